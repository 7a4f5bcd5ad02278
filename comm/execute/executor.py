"""The executor: carries out a plan, bucket by bucket, from DDP's hook to the averaged gradient.

::

    hook(bucket)                                                                     backward's thread
      1. begin      first bucket only: the planner says what to run; an iteration and its course begin
      2. arrive     a future for DDP
      3. take       the course begins to average: Averaging, Planned or Plain ──> lanes run tasks in the total order
                                                                                     lanes, or the library
      4. done       a bucket's last task is done: its future completes
      5. judge      after the last bucket: every rank commits its residuals, or discards them, together
      6. after      the planner may work, all ranks together; then the last future completes

The executor knows nothing of searching or measuring. It asks a ``Planner`` which strategy to run before
the first bucket of an iteration, and tells it what happened after the last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch

from espresso.comm.alarm import Progress
from espresso.comm.errors import EspressoError, PeerError, UnsupportedModelError
from espresso.comm.execute.assignment import Assignment, Interval, Planner, Record
from espresso.comm.execute.averaging import Averager, Averaging
from espresso.comm.execute.failure import Failure, StalledError
from espresso.comm.execute.host import HostSide
from espresso.comm.execute.iteration import END, Course, Iteration, Side, fail_open
from espresso.comm.execute.lanes import Lanes, Node
from espresso.comm.execute.programs import Programs
from espresso.comm.execute.tasks import Plain, Planned, Tasks
from espresso.comm.groups import Groups
from espresso.comm.keep.store import FactorStore, ResidualStore, Velocities
from espresso.comm.parameter_server import Link
from espresso.comm.program import Codecs, Context
from espresso.comm.witness import worded
from espresso.strategies import Bucket, Scope

__all__ = ["Assignment", "Executor", "Interval", "Planner", "Record"]

LOOK_S = 0.5
"""So often the watchdog looks at the state of things; it touches nothing outside this process."""

LISTEN_AFTER_S = 1.0
"""A step that makes no progress for so long looks whether another rank said that it failed."""

HURRY_AFTER_S = 0.4
"""Somebody seems to wait for a bucket before the last is there."""

DDP_FAILED = " DDP has no averaged gradient to convert"
"""DDP puts "Unable to cast " before an error's text and " to Tensor" behind it."""

OFTEN, SELDOM = 100, 64
"""After so many plain steps that sent nothing of what is owed only one in so many tries: what has had no gradient for
so long will hardly have one in the next step, and a step that tries costs more than the library's."""

SLACK_S = 2.0
"""The library's own time-outs come first: they know more."""


class Executor:
    """Runs assignments over the groups of a job. All ranks make theirs together.

    Args:
        store, velocities, factors: what the job keeps; it survives changes of plan.
        seed: for shared random numbers.
        offload_width: offloaded steps under way at the same time, at most.
        timeout_s: an iteration whose gradients are not averaged this long after its last event fails.
        failed: ends the text of the error of a failed exchange.
        agree: whether an iteration was finite here and everywhere else, where its gradients are shards of larger
            ones; it may wait for others. None where every rank of the groups sees the same averages.
    """

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
        side: Side | None = None,
        offload_width: int = 1,
        failed: str = DDP_FAILED,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self.agree = agree
        self.planner, self.store, self.velocities = planner, store, velocities
        self.factors = FactorStore() if factors is None else factors
        self.side: Side = HostSide() if side is None else side
        self._servers, self._timeout_s = servers, timeout_s
        context = Context(
            groups.cluster, groups.rank, groups.scopes, codecs, store, seed, velocities, servers,
            memory=self.side.memory, host=self.side.host, factors=self.factors,
        )  # fmt: skip
        self._programs = Programs(context)
        self._averager = Averager(groups.scopes[Scope.FLAT])
        self.lanes = Lanes(self._failed, offload_width)
        self._groups, self._rank = groups, groups.ranks[groups.rank]
        self._iteration: Iteration | None = None
        self._unjudged: Iteration | None = None
        self._judged: Record | None = None  # of an iteration that was judged alone: the planner's part is to come
        self._count = self.step = 0
        # What some rank may keep something of, alike on all ranks whatever this one keeps; None: of any tensor.
        self._owing: set[str] | None = set()
        self._in_vain = 0  # plain steps since something of that was sent
        self._failure = Failure(self._rank, groups.alarm, groups.witness, self._release, failed)
        groups.alarm.report, groups.witness.servers = self._progress, servers
        self._ended_orderly = False
        self._stopped = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="espresso-watchdog", daemon=True)
        self._watchdog.start()
        if servers is not None:
            servers.on_failure(self.lanes.fail)

    # -- called from the hook ----------------------------------------------------------------------

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
            buffer: the bucket's numbers, of one floating type, on the side's device.
            is_last: of this iteration.
            grad_scale: the loss scale that the gradients carry, so that infs are to be expected and counted
                in uncompressed steps too; None if there is no loss scaling. Asked for once an iteration: on a GPU
                the answer makes the host wait for backward.
            describe: what the bucket holds; asked for only where it matters.

        Raises:
            EspressoError: an earlier bucket failed (the original error, again).
        """
        if self._failure.error is not None:
            raise self._failure.error
        began_ns = time.thread_time_ns()
        if index == 0:
            try:
                self._begin(grad_scale)
            except Exception as error:
                self._fail_here(error)
        with self.lanes.lock:
            iteration = self._iteration
            fits = iteration is not None and index == iteration.num_seen
            future = iteration.arrive(index, buffer, is_last) if iteration is not None and fits else None
        if iteration is None or future is None:
            raise self._fail_now(
                f"rank {self._rank}: bucket {index} arrived out of order;"
                " the previous backward pass did not finish, or the model runs in several threads: run one at a time,"
                " and go on from a checkpoint after one that failed"
            )
        if not self.lanes.failed:
            self._take(iteration, index, buffer, describe)
        elif (settled := self.error) is not None:  # perhaps before this future was there
            fail_open([future], settled)
        iteration.record.hook_ns += time.thread_time_ns() - began_ns
        return future

    def end(self) -> torch.futures.Future[torch.Tensor]:
        """Say that the iteration had its last bucket, where that is known only afterwards: ``is_last`` was never said.

        Returns:
            A future that completes when the iteration is over: every bucket averaged, residuals judged, plans made. It
            fails as the buckets' do.
        """
        with self.lanes.lock:
            iteration = self._iteration
            future = None if iteration is None or iteration.last_seen else iteration.end()
        if iteration is None or future is None:
            future = torch.futures.Future()
            if self.error is None:
                future.set_result(torch.empty(0, device="cpu"))
            else:
                fail_open([future], self.error)
        elif not self.lanes.failed:
            try:
                iteration.course.end()
                self._bucket_done(iteration, END)
            except Exception as error:
                self._fail_here(error)
        elif (settled := self.error) is not None:
            fail_open([future], settled)
        return future

    def _begin(self, grad_scale: Callable[[], float | None]) -> None:
        self.conclude()
        if self._iteration is not None:
            waiting = ", ".join(self._iteration.course.waiting_for()[:3])
            raise self._fail_now(
                f"rank {self._rank}: a new backward pass began before the last one was averaged"
                f" (still waiting for {waiting or 'its last bucket'})"
            )
        self.step = self._count
        record = Record(self.step, self.planner.assign(self.step))
        run = self.side.begin(record, self._timeout_s)
        self.lanes.begin_iteration()
        drains = self.may_owe and (self._in_vain < OFTEN or self.step % SELDOM == 0)
        iteration = Iteration(record, run, grad_scale(), drains, self._choose)
        with self.lanes.lock:
            self._count += 1
            self._iteration = iteration

    def _choose(self, iteration: Iteration) -> Course:
        """How the iteration's buckets are averaged."""
        on_done = partial(self._bucket_done, iteration)
        assignment = iteration.record.assignment
        watched = assignment.deferred or assignment.record or self.velocities is not None
        if assignment.strategy.only_averages and not watched and not iteration.drains:
            if not self.may_owe:
                self._programs.forget()  # of profiled steps, which hold on to their buckets
            return Averaging(iteration, self._averager, on_done, self.lanes.fail)
        tasks = Tasks(iteration, self._programs, self.lanes, on_done)
        if assignment.order is not None and assignment.buckets is not None:
            return Planned(tasks, assignment.buckets)
        return Plain(tasks)

    def _take(self, iteration: Iteration, index: int, buffer: torch.Tensor, describe: Callable[[], Bucket]) -> None:
        # Not under the lock: a plan that is new to parameter servers waits for their answers.
        try:
            iteration.course = iteration.course.take(index, buffer, describe)
        except UnsupportedModelError:
            raise
        except Exception as error:
            self._fail_here(error)

    # -- completion --------------------------------------------------------------------------------

    def _bucket_done(self, iteration: Iteration, index: int) -> None:
        with self.lanes.lock:
            everything = iteration.completes(index)
        if not everything:
            if index != END:
                iteration.hand_over(index)
            return
        iteration.run.seal()
        asks = self.agree is not None or self._asks_who_owes(iteration)
        if not self.side.judges_late and not asks:
            self._go_on(iteration, index, self._judge(iteration))
        elif iteration.record.assignment.deferred or asks:
            self.lanes.submit("control", partial(self._judge_apart, iteration, index))
        else:
            with self.lanes.lock:
                self._unjudged, self._iteration = iteration, None
            iteration.hand_over_last(index)

    def _judge(self, iteration: Iteration) -> Callable[[], None] | None:
        self._note(iteration)
        return self.planner.after(iteration.record)

    def _note(self, iteration: Iteration) -> None:
        """Commit or discard the residuals: the same decision everywhere, as the averages are the same."""
        self._settle(iteration)
        iteration.run.note_times(iteration.record)
        self.planner.note(iteration.record)

    def _settle(self, iteration: Iteration) -> None:
        record = iteration.record
        finite = iteration.run.read(record) and iteration.course.is_finite()
        record.finite = finite if self.agree is None else self.agree(finite)
        record.done_ns = time.perf_counter_ns()
        for store in (self.store, self.velocities, self.factors):
            if store is not None and record.finite:
                store.commit()
            elif store is not None:
                store.discard()
        if self._servers is not None:
            self._servers.settled(record.iteration, record.finite)
        self._note_owing(iteration)

    def _note_owing(self, iteration: Iteration) -> None:
        """What is compressed may leave something behind; a plain step that drains sends it, of the tensors it has.

        Where what has no gradient waits, a rank alone knows what it could not send.
        """
        record = iteration.record
        strategy = record.assignment.strategy
        if strategy.compresses:
            self._in_vain = 0
            if self._owing is not None:
                self._owing |= strategy.in_payloads
        elif iteration.drains and record.finite:
            owing = set(strategy.choices) if self._owing is None else self._owing
            sent = {slot.tensor for bucket in record.buckets for slot in bucket.slots}
            if self.velocities is not None:  # then what a payload holds is velocity, and what is owed waits
                sent -= strategy.in_payloads
            if self._asks_who_owes(iteration):
                sent.difference_update(*self._groups.all_objects(sorted(self.store.unsent)))
            self._in_vain = 0 if owing & sent else self._in_vain + 1
            self._owing = owing - sent
            if not self._owing:  # nothing is needed of the programs that sent it, which hold on to their buckets
                self._programs.forget()
                self.store.carry.clear()  # what narrow gradients round off is of no use to anybody

    def _asks_who_owes(self, iteration: Iteration) -> bool:
        """Whether all ranks tell what they could not send in it; alike on all of them."""
        return self.store.waits and iteration.drains and not iteration.record.assignment.strategy.compresses

    def _judge_apart(self, iteration: Iteration, index: int) -> None:
        """On the control thread, where the device and other ranks may be waited for."""
        try:
            more = self._judge(iteration)
        except Exception as error:
            self.lanes.fail(error)
            return
        self._go_on(iteration, index, more)

    def _go_on(self, iteration: Iteration, index: int, more: Callable[[], None] | None) -> None:
        if more is None:
            self._complete(iteration, index)
        else:
            self.lanes.submit("control", partial(self._run_more, more, iteration, index))

    def _run_more(self, more: Callable[[], None], iteration: Iteration, index: int) -> None:
        iteration.plans = True
        try:
            with iteration.run.aside():
                more()
        except Exception as error:
            self.lanes.fail(_of_the_planner(error))
            return
        self._complete(iteration, index)

    def _complete(self, iteration: Iteration, index: int) -> None:
        with self.lanes.lock:
            self._iteration = None
        iteration.hand_over_last(index)

    def judge(self) -> None:
        """Judge an iteration that is launched but not judged yet: wait for the device, commit or discard residuals.

        On the host there is none. A rank may do it alone; what the planner begins with others then waits for
        :meth:`conclude`: a message that nobody else has begun would end at its time-out.

        Raises:
            EspressoError: the device did not finish in time, or a payload was malformed.
        """
        iteration, self._unjudged = self._unjudged, None
        if iteration is not None:
            with self._telling():
                self._note(iteration)
                self._judged = iteration.record

    def conclude(self) -> None:
        """Judge, and have the planner do what follows. All ranks together, between two iterations; raises likewise."""
        self.judge()
        record, self._judged = self._judged, None
        if record is not None:
            with self._telling():
                more = self.planner.after(record)
                if more is not None:
                    more()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            found = _of_the_planner(error)
            self.lanes.fail(found)
            raise self._first(found) from error

    # -- failure -----------------------------------------------------------------------------------

    @property
    def error(self) -> EspressoError | None:
        """The first error, as the hook's futures have it; its cause is the original one."""
        return self._failure.error

    def _failed(self, error: BaseException, node: Node | None) -> None:
        """Called once by the lanes, with the first error."""
        self._failure.begin(error, node, self.step)

    def _fail_here(self, error: Exception) -> NoReturn:
        """Fail with what was raised in the hook's own thread: the other ranks must hear of it."""
        self.lanes.fail(error)
        first = self._first(error if isinstance(error, EspressoError) else EspressoError(worded(error)))
        if first is error:
            raise error
        raise first from error

    def _fail_now(self, text: str) -> EspressoError:
        error = EspressoError(text)
        self.lanes.fail(error)
        return self._first(error)

    def _first(self, error: EspressoError) -> EspressoError:
        """The first error; ``error`` where there was none, since the lanes are closed."""
        return self._failure.wait(error) if self.lanes.failed else error

    def _release(self, error: EspressoError) -> None:
        with self.lanes.lock:
            futures = [] if self._iteration is None else list(self._iteration.futures.values())
        fail_open(futures, error)
        beside = self._groups.beside
        if beside is not None:  # they wait for this rank's verdict
            beside.alarm.announce(str(error))
            beside.witness.apart(beside.break_off)

    def _progress(self) -> Progress:
        iteration = self._iteration
        if iteration is None:
            return Progress(self._count)
        return Progress(iteration.record.iteration, iteration.num_seen, iteration.course.place())

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        """The watchdog: fail an iteration that outlives its deadline, or that waits for a rank that failed."""
        iteration = self._iteration
        if iteration is None or self.lanes.failed or iteration.is_idle:
            return
        waited, heard = time.monotonic() - iteration.touched_s, self._groups.alarm.failed()
        if heard and waited > LISTEN_AFTER_S:
            rank, text = next(iter(heard.items()))
            pending = iteration.course.waiting_for()
            waiting = f"; this rank waited for {pending[0]}" if pending else ""
            self.lanes.fail(
                PeerError(f"rank {self._groups.ranks[rank]} failed first: {text.strip().rstrip('.')}{waiting}")
            )
        elif waited > self._timeout_s + SLACK_S and not iteration.plans:
            pending = iteration.course.waiting_for()
            what = "; ".join(list(dict.fromkeys(pending))[:3]) or "the next bucket from backward"
            self.lanes.fail(
                StalledError(f"no progress for {waited:.0f} s; waiting for {what} ({len(pending)} tasks open)")
            )
        elif waited > HURRY_AFTER_S:
            iteration.course.hurry()

    # -- between iterations ------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The number the next iteration will have."""
        return self._count

    @property
    def may_owe(self) -> bool:
        """Whether some rank may keep something of a tensor; the same on all ranks."""
        return self._owing != set()

    @property
    def owing(self) -> list[str]:
        """The tensors of which some rank may keep something, where that is known; the same on all ranks."""
        return sorted(self._owing or ())

    def restart(self, step: int, owing: Iterable[str] | None = None) -> None:
        """Go on counting from ``step`` (a resumed job draws the same random numbers).

        Args:
            owing: the tensors of which some rank keeps something, alike on all ranks; None: any.
        """
        self._count, self._owing, self._in_vain = step, None if owing is None else set(owing), 0
        self._programs.forget()

    def look_at_exchanges(self, looks: bool) -> None:
        """Whether ends of exchanges that the library makes by itself are looked at, in some iterations."""
        self._averager.may_look = looks

    def on_failure(self, leave: Callable[[], None]) -> None:
        """Have ``leave`` called once, after the first error was told to everybody and logged."""
        self._failure.on_log = leave

    def try_again(self) -> None:
        """Have each of the next plain steps send what is owed, also where many did so in vain. All ranks alike."""
        self._in_vain = 0

    def watch(self, clock: Any) -> None:
        """Have ``clock.read`` called with the device's times after every iteration (None: measure no more)."""
        self.side.watch(clock)

    def close(self, *, keeps_groups: bool = False) -> bool:
        """Stop threads. Futures still open fail, so that nobody waits for them. The planner hears no more.

        Args:
            keeps_groups: another executor goes on with the groups, also after a failure: what waits in one of their
                collectives ends at its time-out. Else that is broken off.

        Returns:
            Whether all threads have ended and nothing is under way.
        """
        self._stopped.set()
        unjudged, self._unjudged = self._unjudged, None
        if self.error is None and unjudged is not None:
            with suppress(Exception):  # a malformed payload, a device that failed: of no use to anybody now
                self._settle(unjudged)
        iteration = self._iteration
        threads = self.lanes.close()  # first: a lane that completes a future in this moment has not failed
        if iteration is not None:
            closed = EspressoError("espresso was closed during a backward pass")
            fail_open(list(iteration.futures.values()), closed)
            if not self.lanes.failed:
                self._groups.witness.tell(str(closed))
        if self._servers is not None:
            self._servers.close()
        # A daemon thread that comes back from a library call while the interpreter ends aborts the process: what
        # nobody will answer any more ends here.
        # Not before the others were told: of a connection that closes they see only whose it was.
        self._groups.witness.close()
        if (self.lanes.failed or iteration is not None) and not keeps_groups:
            self._groups.break_off()
        deadline = time.monotonic() + 2.0
        for thread in (*threads, self._watchdog):
            if thread is not threading.current_thread():
                thread.join(timeout=max(deadline - time.monotonic(), 0.0))
        is_idle = not any(thread.is_alive() for thread in threads)
        self._ended_orderly = is_idle and iteration is None and not self.lanes.failed
        return is_idle

    def leave(self) -> None:
        """After ``close``: have the servers let go of what they hold for this job, once all ranks say so.

        After a failure, or in the middle of an iteration, pushes may be on the way still: then nothing is said.
        """
        if self._servers is not None and self._ended_orderly:
            self._servers.leave()


def _of_the_planner(error: Exception) -> EspressoError:
    """What was raised while the ranks decided together, between two iterations."""
    if isinstance(error, EspressoError):
        return error
    wrapped = EspressoError(f"while the ranks measured, searched or compared after the last bucket: {worded(error)}")
    wrapped.__cause__ = error
    return wrapped
