"""The search: the paper's two algorithms over the whole tree, at several partition sizes, then improvement.

The result is never above the best baseline, and comes with its plan, whose order the executor follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from espresso.algorithms import Progress, greedy, offload
from espresso.algorithms import improve as improve_locally
from espresso.baselines import simple_baselines
from espresso.candidates import (
    Unit,
    compressed_choices,
    every_choice,
    partition_sizes,
    raw_choices,
    units_of,
)
from espresso.chains import PayloadBytes, Pricer, payload_bytes, shared_pricer
from espresso.evaluator import Evaluator, evaluator_at
from espresso.improve import Effort
from espresso.job import Job, JobError
from espresso.refine import Refined, Start, certify_units, refine
from espresso.splitting import split_buckets
from espresso.strategies import NONE, PLAIN, Choice, CompressorSpec, Device, Mode, Plan, Strategy, plan
from espresso.timeline import list_schedule

MOST_GREEDY_UNITS = 1500
"""Above this the published algorithms are left out: their time grows with the square of the units."""


@dataclass(frozen=True)
class Ranked:
    """A strategy with its predicted iteration time and where it came from."""

    name: str
    strategy: Strategy
    predicted_us: float
    job: Job
    pricer: Pricer

    @cached_property
    def plan(self) -> Plan:
        """The strategy laid over the job, in the order of its list schedule."""
        laid = plan(self.strategy, self.job.laid_out, mode=self.job.mode, host_copies=self.job.host_copies)
        return list_schedule(laid, self.job, pricer=self.pricer)


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
        chosen: the best; its plan is laid out when it is first asked for.
        predicted_us: its iteration time: forward, to the latest finish, optimizer.
        uncompressed_us: flat allreduce of everything.
        upper_bound_us: the paper's upper bound on throughput, as an iteration time: compression free, nothing
            contending. (Of the best strategy found under that assumption: not a certificate.)
        lower_bound_us: certified: no strategy of the space is predicted below it (see
            :mod:`espresso.bounds`). In DDP mode the space is one choice per bucket, or per part where the
            search split one.
        search_ms: wall time of everything.
        algorithms_ms: of baselines and Algorithms 1 and 2 alone.
        certificate_ms: of the certificate alone.
        improve_ms: of the improvement alone.
        alternatives: the best distinct strategies, best first, the chosen one among them, never plain.
        baselines: name to predicted iteration time.
        num_candidates: leaves considered per tensor before deduplication.
        offload_capped: whether Algorithm 2's product was larger than its cap.
    """

    chosen: Ranked
    predicted_us: float
    uncompressed_us: float
    upper_bound_us: float
    lower_bound_us: float
    search_ms: float
    algorithms_ms: float
    certificate_ms: float
    improve_ms: float
    alternatives: tuple[Ranked, ...]
    baselines: dict[str, float]
    num_candidates: int
    offload_capped: bool

    @property
    def strategy(self) -> Strategy:
        """The best strategy found."""
        return self.chosen.strategy

    @property
    def plan(self) -> Plan:
        """It laid over the job, in its total order."""
        return self.chosen.plan

    @property
    def gap(self) -> float:
        """Iteration time over the certified bound, minus one."""
        return self.predicted_us / self.lower_bound_us - 1 if self.lower_bound_us else 0.0

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
    leaves = raw_choices(job.cluster) + _all_compressed(job, specs)[0]
    large = len(units) > MOST_GREEDY_UNITS
    best = evaluator.batch(evaluator.uniforms(leaves), cut=True)[1]
    if large and start:
        return job.forward_us + min(best, evaluator.makespan(evaluator.encode(start))) + job.optimizer_us
    best = min(best, evaluator.makespan(greedy(evaluator, leaves)))
    if start:
        best = min(best, improve_locally(evaluator, evaluator.encode(start), leaves, sweeps=1)[1])
    return job.forward_us + best + job.optimizer_us


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
        compressor: one or several; every tensor takes one of them or none. Where the job has costs for
            fp16, that baseline competes too, and may win.
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
    pricer = shared_pricer(job.costs, job.cluster, payload)
    # The improvement looks at every partition size; the algorithms as published know one.
    published = sizes[:1] if improve else sizes
    for number, size in enumerate(published):
        report = _part_of(progress, number, len(published))
        evaluator = Evaluator(job, units, size, pricer=pricer)
        rows = [
            _Found(row.name, evaluator_at(evaluator, row.partition_bytes), row.choices, row.makespan_us)
            for row in simple_baselines(evaluator, specs)
        ]
        if len(units) <= MOST_GREEDY_UNITS:
            strategy = greedy(evaluator, tree, progress=report)
            rows.append(_found("training device only", evaluator, strategy))
            strategy, bitten = offload(evaluator, strategy)
            capped = capped or bitten
            rows.append(_found("algorithms 1 and 2", evaluator, strategy))
            if moved:
                rows.append(_found("offload only", evaluator, greedy(evaluator, host_tree)))
        for row in rows:
            baselines[row.name] = min(row.makespan_us, baselines.get(row.name, math.inf))
        found += rows
    algorithms_ms = (time.perf_counter() - started) * 1e3
    leaves = every_choice(job, specs)
    refined = refine(
        job, found[0].evaluator,
        [Start(row.choices, row.evaluator.partition_bytes, row.makespan_us) for row in found],
        leaves, sizes, effort=Effort() if improve else Effort(task_trials=0, sizes=0, deep=0),
    )  # fmt: skip
    bound = refined.bound_us
    if improve:
        found.append(_found("improved", refined.evaluator, refined.strategy))
        if job.mode is Mode.DDP:
            both = raw + first + moved
            evaluator, split = split_buckets(job, refined.evaluator, refined.strategy, both)
            if evaluator is not refined.evaluator:
                found.append(_found("buckets split", evaluator, split))
                bound = min(bound, certify_units(job, evaluator, leaves, sizes, bound))
    result = _result(
        job, specs, found, baselines, capped, len(leaves), started, payload, bound, refined, algorithms_ms
    )
    if progress is not None:
        progress("search", 1.0)
    return result


def _part_of(progress: Progress | None, number: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda phase, fraction: progress(phase, (number + fraction) / total)


def _found(name: str, evaluator: Evaluator, strategy: npt.NDArray[np.int64]) -> _Found:
    return _Found(name, evaluator, tuple(evaluator.decode(strategy)), evaluator.makespan(strategy))


def _result(
    job: Job,
    specs: Sequence[CompressorSpec],
    found: list[_Found],
    baselines: dict[str, float],
    capped: bool,
    num_candidates: int,
    started: float,
    payload: PayloadBytes,
    lower: float,
    refined: Refined,
    algorithms_ms: float,
) -> SearchResult:
    beside = job.forward_us + job.optimizer_us
    plain = next(row for row in found if row.name == "uncompressed")
    # Stable: of times equal but for rounding the one found first, so plain wins ties.
    ranked = sorted(found, key=lambda row: float(f"{row.makespan_us:.9e}"))
    chosen = _ranked(job, ranked[0])
    alternatives = [_ranked(job, row) for row in _distinct(ranked)]
    best = ranked[0].evaluator
    bound = upper_bound_us(
        job, specs, best.units, payload, partition_bytes=best.partition_bytes, start=ranked[0].choices
    )
    return SearchResult(
        chosen=chosen,
        predicted_us=chosen.predicted_us,
        uncompressed_us=plain.makespan_us + beside,
        upper_bound_us=min(bound, chosen.predicted_us),
        lower_bound_us=min(lower + beside, chosen.predicted_us),
        search_ms=(time.perf_counter() - started) * 1e3,
        algorithms_ms=algorithms_ms,
        certificate_ms=refined.certificate_ms,
        improve_ms=refined.improve_ms,
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
    laid = plan(strategy, job.laid_out, mode=job.mode, host_copies=job.host_copies)
    return list_schedule(laid, job, pricer=Pricer(job.costs, job.cluster, payload))


def _ranked(job: Job, row: _Found) -> Ranked:
    choices = {
        name: choice
        for unit, choice in zip(row.evaluator.units, row.choices, strict=True)
        for name in unit.tensors
    }
    predicted = job.forward_us + row.makespan_us + job.optimizer_us
    notes = {"predicted_us": predicted, "mode": job.mode.value, "found_by": row.name}
    strategy = Strategy(job.tensors, choices, job.cluster, row.evaluator.partition_bytes, notes=notes)
    return Ranked(row.name, strategy, predicted, job, row.evaluator.pricer)


__all__ = [
    "ChoiceRow",
    "Progress",
    "Ranked",
    "SearchResult",
    "lay_out",
    "search",
    "upper_bound_us",
]
