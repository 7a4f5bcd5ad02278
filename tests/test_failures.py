"""A rank dies, hangs or raises: the others raise in time, say what they waited for, and nothing hangs."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from espresso.comm.groups import Groups
from espresso.cpu_offload.codec import HostCodec
from espresso.live import online_search
from tests.ddp import (
    ALLGATHER,
    ALLREDUCE,
    HIERARCHICAL,
    SHARDED,
    Played,
    batch,
    mlp,
    registered,
    sgd,
    wrap,
)
from tests.workers import Outcome, run_ranks

FATAL_STEP = 4
PROMPT_S = 15.0
"""A closed connection is noticed at once; generous, for a busy machine, and far below the time-out."""

TIMEOUT_S = 4.0

DEATHS = {
    "in backward": (SHARDED, "efsignsgd", 1),
    "in a lane": (HIERARCHICAL, "efsignsgd", 2),
    "between steps": (ALLREDUCE, "none", 1),
}

AT_ONCE = 4
"""Worlds that run at the same time: most of their time is waiting."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[list[Outcome], float]]]:
    """What came of each scenario that has ranks of its own, and when the fault was: ``worlds(scenario, *which)``."""
    at = tmp_path_factory.mktemp("at")
    begun: dict[tuple[Any, ...], tuple[Future[list[Outcome]], Path]] = {}

    def outcomes_of(*key: Any) -> tuple[list[Outcome], float]:
        future, path = begun[key]
        return future.result(), float(path.read_text()) if path.exists() else 0.0

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for scenario, num_ranks, which in (
            *((train_beside_a_stopped_rank, 3, (victim,)) for victim in (0, 1)),
            (start_beside_a_stopped_rank, 2, ()),
            (lose_a_rank_elsewhere, 3, ()),
            (one_stays_away, 3, ()),
            *((train_until_death, 4 if case[2] == 2 else 3, (moment,)) for moment, case in DEATHS.items()),
        ):
            path = at / str(len(begun))
            running = pool.submit(run_ranks, scenario, num_ranks, str(path), *which, check=False, deadline_s=120)
            begun[scenario, *which] = running, path
        yield outcomes_of


@pytest.mark.parametrize("moment", DEATHS)
def test_a_killed_worker_is_noticed_promptly(moment, worlds):
    outcomes, died = worlds(train_until_death, moment)
    assert outcomes[-1].exit_code == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.error is None, outcome.error
        assert outcome.exit_code == 0, f"rank {outcome.rank} did not exit by itself"
        check_report(outcome.rank, outcome.value)
        assert outcome.value["raised_at"] - died < PROMPT_S
        assert f"That is rank {len(outcomes) - 1}: it died" in outcome.value["first"], outcome.value["first"]


def test_a_rank_that_stops_is_waited_for_no_longer_than_the_deadline(played):
    sleeper, *others = [report for report in played(one_rank_sleeps)]
    for rank, report in enumerate(others, start=1):
        check_report(rank, report)
        assert 1.9 <= report["raised_at"] - sleeper["stopped_at"] < 2.0 + 5.0
        assert "Rank 0 is behind: iteration 4 has not begun there" in report["first"], report["first"]


def test_an_encoder_that_raises(played):
    reports = played(one_encoder_raises)
    for rank, report in enumerate(reports):
        check_report(rank, report)
    assert "ValueError: no more bits" in reports[1]["first"]
    assert "comp" in reports[1]["first"]
    for report in (reports[0], reports[2]):
        assert report["raised_at"] - reports[1]["raised_at"] < PROMPT_S


def test_an_exception_in_the_users_backward(played):
    reports = played(one_backward_raises)
    assert reports[1]["first"] == "ValueError: the user's own"
    assert "did not finish" in reports[1]["again"] or "before the last one was averaged" in reports[1]["again"]
    for rank in (0, 2):
        check_report(rank, reports[rank])


def test_a_search_may_take_longer_than_the_time_out(played):
    assert played(one_search_takes_long) == [None, None, None]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_in_time(victim, worlds):
    """Rank 0's host runs the job's store, which then answers nobody: connections to it hang."""
    outcomes, stopped_at = worlds(train_beside_a_stopped_rank, victim)
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error is None, outcome.error
            check_report(outcome.rank, outcome.value)
            check_time(outcome.value["raised_at"] - stopped_at)
            assert f"Rank {victim} does not answer" in outcome.value["first"], outcome.value["first"]


def test_a_start_that_a_rank_does_not_take_part_in(worlds):
    """Rank 0 stops after init_process_group: the job's store answers nobody any more."""
    outcomes, stopped_at = worlds(start_beside_a_stopped_rank)
    assert outcomes[1].error is None, outcomes[1].error
    text, raised_at = outcomes[1].value
    assert "EspressoError: making process groups took longer than 6 s: a rank does not take part" in text
    check_time(raised_at - stopped_at)


def test_who_does_not_come_is_named_by_all_others(worlds):
    outcomes, _ = worlds(one_stays_away)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0]
    for outcome in outcomes[:2]:
        assert outcome.value.startswith("LostRankError: rank 2 did not come to espresso.register within 1 s; ")


def test_a_collective_outside_espresso_names_who_was_lost(worlds):
    outcomes, _ = worlds(lose_a_rank_elsewhere)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.error
        assert outcome.value.startswith("LostRankError: a collective outside espresso: RuntimeError"), outcome.value
        assert "rank 2" in outcome.value.lower().rpartition("runtimeerror")[2], outcome.value


def check_time(took_s: float) -> None:
    assert TIMEOUT_S - 1.0 < took_s < TIMEOUT_S + 5.0


def check_report(rank: int, report: dict[str, Any]) -> None:
    """The error names rank, tensor, step and iteration, reads well inside DDP's, and is logged once."""
    first = report["first"]
    for part in (
        f"espresso on rank {rank} failed in iteration {FATAL_STEP}",
        "step ",
        "bucket ",
        "(tensors ",
    ):
        assert part in first, first
    assert "SystemError" not in first
    assert "returned NULL" not in first
    assert report["again"].startswith(f"EspressoError: espresso on rank {rank} failed"), report["again"]
    assert report["logged"] == 1, report["logged"]


# -- workers ---------------------------------------------------------------------------------------


class _Counter(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.count = 0

    def settled(self) -> int:
        """Futures are released before the log is written."""
        deadline = time.monotonic() + 5.0
        while not self.count and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.count

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def train_until_error(
    rank: int,
    case: tuple[str, str, int],
    before_step: Callable[[int, torch.nn.Module], None],
    timeout_s: float,
) -> dict[str, Any]:
    """Train; on the first error try again, and tell what was raised, when, and what was logged."""
    option, compressor, ranks_per_node = case
    counter = _Counter()
    logging.getLogger("espresso").addHandler(counter)
    ddp = wrap(mlp(20, 60, 30, 40, 5))
    report: dict[str, Any] = {}
    with registered(ddp, option, compressor, ranks_per_node=ranks_per_node, timeout_s=timeout_s) as state:
        try:
            for step in range(12):
                before_step(step, ddp)
                ddp.zero_grad()
                ddp(batch(rank, step, 20)).square().mean().backward()
                sgd(ddp)
        except Exception as error:
            report = {"first": f"{type(error).__name__}: {error}", "raised_at": time.time()}
            report["again"] = second_try(ddp, rank)
            report["logged"] = counter.settled()
            assert state.error is not None or report["first"].startswith("ValueError")
    logging.getLogger("espresso").removeHandler(counter)
    return report


def second_try(ddp: torch.nn.Module, rank: int) -> str:
    """What the next hook call says (DDP's own complaint about the unfinished step comes before it)."""
    ddp.reducer._reset_state() if hasattr(ddp.reducer, "_reset_state") else None
    try:
        ddp(batch(rank, 0, 20)).square().mean().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def train_until_death(rank: int, path: str, moment: str) -> dict[str, Any]:
    """The last rank kills itself at ``moment`` of step FATAL_STEP."""

    def die(*_: Any) -> None:
        Path(path).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def before_step(step: int, ddp: torch.nn.Module) -> None:
        if step != FATAL_STEP or rank != torch.distributed.get_world_size() - 1:
            return
        if moment == "between steps":
            die()
        elif moment == "in backward":
            ddp.module[2].weight.register_hook(die)
        else:
            kill_in_lane(die)

    return train_until_error(rank, DEATHS[moment], before_step, timeout_s=60.0)


def kill_in_lane(die: Callable[[], None]) -> None:
    """Die in the first decoding, on a lane's thread."""

    def decode(*_: Any, **__: Any) -> bool:
        assert threading.current_thread().name.startswith("espresso-")
        die()
        return True

    HostCodec.decode = decode


def train_beside_a_stopped_rank(rank: int, path: str, victim: int) -> dict[str, Any]:
    """One rank stops itself, as SIGSTOP from outside would; another ends it when all is said."""
    pids: list[Any] = [None] * 3
    torch.distributed.all_gather_object(pids, os.getpid())

    def before_step(step: int, ddp: torch.nn.Module) -> None:
        if step == FATAL_STEP and rank == victim:
            Path(path).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)

    report = train_until_error(rank, (SHARDED, "efsignsgd", 1), before_step, timeout_s=TIMEOUT_S)
    told = Path(f"{path}.told")
    if rank != 2:
        told.touch()
    else:
        deadline = time.monotonic() + 20.0
        while not told.exists() and time.monotonic() < deadline:  # until then the victim has to stay as it is
            time.sleep(0.05)
        os.kill(pids[victim], signal.SIGKILL)
    return report


def start_beside_a_stopped_rank(rank: int, path: str) -> tuple[str, float]:
    pids: list[Any] = [None] * 2
    torch.distributed.all_gather_object(pids, os.getpid())
    if rank == 0:
        Path(path).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)
    text = ""
    try:
        Groups(timeout_s=TIMEOUT_S)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    raised_at = time.time()
    os.kill(pids[0], signal.SIGKILL)
    return text, raised_at


def one_stays_away(rank: int, path: str) -> str:
    if rank == 2:
        time.sleep(2.5)
        return ""
    try:
        Groups(timeout_s=1.0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def lose_a_rank_elsewhere(rank: int, path: str) -> str:
    """The last rank is gone when the others sum up a loss, in torch's own group."""
    with registered(wrap(mlp(20, 30, 3)), ALLREDUCE, timeout_s=TIMEOUT_S) as state:
        if rank == 2:
            os._exit(1)
        try:
            with state.errors():
                torch.distributed.all_reduce(torch.zeros(1000))
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"


# -- scenarios on three ranks ----------------------------------------------------------------------


def one_rank_sleeps(rank: int) -> dict[str, Any]:
    stopped = [0.0]

    def before_step(step: int, ddp: torch.nn.Module) -> None:
        if step == FATAL_STEP and rank == 0:
            stopped[0] = time.time()
            time.sleep(5.0)

    report = train_until_error(rank, (SHARDED, "efsignsgd", 1), before_step, timeout_s=2.0)
    return report | {"stopped_at": stopped[0]}


def one_encoder_raises(rank: int) -> dict[str, Any]:
    encode = HostCodec.encode

    def raising(*_: Any, **__: Any) -> bool:
        raise ValueError("no more bits")

    def before_step(step: int, ddp: torch.nn.Module) -> None:
        if step == FATAL_STEP and rank == 1:
            HostCodec.encode = raising

    try:
        return train_until_error(rank, (ALLGATHER, "efsignsgd", 1), before_step, timeout_s=60.0)
    finally:
        HostCodec.encode = encode


def one_backward_raises(rank: int) -> dict[str, Any]:
    def raising(_: torch.Tensor) -> None:
        raise ValueError("the user's own")

    def before_step(step: int, ddp: torch.nn.Module) -> None:
        if step == FATAL_STEP and rank == 1:
            ddp.module[2].weight.register_hook(raising)

    return train_until_error(rank, (SHARDED, "efsignsgd", 1), before_step, timeout_s=60.0)


def one_search_takes_long(rank: int) -> str | None:
    find = online_search.find_candidates

    def take_long(*arguments: Any) -> Any:
        time.sleep(3.2)
        return find(*arguments)

    online_search.find_candidates = take_long
    try:
        ddp = wrap(mlp(20, 60, 5))
        with registered(ddp, strategy="auto", profile_steps=1, timeout_s=2.0) as state:
            for step in range(6):
                ddp(batch(rank, step, 20)).square().mean().backward()
                sgd(ddp)
            return None if state.error is None and state.job is not None else f"{state.error}"
    finally:
        online_search.find_candidates = find


@pytest.fixture(scope="module")
def played() -> Played:
    scenarios = (one_rank_sleeps, one_encoder_raises, one_backward_raises, one_search_takes_long)
    return Played(__name__, scenarios, 3)
