"""Mixtures within an error budget: the tensors that owe most take the finer of two choices.

A DDP bucket with one choice owes what all its tensors owe, and each bucket leaves to the next what it does not owe
itself: where signs owe a little too much of the whole model, one bucket in three goes finer, at several times the
bytes. Here every tensor that is compressed takes the coarser of two choices, and then, those first that owe most an
element, the finer, until the budget is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import permutations
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from espresso.model.arrays import Reals
from espresso.model.job import Job
from espresso.search.candidates import units_for
from espresso.search.evaluator import Evaluator
from espresso.search.space import Space
from espresso.strategies import NONE, Choice, Strategy
from espresso.strategies.constraints import FREE

MOST_TRIED = 12
"""Mixtures that are laid on the timeline, of all pairs those that should be fastest by their parts: effort."""


def best_mixture(
    job: Job,
    space: Space,
    base: Evaluator,
    start: Mapping[str, Choice],
    uniform: Mapping[Choice, float],
    limit_us: float,
) -> tuple[Evaluator, npt.NDArray[np.int64]] | None:
    """The fastest mixture of two choices, if it takes less than ``limit_us``.

    Args:
        base: whose partition size and prices count.
        start: a strategy by tensor; what is forced in it stays, and what is raw, unless all of it is.
        uniform: what a step takes if every tensor has that choice, whatever that owes; these are mixed.
    """
    best = None
    for choices in _mixtures(job, space, start, uniform, limit_us):
        units = units_for(job, Strategy(job.tensors, choices, job.cluster, base.partition_bytes), space.constraints)
        evaluator = Evaluator(job, units, base.partition_bytes, pricer=base.pricer)
        strategy = evaluator.encode([choices[unit.tensors[0]] for unit in units])
        takes_us = evaluator.makespan(strategy)
        if takes_us < limit_us:
            best, limit_us = (evaluator, strategy), takes_us
    return best


def _mixtures(
    job: Job, space: Space, start: Mapping[str, Choice], uniform: Mapping[Choice, float], limit_us: float
) -> Iterator[dict[str, Choice]]:
    """Strategies by tensor that keep to the budgets and constraints."""
    constraints, ledger = space.terms.constraints, space.ledger
    compressed = {name for name, choice in start.items() if choice.compressor != NONE} or set(start)
    sizes_of = {t.name: t.numel for t in job.tensors if t.name in compressed and constraints.kind_of(t) == FREE}
    names, sizes = list(sizes_of), np.array([max(size, 1) for size in sizes_of.values()])
    if not names:
        return
    others = {name: choice for name, choice in start.items() if name not in sizes_of}
    left = space.terms.budgets.error**2 - ledger.spent(others)[0]
    allows = partial(space.may, kind=FREE) if space.terms.races else constraints.allows
    usable = [choice for choice in uniform if allows(choice) and ledger.error(dict.fromkeys(names, choice)) is not None]
    owed = {choice: np.array([ledger.spent({name: choice})[0] for name in names]) for choice in usable}
    pairs: list[tuple[float, Choice, Choice, set[str]]] = []
    for coarse, fine in permutations(usable, 2):
        if owed[coarse].sum() <= left or min(uniform[coarse], uniform[fine]) >= limit_us:
            continue
        order = np.argsort((owed[fine] - owed[coarse]) / sizes)
        chosen = order[: _fewest(order, owed[coarse], owed[fine], left)]
        part = sizes[chosen].sum() / sizes.sum()
        about_us = (1 - part) * uniform[coarse] + part * uniform[fine]
        if len(chosen) and about_us < limit_us:
            pairs.append((about_us, coarse, fine, {names[index] for index in chosen}))
    for _, coarse, fine, finer in sorted(pairs, key=itemgetter(0))[:MOST_TRIED]:
        choices = dict(start) | {name: fine if name in finer else coarse for name in names}
        if ledger.allows(choices):
            yield choices


def _fewest(order: npt.NDArray[np.int64], coarse: Reals, fine: Reals, left: float) -> int:
    """How many tensors, in this order, have to take the finer choice; 0 if none or all."""
    owes = coarse.sum() + np.concatenate([[0.0], np.cumsum((fine - coarse)[order])])
    enough = np.flatnonzero(owes <= left)
    return int(enough[0]) % len(order) if len(enough) else 0
