"""The search: the paper's two algorithms over the whole tree, then what lies beyond them.

Espresso (EuroSys '23), section 4.4: Algorithm 1 (:func:`greedy`) starts from the uncompressed strategy and
gives each tensor, largest first, the leaf that makes the *whole* iteration shortest; Algorithm 2
(:func:`offload`) then moves compressions to the host, by groups of equal size and leaf. Both evaluate with
the timeline, never with a tensor's own time. The result is never above the best baseline.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from espresso.baselines import Baseline, simple_baselines
from espresso.candidates import (
    Unit,
    compressed_choices,
    partition_sizes,
    raw_choices,
    units_of,
)
from espresso.chains import PayloadBytes, payload_bytes
from espresso.evaluator import Evaluator
from espresso.job import Job, JobError
from espresso.strategies import (
    NONE,
    PLAIN,
    Choice,
    CompressorSpec,
    Device,
    Plan,
    Strategy,
    plan,
)
from espresso.timeline import list_schedule, simulate

log = logging.getLogger("espresso")

Wholes = npt.NDArray[np.int64]
Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction that is done."""

OFFLOAD_CAP = 4096
"""Most evaluations of Algorithm 2's product; above it groups are settled one after the other."""
_ROUNDING = 1 - 1e-9
"""A strategy is better only by more than rounding."""


@dataclass(frozen=True)
class Ranked:
    """A strategy with its predicted iteration time and where it came from."""

    name: str
    strategy: Strategy
    plan: Plan
    predicted_us: float


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """A line of the table of choices: how many tensors, and how much of the model, use a choice."""

    option: str
    compressor: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        strategy: the best; ``plan`` lays it over the job in its total order.
        predicted_us: its iteration time: forward, to the latest finish, optimizer.
        uncompressed_us: flat allreduce of everything.
        upper_bound_us: the paper's upper bound on throughput, as an iteration time: compression free, nothing
            contending. (Of the best strategy found under that assumption: not a certificate.)
        search_ms: wall time.
        alternatives: the best distinct strategies, best first, the chosen one among them, never plain.
        baselines: name to predicted iteration time.
        num_candidates: leaves considered per tensor before deduplication.
        offload_capped: whether Algorithm 2's product was larger than its cap.
    """

    strategy: Strategy
    plan: Plan
    predicted_us: float
    uncompressed_us: float
    upper_bound_us: float
    search_ms: float
    alternatives: tuple[Ranked, ...]
    baselines: dict[str, float]
    num_candidates: int
    offload_capped: bool

    @property
    def num_tensors(self) -> int:
        return len(self.strategy.tensors)

    @property
    def num_compressed(self) -> int:
        return self.strategy.num_compressed

    @property
    def num_offloaded(self) -> int:
        return sum(choice.option.uses_offload for choice in self.strategy.choices.values())

    @property
    def top_choices(self) -> tuple[ChoiceRow, ...]:
        """The choices in use, those of most bytes first."""
        rows: dict[Choice, list[int]] = {}
        for tensor in self.strategy.tensors:
            row = rows.setdefault(self.strategy.choices[tensor.name], [0, 0])
            row[0] += 1
            row[1] += tensor.num_bytes
        return tuple(
            ChoiceRow(str(choice.option), str(choice.compressor), count, size)
            for choice, (count, size) in sorted(rows.items(), key=lambda item: -item[1][1])
        )


@dataclass
class _Found:
    """A strategy on the way: candidates per unit of one evaluator."""

    name: str
    evaluator: Evaluator
    choices: tuple[Choice, ...]
    makespan_us: float
    order: int = field(default=0)


def bubbles(evaluator: Evaluator, strategy: Wholes) -> int:
    """How many leading units are finished before the next is ready, so that changing them cannot help.

    The paper's ``Remove`` read safely: a unit may be dropped only if it and every earlier one have completely
    finished when the next becomes ready. (A link idle just once is not enough: it costs up to half.)
    """
    evaluator.makespan(strategy)
    finished = np.maximum.accumulate(evaluator.finish)[:-1]
    following = evaluator.buckets[1:]
    gone = np.flatnonzero((following != evaluator.buckets[:-1]) & (finished <= evaluator.ready[following]))
    return int(gone[-1]) + 1 if len(gone) else 0


def size_order(units: Sequence[Unit]) -> list[int]:
    """Largest first; of equal sizes the latest to be ready first ("closer to the output", in the paper's words)."""
    return sorted(range(len(units)), key=lambda index: (-units[index].numel, -index))


def greedy(
    evaluator: Evaluator, leaves: tuple[Choice, ...], *, prune: bool = True, progress: Progress | None = None
) -> Wholes:
    """Algorithm 1: from uncompressed, every unit in size order takes the leaf of least F, or keeps its own.

    Args:
        leaves: what is tried; the uncompressed start is always kept as a choice.
        prune: leave out dominated leaves (see :meth:`Candidates.distinct` for what that gives up).

    Returns:
        Candidate numbers, never worse than the uncompressed strategy.
    """
    strategy = evaluator.uniform(PLAIN)
    options = evaluator.options(leaves, prune=prune)
    best = evaluator.makespan(strategy)
    dropped = bubbles(evaluator, strategy)
    order = size_order(evaluator.units)
    for position, index in enumerate(order):
        if index < dropped:
            continue
        numbers = options[index]
        found, makespan = evaluator.best(strategy, index, numbers, best * _ROUNDING)
        if found >= 0:
            strategy[index], best = found, makespan
            dropped = bubbles(evaluator, strategy)
        if progress is not None:
            progress("greedy", (position + 1) / len(order))
    return strategy


def offload(evaluator: Evaluator, strategy: Wholes, cap: int = OFFLOAD_CAP) -> tuple[Wholes, bool]:
    """Algorithm 2: move compressions to the host, whole leaves at a time.

    Compressed units of equal size and leaf form groups; of each group the first u, earliest ready first, are
    offloaded, for every vector of such numbers. Above ``cap`` vectors the groups are settled one after the
    other instead, in rounds until nothing improves.

    Returns:
        The best strategy, and whether the cap was exceeded.
    """
    groups: dict[tuple[tuple[int, str, int], Choice], list[int]] = {}
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
        index, _, _ = evaluator.batch(batch, best * _ROUNDING, cut=True)
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
            index, makespan, _ = evaluator.batch(batch, best * _ROUNDING, cut=True)
            if index >= 0:
                strategy, best, improved = batch[index], makespan, True
    return strategy, True


def improve(
    evaluator: Evaluator, strategy: Wholes, leaves: tuple[Choice, ...], *, sweeps: int = 2
) -> tuple[Wholes, float]:
    """Local search: single units over every leaf, until a sweep changes nothing. Never worse than its start."""
    options = evaluator.options(leaves)
    strategy = strategy.copy()
    best = evaluator.makespan(strategy)
    for _ in range(sweeps):
        changed = False
        for index in size_order(evaluator.units):
            numbers = options[index]
            found, makespan = evaluator.best(strategy, index, numbers, best * _ROUNDING)
            if found >= 0:
                strategy[index], best, changed = found, makespan, True
        if not changed:
            break
    return strategy, best


def upper_bound_us(
    job: Job, specs: Sequence[CompressorSpec], units: Sequence[Unit], payload: PayloadBytes = payload_bytes
) -> float:
    """The paper's upper bound as an iteration time: compression costs nothing and nothing contends.

    The best strategy under that assumption is itself found by Algorithm 1, from every uniform strategy too.
    """
    evaluator = Evaluator(job, units, 0, payload, free=True)
    leaves = raw_choices(job.cluster) + _all_compressed(job, specs)[0]
    found = evaluator.makespan(greedy(evaluator, leaves))
    uniform = evaluator.batch(evaluator.uniforms(leaves), cut=True)[1]
    return job.forward_us + min(found, uniform) + job.optimizer_us


def _all_compressed(
    job: Job, specs: Sequence[CompressorSpec]
) -> tuple[tuple[Choice, ...], tuple[Choice, ...]]:
    """Compressed leaves (for Algorithm 1, offloaded): the first on the training device where it has costs."""
    first: tuple[Choice, ...] = ()
    moved: tuple[Choice, ...] = ()
    for spec in specs:
        training = compressed_choices(job, (spec,), Device.TRAINING)
        offloaded = compressed_choices(job, (spec,), Device.OFFLOAD)
        first += training or offloaded
        moved += offloaded
    return first, moved


def _check_specs(
    job: Job, compressor: CompressorSpec | str | Sequence[CompressorSpec | str]
) -> tuple[CompressorSpec, ...]:
    given = (compressor,) if isinstance(compressor, CompressorSpec | str) else tuple(compressor)
    specs = tuple(spec if isinstance(spec, CompressorSpec) else CompressorSpec.parse(spec) for spec in given)
    for spec in specs:
        if spec != NONE and not job.costs.devices(spec):
            known = sorted({cost.spec for cost in job.costs.compute}) or ["none at all"]
            raise JobError(f"the job has no costs for compressor '{spec}'; it has {', '.join(known)}")
    return tuple(dict.fromkeys(spec for spec in specs if spec != NONE))


def search(
    job: Job,
    compressor: CompressorSpec | str | Sequence[CompressorSpec | str],
    *,
    improve: bool = True,
    partitions: Sequence[int] | None = None,
    progress: Progress | None = None,
    payload: PayloadBytes = payload_bytes,
) -> SearchResult:
    """Find a strategy for a job.

    Args:
        job: its mode says what is decided: tensors (paper) or DDP's buckets.
        compressor: one or several; every tensor takes one of them or none.
        improve: go on after Algorithms 1 and 2.
        partitions: partition sizes in bytes to try (0: never cut); by default a few that fit the job.
        progress: called with a phase and its fraction done.
        payload: for tests.

    Raises:
        JobError: the job has no costs for a compressor, or for a routine of the tree.
    """
    started = time.perf_counter()
    specs = _check_specs(job, compressor)
    units = units_of(job)
    first, moved = _all_compressed(job, specs)
    raw = raw_choices(job.cluster)
    tree, host_tree = raw + first, raw + moved
    sizes = tuple(partitions) if partitions is not None else partition_sizes(job, units)
    found: list[_Found] = []
    baselines: dict[str, float] = {}
    capped = False
    pricer = None
    for number, size in enumerate(sizes):
        report = _part_of(progress, number, len(sizes))
        evaluator = Evaluator(job, units, size, payload, pricer=pricer)
        pricer = evaluator.pricer
        rows = simple_baselines(evaluator, specs)
        for row in rows:
            baselines[row.name] = min(row.makespan_us, baselines.get(row.name, math.inf))
        found += [_Found(row.name, evaluator, row.choices, row.makespan_us) for row in rows]
        strategy = greedy(evaluator, tree, progress=report)
        found.append(_found("training device only", evaluator, strategy))
        strategy, bitten = offload(evaluator, strategy)
        capped = capped or bitten
        found.append(_found("algorithms 1 and 2", evaluator, strategy))
        if moved:
            found.append(_found("offload only", evaluator, greedy(evaluator, host_tree)))
        for name in ("training device only", "algorithms 1 and 2", "offload only"):
            for row in found:
                if row.name == name and row.evaluator is evaluator:
                    baselines[name] = min(row.makespan_us, baselines.get(name, math.inf))
    if improve:
        _improve_best(found, raw + first + moved)
    return _result(job, specs, units, found, baselines, capped, len(raw + first + moved), started, payload)


def _part_of(progress: Progress | None, number: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda phase, fraction: progress(phase, (number + fraction) / total)


def _found(name: str, evaluator: Evaluator, strategy: Wholes) -> _Found:
    return _Found(name, evaluator, tuple(evaluator.decode(strategy)), evaluator.makespan(strategy))


def _improve_best(found: list[_Found], leaves: tuple[Choice, ...], starts: int = 2) -> None:
    """Improve the best few starts, and add what they become."""
    ranked = sorted(found, key=lambda row: row.makespan_us)
    for row in ranked[:starts]:
        strategy, _ = improve(row.evaluator, row.evaluator.encode(row.choices), leaves)
        found.append(_found("improved", row.evaluator, strategy))


def _result(
    job: Job,
    specs: Sequence[CompressorSpec],
    units: Sequence[Unit],
    found: list[_Found],
    baselines: dict[str, float],
    capped: bool,
    num_candidates: int,
    started: float,
    payload: PayloadBytes,
) -> SearchResult:
    beside = job.forward_us + job.optimizer_us
    plain = next(row for row in found if row.name == "uncompressed")
    # Stable: of equal times the one found first, so plain wins ties.
    ranked = sorted(found, key=lambda row: row.makespan_us)
    chosen = _ranked(job, ranked[0])
    alternatives = [_ranked(job, row) for row in _distinct(ranked)]
    bound = min(upper_bound_us(job, specs, units, payload), chosen.predicted_us)
    return SearchResult(
        strategy=chosen.strategy,
        plan=chosen.plan,
        predicted_us=chosen.predicted_us,
        uncompressed_us=plain.makespan_us + beside,
        upper_bound_us=bound,
        search_ms=(time.perf_counter() - started) * 1e3,
        alternatives=tuple(alternatives),
        baselines={name: makespan + beside for name, makespan in baselines.items()},
        num_candidates=num_candidates,
        offload_capped=capped,
    )


def _distinct(ranked: Sequence[_Found], most: int = 4) -> list[_Found]:
    """The best strategies that differ in their choices and are not plain."""
    seen: set[tuple[Choice, ...]] = set()
    rows = []
    for row in ranked:
        if row.choices in seen or all(choice == PLAIN for choice in row.choices):
            continue
        seen.add(row.choices)
        rows.append(row)
        if len(rows) == most:
            break
    return rows


def lay_out(job: Job, strategy: Strategy, *, payload: PayloadBytes = payload_bytes) -> Plan:
    """Lay a strategy over a job and put its tasks into the order of the list schedule."""
    from espresso.chains import Pricer

    laid = plan(strategy, job.laid_out, mode=job.mode, host_copies=job.host_copies)
    return list_schedule(laid, job, pricer=Pricer(job.costs, job.cluster, payload))


def _ranked(job: Job, row: _Found) -> Ranked:
    choices = {
        name: choice
        for unit, choice in zip(row.evaluator.units, row.choices, strict=True)
        for name in unit.tensors
    }
    strategy = Strategy(job.tensors, choices, job.cluster, row.evaluator.partition_bytes)
    laid = plan(strategy, job.laid_out, mode=job.mode, host_copies=job.host_copies)
    ordered = list_schedule(laid, job, pricer=row.evaluator.pricer)
    predicted = simulate(ordered, job, pricer=row.evaluator.pricer).iteration_us
    notes = {"predicted_us": predicted, "mode": job.mode.value, "found_by": row.name}
    return Ranked(
        row.name,
        Strategy(job.tensors, choices, job.cluster, row.evaluator.partition_bytes, notes=notes),
        ordered,
        predicted,
    )


__all__ = [
    "Baseline",
    "ChoiceRow",
    "Ranked",
    "SearchResult",
    "bubbles",
    "greedy",
    "improve",
    "lay_out",
    "offload",
    "search",
    "upper_bound_us",
]
