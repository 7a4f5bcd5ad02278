"""One backward pass: its state, and what it is carried out by.

::

    Course   how its buckets are averaged: ``Averaging``, ``Planned`` or ``Plain``
    Side     where tasks run: ``HostSide`` on threads, ``DeviceSide`` on streams; a ``Pass`` of it for each iteration
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from espresso.comm.execute.assignment import Record
from espresso.comm.execute.device import DevicePass, DeviceSide
from espresso.comm.execute.host import HostPass, HostSide
from espresso.comm.execute.programs import Future
from espresso.strategies import Bucket

END = -1
"""Stands for the end of an iteration where a bucket's number would."""

Pass = HostPass | DevicePass
Side = HostSide | DeviceSide


class Course(Protocol):
    """How the buckets of one iteration are averaged."""

    def take(self, index: int, buffer: torch.Tensor, describe: Callable[[], Bucket]) -> Course:
        """Begin to average a bucket; returns the course for the buckets after it. Never blocks."""
        ...

    def end(self) -> None:
        """No bucket comes any more, as is known only now; ``last_seen`` says so already."""
        ...

    def hurry(self) -> None:
        """Somebody waits before the last bucket is there: complete what can be completed."""
        ...

    def waiting_for(self) -> list[str]:
        """What is under way or queued, in people's words; what is under way first."""
        ...

    def place(self) -> int:
        """How far it is: the place of its first unfinished part in the order that all ranks follow."""
        ...

    def is_finite(self) -> bool:
        """Whether the averages are, as far as that was to be looked at; once all are there."""
        ...


class Iteration:
    """State of one backward pass. Its fields change under the executor's lock.

    Args:
        grad_scale: the loss scale that the gradients carry; None without loss scaling.
        may_drain: whether some rank may keep something of an earlier strategy that is to be sent.
        choose: the course for its first bucket.
    """

    def __init__(
        self,
        record: Record,
        run: Pass,
        grad_scale: float | None,
        may_drain: bool,
        choose: Callable[[Iteration], Course],
    ) -> None:
        self.record, self.run, self.grad_scale = record, run, grad_scale
        self.drains = may_drain and record.assignment.drain
        # Whether averages are looked at for infs. Every rank must reach the same verdict, also one that keeps no
        # residual (another is the root), since planners move by it together. A plain step without loss scaling
        # goes without: the look would cost a reading pass over all gradients, and nobody skips the step.
        self.checks = record.assignment.strategy.compresses or grad_scale is not None or self.drains
        self.futures: dict[int, Future] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self.complete: set[int] = set()
        self.last_seen = self.has_end = False
        self.plans = False
        self.touched_s = time.monotonic()
        self.course = choose(self)

    @property
    def num_seen(self) -> int:
        return len(self.record.ready_ns)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done before backward hands over another bucket."""
        held_back = self.record.assignment.deferred or len(self.complete) == self.num_seen
        return not self.last_seen and held_back

    def arrive(self, index: int, buffer: torch.Tensor, is_last: bool) -> Future:
        """A bucket is there."""
        self.touch()
        self.record.ready_ns.append(time.perf_counter_ns())
        future = self.futures[index] = self.run.new_future()
        self.buffers[index] = buffer
        self.last_seen = is_last
        return future

    def end(self) -> Future:
        """No bucket comes any more. What stands for the end is averaged like an empty bucket."""
        self.touch()
        self.last_seen = self.has_end = True
        future = self.futures[END] = self.run.new_future()
        self.buffers[END] = torch.empty(0, device="cpu")
        self.run.prepared(END)
        return future

    def completes(self, index: int) -> bool:
        """Take note that a bucket is averaged; whether it was the iteration's last."""
        self.complete.add(index)
        return self.last_seen and len(self.complete) == self.num_seen + self.has_end

    def hand_over(self, index: int) -> None:
        """Let DDP have a bucket, and keep nothing of it.

        FSDP has new ones in every step, and an iteration is in a circle with its course.
        """
        self.run.hand_over(index, self.buffers[index], self.futures[index])
        del self.buffers[index], self.futures[index]

    def hand_over_last(self, index: int) -> None:
        """Let DDP have the bucket that was averaged last; whoever waits for the end has that too."""
        try:
            for each in dict.fromkeys((index, END)):
                if each in self.futures:
                    self.hand_over(each)
        except BaseException as error:  # nobody looks after this iteration any more
            fail_open(self.futures.values(), error)
            raise

    def touch(self) -> None:
        """Something went on: the deadline begins anew."""
        self.touched_s = time.monotonic()


def fail_open(futures: Iterable[Future], error: BaseException) -> None:
    """Complete with ``error`` what is not complete yet."""
    for future in futures:
        try:
            if not future.done():
                future.set_exception(error)  # type: ignore[arg-type]
        except RuntimeError:
            continue  # a lane completed it in this very moment
