"""A certificate: a lower bound on the iteration time of *every* strategy, by Lagrangian duality.

Whatever strategy is chosen and in whatever order the lanes serve it, three things hold for its makespan F
(unit u released at r_u, candidate c of u with load l(c) on a lane and chain h(c)):

- what is released from unit j on passes its lane after r_j:  F >= r_j + sum_{u >= j} l(c_u)  (each lane, each j);
- a unit finishes after its own chain:                        F >= r_u + h(c_u)                  (each u);
- work that contends with backward delays its end:            F >= R + sum_u t(c_u)              (R: backward).

The last line is for training-device work under the paper's assumption; where cores are shared it reads, for
every j, F >= r_j + (b(R - r_j) + sum_{u >= j} w(c_u)) / cores, with w the core time of a candidate.

Weights y >= 0 on these lines that sum to one give D(y) = sum_k y_k rhs_k, minimised over each unit's
candidates *on its own*: a bound for any weights (weak duality), which is why a solver's tolerance never
matters. :func:`ascend` climbs D by entropic mirror ascent; its optimum is that of the linear program in which
every unit may mix its candidates, which the tests solve with HiGHS.

What the bound covers: every leaf of the tree, each compression on either device, every partition size asked
for, each unit with a partition size of its own (a relaxation), and any list schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from espresso.candidates import Size, Unit
from espresso.chains import Pricer, Stretches, partition_segments
from espresso.job import Job
from espresso.strategies import DTYPES, Choice
from espresso.strategies.plan import partition_spans
from espresso.timeline_kernels import LANES_OF_SET, NUM_LANES

Wholes = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

CORES = NUM_LANES
"""Column of the core time in a feature row: after those of the lanes."""
NUM_LOADS = NUM_LANES + 1
"""Loads of a candidate: every lane, and core time."""
CHAIN = NUM_LOADS
"""Column of the chain in a feature row of ``NUM_LOADS + 1``."""
_HEAD, _REST = CHAIN + 1, CHAIN + 1 + NUM_LANES
ROUNDING = 1e-9
"""Sums round; the bound gives this much of itself away, so that it never exceeds the optimum by rounding."""


@dataclass(frozen=True)
class Certificate:
    """A proven lower bound.

    Attributes:
        makespan_us: no strategy's makespan is below it.
        weights: y, float64[NUM_LOADS + 1, units]: the lines' weights; restarts a later ascent.
        support: for every unit, feature row -> how often the ascent's minimum was there, normalised: the
            fractions of the linear program's solution, about.
        rounds: iterations of the ascent.
    """

    makespan_us: float
    weights: Reals
    support: Reals
    rounds: int


@dataclass(frozen=True)
class Relaxation:
    """The linear program's data, candidates pooled by unit size.

    Attributes:
        release_us: float64[units], undisturbed.
        backward_us: R.
        rows: float64[candidates, NUM_LOADS + 1], those of one size together.
        first, last: int64[units]: each unit's candidates among ``rows``.
        origin: for every row (index into the leaves, partition size).
        cores: cores shared by everything, 0 under the paper's assumption.
        backward_cores: what backward demands.
    """

    release_us: Reals
    backward_us: float
    rows: Reals
    first: Wholes
    last: Wholes
    origin: tuple[tuple[int, int], ...]
    cores: float
    backward_cores: float


@njit(cache=True, nogil=True)
def leaf_features(numbers: Wholes, sets: Wholes, us: Reals, cores: Reals, out: Reals) -> None:
    """Per leaf: loads of the lanes, core time, chain; then first and last use of each lane.

    ``numbers`` int64[leaves, longest + 1] of shapes (-1 after the end), priced by ``sets``, ``us``, ``cores``.
    ``out`` float64[leaves, CHAIN + 1 + 2 * NUM_LANES]: from ``_HEAD`` the time before a lane's first task, from
    ``_REST`` after its last.
    """
    for i in range(numbers.shape[0]):
        out[i] = 0.0
        for lane in range(NUM_LANES):
            out[i, _HEAD + lane] = np.inf
        before = 0.0
        for k in range(numbers.shape[1]):
            shape = numbers[i, k]
            if shape < 0:
                break
            time = us[shape]
            lanes = LANES_OF_SET[sets[shape]]
            for m in range(3):
                lane = lanes[m]
                if m > 0 and lane == lanes[m - 1]:
                    continue
                out[i, lane] += time
                out[i, _HEAD + lane] = min(out[i, _HEAD + lane], before)
                out[i, _REST + lane] = before + time
            out[i, CORES] += time * cores[shape]
            before += time
        out[i, CHAIN] = before
        for lane in range(NUM_LANES):
            if out[i, _HEAD + lane] == np.inf:
                out[i, _HEAD + lane] = 0.0
            out[i, _REST + lane] = before - out[i, _REST + lane]


@njit(cache=True, nogil=True)
def join_partitions(full: Reals, tail: Reals, count: int, out: Reals) -> None:
    """Features of ``count`` partitions that run through the same leaf: loads add up, chains overlap.

    The chain is bounded by each lane: it serves all partitions, after the shortest head, before the shortest tail.
    """
    for i in range(full.shape[0]):
        for k in range(NUM_LOADS):
            out[i, k] = (count - 1) * full[i, k] + tail[i, k]
        chain = max(full[i, CHAIN], tail[i, CHAIN]) if count > 1 else tail[i, CHAIN]
        for lane in range(NUM_LANES):
            if count > 1 and out[i, lane] > 0.0:
                head = min(full[i, _HEAD + lane], tail[i, _HEAD + lane])
                rest = min(full[i, _REST + lane], tail[i, _REST + lane])
                chain = max(chain, head + out[i, lane] + rest)
        out[i, CHAIN] = chain


@njit(cache=True, nogil=True)
def pareto(rows: Reals, order: Wholes) -> npt.NDArray[np.bool_]:
    """Rows that no other row matches or beats in every column; of equal ones the first in ``order``.

    ``order`` sorts by the sum of columns, so that a dominating row always comes first.
    """
    n, width = rows.shape
    keep = np.zeros(n, dtype=np.bool_)
    front = np.empty(n, dtype=np.int64)
    size = 0
    for i in order:
        dominated = False
        for position in range(size):
            j = front[position]
            worse = False
            for k in range(width):
                if rows[j, k] > rows[i, k]:
                    worse = True
                    break
            if not worse:
                dominated = True
                # Move to front: a row that beats one often beats the next.
                front[position] = front[position // 2]
                front[position // 2] = j
                break
        if not dominated:
            keep[i] = True
            front[size] = i
            size += 1
    return keep


def undominated_leaves(
    pricer: Pricer, size: Size, leaves: tuple[Choice, ...], partitions: Sequence[int]
) -> tuple[Reals, list[tuple[int, int]]]:
    """The features of a size's leaves at every partition size, dominated ones dropped.

    Safe for the bound: D prices a candidate with weights that are never negative, so one that is no less
    in every load and in its chain never is a minimum alone. (It says nothing about list schedules: there a
    dominated candidate can, rarely, finish earlier.)

    Returns:
        float64[kept, NUM_LOADS + 1] and for every row its (index into ``leaves``, partition size).
    """
    numel, dtype, runs = size
    blocks: list[Reals] = []
    origin: list[tuple[int, int]] = []
    seen: set[tuple[tuple[int, int], ...]] = set()
    for limit in partitions:
        spans = partition_spans(numel, limit // DTYPES[dtype])
        if (key := tuple(spans)) in seen:
            continue
        seen.add(key)
        start = 0
        while start < len(leaves):
            # Leaves of one compressor lie together; each run is priced at once.
            stop = start
            while stop < len(leaves) and leaves[stop].compressor == leaves[start].compressor:
                stop += 1
            members = leaves[start:stop]
            # Compressors of several rounds are never cut.
            cuts = spans if members[0].option.num_rounds == 1 else [(0, numel)]
            parts = [
                _leaf_features(
                    pricer, members, length, dtype,
                    runs if len(cuts) == 1 else partition_segments(runs, length, numel),
                )
                for length in (cuts[0][1] - cuts[0][0], cuts[-1][1] - cuts[-1][0])
            ]  # fmt: skip
            rows = np.empty((len(members), NUM_LOADS + 1))
            join_partitions(parts[0], parts[1], len(cuts), rows)
            kept = np.flatnonzero(pareto(rows, np.argsort(rows.sum(axis=1), kind="stable")))
            blocks.append(rows[kept])
            origin += [(start + int(index), limit) for index in kept]
            start = stop
    rows = np.concatenate(blocks)
    kept = np.flatnonzero(pareto(rows, np.argsort(rows.sum(axis=1), kind="stable")))
    return rows[kept], [origin[index] for index in kept]


def _leaf_features(
    pricer: Pricer, members: tuple[Choice, ...], elements: int, dtype: str, segments: Stretches
) -> Reals:
    numbers = pricer.catalogue.padded([choice.option for choice in members])
    sets, us, cores = pricer.shape_costs(numbers, (members[0].compressor, elements, dtype, segments))
    out = np.empty((len(members), NUM_LOADS + 1 + 2 * NUM_LANES))
    leaf_features(numbers, sets, us, cores, out)
    return out


def _remembered(
    pricer: Pricer, size: Size, leaves: tuple[Choice, ...], partitions: tuple[int, ...]
) -> tuple[Reals, list[tuple[int, int]]]:
    # The leaves are kept with the answer, so that their identity stays their own.
    rows, names, _ = pricer.remember(
        ("undominated", size, id(leaves), partitions),
        lambda: (*undominated_leaves(pricer, size, leaves, partitions), leaves),
    )
    return rows, names


def relax(
    job: Job, units: Sequence[Unit], leaves: tuple[Choice, ...], partitions: Sequence[int], pricer: Pricer
) -> Relaxation:
    """The linear program of a job: see the module's text."""
    where: dict[Size, tuple[int, int]] = {}
    blocks, origin, total = [], [], 0
    for unit in units:
        if unit.size not in where:
            rows, names = _remembered(pricer, unit.size, leaves, tuple(partitions))
            where[unit.size] = (total, total + len(rows))
            blocks.append(rows)
            origin += names
            total += len(rows)
    spans = np.array([where[unit.size] for unit in units], dtype=np.int64)
    ready = np.array(job.ready_us)
    contention = job.costs.contention
    return Relaxation(
        ready[[unit.bucket for unit in units]],
        float(ready[-1]),
        np.concatenate(blocks),
        spans[:, 0].copy(),
        spans[:, 1].copy(),
        tuple(origin),
        contention.cores or 0.0,
        contention.backward_cores,
    )


@njit(cache=True, nogil=True)
def _constants(release: Reals, backward: float, cores: float, backward_cores: float) -> Reals:
    """float64[NUM_LOADS + 1, units]: right-hand sides without candidates; -inf where a line is not used."""
    n = release.shape[0]
    base = np.empty((CHAIN + 1, n))
    for j in range(n):
        base[:NUM_LOADS, j] = release[j]
        # Units handed over together share their lines: those of the first of them.
        if j > 0 and release[j] == release[j - 1]:
            base[:NUM_LOADS, j] = -np.inf
        base[CHAIN, j] = release[j]
        if cores > 0.0:
            if base[CORES, j] > -np.inf:
                base[CORES, j] += backward_cores * (backward - release[j]) / cores
        else:
            base[CORES, j] = -np.inf
            base[0, j] = backward if j == 0 else -np.inf
    return base


@njit(cache=True, nogil=True)
def dual(
    weights: Reals, base: Reals, rows: Reals, first: Wholes, last: Wholes, cores: float,
    picked: Wholes, prices: Reals,
) -> float:  # fmt: skip
    """D(y), and in ``picked`` each unit's minimising row. ``prices`` float64[NUM_LOADS + 1] is scratch."""
    n = first.shape[0]
    total = 0.0
    prices[:] = 0.0
    for u in range(n):
        for k in range(NUM_LOADS):
            if base[k, u] > -np.inf:
                prices[k] += weights[k, u]
                total += weights[k, u] * base[k, u]
        chain = weights[CHAIN, u]
        total += chain * base[CHAIN, u]
        core_price = prices[CORES] / cores if cores > 0.0 else 0.0
        least = np.inf
        at = first[u]
        for row in range(first[u], last[u]):
            cost = (
                prices[0] * rows[row, 0] + prices[1] * rows[row, 1] + prices[2] * rows[row, 2]
                + prices[3] * rows[row, 3] + prices[4] * rows[row, 4] + prices[5] * rows[row, 5]
                + prices[6] * rows[row, 6] + core_price * rows[row, CORES] + chain * rows[row, CHAIN]
            )  # fmt: skip
            if cost < least:
                least = cost
                at = row
        picked[u] = at
        total += least
    return total


@njit(cache=True, nogil=True)
def lines(base: Reals, rows: Reals, cores: float, picked: Wholes, out: Reals) -> None:
    """Every line's right-hand side for the rows picked: D's supergradient."""
    loads = np.zeros(NUM_LOADS)
    for u in range(picked.shape[0] - 1, -1, -1):
        row = rows[picked[u]]
        for k in range(NUM_LANES):
            loads[k] += row[k]
            out[k, u] = base[k, u] + loads[k]
        if cores > 0.0:
            loads[CORES] += row[CORES] / cores
        out[CORES, u] = base[CORES, u] + loads[CORES]
        out[CHAIN, u] = base[CHAIN, u] + row[CHAIN]


@njit(cache=True, nogil=True)
def ascend(
    weights: Reals, base: Reals, rows: Reals, first: Wholes, last: Wholes, cores: float,
    above: float, rounds: int, close: float, best_weights: Reals, frequency: Reals,
) -> tuple[float, int]:  # fmt: skip
    """Entropic mirror ascent on D with Polyak's step; ``weights`` is where it starts and is overwritten.

    Args:
        above: a makespan that some strategy reaches: no bound is above it.
        close: stop when the bound is within this fraction of ``above``.
        best_weights: the weights of the best bound found.
        frequency: float64[units, most candidates]: a running mean of the minimising rows.

    Returns:
        (best bound, rounds taken).
    """
    n = first.shape[0]
    picked = np.empty(n, dtype=np.int64)
    prices = np.empty(CHAIN + 1)
    slope = np.empty((CHAIN + 1, n))
    mean = np.zeros((CHAIN + 1, n))
    best = -np.inf
    reach = -1.0
    stale = 0
    taken = 0
    for taken in range(1, rounds + 1):
        value = dual(weights, base, rows, first, last, cores, picked, prices)
        if value > best:
            if value > best + 0.1 * reach * 0.05:
                stale = 0
            best = value
            best_weights[:] = weights
            if best >= above * (1.0 - close):
                break
        if reach < 0.0:
            reach = max(above - best, 1e-6 * above)
        stale += 1
        if stale > 12:
            reach *= 0.6
            stale = 0
            weights[:] = best_weights
            if reach < 2e-4 * above:
                break
            dual(weights, base, rows, first, last, cores, picked, prices)
        for u in range(n):
            frequency[u] *= 0.95
            frequency[u, picked[u] - first[u]] += 0.05
        lines(base, rows, cores, picked, slope)
        # A running mean of supergradients damps the zigzag between equal candidates.
        blend = 1.0 if taken == 1 else 0.3
        widest = 0.0
        for k in range(CHAIN + 1):
            for u in range(n):
                if base[k, u] > -np.inf:
                    mean[k, u] += blend * (slope[k, u] - mean[k, u])
        centre = 0.0
        for k in range(CHAIN + 1):
            for u in range(n):
                if base[k, u] > -np.inf:
                    centre += weights[k, u] * mean[k, u]
        for k in range(CHAIN + 1):
            for u in range(n):
                if base[k, u] > -np.inf and weights[k, u] > 1e-9:
                    widest = max(widest, abs(mean[k, u] - centre))
                elif base[k, u] > -np.inf:
                    widest = max(widest, mean[k, u] - centre)
        if widest == 0.0:
            break
        step = (max(best - value, 0.0) + reach) / (widest * widest)
        total = 0.0
        for k in range(CHAIN + 1):
            for u in range(n):
                if base[k, u] > -np.inf:
                    # No weight dies: what is slack now may bind later.
                    weights[k, u] = max(weights[k, u], 1e-12) * np.exp(
                        min(max(step * (mean[k, u] - centre), -3.0), 3.0)
                    )
                    total += weights[k, u]
        for k in range(CHAIN + 1):
            for u in range(n):
                weights[k, u] /= total
    return best, taken


def right_hand_sides(relaxation: Relaxation) -> Reals:
    """float64[NUM_LOADS + 1, units]: every line without its candidates; -inf where there is no line."""
    found: Reals = _constants(
        relaxation.release_us, relaxation.backward_us, relaxation.cores, relaxation.backward_cores
    )
    return found


def certify(
    relaxation: Relaxation,
    above: float,
    *,
    rounds: int = 600,
    close: float = 1e-4,
    start: Reals | None = None,
) -> Certificate:
    """The best bound that the ascent finds.

    Args:
        above: a makespan that some strategy reaches.
        rounds: most iterations.
        close: good enough, as a fraction of ``above``.
        start: weights of an earlier certificate of the same units.
    """
    base = right_hand_sides(relaxation)
    used = np.isfinite(base)
    if start is None:
        # Without knowledge: each resource's first line carries most, early lines more than late ones.
        n = base.shape[1]
        weights = np.where(used, 1e-4 / n, 0.0)
        weights[:, 0] += used[:, 0] * 1.0
        weights[CHAIN] = 0.05 / n
    else:
        weights = np.where(used, np.maximum(start, 1e-9), 0.0)
    weights /= weights.sum()
    best_weights = weights.copy()
    most = int((relaxation.last - relaxation.first).max())
    frequency = np.zeros((len(relaxation.first), most))
    best, taken = ascend(
        weights, base, relaxation.rows, relaxation.first, relaxation.last, relaxation.cores,
        above, rounds, close, best_weights, frequency,
    )  # fmt: skip
    bound = max(best, relaxation.backward_us) * (1.0 - ROUNDING)
    return Certificate(min(bound, above), best_weights, frequency, taken)


__all__ = ["Certificate", "Relaxation", "certify", "relax", "right_hand_sides", "undominated_leaves"]
