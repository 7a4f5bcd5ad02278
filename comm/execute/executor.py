"""The executor: carries out a plan, bucket by bucket, from DDP's hook to the averaged gradient.

::

    hook(bucket) ── bind buffers ── open the bucket's gate ──> lanes run its tasks in the total order
        └─ returns a future            (never blocks)            └─ last task of the bucket ── future done
    last bucket of the iteration: every rank commits its residuals, or discards them, together

The executor knows nothing of searching or measuring. It asks a ``Planner`` which strategy to run before
the first bucket of an iteration, and tells it what happened after the last.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from espresso.comm.alarm import LOOK_AFTER_S
from espresso.comm.errors import EspressoError, PeerError
from espresso.comm.execute.averaging import Averaging
from espresso.comm.execute.lanes import Lanes, Node
from espresso.comm.groups import Groups
from espresso.comm.keep.factors import FactorStore
from espresso.comm.keep.residual import Residual
from espresso.comm.keep.store import ResidualStore
from espresso.comm.keep.velocities import Velocities
from espresso.comm.memory import is_finite
from espresso.comm.parameter_server import Line, Link
from espresso.comm.parameter_server.wire import Key
from espresso.comm.program.partition import Codecs, Context, PartitionProgram, Round
from espresso.strategies import DTYPES, Bucket, Lane, Plan, Scope, Strategy, Task, plan

logger = logging.getLogger("espresso")


_SIGNS_OF_A_LOST_PEER = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out")
_SPEAK_S = 0.5
"""How long it waits for the rank at its other end, or another, to say what it failed of."""

_NOTICE_S = 1.0
"""How long a lost connection waits for a server to say whose it was."""

_LOST_PEER = " Another rank died, hangs or left: look for the first error in the other ranks' logs."


@dataclass(frozen=True, slots=True)
class Assignment:
    """What to run in an iteration.

    Attributes:
        strategy: choices for every tensor.
        order: the total order as found by list scheduling for exactly these buckets, or None for the
            plain order (needed while the bucket structure is unknown).
        buckets: the structure ``order`` is for.
        deferred: start nothing before the last bucket is there, so that backward is measured undisturbed.
        record: keep the intervals of all tasks.
        drain: send what uncompressed tensors still carry from an earlier strategy. A plain block of a race
            parks it instead: the strategies it races against take it up again where they left it.
    """

    strategy: Strategy
    order: tuple[int, ...] | None = None
    buckets: tuple[Bucket, ...] | None = None
    deferred: bool = False
    record: bool = False
    drain: bool = True


@dataclass(frozen=True)
class Interval:
    """A task as it ran: ``perf_counter_ns`` times."""

    task: int
    lane: Lane
    partition: int
    start_ns: int
    end_ns: int


@dataclass
class Record:
    """What happened in one iteration on this rank; times are ``perf_counter_ns``."""

    iteration: int
    assignment: Assignment
    ready_ns: list[int] = field(default_factory=list)
    done_ns: int = 0
    finite: bool = True
    bytes_sent: int = 0
    bytes_raw: int = 0
    buckets: tuple[Bucket, ...] = ()
    intervals: list[Interval] = field(default_factory=list)
    plan: Plan | None = None


class Planner(Protocol):
    """Decides what each iteration runs. Both calls come at counts that all ranks agree on."""

    def assign(self, iteration: int) -> Assignment:
        """The assignment of this iteration; must not block."""
        ...

    def after(self, record: Record) -> Callable[[], None] | None:
        """Take note of an iteration; a returned function runs before its last future completes.

        It may block and communicate: every rank is inside the same hook call then.
        """
        ...


class _Iteration:
    """State of one backward pass."""

    def __init__(self, record: Record, deadline_s: float) -> None:
        self.record = record
        self.averaging: Averaging | None = None
        # Whether averages are looked at for infs. Every rank must reach the same verdict, also one that keeps no
        # residual (another is the root), since planners move by it together. A plain step without loss scaling
        # goes without: the look would cost a reading pass over all gradients, and nobody skips the step.
        self.checks = record.assignment.strategy.num_compressed > 0
        self.futures: dict[int, torch.futures.Future[torch.Tensor]] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self.open_tasks: dict[int, int] = {}
        self.programs: dict[int, list[PartitionProgram]] = {}
        self.finite: list[bool] = []
        self.deferred: list[int] = []
        self.complete: set[int] = set()
        self.last_seen = False
        self.planned = False
        self.deadline_s = deadline_s
        self.touched_s = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done before backward hands over another bucket."""
        held_back = self.record.assignment.deferred or len(self.complete) == len(self.record.ready_ns)
        return not self.last_seen and held_back


class Executor:
    """Runs assignments over the groups of a job.

    Args:
        groups: process groups of every scope.
        codecs: where codecs come from.
        planner: decides what to run.
        store: residuals; survives changes of plan.
        seed: for shared random numbers.
        velocities: of momentum correction, where the job has it; they survive likewise.
        factors: what compressors of several rounds keep; they survive likewise.
        timeout_s: an iteration whose gradients are not averaged this long after its last event fails.
        servers: the way to the parameter servers, if there are any.
    """

    host_copies = False
    """Whether offloaded steps copy between device and host."""

    def __init__(
        self,
        groups: Groups,
        codecs: Codecs,
        planner: Planner,
        *,
        store: ResidualStore,
        seed: int = 0,
        timeout_s: float = 60.0,
        velocities: Velocities | None = None,
        servers: Link | None = None,
        factors: FactorStore | None = None,
    ) -> None:
        self.groups, self.planner, self.store, self.velocities = groups, planner, store, velocities
        self.factors = FactorStore() if factors is None else factors
        self._context = Context(
            groups.cluster,
            groups.rank,
            groups.scopes,
            codecs,
            store,
            seed,
            velocities,
            servers,
            factors=self.factors,
        )
        self._servers = servers
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._lanes = Lanes(self._failed, self._lock)
        self._iteration: _Iteration | None = None
        self._count = 0
        self._planned: tuple[Assignment, Plan, list[PartitionProgram]] | None = None
        self._plain: dict[Bucket, tuple[Strategy, Plan, list[PartitionProgram]]] = {}
        self._numels: dict[str, int] = {}
        self._known: dict[int, tuple[int, Bucket]] = {}
        # DDP waits for nothing before the last bucket; a hook around ours may.
        self._collects_early = False
        self._watchdog: threading.Thread | None = None
        self._wake = threading.Condition()
        self._closed = False
        self.error: EspressoError | None = None
        self.step = 0
        if servers is not None:
            servers.on_failure(self._lanes.fail)

    # -- called from the hook ----------------------------------------------------------------------

    def reduce_bucket(
        self, bucket: Bucket, buffer: torch.Tensor, *, is_last: bool, grad_scale: float | None
    ) -> torch.futures.Future[torch.Tensor]:
        """As :meth:`reduce`, for a bucket that is described already."""
        return self.reduce(
            bucket.index, buffer, is_last=is_last, grad_scale=lambda: grad_scale, describe=lambda: bucket
        )

    def reduce(
        self,
        index: int,
        buffer: torch.Tensor,
        *,
        is_last: bool,
        grad_scale: Callable[[], float | None],
        describe: Callable[[], Bucket],
    ) -> torch.futures.Future[torch.Tensor]:
        """Average ``buffer`` over all ranks, in place; returns a future of it. Never blocks.

        Args:
            index: the bucket's number; DDP counts from 0 in every iteration.
            buffer: the bucket's numbers, of one floating type, on the host.
            is_last: of this iteration.
            grad_scale: the loss scale that the gradients carry, so that infs are to be expected and counted
                in uncompressed steps too; None if there is no loss scaling. Asked for once a bucket at most.
            describe: what the bucket holds; asked for only where it matters.

        Raises:
            EspressoError: an earlier bucket failed (the original error, again).
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            if index == 0:
                self._begin()
            iteration = self._iteration
            if iteration is None or index != len(iteration.record.ready_ns):
                raise self._fail_now(
                    f"rank {self.groups.rank}: bucket {index} arrived out of order;"
                    " the previous backward pass did not finish, or the model runs in several threads"
                )
            iteration.touched_s = time.monotonic()
            iteration.record.ready_ns.append(time.perf_counter_ns())
            future = iteration.futures[index] = self._new_future(index)
            iteration.buffers[index] = buffer
            iteration.last_seen = is_last
        if iteration.averaging is not None:
            if is_last:
                iteration.checks = grad_scale() is not None
            self._average(iteration, iteration.averaging, index, buffer, describe)
        else:
            self._follow_plan(iteration, describe(), buffer, grad_scale())
        return future

    def _new_future(self, index: int) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future()

    def _follow_plan(
        self, iteration: _Iteration, bucket: Bucket, buffer: torch.Tensor, grad_scale: float | None
    ) -> None:
        with self._lock:
            iteration.record.buckets += (bucket,)
            for slot in bucket.slots:
                self._numels[slot.tensor] = slot.numel
            iteration.checks |= grad_scale is not None
            scale = 1.0 if grad_scale is None else grad_scale
            if self.velocities is not None:
                self.velocities.clip(bucket, buffer, self.groups.num_ranks, scale, self._context.memory)
            self._prepare(iteration, bucket, buffer, Round(self.step, scale, iteration.record.assignment.drain))
            planned = iteration.record.assignment.buckets or ()
            if iteration.last_seen and iteration.planned and len(planned) > bucket.index + 1:
                self._lanes.drop(lambda node: node.bucket > bucket.index)
            opened = self._gate(iteration, bucket.index)
        for index in opened:
            if iteration.open_tasks[index] == 0:
                self._bucket_done(iteration, index)
        self._lanes.bucket_ready(opened)

    def _average(
        self,
        iteration: _Iteration,
        averaging: Averaging,
        index: int,
        buffer: torch.Tensor,
        describe: Callable[[], Bucket],
    ) -> None:
        known = self._known.get(index)
        if known is None or known[0] != buffer.numel():
            known = self._known[index] = (buffer.numel(), describe())
        averaging.start(buffer)
        if iteration.last_seen:
            record, ranks = iteration.record, self.groups.num_ranks
            record.buckets = tuple(self._known[i][1] for i in range(index + 1))
            record.bytes_raw = sum(round(2 * (ranks - 1) / ranks * b.numel * DTYPES[b.dtype]) for b in record.buckets)
            record.bytes_sent = record.bytes_raw
        if iteration.last_seen or self._collects_early:
            averaging.collect()

    def _average_failed(self, index: int, error: Exception) -> None:
        wrapped = EspressoError(f"{self._average_label(index)}: {_worded(error)}")
        wrapped.__cause__ = error
        self._lanes.fail(wrapped)

    def _average_label(self, index: int) -> str:
        tensors = _range_of([slot.tensor for slot in self._known[index][1].slots])
        peers = _peers_of(self._context.members[Scope.FLAT].ranks)
        return f"step 1/1 'flat.allreduce' of bucket {index} (tensors {tensors}){peers}"

    def _begin(self) -> None:
        if self._iteration is not None:
            waiting = ", ".join(self._waiting_for(self._iteration)[:3])
            raise self._fail_now(
                f"rank {self.groups.rank}: a new backward pass began before the last one was averaged"
                f" (still waiting for {waiting or 'its last bucket'})"
            )
        self.step = self._count
        self._count += 1
        assignment = self.planner.assign(self.step)
        self._iteration = _Iteration(Record(self.step, assignment), self._timeout_s)
        only_averages = assignment.strategy.only_averages and not (assignment.deferred or assignment.record)
        keeps = self.velocities is not None
        if only_averages and not keeps and (self.store.is_empty or not assignment.drain):
            self._iteration.averaging = Averaging(
                self._context.members[Scope.FLAT],
                partial(self._bucket_done, self._iteration),
                self._average_failed,
            )
        self._lanes.begin_iteration()
        self._start_watchdog()

    def _gate(self, iteration: _Iteration, bucket: int) -> list[int]:
        """Which buckets to open now: this one, or all of them at the last if the iteration is deferred."""
        if not iteration.record.assignment.deferred:
            return [bucket]
        iteration.deferred.append(bucket)
        return iteration.deferred if iteration.last_seen else []

    # -- programs ----------------------------------------------------------------------------------

    def _prepare(self, iteration: _Iteration, bucket: Bucket, buffer: torch.Tensor, now: Round) -> None:
        assignment = iteration.record.assignment
        if bucket.index == 0 and assignment.order is not None and assignment.buckets is not None:
            iteration.planned = bucket == assignment.buckets[0]
            if iteration.planned:
                self._enqueue_planned(iteration, assignment)
        if iteration.planned and bucket != _at(assignment.buckets, bucket.index):
            # The structure changed in mid-iteration, on every rank alike: the rest goes in plain order.
            logger.warning("bucket %d is not as planned; the rest of this iteration runs in plain order", bucket.index)
            iteration.planned = False
            first = bucket.index
            self._lanes.drop(lambda node: node.bucket >= first)
        if not iteration.planned:
            self._enqueue_plain(iteration, bucket)
        for program in iteration.programs[bucket.index]:
            program.bind(buffer, now)

    def _enqueue_planned(self, iteration: _Iteration, assignment: Assignment) -> None:
        assert assignment.buckets is not None
        assert assignment.order is not None
        if self._planned is None or self._planned[0] is not assignment:
            laid = plan(assignment.strategy, assignment.buckets, host_copies=self.host_copies)
            laid = laid.with_order(assignment.order)
            programs = self._compile(laid)
            self._plain.clear()
            self._adopt(programs, self._numels | _numels(laid), None, assignment.strategy)
            self._planned = (assignment, laid, programs)
        _, laid, programs = self._planned
        iteration.record.plan = laid
        self._enqueue(iteration, laid, programs, range(len(laid.buckets)))

    def _enqueue_plain(self, iteration: _Iteration, bucket: Bucket) -> None:
        """Bucket by bucket: compile just this one, once per structure and strategy."""
        strategy = iteration.record.assignment.strategy
        found = self._plain.get(bucket)
        if found is None or found[0] is not strategy or not self._keeps(found[2]):
            laid = plan(strategy, [bucket], host_copies=self.host_copies)
            programs = self._compile(laid)
            self._planned = None
            self._adopt(programs, self._numels | _numels(laid), _numels(laid).keys(), strategy)
            found = self._plain[bucket] = (strategy, laid, programs)
        self._enqueue(iteration, found[1], found[2], [bucket.index])

    def _adopt(
        self,
        programs: Sequence[PartitionProgram],
        numels: Mapping[str, int],
        only: Collection[str] | None,
        strategy: Strategy,
    ) -> None:
        """What these programs keep is in use from now on, here and at the servers; what others kept moves there."""
        self.store.adopt(_residuals(programs), numels, only=only)
        if self.velocities is not None:
            self.velocities.adopt([v for program in programs for v in program.velocities], numels, only=only)
        if self._servers is None:
            return
        keys: list[Key] = []
        lines: dict[int, Line] = {}
        for program in programs:
            if program.described is not None:
                if program.line is not None and program.described.mine is not None:
                    lines[len(keys) + program.described.mine] = program.line
                keys += program.described.keys
        if self._servers.needs(keys, only):
            try:
                self._servers.install(keys, lines, numels, only, strategy.digest)
            except EspressoError as error:
                raise self._fail_now(str(error)) from error
        else:
            self._servers.settle_waiting(numels)

    def _keeps(self, programs: Sequence[PartitionProgram]) -> bool:
        """Whether all that these programs keep is in use."""
        velocities = [v for program in programs for v in program.velocities]
        return self.store.holds(_residuals(programs)) and (self.velocities is None or self.velocities.holds(velocities))

    def _compile(self, laid: Plan) -> list[PartitionProgram]:
        return [PartitionProgram(laid, part, self._context) for part in laid.partitions]

    def _enqueue(
        self, iteration: _Iteration, laid: Plan, programs: Sequence[PartitionProgram], buckets: Iterable[int]
    ) -> None:
        """Make this iteration's nodes and put them on their lanes in the plan's order.

        ``buckets`` are DDP's numbers of the plan's buckets.
        """
        for number in buckets:
            iteration.open_tasks[number] = 0
            iteration.programs[number] = []
        nodes: dict[int, Node] = {}
        for program, tasks in zip(programs, laid.tasks_of_partition, strict=True):
            bucket = program.group.bucket
            iteration.programs[bucket].append(program)
            acting = [index for index in tasks if program.actions[laid.tasks[index].step_index] is not None]
            iteration.open_tasks[bucket] += len(acting)
            before: Node | None = None
            for index in acting:
                before = nodes[index] = self._node(
                    iteration, program, laid.tasks[index], bucket, before, index == acting[-1]
                )
        self._lanes.enqueue(nodes[index] for index in laid.order if index in nodes)

    def _node(
        self,
        iteration: _Iteration,
        program: PartitionProgram,
        task: Task,
        bucket: int,
        before: Node | None,
        ends: bool,
    ) -> Node:
        return Node(
            lanes=task.lanes,
            bucket=bucket,
            run=partial(_run_step, program, task.step_index, before is None),
            label=partial(_label, program, task.step_index, bucket),
            after=before,
            issue=program.issue if program.issues else None,
            tag=(task.index, task.partition),
            on_done=partial(self._task_done, iteration, program, ends),
        )

    # -- completion --------------------------------------------------------------------------------

    def _task_done(self, iteration: _Iteration, program: PartitionProgram, ends: bool, node: Node) -> None:
        if iteration.record.assignment.record:
            task, part = node.tag
            lane = node.lanes[0]
            assert isinstance(lane, Lane)
            iteration.record.intervals.append(Interval(task, lane, part, node.start_ns, node.end_ns))
        if ends:
            drains = iteration.record.assignment.drain and not self.store.is_empty
            program.finish(check=iteration.checks or drains or self.velocities is not None)
        with self._lock:
            if ends:
                iteration.finite.append(program.finite is not False)
                iteration.record.bytes_sent += program.bytes_sent
                iteration.record.bytes_raw += program.num_bytes_raw
            iteration.touched_s = time.monotonic()
            iteration.open_tasks[node.bucket] -= 1
            done = iteration.open_tasks[node.bucket] == 0
        if done:
            self._bucket_done(iteration, node.bucket)

    def _bucket_done(self, iteration: _Iteration, bucket: int) -> None:
        with self._lock:
            iteration.complete.add(bucket)
            everything = iteration.last_seen and len(iteration.complete) == len(iteration.record.ready_ns)
            if everything:
                self._settle(iteration)
        if not everything:
            iteration.futures[bucket].set_result(iteration.buffers[bucket])
            return
        more = self.planner.after(iteration.record)
        if more is None:
            self._complete(iteration, bucket)
        else:
            self._lanes.submit("control", partial(self._run_more, more, iteration, bucket))

    def _settle(self, iteration: _Iteration) -> None:
        """Commit or discard the residuals: the same decision everywhere, as the averages are the same."""
        iteration.record.done_ns = time.perf_counter_ns()
        if iteration.averaging is not None and iteration.checks:
            iteration.finite = [is_finite(buffer) for buffer in iteration.buffers.values() if buffer.numel()]
        iteration.record.finite = all(iteration.finite)
        for store in (self.store, self.velocities, self.factors):
            if store is not None and iteration.record.finite:
                store.commit()
            elif store is not None:
                store.discard()
        if self._servers is not None:
            self._servers.settled(iteration.record.iteration, iteration.record.finite)

    def _run_more(self, more: Callable[[], None], iteration: _Iteration, bucket: int) -> None:
        try:
            iteration.deadline_s = float("inf")
            more()
        except EspressoError as error:
            self._lanes.fail(error)
            return
        except Exception as error:
            text = f"while the ranks measured, searched or compared after the last bucket: {_worded(error)}"
            wrapped = EspressoError(text)
            wrapped.__cause__ = error
            self._lanes.fail(wrapped)
            return
        self._complete(iteration, bucket)

    def _complete(self, iteration: _Iteration, bucket: int) -> None:
        with self._lock:
            self._iteration = None
        iteration.futures[bucket].set_result(iteration.buffers[bucket])

    # -- failure -----------------------------------------------------------------------------------

    def _failed(self, error: BaseException, node: Node | None) -> None:
        """Called once by the lanes with the first error: keep it, log it, and let DDP go."""
        where = "" if node is None else f", {node.label()}"
        what = str(error) if isinstance(error, EspressoError) else _worded(error)
        told = isinstance(error, PeerError)  # by a rank that knew more
        hint = "" if told or not any(sign in what for sign in _SIGNS_OF_A_LOST_PEER) else self._hint(what)
        # DDP puts "Unable to cast " before the text and " to Tensor" behind it.
        text = (
            f"espresso on rank {self.groups.rank} failed in iteration {self.step}{where}: {what.strip().rstrip('.')}."
            f"{hint} DDP has no averaged gradient to convert"
        )
        wrapped = EspressoError(text)
        wrapped.__cause__ = error
        with self._lock:
            if self.error is None:
                self.error = wrapped
            iteration = self._iteration
        logger.error("%s", text, exc_info=error)
        if not told:
            self.groups.alarm.ring(f"{what.strip().rstrip('.')}.{hint}")
        if iteration is not None:
            _fail_open(iteration.futures.values(), self.error)

    def _hint(self, what: str) -> str:
        """Whose connection was lost, as far as addresses, servers and other ranks tell."""
        lost, hint = self.groups.rank_in(what), _LOST_PEER
        if lost is not None:
            hint = f" That is rank {lost}: it died, or left because of an error of its own."
            heard = self._heard_soon()
            if heard is not None and heard[0] == lost:
                hint = f" That is rank {lost}, which failed first: {heard[1].strip().rstrip('.')}."
            elif heard is not None and heard[0] != self.groups.rank:
                hint += f" Rank {heard[0]} failed first: {heard[1].strip().rstrip('.')}."
        notice = None if self._servers is None else self._servers.wait_for_notice(_NOTICE_S)
        if notice is None:
            return hint
        if str(notice) in what:  # it has been said who is gone
            return "" if lost is None else hint
        return f"{hint} {str(notice).rstrip('.')}."

    def _heard_soon(self) -> tuple[int, str] | None:
        """The first failure that a rank told of; waits a moment: Gloo closes connections before a rank can speak."""
        until = time.monotonic() + _SPEAK_S
        while (heard := self.groups.alarm.heard()) is None and time.monotonic() < until:
            time.sleep(0.02)
        return heard

    def _fail_now(self, text: str) -> EspressoError:
        self._lanes.fail(EspressoError(text))
        assert self.error is not None
        return self.error

    def _start_watchdog(self) -> None:
        if self._watchdog is None:
            self._watchdog = threading.Thread(target=self._watch, name="espresso-watchdog", daemon=True)
            self._watchdog.start()

    def _watch(self) -> None:
        """Fail an iteration that outlives its deadline; groups time out by themselves a little earlier."""
        while True:
            with self._wake:
                self._wake.wait(timeout=0.5)
                if self._closed:
                    return
            iteration = self._iteration
            if iteration is None or self.error is not None or iteration.is_idle:
                continue
            waited = time.monotonic() - iteration.touched_s
            if waited > LOOK_AFTER_S and self._others_failed():
                continue
            if iteration.averaging is not None and not iteration.last_seen and waited > 0.4:
                self._collects_early = True
                iteration.averaging.collect()
            if waited > iteration.deadline_s + 5.0:
                pending = self._waiting_for(iteration)
                what = "; ".join(pending[:3]) or "the next bucket from backward"
                self._lanes.fail(
                    EspressoError(
                        f"no progress for {waited:.0f} s; waiting for {what} ({len(pending)} tasks open)."
                        " Another rank died, hangs, or runs a different number of steps"
                    ),
                )

    def _waiting_for(self, iteration: _Iteration) -> list[str]:
        """What is under way or queued, in people's words."""
        if iteration.averaging is None:
            return [node.label() for node in self._lanes.pending()]
        begun = range(iteration.averaging.num_started)
        return [self._average_label(index) for index in begun if index not in iteration.complete]

    def _others_failed(self) -> bool:
        """Whether another rank told of a failure; then this one fails too, and says whose it was."""
        heard = self.groups.alarm.heard()
        if heard is None:
            return False
        rank, text = heard
        iteration = self._iteration
        pending = [] if iteration is None else self._waiting_for(iteration)
        waiting = f"; this rank waited for {pending[0]}" if pending else ""
        self._lanes.fail(PeerError(f"rank {rank} failed first: {text.strip().rstrip('.')}{waiting}"))
        return True

    def conclude(self) -> None:
        """Judge an iteration that is launched but not judged yet; on the host there is none."""

    @property
    def next_step(self) -> int:
        """The number the next iteration will have."""
        return self._count

    def restart(self, step: int) -> None:
        """Go on counting from ``step`` (a resumed job draws the same random numbers)."""
        self._count = step

    # -- end of life ---------------------------------------------------------------------------------

    def close(self) -> bool:
        """Stop threads. Futures still open fail, so that nobody waits for them.

        Returns:
            Whether all threads have ended and nothing is under way.
        """
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        iteration = self._iteration
        if iteration is not None:
            if self.error is None:
                self.groups.alarm.ring("espresso was closed during a backward pass")
            _fail_open(iteration.futures.values(), EspressoError("espresso was closed during a backward pass"))
        if self._servers is not None:
            self._servers.close()
        threads = self._lanes.close()
        if self.error is not None:
            threads = []  # a lane may sit in a collective until its time-out
        # A daemon thread that comes back from a library call while the interpreter ends aborts the process.
        deadline = time.monotonic() + 2.0
        for thread in (*threads, self._watchdog):
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout=max(deadline - time.monotonic(), 0.0))
        return self.error is None and iteration is None and not any(thread.is_alive() for thread in threads)


def _fail_open(futures: Iterable[torch.futures.Future[torch.Tensor]], error: BaseException) -> None:
    for future in futures:
        try:
            if not future.done():
                future.set_exception(error)  # type: ignore[arg-type]
        except RuntimeError:
            continue  # a lane completed it in this very moment


def _worded(error: BaseException) -> str:
    """The error without Gloo's source lines and well-meant advice; the log has it in full."""
    text = re.sub(r"\[\S+\.(cc|cpp|h):\d+\] ", "", str(error))
    return f"{type(error).__name__}: {text.partition('. This is typically caused')[0]}"


def _residuals(programs: Iterable[PartitionProgram]) -> list[Residual]:
    return [residual for program in programs for residual in program.residuals]


def _numels(laid: Plan) -> dict[str, int]:
    return {slot.tensor: slot.numel for bucket in laid.buckets for slot in bucket.slots}


def _at(buckets: tuple[Bucket, ...] | None, index: int) -> Bucket | None:
    return buckets[index] if buckets is not None and index < len(buckets) else None


def _run_step(program: PartitionProgram, step_index: int, first: bool) -> None:
    action = program.actions[step_index]
    assert action is not None
    if first:
        program.load()
    # A span for torch.profiler. Lanes have threads of their own, so a profiler sees it only when told to look at
    # all threads; asking whether one does would cost more than the span.
    with torch._C._profiler._RecordFunctionFast(f"espresso::{program.flows[step_index].step}"):
        action()


def _label(program: PartitionProgram, step_index: int, bucket: int) -> str:
    tensors = _range_of(program.tensors)
    step = program.flows[step_index].step
    peers = "" if step.scope is None else _peers_of(program.context.members[step.scope].ranks)
    return f"step {step_index + 1}/{len(program.flows)} '{step}' of bucket {bucket} (tensors {tensors}){peers}"


def _range_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}" if names else "nothing"


def _peers_of(ranks: Sequence[int]) -> str:
    return f" with ranks {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"
