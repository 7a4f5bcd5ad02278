"""How far a unit is when backward ends: more about the last hand-over, for the certificate.

At T, the last hand-over, backward's work is done, and so is what training work was ready before, since backward goes on
only when there is none (a tie counts as later: what follows a task that ends at T is not ready before)::

    lane        ... | dec a | backward |                        T
    training                                                    | comp last | ...
    link          ... c1 | c2 ........ | c3 ...                   F

So every unit that was handed over before is in one *state*, by the first of its tasks that ends at T or later. That is
no training work. With D the training work of the tasks before it and A the time on a lane from ``T - lapse`` on
(of that task itself the lesser of its time and the lapse, since it ends after T; all of those after it)

- T is backward's own time and all D:                      F >= R + sum D + h(c) for each unit c of the last;
- what passes a lane after T - lapse is done after it:     F >= R - lapse + sum (D + A) + what the last ones load.

A unit chooses a state with its leaf: each is a row, and only those that training work waits for matter, since a later
state before the same training work has no more of anything. What is cut has one row that says nothing. These lines
take the place of those that the last hand-over has anyway. It costs the last links' lines the lapse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from espresso.model.arrays import Reals, Wholes
from espresso.model.pricing import Pricer
from espresso.search.bound_kernels import WIDTH, states_of
from espresso.search.candidates import Leaves, Size, Unit, grouped, leaves_of
from espresso.search.relaxation import Relaxation, leaf_rows, leaf_tasks, undominated
from espresso.strategies import DTYPES, Choice

LAPSE = 0.015
"""Of backward. A task under way at its end counts up to the lapse, which its line has less for that. (BERT-base on PCIe
with dgc, not cut: a gap of 7.0, 6.6, 6.6 and 6.7 % with .011, .014, .017 and .022.)"""
SHARE = 0.01
"""Of all elements: units of one size that hold less have too little on the lanes for their states to matter."""


def with_states(
    relaxation: Relaxation,
    units: Sequence[Unit],
    leaves: Leaves,
    partition_bytes: int,
    pricer: Pricer,
    *,
    lapse: float = LAPSE,
) -> Relaxation:
    """The program with states. Unchanged where more than the papers' contention is played, or under budgets."""
    release = relaxation.release_us
    at = int(np.searchsorted(release, release[-1]))
    if at == 0 or not pricer.costs.in_turn(pricer.cluster) or relaxation.has_budget:
        return relaxation
    lapse_us = lapse * relaxation.backward_us
    least = SHARE * sum(unit.numel for unit in units)
    first, last = relaxation.first.copy(), relaxation.last.copy()
    blocks, origin = [relaxation.rows], list(relaxation.origin)
    for (size, _), members in grouped(units[:at]).items():
        numel, dtype, _ = size
        is_cut = 0 < partition_bytes < numel * DTYPES[dtype] or units[members[0]].parts_within(partition_bytes)
        if len(members) * numel < least or is_cut:
            continue
        mine = leaves_of(leaves, units[members[0]])
        rows, leaf = _remembered(pricer, size, mine, lapse_us)
        first[members] = sum(map(len, blocks))
        last[members] = first[members] + len(rows)
        blocks.append(rows)
        origin += [mine[index] for index in leaf.tolist()]
    rows = np.concatenate(blocks)
    kinds = np.append(relaxation.kind_of, np.zeros(len(rows) - len(relaxation.rows), dtype=np.int64))
    return replace(
        relaxation, rows=rows, kind_of=kinds, first=first, last=last, origin=tuple(origin), at=at, lapse_us=lapse_us
    )


def _remembered(pricer: Pricer, size: Size, leaves: tuple[Choice, ...], lapse_us: float) -> tuple[Reals, Wholes]:
    # The leaves are kept with the answer, so that their identity stays their own.
    found, _ = pricer.remember(
        ("states", size, id(leaves), lapse_us), lambda: (_undominated_states(pricer, size, leaves, lapse_us), leaves)
    )
    return found


def _undominated_states(
    pricer: Pricer, size: Size, leaves: tuple[Choice, ...], lapse_us: float
) -> tuple[Reals, Wholes]:
    """float64[kept, WIDTH] and each one's index into ``leaves``, of a size that is not cut."""
    sets, us, _, sizes = leaf_tasks(pricer, size, leaves, 0, np.arange(len(leaves)))
    out = np.empty((len(leaves) * (sets.shape[1] + 1), WIDTH))
    leaf = np.empty(len(out), dtype=np.int64)
    states = states_of(leaf_rows(pricer, size, leaves, 0), sets, us, sizes[:, 0], lapse_us, out, leaf)
    kept = undominated(out[:states])
    return out[kept], leaf[kept]
