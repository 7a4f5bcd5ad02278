"""Whose failure it is: what the alarm, addresses in errors and parameter servers tell, in words."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch.distributed as dist

from espresso.comm.alarm import Alarm, Answer, Progress
from espresso.comm.errors import EspressoError, LostRankError

logger = logging.getLogger("espresso")

LOST_S = 0.5
"""For the roll-call after a connection was closed: Gloo closes it before the rank at its end can speak."""

WHO_S = 1.5
"""For a roll-call in all: more than a busy rank that lives takes to answer."""

NOTICE_S = 1.0
"""How long a lost connection waits for a server to say whose it was."""

_LEAVE_S = 1.5
"""How long closing waits for the others to be told, from then on."""


_SIGNS_OF_A_LOST_PEER = (
    "Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "caused pair closure",
)  # fmt: skip


def lost_peer(text: str) -> bool:
    """Whether an error of the library speaks of a connection that was lost, or of a peer that hangs."""
    return any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)


def is_of_a_collective(error: RuntimeError) -> bool:
    """Whether the library raised it, of a peer that it lost; a data loader may time out too."""
    return lost_peer(str(error)) and (isinstance(error, dist.DistError) or "gloo/" in str(error))


def without_advice(error: BaseException) -> str:
    """What an error says, without Gloo's source lines and well-meant advice; the log has it in full."""
    return re.sub(r"\[\S+\.(cc|cpp|h):\d+\] ", "", str(error)).partition(". This is typically caused")[0]


def worded(error: BaseException) -> str:
    """The same for the middle of a sentence, with the error's kind."""
    return f"{type(error).__name__}: {without_advice(error).strip().rstrip('.')}"


class Servers(Protocol):
    """They know too when a worker is gone."""

    def wait_for_notice(self, timeout_s: float) -> EspressoError | None:
        """What a server says of a failure, if one speaks in time."""
        ...


class Witness:
    """Knows how the other ranks are, apart from collectives.

    Args:
        rank: this rank.
        alarm: to ask and to tell the others.
        rank_in: the rank whose address an error names.
        names: what people call the ranks: by their numbers in the world, where these are some of it.

    Attributes:
        servers: parameter servers, where the job has some.
    """

    def __init__(
        self, rank: int, alarm: Alarm, rank_in: Callable[[str], int | None], names: Sequence[int] = ()
    ) -> None:
        self._rank, self._alarm, self._rank_in, self._names = rank, alarm, rank_in, names
        self._threads: list[tuple[threading.Thread, float]] = []  # and until when they are waited for
        self.servers: Servers | None = None

    def explain(self, what: str, error: Exception) -> EspressoError:
        """An error of the library outside an iteration, with whose it was; the others are told."""
        text = f"{what}: {worded(error)}."
        text += self.who(text)
        self.tell(text)
        return LostRankError(text)

    def glance(self) -> list[int]:
        """Who is silent during a long wait, and may answer again when the wait is over."""
        return self._alarm.silent(self._alarm.roll_call(WHO_S))

    def look(self, what: str, were_silent: Collection[int] = ()) -> None:
        """A roll-call outside an iteration, which failed if ranks ``were_silent`` meanwhile.

        Raises:
            LostRankError: a rank is silent, left or failed, or was silent.
        """
        answers = self._alarm.roll_call(WHO_S)
        text = ""
        if self._alarm.missing(answers) or any(answer.failure for answer in answers.values()):
            text = f"{what}:{self._said_of(None, answers)}"
        elif were_silent:
            text = f"{what}: {_ranks(map(self._name, were_silent), 'was', 'were')} silent meanwhile: stopped, or"
            text += f" not to be reached from rank {self._name(self._rank)}."
        if text:
            self.tell(text)
            raise LostRankError(text)

    def tell(self, text: str) -> None:
        """Let the others know that this rank fails, and of what."""
        self._alarm.announce(text)
        self.apart(self._alarm.insist)

    def apart(self, job: Callable[[], None], seconds: float = _LEAVE_S) -> None:
        """Run it on a thread of its own, which closing leaves so long from now."""
        thread = threading.Thread(target=job, name="espresso-failure", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends
            job()
        else:
            self._threads.append((thread, time.monotonic() + seconds))

    def close(self) -> None:
        """Leave the others a moment to hear."""
        for thread, until in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))

    def who(self, what: str) -> str:
        """Whose failure it is, as far as addresses, the other ranks and servers tell."""
        lost = self._rank_in(what)
        answers = self._alarm.roll_call(LOST_S)
        if set(self._alarm.silent(answers)) - {lost}:  # the one at the other end may have left because of another
            answers |= self._alarm.roll_call(WHO_S - LOST_S)
        hint = self._said_of(lost, answers)
        notice = None if self.servers is None else self.servers.wait_for_notice(NOTICE_S)
        if notice is None:
            return hint
        if str(notice) in what:  # it has been said who is gone
            return "" if lost is None else hint
        return f"{hint} {str(notice).rstrip('.')}."

    def _said_of(self, lost: int | None, answers: Mapping[int, Answer]) -> str:
        """Who is to blame, the last one named at the root of it.

        A rank that failed said of what. Who says nothing at all died or hangs. Who only said that it leaves may have
        had to, because of another.
        """
        name, told = self._name, None if lost is None else self._name(lost)
        failed = self._alarm.failed() | {rank: answer.failure for rank, answer in answers.items() if answer.failure}
        silent = [rank for rank in self._alarm.silent(answers) if rank != lost]
        left = [rank for rank in self._alarm.left() if rank not in failed]
        if lost in failed:
            hint = f" That is rank {told}, which failed first: {_ended(failed[lost])}"
        elif lost in answers:
            hint = f" That is rank {told}, which fails too."
        elif lost in left:
            hint = f" That is rank {told}, which left."
        else:
            hint = "" if lost is None else f" That is rank {told}: it died, or left because of an error of its own."
        if silent:
            here = name(self._rank)
            return (
                f"{hint} {_ranks(map(name, silent))} not answer: stopped, dead, or not to be reached from rank {here}."
            )
        first = next((rank for rank in failed if rank != lost), None)
        if first is not None and lost not in failed:
            return f"{hint} Rank {name(first)} failed first: {_ended(failed[first])}"
        if left and (lost is None or lost in left):
            return f" That is rank {name(left[0])}: it left, at its end or because of an error of its own."
        return hint or self._behind({rank: answer.progress for rank, answer in answers.items()})

    def _name(self, rank: int) -> int:
        return self._names[rank] if self._names else rank

    def _behind(self, progress: Mapping[int, Progress]) -> str:
        """Everybody lives: who has come least far?"""
        mine = self._alarm.report()
        least = min(progress.values(), default=mine)
        if least >= mine:
            return " Another rank died, hangs or left: look for the first error in the other ranks' logs."
        ranks = _ranks([self._name(rank) for rank, theirs in progress.items() if theirs == least], "is", "are")
        if least.iteration < mine.iteration or not least.num_buckets:
            return f" {ranks} behind: iteration {mine.iteration} has not begun there."
        if least.num_buckets < mine.num_buckets:
            counts = f"{least.num_buckets} buckets of iteration {mine.iteration}, here {mine.num_buckets}"
            return f" {ranks} behind: backward has handed over {counts}."
        return f" {ranks} behind, with all buckets of iteration {mine.iteration}: a task hangs there."


def _ranks(ranks: Iterable[int], one: str = "does", many: str = "do") -> str:
    names = sorted(ranks)
    told = ", ".join(map(str, names))
    return f"Rank {told} {one}" if len(names) == 1 else f"Ranks {told} {many}"


def _ended(text: str) -> str:
    return text.strip().rstrip(".") + "."
