"""Strategies: the tree's counts, what every leaf does to data, the plan, and strategy files."""

import errno
import itertools
import json
import os
import resource
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espresso.strategies import (
    NONE,
    PLAIN,
    UNCOMPRESSED,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    Lane,
    Phase,
    Routine,
    Scope,
    Site,
    Slot,
    Stage,
    StepKind,
    Strategy,
    StrategyError,
    TensorSpec,
    compressed_options,
    cut,
    fields,
    flat_options,
    halved_options,
    hierarchical_options,
    options_for,
    parse_option,
    plan,
    round_options,
    server_options,
    summable_options,
    trace,
)

TRAINING = (Device.TRAINING,)
TOPK = CompressorSpec.parse("topk:ratio=0.01")
FLAT_GATHER = "comp > flat.allgather > dec"
TWO_BY_TWO = Cluster(2, 2)


# The tree


def test_the_tree_has_the_papers_4341_leaves():
    assert len(flat_options()) == 63
    assert len(hierarchical_options()) == 4278
    assert len(options_for(Cluster(8, 8))) == 4341


def test_174_leaves_run_on_the_training_device():
    leaves = options_for(Cluster(8, 8), devices=TRAINING)
    assert len(leaves) == 174
    assert len(flat_options(TRAINING)) == 12
    assert Counter(option.num_compressions for option in leaves) == {0: 9, 1: 59, 2: 72, 3: 30, 4: 4}


def test_54_leaves_use_ring_pairs_only():
    rooted = {Routine.REDUCE, Routine.BROADCAST, Routine.GATHER}
    leaves = options_for(Cluster(8, 8), devices=TRAINING)
    assert sum(not any(step.routine in rooted for step in leaf.steps) for leaf in leaves) == 54


def test_the_summable_extension_is_counted_apart():
    assert len(summable_options(hierarchical=True, devices=TRAINING)) == 9
    assert len(summable_options(hierarchical=False, devices=TRAINING)) == 3
    assert len(summable_options(hierarchical=True)) == 36
    assert len(options_for(Cluster(8, 8), summable=True)) == 4341 + 36
    assert all(leaf.is_summable and leaf.num_compressions == 1 for leaf in summable_options(hierarchical=True))


def test_leaves_with_fp16_inside_a_node_are_counted_apart():
    assert len(halved_options(TRAINING)) == 1
    assert len(halved_options()) == 16
    assert not set(halved_options()) & set(options_for(Cluster(8, 8)))
    assert all(parse_option(str(leaf)) == leaf for leaf in halved_options())


def test_the_parameter_server_leaves_are_counted_apart():
    assert len(server_options(hierarchical=False, devices=TRAINING)) == 3
    assert len(server_options(hierarchical=False)) == 7
    assert len(server_options(hierarchical=True)) == 21
    offered = options_for(Cluster(8, 8, 4))
    assert len(offered) == 4341 + 14
    assert not any(option.halves for option in offered), "what fp16 rounds away is in no budget"
    two_way = parse_option("comp > flat.push > dec@server > comp@server > flat.pull > dec")
    flows = trace(two_way, Cluster(3, 1, 2), 1000)
    assert [flow.after.multiplicity for flow in flows] == [1, 3, 0, 1, 1, 0]
    assert [flow.site for flow in flows if flow.site] == [Site.LOCAL, Site.SERVER]
    with pytest.raises(ValueError, match="needs parameter servers, and 3 nodes x 1 ranks has none"):
        trace(two_way, Cluster(3, 1), 1000)


def test_a_strategy_may_meet_another_number_of_servers_but_not_none():
    choice = Choice(parse_option("flat.push > sum@server > flat.pull"))
    made = Strategy.uniform([TensorSpec("w", (3,))], Cluster(2, 1, 2), choice)
    assert Strategy.from_json(made.to_json()) == made
    made.check_model(made.tensors, Cluster(2, 1, 3))
    with pytest.raises(StrategyError, match=r"goes through parameter servers.*espresso.launch --servers N"):
        made.check_model(made.tensors, Cluster(2, 1))


def test_options_of_two_rounds_are_counted_apart():
    assert len(round_options(hierarchical=True, devices=TRAINING)) == 9
    assert len(round_options(hierarchical=False, devices=TRAINING)) == 3
    assert len(round_options(hierarchical=True)) == 72
    assert len(round_options(hierarchical=False)) == 24
    for leaf in round_options(hierarchical=True):
        assert parse_option(str(leaf)) == leaf
        assert (leaf.num_rounds, leaf.num_compressions, leaf.is_summable) == (2, 1, True)
        middle = [step.kind for step in leaf.steps].index(StepKind.TRANSFORM)
        assert leaf.steps[1:middle] == leaf.steps[middle + 1 : -1]
    assert compressed_options(Cluster(2, 2), TRAINING, summable=True, rounds=2) == round_options(True, TRAINING)
    assert len(compressed_options(Cluster(2, 2), TRAINING, summable=True)) == 174 - 9 + 9


def test_a_cluster_may_have_servers_of_both_kinds():
    both = Cluster(2, 1, 3, True, 1)
    assert (both.num_colocated, both.num_dedicated) == (2, 1)
    assert str(both) == "2 nodes x 1 ranks and 3 servers, 2 of them colocated"
    made = Strategy.uniform([TensorSpec("w", (3,))], both)
    assert Strategy.from_json(made.to_json()).cluster == both
    assert "num_apart" not in Cluster(2, 1, 3, True).to_json()
    with pytest.raises(ValueError, match="num_apart"):
        Cluster(2, 1, 3, False, 1)


@pytest.mark.parametrize("cluster", [Cluster(1, 4), Cluster(4, 1), Cluster(1, 1)])
def test_one_scope_leaves_only_flat_options(cluster):
    assert options_for(cluster) == flat_options()


def test_ids_are_unique_and_parse_back():
    leaves = options_for(Cluster(2, 2), summable=True)
    ids = {str(leaf): leaf for leaf in leaves}
    assert len(ids) == len(leaves)
    assert all(parse_option(text) == leaf for text, leaf in ids.items())


def test_no_two_leaves_have_equal_steps():
    assert len(set(options_for(Cluster(8, 8)))) == 4341


def test_an_unknown_option_says_where_it_leaves_the_tree():
    with pytest.raises(ValueError, match=r"unknown option 'comp > flat.ring > dec'.*after 'comp'.*flat.allgather"):
        parse_option("comp > flat.ring > dec")


def test_on_device_moves_every_compression():
    leaf = parse_option("comp > flat.all_to_all > dec > comp > flat.allgather > dec")
    moved = leaf.on_device(Device.OFFLOAD)
    assert moved.uses_offload
    assert not leaf.uses_offload
    assert str(moved) == "comp@offload > flat.all_to_all > dec@offload > comp@offload > flat.allgather > dec@offload"


# The flow


def _ends_whole(option, cluster, size, rank, root):
    flows = trace(option, cluster, size, rank, root)
    last = flows[-1].after
    return last.region == (0, size) and last.form is Form.RAW and last.active


@pytest.mark.parametrize("cluster", [Cluster(2, 2), Cluster(3, 2), Cluster(2, 4)])
def test_every_leaf_ends_with_the_whole_tensor_on_every_rank(cluster):
    for option in options_for(cluster, devices=TRAINING, summable=True):  # the flow is the same wherever it is encoded
        for rank in range(cluster.num_ranks):
            assert _ends_whole(option, cluster, 1000, rank, root=rank + 3), option


def _sum_reached(option, cluster, size):
    """Which ranks' gradients each element of each result holds: an independent, per-element interpreter."""
    flows = [trace(option, cluster, size, rank) for rank in range(cluster.num_ranks)]
    # held[rank][element] is a list of rank multisets: one per unaggregated payload (or the one raw value).
    held = [[[(rank,)] for _ in range(size)] for rank in range(cluster.num_ranks)]
    for position, step in enumerate(option.steps):
        before = [flow[position].before for flow in flows]
        after = [flow[position].after for flow in flows]
        if step.kind is StepKind.COMPRESS:
            assert all(len(held[r][e]) == 1 for r in range(len(held)) if before[r].active for e in _span(before[r]))
            continue
        if step.kind is StepKind.DECOMPRESS:
            held = [[[sum(payloads, ())] if payloads else [] for payloads in rank] for rank in held]
            continue
        groups = {}
        for rank in range(cluster.num_ranks):
            node, local = divmod(rank, cluster.ranks_per_node)
            key = {Scope.FLAT: 0, Scope.INTRA: node, Scope.INTER: local}[step.scope]
            groups.setdefault(key, []).append(rank)
        fresh = [[[] for _ in range(size)] for _ in held]
        for members in groups.values():
            sources = [r for r in members if before[r].active]
            for rank in members:
                if not after[rank].active:
                    continue
                for element in _span(after[rank]):
                    have = [held[r][element] for r in sources if element in _span(before[r])]
                    if step.form in (Form.RAW, Form.SUMMABLE) and step.phase is not Phase.SECOND:
                        fresh[rank][element] = [sum((payload[0] for payload in have), ())]
                    elif step.phase is Phase.SECOND:
                        fresh[rank][element] = have[0]
                    else:
                        fresh[rank][element] = [payload for payloads in have for payload in payloads]
        held = fresh
        for rank in range(cluster.num_ranks):
            if after[rank].active and after[rank].form is Form.PAYLOAD:
                counts = {len(held[rank][element]) for element in _span(after[rank])}
                assert counts == {after[rank].multiplicity}, (str(option), position)
    return held


def _span(state):
    return range(*state.region)


def test_every_training_leaf_sums_every_rank_exactly_once_and_counts_its_payloads():
    cluster = Cluster(2, 2)
    everyone = tuple(range(cluster.num_ranks))
    for option in options_for(cluster, devices=TRAINING):
        held = _sum_reached(option, cluster, 64 * 4)
        for rank in held:
            for payloads in rank:
                assert tuple(sorted(sum(payloads, ()))) == everyone, option


@given(st.integers(0, 5000), st.integers(1, 9))
def test_cut_covers_without_overlap_and_aligned(length, parts):
    shards = cut((0, length), parts)
    assert len(shards) == parts
    assert shards[0][0] == 0
    assert shards[-1][1] == length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shards))
    assert all(start % 64 == 0 or start == length for start, _ in shards)


def test_payload_travels_with_its_multiplicity():
    flows = trace(parse_option("comp > intra.gather > inter.allgather > intra.broadcast > dec"), Cluster(3, 2), 640)
    assert [flow.after.multiplicity for flow in flows] == [1, 2, 6, 6, 0]


def test_a_hierarchical_option_on_a_flat_cluster_is_refused():
    with pytest.raises(ValueError, match="needs several nodes"):
        trace(hierarchical_options(TRAINING)[0], Cluster(4, 1), 64)


# The plan


def _strategy(choices, partition_bytes=0, sizes=(640, 64, 640), cluster=TWO_BY_TWO):
    tensors = tuple(TensorSpec(name, (size,)) for name, size in zip("abc", sizes, strict=True))
    return Strategy(tensors, dict(zip("abc", choices, strict=True)), cluster, partition_bytes)


def _bucket(sizes=(640, 64, 640)):
    slots, offset = [], 0
    for name, size in zip("abc", sizes, strict=True):
        slots.append(Slot(name, offset, size))
        offset += size
    return Bucket(0, tuple(slots))


def test_equal_choices_of_a_bucket_form_one_group():
    gather = Choice(parse_option(FLAT_GATHER), TOPK)
    laid = plan(_strategy([gather, PLAIN, gather]), [_bucket()])
    assert [[run.tensor for run in group.runs] for group in laid.groups] == [["a", "c"], ["b"]]
    assert [(run.group_start, run.bucket_start) for run in laid.groups[0].runs] == [(0, 0), (640, 704)]
    assert len(laid.tasks) == 3 + 1


def test_what_does_not_compress_rides_in_the_payload_of_an_equal_option():
    gather = Choice(parse_option(FLAT_GATHER), TOPK)
    rides = Choice(gather.option, NONE)
    (group,) = plan(_strategy([gather, rides, gather]), [_bucket()]).groups
    assert group.choice == gather
    assert [(run.tensor, run.exact) for run in group.runs] == [("a", False), ("b", True), ("c", False)]
    assert [run.exact for run in group.segments(600, 700)] == [False, True]
    alone = plan(_strategy([rides, PLAIN, rides]), [_bucket()]).groups
    assert [(group.choice, any(run.exact for run in group.runs)) for group in alone] == [(rides, False), (PLAIN, False)]
    # Sums of values have one type, and a server reads one compressor's payload.
    for option in ("comp > flat.allreduce > dec", "comp > flat.push > dec@server > flat.pull"):
        leaf = Choice(parse_option(option), CompressorSpec("fp16"))
        strategy = Strategy.uniform(_strategy([PLAIN] * 3).tensors, Cluster(2, 1, 1), leaf)
        apart = plan(strategy.with_choices({"b": Choice(leaf.option, NONE)}), [_bucket()])
        assert [group.choice for group in apart.groups] == [leaf, Choice(leaf.option, NONE)]


def test_a_group_is_cut_at_the_partition_size_and_pipelined():
    gather = Choice(parse_option(FLAT_GATHER), TOPK)
    laid = plan(_strategy([gather] * 3, partition_bytes=448 * 4), [_bucket()])
    assert [(part.start, part.stop) for part in laid.partitions] == [(0, 448), (448, 896), (896, 1344)]
    assert [segment.tensor for segment in laid.groups[0].segments(448, 896)] == ["a", "b", "c"]
    # Waves: part 0 step 0; part 0 step 1 and part 1 step 0; and so on.
    steps = [(laid.tasks[i].partition, laid.tasks[i].step_index) for i in laid.order]
    assert steps == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0), (1, 2), (2, 1), (2, 2)]


def test_a_device_pushes_and_pulls_by_way_of_the_host():
    leaf = Choice(parse_option("comp@offload > flat.push > dec@server > flat.pull"), TOPK)
    strategy = Strategy.uniform((TensorSpec("a", (448,)),), Cluster(2, 1, 1), leaf)
    bucket = Bucket(0, (Slot("a", 0, 448),))
    told = [(str(task.step), task.stage, task.lanes[0]) for task in plan(strategy, [bucket], host_copies=True).tasks]
    assert told == [
        ("comp@offload", Stage.COPY_TO_HOST, Lane.COPY),
        ("comp@offload", Stage.STEP, Lane.OFFLOAD),
        ("comp@offload", Stage.COPY_TO_DEVICE, Lane.COPY),
        ("flat.push", Stage.COPY_TO_HOST, Lane.COPY),
        ("flat.push", Stage.STEP, Lane.INTER_OUT),
        ("dec@server", Stage.STEP, Lane.SERVER),
        ("flat.pull", Stage.STEP, Lane.INTER_IN),
        ("flat.pull", Stage.COPY_TO_DEVICE, Lane.COPY),
    ]
    assert {task.stage for task in plan(strategy, [bucket]).tasks} == {Stage.STEP}


def test_host_copies_stand_around_offloaded_steps_only():
    leaf = Choice(parse_option("comp@offload > flat.allgather > dec"), TOPK)
    laid = plan(_strategy([leaf] * 3), [_bucket()], host_copies=True)
    assert [task.stage for task in laid.tasks] == [
        Stage.COPY_TO_HOST,
        Stage.STEP,
        Stage.COPY_TO_DEVICE,
        Stage.STEP,
        Stage.STEP,
    ]
    assert [task.lanes[0] for task in laid.tasks] == [
        Lane.COPY, Lane.OFFLOAD, Lane.COPY, Lane.INTRA, Lane.TRAINING
    ]  # fmt: skip


def test_flat_routines_hold_both_links():
    laid = plan(_strategy([PLAIN] * 3), [_bucket()])
    assert laid.tasks[0].lanes == (Lane.INTRA, Lane.INTER_OUT, Lane.INTER_IN)


def test_a_bucket_with_an_unknown_tensor_is_refused():
    with pytest.raises(ValueError, match="'z', which the strategy does not know"):
        plan(_strategy([PLAIN] * 3), [Bucket(0, (Slot("z", 0, 4),))])


def test_an_order_must_be_a_topological_permutation():
    laid = plan(_strategy([Choice(parse_option(FLAT_GATHER), TOPK)] * 3), [_bucket()])
    with pytest.raises(ValueError, match="exactly once"):
        laid.with_order([0, 1])
    with pytest.raises(ValueError, match="task 1 before task 0"):
        laid.with_order([1, 0, 2])


# Compressor specs


def test_specs_round_trip_and_sort_their_parameters():
    spec = CompressorSpec.parse("dgc:warmup=true,ratio=0.01")
    assert str(spec) == "dgc:ratio=0.01,warmup=true"
    assert CompressorSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("text", ["", "DGC", "dgc:", "dgc:ratio", "dgc:ratio=", "dgc:=1", "dgc:r=1,r=2", "1bit"])
def test_malformed_specs_are_refused(text):
    with pytest.raises(ValueError, match="compressor spec"):
        CompressorSpec.parse(text)


# Strategy files


@pytest.fixture
def body():
    return _strategy([Choice(parse_option(FLAT_GATHER), TOPK), PLAIN, PLAIN], partition_bytes=1 << 20).to_json()


def test_a_strategy_file_round_trips(tmp_path):
    strategy = _strategy([Choice(parse_option(FLAT_GATHER), TOPK), PLAIN, PLAIN])
    strategy.save(tmp_path / "s.json")
    loaded = Strategy.load(tmp_path / "s.json")
    assert loaded == strategy
    assert loaded.digest == strategy.digest
    assert loaded.choices["a"].compressor == TOPK
    assert loaded.compresses
    beside = replace(strategy, gain_scale=4.0)
    assert Strategy.from_json(beside.to_json()) == beside
    assert beside.digest != strategy.digest, "what comes back of residuals is another part"
    assert "gain_scale" not in strategy.to_json(), "of files of before nothing changes"


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path):
    path = tmp_path / "s.json"
    fields.save(path, ["old"])
    path.chmod(0o640)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large: '{path}'$"):
            fields.save(path, ["new"] * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads(path.read_text()) == ["old"]
    fields.save(path, ["new"])
    assert json.loads(path.read_text()) == ["new"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("where", ["link", "mount"])
def test_a_file_that_must_stay_is_written_where_it_is(tmp_path, monkeypatch, where):
    def busy(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    path = tmp_path / "s.json"
    fields.save(path, ["old"])
    before = path.stat().st_ino
    if where == "link":
        (tmp_path / "link.json").symlink_to(path)
        fields.save(tmp_path / "link.json", ["new"])
    else:
        monkeypatch.setattr(os, "replace", busy)
        fields.save(path, ["new"])
    assert (path.stat().st_ino, json.loads(path.read_text())) == (before, ["new"])
    assert not list(tmp_path.glob(".*"))


def _edit(body, path, value):
    *parents, last = path
    for key in parents:
        body = body[key]
    if value is _DROP:
        del body[last]
    else:
        body[last] = value


_DROP = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("colour",), 1, "unknown key 'colour'"),
        (("tensors", 0, "colour"), 1, r"tensors\[0\] has an unknown key 'colour'"),
        (("cluster", "gpus"), 8, "cluster has an unknown key 'gpus'"),
        (("fingerprint",), _DROP, "lacks the key 'fingerprint'"),
        (("tensors", 1, "option"), _DROP, r"tensors\[1\] lacks the key 'option'"),
        (
            ("tensors", 0, "option"),
            "comp > flat.ring > dec",
            "tensor 'a': unknown option 'comp > flat.ring > dec'",
        ),
        (("tensors", 0, "compressor"), "topk:ratio", "tensor 'a': compressor spec 'topk:ratio'"),
        (("tensors", 1, "compressor"), "topk:ratio=0.1", "never compresses"),
        (("fingerprint",), "sha256:00", "fingerprint 'sha256:00' does not match"),
        (("tensors", 0, "shape"), [641], "fingerprint"),
        (("tensors", 0, "shape"), [-1], "negative size"),
        (("tensors", 0, "shape"), "640", r"tensors\[0\]\.shape must be a list"),
        (("tensors", 0, "dtype"), "int8", "dtype 'int8' is not one of"),
        (("tensors", 1, "name"), "a", "tensor 'a' appears twice"),
        (("tensors", 1, "name"), 7, "name must be text"),
        (("schema_version",), 99, "schema_version 99 is not supported"),
        (("kind",), "espresso-job", "this is a job file"),
        (("cluster", "num_nodes"), 0, "num_nodes must be a whole number of at least 1, got 0"),
        (("partition_bytes",), -1, "partition_bytes must be"),
        (("partition_bytes",), "big", "partition_bytes must be"),
        (("bucket_cap_mb",), "25", "bucket_cap_mb must be"),
        (("gain_scale",), "0.5", "gain_scale must be"),
        (("gain_scale",), 0, "gain_scale must be from 1/16 to 16, got 0"),
        (("gain_scale",), 17.0, "gain_scale must be from 1/16 to 16, got 17"),
        (("tensors",), {}, "tensors must be a list"),
    ],
)
def test_every_fault_in_a_strategy_file_is_named(body, tmp_path, path, value, message):
    _edit(body, path, value)
    file = tmp_path / "s.json"
    file.write_text(json.dumps(body))
    with pytest.raises(StrategyError, match=message) as raised:
        Strategy.load(file)
    assert str(file) in str(raised.value)


def test_a_file_that_is_not_json_is_named(tmp_path):
    (tmp_path / "s.json").write_bytes(b"\xff{")
    with pytest.raises(StrategyError, match=r"s\.json: not a JSON file"):
        Strategy.load(tmp_path / "s.json")


def test_a_hierarchical_option_in_a_flat_clusters_file_is_named(body):
    body["cluster"] = {"num_nodes": 4, "ranks_per_node": 1}
    body["tensors"][0]["option"] = "intra.reduce_scatter > comp > inter.allgather > dec > intra.allgather"
    with pytest.raises(StrategyError, match=r"tensor 'a': option .* is hierarchical"):
        Strategy.from_json(body)


def test_a_model_that_differs_from_the_strategy_is_named():
    strategy = _strategy([PLAIN] * 3)
    tensors = list(strategy.tensors)
    strategy.check_model(tensors, TWO_BY_TWO)
    with pytest.raises(StrategyError, match="tensor 'extra' is in the model but not in the strategy"):
        strategy.check_model([*tensors, TensorSpec("extra", (1,))], TWO_BY_TWO)
    with pytest.raises(StrategyError, match="tensor 'c' is in the strategy but not in the model"):
        strategy.check_model(tensors[:2], TWO_BY_TWO)
    with pytest.raises(StrategyError, match=r"tensor 'a' is float32\[641\] in the model"):
        strategy.check_model([TensorSpec("a", (641,)), *tensors[1:]], TWO_BY_TWO)
    with pytest.raises(StrategyError, match="made for 2 nodes x 2 ranks, this job runs on 4 nodes x 2 ranks"):
        strategy.check_model(tensors, Cluster(4, 2))


def test_choices_must_cover_exactly_the_tensors():
    with pytest.raises(StrategyError, match="'b'"):
        Strategy((TensorSpec("a", (1,)), TensorSpec("b", (1,))), {"a": PLAIN}, TWO_BY_TWO)


def test_what_a_shard_lacks_keeps_its_choice_for_a_copy_over_all():
    a, b, c = (TensorSpec(name, (4,)) for name in "abc")
    gather = Choice(parse_option(FLAT_GATHER), TOPK)
    whole = Strategy.uniform([a, b], TWO_BY_TWO, gather)
    shard = whole.over([TensorSpec("a", (3,))])
    assert shard == Strategy.uniform([TensorSpec("a", (3,))], TWO_BY_TWO, gather)
    assert shard.over([a, b]) == shard.over([b]).over([a, b]) == whole
    assert shard.over([a, b, c]).choices == {"a": gather, "b": gather, "c": PLAIN}
    assert shard.with_choices({"b": PLAIN}).over([a, b]) == whole.with_choices({"b": PLAIN})
    assert shard.with_choices({"a": PLAIN}).over([a, b]) == whole.with_choices({"a": PLAIN})
    with pytest.raises(StrategyError, match="c"):
        shard.with_choices({"c": PLAIN})


def test_fingerprint_depends_on_names_shapes_dtypes_and_cluster():
    base = _strategy([PLAIN] * 3)
    assert base.fingerprint == _strategy([PLAIN] * 3, partition_bytes=64).fingerprint
    assert base.fingerprint != _strategy([PLAIN] * 3, sizes=(640, 64, 641)).fingerprint
    assert base.fingerprint != _strategy([PLAIN] * 3, cluster=Cluster(4, 2)).fingerprint


def test_the_uncompressed_option_is_plain_ddps():
    assert str(UNCOMPRESSED) == "flat.allreduce"
    assert PLAIN.compressor == NONE


def test_importing_strategies_needs_no_torch():
    code = "import sys, espresso.strategies; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
