"""List scheduling: when every task of a plan starts and ends, and the total order in which all lanes take them.

First come, first served. Time zero is the first ready gradient; backward hands the buckets over one after the other::

    backward   ====b0====b1====|b2=====          (held up or slowed by what runs beside it)
    training        [enc]      [enc]
    inter                [allgather][allgather]
    training                   [dec]      [dec]

1. A bucket is handed over: the first task of each of its partitions becomes ready.
2. A task that becomes ready takes its place at the end of the queues of all its lanes.
3. It starts when it heads all these queues, and holds its lanes until it ends; then the next one of its partition
   becomes ready.
4. Of what happens at one moment, ends come before hand-overs, and those of earlier partitions before later ones.

The order in which tasks become ready is the total order: lanes that take their tasks in it need no queues. The result
depends on nothing but its inputs, so it is the same on every rank. The search's kernels follow the same four rules.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from espresso.strategies.plan import Lane, Plan

BACKWARD = -1
"""Backward's number among the things that run."""

Pace = Callable[[Sequence[int]], Mapping[int, float]]
"""Which of the things that run together (tasks, :data:`BACKWARD`) go at another rate than one, and at which."""


@dataclass(frozen=True)
class Schedule:
    """When everything happens, in microseconds from the first ready gradient.

    Attributes:
        handed_over_us: by position of the bucket.
        start_us, end_us: of every task, by index.
        order: all task indices as they become ready, a topological order.
    """

    handed_over_us: tuple[float, ...]
    start_us: tuple[float, ...]
    end_us: tuple[float, ...]
    order: tuple[int, ...]


def undisturbed(running: Sequence[int]) -> Mapping[int, float]:
    """The pace of durations that were measured: nothing slows anything."""
    return {}


def schedule_tasks(
    plan: Plan,
    ready_us: Sequence[float],
    duration_us: Sequence[float],
    *,
    lanes: Sequence[tuple[Lane, ...]] | None = None,
    order: Sequence[int] | None = None,
    pace: Pace = undisturbed,
) -> Schedule:
    """Run a plan's tasks through their lanes' queues.

    Args:
        ready_us: when backward alone would hand each bucket over, by position, rising.
        duration_us: of every task at rate one, by index.
        lanes: of every task; by default the plan's own.
        order: a total order that all lanes obey instead of rule 2.
        pace: how things that run together slow one another.

    Raises:
        ValueError: backward is held up by something that waits for it.
    """
    lanes = [task.lanes for task in plan.tasks] if lanes is None else lanes
    return _Run(plan, ready_us, duration_us, lanes, order, pace).schedule()


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
        lanes: Sequence[tuple[Lane, ...]],
        order: Sequence[int] | None,
        pace: Pace,
    ) -> None:
        self._tasks, self._lanes, self._duration, self._pace = plan.tasks, lanes, duration_us, pace
        self._following = {task.after: task.index for task in plan.tasks if task.after is not None}
        self._first_of_bucket = [[t for t in tasks if plan.tasks[t].after is None] for tasks in plan.tasks_of_bucket]
        self._gaps = [max(b - a, 0.0) for a, b in zip((0.0, *ready_us), ready_us, strict=False)]
        self._queues: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
        self._queue_as_ready = order is None
        for task in order or ():
            self._queue(task)
        self._now = 0.0
        self._ready: dict[int, None] = {}  # in the order in which they became so
        self._running: dict[int, _Activity] = {}
        self._handed_over: list[float] = []
        self._backward = self._next_gap()
        self._start = [0.0] * len(plan.tasks)
        self._end = [0.0] * len(plan.tasks)

    def schedule(self) -> Schedule:
        while self._running or self._backward is not None:
            task = min(self._running, key=self._ends_first, default=None)
            if task is not None and (self._backward is None or self._running[task].end <= self._backward.end):
                self._now = self._running[task].end
                self._finish(task)
            elif self._backward is not None:
                self._now = self._backward.end
                self._hand_over()
            self._start_heads()
            self._set_rates()
        return Schedule(tuple(self._handed_over), tuple(self._start), tuple(self._end), tuple(self._ready))

    def _ends_first(self, task: int) -> tuple[float, int]:
        return self._running[task].end, self._tasks[task].partition

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

    def _finish(self, task: int) -> None:
        del self._running[task]
        self._end[task] = self._now
        for lane in self._lanes[task]:
            self._queues[lane].popleft()
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
            if not queue or self._lanes[queue[0]][0] is not lane:
                continue
            task = queue[0]
            waits = task not in self._ready or task in self._running
            if not waits and all(self._queues[other][0] == task for other in self._lanes[task]):
                self._start[task] = self._now
                self._running[task] = _Activity(self._now, self._duration[task])

    def _set_rates(self) -> None:
        rates = self._pace([*self._running, *([] if self._backward is None else [BACKWARD])])
        for task, activity in self._running.items():
            activity.go_on_at(rates.get(task, 1.0), self._now)
        if self._backward is not None:
            self._backward.go_on_at(rates.get(BACKWARD, 1.0), self._now)


__all__ = ["BACKWARD", "Pace", "Schedule", "list_order", "schedule_tasks", "undisturbed"]
