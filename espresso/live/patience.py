"""When it pays to look again, and to switch: the budgets of deciding while a job runs."""

from __future__ import annotations

import math

from espresso.live.watch import Change

SUPPOSED_US = 150_000.0
"""What the first turn is supposed to take."""

EARNED = 0.01
"""Of the wall time: what may go to a turn before waiting has cost as much, up to what one takes."""

REST = 10
"""Steps after a turn in which no other begins."""

MOST_DOUBLINGS = 3
"""Of the price of a turn, one for each in a row that brought nothing, for changes no greater than those were."""

MUST_GAIN = 0.05
"""Another strategy is taken for at least this part of a step, or if it is as fast and compresses less."""


class Patience:
    """Remembers what turns cost and brought. All ranks give it the same figures.

    A turn begins once waiting for it may have cost as much as it costs itself: then both together are never more than
    twice the cheaper one, however long the change lasts (the rule of whoever rents skis). A severe change of steps is
    looked into at once, as far as the job has earned that: the first one is, and time goes towards the next after a
    turn that brought nothing.
    """

    def __init__(self) -> None:
        self._idle_turns = self._counted = self._rests_until = 0
        self._cost_us, self._waited_us = SUPPOSED_US, 0.0
        self._severity = self._idle_severity = 0.0
        self._earned_us, self._price_us = SUPPOSED_US, 0.0

    def permits(self, change: Change, step: int) -> bool:
        """Whether a change is looked into: what it may have cost by now is the price, less what was earned."""
        self._waited_us += change.at_stake_us * (step - max(change.since, self._counted))
        passed_us = change.step_us[0] * (step - self._counted)
        self._earned_us = min(self._earned_us + EARNED * passed_us, self._cost_us)
        self._counted = step
        doublings = self._idle_turns if change.severity <= self._idle_severity else 0
        self._severity, self._price_us = change.severity, self._cost_us * 2**doublings
        earned_us = self._earned_us if change.is_severe and not change.hidden_us else 0.0
        return self._waited_us + earned_us >= self._price_us and step >= self._rests_until

    def took(self, step: int, cost_us: float, *, brought: bool) -> None:
        """A turn is over: what it cost beyond steps of the strategy that stays, and whether another is in use now."""
        if brought:
            self._idle_turns, self._idle_severity = 0, 0.0
        else:
            self._earned_us -= min(max(self._price_us - self._waited_us, 0.0), self._earned_us)
            self._idle_turns = min(self._idle_turns + 1, MOST_DOUBLINGS)
            self._idle_severity = max(self._idle_severity, self._severity)
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
        if losses_less and gain_us >= 0:
            return 0.0
        return price_us / gain_us if is_clear and gain_us > MUST_GAIN * ours_us else math.inf
