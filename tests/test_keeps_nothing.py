"""A rank that keeps nothing, beside ranks that do: they go on alike, also where only some look at their averages."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn

from espresso.comm.program import PartitionProgram
from espresso.live.flush import MOST_FLUSHES
from espresso.strategies import Choice, Cluster, CompressorSpec, parse_option
from tests.ddp import (
    ALLGATHER,
    ALLREDUCE,
    ROOTED,
    IntegerNet,
    Played,
    batch,
    mlp,
    registered,
    strategy_for,
    wrap,
)


def inf_while_all_is_sent(rank: int) -> tuple[bool, bool, float]:
    """Rank 1's gradients are all zero: it owes nothing. Whether both know of the inf, and what goes with the next."""
    ddp = wrap(IntegerNet((3000,)))

    def step(number: int, factor: float) -> None:
        ddp.zero_grad()
        (ddp(number) * factor).backward()

    with registered(ddp, ALLGATHER, "topk:ratio=0.01", timeout_s=10.0) as state, state.errors():
        for number in range(4):
            step(10 * number + rank, 1.0 - rank)
        state.flush()
        step(0, 0.0 if rank else math.inf)
        is_known, is_put_off = not state.session.observer.last.finite, state.session.flushes
        for number in range(3):
            step(7 * number + rank, 1.0)
        (parameter,) = ddp.parameters()
        return is_known, is_put_off, float(parameter.grad.sum())


def back_at_the_start(rank: int) -> tuple[list[str], bool]:
    """A checkpoint of before the first step is loaded after it: what is owed after the next one, and whether a flush
    sends it.
    """
    ddp = wrap(IntegerNet((3000,)))
    with registered(ddp, ALLGATHER, "topk:ratio=0.01", timeout_s=10.0) as state, state.errors():
        saved = state.state_dict()
        ddp(rank).backward()
        state.load_state_dict(saved)
        ddp(10 + rank).backward()
        owing = state.session.executor.owing
        state.flush()
        ddp(20 + rank).backward()
        return owing, not state.session.store.lend()


def sent_over_two_connections(rank: int) -> tuple[bool, float]:
    """One tensor of six had a root; a plain step then sends what roots keep. Whether this rank keeps something, and how
    far the step after that is from plain DDP's.
    """
    sizes = (3000, 1000, 2000, 500, 3000, 700)
    ours, plain = wrap(IntegerNet(sizes)), wrap(IntegerNet(sizes))
    strategy = strategy_for(ours, Cluster(2, 2), ALLREDUCE)
    rooted = Choice(parse_option(ROOTED), CompressorSpec.parse("efsignsgd"))
    strategy = strategy.with_choices({strategy.tensors[1].name: rooted})
    with registered(ours, strategy=strategy, ranks_per_node=2, connections=2, timeout_s=10.0) as state, state.errors():

        def step(number: int) -> None:
            for net in (ours, plain):
                net.zero_grad()
                net(number + rank).backward()

        for number in range(4):
            step(10 * number)
        keeps = bool(state.session.store.lend())
        state.use(strategy_for(ours, Cluster(2, 2), ALLREDUCE))
        step(50)
        step(60)
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        return keeps, max(float((mine.grad - theirs.grad).abs().max()) for mine, theirs in pairs)


def comes_later(rank: int) -> tuple[list[bool], int, list[bool], int, bool]:
    """Plain steps in which a branch is not used, and then is: whether something of it is kept after each, and how many
    programs are left; whether a flush is still under way after such steps. Where the branch never comes: after how many
    it is not any more, and whether what is owed is still there.
    """

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([mlp(20, 60, 5, seed=seed) for seed in range(2)])

        def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
            return torch.stack([self.parts[number](x) for number in used]).sum(0)

    settings = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = wrap(Branches(), bucket_cap_mb=0.001, **settings)
    with registered(ddp, ALLGATHER, "topk:ratio=0.1", timeout_s=10.0) as state, state.errors():

        def step(number: int, used: list[int]) -> bool:
            ddp.zero_grad()
            ddp(batch(rank, number, 20), used).square().mean().backward()
            return bool(state.session.store.lend())

        for number in range(4):
            step(number, [0, 1])
        compressed, turns = state.strategy, ([0], [0], [1], [1])
        state.use(strategy_for(ddp, Cluster(2, 1), ALLREDUCE))
        kept = [step(4 + number, used) for number, used in enumerate(turns)]
        gc.collect()
        programs = sum(isinstance(each, PartitionProgram) for each in gc.get_objects())
        state.use(compressed)
        for number in range(8, 10):
            step(number, [0, 1])
        state.flush()
        flushes = []
        for number, used in enumerate(turns):
            step(10 + number, used)
            flushes.append(state.session.flushes)
        for number in range(20, 22):
            step(number, [0, 1])
        state.flush()
        under_way = []
        for number in range(MOST_FLUSHES + 1):
            step(30 + number, [0])
            under_way.append(state.session.flushes)
        return kept, programs, flushes, under_way.index(False), bool(state.session.store.lend())


def cannot_plan(rank: int) -> str:
    """Rank 1 has no memory for a new strategy; what rank 0 is told."""
    from espresso.comm.execute import programs
    from tests.ddp import SHARDED

    ddp = wrap(IntegerNet((3000,)))
    with registered(ddp, ALLGATHER, "efsignsgd", timeout_s=60.0) as state:
        ddp(rank).backward()
        if rank == 1:

            def refuses(*_: object) -> None:
                raise MemoryError("no memory")

            programs.PartitionProgram.__init__ = refuses
        state.use(strategy_for(ddp, Cluster(2, 1), SHARDED, "efsignsgd"))
        with pytest.raises(Exception, match="no memory") as caught, state.errors():
            ddp(rank + 2).backward()
        return f"{type(caught.value).__name__}: {caught.value}"


@pytest.fixture(scope="module")
def two() -> Played:
    return Played(__name__, (inf_while_all_is_sent, comes_later, back_at_the_start, cannot_plan), 2)


@pytest.fixture(scope="module")
def four() -> Played:
    return Played(__name__, (sent_over_two_connections,), 4, ranks_per_node=2)


def test_an_inf_puts_off_on_all_ranks_what_only_some_owe(two):
    everybody = two(inf_while_all_is_sent)
    assert all(is_known and is_put_off for is_known, is_put_off, _ in everybody)
    assert everybody[0][2] == everybody[1][2]


def test_over_two_connections_a_plain_step_sends_what_some_ranks_keep(four):
    everybody = four(sent_over_two_connections)
    assert {keeps for keeps, _ in everybody} == {True, False}
    assert [apart for _, apart in everybody] == [0.0] * 4


def test_what_a_tensor_owes_waits_until_it_comes(two):
    kept = [True, True, False, False]
    assert two(comes_later) == [(kept, 0, kept, MOST_FLUSHES - 1, True)] * 2


def test_what_is_owed_after_a_checkpoint_of_the_start_is_known(two):
    assert two(back_at_the_start) == [(["weights.0"], True)] * 2


def test_what_one_rank_cannot_plan_the_other_hears_at_once(two):
    told = two(cannot_plan)
    assert told[0].startswith("EspressoError: ")
    assert "rank 1" in told[0]
    assert "failed first: MemoryError: no memory" in told[0]
