"""Bounds from the orders in which the largest units' tasks can pass the lanes.

What is first come first served keeps two rules, whatever else is under way. Of two tasks that share a lane one ends
before the other begins; and that is the one that came first, so that what is before it in its own chain ended no later.
Other units may hold any of them up, and training work what backward hands over, but nothing breaks a rule or the order
in which units are handed over: if no schedule of the largest units alone keeps to that and ends by a time, then no
strategy does.

To *refute* a time: earliest starts and latest starts of all tasks are drawn tight along the chains and along the pairs
that are decided; a pair of which only one order is left is decided; if none is, there is no schedule. Else a pair is
decided both ways, one after the other, until all is refuted or the effort is spent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from espresso.model.jit import inner_kernel, kernel
from espresso.model.timeline_kernels import LANES_OF_SET, NUM_LANES, SHARE

Wholes = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.int8]

MOST_TASKS = 128
"""Of all largest units together."""
DEEPEST = 48
"""Pairs that are decided one inside the other."""
EACH, LONGER = 4_000, 60
"""Pairs looked at to refute that a combination ends by a time, at most; and how often as many where that fails."""
BISECTIONS = 6
US, RELEASE, EARLIEST, LATEST = range(4)
"""Rows of a state's times."""
SET, BEFORE, TWIN = range(3)
"""Rows of a state's tasks: lane set; the task before it in its chain, the same of the partition before (-1: none)."""


@inner_kernel
def _tight(n: int, tasks: Wholes, times: Reals, sides: Bytes, slack: float) -> int:
    """Draw starts tight and decide what is left one way; pairs looked at, negative where there is no schedule."""
    us, release, early, late = times[US], times[RELEASE], times[EARLIEST], times[LATEST]
    spent = 0
    changed = True
    while changed:
        changed = False
        for i in range(n):
            for row in range(BEFORE, TWIN + 1):
                k = tasks[row, i]
                if k >= 0 and early[k] + us[k] > early[i]:
                    early[i] = early[k] + us[k]
        for i in range(n - 1, -1, -1):
            for row in range(BEFORE, TWIN + 1):
                k = tasks[row, i]
                if k >= 0 and late[i] - us[k] < late[k]:
                    late[k] = late[i] - us[k]
        for i in range(n):
            if early[i] > late[i] + slack:
                return -spent - 1
            for j in range(i + 1, n):
                side = sides[i, j]
                if side == 2:
                    continue
                spent += 1
                p = tasks[BEFORE, i]
                q = tasks[BEFORE, j]
                if side == 0:
                    came_i = early[p] + us[p] if p >= 0 else release[i]
                    came_j = early[q] + us[q] if q >= 0 else release[j]
                    last_i = late[p] + us[p] if p >= 0 else late[i]
                    last_j = late[q] + us[q] if q >= 0 else late[j]
                    first = early[i] + us[i] <= late[j] + slack and came_i <= last_j + slack
                    other = early[j] + us[j] <= late[i] + slack and came_j <= last_i + slack
                    if not first and not other:
                        return -spent
                    if first and other:
                        continue
                    side = 1 if first else -1
                    sides[i, j] = side
                    changed = True
                a, b, pa, pb = (i, j, p, q) if side == 1 else (j, i, q, p)
                if early[a] + us[a] > early[b] + slack:
                    early[b] = early[a] + us[a]
                    changed = True
                if late[b] - us[a] < late[a] - slack:
                    late[a] = late[b] - us[a]
                    changed = True
                came = early[pa] + us[pa] if pa >= 0 else release[a]
                last = late[pb] + us[pb] if pb >= 0 else late[b]
                if came > last + slack:
                    return -spent
                if pb >= 0 and came - us[pb] > early[pb] + slack:
                    early[pb] = came - us[pb]
                    changed = True
                if pa >= 0 and last - us[pa] < late[pa] - slack:
                    late[pa] = last - us[pa]
                    changed = True
    return spent


@inner_kernel
def _one_machine(n: int, tasks: Wholes, times: Reals, left: Reals, slack: float) -> bool:
    """Whether some lane alone cannot do all its tasks in time, even if it may break off: Jackson's schedule."""
    us, early, late = times[US], times[EARLIEST], times[LATEST]
    for lane in range(NUM_LANES):
        count = 0
        now = np.inf
        for i in range(n):
            held = LANES_OF_SET[tasks[SET, i]]
            left[i] = us[i] if us[i] > 0.0 and (held[0] == lane or held[1] == lane or held[2] == lane) else 0.0
            if left[i] > 0.0:
                count += 1
                now = min(now, early[i])
        while count > 1:
            at, soonest = -1, np.inf
            for i in range(n):
                if left[i] > 0.0:
                    if early[i] > now:
                        soonest = min(soonest, early[i])
                    elif at < 0 or late[i] + us[i] < late[at] + us[at]:
                        at = i
            if at < 0:
                now = soonest
            elif now + left[at] <= soonest:
                now += left[at]
                left[at] = 0.0
                count -= 1
                if now > late[at] + us[at] + slack:
                    return True
            else:
                left[at] -= soonest - now
                now = soonest
        # The last one is alone: its window is known to be wide enough, but for what was before it.
        for i in range(n):
            if left[i] > 0.0 and max(now, early[i]) + left[i] > late[i] + us[i] + slack:
                return True
    return False


@inner_kernel
def _refuted(
    n: int, tasks: Wholes, times: Reals, sides: Bytes, end: float, limit: int, deep_times: Reals, deep_sides: Bytes
) -> tuple[bool, int]:
    """Whether no schedule ends by ``end``; and pairs looked at, at most about ``limit``."""
    slack = 1e-9 * end
    first = deep_times[0]
    for i in range(n):
        first[0, i], first[1, i] = times[RELEASE, i], end - times[US, i]
        for j in range(n):
            deep_sides[0, i, j] = sides[i, j]
    depth, spent = 0, 0
    left = deep_times[DEEPEST, 0]
    while depth >= 0:
        # Take the topmost open state; it stays in ``times`` while it is worked on.
        for i in range(n):
            times[EARLIEST, i], times[LATEST, i] = deep_times[depth, 0, i], deep_times[depth, 1, i]
        here = deep_sides[depth]
        took = _tight(n, tasks, times, here, slack)
        spent += abs(took)
        depth -= 1
        if took < 0:
            continue
        spent += 6 * n
        if _one_machine(n, tasks, times, left, slack):
            continue
        at, other, least = -1, -1, np.inf
        for i in range(n):
            for j in range(i + 1, n):
                if here[i, j] == 0:
                    one = times[LATEST, j] - times[EARLIEST, i] - times[US, i]
                    two = times[LATEST, i] - times[EARLIEST, j] - times[US, j]
                    if max(one, two) < least:
                        at, other, least = i, j, max(one, two)
        if at < 0 or spent > limit or depth + 2 >= DEEPEST:
            return False, spent
        for side in (-1, 1):  # the first of them takes the place of the state itself
            depth += 1
            for i in range(n):
                deep_times[depth, 0, i], deep_times[depth, 1, i] = times[EARLIEST, i], times[LATEST, i]
                if side == 1:
                    for j in range(n):
                        deep_sides[depth, i, j] = deep_sides[depth - 1, i, j]
            deep_sides[depth, at, other] = side
    return True, spent


@inner_kernel
def _lay(
    picked: Wholes, release: Reals, spans: Wholes, task_set: Wholes, task_us: Reals, task_at: Wholes, tasks: Wholes,
    times: Reals, sides: Bytes,
) -> int:  # fmt: skip
    """The tasks of the rows ``picked`` (-1: none yet) as a state with every pair that can meet open; how many."""
    n = 0
    for unit in range(picked.shape[0]):
        row = picked[unit]
        if row < 0:
            continue
        length = spans[row, 2]
        begin = n
        for task in range(spans[row, 0], spans[row, 1]):
            tasks[SET, n] = task_set[task]
            tasks[BEFORE, n] = n - 1 if task_at[task] > 0 else -1
            tasks[TWIN, n] = n - length if task - spans[row, 0] >= length else -1
            times[US, n] = task_us[task]
            times[RELEASE, n] = release[unit]
            for i in range(n):
                meet = SHARE[tasks[SET, i], tasks[SET, n]] and times[US, i] > 0.0 and times[US, n] > 0.0
                sides[i, n] = 0 if meet else 2
                # What a unit begins with comes before all else of it, and of units handed over later.
                same = i >= begin
                if meet and tasks[BEFORE, i] < 0 and (times[RELEASE, i] < times[RELEASE, n] or same):
                    sides[i, n] = 1
                elif meet and tasks[BEFORE, n] < 0 and same:
                    sides[i, n] = -1
            n += 1
    # Along a chain, and among the same tasks of one unit's partitions, the order is known.
    for i in range(n):
        for row in range(BEFORE, TWIN + 1):
            k = tasks[row, i]
            while k >= 0:
                sides[k, i] = 2
                k = tasks[row, k]
    return n


@kernel
def least_end(
    rows_first: Wholes, rows_last: Wholes, order: Wholes, release: Reals, backward: float, loads: Reals, excess: Reals,
    root: float, spans: Wholes, task_set: Wholes, task_us: Reals, task_at: Wholes, above: float, limit: int,
) -> tuple[float, int]:  # fmt: skip
    """A bound over all choices of the largest units, and what it took; above ``limit`` there is none (-inf).

    Args:
        rows_first, rows_last: int64[units], in order of release: each unit's rows, the most promising first.
        order: in which order units are decided.
        loads: float64[rows, lanes]: time on every lane.
        excess: float64[rows]: what a row costs more than its unit's cheapest under weights whose bound is ``root``.
        spans: int64[rows, 3]: a row's first and last task, and how many each partition has.
        task_at: a task's place in its chain.
        above: as far as the bound matters.
    """
    units = order.shape[0]
    lanes = loads.shape[1]
    picked = np.full(units, -1, dtype=np.int64)
    cursor = np.zeros(units, dtype=np.int64)
    least = np.full((units, lanes), np.inf)
    for unit in range(units):
        for row in range(rows_first[unit], rows_last[unit]):
            for lane in range(lanes):
                least[unit, lane] = min(least[unit, lane], loads[row, lane])
    tasks = np.empty((3, MOST_TASKS), dtype=np.int64)
    times = np.empty((4, MOST_TASKS))
    sides = np.empty((MOST_TASKS, MOST_TASKS), dtype=np.int8)
    deep_times = np.empty((DEEPEST + 1, 2, MOST_TASKS))
    deep_sides = np.empty((DEEPEST, MOST_TASKS, MOST_TASKS), dtype=np.int8)
    best, spent, depth = above, 0, 0
    cursor[0] = rows_first[order[0]]
    while depth >= 0:
        unit = order[depth]
        if cursor[depth] >= rows_last[unit]:
            picked[unit] = -1
            depth -= 1
            continue
        picked[unit] = cursor[depth]
        cursor[depth] += 1
        spent += 4 * units
        # The cheap bounds: the weights', and every lane's.
        bound = root
        for u in range(units):
            if picked[u] >= 0:
                bound += excess[picked[u]]
        for lane in range(lanes):
            if bound >= best:
                break
            load = 0.0
            for u in range(units - 1, -1, -1):
                load += loads[picked[u], lane] if picked[u] >= 0 else least[u, lane]
                bound = max(bound, load + (release[u] if lane > 0 else backward))
        if bound >= best:
            continue
        n = 0
        for u in range(units):
            n += spans[picked[u], 1] - spans[picked[u], 0] if picked[u] >= 0 else 0
        if depth > 0 and n <= MOST_TASKS:
            n = _lay(picked, release, spans, task_set, task_us, task_at, tasks, times, sides)
            is_leaf = depth == units - 1
            gone, took = _refuted(n, tasks, times, sides, best, EACH, deep_times, deep_sides)
            spent += took + n * n // 2
            if is_leaf and not gone:
                # It may have the last word: look longer.
                gone, took = _refuted(n, tasks, times, sides, best, LONGER * EACH, deep_times, deep_sides)
                spent += took
            if spent > limit:
                return -np.inf, spent
            if gone:
                continue
            if is_leaf:
                low, high = bound, best
                for _ in range(BISECTIONS):
                    middle = (low + high) / 2
                    gone, took = _refuted(n, tasks, times, sides, middle, LONGER * EACH, deep_times, deep_sides)
                    spent += took
                    if gone:
                        low = middle
                    else:
                        high = middle
                best = low
                continue
        if depth < units - 1:
            depth += 1
            cursor[depth] = rows_first[order[depth]]
        else:
            best = bound
    return best, spent


@kernel
def least_alone(
    first: int, last: int, length: int, task_set: Wholes, task_us: Reals, task_at: Wholes, low: float, high: float,
    limit: int,
) -> tuple[float, int]:  # fmt: skip
    """No schedule of one unit's tasks alone ends before this after its release; and what it took.

    Args:
        first, last, length: a row of ``spans``, see :func:`least_end`.
        low: a bound that is known.
        high: as far as the bound matters.
        limit: pairs to look at for each time that is tried, at most about.
    """
    if last - first > MOST_TASKS:
        return low, 0
    tasks = np.empty((3, MOST_TASKS), dtype=np.int64)
    times = np.empty((4, MOST_TASKS))
    sides = np.empty((MOST_TASKS, MOST_TASKS), dtype=np.int8)
    deep_times = np.empty((DEEPEST + 1, 2, MOST_TASKS))
    deep_sides = np.empty((DEEPEST, MOST_TASKS, MOST_TASKS), dtype=np.int8)
    spans = np.array([[first, last, length]])
    n = _lay(np.zeros(1, dtype=np.int64), np.zeros(1), spans, task_set, task_us, task_at, tasks, times, sides)
    gone, spent = _refuted(n, tasks, times, sides, high, limit, deep_times, deep_sides)
    if gone:
        return high, spent
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        gone, took = _refuted(n, tasks, times, sides, middle, limit, deep_times, deep_sides)
        spent += took
        if gone:
            low = middle
        else:
            high = middle
    return low, spent
