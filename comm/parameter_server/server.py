"""A parameter server: receives pushes, adds them up, compresses the sum once, answers pulls.

::

    worker 0 ── headers ──> receiver ── payload straight into its place ──┐
    worker 1 ── headers ──> receiver ── payload straight into its place ──┤ all there?
                                                                          └─> engine of the key:
              <── answer ───────────────────────── decode + sum in rank order, compress, send

Two threads per worker: one reads headers and posts the receives of what they announce, as far as memory allows;
the other waits for the payloads in that order. Keys are dealt out to engine threads by their bytes. One thread more
waits until answers to questions are taken: who reads headers never waits for what a worker does after another answer.
And one looks for workers whose push is overdue: a connection may not tell that its other end died (MPI) or hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from espresso.comm.errors import EspressoError, ProtocolError
from espresso.comm.memory import Codecs
from espresso.comm.messages import Bytes
from espresso.comm.parameter_server.holdings import PATIENCE, Holdings, Offers
from espresso.comm.parameter_server.sums import KeySum, Slots, measure_server
from espresso.comm.parameter_server.transport import (
    Channel,
    Deadline,
    LinkError,
    Pending,
    Transport,
    wait_for,
    wait_for_each,
)
from espresso.comm.parameter_server.wire import HEADER_BYTES, Body, Flag, Header, Key, Op, Table, Tag, say

logger = logging.getLogger("espresso")

DEFAULT_MEMORY_BYTES = 1 << 30

SILENCE_S = 24 * 3600.0
"""Workers that live say so every hour. MPI does not tell of one that is gone for good."""

_NOTICE_S = 5.0
_LOOK_S = 0.1
_SIGN_S = 1.0


class Overdue(LinkError):
    """A worker's push, or its table, did not come, while others wait for it."""


@dataclass(frozen=True)
class _Arriving:
    """A push on its way into its place."""

    pending: Pending
    summed: KeySum
    header: Header


class Server:
    """Serves until every worker has left.

    Args:
        transport: connected; ranks from ``num_workers`` on are servers.
        codecs: where codecs come from; engine threads use those of the training device.
        engines: threads that add up.
        timeout_s: a payload that was announced, or an answer that is not taken, for so long is an error.
        silence_s: a worker that says nothing for so long, not even that it lives, is an error.
        memory_bytes: for what was pushed and not yet added up.
        prepare: compiles the kernels of compressors for gradient types; called when workers ask for it.
    """

    def __init__(
        self,
        transport: Transport,
        num_workers: int,
        codecs: Codecs,
        *,
        engines: int = 4,
        timeout_s: float = 300.0,
        silence_s: float = SILENCE_S,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        prepare: Callable[[Any, Any], None] = lambda specs, dtypes: None,
    ) -> None:
        self.transport, self._codecs = transport, codecs
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self.rank = transport.rank
        self._index = transport.rank - num_workers
        self._num_workers = num_workers
        self._prepare = prepare
        self._slots = Slots(memory_bytes)
        self._lock = threading.RLock()
        self._held = Holdings(self._index, codecs, engines)
        self._tables: dict[tuple[int, tuple[int, ...]], Offers] = {}
        self._engines: list[SimpleQueue[tuple[KeySum, Header] | None]] = [SimpleQueue() for _ in range(engines)]
        self._answers: SimpleQueue[tuple[list[Pending], float] | None] = SimpleQueue()
        self._latest: dict[int, Key] = {}
        self._left: set[int] = set()
        self._gone: set[int] = set()
        self._over = threading.Event()
        self.error: EspressoError | None = None

    def serve(self) -> None:
        """Run until all workers have left.

        Raises:
            EspressoError: a worker died or broke the protocol; the other workers have been told.
        """
        threads: list[tuple[str, Callable[[], None]]] = []
        for worker in range(self._num_workers):
            arriving: SimpleQueue[_Arriving | None] = SimpleQueue()
            threads.append((f"headers-{worker}", partial(self._read_headers, worker, arriving)))
            threads.append((f"payloads-{worker}", partial(self._await_payloads, worker, arriving)))
        threads += [(f"engine-{number}", partial(self._run_engine, number)) for number in range(len(self._engines))]
        threads += [("answers", self._await_answers), ("watch", self._watch)]
        running = [threading.Thread(target=target, name=f"espresso-{name}", daemon=True) for name, target in threads]
        for thread in running:
            thread.start()
        self._over.wait()
        for engine in self._engines:
            engine.put(None)
        self._answers.put(None)
        if self.error is not None:
            raise self.error
        until = Deadline(_NOTICE_S)
        for thread in running:
            thread.join(until.left_s)

    # -- receiving -------------------------------------------------------------------------------

    def _read_headers(self, worker: int, arriving: SimpleQueue[_Arriving | None]) -> None:
        try:
            posted = self._post_header(worker)
            while True:
                data, pending = posted
                pending.wait(self._silence_s)
                header = Header.unpack(data)
                if header.op is Op.LEAVE:
                    arriving.put(None)
                    self._leave(worker)
                    return
                posted = self._post_header(worker)
                if header.op is Op.PUSH:
                    arriving.put(self._announce(worker, header))
                elif header.op is Op.CLOSE:
                    with self._lock:
                        self._held.leave(worker, header.key)
                elif header.op is not Op.LIVES:
                    self._control(worker, header)
        except Exception as error:
            self._fail(worker, error)

    def _post_header(self, worker: int) -> tuple[Bytes, Pending]:
        data = np.empty(HEADER_BYTES, np.uint8)
        return data, self.transport.receive(Channel.CONTROL, worker, Tag.HEADER, data)

    def _announce(self, worker: int, header: Header) -> _Arriving:
        """Post the receive of an announced push; waits while memory is short."""
        with self._lock:
            summed = self._held.get(header.key)
            if summed is not None:
                summed.announced.add(worker)
        if summed is None or worker not in summed.key.workers:
            raise ProtocolError(f"worker rank {worker} pushed key {header.key}, which is not its to push")
        if header.num_bytes != summed.key.up_bytes or bool(header.flags & Flag.RAW) != summed.key.is_plain:
            raise ProtocolError(
                f"worker rank {worker} pushes {header.num_bytes} bytes for {summed.key}, expected {summed.key.up_bytes}"
            )
        summed.take_block(self._slots, partial(self._holds_up, summed))
        place = summed.place(worker)
        self._latest[worker] = summed.key
        pending = self.transport.receive(Channel.DATA, worker, summed.tag, place)
        return _Arriving(pending, summed, header)

    def _holds_up(self, summed: KeySum) -> bool:
        """Whether a worker that has announced this key may have a push behind it for which a key with a block waits."""
        with self._lock:
            held = [other for other in self._held if other.has_block]
            return any(w in other.key.workers and w not in other.announced for other in held for w in summed.announced)

    def _await_payloads(self, worker: int, arriving: SimpleQueue[_Arriving | None]) -> None:
        while (push := arriving.get()) is not None:
            try:
                push.pending.wait(self._timeout_s)
                with self._lock:
                    if not push.summed.arrived:
                        push.summed.first_s = time.monotonic()
                    push.summed.arrived.add(worker)
                    self._expect(push.summed.key.workers)
                    complete = len(push.summed.arrived) == len(push.summed.key.workers)
                if complete:
                    self._engines[push.summed.engine].put((push.summed, push.header))
            except Exception as error:
                self._fail(worker, error, push.summed.key)
                return

    def _expect(self, workers: Iterable[int]) -> None:
        """Refuse to wait for one of these that has left. Under the lock."""
        for worker in self._left.intersection(workers):
            raise LinkError("it left before", worker)

    def _watch(self) -> None:
        """Fail when a key has waited too long for somebody's push, or others for somebody's table."""
        while not self._over.wait(_LOOK_S):
            with self._lock:
                late = next(filter(self._held.is_overdue, self._held), None)
                missing = set() if late is None else set(late.key.workers) - late.arrived
                limit_s = 0.0 if late is None else self._held.patience_s(late.key)
                silent = [(worker, offers.limit_s) for offers in self._tables.values()
                          if (worker := offers.missing()) is not None]  # fmt: skip
            if late is not None and missing:
                self._fail(min(missing), Overdue(f"no push within {limit_s:g} s of another worker's"))
            for worker, limit_s in silent:
                self._fail(worker, Overdue(f"no table of keys within {limit_s:g} s of another worker's"))

    # -- adding up -------------------------------------------------------------------------------

    def _run_engine(self, number: int) -> None:
        while (job := self._engines[number].get()) is not None:
            summed, header = job
            try:
                self._finish_round(summed, header)
            except Exception as error:
                self._fail(None, error, summed.key)
                return

    def _finish_round(self, summed: KeySum, header: Header) -> None:
        # The answer before the last was pulled by everybody, or nobody could have pushed this round.
        sends = summed.sends[summed.parity]
        wait_for(sends, Deadline(self._timeout_s))
        sends.clear()
        summed.settle(bool(header.flags & Flag.KEPT))
        answer, block = summed.add_up(header.step, header.scale)
        self._slots.give(block)
        for worker in summed.key.workers:
            sends.append(self.transport.send(Channel.DATA, worker, summed.tag, answer))

    # -- control ---------------------------------------------------------------------------------

    def _control(self, worker: int, header: Header) -> None:
        body = Body(self.transport, worker, Tag.HEADER, header).read(Deadline(self._timeout_s))
        if header.op is Op.INSTALL:
            self._offer(worker, header.key, body)
            return
        quick: dict[Op, Callable[..., Any]] = {
            Op.PLACE: self._held.place,
            Op.FETCH: self._held.fetch,
            Op.RESET: self._held.reset,
            Op.RESCALE: self._held.rescale,
        }
        slow: dict[Op, Callable[..., Any]] = {
            Op.PREPARE: self._prepare,
            Op.MEASURE: partial(measure_server, self._codecs),
        }
        if header.op in quick:
            with self._lock:
                answer = quick[header.op](*body)
        elif header.op in slow:
            answer = self._at_work(worker, header.key, partial(slow[header.op], *body))
        else:
            raise ProtocolError(f"worker rank {worker} sent {header.op.name}, which only servers send")
        self._answer(worker, header.key, Op.ANSWER, answer, self._timeout_s)

    def _at_work(self, worker: int, tag: int, job: Callable[[], Any]) -> Any:
        """Do what may take long: until it is done the worker hears every second that this server lives."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(job)
            while wait((done,), _SIGN_S).not_done:
                self._answer(worker, tag, Op.WORKING, None, self._timeout_s)
            return done.result()

    def _answer(self, worker: int, tag: int, op: Op, body: Any, timeout_s: float) -> None:
        """Start to send an answer; each piece of it is to be taken in time."""
        self._answers.put((say(self.transport, worker, tag, op, body), timeout_s))

    def _await_answers(self) -> None:
        while (answer := self._answers.get()) is not None:
            sends, timeout_s = answer
            try:
                wait_for_each(sends, Deadline(timeout_s))  # that begins now: others' may have taken long
            except Exception as error:
                self._fail(None, error)
                return

    def _offer(self, worker: int, tag: int, table: Table) -> None:
        """Take a worker's table; when all have offered theirs, install it or refuse it to all."""
        retired: list[KeySum] = []
        with self._lock:
            self._expect(table.workers)
            offered = self._tables.setdefault((table.namespace, table.workers), Offers())
            offered[worker], offered.tags[worker] = table, tag
            if len(offered) < len(table.workers):
                return
            del self._tables[table.namespace, table.workers]
            refusal = offered.disagreement() or self._held.refusal(table)
            if refusal is None:
                installed, retired = self._held.install(table)
        limit_s = PATIENCE * table.timeout_s
        # Without the lock: a worker that does not take its last answer must not hold up the others' states.
        wait_for((one for summed in retired for sends in summed.sends for one in sends), Deadline(limit_s))
        for each, its_tag in offered.tags.items():
            if refusal is not None:
                self._answer(each, its_tag, Op.REFUSAL, refusal, limit_s)
            else:
                mine = installed if each == min(table.workers) else replace(installed, orphans=())
                self._answer(each, its_tag, Op.ANSWER, mine, limit_s)

    def _leave(self, worker: int) -> None:
        """Let a worker go, and its listener, which would otherwise wait on in a process that ends."""
        with self._lock:
            self._left.add(worker)
            rounds = [summed.key.workers for summed in self._held if summed.arrived]
            is_missed = any(worker in workers for workers in [*rounds, *(workers for _, workers in self._tables)])
            self._held.leave(worker)
        if is_missed:
            self._fail(worker, LinkError("it left in the middle of a round"))
        farewell = Header(Op.LEAVE, self.rank).pack()
        with suppress(LinkError):  # it has said that it goes; it need not wait for this
            self.transport.send(Channel.CONTROL, worker, Tag.NOTICE, farewell).wait(_NOTICE_S)
        with self._lock:
            self._gone.add(worker)
            if len(self._gone) == self._num_workers:
                self._over.set()

    # -- failure ---------------------------------------------------------------------------------

    def _fail(self, worker: int | None, error: BaseException, key: Key | None = None) -> None:
        """Tell the other workers once, and stop. ``worker`` is to blame, unless the error says who was lost."""
        if isinstance(error, LinkError) and error.peer is not None:
            worker = error.peer
        with self._lock:
            if self.error is not None or self._over.is_set():
                return
            self.error = EspressoError(self._say(worker, error, key))
            self.error.__cause__ = error
        logger.error("%s", self.error, exc_info=error)
        self._notify(str(self.error), worker if isinstance(error, LinkError) else None)
        self._over.set()

    def _say(self, worker: int | None, error: BaseException, key: Key | None) -> str:
        waiting = [
            str(summed.key)
            for summed in self._held
            if summed.arrived and worker is not None and worker not in summed.arrived
        ]
        about = f"while {key} was on its way" if key is not None else "between its pushes"
        if key is None and worker in self._latest:
            about += f", the last of {self._latest[worker]}"
        if waiting:
            about = f"while {waiting[0]} waited for its push"
            about += f" ({len(waiting)} keys in all)" if len(waiting) > 1 else ""
        if isinstance(error, Overdue):
            return f"worker rank {worker} died, left or hangs {about}: server rank {self.rank} had {error}"
        if worker is not None and isinstance(error, LinkError):
            return f"worker rank {worker} died or left {about}: server rank {self.rank} lost it ({error})"
        at = "" if worker is None else f"at a message of worker rank {worker} "
        at = at if key is None else f"at {key} "
        return f"server rank {self.rank} failed {at}({type(error).__name__}: {error})"

    def _notify(self, text: str, lost: int | None) -> None:
        """Have all workers that are still there hear of it; ``lost`` is not."""
        sends: list[Pending] = []
        for worker in set(range(self._num_workers)) - self._left - {lost}:
            with suppress(LinkError):  # it may be gone as well
                sends += say(self.transport, worker, Tag.NOTICE, Op.NOTICE, text)
        until = Deadline(_NOTICE_S)
        for pending in sends:
            with suppress(LinkError):
                pending.wait(until.left_s)
