"""Strategies that are tried in turn, in short alternated blocks, on the live job.

::

    round 0   plain plain plain | A A A | B B B
    round 1   plain plain plain | B B B | A A A          the first step of a block is not counted

What follows plain finds a card's token bucket empty: each of several others does, round by round. (One alone runs twice
in a row instead.) Between two rounds those that are far behind may drop out (``drop``); all ranks compare the slowest
rank's medians.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median, median_low

from espresso.comm.execute.assignment import Assignment, Record
from espresso.comm.groups import Groups
from espresso.live.patience import MUST_GAIN
from espresso.model.links import JobError
from espresso.search.terms import NEAR, Terms
from espresso.strategies import NONE, Strategy

SMALL_SAMPLE = 1.3
"""By so much two to four steps look closer to their own median than they are to the true one."""


@dataclass(frozen=True, eq=False)
class Arm:
    """A strategy in a race.

    Attributes:
        least_us: its steps take no less for long: what a token bucket lets through in a block it takes back later.
    """

    name: str
    assignment: Assignment
    least_us: float = 0.0

    @property
    def losses(self) -> int:
        """Lossy encodes a gradient goes through, over all tensors, also of other shards, which have to pick alike: the
        less, the closer to plain training.
        """
        choices = self.assignment.strategy.known.values()
        return sum(choice.option.num_compressions for choice in choices if choice.compressor != NONE)


def _has_budget(strategy: Strategy) -> bool:
    with suppress(JobError):  # notes of another version
        terms = Terms.of(strategy.notes)
        return terms is not None and terms.error_budget is not None
    return False


class Race:
    """Blocks of steps of several arms, and what they took.

    Args:
        arms: in the order of the first round; of those behind the first one the next is expected to be the fastest.
        block: steps of a block.
        later: and after the first round, when all have their buffers; None: as many.
        rounds: how often every arm that is not dropped has a block.
        most_rounds: how often the first arm and the fastest one have, while it is not clear that they differ. If the
            first is known, the fastest of the others has a second block beside it unless its only one says enough, or
            beside the one that was expected to be the fastest, if that is far behind: one block is easily disturbed.
        drop: after each round, arms above this factor of the fastest run no further. The first arm does, unless it is
            known: a burst in one block must not be all that is told of the strategy in use.
        settle: steps of an arm's first block that do not count.
        doubts: a difference that the spread of the steps explains counts for nothing.
        known: step times of arms that were measured just before, in microseconds: they need no block in round 0.

    Attributes:
        took: of every arm the slowest rank's median step, as far as compared.
        measured: that, and no less than the arm's ``least_us``.
        excess_us: the most that the first step of an arm's block took beyond its median, of the arm's blocks the least:
            what a switch costs, where more than one block was begun.
        noise: a difference between two arms, as a logarithm, that the spread of their steps makes one time in twenty.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        block: int,
        rounds: int,
        later: int | None = None,
        most_rounds: int = 0,
        drop: float = math.inf,
        settle: int = 1,
        doubts: bool = True,
        known: Mapping[str, float] | None = None,
    ) -> None:
        self.arms, self._rounds, self._drop = tuple(arms), rounds, drop
        self._block, self._later = block, later or block
        self._most_rounds = max(rounds, most_rounds)
        self._known, self._settle, self._doubts = dict(known or {}), settle, doubts
        self._running = list(arms)
        self._round = 0
        self._steps_us: dict[tuple[str, int], list[float]] = {}  # by arm and round
        self._rounds_us: dict[tuple[str, int], float] = {}
        self._first_us: dict[str, list[float]] = {}
        self._ran: Counter[str] = Counter()
        self._before_ns: int | None = None
        self.took: dict[str, float] = {}
        self.measured: dict[str, float] = {}
        self.excess_us = self.noise = 0.0
        self._queue = self._lay_out([arm for arm in arms if arm.name not in self._known])
        self._next = self._queue[0] if self._queue else self.arms[0]
        self._place = 0
        self._seen = set(self._known)  # whose buffers are made

    @property
    def num_steps(self) -> int:
        """Steps still to come, if nothing drops out."""
        rounds = self._rounds - self._round - 1
        return (len(self._queue) + rounds * len(self._running) * self._later) if self._queue else 0

    @property
    def assignment(self) -> Assignment:
        """What the next step runs."""
        return self._next.assignment

    def pause(self) -> None:
        """The time until the next step is not a step of a race."""
        self._before_ns = None

    def skip(self, record: Record) -> None:
        """A step was none of the race's: the next one is timed from its end."""
        self._before_ns = record.done_ns

    def take(self, record: Record) -> bool:
        """Note a step. Whether a round is over that is to be compared: then all ranks call :meth:`compare`."""
        arm = self._queue.popleft()
        self._ran[arm.name] += 1
        before, self._before_ns = self._before_ns, record.done_ns
        place, self._place = self._place, self._place + 1
        if before is not None:
            settles = 1 if arm.name in self._seen else self._settle
            us = (record.done_ns - before) / 1e3
            if place % self._block == 0:
                self._first_us.setdefault(arm.name, []).append(us)
            elif place % self._block >= settles:
                self._steps_us.setdefault((arm.name, self._round), []).append(us)
        if self._place % self._block == 0:
            self._seen.add(arm.name)
        if not self._queue and self._drop == math.inf and self._round + 1 < self._rounds:
            self._begin_round()  # nothing can drop out: go on
        if self._queue:
            self._next = self._queue[0]
            return False
        return True

    def compare(self, groups: Groups) -> bool:
        """Compare the slowest rank's medians. Collective. Whether the race is over."""
        # Of few steps the lower median: what disturbs one makes it longer.
        least = {arm.name: arm.least_us for arm in self.arms}
        mine = self._known | {name: median_low(us) for name, us in self._by_arm().items()}
        rounds = {key: max(median_low(us), least[key[0]]) for key, us in self._steps_us.items()}
        excess = max((min(first) - mine[name] for name, first in self._first_us.items() if name in mine), default=0.0)
        everybody = groups.everywhere((mine, rounds, excess, self._noise()))
        self.took = {name: max(theirs[name] for theirs, _, _, _ in everybody) for name in mine}
        self.measured = {name: us if name in self._known else max(us, least[name]) for name, us in self.took.items()}
        self._rounds_us = {key: max(theirs[key] for _, theirs, _, _ in everybody) for key in rounds}
        self.excess_us = max(0.0, *(theirs for _, _, theirs, _ in everybody))
        self.noise = max(theirs for _, _, _, theirs in everybody)
        limit = min(self.measured.values()) * self._drop
        stays = {arm.name for arm in self.arms[:1]}.difference(self._known)
        is_near = {name for name, us in self.measured.items() if us <= limit}
        self._running = [arm for arm in self._running if arm.name in stays | is_near]
        is_over = self._round + 1 >= self._rounds or len(self._running) == 1
        if is_over and self._round + 1 < self._most_rounds and (pair := self._open()):
            self._running, is_over = [arm for arm in self.arms if arm.name in pair], False
        if is_over:
            return True
        self._begin_round()
        self._next = self._queue[0]
        self.pause()
        return False

    @property
    def losses(self) -> dict[str, int]:
        """Every arm's. Where a budget says what may be owed, less of it is worth no time: then 1 for any."""
        has_budget = any(_has_budget(arm.assignment.strategy) for arm in self.arms)
        return {arm.name: min(arm.losses, 1) if has_budget else arm.losses for arm in self.arms}

    def best(self) -> str:
        """Of arms that are as fast as the fastest the one that compresses least, and of these the fastest."""
        limit = min(self.measured.values()) * NEAR
        losses = self.losses
        near = [name for name, us in self.measured.items() if us <= limit]
        return min(near, key=lambda name: (losses[name], self.measured[name]))

    def spent_us(self, best: str) -> float:
        """What its steps took beyond as many of one arm; what a script did between two of them was not the race's."""
        longer = sum(steps * max(self.took[name] - self.took[best], 0.0) for name, steps in self._ran.items())
        first = {name: max(min(us) - self.took[name], 0.0) for name, us in self._first_us.items()}
        return longer + sum(first[name] * len(us) for name, us in self._first_us.items())

    def is_clear(self, one: str, other: str) -> bool:
        """Whether an arm is faster than another beyond what may be noise, and in two of three rounds that both ran.

        What disturbed one block says nothing about an arm.
        """
        noise = self.noise if self._doubts else 0.0
        both = [number for name, number in self._rounds_us if name == one and (other, number) in self._rounds_us]
        won = sum(self._rounds_us[one, number] < self._rounds_us[other, number] for number in both)
        return 3 * won >= 2 * len(both) and math.log(self.measured[other] / self.measured[one]) > noise

    def _open(self) -> tuple[str, str] | None:
        """The first arm and the fastest, where more rounds may tell which is better."""
        first, best = self.arms[0].name, self.best()
        others = [name for name in self.measured if name != first]
        if self._round == 0 and first in self._known and others:
            best, expected = min(others, key=lambda name: self.measured[name]), others[0]
            if self.measured[expected] > self._drop * self.measured[best]:
                return expected, best
            times = self.measured[best] / self.measured[first]
            return (first, best) if 1 - MUST_GAIN <= times <= self._drop else None
        gain = 1 - self.measured[best] / self.measured[first]
        is_open = best != first and gain > MUST_GAIN and not self.is_clear(best, first)
        return (first, best) if is_open else None

    def _by_arm(self) -> dict[str, list[float]]:
        steps: dict[str, list[float]] = {}
        for (name, _), values in self._steps_us.items():
            steps.setdefault(name, []).extend(values)
        return steps

    def _noise(self) -> float:
        """Twice the standard error of the difference of two arms' medians, from the steps of all arms together."""
        steps = self._by_arm().values()
        apart = [abs(math.log(us / median(values))) for values in steps if len(values) > 1 for us in values]
        if not apart:
            return 0.0
        # Of so few steps an arm's own median lies among them, and makes them look closer than they are.
        spread = 1.4826 * SMALL_SAMPLE * median(apart)
        fewest = min(map(len, steps))
        return 2.0 * 1.2533 * spread * math.sqrt(2.0 / fewest)

    def _begin_round(self) -> None:
        self._round += 1
        self._block = self._later
        first, *others = self._running
        turned = self._round % max(len(others), 1)
        order = [first, *others[turned:], *others[:turned]]
        self._queue = self._lay_out(order[::-1] if len(others) == 1 and self._round % 2 else order)
        self._place = 0

    def _lay_out(self, arms: Sequence[Arm]) -> deque[Arm]:
        return deque(arm for arm in arms for _ in range(self._block))
