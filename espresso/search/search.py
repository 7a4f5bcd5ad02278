"""The search: baselines, the paper's two algorithms, the certificate, improvement; partition and bucket sizes; terms.

Without terms the result is never above the best baseline. It comes with its plan, whose order the executor follows.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from espresso.model.bucket_caps import as_asked, caps_for, held, in_buckets, rebucketed
from espresso.model.job import GAIN_SCALE, Job, JobError
from espresso.model.payload_sizes import PayloadBytes, payload_bytes
from espresso.model.pricing import shared_pricer
from espresso.model.timeline import first_come
from espresso.search.algorithms import MOST_GREEDY_UNITS, Progress, greedy, offload, upper_bound_us
from espresso.search.baselines import FP16, simple_baselines
from espresso.search.candidates import Leaves, Unit, partition_sizes, units_for
from espresso.search.error_budget import Sensitivity
from espresso.search.evaluator import Evaluator, evaluator_at
from espresso.search.finish import settled
from espresso.search.local_search import NO_EFFORT, REPLAN_EFFORT, Effort
from espresso.search.mixing import best_mixture
from espresso.search.refine import Refined, Start, certify_units, refine
from espresso.search.result import CapRow, Ranked, SearchResult
from espresso.search.space import Space, check_specs, sensitivity_of, space_of
from espresso.search.splitting import split_buckets
from espresso.search.terms import NEAR, Terms
from espresso.strategies import NONE, PLAIN, Choice, CompressorSpec, Mode, Plan, Strategy, plan
from espresso.strategies.constraints import FREE

PUBLISHED = "algorithms 1 and 2 as published"
"""From the uncompressed strategy; can end above a baseline."""
GREEDY = "Espresso's greedy"
"""The same two algorithms, begun from the best baseline where that is below; above none."""


class BudgetError(JobError):
    """No strategy keeps to the budgets."""


@dataclass
class _Found:
    """A strategy on the way: candidates per unit of one evaluator."""

    name: str
    evaluator: Evaluator
    choices: tuple[Choice, ...]
    makespan_us: float

    @property
    def start(self) -> Start:
        return Start(self.choices, self.evaluator.partition_bytes, self.makespan_us)

    @property
    def by_tensor(self) -> dict[str, Choice]:
        return {
            name: choice
            for unit, choice in zip(self.evaluator.units, self.choices, strict=True)
            for name in unit.tensors
        }


@contextmanager
def _collector_waits() -> Iterator[None]:
    """Nothing is collected in here: what a search makes has no cycles, and a collection goes through all that the
    process holds: of 330 000 objects, without PyTorch, up to .3 s of a certificate of .4 (VGG16, five families).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collector_waits()
def search(
    job: Job,
    compressor: CompressorSpec | str | Sequence[CompressorSpec | str],
    *,
    effort: Effort | None = None,
    partitions: Sequence[int] | None = None,
    progress: Progress | None = None,
    payload: PayloadBytes = payload_bytes,
    bucket_caps: Sequence[float] | None = (),
    terms: Terms | None = None,
    sensitivity: Sensitivity | None = None,
    certified: bool = True,
) -> SearchResult:
    """Find a strategy for a job.

    Args:
        job: its mode says what is decided: tensors (paper) or DDP's buckets.
        compressor: one or several; every tensor takes one of them or none. Where the job has costs for
            fp16, that baseline competes too, and may win.
        effort: how long to go on after Algorithms 1 and 2; by default as fits the job.
        partitions: partition sizes in bytes to try (0: never cut); by default a few that fit the job.
        progress: called with a phase and its fraction done.
        payload: for tests.
        bucket_caps: for DDP jobs, bucket sizes to search beside the job's own; None: those that fit the job.
        terms: budgets, constraints, few kinds; by default none, and time alone counts.
        sensitivity: what compressors owe; by default as the job says, else of normal numbers where it is asked for.
        certified: False where all wait for the strategy: both bounds are left out, and without budgets the local search
            is shorter.

    Raises:
        JobError: the job has no costs for a compressor, or for a routine of the tree; a bad budget; no strategy keeps
            to the terms.
    """
    started = time.perf_counter()
    space = space_of(job, check_specs(job, compressor), payload, terms or Terms(), sensitivity, certified=certified)
    caps: tuple[float, ...] = ()
    if job.mode is Mode.DDP:
        caps = caps_for(job) if bucket_caps is None else tuple(bucket_caps)
        caps = tuple(cap for cap in caps if held(rebucketed(job, cap)) != held(job))  # the job's own were measured
    own = [job, *(rebucketed(job, cap) for cap in caps)]
    results = []
    for number, one in enumerate(own):
        results.append(_search_buckets(one, space, effort, partitions, _part_of(progress, number, len(own))))
    result = _with_caps(results, (None, *caps)) if caps else results[0]
    result = settled(result.chosen.job, space, result, _sizes(space.units(result.chosen.job), partitions))
    kinds = {tensor.name: space.terms.constraints.kind_of(tensor) for tensor in job.tensors}
    chosen = {c.compressor for name, c in result.strategy.choices.items() if kinds[name] == FREE}
    if certified and FP16 in chosen.difference(space.specs):
        # The baseline is best, and nothing was said of strategies that take it for some tensors.
        known = sensitivity_of(job, sensitivity)
        if known is None or known.knows(FP16, [tensor.name for tensor in job.tensors]):
            asked = search(
                job, (*space.specs, FP16), effort=effort, partitions=partitions, payload=payload,
                bucket_caps=bucket_caps, terms=terms, sensitivity=sensitivity,
            )  # fmt: skip
            if asked.predicted_us > result.predicted_us:  # its heuristics begin elsewhere
                asked = replace(
                    result, lower_bound_us=min(asked.lower_bound_us, result.predicted_us),
                    upper_bound_us=asked.upper_bound_us,
                )  # fmt: skip
            result = replace(asked, baselines=result.baselines)
        else:
            result = replace(result, lower_bound_us=0.0, upper_bound_us=0.0)
    if progress is not None:
        progress("search", 1.0)
    return replace(result, search_ms=(time.perf_counter() - started) * 1e3)


def advised_bucket_cap(
    job: Job,
    compressors: Sequence[CompressorSpec],
    result: SearchResult,
    caps: Sequence[float],
    terms: Terms | None = None,
) -> CapRow | None:
    """A bucket size of DDP that gains 2 % over the job's own.

    Like is compared with like: buckets are handed over with their last gradient, and one search within the same terms
    sees them all, first without improvement (and so without most mixtures, which a budget may need). What is best by
    that is searched to the end, as the job itself was.

    Raises:
        JobError: in buckets of some size nothing that is found at a glance keeps to the terms.
    """
    partitions = None if terms is None else terms.partitions

    def glance(other: Job) -> float:
        return search(
            other, compressors, effort=NO_EFFORT, partitions=partitions or (0,), terms=terms, certified=False
        ).predicted_us

    laid = {cap: other for cap in caps if held(other := rebucketed(job, cap)) != held(job)}
    if not laid:
        return None
    seen = {cap: glance(other) for cap, other in laid.items()}
    best = min(seen, key=seen.__getitem__)
    own = glance(in_buckets(job, job.laid_out))
    if NEAR * seen[best] >= own:
        return None
    found = search(laid[best], compressors, partitions=partitions, terms=terms, certified=False)
    row = CapRow(best, len(laid[best].laid_out), found.predicted_us, found.uncompressed_us)
    return row if NEAR * row.predicted_us < min(own, as_others_us(result)) else None


@_collector_waits()
def replan(
    job: Job,
    old: Strategy,
    *,
    compressor: CompressorSpec | str | Sequence[CompressorSpec | str] | None = None,
    payload: PayloadBytes = payload_bytes,
    terms: Terms | None = None,
    sensitivity: Sensitivity | None = None,
) -> SearchResult:
    """Search from an old strategy, for a job whose costs changed: much faster than from scratch.

    Only the old partition size, in the buckets that the old strategy asks for, is searched and certified, the paper's
    algorithms are left out, and of the baselines only ``uncompressed`` is looked at; the result is above neither it nor
    the old strategy.

    Args:
        compressor: by default those that the old strategy uses where nothing is forced.
        terms: by default those that the old strategy's notes say it was searched under.
        sensitivity: as for :func:`search`.

    Raises:
        JobError: as :func:`search`. StrategyError: the strategy is for another model or cluster.
    """
    started = time.perf_counter()
    old.check_model(job.tensors, job.cluster)
    job = as_asked(job, old.bucket_cap_mb)
    job = replace(job, meta={GAIN_SCALE: old.gain_scale, **job.meta})
    terms = terms or Terms.of(old.notes) or Terms()
    free = (tensor.name for tensor in job.tensors if terms.constraints.kind_of(tensor) == FREE)
    used = dict.fromkeys(old.choices[name].compressor for name in free)
    space = space_of(
        job, check_specs(job, tuple(used) if compressor is None else compressor), payload, terms, sensitivity
    )
    units = units_for(job, old, space.constraints)
    evaluator = Evaluator(job, units, old.partition_bytes, pricer=shared_pricer(job.costs, job.cluster, payload))
    whole = evaluator_at(evaluator, 0)  # as plain DDP averages
    rows = [_found("uncompressed", whole, whole.uniform(PLAIN))]
    begun = evaluator.encode([old.choices[unit.tensors[0]] for unit in units])
    rows.append(_found("old strategy", evaluator, begun))
    algorithms_ms = (time.perf_counter() - started) * 1e3
    space.ledger.kinds_of(choice for row in rows for choice in row.choices)
    allowed = _allowed(space, rows)
    refined = refine(
        job, evaluator, [row.start for row in allowed], space.every, (old.partition_bytes,),
        effort=REPLAN_EFFORT, ledger=space.budgets,
    )  # fmt: skip
    allowed.append(_found("replanned", refined.evaluator, refined.strategy))
    rows, allowed = ([_on_plan(job, row) for row in some] for some in (rows, allowed))
    baselines = {row.name: row.makespan_us for row in rows}
    plain_us = rows[0].makespan_us
    bound = _merged_too(job, space, evaluator, (old.partition_bytes,), refined.bound_us)
    result = _result(job, space, allowed, plain_us, baselines, False, started, bound, refined, algorithms_ms)
    return _asking(old.bucket_cap_mb, settled(job, space, result, (old.partition_bytes,)))


def _asking(bucket_cap_mb: float | None, result: SearchResult) -> SearchResult:
    """The result whose strategies ask for this bucket size."""
    chosen, *others = (
        replace(row, strategy=replace(row.strategy, bucket_cap_mb=bucket_cap_mb))
        for row in (result.chosen, *result.alternatives)
    )
    return replace(result, chosen=chosen, alternatives=tuple(others))


def as_others_us(own: SearchResult) -> float:
    """What is chosen for a job's own buckets takes where they are handed over as others would be, with their last
    gradient: measured buckets come later.
    """
    job = in_buckets(own.chosen.job, own.chosen.job.laid_out)
    return min(own.predicted_us, replace(own.chosen, job=job).timeline.iteration_us)


def _with_caps(results: Sequence[SearchResult], caps: Sequence[float | None]) -> SearchResult:
    """The best bucket size's result; the job's own buckets stay unless another gains something."""
    own = results[0]
    best = min(range(len(results)), key=lambda index: results[index].predicted_us)
    if results[best].predicted_us > as_others_us(own) / NEAR:
        best = 0
    found = results[best]
    rows = tuple(
        CapRow(cap, len(result.chosen.job.laid_out), result.predicted_us, result.uncompressed_us)
        for cap, result in zip(caps, results, strict=True)
    )
    strategy = replace(found.strategy, bucket_cap_mb=caps[best])
    return replace(
        found,
        chosen=replace(found.chosen, strategy=strategy),
        uncompressed_us=own.uncompressed_us,
        baselines=own.baselines,
        lower_bound_us=min(result.lower_bound_us for result in results),
        upper_bound_us=min(result.upper_bound_us for result in results),
        algorithms_ms=sum(result.algorithms_ms for result in results),
        certificate_ms=sum(result.certificate_ms for result in results),
        improve_ms=sum(result.improve_ms for result in results),
        offload_capped=any(result.offload_capped for result in results),
        caps=rows,
    )


def _search_buckets(
    job: Job,
    space: Space,
    effort: Effort | None,
    partitions: Sequence[int] | None,
    progress: Progress | None,
) -> SearchResult:
    """The search at one bucketing."""
    started = time.perf_counter()
    units = space.units(job)
    if effort is None:
        effort = Effort.for_units(len(units))
        if space.certified:
            effort = effort.patient
    if not space.certified:
        effort = effort.without_certificate
    sizes = _sizes(units, partitions)
    found: list[_Found] = []
    baselines: dict[str, float] = {}
    capped = False
    pricer = shared_pricer(job.costs, job.cluster, space.payload)
    # The local search looks at every partition size; the algorithms as published know one.
    published = sizes[:1] if effort.events else sizes
    for number, size in enumerate(published):
        report = _part_of(progress, number, len(published))
        rows, bitten = _known(Evaluator(job, units, size, pricer=pricer), space, report)
        capped = capped or bitten
        for row in rows:
            baselines[row.name] = min(row.makespan_us, baselines.get(row.name, math.inf))
        found += rows
    algorithms_ms = (time.perf_counter() - started) * 1e3
    space.ledger.kinds_of(choice for row in found for choice in row.choices)
    allowed = _allowed(space, found)
    mixes = effort.events > 0 and space.terms.budgets.error < math.inf
    if mixes and job.mode is Mode.PAPER:  # where every tensor is a unit a mixture can be gone on from
        allowed += _mixed(job, space, found[0].evaluator, allowed, found)
    refined = refine(
        job, found[0].evaluator, [row.start for row in allowed], space.every, sizes,
        effort=effort, ledger=space.budgets,
        # Where one core does everything predictions are too kind to cuts: in one race a GPT at 100 Mb/s was to take
        # 1.4 % less with them, and took 1.5 % more.
        whole_within=0.0 if space.terms.all_kinds else NEAR,
    )  # fmt: skip
    bound = _merged_too(job, space, found[0].evaluator, sizes, refined.bound_us)
    if effort.events:
        allowed.append(_found("improved", refined.evaluator, refined.strategy))
        if job.mode is Mode.DDP:
            both = {*space.raw, *space.training, *space.offloaded}
            offered = {kind: tuple(c for c in leaves if c in both) or leaves for kind, leaves in space.every.items()}
            evaluator, split = split_buckets(
                job, refined.evaluator, refined.strategy, offered, ledger=space.budgets
            )  # fmt: skip
            if evaluator is not refined.evaluator:
                allowed.append(_on_plan(job, _found("buckets split", evaluator, split)))
                bound = _certified(job, space, evaluator, sizes, bound)
            if mixes:
                mixed = _mixed(job, space, refined.evaluator, allowed, found)
                allowed += mixed
                bound = min([bound, *(_certified(job, space, row.evaluator, sizes, bound) for row in mixed)])
    plain_us = min(row.makespan_us for row in found if row.name == "uncompressed")
    return _result(job, space, allowed, plain_us, baselines, capped, started, bound, refined, algorithms_ms)


def _sizes(units: Sequence[Unit], partitions: Sequence[int] | None) -> tuple[int, ...]:
    """The partition sizes that are searched: as given, or a few that fit the units."""
    return partition_sizes(units) if partitions is None else tuple(partitions)


def _merged_too(job: Job, space: Space, evaluator: Evaluator, sizes: Sequence[int], bound_us: float) -> float:
    """The bound for strategies too that give a bucket's units of several kinds one choice, or let what is raw ride in a
    payload of others: a plan exchanges them once.

    Of each bucket its largest unit alone, which may ride as well, bounds all of these.
    """
    largest: dict[int, Unit] = {}
    for unit in evaluator.units:
        if unit.bucket not in largest or unit.size > largest[unit.bucket].size:
            largest[unit.bucket] = unit
    # Where exchanges travel together, a bucket that is raw may be a payload of its own.
    may_merge = len(largest) < len(evaluator.units) or job.costs.links.in_flight > 1
    if job.mode is Mode.PAPER or not may_merge:
        return bound_us
    alone = Evaluator(job, tuple(largest.values()), evaluator.partition_bytes, pricer=evaluator.pricer)
    options = dict.fromkeys(c.option for leaves in space.every.values() for c in leaves if c.option.carries_payloads)
    riders = tuple(Choice(option, NONE) for option in options)
    every = {kind: tuple(dict.fromkeys((*leaves, *riders))) for kind, leaves in space.every.items()}
    return _certified(job, space, alone, sizes, bound_us, every)


def _certified(
    job: Job, space: Space, evaluator: Evaluator, sizes: Sequence[int], bound_us: float, every: Leaves | None = None
) -> float:
    """The bound for an evaluator's units too."""
    if not space.certified:
        return bound_us
    return min(bound_us, certify_units(job, evaluator, every or space.every, sizes, bound_us, space.budgets))


def _mixed(job: Job, space: Space, base: Evaluator, allowed: Sequence[_Found], found: Sequence[_Found]) -> list[_Found]:
    """The best mixture of two choices that all units had, if it is faster than what is allowed so far."""
    best = min(allowed, key=lambda row: row.makespan_us)
    start = dict.fromkeys((tensor.name for tensor in job.tensors), PLAIN) | best.by_tensor
    mixed = best_mixture(job, space, base, start, _uniform(found), best.makespan_us / NEAR)
    return [] if mixed is None else [_found("mixed within the budget", *mixed)]


def _uniform(rows: Sequence[_Found]) -> dict[Choice, float]:
    """Of each compressor, once and twice, the fastest choice that every unit had, and what a step took with it."""
    fastest: dict[tuple[CompressorSpec, int], tuple[float, Choice]] = {}
    for row in rows:
        first = row.choices[0]
        if first.compressor != NONE and all(choice == first for choice in row.choices):
            kind = first.compressor, first.option.num_compressions
            if kind not in fastest or row.makespan_us < fastest[kind][0]:
                fastest[kind] = row.makespan_us, first
    return {choice: takes_us for takes_us, choice in fastest.values()}


def _known(evaluator: Evaluator, space: Space, progress: Progress | None) -> tuple[list[_Found], bool]:
    """The baselines and the algorithms, and whether Algorithm 2's product was capped.

    The algorithms as published start from the uncompressed strategy and can end above a baseline. The greedy of
    this product is the same two algorithms begun from the best baseline, where that is below, and never above any.
    """
    rows = [
        _Found(row.name, evaluator_at(evaluator, row.partition_bytes), row.choices, row.makespan_us)
        for row in simple_baselines(evaluator, space.specs)
    ]
    if len(evaluator.units) > MOST_GREEDY_UNITS:
        return rows, False
    tree = space.raw + space.training
    strategy = greedy(evaluator, tree, progress=progress)
    rows.append(_found("training device only", evaluator, strategy))
    strategy, capped = offload(evaluator, strategy)
    published = _found(PUBLISHED, evaluator, strategy)
    if space.offloaded:
        rows.append(_found("offload only", evaluator, greedy(evaluator, space.raw + space.offloaded)))
    best = min(rows, key=lambda row: row.makespan_us)
    again = replace(published, name=GREEDY)
    if best.makespan_us < published.makespan_us:
        begun = greedy(best.evaluator, tree, start=best.evaluator.encode(best.choices))
        begun, bitten = offload(best.evaluator, begun)
        capped = capped or bitten
        again = _found(GREEDY, best.evaluator, begun)
    return [*rows, published, again], capped


def _allowed(space: Space, rows: Sequence[_Found]) -> list[_Found]:
    """Those of the strategies that may be taken, or what is left of them.

    Raises:
        BudgetError: there are none.
    """
    allowed = [fitted for row in rows if (fitted := _fitted(space, row)) is not None]
    if not allowed:
        raise BudgetError("no strategy that the search knows keeps to the budgets with what tensors are forced to")
    return allowed


def _fitted(space: Space, row: _Found) -> _Found | None:
    """The strategy with what its units may not take replaced, if it keeps to the budgets then."""
    units = row.evaluator.units
    may = space.may if space.terms.races else space.terms.constraints.allows  # where fp16 wins it is searched, too
    for narrow in (False, True):
        choices = tuple(
            choice if may(choice, unit.kind) else space.forced(unit.tensors[0], unit.kind, narrow=narrow)
            for unit, choice in zip(units, row.choices, strict=True)
        )
        fitted = row
        if choices != row.choices:
            makespan = row.evaluator.makespan(row.evaluator.encode(choices))
            name = "only what is forced" if row.name == "uncompressed" else row.name
            fitted = replace(row, name=name, choices=choices, makespan_us=makespan)
        if space.ledger.allows(fitted.by_tensor):
            return fitted
    return None


def _part_of(progress: Progress | None, number: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda phase, fraction: progress(phase, (number + fraction) / total)


def _found(name: str, evaluator: Evaluator, strategy: npt.NDArray[np.int64]) -> _Found:
    return _Found(name, evaluator, tuple(evaluator.decode(strategy)), evaluator.makespan(strategy))


def _on_plan(job: Job, row: _Found) -> _Found:
    """With what it takes where a bucket's units are exchanged together that take the same."""
    return row if job.mode is Mode.PAPER else replace(row, makespan_us=_ranked(job, row).timeline.makespan_us)


def _result(
    job: Job,
    space: Space,
    found: list[_Found],
    plain_us: float,
    baselines: dict[str, float],
    capped: bool,
    started: float,
    lower: float,
    refined: Refined,
    algorithms_ms: float,
) -> SearchResult:
    beside = job.forward_us + job.optimizer_us
    # Stable: of times equal but for rounding the one found first, so plain wins ties.
    ranked = sorted(found, key=lambda row: float(f"{row.makespan_us:.9e}"))
    chosen = _ranked(job, ranked[0])
    alternatives = [_ranked(job, row) for row in _distinct(ranked)]
    best = ranked[0].evaluator
    upper = 0.0
    if space.certified:
        upper = upper_bound_us(
            job, space.specs, best.units, space.payload, partition_bytes=best.partition_bytes,
            start=ranked[0].choices,
        )  # fmt: skip
    return SearchResult(
        chosen=chosen,
        predicted_us=chosen.predicted_us,
        uncompressed_us=plain_us + beside,
        upper_bound_us=min(upper, chosen.predicted_us),
        lower_bound_us=min(lower + beside, chosen.predicted_us) if space.certified else 0.0,
        search_ms=(time.perf_counter() - started) * 1e3,
        algorithms_ms=algorithms_ms,
        certificate_ms=refined.certificate_ms,
        improve_ms=refined.improve_ms,
        alternatives=tuple(alternatives),
        baselines={name: makespan + beside for name, makespan in baselines.items()},
        num_candidates=len(space.every[FREE]),
        offload_capped=capped,
        error=space.ledger.error(ranked[0].by_tensor),
        terms=space.terms,
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


def lay_out(job: Job, strategy: Strategy) -> Plan:
    """Lay a strategy over a job and put its tasks into the order of the list schedule."""
    laid = plan(strategy, job.laid_out, mode=job.mode, host_copies=job.host_copies)
    return first_come(laid, job).plan


def _ranked(job: Job, row: _Found) -> Ranked:
    predicted = job.forward_us + row.makespan_us + job.optimizer_us
    notes = {"predicted_us": predicted, "mode": job.mode.value, "found_by": row.name}
    choices = {**dict.fromkeys((tensor.name for tensor in job.tensors), PLAIN), **row.by_tensor}
    strategy = Strategy(
        job.tensors, choices, job.cluster, row.evaluator.partition_bytes, notes=notes, gain_scale=job.gain_scale
    )
    return Ranked(row.name, strategy, predicted, job, row.evaluator.pricer)
