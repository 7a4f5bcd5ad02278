"""The certificate for a few giants: what their tasks lose by waiting for one another on the lanes.

The linear program knows every lane's load and every unit's chain, but not that units wait for each other from lane to
lane. Where two to six units hold nearly all bytes and are ready at about the same time, that is most of the gap. So all
combinations of their leaves are looked at, and of those that neither loads nor weights rule out, all orders
(:mod:`espresso.search.order_kernels`). Dominance plays no part: a leaf that loads more may still wait less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from espresso.model.payload_sizes import share_of_stretches
from espresso.model.pricing import Pricer
from espresso.model.timeline_kernels import NUM_LANES
from espresso.search.bound_kernels import CHAIN, COSTS
from espresso.search.bounds import ROUNDING, Certificate, fees, prices
from espresso.search.candidates import Leaves, Size, Unit, leaves_of
from espresso.search.order_kernels import least_end
from espresso.search.relaxation import Relaxation, leaf_rows
from espresso.strategies import DTYPES, Choice
from espresso.strategies.plan import partition_spans

Reals = npt.NDArray[np.float64]

NEARLY_ALL = 0.9
"""Of all elements; with less the others' loads say more, and there is more to look at."""

LEAF = 2_500
"""What a leaf's tasks take to lay out, in pairs of tasks looked at."""


class Tables:
    """What the kernel reads: leaves in rows, those of one giant together, and their tasks."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.last: list[int] = []
        self.loads: list[Reals] = []
        self.excess: list[float] = []
        self.spans: list[tuple[int, int, int]] = []
        self.sets: list[int] = []
        self.us: list[float] = []
        self.places: list[int] = []

    def begin(self) -> None:
        """The next giant's leaves follow."""
        self.first.append(len(self.spans))
        self.last.append(len(self.spans))

    def add(self, load: Reals, excess: float, chains: Sequence[Sequence[tuple[int, float]]]) -> None:
        """A leaf: (lane set, time) of every task, partition by partition."""
        begin = len(self.sets)
        for chain in chains:
            self.sets += [lane_set for lane_set, _ in chain]
            self.us += [us for _, us in chain]
            self.places += range(len(chain))
        self.spans.append((begin, len(self.sets), len(chains[0])))
        self.loads.append(load)
        self.excess.append(excess)
        self.last[-1] += 1


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
    hopeful: list[tuple[Size, Sequence[Choice], Reals, Reals, list[int]]] = []
    for giant in giants:
        unit = units[giant]
        mine = leaves_of(leaves, unit)
        rows = leaf_rows(pricer, unit.size, mine, partition_bytes)
        excess = rows[:, :COSTS] @ paid[giant] * (root > 0.0)
        if relaxation.ledger is not None and root > 0.0:
            excess += kinds[giant, relaxation.ledger.kinds_of(mine)]
        excess -= excess.min()
        least = np.maximum(relaxation.release_us[giant] + rows[:, CHAIN], relaxation.backward_us + rows[:, 0])
        possible = np.flatnonzero((least < above) & (root + excess < above))
        if len(possible) == 0:
            return above, 0  # no strategy is below it
        cheapest_first = possible[np.argsort(excess[possible], kind="stable")].tolist()
        hopeful.append((unit.size, mine, rows, excess, cheapest_first))
    if LEAF * sum(len(in_order) for *_, in_order in hopeful) > limit:
        return -np.inf, 0
    tables = Tables()
    for size, choices, rows, excess, in_order in hopeful:
        tables.begin()
        for leaf in in_order:
            chains = chains_of(pricer, size, choices[leaf], partition_bytes)
            tables.add(rows[leaf, :NUM_LANES], float(excess[leaf]), chains)
    sizes = [units[giant].numel for giant in giants]
    found, spent = least_end(
        np.array(tables.first), np.array(tables.last), np.argsort(sizes)[::-1].copy(),
        relaxation.release_us[giants], relaxation.backward_us, np.array(tables.loads), np.array(tables.excess), root,
        np.array(tables.spans), np.array(tables.sets), np.array(tables.us), np.array(tables.places), above, limit,
    )  # fmt: skip
    return float(found) * (1.0 - ROUNDING), int(spent)


def chains_of(pricer: Pricer, size: Size, choice: Choice, partition_bytes: int) -> list[list[tuple[int, float]]]:
    """(lane set, time) of every task of every partition of a unit."""
    numel, dtype, runs = size
    spans = partition_spans(numel, partition_bytes // DTYPES[dtype])
    found = []
    for start, stop in spans if choice.option.num_rounds == 1 else [(0, numel)]:
        segments = runs if stop - start == numel else share_of_stretches(runs, stop - start, numel)
        works = pricer.chain(choice, stop - start, dtype, segments)
        found.append([(work.shape.lane_set, work.us) for work in works])
    return found


__all__ = ["Tables", "bound_by_orders", "chains_of"]
