"""The timeline: a deterministic event simulation of a plan, readable first.

A job's backward pass and prices go through the list scheduler (:mod:`espresso.strategies.list_scheduling`), in a
plan's total order (:func:`simulate`) or first come first served (:func:`first_come`), which is how that order is
found. What is decided here is how things slow one another (:func:`pace_of`). This module is the oracle of the kernels
in :mod:`espresso.model.timeline_kernels`, which the search uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from espresso.model.costs import Contention, CostModel
from espresso.model.job import Job
from espresso.model.pricing import Pricer, Work, price_plan
from espresso.model.step_shapes import LANE_SETS
from espresso.strategies import LINK_LANES, Lane, Plan
from espresso.strategies.list_scheduling import BACKWARD, Credit, Pace, Schedule, Width, schedule_tasks

BURSTS = Lane.INTER_OUT
"""The lane of a machine's card that has a token bucket."""


@dataclass(frozen=True)
class Timeline:
    """What a plan does with a job.

    Attributes:
        iteration_us: forward, to the latest finish, and the optimizer.
        makespan_us: first ready gradient to the latest finish (backward's end included), and what is sent on average.
        bucket_ready_us: when each bucket was handed over, contention included.
        start_us, freed_us, end_us: for every task of the plan: it takes its lanes, leaves them, and is done.
        sent_us: where a card has a token bucket, what all that is sent takes at its rate.
    """

    plan: Plan
    works: tuple[Work, ...]
    forward_us: float
    optimizer_us: float
    makespan_us: float
    bucket_ready_us: tuple[float, ...]
    start_us: tuple[float, ...]
    freed_us: tuple[float, ...]
    end_us: tuple[float, ...]
    sent_us: float = 0.0

    @property
    def iteration_us(self) -> float:
        return self.forward_us + self.makespan_us + self.optimizer_us

    def lanes(self, task: int) -> tuple[Lane, ...]:
        """The lanes that a task holds while it runs."""
        return LANE_SETS[self.works[task].shape.lane_set]


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
        if not waiting:  # they just fill it, and their sum was rounded up
            return rates


def pace_of(contention: Contention, works: Sequence[Work]) -> Pace:
    """How a job's work slows other work: nothing but backward behind training work, or all of it on shared cores."""
    cores = contention.cores
    if cores is None:

        def held_up(running: Sequence[int]) -> Mapping[int, float]:
            training = any(task >= 0 and Lane.TRAINING in LANE_SETS[works[task].shape.lane_set] for task in running)
            return {BACKWARD: 0.0} if training else {}

        return held_up

    def shared(running: Sequence[int]) -> Mapping[int, float]:
        # In a fixed order, so that the kernel's sums round alike: backward, then lane sets as numbered.
        active = sorted(running, key=lambda task: -1 if task == BACKWARD else works[task].shape.lane_set)
        demands = [contention.backward_cores if task == BACKWARD else works[task].cores for task in active]
        return dict(zip(active, water_fill(demands, cores), strict=True))

    return shared


def widths_of(costs: CostModel) -> dict[Lane, Width]:
    """The lanes with room for more than one task: the pool's, and the links', which one message crosses at a time."""
    pool = Width(costs.offload_width, costs.offload_width)
    return {Lane.OFFLOAD: pool, **dict.fromkeys(LINK_LANES, Width(1, costs.links.in_flight))}


def simulate(plan: Plan, job: Job, *, pricer: Pricer | None = None) -> Timeline:
    """Run a plan in its total order.

    Args:
        plan: laid over ``job.laid_out``, with ``job.host_copies``.
        job: the backward pass and the costs.
        pricer: to share prices between calls, or to price otherwise than the job does.
    """
    works = _priced(plan, job, pricer)
    return _timeline(plan, job, works, _scheduled(plan, job, works, plan.order))


def first_come(plan: Plan, job: Job, *, pricer: Pricer | None = None) -> Timeline:
    """Run a plan as lanes serve first come first served; its plan has the order in which tasks became ready.

    Simulating that plan gives exactly this timeline.
    """
    works = _priced(plan, job, pricer)
    run = _scheduled(plan, job, works, None)
    return _timeline(plan.with_order(run.order), job, works, run)


def _timeline(plan: Plan, job: Job, works: tuple[Work, ...], run: Schedule) -> Timeline:
    # What a token bucket lets through in one step it takes back from the next: none is shorter than what is sent takes.
    on_average_us = run.sent_us - (job.forward_us + job.optimizer_us)
    return Timeline(
        plan,
        works,
        job.forward_us,
        job.optimizer_us,
        max(*run.handed_over_us, *run.end_us, on_average_us, 0.0),
        run.handed_over_us,
        run.start_us,
        run.freed_us,
        run.end_us,
        run.sent_us,
    )


def _priced(plan: Plan, job: Job, pricer: Pricer | None) -> tuple[Work, ...]:
    if len(plan.buckets) != len(job.ready_us):
        raise ValueError(
            f"the plan has {len(plan.buckets)} buckets, the job {len(job.ready_us)}: lay it over job.laid_out"
        )
    if plan.cluster != job.cluster:
        raise ValueError(f"the plan is for {plan.cluster}, the job ran on {job.cluster}")
    return tuple(price_plan(plan, pricer or Pricer(job.costs, job.cluster)))


def _scheduled(plan: Plan, job: Job, works: Sequence[Work], order: Sequence[int] | None) -> Schedule:
    return schedule_tasks(
        plan,
        job.ready_us,
        [work.us for work in works],
        latency_us=[work.latency_us for work in works],
        lanes=[LANE_SETS[work.shape.lane_set] for work in works],
        widths=widths_of(job.costs),
        order=order,
        pace=pace_of(job.costs.contention, works),
        credit=_credit(job, works),
    )


def _credit(job: Job, works: Sequence[Work]) -> Credit | None:
    burst = job.costs.links.burst(job.cluster)
    least = [min(work.us, max(burst.least_us, work.us * work.cores)) for work in works]
    return Credit(BURSTS, burst.credit_us, least) if burst.credit_us else None
