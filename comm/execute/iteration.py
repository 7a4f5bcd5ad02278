"""One backward pass: its state, and the two protocols by which it is carried out.

::

    Course   how its buckets are averaged: ``Averaging``, ``Planned`` or ``Plain``
    Side     where tasks run: ``HostSide`` on threads, ``DeviceSide`` on streams
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from espresso.comm.execute.assignment import Record
from espresso.comm.execute.lanes import Node
from espresso.comm.memory import Memory
from espresso.comm.program import PartitionProgram
from espresso.strategies import Bucket, Task

Future = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """A task as this rank carries it out.

    Attributes:
        bucket: DDP's number.
        number: of the task in the plan of all the iteration's buckets.
        partition: likewise.
        before: what this rank does before it in the same partition.
        finish: what is to be done after it, if it is its partition's last.
    """

    program: PartitionProgram
    task: Task
    bucket: int
    number: int
    partition: int
    before: Work | None
    finish: Callable[[], None] | None

    def label(self) -> str:
        """What people call it in errors."""
        flows, scope = self.program.flows, self.task.step.scope
        peers = () if scope is None else self.program.context.members[scope].ranks
        which = f"step {self.task.step_index + 1}/{len(flows)} '{self.task.step}'"
        return described(which, self.bucket, self.program.tensors, peers)


def described(which: str, bucket: int, tensors: Sequence[str], peers: Sequence[int]) -> str:
    """A step of a bucket in people's words: which one, of which tensors, with which ranks."""
    names = tensors[0] if len(tensors) == 1 else f"{tensors[0]} … {tensors[-1]}" if tensors else "nothing"
    ranks = f" with ranks {', '.join(map(str, peers[:8]))}{', …' if len(peers) > 8 else ''}" if peers else ""
    return f"{which} of bucket {bucket} (tensors {names}){ranks}"


class Pass(Protocol):
    """One backward pass on a side."""

    def new_future(self) -> Future:
        """For the hook to return."""
        ...

    def prepared(self, bucket: int) -> None:
        """Everything that a bucket's tasks wait for was launched on backward's stream."""
        ...

    def node(self, work: Work, after: Node | None, on_done: Callable[[Work], None]) -> Node:
        """The node of a task, to follow ``after``; ``on_done`` is called when it is carried out, or launched."""
        ...

    def hand_over(self, bucket: int, buffer: torch.Tensor, future: Future) -> None:
        """Complete a future: its bucket's tasks are done, or launched."""
        ...

    def seal(self) -> None:
        """All tasks are done, or launched: begin to find out how they went."""
        ...

    def read(self, record: Record) -> bool:
        """Wait for what ``seal`` began. Whether everything that was noted on the way is finite.

        Raises:
            EspressoError: it took too long, or a payload was malformed.
        """
        ...

    def note_times(self, record: Record) -> None:
        """Put times that only the device knows into the record. After ``read``."""
        ...

    def aside(self) -> AbstractContextManager[Any]:
        """Where the planner's work between iterations runs."""
        ...


class Side(Protocol):
    """Where tasks run.

    Attributes:
        averages_alone: whether a bucket may go to the library without lanes (:class:`Averaging`).
        judges_late: whether it takes a wait for the device to know how an iteration went.
        memory: where gradients are.
        host: where offloaded steps work.
    """

    averages_alone: bool
    judges_late: bool
    memory: Memory
    host: Memory

    def begin(self, record: Record, patience_s: float) -> Pass:
        """A new backward pass; waits for the device, where any do, last ``patience_s``."""
        ...

    def watch(self, clock: Any) -> None:
        """Have ``clock.read`` called with the device's times after every iteration (None: no more)."""
        ...


class Course(Protocol):
    """How the buckets of one iteration are averaged."""

    def take(self, index: int, buffer: torch.Tensor, describe: Callable[[], Bucket]) -> Course:
        """Begin to average a bucket; returns the course for the buckets after it. Never blocks."""
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
        choose: the course for its first bucket.
    """

    def __init__(
        self, record: Record, run: Pass, grad_scale: float | None, choose: Callable[[Iteration], Course]
    ) -> None:
        self.record, self.run, self.grad_scale = record, run, grad_scale
        # Whether averages are looked at for infs. Every rank must reach the same verdict, also one that keeps no
        # residual (another is the root), since planners move by it together. A plain step without loss scaling
        # goes without: the look would cost a reading pass over all gradients, and nobody skips the step.
        self.checks = record.assignment.strategy.num_compressed > 0 or grad_scale is not None
        self.futures: dict[int, Future] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self.complete: set[int] = set()
        self.last_seen = False
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

    @property
    def deadline_passes(self) -> bool:
        """Whether time counts against it: not while the planner works after the last bucket."""
        return not self.plans and not self.is_idle

    def arrive(self, index: int, buffer: torch.Tensor, is_last: bool) -> Future:
        """A bucket is there."""
        self.touch()
        self.record.ready_ns.append(time.perf_counter_ns())
        future = self.futures[index] = self.run.new_future()
        self.buffers[index] = buffer
        self.last_seen = is_last
        return future

    def completes(self, index: int) -> bool:
        """Take note that a bucket is averaged; whether it was the iteration's last."""
        self.complete.add(index)
        return self.last_seen and len(self.complete) == self.num_seen

    def hand_over(self, index: int) -> None:
        """Let DDP have a bucket."""
        self.run.hand_over(index, self.buffers[index], self.futures[index])

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
