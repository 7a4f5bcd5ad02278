"""The papers' figures: every named cause moves its rows as claimed, and what is committed says what it should."""

import json
import math

import pytest

from benchmarks.paper.__main__ import PATH
from benchmarks.paper.causes import AS_IS, Cause, Setting
from benchmarks.paper.figures import AND, FIGURES, explained, fewer_bytes, near
from benchmarks.paper.published import (
    BYTEPS_COMPRESS,
    BYTEPS_COMPRESS_RATE,
    CASES,
    ESPRESSO,
    FP32,
    HIPRESS,
    NVLINK,
    PCIE,
    Case,
    speed_ups,
)
from benchmarks.paper.systems import OURS, PROVEN, UPPER, byteps_compress_us, job_of, times
from benchmarks.paper.tables import PAGE, fidelity_tables

VGG, LSTM = CASES[3], CASES[4]


def only(cause: Cause, case: Case = LSTM):
    return times(case, Setting(frozenset({cause})))


def byteps_compress(case: Case, *causes: Cause) -> float:
    """Its time, without a search."""
    setting = Setting(frozenset(causes))
    return byteps_compress_us(setting.apply(job_of(case.model, case.cluster), case.compressor), case.spec, setting)


def test_a_forward_pass_moves_every_ratio_to_one():
    as_is, later = times(LSTM), only(Cause.FORWARD)
    for system in (FP32, BYTEPS_COMPRESS, HIPRESS):
        before, after = as_is.over(ESPRESSO, system), later.over(ESPRESSO, system)
        assert 1 <= after < before


def test_latency_that_holds_no_link_makes_fp32_faster():
    assert only(Cause.IN_FLIGHT).of[FP32] < times(LSTM).of[FP32]


def test_fp32_as_byteps_changes_fp32_and_nothing_else():
    as_is, switched = times(LSTM), only(Cause.FP32_IS_BYTEPS)
    assert switched.of[FP32] != pytest.approx(as_is.of[FP32], rel=0.02)
    assert {k: v for k, v in switched.of.items() if k != FP32} == pytest.approx(
        {k: v for k, v in as_is.of.items() if k != FP32}
    )


def test_the_published_algorithms_make_espresso_slower():
    assert only(Cause.ALGORITHMS).over(ESPRESSO, FP32) < times(LSTM).over(ESPRESSO, FP32)


def test_one_encode_thread_of_many_cores_makes_byteps_compress_faster_but_not_with_randomk():
    assert byteps_compress(LSTM) == pytest.approx(times(LSTM).of[BYTEPS_COMPRESS])
    assert byteps_compress(LSTM, Cause.ONE_THREAD) < 0.9 * byteps_compress(LSTM)
    job = job_of(VGG.model, VGG.cluster)
    assert Setting(frozenset({Cause.ONE_THREAD})).apply(job, VGG.compressor) is job


def test_the_host_speed_set_by_hand_is_slow_for_vgg16_and_fast_for_bert():
    assert byteps_compress(VGG, Cause.HOST_SPEED) > byteps_compress(VGG)
    assert byteps_compress(CASES[0], Cause.HOST_SPEED) < byteps_compress(CASES[0])


def test_thresholds_leave_tensors_raw():
    assert byteps_compress(VGG, Cause.SCRIPT_THRESHOLD) != byteps_compress(VGG)
    assert only(Cause.SCHEDULER_THRESHOLD, VGG).of[ESPRESSO] >= times(VGG).of[ESPRESSO]


def test_hipress_as_the_artifact_has_it_is_nearer_to_fp32():
    as_is, switched = times(LSTM), only(Cause.ARTIFACT_BASELINES)
    assert 1 <= switched.over(HIPRESS, FP32) < as_is.over(HIPRESS, FP32)


def test_on_the_artifacts_links_compression_gains_more():
    assert only(Cause.ARTIFACT_LINKS).over(ESPRESSO, FP32) > times(LSTM).over(ESPRESSO, FP32)


def test_links_at_their_nominal_rate_bring_fp32_nearer_to_computing_alone():
    assert times(LSTM).of[FP32] > only(Cause.NOMINAL).of[FP32] > 0.8 * times(LSTM).of[FP32]
    assert only(Cause.NOMINAL).over(ESPRESSO, FP32) < times(LSTM).over(ESPRESSO, FP32)


def test_no_system_is_above_the_upper_bound():
    for case in (LSTM, VGG):
        found = times(case, AS_IS)
        assert all(found.of[UPPER] <= us for us in found.of.values())
        assert found.of[OURS] <= min(us for system, us in found.of.items() if system not in (UPPER, PROVEN))


def test_a_cause_is_named_only_where_it_closes_a_quarter_of_the_way():
    moves = {frozenset(): 1.0, frozenset({Cause.FORWARD}): 1.1, frozenset({Cause.ONE_THREAD}): 1.9}
    causes = (Cause.FORWARD, Cause.ONE_THREAD)
    row = explained("f", "r", 2.0, lambda setting: moves[setting.causes], causes)
    assert (row.cause, row.with_cause, row.verdict) == ("one encode thread", 1.9, "explained: one encode thread")
    row = explained("f", "r", 2.0, lambda setting: moves[setting.causes], causes[:1])
    assert (row.cause, row.with_cause, row.verdict) == ("", None, "no cause found")
    moves |= {
        frozenset(causes): 3.9,
        frozenset({Cause.ONE_THREAD, Cause.NOMINAL}): 1.8,
        frozenset({Cause.NOMINAL}): 1.0,
    }
    row = explained("f", "r", 4.0, lambda setting: moves[setting.causes], (*causes, Cause.NOMINAL))
    assert (row.cause, row.with_cause) == ("one encode thread + a step has a forward pass", 3.9)
    row = explained("f", "r", 4.0, lambda setting: moves[setting.causes], (Cause.ONE_THREAD, Cause.NOMINAL))
    assert (row.cause, row.with_cause) == ("one encode thread", 1.9), "the second brings it no nearer"
    row = explained("f", "r", 1.8, lambda setting: moves[setting.causes], (Cause.NOMINAL, Cause.ONE_THREAD))
    assert (row.cause, row.with_cause) == ("one encode thread", 1.9)
    moves[frozenset({Cause.ONE_THREAD})] = 1.0
    row = explained("f", "r", 1.8, lambda setting: moves[setting.causes], (Cause.NOMINAL, Cause.ONE_THREAD))
    assert (row.cause, row.with_cause) == ("links at their nominal rate + one encode thread", 1.8)
    moves[frozenset({Cause.ONE_THREAD})] = 1.9
    row = explained("f", "r", 1.1, lambda setting: moves[setting.causes], causes)
    assert (row.cause, row.verdict) == ("", "within 25 %")
    assert row.switched == {"a step has a forward pass": 1.1, "one encode thread": 1.9}


def test_top_k_of_a_thousandth_takes_333_times_fewer_bytes_than_fp16():
    # (Six bytes a number in both; ours has four more for every 65536 elements.)
    assert fewer_bytes() == pytest.approx(BYTEPS_COMPRESS_RATE, rel=0.011)
    assert 1 / (1 / fewer_bytes() - 4 / 65536 / 2) == pytest.approx(1000 / 3, rel=1e-4)


# What is committed.


@pytest.fixture(scope="module")
def rows():
    return json.loads(PATH.read_text())["rows"]


def test_every_published_figure_has_its_rows(rows):
    assert {row["section"] for row in rows} == set(FIGURES)
    assert all({"figure", "row", "published", "ours", "ratio", "cause", "verdict"} <= set(row) for row in rows)
    ratios = [row for row in rows if row["section"] == "figures-12-13" and row["published"] is not None]
    assert [row["published"] for row in ratios] == [entry.published for entry in speed_ups()]
    explained_as = [row["with_cause"] or row["ours"] for row in ratios]
    assert all(near(ours / row["published"]) for ours, row in zip(explained_as, ratios, strict=True))
    series = [row for row in rows if row["figure"] == "figures 12, 13, series"]
    assert len(series) == len(CASES) * 2 * 4 * 6


def test_the_committed_rows_are_what_the_code_says(rows):
    for entry in speed_ups():
        if entry.case is LSTM:
            row = next(row for row in rows if row["row"] == f"lstm, {entry.system} over {entry.over}")
            assert row["ours"] == pytest.approx(times(LSTM).over(entry.system, entry.over), rel=0.02)


def test_a_named_cause_moves_its_row_toward_what_was_published(rows):
    for row in rows:
        if row["published"] is None or not row["ratio"]:
            continue
        if row["cause"]:
            assert not near(row["ratio"])
            assert AND in row["cause"] or row["switched"][row["cause"]] == row["with_cause"]
            before, after = math.log(row["ratio"]), math.log(row["with_cause"] / row["published"])
            assert abs(after) <= 0.75 * abs(before)


def test_all_jobs_on_nvlink_are_within_a_tenth_of_the_upper_bound_and_most_on_pcie(rows):
    far = {
        cluster: [
            row["ours"] for row in rows if row["figure"] == "figure 14" and row["row"].endswith(f"{cluster}, {OURS}")
        ]
        for cluster in (NVLINK, PCIE)
    }
    assert [len(values) for values in far.values()] == [18, 18]
    assert max(far[NVLINK]) <= 0.10
    assert sum(value <= 0.10 for value in far[PCIE]) >= 12


def test_the_page_shows_the_committed_rows(rows):
    page = PAGE.read_text()
    for name, table in fidelity_tables(rows).items():
        assert table in page, f"docs/fidelity.md: table {name} is not that of {PATH.name}; python -m benchmarks.paper"
