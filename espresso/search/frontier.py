"""The frontier of time against error and memory: what every budget buys, several compressors mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from espresso.model.job import Job
from espresso.model.payload_sizes import PayloadBytes, payload_bytes
from espresso.search.error_budget import Sensitivity
from espresso.search.result import SearchResult
from espresso.search.search import BudgetError, search
from espresso.search.space import assumed, sensitivity_of
from espresso.search.terms import MB, Terms
from espresso.strategies import NONE, CompressorSpec


@dataclass(frozen=True)
class FrontierPoint:
    """The best strategy found within budgets.

    Attributes:
        error: what it owes: at most the budget.
        residual_bytes: what its residuals take: at most the other budget.
    """

    error: float
    residual_bytes: float
    predicted_us: float
    result: SearchResult


def frontier(
    job: Job,
    specs: Sequence[CompressorSpec],
    *,
    sensitivity: Sensitivity | None = None,
    points: int = 8,
    memory_points: int = 1,
    terms: Terms | None = None,
    payload: PayloadBytes = payload_bytes,
) -> list[FrontierPoint]:
    """Time against error and memory, from the fastest strategy down to the uncompressed one.

    Budgets are equal steps between what the fastest strategy without a budget spends and zero; no point is worse than
    another in everything. Where forced tensors spend more than a budget it has no point.

    Args:
        sensitivity: what compressors owe; by default as the job says, else of normal numbers.
        points: budgets of error.
        memory_points: budgets of memory for each of them; 1: none.
        terms: what else holds, for every point.

    Raises:
        JobError: as :func:`espresso.search.search.search`; :class:`BudgetError` where no budget has a point.
    """
    given = replace(terms or Terms(), error_budget=None, residual_budget_mb=None)
    forced = (spec for spec in given.constraints.forced() if spec != NONE)
    known = sensitivity_of(job, sensitivity) or assumed(job, (*specs, *forced))

    def find(terms: Terms) -> SearchResult:
        return search(job, specs, sensitivity=known, partitions=given.partitions, terms=terms, payload=payload)

    free = find(given)
    # The fastest may be a baseline with a compressor that nobody gave a sensitivity for.
    most = max((max(rows.values(), default=0.0) for rows in known.owed.values()), default=0.0)
    most = most if free.error is None else free.error
    found = [] if free.error is None else [_point(free)]
    refused: BudgetError | None = None
    errors = [most, *(most * part / (points - 1) for part in range(points - 2, -1, -1))]
    budgets = [(error, memory) for error in errors for memory in range(memory_points, 0, -1)]
    for error, memory in budgets[1:]:  # the first is what the fastest spends
        limit = None if memory == memory_points else free.residual_bytes / MB * memory / memory_points
        at = replace(given, error_budget=error, residual_budget_mb=limit)
        try:
            found.append(_point(find(at)))
        except BudgetError as why:
            refused = why
    if refused is not None and not found:
        raise refused
    return _undominated(found)


def _point(result: SearchResult) -> FrontierPoint:
    assert result.error is not None
    return FrontierPoint(result.error, result.residual_bytes, result.predicted_us, result)


def _undominated(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Fastest first; every further point owes or keeps less than all faster ones."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda one: (one.predicted_us, one.error, one.residual_bytes)):
        slack = 1e-12
        if not any(
            one.error <= point.error + slack and one.residual_bytes <= point.residual_bytes + slack for one in kept
        ):
            kept.append(point)
    return kept
