"""One fault in one job, and the verdict."""

import random
import re
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import FAULTS, Ending, Fault, full_disk
from benchmarks.chaos.places import PLACES, Job, Place, started
from benchmarks.chaos.worker import Work

GRACE_S = 10.0
START_S = 600.0
"""How long a job may take to come to the phase in which it is disturbed: a slow and busy machine compiles for long."""
LONGEST_DELAY_S = 0.4
NUM_STEPS = 120
DEATHS = re.compile(r"terminate called|Fatal Python error|SIGABRT|SIGSEGV|[Ss]ignal (?:6|11)\b")
"""What nobody but the victim may print."""

ALL_GATHER = "comp > flat.allgather > dec"
TWO_WAY = "comp > flat.all_to_all > dec > comp > flat.allgather > dec"
HIERARCHICAL = "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather"
SERVERS = "comp > flat.push > dec@server > comp@server > flat.pull > dec"

KINDS = (
    ("plain", "flat.allreduce", "efsignsgd"),
    ("all-gather", ALL_GATHER, "dgc:ratio=0.01"),
    ("two-way", TWO_WAY, "efsignsgd"),
    ("hierarchical", HIERARCHICAL, "efsignsgd"),
    ("automatic", "", "efsignsgd"),
)
"""Name, option (empty: automatic mode) and compressor."""

GIVEN_PHASES = ("start-up", "warm-up", "steady", "switch", "save", "closing")
AUTOMATIC_PHASES = ("start-up", "warm-up", "profile", "search", "race", "steady", "save", "closing")
LATE = "closing"
"""The phase in which a rank may be done before it can notice."""


@dataclass(frozen=True)
class Plan:
    """What is played: everything that chance decides."""

    fault: Fault
    place: Place
    kind: str
    phase: str
    victim: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.fault.name}, {self.place.name}, {self.kind}, {self.phase}, rank {self.victim}"


@dataclass(frozen=True)
class Verdict:
    """What came of it.

    Attributes:
        wrong: why the outcome is not right; empty if it is.
        slowest_s: from the fault to the last survivor's error.
    """

    plan: Plan
    wrong: str
    slowest_s: float = 0.0
    log: str = ""


def draw_plan(draw: random.Random, number: int) -> Plan:
    """The plan of a trial; faults take turns, all else is chance."""
    fault = FAULTS[number % len(FAULTS)]
    # Launchers start anew what forked ranks share, which takes ten times as long: one trial in five.
    places = [place for place in PLACES if fault.fits(place)]
    forked = [place for place in places if place.launcher == "forked"]
    place = draw.choice(forked if forked and draw.random() < 0.8 else places)
    kinds = [kind for kind, _, _ in KINDS if kind != "hierarchical" or place.num_ranks == 4]
    kind = "servers" if place.num_servers else draw.choice(kinds)
    phases = AUTOMATIC_PHASES if kind == "automatic" else GIVEN_PHASES
    phase = draw.choice([phase for phase in phases if place.num_hosts or phase != "race"])
    delay_s = draw.uniform(0.0, LONGEST_DELAY_S if phase != LATE else LONGEST_DELAY_S / 10)
    return Plan(fault, place, kind, phase, draw.randrange(place.num_ranks), delay_s)


def work_of(plan: Plan, folder: Path, timeout_s: float, **more: Any) -> Work:
    """The job's settings."""
    option, compressor = next(
        ((option, compressor) for kind, option, compressor in KINDS if kind == plan.kind), (SERVERS, "efsignsgd")
    )
    per_node = None if plan.place.num_hosts or plan.place.num_servers else 1
    per_node = 2 if plan.kind == "hierarchical" else per_node
    return Work(str(folder), option, compressor, per_node, timeout_s, NUM_STEPS, **more)


def warm_up(timeout_s: float = 60.0) -> None:
    """Compile what jobs of every kind run, so that no trial waits for it."""
    for place in (PLACES[0], PLACES[-1]):
        for kind, _, _ in KINDS if not place.num_servers else (("servers", "", ""),):
            undisturbed(place, kind, timeout_s)


@cache
def undisturbed(place: Place, kind: str, timeout_s: float) -> str:
    """What all ranks end with when nothing happens."""
    plan = Plan(FAULTS[0], place, kind, "", 0, 0.0)
    with tempfile.TemporaryDirectory() as name, started(place, work_of(plan, Path(name), timeout_s), Path(name)) as job:
        _wait_for_end(job, time.time() + START_S + 60.0, ())
        results = {_last(lines).get("result") for lines in job.told().values()}
        if len(results) != 1 or None in results:
            raise RuntimeError(f"an undisturbed job of {kind} on {place.name} did not end well: {results}\n{job.log()}")
        return str(results.pop())


def play(plan: Plan, timeout_s: float) -> Verdict:
    """Start the job, wait for the phase, play the fault, watch."""
    expected = ""
    if plan.fault.ending is Ending.GOES_ON and plan.kind != "automatic":
        expected = undisturbed(plan.place, plan.kind, timeout_s)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        more: dict[str, Any] = {}
        if plan.fault.name == "full disk":
            more["artifacts_dir"] = str(stack.enter_context(full_disk(folder)))
        if plan.fault.name == "another build on one rank":
            more["wrong_build"] = plan.victim
        job = stack.enter_context(started(plan.place, work_of(plan, folder, timeout_s, **more), folder))
        phase = "start-up" if plan.fault.at_start else plan.phase
        if not _wait_for_phase(job, plan.victim, phase):
            return Verdict(plan, f"never came to {phase}", log=_all_of(job))
        time.sleep(0.0 if plan.fault.at_start else plan.delay_s)
        at = time.time()
        plan.fault.play(job, plan.victim)
        at = next((line["at"] for line in job.told()[plan.victim] if "fault" in line), at)
        limit_s = START_S if plan.fault.ending is Ending.GOES_ON else timeout_s + GRACE_S
        stays = _those_who_stay(plan, job)
        left = _wait_for_end(job, at + limit_s, {*stays, *_victim(plan, job)})
        left += _wait_for_end(job, time.time() + limit_s, stays)
        wrong, slowest = _judge(plan, job, at, limit_s, expected, left)
        return Verdict(plan, wrong, slowest, _all_of(job) if wrong else "")


def _all_of(job: Job) -> str:
    """What a job wrote, and the last that each rank told."""
    told = "\n".join(f"rank {rank}: {_last(lines)}" for rank, lines in job.told().items())
    return f"{job.log()[-20000:]}\n{told}"


def _victim(plan: Plan, job: Job) -> set[int]:
    """The processes that were hit."""
    if plan.fault.ending is Ending.NAMES_RANK and not plan.fault.at_start:
        return {job.pid(plan.victim)}
    return set(job.server_pids()) if plan.fault.ending is Ending.NAMES_SERVER else set()


def _those_who_stay(plan: Plan, job: Job) -> set[int]:
    """What does not end by itself: who was stopped for good, a launcher, which waits for it, and MPI's processes.

    Those that are done wait in ``MPI_Finalize`` for who was stopped after all work was done.
    """
    if not plan.fault.stays:
        return set()
    done = plan.phase == LATE and plan.place.launcher == "mpirun" and plan.place.num_servers > 0
    return set(job.alive()) if done else _victim(plan, job) | job.launcher_pids()


def _last(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return lines[-1] if lines else {}


def _wait_for_phase(job: Job, rank: int, phase: str) -> bool:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        lines = job.told()[rank]
        if any(line.get("phase") == phase for line in lines):
            return True
        if any("error" in line or "result" in line for line in lines):
            return False
        time.sleep(0.02)
    return False


def _wait_for_end(job: Job, until: float, without: Collection[int]) -> list[int]:
    """Wait for all processes of a job but some; those that are left at last."""
    while left := [pid for pid in job.alive() if pid not in without]:
        if time.time() > until:
            return left
        time.sleep(0.05)
    return []


def _judge(plan: Plan, job: Job, at: float, limit_s: float, expected: str, left: Sequence[int]) -> tuple[str, float]:
    """Why it is wrong (empty: it is right), and how long the slowest error took."""
    told = job.told()
    if left:
        ranks = [str(rank) for rank, lines in told.items() if lines and lines[0]["pid"] in left]
        return f"{len(left)} processes alive {limit_s:.0f} s after the fault, ranks {', '.join(ranks) or 'none'}", 0.0
    if death := _death(plan, job):
        return death, 0.0
    results = {rank: _last(lines)["result"] for rank, lines in told.items() if "result" in _last(lines)}
    errors = {rank: _last(lines) for rank, lines in told.items() if "error" in _last(lines)}
    if len(set(results.values())) > 1:
        return f"replicas differ: {results}", 0.0
    if plan.fault.ending is Ending.GOES_ON:
        if plan.phase == "start-up" and plan.fault.else_at_start and len(errors) == plan.place.num_ranks:
            otherwise = replace(plan, fault=replace(plan.fault, ending=plan.fault.else_at_start))
            return _judge(otherwise, job, at, job.work.timeout_s + GRACE_S, expected, left)
        if len(results) < plan.place.num_ranks:
            return f"did not go on: {_texts(errors) or 'silence'}", 0.0
        if expected and expected not in results.values():
            return f"went on differently: {results} and not {expected}", 0.0
        return "", 0.0
    victims = _victim(plan, job)
    slowest = max((line["at"] - at for line in errors.values() if line["pid"] not in victims), default=0.0)
    if slowest > limit_s:
        return f"an error came after {slowest:.1f} s: {_texts(errors)}", slowest
    for rank, lines in told.items():
        if lines[0]["pid"] in victims or (rank in results and plan.phase == LATE):
            continue
        if rank in results:
            return f"rank {rank} noticed nothing", slowest
        if rank not in errors:
            if plan.place.launcher == "forked":
                return f"rank {rank} ended without a word", slowest
            continue  # the launcher ended it
        if not any(blames(plan, rank, text) for text in _text(errors[rank]).split(" | ")):
            return f"rank {rank} names the wrong one: {_text(errors[rank])}", slowest
    return "", slowest


def _death(plan: Plan, job: Job) -> str:
    """A process that ended by a signal, though nobody sent it one."""
    victim = plan.victim if plan.fault.ending is Ending.NAMES_RANK else None
    for rank, process in enumerate(job.processes):
        if rank != victim and getattr(process, "exitcode", 0) not in (0, 1):
            return f"rank {rank} ended with {process.exitcode}"
    if found := DEATHS.search(job.log()):
        return f"a process died: {found[0]}"
    return ""


def _text(line: dict[str, Any]) -> str:
    return " | ".join([str(line["error"]), *line.get("kept", [])])


def _texts(errors: dict[int, dict[str, Any]]) -> str:
    return "; ".join(f"rank {rank}: {_text(line)}" for rank, line in errors.items())


def blames(plan: Plan, rank: int, text: str) -> bool:
    """Whether an error says who it was: the last one it blames is at the root of it."""
    if plan.fault.ending is Ending.NAMES_SERVER:
        return f"server rank {plan.place.num_ranks} " in text
    blamed = blamed_in(rank, text)
    if plan.fault.at_start:  # it says which two differ
        return plan.victim in set().union(*blamed)
    last = blamed[-1] if blamed else set()
    if plan.fault.ending is Ending.NAMES_RANK:
        return last == {plan.victim}
    # A rank on the other side that says whom it cannot reach tells as much.
    quoted = re.findall(r"rank (\d+)(?:, which)? failed first", text, re.IGNORECASE)
    speaker = int(quoted[-1]) if quoted else rank
    sides = {plan.place.host_of(other) for other in last}
    return len(sides) == 1 and any(sides != {plan.place.host_of(one)} for one in {rank, speaker})


def blamed_in(rank: int, text: str) -> list[set[int]]:
    """The ranks that a text speaks of, but for those that it says it of and those that are no workers."""
    text = re.sub(rf"on rank {rank} failed|reached from rank \d+|with ranks [\d, ]+|server rank \d+", "", text)
    found = re.findall(r"\branks? (\d+(?:(?:, | and )\d+)*)", text, re.IGNORECASE)
    return [set(map(int, re.findall(r"\d+", numbers))) for numbers in found]
