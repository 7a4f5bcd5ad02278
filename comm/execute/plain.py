"""Bucket by bucket, each planned alone: while the structure of the buckets is unknown, or has just changed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from espresso.comm.execute.tasks import Tasks
from espresso.strategies import Bucket


class Plain:
    """An iteration in plain order: a course.

    Args:
        num_tasks: of the buckets before the first that it takes, which a plan covered.
        num_partitions: likewise.
    """

    def __init__(self, tasks: Tasks, num_tasks: int = 0, num_partitions: int = 0) -> None:
        self._tasks, self._num_tasks, self._num_partitions = tasks, num_tasks, num_partitions

    def take(self, index: int, buffer: torch.Tensor, describe: Callable[[], Bucket]) -> Plain:
        bucket = describe()
        compiled = self._tasks.programs.of_bucket(self._tasks.iteration.record.assignment.strategy, bucket)
        self._tasks.enqueue(compiled, self._num_tasks, self._num_partitions)
        self._num_tasks += len(compiled.plan.tasks)
        self._num_partitions += len(compiled.plan.partitions)
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
