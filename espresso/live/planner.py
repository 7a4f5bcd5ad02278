"""Which strategy each iteration runs: a given one, or one that is measured, searched for, and raced.

Planners are state machines over the iteration count, which is the same on every rank, so all ranks make
the same moves. What needs an exchange (measuring links, comparing step times) is returned from ``after``
and runs while every rank is inside the same hook call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from espresso.comm.execute.executor import Assignment, Record
from espresso.comm.groups import Groups
from espresso.compressors.schedule import translate
from espresso.strategies import Bucket, CompressorSpec, Strategy, plan
from espresso.strategies.list_scheduling import list_order

logger = logging.getLogger("espresso")

Work = Callable[[], None]

InForce = Mapping[CompressorSpec, CompressorSpec]
"""For every compressor as given the one that runs."""

NOISE = 1.02
"""Arms this close to the fastest count as equally fast."""


def _num_compressions(strategy: Strategy) -> int:
    """Lossy encodes a gradient goes through, over all tensors: the less, the closer to plain training."""
    return sum(choice.option.num_compressions for choice in strategy.choices.values())


class Orderer:
    """Runs one strategy, in plain order until the bucket structure is known, then list-scheduled.

    The durations are those of the tasks of one recorded iteration on rank 0, whose order all ranks take.
    """

    def __init__(self, strategy: Strategy, groups: Groups) -> None:
        self.strategy = strategy
        self._groups = groups
        self._plain = Assignment(strategy, record=not strategy.only_averages)
        self._planned: Assignment | None = None
        self._last: tuple[Bucket, ...] = ()

    @property
    def assignment(self) -> Assignment:
        return self._planned or self._plain

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to order."""
        return self._planned is not None or self.strategy.only_averages

    def note(self, record: Record) -> Work | None:
        """Take note of an iteration of this strategy; returns the ordering when it is time for it."""
        same, self._last = record.buckets == self._last, record.buckets
        if self._planned is not None:
            if record.buckets != self._planned.buckets:
                logger.info("the bucket structure changed; back to plain order until it is stable again")
                self._planned = None
            return None
        if not same or self.settled or not record.finite or record.assignment is not self._plain:
            return None
        return lambda: self._schedule(record)

    def _schedule(self, record: Record) -> None:
        order = None
        laid = plan(self.strategy, record.buckets, host_copies=self._groups.host_copies)
        if self._groups.rank == 0:
            begin = record.ready_ns[0]
            ready = [(ns - begin) / 1e3 for ns in record.ready_ns]
            duration = [0.0] * len(laid.tasks)
            for interval in record.intervals:
                duration[interval.task] = (interval.end_ns - interval.start_ns) / 1e3
            order = list_order(laid, ready, duration)
        order = self._groups.from_rank_0(order)
        self._planned = Assignment(self.strategy, order, record.buckets, record=True)


class Search(Protocol):
    """Finds candidates from the observed iterations; collective, rank 0 decides."""

    def __call__(self, records: Sequence[Record]) -> list[Candidate]: ...

    def follow(self, in_force: InForce) -> bool:
        """Whether this makes the compressor it searches for another one."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A strategy that may race against plain.

    Attributes:
        order: its total order for ``buckets``.
        predicted_us: of an iteration.
    """

    name: str
    strategy: Strategy
    order: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    predicted_us: float

    @property
    def assignment(self) -> Assignment:
        return Assignment(self.strategy, self.order, self.buckets, record=True)


@dataclass
class Verdict:
    """What automatic mode decided, and why."""

    name: str
    reason: str
    measured_us: dict[str, float] = field(default_factory=dict)
    predicted_us: dict[str, float] = field(default_factory=dict)


class FixedPlanner:
    """Always the same strategy, but for compressors that change with step or epoch."""

    def __init__(self, strategy: Strategy, groups: Groups, in_force: InForce | None = None) -> None:
        self._given, self._groups = strategy, groups
        self.verdict = Verdict("given", "the strategy was given")
        self.follow(in_force or {})

    def follow(self, in_force: InForce) -> None:
        """Run the same options with these compressors, from the iteration on that is about to be assigned."""
        self._orderer = Orderer(translate(self._given, in_force), self._groups)

    @property
    def decided(self) -> bool:
        return True

    @property
    def strategy(self) -> Strategy:
        return self._orderer.strategy

    def assign(self, iteration: int) -> Assignment:
        """What this iteration runs; must not block."""
        return self._orderer.assignment

    def after(self, record: Record) -> Work | None:
        """Take note of an iteration; what is returned runs while every rank is inside the same hook call."""
        return self._orderer.note(record)


class AutoPlanner:
    """Warm up, profile, search, race the best candidates against plain, keep the fastest.

    ::

        iteration   0 ... w | w ... w+p      | w+p ... | ... decide_by                | then
        runs        plain   | plain, deferred| plain   | plain, A, B, B, A, plain ... | the winner

    The race begins as late as it may: gradients change most in the first steps of a training, and what compression does
    to them stays in an optimizer's second moments for long (``docs/convergence.md``).

    Args:
        plain: the uncompressed strategy.
        search: see :class:`Search`; called once, after the profiled iterations.
        decide_by: iterations after which the race should be over; it follows the profile at once where it is longer.
        on_profile: told True before the first profiled iteration and False after the last.
        profile_only: measure, and stay plain.
    """

    def __init__(
        self,
        plain: Strategy,
        groups: Groups,
        search: Search,
        *,
        warmup_steps: int,
        profile_steps: int,
        race_steps: int,
        race_rounds: int,
        decide_by: int,
        on_profile: Callable[[bool], None],
        profile_only: bool = False,
    ) -> None:
        self._groups, self._search, self._on_profile = groups, search, on_profile
        self._profile_steps, self._race_steps, self._race_rounds = profile_steps, race_steps, race_rounds
        self._profile_only, self._decide_by = profile_only, decide_by
        self._plain = Orderer(plain, groups)
        self._deferred = Assignment(plain, deferred=True)
        self._winner: Orderer | None = None
        self._winning: Assignment | None = None
        self._profile_from = warmup_steps
        self._first: int | None = None
        self._observed: list[Record] = []
        self._race: list[tuple[str, Assignment]] = []
        self._pause = 0
        self._candidates: list[Candidate] = []
        self._steps_us: dict[str, list[float]] = {}
        self._before: tuple[str, int] = ("", 0)
        self._turn = 0
        self._restarts = 0
        self._again = False
        self.verdict: Verdict | None = None

    @property
    def decided(self) -> bool:
        return self.verdict is not None

    @property
    def strategy(self) -> Strategy:
        """The strategy in use once decided, until then the plain one."""
        return self._plain.strategy if self._winner is None else self._winner.strategy

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(self._candidates)

    def assign(self, iteration: int) -> Assignment:
        if self._winner is not None:
            return self._winning or self._winner.assignment
        if self._race:  # plain comes first, also while it pauses
            return self._race[self._turn][1]
        if self._again:
            return replace(self._plain.assignment, drain=False)
        # Iterations are numbered through the life of a job; one that was resumed before it decided starts here.
        if self._first is None:
            self._first = iteration
            self._say("automatic mode: %d steps of warm-up, then %d measured", self._profile_from, self._profile_steps)
        iteration -= self._first
        if iteration < self._profile_from:
            return self._plain.assignment
        if iteration == self._profile_from:
            self._on_profile(True)
        self._pause = self._decide_by - iteration - 1
        return self._deferred

    def follow(self, in_force: InForce) -> None:
        """Search and race again if it makes another compressor of the one searched for.

        The job is measured already; while it is not, the search to come will find the new compressor.
        """
        if not self._search.follow(in_force) or (self._winner is None and not self._race):
            return
        self._winner, self._winning, self.verdict = None, None, None
        self._race, self._candidates, self._turn, self._pause = [], [], 0, 0
        self._steps_us, self._before = {}, ("", 0)
        self._again = True

    def after(self, record: Record) -> Work | None:
        if self._again:
            return self._find_candidates
        if self._winner is not None:
            return self._after_decision(record)
        if self._race:
            return self._after_race(record)
        if record.assignment is self._deferred:
            return self._after_profile(record)
        return None

    def _say(self, text: str, *values: object) -> None:
        """Log progress, once for all ranks."""
        if self._groups.rank == 0:
            logger.info(text, *values)

    # -- profiling -------------------------------------------------------------------------------

    def _after_profile(self, record: Record) -> Work | None:
        if self._observed and record.buckets != self._observed[-1].buckets and self._restarts < 2:
            logger.info("the bucket structure changed while profiling; starting over")
            self._observed.clear()
            self._restarts += 1
        self._observed.append(record)
        if len(self._observed) < self._profile_steps:
            return None
        self._on_profile(False)
        return self._find_candidates

    def _find_candidates(self) -> None:
        self._again = False
        self._say("automatic mode measures links and compressors, and searches; this step takes longer")
        candidates = self._search(self._observed)
        if self._profile_only:
            self._decide("plain", "profile only: the job was measured, nothing is compressed")
            return
        if not candidates:
            self._decide("plain", "no strategy is predicted to be faster than plain allreduce")
            return
        self._candidates = candidates
        arms = [("plain", replace(self._plain.assignment, drain=False))] + [(c.name, c.assignment) for c in candidates]
        for turn in range(self._race_rounds):
            for name, assignment in arms if turn % 2 == 0 else reversed(arms):
                self._race += [(name, assignment)] * self._race_steps
        self._pause = max(0, self._pause - len(self._race))
        names, steps = ", ".join(name for name, _ in arms), len(self._race)
        self._say("automatic mode races %s in %d steps, after %d more plain ones", names, steps, self._pause)

    # -- racing ----------------------------------------------------------------------------------

    def _after_race(self, record: Record) -> Work | None:
        if self._pause:
            self._pause -= 1
            return None
        name, _ = self._race[self._turn]
        before, self._before = self._before, (name, record.done_ns)
        if before[0] == name and self._turn % self._race_steps > 0:
            self._steps_us.setdefault(name, []).append((record.done_ns - before[1]) / 1e3)
        self._turn += 1
        if self._turn < len(self._race):
            return None
        self._turn -= 1
        return self._judge

    def _judge(self) -> None:
        """Compare the slowest rank's medians; of arms within the noise the one that compresses least wins."""
        medians = {name: median(values) for name, values in self._steps_us.items()}
        everybody = self._groups.all_objects(medians)
        measured = {name: max(m[name] for m in everybody) for name in medians}
        losses = {"plain": 0} | {c.name: _num_compressions(c.strategy) for c in self._candidates}
        limit = min(measured.values()) * NOISE
        best = min((n for n in measured if measured[n] <= limit), key=lambda n: (losses[n], measured[n]))
        times = ", ".join(f"{name} {us / 1e3:.1f} ms" for name, us in measured.items())
        pays = "compression does not pay here" if best == "plain" else "measured in alternated blocks"
        self._decide(best, f"{pays}: {times} a step", measured)

    def _decide(self, name: str, reason: str, measured: dict[str, float] | None = None) -> None:
        chosen = next((c for c in self._candidates if c.name == name), None)
        self._winner = self._plain if chosen is None else Orderer(chosen.strategy, self._groups)
        if chosen is not None:
            self._winning = next(a for n, a in self._race if n == name)
        predicted = {c.name: c.predicted_us for c in self._candidates}
        self.verdict = Verdict(name, reason, measured or {}, predicted)
        self._race = []
        self._say("automatic mode decided: %s (%s)", name, reason)

    def _after_decision(self, record: Record) -> Work | None:
        assert self._winner is not None
        if self._winning is not None and record.buckets != self._winning.buckets:
            self._winning = None
        return None if self._winning is not None else self._winner.note(record)


Decider = FixedPlanner | AutoPlanner
"""Says which strategy each iteration runs, whether it is settled (``decided``), and why (``verdict``)."""
