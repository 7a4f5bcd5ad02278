"""Findings of runs whose cause is known: synthetic records, in which every moment follows from the cause."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from espresso.cli import app
from espresso.diagnosis.findings import _Case, diagnose
from espresso.diagnosis.replay import costs_of, replay, shared
from espresso.diagnosis.report import Diagnosis
from espresso.diagnosis.turns import Run
from espresso.flight.form import Flight, FlightError, Script, Span, StepRecord, Stretch, Tick, Traffic
from espresso.flight.kineto import flight_of, load_any
from espresso.show.flight_events import flight_events
from espresso.show.trace_events import trace_body, write_history
from espresso.strategies import (
    PLAIN,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Slot,
    Strategy,
    TensorSpec,
    parse_option,
)

MS = 1000.0
STEPS = 40


@dataclass(frozen=True)
class Rank:
    """What a rank does in a step, in milliseconds."""

    input: float = 2.0
    forward: float = 20.0
    backward: float = 40.0
    optimizer: float = 2.0
    coding: float = 3.0
    waited: float = 1.0


@dataclass(frozen=True)
class World:
    """A synthetic run; in its first ``disturbed`` steps something slows rank 0."""

    ranks: tuple[Rank, ...] = (Rank(), Rank(), Rank())
    buckets: int = 8
    tensors_a_bucket: int = 4
    bucket_mb: float = 1.0
    ms_a_mb: float = 3.0
    alpha_ms: float = 0.1
    latency_ms: float = 0.0
    broadcast_ms: float = 0.0
    passes: int = 1
    compressed: bool = False
    observed: bool = False
    late: bool = False
    noise: float = 0.02
    ahead_s: float = 0.0
    traffic: Callable[[int], tuple[Traffic, ...]] = lambda rank: ()
    cards: tuple[float, ...] = ()
    beside_ms: float = 0.0
    hook_ms: float = 0.0
    disturbed: int = 0
    ranks_a_host: int = 1

    def stretch(self) -> Stretch:
        numel = round(self.bucket_mb * 250_000 / self.tensors_a_bucket)
        names = [[f"t{b}.{i}" for i in range(self.tensors_a_bucket)] for b in range(self.buckets)]
        tensors = [TensorSpec(name, (numel,)) for each in names for name in each]
        choice = PLAIN
        if self.compressed:
            choice = Choice(parse_option("comp > flat.allgather > dec"), CompressorSpec.parse("efsignsgd"))
        strategy = Strategy.uniform(tensors, Cluster(len(self.ranks), 1), choice, partition_bytes=0)
        buckets = tuple(
            Bucket(b, tuple(Slot(name, i * numel, numel) for i, name in enumerate(each)))
            for b, each in enumerate(names)
        )
        return Stretch(strategy, buckets)

    def flights(self) -> list[Flight]:
        """Run it."""
        draw = random.Random(7)
        stretch = self.stretch()
        steps: list[list[StepRecord]] = [[] for _ in self.ranks]
        now = 1e6
        for number in range(STEPS):
            slowed = replace(self, ranks=(Rank(forward=35, backward=70), *self.ranks[1:]))
            now = (slowed if number < self.disturbed else self)._step(number, now, stretch, steps, draw)
        return [
            Flight(
                rank, len(self.ranks), f"host{rank // self.ranks_a_host}",
                Cluster(len(self.ranks) // self.ranks_a_host, self.ranks_a_host), (stretch,), tuple(mine),
                ticks=self._ticks(rank), traffic=self.traffic(rank), facts=self._facts(rank),
            )
            for rank, mine in enumerate(steps)
        ]  # fmt: skip

    def _facts(self, rank: int) -> dict[str, float]:
        facts = {"buffer_bytes": 4096.0, "cores": 1.0 if self.beside_ms else 4.0}
        return facts | ({"card_rate": self.cards[rank]} if self.cards else {})

    def _clock(self, rank: int, at: float) -> float:
        return at + rank * self.ahead_s * 1e6

    def _ticks(self, rank: int) -> tuple[Tick, ...]:
        error = max(self.latency_ms * MS / (2 * max(len(self.ranks) - 1, 1)), 30.0)
        return tuple(Tick(self._clock(rank, at), rank * self.ahead_s * 1e6, error) for at in (1e6, 9e6)) if rank else ()

    def _step(
        self, number: int, now: float, stretch: Stretch, steps: list[list[StepRecord]], draw: random.Random
    ) -> float:
        def took(ms: float) -> float:
            return ms * MS * (1 + self.noise * draw.random())

        stepped = number % self.passes == 0  # the step before ended with an optimizer
        begun = [now + (took(rank.optimizer) if stepped and number else 0.0) for rank in self.ranks]
        entered = [at + took(rank.input) for at, rank in zip(begun, self.ranks, strict=True)]
        synced = max(entered) + self.broadcast_ms * MS
        forward = [synced if self.broadcast_ms else at for at in entered]
        backward = [at + took(rank.forward) for at, rank in zip(forward, self.ranks, strict=True)]
        ready = [
            [at + (rank.backward + self.hook_ms) * MS * (b + 1) / self.buckets for b in range(self.buckets)]
            for at, rank in zip(backward, self.ranks, strict=True)
        ]
        spans: list[list[Span]] = [[] for _ in self.ranks]
        free = [0.0] * len(self.ranks)
        link = end = 0.0
        ended: list[float] = []  # two are under way at once
        task = 0
        part = 0.03 if self.compressed else 1.0
        sent = round(2 * (len(self.ranks) - 1) / len(self.ranks) * self.bucket_mb * part * 1e6)
        held = (self.alpha_ms + self.ms_a_mb * self.bucket_mb * part) * MS
        for bucket in range(self.buckets):
            starts = [mine[-1] if self.late else mine[bucket] for mine in ready]
            if self.compressed:
                starts = [
                    self._code(spans[r], task, at, free, r, self.ranks[r].coding * 0.7 / self.buckets)
                    for r, at in enumerate(starts)
                ]
            at = max(max(starts), link, ended[-2] if len(ended) > 1 else 0.0)
            link = at + held
            end = link + self.latency_ms * MS
            ended.append(end)
            for r, mine in enumerate(spans):
                issued = ready[r][bucket] if self.late else starts[r]
                mine.append(Span(task + self.compressed, issued, starts[r], end, sent))
            if self.compressed:
                ends = [
                    self._code(spans[r], task + 2, end, free, r, rank.coding * 0.3 / self.buckets)
                    for r, rank in enumerate(self.ranks)
                ]
                end = max(ends)
            task += 3 if self.compressed else 1
        averaged = max(end, max(mine[-1] for mine in ready))
        for r in range(len(self.ranks)):
            if stepped and steps[r]:
                before = steps[r][-1].script
                before.optimizer_us = self._clock(r, now)
                before.optimizer_end_us = self._clock(r, begun[r])
            script = Script(
                began_us=self._clock(r, begun[r]), input_us=entered[r] - begun[r], passes=1,
                entered_us=self._clock(r, entered[r]), forward_us=self._clock(r, forward[r]),
                forward_end_us=self._clock(r, backward[r]), backward_us=self._clock(r, backward[r]),
                backward_end_us=self._clock(r, ready[r][-1]), averaged_us=self._clock(r, averaged),
                beside_us=self.beside_ms * MS, waited_us=self.ranks[r].waited * MS,
            )  # fmt: skip
            moved = tuple(
                s._replace(
                    issue_us=self._clock(r, s.issue_us), start_us=self._clock(r, s.start_us),
                    end_us=self._clock(r, s.end_us),
                )
                for s in sorted(spans[r], key=lambda span: span.start_us)
            )  # fmt: skip
            steps[r].append(
                StepRecord(
                    number, 0, script, tuple(self._clock(r, at) for at in ready[r]), self._clock(r, averaged),
                    spans=() if self.observed else moved, hook_us=self.hook_ms * MS,
                )
            )  # fmt: skip
        return averaged

    @staticmethod
    def _code(mine: list[Span], task: int, at: float, free: list[float], rank: int, ms: float) -> float:
        start = max(at, free[rank])
        free[rank] = start + ms * MS
        mine.append(Span(task, at, start, free[rank], 0))
        return free[rank]

    @property
    def step_us(self) -> float:
        run = Run(self.flights())
        values = sorted(turn.measured for turn in run.turns)
        return values[len(values) // 2] * self.passes


def sending(rates: Sequence[float], window: float = 0.0) -> Callable[[int], tuple[Traffic, ...]]:
    """Connections that send at so many bytes a microsecond."""

    def of(rank: int) -> tuple[Traffic, ...]:
        busy = 1e8 / rates[rank]
        return Traffic(1e6, 0, 0.0, 0.0, 90.0), Traffic(
            9e6, 10**8, busy / (1 - window), busy / (1 - window) * window, 90.0
        )

    return of


EVEN = (Rank(), Rank(), Rank())
BASE = World()
THIN = World(buckets=16, bucket_mb=0.1)
SMALL = World(buckets=160, bucket_mb=0.05, tensors_a_bucket=1, alpha_ms=1.0, traffic=sending([444] * 3))
CAUSES: dict[str, tuple[World, World, str, int | None]] = {
    "slow input": (World((Rank(), Rank(input=27), Rank())), BASE, "slow_input", 1),
    "slow worker": (
        World((Rank(), Rank(), Rank(input=2, forward=32, backward=64, optimizer=3))), BASE, "slow_worker", 2
    ),
    "slow forward": (World((Rank(forward=45), Rank(), Rank())), BASE, "slow_forward", 0),
    "slow backward": (World((Rank(backward=70), Rank(), Rank())), BASE, "slow_backward", 0),
    "slow worker of two": (World((Rank(forward=35, backward=70), Rank())), World(EVEN[:2]), "slow_worker", 0),
    "slow worker, from outside": (
        World((Rank(), Rank(), Rank(forward=32, backward=64)), observed=True), World(observed=True), "slow_worker", 2
    ),
    "slow encoder": (
        World((Rank(), Rank(coding=60), Rank()), compressed=True), World(compressed=True), "slow_encoder", 1
    ),
    "thin card": (World(ms_a_mb=15, traffic=sending((444, 89, 444))), BASE, "thin_card", 1),
    "thin card, from outside": (
        World(ms_a_mb=15, observed=True, traffic=sending((444, 89, 444))), World(observed=True), "thin_card", 1
    ),
    "thin card of two": (  # answers to the other wait behind what the thin one sends
        World(EVEN[:2], ms_a_mb=15, traffic=sending((110, 67)), cards=(333, 67)), World(EVEN[:2]), "thin_card", 1
    ),
    "card that became thin": (
        World(ms_a_mb=15, traffic=sending((444, 89, 444)), cards=(444, 444, 444)), BASE, "thin_card", 1
    ),
    "quota that hits backward": (World((Rank(backward=70, waited=30), Rank(), Rank())), BASE, "slow_worker", 0),
    "latency": (replace(THIN, latency_ms=30), THIN, "latency_bound", None),
    "one connection": (
        World(ms_a_mb=20, traffic=sending((50, 50, 50), window=0.75)), World(ms_a_mb=5), "one_connection", None
    ),
    "late starts": (World(late=True, ms_a_mb=4), World(ms_a_mb=4), "unused_overlap", None),
    "buffer broadcast": (World(broadcast_ms=9), BASE, "buffer_broadcast", None),
    "missing no_sync": (World(passes=4, ms_a_mb=12), World(passes=4, ms_a_mb=12), "missing_no_sync", None),
    "small buckets": (
        SMALL, World(alpha_ms=1.0), "buckets_too_small", None
    ),
    "small buckets, a slow hook": (
        replace(SMALL, alpha_ms=0.1, hook_ms=80), World(alpha_ms=0.1, hook_ms=4), "buckets_too_small", None
    ),
    "large buckets": (
        World(buckets=1, bucket_mb=8, tensors_a_bucket=32, ms_a_mb=6), World(ms_a_mb=6), "buckets_too_large", None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_first_where_it_is_and_its_gain_is_right(name: str) -> None:
    world, mended, kind, rank = CAUSES[name]
    found = diagnose(world.flights())
    assert not found.clean
    first = found.findings[0]
    assert (first.kind, first.rank) == (kind, rank), str(found)
    assert first.host == (None if rank is None else f"host{rank}")
    assert 0 < first.confidence <= 1
    assert first.remedy
    if kind != "missing_no_sync":
        gain = found.step_us - mended.step_us
        assert abs(first.gain_us - gain) <= max(0.15 * gain, 0.03 * found.step_us), (first.gain_us, gain, str(found))


@pytest.mark.parametrize(
    "world",
    [
        World(),
        World(EVEN[:2]),
        World(ms_a_mb=30),
        World(compressed=True),
        World(observed=True),
        World(ms_a_mb=0.1),
        World(noise=0.2),
        World(disturbed=32),
        World(ahead_s=3.0),
        World(traffic=sending((110, 125, 118))),
        World((Rank(),)),
    ],
)
def test_a_clean_run_is_clean(world: World) -> None:
    found = diagnose(world.flights())
    assert found.clean, str(found)
    assert "Nothing to mend" in str(found)


def test_a_slow_host_is_named_where_none_of_its_ranks_is_always_the_last() -> None:
    slow = Rank(forward=40, backward=80)
    of_two = World((Rank(), Rank(), slow, slow), ranks_a_host=2)
    (found,) = diagnose(of_two.flights()).findings
    assert (found.kind, found.rank, found.host) == ("slow_worker", None, "host1")
    assert found.gain_us == pytest.approx(60_000, rel=0.1)
    assert "every rank on host1" in found.remedy
    assert "slow worker on host host1" in str(diagnose(of_two.flights()))
    slower = Rank(forward=41, backward=82)  # is always the last, and without it next to nothing is gained
    (found,) = diagnose(World((Rank(), Rank(), slow, slower), ranks_a_host=2).flights()).findings
    assert (found.rank, found.host) == (None, "host1")
    (found,) = diagnose(World((Rank(), Rank(), slow, Rank()), ranks_a_host=2).flights()).findings
    assert (found.rank, found.host) == (2, "host1"), "one of its ranks"
    for ranks, per_host in ((4, 2), (6, 3), (4, 3)):  # the last: three ranks and one
        even = World((Rank(),) * ranks, ranks_a_host=per_host)
        assert diagnose(even.flights()).clean
        assert _Case(Run(even.flights()))._late_ones() == []


def test_of_a_ring_one_rank_of_a_host_says_how_fast_its_card_is() -> None:
    """What the others have on the way off their host, round trips of the clock and barriers, is next to nothing."""
    rates = (444.0, 444.0, 444.0, 444.0)

    def ring(rank: int) -> tuple[Traffic, ...]:
        first, last = sending(rates)(rank)
        if rank == 2:  # the ring goes on inside of its host
            last = last._replace(num_bytes=first.num_bytes + 2000, busy_us=first.busy_us + 4000.0)
        return (first, last) if rank else ()

    world = World((Rank(),) * 4, ms_a_mb=15, ranks_a_host=2, traffic=ring)
    assert "thin_card" not in [finding.kind for finding in diagnose(world.flights()).findings]


@pytest.mark.parametrize(
    ("world", "bound", "advice"),
    [
        (World(), "compute", "compressing gradients would bring next to nothing"),
        (World(ms_a_mb=8), "compute", "of it waits for averages"),
        (World((Rank(input=240),) * 3, ms_a_mb=8), "input", "of it waits for averages"),
        (World((Rank(input=600),) * 3), "input", "next to nothing"),
        (World(ms_a_mb=30), "network", "of it waits for averages"),
    ],
)
def test_a_clean_step_is_bound_by_what_takes_most_of_it(world: World, bound: str, advice: str) -> None:
    found = diagnose(world.flights())
    assert found.clean, str(found)
    assert found.bound == bound
    assert f"A step is bound by {bound}; " in str(found)
    assert advice in str(found)


def test_where_all_connections_wait_for_who_wakes_no_card_is_thin() -> None:
    world = replace(SMALL, traffic=sending([61, 60, 62]), cards=(444, 444, 444))
    findings = diagnose(world.flights()).findings
    kinds = [finding.kind for finding in findings]
    assert kinds[0] == "buckets_too_small"
    assert "thin_card" not in kinds
    assert findings[0].gain_us == pytest.approx(world.step_us - World(alpha_ms=1.0).step_us, rel=0.15)


def test_a_faster_card_frees_what_exchanges_held_together() -> None:
    costs = costs_of(Run(BASE.flights()))
    uneven = replace(costs, task_us=tuple(us * (0.1, 1.9)[i % 2] for i, us in enumerate(costs.task_us)))
    freed = [sum(each.task_us) - sum(each.at_rate(444, 888).task_us) for each in (costs, uneven)]
    assert freed == pytest.approx([sum(costs.sent) / 888] * 2, rel=0.02)


def test_a_devices_host_says_nothing_of_broadcasts() -> None:
    """It launches them, and runs ahead."""
    flights = World(broadcast_ms=9).flights()
    assert "buffer_broadcast" in [finding.kind for finding in diagnose(flights).findings]
    there = [replace(f, stretches=tuple(replace(s, host_copies=True) for s in f.stretches)) for f in flights]
    assert "buffer_broadcast" not in [finding.kind for finding in diagnose(there).findings]


def test_shifted_clocks_change_nothing() -> None:
    for change in ({}, {"compressed": True}):
        here, apart = (diagnose(World(ahead_s=s, broadcast_ms=9, **change).flights()) for s in (0.0, 12.0))
        assert [(f.kind, round(f.gain_us, -2)) for f in here.findings] == [
            (f.kind, round(f.gain_us, -2)) for f in apart.findings
        ]


@pytest.mark.parametrize("world", [World(), World(ms_a_mb=20), World(compressed=True), World(noise=0.3)])
def test_recorded_steps_replay(world: World) -> None:
    run = Run(world.flights())
    costs = costs_of(run)
    for turn in run.turns:
        assert abs(replay(turn, costs) / turn.measured - 1) < 0.02


def test_backward_is_shorter_by_what_exchanges_took_of_its_core() -> None:
    run = Run(World(beside_ms=8).flights())
    turn, costs = run.turns[0], costs_of(run)
    alone = shared(turn, costs, turn, costs.idle())
    for before, after in zip(turn.parts, alone.parts, strict=True):
        assert before.backward - after.backward == pytest.approx(7 * MS, rel=0.05)  # all but the last of eight
    assert shared(turn, costs, turn, costs) == turn
    free = costs_of(Run(World().flights()))  # other cores carry them out
    assert shared(turn, free, turn, free.idle()) == turn


def test_what_is_hidden_is_measured_and_predicted() -> None:
    fast, slow = diagnose(World().flights()), diagnose(World(ms_a_mb=30).flights())
    for found in (fast, slow):
        assert found.overlap == pytest.approx(found.overlap_predicted, abs=0.02)
    assert fast.overlap == pytest.approx(1 - 3.1 / 24.8, abs=0.02)
    assert slow.overlap is not None
    assert slow.overlap < 0.2


def test_steps_of_which_only_the_exchange_was_seen() -> None:
    """The module was gone when the recorder looked for it, or the job ran on a GPU."""
    worlds = {"": World(), "slow_worker": World((Rank(), Rank(forward=40, backward=80)))}
    for kind, world in worlds.items():
        flights = [
            replace(flight, steps=tuple(replace(step, script=Script()) for step in flight.steps))
            for flight in world.flights()
        ]
        found = diagnose(flights)
        assert [finding.kind for finding in found.findings] == ([kind] if kind else []), str(found)


def test_too_little_says_so() -> None:
    flights = World().flights()
    with pytest.raises(FlightError, match="too few steps"):
        diagnose([replace(flight, steps=flight.steps[-1:]) for flight in flights])
    with pytest.raises(FlightError, match="no steps"):
        diagnose([replace(flight, steps=()) for flight in flights])
    assert diagnose(flights[:2]).num_ranks == 3  # a rank's file is missing


def test_steps_in_which_ranks_ran_unlike_things_say_nothing() -> None:
    first, second, third = World().flights()
    for other in (World(buckets=4), World(compressed=True)):
        apart = other.flights()[1]
        with pytest.raises(FlightError, match="too few steps"):
            diagnose([first, apart, third])
        late = tuple(replace(step, stretch=1) for step in second.steps[10:])
        both = replace(second, stretches=(*apart.stretches, *second.stretches), steps=(*apart.steps[:10], *late))
        run = Run([first, both, third])
        assert run.turns[0].number > 10
        assert diagnose(run.flights).clean


def test_a_job_that_has_just_gone_on_to_something_else_is_told_by_what_it_ran_before() -> None:
    flights, others = World().flights(), World(compressed=True).flights()
    before = diagnose(flights)
    changed = [
        replace(
            flight,
            stretches=(*flight.stretches, *other.stretches),
            steps=(*flight.steps[:-1], replace(flight.steps[-1], stretch=1)),
        )
        for flight, other in zip(flights, others, strict=True)
    ]
    run = Run(changed)
    assert run.stretch == flights[0].stretches[0]
    assert run.turns[-1].number == flights[0].steps[-2].number
    assert diagnose(changed).clean == before.clean


def test_a_job_that_raced_is_told_by_what_won() -> None:
    """Plain steps ran between others, and the newest are plain."""
    flights, others = World().flights(), World(compressed=True).flights()
    raced = []
    for flight, other in zip(flights, others, strict=True):
        first = tuple(replace(step, stretch=1) for step in other.steps[:5])
        second = tuple(replace(step, stretch=2) for step in other.steps[10:20])
        steps = (*first, *flight.steps[5:10], *second, *flight.steps[20:])
        raced.append(replace(flight, stretches=(*flight.stretches, *2 * other.stretches), steps=steps))
    run = Run(raced)
    assert run.stretch == flights[0].stretches[0]
    assert run.turns[-1].number == flights[0].steps[-1].number


# -- the command -----------------------------------------------------------------------------------------


def saved(world: World, folder: Path) -> Diagnosis:
    flights = world.flights()
    for flight in flights:
        flight.save(folder / f"flight-{flight.rank:05d}.json")
    return diagnose(flights)


def test_the_command_says_it_to_people_and_to_programs(tmp_path: Path) -> None:
    found = saved(CAUSES["slow input"][0], tmp_path)
    trace, plot = tmp_path / "out.trace", tmp_path / "out.png"
    shown = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--trace", str(trace), "--plot", str(plot)])
    assert shown.exit_code == 0, shown.output
    assert "1. slow input on rank 1, host host1" in shown.output
    assert len(shown.output.splitlines()) < 24
    assert plot.stat().st_size > 1000
    body = json.loads(CliRunner().invoke(app, ["diagnose", str(tmp_path), "--json"]).stdout)
    assert body["clean"] is False
    assert set(body["findings"][0]) >= {"kind", "rank", "host", "cost_us", "gain_us", "confidence", "remedy"}
    assert body["findings"][0]["gain_us"] == pytest.approx(found.findings[0].gain_us, rel=0.01)
    wrong = CliRunner().invoke(app, ["diagnose", str(tmp_path / "nowhere")])
    assert wrong.exit_code == 1
    assert "error:" in wrong.output


def test_all_ranks_are_in_one_trace_and_rows_nest() -> None:
    body = trace_body([], flight_events(World(latency_ms=30, ahead_s=5.0).flights()))
    names = [e["args"]["name"] for e in body["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"measured host{rank}.{rank}" for rank in range(3)]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in body["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(after[0] >= before[1] - 0.01 for before, after in pairwise(spans))
    sent = [e for e in body["traceEvents"] if "allreduce" in e["name"]]
    ends = [max(e["ts"] + e["dur"] for e in sent if e["pid"] == pid) for pid in (1, 2)]
    assert abs(ends[0] - ends[1]) < 100


# -- Kineto ------------------------------------------------------------------------------------------


KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kineto(world: World, rank: int, *, logs: bool = False, lag_us: float | None = None) -> dict[str, Any]:
    """What torch.profiler would have exported, perhaps of a script that averages its loss behind the optimizer, or of
    one on a GPU that lags so far behind its host.
    """
    events = []

    def event(name: str, start: float, end: float, cat: str = "user_annotation", **args: Any) -> None:
        row = {"ph": "X", "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": 1, "args": args, "cat": cat}
        events.append(row)
        if lag_us is not None and cat == "user_annotation":
            events.append(row | {"ts": start + lag_us, "cat": "gpu_user_annotation"})

    flight = world.flights()[rank]
    for step in flight.steps:
        script = step.script
        end = script.optimizer_end_us or script.averaged_us
        assert script.began_us is not None
        assert end is not None
        event(f"ProfilerStep#{step.number}", script.began_us, end)
        event("DistributedDataParallel.forward", script.entered_us or 0, script.forward_end_us or 0)
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        event(name, script.backward_us or 0, script.backward_end_us or 0, "cpu_op")
        if script.optimizer_end_us is not None:
            event("Optimizer.step#SGD.step", script.optimizer_us or 0, script.optimizer_end_us)
            if logs:
                event("gloo:all_reduce", end - 5.0, end, **{"Input Dims": [[[1]]]})
        for span in step.spans:
            if lag_us is None:
                event("gloo:all_reduce", span.start_us, span.end_us, **{"Input Dims": [[[250_000]]]})
                continue
            told = {"In msg nelems": 250_000, "dtype": "Float", "Comms Id": 2**64 - 1}
            event("nccl:all_reduce", span.start_us, span.start_us + 20)
            event(KERNEL, span.start_us + lag_us, span.end_us + lag_us, "kernel", **told)
    return {"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": len(world.ranks)}}


@pytest.mark.parametrize("logs", [False, True])
def test_traces_of_the_profiler_are_diagnosed(tmp_path: Path, logs: bool) -> None:
    world = replace(CAUSES["slow input"][0], ahead_s=8.0)
    for rank in range(3):
        text = json.dumps(kineto(world, rank, logs=logs)).encode()
        path = tmp_path / f"rank{rank}.json"
        if rank:
            path.write_bytes(text)
        else:
            path.with_suffix(".json.gz").write_bytes(gzip.compress(text))
    found = diagnose(load_any(tmp_path))
    assert (found.findings[0].kind, found.findings[0].rank) == ("slow_input", 1)
    assert "#" not in str(found.findings[0].host), "nobody knows which ranks share a host"
    assert found.step_us == pytest.approx(world.step_us, rel=0.03)
    assert found.shares["optimizer"] > 0.02


def test_a_device_that_lags_behind_its_host_has_steps_of_its_own(tmp_path: Path) -> None:
    world = CAUSES["slow worker"][0]
    (tmp_path / "rank0.json").write_text(json.dumps(kineto(world, 0)))
    here = load_any(tmp_path)[0]
    lag_us = 0.5 * world.step_us
    for rank in range(3):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(kineto(world, rank, lag_us=lag_us)))
    flights = load_any(tmp_path)
    assert len(flights[0].steps) == len(here.steps)
    for step, same in zip(flights[0].steps, here.steps, strict=True):
        assert replace(step.script, averaged_us=0.0) == replace(same.script, averaged_us=0.0)
        assert [span.start_us - lag_us for span in step.spans] == pytest.approx([s.start_us for s in same.spans])
    found = diagnose(flights)
    assert (found.findings[0].kind, found.findings[0].rank) == ("slow_worker", 2), str(found)
    assert found.step_us == pytest.approx(world.step_us, rel=0.03)


def test_findings_name_ranks_as_the_job_does() -> None:
    """Of replicas of a shard, or of a group of some ranks."""
    flights = CAUSES["slow input"][0].flights()
    flights = [replace(one, facts={**one.facts, "group": [0, 8, 16]}) for one in flights]
    found = diagnose(flights)
    assert (found.findings[0].kind, found.findings[0].rank) == ("slow_input", 8)
    assert diagnose([flights[0], flights[2]]).missing == (8,)


def test_what_was_not_looked_at_is_named(tmp_path: Path) -> None:
    """Two replicas of four shards."""
    for shard in range(4):
        for flight in World(EVEN[:2]).flights():
            told = replace(flight, facts={**flight.facts, "group": [shard, shard + 4]})
            told.save(tmp_path / f"flight-{told.name:05d}.json")
    shown = CliRunner().invoke(app, ["diagnose", str(tmp_path)]).stdout
    assert "not looked at: ranks 1, 5; ranks 2, 6; ranks 3, 7 (other groups: give" in shown
    assert "Nothing to mend on the ranks that were looked at." in shown
    body = json.loads(CliRunner().invoke(app, ["diagnose", str(tmp_path), "--json"]).stdout)
    assert (body["clean"], body["missing"], body["other_groups"]) == (True, [], [[1, 5], [2, 6], [3, 7]])


@pytest.mark.parametrize("name", ["small buckets", "large buckets", "missing no_sync", "latency"])
def test_remedies_are_of_what_sends_the_gradients(name: str) -> None:
    flights = CAUSES[name][0].flights()
    for is_sharded in (False, True):
        told = [replace(one, facts={**one.facts, "sharded": is_sharded}) for one in flights]
        remedy = diagnose(told).findings[0].remedy
        assert any(word in remedy for word in ("bucket_cap_mb", "no_sync")) is not is_sharded, remedy
        assert any(word in remedy for word in ("fully_shard", "set_requires")) is is_sharded, remedy


def test_a_card_that_has_become_thin_is_found_however_long_the_job_ran_well() -> None:
    def traffic(rank: int) -> tuple[Traffic, ...]:
        before, now = 10**11 / 444, 10**8 / (89 if rank == 1 else 444)
        return (
            Traffic(-1e9, 0, 0.0, 0.0, 90.0), Traffic(0.9e6, 10**11, before, 0.0, 90.0),
            Traffic(9e6, 10**11 + 10**8, before + now, 0.0, 90.0),
        )  # fmt: skip

    found = diagnose(World(ms_a_mb=15, traffic=traffic).flights())
    assert (found.findings[0].kind, found.findings[0].rank) == ("thin_card", 1)


def test_ranks_that_left_no_record_are_named(tmp_path: Path) -> None:
    for rank in (0, 2):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(kineto(World(), rank)))
    found = diagnose(load_any(tmp_path))
    assert found.missing == (1,)
    assert "no record of rank 1: what is slow there is not seen" in str(found)
    assert "Nothing to mend on the ranks that were looked at." in str(found)
    (tmp_path / "rank3.json.gz").write_bytes(gzip.compress(b"{}" * 9999)[:-9])
    with pytest.raises(FlightError, match=r"rank3\.json\.gz: cannot be unpacked"):
        load_any(tmp_path)
    (tmp_path / "rank3.json.gz").write_bytes(gzip.compress(b"[]")[:-6] + b"rotten")
    with pytest.raises(FlightError, match=r"rank3\.json\.gz: cannot be unpacked"):
        load_any(tmp_path)


def test_traces_that_we_wrote_are_no_ranks(tmp_path: Path) -> None:
    """What led to decisions, of a job that still runs; all ranks on one clock, beside the traces it was made from."""
    write_history(tmp_path / "history.json", [])
    with pytest.raises(FlightError, match="holds no flight records"):
        load_any(tmp_path)
    for rank in range(3):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(kineto(World(), rank)))
    for _ in range(2):
        shown = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--trace", str(tmp_path / "all.json")])
        assert shown.exit_code == 0, shown.output
        assert "3 ranks" in shown.output


@pytest.mark.parametrize(
    "body",
    [[], {}, {"traceEvents": 3}, {"traceEvents": [1, {"ph": "X", "name": 2}]}],
    ids=["list", "empty", "no", "odd"],
)
def test_what_is_no_trace_is_refused(body: Any) -> None:
    with pytest.raises(FlightError):
        flight_of(body)
