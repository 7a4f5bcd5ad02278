"""The first failure of a rank: who it was, how it is worded, and who is told.

::

    1. begin    nothing new starts; what runs runs out
    2. who      if a peer seems lost: addresses, and a roll-call of at most WHO_S
    3. settle   the others are told, once; the error is kept, and every future gets it: DDP goes on, and raises
    4. log it
    5. insist   who has not heard it is told again
    6. leave    what is left for people is written down

Steps 2, 5 and 6 run on a thread of their own, and 3 and 4 too where a peer seems lost. None of 2 to 5 waits for the
job's store, a collective or a peer; 6 may wait for a disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from espresso.comm.alarm import Alarm
from espresso.comm.errors import EspressoError, LostRankError, PeerError
from espresso.comm.execute.lanes import Node
from espresso.comm.witness import NOTICE_S, WHO_S, Witness, lost_peer, worded

logger = logging.getLogger("espresso")

LEAVE_S = 10.0
"""For all of this, where the process ends meanwhile: a full record takes 1.5 s to write, and a disk may hang."""


class StalledError(EspressoError):
    """Nothing went on for too long, and nobody said why."""


class Failure:
    """What becomes of the first error.

    Args:
        rank: this rank.
        alarm: to tell the others.
        witness: knows whose failure it is.
        release: gives every open future the error.
        ending: of the error's text, for what PyTorch puts behind it.

    Attributes:
        on_log: called once the error was logged and everybody told: what is left for people is written down.
    """

    def __init__(
        self, rank: int, alarm: Alarm, witness: Witness, release: Callable[[EspressoError], None], ending: str = ""
    ) -> None:
        self._rank, self._alarm, self._witness, self._release = rank, alarm, witness, release
        self._ending = ending
        self._settled = threading.Event()
        self.on_log: Callable[[], None] = lambda: None
        self.error: EspressoError | None = None

    def begin(self, error: BaseException, node: Node | None, step: int) -> None:
        """Take the first error of all. Called once; returns at once."""
        what = str(error).strip().rstrip(".") if isinstance(error, EspressoError) else worded(error)
        where = f"iteration {step}" + ("" if node is None else f", {node.label()}")
        asks = not isinstance(error, LostRankError | PeerError)  # those have been asked for, or a rank that knew more
        asks &= isinstance(error, StalledError) or lost_peer(what)
        if asks:
            self._witness.apart(lambda: self._find_out(error, where, what), LEAVE_S)
        else:
            self._settle(error, where, what, "")
            self._witness.apart(self._insist, LEAVE_S)

    def wait(self, error: EspressoError) -> EspressoError:
        """The first error, once ``begin`` has worded it; ``error`` if that takes too long."""
        self._settled.wait(WHO_S + NOTICE_S + 1.0)
        return error if self.error is None else self.error

    def _find_out(self, error: BaseException, where: str, what: str) -> None:
        hint = ""
        try:
            hint = self._witness.who(what)
        except Exception:
            logger.debug("could not find out whose failure it was", exc_info=True)
        finally:
            self._settle(error, where, what, hint)
        self._insist()

    def _insist(self) -> None:
        try:
            self._alarm.insist()
        finally:
            self.on_log()

    def _settle(self, error: BaseException, where: str, what: str, hint: str) -> None:
        text = f"espresso on rank {self._rank} failed in {where}: {what}.{hint}{self._ending}"
        wrapped = EspressoError(text)
        wrapped.__cause__ = error
        self.error = wrapped
        try:
            # Before anybody gets the error: the process may end with it, and a rank that was not told would take
            # this one for the first to fail.
            self._alarm.announce(f"{what}.{hint}")
            self._release(wrapped)
        finally:
            self._settled.set()
            logger.error("%s", text, exc_info=error)
