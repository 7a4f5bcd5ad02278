"""List scheduling: when every task of a plan starts and ends, and the total order in which all lanes take them.

First come, first served. Time zero is the first ready gradient; backward hands the buckets over one after the other::

    backward   ====b0====b1====|b2=====          (held up or slowed by what runs beside it)
    training        [enc]      [enc]
    inter                [allgather][allgather]
    training                   [dec]      [dec]

1. A bucket is handed over: the first task of each of its partitions becomes ready.
2. A task that becomes ready takes its place at the end of the queues of all its lanes.
3. It starts when it heads all these queues and all its lanes have room. It holds its lanes for its duration, and is
   under way for its latency; then the next one of its partition becomes ready.
4. Of what happens at one moment, ends come before hand-overs, and those of earlier partitions before later ones.

A lane has room for as many tasks as its :class:`Width` says: that hold it, and that hold it or are under way. By
default that is one: then latency occupies the lane as duration does. One lane may have a :class:`Credit`.

The order in which tasks become ready is the total order: lanes that take their tasks in it need no queues. The result
depends on nothing but its inputs, so it is the same on every rank. The search's kernels follow the same four rules.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from espresso.strategies.plan import Lane, Plan

BACKWARD = -1
"""Backward's number among the things that run."""

Pace = Callable[[Sequence[int]], Mapping[int, float]]
"""Which of the things that run together (tasks, :data:`BACKWARD`) go at another rate than one, and at which."""


class Width(NamedTuple):
    """How many tasks a lane has room for: that hold it, and that hold it or are under way."""

    holding: int = 1
    under_way: int = 1


class Credit(NamedTuple):
    """A token bucket: a lane's tasks take as much less as it holds, and it gets back what the lane rests.

    Attributes:
        full_us: what it holds at first, and at most.
        least_us: what a task takes at least, by index.
    """

    lane: Lane
    full_us: float
    least_us: Sequence[float]


@dataclass(frozen=True)
class Schedule:
    """When everything happens, in microseconds from the first ready gradient.

    Attributes:
        handed_over_us: by position of the bucket.
        start_us, freed_us, end_us: of every task, by index: it takes its lanes, leaves them, and is done.
        order: all task indices as they become ready, a topological order.
        sent_us: what all tasks of a lane with a :class:`Credit` take without one.
    """

    handed_over_us: tuple[float, ...]
    start_us: tuple[float, ...]
    freed_us: tuple[float, ...]
    end_us: tuple[float, ...]
    order: tuple[int, ...]
    sent_us: float = 0.0


def undisturbed(running: Sequence[int]) -> Mapping[int, float]:
    """The pace of durations that were measured: nothing slows anything."""
    return {}


def schedule_tasks(
    plan: Plan,
    ready_us: Sequence[float],
    duration_us: Sequence[float],
    *,
    latency_us: Sequence[float] | None = None,
    lanes: Sequence[tuple[Lane, ...]] | None = None,
    widths: Mapping[Lane, Width] | None = None,
    order: Sequence[int] | None = None,
    pace: Pace = undisturbed,
    credit: Credit | None = None,
) -> Schedule:
    """Run a plan's tasks through their lanes' queues.

    Args:
        ready_us: when backward alone would hand each bucket over, by position, rising.
        duration_us: of every task at rate one, by index.
        latency_us: of every task; by default none.
        lanes: of every task; by default the plan's own.
        widths: of lanes with room for more than one task.
        order: a total order that all lanes obey instead of rule 2.
        pace: how things that run together slow one another.
        credit: of a lane that has room for one task.

    Raises:
        ValueError: backward is held up by something that waits for it.
    """
    lanes = [task.lanes for task in plan.tasks] if lanes is None else lanes
    latency_us = [0.0] * len(plan.tasks) if latency_us is None else latency_us
    return _Run(plan, ready_us, duration_us, latency_us, lanes, widths or {}, order, pace, credit).schedule()


def list_order(plan: Plan, ready_us: Sequence[float], duration_us: Sequence[float]) -> tuple[int, ...]:
    """The total order of :func:`schedule_tasks` for times that were measured."""
    return schedule_tasks(plan, ready_us, duration_us).order


class _Activity:
    """Something that runs: work left, at a rate that others set."""

    __slots__ = ("end", "left", "rate", "since")

    def __init__(self, now: float, work: float) -> None:
        self.left = work
        self.rate = 1.0
        self.since = now
        self.end = now + work

    def go_on_at(self, rate: float, now: float) -> None:
        """Another rate from now on; an unchanged one keeps the end exactly as it was."""
        if rate == self.rate:
            return
        self.left = max(self.left - (now - self.since) * self.rate, 0.0)
        self.since = now
        self.rate = rate
        if self.left == 0.0:
            self.end = now
        else:
            self.end = now + self.left / rate if rate > 0.0 else math.inf


class _Run:
    """One run of a plan's tasks through the queues."""

    def __init__(
        self,
        plan: Plan,
        ready_us: Sequence[float],
        duration_us: Sequence[float],
        latency_us: Sequence[float],
        lanes: Sequence[tuple[Lane, ...]],
        widths: Mapping[Lane, Width],
        order: Sequence[int] | None,
        pace: Pace,
        credit: Credit | None,
    ) -> None:
        self._tasks, self._lanes, self._pace = plan.tasks, lanes, pace
        self._duration, self._latency = duration_us, latency_us
        self._credit, self._sent_us, self._spent_us, self._rests_since = credit, 0.0, 0.0, 0.0
        self._following = {task.after: task.index for task in plan.tasks if task.after is not None}
        self._first_of_bucket = [[t for t in tasks if plan.tasks[t].after is None] for tasks in plan.tasks_of_bucket]
        self._gaps = [max(b - a, 0.0) for a, b in zip((0.0, *ready_us), ready_us, strict=False)]
        self._queues: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
        self._widths = {lane: widths.get(lane, Width()) for lane in Lane}
        self._holding, self._occupied = dict.fromkeys(Lane, 0), dict.fromkeys(Lane, 0)
        self._queue_as_ready = order is None
        for task in order or ():
            self._queue(task)
        self._now = 0.0
        self._ready: dict[int, None] = {}  # in the order in which they became so
        self._running: dict[int, _Activity] = {}
        self._under_way: dict[int, _Activity] = {}
        self._handed_over: list[float] = []
        self._backward = self._next_gap()
        self._start, self._freed, self._end = ([0.0] * len(plan.tasks) for _ in range(3))

    def schedule(self) -> Schedule:
        while self._running or self._under_way or self._backward is not None:
            active = self._running | self._under_way
            task = min(active, key=lambda task: (active[task].end, self._tasks[task].partition), default=None)
            if task is not None and (self._backward is None or active[task].end <= self._backward.end):
                self._now = active[task].end
                if task in self._running:
                    self._leave_lanes(task)
                else:
                    self._finish(task)
            elif self._backward is not None:
                self._now = self._backward.end
                self._hand_over()
            self._start_heads()
            self._set_rates()
        start, freed, end = map(tuple, (self._start, self._freed, self._end))
        return Schedule(tuple(self._handed_over), start, freed, end, tuple(self._ready), self._sent_us)

    def _next_gap(self) -> _Activity | None:
        bucket = len(self._handed_over)
        return _Activity(self._now, self._gaps[bucket]) if bucket < len(self._gaps) else None

    def _hand_over(self) -> None:
        if self._now == math.inf:
            raise ValueError("backward is held up for ever: the pace lets nothing go on")
        for task in self._first_of_bucket[len(self._handed_over)]:
            self._make_ready(task)
        self._handed_over.append(self._now)
        self._backward = self._next_gap()

    def _leave_lanes(self, task: int) -> None:
        self._freed[task] = self._now
        for lane in self._lanes[task]:
            self._holding[lane] -= 1
        self._under_way[task] = _Activity(self._now, self._latency[task])
        del self._running[task]
        if self._latency[task] == 0.0:
            self._finish(task)

    def _finish(self, task: int) -> None:
        del self._under_way[task]
        self._end[task] = self._now
        for lane in self._lanes[task]:
            self._occupied[lane] -= 1
        if task in self._following:
            self._make_ready(self._following[task])

    def _make_ready(self, task: int) -> None:
        self._ready[task] = None
        if self._queue_as_ready:
            self._queue(task)

    def _queue(self, task: int) -> None:
        for lane in self._lanes[task]:
            self._queues[lane].append(task)

    def _start_heads(self) -> None:
        for lane, queue in self._queues.items():
            # (A task that holds several lanes is looked at once, at its first.)
            while queue and self._lanes[queue[0]][0] is lane and self._may_start(queue[0]):
                task = queue[0]
                for other in self._lanes[task]:
                    self._queues[other].popleft()
                    self._holding[other] += 1
                    self._occupied[other] += 1
                self._start[task] = self._now
                self._running[task] = _Activity(self._now, self._work(task))

    def _work(self, task: int) -> float:
        duration, credit = self._duration[task], self._credit
        if credit is None or credit.lane not in self._lanes[task]:
            return duration
        self._sent_us += duration
        spent = max(self._spent_us - (self._now - self._rests_since), 0.0)
        work = max(duration - (credit.full_us - spent), credit.least_us[task])
        self._spent_us = spent + (duration - work)
        self._rests_since = self._now + work
        return work

    def _may_start(self, task: int) -> bool:
        return task in self._ready and all(
            self._queues[lane][0] == task and self._has_room(lane) for lane in self._lanes[task]
        )

    def _has_room(self, lane: Lane) -> bool:
        return self._holding[lane] < self._widths[lane].holding and self._occupied[lane] < self._widths[lane].under_way

    def _set_rates(self) -> None:
        rates = self._pace([*self._running, *([] if self._backward is None else [BACKWARD])])
        for task, activity in self._running.items():
            activity.go_on_at(rates.get(task, 1.0), self._now)
        if self._backward is not None:
            self._backward.go_on_at(rates.get(BACKWARD, 1.0), self._now)
