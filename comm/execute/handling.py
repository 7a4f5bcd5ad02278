"""A plan of buckets with next to nothing in them: what it takes is what carrying out a plan takes, whatever it does."""

from __future__ import annotations

import threading
from functools import partial
from types import TracebackType

import torch

from espresso.comm.errors import EspressoError
from espresso.comm.execute.assignment import Assignment, Record
from espresso.comm.execute.host import HostPass
from espresso.comm.execute.iteration import Iteration
from espresso.comm.execute.lanes import Lanes, Node
from espresso.comm.execute.programs import Programs
from espresso.comm.execute.tasks import Planned, Tasks
from espresso.comm.groups import Groups
from espresso.comm.keep.store import ResidualStore
from espresso.comm.program import Codecs, Context
from espresso.strategies import Bucket, Choice, Plan, Strategy, TensorSpec, plan


class Handling:
    """One small tensor a bucket, on the host, with lanes and residuals of its own. All ranks make theirs together.

    Args:
        choice: of every tensor.
        numel: elements of each.
        patience_s: after which a pass that is not over fails.
    """

    def __init__(
        self, groups: Groups, codecs: Codecs, choice: Choice, *, num_buckets: int, numel: int, patience_s: float
    ) -> None:
        context = Context(groups.cluster, groups.rank, groups.scopes, codecs, ResidualStore())
        tensors = [TensorSpec(f"{number}", (numel,), "float32") for number in range(num_buckets)]
        buckets = tuple(Bucket.packed(i, [(tensor.name, numel)], "float32") for i, tensor in enumerate(tensors))
        strategy = Strategy.uniform(tensors, groups.cluster, choice)
        self.plan: Plan = plan(strategy, buckets)
        self._assignment = Assignment(strategy, self.plan.order, buckets)
        self._buffers = [torch.zeros(numel, device="cpu") for _ in buckets]
        self._store, self._programs, self._patience_s = context.store, Programs(context), patience_s
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
        """One backward pass: hand every bucket over, and wait until all are averaged.

        Raises:
            EspressoError: it takes too long.
            Exception: what a lane raised.
        """
        record = Record(0, self._assignment)
        self._lanes.begin_iteration()
        iteration = Iteration(record, HostPass(record), None, False, self._course)
        assert self._assignment.buckets is not None
        for bucket, buffer in zip(self._assignment.buckets, self._buffers, strict=True):
            iteration.arrive(bucket.index, buffer, bucket.index + 1 == len(self._buffers))
            iteration.course = iteration.course.take(bucket.index, buffer, partial(_itself, bucket))
        for _ in self._buffers:
            if not self._done.acquire(timeout=self._patience_s):
                raise EspressoError(f"a plan of small buckets was not carried out within {self._patience_s:g} s")
            if self._error is not None:
                raise self._error
        self._store.commit()

    def _course(self, iteration: Iteration) -> Planned:
        assert self._assignment.buckets is not None
        return Planned(Tasks(iteration, self._programs, self._lanes, self._averaged), self._assignment.buckets)

    def _averaged(self, bucket: int) -> None:
        self._done.release()

    def _failed(self, error: BaseException, node: Node | None) -> None:
        self._error = error
        self._done.release()


def _itself(bucket: Bucket) -> Bucket:
    return bucket
