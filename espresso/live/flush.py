"""A flush: uncompressed steps that send all that is owed, until one that counts has."""

from __future__ import annotations

import logging

from espresso.comm.execute.assignment import Assignment, Record
from espresso.comm.execute.executor import Executor
from espresso.strategies import Strategy

logger = logging.getLogger("espresso")

MOST_FLUSHES = 100
"""Steps that a flush is waited for: a tensor that is not used has no gradient to send what it owes with."""


class Flush:
    """What is under way of it.

    Args:
        speaks: whether this rank warns.

    Attributes:
        assignment: what iterations run meanwhile; None while nothing is to be sent.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks, self._steps_left = speaks, 0
        self.assignment: Assignment | None = None

    def begin(self, plain: Strategy) -> None:
        """Have all that is owed sent from the next iteration on."""
        # One whose step is still to be judged goes on: the step is known by it.
        self.assignment, self._steps_left = self.assignment or Assignment(plain), MOST_FLUSHES

    def took(self, record: Record, executor: Executor) -> bool:
        """Take note of an iteration; whether it was one of the flush."""
        if record.assignment is not self.assignment:
            return False
        self._steps_left -= 1
        is_done = not executor.may_owe  # all that was owed was in a step that counts
        if is_done if executor.agree is None else executor.agree(is_done):
            self.assignment = None
        elif not self._steps_left:
            self.assignment = None
            self._tell_what_is_left(executor.owing)
        return True

    def _tell_what_is_left(self, owing: list[str]) -> None:
        """It has had no gradient in all these steps, or none that was finite."""
        if self._speaks:
            logger.warning(
                "%d steps after a flush some tensors have had no finite gradient to send with what they owe (%s); it"
                " goes with their next one, or is lost where espresso leaves",
                MOST_FLUSHES, ", ".join(owing[:3]) or "any of the model's",
            )  # fmt: skip
