"""Local search over a strategy, compiled: single units, blocks of one size, neighbours, annealing.

All moves evaluate with the timeline's own kernels. F is a maximum, so most moves leave it as it is; of equal
times the one with the lower *price* wins, the candidate's cost under the certificate's weights, so that a
plateau is crossed in the direction of the linear program. ``lists`` int64[units, k] holds the candidates worth
trying for each unit (-1 after the end), ``price`` float64[units, k] what they cost under the weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from espresso.bounds import CHAIN, CORES, NUM_LOADS
from espresso.timeline_kernels import State, advance_paper, advance_shared, copy_state

Reals = npt.NDArray[np.float64]
Wholes = npt.NDArray[np.int64]
BETTER = 1.0 - 1e-9
"""A time is shorter only by more than rounding."""
_SAME = 1.0 + 1e-12


@njit(cache=True, nogil=True)
def _advance(
    shared: bool, state: State, gaps: Reals, first_unit: Wholes, choice: Wholes, count: Wholes, full: Wholes,
    tail: Wholes, task_set: Wholes, task_us: Reals, task_cores: Reals, contention: Reals, stop: int,
    limit: float, ready: Reals, finish: Reals,
) -> float:  # fmt: skip
    if shared:
        return advance_shared(
            state, gaps, first_unit, choice, count, full, tail, task_set, task_us, task_cores, contention,
            stop, limit, ready, finish,
        )  # fmt: skip
    return advance_paper(
        state, gaps, first_unit, choice, count, full, tail, task_set, task_us, task_cores, contention,
        stop, limit, ready, finish,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def sweep(
    shared: bool, origin: State, cursor: State, scratch: State, choice: Wholes, best: float,
    lists: Wholes, price: Reals, paid: Reals, gaps: Reals, first_unit: Wholes, count: Wholes, full: Wholes,
    tail: Wholes, task_set: Wholes, task_us: Reals, task_cores: Reals, contention: Reals, ready: Reals,
    finish: Reals,
) -> float:  # fmt: skip
    """Every unit, in the order of release, takes the best of its list, the others fixed.

    ``cursor`` follows the sweep, so that each trial resumes at its own bucket. ``choice`` and ``paid``, what
    each unit's candidate costs, are updated. Returns the makespan.
    """
    buckets = gaps.shape[0]
    copy_state(origin, cursor)
    for bucket in range(buckets):
        _advance(
            shared, cursor, gaps, first_unit, choice, count, full, tail, task_set, task_us, task_cores,
            contention, bucket, np.inf, ready, finish,
        )  # fmt: skip
        for unit in range(first_unit[bucket], first_unit[bucket + 1]):
            chosen = choice[unit]
            for k in range(lists.shape[1]):
                candidate = lists[unit, k]
                if candidate < 0:
                    break
                if candidate == chosen:
                    continue
                cheaper = price[unit, k] < paid[unit]
                choice[unit] = candidate
                copy_state(cursor, scratch)
                time = _advance(
                    shared, scratch, gaps, first_unit, choice, count, full, tail, task_set, task_us,
                    task_cores, contention, buckets + 1, best * _SAME if cheaper else best * BETTER, ready,
                    finish,
                )  # fmt: skip
                if time < best * BETTER or (cheaper and time <= best):
                    chosen = candidate
                    best = min(time, best)
                    paid[unit] = price[unit, k]
            choice[unit] = chosen
    return best


@njit(cache=True, nogil=True)
def blocks(
    shared: bool, origin: State, scratch: State, choice: Wholes, best: float, lists: Wholes, price: Reals,
    paid: Reals, members: Wholes, starts: Wholes, patterns: Wholes, gaps: Reals, first_unit: Wholes,
    count: Wholes, full: Wholes, tail: Wholes, task_set: Wholes, task_us: Reals, task_cores: Reals,
    contention: Reals, ready: Reals, finish: Reals,
) -> float:  # fmt: skip
    """Moves of many units of one size at once: every q-th from an offset, between two fractions of the group.

    ``members`` lists the units group by group, group g from ``starts[g]`` to ``starts[g + 1]``; ``patterns``
    int64[n, 4] holds stride, offset, and the window in eighths of the group. Tried candidates are those of
    the window's middle unit. Returns the makespan.
    """
    buckets = gaps.shape[0]
    kept = np.empty_like(choice)
    paid_before = np.empty_like(paid)
    for group in range(starts.shape[0] - 1):
        length = starts[group + 1] - starts[group]
        if length < 2:
            continue
        for pattern in range(patterns.shape[0]):
            stride, offset, low, high = patterns[pattern]
            begin = starts[group] + length * low // 8 + offset
            end = starts[group] + (length * high + 7) // 8
            if begin + stride >= end and stride > 1:
                continue
            guide = members[(begin + end) // 2] if (begin + end) // 2 < end else members[begin]
            for k in range(lists.shape[1]):
                candidate = lists[guide, k]
                if candidate < 0:
                    break
                kept[:] = choice
                paid_before[:] = paid
                changed = False
                position = begin
                while position < end:
                    unit = members[position]
                    if choice[unit] != candidate:
                        changed = True
                        choice[unit] = candidate
                        paid[unit] = price[guide, k]
                    position += stride
                if not changed:
                    continue
                copy_state(origin, scratch)
                time = _advance(
                    shared, scratch, gaps, first_unit, choice, count, full, tail, task_set, task_us,
                    task_cores, contention, buckets + 1, best * BETTER, ready, finish,
                )  # fmt: skip
                if time < best * BETTER:
                    best = time
                else:
                    choice[:] = kept
                    paid[:] = paid_before
    return best


@njit(cache=True, nogil=True)
def anneal(
    shared: bool, origin: State, scratch: State, choice: Wholes, best: float, lists: Wholes, price: Reals,
    paid: Reals, members: Wholes, starts: Wholes, trials: int, hot: float, cold: float, seed: int,
    gaps: Reals, first_unit: Wholes, count: Wholes, full: Wholes, tail: Wholes, task_set: Wholes,
    task_us: Reals, task_cores: Reals, contention: Reals, ready: Reals, finish: Reals,
) -> float:  # fmt: skip
    """Threshold accepting: random moves, kept while they stay below the present time plus a random margin.

    The margin's mean falls from ``hot`` to ``cold`` (fractions of the time). A move changes one unit, or
    exchanges two of one size. Its limit is known before it is evaluated, so most fail early. ``choice`` ends
    as the best strategy met. Deterministic for a seed. Returns its makespan.
    """
    np.random.seed(seed)
    buckets = gaps.shape[0]
    units = choice.shape[0]
    top = choice.copy()
    top_paid = paid.copy()
    group_of = np.empty(units, dtype=np.int64)
    for group in range(starts.shape[0] - 1):
        for position in range(starts[group], starts[group + 1]):
            group_of[members[position]] = group
    width = np.zeros(units, dtype=np.int64)
    for unit in range(units):
        while width[unit] < lists.shape[1] and lists[unit, width[unit]] >= 0:
            width[unit] += 1
    now = best
    for trial in range(trials):
        heat = hot * (cold / hot) ** (trial / trials)
        limit = now + now * heat * -np.log(np.random.random() + 1e-12)
        unit = np.random.randint(units)
        group = group_of[unit]
        length = starts[group + 1] - starts[group]
        other = -1
        if length > 1 and np.random.random() < 0.4:
            other = members[starts[group] + np.random.randint(length)]
            if choice[other] == choice[unit]:
                continue
        before = choice[unit]
        paid_unit = paid[unit]
        if other >= 0:
            choice[unit], choice[other] = choice[other], before
            paid[unit], paid[other] = paid[other], paid_unit
        else:
            k = np.random.randint(width[unit])
            if lists[unit, k] == before:
                continue
            choice[unit] = lists[unit, k]
            paid[unit] = price[unit, k]
        copy_state(origin, scratch)
        time = _advance(
            shared, scratch, gaps, first_unit, choice, count, full, tail, task_set, task_us, task_cores,
            contention, buckets + 1, limit, ready, finish,
        )  # fmt: skip
        if time < limit:
            now = time
            if now < best * BETTER:
                best = now
                top[:] = choice
                top_paid[:] = paid
        elif other >= 0:
            choice[unit], choice[other] = before, choice[unit]
            paid[unit], paid[other] = paid_unit, paid[unit]
        else:
            choice[unit] = before
            paid[unit] = paid_unit
    choice[:] = top
    paid[:] = top_paid
    return best


@njit(cache=True, nogil=True)
def spread(frequency: Reals, width: Wholes, members: Wholes, starts: Wholes, rows: Wholes) -> None:
    """Round the linear program's fractions: along each group, in order of release, by error diffusion.

    ``frequency`` float64[units, most rows], of which ``width`` int64[units] count; ``rows`` int64[units] takes
    each unit's pick.
    """
    owed = np.empty(frequency.shape[1])
    for group in range(starts.shape[0] - 1):
        owed[:] = 0.0
        for position in range(starts[group], starts[group + 1]):
            unit = members[position]
            owed += frequency[unit]
            pick = np.argmax(owed[: width[unit]])
            owed[pick] -= 1.0
            rows[unit] = pick


@njit(cache=True, nogil=True)
def shortlist(
    weights: Reals, used: npt.NDArray[np.bool_], rows: Reals, first: Wholes, last: Wholes, cores: float,
    picks: Wholes, price: Reals,
) -> None:  # fmt: skip
    """For every unit the rows of least cost under the weights, cheapest first (-1 after the end).

    ``picks`` int64[units, k] takes rows relative to ``first``, ``price`` float64[units, k] their costs.
    """
    prices = np.zeros(NUM_LOADS)
    depth = picks.shape[1]
    for u in range(first.shape[0]):
        for k in range(NUM_LOADS):
            if used[k, u]:
                prices[k] += weights[k, u]
        core_price = prices[CORES] / cores if cores > 0.0 else 0.0
        filled = 0
        for row in range(first[u], last[u]):
            cost = core_price * rows[row, CORES] + weights[CHAIN, u] * rows[row, CHAIN]
            for k in range(CORES):
                cost += prices[k] * rows[row, k]
            at = filled
            while at > 0 and price[u, at - 1] > cost:
                at -= 1
            if at >= depth:
                continue
            filled = min(filled + 1, depth)
            for k in range(filled - 1, at, -1):
                price[u, k] = price[u, k - 1]
                picks[u, k] = picks[u, k - 1]
            price[u, at] = cost
            picks[u, at] = row - first[u]
        for k in range(filled, depth):
            picks[u, k] = -1
            price[u, k] = np.inf
