"""A worker's side of the servers: one :class:`Client` per process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, cycle
from typing import Any, TypeVar

from espresso.comm.errors import DisagreementError, EspressoError
from espresso.comm.messages import Bytes
from espresso.comm.parameter_server.places import Bearing
from espresso.comm.parameter_server.transport import Channel, Deadline, LinkError, Pending, Transport, wait_for_each
from espresso.comm.parameter_server.wire import Body, Header, Key, Op, Tag, hear, say
from espresso.strategies import CompressorSpec, Sharing

WINDOW_BYTES = 16 << 20
"""Pushes that may be on the wire at once from one worker; more would only wait in buffers."""

SIGN_S = 3600.0
"""A small part of the day after which a server takes a silent worker for dead."""

_T = TypeVar("_T")

_FULLER_S = 0.5
"""A server that has nothing of this worker's waits its turn: one that has can name the key."""


@dataclass(eq=False)
class Line:
    """This worker's use of one key: posted, pushed, pulled once a round. Its server gives it a tag.

    Attributes:
        sends: of this round's push, those that nobody has waited for.
    """

    key: Key
    tag: int = -1
    last_step: int = -1
    answer: Pending | None = None
    sends: deque[Pending] = field(default_factory=deque)


class Client:
    """Speaks to all servers. Thread-safe.

    Args:
        transport: connected; ranks from ``num_workers`` on are servers.
        addresses: where each server runs, for messages.
        near: for each server, the part of the workers that runs on its machine; by default none.
        machines: a number for each server's machine; by default all have their own.
        sharing: how keys are shared out over the servers.
        sign_s: after so long each time the servers hear that this worker lives.
    """

    def __init__(
        self,
        transport: Transport,
        num_workers: int,
        *,
        addresses: Sequence[str] = (),
        near: Sequence[float] = (),
        machines: Sequence[int] = (),
        engines: int = 1,
        sharing: Sharing = Sharing.MEASURED,
        sign_s: float = SIGN_S,
    ) -> None:
        self.transport, self.num_workers = transport, num_workers
        self.rank = transport.rank
        self.num_servers = transport.size - num_workers
        self.engines, self.sharing = engines, sharing
        self._near, self._machines = tuple(near), tuple(machines)
        self.addresses = tuple(addresses)
        self._namespaces = count(self.rank, num_workers)
        self._answer_tags = cycle(range(Tag.FIRST, Tag.LAST, 2))
        self._saying = threading.Lock()
        self._window: deque[tuple[Key, int, deque[Pending]]] = deque()
        self._in_window = 0
        self._pushing = threading.Lock()
        self._open: dict[int, Line] = {}
        self._latest: dict[int, Key] = {}
        self._listeners: list[Callable[[EspressoError], None]] = []
        self._closed, self._leaving = threading.Event(), threading.Lock()
        self.error: EspressoError | None = None
        self._unanswered: LinkError | None = None
        self._told = threading.Event()
        self._ears = [
            threading.Thread(target=self._listen, args=(server,), name=f"espresso-listen-{server}", daemon=True)
            for server in range(self.num_servers)
        ]
        for ear in self._ears:
            ear.start()
        threading.Thread(target=self._give_signs, args=(sign_s,), name="espresso-signs", daemon=True).start()

    def name(self, server: int) -> str:
        """What people call a server: its rank and its address."""
        where = f" ({self.addresses[server]})" if server < len(self.addresses) else ""
        return f"server rank {self.num_workers + server}{where}"

    @property
    def num_colocated(self) -> int:
        """Servers on machines of workers: the first ones."""
        return sum(near > 0.0 for near in self._near[: self.num_servers])

    @property
    def bearing(self) -> Bearing:
        """What is known of the servers without measuring."""
        count = self.num_servers
        near, machines = self._near or (0.0,) * count, self._machines or range(count)
        return Bearing.alike(machines[:count], near[:count], self.sharing)

    def measure(
        self, spec: CompressorSpec | None, sizes: Sequence[int], num_workers: int, timeout_s: float, server: int = 0
    ) -> dict[str, Any]:
        """What a server's processor needs: see :func:`measure_server`."""
        body = (spec, tuple(sizes), num_workers)
        answer: dict[str, Any] = self.ask_all(Op.MEASURE, {server: body}, timeout_s)[server]
        return answer

    def new_namespace(self) -> int:
        """A number that no other state of any worker has; the first worker of a group picks it for all."""
        return next(self._namespaces)

    def on_failure(self, listener: Callable[[EspressoError], None]) -> Callable[[], None]:
        """Have ``listener`` called when a server reports a failure or goes; returns how to take it off."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    # -- rounds ----------------------------------------------------------------------------------

    def push(self, line: Line, data: Bytes, answer: Bytes, header: Header, timeout_s: float) -> None:
        """Post the receive of the answer, announce, send; waits while too much is on the wire."""
        key = line.key
        server = self.num_workers + key.server
        with self._pushing:
            self._open[key.number], self._latest[key.server] = line, key
            while self._window and (not self._window[0][2] or self._in_window + data.nbytes > WINDOW_BYTES):
                oldest, num_bytes, sends = self._window.popleft()
                self._in_window -= num_bytes
                self._see_off(oldest, sends, timeout_s)
            try:
                line.answer = self.transport.receive(Channel.DATA, server, line.tag, answer)
                announced = self.transport.send(Channel.CONTROL, server, Tag.HEADER, header.pack())
                line.sends = deque((announced, self.transport.send(Channel.DATA, server, line.tag, data)))
            except LinkError as error:
                raise self._lost(key, "does not take the push of", error) from error
            self._window.append((key, data.nbytes, line.sends))
            self._in_window += data.nbytes
        line.last_step = header.step

    def _see_off(self, key: Key, sends: deque[Pending], timeout_s: float) -> None:
        """Wait until a push, which may have gone to another server than the next, needs its buffer no more."""
        try:
            with suppress(IndexError):  # the next push and this one's pull may both wait, each for another part
                while True:
                    sends.popleft().wait(timeout_s)
        except LinkError as error:
            raise self._lost(key, "did not take the push of", error) from error

    def pull(self, line: Line, timeout_s: float) -> None:
        """Wait until the answer is in the place that ``push`` was given."""
        assert line.answer is not None
        try:
            line.answer.wait(timeout_s)
        except LinkError as error:
            raise self._lost(line.key, "did not answer the push of", error) from error
        line.answer = None
        self._see_off(line.key, line.sends, timeout_s)
        self._open.pop(line.key.number, None)

    def _lost(self, key: Key, what: str, error: LinkError) -> EspressoError:
        if self.error is None:  # and nobody waits for this server again
            self.error = EspressoError(f"{self.name(key.server)} {what} {key} ({error})")
        return self.error

    # -- control ---------------------------------------------------------------------------------

    def ask_all(self, op: Op, bodies: Mapping[int, Any], timeout_s: float) -> dict[int, Any]:
        """Send a question to servers and wait for their answers: body and answer by server.

        Threads ask side by side: what one asks may be answered only once other workers have asked it too, and they may
        ask for another model first.

        Args:
            timeout_s: until a server's next sign: that it works on it, an answer, or 16 MiB that it took or gave.

        Raises:
            DisagreementError: a server refused.
            LinkError: one is gone or hangs.
        """
        if broken := self.error or self._unanswered:
            raise broken
        answers = self._asked(op, bodies, timeout_s)
        for server, (header, body) in answers.items():
            if header.op is Op.REFUSAL:
                raise DisagreementError(f"{self.name(server)} refuses: {body}")
        return {server: body for server, (_, body) in answers.items()}

    def _asked(self, op: Op, bodies: Mapping[int, Any], timeout_s: float) -> dict[int, tuple[Header, Any]]:
        """All answers, also behind a refusal: a server whose answer is not taken ends the job.

        So nothing can be asked once an answer did not come in time.
        """
        ranks = {server: self.num_workers + server for server in bodies}
        try:
            with self._saying:  # each header's body follows it; nobody is waited for meanwhile
                tag = next(self._answer_tags)
                sends = [say(self.transport, ranks[one], Tag.HEADER, op, body, tag) for one, body in bodies.items()]
            wait_for_each(chain.from_iterable(sends), Deadline(timeout_s))
            # All are listened to at once: each server gives what it says so long to be taken, also that it works on it.
            coming = {server: _beside(partial(self._answer, rank, tag, timeout_s)) for server, rank in ranks.items()}
            return {server: answer.result() for server, answer in coming.items()}
        except LinkError as error:
            who = "a server" if error.peer is None else self.name(error.peer - self.num_workers)
            # Over Gloo the first time-out closes the connection.
            self._unanswered = self._unanswered or LinkError(f"{who} did not answer '{op.name.lower()}' ({error})")
            raise self.error or self._unanswered from error
        except EspressoError as error:  # and what is left of the answer is not taken
            self._unanswered = LinkError(f"the answer to '{op.name.lower()}' could not be read ({error})")
            raise

    def _answer(self, rank: int, tag: int, timeout_s: float) -> tuple[Header, Any]:
        """A server's; while it says that it works on it, there is time."""
        until = Deadline(timeout_s)
        while True:
            header = hear(self.transport, rank, tag, until)
            said = Body(self.transport, rank, tag, header).read(until)
            if header.op is not Op.WORKING:
                return header, said

    # -- failure and end -------------------------------------------------------------------------

    def _listen(self, server: int) -> None:
        """Wait for the one notice a server sends: that it stops, and why, or the answer to our leaving."""
        rank = self.num_workers + server
        try:
            header = hear(self.transport, rank, Tag.NOTICE, None)
            if header.op is Op.LEAVE:
                return
            said = Body(self.transport, rank, Tag.NOTICE, header).read(None)
            text = f"{self.name(server)} reports: {said}"
        except Exception as error:
            waiting = [str(line.key) for line in list(self._open.values()) if line.key.server == server]
            about = f"while {waiting[0]} was on its way" if waiting else "between rounds"
            if not waiting and server in self._latest:
                about += f", the last of {self._latest[server]}"
            text = f"{self.name(server)} is gone, {about} ({error})"
        if self._closed.is_set():
            return
        servers = {line.key.server for line in list(self._open.values())}
        if servers and server not in servers:
            self._told.wait(_FULLER_S)
        if self.error is None:
            self.error = EspressoError(text)
        self._told.set()
        for listener in list(self._listeners):
            listener(self.error)

    def _give_signs(self, every_s: float) -> None:
        """Have the servers hear that this worker lives, also while it has nothing to say to them."""
        sign = Header(Op.LIVES, self.rank).pack()
        with suppress(LinkError):  # who needs that server finds out
            while not self._closed.wait(every_s):
                with self._leaving:  # nothing follows the farewell
                    if self._closed.is_set():
                        return
                    servers = range(self.num_workers, self.transport.size)
                    sends = [self.transport.send(Channel.CONTROL, rank, Tag.HEADER, sign) for rank in servers]
                wait_for_each(sends, None)  # a server that waits for memory reads it later

    def close_state(self, namespace: int, timeout_s: float) -> None:
        """Tell the servers that this worker has left a state: what they hold of it goes once all its workers have."""
        with self._leaving:  # nothing follows the farewell
            if not (self._closed.is_set() or self.error or self._unanswered):
                self._tell(Header(Op.CLOSE, self.rank, namespace), Deadline(timeout_s))

    def _tell(self, header: Header, until: Deadline) -> None:
        for rank in range(self.num_workers, self.transport.size):
            with suppress(EspressoError):  # it is gone already
                self.transport.send(Channel.CONTROL, rank, Tag.HEADER, header.pack()).wait(until.left_s)

    def leave(self, timeout_s: float) -> None:
        """Tell the servers that this worker is done. The process must not use them afterwards.

        Raises:
            LinkError: a server failed or does not answer, and would hold up the end of a job under MPI.
        """
        with self._leaving:
            if self._closed.is_set():
                return
            self._closed.set()
            if broken := self.error or self._unanswered:
                raise LinkError(f"the servers are of no use any more: {broken}") from broken
            until = Deadline(timeout_s)
            self._tell(Header(Op.LEAVE, self.rank), until)
        for server, ear in enumerate(self._ears):
            ear.join(until.left_s)
            if ear.is_alive():
                raise LinkError(f"{self.name(server)} did not answer within {timeout_s:g} s that this worker leaves")


def _beside(work: Callable[[], _T]) -> Future[_T]:
    """What ``work`` returns or raises, done by a thread that a process which ends does not wait for."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="espresso-answer", daemon=True).start()
    return future
