"""The arithmetic of the benchmarks that measure the project's bars; the measuring itself is not tested here."""

import json
import math
from collections import Counter
from dataclasses import astuple, replace
from itertools import pairwise

import pytest
import torch

from benchmarks import diagnose, far, growth, overhead, prediction, results, server_speed, speed, weather
from benchmarks.prediction import Row
from benchmarks.train import alternate
from espresso.live.profiler import rising


def test_a_perfect_prediction_scores_perfectly():
    rows = [Row("a", 10.0, 10.0), Row("b", 20.0, 20.0), Row("c", 30.0, 30.0)]
    total = prediction.score(rows)
    assert total == prediction.Score(0.0, 1.0, 3, ())
    assert total.passes


def test_a_clear_pair_in_the_wrong_order_fails_even_with_small_errors():
    total = prediction.score([Row("a", 10.6, 10.0), Row("b", 10.5, 10.6), Row("c", 30.0, 30.0)])
    assert total.wrong_pairs == (("a", "b"),)
    assert total.median_error < prediction.MAX_MEDIAN_ERROR
    assert not total.passes
    assert total.kendall_tau == pytest.approx(1 / 3)


def test_a_close_pair_may_be_in_either_order():
    total = prediction.score([Row("a", 10.5, 10.0), Row("b", 10.0, 10.4), Row("c", 30.0, 30.0)])
    assert (total.wrong_pairs, total.num_clear_pairs, total.passes) == ((), 2, True)


def test_large_errors_in_the_right_order_fail():
    total = prediction.score([Row("a", 5.0, 10.0), Row("b", 10.0, 20.0)])
    assert (total.median_error, total.wrong_pairs, total.passes) == (0.5, (), False)


ARMS = [
    {
        "name": name,
        "step_ms": 100.0 * compute,
        "mb_per_step_per_host": 1.0,
        "time_over_none": {"value": compute, "low": 0.98 * compute, "high": 1.02 * compute},
        "time_over_plain": {"value": plain, "low": 0.98 * plain, "high": 1.02 * plain},
        "num_steps_to_decide": 0,
        "verdict": "",
    }
    for name, compute, plain in (("none", 1.0, 0.2), ("plain", 5.0, 1.0), ("espresso:efsignsgd", 1.25, 0.25))
]


@pytest.mark.parametrize(("of_compute", "of_plain", "passes"), [(0.75, None, True), (0.85, None, False),
                                                                 (None, 3.9, True), (0.75, 4.1, False),
                                                                 (None, None, None)])  # fmt: skip
def test_only_automatic_arms_are_judged_against_their_bars(of_compute, of_plain, passes):
    case = speed.Case("x", "mlp", 1, "1gbit", of_compute, of_plain, 2, 2)
    none, plain, ours = speed.rows_of(case, ARMS)
    assert (none.passes, plain.passes, ours.passes) == (None, None, passes)
    assert (none.bar, plain.bar) == ("", "")
    assert ours.of_compute.value == pytest.approx(0.8)
    assert ours.of_compute.low < 0.8 < ours.of_compute.high
    assert ours.of_plain.value == pytest.approx(4.0)


def test_the_rate_of_an_open_interval_is_open():
    assert speed.Rate.from_times({"value": 2.0, "low": 0.0, "high": math.inf}) == speed.Rate(0.5, 0.0, math.inf)


def test_a_predicted_gain_is_right_within_a_part_of_it_or_of_a_step():
    row = diagnose.Row("slow input", "slow_input on rank 1", "slow_input on rank 1", True, step_ms=200.0, gain_ms=40.0)
    assert [replace(row, predicted_ms=ms).gain_is_right for ms in (33.0, 35.0, 46.0, 47.0)] == [
        False,
        True,
        True,
        False,
    ]
    assert {case.mended().kinds for case in diagnose.CASES} == {()}
    assert [case.rank for case in diagnose.CASES if case.name in ("thin card", "added latency")] == [1, None]


def test_overhead_is_judged_by_the_end_of_its_interval():
    case = overhead.Case("mlp", 1.0, 1, 4, 3, True)
    plain, none = [0.1, 0.1, 0.1, 0.1], {"plain": [], "espresso": []}
    near = overhead.summarize(case, 7, {"plain": plain, "espresso": [0.101, 0.102, 0.101, 0.102]}, none)
    wide = overhead.summarize(case, 7, {"plain": plain, "espresso": [0.09, 0.11, 0.09, 0.11]}, none)
    assert [row.judged for row in near] == [False, True]
    assert near[1].passes
    assert wide[1].ratio.value < 1.03
    assert not wide[1].passes


def test_steps_that_the_recorder_looks_at_count_by_their_number():
    case = overhead.Case("gpt", 1.0, 1, 16, 1, True)
    times = {"off": [0.1] * 15, "on": [0.1] * 15}
    assert overhead.summarize(case, 7, times, {"off": [0.1], "on": [0.132]})[1].ratio.value == pytest.approx(1.02)
    both = overhead.summarize(case, 7, times, {"off": [0.1] * 5, "on": [0.14] * 5})[1].ratio
    assert astuple(both) == pytest.approx((1.1, 1.1, 1.1))


def test_a_result_says_where_and_how_it_was_made(tmp_path):
    path = tmp_path / "deep" / "result.json"
    results.write(path, results.record({"steps": 3}, 7, [{"a": 1.5}]))
    read = json.loads(path.read_text())
    assert {"cpu", "cores", "memory_gib", "kernel"} <= read["hardware"].keys()
    assert {"python", "torch", "numpy", "numba", "commit"} <= read["versions"].keys()
    assert (read["config"], read["seed"], read["rows"]) == ({"steps": 3}, 7, [{"a": 1.5}])
    assert len(read["date"]) == len("2026-01-01")


def test_measured_curves_never_fall():
    points = [(1.0, 9.0), (2.0, 4.0), (3.0, 5.0), (4.0, 5.0), (5.0, 20.0)]
    assert rising(points) == ((1.0, 4.0), (2.0, 4.0), (3.0, 5.0), (4.0, 5.0), (5.0, 20.0))


def test_the_most_that_goes_into_probing_is_that_of_the_worst_thousand_steps():
    step_s = [0.01] * 2061
    probed_s = [0.0] * 500 + [0.1] * 700 + [0.4] * 861
    assert weather.most_probed(step_s, probed_s) == pytest.approx(0.04)
    assert weather.most_probed(step_s[:561], probed_s) == pytest.approx(0.02)
    assert weather.most_probed(step_s[:30], probed_s) == 0


def test_weather_reads_its_schedule_and_judges_phases_and_windows():
    first, second = weather.parse_schedule("10gbit/100 50mbit/100,load=1,batch=4,rtt=20")
    assert first == weather.Phase("10gbit", 100)
    assert second == weather.Phase("50mbit", 100, load=1, batch=4, rtt_ms=20.0)
    for wrong in ("50mbit", "50mbit/x", "50mbit/5,wind=3"):
        with pytest.raises(ValueError, match="a phase is"):
            weather.parse_schedule(wrong)
    for widths, schedule in weather.CHANGES.values():
        assert len(weather.parse_schedule(schedule)) >= 2
        assert widths.startswith("64,")
    # Forty steps to find out, then 5 % above a fresh decision; plain is ten times slower there.
    step_s = {
        "adapt": [0.010] * 100 + [0.1] * 40 + [0.021] * 60,
        "fresh": [0.010] * 100 + [0.020] * 100,
        "plain": [0.008] * 100 + [0.2] * 100,  # the best of the first phase
    }
    phases = first, second
    found = weather.verdicts(phases, step_s, [1.02, 1.05])
    assert found["of_fresh"] == 1.05
    assert found["of_known"] == pytest.approx((0.4 + 4.0 + 1.26) / (0.32 + 2.0))
    assert found["of_plain"] < 1
    assert "again_of_plain" not in found
    again = weather.verdicts(phases, {"plain": [0.010] * 400, "again": [0.010] * 200 + [0.012] * 200}, [])
    assert again == {"again_of_plain": pytest.approx(1.2)}
    assert weather.sums_of(step_s["fresh"]) == pytest.approx([0.2] * 5 + [0.4] * 5)
    events = [{"event": "switched", "step": 140}, {"event": "changed", "step": 120}]
    picture = weather.draw(phases, step_s, events)
    assert picture.count("<polyline") == 3
    assert "50mbit + load x4" in picture
    assert picture.count(">switched<") == 1


def test_rank_correlations_and_what_a_dossier_says_of_its_runs():
    from benchmarks import dossier, error_measures

    assert error_measures.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert error_measures.spearman([1, 2, 3, 4], [4, 4, 1, 1]) == pytest.approx(-0.894, abs=1e-3)
    control_arm = f"ours{dossier.OFF}"
    curves = {"plain": (1.0, 0.5, 0.2), "ours": (1.0, 0.4, 0.1), control_arm: (1.0, 0.9, 0.8)}
    metrics = {"plain": 0.9, "ours": 0.91, control_arm: 0.5}
    runs = [
        dossier.Run("mlp-sgd", arm, seed, tuple((10 * i, float(i), loss) for i, loss in enumerate(curve, 1)),
                    metrics[arm] + 0.01 * seed, False, "")
        for arm, curve in curves.items() for seed in (0, 1)
    ]  # fmt: skip
    assert all(dossier.task_of(case, 0).make_models() for case in dossier.CASES)
    assert len(dossier.task_of("gan", 0).make_models()) == 2, "a task of the suite as it is"
    plain, ours, control = dossier.judge(runs)
    assert (plain.inside, ours.inside, control.inside) == (True, True, False)
    assert (ours.steps_to_target, ours.seconds_to_target, control.steps_to_target) == (30, 3.0, None)
    assert plain.metric_95 == pytest.approx(12.7062047 * 0.01 / 2)
    assert ours.step_ms == pytest.approx(100.0)


@pytest.mark.parametrize("arms", range(1, 9))
def test_no_arm_follows_another_one_more_often_than_the_others_do(arms):
    """What plain DDP leaves in a slow network's queues, and in caches, is paid for by whoever has the next block."""
    num_rounds = arms * (1 + arms % 2)
    blocks = list(alternate([str(arm) for arm in range(arms)], num_rounds))
    rounds = [blocks[place : place + arms] for place in range(0, len(blocks), arms)]
    assert all(len(set(row)) == arms for row in rounds)
    pairs = Counter(pair for row in rounds for pair in pairwise(row))
    assert len(pairs) == arms * (arms - 1)
    assert set(pairs.values()) <= {1 + arms % 2}


def test_where_packets_are_lost_nothing_else_may_be():
    row = far.Row("pair", 300, 120.0, 900.0, 0.0, True)
    assert row.passes
    assert not replace(row, equal=False).passes
    assert not replace(row, off=1e-9).passes, "what moves numbers unchanged loses nothing"
    assert replace(row, arm="signs", off=1e-7).passes
    assert not replace(row, arm="signs", off=1e-3).passes


def test_all_who_live_name_who_was_killed(tmp_path):
    (tmp_path / "killed").write_text("100.0")
    (tmp_path / "heard0").write_text(json.dumps({"at": 101.5, "text": "That is rank 2: it died"}))
    assert not far.death_of(tmp_path, 3).named, "rank 1 is silent"
    (tmp_path / "heard1").write_text(json.dumps({"at": 103.0, "text": "Rank 2 does not answer"}))
    death = far.death_of(tmp_path, 3)
    assert (death.seconds, death.passes) == (3.0, True)
    assert not replace(death, seconds=far.WITHIN_S + 1).passes
    (tmp_path / "heard1").write_text(json.dumps({"at": 103.0, "text": "Rank 0 does not answer"}))
    assert not far.death_of(tmp_path, 3).passes


def test_traffic_and_rounds_by_the_models_formulas():
    once, twice, between = (
        (growth.FLAT | growth.HIERARCHICAL)["signs, all-gather"],
        *(
            (growth.FLAT | growth.HIERARCHICAL)[name]
            for name in ("signs, all-to-all, all-gather", "signs, between hosts: all-gather")
        ),
    )
    payload, rounds = growth.formula(*once, 2, 1, growth.MANY)
    assert rounds == 1
    assert growth.formula(*once, 8, 1, growth.MANY) == (pytest.approx(7 * payload), 1)
    assert growth.formula(*twice, 8, 1, growth.MANY) == (pytest.approx(2 * 7 / 8 * payload, rel=0.01), 2)
    assert growth.formula(*between, 4, 2, growth.MANY) == (pytest.approx(3 * payload, rel=0.01), 1)
    assert growth.formula("flat.allreduce", "none", 4, 1, growth.MANY)[0] == pytest.approx(1.5 * 4 * growth.MANY)
    through = growth.SERVERS["through a server"]  # its card receives every worker's and sends every worker its own
    assert growth.formula(*through, 4, 1, growth.MANY, servers=1) == (pytest.approx(2 * 4 * 4 * growth.MANY), 2)


@pytest.mark.parametrize(("both_ms", "passes"), [(102.0, True), (104.0, False)])
def test_both_kinds_of_servers_are_judged_by_the_better_kind_alone(both_ms, passes):
    def row(case, arm, step_ms):
        return {"case": case, "arm": arm, "block_step_ms": [step_ms, 2 * step_ms], "passes": None}

    arm = server_speed.RAW
    rows = [row("own", arm, 300.0), row("beside", arm, 100.0), row("both", "plain", 500.0), row("both", arm, both_ms),
            row("both-slow-rule", arm, 500.0), row("beside-mlp", arm, 1.0)]  # fmt: skip
    rows[1]["block_step_ms"].append(700.0)  # its next turn is over
    server_speed.judge_both(rows[1:])
    assert [r["passes"] for r in rows] == [None] * 6, "one kind alone was not measured"
    server_speed.judge_both(rows)
    assert [r["passes"] for r in rows] == [None, None, None, passes, None, None]
    ratios = [r["time_over_better_kind"]["value"] for r in rows if "time_over_better_kind" in r]
    assert ratios == [pytest.approx(both_ms / 100.0), pytest.approx(5.0)]


def test_turns_of_a_case_count_as_blocks_of_one():
    turns = [[{"step_ms": ms, "block_step_ms": [ms, ms + 1], "replicas_equal": same, "verdict": ""}]
             for ms, same in ((10.0, True), (20.0, False), (40.0, True))]  # fmt: skip
    (row,) = server_speed.joined(turns)
    assert row["block_step_ms"] == [10.0, 11.0, 20.0, 21.0, 40.0, 41.0]
    assert (row["step_ms"], row["replicas_equal"]) == (20.0, False)


def test_a_held_out_task_leaves_a_rank_s_gradients_and_moves_no_weight():
    from benchmarks.feedback_gain import opened

    model, _, backward, _ = opened("waves", 0)
    before, seen = [p.detach().clone() for p in model.parameters()], []
    for rank in range(2):
        backward(0, rank)
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert all(torch.equal(one, p) for one, p in zip(before, model.parameters(), strict=True))
    assert seen[0].norm() > 0
    assert not torch.allclose(seen[0], seen[1])
