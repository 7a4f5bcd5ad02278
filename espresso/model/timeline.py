"""The timeline: a deterministic event simulation of a plan, readable first.

Time zero is the first ready gradient. Backward makes the buckets ready one after the other; every task
queues on its lanes and starts when its predecessor is done, it heads every lane it holds, and those are
free::

    backward   ====b0====b1====|b2=====          (held up or slowed by work on its cores)
    training        [enc]      [enc]
    inter                [allgather][allgather]
    training                   [dec]      [dec]

Two ways to queue: in a plan's total order (:func:`simulate`), or first come first served, ties by backward
order (:func:`list_schedule`), which is how that order is found. This module is the oracle of the kernels in
:mod:`espresso.model.timeline_kernels`, which the search uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from espresso.model.costs import Contention
from espresso.model.job import Job
from espresso.model.pricing import LANE_SETS, Pricer, Work, price_plan
from espresso.strategies import Lane, Plan, Stage, Step

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Interval:
    """One task on one lane, in microseconds from the first ready gradient.

    Attributes:
        num_bytes: the routine's whole array, or the bytes copied; 0 for computation.
    """

    lane: Lane
    task: int
    partition: int
    bucket: int
    tensors: tuple[str, ...]
    option: str
    compressor: str
    step: Step
    stage: Stage
    start_us: float
    end_us: float
    num_bytes: float


@dataclass(frozen=True)
class Timeline:
    """What a plan does with a job.

    Attributes:
        iteration_us: forward, to the latest finish, and the optimizer.
        makespan_us: first ready gradient to the latest finish (backward's end included).
        bucket_ready_us: when each bucket was handed over, contention included.
        start_us: for every task of the plan.
        end_us: for every task of the plan.
    """

    plan: Plan
    works: tuple[Work, ...]
    forward_us: float
    optimizer_us: float
    makespan_us: float
    bucket_ready_us: tuple[float, ...]
    start_us: tuple[float, ...]
    end_us: tuple[float, ...]

    @property
    def iteration_us(self) -> float:
        return self.forward_us + self.makespan_us + self.optimizer_us

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """Every task on every lane it holds, by start, then by task."""
        rows = []
        for task in self.plan.tasks:
            part = self.plan.partitions[task.partition]
            group = self.plan.groups[part.group]
            names = tuple(run.tensor for run in group.segments(part.start, part.stop))
            for lane in LANE_SETS[self.works[task.index].shape.lane_set]:
                rows.append(
                    Interval(
                        lane,
                        task.index,
                        part.index,
                        group.bucket,
                        names,
                        str(group.choice.option),
                        str(group.choice.compressor),
                        task.step,
                        task.stage,
                        self.start_us[task.index],
                        self.end_us[task.index],
                        self.works[task.index].num_bytes,
                    )
                )
        return tuple(sorted(rows, key=lambda row: (row.start_us, row.task)))


def water_fill(demands: Sequence[float], capacity: float) -> list[float]:
    """Max-min fair shares of ``capacity``, as fractions of each demand (1 where it is met, or is zero).

    >>> water_fill([1.0, 1.0, 0.25], 1.0)
    [0.375, 0.375, 1.0]
    """
    rates = [1.0] * len(demands)
    if sum(demands) <= capacity:
        return rates
    left, waiting = capacity, list(range(len(demands)))
    while True:
        fair = left / len(waiting)
        unmet = [i for i in waiting if demands[i] > fair]
        if len(unmet) == len(waiting):
            for i in waiting:
                rates[i] = fair / demands[i]
            return rates
        for i in waiting:
            if demands[i] <= fair:
                left -= demands[i]
        waiting = unmet


class _Activity:
    """Something that runs: work left, at a rate that contention sets."""

    __slots__ = ("demand", "end", "left", "rate", "since")

    def __init__(self, now: float, work: float, demand: float) -> None:
        self.demand = demand
        self.left = work
        self.rate = 1.0
        self.since = now
        self.end = now + work

    def set_rate(self, rate: float, now: float) -> None:
        """Go on at another rate from now; an unchanged rate keeps the end exactly as it was."""
        if rate == self.rate:
            return
        self.left = max(self.left - (now - self.since) * self.rate, 0.0)
        self.since = now
        self.rate = rate
        if self.left == 0.0:
            self.end = now
        else:
            self.end = now + self.left / rate if rate > 0.0 else INFINITY


class _Simulation:
    """One run over a plan's tasks. Lanes take them in ``order``; without one, first come first served."""

    def __init__(
        self,
        plan: Plan,
        works: Sequence[Work],
        ready_us: Sequence[float],
        contention: Contention,
        order: Sequence[int] | None,
    ) -> None:
        self.now = 0.0
        self.contention = contention
        self.works = works
        self.lanes = [LANE_SETS[work.shape.lane_set] for work in works]
        self.partition = [task.partition for task in plan.tasks]
        self.next_task: list[int | None] = [None] * len(works)
        self.first_tasks: list[list[int]] = [[] for _ in plan.buckets]
        for task in plan.tasks:
            if task.after is None:
                group = plan.groups[plan.partitions[task.partition].group]
                self.first_tasks[group.bucket].append(task.index)
            else:
                self.next_task[task.after] = task.index
        self.gaps = [b - a for a, b in zip((0.0, *ready_us), ready_us, strict=False)]
        self.bucket = 0
        self.bucket_ready: list[float] = []
        self.start = [0.0] * len(works)
        self.end = [0.0] * len(works)
        self.ready = [False] * len(works)
        self.queues: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
        self.fifo = order is None
        self.came: list[int] = []
        for task_index in order or ():
            for lane in self.lanes[task_index]:
                self.queues[lane].append(task_index)
        self.running: dict[int, _Activity] = {}
        self.backward = self._next_gap()

    def run(self) -> None:
        while self.running or self.backward is not None:
            task = min(self.running, key=lambda t: (self.running[t].end, self.partition[t]), default=None)
            # A completion goes before a bucket that is handed over at the same moment.
            if task is not None and (self.backward is None or self.running[task].end <= self.backward.end):
                self.now = self.running[task].end
                self._finish(task)
            else:
                assert self.backward is not None
                assert self.backward.end < INFINITY
                self.now = self.backward.end
                self._hand_over()
            self._start_heads()
            self._set_rates()

    def _next_gap(self) -> _Activity | None:
        if self.bucket == len(self.gaps):
            return None
        return _Activity(self.now, self.gaps[self.bucket], self.contention.backward_cores)

    def _hand_over(self) -> None:
        self.bucket_ready.append(self.now)
        for task in self.first_tasks[self.bucket]:
            self._enqueue(task)
        self.bucket += 1
        self.backward = self._next_gap()

    def _finish(self, task: int) -> None:
        del self.running[task]
        self.end[task] = self.now
        for lane in self.lanes[task]:
            self.queues[lane].popleft()
        following = self.next_task[task]
        if following is not None:
            self._enqueue(following)

    def _enqueue(self, task: int) -> None:
        self.ready[task] = True
        self.came.append(task)
        if self.fifo:
            for lane in self.lanes[task]:
                self.queues[lane].append(task)

    def _start_heads(self) -> None:
        for lane, queue in self.queues.items():
            if not queue:
                continue
            task = queue[0]
            lanes = self.lanes[task]
            if lanes[0] is not lane or task in self.running or not self.ready[task]:
                continue
            if all(self.queues[other][0] == task for other in lanes):
                self.start[task] = self.now
                self.running[task] = _Activity(self.now, self.works[task].us, self.works[task].cores)

    def _set_rates(self) -> None:
        if self.contention.cores is None:
            if self.backward is not None:
                held_up = any(Lane.TRAINING in self.lanes[task] for task in self.running)
                self.backward.set_rate(0.0 if held_up else 1.0, self.now)
            return
        # In a fixed order, so that the kernel's sums round alike: backward, then lane sets as numbered.
        active = sorted(self.running, key=lambda task: self.works[task].shape.lane_set)
        activities = [self.running[task] for task in active]
        if self.backward is not None:
            activities.insert(0, self.backward)
        rates = water_fill([activity.demand for activity in activities], self.contention.cores)
        for activity, rate in zip(activities, rates, strict=True):
            activity.set_rate(rate, self.now)


def simulate(plan: Plan, job: Job, *, pricer: Pricer | None = None) -> Timeline:
    """Run a plan in its total order.

    Args:
        plan: laid over ``job.laid_out``, with ``job.host_copies``.
        job: the backward pass and the costs.
        pricer: to share prices between calls, or to price otherwise than the job does.
    """
    return _simulate(plan, job, pricer, plan.order)[0]


def list_schedule(plan: Plan, job: Job, *, pricer: Pricer | None = None) -> Plan:
    """The same plan in the order in which tasks become ready when lanes serve first come first served.

    Ties go to the earlier tensor. Simulating the result gives exactly the time of the list schedule.
    """
    return plan.with_order(_simulate(plan, job, pricer, None)[1])


def _simulate(plan: Plan, job: Job, pricer: Pricer | None, order: Sequence[int] | None) -> tuple[Timeline, list[int]]:
    if len(plan.buckets) != len(job.ready_us):
        raise ValueError(
            f"the plan has {len(plan.buckets)} buckets, the job {len(job.ready_us)}: lay it over job.laid_out"
        )
    if plan.cluster != job.cluster:
        raise ValueError(f"the plan is for {plan.cluster}, the job ran on {job.cluster}")
    works = price_plan(plan, pricer or Pricer(job.costs, job.cluster))
    run = _Simulation(plan, works, job.ready_us, job.costs.contention, order)
    run.run()
    timeline = Timeline(
        plan,
        tuple(works),
        job.forward_us,
        job.optimizer_us,
        max(*run.bucket_ready, *run.end, 0.0),
        tuple(run.bucket_ready),
        tuple(run.start),
        tuple(run.end),
    )
    return timeline, run.came


__all__ = ["Interval", "Timeline", "list_schedule", "simulate", "water_fill"]
