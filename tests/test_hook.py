"""The hook under real DDP models with many buckets, right from the first iteration through DDP's rebuild."""

import copy
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from espresso.comm.hook import Arrived, Front
from espresso.jit.kernels import NotKeptError
from espresso.live import prepare
from espresso.strategies import NONE, Choice, Cluster, halved_options, parse_option, plan
from tests.ddp import (
    ALLGATHER,
    ALLREDUCE,
    HIERARCHICAL,
    ROOTED,
    SHARDED,
    Halves,
    IntegerNet,
    Played,
    agreed,
    batch,
    kept_on_all_ranks,
    mlp,
    registered,
    same,
    sgd,
    strategy_for,
    train,
    wrap,
)

STEPS = range(6)

Case = tuple[str, str, int, int]
"""Option, compressor, ranks per node, partition bytes."""

LOSSLESS = (
    (ALLREDUCE, "none", 1, 0),
    (ALLREDUCE, "none", 1, 1024),  # partitions
    ("flat.reduce_scatter > flat.allgather", "none", 1, 0),
    ("intra.reduce_scatter > inter.allreduce > intra.allgather", "none", 2, 1024),
    (ALLGATHER, "none", 1, 0),
    (SHARDED, "none", 1, 1024),
    (HIERARCHICAL, "none", 2, 0),
    (ROOTED, "none", 2, 0),
    (str(halved_options()[0]), "none", 2, 0),
    ("comp > flat.allreduce > dec", "fp16", 1, 0),
)

LOSSY = (
    (ALLGATHER, "efsignsgd", 1, 0),
    (SHARDED, "efsignsgd", 1, 8192),
    (HIERARCHICAL, "topk:ratio=0.05", 2, 0),
    (ROOTED, "dgc:ratio=0.05", 2, 0),
    ("comp > flat.allreduce > dec", "randomk:ratio=0.1", 1, 0),
)

RAW_FIRST = (
    ("flat.reduce_scatter > comp > flat.allgather > dec", 1),
    ("intra.reduce_scatter > inter.allreduce > comp > intra.allgather > dec", 2),
    (HIERARCHICAL, 2),
    (ROOTED, 2),
)

RIDDEN = (
    (ALLGATHER, "dgc:ratio=0.05", 1, 0),
    (SHARDED, "efsignsgd", 1, 8192),
    (HIERARCHICAL, "efsignsgd", 2, 0),
    (ROOTED, "topk:ratio=0.05", 2, 0),
)


def test_of_a_sum_nobody_is_silent_alone(played):
    """What is compressed first may be a sum that has others' gradients of a tensor that this rank did not use."""
    for found in played(unused_by_some):
        assert found == [(0.0, True)] * len(RAW_FIRST)


def test_plain_ddp_bit_for_bit(played):
    """Uncompressed is DDP's own arithmetic, on random floats, with the same reduction order."""
    for equal, buckets in played(uncompressed):
        assert equal == [True] * len(STEPS)
        assert buckets[0] != buckets[1], "DDP did not rebuild its buckets"
        assert all(later == buckets[1] and len(later) > 3 for later in buckets[1:])


def test_lossless_leaves_equal_ddp_on_integers(played):
    for results in played(lossless):
        assert results == {case: True for case in LOSSLESS}


def test_lossy_leaves_keep_replicas_equal_and_compress(played):
    everybody = played(lossy)
    for results in everybody:
        for case, (digests, sent, raw, residual) in results.items():
            assert digests == everybody[0][case][0]
            assert len(set(digests)) == len(STEPS), "parameters did not move"
            assert 0 < sent < raw, case
            assert residual > 0, case


def test_several_offloaded_at_once_change_no_bit(played):
    for one, three in played(offloaded):
        assert one == three
        assert len(set(one)) == len(STEPS), "parameters did not move"


def test_lossy_training_conserves_the_gradient(played):
    """Sent plus kept is what came in: the parameters' path plus the residuals is plain SGD's path."""
    for distance, moved in played(conservation):
        assert moved > 1.0
        assert distance < 1e-4 * moved


def test_exact_tensors_ride_in_the_payloads_of_others(played):
    """Every second tensor is averaged exactly, by the same exchanges that carry the others' payloads."""
    for results in played(ridden):
        for case, (exact, lossy, groups, buckets) in results.items():
            assert exact == 0.0, case
            assert lossy > 0.0, case
            assert groups == buckets > 1, case


def test_order_is_planned_once_buckets_are_stable(played):
    for planned in played(planned_order):
        assert planned[:2] == [False, False]
        assert planned[-1]
        assert [a for a, b in pairwise(planned) if a and not b] == []


def test_spans_for_the_profiler(played):
    for names in played(profiled):
        assert any(name.startswith("espresso::") for name in names)


def test_scalar_and_empty_parameters_and_replica_check(played):
    for caught in played(odd_shapes):
        assert "'weights.1' on rank 1 differs from rank 0" in caught


# -- scenarios -------------------------------------------------------------------------------------


def uncompressed(rank: int) -> tuple[list[bool], list[int]]:
    model = mlp(20, 30, 25, 40, 12, 3)
    ours, plain = wrap(model), wrap(copy.deepcopy(model))
    equal, buckets = [], []
    with registered(ours) as state:
        for step in STEPS:
            for ddp in (ours, plain):
                ddp.zero_grad()
                ddp(batch(rank, step, 20)).square().mean().backward()
            equal.append(same(gradients(ours), gradients(plain)))
            for ddp in (ours, plain):
                sgd(ddp)
            last = state.session.observer.last
            assert last is not None
            buckets.append(last.buckets)
    return equal, buckets


def lossless(rank: int) -> dict[Case, bool]:
    plain = wrap(IntegerNet())
    wanted = train(plain, STEPS, lambda step: plain(100 * step + rank))
    results = {}
    for option, compressor, ranks_per_node, partition_bytes in LOSSLESS:
        ddp = wrap(IntegerNet())
        ways = 3 if partition_bytes else 1
        with registered(
            ddp, option, compressor, ranks_per_node=ranks_per_node, partition_bytes=partition_bytes, connections=ways
        ):
            got = train(ddp, STEPS, lambda step, ddp=ddp: ddp(100 * step + rank))
        results[option, compressor, ranks_per_node, partition_bytes] = got == wanted
    return results


def lossy(rank: int) -> dict[Case, tuple[list[str], float, float, float]]:
    results = {}
    for option, compressor, ranks_per_node, partition_bytes in LOSSY:
        ddp = wrap(mlp(20, 300, 25, 40, 12, 3))
        with registered(
            ddp, option, compressor, ranks_per_node=ranks_per_node, partition_bytes=partition_bytes
        ) as state:
            digests = train(ddp, STEPS, lambda step, ddp=ddp: ddp(batch(rank, step, 20)).square().mean())
            metrics = state.metrics()
        results[option, compressor, ranks_per_node, partition_bytes] = (
            digests,
            metrics["espresso/bytes_sent"],
            metrics["espresso/bytes_raw"],
            metrics["espresso/residual_norm"],
        )
    return results


def conservation(rank: int) -> tuple[float, float]:
    """Gradients that do not depend on the parameters: both paths add up the same numbers."""
    ours, plain = wrap(IntegerNet()), wrap(IntegerNet())
    with registered(ours, HIERARCHICAL, "efsignsgd", ranks_per_node=2, partition_bytes=1024) as state:
        for ddp in (ours, plain):
            train(ddp, range(12), lambda step, ddp=ddp: ddp(100 * step + rank))
        kept = kept_on_all_ranks(state, ours)
    left = [p.detach() - 0.125 * kept[name] / 4 for name, p in ours.module.named_parameters()]
    moved = [p.detach() for p in plain.module.parameters()]
    return max_distance(left, moved), max(float(p.abs().max()) for p in moved)


def ridden(rank: int) -> dict[Case, tuple[float, float, int, int]]:
    """Distances from plain training, of exact and of other tensors; groups and buckets that were carried out."""
    plain = wrap(IntegerNet())
    train(plain, STEPS, lambda step: plain(100 * step + rank))
    wanted = {name: p.detach() for name, p in plain.module.named_parameters()}
    results = {}
    for option, compressor, ranks_per_node, partition_bytes in RIDDEN:
        ddp = wrap(IntegerNet())
        whole = strategy_for(ddp, Cluster(4 // ranks_per_node, ranks_per_node), option, compressor, partition_bytes)
        exact = {name for name, _ in [*wanted.items()][1::2]}
        strategy = whole.with_choices({name: Choice(parse_option(option), NONE) for name in exact})
        with registered(ddp, compressor=compressor, strategy=strategy, ranks_per_node=ranks_per_node) as state:
            train(ddp, STEPS, lambda step, ddp=ddp: ddp(100 * step + rank))
            last = state.session.observer.last
            assert last is not None
            laid = plan(strategy, last.buckets)
        gone = {name: max_distance([p.detach()], [wanted[name]]) for name, p in ddp.module.named_parameters()}
        results[option, compressor, ranks_per_node, partition_bytes] = (
            max(gone[name] for name in exact),
            max(distance for name, distance in gone.items() if name not in exact),
            len(laid.groups),
            len(laid.buckets),
        )
    return results


def planned_order(rank: int) -> list[bool]:
    ddp = wrap(mlp(20, 30, 25, 40, 12, 3))
    planned = []
    with registered(ddp, SHARDED, "efsignsgd") as state:
        for step in range(8):
            train(ddp, range(step, step + 1), lambda step: ddp(batch(rank, step, 20)).square().mean())
            last = state.session.observer.last
            assert last is not None
            planned.append(last.plan is not None)
    return planned


def profiled(rank: int) -> set[str]:
    ddp = wrap(mlp(20, 30, 3))
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    watch = profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere)
    with registered(ddp, ALLGATHER, "efsignsgd"), watch as seen:
        train(ddp, range(2), lambda step: ddp(batch(rank, step, 20)).square().mean())
    return {event.name for event in seen.events()}


def odd_shapes(rank: int) -> str:
    """A scalar and an empty parameter train; a parameter changed on one rank is found by name."""

    class Odd(IntegerNet):
        def __init__(self) -> None:
            super().__init__((5, 300))
            self.weights.append(nn.Parameter(torch.tensor(1.0)))
            self.weights.append(nn.Parameter(torch.empty(0)))

    ddp = wrap(Odd())
    with registered(ddp, SHARDED, "efsignsgd", check_every=2) as state:
        train(ddp, range(4), lambda step: ddp(step * 10 + rank))
        if rank == 1:
            with torch.no_grad():
                ddp.module.weights[1][17] += 1
        try:
            for step in range(4, 6):
                ddp(step).backward()
        except RuntimeError:
            assert state.error is not None
            return str(state.error)
    return "nothing was found"


def gradients(module: nn.Module) -> nn.ParameterList:
    return nn.ParameterList([p.grad for p in module.parameters() if p.grad is not None])


def max_distance(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True) if a.numel())


def offloaded(rank: int) -> list[list[str]]:
    digests = []
    for width in (1, 3):
        ddp = wrap(mlp(20, 300, 25, 40, 12, 3))
        option = "comp@offload > flat.allgather > dec@offload"
        with registered(ddp, option, "topk:ratio=0.05", partition_bytes=2048, offload_width=width) as state:
            digests.append(train(ddp, STEPS, lambda step, ddp=ddp: ddp(batch(rank, step, 20)).square().mean()))
            assert state.session.codecs.offload_width == width
    return digests


def compiles_first(rank: int) -> bool:
    """Whether this rank compiles for its host, where two jobs of two ranks each find nothing on disk."""
    mine = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    ddp = wrap(mlp(20, 5), process_group=mine)
    with (
        patch.object(prepare, "only_kept", side_effect=NotKeptError),
        patch.object(prepare.Kernels, "_compiling", return_value=None) as compiling,
        registered(ddp, compressor="fp16", strategy="auto", compile_beside=True),
    ):
        return bool(compiling.called)


def unused_by_some(rank: int) -> list[tuple[float, bool]]:
    """What plain DDP averaged, less what ours did and what the ranks keep, where in each step two other ranks of four
    use the second half; and whether all ranks had the same averages.
    """
    found = []
    for option, ranks_per_node in RAW_FIRST:
        plain, ours = (wrap(Halves(), find_unused_parameters=True) for _ in range(2))
        apart = {name: torch.zeros(3000) for name, _ in plain.module.named_parameters()}
        with registered(ours, option, "topk:ratio=0.1", ranks_per_node=ranks_per_node, feedback_gain=1.0) as state:
            for step in range(6):
                for sign, ddp in ((1, plain), (-1, ours)):
                    ddp.zero_grad()
                    ddp(10 * step + rank, (rank - step) % 4 < 2).backward()
                    for name, parameter in ddp.module.named_parameters():
                        apart[name] += sign * parameter.grad
                        parameter.data += parameter.grad
            kept = kept_on_all_ranks(state, ours)
        found.append((max(float((apart[name] - kept[name] / 4).abs().max()) for name in apart), agreed(ours)))
    return found


SCENARIOS = (
    uncompressed,
    lossless,
    lossy,
    conservation,
    unused_by_some,
    ridden,
    offloaded,
    planned_order,
    profiled,
    odd_shapes,
    compiles_first,
)


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(__name__, SCENARIOS, 4)


def test_each_jobs_first_rank_of_a_host_compiles_for_it(played: Played) -> None:
    assert played(compiles_first) == [True, False, True, False]


def test_places_are_counted_where_ddp_skips_buckets() -> None:
    """Also after a pass that ended with an error: then nobody said that no more would come."""
    module, numbers, ends = nn.Linear(1, 1), torch.zeros(3), []
    module.skip_all_reduce_unused_params = True
    front = Front(module, {})

    def end() -> torch.futures.Future[torch.Tensor]:
        ends.append(len(ends))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(numbers)
        return future

    def arrived(*came: int, fails: bool = False) -> list[Arrived]:
        """What a backward pass makes of the buckets that come in it."""
        found = []

        def hand_over(_: torch.Tensor) -> None:
            for index in came:
                bucket = SimpleNamespace(buffer=lambda: numbers, index=lambda index=index: index)
                found.append(front.take(bucket, end))
            if fails:
                raise RuntimeError("in the middle")

        weight = torch.ones(1, requires_grad=True)
        weight.register_hook(hand_over)
        weight.sum().backward()
        return found

    assert [(each.index, each.is_last) for each in arrived(1, 3)] == [(0, False), (1, False)]
    with pytest.raises(RuntimeError, match="in the middle"):
        arrived(1, 2, fails=True)
    assert ends == [0]
    assert [each.index for each in arrived(1, 2, 3)] == [0, 1, 2]
    assert [each.index for each in arrived(2)] == [0]
    assert ends == [0, 1, 2]
