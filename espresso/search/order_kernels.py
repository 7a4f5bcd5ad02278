"""Bounds from the orders in which the largest units' tasks can pass the lanes.

What is first come first served keeps two rules, whatever else is under way. Of two tasks that share a lane one ends
before the other begins; and that is the one that came first, so that what is before it in its own chain ended no later.
Other units may hold any of them up, and training work what backward hands over, but nothing breaks a rule or the order
in which units are handed over: if no schedule of the largest units alone keeps to that and ends by a time, then no
strategy does.

To *refute* a time: earliest starts and latest starts of all tasks are drawn tight along the chains and along the pairs
that are decided; a pair of which only one order is left is decided, and with it all pairs of what comes before the one
and after the other; if no order is left, there is no schedule. Else a pair is decided both ways, one after the other,
until all is refuted or the effort is spent. Before that the tasks are served first come first served: if that ends by
the time there is nothing to refute.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from espresso.model.arrays import Reals, Wholes
from espresso.model.jit import inner_kernel, kernel
from espresso.model.timeline_kernels import LANES_OF_SET, NUM_LANES, POSITIVE, SHARE

Bytes = npt.NDArray[np.int8]
Shorts = npt.NDArray[np.int16]
Tasks = tuple[Wholes, Reals, Reals, Wholes]
"""Lane sets int64[rows, longest], times float64[rows, longest] of a whole partition's tasks and of the last one's, and
int64[rows, 2]: how many tasks a chain has, and how many partitions."""

MOST_TASKS = 128
"""Of all largest units together."""
MOST_PAIRS = MOST_TASKS * (MOST_TASKS - 1) // 2
DEEPEST = 48
"""Pairs that are decided one inside the other."""
EACH, LONGER = 4_000, 240_000
"""Pairs looked at to refute that some units' leaves end by a time, at most; and that all units' leaves do."""
BISECTIONS = 8
SET, PLACE, PART, LENGTH, COUNT = range(5)
"""Rows of tasks: the lane set; the place in its chain, its partition; how many of both its unit has."""
US, RELEASE, CAME, LAST = range(4)
"""Rows of times: how long a task takes, its unit's release; scratch: when it comes, at the earliest and the latest."""
EARLIEST, LATEST = range(2)
"""Rows of a state's windows, within which a task starts."""
OPEN, KNOWN = 0, 2
"""Sides of a pair (i, j): neither order, or one that says no more. 1: i comes first, -1: j."""

Buffers = tuple[Wholes, Reals, Shorts, Shorts, Shorts, Wholes, Reals, Bytes, Shorts, Wholes]


@inner_kernel
def _buffers(units: int) -> Buffers:
    """Tasks and their times; pairs by number, and numbers by pair; tasks by lane, and how many.

    Then by state, one for each unit that is laid and those of a search: windows, sides, active pairs and how many.
    """
    states = units + DEEPEST
    return (
        np.empty((5, MOST_TASKS), dtype=np.int64),
        np.empty((4, MOST_TASKS)),
        np.empty((2, MOST_PAIRS), dtype=np.int16),
        np.empty((MOST_TASKS, MOST_TASKS), dtype=np.int16),
        np.empty((NUM_LANES, MOST_TASKS), dtype=np.int16),
        np.empty(NUM_LANES, dtype=np.int64),
        np.empty((states, 2, MOST_TASKS)),
        np.empty((states, MOST_PAIRS), dtype=np.int8),
        np.empty((states, MOST_PAIRS), dtype=np.int16),
        np.zeros(states, dtype=np.int64),
    )


@inner_kernel
def _decide(a: int, b: int, tasks: Wholes, pair_of: Shorts, sides: Bytes) -> bool:
    """a comes before b: what that says of all before a and all after b is known. False if it contradicts a pair."""
    for part in range(tasks[PART, a] + 1):
        for place in range(tasks[PLACE, a] + 1):
            i = a - (tasks[PART, a] - part) * tasks[LENGTH, a] - tasks[PLACE, a] + place
            for later in range(tasks[COUNT, b] - tasks[PART, b]):
                for after in range(tasks[LENGTH, b] - tasks[PLACE, b]):
                    j = b + later * tasks[LENGTH, b] + after
                    pair = pair_of[min(i, j), max(i, j)]
                    if pair >= 0 and sides[pair] != KNOWN:
                        if sides[pair] == (-1 if i < j else 1):
                            return False
                        sides[pair] = KNOWN
    pair = pair_of[min(a, b), max(a, b)]
    sides[pair] = 1 if a < b else -1
    return True


@inner_kernel
def _tight(n: int, buffers: Buffers, at: int, slack: float) -> tuple[bool, int]:
    """Draw a state's windows tight and decide what is left one way. Whether a schedule may be left; pairs looked at."""
    tasks, times, pairs, pair_of, _, _, windows, all_sides, all_active, counts = buffers
    us, release, came, last = times[US], times[RELEASE], times[CAME], times[LAST]
    place, part, length = tasks[PLACE], tasks[PART], tasks[LENGTH]
    early, late, sides, active = windows[at, EARLIEST], windows[at, LATEST], all_sides[at], all_active[at]
    spent = 0
    changed = True
    while changed:
        changed = False
        for i in range(n):
            came[i] = release[i]
            if place[i] > 0:
                came[i] = early[i - 1] + us[i - 1]
                early[i] = max(early[i], came[i])
            if part[i] > 0:
                k = (i - length[i]) & POSITIVE
                early[i] = max(early[i], early[k] + us[k])
            if early[i] > late[i] + slack:
                return False, spent
        for i in range(n - 1, -1, -1):
            if place[i] > 0:
                late[i - 1] = min(late[i - 1], late[i] - us[i - 1])
            if part[i] > 0:
                k = (i - length[i]) & POSITIVE
                late[k] = min(late[k], late[i] - us[k])
        for i in range(n):
            last[i] = late[i - 1] + us[i - 1] if place[i] > 0 else late[i]
        spent += counts[at] + n
        kept = 0
        for position in range(counts[at]):
            pair = active[position] & POSITIVE
            side = sides[pair]
            if side == KNOWN:
                continue
            a, b = pairs[0, pair] & POSITIVE, pairs[1, pair] & POSITIVE
            if side == OPEN:
                first = early[a] + us[a] <= late[b] + slack and came[a] <= last[b] + slack
                other = early[b] + us[b] <= late[a] + slack and came[b] <= last[a] + slack
                if first and other:
                    active[kept] = pair
                    kept += 1
                    continue
                if not first:
                    a, b = b, a
                if not (first or other) or not _decide(a, b, tasks, pair_of, sides):
                    return False, spent
                changed = True
            elif side == -1:
                a, b = b, a
            if came[a] > last[b] + slack:
                return False, spent
            if early[a] + us[a] > early[b] + slack:
                early[b] = early[a] + us[a]
                changed = True
            if late[b] - us[a] < late[a] - slack:
                late[a] = late[b] - us[a]
                changed = True
            if came[a] > came[b] + slack and place[b] > 0:
                came[b] = came[a]
                early[b - 1] = came[a] - us[b - 1]
                changed = True
            if last[b] < last[a] - slack and place[a] > 0:
                last[a] = last[b]
                late[a - 1] = last[b] - us[a - 1]
                changed = True
            if late[a] + us[a] <= early[b] and last[a] <= came[b]:
                sides[pair] = KNOWN
            else:
                active[kept] = pair
                kept += 1
        counts[at] = kept
    return True, spent


@inner_kernel
def _by_lane(n: int, buffers: Buffers) -> None:
    """Note which tasks each lane has to do."""
    tasks, times, _, _, of_lane, lane_counts, _, _, _, _ = buffers
    lane_counts[:] = 0
    for i in range(n):
        held = LANES_OF_SET[tasks[SET, i]]
        for k in range(3):
            if times[US, i] > 0.0 and (k == 0 or held[k] != held[k - 1]):
                of_lane[held[k], lane_counts[held[k]]] = i
                lane_counts[held[k]] += 1


@inner_kernel
def _overfull(buffers: Buffers, at: int, slack: float) -> tuple[bool, int]:
    """Whether some lane cannot do all its tasks in time, even if it may break off; and pairs looked at."""
    _, times, _, _, of_lane, lane_counts, windows, _, _, _ = buffers
    us, early, late = times[US], windows[at, EARLIEST], windows[at, LATEST]
    spent = 0
    for lane in range(NUM_LANES):
        size = lane_counts[lane]
        mine = of_lane[lane]
        # In order of their latest ends; nearly so from last time.
        for k in range(1, size):
            i = mine[k] & POSITIVE
            due = late[i] + us[i]
            place = k
            while place > 0 and late[mine[place - 1]] + us[mine[place - 1]] > due:
                mine[place] = mine[place - 1]
                place -= 1
            mine[place] = i
        for k in range(size):
            begin = early[mine[k]]
            end = begin
            for m in range(size):
                j = mine[m] & POSITIVE
                if early[j] >= begin:
                    end += us[j]
                    if end > late[j] + us[j] + slack:
                        return True, spent
        spent += size * size
    return False, spent


@inner_kernel
def _served(n: int, buffers: Buffers) -> float:
    """When all tasks are done if they alone are served, first come first served."""
    tasks, times, _, _, _, _, _, _, _, _ = buffers
    us, came = times[US], times[CAME]
    free = np.zeros(NUM_LANES)
    end = 0.0
    for i in range(n):
        came[i] = times[RELEASE, i] if tasks[PLACE, i] == 0 else np.inf
    for _ in range(n):
        at = 0
        for i in range(n):
            if came[i] < came[at]:
                at = i
        held = LANES_OF_SET[tasks[SET, at]]
        done = came[at]
        if us[at] > 0.0:
            done = max(max(done, free[held[0]]), max(free[held[1]], free[held[2]])) + us[at]
            free[held[0]] = free[held[1]] = free[held[2]] = done
        end = max(end, done)
        came[at] = np.inf
        if tasks[PLACE, at] + 1 < tasks[LENGTH, at]:
            came[at + 1] = done
    return end


@inner_kernel
def _copy(n: int, num_pairs: int, buffers: Buffers, at: int, to: int) -> None:
    """Copy a state."""
    _, _, _, _, _, _, windows, sides, active, counts = buffers
    for row in range(2):
        for i in range(n):
            windows[to, row, i] = windows[at, row, i]
    for pair in range(num_pairs):
        sides[to, pair] = sides[at, pair]
    for k in range(counts[at]):
        active[to, k] = active[at, k]
    counts[to] = counts[at]


@inner_kernel
def _hasten(n: int, buffers: Buffers, at: int, end: float) -> None:
    """All of a state's tasks end by ``end``."""
    _, times, _, _, _, _, windows, _, _, _ = buffers
    for i in range(n):
        windows[at, LATEST, i] = min(windows[at, LATEST, i], end - times[US, i])


@inner_kernel
def _refuted(n: int, num_pairs: int, buffers: Buffers, base: int, end: float, limit: int) -> tuple[bool, int]:
    """Whether no schedule of a state ends by ``end``; and pairs looked at, at most about ``limit``."""
    tasks, times, pairs, pair_of, _, _, windows, all_sides, all_active, counts = buffers
    slack = 1e-9 * end
    at, spent = base + 1, 0
    _copy(n, num_pairs, buffers, base, at)
    _hasten(n, buffers, at, end)
    while at > base:
        left, took = _tight(n, buffers, at, slack)
        spent += took
        if left:
            full, took = _overfull(buffers, at, slack)
            spent += took
            left = not full
        if not left:
            at -= 1
            continue
        chosen, least = -1, np.inf
        early, late, sides, active = windows[at, EARLIEST], windows[at, LATEST], all_sides[at], all_active[at]
        for position in range(counts[at]):
            pair = active[position]
            if sides[pair] == OPEN:
                i, j = pairs[0, pair], pairs[1, pair]
                room = max(late[j] - early[i] - times[US, i], late[i] - early[j] - times[US, j])
                if room < least:
                    chosen, least = pair, room
        if chosen < 0 or spent > limit or at + 1 == counts.shape[0]:
            return False, spent
        i, j = pairs[0, chosen], pairs[1, chosen]
        _copy(n, num_pairs, buffers, at, at + 1)
        one = _decide(i, j, tasks, pair_of, all_sides[at + 1])
        other = _decide(j, i, tasks, pair_of, sides)
        if one and not other:
            _copy(n, num_pairs, buffers, at + 1, at)
        at += one + other - 1
    return True, spent


@inner_kernel
def _lay(
    row: int, release: float, work: Tasks, n: int, num_pairs: int, buffers: Buffers, at: int
) -> tuple[int, int]:  # fmt: skip
    """Add a unit's tasks to those of state ``at``, with every pair that can meet: how many of both there are then."""
    sets, whole_us, last_us, sizes = work
    tasks, times, pairs, pair_of, _, _, windows, all_sides, all_active, counts = buffers
    sides, active = all_sides[at], all_active[at]
    begin, before = n, num_pairs
    length, count = sizes[row, 0], sizes[row, 1]
    for part in range(count):
        for place in range(length):
            tasks[SET, n], tasks[PLACE, n], tasks[PART, n] = sets[row, place], place, part
            tasks[LENGTH, n], tasks[COUNT, n] = length, count
            times[US, n] = whole_us[row, place] if part < count - 1 else last_us[row, place]
            times[RELEASE, n] = windows[at, EARLIEST, n] = release
            windows[at, LATEST, n] = np.inf
            for i in range(n):
                pair_of[i, n] = -1
                same = i >= begin
                # Along a chain, and among the same tasks of one unit's partitions, the order is known.
                known = same and tasks[PLACE, i] <= place
                if known or not SHARE[tasks[SET, i], tasks[SET, n]] or times[US, i] == 0.0 or times[US, n] == 0.0:
                    continue
                pairs[0, num_pairs], pairs[1, num_pairs] = i, n
                pair_of[i, n] = num_pairs
                # What a unit begins with comes before all else of it, and of units handed over later.
                sides[num_pairs] = OPEN
                if tasks[PLACE, i] == 0 and times[RELEASE, i] < release:
                    sides[num_pairs] = 1
                elif place == 0 and (same or release < times[RELEASE, i]):
                    sides[num_pairs] = -1
                active[counts[at] + num_pairs - before] = num_pairs
                num_pairs += 1
            n += 1
    counts[at] += num_pairs - before
    for pair in range(before, num_pairs):
        if sides[pair] == 1:
            _decide(pairs[0, pair], pairs[1, pair], tasks, pair_of, sides)
        elif sides[pair] == -1:
            _decide(pairs[1, pair], pairs[0, pair], tasks, pair_of, sides)
    return n, num_pairs


@inner_kernel
def _least(
    n: int, num_pairs: int, buffers: Buffers, base: int, low: float, high: float, limit: int
) -> tuple[float, int]:  # fmt: skip
    """The highest time found, from ``low`` to ``high``, by which no schedule of a state ends; and pairs looked at."""
    spent = 0
    for _ in range(BISECTIONS if low < high else 0):
        middle = (low + high) / 2
        gone, took = _refuted(n, num_pairs, buffers, base, middle, limit)
        spent += took
        if gone:
            low = middle
        else:
            high = middle
    return low, spent


@kernel
def least_end(
    rows_first: Wholes, rows_last: Wholes, order: Wholes, release: Reals, backward: float, loads: Reals, excess: Reals,
    root: float, spends: Reals, limits: Reals, work: Tasks, above: float, limit: int,
) -> tuple[float, int]:  # fmt: skip
    """A bound over all choices of the largest units, and what it took; above ``limit`` there is none (-inf).

    Args:
        rows_first, rows_last: int64[units], in order of release: each unit's rows, the most promising first.
        order: in which order units are decided.
        loads: float64[rows, lanes]: time on every lane.
        excess: float64[rows]: what a row costs more than its unit's cheapest under weights whose bound is ``root``.
        spends: float64[rows, budgets]: what a row spends of the ``limits``.
        above: as far as the bound matters.
    """
    units = order.shape[0]
    lanes = loads.shape[1]
    picked = np.full(units, -1, dtype=np.int64)
    cursor = np.zeros(units, dtype=np.int64)
    budgets = limits.shape[0]
    least, thrifty = np.full((units, lanes), np.inf), np.full((units, budgets), np.inf)
    for unit in range(units):
        for row in range(rows_first[unit], rows_last[unit]):
            for lane in range(lanes):
                least[unit, lane] = min(least[unit, lane], loads[row, lane])
            for budget in range(budgets):
                thrifty[unit, budget] = min(thrifty[unit, budget], spends[row, budget])
    # By depth: a state with the units down to there, and how many tasks and pairs it has.
    buffers = _buffers(units)
    sizes = work[3]
    num_tasks, num_pairs = np.zeros(units + 1, dtype=np.int64), np.zeros(units + 1, dtype=np.int64)
    best, spent, depth = above, 0, 0
    cursor[0] = rows_first[order[0]]
    while depth >= 0:
        if spent > limit:
            return -np.inf, spent
        unit = order[depth]
        if cursor[depth] >= rows_last[unit]:
            picked[unit] = -1
            depth -= 1
            continue
        row = cursor[depth]
        picked[unit] = row
        cursor[depth] += 1
        spent += 4 * units
        # The cheap bounds: the weights', every lane's, and what the budgets allow.
        bound = root
        for u in range(units):
            if picked[u] >= 0:
                bound += excess[picked[u]]
        if bound >= best:
            cursor[depth] = rows_last[unit]  # those that follow cost more still
        for lane in range(lanes):
            if bound >= best:
                break
            load = 0.0
            for u in range(units - 1, -1, -1):
                load += loads[picked[u], lane] if picked[u] >= 0 else least[u, lane]
                bound = max(bound, load + (release[u] if lane > 0 else backward))
        for budget in range(budgets):
            spends_all = 0.0
            for u in range(units):
                spends_all += spends[picked[u], budget] if picked[u] >= 0 else thrifty[u, budget]
            if spends_all > limits[budget]:
                bound = np.inf
        if bound >= best:
            continue
        n, pairs = num_tasks[depth], num_pairs[depth]
        is_last = depth == units - 1
        fits = n >= 0 and n + sizes[row, 0] * sizes[row, 1] <= MOST_TASKS
        if fits:
            if depth > 0:
                _copy(n, pairs, buffers, depth - 1, depth)
            else:
                buffers[9][0] = 0
            begin = n
            n, pairs = _lay(row, release[unit], work, n, pairs, buffers, depth)
            _hasten(n, buffers, depth, best)
            left, took = _tight(n, buffers, depth, 1e-9 * best)
            spent += took + (n - begin) * n
            if not left:
                continue
            _by_lane(n, buffers)
            full, took = _overfull(buffers, depth, 1e-9 * best)
            spent += took
            if full:
                continue
            served = _served(n, buffers)
            spent += n * n
            if served > best:
                gone, took = _refuted(n, pairs, buffers, depth, best, LONGER if is_last else EACH)
                spent += took
                if gone:
                    continue
            if is_last:
                best, took = _least(n, pairs, buffers, depth, bound, min(best, served), LONGER)
                spent += took
        elif is_last:
            best = bound
        if not is_last:
            depth += 1
            cursor[depth] = rows_first[order[depth]]
            num_tasks[depth], num_pairs[depth] = n if fits else -1, pairs
    return best, spent


@kernel
def least_alone(row: int, work: Tasks, low: float, high: float, limit: int) -> tuple[float, int]:
    """No schedule of one unit's tasks alone ends before this after its release; and what it took.

    Args:
        low: a bound that is known.
        high: as far as the bound matters.
        limit: pairs to look at for each time that is tried, at most about.
    """
    sizes = work[3]
    if sizes[row, 0] * sizes[row, 1] > MOST_TASKS:
        return low, 0
    buffers = _buffers(1)
    n, num_pairs = _lay(row, 0.0, work, 0, 0, buffers, 0)
    _by_lane(n, buffers)
    served = _served(n, buffers)
    spent = n * n
    if served > high:
        gone, spent = _refuted(n, num_pairs, buffers, 0, high, limit)
        if gone:
            return high, spent
    found, took = _least(n, num_pairs, buffers, 0, low, min(high, served), limit)
    return found, spent + took
