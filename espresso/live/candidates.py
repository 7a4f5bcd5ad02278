"""What a planner is told by a search."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from espresso.comm.execute.assignment import Assignment
from espresso.strategies import Bucket, Strategy


class Moved(NamedTuple):
    """What measuring again found, against when it was measured last.

    Attributes:
        link: so many times what they took links take, where that has changed most.
        most: how far what has moved most of links, compute and encoders has, as a logarithm.
    """

    link: float
    most: float

    @classmethod
    def of_all(cls, moves: Iterable[tuple[float, float]]) -> Moved:
        """Of several links, or shards: what has moved most."""
        links, most = zip(*moves, strict=True)
        return cls(max(links, key=lambda ratio: abs(math.log(ratio))), max(most))


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
