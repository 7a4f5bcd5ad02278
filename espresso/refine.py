"""From the algorithms' strategies to the improved one with its certificate, over the partition sizes.

The partition size is one number for the whole strategy, so the certificate is the least of the bounds of the
sizes; a size whose own bound is not below the best strategy known needs no search.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from espresso.bounds import Certificate, certify, relax
from espresso.evaluator import Evaluator, evaluator_at
from espresso.improve import Effort, Guide, LocalSearch, guide
from espresso.job import Job
from espresso.strategies import Choice

Wholes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Start:
    """A strategy to begin with: choices per unit, and its makespan at its own partition size."""

    choices: tuple[Choice, ...]
    partition_bytes: int
    makespan_us: float


@dataclass(frozen=True)
class Refined:
    """What improvement found.

    Attributes:
        evaluator: at the best partition size.
        strategy: its candidate numbers.
        bound_us: no strategy's makespan is below it.
        certificates: by partition size; their weights restart a later search.
        certificate_ms, improve_ms: wall time.
    """

    evaluator: Evaluator
    strategy: Wholes
    makespan_us: float
    bound_us: float
    certificates: dict[int, Certificate]
    certificate_ms: float
    improve_ms: float


@dataclass
class _Size:
    evaluator: Evaluator
    certificate: Certificate
    led: Guide
    strategy: Wholes
    makespan_us: float


def refine(
    job: Job,
    evaluator: Evaluator,
    starts: Sequence[Start],
    leaves: tuple[Choice, ...],
    partitions: Sequence[int],
    *,
    effort: Effort | None = None,
    warm: dict[int, Certificate] | None = None,
) -> Refined:
    """Certify and improve.

    Args:
        evaluator: gives the units and the pricer.
        starts: strategies known, the best of which the result is never above.
        leaves: the whole space (:func:`espresso.candidates.every_choice`).
        warm: certificates of an earlier search of the same units.
    """
    effort = effort or Effort()
    units, pricer = evaluator.units, evaluator.pricer
    began = time.perf_counter()
    best = min(starts, key=lambda start: start.makespan_us)
    certificates: dict[int, Certificate] = {}
    open_sizes = []
    weights = None
    for size in partitions:
        relaxation = relax(job, units, leaves, (size,), pricer)
        old = (warm or {}).get(size)
        begin = old.weights if old is not None and old.weights.shape[1] == len(units) else weights
        certificates[size] = certify(
            relaxation,
            best.makespan_us,
            rounds=effort.rounds(len(units), warm=begin is not None),
            start=begin,
        )
        weights = certificates[size].weights
        if certificates[size].makespan_us < best.makespan_us * (1 - 1e-4):
            open_sizes.append((size, relaxation))
    certified = time.perf_counter()
    tried = []
    for size, relaxation in open_sizes:
        here = evaluator_at(evaluator, size)
        led = guide(here, relaxation, certificates[size], leaves, effort.depth(len(units)))
        own = [start for start in starts if start.partition_bytes == size]
        candidates = [led.rounded]
        if own:
            candidates.append(here.encode(min(own, key=lambda start: start.makespan_us).choices))
        times = [here.makespan(row) for row in candidates]
        first = int(np.argmin(times))
        tried.append(_Size(here, certificates[size], led, candidates[first], times[first]))
    tried.sort(key=lambda row: row.makespan_us)
    for row in tried[: effort.sizes]:
        _descend(row, effort)
    tried.sort(key=lambda row: row.makespan_us)
    for row in tried[: effort.deep]:
        if row.makespan_us > best.makespan_us * 1.1:
            continue
        _anneal(row, effort)
    found = min(tried, key=lambda row: row.makespan_us, default=None)
    bound = min(row.makespan_us for row in certificates.values())
    done = time.perf_counter()
    if found is None or found.makespan_us >= best.makespan_us:
        home = evaluator_at(evaluator, best.partition_bytes)
        return Refined(
            home, home.encode(best.choices), best.makespan_us, min(bound, best.makespan_us), certificates,
            (certified - began) * 1e3, (done - certified) * 1e3,
        )  # fmt: skip
    return Refined(
        found.evaluator, found.strategy, found.makespan_us, min(bound, found.makespan_us), certificates,
        (certified - began) * 1e3, (done - certified) * 1e3,
    )  # fmt: skip


def certify_units(
    job: Job,
    evaluator: Evaluator,
    leaves: tuple[Choice, ...],
    partitions: Sequence[int],
    above: float,
) -> float:
    """The bound alone, for other units of the same job."""
    return min(
        certify(relax(job, evaluator.units, leaves, (size,), evaluator.pricer), above).makespan_us
        for size in partitions
    )


def _descend(row: _Size, effort: Effort) -> None:
    search = LocalSearch(row.evaluator, row.led, effort)
    paid = np.full(len(row.strategy), np.inf)
    strategy = row.strategy.copy()
    row.makespan_us = search.descend(strategy, row.makespan_us, paid)
    row.strategy = strategy


def _anneal(row: _Size, effort: Effort) -> None:
    if row.makespan_us <= row.certificate.makespan_us * (1 + 1e-3):
        return
    search = LocalSearch(row.evaluator, row.led, effort)
    paid = np.full(len(row.strategy), np.inf)
    strategy = row.strategy.copy()
    reached = search.anneal(strategy, row.makespan_us, paid)
    row.makespan_us = search.descend(strategy, reached, paid)
    row.strategy = strategy


__all__ = ["Refined", "Start", "certify_units", "refine"]
