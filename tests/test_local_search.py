"""The improvement: never above its starts, far below the published algorithms where those are far off."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from benchmarks.search_models import model_job, random_model_job
from espresso.model.presets import job_from_trace
from espresso.model.pricing import Pricer
from espresso.search.bounds import certify
from espresso.search.candidates import every_choice, units_of
from espresso.search.evaluator import Evaluator
from espresso.search.local_search import LocalSearch, guide
from espresso.search.local_search_kernels import spread
from espresso.search.relaxation import relax
from espresso.search.search import GREEDY, PUBLISHED, search
from espresso.search.together import move_together
from espresso.strategies import PLAIN, Device
from tests.timeline_jobs import TOY, jobs, make_job, tenth

slow_ok = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
BRIEF = 40_000
"""Events."""


def led_by(job):
    evaluator = Evaluator(job, units_of(job), 0, pricer=Pricer(job.costs, job.cluster, tenth))
    leaves = every_choice(job, (TOY,))
    relaxation = relax(job, evaluator.units, leaves, 0, evaluator.pricer)
    plain = evaluator.uniform(PLAIN)
    certificate = certify(relaxation, evaluator.makespan(plain))
    return evaluator, guide(evaluator, relaxation, certificate, 8), plain


@given(jobs())
@slow_ok
def test_local_search_never_worsens_and_reports_what_it_found(job):
    evaluator, led, strategy = led_by(job)
    local = LocalSearch(evaluator, led)
    start = evaluator.makespan(strategy)
    first = local.descend(strategy, start, BRIEF)
    assert first <= start
    assert evaluator.makespan(strategy) == pytest.approx(first, rel=1e-9)
    second = local.sweep(strategy, first, BRIEF)
    assert second <= first
    assert evaluator.makespan(strategy) == pytest.approx(second, rel=1e-9)


@given(jobs(most=2))
@slow_ok
def test_of_two_units_tried_together_no_pair_is_better(job):
    evaluator, led, strategy = led_by(job)
    start = evaluator.makespan(strategy)
    leaves = every_choice(job, (TOY,))
    options = evaluator.options(leaves, prune=True)
    enough = (2 + max(map(len, options))) ** 2  # on large clusters more leaves are left than a search tries
    few = np.arange(len(strategy))
    found, _ = move_together(evaluator, led, leaves, strategy, start, few, enough, BRIEF**2)
    assert evaluator.makespan(strategy) == pytest.approx(found, rel=1e-9)
    pairs = [np.array(pair) for pair in itertools.product(*options)]
    assert found <= min([start, *(evaluator.makespan(pair) for pair in pairs if len(pair) == 2)]) * (1 + 1e-9)


def test_giants_are_tried_together_at_every_partition_size():
    """Of NCF's four giants single moves alone find 15.53 ms, not cut; a pair, cut in two, leads to 14.8."""
    result = search(model_job("ncf", "nvlink-100g"), "efsignsgd")
    assert result.predicted_us <= 14_800
    assert result.strategy.partition_bytes > 0
    assert result.gap <= 0.05


def test_on_large_random_jobs_the_greedy_is_above_no_baseline_though_the_published_algorithms_are():
    above = 0
    for seed in (0, 1, 3, 5, 7, 11):
        for preset, compressor in (("nvlink-100g", "efsignsgd"), ("pcie-25g", "dgc:ratio=0.01")):
            result = search(random_model_job(seed, preset), compressor)
            fixed = {name: us for name, us in result.baselines.items() if name not in (GREEDY, PUBLISHED)}
            best = min(fixed.values()) * (1 + 1e-9)
            assert result.baselines[GREEDY] <= best
            assert result.baselines[GREEDY] <= result.baselines[PUBLISHED] * (1 + 1e-9)
            assert result.predicted_us <= result.baselines[GREEDY] * (1 + 1e-9)
            above += result.baselines[PUBLISHED] > best
    # Where nothing was above, nothing would have been shown.
    assert above >= 4


@pytest.mark.parametrize("cluster", ["nvlink-100g", "pcie-25g"])
def test_bert_is_ten_percent_below_the_published_algorithms(cluster):
    result = search(job_from_trace("bert_base", 8, 8, cluster), "randomk:ratio=0.01")
    assert result.predicted_us <= 0.9 * result.baselines[PUBLISHED]
    assert result.gap <= 0.08


def test_leaves_of_mixed_devices_are_used_where_they_pay():
    result = search(job_from_trace("bert_base", 8, 8, "pcie-25g"), "efsignsgd")
    used = [{s.device for s in c.option.steps if s.device} for c in result.strategy.choices.values()]
    assert {Device.TRAINING, Device.OFFLOAD} in used


def test_rounding_keeps_the_fractions_along_a_group():
    members, starts = np.arange(12), np.array([0, 12])
    picks = np.zeros(12, dtype=np.int64)
    spread(np.tile([0.25, 0.75, 0.0], (12, 1)), np.full(12, 3), members, starts, np.empty(3), picks)
    assert np.bincount(picks).tolist() == [3, 9]
    assert np.bincount(picks[:4]).tolist() == [1, 3]


def test_a_block_move_crosses_what_single_moves_cannot():
    """Two equal tensors ready together: F is the later of both, so changing one alone shortens nothing."""
    job = make_job([50_000] * 8, [0] * 8, beta=30.0)
    evaluator, led, strategy = led_by(job)
    local = LocalSearch(evaluator, led)
    start = evaluator.makespan(strategy)
    assert local.descend(strategy, start, BRIEF) < 0.5 * start
