"""Budgets of error and memory, constraints, few kinds: they hold, and the best within them is found."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espresso.live.given import AUTO_COMPRESSORS
from espresso.live.guard import OWED_CHECKS
from espresso.live.online_search import OnlineSearch
from espresso.live.sampler import MOST_SAMPLED, Sampler
from espresso.model.costs import Contention
from espresso.model.job import SENSITIVITY
from espresso.model.links import JobError
from espresso.model.payload_sizes import payload_bytes
from espresso.model.presets import job_from_trace
from espresso.model.pricing import Pricer
from espresso.model.timeline import simulate
from espresso.search.bounds import certify
from espresso.search.budgets import Budgets, Ledger, narrower, residual_bytes
from espresso.search.candidates import every_choice, units_of
from espresso.search.error_budget import (
    RINGING,
    TOO_MUCH,
    Sample,
    Sensitivity,
    measure_sensitivity,
    normal_sensitivity,
    rings,
    stretches_of,
)
from espresso.search.evaluator import Evaluator
from espresso.search.frontier import frontier
from espresso.search.local_search import Effort
from espresso.search.orders import Orders, say_more
from espresso.search.relaxation import relax
from espresso.search.search import BudgetError, _merged_too, lay_out, replan, search
from espresso.search.settle import SIMPLE, Settler, is_rider, kinds_of
from espresso.search.space import space_of
from espresso.search.terms import AUTOMATIC, HARMLESS, MB, NEAR, Terms
from espresso.strategies import (
    NONE,
    PLAIN,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    FormError,
    Mode,
    Routine,
    Slot,
    Strategy,
    TensorSpec,
    options_for,
    parse_option,
    plan,
)
from espresso.strategies.constraints import Constraints
from tests.timeline_jobs import CLUSTERS, GATHER, TOY, compute, jobs, make_job, tenth

slow_ok = settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
FP16 = CompressorSpec("fp16")
TERN = CompressorSpec("twobit")
BOTH = compute(1.0, 1.0) + compute(0.5, 0.5, name="fp16")
LOSSES = Sensitivity({TOY: {"*": 0.8, "t0": 0.2}, FP16: {"*": 0.01}})


def two_sizes(spec, elements, dtype, segments):
    """Half the bytes for fp16, a tenth for the other."""
    return 2 * elements if spec == FP16 else tenth(spec, elements, dtype, segments)


def mixed_job(count=6):
    return make_job([40_000] * count, [0, *[5] * (count - 1)], beta=20.0, costs=BOTH)


def ledger_of(job, specs, sensitivity, error=np.inf, residual=np.inf):
    return Ledger(job.tensors, job.cluster, specs, sensitivity, Budgets(error, residual))


def test_the_budget_holds_and_buys_time():
    job = mixed_job()
    budgets = (0.0, 0.005, 0.3, 0.6, 1.5)
    terms = [Terms(error_budget=b) for b in budgets]
    found = [search(job, [TOY, FP16], terms=t, sensitivity=LOSSES, payload=two_sizes) for t in terms]
    for budget, result in zip(budgets, found, strict=True):
        ledger = ledger_of(job, (TOY, FP16), LOSSES)
        assert result.error == pytest.approx(ledger.error(result.strategy.choices))
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


def test_tensors_that_owe_most_do_not_decide_for_their_bucket():
    """Of two buckets of six tensors, one in each owes six times as much, and alone more than the budget."""
    size, each = 40_000, 6
    buckets = tuple(
        Bucket(which, tuple(Slot(f"t{which * each + i}", i * size, size) for i in range(each))) for which in range(2)
    )
    job = make_job(
        [size] * 2 * each, [0, *[5] * (2 * each - 1)], beta=20.0, costs=BOTH,
        mode=Mode.DDP, buckets=buckets, bucket_ready_us=(25.0, 55.0),
    )  # fmt: skip
    owed = Sensitivity({TOY: {"*": 1.0, "t3": 6.0, "t8": 6.0}, FP16: {"*": 0.01}})
    result = search(job, [TOY, FP16], terms=Terms(error_budget=1.2), sensitivity=owed, payload=two_sizes)
    finer = {name for name, choice in result.strategy.choices.items() if choice.compressor == FP16}
    assert finer == {"t3", "t8"}
    assert result.error <= 1.2
    assert result.lower_bound_us <= result.predicted_us
    whole = search(job, [FP16], payload=two_sizes)
    assert result.predicted_us < 0.5 * whole.predicted_us
    # What memory leaves no room for is not mixed either.
    narrow = Terms(error_budget=1.2, residual_budget_mb=8 * size * 4 / MB)
    few = search(job, [TOY, FP16], terms=narrow, sensitivity=owed, payload=two_sizes)
    assert few.residual_bytes <= 8 * size * 4
    assert few.error <= 1.2


def test_memory_has_a_price_too():
    job = mixed_job()
    whole = 8 * sum(tensor.numel for tensor in job.tensors)
    times = []
    for part in (0.0, 0.4, 1.0):
        terms = Terms(residual_budget_mb=part * whole / MB)
        result = search(job, [TOY, FP16], terms=terms, payload=two_sizes)
        assert result.residual_bytes <= part * whole * (1 + 1e-9)
        assert result.lower_bound_us <= result.predicted_us
        times.append(result.predicted_us)
        # What casts send is exact enough to keep nothing.
        assert {c.compressor for c in result.strategy.choices.values()} & {TOY, FP16}
    assert times == sorted(times, reverse=True)
    assert times[0] > times[2]
    narrow = Terms(residual_budget_mb=0.4 * whole / MB, residual_dtype="bf16", transactional=False)
    assert search(job, [TOY, FP16], terms=narrow, payload=two_sizes).predicted_us <= times[1]


def test_within_a_memory_budget_residuals_are_kept_in_fewer_bits_where_that_buys_time():
    packs = compute(0.2, 0.2, name="bf16") + compute(0.1, 0.1, name="int8")
    costs = compute(1.0, 1.0)
    unpacked, job = (make_job([40_000] * 6, [0, *[5] * 5], beta=20.0, costs=known) for known in (costs, costs + packs))
    whole = 8 * sum(tensor.numel for tensor in job.tensors)
    times, kept = [], {}
    for part in (0.1, 0.3, 0.6, 1.0):
        terms = Terms(residual_budget_mb=part * whole / MB)
        result = search(job, [TOY], terms=terms, payload=tenth)
        assert result.residual_bytes <= part * whole * (1 + 1e-9)
        assert result.lower_bound_us <= result.predicted_us
        assert result.predicted_us <= search(unpacked, [TOY], terms=terms, payload=tenth).predicted_us
        assert residual_bytes(result.plan, 0, "float32", True) == pytest.approx(result.residual_bytes, rel=1e-3)
        times.append(result.predicted_us)
        compressors = [c.compressor for c in result.strategy.choices.values()]
        kept[part] = {spec.residual_dtype for spec in compressors if spec != NONE}
        raw = compressors.count(NONE)
        assert raw == 0 or part < 0.3
    assert times == sorted(times, reverse=True)
    assert len(kept[0.6]) > 1, "each tensor in its own way"
    assert kept[0.3] == {"int8"}
    for times_all, narrow in ((0.3, True), (2.0, False)):
        terms = replace(AUTOMATIC, residual_budget_mb=times_all * whole / MB)
        found = search(job, [TOY], terms=terms, payload=tenth).strategy.choices.values()
        assert any(c.compressor.residual_dtype for c in found) is narrow, "no narrower than there is memory for"
    # Nobody asked for less, or it is less already.
    assert search(job, [TOY], payload=tenth).strategy.choices["t0"].compressor == TOY
    narrow = Terms(residual_budget_mb=0.3 * whole / MB, residual_dtype="int8")
    found = search(job, [TOY], terms=narrow, payload=tenth).strategy.choices.values()
    assert {c.compressor for c in found} == {TOY}


@pytest.mark.parametrize(
    ("sizes", "us", "beta"),
    [([40_000] * 6, 1.0, 2.0), ([40_000] * 6, 10.0, 20.0), ([400_000, 20_000, 60_000, 100_000], 1.0, 2.0)],
)
def test_residuals_are_no_narrower_than_there_is_memory_for(sizes, us, beta):
    """Where encodes hide behind exchanges packing costs nothing, and any of the ways was as fast."""
    packs = compute(0.2, 0.2, name="bf16") + compute(0.1, 0.1, name="int8")
    job = make_job(sizes, [0, *[50] * (len(sizes) - 1)], beta=beta, costs=compute(us, us) + packs)
    terms = replace(AUTOMATIC, residual_budget_mb=100.0)
    found = search(job, [TOY], terms=terms, payload=tenth).strategy.choices.values()
    assert not any(c.compressor.residual_dtype for c in found)


@pytest.mark.parametrize(
    ("sizes", "gaps", "us", "beta", "part"),
    [([134_132, 197_371, 109_382, 27_199, 49_437], [0, 8, 56, 1, 36], 2.7928, 7.7243, 0.75672),
     ([76_869, 31_510, 52_888, 68_963, 178_417], [0, 42, 76, 45, 74], 3.3056, 14.022, 0.97342)],
)  # fmt: skip
def test_fewer_kinds_and_wider_residuals_together_take_no_more_than_what_is_as_fast(sizes, gaps, us, beta, part):
    """Both give up time for something else; with an allowance each they would take three percent."""
    packs = compute(0.2, 0.2, name="bf16") + compute(0.1, 0.1, name="int8")
    job = make_job(sizes, gaps, beta=beta, costs=compute(us, us) + packs)
    terms = replace(AUTOMATIC, residual_budget_mb=part * 8 * sum(sizes) / MB)
    found = search(job, [TOY], terms=terms, payload=tenth)
    assert found.kinds_left_out > 0
    assert found.predicted_us <= NEAR * (found.predicted_us - found.fewer_kinds_cost_us) * (1 + 1e-9)


def test_what_is_forced_is_kept_in_fewer_bits_where_a_budget_wants_that_of_it_alone():
    """With the other tensor raw it fits; with both compressed, or with this one in full, it does not."""
    job = make_job([40_000] * 2, [0, 5], beta=20.0, costs=compute(1.0, 1.0) + compute(0.2, 0.2, name="bf16"))
    limits = Constraints(force={"t0": f"efsignsgd via {GATHER.option}"})
    found = search(job, [TOY], terms=Terms(residual_budget_mb=4.1 * 40_000 / MB, constraints=limits), payload=tenth)
    assert found.strategy.choices["t0"].compressor == TOY.kept_as("bf16")
    assert found.residual_bytes <= 4.1 * 40_000


def test_what_is_forced_may_be_kept_in_fewer_bits_too():
    job = make_job([40_000] * 2, [0, 5], beta=20.0, costs=compute(1.0, 1.0) + compute(0.2, 0.2, name="bf16"))
    terms = Terms(
        residual_budget_mb=4.1 * 80_000 / MB, constraints=Constraints(force={"*": f"efsignsgd via {GATHER.option}"})
    )
    found = search(job, [TOY], terms=terms, payload=tenth).strategy.choices.values()
    assert {c.compressor for c in found} == {TOY.kept_as("bf16")}
    said = Constraints(force={"*": f"efsignsgd:residual_dtype=float32 via {GATHER.option}"})
    with pytest.raises(BudgetError):
        search(job, [TOY], terms=replace(terms, constraints=said), payload=tenth)


def test_a_compressor_may_be_named_with_how_its_residual_is_kept():
    """Known under its own name only, as a live job measures it."""
    narrow = TOY.kept_as("int8")
    costs = compute(1.0, 1.0, name=str(narrow)) + compute(0.1, 0.1, name="int8")
    job = make_job([40_000] * 3, [0, 5, 5], beta=20.0, costs=costs)
    terms = Terms(error_budget=1.0, residual_budget_mb=120_000 * 2.1 / MB)
    found = search(job, [narrow], terms=terms, sensitivity=Sensitivity({narrow: {"*": 0.9}}), payload=tenth)
    assert {c.compressor for c in found.strategy.choices.values()} == {narrow}
    assert found.error == pytest.approx(0.9)
    assert found.residual_bytes <= 120_000 * 2.1


def test_how_a_named_compressor_keeps_its_residual_stays_in_a_race_too():
    """Wider ones were not offered, and a live job has no cost of them."""
    narrow = TOY.kept_as("int8")
    costs = compute(1.0, 1.0, name=str(narrow)) + compute(0.1, 0.1, name="int8")
    for more, storage in ((compute(1.0, 1.0), "float32"), ((), "float32"), (compute(1.0, 1.0), "int8")):
        job = make_job([40_000] * 3, [0, 5, 5], beta=20.0, costs=costs + more)
        found = search(job, [narrow], terms=replace(AUTOMATIC, residual_dtype=storage), payload=tenth)
        assert {str(c.compressor) for c in found.strategy.choices.values()} == {str(narrow)}


def test_packing_takes_what_the_casts_take():
    bf16, narrow = CompressorSpec("bf16"), TOY.kept_as("bf16")
    costs = make_job([1], [0], costs=compute(1.0, 1.0) + compute(0.2, 0.3, name="bf16")).costs
    for device in (Device.TRAINING, Device.OFFLOAD):
        alone = costs.encode_us(TOY, device, 5e5)
        packing = 2 * costs.encode_us(bf16, device, 5e5) + costs.decode_us(bf16, device, 5e5)
        assert costs.encode_us(narrow, device, 5e5) == pytest.approx(alone + packing)
        assert costs.decode_us(narrow, device, 5e5) == costs.decode_us(TOY, device, 5e5)
    assert costs.encode_us(narrow, Device.SERVER, 5e5) == costs.encode_us(TOY, Device.SERVER, 5e5)
    assert costs.encode_us(TOY.kept_as("int8"), Device.TRAINING, 5e5) == costs.encode_us(TOY, Device.TRAINING, 5e5)


def test_narrow_residuals_are_no_choice_where_packing_has_no_cost_on_some_device():
    """They would be free there."""
    casts = tuple(cost for cost in compute(0.2, 0.3, name="bf16") if cost.device is Device.TRAINING)
    job = make_job([40_000], [0], beta=20.0, costs=compute(1.0, 1.0) + casts)
    assert narrower(TOY, job, "float32") == ()
    everywhere = make_job([40_000], [0], beta=20.0, costs=compute(1.0, 1.0) + compute(0.2, 0.3, name="bf16"))
    assert narrower(TOY, everywhere, "float32") == (TOY.kept_as("bf16"),)


def test_without_a_budget_nothing_changes():
    job = mixed_job(3)
    plain = search(job, [TOY, FP16], payload=two_sizes)
    told = search(job, [TOY, FP16], sensitivity=LOSSES, payload=two_sizes)
    assert told.strategy == plain.strategy
    assert told.error_budget is None
    assert told.error > 0.0


def test_what_alone_is_above_a_budget_is_not_in_the_bound():
    """Half a giant compressed would keep to it; no strategy has that."""
    job = make_job([200_000, 2000, 2000], [0, 5, 5], beta=20.0, costs=BOTH)
    terms = Terms(error_budget=0.5)
    found = search(job, [TOY], terms=terms, sensitivity=Sensitivity({TOY: {"*": 0.8}}), payload=tenth)
    assert found.strategy.choices["t0"] == PLAIN or found.strategy.choices["t0"].compressor == NONE
    assert 0.9 * found.predicted_us <= found.lower_bound_us <= found.predicted_us


def test_sensitivities_are_kept_up_by_what_tensors_do_owe():
    gather = Choice(parse_option("comp > flat.allgather > dec"), TOY)
    twice = Choice(parse_option("comp > flat.all_to_all > dec > comp > flat.allgather > dec"), TOY)
    other = CompressorSpec("topk")
    forecast = Sensitivity({TOY: {"*": 0.8, "t0": 0.2}, other: {"*": 4.0}, FP16: {"*": 0.01}})
    kept_up = forecast.kept_up(
        {"t0": (gather, 0.3), "t1": (twice, 0.8 * 2**0.5), "t2": (Choice(gather.option, FP16), 9.0)}
    )
    assert kept_up.of(TOY, "t0") == pytest.approx(0.3)
    assert kept_up.of(other, "t0") == pytest.approx(6.0), "in proportion"
    assert kept_up.of(TOY, "t1") == pytest.approx(0.8), "of each compression"
    assert {kept_up.of(FP16, f"t{i}") for i in range(4)} == {0.01}, "casts keep nothing"
    assert kept_up.of(other, "t3") == 4.0


def test_what_was_measured_itself_follows_no_forecast_of_another_compressor():
    """Or a strategy that owed too much is found again once a finer one owes less than signs had let expect."""
    gather, other = parse_option("comp > flat.allgather > dec"), CompressorSpec("topk")
    third = CompressorSpec("stc", (("ratio", 0.1),))
    forecast = Sensitivity({TOY: {"t": 1.0}, other: {"t": 2.0}, third: {"t": 3.0}})
    seen = {(other, "t")}
    first = forecast.kept_up({"t": (Choice(gather, TOY), 0.5)}, seen)
    assert [first.of(spec, "t") for spec in (TOY, other, third)] == pytest.approx([0.5, 2.0, 1.5])
    later = first.kept_up({"t": (Choice(gather, TOY), 1.0)}, {*seen, (TOY, "t")})
    assert [later.of(spec, "t") for spec in (TOY, other, third)] == pytest.approx([1.0, 4.0, 3.0]), "all grow alike"


def test_what_was_measured_tells_of_its_other_settings_before_other_compressors_do():
    """Signs owe too much; a quantizer owes less than they had let expect, which says nothing of finer signs."""
    gather = parse_option("comp > flat.allgather > dec")
    signs, fine = CompressorSpec("efsignsgd"), CompressorSpec("efsignsgd", (("block", 64),))
    quantizer, third = CompressorSpec("int4"), CompressorSpec("twobit")
    owed = Sensitivity({signs: {"t": 2.0}, fine: {"t": 1.8}, quantizer: {"t": 0.5}, third: {"t": 1.0}})
    specs = (signs, fine, quantizer, third)
    first = owed.kept_up({"t": (Choice(gather, signs), 6.0)})
    assert [first.of(spec, "t") for spec in specs] == pytest.approx([6.0, 5.4, 1.5, 3.0])
    second = first.kept_up({"t": (Choice(gather, quantizer), 0.5)}, {(signs, "t")})
    assert [second.of(spec, "t") for spec in specs] == pytest.approx([6.0, 5.4, 0.5, 1.0])
    both = {(signs, "t"), (quantizer, "t")}
    third_time = second.kept_up({"t": (Choice(gather, fine), 4.5)}, both)
    assert [third_time.of(spec, "t") for spec in specs] == pytest.approx([6.0, 4.5, 0.5, 4.5 / 5.4])


def test_a_short_sample_of_a_long_tensor_is_not_raw():
    values = np.random.default_rng(0).standard_normal((8, 2048)).astype(np.float32)
    whole, short = TensorSpec("whole", (1000, 1000)), TensorSpec("short", (3000,))
    for text in ("efsignsgd", "dgc:ratio=0.01", "dgc:ratio=0.01,least=2048"):
        usual = CompressorSpec.parse(text)
        above = CompressorSpec(usual.name, (*usual.params, ("raw_below", 4096)))
        found = measure_sensitivity([Sample(whole, values), Sample(short, values)], [usual, above])
        assert found.of(above, "whole") == found.of(usual, "whole") > 1
        assert found.of(above, "short") == 0


def brute_force(job, few, ledger, payload=tenth):
    """The least makespan of all strategies within the budgets."""
    units = units_of(job)
    evaluator = Evaluator(job, units, 0, payload)
    numbers = [[evaluator.candidates.number(unit.size, leaf) for leaf in few] for unit in units]
    best = np.inf
    for row in itertools.product(*numbers):
        chosen = evaluator.decode(np.array(row))
        by_tensor = {name: c for unit, c in zip(units, chosen, strict=True) for name in unit.tensors}
        if ledger.allows(by_tensor):
            best = min(best, evaluator.makespan(np.array(row)))
    return best


@given(jobs(most=3), st.floats(0.0, 0.8), st.floats(0.0, 1.0), st.data())
@settings(slow_ok, max_examples=60)
def test_the_bound_under_both_budgets_is_below_brute_force(job, error, part, data):
    """By loads and weights, and by orders of the largest, which budgets keep apart."""
    if data.draw(st.booleans()):
        links = replace(job.costs.links, in_flight=1, burst_bytes=0.0)
        job = replace(job, costs=replace(job.costs, links=links, contention=Contention(), offload_width=1))
    leaves = every_choice(job, (TOY, TOY.kept_as("int8")))
    few = (PLAIN, *data.draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=5, unique=True)))
    few = tuple(dict.fromkeys(few))
    losses = Sensitivity({TOY: {"*": 0.7, "t1": 0.3}})
    ledger = ledger_of(job, (TOY,), losses, error, part * 8 * sum(t.numel for t in job.tensors))
    best = brute_force(job, few, ledger)
    pricer = Pricer(job.costs, job.cluster, tenth)
    relaxation = relax(job, units_of(job), few, 0, pricer, ledger)
    certificate = certify(relaxation, 1.5 * best, rounds=100)
    assert certificate.makespan_us <= best * (1 + 1e-12)
    if say_more(relaxation, units_of(job), pricer):
        orders = Orders(relaxation, certificate, units_of(job), few, 0, pricer)
        for above in (1.3 * best, best * (1 + 1e-6)):
            assert orders.bound(above, 10**8)[0] <= best * (1 + 1e-12)


def test_orders_know_which_giants_a_budget_keeps_apart():
    """Of two equal tensors only one may be compressed: the program does half of each so, and ends a fifth too soon."""
    job = make_job([100_000, 100_000], [0, 1], beta=1.0, costs=compute(0.1, 0.1))
    few = (PLAIN, Choice(parse_option("comp > flat.allgather > dec"), TOY))
    ledger = ledger_of(job, (TOY,), Sensitivity({TOY: {"*": 1.0}}), 0.75)
    best = brute_force(job, few, ledger)
    pricer = Pricer(job.costs, job.cluster, tenth)
    relaxation = relax(job, units_of(job), few, 0, pricer, ledger)
    certificate = certify(relaxation, best)
    raised, _ = Orders(relaxation, certificate, units_of(job), few, 0, pricer).bound(best, 10**6)
    assert certificate.makespan_us < 0.9 * raised
    assert 0.99 * best < raised <= best


def test_what_no_budget_allows_is_no_measure_for_what_a_leaf_costs():
    """Compressed twice a tensor would cost less than half under the weights, and owe more than it may."""
    job = make_job([100_000, 100_000], [0, 1], beta=1.0, costs=compute(0.1, 0.1), cluster=Cluster(16, 1))
    few = (PLAIN, *leaves_in(job))
    ledger = ledger_of(job, (TOY,), Sensitivity({TOY: {"*": 1.0}}), 0.9)
    best = brute_force(job, few, ledger)
    pricer = Pricer(job.costs, job.cluster, tenth)
    relaxation = relax(job, units_of(job), few, 0, pricer, ledger)
    orders = Orders(relaxation, certify(relaxation, best), units_of(job), few, 0, pricer)
    assert orders.bound(1.3 * best, 10**7)[0] <= best * (1 + 1e-12)


def test_what_two_giants_may_not_owe_together_is_certified():
    """Two tensors hold four fifths of the model, and only one of them may be compressed much."""
    job = job_from_trace("ugatit", 8, 8, "pcie-25g")
    specs = [CompressorSpec.parse(text) for text in ("fp16", "efsignsgd", "dgc:ratio=0.01")]
    result = search(job, specs, terms=Terms(error_budget=2.0), sensitivity=normal_sensitivity(specs))
    assert result.gap <= 0.08


def leaves_in(job):
    """A few leaves of different character, as constraints can ask for them: everything but them is forbidden."""
    gather, twice = "comp > flat.allgather > dec", "comp > flat.all_to_all > dec > comp > flat.allgather > dec"
    return tuple(Choice(parse_option(text), TOY) for text in (gather, twice))


@pytest.mark.parametrize("seed", range(12))
def test_small_jobs_end_within_two_percent_of_brute_force_under_both_budgets(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 6))
    sizes, gaps = rng.choice([5000, 20_000, 60_000], count), rng.integers(0, 400, count)
    beta, costs = float(rng.uniform(1, 12)), compute(float(rng.uniform(0.5, 3)), float(rng.uniform(0.5, 3)))
    job = make_job(sizes.tolist(), [0, *gaps[1:].tolist()], alpha=20.0, beta=beta, costs=costs, cluster=Cluster(4, 1))
    losses = Sensitivity({TOY: {t.name: float(rng.uniform(0.2, 1.5)) for t in job.tensors}})
    whole = 8 * sum(sizes)
    error, memory = float(rng.uniform(0.1, 1.2)), float(rng.uniform(0.2, 1.2)) * whole
    few = (PLAIN, Choice(parse_option("flat.reduce_scatter > flat.allgather")), *leaves_in(job))
    best = brute_force(job, few, ledger_of(job, (TOY,), losses, error, memory))
    allowed = [str(choice.option) for choice in few]
    forbidden = tuple(str(c.option) for c in every_choice(job, (TOY,)) if str(c.option) not in allowed)
    terms = Terms(error, memory / MB, constraints=Constraints(forbid=forbidden))
    result = search(job, TOY, terms=terms, sensitivity=losses, partitions=(0,), payload=tenth)
    assert result.error <= error * (1 + 1e-9)
    assert result.residual_bytes <= memory * (1 + 1e-9)
    assert result.lower_bound_us <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= result.predicted_us <= 1.02 * best


@pytest.mark.parametrize("seed", range(6))
def test_of_three_families_small_jobs_end_within_two_percent_too(seed):
    """Of an error budget that a cast, bytes and signs share, four tensors, two options of each: 2401 strategies."""
    rng = np.random.default_rng(100 + seed)
    int8 = CompressorSpec("int8")
    specs, part = (TOY, FP16, int8), {TOY: 30, FP16: 2, int8: 4}

    def payload(spec, elements, dtype, segments):
        return -(-4 * elements // part[spec])

    sizes, gaps = rng.choice([5000, 20_000, 60_000], 4), rng.integers(0, 400, 4)
    costs = sum((compute(*rng.uniform(0.3, 3, 2), name=spec.name) for spec in specs), ())
    beta = float(rng.uniform(1, 12))
    job = make_job(sizes.tolist(), [0, *gaps[1:].tolist()], alpha=20.0, beta=beta, costs=costs, cluster=Cluster(4, 1))
    owed = {TOY: (1.0, 3.0), FP16: (0.001, 0.01), int8: (0.02, 0.2)}
    losses = Sensitivity({spec: {t.name: float(rng.uniform(*owed[spec])) for t in job.tensors} for spec in specs})
    error = float(rng.uniform(0.1, 2.0))
    few = [PLAIN, *(replace(choice, compressor=spec) for choice in leaves_in(job) for spec in specs)]
    best = brute_force(job, few, ledger_of(job, specs, losses, error), payload)
    allowed = {str(choice.option) for choice in few}
    forbidden = sorted({str(c.option) for c in every_choice(job, specs)} - allowed)
    terms = Terms(error, constraints=Constraints(forbid=tuple(forbidden)))
    result = search(job, specs, terms=terms, sensitivity=losses, partitions=(0,), payload=payload)
    assert result.error <= error * (1 + 1e-9)
    assert result.lower_bound_us <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= result.predicted_us <= NEAR * best


@pytest.mark.parametrize("seed", range(4))
def test_of_two_families_with_narrow_residuals_small_jobs_end_within_two_percent_under_both_budgets(seed):
    """Three tensors, two options of each compressor with its residual as it is and in 8 bits: 729 strategies."""
    rng = np.random.default_rng(200 + seed)
    int8 = CompressorSpec("int8")
    specs, part = (TOY, int8), {TOY: 30, int8: 4}
    every = (*specs, *(spec.kept_as("int8") for spec in specs))

    def payload(spec, elements, dtype, segments):
        return -(-4 * elements // part[spec.kept_as("")])

    sizes, gaps = rng.choice([5000, 20_000, 60_000], 3), rng.integers(0, 400, 3)
    costs = sum((compute(*rng.uniform(0.3, 3, 2), name=spec.name) for spec in specs), ())
    beta = float(rng.uniform(1, 12))
    job = make_job(sizes.tolist(), [0, *gaps[1:].tolist()], alpha=20.0, beta=beta, costs=costs, cluster=Cluster(4, 1))
    owed = {TOY: (1.0, 3.0), int8: (0.02, 0.2)}
    losses = Sensitivity({spec: {t.name: float(rng.uniform(*owed[spec])) for t in job.tensors} for spec in specs})
    error, memory = float(rng.uniform(0.1, 2.0)), float(rng.uniform(0.1, 0.8)) * 8 * sum(sizes)
    few = [PLAIN, *(replace(choice, compressor=spec) for choice in leaves_in(job) for spec in every)]
    best = brute_force(job, few, ledger_of(job, every, losses, error, memory), payload)
    allowed = {str(choice.option) for choice in few}
    forbidden = sorted({str(c.option) for c in every_choice(job, specs)} - allowed)
    terms = Terms(error, memory / MB, constraints=Constraints(forbid=tuple(forbidden)))
    result = search(job, specs, terms=terms, sensitivity=losses, partitions=(0,), payload=payload)
    assert result.error <= error * (1 + 1e-9)
    assert result.residual_bytes <= memory * (1 + 1e-9)
    assert result.lower_bound_us <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= result.predicted_us <= NEAR * best


def test_the_simple_strategy_is_of_a_compressor_that_the_budget_allows_for_everything():
    found = search(mixed_job(), [TOY, FP16], terms=Terms(0.6, races=True), sensitivity=LOSSES, payload=two_sizes)
    held = [choice.compressor for choice in found.strategy.choices.values()]
    assert held.count(TOY) > held.count(FP16) > 0, "of all tensors it would owe too much"
    (simple,) = (row for row in found.alternatives if row.name == SIMPLE)
    assert {choice.compressor for choice in simple.strategy.choices.values()} == {FP16}


def test_what_options_keep_is_what_the_executor_will_allocate():
    """On the rank that keeps most, for every shape of leaf, to within what stretches are rounded up; of rooted ones at
    most so much, since roots rotate over partitions."""
    tensors = [TensorSpec("a", (300, 200)), TensorSpec("b", (123_457,))]
    for cluster in CLUSTERS[:5]:
        for option in options_for(cluster):
            if not option.is_compressed or any(step.device is Device.OFFLOAD for step in option.steps):
                continue
            strategy = Strategy.uniform(tensors, cluster, Choice(option, TOY), partition_bytes=65_536)
            ledger = Ledger(tensors, cluster, (TOY,), None, Budgets())
            laid = plan(strategy, job_buckets(tensors))
            exact = [residual_bytes(laid, rank, "float32", True) for rank in range(cluster.num_ranks)]
            forecast = ledger.spent(strategy.choices)[1]
            assert max(exact) <= forecast * 1.02, option
            if not any(step.routine in (Routine.REDUCE, Routine.GATHER) for step in option.steps):
                assert max(exact) == pytest.approx(forecast, rel=0.02), option


def job_buckets(tensors):
    from benchmarks.exchange import make_buckets

    return make_buckets({tensor.name: tensor.numel for tensor in tensors})


def test_the_frontier_trades_time_for_error_and_memory():
    points = frontier(mixed_job(4), [TOY, FP16], sensitivity=LOSSES, points=4, payload=two_sizes)
    assert len(points) >= 3
    for faster, slower in itertools.pairwise(points):
        assert slower.error < faster.error
        assert slower.predicted_us >= faster.predicted_us
    assert points[-1].error == 0.0
    both = frontier(
        mixed_job(4), [TOY, FP16], sensitivity=LOSSES, points=3, memory_points=3, payload=two_sizes
    )  # fmt: skip
    for one, other in itertools.permutations(both, 2):
        better = (
            (one.predicted_us, one.error, one.residual_bytes),
            (other.predicted_us, other.error, other.residual_bytes),
        )
        assert not all(a <= b for a, b in zip(*better, strict=True))


def test_the_frontier_is_searched_as_the_job_and_its_terms_say():
    job = mixed_job(4)
    told = frontier(job, [TOY, FP16], sensitivity=LOSSES, points=3, payload=two_sizes)
    measured = frontier(replace(job, meta={SENSITIVITY: LOSSES.to_json()}), [TOY, FP16], points=3, payload=two_sizes)
    assert [point.error for point in measured] == [point.error for point in told]
    cut = frontier(
        job, [TOY, FP16], sensitivity=LOSSES, points=3, terms=Terms(partition_bytes=32_768), payload=two_sizes
    )  # fmt: skip
    assert {point.result.strategy.partition_bytes for point in cut if point.error} == {32_768}


def test_the_frontier_knows_what_tensors_are_forced_to():
    job, forced = mixed_job(4), Terms(constraints=Constraints(force={"t0": "fp16"}))
    points = frontier(job, [TOY], points=6, terms=forced, payload=two_sizes)
    assert len(points) == 3, "what is forced owes something: no budget of nothing"
    assert {point.result.strategy.choices["t0"].compressor for point in points} == {FP16}
    both = frontier(job, [TOY], points=6, memory_points=2, terms=forced, payload=two_sizes)
    assert {point.error for point in points} <= {point.error for point in both}
    with pytest.raises(JobError, match="does not say what 'fp16' does to tensor"):
        frontier(job, [TOY], sensitivity=Sensitivity({TOY: {"*": 0.8}}), terms=forced, payload=two_sizes)


# -- constraints -----------------------------------------------------------------------------------


def test_what_is_forbidden_is_not_chosen_and_the_certificate_says_so():
    job = job_from_trace("lstm", 4, 2, "pcie-25g")
    free = search(job, "efsignsgd")
    used = {str(choice.option) for choice in free.strategy.choices.values() if choice.option.is_compressed}
    cases = {
        "options": Constraints(forbid=("*all_to_all*", "*intra.*")),
        "devices": Constraints(devices=("training",)),
        "second compressions": Constraints(most_compressions=1),
        "any compression": Constraints(most_compressions=0),
        "by name": Constraints(keep_exact=("*weight*",)),
    }
    assert any("all_to_all" in text or "intra." in text for text in used)
    for name, limits in cases.items():
        found = search(job, "efsignsgd", terms=Terms(constraints=limits))
        for tensor in job.tensors:
            choice = found.strategy.choices[tensor.name]
            assert limits.allows(choice, limits.kind_of(tensor)), name
        assert found.lower_bound_us <= found.predicted_us, name
    assert found.num_compressed == 0 or not any(
        "weight" in n for n, c in found.strategy.choices.items() if c.compressor != NONE
    )


def test_tensors_take_what_they_are_forced_to():
    job = mixed_job(4)
    force = {"t[01]": "fp16 via comp > flat.allreduce > dec", "t2": "efsignsgd", "t?": "none via flat.allreduce"}
    found = search(job, TOY, terms=Terms(constraints=Constraints(force=force)), payload=two_sizes)
    choices = found.strategy.choices
    assert str(choices["t0"].option) == "comp > flat.allreduce > dec"
    assert [str(choices[f"t{i}"].compressor) for i in range(4)] == ["fp16", "fp16", "efsignsgd", "none"]
    assert found.lower_bound_us <= found.predicted_us
    free = search(job, TOY, payload=two_sizes)
    assert found.uncompressed_us == free.uncompressed_us, "plain allreduce, whatever is forced"
    assert all(row.name != "uncompressed" for row in found.alternatives)
    again = replan(job, found.strategy, terms=Terms(constraints=Constraints(force=force)), payload=two_sizes)
    assert str(again.strategy.choices["t2"].compressor) == "efsignsgd"


def test_what_is_said_of_the_forced_tensors_alone_is_enough():
    """A compressor that nobody else is offered."""
    job = make_job([90_000, 40_000], [0, 5], beta=20.0, costs=BOTH)
    terms = Terms(
        2.0, constraints=Constraints(most_compressions=1, force={"t0": "fp16 via comp > flat.allreduce > dec"})
    )
    said = Sensitivity({TOY: {"*": 0.9}, FP16: {"t0": 0.25}})
    for asked in (terms, replace(terms, error_budget=None)):
        found = search(job, [TOY], terms=asked, sensitivity=said, payload=two_sizes)
        assert found.strategy.choices["t0"].compressor == FP16
        owed = 0.9 if found.strategy.choices["t1"].compressor == TOY else 0.0
        assert found.error == pytest.approx(math.sqrt((9 * 0.25**2 + 4 * owed**2) / 13))
    with pytest.raises(JobError, match="what 'fp16' does to tensor 't0'"):
        search(
            job, [TOY], terms=terms, sensitivity=Sensitivity({TOY: {"*": 0.9}, FP16: {"t1": 0.25}}), payload=two_sizes
        )


@pytest.mark.parametrize("forced", [str(TOY), f"{TOY} via {GATHER.option}", "fp16"])
def test_what_some_tensors_are_forced_to_is_nothing_for_the_others(forced):
    """Neither by the simple strategy, whose compressor holds most, nor by merging kinds, nor by a baseline."""
    offered = TERN if forced == "fp16" else FP16
    costs = BOTH + compute(0.9, 0.9, name=str(TERN))
    job = make_job([90_000, 40_000, 40_000], [0, 5, 5], beta=20.0, costs=costs)
    terms = replace(AUTOMATIC, constraints=Constraints(force={"t0": forced}))
    found = search(job, [offered], terms=terms, payload=two_sizes)
    assert found.alternatives
    for row in found.alternatives:
        assert {c.compressor for name, c in row.strategy.choices.items() if name != "t0"} <= {offered, NONE}, row.name
    again = replan(job, found.strategy, terms=terms, payload=two_sizes)
    assert {c.compressor for name, c in again.strategy.choices.items() if name != "t0"} <= {offered, NONE}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"devices": ("gpu",)}, "'gpu' is not one of training, offload"),
        ({"keep_exact": "embedding"}, "keep_exact is a list of texts"),
        ({"force": {"a": "fp16 via flat.telepathy"}}, r"force\['a'\]"),
        ({"most_compressions": -1}, "most_compressions"),
    ],
)
def test_constraints_that_are_none_are_refused(wrong, says):
    with pytest.raises(FormError, match=says):
        Constraints(**wrong)


# -- few kinds -------------------------------------------------------------------------------------


def test_what_is_forced_leaves_less_of_the_budget_to_the_others():
    """It spends the most of all, and can do no better."""
    job, owed = mixed_job(6), Sensitivity({TOY: {"*": 2.0, "t5": 4.0}})
    budget = 1.01 * 4.0 / 6**0.5  # of which the forced one takes all but a fiftieth
    terms = Terms(error_budget=budget, constraints=Constraints(force={"t5": f"{TOY} via {GATHER.option}"}))
    found = search(job, [TOY], terms=terms, sensitivity=owed, payload=tenth)
    assert found.error <= budget * (1 + 1e-9)
    assert found.strategy.choices["t5"].compressor == TOY
    tight = replace(terms, error_budget=0.9 * budget)
    with pytest.raises(JobError, match="no strategy that the search knows keeps to the budgets"):
        search(job, [TOY], terms=tight, sensitivity=owed, payload=tenth)
    with pytest.raises(JobError, match="no strategy that the search knows keeps to the budgets"):
        replan(job, found.strategy, terms=tight, sensitivity=owed, payload=tenth)


def test_what_travels_as_fp16_inside_a_node_is_not_gone_on_with():
    """No budget counts what that rounds away; an older strategy may have it."""
    job = job_from_trace("lstm", 2, 2, "pcie-25g", servers=2)
    halved = Choice(parse_option("intra.reduce_scatter:fp16 > inter.push > sum@server > inter.pull > intra.allgather"))
    assert not Constraints().allows(halved)
    found = replan(job, Strategy.uniform(job.tensors, job.cluster, halved))
    assert not any(choice.option.halves for choice in found.strategy.choices.values())


@pytest.mark.parametrize("sizes", [(30_000, 10_000), (10_000, 30_000)])
def test_a_certificate_knows_that_exact_and_free_tensors_may_be_exchanged_together(sizes):
    """Of a bucket both take one exchange where they take the same option, and pay for its start once."""
    first, second = sizes
    slots = Slot("t0", 0, first), Slot("t1", first, second)
    job = make_job(
        sizes, [0, 5], cluster=Cluster(2, 2), alpha=300.0, beta=2.0, latency=0.0,
        mode=Mode.DDP, buckets=(Bucket(0, slots),), bucket_ready_us=(5.0,),
    )  # fmt: skip
    found = search(job, [], terms=Terms(constraints=Constraints(keep_exact=("t1",))))
    best = min(
        simulate(lay_out(job, Strategy.uniform(job.tensors, job.cluster, Choice(option))), job).iteration_us
        for option in options_for(job.cluster)
        if not option.is_compressed
    )
    assert found.lower_bound_us <= found.predicted_us <= best * (1 + 1e-9)
    # Each for itself pays for two starts: what is certified of those says nothing of both in one.
    terms = Terms(constraints=Constraints(keep_exact=("t1",)))
    space = space_of(job, (), payload_bytes, terms, None)
    evaluator, beside = Evaluator(job, space.units(job), 0), job.forward_us + job.optimizer_us
    assert len(evaluator.units) == 2
    assert 0 < _merged_too(job, space, evaluator, (0,), 2 * best) <= best - beside


@pytest.mark.parametrize("mode", list(Mode))
def test_what_is_certified_is_what_may_be_returned_where_exchanges_travel_together(mode):
    """A raw tensor that is a payload of its own is in the space of buckets, and not in the paper's."""
    links = {"latency": 900.0, "in_flight": 4}
    if mode is Mode.DDP:
        links |= {"buckets": (Bucket(0, (Slot("t0", 0, 30_000),)), Bucket(1, (Slot("t1", 0, 1_000),))),
                  "bucket_ready_us": (0.0, 5.0)}  # fmt: skip
    job = make_job([30_000, 1_000], [0, 5], cluster=Cluster(3, 1), mode=mode, **links)
    terms = Terms(constraints=Constraints(keep_exact=("t1",)), all_kinds=False)
    space = space_of(job, (TOY,), tenth, terms, None)
    apart = Strategy.uniform(job.tensors, job.cluster, GATHER).with_choices({"t1": PLAIN})
    riding = Settler(job, space)._riding(apart)
    assert is_rider(riding.choices["t1"]) == (mode is Mode.DDP)
    evaluator = Evaluator(job, space.units(job), 0)
    assert (_merged_too(job, space, evaluator, (0,), 1e9) < 1e9) == (mode is Mode.DDP)


def test_residuals_of_wide_gradients_are_as_wide():
    wide, usual = (
        [TensorSpec("a", (300, 200), dtype), TensorSpec("b", (40_000,), dtype)] for dtype in ("float64", "float32")
    )
    for storage, times in (("float32", 2.0), ("bf16", 1.0)):
        kept = []
        for tensors in (wide, usual):
            strategy = Strategy.uniform(tensors, Cluster(2, 1), GATHER)
            spent = Ledger(tensors, Cluster(2, 1), (TOY,), None, Budgets(), storage=storage).spent(strategy.choices)[1]
            buckets = (Bucket.packed(0, [(each.name, each.numel) for each in tensors], tensors[0].dtype),)
            assert spent == pytest.approx(residual_bytes(plan(strategy, buckets), 0, storage, True), rel=0.01)
            kept.append(spent)
        assert kept[0] == times * kept[1]


def test_what_rides_takes_of_the_memory_too():
    """Its payload's residual is as long as all that travels in it."""
    sizes = (40_000, 20_000)
    job = make_job(
        sizes, [0, 5], beta=20.0, alpha=50.0, costs=BOTH, mode=Mode.DDP,
        buckets=(Bucket(0, (Slot("t0", 0, sizes[0]), Slot("t1", sizes[0], sizes[1]))),), bucket_ready_us=(5.0,),
    )  # fmt: skip
    limits = Constraints(keep_exact=("t1",), force={"t0": f"{TOY} via {GATHER.option}"})
    for millions, rides in ((8 * 60_100 / MB, True), (8 * 40_100 / MB, False)):
        found = search(job, [TOY], terms=Terms(residual_budget_mb=millions, constraints=limits), payload=tenth)
        assert found.residual_bytes <= millions * MB
        assert residual_bytes(found.plan, 0, "float32", True) == pytest.approx(found.residual_bytes, rel=1e-3)
        assert is_rider(found.strategy.choices["t1"]) == rides


def test_what_an_older_strategy_has_ride_takes_of_the_memory_too():
    sizes = (40_000, 20_000)
    job = make_job(
        sizes, [0, 5], beta=20.0, alpha=50.0, costs=BOTH, mode=Mode.DDP,
        buckets=(Bucket(0, (Slot("t0", 0, sizes[0]), Slot("t1", sizes[0], sizes[1]))),), bucket_ready_us=(5.0,),
    )  # fmt: skip
    old = Strategy(job.tensors, {"t0": GATHER, "t1": Choice(GATHER.option, NONE)}, job.cluster)
    for millions, rides in ((8 * 60_100 / MB, True), (8 * 40_100 / MB, False)):
        found = replan(job, old, terms=Terms(residual_budget_mb=millions), payload=tenth)
        assert found.residual_bytes == pytest.approx(residual_bytes(found.plan, 0, "float32", True), rel=1e-3)
        assert found.residual_bytes <= millions * MB
        assert is_rider(found.strategy.choices["t1"]) == rides
    free = replan(job, old, payload=tenth)
    assert is_rider(free.strategy.choices["t1"])
    assert free.residual_bytes == pytest.approx(residual_bytes(free.plan, 0, "float32", True), rel=1e-3)


def test_of_more_tensors_than_pairs_can_be_tried_of_the_giants_move_together():
    """What one owes less the other may owe more: single moves from a budget that is spent cannot do that."""
    job = job_from_trace("ugatit", 8, 8, "nvlink-100g")
    specs = tuple(map(CompressorSpec.parse, ("fp16", "efsignsgd", "onebit", "dgc:ratio=0.01", "randomk:ratio=0.05")))
    known = normal_sensitivity(specs)
    whole = Effort().patient
    apart, together = (
        search(job, specs, terms=Terms(error_budget=2.0, all_kinds=True), sensitivity=known, effort=effort)
        for effort in (replace(whole, together=0), whole)
    )
    assert together.predicted_us < 0.98 * apart.predicted_us
    assert together.error <= 2.0


def test_many_tensors_of_which_none_is_large_are_searched_within_a_budget():
    """Pairs of all are too many, and there are no giants."""
    job = make_job([30_000] * 120, [5.0] * 120, beta=20.0, costs=BOTH)
    known = Sensitivity({TOY: {"*": 2.0}, FP16: {"*": 0.1}})
    found = search(job, [TOY, FP16], terms=Terms(error_budget=1.0), sensitivity=known, payload=two_sizes)
    assert found.error <= 1.0
    assert found.lower_bound_us <= found.predicted_us < found.uncompressed_us


def test_a_sensitivity_of_some_tensors_only_is_none_where_nothing_is_asked_of_it():
    job = make_job([40_000] * 2, [0, 5], beta=20.0, costs=BOTH)
    partly = Sensitivity({TOY: {"t0": 1.0}, FP16: {"t0": 0.01}})
    found = search(job, [TOY], sensitivity=partly, payload=two_sizes)
    assert found.error is None
    with pytest.raises(JobError, match="does not say"):
        search(job, [TOY], terms=Terms(error_budget=1.0), sensitivity=partly, payload=two_sizes)


def test_a_budget_has_a_price_beside_compressors_of_which_nothing_is_known():
    """A baseline with fp16, of which nobody says what it owes, is among the strategies that are looked at."""
    told, budget = mixed_job(8), Terms(error_budget=0.5)
    owed = Sensitivity({TOY: {"*": 0.8}})
    with_fp16 = search(told, [TOY], terms=budget, sensitivity=owed, payload=two_sizes)
    alone = replace(told, costs=replace(told.costs, compute=compute(1.0, 1.0)))
    without = search(alone, [TOY], terms=budget, sensitivity=owed, payload=two_sizes)
    assert with_fp16.predicted_us == pytest.approx(without.predicted_us)
    assert with_fp16.lower_bound_us == pytest.approx(without.lower_bound_us, rel=0.01)


def test_of_what_is_nearly_as_fast_the_fewest_kinds_are_taken():
    job = job_from_trace("bert_base", 8, 8, "pcie-25g")
    whole = search(job, "efsignsgd", terms=Terms(all_kinds=True))
    few = search(job, "efsignsgd", terms=Terms(all_kinds=False))
    before, after = len(kinds_of(whole.strategy)), len(kinds_of(few.strategy))
    assert after <= 8 < 14 <= before
    assert few.predicted_us <= NEAR * whole.predicted_us * (1 + 1e-9)
    assert few.kinds_left_out >= before - after
    assert few.lower_bound_us <= few.predicted_us
    assert few.fewer_kinds_cost_us <= few.predicted_us - whole.predicted_us + 1e-6


# -- what compressors owe --------------------------------------------------------------------------


def test_measured_errors_are_what_feedback_keeps():
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((8, 4096)).astype(np.float32)
    same = np.broadcast_to(wide[:1], wide.shape).copy()
    samples = [Sample(TensorSpec(name, (64, 64)), values) for name, values in {"noise": wide, "same": same}.items()]
    specs = [CompressorSpec.parse(text) for text in ("topk:ratio=0.1", "topk:ratio=0.01", "int8", "fp16")]
    found = measure_sensitivity(samples, specs)
    tenths, hundredths, int8, fp16 = (found.of(spec, "noise") for spec in specs)
    assert 1.0 < tenths < hundredths
    assert int8 < 0.05
    assert fp16 < 1e-3
    # What is the same in every step is only late.
    assert found.of(specs[1], "same") == pytest.approx(hundredths, rel=0.3)
    assert [rings(specs[0], gain) for gain in (None, 0.125, 1.0)] == [1.0, 1.0, RINGING]
    assert rings(FP16, 1.0) == 1.0, "what keeps nothing back does not ring"
    # In a job that corrects momentum all of a residual comes back of every compressor, as with dgc's own.
    assert rings(specs[0], 1.0, corrected=True) == rings(CompressorSpec.parse("dgc:ratio=0.1,momentum=0.9")) == 1.0
    classical = measure_sensitivity(samples, specs[:1], gain=1.0)
    corrected = measure_sensitivity(samples, specs[:1], corrected=True)
    assert RINGING * corrected.of(specs[0], "noise") == pytest.approx(classical.of(specs[0], "noise"))
    assert classical.of(specs[0], "noise") != pytest.approx(tenths, rel=0.01), "the gain counts"
    beside = measure_sensitivity(samples, specs[:1], scale=4.0).of(specs[0], "noise")
    as_asked = measure_sensitivity(samples, specs[:1], gain=1 / 4).of(specs[0], "noise")
    assert beside * rings(specs[0], 1 / 4) == pytest.approx(as_asked), "which rings beside a momentum of .9"
    signs = CompressorSpec.parse("efsignsgd")
    usual, slower = (measure_sensitivity(samples, [signs, specs[0]], scale=scale) for scale in (1.0, 1 / 4))
    raw = measure_sensitivity(samples, [signs], gain=1 / 64).of(signs, "noise")
    assert slower.of(signs, "noise") == pytest.approx(raw / 4), "what comes back over four times the steps"
    assert slower.of(signs, "noise") < 0.6 * usual.of(signs, "noise") < 0.4 * raw
    assert slower.of(specs[0], "noise") == usual.of(specs[0], "noise"), "a sparsifier's gain stays"
    assert normal_sensitivity([FP16]).of(FP16, "anything") < 1e-3


def test_a_gradient_that_was_zero_or_seen_once_is_forecast_like_noise():
    """Zero said that every compressor owes nothing for ever; a single one, that it comes again in every step."""
    values = np.random.default_rng(1).standard_normal((8, 4096)).astype(np.float32)
    shape = TensorSpec("w", (64, 64))
    specs = [CompressorSpec.parse(text) for text in ("int8", "efsignsgd", "dgc:ratio=0.01")]
    usual = measure_sensitivity([Sample(shape, values)], specs)
    zero = measure_sensitivity([Sample(shape, np.zeros_like(values))], specs)
    once = measure_sensitivity([Sample(shape, values[:1])], specs)
    again = measure_sensitivity([Sample(shape, values[:1].repeat(8, axis=0))], specs)
    for spec in specs:
        assert again.of(spec, "w") == once.of(spec, "w")
        assert zero.of(spec, "w") == pytest.approx(usual.of(spec, "w"), rel=0.2), spec
        assert 0.7 * usual.of(spec, "w") < once.of(spec, "w") < 3 * usual.of(spec, "w"), spec


def test_what_gradients_have_in_common_is_only_late_and_not_forecast():
    draws = np.random.default_rng(0).standard_normal((9, 4096)).astype(np.float32)
    tensor, spec = TensorSpec("w", (64, 64)), CompressorSpec.parse("efsignsgd")
    alone, drifting = (measure_sensitivity([Sample(tensor, v)], [spec]) for v in (draws[:8], draws[:8] + 5 * draws[8]))
    assert drifting.of(spec, "w") == pytest.approx(alone.of(spec, "w"), rel=1e-3)


@pytest.mark.filterwarnings("error")
def test_what_cannot_carry_gradients_owes_too_much_of_them_and_nothing_fails():
    """A training that diverges, or whose loss is scaled: half precision overflows, and in the end everything does."""
    values = np.random.default_rng(0).standard_normal((4, 4096)).astype(np.float32)
    shape = TensorSpec("w", (64, 64))
    specs = [CompressorSpec.parse(text) for text in ("fp16", *AUTO_COMPRESSORS)]
    large = measure_sensitivity([Sample(shape, values * np.float32(1e6))], specs)
    usual = measure_sensitivity([Sample(shape, values)], specs)
    assert large.of(specs[0], "w") == TOO_MUCH
    for spec in specs[1:]:
        assert large.of(spec, "w") == pytest.approx(usual.of(spec, "w"), rel=0.05, abs=0.01), spec
    last = measure_sensitivity([Sample(shape, np.sign(values) * np.float32(3e38))], specs)
    assert all(0 <= last.of(spec, "w") <= TOO_MUCH for spec in specs)


def test_forecasts_from_eight_gradients_are_what_a_long_run_owes():
    """Predicted within a quarter of measured, where gradients of very different sizes scatter."""
    from benchmarks.feedback_gain import Site

    rng = np.random.default_rng(0)
    scale = np.exp(rng.standard_normal(4096)).astype(np.float32)

    def gradient():
        return (scale * rng.standard_normal(4096)).astype(np.float32)

    sample = Sample(TensorSpec("w", (64, 64)), np.stack([gradient() for _ in range(8)]))
    for text in ("efsignsgd:block=64", "topk:ratio=0.1", "int4"):
        spec = CompressorSpec.parse(text)
        said = measure_sensitivity([sample], [spec]).of(spec, "w")
        site, owed = Site(text, 4096, finer_gain(spec), 0, 0), []
        for step in range(200):
            g = gradient()
            site.send(g, step)
            if step >= 150:
                owed.append(np.linalg.norm(site.owed) / np.linalg.norm(g))
        assert said == pytest.approx(rings(spec) * np.median(owed), rel=0.25), text


@pytest.mark.parametrize("sampled", [256, 32])
@pytest.mark.parametrize(("inner", "noise"), [(16, 1.0), (8, 0.0)])
def test_low_rank_forecasts_are_of_gradients_that_are_new_in_every_step(sampled, inner, noise):
    """Eight gradients span little of a matrix, and a part of its rows less; a long run sees all of it."""
    rng, (rows, columns) = np.random.default_rng(0), (256, 128)

    def gradient():
        left, right = rng.standard_normal((rows, inner)), rng.standard_normal((inner, columns))
        return (left @ right + noise * rng.standard_normal((rows, columns))).astype(np.float32)

    values = np.stack([gradient()[:: rows // sampled].reshape(-1) for _ in range(8)])
    spec = CompressorSpec.parse("powersgd:rank=4,start_iter=0")
    said = measure_sensitivity([Sample(TensorSpec("w", (rows, columns)), values)], [spec]).of(spec, "w")
    kept, right, owed = np.zeros((rows, columns), np.float32), rng.standard_normal((columns, 4)), []
    for _ in range(200):
        g = gradient()
        left, _ = np.linalg.qr((g + kept) @ right)
        right = (g + kept).T @ left
        kept = g + kept - left @ right.T
        owed.append(np.linalg.norm(kept) / np.linalg.norm(g))
    assert said == pytest.approx(RINGING * np.median(owed[150:]), rel=0.25), "it comes back at once, and counts more"


def finer_gain(spec):
    from espresso.compressors import create

    return create(spec).traits.gain_at(1.0)


def test_a_count_is_scaled_to_the_part_of_a_tensor_that_is_sampled():
    values = np.random.default_rng(2).standard_normal((8, 4096)).astype(np.float32)
    sample = Sample(TensorSpec("w", (1024, 64)), values)
    spec, same = CompressorSpec.parse("topk:least=6554,ratio=0.001"), CompressorSpec.parse("topk:ratio=0.1")
    found = measure_sensitivity([sample], [spec, same])
    assert found.of(spec, "w") == pytest.approx(found.of(same, "w"), rel=1e-3)


def test_samples_are_whole_rows_of_large_tensors():
    assert stretches_of(TensorSpec("b", (100,)), 512) == ((0, 100),)
    rows = stretches_of(TensorSpec("w", (1000, 60)), 4096)
    assert len(rows) == 8
    assert all(start % 60 == 0 and numel % 60 == 0 and start + numel <= 60_000 for start, numel in rows)
    wide = stretches_of(TensorSpec("w", (10, 100_000)), 4096)
    assert all(numel == 512 for _, numel in wide)


def test_a_budget_takes_other_settings_where_they_owe_less():
    job = make_job([60_000] * 3, [0, 1, 1], beta=30.0, costs=compute(0.01, 0.01))
    coarse, fine = CompressorSpec.parse("efsignsgd"), CompressorSpec.parse("efsignsgd:block=64")
    losses = Sensitivity({coarse: {"*": 1.0}, fine: {"*": 0.5}})
    found = search(job, [coarse, fine], terms=replace(AUTOMATIC, error_budget=0.6), sensitivity=losses)
    assert {choice.compressor for choice in found.strategy.choices.values()} == {fine}
    assert found.error == pytest.approx(0.5)
    assert Terms.of(found.strategy.notes).error_budget == 0.6


def test_files_and_their_faults(tmp_path):
    path = tmp_path / "sensitivity.json"
    path.write_text(json.dumps(LOSSES.to_json()))
    assert Sensitivity.load(path).of(TOY, "t0") == 0.2
    with pytest.raises(JobError, match="does not say what 'topk'"):
        LOSSES.of(CompressorSpec("topk"), "t0")
    path.write_text(json.dumps(LOSSES.to_json() | {"kind": "espresso-job"}))
    with pytest.raises(JobError, match="this is a job file, and a sensitivity file is wanted"):
        Sensitivity.load(path)
    with pytest.raises(JobError, match="error budget is at least zero"):
        Budgets(-1.0)
    with pytest.raises(JobError, match="give a sensitivity"):
        ledger_of(mixed_job(2), (TOY,), None, 1.0)
    with pytest.raises(JobError, match="must be finite"):
        Sensitivity({TOY: {"*": -0.5}})


@pytest.mark.parametrize(
    ("budget", "checks", "over"),
    [
        (2.0, [2.9, 3.0, 3.1], 1.5),
        (2.0, [2.1, 2.2, 2.2], 0.0),  # forecasts are no better than that
        (2.0, [0.5, 0.5, 12.0], 0.0),  # one check says so, and the others do not
        (None, [9.0, 9.0, 9.0], 9.0 / HARMLESS),  # nobody said: it came with a checkpoint
        (0.0, [9.0, 9.0, 9.0], 0.0),
    ],
)
def test_what_is_over_budget_is_so_for_certain(budget, checks, over):
    strategy, measured = owing(checks)
    assert found_over(strategy, measured, Terms(error_budget=budget)) == pytest.approx(over, abs=0.01)
    beside_another = replace(strategy, gain_scale=4.0)
    assert found_over(beside_another, measured, Terms(error_budget=budget)) == 0.0, "what was measured is none of its"


@pytest.mark.parametrize(("budget", "over"), [(2.0, 1.5), (4.0, 0.0)])
def test_a_strategy_is_held_to_what_it_was_searched_under_on_every_rank(budget, over):
    """Whether the optimizer adapts a rank sees by those that it still holds, which others may have let go."""
    strategy, measured = owing([2.9, 3.0, 3.1])
    noted = replace(strategy, notes=Terms(error_budget=budget).to_meta())
    noted = Strategy.from_json(json.loads(json.dumps(noted.to_json())))  # as other ranks and checkpoints have it
    for adapts in (True, False):
        assert found_over(noted, measured, Terms(), adapts=adapts) == pytest.approx(over, abs=0.01)
        assert found_over(noted, measured, Terms(error_budget=1.0), adapts=adapts) > 2.5, "the user's comes first"
        strange = replace(strategy, notes={"automatic": "of another version"})
        assert found_over(strange, measured, Terms(), adapts=adapts) == 0.0
        assert found_over(noted, measured, Terms(), adapts=adapts, given=(TOY,)) == 0.0, (
            "one that is named owes any number"
        )


def test_every_strategy_that_was_searched_within_a_budget_says_so():
    for all_kinds in (True, False):
        terms = Terms(error_budget=0.4, all_kinds=all_kinds)
        found = search(mixed_job(4), (TOY,), terms=terms, sensitivity=LOSSES)
        for row in (found.chosen, *found.alternatives):
            if row.strategy.compresses:
                assert Terms.of(row.strategy.notes).error_budget == 0.4


def found_over(strategy, measured, asked, *, adapts=True, given=(TOY, TOY)):
    search = object.__new__(OnlineSearch)
    search._asked, search._given, search.measured_owed = asked, given, measured
    search.optimizer_adapts = lambda: adapts
    return search.over_budget(strategy)


def owing(checks):
    """A strategy, and what its tensors owe by checks of which each found so much."""
    tensors = (TensorSpec("a", (64, 64), "float32"), TensorSpec("b", (64, 64), "float32"))
    choice = Choice(parse_option("comp > flat.allgather > dec"), CompressorSpec.parse("efsignsgd"))
    strategy = Strategy.uniform(tensors, Cluster(2, 1)).with_choices({"a": choice})
    seen = [checks[number % len(checks)] for number in range(OWED_CHECKS)]

    def measured(*, scale: float, without: int | None = None) -> dict[str, tuple[Choice, float]]:
        if scale != 1.0:
            return {}
        left = [owed**2 for number, owed in enumerate(seen) if number != without]
        # Half of the elements owe nothing.
        return {"a": (choice, math.sqrt(2 * sum(left) / len(left))), "b": (choice, 99.0)}

    return strategy, measured


def test_what_was_measured_still_counts_when_another_strategy_runs():
    signs, other = map(CompressorSpec.parse, ("efsignsgd", "dgc:ratio=0.01"))
    choice = Choice(parse_option("comp > flat.allgather > dec"), signs)
    forecast = {signs: {"t0": 1.0}, other: {"t0": 4.0}}
    search = SimpleNamespace(
        _wanted=lambda: (),
        _forecast=forecast,
        _known=forecast,
        _measured={},
        _offered=[],
        _forecast_scale=1.0,
        gain_scale=lambda: 1.0,
    )
    for measured in ({"t0": (choice, 2.0)}, {}):  # it is not looked at for long enough at first
        search.measured_owed = lambda scale, measured=measured: measured
        job = OnlineSearch._with_sensitivity(search, mixed_job(2))
        known = Sensitivity.from_json(job.meta[SENSITIVITY])
        assert [known.of(spec, "t0") for spec in (signs, other)] == [2.0, 8.0]
    assert list(search._measured) == [(signs, "t0")]


def test_what_grows_of_one_compressor_grows_of_all_whichever_ran_first():
    """Signs, then twobit, which comes to owe twice as much; then signs again."""
    specs = signs, twobit, few = tuple(map(CompressorSpec.parse, ("efsignsgd", "twobit", "dgc:ratio=0.01")))
    forecast = {signs: {"t0": 2.0}, twobit: {"t0": 1.0}, few: {"t0": 4.0}}
    search = SimpleNamespace(
        _wanted=lambda: (), _forecast=forecast, _known=forecast, _measured={}, _offered=[], _forecast_scale=1.0,
        gain_scale=lambda: 1.0,
    )  # fmt: skip
    found = []
    for spec, owed in ((signs, 3.0), (twobit, 1.5), (twobit, 3.0), (signs, 5.0)):
        row = Choice(parse_option("comp > flat.allgather > dec"), spec), owed
        search.measured_owed = lambda scale, row=row: {"t0": row}
        known = Sensitivity.from_json(OnlineSearch._with_sensitivity(search, mixed_job(2)).meta[SENSITIVITY])
        found.append([known.of(each, "t0") for each in specs])
    assert found == [[3.0, 1.5, 6.0], [3.0, 1.5, 6.0], [6.0, 3.0, 12.0], pytest.approx([5.0, 2.5, 10.0])]


def test_where_something_was_never_finite_normal_numbers_stand_in():
    """And what tensors were found to owe still counts."""
    signs = CompressorSpec.parse("efsignsgd")
    online = SimpleNamespace(
        _wanted=lambda: (signs,), _forecast={}, _known={}, _measured={}, _offered=[], _forecast_scale=None, _gain=None,
        corrects_momentum=False,
        gain_scale=lambda: 4.0,
        _sampler=SimpleNamespace(samples=list),
        measured_owed=lambda scale: {"t1": (GATHER, 7.0)} if scale == 4.0 else {},
        _tensors={"t0": 0, "t1": 0},
    )  # fmt: skip
    job = OnlineSearch._with_sensitivity(online, mixed_job(2))
    known = Sensitivity.from_json(job.meta[SENSITIVITY])
    assert known.of(signs, "t1") == 7.0
    assert online._forecast[signs]["*"] == normal_sensitivity([signs], scale=4.0).of(signs, "t0")
    assert search(job, [TOY], payload=two_sizes).strategy.gain_scale == 4.0
    # A schedule moves the optimizer's momentum, and with it what comes back in a step.
    online.gain_scale = lambda: 0.25
    known = Sensitivity.from_json(OnlineSearch._with_sensitivity(online, mixed_job(2)).meta[SENSITIVITY])
    assert known.of(signs, "t1") == normal_sensitivity([signs], scale=0.25).of(signs, "t1")
    # A compressor that comes into force later is corrected by what was measured, also while nothing is.
    few = CompressorSpec.parse("dgc:ratio=0.01")
    online.gain_scale = lambda: 4.0
    for wanted in ((signs,), (signs, few)):
        online._wanted = lambda wanted=wanted: wanted
        online.measured_owed = lambda scale, wanted=wanted: {"t1": (GATHER, 7.0)} if len(wanted) == 1 else {}
        known = Sensitivity.from_json(OnlineSearch._with_sensitivity(online, mixed_job(2)).meta[SENSITIVITY])
    normal = normal_sensitivity([signs, few], scale=4.0)
    assert known.of(signs, "t1") == 7.0
    assert known.of(few, "t1") == pytest.approx(7.0 * normal.of(few, "t1") / normal.of(signs, "t1"))


def test_a_tensor_without_a_gradient_does_not_take_the_samples_of_the_others():
    tensors = [TensorSpec("used", (64, 64)), TensorSpec("idle", (64, 64))]
    sampler, values = Sampler(tensors, 0), np.random.default_rng(0).standard_normal((8, 4096)).astype(np.float32)
    values[:, 64:] = 0  # as of an embedding of which few rows were touched
    sampler.is_on = True
    bucket = Bucket(0, (Slot("used", 0, 4096),))
    for row in values:
        sampler.see(torch.from_numpy(row), lambda: bucket)
    assert [sample.tensor.name for sample in sampler.samples()] == ["used"]
    signs = CompressorSpec.parse("efsignsgd")
    online = SimpleNamespace(
        _wanted=lambda: (signs,), _forecast={}, _known={}, _measured={}, _offered=[], _forecast_scale=None, _gain=None,
        corrects_momentum=False,
        gain_scale=lambda: 1.0,
        _sampler=sampler, measured_owed=lambda scale: {}, _tensors=dict.fromkeys(("used", "idle")),
    )  # fmt: skip
    known = Sensitivity.from_json(OnlineSearch._with_sensitivity(online, mixed_job(2)).meta[SENSITIVITY])
    normal = normal_sensitivity([signs]).of(signs, "*")
    assert known.of(signs, "idle") == normal
    assert known.of(signs, "used") > 1.5 * normal


def test_of_many_tensors_the_largest_are_sampled_and_no_more_in_all():
    tensors = [TensorSpec(f"t{number}", (512 + number,)) for number in range(1000)]
    sampler = Sampler(tensors, 0)
    sampler.is_on = True
    for tensor in tensors:
        bucket = Bucket(0, (Slot(tensor.name, 0, tensor.numel),))
        sampler.see(torch.ones(tensor.numel), lambda held=bucket: held)
    samples = sampler.samples()
    assert {sample.tensor.name for sample in samples} == {f"t{number}" for number in range(744, 1000)}
    assert sum(sample.values.size for sample in samples) <= MOST_SAMPLED


def test_few_rows_say_nothing_of_a_low_rank():
    tensor, spec = TensorSpec("w", (512, 256), "float32"), CompressorSpec.parse("powersgd:rank=8,start_iter=0")
    owes = {}
    for rows in (8, 32):  # of eight rank 8 would leave nothing
        values = np.random.default_rng(0).standard_normal((8, rows * 256)).astype(np.float32)
        owes[rows] = measure_sensitivity([Sample(tensor, values)], [spec]).of(spec, "w")
    assert owes[8] > owes[32] > 1
