"""Jobs and costs: round trips, every fault by name, and the cost formulas by hand."""

import json
from dataclasses import replace

import pytest

from espresso.model.costs import (
    ComputeCost,
    Contention,
    CopyCost,
    CostModel,
    Op,
)
from espresso.model.job import Job, JobError, Profile
from espresso.model.links import (
    AlphaBeta,
    LinkCurve,
    Links,
    fit_line,
    interpolate,
    routine_cost,
)
from espresso.model.payload_sizes import atom_sizes, first_shard, payload_bytes
from espresso.model.presets import cluster_names, job_from_trace, load_cluster, published_costs, trace_names
from espresso.model.pricing import Pricer
from espresso.strategies import (
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    Mode,
    Phase,
    Routine,
    Scope,
    Slot,
    TensorSpec,
    parse_option,
)
from espresso.strategies.fields import FormError, as_json, read_as
from espresso.strategies.option import communicate

TOPK = CompressorSpec.parse("topk:ratio=0.01")


def make_costs(**changes):
    return replace(
        CostModel(
            links=Links(
                AlphaBeta(1.0, 0.5),
                AlphaBeta(10.0, 2.0),
                (LinkCurve(Routine.ALLGATHER, Scope.INTER, Form.PAYLOAD, ((1000.0, 50.0), (2000.0, 90.0))),),
            ),
            compute=(
                ComputeCost("topk", Device.TRAINING, Op.ENCODE, ((0.0, 0.0), (1000.0, 10.0)), launch_us=5.0),
                ComputeCost("topk", Device.TRAINING, Op.DECODE, ((0.0, 0.0), (1000.0, 2.0)), launch_us=3.0),
            ),
            copy=CopyCost(4.0, 1.0, True),
            contention=Contention(1.5, 1.0, 2.0, {"inter": 0.25, "inter.allgather": 0.5}),
            offload_ranks_per_pool=2,
        ),
        **changes,
    )


def make_job():
    return Job(
        model="toy",
        tensors=(TensorSpec("w", (10, 64)), TensorSpec("b", (64,), "float64")),
        gaps_us=(0.0, 30.5),
        cluster=Cluster(2, 2),
        costs=make_costs(),
        mode=Mode.DDP,
        buckets=(Bucket(0, (Slot("b", 0, 64),), "float64"), Bucket(1, (Slot("w", 0, 640),))),
        bucket_ready_us=(10.0, 30.5),
        forward_us=100.0,
        optimizer_us=20.0,
        source="a test",
        meta={"cpu": "any"},
        profile=Profile(16, 0.031),
    )


def test_a_job_file_round_trips(tmp_path):
    job = make_job()
    job.save(tmp_path / "job.json")
    loaded = Job.load(tmp_path / "job.json")
    assert loaded == job
    assert loaded.meta == job.meta
    assert loaded.costs.contention == job.costs.contention
    assert str(loaded.profile) == "16 steps, backward's spread is 3.1 %"
    assert str(Profile(16, 0.12)) == "16 steps, backward's spread is 12.0 %, above the 5 % of a steady one"


def test_a_file_from_before_profiles_had_a_spread_is_read():
    body = make_job().to_json()
    assert body.pop("profile") == {"num_steps": 16, "spread": 0.031}
    assert Job.from_json(body) == replace(make_job(), profile=None)


def test_a_file_from_before_latency_had_a_place_has_it_in_its_occupancy():
    body = make_job().to_json()
    links = body["costs"]["links"]
    for row in (links["intra"], links["inter"], links["curves"][0]):
        assert row.pop("latency_us") == 0.0
    assert links.pop("in_flight") == body["costs"].pop("offload_width") == 1
    assert Job.from_json(body) == make_job()


_DROP = object()


def _edit(body, path, value):
    *parents, last = path
    for key in parents:
        body = body[key]
    if value is _DROP:
        del body[last]
    else:
        body[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("colour",), 1, "the job has an unknown key 'colour'"),
        (("costs", "colour"), 1, "costs has an unknown key 'colour'"),
        (("costs", "contention", "gpu"), 1, "costs.contention has an unknown key 'gpu'"),
        (("costs", "compute", 0, "note"), 1, r"costs.compute\[0\] has an unknown key 'note'"),
        (("costs", "links", "curves", 0, "mtu"), 1, r"curves\[0\] has an unknown key 'mtu'"),
        (("costs", "links", "intra", "gamma"), 1, "intra has an unknown key 'gamma'"),
        (("tensors", 0, "colour"), 1, r"tensors\[0\] has an unknown key 'colour'"),
        (("cluster", "gpus"), 1, "cluster has an unknown key 'gpus'"),
        (("forward_us",), _DROP, "lacks the key 'forward_us'"),
        (("schema_version",), 2, "schema_version 2 is not supported"),
        (("kind",), "espresso-strategy", "this is a strategy file"),
        (("mode",), "gpu", "mode is 'gpu', which is none of paper, ddp"),
        (("forward_us",), -1, "forward_us must be finite and at least zero, got -1"),
        (("forward_us",), "1", "forward_us must be a number, got '1'"),
        (("profile", "num_steps"), 0, "profile: num_steps must be a whole number of at least 1, got 0"),
        (("profile", "spread"), -0.1, "profile: spread must be finite and at least zero, got -0.1"),
        (("profile", "spread"), None, "profile.spread must be a number, got None"),
        (("profile", "steps"), 8, "profile has an unknown key 'steps'"),
        (("tensors", 1, "gap_us"), float("nan"), "holds NaN, which is no number of JSON"),
        (("tensors", 1, "gap_us"), float("inf"), "holds Infinity"),
        (("tensors", 1, "name"), "w", "tensor 'w' appears twice"),
        (("tensors", 0, "dtype"), "int8", "tensor 'w': dtype 'int8'"),
        (("tensors",), [], "at least one tensor"),
        (("buckets",), _DROP, "mode is 'ddp'"),
        (("buckets", 0, "slots", 0, 0), "z", "holds tensor 'z', which the job does not list"),
        (("buckets", 0, "slots", 0, 2), 65, "tensor 'b' has 65 elements there and 64 in the job"),
        (("buckets", 0, "slots"), [], "tensor 'b' lies in no bucket"),
        (("buckets", 1, "ready_us"), 5.0, "bucket 1 is ready at 5, before the one ahead of it"),
        (("cluster", "num_nodes"), 0, "num_nodes must be a whole number"),
        (("costs", "links", "curves", 0, "routine"), "ring", "routine is 'ring', which is none of allreduce"),
        (("costs", "links", "curves", 0, "points"), [[2, 1], [1, 2]], "points must rise"),
        (("costs", "links", "curves", 0, "latency_us"), -1, "latency_us must be finite and at least zero"),
        (("costs", "links", "inter", "latency_us"), -1, "latency_us must be finite and at least zero"),
        (("costs", "links", "in_flight"), 0, "in_flight"),
        (("costs", "offload_width"), 65, "offload_width"),
        (("costs", "links", "curves", 0, "points"), [], "has no points"),
        (("costs", "compute", 0, "points", 1), [5], "must be a list of 2 values"),
        (("costs", "compute", 1, "op"), "encode", "encode of 'topk' on training is given twice"),
        (("costs", "links", "curves", 0, "points"), [[1e-320, 1]], "at 1e-320 must be finite and at least 1e-15"),
        (("costs", "links", "curves", 0, "points"), [[0, 1], [1e-320, 2]], "points must rise"),
        (("costs", "contention", "cores"), 0, "cores must be finite and at least 1e-15, got 0"),
        (("costs", "contention", "cores"), 1e-320, "cores must be finite and at least 1e-15, got 9.9"),
        (("costs", "contention", "comm_cpu"), {"wan": 1}, "scope is 'wan'"),
        (("costs", "offload_ranks_per_pool"), 0, "offload_ranks_per_pool"),
        (("costs", "copy", "shares_intra"), "no", "shares_intra must be true or false"),
        (("meta", "gain_scale"), "0.9", "meta.gain_scale must be a number, got '0.9'"),
        (("meta", "gain_scale"), 0, "meta.gain_scale must be from 1/16 to 16, got 0"),
    ],
)
def test_every_fault_in_a_job_file_is_named(tmp_path, path, value, message):
    body = make_job().to_json()
    _edit(body, path, value)
    file = tmp_path / "job.json"
    file.write_text(json.dumps(body))
    with pytest.raises(JobError, match=message) as raised:
        Job.load(file)
    assert str(file) in str(raised.value)


def test_a_retired_key_is_read_only_where_it_said_nothing():
    """Files of earlier versions have it: its one harmless value is left out of account, another is a fault."""
    cost = as_json(ComputeCost("topk", Device.TRAINING, Op.ENCODE, ((1, 2.0), (4, 8.0))))
    assert read_as(ComputeCost, {**cost, "segment_us": 0.0}, "the cost") == read_as(ComputeCost, cost, "the cost")
    with pytest.raises(FormError, match="the cost has an unknown key 'segment_us'; known are"):
        read_as(ComputeCost, {**cost, "segment_us": 1.5}, "the cost")


def test_ready_times_come_from_buckets_or_gaps():
    job = make_job()
    assert job.ready_us == (10.0, 30.5)
    paper = replace(job, mode=Mode.PAPER, buckets=None, bucket_ready_us=None)
    assert paper.ready_us == (0.0, 30.5)
    assert [bucket.slots[0].tensor for bucket in paper.laid_out] == ["w", "b"]


# Costs


def test_curves_are_linear_between_and_beyond_their_points():
    points = ((10.0, 5.0), (20.0, 10.0), (30.0, 20.0))
    assert [interpolate(points, x) for x in (10, 15, 25, 40, 0)] == [5, 7.5, 15, 30, 0]
    assert interpolate(((10.0, 20.0), (20.0, 5.0)), 100) == 0.0
    assert interpolate(((10.0, 20.0),), 5) == 10.0


@pytest.mark.parametrize(
    ("routine", "expected"),
    [
        # ring: 2 * 3/4 * 8 KB * 2 + 6 * 10 = 84; tree: 2 * 8 * 2 + 4 * 10 = 72
        (Routine.ALLREDUCE, 72.0),
        (Routine.REDUCE_SCATTER, 0.75 * 16 + 30),
        (Routine.ALLGATHER, 0.75 * 16 + 30),
        (Routine.ALL_TO_ALL, 0.75 * 16 + 30),
        (Routine.REDUCE, 16 + 20),
        (Routine.BROADCAST, 16 + 20),
        (Routine.GATHER, 16 + 20),
    ],
)
def test_routines_cost_what_the_literature_says(routine, expected):
    assert routine_cost(routine, AlphaBeta(10.0, 2.0), 4, 8000).alone_us == pytest.approx(expected)


def test_a_large_allreduce_takes_the_ring():
    link = AlphaBeta(10.0, 2.0)
    assert routine_cost(Routine.ALLREDUCE, link, 4, 1e6).alone_us == pytest.approx(2 * 0.75 * 2000 + 60)


def test_one_rank_costs_nothing():
    assert routine_cost(Routine.ALLREDUCE, AlphaBeta(10.0, 2.0), 1, 1e6).alone_us == 0.0


def test_flat_routines_are_timed_by_the_slowest_link_and_share_the_nic():
    costs, cluster = make_costs(), Cluster(2, 4)
    gather = communicate(Routine.ALLGATHER, Scope.FLAT, Phase.WHOLE, Form.PAYLOAD)
    swap = communicate(Routine.ALL_TO_ALL, Scope.FLAT, Phase.FIRST, Form.PAYLOAD)
    # A ring crosses a node's NIC once: (P-1)/P S; an all-to-all with every rank's shards: k(P-k)/P S.
    assert costs.comm(gather, cluster, 8000).alone_us == pytest.approx(7 / 8 * 8 * 2.0 + 70)
    assert costs.comm(swap, cluster, 8000).alone_us == pytest.approx(4 * 4 / 8 * 8 * 2.0 + 70)


def test_measured_curves_go_before_lines():
    costs, cluster = make_costs(), Cluster(2, 2)
    gather = communicate(Routine.ALLGATHER, Scope.INTER, Phase.WHOLE, Form.PAYLOAD)
    assert costs.comm(gather, cluster, 1500).alone_us == 70.0
    swap = communicate(Routine.ALL_TO_ALL, Scope.INTER, Phase.FIRST, Form.PAYLOAD)
    assert costs.comm(swap, cluster, 1500).alone_us == pytest.approx(0.5 * 1.5 * 2 + 10)


def test_a_routine_without_a_cost_is_named():
    costs = make_costs(links=Links(intra=AlphaBeta(1, 1)))
    gather = communicate(Routine.ALLGATHER, Scope.INTER, Phase.WHOLE, Form.PAYLOAD)
    with pytest.raises(JobError, match=r"no cost for inter\.allgather"):
        costs.comm(gather, Cluster(2, 2), 1)


def test_a_batched_decode_is_one_launch_and_its_shares():
    costs = make_costs()
    assert costs.encode_us(TOPK, Device.TRAINING, 2000) == 5 + 20
    assert costs.decode_us(TOPK, Device.TRAINING, 500, 4) == 3 + 4 * 1
    assert costs.decode_us(TOPK, Device.TRAINING, 0, 4) == 0


def test_an_unmeasured_compressor_is_named():
    with pytest.raises(JobError, match=r"no encode cost for compressor 'int8' on the training device; .* topk"):
        make_costs().encode_us(CompressorSpec("int8"), Device.TRAINING, 10)
    assert make_costs().devices(TOPK) == (Device.TRAINING,)


def test_demands_are_by_routine_then_scope():
    contention = make_costs().contention
    gather = communicate(Routine.ALLGATHER, Scope.INTER, Phase.WHOLE, Form.PAYLOAD)
    swap = communicate(Routine.ALL_TO_ALL, Scope.INTER, Phase.FIRST, Form.PAYLOAD)
    flat = communicate(Routine.ALL_TO_ALL, Scope.FLAT, Phase.FIRST, Form.PAYLOAD)
    assert [contention.demand(step) for step in (gather, swap, flat)] == [0.5, 0.25, 0.0]


def test_fit_line_recovers_a_ring():
    link = AlphaBeta(12.0, 3.0)
    sizes = (1e3, 1e4, 1e5, 1e6)
    points = [(s, routine_cost(Routine.ALLGATHER, link, 4, s).alone_us) for s in sizes]
    fitted = fit_line(points, messages=3, factor=0.75)
    assert fitted.alpha_us == pytest.approx(12.0)
    assert fitted.beta_us_per_kb == pytest.approx(3.0)


# Chains: what the steps of a leaf cost


def _halves(spec, elements, dtype, segments):
    return 2 * elements


def _prices(text, elements=6400, cluster=None, spec=TOPK, costs=None):
    pricer = Pricer(costs or make_costs(), cluster or Cluster(2, 2), _halves)
    return pricer.chain(Choice(parse_option(text), spec), elements, "float32")


def test_bytes_follow_shards_payloads_and_multiplicity():
    works = _prices("comp > intra.all_to_all > dec > comp > inter.allgather > intra.allgather > dec")
    # 6400 elements: 12800 bytes in two payloads; then shards of 3200; two ranks share the NIC.
    assert [work.num_bytes for work in works] == [0, 12800, 0, 0, 2 * (2 * 6400), 4 * 6400, 0]
    assert [work.us for work in works][2] == 3 + 2 * interpolate(((0, 0), (1000, 2)), 3200)
    assert [work.us for work in works][6] == 3 + 2 * interpolate(((0, 0), (1000, 2)), 6400)


def test_after_a_rooted_intra_step_one_rank_has_the_nic():
    works = _prices("intra.reduce > inter.allreduce > intra.broadcast", spec=CompressorSpec("none"))
    assert [work.num_bytes for work in works] == [25600, 25600, 25600]
    works = _prices("intra.reduce_scatter > inter.allreduce > intra.allgather", spec=CompressorSpec("none"))
    assert [work.num_bytes for work in works] == [25600, 2 * 12800, 25600]


def test_an_offloaded_step_serves_the_ranks_of_its_pool_and_copies():
    cost = ComputeCost("topk", Device.OFFLOAD, Op.ENCODE, ((0.0, 0.0), (1000.0, 10.0)))
    decode = ComputeCost("topk", Device.OFFLOAD, Op.DECODE, ((0.0, 0.0), (1000.0, 10.0)))
    works = _prices("comp@offload > flat.allgather > dec@offload", costs=make_costs(compute=(cost, decode)))
    copies = [(work.us, work.num_bytes) for work in works if work.shape.stage.value != "step"]
    assert works[1].us == 2 * 64  # two ranks on one pool
    assert copies == [(4 + 25.6, 25600), (4 + 12.8, 12800), (4 + 51.2, 51200), (4 + 25.6, 25600)]
    assert works[0].shape.lane_set == 3  # this preset's copies share the intra link


def test_atoms_and_shards_follow_the_one_cutting_rule():
    assert first_shard(1000, 4) == 256
    assert first_shard(10, 4) == 10
    assert atom_sizes(1000, (4,)) == {256: 3, 232: 1}
    assert atom_sizes(10, (4,)) == {10: 1, 0: 3}
    assert atom_sizes(6400, (2, 2)) == {1600: 4}


def test_payload_bytes_are_the_layouts_own():
    from espresso.compressors import Segment, create

    spec = CompressorSpec("efsignsgd")
    layout = create(spec).layout([Segment("", 0, 5000)])
    assert payload_bytes(spec, 5000) == layout.num_bytes < 5000 * 4
    assert payload_bytes(spec, 5000, "float32", 3) > payload_bytes(spec, 5000)


# Presets


def test_every_trace_makes_a_job_on_every_preset():
    assert set(trace_names()) == {"bert_base", "gpt2", "lstm", "ugatit", "vgg16"}
    assert set(cluster_names()) == {"nvlink-100g", "pcie-25g"}
    for trace in trace_names():
        for cluster in cluster_names():
            job = job_from_trace(trace, 8, 8, cluster)
            assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
            assert "published" in job.source
            assert job.costs.contention.cores is None


def test_published_compressor_times_are_reproduced():
    costs = job_from_trace("lstm", 8, 8, "pcie-25g").costs
    gpu = published_costs()["gpu"]
    for name, us in gpu["encode_us"].items():
        spec = CompressorSpec(name)
        assert costs.encode_us(spec, Device.TRAINING, 1000) == us
        assert costs.encode_us(spec, Device.TRAINING, 1 << 20) == us
        assert costs.encode_us(spec, Device.TRAINING, 1 << 22) == pytest.approx(4 * us)
    for elements, encode, decode in published_costs()["cpu"]["dgc"]:
        spec = CompressorSpec("dgc")
        assert costs.encode_us(spec, Device.OFFLOAD, elements) == pytest.approx(encode)
        assert costs.decode_us(spec, Device.OFFLOAD, elements) == pytest.approx(decode)


def test_a_cluster_file_is_read_and_its_faults_named(tmp_path):
    file = tmp_path / "cluster.json"
    body = {
        "schema_version": 1,
        "kind": "espresso-cluster",
        "intra": {"alpha_us": 1, "beta_us_per_kb": 0.5},
        "inter": {"alpha_us": 10, "beta_us_per_kb": 2},
    }
    file.write_text(json.dumps({**body, "in_flight": 3, "offload_width": 2}))
    wide = job_from_trace("vgg16", 2, 2, file).costs
    assert (wide.links.in_flight, wide.offload_width) == (3, 2)
    file.write_text(json.dumps(body))
    preset = load_cluster(file)
    assert preset.inter == AlphaBeta(10.0, 2.0)
    assert job_from_trace("vgg16", 2, 2, file).costs.copy is None
    for key, value, message in (
        ("wan", {}, "unknown key 'wan'"),
        ("inter", {"alpha_us": 1}, "inter lacks the key 'beta_us_per_kb'"),
        ("schema_version", 9, "schema_version 9"),
    ):
        file.write_text(json.dumps({**body, key: value}))
        with pytest.raises(JobError, match=message):
            load_cluster(file)
    with pytest.raises(JobError, match="neither a file nor a cluster preset"):
        load_cluster("nvlink-1g")
    with pytest.raises(JobError, match=r"neither a file nor a published trace .*bert_base"):
        job_from_trace("alexnet", 2, 2, "pcie-25g")


def test_measured_links_make_a_cluster_file(tmp_path):
    from espresso.model.links import AlphaBeta, LinkCurve, routine_cost
    from espresso.model.presets import load_cluster, measured_cluster
    from espresso.strategies import Cluster, Form, Routine, Scope

    line = AlphaBeta(40.0, 0.3, 1500.0)
    costs = {
        r: [(n, routine_cost(r, line, 4, n)) for n in (1e3, 1e5, 1e7)]
        for r in (Routine.ALLGATHER, Routine.REDUCE_SCATTER, Routine.ALL_TO_ALL)
    }
    curves = [
        LinkCurve(r, Scope.FLAT, Form.RAW, tuple((n, cost.occupancy_us) for n, cost in row), row[0][1].latency_us)
        for r, row in costs.items()
    ]
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(measured_cluster(curves, Cluster(4, 1), {"num_nodes": 4})))
    loaded = load_cluster(path)
    assert loaded.inter.alpha_us == pytest.approx(40.0, rel=1e-3)
    assert loaded.inter.beta_us_per_kb == pytest.approx(0.3, rel=1e-3)
    assert loaded.inter.latency_us == pytest.approx(1500.0)
    assert loaded.intra is None
    assert job_from_trace("lstm", 4, 1, path).cluster == Cluster(4, 1)
    with pytest.raises(JobError, match=r"cluster.json knows no links between ranks of a machine, and 2 .* 'intra'"):
        job_from_trace("lstm", 2, 2, path)


def test_links_of_one_machine_make_no_network(tmp_path):
    from espresso.model.links import LinkCurve
    from espresso.model.presets import measured_cluster
    from espresso.strategies import Cluster, Form, Routine, Scope

    curve = LinkCurve(Routine.ALLGATHER, Scope.FLAT, Form.RAW, ((1e3, 10.0), (1e6, 500.0)))
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(measured_cluster([curve], Cluster(1, 2), {"num_nodes": 1})))
    assert job_from_trace("lstm", 1, 2, path).cluster == Cluster(1, 2)
    for shape, servers in (((2, 2), 0), ((1, 2), 1)):
        with pytest.raises(JobError, match=r"cluster.json knows no links between machines, and .* 'inter'"):
            job_from_trace("lstm", *shape, path, servers=servers)


def test_compressors_of_one_algorithm_share_what_is_measured():
    from espresso.live.codec_costs import _scaled
    from espresso.model.costs import ComputeCost, Op
    from espresso.strategies import Device

    sizes = (1e3, 1e4, 1e5, 1e6)

    def cost(device, factor, at=sizes):
        return ComputeCost("a", device, Op.ENCODE, tuple((n, factor * n / 100) for n in at), launch_us=10.0)

    first = [cost(Device.TRAINING, 1.0), cost(Device.OFFLOAD, 0.5)]
    probed = [cost(Device.TRAINING, 3.0, (1e4, 1e6))]
    training, offload = (_scaled(one, "a:b=1", first, probed) for one in first)
    assert training.spec == "a:b=1"
    assert [training.time_us(n) for n in (1e4, 1e6)] == pytest.approx([probed[0].time_us(n) for n in (1e4, 1e6)])
    assert offload.time_us(1e6) == pytest.approx(first[1].time_us(1e6) * probed[0].time_us(1e6) / first[0].time_us(1e6))
    assert training.time_us(1e5) == pytest.approx(3 * first[0].time_us(1e5), rel=0.05)
