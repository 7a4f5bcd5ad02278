"""Two of the three courses: along a plan of all buckets, in the order found for them, or bucket by bucket."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from espresso.comm.execute.tasks import Tasks
from espresso.strategies import Bucket

logger = logging.getLogger("espresso")


class _AlongTasks:
    """What both know from the tasks that are queued."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.waiting_for, self.place, self.is_finite = tasks.waiting_for, tasks.place, tasks.is_finite

    def hurry(self) -> None:
        """Nothing: buckets are completed as they come."""


class Plain(_AlongTasks):
    """Bucket by bucket, each planned alone: while the structure of the buckets is unknown, or has just changed.

    Args:
        num_tasks: of the buckets before the first that it takes, which a plan covered.
        num_partitions: likewise.
    """

    def __init__(self, tasks: Tasks, num_tasks: int = 0, num_partitions: int = 0) -> None:
        super().__init__(tasks)
        self._num_tasks, self._num_partitions = num_tasks, num_partitions

    def take(self, index: int, buffer: torch.Tensor, describe: Callable[[], Bucket]) -> Plain:
        bucket = describe()
        compiled = self._tasks.programs.of_bucket(self._tasks.iteration.record.assignment.strategy, bucket)
        self._tasks.enqueue(compiled, self._num_tasks, self._num_partitions)
        self._num_tasks += len(compiled.plan.tasks)
        self._num_partitions += len(compiled.plan.partitions)
        self._tasks.begin(bucket, buffer)
        return self


class Planned(_AlongTasks):
    """Along a plan of all buckets, in the order found for them, as far as buckets are as planned.

    Args:
        buckets: that the assignment has an order for.
    """

    def __init__(self, tasks: Tasks, buckets: tuple[Bucket, ...]) -> None:
        super().__init__(tasks)
        self._buckets = buckets
        self._assignment = tasks.iteration.record.assignment

    def take(self, index: int, buffer: torch.Tensor, describe: Callable[[], Bucket]) -> Planned | Plain:
        bucket = describe()
        if index >= len(self._buckets) or bucket != self._buckets[index]:
            return self._leave(index).take(index, buffer, lambda: bucket)
        if index == 0:
            compiled = self._tasks.programs.of_plan(self._assignment)
            self._tasks.iteration.record.plan = compiled.plan
            self._tasks.enqueue(compiled)
        if self._tasks.iteration.last_seen:
            self._tasks.drop(index + 1)
        self._tasks.begin(bucket, buffer)
        return self

    def _leave(self, index: int) -> Plain:
        """The structure changed, on every rank alike: the rest goes in plain order."""
        if index == 0:
            return Plain(self._tasks)
        logger.warning("bucket %d is not as planned; the rest of this iteration runs in plain order", index)
        self._tasks.drop(index)
        laid = self._tasks.programs.of_plan(self._assignment).plan
        num_partitions = sum(laid.groups[part.group].bucket < index for part in laid.partitions)
        return Plain(self._tasks, sum(map(len, laid.tasks_of_bucket[:index])), num_partitions)
