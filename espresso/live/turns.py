"""A turn of deciding again, after a change: its figures, and what the planner remembers of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from espresso.live.change import Change
from espresso.live.race import Race
from espresso.strategies import Strategy

TRY_STEPS, TRY_ROUNDS, MOST_ROUNDS, DROP = 4, 2, 5, 1.25
"""Of the race when something has changed: short blocks, more of them of the two that matter while their difference may
be noise, and who is this much slower than the fastest has only one."""

TRY_US, TRY_MOST = 40_000.0, 8
"""A block is so long, of so many steps at the most: in fewer of them short ones run on what a card let gather while the
first steps of an arm made its buffers."""

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


def block_of(step_us: float) -> int:
    """Steps of a block, where a step is supposed to take so long."""
    return max(TRY_STEPS, min(math.ceil(TRY_US / max(step_us, 1.0)), TRY_MOST))


@dataclass(frozen=True)
class Turn:
    """What is decided again.

    Attributes:
        step: in which it began.
        began_ns: when.
        predicted_us: what the strategy in use is predicted to take now; 0: nobody knows.
        is_second: it follows another at once, since more has changed during that.
    """

    change: Change
    step: int
    began_ns: int
    predicted_us: float
    is_second: bool = False


@dataclass(frozen=True)
class Later:
    """What a turn found to be faster, and not yet worth a switch: in use from ``step`` on if nothing changes before."""

    step: float
    name: str
    race: Race
    change: Change


def times_of(race: Race) -> str:
    return ", ".join(f"{name} {us / 1e3:.1f} ms" for name, us in race.measured.items()) + " a step"


def alike(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies run the same."""
    return one.choices == other.choices and one.partition_bytes == other.partition_bytes
