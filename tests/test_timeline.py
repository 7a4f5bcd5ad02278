"""The timeline: exact event logs by hand, invariants on random plans, and kernels equal to the oracle."""

import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espresso.model.costs import Contention, CopyCost, Op, ServerCosts
from espresso.model.links import AlphaBeta, LinkCurve
from espresso.model.pricing import Pricer
from espresso.model.timeline import first_come, simulate, water_fill, widths_of
from espresso.search.candidates import units_of
from espresso.search.evaluator import Evaluator
from espresso.strategies import (
    PLAIN,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    Lane,
    Routine,
    Scope,
    parse_option,
    plan,
)
from espresso.strategies.list_scheduling import Width, list_order, schedule_tasks
from tests.timeline_jobs import (
    GATHER,
    HOST_GATHER,
    PUSH_RAW,
    TOY,
    TWO_WAY,
    choices,
    compute,
    jobs,
    make_job,
    planned,
    tenth,
    uniform,
)

slow_ok = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))


def lay(job, strategy):
    laid = plan(strategy, job.laid_out, mode=job.mode, host_copies=job.host_copies)
    return first_come(laid, job, pricer=Pricer(job.costs, job.cluster, tenth)).plan


def run(job, strategy):
    return simulate(lay(job, strategy), job, pricer=Pricer(job.costs, job.cluster, tenth))


def events(timeline):
    """(lane, tensor, step, start, end), the event log."""
    laid, start, end = timeline.plan, timeline.start_us, timeline.end_us
    return [
        (lane.value, _first_tensor(laid, task), str(task.step), start[task.index], end[task.index])
        for task in sorted(laid.tasks, key=lambda task: start[task.index])
        for lane in timeline.lanes(task.index)
    ]


def _first_tensor(laid, task):
    part = laid.partitions[task.partition]
    return laid.groups[part.group].segments(part.start, part.stop)[0].tensor


# By hand. Two nodes of one rank; 1 us per KB; encode and decode 10 us per 1000 elements, ten to one.


def test_plain_allreduces_queue_on_the_link():
    job = make_job([10_000, 20_000], [0, 10], forward_us=5.0, optimizer_us=3.0)
    timeline = run(job, uniform(job))
    # Ring of two: S/B = 40 us and 80 us; the second is ready at 10 and waits.
    assert events(timeline) == [
        ("inter_out", "t0", "flat.allreduce", 0, 40),
        ("inter_in", "t0", "flat.allreduce", 0, 40),
        ("inter_out", "t1", "flat.allreduce", 40, 120),
        ("inter_in", "t1", "flat.allreduce", 40, 120),
    ]
    assert timeline.bucket_ready_us == (0, 10)
    assert timeline.makespan_us == 120
    assert timeline.iteration_us == 128


def test_training_compression_holds_backward_up():
    job = make_job([1000, 1000], [0, 15])
    timeline = run(job, uniform(job, GATHER))
    # encode 10, allgather half of 2 * 400 bytes: 0.4 us, decode of two payloads: 20.
    assert [(e[0], e[1], e[2]) for e in events(timeline) if e[0] != "inter_in"] == [
        ("training", "t0", "comp"),
        ("inter_out", "t0", "flat.allgather"),
        ("training", "t0", "dec"),
        ("training", "t1", "comp"),
        ("inter_out", "t1", "flat.allgather"),
        ("training", "t1", "dec"),
    ]
    # Backward: 0-10 held by comp, 0.4 us of work while the link runs, 20 held by dec, then the other 14.6.
    assert timeline.bucket_ready_us == (0, pytest.approx(45.0))
    assert timeline.makespan_us == pytest.approx(45 + 30.4)


def test_host_compression_holds_nothing_up():
    job = make_job([1000, 1000], [0, 15])
    timeline = run(job, uniform(job, HOST_GATHER))
    assert timeline.bucket_ready_us == (0, 15)
    assert timeline.makespan_us == pytest.approx(10 + 0.4 + 20 + 10 + 0.4 + 20)


def test_host_copies_have_their_lane_or_the_intra_link():
    job = make_job([1000], [0], copy=CopyCost(2.0, 1.0))
    assert [(e[0], e[3], e[4]) for e in events(run(job, uniform(job, HOST_GATHER))) if e[0] == "copy"] == [
        ("copy", 0, 6),
        ("copy", 16, pytest.approx(18.4)),
        ("copy", pytest.approx(18.8), pytest.approx(21.6)),
        ("copy", pytest.approx(41.6), pytest.approx(47.6)),
    ]
    shared = make_job([1000], [0], copy=CopyCost(2.0, 1.0, True))
    timeline = run(shared, uniform(shared, HOST_GATHER))
    assert [e[0] for e in events(timeline)].count("intra") == 4


def test_shared_cores_slow_everything_in_proportion():
    # One core: backward (demand 1) and the encoder (demand 1) get half each until the encoder is done at 20.
    contention = Contention(1.0, 1.0, 1.0, {"flat": 0.5})
    job = make_job([1000, 64], [0, 30], contention=contention)
    strategy = uniform(job).with_choices({"t0": GATHER})
    timeline = run(job, strategy)
    log = {(e[1], e[2]): e[3:] for e in events(timeline)}
    assert log["t0", "comp"] == (0, 20)
    # The gather burns half a core and is served first; backward then has the other half.
    assert log["t0", "flat.allgather"] == (20, pytest.approx(20.4))
    # Backward did 10 + 0.2; with the decoder at half speed it needs 39.6 for the rest.
    assert timeline.bucket_ready_us == (0, pytest.approx(20.4 + 39.6))
    # The decoder did 19.8 of its 20 by then, shares with the allreduce (0.256 at half a core), then is alone.
    assert log["t0", "dec"][0] == pytest.approx(20.4)
    assert log["t0", "dec"][1] == pytest.approx(60.0 + 0.256 + (0.2 - 0.128))


def test_handing_over_adds_to_what_a_rank_compresses_and_decompresses():
    """Not to what servers do, nor to plain allreduces; to copies for the exact, which cost nothing else, too."""
    handled = Contention(8.0, handling_us=7.0)
    for option, servers, tasks in ((GATHER, None, 2), (HOST_GATHER, None, 2), (TWO_WAY, ServerCosts(0.5), 2)):
        usual, longer = (
            make_job([1000], [0], cluster=Cluster(2, 1, int(servers is not None)), servers=servers, contention=paced)
            for paced in (Contention(8.0), handled)
        )
        for spec in ("efsignsgd", "none"):
            if spec == "none" and servers:
                continue  # nothing rides there
            choice = replace(option, compressor=CompressorSpec(spec))
            before, after = (run(job, uniform(job, choice)).makespan_us for job in (usual, longer))
            assert after - before == pytest.approx(7.0 * tasks), (option, spec)
    assert run(longer, uniform(longer)).makespan_us == run(usual, uniform(usual)).makespan_us
    # Of a core, however many the pool's encoders take.
    wide = make_job([1000], [0], contention=Contention(8.0, 1.0, 4.0, handling_us=7.0))
    demands = [(work.us, work.cores) for work in run(wide, uniform(wide, HOST_GATHER)).works if work.cores]
    assert demands == [(17.0, pytest.approx(47 / 17)), (27.0, pytest.approx(87 / 27))]


def test_two_workers_on_one_core_have_half_each():
    job = make_job([1000], [0], contention=Contention(0.5, 0.5, 1.0))
    assert run(job, uniform(job, GATHER)).makespan_us == pytest.approx(20 + 0.4 + 40)


def test_water_fill():
    assert water_fill([1.0, 1.0], 2.0) == [1.0, 1.0]
    assert water_fill([1.0, 1.0, 0.25], 1.0) == [0.375, 0.375, 1.0]
    assert water_fill([0.34, 0.55, 0.11], 1.0) == [1.0] * 3, "their sum is rounded to more"
    assert water_fill([3.0, 1.0], 2.0) == [pytest.approx(1 / 3), 1.0]
    assert water_fill([0.0, 5.0], 1.0) == [1.0, 0.2]
    assert water_fill([], 1.0) == []


def test_a_flat_routine_waits_for_both_links():
    job = make_job([10_000, 10_000], [0, 0], cluster=Cluster(2, 2))
    deep = Choice(parse_option("intra.reduce_scatter > inter.allreduce > intra.allgather"))
    timeline = run(job, uniform(job).with_choices({"t0": deep}))
    flat = [row for row in events(timeline) if row[2] == "flat.allreduce"]
    assert {row[0] for row in flat} == {"intra", "inter_out", "inter_in"}
    # t1's allreduce took its place on the links before t0's inter step asked for one.
    inter = next(row for row in events(timeline) if row[2] == "inter.allreduce")
    assert flat[0][3] == pytest.approx(20.0)
    assert inter[3] == flat[0][4]


def test_partitions_pipeline():
    job = make_job([4000], [0], beta=50.0)
    whole = run(job, uniform(job, GATHER)).makespan_us
    cut = run(job, uniform(job, GATHER, partition_bytes=4 * 1024)).makespan_us
    assert whole == pytest.approx(40 + 80 + 80)
    # Four parts of 1000: the training lane is busy for 40 + 80 and waits for the first part's 20 at most.
    assert 120 <= cut <= 145


def test_server_lanes():
    # Two workers of 1000 elements (4000 bytes raw, 400 compressed), one server: its card carries twice a worker's.
    job = make_job([1000], [0], cluster=Cluster(2, 1, 1), servers=ServerCosts(0.5))
    assert events(run(job, uniform(job, TWO_WAY))) == [
        ("training", "t0", "comp", 0, 10),
        ("inter_out", "t0", "flat.push", 10, pytest.approx(10.8)),
        ("server_in", "t0", "flat.push", 10, pytest.approx(10.8)),
        ("server", "t0", "dec@server", pytest.approx(10.8), pytest.approx(30.8)),
        ("server", "t0", "comp@server", pytest.approx(30.8), pytest.approx(40.8)),
        ("inter_in", "t0", "flat.pull", pytest.approx(40.8), pytest.approx(41.6)),
        ("server_out", "t0", "flat.pull", pytest.approx(40.8), pytest.approx(41.6)),
        ("training", "t0", "dec", pytest.approx(41.6), pytest.approx(51.6)),
    ]
    assert run(job, uniform(job, PUSH_RAW)).makespan_us == pytest.approx(8 + 0.5 * 8 + 8)


def test_what_servers_get_and_give_is_copied_from_and_to_the_device():
    job = make_job([1000], [0], cluster=Cluster(2, 1, 1), servers=ServerCosts(0.5), copy=CopyCost(2.0, 1.0))
    log = [(e[0], e[2], *map(pytest.approx, e[3:])) for e in events(run(job, uniform(job, TWO_WAY)))]
    assert [row for row in log if row[0] not in ("inter_out", "inter_in")] == [
        ("training", "comp", 0, 10),
        ("copy", "flat.push", 10, 12.4),
        ("server_in", "flat.push", 12.4, 13.2),
        ("server", "dec@server", 13.2, 33.2),
        ("server", "comp@server", 33.2, 43.2),
        ("server_out", "flat.pull", 43.2, 44),
        ("copy", "flat.pull", 44, 46.4),
        ("training", "dec", 46.4, 56.4),
    ]
    assert run(job, uniform(job, PUSH_RAW)).makespan_us == pytest.approx(6 + 8 + 0.5 * 8 + 8 + 6)
    # The second partition is copied while the first is pushed; the server's card needs 4.096 us for two workers'.
    job = make_job([1024], [0], cluster=Cluster(2, 1, 1), servers=ServerCosts(0.5), copy=CopyCost(2.0, 1.0))
    cut = events(run(job, uniform(job, PUSH_RAW, partition_bytes=2048)))
    assert [e[3] for e in cut if e[0] == "copy" and e[2] == "flat.push"] == [0, pytest.approx(4.048)]
    assert [e[3] for e in cut if e[0] == "inter_out"] == [pytest.approx(4.048), pytest.approx(8.144)]


def test_more_servers_and_engines_share_the_work():
    job = make_job([1000], [0], cluster=Cluster(2, 1, 4), servers=ServerCosts(0.5, engines=2))
    # Four cards take 1 us for what a worker's own needs 4; eight engines share the sum.
    assert run(job, uniform(job, PUSH_RAW)).makespan_us == pytest.approx(4 + 0.5 * 8 / 8 + 4)
    slow = make_job([1000], [0], cluster=Cluster(2, 1, 1), servers=ServerCosts(0.5, nic=AlphaBeta(0.0, 10.0)))
    assert run(slow, uniform(slow, PUSH_RAW)).makespan_us == pytest.approx(80 + 4 + 80)
    # Colocated servers: half of each worker's 4000 bytes leaves its machine, and as much again goes to the others.
    near = make_job([1000], [0], cluster=Cluster(2, 1, 2, True), servers=ServerCosts(0.5))
    assert run(near, uniform(near, PUSH_RAW)).makespan_us == pytest.approx(4 + 0.5 * 8 / 2 + 4)


def test_the_plan_order_is_obeyed():
    job = make_job([1000, 1000], [0, 5])
    laid = lay(job, uniform(job))
    assert [row[1] for row in events(simulate(laid, job)) if row[0] == "inter_out"] == ["t0", "t1"]
    other = simulate(laid.with_order(laid.order[::-1]), job)
    assert [row[1] for row in events(other) if row[0] == "inter_out"] == ["t1", "t0"]
    assert other.makespan_us == 5 + 4 + 4


def test_a_plan_for_another_job_is_refused():
    job, other = make_job([64, 64], [0, 1]), make_job([64], [0])
    with pytest.raises(ValueError, match="lay it over"):
        simulate(lay(job, uniform(job)), other)
    third = make_job([64], [0], cluster=Cluster(4, 1))
    with pytest.raises(ValueError, match="the plan is for 2 nodes x 1 ranks"):
        simulate(lay(other, uniform(other)), third)


def test_a_completion_goes_before_a_bucket_of_the_same_moment():
    # The gather takes 10 us and ends at 20, when the second tensor becomes ready: t0's decoder goes first.
    job = make_job([1000, 1000, 64], [0, 10, 5], beta=25.0)
    picked = [GATHER, GATHER, PLAIN]
    strategy = uniform(job).with_choices(dict(zip(("t0", "t1", "t2"), picked, strict=True)))
    timeline = run(job, strategy)
    training = [e[1:] for e in events(timeline) if e[0] == "training"]
    assert training[:3] == [("t0", "comp", 0, 10), ("t0", "dec", 20, 40), ("t1", "comp", 40, 50)]
    # The decoder began at the moment of the hand-over and holds up only what comes after it.
    assert timeline.bucket_ready_us == (0, 20, 55)
    evaluator = Evaluator(job, units_of(job), 0, tenth)
    assert evaluator.makespan(evaluator.encode(picked)) == timeline.makespan_us
    assert tuple(evaluator.ready) == timeline.bucket_ready_us


# Invariants


@given(st.data())
@slow_ok
def test_one_tensor_takes_the_sum_of_its_chain(data):
    job = make_job([data.draw(st.sampled_from((64, 1000, 5000)))], [0], cluster=Cluster(2, 2), beta=0.7, alpha=1.0)
    choice = data.draw(choices(job.cluster))
    chain = Pricer(job.costs, job.cluster, tenth).chain(choice, job.tensors[0].numel, "float32")
    assert run(job, uniform(job, choice)).makespan_us == pytest.approx(sum(work.us for work in chain))


def test_latency_delays_the_chain_and_holds_nothing():
    # An allgather takes 0.4 us of the link and 100 on the way; one encode of 10 us frees the link for the next.
    picked = [GATHER, GATHER, GATHER]
    times = {}
    for in_flight in (1, 2, 8):
        job = make_job([1000, 1000, 1000], [0, 0, 0], latency=100.0, in_flight=in_flight)
        log = [e for e in events(run(job, uniform(job, GATHER))) if e[0] == "inter_out"]
        times[in_flight] = [(e[3], e[4]) for e in log]
        evaluator = Evaluator(job, units_of(job), 0, tenth)
        assert evaluator.makespan(evaluator.encode(picked)) == pytest.approx(run(job, uniform(job, GATHER)).makespan_us)
    assert times[8] == [(10, pytest.approx(110.4)), (20, pytest.approx(120.4)), (30, pytest.approx(130.4))]
    # Two at once: the third begins when the first is there. One: each does.
    assert [start for start, _ in times[2]] == [10, 20, pytest.approx(110.4)]
    assert [start for start, _ in times[1]] == [10, pytest.approx(110.4), pytest.approx(210.8)]


def test_a_token_bucket_lets_through_at_once_what_it_holds_and_takes_it_back():
    # Three allreduces of 4 KB, a microsecond a KB.
    def ends(burst, gaps=(0, 0, 0), **more):
        job = make_job((1000, 1000, 1000), gaps, burst=burst, **more)
        timeline = run(job, uniform(job))
        evaluator = Evaluator(job, units_of(job), 0, tenth)
        assert evaluator.makespan(evaluator.uniform(PLAIN)) == timeline.makespan_us
        return [timeline.end_us[task] for task in timeline.plan.order], timeline.makespan_us

    assert ends(0.0) == ([4.0, 8.0, 12.0], 12.0)
    # What is in the bucket goes at once: all of the first, half of the second. What is sent on average stays.
    assert ends(6000.0) == ([0.0, 2.0, 6.0], 12.0)
    assert ends(6000.0, forward_us=4.0, optimizer_us=3.0) == ([0.0, 2.0, 6.0], 6.0)
    # While the link rests it fills again, and no further than it holds.
    assert ends(4000.0, gaps=(0, 3, 50), optimizer_us=60.0) == ([0.0, 4.0, 53.0], 53.0)
    # No exchange is shorter than what it takes of the cores.
    busy = Contention(2.0, comm_cpu={"flat": 0.25})
    assert ends(6000.0, contention=busy, optimizer_us=60.0)[0] == [1.0, 2.0, 6.0]


def test_a_token_bucket_saves_nothing_where_the_largest_size_took_less_than_the_one_before():
    """As curves may that were written by hand, or measured badly."""
    points = ((1000.0, 10.0), (8000.0, 90.0), (16_000.0, 50.0))
    curve = LinkCurve(Routine.ALLGATHER, Scope.FLAT, Form.PAYLOAD, points)
    job = make_job([1000] * 3, [0, 30, 30])
    links = replace(job.costs.links, curves=(curve,), burst_bytes=6000.0)
    job = replace(job, costs=replace(job.costs, links=links))
    assert links.burst(job.cluster).credit_us == 0.0
    evaluator = Evaluator(job, units_of(job), 0, tenth)
    assert evaluator.makespan(evaluator.uniform(GATHER)) == run(job, uniform(job, GATHER)).makespan_us


def test_with_one_exchange_at_a_time_latency_is_occupancy():
    """The papers' convention: the same job with all of the latency in alpha is predicted alike, bit by bit."""
    for choice in (PLAIN, GATHER, HOST_GATHER):
        late = make_job([1000, 5000, 64], [0, 7, 30], latency=12.5, alpha=3.0, in_flight=1)
        flat = make_job([1000, 5000, 64], [0, 7, 30], alpha=15.5)
        assert run(late, uniform(late, choice)).end_us == run(flat, uniform(flat, choice)).end_us
        evaluators = [Evaluator(job, units_of(job), 0, tenth) for job in (late, flat)]
        assert len({one.makespan(one.uniform(choice)) for one in evaluators}) == 1


def test_rounds_that_wait_for_each_other_add_up_their_latency():
    def latency(option, cluster, compressor=None):
        job = make_job([1000], [0], cluster=cluster, latency=10.0, in_flight=4)
        choice = Choice(parse_option(option), compressor) if compressor else Choice(parse_option(option))
        chain = Pricer(job.costs, job.cluster, tenth).chain(choice, 1000, "float32")
        return [work.latency_us for work in chain if work.shape.step.is_communication]

    assert latency("flat.allreduce", Cluster(2, 1)) == [20.0]
    assert latency("flat.allreduce", Cluster(16, 1)) == [80.0]  # a tree of depth four, up and down
    gather = "comp > flat.allgather > dec"
    assert latency(gather, Cluster(2, 2), TOY) == [30.0]  # a ring, where ranks share a node
    # All at once, however many they are.
    swap = "comp > flat.all_to_all > dec > comp > flat.allgather > dec"
    assert latency(swap, Cluster(16, 1), TOY) == [10.0, 10.0]
    assert latency("flat.reduce_scatter > flat.allgather", Cluster(4, 1)) == [10.0, 10.0]


def test_a_pool_of_some_width_compresses_as_many_at_once():
    def encodes(width):
        job = make_job([1000] * 4, [0] * 4, offload_width=width)
        timeline = run(job, uniform(job, HOST_GATHER))
        evaluator = Evaluator(job, units_of(job), 0, tenth)
        assert evaluator.makespan(evaluator.uniform(HOST_GATHER)) == pytest.approx(timeline.makespan_us)
        return [e[3] for e in events(timeline) if e[0] == "offload" and e[2] == "comp@offload"]

    assert encodes(1) == [0, 10, 20, 30]
    assert encodes(3) == [0, 0, 0, 10]


def test_a_wide_pool_shortens_an_offload_only_job():
    times = {}
    for width in (1, 4):
        job = make_job([4000] * 16, [0] * 16, beta=0.01, offload_width=width)
        times[width] = run(job, uniform(job, HOST_GATHER)).makespan_us
    assert times[1] > 3.5 * times[4]


def test_infinite_bandwidth_without_compression_is_compute_only():
    job = make_job([1000, 5000, 100], [0, 20, 30], beta=0.0, forward_us=9.0)
    assert run(job, uniform(job)).iteration_us == 59.0


@given(planned())
@slow_ok
def test_lanes_never_overlap_and_dependencies_hold(case):
    job, strategy = case
    timeline = run(job, strategy)
    laid = timeline.plan
    for lane in Lane:
        tasks = [task.index for task in laid.tasks if lane in timeline.lanes(task.index)]
        width = widths_of(job.costs).get(lane, Width())
        for ends, most in ((timeline.freed_us, width.holding), (timeline.end_us, width.under_way)):
            # At the start of each, no more than so many others have begun and not ended.
            for task in tasks:
                at = timeline.start_us[task] + 1e-9
                assert sum(timeline.start_us[one] < at < ends[one] for one in tasks) <= most
    place = {task: position for position, task in enumerate(laid.order)}
    for task in laid.tasks:
        start, end = timeline.start_us[task.index], timeline.end_us[task.index]
        assert start <= timeline.freed_us[task.index] <= end
        if task.after is None:
            bucket = laid.groups[laid.partitions[task.partition].group].bucket
            assert start >= timeline.bucket_ready_us[bucket]
        else:
            assert start >= timeline.end_us[task.after]
            assert place[task.after] < place[task.index]
    ready = timeline.bucket_ready_us
    assert all(a <= b for a, b in itertools.pairwise(ready))
    assert all(a <= b + 1e-9 for a, b in zip(job.ready_us, ready, strict=True))


@given(planned())
@slow_ok
def test_no_schedule_beats_its_own_bounds(case):
    job, strategy = case
    timeline = run(job, strategy)
    laid, works = timeline.plan, timeline.works
    burst = job.costs.links.burst(job.cluster)

    def least_us(work):
        bursts = burst.credit_us and Lane.INTER_OUT in _lanes(work)
        return min(work.us, max(burst.least_us, work.us * work.cores)) if bursts else work.us

    bounds = [job.ready_us[-1], timeline.bucket_ready_us[-1]]
    for lane in Lane:
        width = widths_of(job.costs).get(lane, Width())
        mine = [work for work in works if lane in _lanes(work)]
        if lane is Lane.INTER_OUT:
            sent_us = sum(work.us for work in mine)
            beside_us = job.forward_us + job.optimizer_us
            bounds += [sent_us - burst.credit_us, (sent_us - beside_us) * (burst.credit_us > 0.0)]
        bounds.append(sum(map(least_us, mine)) / width.holding)
        bounds.append(sum(least_us(work) + work.latency_us for work in mine) / width.under_way)
    if job.costs.contention.cores is None:
        held = sum(work.us for work in works if Lane.TRAINING in _lanes(work))
        bounds.append(held)
    for part in laid.partitions:
        bucket = laid.groups[part.group].bucket
        mine = [works[task.index] for task in laid.tasks if task.partition == part.index]
        chain = sum(max(work.us - burst.credit_us, least_us(work)) + work.latency_us for work in mine)
        bounds.append(job.ready_us[bucket] + chain)
    assert timeline.makespan_us >= max(bounds) * (1 - 1e-9)
    assert timeline.iteration_us == job.forward_us + timeline.makespan_us + job.optimizer_us


def _lanes(work):
    from espresso.model.step_shapes import LANE_SETS

    return LANE_SETS[work.shape.lane_set]


@given(st.lists(st.sampled_from((64, 1000, 5000)), min_size=1, max_size=8), st.data())
@slow_ok
def test_free_compression_never_loses_on_a_single_link(sizes, data):
    gaps = [0, *(data.draw(st.integers(0, 40)) for _ in sizes[1:])]
    job = make_job(sizes, gaps, costs=compute(0.0, 0.0, name="fp16"))
    fp16 = Choice(parse_option("comp > flat.allreduce > dec"), CompressorSpec("fp16"))
    picked = {t.name: fp16 for t in job.tensors if data.draw(st.booleans())}
    assert run(job, uniform(job).with_choices(picked)).makespan_us <= run(job, uniform(job)).makespan_us + 1e-9


# Kernels against the oracle


def _kernel_case(case):
    job, strategy = case
    evaluator = Evaluator(job, units_of(job), strategy.partition_bytes, tenth)
    encoded = evaluator.encode([strategy.choices[unit.tensors[0]] for unit in evaluator.units])
    return evaluator, encoded


@given(planned(per_bucket=True))
@settings(slow_ok, max_examples=150)
def test_kernels_equal_the_oracle(case):
    job, strategy = case
    evaluator, encoded = _kernel_case(case)
    timeline = run(job, strategy)
    assert evaluator.makespan(encoded) == pytest.approx(timeline.makespan_us, rel=1e-9)
    np.testing.assert_allclose(evaluator.ready, timeline.bucket_ready_us, rtol=1e-9)
    finish = [0.0] * len(evaluator.units)
    laid = timeline.plan
    for task in laid.tasks:
        bucket = laid.groups[laid.partitions[task.partition].group].bucket
        finish[bucket] = max(finish[bucket], timeline.end_us[task.index])
    np.testing.assert_allclose(evaluator.finish, finish, rtol=1e-9)


@given(planned(per_bucket=True), st.data())
@slow_ok
def test_resuming_equals_starting_over(case, data):
    job, _ = case
    evaluator, encoded = _kernel_case(case)
    unit = data.draw(st.integers(0, len(evaluator.units) - 1))
    tried = [data.draw(choices(job.cluster)) for _ in range(4)]
    numbers = np.array([evaluator.candidates.number(evaluator.units[unit].size, choice) for choice in tried])
    times = []
    for number in numbers:
        changed = encoded.copy()
        changed[unit] = number
        times.append(evaluator.makespan(changed))
    best, time = evaluator.best(encoded, unit, numbers, np.inf)
    assert time == min(times)
    assert best == numbers[times.index(min(times))]
    assert evaluator.best(encoded, unit, numbers, min(times)) == (-1, min(times))
    for hint in numbers:
        assert evaluator.best(encoded, unit, numbers, np.inf, hint=hint) == (best, time)


@given(planned(per_bucket=True), st.data())
@slow_ok
def test_a_batch_equals_its_rows(case, data):
    job, _ = case
    evaluator, encoded = _kernel_case(case)
    batch = np.array(
        [
            encoded,
            *(evaluator.encode([data.draw(choices(job.cluster)) for _ in evaluator.units]) for _ in range(3)),
        ]
    )
    index, time, times = evaluator.batch(batch)
    assert times.tolist() == [evaluator.makespan(row) for row in batch]
    assert (index, time) == (int(times.argmin()), times.min())
    cut = evaluator.batch(batch, cut=True)
    assert cut[:2] == (index, time)
    # Evaluations give up at their own time, and not just above it.
    for row, own in zip(batch, times, strict=True):
        assert evaluator.batch(row[None], own, cut=True)[0] == -1
        assert evaluator.batch(row[None], np.nextafter(own, np.inf), cut=True)[1] == own


@given(planned())
@slow_ok
def test_list_schedules_are_pure_and_replay_exactly(case):
    job, strategy = case
    first, second = lay(job, strategy), lay(job, strategy)
    assert first.order == second.order
    replayed = lay(job, strategy).with_order(first.order)
    pricer = Pricer(job.costs, job.cluster, tenth)
    assert simulate(replayed, job, pricer=pricer).end_us == simulate(first, job, pricer=pricer).end_us


@given(planned(contentions=(Contention(1e9),)))
@slow_ok
def test_measured_durations_give_the_order_that_the_timeline_gives_where_nothing_slows_anything(case):
    job, strategy = case
    job = replace(job, costs=replace(job.costs, links=replace(job.costs.links, burst_bytes=0.0)))
    laid = lay(job, strategy)
    timeline = simulate(laid, job, pricer=Pricer(job.costs, job.cluster, tenth))
    durations = [work.us for work in timeline.works]
    again = schedule_tasks(
        laid,
        job.ready_us,
        durations,
        latency_us=[work.latency_us for work in timeline.works],
        lanes=[timeline.lanes(task.index) for task in laid.tasks],
        widths=widths_of(job.costs),
    )
    assert again.order == laid.order
    assert again.end_us == timeline.end_us


def test_a_task_takes_its_place_on_all_its_lanes_when_it_becomes_ready():
    # t0's flat allreduce waits for the link between nodes; t1's step inside the node is ready later and comes after it.
    job = make_job([64, 64, 64], [0, 1, 2], cluster=Cluster(2, 2))
    deep = Choice(parse_option("intra.reduce_scatter > inter.allreduce > intra.allgather"))
    laid = plan(uniform(job, deep).with_choices({"t1": PLAIN}), job.laid_out, mode=job.mode)
    ready, intra, inter, flat = [0.0, 11.0, 12.0], 10.0, 20.0, 5.0
    duration = {"intra.reduce_scatter": intra, "inter.allreduce": inter, "intra.allgather": 1.0, "flat.allreduce": flat}
    order = list_order(laid, ready, [duration[str(task.step)] for task in laid.tasks])
    steps = [(_first_tensor(laid, laid.tasks[task]), str(laid.tasks[task].step)) for task in order]
    assert steps == [
        ("t0", "intra.reduce_scatter"),
        ("t0", "inter.allreduce"),
        ("t1", "flat.allreduce"),
        ("t2", "intra.reduce_scatter"),
        ("t0", "intra.allgather"),
        ("t2", "inter.allreduce"),
        ("t2", "intra.allgather"),
    ]


@given(jobs())
@slow_ok
def test_free_prices_leave_communication_alone(job):
    free, full = Pricer(job.costs, job.cluster, tenth, free=True), Pricer(job.costs, job.cluster, tenth)
    for mine, theirs in zip(free.chain(GATHER, 1000, "float32"), full.chain(GATHER, 1000, "float32"), strict=True):
        assert mine.us == (theirs.us if theirs.shape.step.is_communication else 0.0)


def test_costs_are_found_for_both_devices():
    costs = make_job([64], [0]).costs
    assert costs.devices(TOY) == (Device.TRAINING, Device.OFFLOAD)
    assert costs.compute_cost(TOY, Device.OFFLOAD, Op.DECODE).time_us(1000) == 10.0
    assert PLAIN.option.is_compressed is False


def test_an_edit_of_any_kernel_file_invalidates_the_cache_of_compiled_code(tmp_path):
    """Numba alone looks only at the file that a kernel is in, not at the helpers compiled into it."""
    from espresso.jit.kernels import digest_of
    from espresso.model import jit
    from espresso.model.timeline_kernels import copy_state

    signature, library = ("signature",), type("Codegen", (), {"magic_tuple": lambda self: ("machine",)})()
    assert copy_state._cache._index_key(signature, library)[-1] == jit.source_digest()
    for room in jit.ROOMS:
        shutil.copytree(jit.ROOT / room, tmp_path / room)
    copies = list(tmp_path.glob("*/*_kernels.py"))
    assert digest_of(copies) == jit.source_digest()
    for path in copies:
        before = digest_of(copies)
        path.write_text(path.read_text() + "# edited\n")
        assert digest_of(copies) != before


def test_kernels_without_a_way_in_from_python_are_functions_there():
    from espresso.model.timeline_kernels import add_loads

    loads, row = np.zeros(7), np.array([0])
    sets, us = np.array([3, -1]), np.array([1.5, 0.0])
    add_loads(0, 2.0, (None, None, np.array([1]), row, row, sets, us, None, None, loads, None, None))
    assert loads.tolist() == [0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0]
