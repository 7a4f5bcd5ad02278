"""What exchanges, residuals, servers and the cores beside them are priced at: as they are carried out."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from espresso.comm.parameter_server import sums
from espresso.live import profiler, remeasure
from espresso.live.change import Cause, Change, Finding
from espresso.live.online_search import OnlineSearch
from espresso.live.profiler import Place, cores_taken
from espresso.live.remeasure import Remeasured
from espresso.model.costs import CostModel, ServerCosts
from espresso.model.job import Job
from espresso.model.links import JobError, LinkCurve, Links
from espresso.model.pricing import Pricer
from espresso.model.timeline import first_come, simulate
from espresso.search.candidates import choices_for, units_of
from espresso.search.evaluator import Evaluator
from espresso.search.frontier import frontier
from espresso.search.terms import Terms
from espresso.show.explain import explain
from espresso.strategies import (
    NONE,
    PLAIN,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    Routine,
    Scope,
    Strategy,
    TensorSpec,
    options_for,
    plan,
)
from tests.timeline_jobs import GATHER, PUSH_RAW, TOY, compute, make_job, tenth, uniform

FP16 = CompressorSpec("fp16")
SQUARE = Cluster(2, 2, 2)


def test_where_an_option_compresses_numbers_of_16_bits_travel_as_32():
    """So the executor does it: see :class:`espresso.comm.program.part.Home`."""
    entries = compute(1.0, 1.0) + compute(1.0, 1.0, name="fp16")
    pricer = Pricer(make_job([1], [0], costs=entries, servers=ServerCosts(0.1)).costs, SQUARE)
    chosen = [*choices_for(SQUARE, TOY, (Device.TRAINING,)), *choices_for(SQUARE, FP16, (Device.TRAINING,))]
    riders = [Choice(choice.option, NONE) for choice in chosen if choice.option.carries_payloads]
    for choice in (*chosen, *riders):
        narrow, wide = (
            [work.num_bytes for work in pricer.chain(choice, 10_000, dtype)] for dtype in ("bfloat16", "float32")
        )
        assert narrow == wide, choice
    for option in options_for(SQUARE, devices=(Device.TRAINING,)):
        if not option.is_compressed and not option.halves:
            narrow, wide = (
                [work.num_bytes for work in pricer.chain(Choice(option), 10_000, dtype)]
                for dtype in ("bfloat16", "float32")
            )
            assert [2 * each for each in narrow] == wide, option
    for choice in chosen:
        sent = []
        for dtype in ("bfloat16", "float32"):
            strategy = Strategy.uniform((TensorSpec("w", (10_000,), dtype),), SQUARE, choice)
            sent.append([step.sent_bytes for step in explain(strategy)[0].steps])
        assert sent[0] == sent[1], choice


def test_an_encode_packs_its_residual_as_the_job_keeps_it():
    entries = compute(10.0, 10.0) + compute(1.0, 2.0, name="bf16") + compute(5.0, 5.0, name="fp16")
    full = CostModel(make_job([1], [0]).costs.links, entries)
    packs = replace(full, residual_dtype="bf16")
    for device in (Device.TRAINING, Device.OFFLOAD):
        said = full.encode_us(TOY.kept_as("bf16"), device, 1000)
        assert packs.encode_us(TOY, device, 1000) == said == 14.0
        assert packs.encode_us(TOY.kept_as("float32"), device, 1000) == full.encode_us(TOY, device, 1000) == 10.0
        assert packs.encode_us(FP16, device, 1000) == 5.0, "it has no residual"
        assert packs.decode_us(TOY, device, 1000) == 10.0
    assert packs.encode_us(TOY, Device.SERVER, 1000) == 10.0, "servers keep theirs in full"
    job = replace(make_job([1000], [0]), costs=packs)
    assert Job.from_json(job.to_json()) == job
    with pytest.raises(JobError, match="residual_dtype must be one of float32, bf16, int8, got 'int7'"):
        replace(full, residual_dtype="int7")


@pytest.mark.parametrize(
    ("compressors", "storage", "packs"),
    [
        ("efsignsgd", "float32", ()),
        ("efsignsgd", "bf16", ("bf16",)),
        ("efsignsgd:residual_dtype=int8", "bf16", ("int8",)),
        ("fp16", "int8", ()),
    ],
)
def test_what_packs_residuals_is_measured(compressors, storage, packs):
    spec = CompressorSpec.parse(compressors)
    search: Any = SimpleNamespace(compressors=(spec,), _terms=Terms(residual_dtype=storage), _suits=lambda _: True)
    assert OnlineSearch._wanted(search) == (spec, *map(CompressorSpec, packs))


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_a_server_adds_up_one_time_less_often_than_there_are_workers(monkeypatch, num_workers):
    monkeypatch.setattr(sums, "_time", lambda run: 100.0)
    found = sums.measure_server(None, None, (), num_workers)["sum_us_per_kb"]
    contributions_kb = num_workers * 4 * sums.SUM_ELEMENTS / 1e3
    assert found * contributions_kb == pytest.approx(100.0 * max(num_workers - 1, 1))


def test_what_exchanges_take_of_a_core_is_over_how_long_they_hold_the_link(monkeypatch):
    """A step counts it for as long, and not for the time in which they are only on their way."""
    points, late_us = ((1e4, 100.0), (1e6, 10_000.0)), 90_000.0

    def links(rate: float) -> Links:
        slower = tuple((size, rate * us) for size, us in points)
        gather = LinkCurve(Routine.ALLGATHER, Scope.FLAT, Form.PAYLOAD, slower, late_us)
        return Links(curves=(gather,), in_flight=8)

    ran: list[int] = []

    class Computing:
        def __init__(self, groups: Any) -> None:
            pass

        def taken_us(self, run: Any) -> float:
            run()
            return 2_000.0 * len(ran)

    monkeypatch.setattr(profiler, "Computing", Computing)
    monkeypatch.setattr(profiler, "starter", lambda *_: lambda: lambda: ran.append(1))
    groups: Any = SimpleNamespace(cluster=Cluster(2, 1), scopes={Scope.FLAT: None})
    taken = cores_taken(groups, links(1.0).curves)
    assert taken == pytest.approx({"flat": 0.2})
    # Twice as long on the link, as long on the way: half the cores.
    assert remeasure.taken_now(taken, links(1.0), links(2.0)) == pytest.approx({"flat": 0.1})


def test_computing_is_compared_with_what_it_took_under_the_same_strategy(monkeypatch):
    """Another strategy's encoders run beside backward, which takes longer for it: the machine is no slower."""
    job = make_job([1000, 1000], [0, 100], forward_us=50.0)
    monkeypatch.setattr(remeasure, "probe", lambda *_: {})
    groups: Any = SimpleNamespace(cluster=job.cluster)
    plain, other = uniform(job), uniform(job, GATHER)

    def slower(before_us: float, now_us: float) -> Change:
        return Change((Finding(Cause.JOB, now_us / before_us),), 0, (before_us, now_us), (before_us, now_us))

    first = slower(100.0, 150.0)
    known = Remeasured(job, first, plain)
    assert sum(known.job(job, first, groups, Place(), plain).gaps_us) == pytest.approx(150.0)
    # Under the other strategy computing takes 180 as long as all is as it is, and then twice that.
    assert sum(known.job(job, slower(180.0, 360.0), groups, Place(), other).gaps_us) == pytest.approx(300.0)
    assert sum(known.job(job, slower(360.0, 120.0), groups, Place(), other).gaps_us) == pytest.approx(100.0)


def test_the_frontier_has_points_of_less_memory_at_the_error_of_the_fastest():
    costs = compute(1.0, 1.0) + compute(4.0, 4.0, name="fp16")
    job = make_job([40_000] * 4, [0, 5, 5, 5], beta=20.0, costs=costs)
    points = frontier(job, [TOY], points=2, memory_points=4, payload=tenth)
    fastest = points[0]
    assert fastest.residual_bytes > 0
    between = [point for point in points if 0 < point.residual_bytes < fastest.residual_bytes]
    assert between, "what less memory buys"


def test_a_strategy_of_a_checkpoint_with_other_servers_is_foreseen_in_this_cluster():
    job = make_job([1000], [0], cluster=Cluster(2, 1, 2), servers=ServerCosts(0.1))
    before = Strategy.uniform(job.tensors, Cluster(2, 1, 1), PUSH_RAW)
    search: Any = SimpleNamespace(job=job, _groups=SimpleNamespace(rank=0))
    now = first_come(plan(uniform(job, PUSH_RAW), job.laid_out, mode=job.mode), job)
    assert OnlineSearch.foresees(search, before) == (now.iteration_us, now.sent_us)


@pytest.mark.parametrize("choice", [PLAIN, GATHER])
def test_a_tensor_of_no_elements_costs_no_more_than_in_the_search(choice):
    job = make_job([0, 1000], [0, 10])
    pricer = Pricer(job.costs, job.cluster)
    found = simulate(first_come(plan(uniform(job, choice), job.laid_out, mode=job.mode), job).plan, job, pricer=pricer)
    evaluator = Evaluator(job, units_of(job), 0)
    assert found.makespan_us == evaluator.makespan(evaluator.uniform(choice))
    assert [work.num_bytes for work in pricer.chain(PLAIN, 0, "float32")] == [0.0]


def test_a_curve_that_says_nothing_of_bytes_is_refused():
    for points in (((0.0, 5.0), (10.0, 6.0)), ((10.0, 6.0),)):
        LinkCurve(Routine.ALLGATHER, Scope.FLAT, Form.PAYLOAD, points)
    with pytest.raises(JobError, match=r"flat\.allgather: its only point is at 0 bytes"):
        LinkCurve(Routine.ALLGATHER, Scope.FLAT, Form.PAYLOAD, ((0.0, 5.0),))
