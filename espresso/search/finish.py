"""The end of a search: what its terms make of the strategies found, with a certificate for what they have become."""

from __future__ import annotations

import math
from dataclasses import replace

from espresso.model.job import Job
from espresso.search.budgets import Budgets, Ledger, residual_bytes
from espresso.search.candidates import units_for
from espresso.search.evaluator import Evaluator
from espresso.search.refine import certify_units
from espresso.search.result import Ranked, SearchResult
from espresso.search.settle import Settler, is_rider, kinds_of
from espresso.search.space import Space, assumed
from espresso.search.terms import MAX_CANDIDATES, MB
from espresso.strategies import NONE, PLAIN, Strategy

OWED, RESIDUAL_MB = "gradients_owed", "residual_mb"
"""Of a strategy's notes: what it is forecast to owe and to keep on a rank."""
MOST_LOOKED_AT = 16
"""Ranks whose residuals are laid out for that; the largest counts."""


def settled(job: Job, space: Space, result: SearchResult, sizes: tuple[int, ...]) -> SearchResult:
    """The result as its terms ask for: of few kinds, certified as it is then.

    ``alternatives`` are then what may race, best first, none that is not below plain; ``chosen`` is the first of them.

    Args:
        sizes: of partitions, that were searched.
    """
    terms = space.terms
    settler = Settler(job, space)
    # What an older strategy has ride keeps a residual as well, which the search does not know.
    choices = (choice for row in (result.chosen, *result.alternatives) for choice in row.strategy.choices.values())
    fits = terms.residual_budget_mb is None or not any(map(is_rider, choices))
    if terms.all_kinds and not terms.races and space.constraints is None and fits:
        result = replace(result, residual_bytes=settler.bytes_kept(result.strategy))
        if space.budgets is None:
            return result
        noted = tuple(_noted(space, row) for row in result.alternatives)
        return replace(result, chosen=_noted(space, result.chosen), alternatives=noted)
    plain = _plain(job, space, result)
    plain = replace(plain, predicted_us=settler.priced(plain).predicted_us)
    # What is forced is no plain allreduce, and no measure for what compression gains.
    averages = plain.strategy.with_choices(dict.fromkeys(plain.strategy.choices, PLAIN))
    settler.plain_us = settler.priced(replace(plain, strategy=averages)).predicted_us
    cap = result.strategy.bucket_cap_mb
    plain = replace(plain, strategy=replace(plain.strategy, bucket_cap_mb=cap))
    rows = [replace(row, strategy=replace(row.strategy, bucket_cap_mb=cap)) for row in result.alternatives]
    if terms.races and (simple := settler.simplest(result)) is not None:
        rows = [*rows[:MAX_CANDIDATES], simple]
    # In a race plain DDP stands for all that compress nothing.
    may_be_raw = terms.constraints.force or not terms.races
    settled = [settler.settled(row) for row in rows if row.strategy.compresses or may_be_raw]
    settled.sort(key=lambda one: one.row.predicted_us)
    kept, seen = [], []
    for one in settled:
        if one.row.strategy not in seen and (one.row.predicted_us < plain.predicted_us or terms.constraints.force):
            seen.append(one.row.strategy)
            kept.append(one)
    kept = [replace(one, row=_noted(space, one.row)) for one in kept]
    chosen = kept[0].row if kept else _noted(space, plain)
    kept_bytes = settler.bytes_kept(chosen.strategy)
    bound = min(result.lower_bound_us, _bound_of(job, space, chosen, sizes), chosen.predicted_us)
    return replace(
        result,
        chosen=chosen,
        predicted_us=chosen.predicted_us,
        uncompressed_us=settler.plain_us if cap is None else result.uncompressed_us,
        lower_bound_us=bound,
        upper_bound_us=min(result.upper_bound_us, chosen.predicted_us),
        alternatives=tuple(one.row for one in kept),
        error=space.ledger.error(chosen.strategy.choices),
        residual_bytes=kept_bytes,
        kinds_left_out=kept[0].kinds_before - len(kinds_of(chosen.strategy)) if kept else 0,
        fewer_kinds_cost_us=chosen.predicted_us - kept[0].before_us if kept else 0.0,
    )


def with_assumed_error(result: SearchResult) -> SearchResult:
    """A result with what its strategy owes of normal numbers, where nothing else is known of that."""
    strategy, job = result.strategy, result.chosen.job
    specs = [spec for spec in strategy.compressors if spec != NONE]
    owed = Ledger(job.tensors, job.cluster, specs, assumed(job, specs), Budgets()).error(strategy.choices)
    noted = replace(strategy, notes={**strategy.notes, OWED: owed})
    return replace(result, error=owed, chosen=replace(result.chosen, strategy=noted))


def _noted(space: Space, row: Ranked) -> Ranked:
    """The row with what its strategy owes and keeps in its notes, and what it was asked to keep to."""
    owed, ranks = space.ledger.error(row.strategy.choices), range(min(row.strategy.cluster.num_ranks, MOST_LOOKED_AT))
    terms = space.terms
    kept = max(residual_bytes(row.plan, rank, terms.residual_dtype, terms.transactional) for rank in ranks)
    notes = {**row.strategy.notes, RESIDUAL_MB: kept / MB, **space.terms.to_meta()}
    if owed is not None:
        notes[OWED] = owed
    if row.job.profile is not None:
        notes["profile"] = str(row.job.profile)
    return replace(row, strategy=replace(row.strategy, notes=notes))


def _plain(job: Job, space: Space, result: SearchResult) -> Ranked:
    """Every tensor raw, but for those that are forced to something else."""
    kinds = {tensor.name: space.terms.constraints.kind_of(tensor) for tensor in job.tensors}
    for narrow in (False, True):
        choices = {name: space.forced(name, kind, narrow=narrow) for name, kind in kinds.items()}
        if space.ledger.allows(choices):
            break
    notes = {"predicted_us": result.uncompressed_us, "mode": job.mode.value, "found_by": "uncompressed"}
    strategy = Strategy(job.tensors, choices, job.cluster, partition_bytes=0, notes=notes)
    name = "only what is forced" if strategy.compresses else "uncompressed"
    return replace(
        result.chosen, name=name, strategy=strategy, job=job, predicted_us=result.uncompressed_us
    )  # fmt: skip


def _bound_of(job: Job, space: Space, row: Ranked, sizes: tuple[int, ...]) -> float:
    """Certified over the groups that a strategy has, without what rides in payloads of others, at its own partition
    size and those that were searched.
    """
    strategy = row.strategy
    units = tuple(
        unit for unit in units_for(job, strategy, space.constraints)
        if not is_rider(strategy.choices[unit.tensors[0]])
    )  # fmt: skip
    tried = tuple(dict.fromkeys((*sizes, strategy.partition_bytes)))
    if not space.certified or not units or (units == space.units(job) and tried == sizes):
        return math.inf  # what was certified already says it
    evaluator = Evaluator(job, units, tried[0], pricer=row.pricer)
    above = row.predicted_us - job.forward_us - job.optimizer_us
    found = certify_units(job, evaluator, space.every, tried, above, space.budgets)
    return found + job.forward_us + job.optimizer_us
