"""The executor of a job on a GPU: the same plan and the same order, but lanes are streams.

::

    hook(bucket) ── event on backward's stream ── every task whose turn has come is launched, at once, here
        └─ returns a future, completed at once with the stream "out" current: DDP's stream waits, the host does not
    next iteration's first bucket ── the verdict of this one is read, residuals are committed or discarded

A task waits for an event of the task before it and of what held its lanes before. Three kinds of tasks take the host,
and so a thread of their lane: an offloaded step, which works on mirrors in pinned memory, an exchange over Gloo, and
a push or pull of parameter servers, from and to mirrors too. Copies to and from mirrors are tasks of their own.

Whether averages were finite and payloads well formed is noted on the device and copied once an iteration. In steady
state it is read when the next iteration begins, so that the host runs ahead by up to one iteration; what the planner
has to do then runs there. In a profiled iteration (``Assignment.deferred``) the last future waits, as on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from espresso.comm.errors import EspressoError
from espresso.comm.execute.executor import Executor, Interval, Record, _Iteration, _label, _worded
from espresso.comm.execute.lanes import LAUNCH, Node
from espresso.comm.execute.streams import OUT, STREAM_OF, Event, Streams
from espresso.comm.memory import DeviceMemory
from espresso.comm.program.partition import PartitionProgram, Round
from espresso.strategies import Bucket, Lane, Plan, Routine, Stage, StepKind, Task

NoteTaker = Callable[[], list[torch.Tensor]]
"""Gives tensors on the device that are all zero if the iteration's payloads were good and finite."""


class _Launched:
    """What a launch returns where lanes expect a future: it is done as far as the host is concerned."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    def value(self) -> None:
        return None


_LAUNCHED = _Launched()


@dataclass
class _Marks:
    """Events of one iteration, and what else the device keeps of it."""

    begin: Event
    ready: dict[int, Event] = field(default_factory=dict)
    last: dict[Lane, Event] = field(default_factory=dict)
    of_node: dict[Node, Event] = field(default_factory=dict)
    ends: dict[PartitionProgram, Event] = field(default_factory=dict)
    times: list[tuple[Interval, Event, Event]] = field(default_factory=list)


@dataclass
class _Verdict:
    """An iteration whose work is launched but not judged yet."""

    iteration: _Iteration
    flags: torch.Tensor
    event: Event
    marks: _Marks


class DeviceExecutor(Executor):
    """Runs assignments on the streams of one device.

    Args:
        streams: of the model's device.
        memory: of the model's device.
        note_taker: for what decoders find.
        arguments: as for :class:`~espresso.comm.execute.executor.Executor`.
    """

    host_copies = True

    def __init__(
        self, *arguments: Any, streams: Streams, memory: DeviceMemory, note_taker: NoteTaker, **more: Any
    ) -> None:
        super().__init__(*arguments, **more)
        self.streams, self.memory = streams, memory
        self._context = replace(self._context, memory=memory, host=memory.host)
        self._note_taker = note_taker
        self._marks: _Marks | None = None
        self._pending: _Verdict | None = None
        self._anchor: tuple[Event, int] | None = None
        self._clock: Any = None
        self._touched = False

    # -- the hook ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.conclude()
        super()._begin()
        assert self._iteration is not None
        self._iteration.averaging = None  # every tensor goes through programs: they know streams
        self._marks = _Marks(self.streams.record())

    def _new_future(self, index: int) -> torch.futures.Future[torch.Tensor]:
        assert self._marks is not None
        self._marks.ready[index] = self.streams.record()
        return self.streams.new_future()

    def _prepare(self, iteration: _Iteration, bucket: Bucket, buffer: torch.Tensor, now: Round) -> None:
        """What was allocated, filled or clipped here was launched on backward's stream: tasks wait for that too."""
        assert self._marks is not None
        self._touched = self.velocities is not None and bool(self.velocities.rule.clip_norm)
        super()._prepare(iteration, bucket, buffer, now)
        if self._touched:
            self._marks.ready[bucket.index] = self.streams.record()

    def _compile(self, laid: Plan) -> list[PartitionProgram]:
        self._touched = True
        return super()._compile(laid)

    def _node(
        self,
        iteration: _Iteration,
        program: PartitionProgram,
        task: Task,
        bucket: int,
        before: Node | None,
        ends: bool,
    ) -> Node:
        marks = self._marks
        assert marks is not None
        launch = partial(self._launch, iteration, marks, program, task, bucket, before, ends)
        takes_host = self._takes_host(program, task)
        moves = task.stage is Stage.STEP and task.step.kind is StepKind.COMMUNICATE
        ordered = moves and not takes_host
        node = Node(
            lanes=(*task.lanes, LAUNCH) if ordered else task.lanes,
            bucket=bucket,
            run=lambda: None,
            label=partial(_label, program, task.step_index, bucket),
            after=before,
            tag=(task.index, task.partition),
            on_done=partial(self._task_done, iteration, program, ends),
        )
        if takes_host:
            node.run = partial(launch, node, on_host=True)
        else:
            node.issue = partial(launch, node, on_host=False)
        return node

    def _takes_host(self, program: PartitionProgram, task: Task) -> bool:
        if task.stage is not Stage.STEP:
            return False
        if task.step.routine in (Routine.PUSH, Routine.PULL):
            return True
        if task.step.scope is not None:
            return program.context.members[task.step.scope].is_gloo
        return task.lanes == (Lane.OFFLOAD,)

    def _launch(
        self,
        iteration: _Iteration,
        marks: _Marks,
        program: PartitionProgram,
        task: Task,
        bucket: int,
        before: Node | None,
        ends: bool,
        node: Node,
        *,
        on_host: bool,
    ) -> _Launched:
        """Queue a task on its stream; one that takes the host first waits, on its lane's thread, for what it needs."""
        action = program.action(task.step_index, task.stage)
        earlier = [marks.ready[bucket] if before is None else marks.of_node[before]]
        earlier += [marks.last[lane] for lane in task.lanes if lane in marks.last]
        with self.streams.on(STREAM_OF[task.lanes[-1]]):
            self.streams.wait(earlier)
            begin = self.streams.record()
            if before is None:
                program.load()
            if on_host:
                reached = self.streams.record()
                if not self.streams.wait_here(reached, self._timeout_s):
                    raise EspressoError(f"the device did not come so far within {self._timeout_s:.0f} s")
            action()
            if ends:
                drains = iteration.record.assignment.drain and not self.store.is_empty
                program.finish(check=iteration.checks or drains or self.velocities is not None)
            end = self.streams.record()
        with self._lock:
            marks.of_node[node] = end
            for lane in task.lanes:
                marks.last[lane] = end
            if ends:
                marks.ends[program] = end
                iteration.finite.append(program.finite is not False)  # what a step on the host found
            if iteration.record.assignment.record:
                interval = Interval(task.index, task.lanes[0], task.partition, 0, 0)
                marks.times.append((interval, begin, end))
        return _LAUNCHED

    def _task_done(self, iteration: _Iteration, program: PartitionProgram, ends: bool, node: Node) -> None:
        with self._lock:
            if ends:
                iteration.record.bytes_sent += program.bytes_sent
                iteration.record.bytes_raw += program.num_bytes_raw
            iteration.touched_s = time.monotonic()
            iteration.open_tasks[node.bucket] -= 1
            done = iteration.open_tasks[node.bucket] == 0
        if done:
            self._bucket_done(iteration, node.bucket)

    # -- completion --------------------------------------------------------------------------------

    def _bucket_done(self, iteration: _Iteration, bucket: int) -> None:
        """All of a bucket is launched: DDP's stream may wait for it."""
        marks = self._marks
        assert marks is not None
        with self._lock:
            iteration.complete.add(bucket)
            everything = iteration.last_seen and len(iteration.complete) == len(iteration.record.ready_ns)
        with self.streams.on(OUT):
            programs = iteration.programs[bucket]
            ends = [marks.ends[program] for program in programs if program in marks.ends]
            self.streams.wait([marks.ready[bucket], *ends])
            if not everything:
                iteration.futures[bucket].set_result(iteration.buffers[bucket])
                return
            self.streams.wait(marks.ends.values())
            verdict = self._verdict(iteration, marks)
            if not iteration.record.assignment.deferred:
                with self._lock:
                    self._pending, self._iteration = verdict, None
                iteration.futures[bucket].set_result(iteration.buffers[bucket])
                return
        self._lanes.submit("control", partial(self._conclude_now, verdict, bucket))

    def _verdict(self, iteration: _Iteration, marks: _Marks) -> _Verdict:
        """Start the copy of everything that the iteration noted on the device."""
        device = self.streams.device
        notes = [(~note).view(1) for note in self.memory.take_notes()]
        found = self._note_taker()
        flags = torch.cat([torch.zeros(1, dtype=torch.bool, device=device), *notes])
        codes = torch.cat([torch.zeros(2, dtype=torch.int64, device=device), *(f.view(-1) for f in found)])
        both = torch.stack([flags.any().to(torch.int64), codes[0::2].amax(), codes[1::2].amax()])
        for tensor in found:
            tensor.zero_()
        host = self.memory.host.numbers(3, torch.int64)
        host.copy_(both, non_blocking=True)
        return _Verdict(iteration, host, self.streams.record(), marks)

    def conclude(self) -> None:
        """Judge the last iteration, if that is still to be done: wait for the device, commit or discard residuals.

        Raises:
            EspressoError: the device did not finish in time, or a payload was malformed.
        """
        verdict, self._pending = self._pending, None
        if verdict is None:
            return
        more = self._judge(verdict)
        if more is not None:
            try:
                more()
            except EspressoError as error:
                raise self._fail_now(str(error)) from error
            except Exception as error:
                text = f"while the ranks searched or compared after an iteration: {_worded(error)}"
                raise self._fail_now(text) from error

    def _judge(self, verdict: _Verdict) -> Callable[[], None] | None:
        self._read(verdict)
        self._take_times(verdict.iteration.record, verdict)
        return self.planner.after(verdict.iteration.record)

    def _read(self, verdict: _Verdict) -> None:
        """Wait for the device, and commit or discard residuals."""
        iteration, record = verdict.iteration, verdict.iteration.record
        if not self.streams.wait_here(verdict.event, self._timeout_s):
            raise self._fail_now(
                f"rank {self.groups.rank}: the device did not finish iteration {record.iteration} within"
                f" {self._timeout_s:.0f} s; another rank died, hangs, or runs a different number of steps"
            )
        not_finite, flagged, malformed = verdict.flags.tolist()
        if malformed:
            raise self._fail_now(
                f"rank {self.groups.rank}: iteration {record.iteration} received a malformed payload"
                f" (code {malformed:#x}); do all ranks use the same strategy and version?"
            )
        iteration.finite.append(not (not_finite or flagged))
        self._settle(iteration)

    def _conclude_now(self, verdict: _Verdict, bucket: int) -> None:
        """On the control thread: judge, let the planner work, then complete the last future."""
        iteration = verdict.iteration
        try:
            more = self._judge(verdict)
        except EspressoError:
            return  # kept and logged already; the futures have it
        if more is not None:
            with self.streams.on(OUT):
                self._run_more(more, iteration, bucket)
            return
        self._complete(iteration, bucket)

    def _complete(self, iteration: _Iteration, bucket: int) -> None:
        with self.streams.on(OUT):
            super()._complete(iteration, bucket)

    # -- times -------------------------------------------------------------------------------------

    def at_ns(self, event: Event) -> int:
        """When an event came, on the clock of ``perf_counter_ns``; both it and the anchor have come."""
        assert self._anchor is not None
        anchor, at_ns = self._anchor
        return at_ns + int(self.streams.elapsed_us(anchor, event) * 1e3)

    def _take_times(self, record: Record, verdict: _Verdict) -> None:
        """Put the device's times into the record, and take a new anchor: the device has come to rest or nearly so."""
        if self._anchor is not None:
            record.ready_ns = [self.at_ns(verdict.marks.ready[i]) for i in range(len(record.ready_ns))]
            record.done_ns = self.at_ns(verdict.event)
            record.intervals = [
                replace(interval, start_ns=self.at_ns(begin), end_ns=self.at_ns(end))
                for interval, begin, end in verdict.marks.times
            ]
        if self._clock is not None:
            self._clock.read(self.at_ns if self._anchor is not None else None)
        self._anchor = (verdict.event, record.done_ns if self._anchor is not None else time.perf_counter_ns())

    def watch(self, clock: Any) -> None:
        """Have ``clock.read`` called with :meth:`at_ns` after every iteration (None: measure no more)."""
        self._clock = clock

    def close(self) -> bool:
        """Commit or discard what is left, then as on the host. The planner hears no more: its state may be gone."""
        verdict, self._pending = self._pending, None
        if self.error is None and verdict is not None:
            with suppress(EspressoError):  # kept and logged
                self._read(verdict)
        return super().close()
