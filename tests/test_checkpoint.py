"""Save and resume: the same bits as without the break, on the same ranks or on another number of them."""

import copy
import pickle
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from espresso.live.checkpoint import CheckpointError
from espresso.live.state import EspressoState, PerRank
from espresso.strategies import Cluster
from tests.ddp import (
    ALLGATHER,
    HIERARCHICAL,
    SHARDED,
    Played,
    agreed,
    batch,
    kept_on_all_ranks,
    mlp,
    registered,
    strategy_for,
    train,
    wrap,
)

ARMS = (
    (SHARDED, "efsignsgd", 1),
    (HIERARCHICAL, "dgc:ratio=0.05", 2),
    ("comp > flat.allreduce > dec", "randomk:ratio=0.1", 1),
    (HIERARCHICAL, "dgc:ratio=0.05,momentum=0.75", 2),
    ("comp > flat.allreduce > transform > flat.allreduce > dec", "powersgd:rank=2,start_iter=2", 1),
)
BREAK, END = 4, 8


@pytest.mark.parametrize("how", ["after register", "before the first step", "pickle", "gathered", "dcp"])
def test_resumed_is_bit_identical(played, how):
    for results in played(resumed):
        for arm in ARMS:
            assert results[arm, how] == results[arm, "unbroken"], arm
            assert results[arm, "forgotten"] != results[arm, "unbroken"], "the residuals made no difference"


def test_other_states_are_refused_and_change_nothing(played):
    for rank, (messages, unchanged) in enumerate(played(refused)):
        assert unchanged
        other = (rank + 1) % 4
        assert f"is of rank {other} of 4, this is rank {rank} of 4" in messages["another rank"]
        assert "other parameters" in messages["another model"]
        assert "version 99" in messages["version"]
        assert "'espresso-rank'" in messages["not ours"]
        assert "'espresso-rank'" in messages["not a dictionary"]
        assert "'carry'" in messages["missing entry"]
        assert "'surplus'" in messages["unknown entry"]
        assert "unknown site 'nowhere'" in messages["site"]
        assert "outside the model's tensor" in messages["range"]
        assert "outside the model's tensor" in messages["name"]
        assert "floating-point tensor" in messages["values"]
        assert "not finite" in messages["inf"]
        assert "unlike the model's tensor" in messages["carry"]
        assert "strategy" in messages["strategy"]
        assert "place 0 of 3 holds rank 1 of 4" in messages["ranks"]


def test_another_world_size_keeps_the_effect_on_the_average(played):
    """What all ranks keep, divided by their number, is what it was; also back on more ranks."""
    for ratio_two, ratio_four, kept, moving in played(resized)[:2]:
        assert kept > 0
        assert ratio_two < 1e-5
        assert ratio_four < 1e-5
        assert moving < 1e-5, "velocities are scaled likewise"


def test_a_given_strategy_wins_over_the_checkpoint(played):
    for option in played(given_strategy):
        assert option == ALLGATHER


def test_a_job_saved_while_profiling_decides_after_resuming(played):
    for decided_at in played(resumed_undecided):
        assert 0 < decided_at <= 60


# -- scenarios, on two nodes of two ranks ----------------------------------------------------------


def model() -> DistributedDataParallel:
    # With find_unused_parameters DDP does not rebuild its buckets: the same ones before and after the break.
    return wrap(mlp(20, 60, 30, 40, 5), find_unused_parameters=True)


def go(ddp: DistributedDataParallel, rank: int, steps: range) -> list[str]:
    return train(ddp, steps, lambda step: ddp(batch(rank, step, 20)).square().mean())


def resumed(rank: int) -> dict[tuple[Any, str], list[str]]:
    results: dict[tuple[Any, str], list[str]] = {}
    for arm in ARMS:
        option, compressor, ranks_per_node = arm
        settings = {"ranks_per_node": ranks_per_node}
        ddp = model()
        with registered(ddp, option, compressor, **settings) as state:
            go(ddp, rank, range(BREAK))
            weights = copy.deepcopy(ddp.module.state_dict())
            saved, gathered, pickled = state.state_dict(), state.gather_state_dict(), pickle.dumps(state)
            assert state.metrics()["espresso/residual_norm"] > 0
            folder = [tempfile.mkdtemp() if rank == 0 else None]
            dist.broadcast_object_list(folder)
            dcp.save({"espresso": PerRank(state)}, checkpoint_id=folder[0])
            results[arm, "unbroken"] = go(ddp, rank, range(BREAK, END))
        for how in ("after register", "before the first step", "pickle", "gathered", "dcp", "forgotten"):
            ddp = model()
            ddp.module.load_state_dict(weights)
            if how in ("before the first step", "pickle"):
                results[arm, how] = late(ddp, rank, arm, how, saved, pickled)
                continue
            with registered(ddp, option, compressor, **settings) as state:
                if how == "dcp":
                    dcp.load({"espresso": PerRank(state)}, checkpoint_id=folder[0])
                elif how == "forgotten":
                    state.session.executor.restart(BREAK)
                else:
                    state.load_state_dict(gathered if how == "gathered" else saved)
                results[arm, how] = go(ddp, rank, range(BREAK, END))
    return results


def late(
    ddp: DistributedDataParallel, rank: int, arm: tuple[str, str, int], how: str, saved: Any, pickled: bytes
) -> list[str]:
    """Resume a state that has not started: the model is bound and the groups are made afterwards."""
    from espresso.comm.hook import espresso_hook

    option, compressor, ranks_per_node = arm
    if how == "pickle":
        state = pickle.loads(pickled)
    else:
        strategy = strategy_for(ddp, Cluster(4 // ranks_per_node, ranks_per_node), option, compressor)
        state = EspressoState(compressor, strategy, ranks_per_node=ranks_per_node, timeout_s=15.0)
        state.load_state_dict(saved)
    ddp.register_comm_hook(state.bind(ddp), espresso_hook)
    digests = go(ddp, rank, range(BREAK, END))
    state.close()
    return digests


def refused(rank: int) -> tuple[dict[str, str], bool]:
    ddp = model()
    with registered(ddp, SHARDED, "efsignsgd") as state:
        go(ddp, rank, range(BREAK))
        gathered = state.gather_state_dict()
        mine = gathered["ranks"][rank]

        def changed(**entries: Any) -> dict[str, Any]:
            return {**copy.deepcopy(mine), **entries}

        def row(**entries: Any) -> dict[str, Any]:
            body = copy.deepcopy(mine)
            body["residuals"][-1].update(entries)
            return body

        name = mine["residuals"][0]["tensor"]
        strategy = copy.deepcopy(mine["strategy"])
        bad = {
            "another rank": gathered["ranks"][(rank + 1) % 4],
            "another model": changed(model="0" * 64),
            "version": changed(version=99),
            "not ours": {"state": {}, "param_groups": []},
            "not a dictionary": 17,
            "missing entry": {key: value for key, value in mine.items() if key != "carry"},
            "unknown entry": changed(surplus=1),
            "site": row(site="nowhere"),
            "range": row(start=10**6),
            "name": row(tensor="nobody"),
            "values": row(values=[1.0, 2.0]),
            "inf": row(values=torch.tensor([1.0, float("inf")])),
            "carry": changed(carry={name: torch.ones(3)}),
            "ranks": {**gathered, "ranks": gathered["ranks"][1:]},
        }
        before = state.state_dict()
        messages = {what: message_of(state, body) for what, body in bad.items()}
        unchanged = same_bits(state.state_dict(), before)
    with registered(model(), strategy="auto") as state:
        strategy["tensors"][0]["option"] = "no such option"
        messages["strategy"] = message_of(state, changed(strategy=strategy))
    return messages, unchanged


def message_of(state: EspressoState, body: Any) -> str:
    try:
        state.load_state_dict(body)
    except CheckpointError as error:
        return str(error)
    return "accepted"


def same_bits(left: dict[str, Any], right: dict[str, Any]) -> bool:
    if left["step"] != right["step"] or len(left["residuals"]) != len(right["residuals"]):
        return False
    pairs = zip(left["residuals"], right["residuals"], strict=True)
    return all(torch.equal(a["values"], b["values"]) and a["tensor"] == b["tensor"] for a, b in pairs)


def resized(rank: int) -> tuple[float, float, float, float]:
    compressor = "dgc:ratio=0.05,momentum=0.75"
    ddp = model()
    with registered(ddp, HIERARCHICAL, compressor, ranks_per_node=2) as state:
        go(ddp, rank, range(BREAK))
        four = state.gather_state_dict()
        wanted = {name: values / 4 for name, values in kept_on_all_ranks(state, ddp).items()}
        moved = {n: v / 4 for n, v in kept_on_all_ranks(state, ddp, "velocities", "velocity_carry").items()}
        assert sum(float(values.abs().sum()) for values in moved.values()) > 0
    half = dist.new_group([0, 1])
    to_two = to_four = moving = 0.0
    box: list[Any] = [None]
    if rank < 2:
        smaller = wrap(mlp(20, 60, 30, 40, 5), find_unused_parameters=True, process_group=half)
        with registered(smaller, SHARDED, compressor) as state:
            state.load_state_dict(four)
            moving = distance(kept_on_all_ranks(state, smaller, "velocities", "velocity_carry"), moved, 2)
            to_two = distance(kept_on_all_ranks(state, smaller), wanted, 2)
            train(smaller, range(2), lambda step: smaller(batch(rank, step, 20)).square().mean())
            box = [(state.gather_state_dict(), kept_on_all_ranks(state, smaller))]
    dist.broadcast_object_list(box)
    two, kept_by_two = box[0]
    ddp = model()
    with registered(ddp, HIERARCHICAL, compressor, ranks_per_node=2) as state:
        state.load_state_dict(two)
        wanted = {name: values / 2 for name, values in kept_by_two.items()}
        to_four = distance(kept_on_all_ranks(state, ddp), wanted, 4)
        go(ddp, rank, range(3))
        assert agreed(ddp)
    return to_two, to_four, sum(float(values.abs().sum()) for values in wanted.values()), moving


def distance(kept: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], num_ranks: int) -> float:
    return max(float((kept[name] / num_ranks - values).abs().max()) for name, values in wanted.items())


def given_strategy(rank: int) -> str:
    ddp = model()
    with registered(ddp, SHARDED, "efsignsgd") as state:
        go(ddp, rank, range(2))
        saved = state.state_dict()
    ddp = model()
    with registered(ddp, ALLGATHER, "efsignsgd") as state:
        state.load_state_dict(saved)
        go(ddp, rank, range(2, 4))
        assert state.strategy is not None
        return str(state.strategy.choices["0.weight"].option)


def resumed_undecided(rank: int) -> int:
    ddp = model()
    with registered(ddp, compressor="efsignsgd", strategy="auto", ranks_per_node=2) as state:
        go(ddp, rank, range(9))
        assert not state.decided
        saved = state.state_dict()
    ddp = model()
    with registered(ddp, compressor="efsignsgd", strategy="auto", ranks_per_node=2, timeout_s=60.0) as state:
        state.load_state_dict(saved)
        for step in range(9, 9 + 60):
            go(ddp, rank, range(step, step + 1))
            if state.decided:
                assert state.job is not None
                return step - 8
    return 0


@pytest.fixture(scope="module")
def played() -> Played:
    scenarios = (resumed, refused, resized, given_strategy, resumed_undecided)
    return Played(__name__, scenarios, 4, deadline_s=150)
