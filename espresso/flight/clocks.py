"""Ranks on one clock: rank 0's.

Two things tell how far a clock is ahead. Round trips (:class:`~espresso.flight.form.Tick`): an answer that came back
within 100 us was written at a moment known to 50. And collectives that end on all ranks together: where there were no
round trips, or none since long, they do. A clock drifts, so between ticks it is interpolated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from espresso.flight.form import Flight, Tick

MOST_DRIFT = 1e-3
"""Microseconds a microsecond: no clock of a computer drifts so much; what says so is noise."""

SURE_US = 100.0
"""Ticks with a larger error give way to collectives, where there are some."""

LEAST_ENDS = 8
"""Steps whose ends are compared, at least."""


def tick_of(trips: Sequence[tuple[float, float, float]]) -> Tick:
    """What round trips tell: (sent on our clock, answered on rank 0's, back on ours). The shortest knows most.

    >>> tick_of([(1000.0, 40.0, 1020.0), (2000.0, 1100.0, 2200.0)])
    Tick(at_us=1010.0, ahead_us=970.0, error_us=10.0)
    """
    sent, answered, back = min(trips, key=lambda trip: trip[2] - trip[0])
    middle = (sent + back) / 2
    return Tick(middle, middle - answered, (back - sent) / 2)


@dataclass(frozen=True)
class Clock:
    """A rank's clock against rank 0's: knots of (our time, how far ahead), rising in time; none: the same clock."""

    knots: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, ticks: Sequence[Tick]) -> Clock:
        return cls(tuple(sorted((tick.at_us, tick.ahead_us) for tick in ticks)))

    def common(self, at_us: float) -> float:
        """Rank 0's clock at a moment of ours: linear between knots, and beyond them with the slope of all."""
        return at_us - self._ahead(at_us)

    def _ahead(self, at_us: float) -> float:
        knots = self.knots
        if len(knots) < 2:
            return knots[0][1] if knots else 0.0
        (first, low), (last, high) = knots[0], knots[-1]
        slope = (high - low) / (last - first) if last > first else 0.0
        slope = min(max(slope, -MOST_DRIFT), MOST_DRIFT)
        if at_us <= first:
            return low + slope * (at_us - first)
        if at_us >= last:
            return high + slope * (at_us - last)
        right = bisect_right(knots, at_us, key=lambda knot: knot[0])
        (x0, y0), (x1, y1) = knots[right - 1], knots[right]
        return y0 + (y1 - y0) * (at_us - x0) / (x1 - x0)


def align(flights: Sequence[Flight]) -> dict[int, Clock]:
    """A clock for every rank: by its ticks where they are sure and not too old, else by the ends of collectives.

    >>> align([])
    {}
    """
    if not flights:
        return {}
    first = min(flights, key=lambda flight: flight.rank)
    ends = _ends(first)
    clocks = {}
    for flight in flights:
        # One that was taken while a rank was held up says less than no tick at all, where others are sure.
        is_sure = flight is not first and _is_sure(flight)
        ticked = Clock.of([tick for tick in flight.ticks if not is_sure or tick.error_us <= SURE_US])
        if flight is first or is_sure:
            clocks[flight.rank] = ticked
        else:
            clocks[flight.rank] = _by_ends(flight, ends, Clock.of(first.ticks)) or ticked
    return clocks


def _is_sure(flight: Flight) -> bool:
    """Whether round trips tell enough: short ones, on both sides of the steps or nearly."""
    ticks = [tick for tick in flight.ticks if tick.error_us <= SURE_US]
    if len(ticks) < 2 or not flight.steps:
        return False
    begin, end = flight.steps[0].done_us, flight.steps[-1].done_us
    covered = min(ticks[-1].at_us, end) - max(ticks[0].at_us, begin)
    return covered >= 0.5 * (end - begin) or end - ticks[-1].at_us < ticks[-1].at_us - ticks[0].at_us


def _ends(flight: Flight) -> Mapping[int, float]:
    """When the last exchange of each step ended on a rank."""
    return {step.number: step.done_us for step in flight.steps}


def _by_ends(flight: Flight, ends: Mapping[int, float], reference: Clock) -> Clock | None:
    """What the ends of the steps' exchanges tell: the middle of each half of them, so that drift is seen."""
    pairs = sorted((step.done_us, reference.common(ends[step.number])) for step in flight.steps if step.number in ends)
    if len(pairs) < LEAST_ENDS:
        return None
    half = len(pairs) // 2
    knots = []
    for part in (pairs[:half], pairs[half:]):
        knots.append((median(ours for ours, _ in part), median(ours - theirs for ours, theirs in part)))
    if any(after[0] <= before[0] for before, after in pairwise(knots)):
        return None
    return Clock(tuple(knots))
