"""Splitting a DDP bucket: its tensors need not all go the same way.

A bucket with one choice is one group: one launch, one payload, one collective. Another choice for some of
its tensors makes two groups, and every routine and launch is then paid twice, so a split must earn that.
Tried per unit: the largest tensor against the rest, and the large tensors against the small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from espresso.model.arrays import Wholes
from espresso.model.job import Job
from espresso.search.budgets import ROUNDING, Ledger
from espresso.search.candidates import Leaves, Unit, leaves_of, unit_of
from espresso.search.evaluator import Evaluator
from espresso.search.terms import NEAR
from espresso.strategies import DTYPES, Choice

SMALL_BYTES = 64 << 10
"""Tensors below this are small (BytePS leaves them raw)."""


def split_buckets(
    job: Job,
    evaluator: Evaluator,
    strategy: Wholes,
    leaves: Leaves,
    *,
    ledger: Ledger | None = None,
    most: int = 8,
) -> tuple[Evaluator, Wholes]:
    """Split the largest units where that shortens the iteration by more than ``NEAR``.

    Args:
        strategy: candidate numbers of ``evaluator``.
        leaves: what either part may take.
        ledger: budgets to keep to.
        most: how many units are tried.

    Returns:
        An evaluator whose units include the parts, and the strategy in its candidate numbers.
    """
    best = evaluator.makespan(strategy)
    large = sorted((unit for unit in evaluator.units if len(unit.tensors) > 1), key=lambda unit: -unit.numel)[:most]
    for unit in large:
        for parts in _ways(job, unit):
            tried, position = _replace(job, evaluator, unit, parts)
            choices = evaluator.decode(strategy)
            start = tried.encode([*choices[:position], choices[position], *choices[position:]])
            found = _settle(tried, start, (position, position + 1), leaves, best / NEAR, ledger)
            if found is not None:
                strategy, best = found
                evaluator = tried
                break
    return evaluator, strategy


def _ways(job: Job, unit: Unit) -> Iterator[tuple[Unit, Unit]]:
    """Two units in the order of their first slots, as the plan numbers its groups."""
    bucket = job.laid_out[unit.bucket]
    slots = [slot for slot in bucket.slots if slot.tensor in unit.tensors]
    largest = max(slots, key=lambda slot: slot.numel)
    small = {slot.tensor for slot in slots if slot.numel * DTYPES[bucket.dtype] < SMALL_BYTES}
    tried: set[frozenset[str]] = set()
    for names in ({largest.tensor}, small):
        others = frozenset(slot.tensor for slot in slots) - names
        if not names or not others or {frozenset(names), others} & tried:
            continue
        tried |= {frozenset(names), others}
        first, second = (names, others) if slots[0].tensor in names else (others, names)
        yield tuple(  # type: ignore[misc]
            unit_of(job, bucket, [slot.tensor for slot in slots if slot.tensor in part], unit.kind)
            for part in (first, second)
        )


def _replace(job: Job, evaluator: Evaluator, unit: Unit, parts: Sequence[Unit]) -> tuple[Evaluator, int]:
    units = list(evaluator.units)
    position = units.index(unit)
    units[position : position + 1] = parts
    return Evaluator(job, units, evaluator.partition_bytes, pricer=evaluator.pricer), position


def _settle(
    evaluator: Evaluator,
    strategy: Wholes,
    pair: tuple[int, int],
    leaves: Leaves,
    limit: float,
    ledger: Ledger | None,
) -> tuple[Wholes, float] | None:
    """The best of changing either part alone; None if neither comes below ``limit``.

    Only one part changes: parts with equal choices would be one group again.
    """
    best: tuple[Wholes, float] | None = None
    for index in pair:
        unit = evaluator.units[index]
        other = _other(evaluator, strategy, pair, index)
        offered = evaluator.candidates.distinct(unit.size, leaves_of(leaves, unit), prune=True)
        numbers = [number for number in offered if evaluator.candidates.choices[number] != other]
        if ledger is not None:
            numbers = _affordable(evaluator, strategy, index, numbers, ledger)
        if not numbers:
            continue
        found, limit = evaluator.best(strategy, index, np.array(numbers, dtype=np.int64), limit)
        if found >= 0:
            changed = strategy.copy()
            changed[index] = found
            best = changed, limit
    return best


def _affordable(
    evaluator: Evaluator, strategy: Wholes, index: int, numbers: Sequence[int], ledger: Ledger
) -> list[int]:
    """The candidates for a unit with which every budget is kept."""
    choices = evaluator.candidates.choices
    kinds = ledger.kinds_of(choices)
    spends = ledger.of_units(evaluator.units)
    others = np.delete(np.arange(len(strategy)), index)
    left = ledger.limits * (1 + ROUNDING) - spends[:, others, kinds[strategy[others]]].sum(axis=1)
    return [number for number in numbers if (spends[:, index, kinds[number]] <= left).all()]


def _other(evaluator: Evaluator, strategy: Wholes, pair: tuple[int, int], index: int) -> Choice:
    """The choice of the part that is not ``index``."""
    return evaluator.candidates.choices[int(strategy[pair[0] if index == pair[1] else pair[1]])]
