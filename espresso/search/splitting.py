"""Splitting a DDP bucket: its tensors need not all go the same way.

A bucket with one choice is one group: one launch, one payload, one collective. Another choice for some of
its tensors makes two groups, and every routine and launch is then paid twice, so a split must earn that.
Tried per bucket: the largest tensor against the rest, and the large tensors against the small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from espresso.model.job import Job
from espresso.search.candidates import Unit, unit_of
from espresso.search.evaluator import Evaluator
from espresso.strategies import DTYPES, Bucket, Choice

SMALL_BYTES = 64 << 10
"""Tensors below this are small (BytePS leaves them raw)."""
_GAIN = 0.98
"""A split must gain this much, or the simpler strategy stays."""


def split_buckets(
    job: Job,
    evaluator: Evaluator,
    strategy: npt.NDArray[np.int64],
    leaves: tuple[Choice, ...],
    *,
    most: int = 8,
) -> tuple[Evaluator, npt.NDArray[np.int64]]:
    """Split the largest buckets where that shortens the iteration; ``evaluator``'s units are whole buckets.

    Args:
        strategy: candidate numbers of ``evaluator``.
        leaves: what either part may take.
        most: how many buckets are tried.

    Returns:
        An evaluator whose units include the parts, and the strategy in its candidate numbers.
    """
    best = evaluator.makespan(strategy)
    by_size = sorted(job.laid_out, key=lambda bucket: -bucket.numel)
    for bucket in [bucket for bucket in by_size if len(bucket.slots) > 1][:most]:
        for parts in _ways(job, bucket):
            tried, position = _replace(job, evaluator, bucket.index, parts)
            choices = evaluator.decode(strategy)
            start = tried.encode([*choices[:position], choices[position], *choices[position:]])
            found = _settle(tried, start, (position, position + 1), leaves, best * _GAIN)
            if found is not None:
                strategy, best = found
                evaluator = tried
                break
    return evaluator, strategy


def _ways(job: Job, bucket: Bucket) -> Iterator[tuple[Unit, Unit]]:
    """Two units in the order of their first slots, as the plan numbers its groups."""
    largest = max(bucket.slots, key=lambda slot: slot.numel)
    small = {slot.tensor for slot in bucket.slots if slot.numel * DTYPES[bucket.dtype] < SMALL_BYTES}
    tried: set[frozenset[str]] = set()
    for names in ({largest.tensor}, small):
        others = frozenset(slot.tensor for slot in bucket.slots) - names
        if not names or not others or {frozenset(names), others} & tried:
            continue
        tried |= {frozenset(names), others}
        first, second = (names, others) if bucket.slots[0].tensor in names else (others, names)
        yield _unit(job, bucket, first), _unit(job, bucket, second)


def _unit(job: Job, bucket: Bucket, names: set[str] | frozenset[str]) -> Unit:
    return unit_of(job, bucket, [slot.tensor for slot in bucket.slots if slot.tensor in names])


def _replace(job: Job, evaluator: Evaluator, bucket: int, parts: Sequence[Unit]) -> tuple[Evaluator, int]:
    units = list(evaluator.units)
    position = next(index for index, unit in enumerate(units) if unit.bucket == bucket)
    units[position : position + 1] = parts
    return Evaluator(job, units, evaluator.partition_bytes, pricer=evaluator.pricer), position


def _settle(
    evaluator: Evaluator,
    strategy: npt.NDArray[np.int64],
    pair: tuple[int, int],
    leaves: tuple[Choice, ...],
    limit: float,
) -> tuple[npt.NDArray[np.int64], float] | None:
    """The best of changing either part alone; None if neither comes below ``limit``.

    Only one part changes: parts with equal choices would be one group again.
    """
    options = evaluator.options(leaves)
    best: tuple[npt.NDArray[np.int64], float] | None = None
    for index in pair:
        other = _other(evaluator, strategy, pair, index)
        numbers = [number for number in options[index] if evaluator.candidates.choices[number] != other]
        found, limit = evaluator.best(strategy, index, np.array(numbers, dtype=np.int64), limit)
        if found >= 0:
            changed = strategy.copy()
            changed[index] = found
            best = changed, limit
    return best


def _other(evaluator: Evaluator, strategy: npt.NDArray[np.int64], pair: tuple[int, int], index: int) -> Choice:
    """The choice of the part that is not ``index``."""
    return evaluator.candidates.choices[int(strategy[pair[0] if index == pair[1] else pair[1]])]
