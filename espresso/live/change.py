"""What the watch finds, and what may follow: which part of a step changed, by how much, and what is at stake."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

URGENT = 2.0
"""Steps that take so many times longer, or less, are looked into at once."""

FASTER, HIDDEN, FREE = 2.0, 0.4, 3.0
"""A link that changes by a factor of two may count as much as a step that changes by 1.3: it may hide behind computing,
and where it is faster, less need be encoded. By a factor of three nobody waits."""

FREED = 2.0
"""What a change that makes steps faster may bring another strategy, in terms of what it brought the one in use."""

TELLING = math.log(1.15)
"""A part of the step that moved by less is not what changed."""

SEVERE = math.log(1.3)
"""How far a step has moved, as a logarithm, where more is tried, and sooner."""

SLIGHT = math.log(1.5)
"""What else moved by less than this, where a link is to blame, may be one moment's disturbance."""


class Cause(StrEnum):
    """What changed."""

    LINK = "link"
    COMPUTE = "compute"
    JOB = "job"
    ENCODERS = "encoders"
    STEP = "step"
    OWED = "owed"


@dataclass(frozen=True)
class Finding:
    """One thing that changed.

    Attributes:
        ratio: of the time it takes now to that before; of what is owed to what may be.
        ranks: whose; empty where it is not a rank's own.
    """

    cause: Cause
    ratio: float
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.cause is Cause.OWED:
            return f"{self.ratio:.2g} times the error budget is owed"
        factor = self.ratio if self.ratio > 1 else 1 / self.ratio
        word = f"{factor:.2g} times {'slower' if self.ratio > 1 else 'faster'}"
        who = ", ".join(map(str, self.ranks))
        what = {
            Cause.LINK: "the link is",
            Cause.COMPUTE: f"compute of rank{'s' if len(self.ranks) > 1 else ''} {who} is",
            Cause.JOB: "the job's own compute (batch, accumulation) is",
            Cause.ENCODERS: "encoding is",
            Cause.STEP: "the step is",
        }[self.cause]
        return f"{what} {word}"


@dataclass(frozen=True)
class Change:
    """What the watch found, the same on every rank.

    Attributes:
        since: about the iteration in which it began.
        step_us: of the slowest rank before and now.
        compute_us: likewise; 0 before, if that was not watched for long enough.
        exposed_us: what a step spends now on waiting for exchanges, encoding and decoding.
        hidden_us: what it may save although it takes as long as before: where the link is faster, what encoding takes.
        came_home: an earlier change was over before, so that what was measured for that holds no longer.
        again: told once more, right after somebody looked and found the link as it was.
    """

    findings: tuple[Finding, ...]
    since: int
    step_us: tuple[float, float]
    compute_us: tuple[float, ...] = (1.0, 1.0)
    exposed_us: float = math.inf
    hidden_us: float = 0.0
    came_home: bool = False
    again: bool = False

    @property
    def at_stake_us(self) -> float:
        """What another strategy may save of a step: what has come to it, and no more than is exposed of it.

        Where steps are faster, twice as much as they are: strategies that send more have gained more. Where computing
        is, and steps are not, what it takes less.
        """
        (before_us, now_us), (computed_us, computes_us) = self.step_us, self.compute_us
        freed_us = computed_us - computes_us
        return min(max(now_us - before_us, FREED * (before_us - now_us), freed_us, self.hidden_us), self.exposed_us)

    @property
    def severity(self) -> float:
        """How far the step moved, as a logarithm. What the link takes may be hidden: of its logarithm a part."""
        link = self.ratio(Cause.LINK) or 1.0
        return max(abs(math.log(self.step_us[1] / self.step_us[0])), HIDDEN * abs(math.log(link)))

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether what moved most is the link, and whether it became slower.

        What disturbs a machine shows now in one of the other causes and now in another.
        """
        most = max(self.findings, key=lambda each: abs(math.log(each.ratio)))
        return most.cause is Cause.LINK, most.ratio > 1

    @property
    def is_over_budget(self) -> bool:
        """Whether the strategy in use owes more than it may, and has to go however fast it is."""
        return self.ratio(Cause.OWED) is not None

    @property
    def blames_link(self) -> bool:
        """Whether nearly all is laid to a link that is slower: then what it takes says whether that is so.

        A machine that was busy for a moment looks the same, and a turn takes as long as a hundred short steps.
        """
        others = [each.ratio for each in self.findings if each.cause is not Cause.LINK]
        return (self.ratio(Cause.LINK) or 0.0) > URGENT and all(abs(math.log(ratio)) < SLIGHT for ratio in others)

    @property
    def is_severe(self) -> bool:
        return self.severity >= SEVERE

    @property
    def is_urgent(self) -> bool:
        """Whether nobody waits: steps take ``URGENT`` times longer or less, a hidden link became ``FREE`` times faster,
        or steps are severely longer by a link that is as many times slower.
        """
        before_us, now_us = self.step_us
        link = self.ratio(Cause.LINK) or 1.0
        is_free, is_blocked = self.hidden_us > 0 and FREE * link <= 1, link >= FREE and now_us > before_us
        moved = abs(math.log(now_us / before_us))
        return is_free or moved >= (SEVERE if is_blocked else math.log(URGENT))

    def with_link(self, ratio: float) -> Change:
        """The change with what the link was measured to take, in terms of what it took, in place of what steps told.

        Where that leaves nothing, the step itself has changed.
        """
        before_us, now_us = self.step_us
        others = tuple(each for each in self.findings if each.cause is not Cause.LINK)
        found = (Finding(Cause.LINK, ratio),) if abs(math.log(ratio)) > TELLING else ()
        return replace(self, findings=found + others or (Finding(Cause.STEP, now_us / before_us),))

    def ratio(self, *causes: Cause) -> float | None:
        """Of the first finding with one of these causes."""
        return next((each.ratio for each in self.findings if each.cause in causes), None)

    def __str__(self) -> str:
        before, now = (us / 1e3 for us in self.step_us)
        steps = f"takes {now:.1f} ms" if self.is_over_budget else f"took {before:.1f} ms, now {now:.1f}"
        return f"{', '.join(map(str, self.findings))}; a step {steps}"
