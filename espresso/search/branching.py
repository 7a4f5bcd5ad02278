"""Branch and bound over the giants: one that mixes its candidates is most of a certificate's gap.

Its candidates are split in two, again and again, always where the bound is least (:mod:`espresso.search.bounds`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from espresso.model.arrays import Reals, Wholes
from espresso.model.timeline_kernels import BURST_LANE
from espresso.search.bound_kernels import CHAIN, COSTS, NUM_RESOURCES
from espresso.search.bounds import (
    CLOSE,
    Certificate,
    ascended,
    fees,
    nothing_noted,
    prices,
    right_hand_sides,
    round_cost,
)
from espresso.search.relaxation import Relaxation

NODE_ROUNDS = 30
ROOT_ROUNDS = 60
NODE_OVERHEAD = 40_000
"""What a node takes beside its ascent, in multiplications: most of a small job's."""


@dataclass(order=True)
class _Node:
    bound: float
    number: int
    sets: list[Wholes] = field(compare=False)
    certificate: Certificate = field(compare=False)


class Branching:
    """Branch and bound over the giants' candidates, at one partition size.

    ``bound`` is the least over all open nodes, and valid at any time; :meth:`step` opens the least one.
    Candidates that no strategy below ``above`` can have are dropped on the way: those whose own chain or load
    is too long where their unit is released, and those that cost too much under the weights of a bound that is near.
    """

    def __init__(self, relaxation: Relaxation, certificate: Certificate, above: float) -> None:
        self._relaxation, self._above = relaxation, above
        self._giants = relaxation.giants
        self._base = right_hand_sides(relaxation)
        self._often = nothing_noted(relaxation)
        self._open: list[_Node] = []
        self._made = 0
        self._settled = np.inf
        self._root: Certificate | None = certificate

    def _possible(self, giant: int) -> Wholes:
        """The giant's rows that a strategy below ``above`` can have."""
        whole = self._relaxation
        every: Wholes = np.arange(whole.first[giant], whole.last[giant])
        costs, release = whole.rows[every], whole.release_us[giant]
        loads = costs[:, 1:NUM_RESOURCES].copy()
        loads[:, BURST_LANE - 1] -= whole.credit_us
        least = release + np.maximum(costs[:, CHAIN], loads.max(axis=1))
        if whole.cores == 0.0:
            least = np.maximum(least, whole.backward_us + costs[:, 0])
        possible: Wholes = every[least < self._above]
        return possible

    @property
    def bound(self) -> float:
        """No strategy's makespan is below it."""
        if self._root is not None:
            return min(self._root.makespan_us, self._above)
        return min(self._settled, self._open[0].bound if self._open else np.inf, self._above)

    @property
    def can_step(self) -> bool:
        """Whether another step can raise the bound."""
        close = self._above * (1 - CLOSE)
        return self.bound < close and (self._root is not None or self.bound < self._settled)

    def step(self) -> None:
        """Split the least open node in two and bound both halves; before that, bound the root."""
        if self._root is not None:
            root, self._root = self._root, None
            sets = [self._possible(giant) for giant in self._giants]
            if all(len(rows) for rows in sets):
                self._push(sets, root.makespan_us, root, ROOT_ROUNDS)
            return
        node = heapq.heappop(self._open)
        split = self._split(node)
        if split is None:
            # Its giants are decided; branching has nothing more to say about it.
            self._settled = min(self._settled, node.bound)
            return
        giant, low = split
        for half in (low, ~low):
            sets = list(node.sets)
            sets[giant] = sets[giant][half]
            self._push(sets, node.bound, node.certificate, NODE_ROUNDS)

    @property
    def step_cost(self) -> int:
        """Multiplications in a step, about: two ascents and what is beside. (Each root is bounded once, and free.)"""
        if self._root is not None:
            return 0
        return 2 * (NODE_ROUNDS * round_cost(self._relaxation) + NODE_OVERHEAD)

    def _push(self, sets: list[Wholes], bound: float, near: Certificate, rounds: int) -> None:
        """Bound a node and keep it open, unless nothing in it can be below ``above``."""
        self._made += 1
        node = self._restricted(sets)
        base = right_hand_sides(node, self._base)
        reach = 0.3 * max(self._above - bound, 1e-3 * self._above)
        self._often[1][self._giants] = 0  # their rows are others in each node
        found = ascended(node, base, near.weights, self._above, rounds, near.paid, self._often, reach)
        if found.makespan_us >= self._above * (1 - CLOSE):
            self._settled = min(self._settled, max(bound, found.makespan_us))
            return
        sets, found = self._affordable(sets, found, node, base)
        if all(len(rows) for rows in sets):
            heapq.heappush(self._open, _Node(max(bound, found.makespan_us), self._made, sets, found))

    def _affordable(
        self, sets: list[Wholes], found: Certificate, node: Relaxation, base: Reals
    ) -> tuple[list[Wholes], Certificate]:
        """The rows whose cost under the weights leaves the bound below ``above``."""
        whole = self._relaxation
        if found.makespan_us <= whole.backward_us:
            return sets, found  # not from the weights, which then say nothing of what is left
        paid = prices(node, found.weights, base)
        kinds = fees(node, found.paid)
        support = found.support.copy()
        kept = []
        for unit, rows in zip(self._giants, sets, strict=True):
            costs = whole.rows[rows, :COSTS] @ paid[unit] + kinds[unit, whole.kind_of[rows]]
            few = found.makespan_us + costs - costs.min() < self._above
            support[unit] = 0.0
            support[unit, : few.sum()] = found.support[unit, : len(rows)][few]
            kept.append(rows[few])
        return kept, replace(found, support=support)

    def _split(self, node: _Node) -> tuple[int, npt.NDArray[np.bool_]] | None:
        """The giant whose candidates in use differ most, and which of its set lie on the lower side."""
        best: tuple[float, int, npt.NDArray[np.bool_]] | None = None
        # What nothing pays for tells candidates apart no more than a little.
        paid = prices(self._relaxation, node.certificate.weights, self._base) + 1e-3
        for position, (unit, rows) in enumerate(zip(self._giants, node.sets, strict=True)):
            if len(rows) < 2:
                continue
            share = node.certificate.support[unit, : len(rows)]
            share = share / share.sum() if share.any() else np.full(len(rows), 1 / len(rows))
            costs = self._relaxation.rows[rows, :COSTS]
            mean = share @ costs
            spread = np.sqrt(share @ (costs - mean) ** 2) * paid[unit]
            column = int(np.argmax(spread))
            low = costs[:, column] <= mean[column]
            if low.all() or not low.any():
                order = np.argsort(costs[:, column], kind="stable")
                low = np.zeros(len(rows), dtype=np.bool_)
                low[order[: len(rows) // 2]] = True
            if best is None or spread[column] > best[0]:
                best = (float(spread[column]), position, low)
        return None if best is None else (best[1], best[2])

    def _restricted(self, sets: list[Wholes]) -> Relaxation:
        """The relaxation in which giants have only these rows."""
        whole = self._relaxation
        first, last, blocks = whole.first.copy(), whole.last.copy(), [np.arange(len(whole.rows))]
        total = len(whole.rows)
        for unit, rows in zip(self._giants, sets, strict=True):
            first[unit], last[unit] = total, total + len(rows)
            total += len(rows)
            blocks.append(rows)
        taken = np.concatenate(blocks)
        return replace(whole, rows=whole.rows[taken], kind_of=whole.kind_of[taken], first=first, last=last, origin=())


def branch(branchings: list[Branching], effort: int) -> None:
    """Take steps where the bound of all together is least, until ``effort`` multiplications are spent."""
    left = effort
    while branchings and left > 0:
        least = min(branchings, key=lambda one: one.bound)
        if not least.can_step:
            return
        left -= least.step_cost
        least.step()
