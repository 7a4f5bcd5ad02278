"""Tasks of a job on the CPU: they run on their lanes' threads, and are done when those return."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from espresso.comm.execute.assignment import Interval, Record
from espresso.comm.execute.iteration import Future, Work
from espresso.comm.execute.lanes import Node
from espresso.comm.memory import HOST, Memory
from espresso.strategies import Lane


class HostSide:
    """The host's threads."""

    averages_alone = True
    judges_late = False

    def __init__(self) -> None:
        self.memory: Memory = HOST
        self.host: Memory = HOST

    def begin(self, record: Record, patience_s: float) -> HostPass:
        return HostPass(record)

    def watch(self, clock: Any) -> None:
        """Nothing to tell: the host's clock is everybody's."""


class HostPass:
    """One backward pass on the host."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def new_future(self) -> Future:
        return torch.futures.Future()

    def prepared(self, bucket: int) -> None:
        """Nothing: what was done here is done."""

    def node(self, work: Work, after: Node | None, on_done: Callable[[Work], None]) -> Node:
        return Node(
            lanes=work.task.lanes,
            bucket=work.bucket,
            run=partial(_run, work),
            label=work.label,
            after=after,
            issue=work.program.issue if work.program.issues else None,
            on_done=partial(self._done, work, on_done),
        )

    def hand_over(self, bucket: int, buffer: torch.Tensor, future: Future) -> None:
        future.set_result(buffer)

    def seal(self) -> None:
        """Nothing: everything is known."""

    def read(self, record: Record) -> bool:
        return True

    def note_times(self, record: Record) -> None:
        """Nothing: the record has the host's times already."""

    def aside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _done(self, work: Work, on_done: Callable[[Work], None], node: Node) -> None:
        if self._record.assignment.record:
            lane = node.lanes[0]
            assert isinstance(lane, Lane)
            self._record.intervals.append(Interval(work.number, lane, work.partition, node.start_ns, node.end_ns))
        if work.finish is not None:
            work.finish()
        on_done(work)


def _run(work: Work) -> None:
    action = work.program.action(work.task.step_index, work.task.stage)
    if work.before is None:
        work.program.load()
    # A span for torch.profiler. Lanes have threads of their own, so a profiler sees it only when told to look at
    # all threads; asking whether one does would cost more than the span.
    with torch._C._profiler._RecordFunctionFast(f"espresso::{work.task.step}"):
        action()
