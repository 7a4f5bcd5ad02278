"""A link that hides behind computing, looked at now and then: it may have become faster, and no step tells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from espresso.live.change import FASTER, Cause, Change, Finding
from espresso.live.patience import MUST_GAIN
from espresso.live.watch import LEAST_US, MANY, WINDOW, Vitals

SHOWS_US = 3_000.0
"""Soundings that take less are alike: they, and what they compete with for a core, take turns of some milliseconds."""

SHARE, AGE = 0.01, 2.5
"""Of the wall time what soundings may take, and at first more: a strategy that has been in use for so many steps has
had ``AGE`` times the logarithm of them taken up by soundings (what has lasted for long is supposed to last)."""

CONFIRMED = 2
"""A link that is ``FASTER`` than it usually was, in so many soundings in a row, is looked into: once it may have been a
token bucket that happened to be full."""

FEW, APART = 4, 10
"""Soundings that tell what a strategy's link takes, and steps between later ones at least: what disturbs one would else
disturb them all."""


class Soundings:
    """Of one strategy after another. All ranks make the same calls with the same figures.

    A sounding is a gather for which nobody waits. It holds up what else is on the link, so what it costs is what it
    takes, times the part of a step in which the link is in use, and at least what it takes of a core.
    (Not what windows with one take beyond others, which tells little: by a script, where a sounding cost 5 ms and
    made-up steps of 4 ms moved by a fifth, sixteen windows told 1 to 5 ms, give or take 1 to 3.)

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
        """Whether to begin one; ``rows`` are the ranks' latest window."""
        return step >= self._next and _codec_us(rows) > MUST_GAIN * _step_us(rows)

    def take(self, step: int, rows: Sequence[Vitals]) -> tuple[Change | None, float]:
        """What was found in a window with a sounding of every rank, and what that has cost."""
        # Whoever comes last waits for the link alone.
        link_us, step_us = min(row.link for row in rows), _step_us(rows)
        cost_us = max(link_us * min(max(row.wire for row in rows) / step_us, 1.0), LEAST_US)
        now_us = max(link_us, SHOWS_US)
        self._first = step if self._first is None else self._first
        age = step - self._first + WINDOW
        steps = math.ceil(min(age / AGE, 1 / SHARE) * cost_us / step_us)
        usual_us = median(self._seen_us or [now_us])
        self._next = step + (max(steps, APART) if len(self._seen_us) + 1 >= FEW else 0)
        if len(self._seen_us) < FEW or usual_us / FASTER < now_us < FASTER * usual_us:
            self._seen_us = [*self._seen_us, now_us][:MANY]
            self._last, self._found = step, 0
            return None, cost_us
        side = 1 if now_us < usual_us else -1
        self._found = side if side * self._found < 0 else side + self._found
        if abs(self._found) < CONFIRMED:
            self._next = step if side > 0 else self._next  # a faster one is due at once
            return None, cost_us
        if side < 0:
            self._seen_us, self._last, self._found = [now_us], step, 0
            return None, cost_us
        compute_us, saves = max(row.compute for row in rows), _codec_us(rows)
        findings = (Finding(Cause.LINK, now_us / usual_us),)
        return Change(findings, self._last, (step_us, step_us), (compute_us,) * 2, saves, saves), cost_us


def _step_us(rows: Sequence[Vitals]) -> float:
    return max(max(row.step for row in rows), 1.0)


def _codec_us(rows: Sequence[Vitals]) -> float:
    return max(row.codec for row in rows)
