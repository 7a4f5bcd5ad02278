"""Sharper chains for the largest units: what a cut tensor's partitions lose by waiting for one another.

The program's chain of a leaf knows of several partitions only that each lane serves them all after the least head and
before the least tail. Where a giant is cut and comes last, nearly the whole bound is its chain. First come first
served keeps two rules whatever else is under way (:mod:`espresso.search.order_kernels`), so a time after its release
that they refute for the unit alone is refuted for every strategy. Dominance plays no part before: a leaf that loads
more may still wait less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from espresso.model.pricing import Pricer
from espresso.search.bound_kernels import CHAIN, NUM_RESOURCES
from espresso.search.bounds import ROUNDING
from espresso.search.candidates import Leaves, Unit, leaves_of
from espresso.search.order_kernels import least_alone
from espresso.search.relaxation import Relaxation, leaf_rows, leaf_tasks, undominated

MOST_LEAVES = 60
"""Of a giant. With more the others' loads say more than its chain."""
EACH = 4_000
"""Pairs of tasks that are looked at to refute one time."""


def with_sharper_chains(
    relaxation: Relaxation, units: Sequence[Unit], leaves: Leaves, partition_bytes: int, pricer: Pricer, above: float
) -> Relaxation:
    """The program in which the giants' rows are those that a strategy below ``above`` can have, their chains sharper.

    Unchanged where more than the papers' contention is played, under budgets, where many leaves are possible, or where
    what is cut may have company.
    """
    if not pricer.costs.in_turn(pricer.cluster) or relaxation.has_budget:
        return relaxation
    first, last = relaxation.first.copy(), relaxation.last.copy()
    blocks, origin = [relaxation.rows], list(relaxation.origin)
    for giant in relaxation.giants:
        unit, release = units[giant], relaxation.release_us[giant]
        if unit.parts_within(partition_bytes):
            continue
        mine = leaves_of(leaves, unit)
        rows = leaf_rows(pricer, unit.size, mine, partition_bytes)
        least = release + np.maximum(rows[:, CHAIN], rows[:, 1:NUM_RESOURCES].max(axis=1))
        possible = np.flatnonzero(np.maximum(least, relaxation.backward_us + rows[:, 0]) < above)
        if not 0 < len(possible) <= MOST_LEAVES:
            continue
        rows = rows[possible]
        tasks = leaf_tasks(pricer, unit.size, mine, partition_bytes, possible)
        for row in np.flatnonzero(tasks[3][:, 1] > 1).tolist():
            chain, _ = least_alone(row, tasks, float(rows[row, CHAIN]), float(above - release), EACH)
            rows[row, CHAIN] = max(rows[row, CHAIN], chain * (1 - ROUNDING))
        kept = undominated(rows)
        first[giant] = sum(map(len, blocks))
        last[giant] = first[giant] + len(kept)
        blocks.append(rows[kept])
        origin += [mine[leaf] for leaf in possible[kept].tolist()]
    rows = np.concatenate(blocks)
    kinds = np.append(relaxation.kind_of, np.zeros(len(rows) - len(relaxation.rows), dtype=np.int64))
    return replace(relaxation, rows=rows, kind_of=kinds, first=first, last=last, origin=tuple(origin))
