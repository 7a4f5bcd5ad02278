"""Messages over MPI: non-blocking transfers, all of them made and completed by one thread.

One thread calls MPI, so that an MPI built without full thread support will do, and so that no caller spins: waiting
threads sleep on a condition, and the one that polls rests between rounds, longer the longer nothing happens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from espresso.comm.messages import Bytes
from espresso.comm.parameter_server.transport import Channel, LinkError, Pending

_REST_S = 20e-6
_LONGEST_REST_S = 1e-3


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


class MpiTransport:
    """Transfers over duplicates of a communicator.

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
        self._testsome = MPI.Request.Testsome
        self._todo: deque[_MpiPending] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._progress, name="espresso-mpi", daemon=True)
        self._thread.start()

    def send(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending:
        comm, rank = self._comms[channel], self._ranks[peer]
        return self._submit(lambda: comm.Isend([data, data.nbytes], rank, tag), peer)

    def receive(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending:
        comm, rank = self._comms[channel], self._ranks[peer]
        return self._submit(lambda: comm.Irecv([data, data.nbytes], rank, tag), peer)

    def _submit(self, start: Any, peer: int) -> Pending:
        if self._closed:
            raise LinkError(f"rank {peer}: the connection is closed", peer)
        pending = _MpiPending(start, peer)
        self._todo.append(pending)
        self._wake.set()
        return pending

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
                time.sleep(rest)
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
        try:
            done = self._testsome([pending.request for pending in running])
        except Exception as error:
            for pending in running:
                pending.error = error
                pending.over.set()
            running.clear()
            return True
        if not done:
            return False
        for index in done:
            running[index].over.set()
        gone = set(done)
        running[:] = [pending for index, pending in enumerate(running) if index not in gone]
        return True

    def _cancel(self, pending: _MpiPending) -> None:
        pending.error = LinkError("the connection was closed")
        try:
            pending.request.Cancel()
            pending.request.Free()
        except Exception as error:
            pending.error = error
        pending.over.set()
