"""Point-to-point messages between workers and servers: one small interface, two implementations.

Ranks count workers first, then servers. Two channels: control messages never wait behind gradients. Buffers are
contiguous uint8 arrays that stay untouched until their ``Pending`` is over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch

from espresso.comm.connections import is_far
from espresso.comm.endpoints import ends_since, local_ends
from espresso.comm.errors import EspressoError
from espresso.comm.member import Member, break_off
from espresso.comm.messages import Bytes
from espresso.comm.upkeep import Upkeep
from espresso.comm.witness import without_advice

FOREVER = timedelta(days=365)

MPI_BYTES = 1 << 30
"""Of a message; a larger one goes in pieces, since MPI counts bytes in 31 bits."""

_REST_S = 20e-6
_LONGEST_REST_S = 1e-3


class Channel(Enum):
    CONTROL = "control"
    DATA = "data"


class LinkError(EspressoError):
    """A message did not get through: the other side is gone, hangs or cannot be reached.

    Attributes:
        peer: the rank at the other end, where a transport found out.
    """

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


class Deadline:
    """The end of several waits in a row."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Begin anew: somebody lives."""
        self._end = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        """At least a moment: what is there already is taken."""
        return max(self._end - time.monotonic(), 0.01)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end


class Pending(Protocol):
    """A message under way."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the buffer may be used again; None waits without a limit.

        Raises:
            LinkError: the peer is gone, or the time is over.
        """
        ...


def wait_for(pending: Iterable[Pending], until: Deadline) -> None:
    """Until all of them are over."""
    for one in pending:
        one.wait(until.left_s)


def wait_for_each(pending: Iterable[Pending], until: Deadline | None) -> None:
    """Until all of them are over; each renews the time, to which there is no limit without ``until``."""
    for one in pending:
        one.wait(None if until is None else until.left_s)
        if until is not None:
            until.renew()


def cut(data: Bytes, piece_bytes: int) -> list[Bytes]:
    """Pieces of so many bytes, the last of what is left."""
    return [data[at : at + piece_bytes] for at in range(0, data.nbytes, piece_bytes)]


class Transport(Protocol):
    """Messages between ``size`` ranks; thread-safe. Messages of one (channel, peer, tag) keep their order."""

    rank: int
    size: int

    def send(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending: ...

    def receive(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending: ...

    def close(self) -> None: ...


class _GlooPending:
    def __init__(self, work: Any, peer: int, buffer: torch.Tensor) -> None:
        self._work, self._peer, self._buffer = work, peer, buffer

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._work.wait(FOREVER if timeout_s is None else timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise LinkError(f"rank {self._peer}: {without_advice(error)}", self._peer) from error


class GlooTransport:
    """Gloo's point-to-point transfers, over process groups of its own.

    Args:
        store: where the ranks find each other (``torch.distributed.Store``); a prefix of its own is used.
        timeout_s: for connecting.
        connections: between two ranks, over which what has different tags goes in turn; the same on all ranks.

    Raises:
        LinkError: the ranks could not be connected.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float = 60.0, connections: int = 1) -> None:
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

        self.rank, self.size = rank, size
        self._groups: dict[Channel, list[Any]] = {channel: [] for channel in Channel}
        self._begun, known = 0, local_ends()
        for channel, number in ((Channel.CONTROL, 0), *((Channel.DATA, number) for number in range(connections))):
            prefix = PrefixStore(f"espresso-servers-{channel.value}-{number}", store)
            try:
                group = ProcessGroupGloo(prefix, rank, size, timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise LinkError(f"rank {rank} could not connect to the other {size - 1} ranks: {error}") from error
            self._groups[channel].append(group)
        self._upkeep, ends = None, ends_since(known)
        if is_far(ends):
            links = [Member(group, tuple(range(size)), rank) for group in self._groups[Channel.DATA]]
            self._upkeep = Upkeep(links, ends, lambda: self._begun)

    def send(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending:
        return self._start(self._group(channel, tag).send, torch.from_numpy(data), peer, tag)

    def receive(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending:
        return self._start(self._group(channel, tag).recv, torch.from_numpy(data), peer, tag)

    def _group(self, channel: Channel, tag: int) -> Any:
        self._begun += 1
        groups = self._groups[channel]
        return groups[tag % len(groups)]

    def _start(self, call: Any, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        try:
            return _GlooPending(call([buffer], peer, tag), peer, buffer)
        except RuntimeError as error:
            raise LinkError(f"rank {peer}: {without_advice(error)}", peer) from error

    def close(self) -> None:
        if self._upkeep is not None:
            self._upkeep.stop()
        # A thread that still waits here would come back from the library while the interpreter ends, and abort it.
        for group in (group for groups in self._groups.values() for group in groups):
            break_off(group, self.rank, self.size)
        self._groups.clear()
        self._upkeep = None


class _MpiPending:
    def __init__(self, start: Any, peer: int) -> None:
        self.start, self.peer = start, peer
        self.request: Any = None
        self.over = threading.Event()
        self.error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.over.wait(timeout_s):
            raise LinkError(f"rank {self.peer}: no message within {timeout_s:g} s", self.peer)
        if self.error is not None:
            raise LinkError(f"rank {self.peer}: {self.error}", self.peer) from self.error


class _MpiPieces:
    """A message that goes in several."""

    def __init__(self, pieces: list[_MpiPending]) -> None:
        self._pieces = pieces

    def wait(self, timeout_s: float | None = None) -> None:
        until = None if timeout_s is None else Deadline(timeout_s)
        for piece in self._pieces:
            piece.wait(None if until is None else until.left_s)


class MpiTransport:
    """MPI's non-blocking transfers over duplicates of a communicator, all of them made and completed by one thread.

    One thread calls MPI, so that an MPI built without full thread support will do, and so that no caller spins:
    waiting threads sleep on a condition, and the one that polls rests between rounds, longer the longer nothing
    happens.

    Args:
        world: an ``mpi4py`` communicator.
        ranks: its ranks, workers first, then servers: place i is rank i of this transport.
    """

    def __init__(self, world: Any, ranks: list[int]) -> None:
        from mpi4py import MPI

        self.size = len(ranks)
        self.rank = ranks.index(world.Get_rank())
        self._ranks = ranks
        self._comms = {channel: world.Dup() for channel in Channel}
        for comm in self._comms.values():
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._testany = MPI.Request.Testany
        self._todo: deque[_MpiPending] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._progress, name="espresso-mpi", daemon=True)
        self._thread.start()

    def send(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending:
        return self._submit(self._comms[channel].Isend, peer, tag, data)

    def receive(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending:
        return self._submit(self._comms[channel].Irecv, peer, tag, data)

    def _submit(self, call: Any, peer: int, tag: int, data: Bytes) -> Pending:
        if self._closed:
            raise LinkError(f"rank {peer}: the connection is closed", peer)
        rank, parts = self._ranks[peer], cut(data, MPI_BYTES)
        pieces = [_MpiPending(partial(call, [part, part.nbytes], rank, tag), peer) for part in parts]
        self._todo.extend(pieces)
        self._wake.set()
        return pieces[0] if len(pieces) == 1 else _MpiPieces(pieces)

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=5.0)

    def _progress(self) -> None:
        running: list[_MpiPending] = []
        rest = _REST_S
        while not self._closed or any(not p.over.is_set() and p.request is None for p in self._todo):
            busy = self._start_new(running)
            if running:
                busy |= self._collect(running)
            if busy:
                rest = _REST_S
                continue
            if not running:
                self._wake.wait(0.05)
            else:
                self._wake.wait(rest)
                rest = min(rest * 1.5, _LONGEST_REST_S)
            self._wake.clear()
        for pending in running:
            self._cancel(pending)

    def _start_new(self, running: list[_MpiPending]) -> bool:
        started = False
        while self._todo:
            pending = self._todo.popleft()
            try:
                pending.request = pending.start()
                running.append(pending)
            except Exception as error:  # an MPI error belongs to whoever waits for the message
                pending.error = error
                pending.over.set()
            pending.start = None
            started = True
        return started

    def _collect(self, running: list[_MpiPending]) -> bool:
        """Take out what is over, one after the other: of several at once an error would not say whose it is."""
        before = len(running)
        while running:
            try:
                index, is_over = self._testany([pending.request for pending in running])
                over = [running.pop(index)] if is_over else []
            except Exception as error:
                # MPI has let go of what failed, and of nothing else; where of nothing, the error is about all.
                over = [pending for pending in running if not pending.request] or list(running)
                running[:] = [pending for pending in running if pending not in over]
                for pending in over:
                    pending.error = error
            if not over:
                break
            for pending in over:
                pending.over.set()
        return len(running) < before

    def _cancel(self, pending: _MpiPending) -> None:
        pending.error = LinkError("the connection was closed")
        try:
            pending.request.Cancel()
            pending.request.Free()
        except Exception as error:
            pending.error = error
        pending.over.set()
