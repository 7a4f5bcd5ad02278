"""A few bytes now and then over connections to hosts far apart, so that a pause does not make them start again.

TCP takes back the window of a connection that sent nothing for longer than its retransmission time-out, a round trip
and a fifth of a second, down to ten segments: the next message takes round trips more. What is sent here goes over the
very connections that exchanges use, as messages from rank to rank with a tag of their own.

Nobody waits for a beat: it has arrived when the number in it is there. So a rank that stopped holds up no other. None
is sent while a job gets on with its exchanges.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from espresso.comm.member import BEAT_TAG, Member

EVERY_S = 0.1
"""Less than the least retransmission time-out, with time for a thread that wakes late."""

MOST_UNHEARD = 4
"""Beats that are sent to a rank of which nothing is heard; of one that was stopped, say."""

_NOTHING = -1


class Beats:
    """Sends them over the connections of some groups to all their other ranks, until it is stopped; all ranks do.

    To be let go of when the groups are: until then the library may write to what is received here.

    Args:
        members: the groups, seen from this rank.
        progress: changes whenever something is exchanged.
    """

    def __init__(self, members: Sequence[Member], progress: Callable[[], object]) -> None:
        self._progress = progress
        self.lines = [Line(each.group, peer) for each in members for peer in range(each.size) if peer != each.index]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="espresso-beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more, and hold no group any longer."""
        self._stopped.set()
        self._thread.join()
        for line in self.lines:
            line.group = None

    def _run(self) -> None:
        seen = self._progress()
        try:
            while not self._stopped.wait(EVERY_S):
                before, seen = seen, self._progress()
                for line in self.lines if seen == before else ():
                    line.beat()
        except RuntimeError:
            return  # a connection was lost: whoever needs it says so


class Line:
    """One connection to one rank. A beat tells how many of that rank's have arrived.

    Attributes:
        heard, sent: beats, so far.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self._receiving: Any = None  # (works go before what they write to or read from)
        self._sending: deque[tuple[torch.Tensor, Any]] = deque()
        self._theirs = torch.empty(0)
        self.group, self._peer = group, peer
        self.heard = self.sent = 0
        self._listen()

    def beat(self) -> None:
        """Take what has come, and send one. Never blocks."""
        known = int(self._theirs)
        if known != _NOTHING:
            self.heard += 1
            self._listen()
            while len(self._sending) > self.sent - known:
                self._sending.popleft()
        if known != _NOTHING or len(self._sending) < MOST_UNHEARD:
            mine = torch.tensor([self.heard])
            self._sending.append((mine, self.group.send([mine], self._peer, BEAT_TAG)))
            self.sent += 1

    def _listen(self) -> None:
        theirs = torch.tensor([_NOTHING])
        self._receiving = self.group.recv([theirs], self._peer, BEAT_TAG)
        self._theirs = theirs
