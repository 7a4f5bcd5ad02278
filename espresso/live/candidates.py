"""What a planner asks of a search, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from espresso.comm.execute.assignment import Assignment, Record
from espresso.live.change import Change
from espresso.live.fixed_planner import InForce
from espresso.strategies import Bucket, Strategy


class Moved(NamedTuple):
    """What measuring again found, against when it was measured last.

    Attributes:
        link: so many times what they took links take, where that has risen most.
        most: how far what has moved most of links, compute and encoders has, as a logarithm.
    """

    link: float
    most: float


class Search(Protocol):
    """Finds candidates from the observed iterations; collective, rank 0 decides.

    Attributes:
        uncompressed_us: predicted for a plain iteration by the latest search.
        bucket_cap_mb: a bucket size that the search would rather have; None where it is content.
        why_none: why there are no candidates; empty where none is predicted to be faster than plain.
    """

    uncompressed_us: float
    bucket_cap_mb: float | None
    why_none: str

    def __call__(self, records: Sequence[Record]) -> list[Candidate]: ...

    def follow(self, in_force: InForce) -> bool:
        """Whether this makes the compressor it searches for another one."""
        ...

    def revise(self, change: Change) -> Moved:
        """Measure again what changed; collective. The next call searches with it."""
        ...

    def before_trying(self) -> None:
        """Use up what links let through at once after the pause that measuring and searching was; collective."""
        ...

    def after_trying(self) -> None:
        """Give back what only those that were tried needed."""
        ...

    def over_budget(self, strategy: Strategy) -> float:
        """So many times what it may owe the strategy in use does owe, where that is certain; else 0."""
        ...

    def predicted_us(self, strategy: Strategy) -> float:
        """Of an iteration, as far as the job is known by now; 0 on ranks that do not know."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A strategy that may race against plain.

    Attributes:
        order: its total order for ``buckets``.
        predicted_us: of an iteration.
        sent_us: what all that it sends takes at the card's rate; 0 where that lets nothing through at once.
    """

    name: str
    strategy: Strategy
    order: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    predicted_us: float
    sent_us: float = 0.0

    def to_row(self) -> tuple[Any, ...]:
        """What other ranks are told of it: all but the buckets, which they know."""
        return self.name, self.strategy.to_json(), self.order, self.predicted_us, self.sent_us

    @property
    def assignment(self) -> Assignment:
        return Assignment(self.strategy, self.order, self.buckets, record=True)
