"""Several compressors and a budget: errors add up, the budget holds, the best within it is found."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espresso.model.links import JobError
from espresso.model.pricing import Pricer
from espresso.search.bounds import certify
from espresso.search.candidates import every_choice, units_of
from espresso.search.error_budget import ErrorTable, Sensitivity, measure_sensitivity, normal_sensitivity
from espresso.search.evaluator import Evaluator
from espresso.search.frontier import frontier
from espresso.search.relaxation import relax
from espresso.search.search import search
from espresso.strategies import PLAIN, CompressorSpec
from tests.timeline_jobs import TOY, compute, jobs, make_job, tenth

slow_ok = settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
FP16 = CompressorSpec("fp16")
BOTH = compute(1.0, 1.0) + compute(0.5, 0.5, name="fp16")
LOSSES = Sensitivity({TOY: {"*": 0.8, "t0": 0.2}, FP16: {"*": 0.01}})


def two_sizes(spec, elements, dtype, segments):
    """Half the bytes for fp16, a tenth for the other."""
    return 2 * elements if spec == FP16 else tenth(spec, elements, dtype, segments)


def mixed_job(count=6):
    return make_job([40_000] * count, [0, *[5] * (count - 1)], beta=20.0, costs=BOTH)


def test_the_budget_holds_and_buys_time():
    job = mixed_job()
    budgets = (0.0, 0.005, 0.1, 0.4, 1.0)
    found = [search(job, [TOY, FP16], error_budget=b, sensitivity=LOSSES, payload=two_sizes) for b in budgets]
    for budget, result in zip(budgets, found, strict=True):
        table = ErrorTable(LOSSES, job.tensors, (TOY, FP16))
        assert result.error == pytest.approx(table.of_choices(result.strategy.choices))
        assert result.error <= budget + 1e-9
        assert result.lower_bound_us <= result.predicted_us
    times = [result.predicted_us for result in found]
    assert times == sorted(times, reverse=True)
    assert found[0].num_compressed == 0
    kinds = {choice.compressor for choice in found[2].strategy.choices.values()}
    assert {TOY, FP16} <= kinds, "a middling budget mixes"
    # The tensor that the strong compressor hurts least gets it first.
    assert found[2].strategy.choices["t0"].compressor == TOY
    free = search(job, [TOY, FP16], payload=two_sizes)
    assert found[-1].predicted_us == pytest.approx(free.predicted_us, rel=1e-2)


def test_without_a_budget_nothing_changes():
    job = mixed_job(3)
    plain = search(job, [TOY, FP16], payload=two_sizes)
    told = search(job, [TOY, FP16], sensitivity=LOSSES, payload=two_sizes)
    assert told.strategy == plain.strategy
    assert told.error_budget is None
    assert told.error > 0.0


@given(jobs(most=3), st.floats(0.0, 0.6), st.data())
@slow_ok
def test_the_bound_under_a_budget_is_below_brute_force(job, budget, data):
    leaves = every_choice(job, (TOY,))
    few = (PLAIN, *data.draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=5, unique=True)))
    few = tuple(dict.fromkeys(few))
    table = ErrorTable(Sensitivity({TOY: {"*": 0.7, "t1": 0.3}}), job.tensors, (TOY,), budget)
    units = units_of(job)
    evaluator = Evaluator(job, units, 0, tenth)
    numbers = [[evaluator.candidates.number(unit.size, leaf) for leaf in few] for unit in units]
    best = np.inf
    for row in itertools.product(*numbers):
        chosen = evaluator.decode(np.array(row))
        by_tensor = {name: c for unit, c in zip(units, chosen, strict=True) for name in unit.tensors}
        if table.of_choices(by_tensor) <= budget:
            best = min(best, evaluator.makespan(np.array(row)))
    relaxation = relax(job, units, few, (0,), Pricer(job.costs, job.cluster, tenth), table)
    assert certify(relaxation, 1.5 * best, rounds=100).makespan_us <= best * (1 + 1e-12)


def test_the_frontier_trades_time_for_error():
    points = frontier(mixed_job(4), [TOY, FP16], sensitivity=LOSSES, points=4, payload=two_sizes)
    assert len(points) >= 3
    for faster, slower in itertools.pairwise(points):
        assert slower.error < faster.error
        assert slower.predicted_us >= faster.predicted_us
    assert points[-1].error == 0.0


def test_measured_errors_are_what_the_compressors_lose():
    rng = np.random.default_rng(1)
    ternary = np.sign(rng.standard_normal(4096)).astype(np.float32)
    normal = rng.standard_normal(4096).astype(np.float32)
    measured = measure_sensitivity({"signs": ternary, "w": normal}, [TOY, FP16])
    assert measured.of(TOY, "signs") == pytest.approx(0.0, abs=1e-6), "signs of equal size lose nothing"
    # For normal numbers |x| has mean sqrt(2/pi), so that a share of 1 - 2/pi of the energy is lost.
    assert measured.of(TOY, "w") == pytest.approx(np.sqrt(1 - 2 / np.pi), rel=0.05)
    assert measured.of(FP16, "w") < 1e-3
    assert normal_sensitivity([TOY]).of(TOY, "anything") == pytest.approx(0.603, rel=0.02)


def test_files_and_their_faults(tmp_path):
    path = tmp_path / "sensitivity.json"
    path.write_text(json.dumps(LOSSES.to_json()))
    assert Sensitivity.load(path).of(TOY, "t0") == 0.2
    with pytest.raises(JobError, match="does not say what 'topk'"):
        LOSSES.of(CompressorSpec("topk"), "t0")
    path.write_text(json.dumps(LOSSES.to_json() | {"kind": "espresso-job"}))
    with pytest.raises(JobError, match="this is a job file, and a sensitivity file is wanted"):
        Sensitivity.load(path)
    with pytest.raises(JobError, match="at least zero"):
        ErrorTable(LOSSES, mixed_job(2).tensors, (TOY,), -1.0)
    with pytest.raises(JobError, match="must be finite"):
        Sensitivity({TOY: {"*": -0.5}})
