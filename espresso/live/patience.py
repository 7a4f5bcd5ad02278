"""When it pays to look again, and to switch: the budgets of deciding while a job runs."""

from __future__ import annotations

import math

from espresso.live.watch import Change

QUIET_SHARE = 0.02
"""Of the wall time: the most that turns which change nothing may take."""

SUPPOSED_US = 300_000.0
"""What the first turn is supposed to take."""

SEVERE = math.log(1.3)
"""A change by which steps take this factor is looked into whatever earlier turns cost, after a ``REST``,"""

FALSE_ALARMS = 2
"""unless so many turns in a row found that nothing had changed."""

DRASTIC = 2.0
"""Steps that take so many times longer wait for no more than one ``REST``."""

REST = 10
"""Steps after a turn in which no other begins, doubled by every turn of late,"""

FORGET = 100
"""of which one is forgotten after so many steps."""

MOST_DOUBLINGS = 8

MUST_GAIN = 0.05
"""Another strategy is taken for at least this part of a step, or if it is as fast and compresses less."""


class Patience:
    """Remembers what turns cost and brought. All ranks give it the same figures.

    Attributes:
        rest_until: the step before which no turn begins.
    """

    def __init__(self) -> None:
        self.rest_until = 0
        self._quiet_until: float | None = None
        self._idle_turns = self._turns_of_late = 0
        self._last = self._counted = 0
        self._cost_us, self._lost_us = SUPPOSED_US, 0.0

    def permits(self, change: Change, step: int) -> bool:
        """Whether a change is looked into: a severe one after a rest, any within the budget.

        And a severe one by which as much time was lost as the last turn took: to look costs no more than that.
        """
        is_severe = change.severity >= SEVERE
        at_once = is_severe and self._idle_turns < FALSE_ALARMS
        before_us, now_us = change.step_us
        if at_once and now_us >= DRASTIC * before_us:
            return step >= min(self.rest_until, self._last + REST)
        quiet_until = self._quiet_until
        if quiet_until is None:
            quiet_until = SUPPOSED_US / QUIET_SHARE / max(before_us, 1.0)
        if step >= (self.rest_until if at_once else max(quiet_until, self.rest_until)):
            return True
        if not is_severe:
            return False
        self._lost_us += max(now_us - before_us, 0.0) * (step - max(change.since, self._counted))
        self._counted = step
        return self._lost_us > self._cost_us and step >= self._last + REST

    def took(self, step: int, cost_us: float, step_us: float, *, was_real: bool) -> None:
        """A turn is over: what it cost beyond steps of the strategy that stays, and whether anything had changed."""
        self._idle_turns = 0 if was_real else self._idle_turns + 1
        forgotten = (step - self._last) // FORGET
        self._turns_of_late = min(max(self._turns_of_late - forgotten, 0) + 1, MOST_DOUBLINGS)
        self._last = self._counted = step
        self._cost_us, self._lost_us = cost_us, 0.0
        self.rest_until = step + REST * 2**self._turns_of_late
        # What was spent is earned again before the next turn on a mere suspicion.
        self._quiet_until = max(self._quiet_until or 0.0, step) + cost_us / QUIET_SHARE / max(step_us, 1.0)

    @staticmethod
    def pays_after(ours_us: float, theirs_us: float, *, losses_less: bool, noise: float, price_us: float) -> float:
        """Steps that a condition has to have lasted before a switch pays; infinity: it never does.

        A condition is supposed to last as long again: what a switch gains until then is what it costs.

        Args:
            losses_less: the other compresses less.
            noise: the least factor, as a logarithm, that the race could tell.
            price_us: of switching, there and back.
        """
        gain_us = ours_us - theirs_us
        if losses_less and gain_us >= 0:
            return 0.0
        clear = gain_us > MUST_GAIN * ours_us and math.log(ours_us / theirs_us) > noise
        return price_us / gain_us if clear else math.inf
