"""The first failure of a rank: who it was, how it is worded, and who is told.

::

    1. begin    nothing new starts; what runs runs out
    2. who      if a peer seems lost: addresses, and a roll-call of at most WHO_S
    3. settle   the error is kept, and every future gets it: DDP goes on, and raises
    4. log it
    5. tell     the other ranks, by datagram

Steps 2 to 5 run on a thread of their own. None of them waits for the job's store, a collective or a peer.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Mapping

from espresso.comm.alarm import Alarm, Answer, Progress
from espresso.comm.errors import EspressoError, PeerError
from espresso.comm.execute.lanes import Node
from espresso.comm.parameter_server import Link

logger = logging.getLogger("espresso")

_SIGNS_OF_A_LOST_PEER = (
    "Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "caused pair closure",
)  # fmt: skip

LOST_S = 0.5
"""For the roll-call after a connection was closed: Gloo closes it before the rank at its end can speak."""

WHO_S = 1.5
"""For a roll-call in all: more than a busy rank that lives takes to answer."""

_NOTICE_S = 1.0
"""How long a lost connection waits for a server to say whose it was."""

_LEAVE_S = 1.5
"""How long closing waits for the others to be told."""


class StalledError(EspressoError):
    """Nothing went on for too long, and nobody said why."""


class LostRankError(EspressoError):
    """A message between iterations did not arrive; the text says whose fault it seems to be."""


def worded(error: BaseException) -> str:
    """The error without Gloo's source lines and well-meant advice; the log has it in full."""
    text = re.sub(r"\[\S+\.(cc|cpp|h):\d+\] ", "", str(error))
    return f"{type(error).__name__}: {text.partition('. This is typically caused')[0]}"


class Failure:
    """What becomes of the first error.

    Args:
        rank: this rank.
        rank_in: the rank whose address an error names.
        alarm: to ask and to tell the others.
        servers: they know too when a worker is gone.
        progress: how far this rank is.
        release: gives every open future the error.
    """

    def __init__(
        self,
        rank: int,
        rank_in: Callable[[str], int | None],
        alarm: Alarm,
        servers: Link | None,
        progress: Callable[[], Progress],
        release: Callable[[EspressoError], None],
    ) -> None:
        self._rank, self._rank_in, self._alarm, self._servers = rank, rank_in, alarm, servers
        self._progress, self._release = progress, release
        self._settled = threading.Event()
        self._threads: list[threading.Thread] = []
        self.begun = False
        self.error: EspressoError | None = None

    def begin(self, error: BaseException, node: Node | None, step: int) -> None:
        """Take the first error of all. Called once; returns at once."""
        self.begun = True
        what = str(error).strip().rstrip(".") if isinstance(error, EspressoError) else worded(error).strip().rstrip(".")
        where = f"iteration {step}" + ("" if node is None else f", {node.label()}")
        told = isinstance(error, PeerError)  # by a rank that knew more
        asks = not isinstance(error, LostRankError)
        asks &= isinstance(error, StalledError) or any(sign in what for sign in _SIGNS_OF_A_LOST_PEER)
        if told or not asks:
            self._settle(error, where, what, "")
            self._apart(lambda: None if told else self._alarm.ring(f"{what}."))
        else:
            self._apart(lambda: self._find_out(error, where, what))

    def wait(self, error: EspressoError) -> EspressoError:
        """The first error once it is worded; ``error`` if that is not to be."""
        self._settled.wait(WHO_S + _NOTICE_S + 1.0 if self.begun else 0.0)
        return error if self.error is None else self.error

    def explain(self, what: str, error: Exception) -> EspressoError:
        """An error of the library outside an iteration, with whose it was; the others are told."""
        text = f"{what}: {worded(error).strip().rstrip('.')}."
        if any(sign in text for sign in _SIGNS_OF_A_LOST_PEER):
            text += self._who(text)
        self.tell(text)
        return LostRankError(text)

    def look(self, what: str) -> None:
        """A roll-call outside an iteration.

        Raises:
            LostRankError: a rank is silent, or failed.
        """
        answers = self._alarm.roll_call(WHO_S)
        if self._alarm.silent(answers) or any(answer.failure for answer in answers.values()):
            text = f"{what}:{self._said_of(None, answers)}"
            self.tell(text)
            raise LostRankError(text)

    def tell(self, text: str) -> None:
        """Let the others know of something that is no error here."""
        self._apart(lambda: self._alarm.ring(text))

    def close(self) -> None:
        """Leave the others a moment to hear."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LEAVE_S)

    def _apart(self, job: Callable[[], None]) -> None:
        thread = threading.Thread(target=job, name="espresso-failure", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends
            job()
        else:
            self._threads.append(thread)

    def _find_out(self, error: BaseException, where: str, what: str) -> None:
        hint = ""
        try:
            hint = self._who(what)
        except Exception:
            logger.debug("could not find out whose failure it was", exc_info=True)
        finally:
            self._settle(error, where, what, hint)
        self._alarm.ring(f"{what}.{hint}")

    def _settle(self, error: BaseException, where: str, what: str, hint: str) -> None:
        # DDP puts "Unable to cast " before the text and " to Tensor" behind it.
        text = f"espresso on rank {self._rank} failed in {where}: {what}.{hint} DDP has no averaged gradient to convert"
        wrapped = EspressoError(text)
        wrapped.__cause__ = error
        self.error = wrapped
        try:
            self._release(wrapped)
        finally:
            self._settled.set()
            logger.error("%s", text, exc_info=error)

    # -- who it was --------------------------------------------------------------------------------

    def _who(self, what: str) -> str:
        """Whose failure it is, as far as addresses, the other ranks and servers tell."""
        lost = self._rank_in(what)
        answers = self._alarm.roll_call(LOST_S)
        if set(self._alarm.silent(answers)) - {lost}:  # the one at the other end may have left because of another
            answers |= self._alarm.roll_call(WHO_S - LOST_S)
        hint = self._said_of(lost, answers)
        notice = None if self._servers is None else self._servers.wait_for_notice(_NOTICE_S)
        if notice is None:
            return hint
        if str(notice) in what:  # it has been said who is gone
            return "" if lost is None else hint
        return f"{hint} {str(notice).rstrip('.')}."

    def _said_of(self, lost: int | None, answers: Mapping[int, Answer]) -> str:
        failed = self._alarm.heard() | {rank: answer.failure for rank, answer in answers.items() if answer.failure}
        silent = [rank for rank in self._alarm.silent(dict(answers)) if rank != lost]
        if lost in failed:
            hint = f" That is rank {lost}, which failed first: {_ended(failed[lost])}"
        elif lost is not None and lost not in answers:
            hint = f" That is rank {lost}: it died, or left because of an error of its own."
        else:
            hint = "" if lost is None else f" That is rank {lost}, which fails too."
        if silent:
            return f"{hint} {_ranks(silent)} not answer: stopped, dead, or not to be reached from rank {self._rank}."
        first = next((rank for rank in failed if rank != lost), None)
        if first is not None and lost not in failed:
            return f"{hint} Rank {first} failed first: {_ended(failed[first])}"
        return hint or self._behind({rank: answer.progress for rank, answer in answers.items()})

    def _behind(self, progress: Mapping[int, Progress]) -> str:
        """Everybody lives: who has come least far?"""
        mine = self._progress()
        least = min(progress.values(), default=mine)
        if least >= mine:
            return " Another rank died, hangs or left: look for the first error in the other ranks' logs."
        ranks = _ranks([rank for rank, theirs in progress.items() if theirs == least], "is", "are")
        if least.iteration < mine.iteration or not least.num_buckets:
            return f" {ranks} behind: iteration {mine.iteration} has not begun there."
        if least.num_buckets < mine.num_buckets:
            counts = f"{least.num_buckets} buckets of iteration {mine.iteration}, here {mine.num_buckets}"
            return f" {ranks} behind: backward has handed over {counts}."
        return f" {ranks} behind, with all buckets of iteration {mine.iteration}: a task hangs there."


def _ranks(ranks: Collection[int], one: str = "does", many: str = "do") -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"Rank {names} {one}" if len(ranks) == 1 else f"Ranks {names} {many}"


def _ended(text: str) -> str:
    return text.strip().rstrip(".") + "."
