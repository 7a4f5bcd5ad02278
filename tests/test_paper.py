"""The papers' figures: every named cause moves its rows as claimed, and what is committed says what it should."""

import json
import math

import pytest

from benchmarks.clan_slopes import Run, rows_of
from benchmarks.paper.__main__ import PATH
from benchmarks.paper.causes import AS_IS, Cause, Setting
from benchmarks.paper.figures import FIGURES, fewer_bytes, small_models
from benchmarks.paper.published import (
    BYTEPS_COMPRESS,
    BYTEPS_COMPRESS_RATE,
    CASES,
    ESPRESSO,
    FP32,
    HIPRESS,
    HITOPKCOMM,
    NVLINK,
    PCIE,
    Case,
    speed_ups,
)
from benchmarks.paper.rows import AND, explained, missed, near
from benchmarks.paper.systems import OURS, PROVEN, UPPER, byteps_compress_us, job_of, times
from benchmarks.paper.tables import PAGE, fidelity_tables
from benchmarks.search_evidence import sub_jobs
from espresso.search.ablation import EVERYTHING, ablate
from espresso.search.search import search
from espresso.strategies import CompressorSpec

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
        assert all(found.us(UPPER) <= us for us in found.of.values())
        assert found.of[OURS] <= min(us for system, us in found.of.items() if system != PROVEN)


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
    assert row.verdict == "moved by one encode thread, still outside"
    assert missed(row.to_json())
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
            assert abs(after) <= 0.75 * abs(before) or (
                AND in row["cause"] and near(row["with_cause"] / row["published"])
            )


SCALING = ""
ANY = (FP32, BYTEPS_COMPRESS, HITOPKCOMM, HIPRESS, ESPRESSO, SCALING)
UP, DOWN, LITTLE = (0.995, math.inf), (0.0, 1.005), (0.97, 1.03)
"""Ours switched over ours as it is; half a percent for searches that end elsewhere."""
FEW_TENSORS = {"lstm"}

CLAIMED = {
    Cause.IN_FLIGHT: [
        (FP32, SCALING, lambda model, cluster: UP),
        (ANY, FP32, lambda model, cluster: (0.0, 1.03) if model in FEW_TENSORS else DOWN),
    ],
    Cause.FP32_IS_BYTEPS: [(FP32, SCALING, lambda model, cluster: DOWN), (ANY, FP32, lambda model, cluster: UP)],
    Cause.ALGORITHMS: [(ESPRESSO, ANY, lambda model, cluster: DOWN)],
    Cause.ONE_THREAD: [
        (BYTEPS_COMPRESS, (SCALING, FP32), lambda model, cluster: UP),
        (ESPRESSO, BYTEPS_COMPRESS, lambda model, cluster: (1.01, 1.03) if model == "resnet101" else DOWN),
        (ESPRESSO, (FP32, HITOPKCOMM, HIPRESS), lambda model, cluster: UP),
    ],
    Cause.HOST_SPEED: [
        (BYTEPS_COMPRESS, (SCALING, FP32), lambda model, cluster: {"bert_base": UP, "vgg16": DOWN}.get(model)),
        (ESPRESSO, BYTEPS_COMPRESS, lambda model, cluster: {"bert_base": DOWN, "vgg16": UP}.get(model)),
    ],
    Cause.SCRIPT_THRESHOLD: [(ANY, ANY, lambda model, cluster: LITTLE)],
    Cause.SCHEDULER_THRESHOLD: [(ESPRESSO, ANY, lambda model, cluster: DOWN)],
    Cause.ARTIFACT_BASELINES: [
        (HITOPKCOMM, (SCALING, FP32), lambda model, cluster: UP),
        (ESPRESSO, HITOPKCOMM, lambda model, cluster: DOWN),
        (ESPRESSO, HIPRESS, lambda model, cluster: DOWN if model == "gpt2" else UP),
        (HIPRESS, FP32, lambda model, cluster: DOWN),  # (All are above 1 as they are: nearer to it.)
    ],
    Cause.ARTIFACT_LINKS: [
        (FP32, SCALING, lambda model, cluster: (1.0, 1.03) if model == "resnet101" else DOWN),
        (ANY, FP32, lambda model, cluster: UP if cluster == NVLINK else None),
        (ESPRESSO, FP32, lambda model, cluster: UP),
    ],
    Cause.NOMINAL: [(ANY, SCALING, lambda model, cluster: UP), (ANY, FP32, lambda model, cluster: DOWN)],
}
"""Of each cause what it claims: which system, over which, and by what factor the ratio moves (None: not claimed)."""

SYSTEMS = {"FP32": FP32, "compressed on the GPU": HITOPKCOMM, "compressed on the host": BYTEPS_COMPRESS}
GAINS = {"GPU over FP32": (HITOPKCOMM, FP32), "host over FP32": (BYTEPS_COMPRESS, FP32)}


def kind(row) -> tuple[str, str]:
    """Which system a row is of, and over which ("": its scaling factor)."""
    what = row["row"].split(", ", 1)[1]
    if row["figure"] == "figure 16":
        return ESPRESSO, FP32
    if row["figure"] == "BytePS-Compress":
        return BYTEPS_COMPRESS, FP32
    if what in SYSTEMS:
        return SYSTEMS[what], SCALING
    return GAINS.get(what) or tuple(what.split(" over "))


def cluster_of(row) -> str:
    on_pcie = row["row"].startswith(("lstm", "vgg16", "resnet101")) and row["figure"] not in (
        "figure 16",
        "BytePS-Compress",
    )
    return PCIE if on_pcie else NVLINK


@pytest.mark.parametrize("cause", Cause, ids=lambda cause: cause.name.lower())
def test_a_cause_moves_every_committed_row_as_it_claims(rows, cause):
    found = 0
    for row in rows:
        if not row["switched"] or cause.value not in row["switched"]:
            continue
        before, after = row["ours"], row["switched"][cause.value]
        system, over = kind(row)
        if cause is Cause.FORWARD:
            found += 1
            assert min(1, before) - 0.005 <= after <= max(1, before) + 0.005, row["row"]
            continue
        for mine, others, claimed in CLAIMED[cause]:
            bounds = claimed(row["row"].split(", ")[0], cluster_of(row))
            if system in _some(mine) and over in _some(others) and bounds is not None:
                found += 1
                assert bounds[0] <= after / before <= bounds[1], (row["figure"], row["row"], after / before)
    assert found >= 4


def _some(systems) -> tuple[str, ...]:
    return (systems,) if isinstance(systems, str) else systems


def test_one_setting_for_all_is_stated_for_each_cluster(rows):
    for cluster in (NVLINK, PCIE):
        found = [row for row in rows if row["section"] == "one-setting" and row["row"].startswith(cluster)]
        assert len(found) == 4
        assert found[1]["ours"] <= found[2]["ours"] <= found[3]["ours"]


def test_the_page_names_the_rows_that_stay_outside(rows):
    page = " ".join(PAGE.read_text().split())
    outside = [row for row in rows if missed(row)]
    assert not [row for row in outside if row["section"] == "figures-12-13"]
    for row in outside:
        assert f"`{row['row']}`" in page, row["row"]


def test_no_crippled_dimension_is_better_than_the_whole_space(rows):
    found = {row["row"]: row["ours"] for row in rows if row["figure"] == "figure 15"}
    for name, value in found.items():
        compressor, cluster, _ = name.split(", ", 2)
        assert value <= found[f"{compressor}, {cluster}, all four dimensions"] * (1 + 1e-9), name


def test_a_search_of_the_whole_space_ends_below_those_of_its_parts():
    # (On its own it ends .1 % above the search of all tensors compressed.)
    job = next(sub_jobs(job_of("ugatit", NVLINK)))
    rows = ablate(job, [CompressorSpec.parse("dgc:ratio=0.01")])
    assert rows[0].name == EVERYTHING
    assert rows[0].predicted_us <= min(row.predicted_us for row in rows)
    assert rows[0].lower_bound_us <= rows[0].predicted_us


def test_the_upper_bound_is_looked_for_at_every_partition_size():
    assert times(LSTM).us(UPPER) < search(job_of(LSTM.model, LSTM.cluster), LSTM.spec).upper_bound_us


def test_the_counterpart_of_figure_16_is_read_where_it_was_run(tmp_path):
    assert list(small_models(tmp_path)) == []
    arms = [
        {"case": "mlp", "arm": "plain", "metric": 0.9, "seconds_to_target": 8.0},
        {"case": "mlp", "arm": "ours", "metric": 0.91, "seconds_to_target": 4.0},
        {"case": "mlp", "arm": "none", "metric": 0.8, "seconds_to_target": None},
    ]
    (tmp_path / "dossier.json").write_text(json.dumps({"rows": arms}))
    found = {row.row: row.ours for row in small_models(tmp_path)}
    assert found == pytest.approx(
        {"mlp, ours, dossier, metric": 0.01, "mlp, ours, dossier, seconds to the target": 0.5,
         "mlp, none, dossier, metric": -0.1}
    )  # fmt: skip


def test_a_line_of_clan_that_rises_does_not_pass_beside_one_of_lans_that_does():
    def runs(compressor, *means):
        return [Run("mlp", compressor, 0.05, steps, mean) for steps, mean in zip((50, 100, 200), means, strict=True)]

    rising = rows_of([*runs("", 1.0, 1.1, 1.2), *runs("topk", 1.0, 1.1, 1.2)])
    assert [row.passes for row in rising] == [False, False]
    falling = rows_of([*runs("", 1.0, 0.9, 0.8), *runs("topk", 1.0, 0.9, 0.8), *runs("int8", 1.0, 1.0, 0.99)])
    assert [row.passes for row in falling] == [True, True, False]


def test_all_jobs_on_nvlink_are_within_a_tenth_of_the_upper_bound_and_most_on_pcie(rows):
    far = {
        cluster: [
            row["ours"] for row in rows if row["figure"] == "figure 14" and row["row"].endswith(f"{cluster}, {OURS}")
        ]
        for cluster in (NVLINK, PCIE)
    }
    assert [len(values) for values in far.values()] == [18, 18]
    assert max(far[NVLINK]) <= 0.10
    assert sum(value <= 0.10 for value in far[PCIE]) == 14
    assert "14 of 18" in PAGE.read_text()


def test_the_page_shows_the_committed_rows(rows):
    page = PAGE.read_text()
    for name, table in fidelity_tables(rows).items():
        assert table in page, f"docs/fidelity.md: table {name} is not that of {PATH.name}; python -m benchmarks.paper"
