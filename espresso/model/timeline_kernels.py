"""The timeline over flat arrays, for searches: first come first served, makespan only, resumable.

Two kernels with one interface. ``advance_serial`` is for jobs whose tasks follow one another on every lane, with no
cores shared: a task's end is then known when it is queued, and every lane set emits its completions in order, so that
a few FIFO heads replace an event heap. ``advance_general`` is for all jobs: cores shared by whatever runs (max-min
fair), latency, and lanes with room for several tasks, as in the oracle, operation by operation, so that both round
alike.

Arrays of one evaluation (U units, B buckets, C candidates, T task rows): ``choice`` int64[U], every unit's candidate,
and the job's, in one tuple (:data:`JobArrays`)::

    gaps         float64[B]      backward's
    first_unit   int64[B + 1]    the units that each bucket hands over
    count        int64[C]        a candidate's partitions: ``count - 1`` times the chain that starts
    full, tail   int64[C]        at row ``full``, then the chain at row ``tail``
    task_set     int64[T]        index into ``LANE_SETS``, -1 ends a chain
    task_us      float64[T]
    task_beside  float64[T, 2]   cores, latency
    limits       float64[21]     cores shared (0: none), backward's demand; then see :func:`limits_of`
    loads, ready, finish         scratch: float64[NUM_LANES]; when buckets are handed over and units end

State (made by :func:`make_state`), a ring of tasks per lane set (end or arrival, row, key) and two vectors::

    real   0-6 lanes free, 7 backward's next hand-over, 8-10 its work left, since, rate, 11 latest, 12 now
           13-15 what of a card's burst is spent, since when it rests, what all that was sent takes (general only)
           16-31 end of each ring's head
           80-86 time that each lane stood idle before its last task (serial only); 80: neither backward nor training
           96-   active tasks, four figures each: end, work left, since, rate (general only)
    whole  0 next bucket, 1 arrivals, 2 events so far, 3 whether there are servers, 4 number of active tasks
           16-31 ring fronts, 32-47 ring rears, 48-55 tasks that hold a lane, 56-63 that do or are under way
           64-   active tasks, by lane set: set, row, key, whether it has left its lanes (general only)

It is copied with :func:`copy_state` to resume from the event at which a changed unit is handed over.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from espresso.model.arrays import Reals, Wholes
from espresso.model.costs import CostModel
from espresso.model.jit import inner_kernel, kernel
from espresso.model.links import MOST_IN_FLIGHT
from espresso.model.timeline import widths_of
from espresso.strategies import Cluster, Lane
from espresso.strategies.list_scheduling import Width

State = tuple[Reals, Wholes, Reals, Wholes, Wholes]
JobArrays = tuple[Any, ...]
General = bool | None
"""Which kernel advances: True, or None and not False, so that kernels are compiled for the one case alone."""

NUM_SETS = 9
NUM_RANK_SETS = 6
"""The first sets are those of ranks; the others need servers."""
NUM_LANES = 7
BACK, LATEST, NOW, SPENT, RESTS, SENT = 7, 11, 12, 13, 14, 15
END, IDLE, ACTIVE = 16, 80, 96
"""Places in the real vector; the last three are bases: one entry per lane set, per lane, four per active task."""
LEFT, SINCE, RATE = 1, 2, 3
"""Places beside an active task's end, or backward's."""
MARGIN = 1.0 + 1e-11
"""What is cut off must be sure to reach its limit; sums round."""
EVENTS = 2
"""Where a state counts its events: hand-overs and completed tasks (a chain's last one as soon as its end is known)."""
SERVED, NUM_ACTIVE = 3, 4
FRONT, REAR, HOLDING, UNDER_WAY, TASKS = 16, 32, 48, 56, 64
"""Bases in the whole vector."""
ROW, KEY, AWAY = 1, 2, 3
"""Places of an active task in it, its lane set first."""
ROOM = 2
ROOM_UNDER_WAY = ROOM + NUM_LANES + 1
"""Where the limits say how many tasks a lane has room for: that hold it, and that hold it or are under way."""
CREDIT = ROOM_UNDER_WAY + NUM_LANES + 1
"""Where they say what a card's full token bucket saves, what no exchange takes less than, and, of what is sent on
average, forward's and the optimizer's part."""
BURST_LANE = 4
POSITIVE = (1 << 62) - 1
"""Masks what is never negative: the compiler then leaves out Python's counting of indices from the end."""
KEY_SHIFT = 24
"""Ring keys order ties: unit number above, partition number below this bit."""

_LANES = (Lane.TRAINING, Lane.OFFLOAD, Lane.COPY, Lane.INTRA, Lane.INTER_OUT, Lane.INTER_IN, Lane.SERVER)
# Three lanes of each set, repeated where it has fewer: training 0, offload 1, copy 2, intra 3, out 4, in 5, the
# servers' processors 6. What enters or leaves the servers' network cards holds a worker's card as long, and
# nothing else goes there, so those lanes need no queue of their own.
LANES_OF_SET = np.array(
    [
        [0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 5, 5], [3, 4, 5], [4, 4, 4], [5, 5, 5], [6, 6, 6],
    ],
    dtype=np.int64,
)  # fmt: skip
# The same with a lane of unlimited room, 7, for repetitions.
DISTINCT_LANES = np.array(
    [[lane if lane not in row[:k] else NUM_LANES for k, lane in enumerate(row)] for row in LANES_OF_SET.tolist()],
    dtype=np.int64,
)
# Which sets hold a lane in common; only those of links do.
FIRST_LINK, LAST_LINK = 3, 7
SHARE = np.array([[bool(set(a) & set(b)) for b in LANES_OF_SET.tolist()] for a in LANES_OF_SET.tolist()])


def make_state(num_partitions: int, most_active: int) -> State:
    """Buffers for evaluations of up to ``num_partitions`` partitions, ``most_active`` tasks at once (general only)."""
    capacity = 8
    while capacity < num_partitions + 1:
        capacity *= 2
    return (
        np.zeros(ACTIVE + 4 * most_active),
        np.zeros(TASKS + 4 * most_active, dtype=np.int64),
        np.zeros((NUM_SETS, capacity)),
        np.zeros((NUM_SETS, capacity), dtype=np.int64),
        np.zeros((NUM_SETS, capacity), dtype=np.int64),
    )


def limits_of(costs: CostModel, cluster: Cluster, beside_us: float = 0.0) -> Reals:
    """What shares the cores, how many tasks each lane has room for, and bursts: ``limits`` of a job's arrays.

    ``beside_us`` is what forward and the optimizer take.
    """
    widths = widths_of(costs)
    room = [*(widths.get(lane, Width()) for lane in _LANES), Width(MOST_IN_FLIGHT**2, MOST_IN_FLIGHT**2)]
    figures = (costs.contention.cores or 0.0, costs.contention.backward_cores)
    widths_of_lanes = (*(w.holding for w in room), *(w.under_way for w in room))
    return np.array([*figures, *widths_of_lanes, *costs.links.burst(cluster), beside_us], dtype=float)


@inner_kernel
def _begin(real: Reals, end: int, work: float) -> None:
    """What will end at ``real[end]`` begins: a task's work, its latency, backward's next gap."""
    real[end] = real[NOW] + work
    real[end + LEFT] = work
    real[end + SINCE] = real[NOW]
    real[end + RATE] = 1.0


def reset(state: State, gaps: Reals, served: bool) -> None:
    """Go to the start of backward of a job with or without servers."""
    real, whole, _, _, _ = state
    real[:] = 0.0
    whole[:] = 0
    whole[SERVED] = 1 if served else 0
    for s in range(NUM_SETS):
        real[END + s] = np.inf
    _begin(real, BACK, gaps[0])


@inner_kernel
def copy_vector(source: Any, target: Any) -> None:
    """Copy a vector of numbers. (Assigning to a slice compiles Numba's text functions too, for its error message.)"""
    for i in range(source.shape[0]):
        target[i] = source[i]


@kernel
def copy_state(source: State, target: State) -> None:
    """Make ``target`` equal to ``source``: vectors, and the queued tasks only."""
    copy_vector(source[0], target[0])
    copy_vector(source[1], target[1])
    mask = source[2].shape[1] - 1
    for s in range(NUM_SETS):
        for position in range(source[1][FRONT + s], source[1][REAR + s]):
            slot = position & mask
            target[2][s, slot] = source[2][s, slot]
            target[3][s, slot] = source[3][s, slot]
            target[4][s, slot] = source[4][s, slot]


@inner_kernel
def add_loads(candidate: int, sign: float, job: JobArrays) -> None:
    """Add (or, with ``sign`` -1, take away) what a candidate's tasks take on each lane."""
    _, _, count, full, tail, task_set, task_us, _, _, loads, _, _ = job
    copies = count[candidate] - 1
    for part in range(2):
        times = sign if part else sign * copies
        row = tail[candidate] if part else full[candidate]
        while times != 0.0 and task_set[row] >= 0:
            us = task_us[row] * times
            lanes = LANES_OF_SET[task_set[row]]
            loads[lanes[0]] += us
            if lanes[1] != lanes[0]:
                loads[lanes[1]] += us
            if lanes[2] != lanes[1]:
                loads[lanes[2]] += us
            row += 1


@inner_kernel
def total_loads(choice: Wholes, job: JobArrays) -> None:
    """What a strategy takes of each lane, from start to end: ``loads`` float64[NUM_LANES].

    Backward's own time is added to the training lane's, since both must pass one after the other. No lane is done
    before this and the time that it stood idle.
    """
    gaps, loads = job[0], job[9]
    loads[:] = 0.0
    for gap in gaps:
        loads[0] += gap
    for unit in range(choice.shape[0]):
        add_loads(choice[unit], 1.0, job)


@inner_kernel
def hopeless(state: State, loads: Reals, limit: float) -> bool:
    """Whether idle time so far and loads alone reach ``limit``. Rounding adds up over the tasks: by a margin."""
    real = state[0]
    found = False
    for lane in range(NUM_LANES):
        found |= real[IDLE + lane] + loads[lane] >= limit * MARGIN
    return found


@kernel
def advance_serial(state: State, choice: Wholes, stop: int, limit: float, job: JobArrays) -> float:
    """Run events up to the hand-over of bucket ``stop`` (beyond the last: to the end).

    A chain's last task wakes nothing, so it is done with as soon as it is queued, and only others enter the rings.

    Args:
        limit: where finite, ``loads`` hold what the whole strategy takes of each lane (:func:`total_loads`): an
            evaluation in which this and the lane's idle time so far reach ``limit`` ends at once.

    Returns:
        The latest time so far, backward's included; infinity as soon as it is sure to reach ``limit``.
        ``ready`` float64[B] and ``finish`` float64[U] are filled along the way.
    """
    gaps, first_unit, count, full, tail, task_set, task_us, _, _, loads, ready, finish = job
    real, whole, ring_end, ring_row, ring_key = state
    mask = (ring_end.shape[1] - 1) & POSITIVE
    buckets = gaps.shape[0]
    bucket = whole[0]
    back = real[BACK]
    latest = real[LATEST]
    events = whole[EVENTS]
    served = whole[SERVED] > 0
    sure = limit * MARGIN
    # Of the bucket that is being handed over: the present unit, the end; its next partition, its last.
    unit = 0
    units = 0
    part = 0
    last = -1
    now = 0.0
    while True:
        if part > last and unit + 1 < units:
            unit = (unit + 1) & POSITIVE
            part = 0
            last = count[choice[unit] & POSITIVE] - 1
        if part <= last:
            candidate = choice[unit] & POSITIVE
            row = (full[candidate] if part < last else tail[candidate]) & POSITIVE
            key = (unit << KEY_SHIFT) + part
            part += 1
        else:
            at = np.inf
            s = -1
            for k in range(NUM_RANK_SETS):
                end = real[END + k]
                if end < at or (
                    end == at
                    and end < np.inf
                    and ring_key[k, whole[FRONT + k] & mask] < ring_key[s, whole[FRONT + s] & mask]
                ):
                    at = end
                    s = k
            if served:
                for k in range(NUM_RANK_SETS, NUM_SETS):
                    end = real[END + k]
                    if end < at or (
                        end == at
                        and end < np.inf
                        and ring_key[k, whole[FRONT + k] & mask] < ring_key[s, whole[FRONT + s] & mask]
                    ):
                        at = end
                        s = k
            if bucket < buckets and back < at:
                if bucket == stop:
                    break
                now = back
                events += 1
                ready[bucket] = now
                latest = max(latest, now)
                if latest >= limit:
                    whole[EVENTS] = events
                    return np.inf
                if bucket + 1 < buckets:
                    gap = gaps[bucket + 1]
                    # Work that began at this very moment holds the next gap up, but cannot undo this hand-over.
                    if gap > 0.0:
                        back = max(now, real[0])
                        real[IDLE] += back - now
                        back += gap
                else:
                    back = np.inf
                    free = max(now, real[0])
                    real[IDLE] += free - now
                    real[0] = free
                if real[IDLE] + loads[0] >= sure:
                    whole[EVENTS] = events
                    return np.inf
                unit = first_unit[bucket] - 1
                units = first_unit[bucket + 1]
                part = 0
                last = -1
                bucket += 1
                continue
            if s < 0:
                break
            events += 1
            now = at
            front = whole[FRONT + s]
            slot = front & mask
            row = (ring_row[s, slot] + 1) & POSITIVE
            key = ring_key[s, slot]
            front += 1
            whole[FRONT + s] = front
            real[END + s] = ring_end[s, front & mask] if front < whole[REAR + s] else np.inf
        s = task_set[row]
        if s < 0:
            continue
        us = task_us[row]
        if s == 0:
            free = real[0]
            start = max(now, free)
            end = start + us
            real[0] = end
            if back == np.inf:
                real[IDLE] += start - free
            elif start < back:
                back += us
            else:
                # The next gap will wait for it.
                real[IDLE] -= us
            over = real[IDLE] + loads[0] >= sure
        else:
            a = LANES_OF_SET[s, 0] & 7
            b = LANES_OF_SET[s, 1] & 7
            c = LANES_OF_SET[s, 2] & 7
            start = max(max(now, real[a]), max(real[b], real[c]))
            end = start + us
            idle_a = real[IDLE + a] + (start - real[a])
            idle_b = real[IDLE + b] + (start - real[b])
            idle_c = real[IDLE + c] + (start - real[c])
            real[IDLE + a] = idle_a
            real[IDLE + b] = idle_b
            real[IDLE + c] = idle_c
            real[a] = end
            real[b] = end
            real[c] = end
            over = (idle_a + loads[a] >= sure) | (idle_b + loads[b] >= sure) | (idle_c + loads[c] >= sure)
        latest = max(latest, end)
        if over | (latest >= limit):
            whole[EVENTS] = events
            return np.inf
        if task_set[row + 1] < 0:
            # Partitions pass the same lane sets in order, so the last one to be queued is the last to end.
            finish[(key >> KEY_SHIFT) & POSITIVE] = end
            events += 1
            continue
        rear = whole[REAR + s]
        slot = rear & mask
        ring_end[s, slot] = end
        ring_row[s, slot] = row
        ring_key[s, slot] = key
        if rear == whole[FRONT + s]:
            real[END + s] = end
        whole[REAR + s] = rear + 1
    whole[0] = bucket
    whole[EVENTS] = events
    real[BACK] = back
    real[LATEST] = latest
    return float(latest)


@inner_kernel
def _go_on_at(real: Reals, end: int, value: float) -> None:
    """What ends at ``real[end]`` goes on at another rate. (At the same one its end stays exactly as it was.)"""
    now = real[NOW]
    left = max(real[end + LEFT] - (now - real[end + SINCE]) * real[end + RATE], 0.0)
    real[end + LEFT] = left
    real[end + SINCE] = now
    real[end + RATE] = value
    # Nothing left is done, whatever the rate; else at rate zero there is no end.
    real[end] = now + (left / value if left > 0.0 else 0.0)


@inner_kernel
def _have_room(whole: Wholes, limits: Reals, s: int) -> bool:
    """Whether the lanes of a set have room for one more task. (Without branches it needs no counting of references.)"""
    a, b, c = DISTINCT_LANES[s, 0], DISTINCT_LANES[s, 1], DISTINCT_LANES[s, 2]
    holding = (
        (whole[HOLDING + a] < limits[ROOM + a])
        & (whole[HOLDING + b] < limits[ROOM + b])
        & (whole[HOLDING + c] < limits[ROOM + c])
    )
    under_way = (
        (whole[UNDER_WAY + a] < limits[ROOM_UNDER_WAY + a])
        & (whole[UNDER_WAY + b] < limits[ROOM_UNDER_WAY + b])
        & (whole[UNDER_WAY + c] < limits[ROOM_UNDER_WAY + c])
    )
    return bool(holding & under_way)


@inner_kernel
def _occupy(whole: Wholes, s: int, holding: int, under_way: int) -> None:
    """So many more tasks of a lane set hold its lanes, and hold them or are under way."""
    a, b, c = DISTINCT_LANES[s, 0], DISTINCT_LANES[s, 1], DISTINCT_LANES[s, 2]
    whole[HOLDING + a] += holding
    whole[HOLDING + b] += holding
    whole[HOLDING + c] += holding
    whole[UNDER_WAY + a] += under_way
    whole[UNDER_WAY + b] += under_way
    whole[UNDER_WAY + c] += under_way


@inner_kernel
def _sent(real: Reals, limits: Reals, us: float, cores: float) -> float:
    """What an exchange takes that begins now: less by what its card's token bucket holds."""
    real[SENT] += us
    spent = max(real[SPENT] - (real[NOW] - real[RESTS]), 0.0)
    work = max(us - (limits[CREDIT] - spent), min(us, max(limits[CREDIT + 1], us * cores)))
    real[SPENT] = spent + (us - work)
    real[RESTS] = real[NOW] + work
    return float(work)


@inner_kernel
def _queue(
    whole: Wholes, ring_came: Reals, ring_row: Wholes, ring_key: Wholes, s: int, row: int, key: int
) -> None:  # fmt: skip
    """A task becomes ready."""
    slot = whole[REAR + s] & ((ring_row.shape[1] - 1) & POSITIVE)
    ring_came[s, slot] = whole[1]
    ring_row[s, slot] = row
    ring_key[s, slot] = key
    whole[REAR + s] += 1
    whole[1] += 1


@kernel
def advance_general(state: State, choice: Wholes, stop: int, limit: float, job: JobArrays) -> float:
    """As :func:`advance_serial`. ``loads`` is not used: lanes have no end here until their tasks have theirs.

    Rings hold arrival numbers for ends.
    """
    gaps, first_unit, count, full, tail, task_set, task_us, task_beside, limits, _, ready, finish = job
    real, whole, ring_came, ring_row, ring_key = state
    mask = (ring_row.shape[1] - 1) & POSITIVE
    buckets = gaps.shape[0]
    most = (real.shape[0] - ACTIVE) // 4 + 1
    demands = np.empty(most)
    rates = np.empty(most)
    who = np.empty(most, dtype=np.int64)
    waiting = np.empty(most, dtype=np.int64)
    while True:
        at = np.inf
        first = -1
        for k in range(whole[NUM_ACTIVE]):
            end = real[ACTIVE + 4 * k]
            if end < at or (end == at and whole[TASKS + 4 * k + KEY] < whole[TASKS + 4 * first + KEY]):
                at = end
                first = k
        bucket = whole[0]
        hands_over = bucket < buckets and real[BACK] < at
        if (hands_over and bucket == stop) or (not hands_over and first < 0):
            break
        now = real[BACK] if hands_over else at
        whole[EVENTS] += 1
        real[NOW] = now
        if now > real[LATEST]:
            real[LATEST] = now
            if now >= limit:
                return np.inf
        if hands_over:
            ready[bucket] = now
            for unit in range(first_unit[bucket], first_unit[bucket + 1]):
                candidate = choice[unit]
                last = count[candidate] - 1
                for part in range(last + 1):
                    row = full[candidate] if part < last else tail[candidate]
                    if task_set[row] >= 0:
                        key = (unit << KEY_SHIFT) + part
                        _queue(whole, ring_came, ring_row, ring_key, task_set[row], row, key)
            whole[0] = bucket + 1
            if bucket + 1 < buckets:
                _begin(real, BACK, gaps[bucket + 1])
            else:
                real[BACK] = np.inf
        else:
            s = whole[TASKS + 4 * first]
            row = whole[TASKS + 4 * first + ROW]
            key = whole[TASKS + 4 * first + KEY]
            leaves = whole[TASKS + 4 * first + AWAY] == 0
            done = task_beside[row, 1] == 0.0 or not leaves
            _occupy(whole, s, -1 if leaves else 0, -1 if done else 0)
            if done:
                whole[NUM_ACTIVE] -= 1
                for k in range(4 * first, 4 * whole[NUM_ACTIVE]):
                    whole[TASKS + k] = whole[TASKS + k + 4]
                    real[ACTIVE + k] = real[ACTIVE + k + 4]
                if task_set[row + 1] < 0:
                    finish[key >> KEY_SHIFT] = now
                else:
                    _queue(whole, ring_came, ring_row, ring_key, task_set[row + 1], row + 1, key)
            else:
                whole[TASKS + 4 * first + AWAY] = 1
                _begin(real, ACTIVE + 4 * first, task_beside[row, 1])
        # Start every waiting head whose lanes have room, and wait for no earlier arrival.
        for s in range(NUM_SETS):
            while whole[FRONT + s] < whole[REAR + s]:
                slot = whole[FRONT + s] & mask
                turn = _have_room(whole, limits, s)
                for other in range(FIRST_LINK, LAST_LINK + 1):
                    if other != s and SHARE[s, other] and whole[FRONT + other] < whole[REAR + other]:
                        turn &= ring_came[other, whole[FRONT + other] & mask] > ring_came[s, slot]
                if not turn:
                    break
                whole[FRONT + s] += 1
                _occupy(whole, s, 1, 1)
                # It becomes active, behind the tasks of the same and earlier sets.
                place = whole[NUM_ACTIVE]
                whole[NUM_ACTIVE] = place + 1
                while place > 0 and whole[TASKS + 4 * (place - 1)] > s:
                    for k in range(4):
                        whole[TASKS + 4 * place + k] = whole[TASKS + 4 * (place - 1) + k]
                        real[ACTIVE + 4 * place + k] = real[ACTIVE + 4 * (place - 1) + k]
                    place -= 1
                row = ring_row[s, slot]
                whole[TASKS + 4 * place] = s
                whole[TASKS + 4 * place + ROW] = row
                whole[TASKS + 4 * place + KEY] = ring_key[s, slot]
                whole[TASKS + 4 * place + AWAY] = 0
                us = task_us[row]
                if limits[CREDIT] > 0.0 and LANES_OF_SET[s, 0] <= BURST_LANE <= LANES_OF_SET[s, 1]:
                    us = _sent(real, limits, us, task_beside[row, 0])
                _begin(real, ACTIVE + 4 * place, us)
        if limits[0] > 0.0:
            # Max-min fair rates for backward and the tasks that hold a lane, in the order of their sets.
            capacity = limits[0]
            active = 0
            total = 0.0
            if whole[0] < buckets:
                demands[active] = limits[1]
                who[active] = BACK
                total += limits[1]
                active += 1
            for k in range(whole[NUM_ACTIVE]):
                if not whole[TASKS + 4 * k + AWAY]:
                    demands[active] = task_beside[whole[TASKS + 4 * k + ROW], 0]
                    who[active] = ACTIVE + 4 * k
                    total += demands[active]
                    active += 1
            for i in range(active):
                rates[i] = 1.0
                waiting[i] = i
            if total > capacity:
                left = capacity
                waits = active
                while True:
                    fair = left / waits
                    unmet = 0
                    for j in range(waits):
                        if demands[waiting[j]] > fair:
                            unmet += 1
                    if unmet == waits:
                        for j in range(waits):
                            rates[waiting[j]] = fair / demands[waiting[j]]
                        break
                    kept = 0
                    for j in range(waits):
                        i = waiting[j]
                        if demands[i] <= fair:
                            left -= demands[i]
                        else:
                            waiting[kept] = i
                            kept += 1
                    waits = kept
            for i in range(active):
                if real[who[i] + RATE] != rates[i]:
                    _go_on_at(real, who[i], rates[i])
        elif whole[0] < buckets:
            # Nothing is shared, but training work holds backward up. (Active tasks of the first set come first.)
            rate = 0.0 if whole[NUM_ACTIVE] > 0 and whole[TASKS] == 0 else 1.0
            if rate != real[BACK + RATE]:
                _go_on_at(real, BACK, rate)
    if limits[CREDIT] > 0.0 and whole[0] == buckets:
        return float(max(real[LATEST], real[SENT] - limits[CREDIT + 2]))
    return float(real[LATEST])


@inner_kernel
def advance(general: General, state: State, choice: Wholes, stop: int, limit: float, job: JobArrays) -> Any:
    """By either kernel."""
    if general is not None:
        return advance_general(state, choice, stop, limit, job)
    return advance_serial(state, choice, stop, limit, job)


@kernel
def best_of(
    general: General, start: State, scratch: State, unit: int, candidates: Wholes, hint: int, choice: Wholes,
    limit: float, job: JobArrays,
) -> tuple[int, float]:  # fmt: skip
    """Try candidates for one unit, resuming from ``start``, where its bucket is about to be handed over.

    The candidate ``hint`` goes first, if it is among them: the likelier it is the best, the sooner the others end.

    Returns:
        The first best candidate strictly below ``limit`` and its makespan; (-1, limit) if there is none.
    """
    kept = choice[unit]
    best = -1
    place = candidates.shape[0]
    first = -1
    for index in range(candidates.shape[0]):
        if candidates[index] == hint:
            first = index
            break
    buckets = job[0].shape[0]
    total_loads(choice, job)
    present = kept
    for index in range(-1, candidates.shape[0]):
        if index == first:
            continue
        here = first if index < 0 else index
        candidate = candidates[here]
        # Of equal times the earliest in the list wins, in whatever order they are tried.
        allowed = np.nextafter(limit, np.inf) if best >= 0 and here < place else limit
        add_loads(present, -1.0, job)
        add_loads(candidate, 1.0, job)
        present = candidate
        if general is None and hopeless(start, job[9], allowed):
            continue
        choice[unit] = candidate
        copy_state(start, scratch)
        time = advance(general, scratch, choice, buckets + 1, allowed, job)
        if time < allowed:
            limit = time
            best = candidate
            place = here
    choice[unit] = kept
    return best, limit


@kernel
def evaluate_batch(
    general: General, start: State, scratch: State, batch: Wholes, limit: float, cut: bool, times: Reals, job: JobArrays
) -> tuple[int, float]:
    """Makespans of many strategies at once: ``batch`` int64[n, U] of choices, equal before ``start``.

    With ``cut`` every evaluation stops as soon as it cannot beat the best so far (its time is then infinity).

    Returns:
        The first best row strictly below ``limit`` and its makespan; (-1, limit) if there is none.
    """
    best = -1
    buckets = job[0].shape[0]
    for index in range(batch.shape[0]):
        bound = limit if cut else np.inf
        if cut and general is None:
            total_loads(batch[index], job)
            if hopeless(start, job[9], limit):
                times[index] = np.inf
                continue
        copy_state(start, scratch)
        time = advance(general, scratch, batch[index], buckets + 1, bound, job)
        times[index] = time
        if time < limit:
            limit = time
            best = index
    return best, limit
