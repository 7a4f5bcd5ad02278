"""A worker's side of the servers: one :class:`Client` per process, one :class:`Link` per state."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from espresso.comm.errors import DisagreementError, EspressoError
from espresso.comm.keep.store import Address, Piece, ResidualStore
from espresso.comm.messages import Bytes
from espresso.comm.parameter_server.server import NAMESPACE_SHIFT
from espresso.comm.parameter_server.transport import Channel, LinkError, Pending, Transport
from espresso.comm.parameter_server.wire import (
    BODIES,
    HEADER_BYTES,
    Coding,
    Flag,
    Header,
    Held,
    Key,
    Op,
    Orphans,
    Table,
    Tag,
    balance,
)
from espresso.strategies import CompressorSpec, Site

T = TypeVar("T")

WINDOW_BYTES = 16 << 20
"""Pushes that may be on the wire at once from one worker; more would only wait in buffers."""

PATIENCE_S = 600.0
"""For a server that compiles kernels."""

_FULLER_S = 0.5
"""A server that has nothing of this worker's waits its turn: one that has can name the key."""


@dataclass(eq=False)
class Line:
    """This worker's use of one key: posted, pushed, pulled once a round."""

    key: Key
    last_step: int = -1
    answer: Pending | None = None


class Client:
    """Speaks to all servers. Thread-safe.

    Args:
        transport: connected; ranks from ``num_workers`` on are servers.
        addresses: where each server runs, for messages.
        colocated: whether servers share the workers' machines.
    """

    def __init__(
        self,
        transport: Transport,
        num_workers: int,
        *,
        addresses: Sequence[str] = (),
        colocated: bool = False,
        engines: int = 1,
    ) -> None:
        self.transport, self.num_workers = transport, num_workers
        self.rank = transport.rank
        self.num_servers = transport.size - num_workers
        self.colocated, self.engines = colocated, engines
        self._addresses = tuple(addresses)
        self._namespaces = 0
        self._asking = threading.Lock()
        self._window: deque[tuple[Key, int, Pending]] = deque()
        self._in_window = 0
        self._pushing = threading.Lock()
        self._open: dict[int, Line] = {}
        self._latest: dict[int, Key] = {}
        self._listeners: list[Callable[[EspressoError], None]] = []
        self._closed = False
        self.error: EspressoError | None = None
        self._told = threading.Event()
        self._ears = [
            threading.Thread(target=self._listen, args=(server,), name=f"espresso-listen-{server}", daemon=True)
            for server in range(self.num_servers)
        ]
        for ear in self._ears:
            ear.start()

    def name(self, server: int) -> str:
        """What people call a server: its rank and its address."""
        where = f" ({self._addresses[server]})" if server < len(self._addresses) else ""
        return f"server rank {self.num_workers + server}{where}"

    def measure(self, spec: CompressorSpec | None, sizes: Sequence[int], num_workers: int) -> dict[str, Any]:
        """What the first server's processor needs: see :func:`measure_server`."""
        answer: dict[str, Any] = self.ask(0, Op.MEASURE, (spec, tuple(sizes), num_workers), PATIENCE_S)
        return answer

    def new_namespace(self) -> int:
        """A number that no other state of any worker has; the first worker of a group picks it for all."""
        self._namespaces += 1
        return (self._namespaces - 1) * self.num_workers + self.rank

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
            while self._window and self._in_window + data.nbytes > WINDOW_BYTES:
                self._take_one(timeout_s)
            try:
                line.answer = self.transport.receive(Channel.DATA, server, Tag.KEYS + key.number, answer)
                announced = self.transport.send(Channel.CONTROL, server, Tag.HEADER, header.pack())
                sent = self.transport.send(Channel.DATA, server, Tag.KEYS + key.number, data)
            except LinkError as error:
                raise self._lost(key, "does not take the push of", error) from error
            self._window += [(key, 0, announced), (key, data.nbytes, sent)]
            self._in_window += data.nbytes
        line.last_step = header.step

    def _take_one(self, timeout_s: float) -> None:
        """Wait for the oldest push, which may have gone to another server than the next."""
        key, num_bytes, pending = self._window.popleft()
        self._in_window -= num_bytes
        try:
            pending.wait(timeout_s)
        except LinkError as error:
            raise self._lost(key, "did not take the push of", error) from error

    def pull(self, line: Line, timeout_s: float) -> None:
        """Wait until the answer is in the place that ``push`` was given."""
        assert line.answer is not None
        try:
            line.answer.wait(timeout_s)
        except LinkError as error:
            raise self._lost(line.key, f"did not answer within {timeout_s:g} s or is gone:", error) from error
        line.answer = None
        self._open.pop(line.key.number, None)

    def _lost(self, key: Key, what: str, error: LinkError) -> EspressoError:
        if self.error is None:  # and nobody waits for this server again
            self.error = EspressoError(f"{self.name(key.server)} {what} {key} ({error})")
        return self.error

    # -- control ---------------------------------------------------------------------------------

    def ask(self, server: int, op: Op, body: Any, timeout_s: float) -> Any:
        """Send a request to one server and wait for its answer.

        Raises:
            DisagreementError: the server refused.
            LinkError: it is gone or hangs.
        """
        return self.ask_all(op, {server: body}, timeout_s)[server]

    def ask_all(self, op: Op, bodies: Mapping[int, Any], timeout_s: float) -> dict[int, Any]:
        """The same to several servers at once: body and answer by server."""
        with self._asking:
            sends: list[tuple[int, Pending]] = []
            for server, body in bodies.items():
                rank = self.num_workers + server
                data = BODIES.pack(body)
                header = Header(op, self.rank, num_bytes=data.nbytes).pack()
                for tag, message in ((Tag.HEADER, header), (Tag.BODY, data)):
                    send = partial(self.transport.send, Channel.CONTROL, rank, tag, message)
                    sends.append((server, self._try(server, op, send, timeout_s)))
            for server, pending in sends:
                self._try(server, op, partial(pending.wait, timeout_s), timeout_s)
            # All of them before a refusal is raised: an answer that nobody takes would be the next question's.
            answers = {server: self._answer(server, op, timeout_s) for server in bodies}
        for server, (is_refusal, body) in answers.items():
            if is_refusal:
                raise DisagreementError(f"{self.name(server)} refuses: {body}")
        return {server: body for server, (_, body) in answers.items()}

    def _answer(self, server: int, op: Op, timeout_s: float) -> tuple[bool, Any]:
        """(whether it refuses, what it says)."""
        header = Header.unpack(self._hear(server, op, Tag.ANSWER, HEADER_BYTES, timeout_s))
        body = self._hear(server, op, Tag.ANSWER_BODY, header.num_bytes, timeout_s)
        return header.op is Op.REFUSAL, BODIES.unpack(body)

    def _hear(self, server: int, op: Op, tag: Tag, num_bytes: int, timeout_s: float) -> Bytes:
        data = np.empty(num_bytes, np.uint8)

        def receive() -> None:
            rank = self.num_workers + server
            self.transport.receive(Channel.CONTROL, rank, tag, data).wait(timeout_s)

        self._try(server, op, receive, timeout_s)
        return data

    def _try(self, server: int, op: Op, call: Callable[[], T], timeout_s: float) -> T:
        """Call it; a lost connection names the server and what was asked of it."""
        try:
            return call()
        except LinkError as error:
            if self.error is not None:
                raise self.error from error
            raise LinkError(
                f"{self.name(server)} did not answer '{op.name.lower()}' within {timeout_s:g} s ({error}); did another"
                " worker stop?"
            ) from error

    # -- failure and end -------------------------------------------------------------------------

    def _listen(self, server: int) -> None:
        """Wait for the one notice a server sends: that it stops, and why, or the answer to our leaving."""
        rank = self.num_workers + server
        try:
            data = np.empty(HEADER_BYTES, np.uint8)
            self.transport.receive(Channel.CONTROL, rank, Tag.NOTICE, data).wait()
            header = Header.unpack(data)
            if header.op is Op.LEAVE:
                return
            body = np.empty(header.num_bytes, np.uint8)
            self.transport.receive(Channel.CONTROL, rank, Tag.NOTICE_BODY, body).wait()
            text = f"{self.name(server)} reports: {BODIES.unpack(body)}"
        except Exception as error:
            waiting = [str(line.key) for line in list(self._open.values()) if line.key.server == server]
            about = f"while {waiting[0]} was on its way" if waiting else "between rounds"
            if not waiting and server in self._latest:
                about += f", the last of {self._latest[server]}"
            text = f"{self.name(server)} is gone, {about} ({error})"
        if self._closed:
            return
        servers = {line.key.server for line in list(self._open.values())}
        if servers and server not in servers:
            self._told.wait(_FULLER_S)
        if self.error is None:
            self.error = EspressoError(text)
        self._told.set()
        for listener in list(self._listeners):
            listener(self.error)

    def leave(self) -> None:
        """Tell the servers that this worker is done. The process must not use them afterwards."""
        if self._closed:
            return
        self._closed = True
        if self.error is not None:
            return
        header = Header(Op.LEAVE, self.rank).pack()
        for rank in range(self.num_workers, self.transport.size):
            try:
                self.transport.send(Channel.CONTROL, rank, Tag.HEADER, header).wait(5.0)
            except EspressoError:
                continue  # it is gone already
        for ear in self._ears:
            ear.join(5.0)


class Link:
    """What one state has at the servers: its keys, and their residuals seen from here.

    Args:
        ranks: the workers that train together, in order.
        store: this rank's residuals; it saves and loads the servers' through this link.
        timeout_s: for everything but compiling.
        namespace: the first worker's ``client.new_namespace()``, on all workers of the group.
    """

    def __init__(
        self, client: Client, ranks: Sequence[int], store: ResidualStore, timeout_s: float, namespace: int
    ) -> None:
        self.client, self._ranks, self._store, self._timeout_s = client, tuple(ranks), store, timeout_s
        self._namespace = namespace
        self._count = 0
        self._live: dict[int, Key] = {}
        self._discarded: set[int] = set()
        self._waiting: list[Held] = []
        self._release: Callable[[], None] = lambda: None
        store.remote = self

    @property
    def answers(self) -> bool:
        """Whether this worker speaks for all: the first of the group."""
        return self.client.rank == self._ranks[0]

    def on_failure(self, listener: Callable[[EspressoError], None]) -> None:
        self._release = self.client.on_failure(listener)

    def wait_for_notice(self, timeout_s: float) -> EspressoError | None:
        """What a server says of a failure, if one speaks in time: servers know which worker is gone."""
        deadline = time.monotonic() + timeout_s
        while self.client.error is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.client.error

    def close(self) -> None:
        self._release()

    def prepare(self, specs: Iterable[CompressorSpec], dtypes: Iterable[str]) -> None:
        """Have the servers compile what they will run; the first worker asks, the others go on."""
        if self.answers:
            body = (set(specs), set(dtypes))
            self.client.ask_all(Op.PREPARE, dict.fromkeys(range(self.client.num_servers), body), PATIENCE_S)

    # -- tables ----------------------------------------------------------------------------------

    def needs(self, keys: Sequence[Key], only: Collection[str] | None) -> bool:
        """Whether the servers must hear of a new plan: it uses them, or what it replaces did."""
        return bool(keys) or any(self._touches(key, only) for key in self._live.values())

    def install(
        self,
        keys: Sequence[Key],
        lines: Mapping[int, Line],
        numels: Mapping[str, int],
        only: Collection[str] | None,
        strategy: str,
    ) -> None:
        """Agree with servers and workers on new keys; move residuals to where the keys lie now.

        Args:
            keys: of all ranks of the group, the same list on each, not numbered yet.
            lines: this rank's, by place in ``keys``; they get their numbered keys.
            only: tensors whose earlier keys they replace; None: all.
            strategy: its digest.

        Raises:
            DisagreementError: another worker has another strategy or cut.
        """
        for number in [n for n, key in self._live.items() if self._touches(key, only)]:
            del self._live[number]
        loads = [0] * self.client.num_servers
        for key in self._live.values():
            loads[key.server] += key.load_bytes
        places = balance([key.load_bytes for key in keys], self.client.num_servers, loads)
        numbered = []
        for key, server in zip(keys, places, strict=True):
            numbered.append(replace(key, number=self._next_number(), server=server))
        for index, line in lines.items():
            line.key = numbered[index]
        self._live |= {key.number: key for key in numbered}
        table = Table(
            self._namespace,
            self._ranks,
            tuple(numbered),
            dict(numels),
            None if only is None else frozenset(only),
            strategy,
            self._store.transactional,
            self._store.gain,
            frozenset(self._discarded),
            self._timeout_s,
        )
        answers = self.client.ask_all(Op.INSTALL, dict.fromkeys(range(self.client.num_servers), table), self._timeout_s)
        if self.answers:
            orphans = [piece for answer in answers.values() for piece in _pieces_of(answer)]
            self._resettle(orphans, numels)

    def settle_waiting(self, numels: Mapping[str, int]) -> None:
        """Loaded residuals of tensors that are known now and do not go through servers: this rank carries them."""
        if self._waiting:
            self._resettle([], numels)

    def _next_number(self) -> int:
        while True:
            number = (self._namespace << NAMESPACE_SHIFT) | (self._count & ((1 << NAMESPACE_SHIFT) - 1))
            self._count += 1
            if number not in self._live:
                return number

    def _touches(self, key: Key, only: Collection[str] | None) -> bool:
        return only is None or any(stretch.tensor in only for stretch in key.stretches)

    def _resettle(self, orphans: Sequence[Held], numels: Mapping[str, int]) -> None:
        """Give pieces to the keys that hold their ranges now; what is in no key is carried by this rank."""
        known, self._waiting = self._split_waiting(numels)
        shares: dict[int, list[Held]] = {}
        for piece in [*orphans, *known]:
            for server, part in self._homes(piece):
                if server is None:
                    self._store.add_carry(part.tensor, part.start, part.values, numels[part.tensor])
                elif np.any(part.values):
                    shares.setdefault(server, []).append(part)
        bodies = {server: (self._namespace, pieces) for server, pieces in shares.items()}
        if bodies:
            self.client.ask_all(Op.PLACE, bodies, self._timeout_s)

    def _split_waiting(self, numels: Mapping[str, int]) -> tuple[list[Held], list[Held]]:
        """Loaded pieces of tensors whose keys are known now, and the others."""
        known = [piece for piece in self._waiting if piece.tensor in numels]
        return known, [piece for piece in self._waiting if piece.tensor not in numels]

    def _homes(self, piece: Held) -> list[tuple[int | None, Held]]:
        """The piece cut along the keys that keep a residual; None where no key does."""
        parts: list[tuple[int | None, Held]] = []
        at, end = piece.start, piece.start + piece.values.size
        homes = sorted(
            (stretch.start, stretch.start + stretch.numel, key.server)
            for key in self._live.values()
            if key.keeps_residual
            for stretch in key.stretches
            if stretch.tensor == piece.tensor
        )
        for low, high, server in homes:
            low, high = max(low, at), min(high, end)
            if low >= high:
                continue
            if at < low:
                parts.append((None, _cut(piece, at, low)))
            parts.append((server, _cut(piece, low, high)))
            at = high
        if at < end:
            parts.append((None, _cut(piece, at, end)))
        return parts

    # -- rounds ----------------------------------------------------------------------------------

    def push(self, line: Line, data: Bytes, answer: Bytes, step: int, scale: float) -> None:
        """Send this round's push of a line; ``answer`` is where the pull will lie."""
        kept = line.last_step >= 0 and line.last_step not in self._discarded
        flags = Flag.KEPT if kept else Flag.NONE
        if line.key.up is Coding.RAW:
            flags |= Flag.RAW
        header = Header(Op.PUSH, self.client.rank, line.key.number, flags, step, data.nbytes, scale, line.last_step)
        self.client.push(line, data, answer, header, self._timeout_s)

    def pull(self, line: Line) -> None:
        self.client.pull(line, self._timeout_s)

    def settled(self, step: int, counts: bool) -> None:
        """An iteration is over; one that does not count leaves the servers' residuals as they were."""
        if not counts:
            self._discarded.add(step)

    # -- what checkpoints need -------------------------------------------------------------------

    def snapshot(self) -> dict[Address, list[Piece]]:
        """The servers' residuals, on the first worker; nothing on the others."""
        if not self.answers:
            return {}
        body = (self._namespace, frozenset(self._discarded))
        held = list(self._waiting)
        if self._live:
            answers = self.client.ask_all(
                Op.FETCH, dict.fromkeys(range(self.client.num_servers), body), self._timeout_s
            )
            held += [piece for pieces in answers.values() for piece in pieces]
        found: dict[Address, list[Piece]] = {}
        for piece in held:
            found.setdefault((piece.tensor, Site.SERVER), []).append((piece.start, piece.values, 0))
        return found

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply what the servers keep of the named tensors; between iterations, all workers alike."""
        if not self.answers:
            return
        for piece in self._waiting:
            np.multiply(piece.values, factors.get(piece.tensor, 1.0), out=piece.values)
        if self._live:
            body = (self._namespace, frozenset(self._discarded), dict(factors))
            self.client.ask_all(Op.RESCALE, dict.fromkeys(range(self.client.num_servers), body), self._timeout_s)

    def load(self, pieces: Mapping[Address, Sequence[Piece]], numels: Mapping[str, int]) -> None:
        """Replace the servers' residuals; what no key keeps yet waits for the keys to come."""
        self._discarded.clear()
        if not self.answers:
            return
        if self._live:
            self.client.ask_all(
                Op.RESET, dict.fromkeys(range(self.client.num_servers), self._namespace), self._timeout_s
            )
        self._waiting = [
            Held(tensor, start, values)
            for (tensor, _), parts in pieces.items()
            for start, values, replica in parts
            if replica == 0
        ]
        live = {stretch.tensor for key in self._live.values() for stretch in key.stretches}
        self._resettle([], {tensor: numels[tensor] for tensor in live})


def _pieces_of(answer: Orphans) -> list[Held]:
    return answer.pieces


def _cut(piece: Held, low: int, high: int) -> Held:
    return Held(piece.tensor, low, piece.values[low - piece.start : high - piece.start])
