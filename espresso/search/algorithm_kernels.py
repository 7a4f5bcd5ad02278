"""Algorithm 1's loop, compiled: one unit after the other takes the candidate of least makespan."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.model.jit import inner_kernel, kernel
from espresso.model.timeline_kernels import Shared, State, advance_paper, advance_shared, best_of, copy_state

Reals = npt.NDArray[np.float64]
Wholes = npt.NDArray[np.int64]
JobArrays = tuple[Any, ...]
ROUNDING = 1 - 1e-9
"""A strategy is better only by more than rounding."""


@inner_kernel
def advance(shared: Shared, state: State, choice: Wholes, stop: int, limit: float, job: JobArrays) -> Any:
    """Either kind of job, its arrays in one tuple."""
    gaps, first_unit, count, full, tail, task_set, task_us, task_cores, contention, loads, ready, finish = job
    if shared is not None:
        return advance_shared(
            state, gaps, first_unit, choice, count, full, tail, task_set, task_us, task_cores, contention,
            stop, limit, loads, ready, finish,
        )  # fmt: skip
    return advance_paper(
        state, gaps, first_unit, choice, count, full, tail, task_set, task_us, task_cores, contention,
        stop, limit, loads, ready, finish,
    )  # fmt: skip


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
    shared: Shared, origin: State, start: State, scratch: State, order: Wholes, options: Wholes,
    option_first: Wholes, buckets: Wholes, choice: Wholes, best: float, dropped: int, hint: int, job: JobArrays,
) -> tuple[float, int, int]:  # fmt: skip
    """The units of ``order``, in turn; ``choice`` is changed.

    ``options`` lists candidates, those of unit u from ``option_first[u]`` to ``option_first[u + 1]``;
    ``buckets`` int64[units]. Units before ``dropped`` are left alone. ``hint`` is the candidate taken last,
    -1 at first. Returns (makespan, dropped, hint).
    """
    gaps, first_unit, count, full, tail, task_set, task_us, task_cores, contention, loads, ready, finish = job
    end = gaps.shape[0] + 1
    for unit in order:
        if unit < dropped:
            continue
        copy_state(origin, start)
        advance(shared, start, choice, buckets[unit], np.inf, job)
        numbers = options[option_first[unit] : option_first[unit + 1]]
        found, time = best_of(
            shared, start, scratch, unit, numbers, hint, gaps, first_unit, choice, count, full, tail, task_set,
            task_us, task_cores, contention, best * ROUNDING, loads, ready, finish,
        )  # fmt: skip
        if found < 0:
            continue
        choice[unit] = found
        best = time
        # Units of one size follow each other and often take the same.
        hint = found
        # Nothing changed before the unit's hand-over, so the evaluation goes on from there.
        advance(shared, start, choice, end, np.inf, job)
        dropped = finished_units(buckets, ready, finish)
    return best, dropped, hint
