"""Word of a failure, and a roll-call: datagrams between the ranks, apart from all that training depends on.

::

    at the start      every rank opens a socket, and tells the others where it listens and by which secret
    roll-call         ASK to everybody ── ANSWER: how far that rank is, and of what it failed, if it did
    a rank failed     FAILED to everybody ── HEARD
    a rank leaves     LEFT to everybody ── HEARD

A thread answers, whatever the rank's other threads do. A rank whose process was stopped or whose host is gone does
not. Nothing here waits longer than it is told to: a datagram has no connection that could hang, and the job's
store, which runs on rank 0's host, is not asked. A step that goes well sends nothing.

A message, in network order: the receiver's secret (16 bytes), kind (u8), sender's rank (u32), number of the question
(u32), iteration (i64), buckets of it (i32), place in its order (i32), text (UTF-8, the rest). What does not begin
with the secret is dropped unread. A receipt has the kind that it is for in place of the question.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from espresso.comm.environment import local_address

logger = logging.getLogger("espresso")

SECRET_BYTES = 16
MAX_TEXT_BYTES = 1100
"""A message fits the smallest frame in use, and is not cut on its way."""

_MESSAGE = struct.Struct("!16sBIIqii")
_REPEAT_S = 0.1
START_S = 3.0
"""How long ranks that start together may take to hear each other."""

_TELL_S = 0.6
"""How long a failed rank repeats itself to those who have not heard it."""


class _Kind(IntEnum):
    ASK = 1
    ANSWER = 2
    FAILED = 3
    HEARD = 4
    LEFT = 5


@dataclass(frozen=True, order=True, slots=True)
class Progress:
    """How far a rank is, in an order that all ranks share.

    Attributes:
        iteration: its number; the coming one's between two.
        num_buckets: that backward has handed over in it.
        place: of its first unfinished task in the total order.
    """

    iteration: int = 0
    num_buckets: int = 0
    place: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says in a roll-call; ``failure`` is empty while it has none."""

    progress: Progress
    failure: str


class Alarm:
    """One rank's socket, and the thread that answers on it.

    Args:
        rank: in the job.

    Attributes:
        report: says how far this rank is.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.report: Callable[[], Progress] = Progress
        self._failure = ""
        self._failed: dict[int, str] = {}
        self._left: dict[int, None] = {}
        self._questions = itertools.count(1)  # asked from several threads
        self._news = threading.Condition()
        self._answers: dict[int, dict[int, Answer]] = {}
        self._acknowledged: dict[int, set[int]] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._stop, self._stopped = socket.socketpair()
        self._peers: list[tuple[tuple[str, int], bytes]] = []
        self._mute: frozenset[int] = frozenset()
        self._secret, address = os.urandom(SECRET_BYTES), local_address()
        try:
            self._socket.bind((address, 0))
        except OSError as error:  # no such address any more: nobody will hear of us, and training does not care
            logger.debug("no socket for alarms on %s: %s", address, error)
        self._socket.setblocking(False)
        self.card = [*self._socket.getsockname()[:2], self._secret.hex()]
        self._thread = threading.Thread(target=self._listen, name="espresso-alarm", daemon=True)
        self._thread.start()

    def meet(self, cards: Sequence[Any]) -> None:
        """Take everybody's ``card``, in rank order."""
        self._peers = [((host, port), bytes.fromhex(key)) for host, port, key in cards]

    def excuse(self, answers: Collection[int]) -> None:
        """Never accuse a rank that lives and yet did not answer: datagrams do not get through."""
        self._mute = self._others - frozenset(answers)
        if self._mute:
            logger.warning(
                "rank %d gets no answer from ranks %s over UDP (from %s); after a failure they cannot be asked how far"
                " they are", self._rank, ", ".join(map(str, sorted(self._mute))), self.card[0],
            )  # fmt: skip

    # -- asking and telling ------------------------------------------------------------------------

    def roll_call(self, patience_s: float) -> dict[int, Answer]:
        """What the other ranks answer; returns as soon as all have, or after ``patience_s``."""
        question, deadline = next(self._questions), time.monotonic() + patience_s
        answers = self._answers[question] = {}
        self._repeat(_Kind.ASK, question, "", answers, self._others - self._mute, deadline)
        with self._news:
            del self._answers[question]
        return dict(answers)

    def missing(self, answers: Collection[int]) -> frozenset[int]:
        """The ranks that did not answer, though they could be heard at the start."""
        return self._others - self._mute - frozenset(answers)

    def silent(self, answers: Collection[int]) -> list[int]:
        """Those of them that said nothing before either: neither that they fail nor that they leave."""
        return sorted(self.missing(answers) - self._failed.keys() - self._left.keys())

    def announce(self, text: str) -> None:
        """Tell the others that this rank fails, and of what: once, and without waiting."""
        self._failure = text
        for peer in self._others:
            self._send(peer, _Kind.FAILED, 0, text)

    def insist(self) -> None:
        """Say it again to those who have not heard it, for a moment."""
        self._tell(_Kind.FAILED, self._failure, self._others)

    def failed(self) -> dict[int, str]:
        """What other ranks said that they failed of, the first one first."""
        return dict(self._failed)

    def left(self) -> list[int]:
        """The ranks that said that they leave, the first one first."""
        return list(self._left)

    def forget(self) -> None:
        """What was told so far is over: somebody begins anew."""
        self._failure = ""
        for told in (self._failed, self._left, self._acknowledged):
            told.clear()

    def close(self) -> None:
        """Tell those who are still there that this rank answers no more, unless they know that it failed; end it."""
        if not self._failure and self._thread.is_alive():
            self._tell(_Kind.LEFT, "", self._others - self._mute - self._failed.keys() - self._left.keys())
        with suppress(OSError):  # a process that was forked since has this end too
            self._stop.shutdown(socket.SHUT_RDWR)
        self._stop.close()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    @property
    def _others(self) -> frozenset[int]:
        return frozenset(range(len(self._peers))) - {self._rank}

    def _tell(self, kind: _Kind, text: str, wanted: frozenset[int]) -> None:
        acknowledged = self._acknowledged.setdefault(kind, set())
        self._repeat(kind, 0, text, acknowledged, wanted, time.monotonic() + _TELL_S)

    def _repeat(
        self, kind: _Kind, question: int, text: str, replied: Any, wanted: frozenset[int], deadline: float
    ) -> None:
        """Send to those of ``wanted`` that have not ``replied``, until all have or it is too late.

        Who leaves as well may be gone before it could reply that it heard so of this rank.
        """
        gone = self._left if kind == _Kind.LEFT else {}
        while True:
            for peer in wanted - set(replied) - gone.keys():
                self._send(peer, kind, question, text)
            with self._news:
                now = time.monotonic()
                left = min(_REPEAT_S, deadline - now)
                all_know = self._news.wait_for(lambda: wanted <= set(replied) | gone.keys(), timeout=max(left, 0.0))
                if all_know or now >= deadline:
                    return

    def _send(self, peer: int, kind: _Kind, question: int, text: str) -> None:
        address, secret = self._peers[peer]
        progress = Progress() if kind in (_Kind.ASK, _Kind.HEARD) else self.report()
        head = (progress.iteration, progress.num_buckets, progress.place)
        # Of a text that is too long the end counts: it names the first of all failures.
        data = _MESSAGE.pack(secret, kind, self._rank, question, *head) + text.encode()[-MAX_TEXT_BYTES:]
        try:
            self._socket.sendto(data, address)
        except OSError as error:  # the network is down, or its queue is full: as good as lost
            logger.debug("no way to rank %d: %s", peer, error)

    # -- answering ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        watched = select.poll()
        for end in (self._socket, self._stopped):
            watched.register(end, select.POLLIN)
        while self._stopped.fileno() not in dict(watched.poll()):
            try:
                data = self._socket.recv(4096)
            except OSError:
                continue  # what an earlier datagram met on its way
            self._take(data)
        self._socket.close()
        self._stopped.close()

    def _take(self, data: bytes) -> None:
        """One message; whatever is not one of ours is dropped."""
        if len(data) < _MESSAGE.size or data[:SECRET_BYTES] != self._secret:
            return
        _, kind, rank, question, *progress = _MESSAGE.unpack_from(data)
        if rank not in self._others:
            return
        text = data[_MESSAGE.size :].decode(errors="replace")
        if kind == _Kind.ASK:
            self._send(rank, _Kind.ANSWER, question, self._failure)
            return
        if kind in (_Kind.FAILED, _Kind.LEFT):
            self._send(rank, _Kind.HEARD, kind, "")
        with self._news:
            if kind == _Kind.ANSWER and question in self._answers:
                self._answers[question][rank] = Answer(Progress(*progress), text)
            elif kind == _Kind.HEARD:
                self._acknowledged.setdefault(question, set()).add(rank)
            elif kind == _Kind.FAILED:
                self._failed.setdefault(rank, text)
            elif kind == _Kind.LEFT:
                self._left.setdefault(rank)
            self._news.notify_all()
