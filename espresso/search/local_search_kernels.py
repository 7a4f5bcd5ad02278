"""Local search over a strategy, compiled: single units, and blocks of one size.

All moves evaluate with the timeline's own kernels. F is a maximum, so most moves leave it as it is; of equal
times the one with the lower *price* wins, the candidate's cost under the certificate's weights, so that a
plateau is crossed in the direction of the linear program. Arrays that all kernels take:

- ``lists`` int64[units, k]: the candidates worth trying for each unit (-1 after the end);
- ``price`` float64[units, k]: what they cost under the weights; ``paid`` float64[units]: what the present ones do;
- ``losses`` = (spends float64[budgets, units, kinds], kind int64[candidates], limits float64[budgets]): a move may not
  exceed a budget;
- ``job``: the evaluator's arrays (:class:`espresso.search.evaluator.KernelArrays`);
- ``effort``: events that may be simulated. Every kernel returns (makespan, events simulated).
"""

from __future__ import annotations

import numpy as np

from espresso.model.arrays import Reals, Wholes
from espresso.model.jit import inner_kernel, kernel
from espresso.model.timeline_kernels import (
    EVENTS,
    General,
    JobArrays,
    State,
    add_loads,
    advance,
    copy_state,
    copy_vector,
    hopeless,
    total_loads,
)
from espresso.search.algorithm_kernels import BETTER
from espresso.search.bound_kernels import CHAIN

Losses = tuple[Reals, Wholes, Reals]
_SAME = 1.0 + 1e-12


@inner_kernel
def _total(general: General, choice: Wholes, job: JobArrays) -> None:
    """What the strategy takes of each lane, for evaluations with a limit."""
    if general is None:
        total_loads(choice, job)


@inner_kernel
def _exchange(general: General, old: int, new: int, job: JobArrays) -> None:
    """One candidate goes, another comes."""
    if general is None:
        add_loads(old, -1.0, job)
        add_loads(new, 1.0, job)


@inner_kernel
def _trial(
    general: General, start: State, scratch: State, choice: Wholes, limit: float, job: JobArrays
) -> tuple[float, int]:  # fmt: skip
    """The makespan from ``start`` on (infinity if not below ``limit``), and the events that it took."""
    if general is None and hopeless(start, job[9], limit):
        return np.inf, 0
    copy_state(start, scratch)
    time = advance(general, scratch, choice, job[0].shape[0] + 1, limit, job)
    return time, scratch[1][EVENTS] - start[1][EVENTS]


@inner_kernel
def _total_spent(losses: Losses, choice: Wholes) -> Reals:
    """float64[budgets]: what a whole strategy spends."""
    spends, kind, _ = losses
    total = np.zeros(spends.shape[0])
    for budget in range(spends.shape[0]):
        for unit in range(choice.shape[0]):
            total[budget] += spends[budget, unit, kind[choice[unit]]]
    return total


@inner_kernel
def _fits(spent: Reals, change: Reals, limits: Reals) -> bool:
    """Whether a change keeps to every budget, or spends no more of it than before."""
    for budget in range(limits.shape[0]):
        if change[budget] > 0.0 and spent[budget] + change[budget] > limits[budget]:
            return False
    return True


@kernel
def sweep(
    general: General, origin: State, cursor: State, scratch: State, choice: Wholes, best: float,
    lists: Wholes, price: Reals, paid: Reals, losses: Losses, effort: int, job: JobArrays,
) -> tuple[float, int]:  # fmt: skip
    """Every unit, in the order of release, takes the best of its list, the others fixed.

    ``cursor`` follows the sweep, so that each trial resumes at its own bucket.
    """
    first_unit = job[1]
    buckets = first_unit.shape[0] - 1
    spends, kind, limits = losses
    spent = _total_spent(losses, choice)
    change = np.zeros(limits.shape[0])
    events = 0
    copy_state(origin, cursor)
    _total(general, choice, job)
    for bucket in range(buckets):
        if events > effort:
            break
        advance(general, cursor, choice, bucket, np.inf, job)
        for unit in range(first_unit[bucket], first_unit[bucket + 1]):
            chosen = choice[unit]
            present = chosen
            for k in range(lists.shape[1]):
                candidate = lists[unit, k]
                if candidate < 0:
                    break
                for budget in range(limits.shape[0]):
                    change[budget] = spends[budget, unit, kind[candidate]] - spends[budget, unit, kind[chosen]]
                if candidate == chosen or not _fits(spent, change, limits):
                    continue
                cheaper = price[unit, k] < paid[unit]
                choice[unit] = candidate
                _exchange(general, present, candidate, job)
                present = candidate
                limit = best * _SAME if cheaper else best * BETTER
                time, taken = _trial(general, cursor, scratch, choice, limit, job)
                events += taken
                if time < best * BETTER or (cheaper and time <= best):
                    chosen = candidate
                    best = min(time, best)
                    paid[unit] = price[unit, k]
                    for budget in range(limits.shape[0]):
                        spent[budget] += change[budget]
            choice[unit] = chosen
            _exchange(general, present, chosen, job)
    return best, events


@kernel
def blocks(
    general: General, origin: State, scratch: State, choice: Wholes, best: float, lists: Wholes, price: Reals,
    paid: Reals, members: Wholes, starts: Wholes, patterns: Wholes, losses: Losses, effort: int,
    job: JobArrays,
) -> tuple[float, int]:  # fmt: skip
    """Moves of many units of one size at once: every q-th from an offset, between two fractions of the group.

    ``members`` lists the units group by group, group g from ``starts[g]`` to ``starts[g + 1]``; ``patterns``
    int64[n, 4] holds stride, offset, and the window in eighths of the group. Tried candidates are those of
    the window's middle unit.
    """
    spends, kind, limits = losses
    spent = _total_spent(losses, choice)
    change = np.zeros(limits.shape[0])
    kept = np.empty_like(choice)
    paid_before = np.empty_like(paid)
    events = 0
    for pattern in range(patterns.shape[0]):
        stride, offset, low, high = patterns[pattern]
        for group in range(starts.shape[0] - 1):
            length = starts[group + 1] - starts[group]
            begin = starts[group] + length * low // 8 + offset
            end = starts[group] + (length * high + 7) // 8
            if length < 2 or (begin + stride >= end and stride > 1):
                continue
            if events > effort:
                return best, events
            guide = members[(begin + end) // 2] if (begin + end) // 2 < end else members[begin]
            for k in range(lists.shape[1]):
                candidate = lists[guide, k]
                if candidate < 0:
                    break
                copy_vector(choice, kept)
                copy_vector(paid, paid_before)
                changed = False
                for budget in range(limits.shape[0]):
                    change[budget] = 0.0
                for position in range(begin, end, stride):
                    unit = members[position]
                    if choice[unit] != candidate:
                        changed = True
                        for budget in range(limits.shape[0]):
                            old, new = kind[choice[unit]], kind[candidate]
                            change[budget] += spends[budget, unit, new] - spends[budget, unit, old]
                        choice[unit] = candidate
                        paid[unit] = price[guide, k]
                time = np.inf
                if changed and _fits(spent, change, limits):
                    _total(general, choice, job)
                    time, taken = _trial(general, origin, scratch, choice, best * BETTER, job)
                    events += taken
                if time < best * BETTER:
                    best = time
                    for budget in range(limits.shape[0]):
                        spent[budget] += change[budget]
                else:
                    copy_vector(kept, choice)
                    copy_vector(paid_before, paid)
    return best, events


@kernel
def together(
    general: General, origin: State, cursor: State, scratch: State, choice: Wholes, best: float,
    members: Wholes, lists: Wholes, losses: Losses, effort: int, job: JobArrays,
) -> tuple[float, int]:  # fmt: skip
    """A few units take the best of all combinations of their lists and of what they have, the others fixed.

    ``members`` int64[n]: the units, in order of release; ``lists`` int64[n, k] theirs. The first trials leave most as
    it is.
    """
    first_unit = job[1]
    spends, kind, limits = losses
    spent = _total_spent(losses, choice)
    change = np.zeros(limits.shape[0])
    events = 0
    outer = members.shape[0] - 1
    last = members[outer]
    bucket = 0
    while first_unit[bucket + 1] <= last:
        bucket += 1
    kept = choice[members]
    place = np.full(outer, -1, dtype=np.int64)
    while events <= effort:
        for x in range(outer):
            choice[members[x]] = kept[x] if place[x] < 0 else lists[x, place[x]]
        choice[last] = kept[outer]
        copy_state(origin, cursor)
        advance(general, cursor, choice, bucket, np.inf, job)
        events += cursor[1][EVENTS] - origin[1][EVENTS]
        _total(general, choice, job)
        present = kept[outer]
        for b in range(-1, lists.shape[1]):
            candidate = kept[outer] if b < 0 else lists[outer, b]
            if candidate < 0:
                break
            events += 1
            for budget in range(limits.shape[0]):
                change[budget] = spends[budget, last, kind[candidate]] - spends[budget, last, kind[kept[outer]]]
                for x in range(outer):
                    unit = members[x]
                    change[budget] += spends[budget, unit, kind[choice[unit]]] - spends[budget, unit, kind[kept[x]]]
            if not _fits(spent, change, limits):
                continue
            choice[last] = candidate
            _exchange(general, present, candidate, job)
            present = candidate
            time, taken = _trial(general, cursor, scratch, choice, best * BETTER, job)
            events += taken
            if time < best * BETTER:
                best = time
                for x in range(outer):
                    kept[x] = choice[members[x]]
                kept[outer] = candidate
                for budget in range(limits.shape[0]):
                    spent[budget] += change[budget]
        x = outer - 1
        while x >= 0:
            place[x] += 1
            if place[x] < lists.shape[1] and lists[x, place[x]] >= 0:
                break
            place[x] = -1
            x -= 1
        if x < 0:
            break
    for x in range(outer + 1):
        choice[members[x]] = kept[x]
    return best, events


@kernel
def spread(frequency: Reals, width: Wholes, members: Wholes, starts: Wholes, owed: Reals, rows: Wholes) -> None:
    """Round the linear program's fractions: along each group, in order of release, by error diffusion.

    ``frequency`` float64[units, most rows], of which ``width`` int64[units] count; ``rows`` int64[units] takes
    each unit's pick; ``owed`` float64[most rows] is scratch.
    """
    for group in range(starts.shape[0] - 1):
        for row in range(owed.shape[0]):
            owed[row] = 0.0
        for position in range(starts[group], starts[group + 1]):
            unit = members[position]
            pick = 0
            for row in range(owed.shape[0]):
                owed[row] += frequency[unit, row]
                if row < width[unit] and owed[row] > owed[pick]:
                    pick = row
            owed[pick] -= 1.0
            rows[unit] = pick


@kernel
def keep_to_budgets(
    rounded: Wholes, rows: Reals, kind_of: Wholes, first: Wholes, last: Wholes, spends: Reals, limits: Reals
) -> bool:
    """Give the units that spend most a row that spends less, until every budget is kept. Whether all are.

    Of the rows that spend the most among those that spend less, and no more of any other budget, a unit takes the one
    with the shortest chain. ``rounded`` int64[units], counted from ``first``, is changed; the rest is as
    :class:`espresso.search.relaxation.Relaxation` has it.
    """
    budgets, units = limits.shape[0], rounded.shape[0]
    spent = np.zeros((budgets, units))
    for budget in range(budgets):
        for unit in range(units):
            spent[budget, unit] = spends[budget, unit, kind_of[first[unit] + rounded[unit]]]
    for budget in range(budgets):
        can_do_better = np.ones(units, dtype=np.bool_)
        while spent[budget].sum() > limits[budget]:
            unit, most = -1, 0.0
            for other in range(units):
                if can_do_better[other] and spent[budget, other] > most:
                    unit, most = other, spent[budget, other]
            if unit < 0:
                break
            best = -1
            for row in range(first[unit], last[unit]):
                mine = spends[budget, unit, kind_of[row]]
                lesser = mine < most
                for each in range(budgets):
                    lesser = lesser and spends[each, unit, kind_of[row]] <= spent[each, unit]
                if not lesser:
                    continue
                if best >= 0:
                    known = spends[budget, unit, kind_of[best]]
                    if mine < known or (mine == known and rows[row, CHAIN] >= rows[best, CHAIN]):
                        continue
                best = row
            if best < 0:
                can_do_better[unit] = False
                continue
            rounded[unit] = best - first[unit]
            for each in range(budgets):
                spent[each, unit] = spends[each, unit, kind_of[best]]
    kept = True
    for budget in range(budgets):
        kept = kept and spent[budget].sum() <= limits[budget]
    return kept
