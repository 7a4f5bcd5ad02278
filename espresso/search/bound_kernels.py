"""The certificate's kernels: what a leaf loads, which leaves matter, and the ascent on the dual function.

A *resource* is a lane, which tasks hold, or a link, on which exchanges are under way; a task takes of it its time over
as many as there is room for. Where a card has a token bucket, its lane alone has an exchange's time at the card's rate;
all else has the shortest time that it may take. A candidate is a row of ``WIDTH`` figures::

    0-6 time on each lane   7, 8 exchanges under way on the intra and the inter link   9 core time   10 chain
    11 training work that comes first   12 training work done before the last hand-over, beside that
    13-15 time on the links' lanes after it (12-15: :mod:`espresso.search.states`, else 0)
    16, 17  least time before the intra and the inter lane are first held   18, 19  least time after they are last held

A line is one lower bound on the makespan (:mod:`espresso.search.bounds`); there are up to ``NUM_LINES`` for each unit::

    0-8 resources   9 cores   10 chain   11, 12 intra and inter lane for the largest units alone, ends included
"""

from __future__ import annotations

import numpy as np

from espresso.model.arrays import Flags, Reals, Wholes
from espresso.model.jit import inner_kernel, inner_sum_kernel, kernel, sum_kernel
from espresso.model.timeline_kernels import (
    BURST_LANE,
    CREDIT,
    LANES_OF_SET,
    NUM_LANES,
    ROOM,
    ROOM_UNDER_WAY,
    copy_vector,
)

Scratch = tuple[Reals, Reals, Reals, Reals, Reals]
Often = tuple[Wholes, Wholes]

KEPT, MANY = 24, 200
"""Rows of a unit that are looked at in every round, if units have more than so many on average: else all are.
(With one compressor they have fewer; looking at few there made strategies of BERT up to 1.2 % worse.)"""
LOOK_AT_LEAST, LOOK_AT_MOST = 3, 10
"""Rounds after a look at all rows in which none is taken though the few promise a better bound, and in which one is.
(1 and 5 gave the same bounds to .3 %, in a tenth more time.)"""
HASTY, PATIENT = 12, 100
"""Rounds without a better bound that an ascent bears. A line that matters only beside others has next to no weight
where one line is all, and takes some tens of rounds to grow; a hasty ascent stays there, in a quarter of the time.
(VGG16 on NVLink with dgc, cut in two: half a percent below the exact program; with patience less than a thousandth.)"""

NUM_RESOURCES = NUM_LANES + 2
CORES = NUM_RESOURCES
NUM_LOADS = NUM_RESOURCES + 1
"""Loads of a candidate: the resources, and core time."""
CHAIN = NUM_LOADS
FIRST = CHAIN + 1
DONE = FIRST + 1
AFTER = DONE + 1
LINKS = slice(3, 6)
"""The links' lanes, whose work after the last hand-over is a candidate's columns from ``AFTER`` on."""
COSTS = AFTER + LINKS.stop - LINKS.start
"""Columns that have a price; dominance compares them."""
HEADS = COSTS
TAILS = HEADS + 2
WIDTH = TAILS + 2
GIANT_LINES = CHAIN + 1
NUM_LINES = GIANT_LINES + 2
"""The first of the two lines of the largest units."""
GIANT_LANES = 3
"""The intra link; the inter link's outward lane follows. Exchanges under way are counted on these."""


@kernel
def leaf_features(numbers: Wholes, sets: Wholes, us: Reals, beside: Reals, limits: Reals, out: Reals) -> None:
    """Per leaf and partition: the ``COSTS`` columns, then each resource's time before its first and after its last use.

    ``numbers`` int64[leaves, longest + 1] of shapes (-1 after the end), priced by ``sets``, ``us``, ``beside``
    (:meth:`espresso.model.pricing.Pricer.columns`); ``limits`` as the timeline takes them;
    ``out`` float64[leaves, COSTS + 2 * NUM_RESOURCES].
    """
    heads = COSTS
    tails = COSTS + NUM_RESOURCES
    # Where one exchange is under way at a time, latency is part of its time.
    link_room = limits[ROOM_UNDER_WAY + GIANT_LANES]
    overlaps = link_room > 1.0
    resources = NUM_RESOURCES if overlaps else NUM_LANES
    part = 1.0 / limits[ROOM : ROOM + NUM_LANES]
    for i in range(numbers.shape[0]):
        for k in range(out.shape[1]):
            out[i, k] = 0.0
        for resource in range(resources):
            out[i, heads + resource] = np.inf
        before = 0.0
        if numbers[i, 0] >= 0 and sets[numbers[i, 0]] == 0:
            out[i, FIRST] = us[numbers[i, 0]]
        for k in range(numbers.shape[1]):
            shape = numbers[i, k]
            if shape < 0:
                break
            time = us[shape]
            lanes = LANES_OF_SET[sets[shape]]
            least = time
            if limits[CREDIT] > 0.0 and lanes[0] <= BURST_LANE <= lanes[1]:
                least = min(time, max(limits[CREDIT + 1], time * beside[shape, 0]))
                out[i, BURST_LANE] += time - least
                time = max(time - limits[CREDIT], least)
            done = before + time + beside[shape, 1]
            for m in range(3):
                lane = lanes[m]
                if m > 0 and lane == lanes[m - 1]:
                    continue
                out[i, lane] += least * part[lane]
                out[i, heads + lane] = min(out[i, heads + lane], before)
                out[i, tails + lane] = before + time
                if overlaps and GIANT_LANES <= lane <= GIANT_LANES + 1:
                    link = NUM_LANES + lane - GIANT_LANES
                    out[i, link] += (done - before) / link_room
                    out[i, heads + link] = min(out[i, heads + link], before)
                    out[i, tails + link] = done
            out[i, CORES] += least * beside[shape, 0]
            before = done
        out[i, CHAIN] = before
        for resource in range(resources):
            # One that is not used bounds nothing: no ends.
            if out[i, resource] == 0.0:
                out[i, heads + resource] = 0.0
                out[i, tails + resource] = 0.0
            else:
                out[i, tails + resource] = before - out[i, tails + resource]


@kernel
def join_partitions(full: Reals, tail: Reals, count: int, credit: float, out: Reals) -> None:
    """Rows of ``count`` partitions that run through the same leaf: loads add up, chains overlap.

    The chain is bounded by each resource: it serves all partitions, after the shortest head, before the shortest tail,
    but for what a token bucket lets through (``credit``).
    """
    for i in range(full.shape[0]):
        for k in range(NUM_LOADS):
            out[i, k] = (count - 1) * full[i, k] + tail[i, k]
        out[i, FIRST] = (count - 1) * full[i, FIRST] + tail[i, FIRST]
        chain = max(full[i, CHAIN], tail[i, CHAIN]) if count > 1 else tail[i, CHAIN]
        for k in range(NUM_RESOURCES):
            head = tail[i, COSTS + k]
            rest = tail[i, COSTS + NUM_RESOURCES + k]
            if count > 1:
                head = min(head, full[i, COSTS + k])
                rest = min(rest, full[i, COSTS + NUM_RESOURCES + k])
                if out[i, k] > 0.0:
                    chain = max(chain, head + out[i, k] + rest - (credit if k == BURST_LANE else 0.0))
            if k == GIANT_LANES or k == GIANT_LANES + 1:
                out[i, HEADS + k - GIANT_LANES] = head
                out[i, TAILS + k - GIANT_LANES] = rest
        out[i, CHAIN] = chain


@kernel
def pareto(rows: Reals, spends: Reals, order: Wholes, front: Wholes) -> int:
    """Rows that no other row matches or beats in every cost, of equal ones the first in ``order``: how many.

    They come first in ``front`` int64[rows], in no order. ``spends`` float64[rows, any] are costs beside the rows'.

    ``order`` sorts by the sum of all costs, so that a dominating row always comes first. A row that goes leaves the
    lesser of its heads and tails with the one that beats it, whose line then speaks for both.
    """
    size = 0
    for i in order:
        dominated = False
        for position in range(size):
            j = front[position]
            worse = False
            for k in range(COSTS):
                if rows[j, k] > rows[i, k]:
                    worse = True
                    break
            for k in range(spends.shape[1]):
                worse = worse or spends[j, k] > spends[i, k]
            if not worse:
                dominated = True
                for k in range(HEADS, WIDTH):
                    rows[j, k] = min(rows[j, k], rows[i, k])
                # Move to front: a row that beats one often beats the next.
                front[position] = front[position // 2]
                front[position // 2] = j
                break
        if not dominated:
            front[size] = i
            size += 1
    return size


def constants(
    release: Reals, backward: float, cores: float, backward_cores: float, resources: int, credit: float, beside: float,
    lapse: float, at: int,
) -> Reals:  # fmt: skip
    """float64[NUM_LINES, units]: the lines without the candidates; -inf where a line is not used.

    ``resources`` is how many there are: the lanes alone, where latency occupies them. A full token bucket saves
    ``credit``, and what all is sent takes on average is no longer than the makespan and what is ``beside`` it.
    Where states are known the links' lines of unit ``at`` begin ``lapse`` before it is handed over.
    """
    base = np.full((NUM_LINES, len(release)), -np.inf)
    base[CHAIN] = release
    # Units handed over together share their lines: those of the first of them.
    first = np.append(True, release[1:] != release[:-1])
    base[1:resources, first] = release[first]
    base[LINKS, at] -= lapse
    if credit > 0.0:
        base[BURST_LANE] -= credit
        base[BURST_LANE, 0] = max(base[BURST_LANE, 0], -beside)
    if cores > 0.0:
        base[0, first] = release[first]
        base[CORES, first] = release[first] + backward_cores * (backward - release[first]) / cores
    else:
        base[0, 0] = backward
    return base


@kernel
def giant_constants(
    release: Reals, giants: Wholes, rows: Reals, first: Wholes, last: Wholes, credit: float, base: Reals
) -> None:
    """The lines of the largest units: from one of them on, their link time between the least head and tail.

    ``giants`` int64[few] in order of release. The heads and tails are the least among the rows that are left.
    """
    for link in range(2):
        start = np.inf
        tail = np.inf
        for position in range(giants.shape[0] - 1, -1, -1):
            unit = giants[position]
            head = np.inf
            for row in range(first[unit], last[unit]):
                head = min(head, rows[row, HEADS + link])
                tail = min(tail, rows[row, TAILS + link])
            start = min(start, release[unit] + head)
            base[GIANT_LINES + link, unit] = start + tail - (credit if GIANT_LANES + link == BURST_LANE else 0.0)


@kernel
def unit_prices(
    weights: Reals, base: Reals, giant: Flags, cores: float, at: int, running: Reals, prices: Reals
) -> float:
    """What each unit pays per cost, float64[units, COSTS], and the constant part of the dual function.

    ``at`` is the first unit that is handed over last, if states are known, else 0; ``running`` float64[NUM_LINES] is
    scratch.
    """
    n = giant.shape[0]
    total = 0.0
    for k in range(NUM_LINES):
        running[k] = 0.0
    for u in range(n):
        for k in range(NUM_LINES):
            if base[k, u] > -np.inf:
                total += weights[k, u] * base[k, u]
                if k != CHAIN:
                    running[k] += weights[k, u]
        for k in range(NUM_RESOURCES):
            prices[u, k] = running[k]
        prices[u, CORES] = running[CORES] / cores if cores > 0.0 else 0.0
        prices[u, CHAIN] = weights[CHAIN, u]
        if giant[u]:
            for link in range(2):
                prices[u, GIANT_LANES + link] += running[GIANT_LINES + link]
    later = 0.0
    pending = 0.0
    done = 0.0
    for u in range(n - 1, -1, -1):
        if u < n - 1 and base[CHAIN, u] < base[CHAIN, u + 1]:
            later += pending
            pending = 0.0
        if u == at - 1:
            done = later
        prices[u, FIRST] = later if cores == 0.0 else 0.0
        prices[u, DONE] = done
        for lane in range(LINKS.start, LINKS.stop):
            prices[u, AFTER + lane - LINKS.start] = weights[lane, at] if u < at else 0.0
        for k in range(1, NUM_LINES):
            if base[k, u] > -np.inf:
                pending += weights[k, u]
    return total


@inner_sum_kernel
def cheapest(
    prices: Reals, columns: Reals, fees: Reals, fee_of: Wholes, first: Wholes, last: Wholes, costs: Reals,
    picked: Wholes,
) -> float:  # fmt: skip
    """Each unit's cheapest row in ``picked``; returns the sum of their costs.

    ``fees`` float64[units, kinds] and ``fee_of`` int64[rows] add what a row's kind costs a unit; ``costs`` is
    scratch for one unit's rows. Two columns at a time over all of them, which vector units can do.
    """
    total = 0.0
    for u in range(first.shape[0]):
        begin = first[u]
        n = last[u] - begin
        out = costs[:n]
        if fees.shape[1] == 1:
            for i in range(n):
                out[i] = fees[u, 0]
        else:
            for i in range(n):
                out[i] = fees[u, fee_of[begin + i]]
        for k in range(0, COSTS, 2):
            p, q = prices[u, k], prices[u, k + 1]
            if p == 0.0 and q == 0.0:
                continue
            left = columns[k, begin : begin + n]
            right = columns[k + 1, begin : begin + n]
            for i in range(n):
                out[i] += p * left[i] + q * right[i]
        # The minimum of each quarter, so that no comparison waits for the last one; then where it is.
        a = b = c = d = np.inf
        quarter = n // 4
        for i in range(quarter):
            a = out[i] if out[i] < a else a
            b = out[i + quarter] if out[i + quarter] < b else b
            c = out[i + 2 * quarter] if out[i + 2 * quarter] < c else c
            d = out[i + 3 * quarter] if out[i + 3 * quarter] < d else d
        for i in range(4 * quarter, n):
            a = out[i] if out[i] < a else a
        least = min(min(a, b), min(c, d))
        at = 0
        for i in range(n):
            if out[i] == least:
                at = i
                break
        picked[u] = begin + at
        total += least
    return total


@inner_sum_kernel
def cheapest_of_few(
    prices: Reals, rows: Reals, fees: Reals, fee_of: Wholes, often: Often, picked: Wholes
) -> float:  # fmt: skip
    """As :func:`cheapest`, among the rows that were noted."""
    kept, counts = often
    total = 0.0
    for u in range(counts.shape[0]):
        least = np.inf
        for position in range(min(counts[u], KEPT)):
            row = kept[u, position]
            cost = fees[u, fee_of[row] if fees.shape[1] > 1 else 0]
            for k in range(COSTS):
                cost += prices[u, k] * rows[row, k]
            if cost < least:
                least = cost
                picked[u] = row
        total += least
    return total


@inner_kernel
def note(picked: Wholes, often: Often) -> None:
    """Each unit's row joins those that were cheapest, in place of the one that came longest ago."""
    kept, counts = often
    for u in range(counts.shape[0]):
        known = False
        for position in range(min(counts[u], KEPT)):
            known = known or kept[u, position] == picked[u]
        if not known:
            kept[u, counts[u] % KEPT] = picked[u]
            counts[u] += 1


@inner_kernel
def lines(
    base: Reals, rows: Reals, giant: Flags, cores: float, at: int, picked: Wholes, loads: Reals, out: Reals
) -> None:
    """Every line for the rows picked: the dual function's supergradient; ``loads`` float64[NUM_LINES] is scratch."""
    for k in range(NUM_LINES):
        loads[k] = 0.0
    n = picked.shape[0]
    for u in range(n - 1, -1, -1):
        row = rows[picked[u]]
        for k in range(NUM_RESOURCES):
            loads[k] += row[k]
        if cores > 0.0:
            loads[CORES] += row[CORES] / cores
        if giant[u]:
            for link in range(2):
                loads[GIANT_LINES + link] += row[GIANT_LANES + link]
        for k in range(NUM_LINES):
            out[k, u] = base[k, u] + loads[k]
        out[CHAIN, u] = base[CHAIN, u] + row[CHAIN]
    if cores > 0.0:
        return
    before = 0.0
    pending = 0.0
    done = 0.0
    for u in range(n):
        if u > 0 and base[CHAIN, u] > base[CHAIN, u - 1]:
            before += pending
            pending = 0.0
        row = rows[picked[u]]
        pending += row[FIRST]
        if u < at:
            done += row[DONE]
            for lane in range(LINKS.start, LINKS.stop):
                out[lane, at] += row[AFTER + lane - LINKS.start]
        elif u == at:
            before += done
        for k in range(1, NUM_LINES):
            out[k, u] += before


@sum_kernel
def ascend(
    weights: Reals, base: Reals, rows: Reals, columns: Reals, fees: Reals, fee_of: Wholes, first: Wholes,
    last: Wholes, giant: Flags, cores: float, at: int, above: float, reach: float, rounds: int, close: float,
    patience: int, best_weights: Reals, frequency: Reals, picked: Wholes, scratch: Scratch, often: Often,
) -> tuple[float, int]:  # fmt: skip
    """Entropic mirror ascent with Polyak's step; ``weights`` is where it starts and is overwritten.

    Where units have many rows, most rounds look at a few of each, those that were cheapest before: as good a direction,
    and an upper bound of the dual function. What they promise to be the best bound is one only if all rows say so.

    Args:
        columns: float64[COSTS, candidates]: the priced columns of ``rows``, each contiguous.
        above: a makespan that some strategy reaches: no bound is above it.
        reach: how far above the first value the optimum is taken to be; 0: as far as ``above``.
        close: stop when the bound is within this fraction of ``above``.
        patience: rounds without a better bound after which it begins again from the best weights, with shorter steps.
        best_weights: the weights of the best bound found.
        frequency: float64[units, most candidates]: a running mean of the minimising rows.
        picked, scratch: int64[units]; vectors of ``NUM_LINES`` and of the most candidates, and matrices
            [units, COSTS] and twice [NUM_LINES, units], the last of zeros.
        often: the rows that were cheapest, int64[units, KEPT], and how many were noted of each unit, int64[units]:
            kept from one ascent over the same rows to the next.

    Returns:
        (best bound, rounds taken).
    """
    n = first.shape[0]
    since = LOOK_AT_MOST
    every = 0
    for u in range(n):
        every += last[u] - first[u]
    are_many = every > (MANY if patience < PATIENT else 2 * KEPT) * n
    sums, costs, prices, slope, mean = scratch
    best = -np.inf
    stale = 0
    taken = 0
    known = reach > 0.0
    # What every round adds to the frequencies grows instead of what there is shrinking: one figure, not all.
    added = 0.05
    for taken in range(1, rounds + 1):
        constant = unit_prices(weights, base, giant, cores, at, sums, prices)
        value = np.inf
        if are_many and since < LOOK_AT_MOST and taken < rounds:
            value = constant + cheapest_of_few(prices, rows, fees, fee_of, often, picked)
        since += 1
        looks = not are_many or (value > best and since > LOOK_AT_LEAST)
        if looks:
            since = 0
            value = constant + cheapest(prices, columns, fees, fee_of, first, last, costs, picked)
            note(picked, often)
        if looks and value > best:
            if value > best + 0.005 * reach:
                stale = 0
            best = value
            for k in range(NUM_LINES):
                copy_vector(weights[k], best_weights[k])
            if best >= above * (1.0 - close):
                break
        if not known:
            reach = max(above - best, 1e-6 * above)
            known = True
        stale += 1
        if stale > patience:
            reach *= 0.6 if patience < PATIENT else 0.4
            stale = 0
            for k in range(NUM_LINES):
                copy_vector(best_weights[k], weights[k])
            if reach < 2e-4 * above:
                break
            unit_prices(weights, base, giant, cores, at, sums, prices)
            cheapest(prices, columns, fees, fee_of, first, last, costs, picked)
            note(picked, often)
            since = 0
        added /= 0.95
        for u in range(n):
            frequency[u, picked[u] - first[u]] += added
        lines(base, rows, giant, cores, at, picked, sums, slope)
        # A running mean of supergradients damps the zigzag between equal candidates.
        blend = 1.0 if taken == 1 else 0.3 if patience < PATIENT else 0.2
        centre = 0.0
        for k in range(NUM_LINES):
            for u in range(n):
                if base[k, u] > -np.inf:
                    mean[k, u] += blend * (slope[k, u] - mean[k, u])
                    centre += weights[k, u] * mean[k, u]
        widest = 0.0
        for k in range(NUM_LINES):
            for u in range(n):
                if base[k, u] > -np.inf:
                    off = mean[k, u] - centre
                    widest = max(widest, abs(off) if weights[k, u] > 1e-9 else off)
        if widest == 0.0:
            break
        step = (max(best - value, 0.0) + reach) / (widest * widest)
        total = 0.0
        for k in range(NUM_LINES):
            for u in range(n):
                if base[k, u] > -np.inf:
                    # Nearly the exponential, (1 + x / 64) ** 64, since any weights are valid and products are quick.
                    factor = 1.0 + min(max(step * (mean[k, u] - centre), -3.0), 3.0) / 64.0
                    factor *= factor
                    factor *= factor
                    factor *= factor
                    factor *= factor
                    factor *= factor
                    factor *= factor
                    # No weight dies: what is slack now may bind later.
                    weights[k, u] = max(weights[k, u], 1e-12) * factor
                    total += weights[k, u]
        for k in range(NUM_LINES):
            for u in range(n):
                weights[k, u] /= total
    for u in range(n):
        for k in range(last[u] - first[u]):
            frequency[u, k] *= 0.05 / added
    return best, taken


@kernel
def shortlist(
    prices: Reals, rows: Reals, fees: Reals, fee_of: Wholes, first: Wholes, last: Wholes, picks: Wholes,
    costs: Reals,
) -> None:  # fmt: skip
    """For every unit the rows of least cost, cheapest first (-1 after the end).

    ``picks`` int64[units, k] takes rows relative to ``first``, ``costs`` float64[units, k] their costs.
    """
    depth = picks.shape[1]
    for u in range(first.shape[0]):
        filled = 0
        for row in range(first[u], last[u]):
            cost = fees[u, fee_of[row]]
            for k in range(COSTS):
                cost += prices[u, k] * rows[row, k]
            at = filled
            while at > 0 and costs[u, at - 1] > cost:
                at -= 1
            if at >= depth:
                continue
            filled = min(filled + 1, depth)
            for k in range(filled - 1, at, -1):
                costs[u, k] = costs[u, k - 1]
                picks[u, k] = picks[u, k - 1]
            costs[u, at] = cost
            picks[u, at] = row - first[u]
        for k in range(filled, depth):
            picks[u, k] = -1
            costs[u, k] = np.inf


@kernel
def states_of(rows: Reals, sets: Wholes, us: Reals, lengths: Wholes, lapse: float, out: Reals, leaf: Wholes) -> int:
    """Every leaf's row in each of its states, the last of its chain first; how many in all."""
    states = 0
    for i in range(rows.shape[0]):
        length = lengths[i]
        done = 0.0
        for k in range(length):
            if sets[i, k] == 0:
                done += us[i, k]
        # ``k`` is what comes after the task under way: nothing, where all is done, or training work that waits for it.
        for k in range(length, -1, -1):
            if k < length:
                done -= us[i, k] if sets[i, k] == 0 else 0.0
                if k == 0 or sets[i, k] != 0 or sets[i, k - 1] == 0:
                    continue
            out[states] = rows[i]
            out[states, DONE] = max(done - rows[i, FIRST], 0.0)
            leaf[states] = i
            for task in range(k - 1, length if k < length else 0):
                time = min(us[i, task], lapse) if task == k - 1 else us[i, task]
                for lane in range(LINKS.start, LINKS.stop):
                    if (LANES_OF_SET[sets[i, task]] == lane).any():
                        out[states, AFTER + lane - LINKS.start] += time
            states += 1
    return states
