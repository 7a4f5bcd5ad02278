"""The tasks of one iteration: queued on their lanes in the total order, counted by bucket; the two courses along them.

::

    enqueue   programs become nodes, which wait on their lanes
    begin     a bucket's buffer is there: its programs are pointed at it, its gate opens
    (lanes)   every task whose turn has come runs
    on_done   the last task of a bucket is done
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from espresso.comm.execute.iteration import Iteration
from espresso.comm.execute.lanes import Lanes, Node
from espresso.comm.execute.programs import Compiled, Programs, Work
from espresso.comm.program import Context, PartitionProgram, Round
from espresso.strategies import Bucket

logger = logging.getLogger("espresso")


class Tasks:
    """Nodes of one iteration, and which of them are open.

    Args:
        programs: where :class:`Planned` and :class:`Plain` take theirs from.
        on_done: called with a bucket's number after its last task.
    """

    def __init__(self, iteration: Iteration, programs: Programs, lanes: Lanes, on_done: Callable[[int], None]) -> None:
        self.iteration, self.programs, self._lanes, self._on_done = iteration, programs, lanes, on_done
        self._context: Context = programs.context
        self._of_bucket: dict[int, list[PartitionProgram]] = {}
        self._num_open: dict[int, int] = {}
        self._held_back: list[int] = []
        self._unfinished: dict[int, int] = {}  # bucket by place in the total order
        self._finite: list[bool] = []

    def enqueue(self, compiled: Compiled, first_task: int = 0) -> None:
        """Put the nodes of a plan on their lanes, in its order.

        Args:
            first_task: the number of its first task in the plan of all buckets.
        """
        laid = compiled.plan
        for bucket in laid.buckets:
            self._of_bucket[bucket.index], self._num_open[bucket.index] = [], 0
        works: dict[int, Work] = {}
        nodes: dict[int, Node] = {}
        place = {index: first_task + position for position, index in enumerate(laid.order)}
        for program, tasks in zip(compiled.programs, laid.tasks_of_partition, strict=True):
            number = program.group.bucket
            self._of_bucket[number].append(program)
            acting = [index for index in tasks if program.actions[laid.tasks[index].step_index] is not None]
            self._num_open[number] += len(acting)
            for before, index in zip([None, *acting], acting, strict=False):
                works[index] = Work(
                    program,
                    laid.tasks[index],
                    number,
                    first_task + index,
                    None if before is None else works[before],
                    partial(self._finish, program) if index == acting[-1] else None,
                )
                after = None if before is None else nodes[before]
                nodes[index] = self.iteration.run.node(works[index], after, partial(self._done, place[index]))
        with self._lanes.lock:
            self._unfinished |= {place[index]: node.bucket for index, node in nodes.items()}
            self._lanes.enqueue(nodes[index] for index in laid.order if index in nodes)

    def drop(self, first_bucket: int) -> None:
        """Take what has not begun of this bucket and all later ones off the lanes."""
        with self._lanes.lock:
            self._lanes.drop(lambda node: node.bucket >= first_bucket)
            self._unfinished = {place: b for place, b in self._unfinished.items() if b < first_bucket}

    def begin(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Point a bucket's programs at its buffer, and open its gate."""
        iteration, context = self.iteration, self._context
        iteration.record.buckets += (bucket,)
        scale = 1.0 if iteration.grad_scale is None else iteration.grad_scale
        if context.velocities is not None:
            context.velocities.clip(bucket, buffer, context.cluster.num_ranks, scale, context.memory)
        now = Round(iteration.record.iteration, scale, iteration.drains)
        for program in self._of_bucket[bucket.index]:
            program.bind(buffer, now)
        iteration.run.prepared(bucket.index)
        self._open(self._gates(bucket.index))

    def end(self) -> None:
        """No bucket comes any more: what was planned for others is dropped, what was held back begins."""
        self.drop(self.iteration.num_seen)
        self._open(self._held_back)

    def waiting_for(self) -> list[str]:
        return [node.label() for node in self._lanes.pending()]

    def place(self) -> int:
        """Of the first unfinished task in the total order; behind all if there is none."""
        with self._lanes.lock:
            return min(self._unfinished, default=1 << 30)

    def is_finite(self) -> bool:
        return all(self._finite)

    def _gates(self, bucket: int) -> list[int]:
        """Which buckets to open now: this one, or all of them at the last if the iteration is deferred."""
        if not self.iteration.record.assignment.deferred:
            return [bucket]
        self._held_back.append(bucket)
        return self._held_back if self.iteration.last_seen else []

    def _open(self, buckets: Sequence[int]) -> None:
        for index in buckets:
            if self._num_open[index] == 0:
                self._on_done(index)
        self._lanes.bucket_ready(buckets)

    def _finish(self, program: PartitionProgram) -> None:
        program.finish(check=self.iteration.checks or self._context.velocities is not None)

    def _done(self, place: int, work: Work) -> None:
        with self._lanes.lock:
            if work.finish is not None:
                self._finite.append(work.program.finite is not False)
                self.iteration.record.bytes_sent += work.program.bytes_sent
                self.iteration.record.bytes_raw += work.program.num_bytes_raw
            self.iteration.touch()
            self._unfinished.pop(place, None)
            self._num_open[work.bucket] -= 1
            done = self._num_open[work.bucket] == 0
        if done:
            self._on_done(work.bucket)


class _Queued:
    """What both courses along tasks know from these."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.waiting_for, self.place, self.is_finite = tasks.waiting_for, tasks.place, tasks.is_finite
        self.end = tasks.end

    def hurry(self) -> None:
        """Nothing: buckets are completed as they come."""


class Plain(_Queued):
    """Bucket by bucket, each planned alone: while the structure of the buckets is unknown, or has just changed.

    Args:
        num_tasks: of the buckets before the first that it takes, which a plan covered.
    """

    def __init__(self, tasks: Tasks, num_tasks: int = 0) -> None:
        super().__init__(tasks)
        self._num_tasks = num_tasks

    def take(self, index: int, buffer: torch.Tensor, describe: Callable[[], Bucket]) -> Plain:
        bucket = describe()
        compiled = self._tasks.programs.of_bucket(self._tasks.iteration.record.assignment.strategy, bucket)
        self._tasks.enqueue(compiled, self._num_tasks)
        self._num_tasks += len(compiled.plan.tasks)
        self._tasks.begin(bucket, buffer)
        return self


class Planned(_Queued):
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
        return Plain(self._tasks, sum(map(len, laid.tasks_of_bucket[:index])))
