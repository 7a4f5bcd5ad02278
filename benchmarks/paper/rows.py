"""A row: one figure of a paper beside ours, with the causes that explain the difference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.paper.causes import AS_IS, Cause, Setting

WITHIN = 0.25
"""A ratio so near to the published one needs no cause."""
CLOSES = 0.25
"""A cause is named for a row if it closes so much of the distance (in logarithms)."""
MOST_CAUSES = 3
AND = " + "
ABOVE, NO_CAUSE, STILL = "above", "no cause found", ", still outside"
"""Verdicts, and the end of one, that miss."""


@dataclass(frozen=True)
class Row:
    """One figure of a paper beside ours.

    Attributes:
        row: which of the figure's entries.
        published: None where the paper has a picture only, or nothing.
        ratio: ours over published.
        cause: what explains a ratio outside 25 %, several with ``AND`` between; "" where none is asked for.
        with_cause: ours with that switched on.
        switched: ours with each cause switched on alone, by its name.
        note: what is compared, where that is not plain.
        at_most: whether ``published`` is a bound, or a time that ours should be below.
    """

    figure: str
    row: str
    published: float | None
    ours: float
    ratio: float | None = None
    cause: str = ""
    with_cause: float | None = None
    switched: dict[str, float] | None = None
    note: str = ""
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """In words: how it stands to what was published."""
        if self.published is None or self.ratio is None:
            return ""
        if self.at_most:
            above = "above, within 25 %" if near(self.ratio) else ABOVE
            return "at most that" if self.ratio <= 1 else above
        if near(self.ratio):
            return "within 25 %"
        if not self.cause or self.with_cause is None:
            return NO_CAUSE
        return f"explained: {self.cause}" if near(self.with_cause / self.published) else f"moved by {self.cause}{STILL}"

    def to_json(self) -> dict[str, Any]:
        """As in the results file."""
        return asdict(self) | {"verdict": self.verdict}


def missed(row: Mapping[str, Any]) -> bool:
    """Whether a row of the results file is outside, and what is named, if anything, leaves it there."""
    return row["verdict"] in (ABOVE, NO_CAUSE) or row["verdict"].endswith(STILL)


def near(ratio: float) -> bool:
    """Whether a ratio is within 25 % of one, either way."""
    return abs(math.log(ratio)) <= math.log1p(WITHIN)


def explained(
    figure: str, row: str, published: float, ours: Callable[[Setting], float], causes: Sequence[Cause], note: str = ""
) -> Row:
    """A row with the cause that alone brings it nearest to what was published, if it closes a quarter of the way; while
    the row is still outside, with those that do the same beside it. Where none does, two that bring it inside."""
    as_is = ours(AS_IS)
    switched = {cause: ours(Setting(frozenset({cause}))) for cause in causes}
    named: list[Cause] = []
    value, tried = as_is, switched
    while not near(value / published) and tried:
        best = min(tried, key=lambda cause: _distance(tried[cause], published))
        if _distance(tried[best], published) > (1 - CLOSES) * _distance(value, published):
            break
        named.append(best)
        value = tried[best]
        others = [cause for cause in causes if cause not in named and len(named) < MOST_CAUSES]
        tried = {} if near(value / published) else {o: ours(Setting(frozenset({*named, o}))) for o in others}
    if not named and not near(value / published):
        pairs = {pair: ours(Setting(frozenset(pair))) for pair in itertools.combinations(causes, 2)}
        together = min(pairs, key=lambda pair: _distance(pairs[pair], published), default=())
        if together and near(pairs[together] / published):
            named, value = list(together), pairs[together]
    return Row(
        figure,
        row,
        published,
        as_is,
        as_is / published,
        AND.join(cause.value for cause in named),
        value if named else None,
        {cause.value: value for cause, value in switched.items()},
        note,
    )


def _distance(value: float, published: float) -> float:
    return abs(math.log(value / published))


def beside(
    figure: str, row: str, published: float | None, ours: float, note: str = "", *, at_most: bool = False
) -> Row:
    """A row for which no cause is looked for."""
    ratio = None if not published else ours / published
    return Row(figure, row, published, ours, ratio, note=note, at_most=at_most)
