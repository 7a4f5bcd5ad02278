"""Save and resume: the same bits as without the break, on the same ranks or on another number of them."""

import copy
import json
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from espresso.comm.messages import PLAIN
from espresso.compressors.schedule import Follower
from espresso.live.checkpoint import Checkpoint
from espresso.live.given import Given
from espresso.live.names import named_gradients, tensor_specs
from espresso.live.parts import RESIDUAL, VELOCITY, CheckpointError
from espresso.live.register import register
from espresso.live.resume import _to_resume
from espresso.live.state import EspressoState
from espresso.search.terms import Terms
from espresso.strategies import (
    RANK_DEVICES,
    Choice,
    Cluster,
    CompressorSpec,
    Option,
    Site,
    Strategy,
    TensorSpec,
    compressed_options,
    parse_option,
)
from espresso.strategies.constraints import Constraints
from tests.ddp import (
    ALLGATHER,
    HIERARCHICAL,
    SHARDED,
    Played,
    batch,
    kept_on_all_ranks,
    mlp,
    registered,
    train,
    wrap,
)

CHOICES = {
    "0.weight": (HIERARCHICAL, "dgc:ratio=0.05"),
    "2.weight": ("comp > flat.allreduce > transform > flat.allreduce > dec", "powersgd:rank=2,start_iter=2"),
    "4.weight": ("comp > flat.allreduce > dec", "randomk:ratio=0.1"),
}
OTHERS = (SHARDED, "efsignsgd:raw_below=8")
"""Of a job that keeps everything that one may keep at once: residuals at all sites, factors."""

MOMENTA = ("", "momentum=0.75")
"""Without and with velocities."""

BREAK, END = 4, 8
BRIEF = ("dcp", "gathered")
HOW = (*BRIEF, "after register", "before the first step", "pickle", "file", "dcp, async", "dcp, late")


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_resumed_is_bit_identical(played, how):
    for results in played(resumed):
        for momentum in MOMENTA if how in BRIEF else MOMENTA[1:]:
            assert results[momentum, how] == results[momentum, "unbroken"], momentum
            assert results[momentum, "forgotten"] != results[momentum, "unbroken"], "the residuals made no difference"


def test_other_states_are_refused_and_change_nothing(played):
    for rank, (messages, unchanged) in enumerate(played(refused)):
        assert unchanged
        other = (rank + 1) % 4
        assert f"is of rank {other} of 4, this is rank {rank} of 4" in messages["another rank"]
        assert "other parameters" in messages["another model"]
        assert "'0.weight' is [60, 20] float32 in the checkpoint, [7, 20] float32 in the model" in messages["a shape"]
        assert "version 99" in messages["version"]
        assert "no kind 'espresso'" in messages["not ours"]
        assert "no kind 'espresso'" in messages["not a dictionary"]
        assert "'parts'" in messages["missing entry"]
        assert "'surplus'" in messages["unknown entry"]
        assert all("a row should be" in messages[what] for what in ("held", "held by no one"))
        assert "unknown site 'nowhere'" in messages["site"]
        assert "outside the model's tensor" in messages["range"]
        assert "outside the model's tensor" in messages["name"]
        assert "floating-point numbers" in messages["values"]
        assert "not finite" in messages["inf"]
        assert "strategy" in messages["strategy"]


def test_a_state_that_is_off_saves_the_parts_that_it_was_given_and_no_others():
    """Empty ones for the others would be accepted by their ranks, and what those owed be gone without a word."""
    state = register(torch.nn.Linear(3, 3))
    try:
        whole = state.state_dict()
        state.load_state_dict({**whole, "parts": {"0": whole["parts"]["0"]}})
        assert [set(saved["parts"]) for saved in (state.state_dict(), state.gather_state_dict())] == [{"0"}] * 2
        state.load_state_dict(whole)
        assert set(state.state_dict()["parts"]) == set(whole["parts"])
    finally:
        state.close()


def test_another_number_of_ranks_keeps_the_effect_on_the_average(played):
    """4, 2, 3 and 4 ranks: what all of them keep, divided by their number, is what it was; velocities likewise."""
    for results in played(resized)[:2]:
        assert [size for size, *_ in results] == [2, 3, 4]
        for _, owed, residuals, velocities in results:
            assert owed > 0
            assert residuals < 1e-6
            assert velocities < 1e-6


def test_a_model_that_has_changed_keeps_what_fits(played):
    for dropped, distance, lost, carried in played(changed):
        assert dropped[0] == "'6.weight' is [5, 40] float32 in the checkpoint, [7, 40] float32 in the model"
        assert dropped[2] == "the strategy is for another model"
        assert distance < 1e-6
        assert lost == 0.0
        assert carried > 0.0


def test_what_several_ranks_hold_is_saved_once(played):
    """The last step inside a node encodes the same sum on both nodes: half of the ranks save it, all keep it."""
    for rank, (shared, equal) in enumerate(played(replicated)):
        assert (shared > 0) is (rank < 2)
        assert equal


def test_a_given_strategy_wins_over_the_checkpoint(played):
    for option in played(given_strategy):
        assert option == ALLGATHER


def test_velocities_that_nobody_goes_on_with_are_said_to_be_dropped(played):
    for dropped in played(without_momentum):
        assert "velocities" in dropped[-1]


def test_a_job_saved_while_profiling_decides_after_resuming(played):
    for decided_at in played(resumed_undecided):
        assert 0 < decided_at <= 60


def test_a_job_that_is_resumed_while_ratios_warm_up_decides_again_when_they_change(played):
    for rows, ran in played(resumed_while_it_warms_up):
        first_name, *names = (name for event, name in rows if event == "decided")  # a busy machine may change, too
        assert first_name == "resumed"
        assert names
        assert "resumed" not in names
        assert ["warmup_epochs" in spec for spec in ran] == [False, False]
        first, last = (CompressorSpec.parse(spec) for spec in ran)
        assert dict(last.params)["ratio"] == 0.02 < dict(first.params)["ratio"]


TENSORS = (TensorSpec("a", (64, 64)), TensorSpec("b", (64, 64)), TensorSpec("c", (64,)))
TWO = Cluster(2, 1)
GATHER, PUSH = (
    parse_option(text)
    for text in ("comp > flat.allgather > dec", "comp > flat.push > dec@server > comp@server > flat.pull > dec")
)


def to_resume(
    saved: dict[str, str],
    given: list[str],
    *,
    step: int = 500,
    option: Option = GATHER,
    budget_mb: float | None = None,
    shard: Sequence[str] = (),
    host_copies: bool = False,
    **limits: Any,
) -> dict[str, str] | None:
    """What a job goes on with, whose checkpoint has these compressors, and which is given others now."""
    choices = {name: Choice(option, CompressorSpec.parse(text)) for name, text in saved.items()}
    cluster = Cluster(2, 1, 1) if option is PUSH else TWO
    strategy = Strategy.uniform(TENSORS, cluster).with_choices(choices)
    now, here = Given.of(given, "auto"), [tensor for tensor in TENSORS if not shard or tensor.name in shard]
    session: Any = SimpleNamespace(
        given=now, profile_only=False, model=SimpleNamespace(shards=shard or None, tensors=here),
        groups=SimpleNamespace(cluster=TWO, speaks=True, beside=None, host_copies=host_copies),
        follower=Follower(now.schedule(), None, None),
        config=SimpleNamespace(terms=Terms(residual_budget_mb=budget_mb, constraints=Constraints(**limits))),
    )  # fmt: skip
    found = _to_resume(
        session, cast("Any", SimpleNamespace(strategy=strategy)), cast("Any", SimpleNamespace(step=step, epoch=None))
    )
    return None if found is None else {name: str(found.known[name].compressor) for name in saved}


def test_settings_of_one_algorithm_are_resumed_each_for_itself():
    given = ["powersgd:rank=2,start_iter=10", "efsignsgd", "efsignsgd:block=64", "stc:ratio=0.1", "stc:ratio=0.03"]
    saved = {"a": "efsignsgd:block=64", "b": "stc:ratio=0.03", "c": "stc:ratio=0.1,residual_dtype=int8"}
    for several in (given, given[1:]):  # with one that starts later, and without
        assert to_resume(saved, several) == saved


def test_a_schedule_that_is_given_now_is_gone_on_with():
    """The checkpoint names what was in force: ratios of a warm-up, whichever it was then."""
    given = ["dgc:ratio=0.001,warmup_epochs=4", "efsignsgd"]
    for then in ("dgc:ratio=0.25", "dgc:ratio=0.5"):
        assert to_resume({"a": then}, given, step=0) == {"a": given[0]}


def test_another_setting_of_what_is_scheduled_is_none_that_was_given():
    """Powersgd is scheduled, since it begins after ten steps."""
    assert to_resume({"a": "powersgd:rank=8"}, ["powersgd:rank=8"]) == {"a": "powersgd:rank=8"}
    assert to_resume({"a": "powersgd:rank=8,start_iter=0"}, ["powersgd:rank=8"]) == {"a": "powersgd:rank=8"}
    late = "powersgd:rank=8,start_iter=1000"
    assert to_resume({"a": "powersgd:rank=8"}, [late], step=1000) == {"a": late}
    assert to_resume({"a": "powersgd:rank=8"}, [late], step=999) is None, "it would be plain from then on"
    assert to_resume({"a": "powersgd:rank=8"}, ["powersgd:rank=1"]) is None
    assert to_resume({"a": "powersgd:rank=16"}, ["powersgd:rank=2", "powersgd:rank=16"]) == {"a": "powersgd:rank=16"}
    warms = "dgc:ratio=0.001,warmup_epochs=4"
    for warm in (warms, "dgc:warmup_epochs=4"):
        assert to_resume({"a": "dgc:ratio=0.1"}, [warm]) == {"a": warm}, "some ratio of another schedule"
    assert to_resume({"a": "dgc:momentum=0.9,ratio=0.1"}, [warms]) is None


def test_what_is_given_now_is_kept_to():
    saved = {"a": "efsignsgd", "b": "dgc:ratio=0.01"}
    both = list(saved.values())
    assert to_resume(saved, both) == saved
    assert to_resume(saved, ["efsignsgd"]) is None, "the other one is no longer asked for"
    assert to_resume(saved, ["efsignsgd", "dgc:ratio=0.1"]) is None, "another setting"
    assert to_resume(saved, both, keep_exact=["b"]) is None
    assert to_resume(saved, both, keep_exact=["c"]) == saved
    assert to_resume(saved, both, forbid=["*allgather*"]) is None
    assert to_resume(saved, ["efsignsgd"], force={"b": "dgc:ratio=0.01"}) == saved
    assert to_resume(saved, both, force={"c": "int8"}) is None
    assert to_resume({"a": "efsignsgd"}, ["efsignsgd"], option=PUSH) is None, "there are no servers here"
    moving = next(o for o in compressed_options(TWO, RANK_DEVICES, summable=True, rounds=2) if o.moves_matrices)
    for on_gpu in (False, True):  # where matrices stay where they were compressed
        found = to_resume({"a": "powersgd"}, ["powersgd"], option=moving, host_copies=on_gpu)
        assert (found is None) == on_gpu
    for shard in ("a", "b"):  # all shards find the same, whatever of the model they have
        assert to_resume(saved, both, shard=shard) == saved
        assert to_resume(saved, ["efsignsgd"], shard=shard) is None
        assert to_resume(saved, both, shard=shard, keep_exact=["b"]) is None
    keeps_mb = 2 * 64 * 64 * 4 * 2 / 1e6  # two tensors in float32, twice
    assert to_resume(saved, both, budget_mb=keeps_mb) == saved
    assert to_resume(saved, both, budget_mb=0.99 * keeps_mb) is None
    rides = {"a": "efsignsgd", "c": "none"}  # in the other one's payload, whose residual is as long
    assert to_resume(rides, both, budget_mb=0.51 * keeps_mb) == rides
    assert to_resume(rides, both, budget_mb=0.50 * keeps_mb) is None
    narrow = "efsignsgd:residual_dtype=int8"
    assert to_resume({"a": "efsignsgd"}, [narrow]) == {"a": narrow}
    assert to_resume({"a": narrow}, ["efsignsgd"]) == {"a": narrow}
    assert to_resume({"a": "efsignsgd", "b": narrow}, [narrow, "efsignsgd"]) == {"a": "efsignsgd", "b": narrow}


# -- scenarios, on two nodes of two ranks ----------------------------------------------------------


def model() -> DistributedDataParallel:
    # With find_unused_parameters DDP does not rebuild its buckets: the same ones before and after the break.
    return wrap(mlp(20, 60, 30, 40, 5), find_unused_parameters=True)


def go(ddp: DistributedDataParallel, rank: int, steps: range) -> list[str]:
    return train(ddp, steps, lambda step: ddp(batch(rank, step, 20)).square().mean())


def mixed(ddp: DistributedDataParallel, momentum: str) -> Strategy:
    tensors, choices = tensor_specs(named_gradients(ddp)), {}
    for tensor in tensors:
        option, compressor = CHOICES.get(tensor.name, OTHERS)
        spec = CompressorSpec.parse(f"{compressor},{momentum}" if momentum else compressor)
        choices[tensor.name] = Choice(parse_option(option), spec)
    return Strategy(tensors, choices, Cluster(2, 2), 0)


def resumed(rank: int) -> dict[tuple[str, str], list[str]]:
    results: dict[tuple[str, str], list[str]] = {}
    for momentum in MOMENTA:
        ddp, folder = model(), shared_folder(rank)
        settings = {"strategy": mixed(ddp, momentum), "ranks_per_node": 2}
        with registered(ddp, **settings) as state:
            go(ddp, rank, range(BREAK))
            weights = copy.deepcopy(ddp.module.state_dict())
            # None of these copies anything before it is written, and training goes on meanwhile.
            apart = dist.new_group()  # a save in the background needs a group that nobody else uses
            under_way = dcp.async_save({"espresso": state}, checkpoint_id=folder / "async", process_group=apart)
            saved, gathered, pickled = state.state_dict(), state.gather_state_dict(), pickle.dumps(state)
            assert state.metrics()["espresso/residual_norm"] > 0
            dcp.save({"espresso": state}, checkpoint_id=folder / "sync")
            results[momentum, "unbroken"] = go(ddp, rank, range(BREAK, END))
            under_way.result()
            torch.save(saved, folder / f"rank{rank}.pt")
        for how in (*(HOW if momentum else BRIEF), "forgotten"):
            ddp = model()
            ddp.module.load_state_dict(weights)
            if how in ("before the first step", "pickle", "dcp, late"):
                results[momentum, how] = late(ddp, rank, momentum, how, saved, pickled, folder)
                continue
            with registered(ddp, **settings) as state:
                if how.startswith("dcp"):
                    dcp.load({"espresso": state}, checkpoint_id=folder / ("async" if "async" in how else "sync"))
                elif how == "file":
                    state.load_state_dict(torch.load(folder / f"rank{rank}.pt", weights_only=True))
                elif how == "forgotten":
                    state.session.executor.restart(BREAK)
                else:
                    state.load_state_dict(gathered if how == "gathered" else saved)
                results[momentum, how] = go(ddp, rank, range(BREAK, END))
                assert state.metrics()["espresso/steps"] == END
    return results


def shared_folder(rank: int) -> Path:
    """A new folder, the same on all ranks."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    return Path(str(folder[0]))


def late(
    ddp: DistributedDataParallel,
    rank: int,
    momentum: str,
    how: str,
    saved: Any,
    pickled: bytes,
    folder: Path,
) -> list[str]:
    """Resume a state that has not started: the model is bound and the groups are made afterwards."""
    from espresso.comm.hook import espresso_hook

    if how == "pickle":
        state = pickle.loads(pickled)
    else:
        state = EspressoState(strategy=mixed(ddp, momentum), ranks_per_node=2, timeout_s=15.0)
        if how == "dcp, late":
            dcp.load({"espresso": state}, checkpoint_id=folder / "sync")
        else:
            state.load_state_dict(saved)
    ddp.register_comm_hook(state.bind(ddp), espresso_hook)
    digests = go(ddp, rank, range(BREAK, END))
    state.close()
    return digests


def refused(rank: int) -> tuple[dict[str, str], bool]:
    ddp = model()
    with registered(ddp, SHARDED, "efsignsgd") as state:
        go(ddp, rank, range(BREAK))
        mine = state.state_dict()
        everybody: list[Any] = [None] * 4
        dist.all_gather_object(everybody, mine)
        first = next(iter(mine["parts"]))

        def changed(**entries: Any) -> dict[str, Any]:
            return {**mine, **entries}

        def row(
            held: Any = "residual", tensor: str = "0.weight", site: str = "local", start: int = 0, values: Any = ONES
        ) -> dict[str, Any]:
            part = torch.from_numpy(PLAIN.pack([(held, tensor, site, start, values)]))
            return changed(parts={**mine["parts"], first: part})

        bad = {
            "another rank": everybody[(rank + 1) % 4],
            "another model": changed(model=json.dumps([["0.weight", [60, 20], "float32"]])),
            "version": changed(version=99),
            "not ours": {"state": {}, "param_groups": []},
            "not a dictionary": 17,
            "missing entry": {key: value for key, value in mine.items() if key != "parts"},
            "unknown entry": changed(surplus=1),
            "held": row(held=ONES),
            "held by no one": row(held="nothing"),
            "site": row(site="nowhere"),
            "range": row(start=10**6),
            "name": row(tensor="nobody"),
            "values": row(values=[1.0, 2.0]),
            "inf": row(values=np.array([1.0, np.inf], np.float32)),
        }
        before = numbers(state)
        messages = {what: message_of(state, body) for what, body in bad.items()}
        unchanged = numbers(state) == before
        strategy = json.loads(mine["strategy"])
    other = wrap(mlp(20, 7, 30, 40, 5))
    with registered(other, SHARDED, "efsignsgd") as state:
        messages["a shape"] = message_of(state, mine)
    with registered(model(), strategy="auto") as state:
        strategy["tensors"][0]["option"] = "no such option"
        messages["strategy"] = message_of(state, changed(strategy=json.dumps(strategy)))
    return messages, unchanged


ONES = np.ones(3, np.float32)


def message_of(state: EspressoState, body: Any) -> str:
    try:
        state.load_state_dict(body)
    except CheckpointError as error:
        return str(error)
    return "accepted"


def numbers(state: EspressoState) -> list[Any]:
    """All that a rank keeps, bit for bit."""
    rows = Checkpoint.parse(state.state_dict()).rows()
    return [state.state_dict()["step"], *((row.tensor, row.site, row.start, row.values.tobytes()) for row in rows)]


def resized(rank: int) -> list[tuple[int, float, float, float]]:
    """By the number of ranks: what was owed, how far that moved, and how far velocities did."""
    compressor, folder = "dgc:ratio=0.05,momentum=0.75", shared_folder(rank)
    results: list[tuple[int, float, float, float]] = []
    before: list[Any] = [None]
    for place, size in enumerate((4, 2, 3, 4)):
        group = dist.new_group(list(range(size)))
        if rank < size:
            ddp = wrap(mlp(20, 60, 30, 40, 5), process_group=group)
            option, ranks_per_node = (HIERARCHICAL, 2) if size == 4 else (SHARDED, 1)
            with registered(ddp, option, compressor, ranks_per_node=ranks_per_node) as state:
                if before[0] is not None:
                    dcp.load({"espresso": state}, checkpoint_id=folder / str(place - 1), process_group=group)
                    owed, *moved = (average(state, ddp, size, held) for held in (RESIDUAL, RESIDUAL, VELOCITY))
                    off = [distance(now, then) for now, then in zip(moved, before[0], strict=True)]
                    results.append((size, sum(float(v.abs().sum()) for v in owed.values()), *off))
                go(ddp, rank, range(BREAK))
                dcp.save({"espresso": state}, checkpoint_id=folder / str(place), process_group=group)
                before = [tuple(average(state, ddp, size, held) for held in (RESIDUAL, VELOCITY))]
        dist.broadcast_object_list(before)
    return results


def average(state: EspressoState, ddp: DistributedDataParallel, size: int, held: str) -> dict[str, torch.Tensor]:
    return {name: values / size for name, values in kept_on_all_ranks(state, ddp, held).items()}


def changed(rank: int) -> tuple[tuple[str, ...], float, float, float]:
    """The same model with seven outputs instead of five."""
    ddp = model()
    with registered(ddp, SHARDED, "efsignsgd") as state:
        go(ddp, rank, range(BREAK))
        saved, before = state.state_dict(), kept_on_all_ranks(state, ddp)
    ddp = wrap(mlp(20, 60, 30, 40, 7))
    with registered(ddp, SHARDED, "efsignsgd") as state:
        dropped = state.load_state_dict(saved, strict=False)
        now = kept_on_all_ranks(state, ddp)
        same = {name: before[name] for name in now if not name.startswith("6.")}
        lost = float(now["6.weight"].abs().sum())
        return dropped, distance(now, same), lost, sum(float(values.abs().sum()) for values in same.values())


def replicated(rank: int) -> tuple[int, bool]:
    """Numbers of the shared site that a rank saves; whether a resumed job has all of them everywhere."""
    option, name = "intra.reduce_scatter > inter.allreduce > comp > intra.allgather > dec", Site.INTRA_SECOND
    ddp = model()
    with registered(ddp, option, "efsignsgd", ranks_per_node=2) as state:
        go(ddp, rank, range(BREAK))
        saved = state.state_dict()
        before = [(s.tensor, s.start, s.replica, s.read().tobytes()) for s in state.session.store.lend()]
    ddp = model()
    with registered(ddp, option, "efsignsgd", ranks_per_node=2) as state:
        state.load_state_dict(saved)
        after = [(s.tensor, s.start, s.replica, s.read().tobytes()) for s in state.session.store.lend()]
        train(ddp, range(1), lambda step: ddp(batch(rank, step, 20)).square().mean())
    shared = sum(row.values.size for row in Checkpoint.parse(saved).rows() if row.site is name)
    return shared, joined(after) == joined(before)


def joined(stretches: list[tuple[str, int, int, bytes]]) -> dict[tuple[str, int], bytes]:
    """Numbers by tensor and replica, wherever they were cut."""
    whole: dict[tuple[str, int], bytes] = {}
    for tensor, _, replica, values in sorted(stretches):
        whole[tensor, replica] = whole.get((tensor, replica), b"") + values
    return whole


def distance(kept: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(float((kept[name] - values).abs().max()) for name, values in wanted.items())


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


def without_momentum(rank: int) -> tuple[str, ...]:
    ddp = model()
    with registered(ddp, SHARDED, "dgc:ratio=0.1,momentum=0.5") as state:
        go(ddp, rank, range(2))
        saved = state.state_dict()
    with registered(model(), SHARDED, "dgc:ratio=0.1") as state:
        return state.load_state_dict(saved)


SHORT = {"warmup_steps": 3, "profile_steps": 2, "race_steps": 3, "race_rounds": 1, "decide_by": 0}


def resumed_while_it_warms_up(rank: int) -> tuple[list[tuple[str, str]], list[str]]:
    """Decided in epoch 0; the epoch moves on after the restart, and before the state has started."""
    settings = {"compressor": "dgc:ratio=0.02,warmup_epochs=2", "strategy": "auto", "ranks_per_node": 2, **SHORT}
    ddp = model()
    with registered(ddp, timeout_s=60.0, **settings) as state:
        state.set_epoch(0)
        go(ddp, rank, range(40))
        assert state.decided
        saved = state.state_dict()
    from espresso.comm.hook import espresso_hook

    ddp = model()
    state = EspressoState(timeout_s=60.0, **settings)
    state.load_state_dict(saved)
    state.set_epoch(1)
    ddp.register_comm_hook(state.bind(ddp), espresso_hook)
    ran = []
    for step in range(40, 80):
        go(ddp, rank, range(step, step + 1))
        if step in (41, 70):
            ran.append(str(next(iter(state.session.follower.in_force.values()))))
            state.set_epoch(2)
    rows = [(row["event"], row["strategy"]) for row in state.history]
    state.close()
    return rows, ran


def resumed_undecided(rank: int) -> int:
    ddp = model()
    short = SHORT
    with registered(ddp, compressor="efsignsgd", strategy="auto", ranks_per_node=2, **short) as state:
        go(ddp, rank, range(4))
        assert not state.decided
        saved = state.state_dict()
    ddp = model()
    with registered(ddp, compressor="efsignsgd", strategy="auto", ranks_per_node=2, timeout_s=60.0, **short) as state:
        state.load_state_dict(saved)
        for step in range(4, 4 + 60):
            go(ddp, rank, range(step, step + 1))
            if state.decided:
                assert state.job is not None
                return step - 3
    return 0


@pytest.fixture(scope="module")
def played() -> Played:
    scenarios = (
        resumed, refused, resized, changed, replicated, given_strategy, without_momentum, resumed_undecided,
        resumed_while_it_warms_up,
    )  # fmt: skip
    return Played(__name__, scenarios, 4, deadline_s=150)
