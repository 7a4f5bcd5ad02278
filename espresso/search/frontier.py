"""The frontier of time against error: what every budget buys, several compressors mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from espresso.model.job import Job
from espresso.model.payload_sizes import PayloadBytes, payload_bytes
from espresso.search.error_budget import Sensitivity, normal_sensitivity
from espresso.search.result import SearchResult
from espresso.search.search import search
from espresso.strategies import CompressorSpec


@dataclass(frozen=True)
class FrontierPoint:
    """The best strategy found within a budget.

    Attributes:
        error: what its strategy loses: at most the budget.
    """

    budget: float
    error: float
    predicted_us: float
    result: SearchResult


def frontier(
    job: Job,
    specs: Sequence[CompressorSpec],
    *,
    sensitivity: Sensitivity | None = None,
    points: int = 8,
    payload: PayloadBytes = payload_bytes,
) -> list[FrontierPoint]:
    """Time against error, from the fastest strategy down to the uncompressed one, none worse in both than another.

    Budgets are equal steps between the error of the fastest strategy without a budget and zero.
    """
    known = sensitivity or normal_sensitivity(specs)
    free = search(job, specs, sensitivity=known, payload=payload)
    # The fastest may be a baseline with a compressor that nobody gave a sensitivity for.
    most = float("inf") if free.error is None else free.error
    found = [] if free.error is None else [FrontierPoint(most, most, free.predicted_us, free)]
    if free.error is None:
        most = max(max(rows.values(), default=0.0) for rows in known.relative_error.values())
    for step in range(points - 2, -1, -1):
        budget = most * step / (points - 1)
        result = search(job, specs, error_budget=budget, sensitivity=known, payload=payload)
        assert result.error is not None
        found.append(FrontierPoint(budget, result.error, result.predicted_us, result))
    return _undominated(found)


def _undominated(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Largest error first; every further point is slower."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda one: (one.predicted_us, one.error)):
        if not kept or point.error < kept[-1].error - 1e-12:
            kept.append(point)
    return kept


__all__ = ["FrontierPoint", "frontier"]
