"""When it pays to look again, and to switch: the budgets of deciding while a job runs."""

from __future__ import annotations

import math

from espresso.live.change import Change
from espresso.live.watch import WINDOW
from espresso.model.job import STEADY
from espresso.search.terms import NEAR

SUPPOSED_US = 250_000.0
"""What the first turn is supposed to take."""

EARNED, EARNED_STEPS = 0.01, 1000
"""Of the wall time, at most of so many steps: what may go to a turn before waiting has cost as much, and to soundings.
A turn that costs more than was supposed, and one for steps twice as long, come on top."""

REST = 10
"""Steps after a turn in which no other begins."""

MOST_DOUBLINGS = 3
"""Of the price of a turn, one for each in a row that brought nothing, for changes of their kind and no greater."""

MUST_GAIN = STEADY
"""Another strategy is taken for at least this part of a step, or if it is as fast and compresses less: less than what
steady steps differ by is not told from noise."""


class Patience:
    """Remembers what turns cost and brought. All ranks give it the same figures.

    A turn begins once waiting for it may have cost as much as it costs itself: then both together are never more
    than twice the cheaper one, however long the change lasts (the rule of whoever rents skis). A change that is
    over has cost nothing towards the next one's. For a severe change of steps part of the price is there, as far as
    the job has earned that, and had not to pay for a turn that brought nothing. What is urgent
    (:attr:`.Change.is_urgent`) is looked into at once, and after turns that brought nothing for one price less. A
    strategy that owes more than it may is replaced at once; the next one that does, when the turn for the last one
    is ``EARNED`` of the time since.
    """

    def __init__(self) -> None:
        # Turns in a row that brought nothing, by kind, and the severest change of theirs.
        self._idle: dict[tuple[bool, bool], tuple[int, float]] = {}
        self._rests_until = 0
        self._counted = -EARNED_STEPS
        self._cost_us, self._waited_us = SUPPOSED_US, 0.0
        self._asked: Change | None = None
        self._earned_us = self._price_us = 0.0
        self._replaced, self._replaced_us = 0, 0.0

    def permits(self, change: Change, step: int) -> bool:
        """Whether a change is looked into: what it may have cost by now is the price, less what was earned."""
        self._asked = change
        if change.is_over_budget:  # no time is at stake
            earned_us = EARNED * change.step_us[0] * (step - self._replaced)
            return earned_us >= self._replaced_us and step >= self._rests_until
        if change.since > self._counted + WINDOW:  # steps were what they had been, in between
            self._waited_us = 0.0
        self._waited_us += change.at_stake_us * (step - max(change.since, self._counted))
        each_us = EARNED * change.step_us[0]
        self._earned_us = min(self._earned_us + each_us * (step - self._counted), each_us * EARNED_STEPS)
        self._counted = step
        idle_turns, severity = self._idle.get(change.kind, (0, 0.0))
        doublings = idle_turns if change.severity <= severity else 0
        self._price_us = self._cost_us * (2**doublings - change.is_urgent)
        earned_us = self._earned_us if change.is_severe else 0.0
        return self._waited_us + max(earned_us, 0.0) >= self._price_us and step >= self._rests_until

    def follows(self, change: Change) -> None:
        """A turn for this change begins at once behind another: if it brings nothing, that counts for its own kind."""
        self._asked, self._price_us = change, 0.0

    def sounded(self, cost_us: float) -> None:
        """A sounding is over, and what it cost is spent."""
        self._earned_us -= cost_us

    def took(self, step: int, cost_us: float, *, brought: bool) -> None:
        """A turn is over: what it cost beyond steps of the strategy that stays, and whether another is in use now."""
        if self._asked is not None and self._asked.is_over_budget:
            self._replaced, self._replaced_us = step, cost_us
        if brought:
            self._idle.clear()
        elif self._asked is not None:
            self._earned_us -= max(self._price_us - self._waited_us, 0.0)
            turns, severity = self._idle.get(self._asked.kind, (0, 0.0))
            self._idle[self._asked.kind] = min(turns + 1, MOST_DOUBLINGS), max(severity, self._asked.severity)
        self._counted, self._rests_until = step, step + REST
        self._cost_us, self._waited_us = cost_us, 0.0

    @staticmethod
    def pays_after(ours_us: float, theirs_us: float, *, losses_less: bool, is_clear: bool, price_us: float) -> float:
        """Steps that a condition has to have lasted before a switch pays; infinity: it never does.

        A condition is supposed to last as long again: what a switch gains until then is what it costs.

        Args:
            losses_less: the other compresses less.
            is_clear: the race could tell them apart.
            price_us: of switching, there and back.
        """
        gain_us = ours_us - theirs_us
        if losses_less and theirs_us <= NEAR * ours_us:
            return 0.0
        return price_us / gain_us if is_clear and gain_us > MUST_GAIN * ours_us else math.inf
