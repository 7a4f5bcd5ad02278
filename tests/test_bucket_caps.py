"""DDP's bucket size as a dimension of the search, and replanning."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from espresso.live.online_search import OnlineSearch
from espresso.model.bucket_caps import as_asked, caps_for, in_buckets, rebucketed
from espresso.model.costs import Contention, CostModel
from espresso.model.job import Job, JobError
from espresso.model.links import AlphaBeta, Links
from espresso.model.presets import job_from_trace
from espresso.model.timeline import simulate
from espresso.search.local_search import NO_EFFORT
from espresso.search.search import advised_bucket_cap, lay_out, replan, search
from espresso.search.settle import Settler, is_rider
from espresso.search.terms import Terms
from espresso.strategies import (
    NONE,
    PLAIN,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Mode,
    Slot,
    Strategy,
    StrategyError,
    TensorSpec,
    parse_option,
)
from espresso.strategies.constraints import Constraints
from tests.timeline_jobs import TOY, compute, make_job, tenth

MIB = 1 << 18
"""Elements."""


def ddp_job(sizes, gaps, **more):
    """A job whose tensors all lie in one bucket."""
    paper = make_job(sizes, gaps, **more)
    return rebucketed(replace(paper, mode=Mode.DDP, buckets=rebuild(paper), bucket_ready_us=(sum(paper.gaps_us),)), 1e6)


def rebuild(paper):
    from espresso.strategies import Bucket, Slot

    offset, slots = 0, []
    for tensor in paper.tensors:
        slots.append(Slot(tensor.name, offset, tensor.numel))
        offset += tensor.numel
    return (Bucket(0, tuple(slots)),)


def test_buckets_fill_in_ready_order_as_ddp_fills_them():
    job = ddp_job([MIB, MIB, 3 * MIB, 10, MIB], [0, 10, 10, 10, 10])
    two = rebucketed(job, 2)
    assert [[slot.tensor for slot in b.slots] for b in two.laid_out] == [["t0", "t1"], ["t2"], ["t3", "t4"]]
    assert two.ready_us == (10.0, 20.0, 40.0)
    assert two.laid_out[0].slots[1].offset == MIB
    assert [len(rebucketed(job, cap).laid_out) for cap in (1, 4, 100)] == [4, 2, 1]
    assert caps_for(job) == (1, 5, 10)


def test_a_bucket_that_holds_nothing_of_a_shard_comes_with_the_one_before_it():
    job = ddp_job([MIB, MIB], [0, 10])
    first, second = rebucketed(job, 1).laid_out
    buckets = Bucket(0, ()), replace(first, index=1), Bucket(2, ()), replace(second, index=3)
    assert in_buckets(job, buckets).ready_us == (0.0, 0.0, 0.0, 10.0)
    assert search(in_buckets(job, buckets), [TOY]).predicted_us == pytest.approx(
        search(rebucketed(job, 1), [TOY]).predicted_us
    )


def test_the_search_says_which_bucket_size_to_set():
    """One bucket leaves the link idle until backward ends; small ones overlap."""
    job = ddp_job([MIB] * 8, [0, *[3000] * 7], beta=2.0)
    result = search(job, TOY, payload=tenth, bucket_caps=None)
    assert result.bucket_cap_mb is not None
    assert result.caps[0].bucket_cap_mb is None
    assert result.predicted_us == min(row.predicted_us for row in result.caps) < result.caps[0].predicted_us
    assert result.strategy.bucket_cap_mb == result.bucket_cap_mb
    assert result.lower_bound_us <= result.predicted_us
    assert len(result.plan.buckets) > 1
    own = search(job, TOY, payload=tenth)
    assert own.caps == ()
    assert own.bucket_cap_mb is None
    assert own.predicted_us == result.caps[0].predicted_us


def test_a_bucket_size_that_gains_nothing_is_not_asked_for():
    job = ddp_job([MIB] * 2, [0, 1], beta=2.0, alpha=5000.0)
    result = search(job, TOY, payload=tenth, bucket_caps=None)
    assert result.bucket_cap_mb is None
    assert len(result.caps) > 1


def test_paper_jobs_have_no_buckets():
    with pytest.raises(ValueError, match="ddp mode"):
        rebucketed(make_job([10], [0]), 25)


def test_replanning_keeps_what_is_good_and_mends_what_is_not():
    job = job_from_trace("lstm", 8, 8, "nvlink-100g")
    old = search(job, "dgc:ratio=0.01")
    links = job.costs.links
    slower = replace(job, costs=replace(job.costs, links=Links(links.intra, AlphaBeta(50.0, 0.4))))
    again = replan(slower, old.strategy)
    assert again.predicted_us <= again.baselines["old strategy"]
    assert again.lower_bound_us <= again.predicted_us
    whole = search(slower, "dgc:ratio=0.01")
    assert again.predicted_us <= 1.1 * whole.predicted_us
    same = replan(job, old.strategy)
    assert same.predicted_us <= old.predicted_us * (1 + 1e-9)
    with pytest.raises(StrategyError, match="tensor"):
        replan(job_from_trace("vgg16", 8, 8, "nvlink-100g"), old.strategy)


def test_a_split_bucket_stays_split_when_replanned():
    job = ddp_job([50_000, 50_000], [0, 5], beta=30.0, costs=compute(8.0, 1.0))
    old = search(job, TOY, payload=tenth, partitions=(0,))
    assert len(set(old.strategy.choices.values())) == 2
    again = replan(job, old.strategy, payload=tenth)
    assert again.predicted_us <= old.predicted_us * (1 + 1e-9)


def in_pairs(sizes, gap=100.0, alpha=1000.0, beta=0.8, nodes=3):
    """A DDP job of buckets of a matrix ``f`` and a matrix ``e`` each, of these rows of a thousand elements."""
    rows = [(f"{kind}{i}", pair["fe".index(kind)]) for i, pair in enumerate(sizes) for kind in "fe"]
    tensors = [TensorSpec(name, (count, 1000)) for name, count in rows]
    numels = {tensor.name: tensor.numel for tensor in tensors}
    named = [[(f"{kind}{i}", numels[f"{kind}{i}"]) for kind in "fe"] for i in range(len(sizes))]
    gaps = [0.0, *[gap] * (len(tensors) - 1)]
    ready = tuple(gap * (2 * i + 1) for i in range(len(sizes)))
    buckets = tuple(Bucket.packed(i, row) for i, row in enumerate(named))
    costs = CostModel(Links(None, AlphaBeta(alpha, beta)), compute(20.0, 0.1, name="efsignsgd"))
    return Job("pairs", tuple(tensors), tuple(gaps), Cluster(nodes, 1), costs, Mode.DDP, buckets, ready)


ONCE = parse_option("comp > flat.allgather > dec")
SIGNS = CompressorSpec("efsignsgd")


def test_a_replanned_strategy_is_predicted_as_it_is_exchanged():
    """Two groups of a bucket that come to take the same are one exchange."""
    job = in_pairs([(1000, 200)] * 4, alpha=2000.0, nodes=4)
    plain = Strategy.uniform(job.tensors, job.cluster, partition_bytes=0)
    old = plain.with_choices({f"f{i}": Choice(ONCE, SIGNS) for i in range(4)})
    found = replan(job, old, compressor="efsignsgd")
    laid = lay_out(job, found.strategy)
    assert found.predicted_us == pytest.approx(simulate(laid, job).iteration_us)
    assert found.uncompressed_us == pytest.approx(simulate(lay_out(job, plain), job).iteration_us)
    assert found.baselines["old strategy"] == pytest.approx(simulate(lay_out(job, old), job).iteration_us)
    assert found.lower_bound_us <= found.predicted_us


@pytest.mark.parametrize("all_kinds", [True, False])
def test_small_exact_tensors_ride_where_a_large_one_does_not_and_the_bound_knows(all_kinds, monkeypatch):
    job = in_pairs([(50, 100)] * 20 + [(50, 30_000)])
    forced = {"f20": f"efsignsgd via {ONCE}"}
    terms = Terms(constraints=Constraints(keep_exact=("e*",), force=forced), all_kinds=all_kinds)
    found = search(job, "efsignsgd", terms=terms)
    riding = {f"e{i}": Choice(ONCE, NONE) for i in range(20)}
    mixed = Strategy.uniform(job.tensors, job.cluster, partition_bytes=0).with_choices(
        {f"f{i}": Choice(ONCE, SIGNS) for i in range(21)} | riding
    )
    by_hand = simulate(lay_out(job, mixed), job).iteration_us
    assert found.lower_bound_us <= by_hand
    assert found.predicted_us <= by_hand * (1 + 1e-9)
    assert found.strategy.choices["e20"] == PLAIN
    assert is_rider(found.strategy.choices["e0"])
    monkeypatch.setattr(Settler, "_riding", lambda self, strategy, small=False: strategy)
    apart = search(job, "efsignsgd", terms=terms)
    assert apart.lower_bound_us <= by_hand < apart.predicted_us, "also where nothing that rides is found"


def test_the_buckets_that_a_job_has_are_no_other_size():
    """They were measured; by sums of gaps the same ones seem to be handed over sooner."""
    sizes = [(1000, 1000)] * 6
    job = rebucketed(in_pairs(sizes, gap=1000.0, alpha=2000.0, nodes=4), 25)
    measured = replace(job, bucket_ready_us=tuple(at + 700.0 for at in job.ready_us))
    found = search(measured, "efsignsgd", bucket_caps=(25.0, 100.0))
    assert [row.bucket_cap_mb for row in found.caps] == [None, 100.0]


def test_bucket_size_and_gains_are_kept_when_replanned():
    job = ddp_job([MIB] * 8, [0, *[3000] * 7], beta=2.0)
    old = search(job, TOY, payload=tenth, bucket_caps=None)
    again = replan(job, replace(old.strategy, gain_scale=4.0), payload=tenth)
    assert again.baselines["old strategy"] == pytest.approx(old.predicted_us)
    assert again.predicted_us <= old.predicted_us * (1 + 1e-9)
    assert {row.strategy.gain_scale for row in (again.chosen, *again.alternatives)} == {4.0}
    assert {row.strategy.bucket_cap_mb for row in (again.chosen, *again.alternatives)} == {old.bucket_cap_mb}
    assert again.plan.buckets == old.plan.buckets


def test_buckets_that_are_as_asked_stay_as_they_were_measured():
    small = rebucketed(ddp_job([MIB] * 4, [0, 10, 10, 10]), 2)
    measured = replace(small, bucket_ready_us=tuple(at + 5.0 for at in small.ready_us))
    assert as_asked(measured, 2) is as_asked(measured, None) is measured
    assert as_asked(measured, 1).ready_us == (0.0, 10.0, 20.0, 30.0)
    paper = make_job([10], [0])
    assert as_asked(paper, 25) is paper


def test_advice_compares_like_with_like():
    job = ddp_job([MIB] * 8, [0, *[3000] * 7], beta=8.0)
    found = advised_bucket_cap(job, [TOY], search(job, TOY), (1, 4, 100))
    assert found is not None
    assert found.bucket_cap_mb == 1
    # Buckets that are so already, in another order within, and were measured to come later.
    small = rebucketed(job, 2)
    (first, *rest), late = small.laid_out, tuple(at + 20_000.0 for at in small.ready_us)
    turned = Bucket(0, (Slot("t1", 0, MIB), Slot("t0", MIB, MIB)))
    same = replace(small, buckets=(turned, *rest), bucket_ready_us=late)
    assert advised_bucket_cap(same, [TOY], search(same, TOY), (2,)) is None
    assert first != turned


EXACT = Terms(constraints=Constraints(keep_exact=("*",)))

THREE = tuple(map(CompressorSpec.parse, ("efsignsgd", "dgc:ratio=0.01", "twobit")))
THREE_COSTS = tuple(cost for spec in THREE for cost in compute(0.001, 0.001, name=str(spec)))


@pytest.mark.parametrize(
    ("gap_us", "beta", "late_us", "terms", "says", "lays"),
    [
        (100, 8.0, 0, Terms(), 1, 1),
        (100, 8.0, 0, EXACT, None, None),
        (1000, 1.0, 0, Terms(), 1, None),
        (1000, 1.0, 400, Terms(), 1, None),
    ],
    ids=[
        "worth it",
        "where all travels as it is, buckets change little",
        "nobody races it, and predictions are off",
        "others would come late too",
    ],
)
def test_automatic_mode_lays_buckets_within_its_terms_and_where_that_is_sure_to_gain(
    gap_us, beta, late_us, terms, says, lays
):
    job = ddp_job([MIB] * 8, [0, *[gap_us] * 7], beta=beta, costs=compute(0.01, 0.01))
    job = replace(job, bucket_ready_us=tuple(at + late_us for at in job.ready_us))
    online: Any = SimpleNamespace(_groups=SimpleNamespace(beside=None), _offered=[TOY], _terms=terms)
    OnlineSearch._advise_bucket_size(online, job, search(job, TOY, terms=terms))
    assert online.bucket_cap_mb == lays
    assert (f"bucket_cap_mb={says})" in online.advice) if says else not online.advice


def test_what_is_advised_was_searched_to_the_end_within_the_budget():
    job = ddp_job([MIB] * 8, [0, *[1000] * 7], beta=30.0, costs=THREE_COSTS)
    terms = Terms(error_budget=6.0)
    found = advised_bucket_cap(job, THREE, search(job, THREE, terms=terms), (1, 4, 100), terms)
    assert found is not None
    whole, glance = (
        search(rebucketed(job, found.bucket_cap_mb), THREE, terms=terms, effort=effort) for effort in (None, NO_EFFORT)
    )
    assert whole.error <= 6.0
    assert found.predicted_us == pytest.approx(whole.predicted_us)
    assert found.predicted_us < 0.9 * glance.predicted_us, "a mixture, which is no part of a glance"


def test_buckets_that_are_better_only_since_the_job_s_own_were_measured_late_are_no_advice():
    job = rebucketed(ddp_job([MIB] * 8, [0, *[1000] * 7], beta=8.0, costs=THREE_COSTS), 2)
    late = replace(job, bucket_ready_us=tuple(at + 4000.0 for at in job.ready_us))
    terms = Terms(error_budget=6.0)
    own, other = (search(one, THREE, terms=terms).predicted_us for one in (late, rebucketed(late, 1)))
    assert other < 0.7 * own
    assert advised_bucket_cap(late, THREE, search(late, THREE, terms=terms), (1,), terms) is None


def test_buckets_in_which_nothing_keeps_to_the_terms_are_no_advice():
    job = ddp_job([MIB] * 8, [0, *[100] * 7], beta=8.0, costs=compute(0.01, 0.01))
    terms = Terms(error_budget=0.0, constraints=Constraints(force={"*": str(TOY)}))
    with pytest.raises(JobError):
        search(job, TOY, terms=terms)
    online: Any = SimpleNamespace(_groups=SimpleNamespace(beside=None), _offered=[TOY], _terms=terms)
    OnlineSearch._advise_bucket_size(online, job, search(job, TOY))
    assert (online.bucket_cap_mb, online.advice) == (None, "")


@pytest.mark.parametrize(("handling_us", "advised"), [(0.0, None), (10_000.0, 4)])
def test_a_bucket_costs_what_carrying_it_out_takes(handling_us, advised):
    job = rebucketed(ddp_job([MIB] * 8, [0, *[3000] * 7], beta=40.0), 1)
    job = replace(job, costs=replace(job.costs, contention=Contention(8.0, handling_us=handling_us)))
    found = advised_bucket_cap(job, [TOY], search(job, TOY), (1, 4, 100))
    assert (found and found.bucket_cap_mb) == advised
