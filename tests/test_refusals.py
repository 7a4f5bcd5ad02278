"""What a user asks for and cannot have is said where it is asked, on every rank, and loses nothing."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import espresso
from espresso.comm.errors import DisagreementError, EspressoError
from espresso.cpu_offload.placement import cores_of_threads
from espresso.live.parts import CheckpointError
from espresso.strategies import Cluster
from tests.ddp import ALLGATHER, IntegerNet, Played, Said, agreed, batch, mlp, registered, strategy_for, wrap

TWO = Cluster(2, 1)
WIDTHS = (16, 32, 8)


def stepped(ddp: nn.Module, rank: int, number: int) -> None:
    ddp.zero_grad()
    ddp(batch(rank, number, WIDTHS[0], rows=4)).square().mean().backward()


def other_strategies(rank: int) -> list[bool]:
    """``state.use`` with another strategy on rank 1; then all go on with the one that was in use."""
    ddp = wrap(mlp(*WIDTHS))
    with registered(ddp, ALLGATHER, "efsignsgd", timeout_s=20.0) as state:
        stepped(ddp, rank, 0)
        with pytest.raises(DisagreementError, match="another strategy"):
            state.use(strategy_for(ddp, TWO, ALLGATHER, "int8" if rank else "efsignsgd"))
        with pytest.raises(TypeError, match=r"Strategy\.load"):
            state.use("strategy.json")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="is for no tensor of this model"):
            state.rescale_residuals({"nobody": 1.0})
        with pytest.raises(ValueError, match="is not finite"):
            state.rescale_residuals({"0.weight": float("nan")})
        stepped(ddp, rank, 1)
        return [agreed(ddp), state.strategy.compresses]


def after_the_end(rank: int) -> list[bool]:
    """Backward passes after ``close``: what they leave is not applied. Whether weights are as before."""
    ddp = wrap(mlp(*WIDTHS))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with registered(ddp, ALLGATHER, "efsignsgd") as state:
        stepped(ddp, rank, 0)
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    assert state.session.executor.error is None
    with pytest.raises(Exception, match="closed"), state.errors():
        stepped(ddp, rank, 1)
    with pytest.raises(EspressoError, match="closed"):
        optimizer.step()
    same = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    optimizer.zero_grad()
    optimizer.step()  # of nothing
    return [same]


def off_on_one_rank(rank: int) -> tuple[str, float]:
    """``ESPRESSO_DISABLE=1`` on rank 1, after and before jobs of the same ranks that were off, or were not."""
    ddps = [wrap(mlp(*WIDTHS))]
    group = ddps[0].process_group
    ddps += [nn.parallel.DistributedDataParallel(mlp(*WIDTHS), process_group=group) for _ in range(3)]
    told, took_s = "", 0.0
    try:
        for ddp, off in zip(ddps, (1, 0, rank, 0), strict=True):
            os.environ["ESPRESSO_DISABLE"] = str(off)
            began = time.monotonic()
            try:
                espresso.register(ddp, strategy="auto", compressor="int8", timeout_s=20.0).close()
            except DisagreementError as error:
                told = str(error)
                took_s = time.monotonic() - began
    finally:
        del os.environ["ESPRESSO_DISABLE"]
    return told, took_s


def measured_on_one_node(rank: int) -> str:
    """``ESPRESSO_PROFILE_ONLY=1`` on rank 1, as where ``espresso profile`` starts the script on one node only."""
    os.environ["ESPRESSO_PROFILE_ONLY"] = str(rank)
    try:
        with pytest.raises(EspressoError) as caught, registered(wrap(mlp(*WIDTHS)), timeout_s=5.0):
            pass
        return str(caught.value)
    finally:
        del os.environ["ESPRESSO_PROFILE_ONLY"]


def contradictions(rank: int) -> list[Any]:
    """Limits that no option of two hosts meets, and budgets that nothing forced keeps to."""
    with pytest.raises(ValueError, match=r"force: 'powersgd via .*' is no option of powersgd"):
        espresso.register(wrap(mlp(*WIDTHS)), force={"*": f"powersgd via {ALLGATHER}"}, ranks_per_node=1)
    with pytest.raises(ValueError, match=r"force: 'dgc:.*' changes from epoch to epoch, .* leave warmup_epochs out"):
        espresso.register(wrap(mlp(*WIDTHS)), force={"*": "dgc:ratio=0.001,warmup_epochs=4"})
    with registered(wrap(mlp(*WIDTHS)), strategy="auto", force={"0.weight": "dgc:momentum=0.9"}) as state:
        assert state.session.velocities is not None, "what is forced has the job's momentum corrected"
    ddp = wrap(mlp(*WIDTHS))
    limits: dict[str, Any] = {"force": {"0.weight": "int8"}, "error_budget": 0.0, "keep_exact": ["module.*"]}
    with (
        Said() as said,
        registered(ddp, strategy="auto", compressor="int8", decide_by=0, timeout_s=30.0, **limits) as state,
    ):
        for number in range(14):
            stepped(ddp, rank, number)
        warned = [text for text in said.warnings if "no tensor of this model is called 'module.*'" in text]
        return [state.verdict, len(warned)]


def nothing_to_exchange(rank: int) -> str:
    """All parameters are empty."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.empty(0))

        def forward(self) -> torch.Tensor:
            return self.none.sum()

    ddp = wrap(Empty())
    with registered(ddp, strategy="auto", compressor="efsignsgd", decide_by=0, timeout_s=30.0) as state:
        for _ in range(14):
            ddp().backward()
        return str(state.verdict)


def another_ranks_checkpoint(rank: int) -> str:
    """Rank 1 loads what rank 0 saved; what each is told."""
    ddp = wrap(IntegerNet((300,)))
    with registered(ddp, ALLGATHER, "efsignsgd", timeout_s=20.0) as state:
        ddp(rank).backward()
        saved = [state.state_dict()]
        dist.broadcast_object_list(saved)
        with pytest.raises(CheckpointError) as caught:
            state.load_state_dict(saved[0])
        ddp(rank + 2).backward()
        return str(caught.value)


def checkpoints_of_two_steps(rank: int) -> str:
    """A kill in the middle of a save left each rank's file of another step."""
    ddp = wrap(IntegerNet((300,)))
    with registered(ddp, ALLGATHER, "efsignsgd", timeout_s=20.0) as state:
        ddp(rank).backward()
        early = state.state_dict()
        ddp(rank + 2).backward()
        with pytest.raises(CheckpointError) as caught:
            state.load_state_dict(early if rank else state.state_dict())
        state.load_state_dict(early)
        ddp(rank + 4).backward()
        return str(caught.value)


@pytest.fixture(scope="module")
def played() -> Played:
    scenarios = (
        other_strategies,
        after_the_end,
        off_on_one_rank,
        measured_on_one_node,
        contradictions,
        nothing_to_exchange,
        another_ranks_checkpoint,
        checkpoints_of_two_steps,
    )
    return Played(__name__, scenarios, 2, ranks_per_node=1)


def test_ranks_that_use_other_strategies_are_told_so_and_go_on(played):
    assert played(other_strategies) == [[True, True]] * 2


def test_gradients_that_came_after_the_end_are_not_applied(played):
    assert played(after_the_end) == [[True]] * 2


def test_ranks_that_are_off_beside_others_are_named_at_once(played):
    (told, seconds), (nothing, _) = played(off_on_one_rank)
    assert told == "espresso is off on rank 1 (ESPRESSO_DISABLE) and not on rank 0: set it on all ranks or on none"
    assert seconds < 10
    assert nothing == ""


def test_a_rank_that_only_measures_beside_others_is_named(played):
    for told in played(measured_on_one_node):
        assert told.startswith("rank 1 has another ESPRESSO_PROFILE_ONLY than rank 0 (False on rank 0, True on rank 1)")


def test_limits_that_contradict_each_other_are_named(played):
    told = played(contradictions)
    assert all(str(verdict).startswith("plain: the search found no strategy") for verdict, _ in told)
    assert [num_warnings for _, num_warnings in told] == [1, 0], "once, for all ranks"


def test_a_model_without_numbers_trains(played):
    assert all(verdict.startswith("plain") for verdict in played(nothing_to_exchange))


def test_where_one_rank_cannot_load_none_does(played):
    told = played(another_ranks_checkpoint)
    assert told[0].startswith("rank 1 cannot load its checkpoint: the checkpoint is of rank 0 of 2")
    assert told[1].startswith("the checkpoint is of rank 0 of 2, this is rank 1 of 2")


def test_checkpoints_of_different_steps_are_refused(played):
    for told in played(checkpoints_of_two_steps):
        assert "rank 0 from one of step 2," in told
        assert "rank 1 from one of step 1," in told


def test_what_is_no_group_no_file_and_no_list_of_cores_is_named(monkeypatch):
    with pytest.raises(TypeError, match=r"process_group must be a torch\.distributed group, got 5"):
        espresso.EspressoState(process_group=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="strategy='' is no file"):
        espresso.EspressoState(strategy="")
    with pytest.raises(TypeError, match="takes the DistributedDataParallel model first"):
        espresso.optim.CLAN(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]
    monkeypatch.setenv("ESPRESSO_POOL_CORES", "x")
    with pytest.raises(ValueError, match="ESPRESSO_POOL_CORES: 'x' is no list of cores"):
        cores_of_threads(1, frozenset({0}))
