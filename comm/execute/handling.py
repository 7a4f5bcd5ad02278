"""A plan of buckets with next to nothing in them, on this rank alone: it takes what carrying out any plan takes."""

from __future__ import annotations

import threading
from functools import partial
from types import TracebackType

import torch

from espresso.comm.execute.assignment import Assignment, Record
from espresso.comm.execute.failure import StalledError
from espresso.comm.execute.host import HostPass
from espresso.comm.execute.iteration import Iteration
from espresso.comm.execute.lanes import Lanes, Node
from espresso.comm.execute.programs import Programs
from espresso.comm.execute.tasks import Planned, Tasks
from espresso.comm.keep.store import ResidualStore
from espresso.comm.member import Member
from espresso.comm.program import Codecs, Context
from espresso.strategies import NONE, Bucket, Choice, Cluster, Scope, Strategy, TensorSpec, parse_option, plan

NUMEL = 1024
"""Of a bucket."""

PATIENCE_S = 60.0


class Handling:
    """Buckets of one small tensor, copied for compressed and exchanged with nobody, on the host, on own lanes.

    Attributes:
        num_tasks: compressions and decompressions of a pass.
    """

    def __init__(self, codecs: Codecs, num_buckets: int) -> None:
        alone = Cluster(1, 1)
        tensors = [TensorSpec(f"{number}", (NUMEL,), "float32") for number in range(num_buckets)]
        self._buckets = tuple(Bucket.packed(i, [(tensor.name, NUMEL)], "float32") for i, tensor in enumerate(tensors))
        strategy = Strategy.uniform(tensors, alone, Choice(parse_option("comp > flat.allgather > dec"), NONE))
        laid = plan(strategy, self._buckets)
        self.num_tasks = sum(task.step.device is not None for task in laid.tasks)
        self._assignment = Assignment(strategy, laid.order, self._buckets)
        self._buffers = [torch.zeros(NUMEL, dtype=torch.float32, device="cpu") for _ in tensors]
        self._programs = Programs(Context(alone, 0, {Scope.FLAT: Member(None, (0,), 0)}, codecs, ResidualStore()))
        self._done = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._lanes = Lanes(self._failed)

    def __enter__(self) -> Handling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._lanes.close()

    def __call__(self) -> None:
        """One backward pass: hand every bucket over, and wait until all are done.

        Raises:
            StalledError: it takes too long.
            BaseException: what a lane raised.
        """
        record = Record(0, self._assignment)
        self._lanes.begin_iteration()
        iteration = Iteration(record, HostPass(record), None, False, self._course)
        for bucket, buffer in zip(self._buckets, self._buffers, strict=True):
            iteration.arrive(bucket.index, buffer, bucket is self._buckets[-1])
            iteration.course = iteration.course.take(bucket.index, buffer, partial(_itself, bucket))
        for _ in self._buckets:
            if not self._done.acquire(timeout=PATIENCE_S):
                raise StalledError(f"a plan of small buckets was not carried out within {PATIENCE_S:g} s")
            if self._error is not None:
                raise self._error

    def _course(self, iteration: Iteration) -> Planned:
        return Planned(Tasks(iteration, self._programs, self._lanes, self._averaged), self._buckets)

    def _averaged(self, bucket: int) -> None:
        self._done.release()

    def _failed(self, error: BaseException, node: Node | None) -> None:
        self._error = error
        self._done.release()


def _itself(bucket: Bucket) -> Bucket:
    return bucket
