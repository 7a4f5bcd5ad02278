"""Tasks of a job on a GPU: the same plan and the same order, but lanes are streams.

::

    hook(bucket) ── event on backward's stream ── every task whose turn has come is launched, at once, here
        └─ returns a future, completed at once with the stream "out" current: DDP's stream waits, the host does not
    next iteration's first bucket ── the verdict of this one is read, residuals are committed or discarded

Between streams there are events::

    backward's stream   ... gradients of b0 | event       gradients of b1 | event ...
    training            wait, compress b0 ── event                decompress b0 ── event
    intra / inter                             wait, exchange b0 ── event
    out                                                                   wait, DDP's future of b0

A task waits for an event of the task before it and of what held its lanes before. Three kinds of tasks take the host,
and so a thread of their lane: an offloaded step, which works on mirrors in pinned memory, an exchange over Gloo, and
a push or pull of parameter servers, from and to mirrors too. Copies to and from mirrors are tasks of their own.

Whether averages were finite and payloads well formed is noted on the device and copied once an iteration. In steady
state it is read when the next iteration begins, so that the host runs ahead by up to one iteration; what the planner
has to do then runs there. In a profiled iteration (``Assignment.deferred``) the last future waits, as on the host.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from espresso.comm.errors import EspressoError
from espresso.comm.execute.assignment import Interval, Record
from espresso.comm.execute.failure import StalledError
from espresso.comm.execute.lanes import LAUNCH, Node
from espresso.comm.execute.programs import Future, Work
from espresso.comm.memory import DeviceMemory, Memory
from espresso.strategies import Lane, Routine, Stage, StepKind

NoteTaker = Callable[[], list[torch.Tensor]]
"""Gives tensors on the device that are all zero if the iteration's payloads were good and finite."""


LOOK_EVERY = 16
"""Of uncompressed iterations the times of every so many are read: a read takes microseconds a task."""

OUT = "out"
POLL_S = 1e-4

Event = Any
"""Of a stream: what comes after it may wait for it."""

STREAM_OF = {
    Lane.TRAINING: "training",
    Lane.OFFLOAD: "copy",
    Lane.COPY: "copy",
    Lane.INTRA: "intra",
    Lane.INTER_OUT: "inter",
    Lane.INTER_IN: "inter",
    Lane.SERVER_IN: "inter",
    Lane.SERVER_OUT: "inter",
}
"""The host's pool has no stream: what it waits for and what waits for it are copies."""


class _Launched:
    """What a launch returns where lanes expect a future: it is done for the host. A torch future costs 10 us a task."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    def value(self) -> None:
        """Nothing."""


_LAUNCHED = _Launched()


class CudaStreams:
    """A stream for each lane, with events that know the time. Nothing here makes the host wait but ``wait_here``.

    Streams come before backward's in priority: their kernels are short, and exchanges wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        names = {*STREAM_OF.values(), OUT}
        make: Any = torch.cuda.Stream
        self._streams = {name: make(device, priority=-1) for name in sorted(names)}

    def on(self, name: str) -> AbstractContextManager[Any]:
        """Make a stream the current one of this thread."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._streams[name])
        return context

    def record(self) -> Event:
        """An event at the end of the current stream."""
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, events: Iterable[Event]) -> None:
        """Let the current stream wait for events; the host goes on."""
        current = torch.cuda.current_stream(self.device)
        for event in events:
            current.wait_event(event)

    def wait_here(self, event: Event, timeout_s: float) -> bool:
        """Wait on this thread; False if it takes longer.

        Polls, since a wait for a device cannot be ended, and an exchange may hang.
        """
        end = time.monotonic() + timeout_s
        while not event.query():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    def elapsed_us(self, begin: Event, end: Event) -> float:
        """Device time between two events that both have come."""
        return float(begin.elapsed_time(end)) * 1e3

    def new_future(self) -> Future:
        """A future that remembers the stream current when it is completed."""
        future: Future = torch.futures.Future(devices=[self.device])
        return future


class DeviceSide:
    """The streams of one device; ``note_taker`` knows what decoders find."""

    judges_late = True

    def __init__(self, streams: CudaStreams, memory: DeviceMemory, note_taker: NoteTaker) -> None:
        self.streams, self.found_by_decoders, self.noted = streams, note_taker, memory.take_notes
        self.memory: Memory = memory
        self.host: Memory = memory.host
        self.averaged: Callable[[int], bool] = lambda bucket: False
        self._patience_s = math.inf
        self._anchor: tuple[Event, int] | None = None
        self._clock: Any = None

    def begin(self, record: Record, patience_s: float) -> DevicePass:
        self._patience_s = patience_s
        return DevicePass(self, record, patience_s)

    def watch(self, clock: Any) -> None:
        self._clock = clock

    def copied(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.host.numbers(numbers.numel(), numbers.dtype).copy_(numbers, non_blocking=True)

    def fetched(self, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """On a stream of its own: backward is not waited for."""
        with self.streams.on(OUT):
            there = [self.copied(numbers) for numbers in make()]
            if not self.streams.wait_here(self.streams.record(), self._patience_s):
                raise StalledError(f"the device did not copy {len(there)} stretches within {self._patience_s:.0f} s")
        return there

    def at_ns(self, event: Event) -> int:
        """When an event came, on the clock of ``perf_counter_ns``; both it and the anchor have come."""
        assert self._anchor is not None
        anchor, at_ns = self._anchor
        return at_ns + int(self.streams.elapsed_us(anchor, event) * 1e3)

    def settle_times(self, event: Event, write: Callable[[], None]) -> None:
        """``event`` has come, and the device rests or nearly so: write times down, then take it as the new anchor."""
        known = self._anchor is not None
        if known:
            write()
        if self._clock is not None:
            self._clock.read(self.at_ns if known else None)
        self._anchor = (event, self.at_ns(event) if known else time.perf_counter_ns())


class DevicePass:
    """One backward pass on a device."""

    def __init__(self, side: DeviceSide, record: Record, patience_s: float) -> None:
        self._side, self._streams, self._patience_s = side, side.streams, patience_s
        self._records = record.assignment.record or record.iteration % LOOK_EVERY == 0
        self._decodes = not record.assignment.strategy.only_averages
        self._lock = threading.Lock()
        self.ready: dict[int, Event] = {}
        self.intervals: list[tuple[Interval, Event, Event]] = []
        self._ends: dict[int, list[Event]] = {}
        self._last: dict[Lane, Event] = {}
        self._of_work: dict[Work, Event] = {}
        self.end: Event = self._streams.record()
        self._flags = torch.zeros(3, dtype=torch.int64, device="cpu")

    def new_future(self) -> Future:
        return self._streams.new_future()

    def prepared(self, bucket: int) -> None:
        """What was allocated, filled or clipped for it was launched on backward's stream: tasks wait for that too."""
        self.ready[bucket] = self._streams.record()

    def node(self, work: Work, after: Node | None, on_done: Callable[[Work], None]) -> Node:
        takes_host = _takes_host(work)
        moves = work.task.stage is Stage.STEP and work.task.step.kind is StepKind.COMMUNICATE
        launch = partial(self._launch, work, on_host=takes_host)
        return Node(
            lanes=(*work.task.lanes, LAUNCH) if moves and not takes_host else work.task.lanes,
            bucket=work.bucket,
            run=launch,
            issue=None if takes_host else partial(self._issue, work),
            label=work.label,
            after=after,
            on_done=lambda _: on_done(work),
        )

    def landed(
        self, bucket: int, work: Any, exchange: Interval | None, look: Sequence[torch.Tensor], *, asked: bool
    ) -> bool:
        if asked:
            with self.aside():
                work.wait()
                end = self._streams.record()
        else:  # Gloo's thread has its current stream wait for what it copied
            work.get_future().value()
            end = self._streams.record()
        self._ends[bucket] = [end]
        if exchange is not None:
            self.intervals.append((exchange, self.ready[bucket], end))
        if look:
            with self.aside():
                self._streams.wait([end])
                self._side.memory.all_finite(look)
        return True

    def hand_over(self, bucket: int, buffer: torch.Tensor, future: Future) -> None:
        """DDP's stream will wait for all that is launched; the host does not."""
        with self.aside():
            self._streams.wait(self._ends.get(bucket) or [self.ready[bucket]])
            if self._side.averaged(bucket):
                self.end = self._streams.record()  # the last bucket's comes after the seal
            future.set_result(buffer)

    def seal(self) -> None:
        """Start the copy of everything that the iteration noted on the device."""
        with self.aside():
            for bucket, ready in self.ready.items():
                self._streams.wait(self._ends.get(bucket) or [ready])
            device = self._streams.device
            notes = [(~note).view(1) for note in self._side.noted()]
            if not notes and not self._decodes:  # nothing to copy, and a launch takes microseconds
                self.end = self._streams.record()
                return
            found = self._side.found_by_decoders()
            flags = torch.cat([torch.zeros(1, dtype=torch.bool, device=device), *notes])
            codes = torch.cat([torch.zeros(2, dtype=torch.int64, device=device), *(f.view(-1) for f in found)])
            both = torch.stack([flags.any().to(torch.int64), codes[0::2].amax(), codes[1::2].amax()])
            for tensor in found:
                tensor.zero_()
            self._flags = self._side.host.numbers(3, torch.int64)
            self._flags.copy_(both, non_blocking=True)
            self.end = self._streams.record()

    def read(self, record: Record) -> bool:
        if not self._streams.wait_here(self.end, self._patience_s):
            raise StalledError(
                f"the device did not finish iteration {record.iteration} within {self._patience_s:.0f} s"
            )
        not_finite, flagged, malformed = self._flags.tolist()
        if malformed:
            raise EspressoError(
                f"iteration {record.iteration} received a malformed payload (code {malformed:#x}); do all ranks use"
                " the same strategy and version?"
            )
        return not (not_finite or flagged)

    def note_times(self, record: Record) -> None:
        self._side.settle_times(self.end, partial(self._write_times, record))

    def aside(self) -> AbstractContextManager[Any]:
        return self._streams.on(OUT)

    def _write_times(self, record: Record) -> None:
        at_ns = self._side.at_ns
        record.ready_ns = [at_ns(self.ready[i]) for i in range(len(record.ready_ns))]
        record.done_ns = at_ns(self.end)
        record.intervals = [
            replace(interval, issue_ns=at_ns(begin), start_ns=at_ns(begin), end_ns=at_ns(end))
            for interval, begin, end in self.intervals
        ]

    def _issue(self, work: Work) -> _Launched:
        self._launch(work, on_host=False)
        return _LAUNCHED

    def _launch(self, work: Work, *, on_host: bool) -> None:
        """Queue a task on its stream; one that takes the host first waits, on its lane's thread, for what it needs."""
        action = work.program.action(work.task.step_index, work.task.stage)
        lanes = work.task.lanes
        earlier = [self.ready[work.bucket] if work.before is None else self._of_work[work.before]]
        earlier += [self._last[lane] for lane in lanes if lane in self._last]
        with self._streams.on(STREAM_OF[lanes[-1]]):
            self._streams.wait(earlier)
            begin = self._streams.record()
            if work.before is None:
                work.program.load()
            if on_host and not self._streams.wait_here(self._streams.record(), self._patience_s):
                raise StalledError(f"the device did not come so far within {self._patience_s:.0f} s")
            rest = action()
            if rest is not None:
                rest()
            if work.finish is not None:
                work.finish()
            end = self._streams.record()
        with self._lock:
            self._of_work[work] = end
            self._last |= dict.fromkeys(lanes, end)
            if work.finish is not None:
                self._ends.setdefault(work.bucket, []).append(end)
            if self._records:
                sent = work.program.bytes_of(work.task.step_index, work.task.stage)
                interval = Interval(work.number, lanes[0], 0, 0, num_bytes=sent)
                self.intervals.append((interval, begin, end))


def _takes_host(work: Work) -> bool:
    """Whether a task blocks, and so needs its lane's thread."""
    step = work.task.step
    if work.task.stage is not Stage.STEP:
        return False
    if step.routine in (Routine.PUSH, Routine.PULL):
        return True
    if step.scope is not None:
        return work.program.context.members[step.scope].is_gloo
    return work.task.lanes == (Lane.OFFLOAD,)
