"""Traces, pictures, tables and explanations say what the strategy and the timeline say."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from espresso.compressors.schedule import check_choices
from espresso.model.costs import ComputeCost, CostModel, Op
from espresso.model.job import Job
from espresso.model.links import AlphaBeta, LinkCurve, Links
from espresso.model.timeline import Timeline, first_come
from espresso.show.explain import ExplainedGroup, explain
from espresso.show.gantt import write_gantt
from espresso.show.lane_events import (
    EventError,
    Kind,
    LaneEvent,
    busy_us,
    kind_of,
    last_iteration,
    predicted_events,
    sorted_lanes,
)
from espresso.show.report import human_bytes, human_us, link_rows, short_names
from espresso.show.trace_events import trace_body, write_trace
from espresso.strategies import (
    PLAIN,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    Routine,
    Scope,
    Strategy,
    StrategyError,
    TensorSpec,
    parse_option,
    plan,
)

CLUSTER = Cluster(2, 2)
SPEC = CompressorSpec.parse("topk:ratio=0.01")
TENSORS = (
    TensorSpec("head.weight", (1024, 1024)),
    TensorSpec("head.bias", (1024,)),
    TensorSpec("in.weight", (1 << 20,)),
)
HIERARCHICAL = "intra.reduce_scatter > comp > inter.allgather > dec > intra.allgather"
ROOTED = "intra.reduce > comp > inter.gather > dec > comp > inter.broadcast > dec > intra.broadcast"


def _job(cluster: Cluster = CLUSTER) -> Job:
    compute = tuple(
        ComputeCost("topk", device, op, ((0.0, 0.0), (1 << 20, 300.0)), launch_us=10.0)
        for device in Device
        for op in Op
    )
    costs = CostModel(Links(AlphaBeta(20, 0.1), AlphaBeta(50, 8.0)), compute)
    return Job("toy", TENSORS, (0.0, 500.0, 4000.0), cluster, costs, forward_us=3000.0, optimizer_us=100.0)


def _strategy(option: str, cluster: Cluster = CLUSTER) -> Strategy:
    choice = Choice(parse_option(option), SPEC)
    return Strategy(
        TENSORS,
        {"head.weight": choice, "head.bias": PLAIN, "in.weight": choice},
        cluster,
        partition_bytes=1 << 20,
    )


def _timeline(option: str = HIERARCHICAL) -> Timeline:
    job = _job()
    laid = plan(_strategy(option), job.laid_out, mode=job.mode, host_copies=job.host_copies)
    return first_come(laid, job)


def _ran(**changes: Any) -> LaneEvent:
    """An interval of a run."""
    event = LaneEvent("inter_out", "inter.allgather", ("a",), 8, 1.0, 3.5, Kind.EXCHANGE_COMPRESSED, iteration=7)
    return replace(event, **changes)


# -- events ------------------------------------------------------------------------------------------


def test_predicted_events_cover_every_interval_and_backward() -> None:
    timeline = _timeline()
    events = predicted_events(timeline)
    backward = [event for event in events if event.kind is Kind.BACKWARD]
    assert len(events) - len(backward) == sum(len(timeline.lanes(task.index)) for task in timeline.plan.tasks)
    assert [event.end_us for event in backward] == [us for us in timeline.bucket_ready_us if us > 0]
    assert max(event.end_us for event in events) == timeline.makespan_us
    assert {event.kind for event in events} == {
        Kind.BACKWARD,
        Kind.COMPRESS,
        Kind.DECOMPRESS,
        Kind.EXCHANGE_RAW,
        Kind.EXCHANGE_COMPRESSED,
    }
    assert sorted_lanes(events) == ["backward", "training", "intra", "inter_out", "inter_in"]


def test_kinds_of_steps() -> None:
    assert kind_of("comp@offload") is Kind.COMPRESS
    assert kind_of("flat.allgather", compressed=True) is Kind.EXCHANGE_COMPRESSED
    assert kind_of("flat.allgather") is Kind.EXCHANGE_RAW
    assert kind_of("copy_to_host") is Kind.COPY
    assert kind_of("something else") is Kind.OTHER


def test_an_interval_does_not_end_before_it_starts() -> None:
    with pytest.raises(EventError, match="ends before it starts"):
        _ran(end_us=0.5)


def test_busy_time_counts_overlaps_once() -> None:
    spans = [(0, 10), (5, 12), (20, 25), (21, 22)]
    events = [LaneEvent("offload", "comp", ("a",), 0, a, b, Kind.COMPRESS) for a, b in spans]
    assert busy_us(events) == {"offload": 17.0}


def test_last_iteration_of_the_lowest_rank() -> None:
    events = [_ran(), _ran(iteration=8), _ran(iteration=9, rank=1)]
    assert [(event.rank, event.iteration) for event in last_iteration(events)] == [(0, 8)]


# -- trace -------------------------------------------------------------------------------------------


def check_trace(body: dict[str, Any]) -> list[dict[str, Any]]:
    """What Perfetto needs; returns the intervals."""
    assert body["displayTimeUnit"] == "ms"
    intervals = [event for event in body["traceEvents"] if event["ph"] == "X"]
    named = {(event["name"], event["pid"], event["tid"]) for event in body["traceEvents"] if event["ph"] == "M"}
    assert len(intervals) + sum(event["ph"] == "M" for event in body["traceEvents"]) == len(body["traceEvents"])
    assert [event["ts"] for event in intervals] == sorted(event["ts"] for event in intervals)
    for event in intervals:
        assert {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"} == set(event)
        assert event["dur"] >= 0
        assert {"tensors", "bytes", "step"} <= set(event["args"])
        assert ("process_name", event["pid"], 0) in named
        assert ("thread_name", event["pid"], event["tid"]) in named
    return intervals


def _processes(body: dict[str, Any]) -> dict[str, int]:
    return {e["args"]["name"]: e["pid"] for e in body["traceEvents"] if e["name"] == "process_name"}


def test_trace_file_has_predicted_and_measured_side_by_side(tmp_path: Path) -> None:
    predicted = predicted_events(_timeline())
    ran = [_ran(host="alpha"), _ran(host="beta", rank=1, step="dec", lane="training")]
    path = tmp_path / "trace.json"
    count = write_trace(path, predicted, ran, metadata={"title": "toy"})
    body = json.loads(path.read_text())
    intervals = check_trace(body)
    assert count == len(intervals) == len(predicted) + 2
    assert list(_processes(body)) == ["predicted", "measured alpha.0", "measured beta.1"]
    assert body["otherData"] == {"kind": "espresso-trace", "title": "toy"}
    ours = [event for event in intervals if event["pid"] == _processes(body)["predicted"]]
    sample = next(event for event in ours if event["args"]["step"] == "inter.allgather")
    assert sample["args"]["option"] == HIERARCHICAL
    assert sample["args"]["bytes"] > 0
    assert sample["args"]["partition"] >= 0


def test_iterations_do_not_overlap_in_one_process() -> None:
    body = trace_body([], [_ran(), _ran(iteration=8), _ran(rank=3)])
    check_trace(body)
    assert list(_processes(body)) == [
        "measured rank 0, iteration 7",
        "measured rank 0, iteration 8",
        "measured rank 3, iteration 7",
    ]


def test_intervals_of_one_lane_do_not_cross() -> None:
    """Viewers nest by time: two intervals of a thread must be disjoint or one inside the other."""
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in check_trace(trace_body(predicted_events(_timeline(ROOTED)))):
        by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in by_thread.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002  # rounded to nanoseconds


# -- picture -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_picture_is_written(tmp_path: Path, ending: str) -> None:
    predicted = predicted_events(_timeline())
    path = tmp_path / f"lanes{ending}"
    write_gantt(path, predicted, [_ran()], title="toy")
    head = path.read_bytes()[:400]
    assert {".png": b"\x89PNG", ".svg": b"<svg", ".pdf": b"%PDF"}[ending] in head or b"<?xml" in head
    assert path.stat().st_size > 5000


def test_picture_shows_both_panels_and_every_lane(tmp_path: Path) -> None:
    predicted = predicted_events(_timeline())
    path = tmp_path / "lanes.svg"
    write_gantt(path, predicted, [_ran()], title="toy")
    text = path.read_text()
    for word in (
        "predicted: last",
        "measured: last",
        "training device",
        "network, out",
        "exchange, compressed",
    ):
        assert f"<!-- {word}" in text, word
    assert "measured: last" not in _svg_of(tmp_path, predicted)


def _svg_of(folder: Path, predicted: list[LaneEvent]) -> str:
    write_gantt(folder / "alone.svg", predicted)
    return (folder / "alone.svg").read_text()


def test_picture_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no interval"):
        write_gantt(tmp_path / "x.png", [])
    with pytest.raises(ValueError, match=r"\.png, \.pdf, \.svg"):
        write_gantt(tmp_path / "x.bmp", predicted_events(_timeline()))


# -- explain -----------------------------------------------------------------------------------------


def _group(option: str, cluster: Cluster = CLUSTER) -> ExplainedGroup:
    return next(group for group in explain(_strategy(option, cluster)) if group.choice != PLAIN)


def test_groups_hold_every_tensor_once_most_bytes_first() -> None:
    groups = explain(_strategy(HIERARCHICAL))
    assert [[tensor.name for tensor in group.tensors] for group in groups] == [
        ["head.weight", "in.weight"],
        ["head.bias"],
    ]
    assert [group.raw_bytes for group in groups] == [8 << 20, 4096]
    assert groups[1].sent_bytes == 4096 * 2 * 3 // 4  # an allreduce over four ranks


def test_hierarchical_pipeline_in_words_and_bytes() -> None:
    group = _group(HIERARCHICAL)
    raw = 8 << 20
    assert [step.step for step in group.steps] == HIERARCHICAL.split(" > ")
    scatter, comp, between, dec, gather = group.steps
    assert scatter.sent_bytes == gather.sent_bytes == raw // 2
    assert comp.site is not None
    assert (comp.site.value, comp.residual_elements) == ("inter_first", raw // 4 // 2)
    # One rank's shard is half of each tensor, one in a hundred numbers of it, six bytes each, plus headers.
    assert raw / 4 / 2 * 0.01 * 6 < between.sent_bytes < raw / 4 / 2 * 0.01 * 6 * 1.05
    assert comp.sent_bytes == dec.sent_bytes == 0
    assert "node's sum" in comp.words
    assert "topk:ratio=0.01" in comp.words
    assert "decode 2 payloads and add them up" in dec.words
    assert group.sent_by_scope() == {Scope.INTRA: raw, Scope.INTER: between.sent_bytes}


def test_rooted_pipeline_counts_only_the_ranks_that_take_part() -> None:
    group = _group(ROOTED)
    raw = 8 << 20
    steps = {step.step: step for step in group.steps}
    # In each node one of two ranks sends everything to the root, and later the root to the other.
    assert steps["intra.reduce"].sent_bytes == steps["intra.broadcast"].sent_bytes == raw // 2
    assert [step.at_root for step in group.steps] == [False] + [True] * 7
    payload = raw / 4 * 0.01 * 6
    # Of the two roots one sends its payload to the other: a quarter of the ranks.
    assert payload / 4 < steps["inter.gather"].sent_bytes < payload / 4 * 1.05
    assert steps["inter.gather"].sent_bytes == steps["inter.broadcast"].sent_bytes


def test_multiplicity_is_paid_for() -> None:
    """Two compressed exchanges without a decode between them move every payload of the first."""
    once = _group("comp > intra.all_to_all > dec > comp > inter.allgather > dec > intra.allgather")
    twice = _group("comp > intra.all_to_all > inter.allgather > dec > intra.allgather")
    between = [next(s.sent_bytes for s in g.steps if s.step == "inter.allgather") for g in (once, twice)]
    assert between[1] == pytest.approx(2 * between[0], rel=0.01)


def test_casts_have_no_residual_and_travel_as_numbers() -> None:
    cast = Choice(parse_option("comp > flat.allreduce > dec"), CompressorSpec("fp16"))
    group = explain(Strategy.uniform(TENSORS, CLUSTER, cast))[0]
    comp, exchange, _ = group.steps
    assert comp.residual_elements == 0
    raw = sum(tensor.num_bytes for tensor in TENSORS)
    assert exchange.sent_bytes == pytest.approx(raw / 2 * 2 * 3 / 4, rel=0.01)
    assert "compressed numbers" in exchange.words


def test_offloaded_steps_say_so() -> None:
    group = _group("comp@offload > flat.allgather > dec@offload", Cluster(2, 1))
    assert ["offload pool" in step.words for step in group.steps] == [True, False, True]
    assert json.loads(json.dumps(group.to_json()))["steps"][0]["site"] == "local"


# -- tables ------------------------------------------------------------------------------------------


def test_compressors_of_a_strategy_are_checked_by_name() -> None:
    check_choices(_strategy(HIERARCHICAL))
    wrong = Choice(parse_option(HIERARCHICAL), CompressorSpec.parse("topk:ration=0.01"))
    with pytest.raises(StrategyError, match=r"'in.weight'.*'ration'"):
        check_choices(_strategy(HIERARCHICAL).with_choices({"in.weight": wrong}))


def test_link_rows_recover_the_link_that_was_measured() -> None:
    # 1 Gb/s is 8 us per 1000 bytes; an allgather over two nodes puts half of the array on each link.
    points = tuple((size, 50 + 8.0 * size / 1000 / 2) for size in (1e4, 1e5, 1e6))
    row = link_rows([LinkCurve(Routine.ALLGATHER, Scope.INTER, Form.RAW, points)], CLUSTER)[0]
    assert row["gbit_per_s"] == pytest.approx(1.0, rel=1e-6)
    assert row["alpha_us"] == pytest.approx(50.0, rel=1e-6)


def test_figures_for_people() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 4194304, 3e9)] == [
        "0 B",
        "999 B",
        "1 kB",
        "4.19 MB",
        "3 GB",
    ]
    assert [human_us(us) for us in (12.3, 1234, 81234, 245034, 3.9e6)] == [
        "12 us",
        "1.23 ms",
        "81.2 ms",
        "245.0 ms",
        "3.90 s",
    ]
    assert short_names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert short_names(["a"]) == "a"
