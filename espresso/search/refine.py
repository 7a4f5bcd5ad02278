"""From the strategies known to the improved one with its certificate, over the partition sizes.

The partition size is one number for the whole strategy, so the certificate is the least of the bounds of the
sizes; a size whose own bound is not below the best strategy known needs no search.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from espresso.model.arrays import Wholes
from espresso.model.job import Job
from espresso.search.alone import with_sharper_chains
from espresso.search.bound_kernels import CHAIN
from espresso.search.bounds import CLOSE, Certificate, ascend_from, certify, last_alone, polish, polish_cost
from espresso.search.branching import Branching, branch
from espresso.search.budgets import Ledger
from espresso.search.candidates import Leaves
from espresso.search.evaluator import Evaluator, evaluator_at
from espresso.search.local_search import Effort, Guide, LocalSearch, guide
from espresso.search.orders import Orders, say_more
from espresso.search.relaxation import Relaxation, relax
from espresso.search.states import with_states
from espresso.search.together import move_together, pairs_fit
from espresso.strategies import Choice

GAPS = (0.16, 0.12, 0.079, 0.03, 0.01)
"""What orders are to certify, one after the other: each costs several times as much as the one before."""
MOST_ROUNDS = 2000
"""Of a patient ascent; most are over before."""
FEWEST_ROUNDS = 500
"""With fewer the states' lines gain nothing: they take some hundreds to grow."""


@dataclass(frozen=True)
class Start:
    """A strategy to begin with: choices per unit, and its makespan at its own partition size."""

    choices: tuple[Choice, ...]
    partition_bytes: int
    makespan_us: float


@dataclass(frozen=True)
class Refined:
    """What improvement found.

    Attributes:
        evaluator: at the best partition size.
        strategy: its candidate numbers.
        bound_us: no strategy's makespan is below it.
        certificate_ms, improve_ms: wall time.
    """

    evaluator: Evaluator
    strategy: Wholes
    makespan_us: float
    bound_us: float
    certificate_ms: float
    improve_ms: float


@dataclass
class _Size:
    """One partition size on the way."""

    evaluator: Evaluator
    relaxation: Relaxation
    certificate: Certificate
    led: Guide
    strategy: Wholes
    makespan_us: float


def refine(
    job: Job,
    evaluator: Evaluator,
    starts: Sequence[Start],
    leaves: Leaves,
    partitions: Sequence[int],
    *,
    effort: Effort | None = None,
    ledger: Ledger | None = None,
    whole_within: float = 0.0,
) -> Refined:
    """Certify and improve.

    Args:
        evaluator: gives the units and the pricer.
        starts: strategies known (within the budgets), the best of which the result is never above.
        leaves: the whole space (:func:`espresso.search.candidates.every_choice`).
        ledger: the budgets, if there are any.
        whole_within: steps of a strategy that is cut have to be this much faster than the best that is looked at and
            not cut.
    """
    effort = effort or Effort()
    began = time.perf_counter()
    best = min(starts, key=lambda start: start.makespan_us)
    roots = _roots(job, evaluator, best.makespan_us, leaves, partitions, effort, ledger)
    certified = time.perf_counter()
    bounds = {size: certificate.makespan_us for size, (_, certificate) in roots.items()}
    least = best.makespan_us * (1 - CLOSE)
    open_sizes = [size for size in roots if bounds[size] < least]
    within = whole_within, job.forward_us + job.optimizer_us
    found = _searched(evaluator, starts, leaves, open_sizes, roots, effort, within) if effort.events else None
    improved = time.perf_counter()
    home, strategy, makespan = evaluator_at(evaluator, best.partition_bytes), None, best.makespan_us
    if found is not None and found.makespan_us < best.makespan_us:
        home, strategy, makespan = found.evaluator, found.strategy, found.makespan_us
    polished = _polished(roots, open_sizes, evaluator, leaves, makespan, effort)
    branchings = [Branching(*polished[size], makespan) for size in open_sizes]
    branch(branchings, effort.branching)
    for size, one in zip(open_sizes, branchings, strict=True):
        bounds[size] = max(one.bound, last_alone(polished[size][0]))
    bound = min(makespan, _by_orders(bounds, roots, evaluator, leaves, makespan, effort.orders))
    done = time.perf_counter()
    return Refined(
        home,
        home.encode(best.choices) if strategy is None else strategy,
        makespan,
        bound,
        (certified - began + done - improved) * 1e3,
        (improved - certified) * 1e3,
    )


def _polished(
    roots: dict[int, tuple[Relaxation, Certificate]],
    sizes: Sequence[int],
    evaluator: Evaluator,
    leaves: Leaves,
    makespan: float,
    effort: Effort,
) -> dict[int, tuple[Relaxation, Certificate]]:
    """The program with sharper chains, and a bound nearer the optimum where it is least, size after size.

    The bound knows of states, the program that is branched on does not: giants that are cut have none. An ascent begins
    where the last one ended, unless there is effort for all from nothing.
    """
    units, pricer = evaluator.units, evaluator.pricer
    found = {size: roots[size] for size in sizes}
    left, done = effort.polish, set[int]()
    ended: Certificate | None = None
    while left > 0 and found:
        size = min(found, key=lambda one: found[one][1].makespan_us)
        relaxation, certificate = found[size]
        if size in done or certificate.makespan_us >= makespan * (1 - CLOSE):
            break
        done.add(size)
        relaxation = with_sharper_chains(relaxation, units, leaves, size, pricer, makespan)
        stated = relaxation
        if effort.polish > FEWEST_ROUNDS * polish_cost(relaxation):
            stated = with_states(relaxation, units, leaves, size, pricer)
        each = polish_cost(stated)
        rounds = min(MOST_ROUNDS, left // each + 1)
        start = None if each * MOST_ROUNDS * len(found) <= effort.polish else ended
        better = polish(stated, certificate, makespan, rounds=rounds, start=start)
        left -= each * (rounds if better is certificate else better.rounds)
        found[size] = relaxation, better
        ended = ended if better is certificate else better
    return found


def _by_orders(
    bounds: dict[int, float],
    roots: dict[int, tuple[Relaxation, Certificate]],
    evaluator: Evaluator,
    leaves: Leaves,
    makespan: float,
    effort: int,
) -> float:
    """The least bound of all sizes, raised where a few giants are all there is: one gap after the other is tried.

    Not that of a size that cuts them together with more of their buckets.
    """
    best = min([makespan, *bounds.values()])
    any_relaxation, _ = next(iter(roots.values()))  # all of the same giants
    units = evaluator.units
    if not say_more(any_relaxation, units, evaluator.pricer):
        return best
    orders: dict[int, Orders] = {}
    company = {size for size in bounds for giant in any_relaxation.giants if units[giant].parts_within(size)}
    for gap in GAPS:
        above = makespan / (1 + gap)
        found = above
        for size in sorted(bounds, key=bounds.__getitem__):
            if bounds[size] >= found:
                break
            raised = -np.inf
            if effort > 0 and size not in company:
                if size not in orders:
                    orders[size] = Orders(*roots[size], units, leaves, size, evaluator.pricer)
                raised, spent = orders[size].bound(found, effort)
                effort -= spent
            found = min(found, max(bounds[size], raised))
        best = max(best, found)
        if found < above * (1 - CLOSE):
            break
    return best


def _roots(
    job: Job,
    evaluator: Evaluator,
    above: float,
    leaves: Leaves,
    partitions: Sequence[int],
    effort: Effort,
    ledger: Ledger | None,
) -> dict[int, tuple[Relaxation, Certificate]]:
    """The relaxation and its bound at every partition size; each ascent starts where the last one ended."""
    units = evaluator.units
    roots: dict[int, tuple[Relaxation, Certificate]] = {}
    near: Certificate | None = None
    for size in partitions:
        relaxation = relax(job, units, leaves, size, evaluator.pricer, ledger)
        if near is None:
            near = certify(relaxation, above, rounds=effort.rounds(len(units)))
        else:
            near = ascend_from(relaxation, near, above, rounds=effort.rounds(len(units)) // 6)
        roots[size] = (relaxation, near)
    # The certificate is the least bound: where that was only looked at briefly, look again.
    looked = {partitions[0]}
    while (least := min(roots, key=lambda size: roots[size][1].makespan_us)) not in looked:
        looked.add(least)
        relaxation, certificate = roots[least]
        again = certify(
            relaxation, above, rounds=effort.rounds(len(units)) // 3, start=certificate.weights,
            paid=certificate.paid, fixed=True,
        )  # fmt: skip
        if again.makespan_us > certificate.makespan_us:
            roots[least] = (relaxation, again)
    return roots


def certify_units(
    job: Job,
    evaluator: Evaluator,
    leaves: Leaves,
    partitions: Sequence[int],
    above: float,
    ledger: Ledger | None = None,
) -> float:
    """The bound alone, for other units of the same job."""
    roots = _roots(job, evaluator, above, leaves, partitions, Effort(), ledger)
    return min(certificate.makespan_us for _, certificate in roots.values())


def _searched(
    evaluator: Evaluator,
    starts: Sequence[Start],
    leaves: Leaves,
    sizes: Sequence[int],
    roots: dict[int, tuple[Relaxation, Certificate]],
    effort: Effort,
    within: tuple[float, float],
) -> _Size | None:
    """Single units at the most promising sizes and from further starts, blocks on the best of them, then few together.

    What was found at one size is tried at others too: those with the least bounds.
    """
    begun = {size: _begin(evaluator_at(evaluator, size), starts, *roots[size], effort) for size in sizes}
    if not begun:
        return None
    rows = sorted(begun.values(), key=lambda row: row.makespan_us)[: effort.sizes]
    left = effort.events
    for row in rows:
        left -= _sweep(row, left // 3)
    for times, part in effort.further:
        other = _further(min(rows, key=lambda row: row.makespan_us), times, part, effort)
        left -= _sweep(other, left // 3) if effort.starts == 1 else _descend(other, left // 3, 1)
        rows.append(other)
    # Where a budget is spent single units cannot move: a part is kept for several at once.
    for_few = max(left, 0) // 3 if rows[0].relaxation.has_budget and len(_few(rows[0], effort.together)) else 0
    left -= for_few
    for row in sorted(rows, key=lambda row: row.makespan_us)[: effort.starts]:
        if left > 0:
            left -= _descend(row, left, effort.descents)
    left += for_few
    best = min(rows, key=lambda row: row.makespan_us)
    home = best.evaluator.partition_bytes
    nearest = sorted(begun, key=lambda size: (size != home, begun[size].certificate.makespan_us))
    for size in nearest[: effort.starts + 1]:
        if left > 0:
            rows.append(_as_good_here(begun[size], best))
            left -= _move_together(rows[-1], leaves, effort.together, left)
            best = min(best, rows[-1], key=lambda row: row.makespan_us)
    wholes = [row for row in rows if not row.evaluator.partition_bytes]
    whole = min(wholes, key=lambda row: row.makespan_us, default=best)
    factor, beside_us = within  # which a step takes beside the makespan
    is_near = whole.makespan_us + beside_us <= factor * (best.makespan_us + beside_us)
    # One that a start is below would be given up for that, which may be cut.
    return whole if is_near and whole.makespan_us <= min(start.makespan_us for start in starts) else best


def _as_good_here(row: _Size, best: _Size) -> _Size:
    """The best strategy so far, at a row's partition size."""
    strategy = row.evaluator.encode(best.evaluator.decode(best.strategy))
    return replace(row, strategy=strategy, makespan_us=row.evaluator.makespan(strategy))


def _begin(
    here: Evaluator,
    starts: Sequence[Start],
    relaxation: Relaxation,
    certificate: Certificate,
    effort: Effort,
) -> _Size:
    """The better of the program's rounding and the best start of this size.

    Within budgets also the best of all starts, at this size: what rounding gives is made to fit, and is far off then,
    or cannot be.
    """
    led = guide(here, relaxation, certificate, effort.depth(len(here.units)))
    own = [start for start in starts if start.partition_bytes == here.partition_bytes]
    known = [min(some, key=lambda start: start.makespan_us)
             for some in (own, starts if relaxation.has_budget else ()) if some]  # fmt: skip
    begun = [led.rounded] if led.fits else []
    begun += [here.encode(start.choices) for start in known]
    makespan, number = min((here.makespan(strategy), number) for number, strategy in enumerate(begun))
    return _Size(here, relaxation, certificate, led, begun[number].copy(), makespan)


def _further(row: _Size, times: float, part: float, effort: Effort) -> _Size:
    """Another start: the program's solution with chains so many times longer, and limits a part of what they are.

    As if units had to wait on the way, and with something left to spend. Found from nothing: an ascent that begins
    where another ended stays near it.
    """
    units, program = len(row.strategy), row.relaxation
    costs = program.rows.copy()
    costs[:, CHAIN] *= times
    other = replace(program, rows=costs, limits=program.limits * part)
    certificate = certify(
        other, row.makespan_us * times, rounds=effort.rounds(units), paid=row.certificate.paid, fixed=part == 1
    )
    led = replace(guide(row.evaluator, other, certificate, effort.depth(units)), limits=program.limits)
    start = (led.rounded if led.fits else row.strategy).copy()
    return _Size(row.evaluator, program, row.certificate, led, start, row.evaluator.makespan(start))


def _sweep(row: _Size, effort: int) -> int:
    """Improve by single units; returns the events that it took."""
    search = LocalSearch(row.evaluator, row.led)
    row.makespan_us = search.sweep(row.strategy, row.makespan_us, effort)
    return search.spent


def _descend(row: _Size, effort: int, rounds: int) -> int:
    """Improve by blocks and single units; returns the events that it took."""
    search = LocalSearch(row.evaluator, row.led)
    row.makespan_us = search.descend(row.strategy, row.makespan_us, effort, rounds=rounds)
    return search.spent


def _few(row: _Size, tried: int) -> Wholes:
    """Units that are moved together: the giants, and under budgets all where their pairs are not too many."""
    units = len(row.strategy)
    return np.arange(units) if row.relaxation.has_budget and pairs_fit(units, tried) else row.relaxation.giants


def _move_together(row: _Size, leaves: Leaves, tried: int, effort: int) -> int:
    """Improve by a few units at once; returns the events that it took."""
    few = _few(row, tried)
    row.makespan_us, events = move_together(
        row.evaluator, row.led, leaves, row.strategy, row.makespan_us, few, tried, effort
    )  # fmt: skip
    return events
