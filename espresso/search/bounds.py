"""A certificate: a lower bound on the iteration time of *every* strategy, by Lagrangian duality.

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
which the tests solve with HiGHS. A giant that mixes is most of the gap: :mod:`espresso.search.branching`.

What the bound covers: every leaf of the tree, each compression on either device, every partition size asked
for, scheduled first come first served as the timeline does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from espresso.model.arrays import Reals
from espresso.search.bound_kernels import (
    CHAIN,
    COSTS,
    GIANT_LINES,
    HASTY,
    KEPT,
    LINKS,
    NUM_LINES,
    PATIENT,
    Often,
    ascend,
    constants,
    giant_constants,
    unit_prices,
)
from espresso.search.budgets import UNKNOWN
from espresso.search.relaxation import Relaxation

ROUNDING = 1e-9
"""Sums round; the bound gives this much of itself away, so that it never exceeds the optimum by rounding."""
CLOSE = 1e-4
"""A bound this near the best strategy, as a fraction, is as good as equal."""
BISECTIONS = 8
FAR, NEAR = 4.0, 1.5
"""How far the next multiplier of a budget is from one that was a guess, and from one that an earlier ascent found."""
SETTLED = 0.03
"""A multiplier known so well is good enough: over the ten cases of ``benchmarks.search --only families`` the bound fell
by at most two thousandths against .001."""


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
    start: Reals | None = None,
    paid: tuple[float, ...] = (),
    fixed: bool = False,
) -> Certificate:
    """The best bound that the ascent finds.

    Args:
        above: a makespan that some strategy reaches.
        rounds: most iterations.
        start: weights of an earlier certificate of the same units.
        paid: where to start with the budgets' multipliers.
        fixed: leave them there.
    """
    base, often = right_hand_sides(relaxation), nothing_noted(relaxation)
    weights = _first_weights(base) if start is None else start
    if fixed or not relaxation.has_budget:
        return ascended(relaxation, base, weights, above, rounds, paid, often)
    return _priced(relaxation, base, weights, above, rounds, paid or (0.0,) * len(relaxation.limits), often)


def ascend_from(relaxation: Relaxation, near: Certificate, above: float, *, rounds: int) -> Certificate:
    """A bound from the weights of a similar relaxation (of the same units): short steps, few of them."""
    reach = 0.3 * max(above - near.makespan_us, 1e-3 * above)
    base, often = right_hand_sides(relaxation), nothing_noted(relaxation)
    return ascended(relaxation, base, near.weights, above, rounds, near.paid, often, reach)


def polish(
    relaxation: Relaxation, near: Certificate, above: float, *, rounds: int, start: Certificate | None = None
) -> Certificate:
    """A bound nearer the program's optimum, with patience; or ``near``, where that is higher.

    From nothing, or in short steps from ``start``, where the same units' ascent ended at another partition size.
    """
    base, often = right_hand_sides(relaxation), nothing_noted(relaxation)
    weights, reach = _first_weights(base, relaxation.at), 0.0
    if start is not None:
        weights, reach = start.weights, 0.1 * max(above - start.makespan_us, 1e-3 * above)
    found = ascended(relaxation, base, weights, above, rounds, near.paid, often, reach, PATIENT)
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

    That is one line alone, and an ascent that stays at backward's own can miss it. The last bucket may hold nothing.
    """
    at = int(np.searchsorted(relaxation.release_us, relaxation.backward_us))
    spans = set(zip(relaxation.first[at:].tolist(), relaxation.last[at:].tolist(), strict=True))
    shortest = max((float(relaxation.rows[first:last, CHAIN].min()) for first, last in spans), default=0.0)
    return (relaxation.backward_us + shortest) * (1.0 - ROUNDING)


def nothing_noted(relaxation: Relaxation) -> Often:
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


def ascended(
    relaxation: Relaxation,
    base: Reals,
    start: Reals,
    above: float,
    rounds: int,
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
        relaxation.cores, relaxation.at, above, reach, rounds, CLOSE, patience, best_weights, support,
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
    paid: tuple[float, ...],
    often: Often,
) -> Certificate:
    """As :func:`ascended`, and each budget's multiplier by bisection: more where the fractions overspend."""
    best = ascended(relaxation, base, start, above, rounds, paid, often)
    # Of two budgets the first is looked at again: what the second asks for spends less of it too.
    for which in (0,) if len(paid) == 1 else (0, 1, 0):
        best = _bisected(relaxation, base, best, above, rounds, which, often)
    return best


def _bisected(
    relaxation: Relaxation,
    base: Reals,
    best: Certificate,
    above: float,
    rounds: int,
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
        spends = relaxation.spends[which]
        scale = above / max(np.where(spends < UNKNOWN, spends, 0.0).max(axis=1).sum(), 1e-30)
        if high == np.inf:
            price = max(low * apart, scale / 64)
        else:
            price = (low + high) / 2 if low or apart == FAR else high / apart
        paid = (*best.paid[:which], price, *best.paid[which + 1 :])
        tried = ascended(relaxation, base, best.weights, above, max(rounds // 4, 40), paid, often)
        if tried.makespan_us > best.makespan_us:
            best = tried
        if best.makespan_us >= above * (1 - CLOSE) or high - low < SETTLED * high:
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
