"""Improvement beyond the paper's algorithms, guided by the certificate's linear program.

At one partition size: the dual ascent (:mod:`espresso.bounds`) gives every unit the few leaves that are
cheapest under its weights, mixed devices and partial offload included, and fractions that say how often
each should be used. Their rounding and the best strategies known are then searched locally: single units in order
of release, blocks of one size, exchanges and annealing (:mod:`espresso.improve_kernels`). Single moves alone
stall, since F is a maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from espresso.bounds import Certificate, Relaxation, right_hand_sides
from espresso.candidates import Size
from espresso.evaluator import Evaluator
from espresso.improve_kernels import anneal, blocks, shortlist, spread, sweep
from espresso.strategies import Choice

Wholes = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

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
LARGE_BUDGET = 2_000_000
"""Units that block moves of one descent may evaluate in a larger job."""


@dataclass(frozen=True)
class Effort:
    """How long to search: counts and not seconds, so that the same search gives the same answer.

    Attributes:
        task_trials: tasks that one annealing may simulate; divided by a strategy's tasks it gives the trials.
        sweeps: most passes of single-unit and block moves at each stage.
        sizes: partition sizes searched by descent.
        deep: partition sizes annealed.
    """

    task_trials: int = 2_000_000
    sweeps: int = 1
    sizes: int = 2
    deep: int = 1

    def patterns(self, units: int, groups: int, depth: int) -> int:
        """How many block patterns are tried: a block costs an evaluation, whose time grows with the units."""
        if units <= MOST_SWEPT_UNITS:
            return len(PATTERNS)
        return max(LARGE_BUDGET // (units * groups * depth), 0)

    def depth(self, units: int) -> int:
        """Leaves tried for each unit: small jobs can afford more."""
        return min(max(1600 // units, 4), 40)

    def rounds(self, units: int, *, warm: bool) -> int:
        """Iterations of the dual ascent."""
        return max(min((150 if warm else 400), 400_000 // units), 40)


@dataclass
class Guide:
    """What the linear program says, in an evaluator's candidate numbers.

    Attributes:
        lists, price: see :mod:`espresso.improve_kernels`.
        rounded: the strategy that the fractions round to.
        members, starts: units by size, in order of release.
    """

    lists: Wholes
    price: Reals
    rounded: Wholes
    members: Wholes
    starts: Wholes


def guide(
    evaluator: Evaluator,
    relaxation: Relaxation,
    certificate: Certificate,
    leaves: tuple[Choice, ...],
    depth: int,
) -> Guide:
    """Shortlists and a rounding from a certificate made at the evaluator's partition size."""
    units = evaluator.units
    groups: dict[Size, list[int]] = {}
    for index, unit in enumerate(units):
        groups.setdefault(unit.size, []).append(index)
    members = np.array([index for group in groups.values() for index in group], dtype=np.int64)
    starts = np.cumsum([0, *map(len, groups.values())]).astype(np.int64)
    first, last = relaxation.first, relaxation.last
    depth = min(depth, int((last - first).max()))
    picks = np.full((len(units), depth), -1, dtype=np.int64)
    price = np.full((len(units), depth), np.inf)
    shortlist(
        certificate.weights, np.isfinite(right_hand_sides(relaxation)), relaxation.rows, first, last,
        relaxation.cores, picks, price,
    )  # fmt: skip
    rounded = np.zeros(len(units), dtype=np.int64)
    spread(certificate.support, last - first, members, starts, rounded)
    lists = np.full_like(picks, -1)
    strategy = np.zeros(len(units), dtype=np.int64)
    for size, group in groups.items():
        mine = np.array(group)
        wanted = np.unique(np.append(picks[mine].ravel(), rounded[mine]))
        wanted = wanted[wanted >= 0]
        offset = int(first[mine[0]])
        choices = [leaves[relaxation.origin[offset + int(row)][0]] for row in wanted]
        number: Wholes = np.full(int(last[mine[0]]) - offset + 1, -1, dtype=np.int64)
        number[wanted] = evaluator.candidates.many(size, choices)
        lists[mine] = number[picks[mine]]
        strategy[mine] = number[rounded[mine]]
    return Guide(lists, price, strategy, members, starts)


class LocalSearch:
    """The kernels of :mod:`espresso.improve_kernels` with one evaluator's arrays."""

    def __init__(self, evaluator: Evaluator, led: Guide, effort: Effort) -> None:
        self._evaluator, self._led, self._effort = evaluator, led, effort
        arrays = evaluator.kernel_arrays()
        self._shared, self._origin, self._cursor, self._scratch = arrays.states
        self._rest = arrays.rest
        count = arrays.rest[2]
        self._tasks = max(int(count[led.rounded].sum()) * 8, 1)

    def descend(self, strategy: Wholes, time: float, paid: Reals) -> float:
        led = self._led
        patterns = PATTERNS[: self._effort.patterns(len(strategy), len(led.starts) - 1, led.lists.shape[1])]
        for _ in range(self._effort.sweeps):
            before = time
            if len(strategy) <= MOST_SWEPT_UNITS:
                time = float(
                sweep(
                    self._shared, self._origin, self._cursor, self._scratch, strategy, time, led.lists,
                    led.price, paid, *self._rest,
                )
            )  # fmt: skip
            time = float(
                blocks(
                    self._shared, self._origin, self._scratch, strategy, time, led.lists, led.price, paid,
                    led.members, led.starts, patterns, *self._rest,
                )
            )  # fmt: skip
            if time >= before * (1 - 1e-6):
                break
        return time

    def anneal(self, strategy: Wholes, time: float, paid: Reals, seed: int = 1) -> float:
        led = self._led
        trials = self._effort.task_trials // self._tasks
        return float(
            anneal(
                self._shared, self._origin, self._scratch, strategy, time, led.lists, led.price, paid,
                led.members, led.starts, trials, 1e-2, 1e-4, seed, *self._rest,
            )
        )  # fmt: skip


__all__ = ["Effort", "Guide", "LocalSearch", "guide"]
