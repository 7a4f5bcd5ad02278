"""Automatic mode on a live job: it measures, searches, races, and trains all the while."""

import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from numba.core import config
from numba.core.registry import CPUDispatcher
from torch.distributed import GradBucket

import espresso
from espresso.comm.errors import EspressoError
from espresso.comm.execute.assignment import Assignment
from espresso.cpu_offload import randomk
from espresso.cpu_offload.jit import source_digest
from espresso.jit.kernels import keep
from espresso.live.given import AUTO_COMPRESSORS
from espresso.live.race import Arm, Race
from espresso.live.script import LossScale, StepGuard
from espresso.model import timeline_kernels
from espresso.model.job import STEADY, Profile
from espresso.search import order_kernels
from espresso.search.terms import HARMLESS
from espresso.strategies import Scope, Strategy
from tests.ddp import IntegerNet, Played, agreed, batch, digest, mlp, registered, wrap

DECIDED_WITHIN = 60
POISONED = (1, 6, 20, 29)
"""While warming up, profiling and racing."""
FLUSH_S = 0.5
PAUSE_S = 0.1


@pytest.mark.slow
def test_with_nothing_chosen_it_decides_within_sixty_steps_and_learns(played):
    everybody = played(decide)
    for result in everybody:
        assert result["compressors"] == AUTO_COMPRESSORS
        assert 0 < result["decided at"] <= DECIDED_WITHIN
        assert result["losses"][1] < 0.7 * result["losses"][0]
        assert result["verdict"].startswith(tuple(f"{name}: " for name in result["names"]))
        assert "ms a step" in result["verdict"] or "no strategy is predicted" in result["verdict"]
        assert result["predicted"] > 0
        assert result["measured"] > 0
        assert result["job on rank 0"]
        assert result["budget"] == HARMLESS, "plain SGD"
        assert 0 < result["largest timed"] <= 2 * result["model"], "exchanges that the job never makes"
        assert result["digest"] == everybody[0]["digest"]


def test_of_several_compressors_tensors_take_what_the_terms_allow(pair):
    everybody = pair(decide_among)
    for result in everybody:
        assert result["named"] == "int8; efsignsgd; powersgd:rank=1"
        assert result["raced"], "nothing was raced"
        assert result["scales"] == {4.0}, "which all ranks' gains follow"
        for choices in result["raced"]:
            assert choices["0.weight"] == "none"
            assert choices["4.weight"] == "fp16"
            assert choices["2.bias"] == "none"
            assert choices["2.weight"] == "int8:residual_dtype=int8", "which is what there is memory for"
        assert not any("all_to_all" in option or "offload" in option for option in result["options"]), result["options"]
        assert result["owed"] == sorted(result["owed"])
        assert 0 < result["error"] <= 4.0
        assert 0 < result["residual"] <= 1e6
        most = max(one["kept"] for one in everybody)
        assert most == pytest.approx(result["residual"], rel=0.02), "forecast and allocated"
        assert result["forecast"]
        assert result["raced"] == everybody[0]["raced"]


def test_kernels_that_are_not_on_disk_are_compiled_beside_plain_steps(pair):
    for missing, steps, kept, told in pair(decide_while_compiling):
        assert missing, "registration waited for them"
        assert steps > DECIDED_WITHIN
        assert kept, "compiled, and left for the next job"
        assert told


def test_inf_batches_while_measuring_and_racing(pair):
    """With a grad scaler: skipped everywhere, and the decision still comes."""
    for decided_at, finite in pair(decide_with_overflow):
        assert 0 < decided_at <= DECIDED_WITHIN
        assert finite


def test_the_first_measured_step_is_measured_from_its_forward_pass_on(pair):
    for sampled, given, forward_us, optimizer_us in pair(measured_twice):
        assert sampled in ({}, given)
        assert forward_us < PAUSE_S * 1e6 < optimizer_us
    assert pair(measured_twice)[0][0], "rank 0 samples"


@pytest.mark.parametrize("decide_by", [0, 24, 40])
def test_all_ranks_profile_more_steps_where_those_of_one_are_far_apart(pair, decide_by):
    everybody = pair(shaky)
    for result in everybody:
        measured, decided_at, profile, told = result[decide_by]
        assert measured == {0: 4, 24: 7, 40: 8}[decide_by], "with the race in view, and twice as many at most"
        assert decided_at <= decide_by or not decide_by
        assert profile == everybody[0][decide_by][2]
        assert profile.num_steps == measured
        assert profile.spread > STEADY
        assert f"profile   {measured} steps, backward's spread is" in told


def test_measuring_ends_when_a_strategy_is_given(pair):
    assert pair(interrupted) == [(True, False)] * 2


def test_a_flush_is_no_step_of_a_race_nor_of_what_is_watched(pair):
    for raced_us, watched_us in pair(flushed_meanwhile):
        assert len(raced_us) == 4
        assert max(raced_us) < FLUSH_S * 1e6
        assert len(watched_us) == 3
        assert max(watched_us) < FLUSH_S * 1e6


def test_where_nothing_may_compress_the_verdict_says_so(pair):
    for verdict in pair(nowhere):
        assert "devices=['offload'] allows compression nowhere" in verdict


def test_one_rank_has_nothing_to_exchange(pair):
    for decided, equal in pair(alone):
        assert decided
        assert equal


def cycled(parameters):
    """Adam in the middle of a schedule that has its first beta at .85 there, at .95 in the beginning."""
    optimizer = torch.optim.Adam(parameters)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, pct_start=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has not stepped yet
        while optimizer.param_groups[0]["betas"][0] > 0.851:
            schedule.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "adapts", "scale"),
    [
        (partial(torch.optim.SGD, lr=0.1), False, 8.0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.8), False, 2.0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), False, 1.0),
        (torch.optim.Adam, True, 0.5),
        (partial(torch.optim.Adam, betas=(0.5, 0.9)), True, 4.0),
        (torch.optim.RMSprop, True, 8.0),
        (torch.optim.Adafactor, True, 1.0),
        (cycled, True, 0.5),
    ],
)
def test_what_is_known_of_an_optimizer(make, adapts, scale):
    """Whether it divides by what it remembers, and the feedback gains beside it, by its momentum too: where it does not
    say, they stay.
    """
    ours, others = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    guard = StepGuard({id(p) for p in ours.parameters()}, has_momentum=False, error=lambda: None)
    try:
        assert guard.optimizer_adapts, "nothing is known: carefully"
        assert guard.gain_scale == 1.0
        for model, optimizer in ((others, torch.optim.Adam(others.parameters())), (ours, make(ours.parameters()))):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
        assert guard.optimizer_adapts is adapts
        assert guard.gain_scale == scale
    finally:
        guard.remove()


def test_a_refusal_does_not_meet_the_next_job_of_the_same_parameters():
    model, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(each.parameters()) for each in (model, other)]
    for each in (model, other):
        guard = StepGuard({id(p) for p in each.parameters()}, has_momentum=False, error=lambda: None)
        guard.refuse(EspressoError("closed"))
    again = StepGuard({id(p) for p in model.parameters()}, has_momentum=False, error=lambda: None)
    try:
        optimizers[0].step()
        with pytest.raises(EspressoError, match="closed"):
            optimizers[1].step()
    finally:
        again.remove()


def test_of_an_optimizer_of_two_models_the_jobs_own_groups_count():
    ours, others = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam([{"params": others.parameters()}, {"params": ours.parameters(), "betas": (0.5, 0.9)}])
    guard = StepGuard({id(p) for p in ours.parameters()}, has_momentum=False, error=lambda: None)
    try:
        optimizer.step()
        assert guard.gain_scale == 4.0
    finally:
        guard.remove()


def test_an_optimizer_that_gets_parameters_of_the_job_later_is_ours_then():
    ours, others = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    optimizer, failed = torch.optim.SGD(others.parameters()), EspressoError("failed")
    guard = StepGuard({id(p) for p in ours.parameters()}, has_momentum=True, error=lambda: failed)
    try:
        optimizer.step()
        optimizer.add_param_group({"params": ours.weight})
        with pytest.raises(EspressoError, match="failed"):
            optimizer.step()
        optimizer.add_param_group({"params": ours.bias, "momentum": 0.9})
        with pytest.raises(ValueError, match="momentum correction"):
            optimizer.step()
    finally:
        guard.remove()


def test_a_scaler_that_is_off_scales_nothing():
    """Or each plain step would look for infs."""
    assert LossScale(torch.amp.GradScaler("cpu", enabled=False))() is None
    assert LossScale(torch.amp.GradScaler("cpu", init_scale=8.0))() == 8.0


# -- scenarios, on two nodes of two ranks or of one ----------------------------------------------------------


def decide(rank: int) -> dict[str, object]:
    ddp = wrap(mlp(64, 512, 512, 8), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses, decided_at = [], 0
    with espresso.register(ddp, ranks_per_node=2, timeout_s=60.0, offload_threads=1, compile_beside=False) as state:
        for step in range(DECIDED_WITHIN + 10):
            optimizer.zero_grad()
            inputs = batch(rank, step % 4, 64, rows=16)
            loss = (ddp(inputs) - inputs[:, :8].sin()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if state.decided and not decided_at:
                decided_at = step + 1
            if step % 10 == 9:
                assert agreed(ddp)
        verdict = state.session.decider.verdict
        assert verdict is not None
        metrics = state.metrics()
        curves = [] if state.job is None else state.job.costs.links.curves
        return {
            "largest timed": max(c.points[-1][0] for c in curves if c.scope is not Scope.INTER),
            "model": sum(each.nbytes for each in ddp.parameters()),
            "decided at": decided_at,
            "losses": (sum(losses[:4]) / 4, sum(losses[-4:]) / 4),
            "verdict": state.verdict,
            "names": ["plain", *verdict.predicted_us],
            "predicted": metrics["espresso/predicted_step_us"],
            "measured": metrics["espresso/measured_step_us"],
            "job on rank 0": state.job is not None,
            "budget": state.job.meta["automatic"]["error_budget"],
            "compressors": tuple(map(str, state.compressors)),
            "digest": digest(ddp),
        }


def decide_among(rank: int) -> dict[str, object]:
    """Until the search is done; what races is then known to all ranks."""
    ddp = wrap(mlp(64, 512, 512, 8), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.5)
    settings = {
        "force": {
            "4.weight": "fp16 via comp > flat.allreduce > dec",
            "2.weight": "int8 via comp > flat.allgather > dec",
        },
        "most_compressions": 1, "forbid": ["*all_to_all*"], "devices": ["training"], "keep_exact": ["0.w*"],
        "residual_budget_mb": 1.0, "decide_by": 0,
    }  # fmt: skip
    specs = ["int8", "efsignsgd", "powersgd:rank=1"]
    with registered(ddp, compressor=specs, strategy="auto", timeout_s=60.0, **settings) as state:
        step = 0
        while not (candidates := state.session.decider._candidates) and step < 30:
            ddp(batch(rank, step, 64, rows=16)).square().mean().backward()
            optimizer.step()
            step += 1
        job = state.job
        assert job is not None
        owed = [] if rank else [sum(rows.values()) for rows in job.meta["sensitivity"]["owed"].values()][:2]
        raced = [{name: str(c.compressor) for name, c in one.strategy.choices.items()} for one in candidates]
        options = {str(choice.option) for one in candidates for choice in one.strategy.choices.values()}
        notes = candidates[0].strategy.notes if candidates else {}
        for _ in range(3 if candidates else 0):
            state.use(candidates[0].strategy)
            ddp(batch(rank, step, 64, rows=16)).square().mean().backward()
        summary = state.summary()
        if candidates:  # people may write anything into a strategy's notes
            state.use(replace(candidates[0].strategy, notes={"gradients_owed": "much", "residual_mb": []}))
            assert "owes" not in state.summary()
        return {
            "named": "; ".join(map(str, state.compressors)), "raced": raced, "options": options,
            "owed": owed, "scales": {candidate.strategy.gain_scale for candidate in candidates},
            "error": notes.get("gradients_owed", -1), "residual": 1e6 * notes.get("residual_mb", 9.0),
            "kept": state.metrics()["espresso/residual_bytes"], "forecast": "owes about" in summary,
        }  # fmt: skip


@contextmanager
def kernels_apart(rank: int) -> Iterator[Callable[[], list[Path]]]:
    """Have what compiles here, and in processes begun here, find all kernels but randomk's on disk; what there is of
    those.

    In a folder of this test's own: other workers read and write what all share.
    """
    folder = Path(os.environ["KERNELS_APART"])
    for module in (randomk, timeline_kernels, order_kernels) if rank == 0 else ():
        shared = next(each._cache for each in vars(module).values() if is_kernel_of(module, each))
        ours = folder / shared._impl.locator.get_suitable_cache_subpath(module.__file__)
        shutil.copytree(shared.cache_path, ours, ignore=shutil.ignore_patterns("randomk*", "*.pyc"))
    dist.barrier()
    with patch.dict(os.environ, {"NUMBA_CACHE_DIR": str(folder)}), patch.object(config, "CACHE_DIR", str(folder)):
        for each in vars(randomk).values():
            if is_kernel_of(randomk, each):
                keep(each, source_digest())
        yield lambda: list(folder.rglob("randomk*.nb?"))


def is_kernel_of(module: ModuleType, value: object) -> bool:
    return isinstance(value, CPUDispatcher) and value.py_func.__module__ == module.__name__


def decide_while_compiling(rank: int) -> tuple[bool, int, bool, bool]:
    """No other scenario here has these kernels in memory."""
    ddp, steps = wrap(mlp(20, 30, 3)), 0
    settings = {"strategy": "auto", "compile_beside": True, "profile_steps": 1, "race_steps": 3, "race_rounds": 1}
    with (
        kernels_apart(rank) as kernels_of_randomk,
        registered(ddp, compressor="randomk:ratio=0.1", timeout_s=60.0, **settings) as state,
    ):
        missing = not kernels_of_randomk()
        waits = "compiled" in state.summary()
        while not state.decided and steps < 5000:
            ddp(batch(rank, steps, 20)).square().mean().backward()
            assert agreed(ddp) or steps % 10
            steps += 1
            time.sleep(0.02)
        return missing, steps, bool(kernels_of_randomk()) and state.decided, waits


def decide_with_overflow(rank: int) -> tuple[int, bool]:
    ddp = wrap(mlp(64, 256, 256, 8), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
    settings = {"strategy": "auto", "timeout_s": 60.0, "grad_scaler": scaler}
    decided_at = 0
    with registered(ddp, compressor="dgc:ratio=0.05", **settings) as state:
        for step in range(DECIDED_WITHIN):
            optimizer.zero_grad()
            loss = ddp(batch(rank, step, 64)).square().mean()
            if step in POISONED and rank == 1:
                loss = loss + ddp.module[2].weight[0, 0] * math.inf
            before = digest(ddp)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert (digest(ddp) == before) == (step in POISONED)
            assert agreed(ddp)
            if state.decided and not decided_at:
                decided_at = step + 1
        finite = math.isfinite(state.metrics()["espresso/residual_norm"]) and bool(loss.isfinite())
        return decided_at, finite


def measured_twice(rank: int) -> tuple[dict[str, list[float]], dict[str, list[float]], float, float]:
    """Two steps of many buckets after three of warm-up: sums of what was sampled in each, and of this rank's gradients;
    of the first, how long forward and the optimizer took, which waits.
    """
    ddp = wrap(IntegerNet())
    given: dict[str, list[float]] = {}
    with registered(ddp, compressor="fp16", strategy="auto", warmup_steps=3, profile_steps=100) as state:

        def note(bucket: GradBucket, scale: float, is_first: bool) -> None:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                given.setdefault(state.name_of(parameter), []).append(float(gradient.sum()))

        state.before_exchange.append(note)
        for step in range(5):
            ddp.zero_grad()
            ddp(10 * step + rank).backward()
            time.sleep(PAUSE_S)
        session = state.session
        sampled = {s.tensor.name: s.values.sum(1).tolist() for s in session.sampler.samples()}
        seen = session.observer.observations[0]
        return sampled, {name: sums[3:] for name, sums in given.items()}, seen.forward_us, seen.optimizer_us


def beside_another(rank: int) -> tuple[list[int], bool]:
    """What each of two jobs is told of the other's race, and of one that is over."""
    settings = {"compressor": "fp16", "strategy": "auto", "timeout_s": 60.0}
    with registered(wrap(mlp(20, 30, 3)), **settings) as one, registered(wrap(mlp(20, 30, 3)), **settings) as other:
        sessions = [one.start().session, other.start().session]
        sessions[0].decider._race, sessions[0].decider._pause = SimpleNamespace(num_steps=20), 3
        told = [session.others_race() for session in sessions]
        sessions[0].decider._race = None
    return told, sessions[1].others_race() == 0


class Pause(torch.nn.Module):
    """Holds backward up for so long."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x.register_hook(lambda _: time.sleep(self.seconds))
        return x


def shaky(rank: int) -> dict[int, tuple[int, int, Profile, str]]:
    """Until it has decided: steps that were measured, and all; on rank 1 alone every second one is long."""
    short, found = {"warmup_steps": 3, "profile_steps": 4, "race_steps": 3, "race_rounds": 1}, {}
    for decide_by in (0, 24, 40):
        pause, step = Pause(), 0
        ddp = wrap(torch.nn.Sequential(torch.nn.Linear(20, 30), pause, torch.nn.Linear(30, 3)))
        settings = {"compressor": "fp16", "strategy": "auto", "timeout_s": 60.0, "decide_by": decide_by}
        with registered(ddp, **settings, **short) as state:
            while not state.decided and step < DECIDED_WITHIN:
                pause.seconds = 0.02 if rank == 0 or step % 2 else 0.05
                ddp(batch(rank, step, 20)).square().mean().backward()
                step += 1
            job, measured = state.session.search.job, len(state.session.observer.observations)
            found[decide_by] = measured, step, job.profile, state.summary()
    return found


def alone(rank: int) -> tuple[bool, bool]:
    """A group of one rank in a larger world."""
    groups = [dist.new_group([number]) for number in range(2)]
    ours, plain = (wrap(mlp(20, 30, 3), process_group=groups[rank]) for _ in range(2))
    with registered(ours, compressor="efsignsgd", strategy="auto") as state:
        for ddp in (ours, plain):
            for step in range(3):
                ddp(batch(rank, step, 20)).square().mean().backward()
        same = all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
        return state.decided, same


def nowhere(rank: int) -> str:
    """It may compress on the offload pool alone, which has one thread: that is no place."""
    ddp = wrap(mlp(20, 30, 3))
    with registered(ddp, compressor="efsignsgd", strategy="auto", devices=["offload"], timeout_s=60.0) as state:
        for step in range(30):
            ddp(batch(rank, step, 20)).square().mean().backward()
            if state.decided:
                break
        return str(state.verdict)


def interrupted(rank: int) -> tuple[bool, bool]:
    """A strategy is given while the job is measured."""
    ddp = wrap(mlp(20, 30, 3))
    settings = {"compressor": "fp16", "strategy": "auto", "compile_beside": False, "warmup_steps": 3}
    with registered(ddp, profile_steps=100, **settings) as state:
        seen = []
        for step in range(8):
            if step == 6:
                state.use(Strategy.uniform(state.session.model.tensors, state.session.groups.cluster))
            ddp(batch(rank, step, 20)).square().mean().backward()
            seen.append(state.session.sampler.is_on)
        return seen[5], seen[7]


def flushed_meanwhile(rank: int) -> tuple[list[float], list[float]]:
    """A flush of one long step in a race, and in a window that is watched; what the steps took by either."""
    ddp = wrap(mlp(20, 30, 3))

    def step(number: int, pause_s: float = 0.0) -> None:
        time.sleep(pause_s)
        ddp(batch(rank, number, 20)).square().mean().backward()

    with registered(ddp, compressor="fp16", strategy="auto") as state:
        session, race = state.session, Race([Arm("plain", Assignment(state.strategy))], block=6, rounds=1)
        session.decider._race = race
        for number in range(3):
            step(number)
        state.flush()
        step(3, FLUSH_S)
        for number in range(4, 6):
            step(number)
        state.use(state.strategy)
        for number in range(6, 9):
            step(number)
        state.flush()
        step(9, FLUSH_S)
        step(10)
        watch = session.decider.watch
        return [us for steps in race._steps_us.values() for us in steps], [us for us, *_ in watch._window]


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(__name__, (decide,), 4, deadline_s=240)


def test_of_two_jobs_each_is_told_how_long_the_other_races(pair):
    assert pair(beside_another) == [([0, 23], True)] * 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Played:
    scenarios = (
        decide_among,
        decide_while_compiling,
        decide_with_overflow,
        alone,
        nowhere,
        beside_another,
        interrupted,
        flushed_meanwhile,
        measured_twice,
        shaky,
    )
    environment = {"KERNELS_APART": str(tmp_path_factory.mktemp("kernels"))}
    return Played(__name__, scenarios, 2, deadline_s=240, environment=environment)
