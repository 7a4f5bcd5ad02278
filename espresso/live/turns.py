"""A turn of deciding again, after a change: its figures, what it tries and how, and what a planner remembers of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from espresso.compressors import create
from espresso.live.candidates import Candidate
from espresso.live.change import Change
from espresso.live.patience import Patience
from espresso.live.race import Arm, Race
from espresso.strategies import Strategy

TRY_STEPS, TRY_ROUNDS, MOST_ROUNDS, DROP = 4, 2, 5, 1.25
"""Of the race when something has changed: short blocks, more of them of the two that matter while their difference may
be noise, and who is this much slower than the fastest has only one."""

TRY_US, TRY_MOST = 40_000.0, 8
"""A first block is so long, of so many steps at the most: in fewer of them short ones run on what a card let gather
while the first steps of an arm made its buffers."""

SETTLES = 0.5
"""Of an arm's first block: its part that does not count. What is new to a job fills caches and touches its buffers."""

FAR_BEHIND = 2.0
"""The strategy in use needs no block where its steps take this many times the best prediction, and should; nor where
they are slower, and so is by this factor the link, as the turn measured it."""

MAY_WIN, SURELY_WINS = 1.1, 0.95
"""What is predicted to take up to this factor of the strategy in use is tried: after a severe change, and otherwise."""

DRIFT = math.log(1.25)
"""If the strategy in use takes so much longer or less in the race than when the turn began, and not what it took before
the change, more has changed meanwhile."""

PLAIN_MAY = 1.5
"""Plain is tried again up to this factor of the best prediction."""


@dataclass(frozen=True)
class Turn:
    """What is decided again.

    Attributes:
        step: in which it began.
        began_ns: when.
        in_use: the strategy in use, which the others have to beat; None if it has to go.
        predicted_us: what it is predicted to take now; 0: nobody knows, or it does not matter.
        spent_us: what measuring and searching took, where a race follows.
        is_second: it follows another at once, since more has changed during that.
    """

    change: Change
    step: int
    began_ns: int
    is_second: bool
    in_use: Arm | None = None
    predicted_us: float = 0.0
    spent_us: float = 0.0

    @property
    def lasts_us(self) -> float:
        """Since it began, on this rank."""
        return (time.perf_counter_ns() - self.began_ns) / 1e3


@dataclass(frozen=True)
class Later:
    """What a turn found to be faster, and not yet worth a switch: in use from ``step`` on if nothing changes before."""

    step: float
    name: str
    race: Race
    change: Change


def fresh_of(turn: Turn, found: Sequence[Candidate], same: Sequence[bool], ours: str) -> list[Candidate]:
    """Of what was found those that are tried: other strategies, predicted to be fast enough, under other names.

    Args:
        same: of each, whether it is the strategy in use.
        ours: the name of that one.
    """
    limit_us = turn.predicted_us * (MAY_WIN if turn.change.is_severe else SURELY_WINS) or math.inf
    fresh = [c for c, is_ours in zip(found, same, strict=True) if not is_ours and c.predicted_us <= limit_us]
    return [replace(c, name=f"{c.name} at step {turn.step}") if c.name == ours else c for c in fresh]


def race_of(turn: Turn, arms: Sequence[Arm], best_us: float, link: float) -> Race:
    """A turn's race.

    Args:
        arms: first the strategy in use, if there is one.
        best_us: the best prediction; 0: nothing was found.
        link: so many times what it took the link takes, as the turn measured it.
    """
    # The windows that raised the alarm flatter nobody: a fair race, unless it is clear who is far behind, or by the
    # probe that the link is to blame, or is faster (then such windows are the best of what is in use).
    (before_us, now_us), is_severe = turn.change.step_us, turn.change.is_severe
    far_behind = min(now_us, turn.predicted_us) > FAR_BEHIND * best_us > 0
    surely_slower = is_severe and now_us > before_us and link > FAR_BEHIND
    surely_faster = FAR_BEHIND * link < 1
    is_clear = far_behind or surely_slower or surely_faster
    known = {turn.in_use.name: now_us} if turn.in_use is not None and is_clear else {}
    block = max(TRY_STEPS, min(math.ceil(TRY_US / max(best_us or turn.predicted_us, 1.0)), TRY_MOST))
    return Race(
        arms, block=block, later=TRY_STEPS, rounds=1 if known else TRY_ROUNDS, most_rounds=MOST_ROUNDS, drop=DROP,
        settle=int(SETTLES * block), doubts=not is_severe, known=known,
    )  # fmt: skip


def pays_from(change: Change, race: Race, ours: str, best: str) -> float:
    """The step from which on a switch to the best of a race pays; infinity where it never does."""
    losses = race.losses
    return change.since + Patience.pays_after(
        race.measured[ours], race.measured[best], losses_less=losses[best] < losses[ours],
        is_clear=race.is_clear(best, ours), price_us=2 * race.excess_us,
    )  # fmt: skip


def times_of(race: Race) -> str:
    return ", ".join(f"{name} {us / 1e3:.1f} ms" for name, us in race.measured.items()) + " a step"


def alike(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies exchange the same, and what they keep comes back at the same rate."""
    if (one.choices, one.partition_bytes) != (other.choices, other.partition_bytes):
        return False
    traits = (create(spec).traits for spec in one.compressors)
    return all(each.gain_at(one.gain_scale) == each.gain_at(other.gain_scale) for each in traits)
