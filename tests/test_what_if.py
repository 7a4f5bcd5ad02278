"""What-if: a job under other conditions is the job that would be measured there, and nothing is asked too far."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from espresso.cli import app
from espresso.live.observer import Observation, Observer, combine, hosts_of, profile_of
from espresso.model.costs import ComputeCost, Contention, CostModel, Op
from espresso.model.job import GAIN_SCALE, SENSITIVITY, Host, Job, Profile
from espresso.model.links import AlphaBeta, JobError, LinkCurve, Links, num_rounds, routine_cost
from espresso.model.presets import job_from_trace, load_cluster
from espresso.model.probe import Probe
from espresso.model.timeline import simulate
from espresso.model.what_if import (
    IN_FLIGHT,
    PRESET_REACHED,
    REACHED,
    Change,
    RangeError,
    changed,
    extrapolates,
    of_model,
    own_gbit,
    parse_gbit,
    reached_share,
    repaired,
    slowest,
)
from espresso.search.search import lay_out
from espresso.search.terms import AUTOMATIC, Terms
from espresso.search.what_if import predict, stops_paying
from espresso.strategies import (
    Bucket,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    Routine,
    Scope,
    Slot,
    Strategy,
    TensorSpec,
    parse_option,
)

SIGNS = CompressorSpec.parse("efsignsgd")
ROUTINES = (
    (Routine.ALLREDUCE, Form.RAW),
    (Routine.REDUCE_SCATTER, Form.RAW),
    (Routine.ALLGATHER, Form.RAW),
    (Routine.REDUCE, Form.RAW),
    (Routine.BROADCAST, Form.RAW),
    (Routine.ALL_TO_ALL, Form.PAYLOAD),
    (Routine.GATHER, Form.PAYLOAD),
)
SIZES = (4096.0, 262144.0, 4194304.0)


def measured_job(nodes: int = 2, gbit: float = 1.0, cores: float = 1.0, rtt_ms: float = 0.0) -> Job:
    """A job as a live run would have measured it on a network whose routines follow the formulas exactly.

    Ring routines here are rings (no tree), so that a measurement on any shape is known.
    """
    line = AlphaBeta(40.0, 8.0 / (gbit * 0.95))
    cluster = Cluster(nodes, 1)
    alone = [
        LinkCurve(routine, Scope.FLAT, form, tuple((size, _ring_us(routine, line, nodes, size)) for size in SIZES))
        for routine, form in ROUTINES
    ]
    curves = tuple(replace(curve, latency_us=500.0 * rtt_ms * num_rounds(curve, cluster)) for curve in alone)
    compute = tuple(
        ComputeCost(name, Device.TRAINING, op, ((0.0, 0.0), (1e6, us / cores)), launch_us=20.0 / cores)
        for name, op, us in (("efsignsgd", Op.ENCODE, 300.0), ("efsignsgd", Op.DECODE, 150.0))
    )
    costs = CostModel(Links(curves=curves), compute, contention=Contention(1.0, comm_cpu={"flat": 0.002 * gbit}))
    tensors = tuple(TensorSpec(f"t{i}", (1 << 20,)) for i in range(8))
    gaps = (0.0,) + (4000.0 / cores,) * 7
    return Job("mine", tensors, gaps, cluster, costs, forward_us=9000.0 / cores, optimizer_us=1000.0 / cores)


def _ring_us(routine: Routine, line: AlphaBeta, peers: int, size: float) -> float:
    if routine is Routine.ALLREDUCE:
        return line.cost(2 * (peers - 1) / peers * size, 2 * (peers - 1)).alone_us
    return routine_cost(routine, line, peers, size).alone_us


def plain_us(job: Job) -> float:
    return simulate(lay_out(job, Strategy.uniform(job.tensors, job.cluster)), job).iteration_us


def test_a_rate_is_read_as_tc_reads_it():
    assert [parse_gbit(text) for text in ("100mbit", "25gbit", "500kbit")] == [0.1, 25.0, 0.0005]
    for text in ("100", "fast", "0gbit", "-1gbit", "1gbps"):
        with pytest.raises(JobError, match="positive number with a unit"):
            parse_gbit(text)


def test_the_jobs_own_rate_is_found_in_its_curves_and_in_its_lines():
    assert own_gbit(measured_job(gbit=1.0)) == pytest.approx(1.0, rel=0.01)
    assert own_gbit(job_from_trace("lstm", 8, 8, "pcie-25g")) == pytest.approx(25.0)


def test_nothing_changed_is_the_job():
    job = measured_job()
    assert changed(job, Change()) == job
    assert plain_us(changed(job, Change(inter_gbit=own_gbit(job)))) == pytest.approx(plain_us(job), rel=1e-6)


@pytest.mark.parametrize("gbit", [0.1, 0.3, 10.0])
def test_another_rate_is_what_would_be_measured_there(gbit):
    predicted = plain_us(changed(measured_job(), Change(inter_gbit=gbit)))
    assert predicted == pytest.approx(plain_us(measured_job(gbit=gbit)), rel=0.02)


@pytest.mark.parametrize("rtt_ms", [0.0, 40.0])
def test_more_machines_are_what_would_be_measured_there(rtt_ms):
    predicted = plain_us(changed(measured_job(rtt_ms=rtt_ms), Change(num_nodes=4)))
    assert predicted == pytest.approx(plain_us(measured_job(nodes=4, rtt_ms=rtt_ms)), rel=0.02)


def test_a_core_that_is_busy_bounds_the_rate():
    slow = measured_job()
    busy = replace(slow.costs, contention=replace(slow.costs.contention, comm_cpu={"flat": 0.5}))
    fast = changed(replace(slow, costs=busy), Change(inter_gbit=20.0))
    least = 0.5 * (slow.costs.links.curves[0].points[-1][1] - 100.0)
    assert fast.costs.links.curves[0].points[-1][1] >= least


def test_cores_that_exchanges_take_go_with_the_bytes_a_second():
    """At a tenth of the rate it takes a tenth of what it took, whether that was told by scope or by routine."""
    slow = measured_job()
    for key in ("flat", "flat.allreduce"):
        busy = replace(slow.costs, contention=replace(slow.costs.contention, comm_cpu={key: 0.3}))
        taken = changed(replace(slow, costs=busy), Change(inter_gbit=0.1 * own_gbit(slow))).costs.contention.comm_cpu
        assert taken == {key: pytest.approx(0.03, rel=0.05)}


def test_what_a_core_adds_beside_the_wire_does_not_go_with_the_rate():
    """Routines that copy for 2 us a KB before they send, and one that does not: on another network as there."""

    def copying(gbit: float) -> Job:
        job = measured_job(gbit=gbit)
        curves, busy = [], {}
        for curve in job.costs.links.curves:
            slow = 0.0 if curve.routine is Routine.ALLREDUCE else 2e-3
            points = tuple((size, us + slow * size) for size, us in curve.points)
            curves.append(replace(curve, points=points))
            size, us = points[-1]
            busy[f"flat.{curve.routine.value}"] = slow * size / us
        contention = replace(job.costs.contention, comm_cpu=busy)
        return replace(job, costs=replace(job.costs, links=Links(curves=tuple(curves)), contention=contention))

    slower, there = changed(copying(1.0), Change(inter_gbit=0.2)), copying(0.2)
    for carried, measured in zip(slower.costs.links.curves, there.costs.links.curves, strict=True):
        assert carried.points[-1][1] == pytest.approx(measured.points[-1][1], rel=0.02)
    assert slower.costs.contention.comm_cpu == pytest.approx(there.costs.contention.comm_cpu, rel=0.03)


def test_half_a_core_by_two_probes_is_what_would_be_measured_there():
    whole, half = Probe("cpu", 1, 10.0, 90.0), Probe("cpu", 1, 5.0, 45.0)
    here = measured_job()
    here = replace(here, costs=replace(here.costs, contention=replace(here.costs.contention, handling_us=100.0)))
    other = changed(here, Change(here=whole, there=half))
    assert other.costs.contention.handling_us == pytest.approx(200.0)
    assert (other.forward_us, other.optimizer_us, other.gaps_us[1]) == (18000.0, 2000.0, 8000.0)
    assert other.costs.encode_us(SIGNS, Device.TRAINING, 1e6) == pytest.approx(640.0)
    assert plain_us(other) == pytest.approx(plain_us(measured_job(cores=0.5)), rel=0.02)


def test_another_model_has_its_own_passes_and_these_machines_costs():
    here = measured_job()
    small = replace(measured_job(4, 10.0), model="small", tensors=here.tensors[:4], gaps_us=here.gaps_us[:4])
    specs = [CompressorSpec.parse(cost.spec) for cost in here.costs.compute]
    found = of_model(here, small, specs)
    assert (found.model, found.tensors, found.costs, found.cluster) == (
        "small",
        small.tensors,
        here.costs,
        Cluster(2, 1),
    )
    assert plain_us(found) < plain_us(here)
    assert of_model(here, here, specs) == here
    live = replace(here, meta={**here.meta, SENSITIVITY: {"of": "this model"}, GAIN_SCALE: 0.5})
    assert of_model(live, small, specs).meta == here.meta, "what gradients of another model owe says nothing of these"
    assert of_model(here, replace(small, meta={GAIN_SCALE: 0.5}), specs).meta[GAIN_SCALE] == 0.5
    asks, own = Terms(error_budget=2.5).to_meta(), Terms(error_budget=4.0).to_meta()
    assert of_model(replace(here, meta=asks), replace(small, meta=own), specs).meta == own, "its optimizer's budget"
    assert of_model(replace(here, meta=asks), replace(small, meta={}), specs).meta == asks
    large = replace(here, tensors=tuple(TensorSpec(each.name, (9 << 20,)) for each in here.tensors))
    with pytest.raises(RangeError, match="predictions reach 8 times"):
        of_model(here, large, specs)
    with pytest.raises(RangeError, match="predictions reach 8 times"):
        of_model(here, large, [CompressorSpec.parse("efsignsgd:block=64")])  # its costs stand under the bare name
    assert of_model(here, large, []).tensors == large.tensors, "nobody asks about a compressor"
    assert of_model(large, large, specs) == large, "its own sizes are within reach, however small those measured"


def test_a_link_of_which_no_routine_takes_longer_with_its_bytes_has_no_rate():
    flat = measured_job()
    level = tuple(replace(curve, points=((4096.0, 100.0), (1048576.0, 100.0))) for curve in flat.costs.links.curves)
    flat = replace(flat, costs=replace(flat.costs, links=replace(flat.costs.links, curves=level, inter=None)))
    for change in (Change(inter_gbit=1.0), Change(num_nodes=4, inter_gbit=1.0)):
        with pytest.raises(JobError, match="no limit that was measured"):
            changed(flat, change)
    assert changed(flat, Change(num_nodes=4)).cluster.num_nodes == 4


def test_only_presets_reach_less_of_their_rate():
    shares = [
        reached_share(replace(measured_job(), meta=meta))
        for meta in ({}, *({"cluster_preset": name} for name in ("mine.json", "pcie-25g")))
    ]
    assert shares == [REACHED, REACHED, PRESET_REACHED]


def test_more_machines_at_the_rate_of_these_are_more_machines():
    small = measured_job(2, 5.0)
    assert (
        changed(small, Change(num_nodes=16)).costs
        == changed(small, Change(num_nodes=16, inter_gbit=own_gbit(small))).costs
    )


def test_a_round_trip_is_latency_that_holds_nothing():
    far = changed(measured_job(), Change(rtt_ms=50.0))
    assert far.costs.links.in_flight == IN_FLIGHT
    # The way there and back for every round: over Gloo a receiver says first that it is ready.
    assert {curve.latency_us for curve in far.costs.links.curves} == {50_000.0, 100_000.0}
    assert plain_us(far) > plain_us(measured_job())


def test_a_flat_gather_of_payloads_waits_in_every_round_of_its_ring_as_by_stated_lines():
    """Where links inside nodes and between them are crossed; numbers are gathered from all at once."""
    kinds = [(routine, Scope.FLAT, form) for routine, form in (*ROUTINES, (Routine.ALLGATHER, Form.PAYLOAD))]
    kinds += [(Routine.ALLREDUCE, Scope.INTRA, Form.RAW)]
    curves = tuple(LinkCurve(*kind, ((1e4, 100.0), (1e6, 9e3))) for kind in kinds)
    measured, stated = (
        replace(measured_job(), cluster=Cluster(2, 2), costs=replace(measured_job().costs, links=links))
        for links in (Links(curves=curves), Links(AlphaBeta(1.0, 0.1), AlphaBeta(40.0, 8.0)))
    )
    steps = parse_option("comp > flat.all_to_all > flat.allgather > dec").steps
    for job in (measured, stated):
        far = changed(job, Change(rtt_ms=50.0))
        costs = [far.costs.comm(step, far.cluster, 1e5) for step in steps if step.is_communication]
        assert [cost.latency_us for cost in costs] == [50_000.0, 150_000.0]
    raw = changed(measured, Change(rtt_ms=50.0)).costs.links.measured(Routine.ALLGATHER, Scope.FLAT, Form.RAW)
    assert raw.latency_us == 50_000.0


def test_the_executors_exchanges_in_flight_are_the_models():
    from espresso.comm.execute import lanes

    assert lanes.IN_FLIGHT == IN_FLIGHT


def test_more_ranks_on_a_machine_share_its_cores_and_pool():
    job = job_from_trace("lstm", 2, 8, "pcie-25g")
    job = replace(job, costs=replace(job.costs, contention=Contention(4.0)))
    other = changed(job, Change(ranks_per_node=4))
    assert (other.costs.contention.cores, other.costs.offload_ranks_per_pool) == (8.0, 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Change(inter_gbit=100.0), "times from the measured 1,"),
        (Change(num_nodes=64), "predictions reach 8 times"),
        (Change(rtt_ms=5000.0), "beyond 1000 ms"),
        (Change(here=Probe("cpu", 1, 10.0, 90.0), there=Probe("cpu", 1, 0.5, 90.0)), "its copies"),
    ],
)
def test_what_lies_too_far_is_refused(change, why):
    with pytest.raises(RangeError, match=why):
        changed(measured_job(), change)


def test_what_was_not_measured_is_refused_by_name():
    with pytest.raises(JobError, match="nothing is known of links inside one"):
        changed(measured_job(), Change(ranks_per_node=2))
    with pytest.raises(JobError, match="one machine has no network"):
        changed(job_from_trace("lstm", 1, 8, "pcie-25g"), Change(inter_gbit=1.0))
    with pytest.raises(JobError, match="two probes"):
        Change(here=Probe("cpu", 1, 1.0, 1.0))


def test_how_far_a_prediction_is_from_what_was_measured():
    far = extrapolates(measured_job(), Change(num_nodes=4, inter_gbit=0.1))
    assert far == {"nodes": 2.0, "ranks_per_node": 1.0, "rate": pytest.approx(0.1, rel=0.01)}
    assert extrapolates(job_from_trace("lstm", 8, 8, "pcie-25g"), Change(num_nodes=1536)) == {}


def test_stated_links_hold_for_any_network_of_their_kind():
    job = job_from_trace("lstm", 8, 8, "pcie-25g")
    same = changed(job, Change(inter_gbit=25.0))
    assert same.costs.links.inter.beta_us_per_kb == pytest.approx(load_cluster("pcie-25g").inter.beta_us_per_kb)


def test_servers_beside_the_workers_come_with_further_machines():
    job = job_from_trace("vgg16", 4, 1, "pcie-25g", servers_per_node=1)
    more = changed(job, Change(num_nodes=16))
    assert more.cluster == job_from_trace("vgg16", 16, 1, "pcie-25g", servers_per_node=1).cluster
    both = replace(job, cluster=replace(job.cluster, num_servers=6, num_apart=2))
    assert changed(both, Change(num_nodes=2)).cluster == Cluster(2, 1, 4, True, 2)
    some = replace(job, cluster=replace(job.cluster, num_servers=3))
    with pytest.raises(JobError, match="3 servers on the job's 4 machines are not alike"):
        changed(some, Change(num_nodes=8))


def test_what_only_other_raw_options_bring_is_no_gain_of_compression():
    job = job_from_trace("lstm", 4, 4, "nvlink-100g")
    for each in (job, replace(job, meta=AUTOMATIC.to_meta())):
        found = predict(each, [CompressorSpec.parse("onebit")], Change(inter_gbit=1600.0))
        assert not found.pays
        if each is job:
            assert found.plain_us > 1.02 * found.best_us
            assert found.raw_us == pytest.approx(found.best_us)


def test_compression_stops_paying_somewhere():
    job = replace(measured_job(), forward_us=100_000.0)
    stops = stops_paying(job, (SIGNS,), Change())
    assert stops is not None
    assert predict(job, (SIGNS,), Change(inter_gbit=0.8 * stops), all_kinds=True).pays
    assert not predict(job, (SIGNS,), Change(inter_gbit=1.3 * stops), all_kinds=True).pays


def test_twelve_thousand_ranks_are_priced_by_the_formulas():
    job = job_from_trace("lstm", 8, 8, "pcie-25g")
    large = predict(job, (SIGNS,), Change(num_nodes=1536))
    assert large.cluster.num_ranks == 12_288
    assert large.plain_us > predict(job, (SIGNS,), Change()).plain_us
    assert large.lower_bound_us <= large.best_us <= large.raw_us <= large.plain_us


def uneven_job() -> Job:
    """Two hosts, one of which computes at half the other's speed and has a card of a third of its rate."""
    slow = measured_job(cores=0.5, gbit=1 / 3)
    return replace(slow, hosts=(Host("thin"), Host("good", compute=0.5, compression=0.5, link=1 / 3)))


def test_a_slow_host_repaired_is_the_even_cluster():
    job = uneven_job()
    assert slowest(job) == ["thin"]
    assert plain_us(repaired(job, "thin")) == pytest.approx(plain_us(measured_job()), rel=0.02)
    assert plain_us(repaired(job, "good")) == pytest.approx(plain_us(job))
    with pytest.raises(JobError, match="no host 'bad' beside others; the job has thin, good"):
        repaired(job, "bad")


def test_a_gradient_that_is_in_no_bucket_is_not_observed():
    """FSDP's passes that exchange nothing stamp some, too."""
    clock = SimpleNamespace(ready_ns={"a": 5_000, "elsewhere": 9_000}, forward_ns=1_000)
    bucket = Bucket(0, (Slot("a", 0, 4), Slot("b", 4, 4)))
    record = SimpleNamespace(buckets=[bucket], ready_ns=[7_000])
    observed = Observer._observe(SimpleNamespace(_clock=clock), record, 0)
    assert observed.tensor_ready_us == {"a": 0.0, "b": 2.0}


def seen(backward_us: float) -> list[Observation]:
    return [Observation({"a": 0.0, "b": backward_us}, (backward_us,), 1000.0, 500.0)] * 3


def test_a_live_job_names_the_machine_that_computes_slowly():
    hosts = hosts_of([seen(4000.0), seen(4100.0), seen(9000.0), seen(8000.0)], 2)
    assert [(host.name, host.compute) for host in hosts] == [("node 0", 0.51), ("node 1", 1.0)]
    assert hosts_of([seen(4000.0), seen(4300.0)], 1) == ()


def test_profiled_steps_with_other_buckets_than_the_last_say_nothing():
    """``skip_all_reduce_unused_params``: a step has the buckets of what it used."""
    two = Observation({"a": 0.0, "b": 100.0, "c": 300.0}, (100.0, 300.0), 1000.0, 500.0)
    told = combine([[two, *seen(4000.0)], [*seen(9000.0), two, *seen(4400.0)]])
    assert told.bucket_ready_us == (6700.0,)
    assert told.tensor_ready_us.keys() == {"a", "b"}


def test_the_spread_of_a_profile_is_that_of_the_rank_where_it_is_most_and_stalls_do_not_count():
    steady = [seen(us)[0] for us in (990.0, 1000.0, 1010.0, 1000.0)]
    wide = [seen(us)[0] for us in (900.0, 1000.0, 1100.0, 1e6, 1000.0, 950.0, 1050.0)]
    found = profile_of([steady, wide])
    assert (found.num_steps, found.spread) == (4, pytest.approx(100 / 1.349 / 1000))
    assert profile_of([steady]).spread == pytest.approx(5 / 1.349 / 1000)
    kinds = [seen(us)[0] for us in (1000.0, 2000.0, 1000.0, 2000.0, 1000.0)]
    assert profile_of([kinds]).spread > 0.5
    two = Observation({"a": 0.0, "b": 9.0, "c": 5000.0}, (9.0, 5000.0), 1000.0, 500.0)
    assert profile_of([[two, *steady]]) == profile_of([steady]), "it had other buckets than the last"
    alone = Observation({"a": 0.0}, (0.0,), 1000.0, 500.0)
    assert profile_of([[alone, alone]]) == Profile(2, 0.0)


def test_an_uneven_job_is_written_and_read_and_its_faults_are_named():
    job = uneven_job()
    assert Job.from_json(job.to_json()) == job
    for hosts, why in (
        ((Host("a"),), "hosts are 1 machines, but the cluster has 2"),
        ((Host("a"), Host("a")), "'a' appears twice"),
        ((Host("a", link=0.5), Host("b", link=0.9)), "no host has link 1"),
    ):
        with pytest.raises(JobError, match=why):
            replace(job, hosts=hosts)
    with pytest.raises(JobError, match="at most 1"):
        Host("a", compute=2.0)


def test_the_command_says_what_a_repaired_host_brings(tmp_path):
    path = tmp_path / "job.json"
    uneven_job().save(path)
    body = json.loads(run(str(path), "--no-threshold", "--json").stdout)
    assert [row["host"] for row in body["repaired"]] == ["thin"]
    assert body["repaired"][0]["plain_us"] < 0.6 * body["rows"][0]["plain_us"]
    assert "thin as fast as the others" in run(str(path), "--no-threshold").stdout
    # Under the conditions of the first row.
    there = json.loads(run(str(path), "--no-threshold", "--nodes", "4,2", "--inter", "100mbit", "--json").stdout)
    assert [(row["nodes"], row["inter_gbit"]) for row in there["repaired"]] == [(4, 0.1)]
    assert there["repaired"][0]["plain_us"] <= there["rows"][0]["plain_us"]
    # With a card like the others' the network is three times as fast, and this rate too far from it.
    far = json.loads(run(str(path), "--no-threshold", "--inter", "15mbit", "--json").stdout)
    assert far["repaired"] == []


def run(*argv: str):
    return CliRunner().invoke(app, ["what-if", *argv])


def test_the_command_answers_every_combination(tmp_path):
    path = tmp_path / "job.json"
    measured_job().save(path)
    picture = tmp_path / "steps.png"
    ran = run(str(path), "--nodes", "2,4", "--inter", "100mbit,1gbit", "--json", "--plot", str(picture))
    assert ran.exit_code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert [(row["nodes"], row["inter_gbit"]) for row in body["rows"]] == [(2, 0.1), (2, 1.0), (4, 0.1), (4, 1.0)]
    assert all(row["gain"] >= 1 for row in body["rows"])
    assert body["rows"][0]["plain_us"] > body["rows"][1]["plain_us"]
    assert body["twice"]["plain_us"] < body["rows"][0]["plain_us"]
    assert body["compressors"] == ["efsignsgd"]
    assert picture.stat().st_size > 1000
    other = tmp_path / "other.json"
    replace(measured_job(4), model="other", tensors=(TensorSpec("t0", (1 << 20,)),), gaps_us=(0.0,)).save(other)
    smaller = json.loads(run(str(path), "--model", str(other), "--no-threshold", "--json").stdout)
    assert smaller["model"] == "other"
    assert smaller["rows"][0]["nodes"] == 2
    assert smaller["rows"][0]["plain_us"] < body["rows"][1]["plain_us"]
    shown = run(str(path), "--no-threshold")
    assert "measured on 2 nodes x 1 ranks, 1 Gb/s; predictions reach 30 times" in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    ("asked", "axis"), [(("--nodes", "1,2,4"), "ranks"), (("--inter", "10gbit,25gbit"), "Gb/s between machines")]
)
def test_the_picture_is_over_what_varies(tmp_path, asked, axis):
    """One machine has no rate between machines, which is no other rate."""
    path, picture = tmp_path / "job.json", tmp_path / "steps.svg"
    job_from_trace("lstm", 4, 2, "pcie-25g").save(path)
    ran = run(str(path), "-c", "efsignsgd", *asked, "--no-threshold", "--plot", str(picture))
    assert ran.exit_code == 0, ran.stderr
    assert f"<!-- {axis} -->" in picture.read_text()


def test_a_row_is_searched_as_the_search_command_does(tmp_path):
    path = tmp_path / "job.json"
    job_from_trace("lstm", 2, 2, "pcie-25g").save(path)
    found = CliRunner().invoke(app, ["search", str(path), "-c", "efsignsgd", "--json"])
    row = json.loads(run(str(path), "-c", "efsignsgd", "--no-threshold", "--json").stdout)["rows"][0]
    assert row["best_us"] == pytest.approx(json.loads(found.stdout)["predicted_us"])


def test_the_command_refuses_in_one_line(tmp_path):
    path = tmp_path / "job.json"
    measured_job().save(path)
    for argv, why in (
        (["--inter", "100gbit"], "times from the measured 1,"),
        (["--nodes", "two"], "give whole numbers"),
        (["--rtt-ms", "soon"], "give numbers"),
        (["--device", str(path)], "needs --measured-on"),
        (["--measured-on", str(path)], "needs --device"),
        (["--device", str(path), "--measured-on", str(path)], "a probe file is wanted here"),
    ):
        ran = run(str(path), *argv)
        assert ran.exit_code in (1, 2)
        assert why in ran.stderr
        assert ran.stderr.startswith("error: ")


def test_a_probe_is_measured_and_read_again(tmp_path):
    path = tmp_path / "probe.json"
    ran = CliRunner().invoke(app, ["probe", "-o", str(path), "--threads", "1", "--json"])
    assert ran.exit_code == 0, ran.stderr
    found = Probe.load(path)
    assert found.body == {k: v for k, v in json.loads(ran.stdout).items() if k != "probe"}
    assert 0.1 < found.copy_gb_per_s < 1000
    assert found.matmul_gflops > 1
