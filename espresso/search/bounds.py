"""A certificate: a lower bound on the iteration time of *every* strategy, by Lagrangian duality and branching.

Whatever strategy is chosen, these lines hold for its makespan F (unit u released at r_u, candidate c of u with load
l(c) on a lane, chain h(c), and e(c) of training work before anything else):

- what is released from unit j on passes its lane after r_j:  F >= r_j + sum_{u >= j} l(c_u)  (each lane, each j),
  where l is the work over as many as the lane has room for; the same for exchanges under way, latency included;
- a unit finishes after its own chain:                        F >= r_u + h(c_u)                  (each u);
- work that contends with backward delays its end:            F >= R + sum_u t(c_u)              (R: backward);
- the same for a link and the largest units G alone, which all start and end elsewhere (an end holds the latency):
  F >= min_{u in G} (r_u + head(c_u)) + sum_{u in G} l(c_u) + min_{u in G} tail(c_u).

Where states are known (:mod:`espresso.search.states`) the lines of what is handed over last say more.

Under the paper's assumption r_j is not the undisturbed release but that plus sum_{r_u < r_j} e(c_u): training
work that comes first in its chain is queued when its unit is handed over, and backward goes on only when
the lane is empty. A card's token bucket takes what a full one holds from its lane's lines. Where cores are
shared, releases are the undisturbed ones and the third line reads, for
every j, F >= r_j + (b(R - r_j) + sum_{u >= j} w(c_u)) / cores, with w the core time of a candidate.

Weights y >= 0 on these lines that sum to one give D(y) = sum_k y_k rhs_k, minimised over each unit's
candidates *on its own*: a bound for any weights (weak duality), which is why a solver's tolerance never
matters. Budgets, of error and of memory, add a price on each. :func:`espresso.search.bound_kernels.ascend` climbs D
by entropic mirror ascent; its optimum is that of the linear program in which every unit may mix its candidates,
which the tests solve with HiGHS. A giant that mixes is most of the gap, so :class:`Branching` splits the giants'
candidates in two, again and again, always where the bound is least.

What the bound covers: every leaf of the tree, each compression on either device, every partition size asked
for, scheduled first come first served as the timeline does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from espresso.model.timeline_kernels import BURST_LANE
from espresso.search.bound_kernels import (
    CHAIN,
    COSTS,
    GIANT_LINES,
    HASTY,
    KEPT,
    LINKS,
    NUM_LINES,
    NUM_RESOURCES,
    PATIENT,
    Often,
    ascend,
    constants,
    giant_constants,
    unit_prices,
)
from espresso.search.relaxation import Relaxation

Wholes = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

ROUNDING = 1e-9
"""Sums round; the bound gives this much of itself away, so that it never exceeds the optimum by rounding."""
NODE_ROUNDS = 30
ROOT_ROUNDS = 60
BISECTIONS = 8
FAR, NEAR = 4.0, 1.5
"""How far the next multiplier of a budget is from one that was a guess, and from one that an earlier ascent found."""
SETTLED = 0.03
"""A multiplier known so well is good enough: over the ten cases of ``benchmarks.search --only families`` the bound fell
by at most two thousandths against .001."""
NODE_OVERHEAD = 40_000
"""What a node takes beside its ascent, in multiplications: most of a small job's."""


@dataclass(frozen=True)
class Certificate:
    """A proven lower bound.

    Attributes:
        makespan_us: no strategy's makespan is below it.
        weights: y, float64[NUM_LINES, units]: the lines' weights; restarts a later ascent.
        support: for every unit, row -> how often the ascent's minimum was there, lately: the fractions of the
            linear program's solution, about.
        rounds: iterations of the ascent.
        paid: each budget's multiplier, microseconds per unit of what it bounds.
    """

    makespan_us: float
    weights: Reals
    support: Reals
    rounds: int
    paid: tuple[float, ...] = ()


def right_hand_sides(relaxation: Relaxation, known: Reals | None = None) -> Reals:
    """float64[NUM_LINES, units]: every line without its candidates; -inf where there is no line.

    ``known`` is what this gave for the same units with other candidates, of which only the giants' lines depend.
    """
    if known is None:
        base = constants(
            relaxation.release_us, relaxation.backward_us, relaxation.cores, relaxation.backward_cores,
            relaxation.resources, relaxation.credit_us, relaxation.beside_us, relaxation.lapse_us, relaxation.at,
        )  # fmt: skip
    else:
        base = known.copy()
    if len(relaxation.giants) > 1:
        giant_constants(
            relaxation.release_us, relaxation.giants, relaxation.rows, relaxation.first, relaxation.last,
            relaxation.credit_us, base,
        )  # fmt: skip
    return base


def _is_giant(relaxation: Relaxation) -> npt.NDArray[np.bool_]:
    flags = np.zeros(len(relaxation.first), dtype=np.bool_)
    flags[relaxation.giants] = True
    return flags


def fees(relaxation: Relaxation, paid: Sequence[float]) -> Reals:
    """float64[units, kinds]: what a kind's spending costs a unit, its share of the budgets given back."""
    _, units, kinds = relaxation.spends.shape
    total = np.zeros((units, kinds))
    for price, spends, limit in zip(paid, relaxation.spends, relaxation.limits, strict=bool(paid)):
        total += price * (spends - limit / units)
    return total


def prices(relaxation: Relaxation, weights: Reals, base: Reals | None = None) -> Reals:
    """float64[units, COSTS]: what each unit pays per cost under these weights.

    ``base`` is :func:`right_hand_sides`, if it is at hand.
    """
    if base is None:
        base = right_hand_sides(relaxation)
    found = np.empty((len(relaxation.first), COSTS))
    unit_prices(
        weights, base, _is_giant(relaxation), relaxation.cores, relaxation.at, np.empty(NUM_LINES), found
    )  # fmt: skip
    return found


def certify(
    relaxation: Relaxation,
    above: float,
    *,
    rounds: int = 600,
    close: float = 1e-4,
    start: Reals | None = None,
    paid: tuple[float, ...] = (),
    fixed: bool = False,
) -> Certificate:
    """The best bound that the ascent finds.

    Args:
        above: a makespan that some strategy reaches.
        rounds: most iterations.
        close: good enough, as a fraction of ``above``.
        start: weights of an earlier certificate of the same units.
        paid: where to start with the budgets' multipliers.
        fixed: leave them there.
    """
    base, often = right_hand_sides(relaxation), _nothing_noted(relaxation)
    weights = _first_weights(base) if start is None else start
    if fixed or not relaxation.has_budget:
        return _ascend(relaxation, base, weights, above, rounds, close, paid, often)
    return _priced(relaxation, base, weights, above, rounds, close, paid or (0.0,) * len(relaxation.limits), often)


def ascend_from(relaxation: Relaxation, near: Certificate, above: float, *, rounds: int) -> Certificate:
    """A bound from the weights of a similar relaxation (of the same units): short steps, few of them."""
    reach = 0.3 * max(above - near.makespan_us, 1e-3 * above)
    base, often = right_hand_sides(relaxation), _nothing_noted(relaxation)
    return _ascend(relaxation, base, near.weights, above, rounds, 1e-4, near.paid, often, reach)


def polish(
    relaxation: Relaxation, near: Certificate, above: float, *, rounds: int, start: Certificate | None = None
) -> Certificate:
    """A bound nearer the program's optimum, with patience; or ``near``, where that is higher.

    From nothing, or in short steps from ``start``, where the same units' ascent ended at another partition size.
    """
    base, often = right_hand_sides(relaxation), _nothing_noted(relaxation)
    weights, reach = _first_weights(base, relaxation.at), 0.0
    if start is not None:
        weights, reach = start.weights, 0.1 * max(above - start.makespan_us, 1e-3 * above)
    found = _ascend(relaxation, base, weights, above, rounds, 1e-4, near.paid, often, reach, PATIENT)
    return found if found.makespan_us > near.makespan_us else near


def polish_cost(relaxation: Relaxation) -> int:
    """As :func:`round_cost`, of a patient ascent, which mostly looks at few rows.

    Under budgets there are no states to be patient for, and many rows.
    """
    if relaxation.has_budget:
        return 3 * round_cost(relaxation)
    return int((relaxation.last - relaxation.first).sum()) // 4 + 150 * len(relaxation.first)


def round_cost(relaxation: Relaxation) -> int:
    """Multiplications in a round of an ascent, about: over every unit's rows and lines."""
    return 2 * int((relaxation.last - relaxation.first).sum()) + 50 * len(relaxation.first)


def last_alone(relaxation: Relaxation) -> float:
    """No strategy's makespan is below it: what is handed over last takes its shortest chain then.

    That is one line alone, and an ascent that stays at backward's own can miss it.
    """
    at = int(np.searchsorted(relaxation.release_us, relaxation.backward_us))
    spans = set(zip(relaxation.first[at:].tolist(), relaxation.last[at:].tolist(), strict=True))
    shortest = max(float(relaxation.rows[first:last, CHAIN].min()) for first, last in spans)
    return (relaxation.backward_us + shortest) * (1.0 - ROUNDING)


def _nothing_noted(relaxation: Relaxation) -> Often:
    """For :func:`espresso.search.bound_kernels.ascend`: no row was cheapest so far."""
    units = len(relaxation.first)
    return np.empty((units, KEPT), dtype=np.int64), np.zeros(units, dtype=np.int64)


def _first_weights(base: Reals, at: int = 0) -> Reals:
    """Without knowledge: each resource's first line carries most, early lines more than late ones.

    The lines of unit ``at``, if states are known, matter only beside others: without some weight they stay at none.
    """
    n = base.shape[1]
    used = np.isfinite(base)
    weights = np.where(used, 1e-4 / n, 0.0)
    weights[:GIANT_LINES, 0] += used[:GIANT_LINES, 0] * 1.0
    weights[CHAIN] = 0.05 / n
    if at:
        weights[LINKS, at] = weights[CHAIN, at:] = 0.2
    return weights


def _ascend(
    relaxation: Relaxation,
    base: Reals,
    start: Reals,
    above: float,
    rounds: int,
    close: float,
    paid: tuple[float, ...],
    often: Often,
    reach: float = 0.0,
    patience: int = HASTY,
) -> Certificate:
    weights = np.where(np.isfinite(base), np.maximum(start, 1e-9), 0.0)
    weights /= weights.sum()
    best_weights = weights.copy()
    most = int((relaxation.last - relaxation.first).max())
    units = len(relaxation.first)
    support = np.zeros((units, most))
    scratch = (
        np.empty(NUM_LINES), np.empty(most), np.empty((units, COSTS)), np.empty(base.shape), np.zeros(base.shape)
    )  # fmt: skip
    best, taken = ascend(
        weights, base, relaxation.rows, np.ascontiguousarray(relaxation.rows[:, :COSTS].T),
        fees(relaxation, paid), relaxation.kind_of, relaxation.first, relaxation.last, _is_giant(relaxation),
        relaxation.cores, relaxation.at, above, reach, rounds, close, patience, best_weights, support,
        np.empty(units, dtype=np.int64), scratch, often,
    )  # fmt: skip
    bound = max(best, relaxation.backward_us) * (1.0 - ROUNDING)
    return Certificate(min(bound, above), best_weights, support, taken, paid)


def _priced(
    relaxation: Relaxation,
    base: Reals,
    start: Reals,
    above: float,
    rounds: int,
    close: float,
    paid: tuple[float, ...],
    often: Often,
) -> Certificate:
    """As :func:`_ascend`, and each budget's multiplier by bisection: more where the fractions overspend."""
    best = _ascend(relaxation, base, start, above, rounds, close, paid, often)
    # Of two budgets the first is looked at again: what the second asks for spends less of it too.
    for which in (0,) if len(paid) == 1 else (0, 1, 0):
        best = _bisected(relaxation, base, best, above, rounds, close, which, often)
    return best


def _bisected(
    relaxation: Relaxation,
    base: Reals,
    best: Certificate,
    above: float,
    rounds: int,
    close: float,
    which: int,
    often: Often,
) -> Certificate:
    """The best bound over the multiplier of one budget, the other's fixed."""
    tried, low, high = best, 0.0, np.inf
    price = best.paid[which]
    apart = NEAR if price else FAR
    for _ in range(BISECTIONS):
        if _spent(relaxation, tried, which) > relaxation.limits[which]:
            low = price
        else:
            high = price
            if price == 0.0:
                break
        scale = above / max(relaxation.spends[which].max(axis=1).sum(), 1e-30)
        if high == np.inf:
            price = max(low * apart, scale / 64)
        else:
            price = (low + high) / 2 if low or apart == FAR else high / apart
        paid = (*best.paid[:which], price, *best.paid[which + 1 :])
        tried = _ascend(relaxation, base, best.weights, above, max(rounds // 4, 40), close, paid, often)
        if tried.makespan_us > best.makespan_us:
            best = tried
        if best.makespan_us >= above * (1 - close) or high - low < SETTLED * high:
            break
    return best


def _spent(relaxation: Relaxation, certificate: Certificate, which: int) -> float:
    """What the fractions spend of a budget."""
    total = 0.0
    for unit, (first, last) in enumerate(zip(relaxation.first, relaxation.last, strict=True)):
        share = certificate.support[unit, : last - first]
        if not share.any():
            continue  # the ascent was over before it began
        total += float(share @ relaxation.spends[which, unit, relaxation.kind_of[first:last]]) / float(share.sum())
    return total


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
        self._often = _nothing_noted(relaxation)
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
        close = self._above * (1 - 1e-4)
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
        found = _ascend(node, base, near.weights, self._above, rounds, 1e-4, near.paid, self._often, reach)
        if found.makespan_us >= self._above * (1 - 1e-4):
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


__all__ = [
    "CHAIN",
    "NUM_LINES",
    "Branching",
    "Certificate",
    "ascend_from",
    "branch",
    "certify",
    "fees",
    "last_alone",
    "polish",
    "prices",
    "right_hand_sides",
    "round_cost",
]
