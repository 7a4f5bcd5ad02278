"""Tasks of a job on the CPU: they run on their lanes' threads, and are done when those return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from espresso.comm.collectives import Rest
from espresso.comm.execute.assignment import Interval, Record
from espresso.comm.execute.lanes import Node
from espresso.comm.execute.programs import Future, Work
from espresso.comm.memory import HOST, Memory
from espresso.strategies import RANK_LANES, Lane, Routine


class HostSide:
    """The host's threads. :class:`DeviceSide` has the same methods and attributes.

    Attributes:
        judges_late: whether it takes a wait for the device to know how an iteration went.
        memory: where gradients are.
        host: where offloaded steps work.
        averaged: called with a bucket's number, on the stream that has its average, where that is gone before the
            iteration is judged; whether it launched something. Not called here.
    """

    judges_late = False
    memory: Memory = HOST
    host: Memory = HOST

    def __init__(self) -> None:
        self.averaged: Callable[[int], bool] = lambda bucket: False

    def begin(self, record: Record, patience_s: float) -> HostPass:
        """A new backward pass; on a device waits for it, where any do, last ``patience_s``."""
        return HostPass(record)

    def watch(self, clock: Any) -> None:
        """Have ``clock.read`` called with a device's times after every iteration (None: no more). None here."""

    def copied(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers as they are now on the current stream, on the host: there by the time the iteration is judged."""
        return numbers.clone()

    def fetched(self, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Make tensors of what nothing changes at present, and have them on the host; they are not copied if there."""
        return make()


class HostPass:
    """One backward pass on the host; :class:`DevicePass` has the same methods."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def new_future(self) -> Future:
        """For the hook to return."""
        return torch.futures.Future()

    def prepared(self, bucket: int) -> None:
        """Everything that a bucket's tasks wait for was done, or launched on backward's stream."""

    def node(self, work: Work, after: Node | None, on_done: Callable[[Work], None]) -> Node:
        """The node of a task, to follow ``after``; ``on_done`` is called when it is carried out, or launched."""
        return Node(
            lanes=work.task.lanes,
            bucket=work.bucket,
            run=partial(_run, work),
            label=work.label,
            after=after,
            issue=work.program.issue if work.program.issues else None,
            travels=work.task.step.is_communication and work.task.step.routine not in (Routine.PUSH, Routine.PULL),
            gives_way=all(lane in RANK_LANES for lane in work.task.lanes),
            on_done=partial(self._done, work, on_done),
        )

    def landed(
        self, bucket: int, work: Any, exchange: Interval | None, look: Sequence[torch.Tensor], *, asked: bool
    ) -> bool:
        """The library has averaged a bucket that it was given without tasks, or launched that.

        Args:
            exchange: to note what it took, on a device by the device's clock.
            look: of its buffers those whose numbers may be infinite.
            asked: this is a thread of ours, and none of the library's in the middle of ``work``.

        Returns:
            Whether they are finite; on a device ``read`` says so.

        Raises:
            Exception: what the library did.
        """
        if exchange is not None:
            self._record.intervals.append(exchange)
        work.get_future().value()
        return HOST.all_finite(look)

    def hand_over(self, bucket: int, buffer: torch.Tensor, future: Future) -> None:
        """Complete a future: its bucket's tasks are done, or launched."""
        future.set_result(buffer)

    def seal(self) -> None:
        """All tasks are done, or launched: begin to find out how they went. Here it is known."""

    def read(self, record: Record) -> bool:
        """Wait for what ``seal`` began. Whether everything that was noted on the way is finite.

        Raises:
            EspressoError: on a device: it took too long, or a payload was malformed.
        """
        return True

    def note_times(self, record: Record) -> None:
        """Put times that only the device knows into the record, after ``read``. It has the host's already."""

    def aside(self) -> AbstractContextManager[Any]:
        """Where the planner's work between iterations runs."""
        return nullcontext()

    def _done(self, work: Work, on_done: Callable[[Work], None], node: Node) -> None:
        lane = node.lanes[0]
        assert isinstance(lane, Lane)
        sent = work.program.bytes_of(work.task.step_index, work.task.stage)
        interval = Interval(work.number, lane, node.start_ns, node.end_ns, self._issue_ns(node), sent)
        self._record.intervals.append(interval)
        if work.finish is not None:
            work.finish()
        on_done(work)

    def _issue_ns(self, node: Node) -> int:
        """The task before it was done, or its bucket was there."""
        return self._record.ready_ns[node.bucket] if node.after is None else node.after.end_ns


def _run(work: Work) -> Rest | None:
    action = work.program.action(work.task.step_index, work.task.stage)
    if work.before is None:
        work.program.load()
    # A span for torch.profiler. Lanes have threads of their own, so a profiler sees it only when told to look at
    # all threads; asking whether one does would cost more than the span.
    with torch._C._profiler._RecordFunctionFast(f"espresso::{work.task.step}"):
        return action()
