"""Algorithm 1's loop, compiled: one unit after the other takes the candidate of least makespan."""

from __future__ import annotations

import numpy as np

from espresso.model.arrays import Reals, Wholes
from espresso.model.jit import kernel
from espresso.model.timeline_kernels import General, JobArrays, State, advance, best_of, copy_state

BETTER = 1 - 1e-9
"""A time is shorter only by more than rounding."""


@kernel
def finished_units(buckets: Wholes, ready: Reals, finish: Reals) -> int:
    """How many leading units are finished, all of them, when the next bucket is handed over."""
    finished = 0.0
    gone = 0
    for unit in range(buckets.shape[0] - 1):
        finished = max(finished, finish[unit])
        following = buckets[unit + 1]
        if following != buckets[unit] and finished <= ready[following]:
            gone = unit + 1
    return gone


@kernel
def greedy_units(
    general: General, origin: State, start: State, scratch: State, order: Wholes, options: Wholes,
    option_first: Wholes, buckets: Wholes, choice: Wholes, best: float, dropped: int, hint: int, job: JobArrays,
) -> tuple[float, int, int]:  # fmt: skip
    """The units of ``order``, in turn; ``choice`` is changed.

    ``options`` lists candidates, those of unit u from ``option_first[u]`` to ``option_first[u + 1]``;
    ``buckets`` int64[units]. Units before ``dropped`` are left alone. ``hint`` is the candidate taken last,
    -1 at first. Returns (makespan, dropped, hint).
    """
    ready, finish = job[10], job[11]
    end = job[0].shape[0] + 1
    for unit in order:
        if unit < dropped:
            continue
        copy_state(origin, start)
        advance(general, start, choice, buckets[unit], np.inf, job)
        numbers = options[option_first[unit] : option_first[unit + 1]]
        found, time = best_of(general, start, scratch, unit, numbers, hint, choice, best * BETTER, job)
        if found < 0:
            continue
        choice[unit] = found
        best = time
        # Units of one size follow each other and often take the same.
        hint = found
        # Nothing changed before the unit's hand-over, so the evaluation goes on from there.
        advance(general, start, choice, end, np.inf, job)
        dropped = finished_units(buckets, ready, finish)
    return best, dropped, hint
