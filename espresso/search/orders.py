"""The certificate for a few giants: what their tasks lose by waiting for one another on the lanes.

The linear program knows every lane's load and every unit's chain, but not that units wait for each other from lane to
lane. Where two to six units hold nearly all bytes and are ready at about the same time, that is most of the gap. So all
combinations of their leaves are looked at, and of those that neither loads nor weights rule out, all orders
(:mod:`espresso.search.order_kernels`). Dominance plays no part: a leaf that loads more may still wait less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from espresso.model.pricing import Pricer
from espresso.model.timeline_kernels import NUM_LANES
from espresso.search.bound_kernels import CHAIN, COSTS
from espresso.search.bounds import ROUNDING, Certificate, fees, prices
from espresso.search.candidates import Leaves, Unit, leaves_of
from espresso.search.order_kernels import Tasks, least_end
from espresso.search.relaxation import Relaxation, leaf_rows, leaf_tasks

NEARLY_ALL = 0.9
"""Of all elements; with less the others' loads say more, and there is more to look at."""


def bound_by_orders(
    relaxation: Relaxation,
    certificate: Certificate,
    units: Sequence[Unit],
    leaves: Leaves,
    partition_bytes: int,
    pricer: Pricer,
    above: float,
    limit: int,
) -> tuple[float, int]:
    """A bound at one partition size, up to ``above``, and the pairs of tasks looked at, at most about ``limit``.

    -inf where there is nothing to gain: giants that do not hold nearly all, lanes with room for several, cores that are
    shared, a token bucket, or more than ``limit`` to look at.
    """
    giants = relaxation.giants
    held = sum(units[unit].numel for unit in giants)
    if len(giants) < 2 or held < NEARLY_ALL * sum(unit.numel for unit in units):
        return -np.inf, 0
    if not pricer.costs.in_turn(pricer.cluster):
        return -np.inf, 0
    # Weights say something of a giant's leaves only if the bound comes from them.
    root = certificate.makespan_us if certificate.makespan_us > relaxation.backward_us else 0.0
    paid, kinds = prices(relaxation, certificate.weights), fees(relaxation, certificate.paid)
    found, least = [], np.zeros((len(giants), NUM_LANES))
    for position, giant in enumerate(giants):
        unit = units[giant]
        mine = leaves_of(leaves, unit)
        rows = leaf_rows(pricer, unit.size, mine, partition_bytes)
        excess = rows[:, :COSTS] @ paid[giant] * (root > 0.0)
        if relaxation.ledger is not None and root > 0.0:
            excess += kinds[giant, relaxation.ledger.kinds_of(mine)]
        excess -= excess.min()
        ends = np.maximum(relaxation.release_us[giant] + rows[:, CHAIN], relaxation.backward_us + rows[:, 0])
        possible = np.flatnonzero((ends < above) & (root + excess < above))
        if len(possible) == 0:
            return above, 0  # no strategy is below it
        possible = possible[np.argsort(excess[possible], kind="stable")]
        found.append((mine, possible, rows[possible, :NUM_LANES], excess[possible]))
        least[position] = found[-1][2].min(axis=0)
    begins = relaxation.release_us[giants, None] + np.zeros(NUM_LANES)
    begins[:, 0] = relaxation.backward_us
    for position, (mine, possible, loads, excess) in enumerate(found):
        # A lane serves what is released from any giant on: of this one this leaf's load, of the others their least.
        others = least.copy()
        others[position] = 0.0
        after = begins + others[::-1].cumsum(axis=0)[::-1]
        fits = (np.maximum(after[: position + 1].max(axis=0) + loads, after.max(axis=0)) < above).all(axis=1)
        if not fits.any():
            return above, 0
        found[position] = (mine, possible[fits], loads[fits], excess[fits])
        least[position] = loads[fits].min(axis=0)
    last = np.cumsum([len(possible) for _, possible, _, _ in found])
    sizes = [units[giant].numel for giant in giants]
    end, spent = least_end(
        np.append(0, last[:-1]), last, np.argsort(sizes)[::-1].copy(), relaxation.release_us[giants],
        relaxation.backward_us, np.concatenate([loads for _, _, loads, _ in found]),
        np.concatenate([excess for *_, excess in found]), root,
        _joined([
            leaf_tasks(pricer, units[giant].size, mine, partition_bytes, possible)
            for giant, (mine, possible, _, _) in zip(giants, found, strict=True)
        ]),
        above, limit,
    )  # fmt: skip
    return float(end) * (1.0 - ROUNDING), int(spent)


def _joined(blocks: Sequence[Tasks]) -> Tasks:
    """The tasks of several units' leaves, one unit after the other."""
    longest = max(sets.shape[1] for sets, *_ in blocks)
    wide = [[np.pad(one, ((0, 0), (0, longest - one.shape[1]))) for one in block[:3]] for block in blocks]
    sets, whole, last = (np.concatenate(columns) for columns in zip(*wide, strict=True))
    return sets, whole, last, np.concatenate([sizes for *_, sizes in blocks])
