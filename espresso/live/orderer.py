"""The total order of one strategy's tasks: plain at first, list-scheduled once an iteration was recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable

from espresso.comm.execute.executor import Assignment, Record
from espresso.comm.groups import Groups
from espresso.strategies import Bucket, Strategy, plan
from espresso.strategies.list_scheduling import list_order

logger = logging.getLogger("espresso")

Work = Callable[[], None]


class Orderer:
    """Runs one strategy, in plain order until the bucket structure is known, then list-scheduled.

    The durations are those of the tasks of one recorded iteration on rank 0, whose order all ranks take.

    Args:
        raced: the order in which it was tried, for the buckets of that time; with it nothing is left to order.
    """

    def __init__(self, strategy: Strategy, groups: Groups, raced: Assignment | None = None) -> None:
        self.strategy, self.raced = strategy, raced
        self._groups = groups
        self._plain = Assignment(strategy, record=not strategy.only_averages)
        self._planned = raced
        self._last: tuple[Bucket, ...] = ()

    @property
    def assignment(self) -> Assignment:
        return self._planned or self._plain

    def note(self, record: Record) -> Work | None:
        """Take note of an iteration of this strategy; returns the ordering when it is time for it."""
        same, self._last = record.buckets == self._last, record.buckets
        if self._planned is not None:
            if record.buckets != self._planned.buckets:
                logger.info("the bucket structure changed; back to plain order until it is stable again")
                self._planned = None
            return None
        if not same or self.strategy.only_averages or not record.finite or record.assignment is not self._plain:
            return None
        return lambda: self._schedule(record)

    def _schedule(self, record: Record) -> None:
        order = None
        laid = plan(self.strategy, record.buckets, host_copies=self._groups.host_copies)
        if self._groups.rank == 0:
            begin = record.ready_ns[0]
            ready = [(ns - begin) / 1e3 for ns in record.ready_ns]
            duration = [0.0] * len(laid.tasks)
            for interval in record.intervals:
                duration[interval.task] = (interval.end_ns - interval.start_ns) / 1e3
            order = list_order(laid, ready, duration)
        order = self._groups.from_rank_0(order)
        self._planned = Assignment(self.strategy, order, record.buckets, record=True)
