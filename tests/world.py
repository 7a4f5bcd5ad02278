"""A made-up job for planners: its steps take what a test says, and its search finds what a test says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.exchange import make_buckets, strategy_of
from espresso.comm.execute.assignment import Interval, Record
from espresso.live.candidates import Candidate, Moved
from espresso.live.change import Cause, Change
from espresso.live.fixed_planner import FixedPlanner
from espresso.live.history import History
from espresso.live.planner import AutoPlanner
from espresso.strategies import PLAIN, Bucket, Choice, Cluster, CompressorSpec, Lane, Strategy, parse_option, plan
from tests.ddp import ALLGATHER

BUCKETS, IN_ONE = make_buckets({"a": 3000}, {"b": 3000}), make_buckets({"a": 3000, "b": 3000})
TWO = Cluster(2, 1)
COMPUTE_US, CODEC_US, FINER_US = 10_000.0, 6_000.0, 4_000.0
SIGNS = strategy_of(BUCKETS, TWO, Choice(parse_option(ALLGATHER), CompressorSpec.parse("efsignsgd")))
SIGNS_ONCE_MORE = SIGNS.with_choices({"b": PLAIN})


class Rows:
    """A gather of one rank."""

    def __init__(self, mine: torch.Tensor, took_us: float = 0.0) -> None:
        self._mine, self.took_us = mine, took_us
        self.is_done = True

    def rows(self) -> torch.Tensor:
        return self._mine[None]


@dataclass
class OneRank:
    """What a planner asks of groups.

    Attributes:
        sounds_us: what a short exchange takes.
        soundings: how often it was looked at.
    """

    rank, ranks, num_ranks, host_copies, speaks, beside = 0, (0,), 1, False, True, None
    sounds_us: float = 20_000.0
    soundings: int = 0

    def all_objects(self, value: Any) -> list[Any]:
        return [value]

    everywhere = all_objects

    def from_rank_0(self, value: Any) -> Any:
        return value

    def start_gather(self, mine: torch.Tensor, *, timed: bool = False) -> Rows:
        self.soundings += timed
        return Rows(mine, self.sounds_us if timed else 0.0)


@dataclass
class World:
    """A job whose plain exchange takes ``plain_us`` and whose compressed one a fifteenth, beside its encoders.

    Attributes:
        finds: what the search finds where it pays.
        promises: so many times what it will take.
        when_measured_us: ``plain_us`` from the moment on in which the link is measured again; 0: the same.
        switch_us: what the first step of another strategy takes beyond the rest.
        runs: the strategy of the last step.
        bucket_cap_mb: the size of buckets that the search wants.
        wants: that it would want from the moment on in which the link is measured again.
        rests: exchanges that are free after the pause in which it is measured.
        sent_us: what all that is sent takes for long.
        known_us: ``plain_us`` when it was measured last.
        over: so many times what it may owe every strategy but ``within`` owes, which takes longer.
        groups: of the planner.
    """

    plain_us: float = 1_000.0
    compute: float = 1.0
    noise: float = 0.02
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    changes: list[Change] = field(default_factory=list)
    searches: int = 0
    finds: Strategy = SIGNS
    promises: float = 1.0
    when_measured_us: float = 0.0
    switch_us: float = 0.0
    runs: Strategy | None = None
    buckets: tuple[Bucket, ...] = BUCKETS
    bucket_cap_mb: float | None = None
    wants: float | None = None
    laid: list[float] = field(default_factory=list)
    rests: int = 0
    sent_us: float = 0.0
    free: int = 0
    put_away: int = 0
    why_none: str = ""
    in_force: Any = field(default_factory=dict)
    groups: OneRank = field(default_factory=OneRank)
    known_us: float = 0.0
    over: float = 0.0
    within: Strategy | None = None

    def lay(self, bucket_cap_mb: float) -> bool:
        self.laid.append(bucket_cap_mb)
        self.buckets, self.bucket_cap_mb, self.wants = IN_ONE, None, None
        return True

    def exchange_us(self, strategy: Strategy) -> float:
        if not strategy.compresses:
            return self.plain_us
        return self.plain_us / 15 + CODEC_US + (FINER_US if strategy == self.within else 0.0)

    def step_us(self, strategy: Strategy) -> float:
        return COMPUTE_US * self.compute + self.exchange_us(strategy)

    # -- the search --

    @property
    def uncompressed_us(self) -> float:
        return COMPUTE_US + self.plain_us

    def __call__(self, records: Any) -> list[Candidate]:
        self.searches, self.known_us = self.searches + 1, self.plain_us
        assert not records or records[-1].buckets == self.buckets
        found = self.promises * (COMPUTE_US + self.plain_us / 15 + CODEC_US)
        # Predictions are no better than that: what is close is raced.
        if found > 1.4 * self.uncompressed_us:
            return []
        return [Candidate("signs", self.finds, plan(self.finds, self.buckets).order, self.buckets, found)]

    @property
    def is_measured(self) -> bool:
        """As of a real one."""
        return self.searches > 0

    def spread(self, records: Any) -> float:
        return 0.0

    def follow(self, in_force: Any) -> bool:
        before, self.in_force = self.in_force, in_force
        return bool(in_force != before)

    def revise(self, change: Change, in_use: object = None) -> Moved:
        self.changes.append(change)
        self.plain_us = self.when_measured_us or self.plain_us
        before_us, self.known_us = self.known_us or self.plain_us, self.plain_us
        self.bucket_cap_mb, self.free = self.wants, self.rests
        link, compute = self.plain_us / before_us, change.ratio(Cause.COMPUTE, Cause.JOB) or 1.0
        return Moved(link, max(abs(math.log(link)), abs(math.log(compute))))

    def before_trying(self) -> None:
        self.free = 0

    def after_trying(self) -> None:
        self.put_away += 1

    def over_budget(self, strategy: Strategy) -> float:
        return 0.0 if strategy in (self.within, None) or not strategy.compresses else self.over

    def foresees(self, strategy: Strategy) -> tuple[float, float]:
        return self.step_us(strategy), self.sent_us

    # -- the job --

    def record(self, step: int, planner: AutoPlanner | FixedPlanner, now_ns: float) -> Record:
        assignment = planner.assign(step)
        jitter = np.exp(self.noise * self.random.standard_normal(2))
        compute, exchange = COMPUTE_US * self.compute * jitter[0], self.exchange_us(assignment.strategy) * jitter[1]
        if self.runs is not None and self.runs is not assignment.strategy:
            exchange += self.switch_us
        self.runs = assignment.strategy
        if self.free:
            self.free, exchange = self.free - 1, 0.0
        ready = now_ns + compute * 1e3
        done = ready + exchange * 1e3
        record = Record(step, assignment, ready_ns=[int(ready)], done_ns=int(done), buckets=self.buckets)
        if assignment.strategy.compresses:
            codec = CODEC_US * 1e3 * jitter[1]
            record.intervals = [
                Interval(0, Lane.TRAINING, int(ready), int(ready + codec)),
                Interval(1, Lane.INTER_OUT, int(ready + codec), int(done)),
            ]
        return record


def run(
    world: World, planner: AutoPlanner | FixedPlanner, steps: range, at: dict[int, Callable[[], None]], now_ns: int = 0
) -> int:
    for step in steps:
        at.get(step, lambda: None)()
        record = world.record(step, planner, now_ns)
        now_ns = record.done_ns
        work = planner.after(record)
        if work is not None:
            work()
    return now_ns


def planner_of(world: World, *, adapt: bool = True, decide_by: int = 20, compresses_from: int = 0) -> AutoPlanner:
    return AutoPlanner(
        strategy_of(BUCKETS, TWO, PLAIN), world.groups, world, warmup_steps=3, profile_steps=2, race_steps=3,
        race_rounds=2, decide_by=decide_by, on_profile=lambda _: None, history=History(True), adapt=adapt,
        lay_buckets=world.lay, compresses_from=compresses_from,
    )  # fmt: skip


def rows_of(planner: AutoPlanner) -> list[tuple[int, str, str]]:
    return [(row["step"], row["event"], row["strategy"]) for row in planner.history.rows]
