"""Local search at one partition size, guided by the certificate's linear program.

The dual ascent (:mod:`espresso.search.bounds`) gives every unit the few leaves that are cheapest under its weights,
mixed devices and partial offload included, and fractions that say how often each should be used. Their rounding and
the best strategies known are then searched locally: single units in order of release, and blocks of one size
(:mod:`espresso.search.local_search_kernels`). Single moves alone stall, since F is a maximum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from espresso.model.arrays import Reals, Wholes
from espresso.search.bound_kernels import shortlist
from espresso.search.bounds import Certificate, fees, prices
from espresso.search.budgets import ROUNDING, Ledger
from espresso.search.candidates import grouped
from espresso.search.evaluator import Evaluator
from espresso.search.local_search_kernels import Losses, blocks, keep_to_budgets, spread, sweep, together
from espresso.search.relaxation import Relaxation

_STRIDES = (1, 2, 3, 4, 6, 8)
_WINDOWS = ((0, 8), (0, 4), (4, 8), (6, 8), (0, 2), (7, 8), (2, 6))


def _patterns() -> Wholes:
    rows = [(q, offset, 0, 8) for q in _STRIDES for offset in sorted({0, q // 2, q - 1})]
    rows += [(1, 0, low, high) for low, high in _WINDOWS[1:]]
    rows += [(2, 0, low, high) for low, high in _WINDOWS[1:3]]
    return np.array(rows, dtype=np.int64)


PATTERNS = _patterns()
MOST_SWEPT_UNITS = 1500
"""Above this single-unit sweeps are left out: their time grows with the square of the units."""


MOST_DEEP = 100
"""Leaves tried for each unit at most: small jobs can afford as many."""


@dataclass(frozen=True)
class Effort:
    """How long to search: counts and not seconds, so that the same search gives the same answer.

    Attributes:
        events: of the timeline that the whole search may simulate (about 20 ns each, with what every trial costs).
        sizes: partition sizes that single units are tried at.
        further: starts at the best size: the program's solutions with chains so many times longer, and such a part of
            the limits of budgets (of error its square), each found from nothing.
        starts: the best of all, from which blocks and sweeps go on, one after the other, as far as events last. With
            more than one the further starts take blocks at once.
        descents: rounds of blocks and sweeps from each.
        together: combinations of a few units that a pass may look at, at the best size and as many others as starts.
        polish: multiplications (about 1 ns each) for ascents that are patient, once a strategy is found.
        branching: multiplications (about 1 ns each) that the certificate's branching may take.
        orders: pairs of giants' tasks (about 7 ns each) that the certificate may look at.
    """

    events: int = 6_500_000
    sizes: int = 4
    further: tuple[tuple[float, float], ...] = ((1.0, 0.25), (2.5, 1.0))
    starts: int = 1
    descents: int = 4
    together: int = 20_000
    polish: int = 160_000_000
    branching: int = 40_000_000
    orders: int = 24_000_000

    @classmethod
    def for_units(cls, units: int) -> Effort:
        """Above 200 units, up to 600, four times as many events and thrice the patience: a second is allowed there."""
        return cls(events=4 * cls.events, polish=3 * cls.polish) if 200 < units <= 600 else cls()

    @property
    def patient(self) -> Effort:
        """Where nobody waits for the strategy: fewer sizes, blocks from more starts, more events in small jobs.

        (54 cases of ``benchmarks.search``, on which it was chosen among some forty variants: of 20 the strategy became
        better, by up to 2.1 %, of 3 worse, by up to 1.6; of 84 random jobs of 13 and of 15. Half the branching costs
        .12 % of gap at most, and gives back the time.)
        """
        events = max(self.events, 3 * Effort.events // 2)
        return replace(self, events=events, sizes=3, starts=2, branching=self.branching // 2)

    @property
    def without_certificate(self) -> Effort:
        """The same search for a strategy, with fewer units together, and no more for its bound than that takes."""
        return replace(self, together=2_000, polish=0, branching=0, orders=0)

    def depth(self, units: int) -> int:
        """Leaves tried for each unit."""
        return min(max(1600 // units, 4), MOST_DEEP)

    def rounds(self, units: int) -> int:
        """Iterations of a dual ascent that starts from nothing."""
        return max(min(250, 800_000 // units), 80)


NO_EFFORT = Effort(events=0, sizes=0, further=(), descents=0, together=0, polish=0, branching=0, orders=0)
"""Certify only."""
REPLAN_EFFORT = Effort(
    events=1_500_000, sizes=1, further=(), polish=10_000_000, branching=4_000_000, orders=8_000_000
)  # fmt: skip
"""From a strategy that was good a moment ago."""


@dataclass
class Guide:
    """What the linear program says, in an evaluator's candidate numbers.

    Attributes:
        lists, price: see :mod:`espresso.search.local_search_kernels`.
        rounded: the strategy that the fractions round to, within the budgets where it ``fits``.
        members, starts: units by size, in order of release.
        spends, limits: see :class:`espresso.search.relaxation.Relaxation`.
        ledger: what they are of; None without budgets.
    """

    lists: Wholes
    price: Reals
    rounded: Wholes
    members: Wholes
    starts: Wholes
    spends: Reals
    limits: Reals
    ledger: Ledger | None = None
    fits: bool = True


def guide(
    evaluator: Evaluator,
    relaxation: Relaxation,
    certificate: Certificate,
    depth: int,
) -> Guide:
    """Shortlists and a rounding from a certificate made at the evaluator's partition size."""
    units = evaluator.units
    groups = grouped(units)
    members = np.array([index for group in groups.values() for index in group], dtype=np.int64)
    starts = np.cumsum([0, *map(len, groups.values())]).astype(np.int64)
    first, last = relaxation.first, relaxation.last
    depth = min(depth, int((last - first).max()))
    picks = np.full((len(units), depth), -1, dtype=np.int64)
    price = np.full((len(units), depth), np.inf)
    shortlist(
        prices(relaxation, certificate.weights), relaxation.rows, fees(relaxation, certificate.paid),
        relaxation.kind_of, first, last, picks, price,
    )  # fmt: skip
    rounded = np.zeros(len(units), dtype=np.int64)
    owed = np.empty(certificate.support.shape[1])
    spread(certificate.support, last - first, members, starts, owed, rounded)
    fits = keep_to_budgets(
        rounded, relaxation.rows, relaxation.kind_of, first, last, relaxation.spends, relaxation.limits * (1 + ROUNDING)
    )
    lists = np.full_like(picks, -1)
    strategy = np.zeros(len(units), dtype=np.int64)
    for (size, _), group in groups.items():
        mine = np.array(group)
        wanted = np.unique(np.append(picks[mine].ravel(), rounded[mine]))
        wanted = wanted[wanted >= 0]
        offset = int(first[mine[0]])
        choices = [relaxation.origin[offset + int(row)] for row in wanted]
        number: Wholes = np.full(int(last[mine[0]]) - offset + 1, -1, dtype=np.int64)
        number[wanted] = evaluator.candidates.many(size, choices)
        lists[mine] = number[picks[mine]]
        strategy[mine] = number[rounded[mine]]
    return Guide(
        lists, price, strategy, members, starts, relaxation.spends, relaxation.limits, relaxation.ledger, fits
    )  # fmt: skip


class LocalSearch:
    """The kernels of :mod:`espresso.search.local_search_kernels` with one evaluator's arrays, for one strategy.

    Attributes:
        spent: events simulated so far.
    """

    def __init__(self, evaluator: Evaluator, led: Guide) -> None:
        self._led = led
        arrays = evaluator.kernel_arrays()
        self._general, self._origin, self._cursor, self._scratch = arrays.states
        self._job = arrays.job
        self._losses: Losses = (
            led.spends, evaluator.candidates.kinds(None if led.ledger is None else led.ledger.kinds_of),
            led.limits * (1 + 1e-12),
        )  # fmt: skip
        self._paid = np.full(len(led.lists), np.inf)
        self.spent = 0

    def sweep(self, strategy: Wholes, time: float, effort: int) -> float:
        """Single units, in the order of release; ``strategy`` is changed. Large jobs are left alone."""
        if len(strategy) > MOST_SWEPT_UNITS:
            return time
        led = self._led
        time, events = sweep(
            self._general, self._origin, self._cursor, self._scratch, strategy, time, led.lists, led.price,
            self._paid, self._losses, effort, self._job,
        )  # fmt: skip
        self.spent += int(events)
        return float(time)

    def descend(self, strategy: Wholes, time: float, effort: int, *, rounds: int = 4) -> float:
        """Blocks and sweeps until nothing improves or the effort is spent; ``strategy`` is changed."""
        led = self._led
        end = self.spent + effort
        for _ in range(rounds):
            before = time
            time, events = blocks(
                self._general, self._origin, self._scratch, strategy, time, led.lists, led.price, self._paid,
                led.members, led.starts, PATTERNS, self._losses, end - self.spent, self._job,
            )  # fmt: skip
            self.spent += int(events)
            if self.spent < end:
                time = self.sweep(strategy, time, end - self.spent)
            if time >= before * (1 - 1e-5) or self.spent >= end:
                break
        return float(time)

    def together(self, strategy: Wholes, time: float, members: Wholes, lists: Wholes, effort: int) -> float:
        """A few units at once; ``strategy`` is changed. See the kernel of that name."""
        time, events = together(
            self._general, self._origin, self._cursor, self._scratch, strategy, time, members, lists, self._losses,
            effort, self._job,
        )  # fmt: skip
        self.spent += int(events)
        return float(time)
