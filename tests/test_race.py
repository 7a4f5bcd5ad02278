"""A plain block of a race parks what is carried; the strategy that returns finds it again."""

from __future__ import annotations

from typing import Any

from tests.workers import run_ranks


def _park(rank: int) -> dict[str, Any]:
    import torch

    from espresso.comm import Assignment, Executor, Groups, ResidualStore
    from espresso.host_codecs import HostCodecs
    from espresso.strategies import (
        Bucket,
        Choice,
        CompressorSpec,
        Slot,
        Strategy,
        TensorSpec,
        parse_option,
    )

    groups = Groups(timeout_s=20)
    tensors = (TensorSpec("w", (1000,)),)
    topk = Choice(parse_option("comp > flat.allgather > dec"), CompressorSpec.parse("topk:ratio=0.1"))
    compressed = Assignment(Strategy.uniform(tensors, groups.cluster, topk))
    plain = Strategy.uniform(tensors, groups.cluster)

    class Script:
        now = compressed

        def assign(self, iteration: int) -> Assignment:
            return self.now

        def after(self, record: Any) -> None:
            return None

    script, store = Script(), ResidualStore()
    executor = Executor(groups, HostCodecs(1), script, store=store)
    bucket = Bucket(0, (Slot("w", 0, 1000),))

    def step(assignment: Assignment, gradient: torch.Tensor) -> torch.Tensor:
        script.now = assignment
        return executor.reduce_bucket(bucket, gradient.clone(), is_last=True, grad_scale=1.0).wait()

    ramp = torch.arange(1000.0) + 1
    step(compressed, ramp)
    kept = store.norm()
    parked = step(Assignment(plain, drain=False), ramp)
    still = store.norm()
    drained = step(Assignment(plain), torch.zeros(1000))
    out = {
        "kept": kept,
        "still": still,
        "parked_is_plain": bool(torch.equal(parked, ramp)),
        "drained": float(drained.sum()),
        "left": store.norm(),
    }
    executor.close()
    groups.close()
    return out


def test_plain_block_parks_what_is_carried_and_draining_sends_it() -> None:
    for outcome in run_ranks(_park, 2):
        value = outcome.value
        assert value["kept"] > 0
        assert value["still"] == value["kept"]
        assert value["parked_is_plain"]
        # Top 10 % of 1..1000 was sent; the rest, 1..900 on each rank, comes with the drain.
        assert value["drained"] == 900 * 901 / 2
        assert value["left"] == 0
