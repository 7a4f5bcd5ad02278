"""What connections to hosts far apart need while a job runs: a few bytes in pauses, and bursts that are spread.

TCP takes back the window of a connection that sent nothing for longer than its retransmission time-out, a round trip
and a fifth of a second, down to ten segments: the next message takes round trips more. So something is sent in pauses:
messages from rank to rank with a tag of their own, over the very connections that exchanges use. Nobody waits for such
a beat: it has arrived when the number in it is there, and a rank that stopped holds up no other. None is sent while a
job gets on with its exchanges.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from espresso.comm.connections import spread_bursts
from espresso.comm.member import BEAT_TAG, Member

EVERY_S = 0.1
"""Less than the least retransmission time-out, with time for a thread that wakes late."""

MOST_UNHEARD = 4
"""Beats that are sent to a rank of which nothing is heard; of one that was stopped, say."""

_NOTHING = -1


class Upkeep:
    """A thread that does it, until it is stopped; on all ranks. To be let go of when the groups are, not before: until
    then the library may write to what is received here.

    Args:
        members: the groups whose connections get beats, seen from this rank.
        ends: of the connections whose bursts are spread: local ports by address.
        progress: changes whenever something is exchanged.
    """

    def __init__(
        self,
        members: Sequence[Member],
        ends: Mapping[str, Collection[int]],
        progress: Callable[[], object],
    ) -> None:
        self._ends, self._progress = ends, progress
        self.lines = [Line(each.group, peer) for each in members for peer in range(each.size) if peer != each.index]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="espresso-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more, and hold no group any longer."""
        self._stopped.set()
        self._thread.join()
        for line in self.lines:
            line.group = None

    def _run(self) -> None:
        seen, times, lines = self._progress(), 0, self.lines
        while not self._stopped.wait(EVERY_S):
            before, seen, times = seen, self._progress(), times + 1
            try:
                for line in lines if seen == before else ():
                    line.beat()
            except RuntimeError:
                lines = []  # a connection was lost: whoever needs it says so
            if times & (times - 1) == 0:
                spread_bursts(self._ends)


class Line:
    """One connection to one rank. A beat tells how many of that rank's have arrived.

    Attributes:
        heard, sent: beats, so far.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self._receiving: Any = None  # (works go before what they write to or read from)
        self._sending: deque[tuple[torch.Tensor, Any]] = deque()
        self._theirs = torch.tensor([_NOTHING], device="cpu")
        self.group, self._peer = group, peer
        self.heard = self.sent = 0

    def beat(self) -> None:
        """Take what has come, and send one. Never blocks.

        Raises:
            RuntimeError: the connection is lost.
        """
        if self._receiving is None:
            self._listen()
        known = int(self._theirs)
        if known >= 0:  # its highest byte, which comes last, is there
            self.heard += 1
            self._listen()
            while len(self._sending) > self.sent - known:
                self._sending.popleft()
        if known >= 0 or len(self._sending) < MOST_UNHEARD:
            mine = torch.tensor([self.heard], device="cpu")
            self._sending.append((mine, self.group.send([mine], self._peer, BEAT_TAG)))
            self.sent += 1

    def _listen(self) -> None:
        theirs = torch.tensor([_NOTHING], device="cpu")
        self._receiving = self.group.recv([theirs], self._peer, BEAT_TAG)
        self._theirs = theirs
