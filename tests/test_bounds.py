"""The certificate: never above brute force, near the linear program's optimum, blind to nothing it prunes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.search_models import model_job
from espresso.model.costs import Contention
from espresso.model.presets import job_from_trace
from espresso.model.pricing import Pricer
from espresso.search.alone import with_sharper_chains
from espresso.search.bound_kernels import (
    AFTER,
    CHAIN,
    COSTS,
    DONE,
    FIRST,
    GIANT_LANES,
    GIANT_LINES,
    LINKS,
    MANY,
    NUM_LINES,
    WIDTH,
    pareto,
)
from espresso.search.bounds import certify, last_alone, polish, right_hand_sides
from espresso.search.branching import Branching, branch
from espresso.search.candidates import every_choice, partition_sizes, units_for, units_of
from espresso.search.evaluator import Evaluator
from espresso.search.local_search import Effort
from espresso.search.order_kernels import least_alone
from espresso.search.orders import Orders, say_more
from espresso.search.refine import certify_units
from espresso.search.relaxation import Relaxation, relax, undominated_leaves
from espresso.search.search import search
from espresso.search.states import with_states
from espresso.search.terms import Terms
from espresso.strategies import PLAIN, RANK_DEVICES, Bucket, Cluster, CompressorSpec, Mode
from tests.timeline_jobs import GATHER, TOY, compute, jobs, make_job, tenth

slow_ok = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


def makespans(job, rows, partition_bytes):
    """Of every strategy that gives each unit one of ``rows`` choices."""
    evaluator = Evaluator(job, units_of(job), partition_bytes, tenth)
    numbers = [[evaluator.candidates.number(unit.size, choice) for choice in rows] for unit in evaluator.units]
    return evaluator.batch(np.array(list(itertools.product(*numbers))))[2]


@given(jobs(most=3), st.data())
@settings(slow_ok, max_examples=60)
def test_no_strategy_is_below_the_bound(job, data):
    leaves = every_choice(job, (TOY,))
    few = data.draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=7, unique=True))
    size = data.draw(st.sampled_from((0, 1024, 4096)))
    best = makespans(job, few, size).min()
    # Bounded over just these leaves the claim is sharper than over the whole tree.
    relaxation = relax(job, units_of(job), tuple(few), size, Pricer(job.costs, job.cluster, tenth))
    above = best * data.draw(st.sampled_from((1.0, 1.5)))
    assert certify(relaxation, above).makespan_us <= best * (1 + 1e-12)
    assert last_alone(relaxation) <= best * (1 + 1e-12)
    whole = relax(job, units_of(job), leaves, size, Pricer(job.costs, job.cluster, tenth))
    assert certify(whole, above).makespan_us <= best * (1 + 1e-12)


def test_a_bound_leaves_out_what_a_token_bucket_lets_through():
    """Of 20 KB, 20 us on the link, 6 go at once: of a giant in one part and in five, alone and beside another."""
    for sizes, makespan_us, partition in (([5000], 14.0, 0), ([5000], 14.0, 4096), ([2500, 2500], 14.0, 4096)):
        job = make_job(sizes, [0] * len(sizes), burst=6000.0, optimizer_us=100.0)
        assert makespans(job, (PLAIN,), partition).min() == makespan_us
        relaxation = relax(job, units_of(job), (PLAIN,), partition, Pricer(job.costs, job.cluster, tenth))
        root = certify(relaxation, 2 * makespan_us)
        assert root.makespan_us == pytest.approx(makespan_us, rel=1e-3)
        branching = Branching(relaxation, root, makespan_us * 1.001)
        branch([branching], 10**5)
        assert branching.bound <= makespan_us


@given(jobs(most=3), st.data())
@settings(slow_ok, max_examples=60)
def test_branching_raises_the_bound_and_never_above_the_best_strategy(job, data):
    leaves = every_choice(job, (TOY,))
    few = data.draw(st.lists(st.sampled_from(leaves), min_size=2, max_size=7, unique=True))
    size = data.draw(st.sampled_from((0, 1024, 4096)))
    best = makespans(job, few, size).min()
    relaxation = relax(job, units_of(job), tuple(few), size, Pricer(job.costs, job.cluster, tenth))
    above = best * data.draw(st.sampled_from((1.0, 1.3)))
    root = certify(relaxation, above, rounds=30)
    branching = Branching(relaxation, root, above)
    branch([branching], data.draw(st.sampled_from((10**4, 10**7))))
    assert min(root.makespan_us, above) * (1 - 1e-9) <= branching.bound <= best * (1 + 1e-12)


def by_loads(job, result):
    """The makespan's bound by the program alone, before giants are branched on and chains looked at closely."""
    units, above = units_of(job), result.predicted_us - job.forward_us - job.optimizer_us
    compressors = tuple(dict.fromkeys(c.compressor for c in result.strategy.choices.values() if c != PLAIN))
    leaves = every_choice(job, compressors)
    return certify_units(job, Evaluator(job, units, 0), leaves, partition_sizes(units), above)


def test_branching_closes_what_mixing_giants_leaves_open():
    """Two tensors of a gigabyte each: the program mixes their leaves, a strategy cannot."""
    job = job_from_trace("ugatit", 8, 8, "pcie-25g")
    result = search(job, "efsignsgd")
    assert result.lower_bound_us > 1.02 * by_loads(job, result)
    assert result.gap <= 0.08


def small(job, data, most, sizes):
    """The job under the papers' contention, up to so many leaves, a partition size, and the best that these allow."""
    links = replace(job.costs.links, in_flight=1)
    job = replace(job, costs=replace(job.costs, links=links, contention=Contention(), offload_width=1))
    leaves = st.sampled_from(every_choice(job, (TOY,)))
    few = tuple(data.draw(st.lists(leaves, min_size=1, max_size=most, unique=True)))
    size = data.draw(st.sampled_from(sizes))
    return job, few, size, makespans(job, few, size).min()


@given(jobs(most=3), st.data())
@settings(slow_ok, max_examples=150)
def test_sharper_chains_are_never_above_the_best_strategy(job, data):
    job, few, size, best = small(job, data, 6, (1024, 2048, 4096))
    pricer = Pricer(job.costs, job.cluster, tenth)
    relaxation = relax(job, units_of(job), few, size, pricer)
    above = best * data.draw(st.sampled_from((1.0, 1.3)))
    sharper = with_sharper_chains(relaxation, units_of(job), few, size, pricer, above)
    bound = polish(sharper, certify(sharper, above), above, rounds=300).makespan_us
    assert max(bound, last_alone(sharper)) <= best * (1 + 1e-12)
    branching = Branching(sharper, certify(sharper, above), above)
    branch([branching], 10**6)
    assert branching.bound <= best * (1 + 1e-12)


@given(jobs(most=4), st.data())
@settings(slow_ok, max_examples=150)
def test_states_are_never_above_the_best_strategy(job, data):
    job, few, size, best = small(job, data, 4, (0, 0, 1024, 4096))
    units, pricer = units_of(job), Pricer(job.costs, job.cluster, tenth)
    relaxation = relax(job, units, few, size, pricer)
    if data.draw(st.booleans()):  # their lines hide what others say
        relaxation = replace(relaxation, giants=np.array([], dtype=np.int64))
    lapse = data.draw(st.sampled_from((0.015, 0.2, 1.0, 3.0)))
    stated = with_states(relaxation, units, few, size, pricer, lapse=lapse)
    above = best * data.draw(st.sampled_from((1.0, 1.5)))
    root = certify(stated, above)
    assert root.makespan_us <= best * (1 + 1e-12)
    assert polish(stated, root, above, rounds=300).makespan_us <= best * (1 + 1e-12)
    wild = np.random.default_rng(data.draw(st.integers(0, 99))).random((NUM_LINES, len(units))) ** 8
    assert certify(stated, 2 * best, rounds=1, start=wild).makespan_us <= best * (1 + 1e-12)
    branching = Branching(stated, root, above)
    branch([branching], 10**6)
    assert branching.bound <= best * (1 + 1e-12)


def test_the_states_of_a_leaf():
    """Before each training task: what training came before it, what link time may come after the last hand-over."""
    job = make_job([1000, 250], [0, 100], beta=50.0, cluster=Cluster(2, 2))
    leaf = next(
        choice
        for choice in every_choice(job, (TOY,))
        if str(choice.option) == "intra.reduce_scatter > comp > inter.allgather > dec > intra.allgather"
    )
    pricer = Pricer(job.costs, job.cluster, tenth)
    relaxation = with_states(relax(job, units_of(job), (leaf,), 0, pricer), units_of(job), (leaf,), 0, pricer)
    rows = relaxation.rows[relaxation.first[0] : relaxation.last[0]]
    scatter, gather = rows[:, GIANT_LANES][0] / 2, rows[:, GIANT_LANES + 1][0]
    lapse = 1.5  # of a backward pass of 100 us
    assert (relaxation.at, relaxation.lapse_us) == (1, lapse)
    states = rows[np.argsort(rows[:, DONE])][:, [DONE, *range(AFTER, AFTER + 3)]]
    assert states == pytest.approx(
        np.array([
            [0.0, lapse + scatter, gather, gather],
            [5.12, scatter, lapse, lapse],
            [15.36, 0.0, 0.0, 0.0],  # two ranks' payloads decompressed
        ])
    )  # fmt: skip


def test_states_know_of_link_time_after_the_last_hand_over():
    """A link that is busy until the very end: an exchange ends at the last hand-over, and the last unit's is next.

    Training 10, link 20 (and what follows waits), backward 20 in that time, the last unit's 50 on the link.
    """
    job = make_job([1000, 250], [0, 20], beta=50.0)
    units, pricer = units_of(job), Pricer(job.costs, job.cluster, tenth)
    evaluator = Evaluator(job, units, 0, tenth)
    pair = [evaluator.candidates.number(unit.size, c) for unit, c in zip(evaluator.units, (GATHER, PLAIN), strict=True)]
    best = evaluator.batch(np.array([pair]))[2].min()
    assert best == 80.0
    relaxation = relax(job, units, (GATHER, PLAIN), 0, pricer)
    plain = next(r for r in range(relaxation.first[1], relaxation.last[1]) if relaxation.origin[r] == PLAIN)
    first, last = relaxation.first.copy(), relaxation.last.copy()
    first[1], last[1] = plain, plain + 1
    relaxation = replace(relaxation, first=first, last=last, giants=np.array([], dtype=np.int64))
    stated = with_states(relaxation, units, (GATHER,), 0, pricer, lapse=1.0)
    weights = np.zeros((NUM_LINES, 2))
    weights[LINKS.start, 1] = weights[CHAIN, 1] = 1.0
    assert 79.9 < certify(stated, 160.0, start=weights).makespan_us <= 80.0


def test_states_close_most_of_what_the_last_tensor_leaves_open():
    """A fifth of the model is handed over last, and the processor stands idle meanwhile."""
    job = job_from_trace("bert_base", 8, 8, "pcie-25g")
    result = search(job, "dgc:ratio=0.01")
    assert result.lower_bound_us > 1.015 * by_loads(job, result)
    assert result.gap <= 0.08


def test_what_a_unit_begins_with_comes_before_all_else_of_it():
    """Two partitions: the second one's first task is there before the first one's third, so that one has to wait."""
    # Training 10, link 1, training 1, link 10; in any order they would end at 34.
    us = np.array([[10.0, 1.0, 1.0, 10.0]])
    found, _ = least_alone(0, (np.array([[0, 3, 0, 3]]), us, us, np.array([[4, 2]])), 33.0, 60.0, 4000)
    assert 40.5 < found <= 41.0


def test_partitions_that_wait_for_one_another_lengthen_the_chain():
    """Nearly all of this bound is the last tensor's chain, whose partitions pass the links more than once."""
    job = job_from_trace("gpt2", 8, 8, "pcie-25g")
    result = search(job, "dgc:ratio=0.01")
    assert result.lower_bound_us > 1.002 * by_loads(job, result)
    assert result.gap <= 0.015


def by_orders(job, leaves, size, above, limit=10**8, ledger=None):
    """The bound from orders of the largest units, their weights those of a short ascent; -inf where orders are none."""
    pricer = Pricer(job.costs, job.cluster, tenth)
    relaxation = relax(job, units_of(job), leaves, size, pricer, ledger)
    if not say_more(relaxation, units_of(job), pricer):
        return -np.inf, 0
    certificate = certify(relaxation, above, rounds=30)
    return Orders(relaxation, certificate, units_of(job), leaves, size, pricer).bound(above, limit)


@given(jobs(most=3), st.data())
@settings(slow_ok, max_examples=150)
def test_the_bound_from_orders_is_never_above_the_best_strategy(job, data):
    links = replace(job.costs.links, in_flight=1, burst_bytes=0.0)
    job = replace(job, costs=replace(job.costs, links=links, contention=Contention(), offload_width=1))
    leaves = every_choice(job, (TOY,))
    few = tuple(data.draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=6, unique=True)))
    size = data.draw(st.sampled_from((0, 1024, 4096)))
    best = makespans(job, few, size).min()
    above = best * data.draw(st.sampled_from((1.0, 1.3)))
    found, _ = by_orders(job, few, size, above)
    assert found <= best * (1 + 1e-12)


def test_orders_know_that_giants_wait_for_one_another():
    """Two tensors, one leaf: what one does alone before and after the link counts twice, and only orders see it."""
    job = make_job([4000, 4000], [0, 1], beta=4.0, costs=compute(40.0, 40.0))
    leaf = next(choice for choice in every_choice(job, (TOY,)) if choice.option.is_compressed)
    best = makespans(job, (leaf,), 0).min()
    relaxation = relax(job, units_of(job), (leaf,), 0, Pricer(job.costs, job.cluster, tenth))
    program = certify(relaxation, best).makespan_us
    found, _ = by_orders(job, (leaf,), 0, best)
    assert program < 0.95 * found
    assert best * 0.99 < found <= best
    assert by_orders(job, (leaf,), 0, best, limit=1)[0] == -np.inf


def test_without_effort_orders_certify_nothing():
    """What is not looked at keeps its bound: of a job with a gap of 3 % by loads alone."""
    job = job_from_trace("vgg16", 8, 8, "pcie-25g")
    effort = replace(Effort.for_units(len(job.tensors)), polish=0, branching=0, orders=0)
    result = search(job, "dgc:ratio=0.01", effort=effort)
    assert result.lower_bound_us < 1.005 * by_loads(job, result), "orders would say 1.5 % below what was found"


def test_a_few_giants_are_certified():
    job = model_job("ncf", "nvlink-100g")
    result = search(job, "dgc:ratio=0.01")
    assert result.gap <= 0.03 + 1e-6
    assert by_loads(job, result) < 0.9 * result.lower_bound_us


@given(jobs(most=4), st.data())
@slow_ok
def test_any_weights_are_valid(job, data):
    leaves = every_choice(job, (TOY,))
    few = data.draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=4, unique=True))
    best = makespans(job, few, 0).min()
    relaxation = relax(job, units_of(job), tuple(few), 0, Pricer(job.costs, job.cluster, tenth))
    seed = data.draw(st.integers(0, 99))
    wild = np.random.default_rng(seed).random((NUM_LINES, len(units_of(job)))) ** 8
    assert certify(relaxation, 2 * best, rounds=1, start=wild).makespan_us <= best * (1 + 1e-12)


def test_a_single_tensor_is_bounded_by_its_shortest_chain():
    job = make_job([5000], [0], beta=4.0)
    leaves = every_choice(job, (TOY,))
    best = makespans(job, leaves, 0).min()
    relaxation = relax(job, units_of(job), leaves, 0, Pricer(job.costs, job.cluster, tenth))
    assert certify(relaxation, 2 * best).makespan_us == pytest.approx(best, rel=5e-3)
    assert last_alone(relaxation) == pytest.approx(best)


def test_a_link_that_is_always_busy_makes_the_bound_tight():
    job = make_job([1000] * 8, [0] * 8, beta=4.0, costs=compute(1e4, 1e4))
    leaves = every_choice(job, (TOY,))
    best = search(job, TOY, payload=tenth, partitions=(0,)).predicted_us
    relaxation = relax(job, units_of(job), leaves, 0, Pricer(job.costs, job.cluster, tenth))
    assert certify(relaxation, best).makespan_us == pytest.approx(best, rel=5e-3)


def in_line(relaxation: Relaxation, k: int, j: int, unit: int, row: int) -> float:
    """What line k of unit j has of another one's row, under the paper's contention."""
    assert relaxation.cores == 0.0
    costs, release = relaxation.rows[row], relaxation.release_us
    column = k if k < GIANT_LINES else GIANT_LANES + k - GIANT_LINES
    counts = unit == j if k == CHAIN else unit >= j and (k < GIANT_LINES or unit in relaxation.giants)
    found = costs[column] * counts
    if k > 0 and release[unit] < release[j]:
        # Training work that comes first in an earlier unit holds this line's release up.
        found += costs[FIRST]
    if k > 0 and unit < relaxation.at <= j:
        found += costs[DONE]
    if LINKS.start <= k < LINKS.stop and unit < relaxation.at == j:
        found += costs[AFTER + k - LINKS.start]
    return float(found)


def linear_program(relaxation: Relaxation) -> float:
    """The exact optimum of the relaxation, by HiGHS, under the paper's contention."""
    from scipy.optimize import linprog

    base = right_hand_sides(relaxation)
    units = len(relaxation.first)
    columns = [(u, r) for u in range(units) for r in range(relaxation.first[u], relaxation.last[u])]
    above, right = [], []
    for k, j in itertools.product(range(NUM_LINES), range(units)):
        if not np.isfinite(base[k, j]):
            continue
        above.append([-1.0, *(in_line(relaxation, k, j, u, r) for u, r in columns)])
        right.append(-base[k, j])
    equal = [[0.0, *(float(u == j) for u, _ in columns)] for j in range(units)]
    found = linprog(
        [1.0] + [0.0] * len(columns), np.array(above), np.array(right), np.array(equal), np.ones(units),
        bounds=(0, None), method="highs",
    )  # fmt: skip
    assert found.success
    return float(found.fun)


@pytest.mark.parametrize(("trace", "cluster"), [("lstm", "nvlink-100g"), ("lstm", "pcie-25g"), ("vgg16", "pcie-25g")])
def test_the_ascent_comes_near_the_exact_linear_program(trace, cluster):
    job = job_from_trace(trace, 8, 8, cluster)
    leaves = every_choice(job, (CompressorSpec.parse("randomk:ratio=0.01"),))
    relaxation = relax(job, units_of(job), leaves, 0, Pricer(job.costs, job.cluster))
    exact = linear_program(relaxation)
    found = certify(relaxation, exact * 1.1).makespan_us
    assert found <= exact * (1 + 1e-7)
    assert found >= exact * 0.99


@pytest.mark.parametrize("trace", ["lstm", "vgg16"])
def test_with_states_the_ascent_comes_near_the_program_that_knows_of_them(trace):
    job = job_from_trace(trace, 8, 8, "pcie-25g")
    leaves = every_choice(job, (CompressorSpec.parse("randomk:ratio=0.01"),))
    pricer = Pricer(job.costs, job.cluster)
    relaxation = relax(job, units_of(job), leaves, 0, pricer)
    stated = with_states(relaxation, units_of(job), leaves, 0, pricer)
    exact = linear_program(stated)
    found = polish(stated, certify(stated, exact * 1.1), exact * 1.1, rounds=2000).makespan_us
    assert exact * 0.995 <= found <= exact * (1 + 1e-7)
    # Of one row each the dual function is just the lines, weighted.
    rng = np.random.default_rng(0)
    first = rng.integers(stated.first, stated.last)
    alone = replace(stated, first=first, last=first + 1)
    base = right_hand_sides(alone)
    for k in (*range(LINKS.start, LINKS.stop), CHAIN):
        weights = np.zeros(base.shape)
        weights[k, stated.at] = 1.0
        line = base[k, stated.at] + sum(in_line(alone, k, stated.at, u, r) for u, r in enumerate(first))
        assert certify(alone, 1e9, rounds=1, start=weights).makespan_us == pytest.approx(line, rel=1e-5)


def test_a_patient_ascent_reaches_the_program_where_a_hasty_one_stays_at_one_line():
    job = job_from_trace("vgg16", 8, 8, "nvlink-100g")
    leaves = every_choice(job, (CompressorSpec.parse("dgc:ratio=0.01"),))
    size = partition_sizes(units_of(job))[1]
    relaxation = relax(job, units_of(job), leaves, size, Pricer(job.costs, job.cluster))
    exact = linear_program(relaxation)
    hasty = certify(relaxation, exact * 1.1)
    found = polish(relaxation, hasty, exact * 1.1, rounds=2000).makespan_us
    assert hasty.makespan_us < exact * 0.996
    assert exact * 0.999 <= found <= exact * (1 + 1e-7)


@pytest.mark.parametrize(("trace", "cluster"), [("lstm", "nvlink-100g"), ("vgg16", "pcie-25g")])
def test_rounds_that_look_at_few_rows_lose_little_and_never_exceed_the_program(trace, cluster):
    """Rows that are worse than others in everything change nothing, but make so many that few are looked at."""
    job = job_from_trace(trace, 8, 8, cluster)
    leaves = every_choice(job, (CompressorSpec.parse("randomk:ratio=0.01"),))
    few = relax(job, units_of(job), leaves, 0, Pricer(job.costs, job.cluster))
    rng, picked, worse, first, last = np.random.default_rng(0), [], [], [], []
    for a, b in zip(few.first, few.last, strict=True):
        shuffled = rng.permutation(np.resize(np.arange(a, b), max(2 * MANY, b - a)))
        factors = 1.0 + 0.5 * rng.random(len(shuffled))
        factors[np.unique(shuffled, return_index=True)[1]] = 1.0
        first.append(len(worse))
        picked += shuffled.tolist()
        worse += factors.tolist()
        last.append(len(worse))
    rows = few.rows[picked] * np.array(worse)[:, None]
    many = replace(few, rows=rows, kind_of=few.kind_of[picked], first=np.array(first), last=np.array(last), origin=())
    exact = linear_program(few)
    found = certify(many, exact * 1.1).makespan_us
    assert found <= exact * (1 + 1e-7)
    assert found >= exact * 0.99


@given(jobs(most=3))
@slow_ok
def test_what_is_pruned_never_lowers_the_bound(job):
    """The dominance rule is safe for the bound: with weights, a dominated leaf is never cheapest alone."""
    leaves = every_choice(job, (TOY,))
    pricer = Pricer(job.costs, job.cluster, tenth)
    size = units_of(job)[0].size
    for limit in (0, 1024):
        kept, origin = undominated_leaves(pricer, size, leaves, limit)
        assert len(kept) == len(origin)
        for leaf in leaves[:200]:
            (row,), _ = undominated_leaves(pricer, size, (leaf,), limit)
            assert (kept[:, :COSTS] <= row[:COSTS] * (1 + 1e-12) + 1e-9).all(axis=1).any()


def test_the_cheapest_row_is_the_first_of_equals():
    from numba import njit

    from espresso.search.bound_kernels import cheapest

    rng = np.random.default_rng(3)
    widths = np.array([1, 2, 3, 4, 5, 7, 8, 30, 101])
    last = np.cumsum(widths)
    first = last - widths
    # Few different figures, so that many rows cost the same.
    columns = rng.integers(0, 3, (COSTS, last[-1])).astype(float)
    prices = rng.integers(0, 3, (len(widths), COSTS)).astype(float)
    fees, fee_of = rng.integers(0, 2, (len(widths), 2)).astype(float), rng.integers(0, 2, last[-1])
    picked = np.empty(len(widths), dtype=np.int64)

    @njit
    def compiled(*arrays):
        return cheapest(*arrays)

    total = compiled(prices, columns, fees, fee_of, first, last, np.empty(101), picked)
    costs = [
        prices[u] @ columns[:, a:b] + fees[u, fee_of[a:b]] for u, (a, b) in enumerate(zip(first, last, strict=True))
    ]
    assert picked.tolist() == [a + int(np.argmin(c)) for a, c in zip(first, costs, strict=True)]
    assert total == sum(c.min() for c in costs)


def test_pareto_keeps_the_first_of_equals():
    rows = np.zeros((4, WIDTH))
    rows[:, :2] = [[1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [2.0, 2.0]]
    front = np.empty(4, dtype=np.int64)
    size = pareto(rows, np.zeros((len(rows), 0)), np.argsort(rows.sum(axis=1), kind="stable"), front)
    assert sorted(front[:size]) == [0, 2]


def test_the_certificate_of_a_settled_strategys_groups_is_at_the_sizes_that_were_searched():
    """Not at those that fit the groups: what is certified is what was searched, and the answer's own size."""
    job = make_job(
        [5_000_000, 5_000_000, 3_000_000, 1_000_000], [0, 5000, 500, 0], cluster=Cluster(4, 1), beta=0.2,
        latency=200.0, costs=compute(1.0, 1.0, host=2.0), forward_us=100.0,
    )  # fmt: skip
    bucket = Bucket.packed(0, [(tensor.name, tensor.numel) for tensor in job.tensors], "float32")
    job = replace(job, mode=Mode.DDP, buckets=(bucket,), bucket_ready_us=(5500.0,))
    found = search(job, TOY, terms=Terms(all_kinds=False))
    groups = units_for(job, found.strategy)
    assert len(groups) == 2
    sizes = tuple(dict.fromkeys((*partition_sizes(units_of(job)), found.strategy.partition_bytes)))
    assert sizes != partition_sizes(groups)
    evaluator = Evaluator(job, groups, sizes[0])
    above = found.predicted_us - job.forward_us
    least = certify_units(job, evaluator, every_choice(job, (TOY,)), sizes, above)
    assert found.lower_bound_us <= (least + job.forward_us) * (1 + 1e-9)


def test_mixed_devices_are_in_the_space():
    job = make_job([1000], [0])
    leaves = every_choice(job, (TOY,))
    devices = {frozenset(s.device for s in c.option.steps if s.device) for c in leaves if c.option.is_compressed}
    assert frozenset(RANK_DEVICES) in devices
