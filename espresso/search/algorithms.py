"""The paper's two algorithms, and its upper bound.

Espresso (EuroSys '23), section 4.4: Algorithm 1 (:func:`greedy`) gives each tensor, largest first, the leaf
that makes the *whole* iteration shortest; Algorithm 2 (:func:`offload`) then moves compressions to the host,
by groups of equal size and leaf. All of them evaluate with the timeline, never with a tensor's own time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from espresso.model.arrays import Wholes
from espresso.model.job import Job
from espresso.model.payload_sizes import PayloadBytes, payload_bytes
from espresso.search.algorithm_kernels import BETTER, finished_units, greedy_units
from espresso.search.candidates import Size, Unit, compressed_leaves, raw_choices
from espresso.search.evaluator import Evaluator
from espresso.strategies import PLAIN, Choice, CompressorSpec, Device

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction that is done."""

MOST_GREEDY_UNITS = 1500
"""Above this the published algorithms are left out: their time grows with the square of the units."""
OFFLOAD_CAP = 4096
"""Most evaluations of Algorithm 2's product; above it groups are settled one after the other."""
_AT_ONCE = 64
"""Units between two reports of progress."""


def bubbles(evaluator: Evaluator, strategy: Wholes) -> int:
    """How many leading units are finished before the next is ready, so that changing them cannot help.

    The paper's ``Remove`` read safely: a unit may be dropped only if it and every earlier one have completely
    finished when the next becomes ready. (A link idle just once is not enough: it costs up to half.)
    """
    evaluator.makespan(strategy)
    return int(finished_units(evaluator.buckets, evaluator.ready, evaluator.finish))


def size_order(units: Sequence[Unit]) -> list[int]:
    """Largest first; of equal sizes the latest to be ready first (the paper: "closer to the output")."""
    return sorted(range(len(units)), key=lambda index: (-units[index].numel, -index))


def greedy(
    evaluator: Evaluator,
    leaves: tuple[Choice, ...],
    *,
    prune: bool = True,
    start: Wholes | None = None,
    progress: Progress | None = None,
) -> Wholes:
    """Algorithm 1: from uncompressed, every unit in size order takes the leaf of least F, or keeps its own.

    Args:
        leaves: what is tried; the uncompressed start is always kept as a choice.
        prune: leave out dominated leaves (see :meth:`Candidates.distinct` for what that gives up).
        start: where to begin; the published algorithm begins uncompressed.

    Returns:
        Candidate numbers, never worse than where it began.
    """
    strategy = evaluator.uniform(PLAIN) if start is None else start.copy()
    options = evaluator.options(leaves, prune=prune)
    best = evaluator.makespan(strategy)
    dropped = bubbles(evaluator, strategy)
    order = np.array(size_order(evaluator.units), dtype=np.int64)
    first = np.cumsum([0, *map(len, options)]).astype(np.int64)
    flat = np.concatenate(options)
    arrays = evaluator.kernel_arrays()
    hint = -1
    for begin in range(0, len(order), _AT_ONCE):
        best, dropped, hint = greedy_units(
            *arrays.states, order[begin : begin + _AT_ONCE], flat, first, evaluator.buckets, strategy, best,
            dropped, hint, arrays.job,
        )  # fmt: skip
        if progress is not None:
            progress("greedy", min((begin + _AT_ONCE) / len(order), 1.0))
    return strategy


def offload(evaluator: Evaluator, strategy: Wholes, cap: int = OFFLOAD_CAP) -> tuple[Wholes, bool]:
    """Algorithm 2: move compressions to the host, whole leaves at a time.

    Compressed units of equal size and leaf form groups; of each group the first u, earliest ready first, are
    offloaded, for every vector of such numbers. Above ``cap`` vectors the groups are settled one after the
    other instead, in rounds until nothing improves.

    Returns:
        The best strategy, and whether the cap was exceeded.
    """
    groups: dict[tuple[Size, Choice], list[int]] = {}
    for index, unit in enumerate(evaluator.units):
        choice = evaluator.candidates.choices[strategy[index]]
        movable = choice.option.is_compressed and not choice.option.uses_offload
        if movable and Device.OFFLOAD in evaluator.job.costs.devices(choice.compressor):
            groups.setdefault((unit.size, choice), []).append(index)
    if not groups:
        return strategy, False
    members = [np.array(group) for group in groups.values()]
    moved = [
        evaluator.candidates.number(size, Choice(choice.option.on_device(Device.OFFLOAD), choice.compressor))
        for size, choice in groups
    ]
    best = evaluator.makespan(strategy)
    if math.prod(len(group) + 1 for group in members) <= cap:
        vectors = list(itertools.product(*(range(len(group) + 1) for group in members)))
        batch = np.repeat(strategy[None], len(vectors), axis=0)
        for row, vector in zip(batch, vectors, strict=True):
            for group, number, count in zip(members, moved, vector, strict=True):
                row[group[:count]] = number
        index, _, _ = evaluator.batch(batch, best * BETTER, cut=True)
        return (batch[index] if index >= 0 else strategy), False
    kept = [int(strategy[group[0]]) for group in members]
    strategy = strategy.copy()
    improved = True
    while improved:
        improved = False
        for group, number, old in zip(members, moved, kept, strict=True):
            batch = np.repeat(strategy[None], len(group) + 1, axis=0)
            for count in range(len(group) + 1):
                batch[count, group[:count]] = number
                batch[count, group[count:]] = old
            index, makespan, _ = evaluator.batch(batch, best * BETTER, cut=True)
            if index >= 0:
                strategy, best, improved = batch[index], makespan, True
    return strategy, True


def _sweep(evaluator: Evaluator, strategy: Wholes, leaves: tuple[Choice, ...]) -> float:
    """The makespan after every unit, largest first, took the best of all leaves, the others fixed."""
    options = evaluator.options(leaves)
    strategy = strategy.copy()
    best = evaluator.makespan(strategy)
    for index in size_order(evaluator.units):
        found, makespan = evaluator.best(strategy, index, options[index], best * BETTER)
        if found >= 0:
            strategy[index], best = found, makespan
    return best


def upper_bound_us(
    job: Job,
    specs: Sequence[CompressorSpec],
    units: Sequence[Unit],
    payload: PayloadBytes = payload_bytes,
    *,
    partition_bytes: int = 0,
    start: Sequence[Choice] = (),
) -> float:
    """The paper's upper bound as an iteration time: compression costs nothing and nothing contends.

    The best strategy under that assumption is itself searched for: by Algorithm 1 (of large jobs not), among
    the uniform strategies, and by improving ``start`` (one choice per unit), all at one partition size.
    """
    evaluator = Evaluator(job, units, partition_bytes, payload, free=True)
    leaves = raw_choices(job.cluster) + compressed_leaves(job, specs)[0]
    large = len(units) > MOST_GREEDY_UNITS
    best = evaluator.batch(evaluator.uniforms(leaves), cut=True)[1]
    if large and start:
        return job.forward_us + min(best, evaluator.makespan(evaluator.encode(start))) + job.optimizer_us
    best = min(best, evaluator.makespan(greedy(evaluator, leaves)))
    if start:
        best = min(best, _sweep(evaluator, evaluator.encode(start), leaves))
    return job.forward_us + best + job.optimizer_us
