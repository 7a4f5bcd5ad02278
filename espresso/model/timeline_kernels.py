"""The timeline over flat arrays, for searches: first come first served, makespan only, resumable.

Two kernels with one interface. ``advance_paper`` uses that without shared cores a task's end is known when
it is queued, and that every lane set emits its completions in order, so that a few FIFO heads replace an
event heap. ``advance_shared`` also shares cores among whatever runs (max-min fair), as the oracle does,
operation by operation, so that both round alike.

Arrays of one evaluation (U units, B buckets, C candidates, T task rows):

- ``gaps`` float64[B], ``first_unit`` int64[B + 1]: backward, and the units that each bucket hands over;
- ``choice`` int64[U]: every unit's candidate;
- ``count``, ``full``, ``tail`` int64[C]: a candidate's partitions: ``count - 1`` times the chain that starts
  at row ``full``, then the chain at row ``tail``;
- ``task_set`` int64[T] (index into ``LANE_SETS``, -1 ends a chain), ``task_us``, ``task_cores`` float64[T].

State (made by :func:`make_state`), a ring of tasks per lane set (end or arrival, row, key) and two vectors::

    real   0-6 lanes free, 7 backward's next hand-over, 8 latest, 9 now, 10-12 backward's work left, since, rate
           16-31 end of each ring's head, 32-47 work left, 48-63 since, 64-79 rate of running heads
           80-86 time that each lane stood idle before its last task (paper only); 80: neither backward nor training
    whole  0 next bucket, 1 arrivals, 2 events so far, 3 whether there are servers
           16-31 ring fronts, 32-47 ring rears, 48-63 whether the head runs

It is copied with :func:`copy_state` to resume from the event at which a changed unit is handed over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.model.jit import inner_kernel, kernel

Reals = npt.NDArray[np.float64]
Wholes = npt.NDArray[np.int64]
State = tuple[Reals, Wholes, Reals, Wholes, Wholes]
Shared = bool | None
"""Whether cores are shared: True, or None and not False, so that kernels are compiled for the one case alone."""

NUM_SETS = 9
NUM_RANK_SETS = 6
"""The first sets are those of ranks; the others need servers."""
NUM_LANES = 7
BACK, LATEST, NOW, BACK_LEFT, BACK_SINCE, BACK_RATE = 7, 8, 9, 10, 11, 12
END, LEFT, SINCE, RATE = 16, 32, 48, 64
IDLE = 80
"""Places in the real vector; the last five are bases, one entry per lane set, or lane."""
MARGIN = 1.0 + 1e-11
"""What is cut off must be sure to reach its limit; sums round."""
EVENTS = 2
"""Where a state counts its events: hand-overs and completed tasks (a chain's last one as soon as its end is known)."""
SERVED = 3
FRONT, REAR, RUNS = 16, 32, 48
"""Bases in the whole vector."""
POSITIVE = (1 << 62) - 1
"""Masks what is never negative: the compiler then leaves out Python's counting of indices from the end."""
KEY_SHIFT = 24
"""Ring keys order ties: unit number above, partition number below this bit."""

# Three lanes of each set, repeated where it has fewer: training 0, offload 1, copy 2, intra 3, out 4, in 5, the
# servers' processors 6. What enters or leaves the servers' network cards holds a worker's card as long, and
# nothing else goes there, so those lanes need no queue of their own.
LANES_OF_SET = np.array(
    [
        [0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 5, 5], [3, 4, 5], [4, 4, 4], [5, 5, 5], [6, 6, 6],
    ],
    dtype=np.int64,
)  # fmt: skip
# Which sets hold a lane in common.
_SHARE = np.array([[bool(set(a) & set(b)) for b in LANES_OF_SET.tolist()] for a in LANES_OF_SET.tolist()])


def make_state(num_partitions: int) -> State:
    """Buffers for evaluations of up to ``num_partitions`` partitions."""
    capacity = 8
    while capacity < num_partitions + 1:
        capacity *= 2
    return (
        np.zeros(96),
        np.zeros(64, dtype=np.int64),
        np.zeros((NUM_SETS, capacity)),
        np.zeros((NUM_SETS, capacity), dtype=np.int64),
        np.zeros((NUM_SETS, capacity), dtype=np.int64),
    )


def reset(state: State, gaps: Reals, served: bool) -> None:
    """Go to the start of backward of a job with or without servers."""
    real, whole, _, _, _ = state
    real[:] = 0.0
    whole[:] = 0
    whole[SERVED] = 1 if served else 0
    for s in range(NUM_SETS):
        real[END + s] = np.inf
        real[RATE + s] = 1.0
    real[BACK] = gaps[0]
    real[BACK_LEFT] = gaps[0]
    real[BACK_RATE] = 1.0


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
def add_loads(
    candidate: int,
    sign: float,
    count: Wholes,
    full: Wholes,
    tail: Wholes,
    task_set: Wholes,
    task_us: Reals,
    loads: Reals,
) -> None:
    """Add (or, with ``sign`` -1, take away) what a candidate's tasks take on each lane."""
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
def total_loads(
    gaps: Reals,
    choice: Wholes,
    count: Wholes,
    full: Wholes,
    tail: Wholes,
    task_set: Wholes,
    task_us: Reals,
    loads: Reals,
) -> None:
    """What a strategy takes of each lane, from start to end: ``loads`` float64[NUM_LANES].

    Backward's own time is added to the training lane's, since both must pass one after the other. No lane is done
    before this and the time that it stood idle.
    """
    loads[:] = 0.0
    for gap in gaps:
        loads[0] += gap
    for unit in range(choice.shape[0]):
        add_loads(choice[unit], 1.0, count, full, tail, task_set, task_us, loads)


@inner_kernel
def hopeless(state: State, loads: Reals, limit: float) -> bool:
    """Whether idle time so far and loads alone reach ``limit``. Rounding adds up over the tasks: by a margin."""
    real = state[0]
    found = False
    for lane in range(NUM_LANES):
        found |= real[IDLE + lane] + loads[lane] >= limit * MARGIN
    return found


@kernel
def advance_paper(
    state: State,
    gaps: Reals,
    first_unit: Wholes,
    choice: Wholes,
    count: Wholes,
    full: Wholes,
    tail: Wholes,
    task_set: Wholes,
    task_us: Reals,
    task_cores: Reals,
    contention: Reals,
    stop: int,
    limit: float,
    loads: Reals,
    ready: Reals,
    finish: Reals,
) -> float:
    """Run events up to the hand-over of bucket ``stop`` (beyond the last: to the end).

    A chain's last task wakes nothing, so it is done with as soon as it is queued, and only others enter the rings.

    Args:
        loads: what the whole strategy takes of each lane (:func:`total_loads`), used with a finite ``limit``: an
            evaluation in which this and the lane's idle time so far reach ``limit`` ends at once.

    Returns:
        The latest time so far, backward's included; infinity as soon as it is sure to reach ``limit``.
        ``ready`` float64[B] and ``finish`` float64[U] are filled along the way.
    """
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
def _new_rate(real: Reals, left: int, since: int, rate: int, end: int, value: float, now: float) -> None:
    """Go on at another rate; an unchanged one keeps the end exactly as it was."""
    if value == real[rate]:
        return
    real[left] = max(real[left] - (now - real[since]) * real[rate], 0.0)
    real[since] = now
    real[rate] = value
    if real[left] == 0.0:
        real[end] = now
    elif value > 0.0:
        real[end] = now + real[left] / value
    else:
        real[end] = np.inf


@inner_kernel
def _share_cores(
    real: Reals,
    whole: Wholes,
    ring_row: Wholes,
    task_cores: Reals,
    capacity: float,
    backward_cores: float,
    has_backward: bool,
    demands: Reals,
    who: Wholes,
    rates: Reals,
    waiting: Wholes,
) -> None:
    """Max-min fair rates for backward (number ``NUM_SETS``) and the running task of each set."""
    mask = ring_row.shape[1] - 1
    now = real[NOW]
    active = 0
    total = 0.0
    if has_backward:
        demands[active] = backward_cores
        who[active] = NUM_SETS
        total += backward_cores
        active += 1
    for s in range(NUM_SETS):
        if whole[RUNS + s]:
            demands[active] = task_cores[ring_row[s, whole[FRONT + s] & mask]]
            who[active] = s
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
        s = who[i]
        if s == NUM_SETS:
            _new_rate(real, BACK_LEFT, BACK_SINCE, BACK_RATE, BACK, rates[i], now)
        else:
            _new_rate(real, LEFT + s, SINCE + s, RATE + s, END + s, rates[i], now)


@kernel
def advance_shared(
    state: State,
    gaps: Reals,
    first_unit: Wholes,
    choice: Wholes,
    count: Wholes,
    full: Wholes,
    tail: Wholes,
    task_set: Wholes,
    task_us: Reals,
    task_cores: Reals,
    contention: Reals,
    stop: int,
    limit: float,
    loads: Reals,
    ready: Reals,
    finish: Reals,
) -> float:
    """As :func:`advance_paper`, with ``contention`` float64[2] (cores, backward's demand) shared by all.

    ``loads`` is not used: lanes have no end here until their tasks have theirs.

    Here ``real[END + s]`` is the end of the running task of set s; rings hold arrival numbers for ends.
    """
    real, whole, ring_came, ring_row, ring_key = state
    mask = ring_row.shape[1] - 1
    buckets = gaps.shape[0]
    demands = np.empty(NUM_SETS + 1)
    rates = np.empty(NUM_SETS + 1)
    who = np.empty(NUM_SETS + 1, dtype=np.int64)
    waiting = np.empty(NUM_SETS + 1, dtype=np.int64)
    while True:
        at = np.inf
        s = -1
        for k in range(NUM_SETS):
            if whole[RUNS + k]:
                end = real[END + k]
                if end < at or (
                    end == at and ring_key[k, whole[FRONT + k] & mask] < ring_key[s, whole[FRONT + s] & mask]
                ):
                    at = end
                    s = k
        bucket = whole[0]
        if bucket < buckets and real[BACK] < at:
            if bucket == stop:
                break
            now = real[BACK]
            whole[EVENTS] += 1
            real[NOW] = now
            ready[bucket] = now
            if now > real[LATEST]:
                real[LATEST] = now
                if now >= limit:
                    return np.inf
            for unit in range(first_unit[bucket], first_unit[bucket + 1]):
                candidate = choice[unit]
                last = count[candidate] - 1
                for part in range(last + 1):
                    row = full[candidate] if part < last else tail[candidate]
                    s = task_set[row]
                    if s < 0:
                        continue
                    slot = whole[REAR + s] & mask
                    ring_came[s, slot] = whole[1]
                    ring_row[s, slot] = row
                    ring_key[s, slot] = (unit << KEY_SHIFT) + part
                    whole[REAR + s] += 1
                    whole[1] += 1
            whole[0] = bucket + 1
            if bucket + 1 < buckets:
                real[BACK_LEFT] = gaps[bucket + 1]
                real[BACK_SINCE] = now
                real[BACK_RATE] = 1.0
                real[BACK] = now + real[BACK_LEFT]
            else:
                real[BACK] = np.inf
        elif s < 0:
            break
        else:
            now = at
            whole[EVENTS] += 1
            real[NOW] = now
            if now > real[LATEST]:
                real[LATEST] = now
                if now >= limit:
                    return np.inf
            slot = whole[FRONT + s] & mask
            row = ring_row[s, slot] + 1
            key = ring_key[s, slot]
            whole[FRONT + s] += 1
            whole[RUNS + s] = 0
            real[END + s] = np.inf
            s = task_set[row]
            if s < 0:
                finish[key >> KEY_SHIFT] = now
            else:
                slot = whole[REAR + s] & mask
                ring_came[s, slot] = whole[1]
                ring_row[s, slot] = row
                ring_key[s, slot] = key
                whole[REAR + s] += 1
                whole[1] += 1
        # Start every waiting head whose lanes are free of running tasks and of earlier arrivals.
        for s in range(NUM_SETS):
            if whole[RUNS + s] or whole[FRONT + s] == whole[REAR + s]:
                continue
            free = True
            slot = whole[FRONT + s] & mask
            for other in range(NUM_SETS):
                waits = other != s and _SHARE[s, other] and whole[FRONT + other] < whole[REAR + other]
                if waits and (
                    whole[RUNS + other] or ring_came[other, whole[FRONT + other] & mask] < ring_came[s, slot]
                ):
                    free = False
            if free:
                row = ring_row[s, slot]
                whole[RUNS + s] = 1
                real[LEFT + s] = task_us[row]
                real[SINCE + s] = now
                real[RATE + s] = 1.0
                real[END + s] = now + task_us[row]
        _share_cores(
            real, whole, ring_row, task_cores, contention[0], contention[1], whole[0] < buckets,
            demands, who, rates, waiting,
        )  # fmt: skip
    return float(real[LATEST])


@kernel
def best_of(
    shared: Shared,
    start: State,
    scratch: State,
    unit: int,
    candidates: Wholes,
    hint: int,
    gaps: Reals,
    first_unit: Wholes,
    choice: Wholes,
    count: Wholes,
    full: Wholes,
    tail: Wholes,
    task_set: Wholes,
    task_us: Reals,
    task_cores: Reals,
    contention: Reals,
    limit: float,
    loads: Reals,
    ready: Reals,
    finish: Reals,
) -> tuple[int, float]:
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
    buckets = gaps.shape[0]
    total_loads(gaps, choice, count, full, tail, task_set, task_us, loads)
    present = kept
    for index in range(-1, candidates.shape[0]):
        if index == first:
            continue
        here = first if index < 0 else index
        candidate = candidates[here]
        # Of equal times the earliest in the list wins, in whatever order they are tried.
        allowed = np.nextafter(limit, np.inf) if best >= 0 and here < place else limit
        add_loads(present, -1.0, count, full, tail, task_set, task_us, loads)
        add_loads(candidate, 1.0, count, full, tail, task_set, task_us, loads)
        present = candidate
        if shared is None and hopeless(start, loads, allowed):
            continue
        choice[unit] = candidate
        copy_state(start, scratch)
        if shared is not None:
            time = advance_shared(
                scratch, gaps, first_unit, choice, count, full, tail, task_set, task_us, task_cores,
                contention, buckets + 1, allowed, loads, ready, finish,
            )  # fmt: skip
        else:
            time = advance_paper(
                scratch, gaps, first_unit, choice, count, full, tail, task_set, task_us, task_cores,
                contention, buckets + 1, allowed, loads, ready, finish,
            )  # fmt: skip
        if time < allowed:
            limit = time
            best = candidate
            place = here
    choice[unit] = kept
    return best, limit


@kernel
def evaluate_batch(
    shared: Shared,
    start: State,
    scratch: State,
    batch: Wholes,
    gaps: Reals,
    first_unit: Wholes,
    count: Wholes,
    full: Wholes,
    tail: Wholes,
    task_set: Wholes,
    task_us: Reals,
    task_cores: Reals,
    contention: Reals,
    limit: float,
    cut: bool,
    times: Reals,
    loads: Reals,
    ready: Reals,
    finish: Reals,
) -> tuple[int, float]:
    """Makespans of many strategies at once: ``batch`` int64[n, U] of choices, equal before ``start``.

    With ``cut`` every evaluation stops as soon as it cannot beat the best so far (its time is then infinity).

    Returns:
        The first best row strictly below ``limit`` and its makespan; (-1, limit) if there is none.
    """
    best = -1
    buckets = gaps.shape[0]
    for index in range(batch.shape[0]):
        bound = limit if cut else np.inf
        if cut and shared is None:
            total_loads(gaps, batch[index], count, full, tail, task_set, task_us, loads)
            if hopeless(start, loads, limit):
                times[index] = np.inf
                continue
        copy_state(start, scratch)
        if shared is not None:
            time = advance_shared(
                scratch, gaps, first_unit, batch[index], count, full, tail, task_set, task_us, task_cores,
                contention, buckets + 1, bound, loads, ready, finish,
            )  # fmt: skip
        else:
            time = advance_paper(
                scratch, gaps, first_unit, batch[index], count, full, tail, task_set, task_us, task_cores,
                contention, buckets + 1, bound, loads, ready, finish,
            )  # fmt: skip
        times[index] = time
        if time < limit:
            limit = time
            best = index
    return best, limit


def advance_kernel(shared: bool) -> Any:
    """The advance function for jobs with or without shared cores."""
    return advance_shared if shared else advance_paper
