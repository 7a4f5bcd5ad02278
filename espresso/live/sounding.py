"""A link that hides behind computing, looked at now and then: it may have become faster, and no step tells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from espresso.live.patience import MUST_GAIN
from espresso.live.watch import LEAST_US, MANY, WINDOW, Cause, Change, Finding, Vitals

SHARE, AGE = 0.005, 2.5
"""Of the wall time what soundings may take, and at first more: a strategy that has been in use for so many steps has
had ``AGE`` times the logarithm of them taken up by soundings (what has lasted for long is supposed to last)."""

FASTER, CONFIRMED = 2.0, 2
"""A link that is so many times faster than it usually was, in so many soundings in a row, is looked into: once it may
have been a token bucket that happened to be full."""

RARELY = 8
"""So many times rarer where the link is so fast that nothing would show: first it has to become slower, and strategies
that send little do not notice that either."""

FEW, APART = 4, 10
"""Soundings that tell what a strategy's link takes, and steps between them at least: what disturbs one would else
disturb them all."""


class Soundings:
    """Of one strategy after another. All ranks make the same calls with the same figures.

    What encoders take is what a strategy that sends more may save, however fast the link is: where that is little,
    nobody looks. A link that is twice as slow, twice in a row, is another one, which may become faster again.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Another strategy is in use, or the link was measured: what it took before says nothing."""
        self._seen_us: list[float] = []
        self._first: int | None = None
        self._next = self._last = self._found = 0

    def is_due(self, step: int, rows: Sequence[Vitals]) -> bool:
        """Whether to take one; ``rows`` are the ranks' latest window."""
        return step >= self._next and _codec_us(rows) > MUST_GAIN * _step_us(rows)

    def take(self, step: int, rows: Sequence[Vitals], link_us: float, cost_us: float) -> Change | None:
        """What was found: what an exchange takes on the slowest link, and what finding out did."""
        now_us = max(link_us, LEAST_US)
        self._first = step if self._first is None else self._first
        age = step - self._first + WINDOW
        steps = math.ceil(min(age / AGE, 1 / SHARE) * cost_us / max(_step_us(rows), 1.0))
        usual_us = median(self._seen_us or [now_us])
        self._next = step + max(steps * (1 if usual_us > FASTER * LEAST_US else RARELY), APART)
        if len(self._seen_us) < FEW or usual_us / FASTER < now_us < FASTER * usual_us:
            self._seen_us = [*self._seen_us, now_us][:MANY]
            self._last, self._found = step, 0
            return None
        side = 1 if now_us < usual_us else -1
        self._found = side if side * self._found < 0 else side + self._found
        if abs(self._found) < CONFIRMED:
            self._next = step if side > 0 else self._next  # a faster one is due at once
            return None
        if side < 0:
            self._seen_us, self._last, self._found = [now_us], step, 0
            return None
        step_us, compute_us, saves = _step_us(rows), max(row.compute for row in rows), _codec_us(rows)
        findings = (Finding(Cause.LINK, now_us / usual_us),)
        return Change(findings, self._last, (step_us, step_us), (compute_us,) * 2, saves, saves)


def _step_us(rows: Sequence[Vitals]) -> float:
    return max(row.step for row in rows)


def _codec_us(rows: Sequence[Vitals]) -> float:
    return max(row.codec for row in rows)
