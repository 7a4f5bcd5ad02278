"""Along a plan of all buckets, in the order that list scheduling found for them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from espresso.comm.execute.plain import Plain
from espresso.comm.execute.tasks import Tasks
from espresso.strategies import Bucket

logger = logging.getLogger("espresso")


class Planned:
    """An iteration along a plan: a course, which ends where a bucket is not as planned.

    Args:
        buckets: that the assignment has an order for.
    """

    def __init__(self, tasks: Tasks, buckets: tuple[Bucket, ...]) -> None:
        self._tasks, self._buckets = tasks, buckets
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

    def hurry(self) -> None:
        """Nothing: buckets are completed as they come."""

    def waiting_for(self) -> list[str]:
        return self._tasks.waiting_for()

    def place(self) -> int:
        return self._tasks.place()

    def is_finite(self) -> bool:
        return self._tasks.is_finite()

    def _leave(self, index: int) -> Plain:
        """The structure changed, on every rank alike: the rest goes in plain order."""
        if index == 0:
            return Plain(self._tasks)
        logger.warning("bucket %d is not as planned; the rest of this iteration runs in plain order", index)
        self._tasks.drop(index)
        laid = self._tasks.programs.of_plan(self._assignment).plan
        num_partitions = sum(laid.groups[part.group].bucket < index for part in laid.partitions)
        return Plain(self._tasks, sum(map(len, laid.tasks_of_bucket[:index])), num_partitions)
