"""Deciding again: a network, or a load, changes under a job that has decided.

The loop itself runs in a made-up world, whose steps take what the test says; the same loop on real ranks at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from espresso.comm import collectives
from espresso.live import remeasure
from espresso.live.candidates import Candidate, Moved
from espresso.live.change import Cause, Change, Finding
from espresso.live.fixed_planner import Exact, FixedPlanner
from espresso.live.history import History
from espresso.live.online_search import OnlineSearch
from espresso.live.profiler import Place
from espresso.live.remeasure import Remeasured, with_probes
from espresso.live.turns import TRY_MOST, TRY_ROUNDS, TRY_STEPS, alike
from espresso.model.costs import Contention
from espresso.model.links import LinkCurve, Links
from espresso.model.payload_sizes import compressed
from espresso.model.presets import job_from_trace
from espresso.show.trace_events import write_history
from espresso.strategies import PLAIN, Cluster, CompressorSpec, Form, Routine, Scope
from tests.ddp import Played, agreed, batch, mlp, registered, wrap
from tests.world import IN_ONE, SIGNS, SIGNS_ONCE_MORE, TWO, OneRank, Rows, World, planner_of, rows_of, run

WITHIN = 40
MOST = 100
"""Steps in which real ranks, on a machine that may be busy, have found and raced something better."""


@pytest.mark.parametrize("decide_by", [0, 20, 58])
@pytest.mark.parametrize(
    ("before_us", "after_us", "first", "then"),
    [(1_000, 400_000, "plain", "signs"), (60_000, 500, "signs", "plain"), (20_000, 200_000, "signs", "signs")],
    ids=["a fast network slows down", "a slow one gets fast", "the right one stays"],
)
def test_a_change_of_the_network_is_decided_anew_within_forty_steps(before_us, after_us, first, then, decide_by):
    world = World(plain_us=before_us)
    planner = planner_of(world, decide_by=decide_by)

    def change() -> None:
        world.plain_us = after_us

    run(world, planner, range(200), {63: change})
    rows = rows_of(planner)
    assert rows[0][1:] == ("decided", first)
    assert [event for _, event, _ in rows] == ["decided", "changed", "kept" if first == then else "switched"]
    assert 63 < rows[1][0] <= rows[2][0] <= 63 + WITHIN
    assert planner.verdict.name == then
    assert [finding.cause for finding in world.changes[0].findings] == [Cause.LINK]
    assert world.searches == 2
    assert world.put_away == (first == "signs") + (first != then), "once for each that won a race"


@pytest.mark.parametrize("decide_by", [0, 58])
def test_two_jobs_of_one_process_race_one_after_the_other(decide_by):
    """In one loop: a step of either has the other's exchange in it, and its arms would change in the same steps."""
    worlds = World(plain_us=60_000), World(plain_us=60_000)
    planners = [planner_of(world, decide_by=decide_by) for world in worlds]
    for mine, other in (planners, planners[::-1]):
        mine._others_race = lambda other=other: other.to_race
    moments, racing = [0, 0], [[], []]
    for step in range(150):
        for number, planner in enumerate(planners):
            moments[number] = run(worlds[number], planner, range(step, step + 1), {}, moments[number])
            if planner.to_race and not planner._pause:
                racing[number].append(step)
    assert [planner.verdict.name for planner in planners] == ["signs", "signs"]
    assert max(racing[0]) < min(racing[1])


def test_what_compresses_late_is_profiled_by_the_jobs_own_steps():
    """Its first step here may be a late one of the training: nothing is waited for twice."""
    for first, profiled in ((0, 98), (60, 98), (5_000, 5_003)):
        planner, told = planner_of(World(), compresses_from=100), []
        planner._on_profile = lambda on, told=told: told.append(on)
        for step in range(first, first + 110):
            planner.assign(step)
            if told:
                break
        assert step == profiled


def test_without_adapt_nothing_is_decided_again():
    world = World()
    planner = planner_of(world, adapt=False)

    def change() -> None:
        world.plain_us = 400_000

    run(world, planner, range(200), {63: change})
    assert rows_of(planner) == [(4, "decided", "plain")]


def test_after_a_severe_change_two_rounds_are_enough():
    """Noise explains the difference; but the search expects it."""
    world = World(plain_us=5_000)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    world.plain_us, world.noise = 9_900, 0.1
    run(world, planner, range(100, 160), {}, now)
    (changed, _, _), (switched, *what) = rows_of(planner)[1:]
    assert (switched - changed, what) == (2 * TRY_ROUNDS * TRY_STEPS, ["switched", "signs"])


def test_there_and_back_again():
    world = World()
    planner = planner_of(world)

    def to(plain_us: float) -> Callable[[], None]:
        return lambda: setattr(world, "plain_us", plain_us)

    run(world, planner, range(500), {100: to(300_000), 250: to(500), 400: to(100_000)})
    assert [name for _, event, name in rows_of(planner) if event == "switched"] == ["signs", "plain", "signs"]
    switched = [step for step, event, _ in rows_of(planner) if event == "switched"]
    assert [step - changed <= WITHIN for step, changed in zip(switched, (100, 250, 400), strict=True)] == [True] * 3


def test_conditions_under_which_nothing_better_was_found_are_not_looked_into_again():
    world = World(plain_us=60_000, noise=0.01)
    planner = planner_of(world)
    now = 0
    for number in range(7):
        world.compute = 1.5 if number % 2 else 1.0
        now = run(world, planner, range(300 * number, 300 * number + 300), {}, now)
    assert [row[1:] for row in rows_of(planner)] == [("decided", "signs"), ("changed", "signs"), ("kept", "signs")]
    world.plain_us = 135_000  # steps take as long as when a core was busy, and for another reason
    run(world, planner, range(2_100, 2_200), {}, now)
    assert planner.history.rows[3]["event"] == "changed"


def test_buckets_are_laid_before_it_decides_and_stay():
    world = World(wants=5.0, bucket_cap_mb=5.0)
    planner = planner_of(world)

    def change() -> None:
        world.plain_us, world.wants = 400_000, 1.0

    run(world, planner, range(200), {63: change})
    assert [event for _, event, _ in rows_of(planner)] == ["decided", "changed", "switched"]
    assert world.laid == [5.0]
    assert planner.strategy.bucket_cap_mb == 5.0  # whoever resumes lays them alike
    assert planner.assign(200).buckets == IN_ONE


def test_what_changes_while_something_is_tried_is_looked_into_at_once():
    world = World(plain_us=60_000)
    planner = planner_of(world)
    now, step = run(world, planner, range(100), {}), 100
    world.compute, world.finds = 3.0, SIGNS_ONCE_MORE
    while rows_of(planner)[-1][1] != "changed" and step < 100 + WITHIN:
        now, step = run(world, planner, range(step, step + 1), {}, now), step + 1
    world.compute, world.plain_us = 1.0, 500
    run(world, planner, range(step, step + WITHIN), {}, now)
    (_, _, changed, tried, again, last) = [(0, "", ""), *rows_of(planner)]
    assert (changed[1], again[1], last[1:]) == ("changed", "changed", ("switched", "plain"))
    assert again[0] == tried[0] < last[0] <= step + WITHIN


def test_what_a_card_lets_through_after_a_pause_flatters_nobody():
    world = World(rests=4)
    planner = planner_of(world)

    def change() -> None:
        world.plain_us = 24_000

    run(world, planner, range(150), {63: change})
    assert [(event, name) for _, event, name in rows_of(planner)[-1:]] == [("switched", "signs")]


@pytest.mark.parametrize(("sent_us", "switches"), [(0.0, False), (50_000.0, True)])
def test_what_a_card_lets_through_in_a_race_does_not_keep_what_is_in_use(sent_us, switches):
    world = World(plain_us=60_000, sent_us=sent_us)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    other = replace(SIGNS.choices["b"], compressor=CompressorSpec.parse("efsignsgd:block=64"))
    world.compute, world.finds, world.rests = 3.0, SIGNS.with_choices({"b": other}), 1_000
    with patch.object(world, "before_trying", lambda: None):
        run(world, planner, range(100, 150), {}, now)
    assert ("switched" in [event for _, event, _ in rows_of(planner)]) is switches


def test_while_a_change_has_to_show_that_it_lasts_nothing_else_is_due():
    world = World(plain_us=60_000, over=2.0, within=SIGNS_ONCE_MORE)
    planner = planner_of(world)
    run(world, planner, range(100), {})
    planner.keep_to_budget()
    assert planner.watch is not None
    planner.watch.is_waiting = True
    assert planner._answer(planner.watch, None, 100) is None
    planner.watch.is_waiting = False
    assert planner._answer(planner.watch, None, 100) is not None


def test_what_is_predicted_to_be_slower_is_not_tried():
    world = World(plain_us=60_000)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    world.plain_us, world.finds, world.promises = 300_000, SIGNS_ONCE_MORE, 2.0
    run(world, planner, range(100, 100 + WITHIN), {}, now)
    assert [event for _, event, _ in rows_of(planner)] == ["decided", "changed", "kept"]
    assert "the search finds nothing else" in planner.history.rows[-1]["reason"]


def test_a_slow_network_is_looked_into_however_often_nothing_was_found_before():
    world = World(plain_us=5_000)
    planner = planner_of(world)
    now, step = run(world, planner, range(100), {}), 100
    for _ in range(4):  # bursts that are over when the link is measured
        world.plain_us, world.when_measured_us = 200_000, 5_000
        now, step = run(world, planner, range(step, step + WITHIN), {}, now), step + WITHIN
        world.plain_us = 5_000
        now, step = run(world, planner, range(step, step + WITHIN), {}, now), step + WITHIN
    assert planner.verdict.name == "plain"
    world.plain_us, world.when_measured_us = 60_000, 0.0
    run(world, planner, range(step, step + WITHIN), {}, now)
    assert planner.verdict.name == "signs"


@pytest.mark.parametrize("lasts", [True, False])
def test_what_does_not_pay_yet_is_taken_once_the_change_has_lasted(lasts):
    world = World(plain_us=5_800, switch_us=450_000)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    assert planner.verdict.name == "plain"
    world.plain_us = 11_000
    now = run(world, planner, range(100, 160), {}, now)
    assert rows_of(planner)[-1][1:] == ("kept", "plain")
    assert "signs pays if this lasts until step" in planner.history.rows[-1]["reason"]
    world.plain_us = 11_000 if lasts else 5_800
    run(world, planner, range(160, 400), {}, now)
    # twice that, at some 4 ms a step
    switched = [step - 100 for step, event, _ in rows_of(planner) if event == "switched"]
    assert [150 < step < 250 for step in switched] == [True] * lasts
    assert len(compressed(planner.strategy)) == (2 if lasts else 0)


def test_what_did_not_pay_yet_is_looked_into_again_when_it_returns():
    world = World(plain_us=5_800, switch_us=450_000)
    planner = planner_of(world)
    now = first = 0
    for steps, plain_us in ((140, 5_800), (140, 11_000), (140, 5_800), (800, 11_000)):
        world.plain_us = plain_us
        now, first = run(world, planner, range(first, first + steps), {}, now), first + steps
    events = [event for _, event, _ in rows_of(planner)]
    assert events[:3] == ["decided", "changed", "kept"]
    assert "signs pays if this lasts until step" in planner.history.rows[2]["reason"]
    assert "changed" in [event for step, event, _ in rows_of(planner) if step >= 420]


def test_what_does_not_pay_yet_is_forgotten_once_the_change_is_over():
    world = World(plain_us=5_800, switch_us=320_000)
    planner = planner_of(world)
    now, step = run(world, planner, range(100), {}), 100
    world.plain_us = 11_000
    while rows_of(planner)[-1][1] != "kept" and step < 100 + 2 * WITHIN:
        now, step = run(world, planner, range(step, step + 1), {}, now), step + 1
    assert "signs pays if this lasts until step" in planner.history.rows[-1]["reason"]
    world.plain_us = 5_800
    run(world, planner, range(step, step + 100), {}, now)
    assert [event for _, event, _ in rows_of(planner)].count("switched") == 0


@pytest.mark.parametrize(
    ("compute", "promises", "steps"),
    [(1.0, 1.0, 0), (4.0, 2.4, 20)],
    ids=["before the watch knows steps", "steps hardly change"],
)
def test_what_does_not_pay_yet_is_forgotten_also_where_the_change_had_made_steps_faster(compute, promises, steps):
    world = World(plain_us=150_000, switch_us=200_000, noise=0.002, finds=SIGNS_ONCE_MORE, within=SIGNS_ONCE_MORE)
    world.compute, world.promises = compute, promises
    planner = planner_of(world)
    now, step = run(world, planner, range(140), {}), 140
    world.plain_us, world.finds = 80_000, SIGNS
    while rows_of(planner)[-1][1] != "kept" and step < 140 + 2 * WITHIN:
        now, step = run(world, planner, range(step, step + 1), {}, now), step + 1
    assert "pays if this lasts until step" in planner.history.rows[-1]["reason"]
    now, step = run(world, planner, range(step, step + steps), {}, now), step + steps
    world.plain_us = 150_000
    run(world, planner, range(step, step + 300), {}, now)
    assert [event for _, event, _ in rows_of(planner)] == ["decided", "changed", "kept"]


def test_a_burst_is_no_reason_to_leave_what_is_right():
    """It is over when the link is measured."""
    world = World(plain_us=5_000)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    assert planner.verdict.name == "plain"
    world.plain_us, world.when_measured_us = 200_000, 5_000
    run(world, planner, range(100, 100 + WITHIN), {}, now)
    assert planner.history.rows[2]["reason"] == "the link is as it was"
    assert [event for _, event, _ in rows_of(planner)] == ["decided", "changed", "kept"]


@pytest.mark.parametrize(("before_us", "after_us", "then"), [(5_000, 15_000, "signs"), (60_000, 5_000, "plain")])
def test_where_the_link_is_measured_to_be_another_what_runs_is_not_tried_with_the_others(before_us, after_us, then):
    """The windows that raised the alarm were no burst, and those of a faster one flatter what runs."""
    world = World(plain_us=before_us, noise=0.002)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    world.plain_us = after_us
    run(world, planner, range(100, 100 + WITHIN), {}, now)
    (changed, event, _), (switched, *last) = rows_of(planner)[1:]
    assert (event, *last) == ("changed", "switched", then)
    assert switched - changed <= TRY_MOST


def test_quiet_and_noisy_steps_decide_nothing_again():
    """Some 2 000 steps, one in thirty of which is disturbed by anything up to ten times."""
    world = World(plain_us=60_000, noise=0.1)
    planner = planner_of(world)

    def disturb(step: int) -> None:
        world.compute = 1.0 + 9.0 * world.random.random() if world.random.random() < 1 / 30 else 1.0

    run(world, planner, range(2000), {step: (lambda s=step: disturb(s)) for step in range(30, 2000)})
    assert [event for _, event, _ in rows_of(planner)].count("switched") == 0
    assert len(world.changes) <= 2


def test_a_slower_core_is_told_from_a_slower_link():
    world = World(plain_us=60_000)
    planner = planner_of(world)
    run(world, planner, range(120), {80: lambda: setattr(world, "compute", 2.0)})
    assert world.changes
    assert world.changes[0].findings[0].cause is Cause.JOB  # of one rank, all ranks


def test_tensors_that_have_to_stay_exact_do_whatever_is_found():
    world = World(plain_us=60_000)
    planner = planner_of(world)
    now = run(world, planner, range(60), {})
    assert planner.back_off(["a"], 60) == "signs without 1 tensors"
    assert planner.strategy.choices["a"] == PLAIN
    assert planner.strategy.choices["b"] != PLAIN
    run(world, planner, range(60, 200), {100: lambda: setattr(world, "plain_us", 1e6)}, now)
    assert planner.strategy.choices["a"] == PLAIN
    assert planner.back_off(["b"], 200) == "plain"
    assert not planner.strategy.compresses


@pytest.mark.parametrize(("finds", "then"), [(True, "signs at step 61"), (False, "plain")], ids=["finer", "none"])
def test_what_owes_more_than_it_may_is_replaced_also_where_it_is_faster(finds, then):
    world = World(plain_us=60_000)
    planner = planner_of(world)
    now = run(world, planner, range(60), {})
    assert rows_of(planner)[-1][1:] == ("decided", "signs")
    planner.keep_to_budget()
    now = run(world, planner, range(60, 61), {}, now)
    assert len(rows_of(planner)) == 1, "it owes no more than it may"
    world.over, world.finds, world.within, world.promises = 1.4, SIGNS_ONCE_MORE, SIGNS_ONCE_MORE, 1.0 if finds else 9.0
    planner.keep_to_budget()
    now = run(world, planner, range(61, 200), {}, now)
    rows = rows_of(planner)
    assert [row[1] for row in rows] == ["decided", "changed", "switched"]
    assert rows[-1][2] == then
    assert rows[-1][0] - rows[1][0] <= (WITHIN if finds else 0)
    assert planner.history.rows[1]["reason"].startswith("1.4 times the error budget is owed; a step takes ")
    assert planner.strategy == SIGNS_ONCE_MORE if finds else not planner.strategy.compresses
    planner.keep_to_budget()
    run(world, planner, range(200, 300), {}, now)
    assert rows_of(planner) == rows, "what took its place owes less"
    assert not world.changes, "nor is anything measured again: that says nothing of links"


def test_what_owes_more_than_it_may_costs_a_hundredth_of_the_time_beyond_the_first_turn(monkeypatch):
    turn_us, spent_us = 3e5, 0.0

    class OverBudget(World):
        """Each turn finds another strategy, which owes as much."""

        def __call__(self, records: Any) -> list[Candidate]:
            nonlocal spent_us
            spent_us += turn_us
            self.finds = SIGNS_ONCE_MORE if self.finds == SIGNS else SIGNS
            return super().__call__(records)

    world = OverBudget(plain_us=60_000, over=1.4)
    planner, now = planner_of(world), 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(now + 1e3 * spent_us))
    for step in range(4_000):
        now = run(world, planner, range(step, step + 1), {}, now)
        planner.keep_to_budget()
    reasons = [row["reason"] for row in planner.history.rows if row["event"] == "changed"]
    assert 2 <= len(reasons) == sum("the error budget is owed" in reason for reason in reasons)
    assert (len(reasons) - 1) * turn_us <= 0.01 * now / 1e3


def test_what_is_only_tried_is_not_in_use():
    world = World()
    planner = planner_of(world)
    ran = set()
    now = run(world, planner, range(100), {})
    world.plain_us = 400_000
    for step in range(100, 140):
        before = planner.verdict.name
        ran.add((before, planner.assign(step).strategy.compresses))
        assert planner.decided
        assert (planner.strategy.compresses) is (before == "signs")
        now = run(world, planner, range(step, step + 1), {}, now)
    assert ("plain", True) in ran  # tried, while plain was in use
    assert planner.verdict.name == "signs"


def test_a_resumed_job_goes_on_until_something_changes_and_is_measured_then():
    world = World(plain_us=200_000)
    planner, told = planner_of(world), []
    planner._on_profile = told.append
    planner.resume(SIGNS, {})
    assert planner.decided
    now = run(world, planner, range(100, 200), {})
    assert rows_of(planner) == []
    assert world.searches == 0
    world.plain_us, step = 500, 200
    while not rows_of(planner):
        now, step = run(world, planner, range(step, step + 1), {}, now), step + 1
    assert told == [True], "before the forward pass of the first step that is measured"
    run(world, planner, range(step, 300), {}, now)
    rows = rows_of(planner)
    assert [(event, name) for _, event, name in rows] == [("changed", "resumed"), ("decided", "plain")]
    assert rows[1][0] <= 200 + WITHIN


def test_a_resumed_job_decides_anew_when_another_compressor_comes_into_force():
    """A ratio that warms up: what was plain in the first epoch need not stay plain."""
    world = World(plain_us=200_000)
    planner, told = planner_of(world), []
    planner._on_profile = told.append
    ratios: Any = {"given": "the first epoch's"}, {"given": "the second epoch's"}
    planner.resume(SIGNS.with_choices(dict.fromkeys(SIGNS.choices, PLAIN)), ratios[0])
    now = run(world, planner, range(100, 120), {})
    planner.follow(ratios[0])
    assert (planner.decided, told) == (True, [])
    planner.follow(ratios[1])
    assert (planner.decided, told) == (False, []), "the iteration has begun: the next is measured"
    run(world, planner, range(120, 200), {}, now)
    assert told[0]
    assert [(event, name) for _, event, name in rows_of(planner)] == [("decided", "signs")]


def test_a_profile_in_buckets_that_were_laid_anew_is_whole():
    """One step of it is known there: loading a checkpoint must not take that for a job half measured."""
    world = World(plain_us=200_000, bucket_cap_mb=5.0)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    assert world.laid
    searched = world.searches
    planner.resume(SIGNS, {})
    told: list[bool] = []
    planner._on_profile = told.append
    now = run(world, planner, range(100, 200), {}, now)
    world.plain_us, step = 500, 200
    while "changed" not in [row[1] for row in rows_of(planner)]:
        now, step = run(world, planner, range(step, step + 1), {}, now), step + 1
    run(world, planner, range(step, step + 1), {}, now)
    assert world.searches > searched
    assert told == [], "no profiled steps"


def test_what_was_found_out_stays_exact_after_a_checkpoint():
    world = World(plain_us=200_000)
    planner = planner_of(world)
    run(world, planner, range(100), {})
    (name, *_) = (name for name, choice in SIGNS.choices.items() if choice != PLAIN)
    planner.back_off({name}, 100)
    planner.resume(SIGNS, {})
    assert planner.strategy.choices[name] == PLAIN
    assert planner.strategy.compresses


@pytest.mark.parametrize("step", [4, 12, 16])
def test_what_is_resumed_while_strategies_are_tried_is_in_use_at_once(step):
    world = World(plain_us=200_000)
    planner = planner_of(world)
    now = run(world, planner, range(step), {})
    assert not planner.decided
    planner.resume(SIGNS, {})
    for later in range(step, step + 30):
        assert planner.assign(later).strategy is SIGNS
        now = run(world, planner, range(later, later + 1), {}, now)
    assert rows_of(planner) == []


def test_what_orders_a_resumed_strategy_runs_also_where_a_window_is_late():
    """Whether the window's numbers are there is this rank's own affair; the order comes from rank 0."""

    class Late(Rows):
        def __init__(self, mine: torch.Tensor) -> None:
            super().__init__(mine)
            self.is_done = False

    class LateRank(OneRank):
        def start_gather(self, mine: torch.Tensor, *, timed: bool = False) -> Rows:
            return Late(mine)

    world = World(plain_us=60_000)
    planner = planner_of(world)
    planner._groups = planner.watch._groups = LateRank()
    planner.resume(SIGNS, {})
    now = 0
    for step in range(7):
        record = world.record(step, planner, now)
        record.finite, now = step >= 5, record.done_ns  # it is ordered at the first that is finite
        work = planner.after(record)
        assert (work is None) is (step != 5)
        if work is not None:
            work()
    assert planner.assign(7).order is not None


def test_loading_an_earlier_step_begins_to_count_anew():
    world = World(plain_us=60_000)
    planner = planner_of(world)
    now = run(world, planner, range(5_000, 5_100), {})
    world.plain_us = 400_000
    now = run(world, planner, range(5_100, 5_200), {}, now)
    assert [event for _, event, _ in rows_of(planner)][1:] == ["changed", "kept"]
    assert planner.verdict is not None
    assert "plain" not in planner.verdict.measured_us, "it took that before the change"
    planner.restart()
    assert planner._num_begun(99) == 1, "steps count from where they are now"
    assert planner._decide_by == 0, "and none are waited for before another race"
    now = run(world, planner, range(100, 150), {}, now)
    world.plain_us = 500
    run(world, planner, range(150, 190), {}, now)
    assert rows_of(planner)[-1][1:] == ("switched", "plain")


def test_what_was_out_of_its_band_while_it_was_tried_is_left_exact_and_searched_again():
    world = World(plain_us=60_000)
    planner = planner_of(world, decide_by=0)
    now = run(world, planner, range(7), {})
    assert planner.back_off(["a"], 7) == "plain"
    run(world, planner, range(7, 60), {}, now)
    assert planner.strategy.choices["a"] == PLAIN
    assert planner.strategy.choices["b"] != PLAIN


def test_a_given_strategy_is_watched_and_stays():
    world = World(plain_us=20_000)
    history = History(True)
    planner = FixedPlanner(SIGNS, OneRank(), history=history)
    run(world, planner, range(100), {40: lambda: setattr(world, "plain_us", 2_000_000)})
    assert [(row["event"], row["strategy"]) for row in history.rows] == [("changed", "given")]
    assert 40 < history.rows[0]["step"] <= 40 + WITHIN
    assert "the link is" in history.rows[0]["reason"]
    assert planner.strategy is SIGNS


def test_tensors_that_go_exact_are_no_change_of_a_given_strategys_machine():
    world = World(plain_us=400_000)
    history = History(True)
    planner = FixedPlanner(SIGNS, OneRank(), history=history)
    now = run(world, planner, range(40), {})
    planner.back_off(["a", "b"], 40)
    planner.back_off(["a", "b"], 40)
    run(world, planner, range(40, 100), {}, now)
    assert not planner.strategy.compresses
    assert history.rows == []


def test_the_second_alarm_makes_everything_exact():
    exact = Exact()
    assert exact.of(SIGNS) is SIGNS
    exact.add(["a"])
    assert len(compressed(exact.of(SIGNS))) == 1
    exact.add(["a"])
    assert not exact.of(SIGNS).compresses


KINDS = (
    (Routine.ALLREDUCE, Form.RAW, 2, 2), (Routine.REDUCE, Form.RAW, 1, 2), (Routine.ALLGATHER, Form.PAYLOAD, 1, 1)
)  # fmt: skip
"""With how often they wait on two ranks, and bytes on a link beside a gather's."""


@pytest.mark.parametrize(("routine", "form", "waits", "factor"), KINDS)
def test_curves_follow_the_probe_of_their_scope(routine, form, waits, factor):
    points = ((1000.0, 10.0), (100_000.0, 100.0), (1_000_000.0, 1000.0))
    curves = tuple(LinkCurve(kind, Scope.FLAT, its_form, points, 5.0) for kind, its_form, _, _ in KINDS)
    links = Links(curves=curves)

    def alone(*probes: tuple[float, float]) -> list[float]:
        found = with_probes(links, {Scope.FLAT: probes}, TWO).measured(routine, Scope.FLAT, form)
        assert [size for size, _ in found.alone] == [size for size, _ in points]
        assert 0 <= found.latency_us <= found.alone[0][1]
        return [us for _, us in found.alone]

    before = [15.0, 105.0, 1005.0]
    assert alone((1000.0, 15.0), (1_000_000.0, 1005.0)) == pytest.approx(before)
    thinner = alone((1000.0, 15.0 + 9.0), (1_000_000.0, 1005.0 + 9_000.0))  # 9 ns a byte
    assert thinner == pytest.approx([us + factor * 9e-3 * at for us, (at, _) in zip(before, points, strict=True)])
    farther = alone((1000.0, 15.0 + 500.0), (1_000_000.0, 1005.0 + 500.0))
    assert farther == pytest.approx([us + waits * 500.0 for us in before])
    faster = alone((1000.0, 14.5), (1_000_000.0, 505.0))
    assert all(505 / 1005 * old <= us * 1.001 < old for us, old in zip(faster, before, strict=True))
    assert with_probes(links, {}, TWO).curves == curves


def test_on_several_ranks_a_node_a_probe_waits_in_every_round_of_its_ring():
    points = ((1000.0, 10.0), (1_000_000.0, 1000.0))
    kinds = {
        (Routine.ALLGATHER, Form.PAYLOAD): 3, (Routine.ALLREDUCE, Form.RAW): 6, (Routine.ALL_TO_ALL, Form.PAYLOAD): 1
    }  # fmt: skip
    links = Links(curves=tuple(LinkCurve(routine, Scope.FLAT, form, points, 5.0) for routine, form in kinds))
    probes = {Scope.FLAT: ((1000.0, 15.0 + 300.0), (1_000_000.0, 1005.0 + 300.0))}
    found = with_probes(links, probes, Cluster(2, 2))
    for (routine, form), rounds in kinds.items():
        curve = found.measured(routine, Scope.FLAT, form)
        assert [us for _, us in curve.alone] == pytest.approx([15.0 + 100.0 * rounds, 1005.0 + 100.0 * rounds])


@pytest.mark.parametrize(
    ("took_us", "found_us", "calls"),
    [
        ([18_000, 4_100, 500], 4_100, 2),  # somebody else had the core
        ([9_000, 8_000, 8_500, (2_500,) * 3], 8_000, 4),  # the link is slower indeed
        ([40_000, (11_000, 10_900, 11_000)], 40_000, 2),  # too dear to look at more than parts again
        ([240_000, (10_500, 10_400, 10_600)], 42_000, 2),  # which say that something was lost on the way
        ([40_000, (3_000, 11_000, 10_900)], 40_000, 2),  # and one of which runs on what a card let gather meanwhile
        ([5_000, 4_000], 5_000, 1),  # much as it was known
        ([2_600, 2_500, 2_400, 2_600, 2_500, 15_000, 9_000, 8_000], 9_000, 7),  # faster: more bytes tell
    ],
)
def test_a_gather_that_takes_another_time_than_was_known_is_timed_again_where_that_is_cheap(
    monkeypatch, took_us, found_us, calls
):
    points = ((1e4, 300.0), (5e5, 4_000.0), (4e6, 30_000.0))
    known = Links(curves=(LinkCurve(Routine.ALLGATHER, Scope.FLAT, Form.PAYLOAD, points),))
    groups: Any = SimpleNamespace(scopes={Scope.FLAT: SimpleNamespace(size=2)}, cluster=TWO)
    times = iter(took_us)

    def time_behind(
        _: Any, scope: Scope, behind: int, size: int, place: Any, count: int = 1, of: Any = min
    ) -> float:  # fmt: skip
        if size == remeasure.SMALL_BYTES:
            return 300.0
        took = next(times)
        return took if count == 1 else of(took)

    monkeypatch.setattr(remeasure, "time_behind", time_behind)
    _, (_, large_us) = remeasure.probe(groups, None, known)[Scope.FLAT]
    assert large_us == found_us
    assert len(list(times)) == len(took_us) - calls


@pytest.mark.parametrize("off", [0.99, 1.01, 1.02])
def test_what_the_curves_of_a_slow_link_are_off_by_does_not_stay_when_it_becomes_fast(off):
    sizes = (1e4, 1e6, 8e6)
    gather = LinkCurve(Routine.ALLGATHER, Scope.FLAT, Form.PAYLOAD, tuple((size, size / 12.5) for size in sizes))
    summed = LinkCurve(Routine.ALLREDUCE, Scope.FLAT, Form.RAW, tuple((size, off * size / 6.25) for size in sizes))
    probes = {Scope.FLAT: ((1e4, 1e4 / 250), (1e6, 1e6 / 250))}  # twenty times as fast
    found = with_probes(Links(curves=(gather, summed)), probes, TWO).measured(Routine.ALLREDUCE, Scope.FLAT, Form.RAW)
    assert [us for _, us in found.alone] == pytest.approx([size / 125 for size in sizes], rel=0.05)


def test_what_exchanges_take_of_a_core_is_spread_over_how_long_they_last(monkeypatch):
    """And measured anew on a link that has become faster: of a slow one's exchanges nothing is seen."""
    sizes = (1e4, 1e6, 8e6)

    def links(us_per_byte: float) -> Links:
        gather, summed = (
            LinkCurve(routine, Scope.FLAT, form, tuple((size, waits * size * us_per_byte) for size in sizes))
            for routine, form, waits in ((Routine.ALLGATHER, Form.PAYLOAD, 1), (Routine.ALLREDUCE, Form.RAW, 2))
        )
        return Links(curves=(gather, summed))

    taken = {"flat": 0.4, "flat.allreduce": 0.8, "inter": 0.5}
    slower = remeasure.taken_now(taken, links(1e-3), links(2e-2))
    assert slower == pytest.approx({"flat": 0.02, "flat.allreduce": 0.04, "inter": 0.5})
    assert remeasure.taken_now(slower, links(2e-2), links(1e-3)) == pytest.approx(taken)
    assert remeasure.taken_now(taken, links(1e-3), links(5e-4)) == pytest.approx(
        {"flat": 0.8, "flat.allreduce": 1.0, "inter": 0.5}
    )

    job = job_from_trace("lstm", 2, 1, "pcie-25g")
    contention = Contention(cores=1.0, comm_cpu={"flat": 0.0, "flat.push": 0.3})
    job = replace(job, costs=replace(job.costs, links=links(2e-2), contention=contention))
    groups: Any = SimpleNamespace(cluster=TWO)
    found, measured = [], []
    monkeypatch.setattr(remeasure, "cores_taken", lambda _, curves: measured.append(curves) or {"flat": 0.4})
    change = Change((), 0, (1.0, 1.0))
    known = Remeasured(job, change)
    for rate in (1e-3, 1e-3, 4e-3):
        probes = {Scope.FLAT: tuple((size, size * rate) for size in (1e4, 1e6))}
        monkeypatch.setattr(remeasure, "probe", lambda *_, probes=probes: probes)
        job = known.job(job, change, groups, Place())
        found.append(job.costs.contention.comm_cpu["flat"])
    assert found == pytest.approx([0.4, 0.4, 0.1], rel=0.01)
    assert len(measured) == 1
    assert job.costs.contention.comm_cpu["flat.push"] == 0.3, "is not measured again"


def test_of_several_links_what_has_moved_most_counts():
    """A link between hosts that became faster, on a cluster whose links within hosts stay."""
    assert Moved.of_all([(1.0, 0.0), (0.25, 1.4), (1.1, 0.1)]) == (0.25, 1.4)
    assert Moved.of_all([[0.9, 0.1], [3.0, 1.1]]) == (3.0, 1.1)


def test_a_strategy_whose_residuals_come_back_at_another_rate_is_another():
    slower = replace(SIGNS, gain_scale=0.5)
    assert alike(SIGNS, replace(SIGNS))
    assert not alike(SIGNS, slower)
    exact = SIGNS.with_choices(dict.fromkeys(SIGNS.choices, PLAIN))
    assert alike(exact, replace(exact, gain_scale=0.5))


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_what_was_measured_for_a_change_that_is_over_does_not_stay(monkeypatch, slower):
    """A competitor came, and left without a turn; then the link changes, or has changed for a moment."""
    job = job_from_trace("lstm", 2, 1, "pcie-25g")
    points = ((1e4, 300.0), (1e6, 9_000.0))
    links = Links(curves=(LinkCurve(Routine.ALLGATHER, Scope.FLAT, Form.PAYLOAD, points),))
    job = replace(job, costs=replace(job.costs, links=links))
    groups: Any = SimpleNamespace(cluster=TWO)
    monkeypatch.setattr(remeasure, "probe", lambda *_: {Scope.FLAT: points})
    monkeypatch.setattr(remeasure, "_gather_us", lambda _: 1.0)
    busy = Change((Finding(Cause.COMPUTE, 2.0, (0,)),), 0, (1e5, 2e5), (9e4, 18e4))
    known = Remeasured(job, busy)
    slow = known.job(job, busy, groups, Place())
    assert sum(slow.gaps_us) == pytest.approx(2 * sum(job.gaps_us))
    link = Change((Finding(Cause.LINK, 3.0),), 50, (1e5, 2e5), (9e4, 9e4), came_home=True)
    monkeypatch.setattr(remeasure, "probe", lambda *_: {Scope.FLAT: [(size, slower * us) for size, us in points]})
    after = known.job(slow, link, groups, Place())
    assert after.gaps_us == pytest.approx(job.gaps_us)
    assert [each.points for each in after.costs.compute] == [each.points for each in job.costs.compute]


@pytest.mark.parametrize(
    ("changes", "codec"),
    [
        ([(2.0, Cause.JOB, 2.0)], [1.0]),
        ([(2.0, Cause.JOB, 2.0), (3.0, Cause.COMPUTE, 1.5), (2.0, Cause.COMPUTE, 1 / 1.5)], [1.0, 1.5, 1.0]),
        # The neighbour leaves without a turn, or the batch becomes what it was.
        ([(2.0, Cause.JOB, 2.0), (3.0, Cause.COMPUTE, 1.5), (2.0, Cause.LINK, 3.0)], [1.0, 1.5, 1.0]),
        ([(2.0, Cause.JOB, 2.0), (1.0, Cause.LINK, 3.0), (1.5, Cause.COMPUTE, 1.5)], [1.0, 1.0, 1.5]),
    ],
    ids=["a larger batch", "and a neighbour that comes and goes", "and one that went unseen", "a batch as before"],
)
def test_a_larger_batch_is_not_taken_for_slower_encoders(monkeypatch, changes, codec):
    job = job_from_trace("lstm", 2, 1, "pcie-25g")
    first = job = replace(job, costs=replace(job.costs, contention=Contention(handling_us=10.0)))
    groups: Any = SimpleNamespace(cluster=TWO)
    monkeypatch.setattr(remeasure, "probe", lambda *_: {})
    monkeypatch.setattr(remeasure, "_gather_us", lambda _: 1.0)
    known, was, found = None, 1.0, []
    for computes, cause, ratio in changes:
        home = cause is Cause.LINK
        compute_us = (1e5 * (computes if home else was), 1e5 * computes)
        change = Change((Finding(cause, ratio),), 0, (2e5, 3e5), compute_us, came_home=home)
        known = known or Remeasured(job, change)
        job, was = known.job(job, change, groups, Place()), computes
        assert sum(job.gaps_us) == pytest.approx(computes * sum(first.gaps_us))
        found.append(job.costs.compute[0].points[-1][1] / first.costs.compute[0].points[-1][1])
        assert job.costs.contention.handling_us == pytest.approx(10.0 * found[-1])
    assert found == pytest.approx(codec)


def test_the_turn_after_a_change_that_was_over_before_it_is_told_so():
    world = World(plain_us=60_000, noise=0.002)
    planner = planner_of(world)
    now = run(world, planner, range(200), {})
    step = 200
    for compute in (3.0, 1.0):  # it comes, and goes without a turn
        world.compute = compute
        now, step = run(world, planner, range(step, step + 100), {}, now), step + 100
    assert len(world.changes) == 1
    assert planner.watch.came_home
    world.plain_us = 1_200_000
    run(world, planner, range(step, step + WITHIN), {}, now)
    assert [change.came_home for change in world.changes[:2]] == [False, True]
    assert not planner.watch.came_home


def test_the_history_is_a_trace(tmp_path):
    import json

    from espresso.live.history import Event

    history = History(True)
    history.add(60, Event.DECIDED, "measured", "signs", measured_us=5.0)
    history.add(90, Event.SWITCHED, "the link is slower", "plain", since_ns=time.perf_counter_ns() - 1000)
    write_history(tmp_path / "history.json", history.rows)
    spans = [e for e in json.loads((tmp_path / "history.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [span["name"] for span in spans if span["cat"] == "in use"] == ["signs", "plain"]
    assert spans[2]["dur"] >= 1.0


# -- on two real ranks, whose exchanges are held up ------------------------------------------------


def slowed(rank: int) -> dict[str, Any]:
    """Automatic mode on a fast network, which then sends 5 MB a second and no more.

    Until then the search finds nothing: on a busy machine the network may not look fast.
    """
    allreduce, exchange, search = collectives.allreduce_async, collectives.exchange_async, OnlineSearch.__call__
    us_per_byte = [0.0]

    def search_once_slow(self: OnlineSearch, records: Any) -> list[Candidate]:
        found = search(self, records)
        return found if us_per_byte[0] else []

    def hold_up(num_bytes: int) -> None:
        time.sleep(num_bytes * us_per_byte[0] / 1e6)

    def slow_allreduce(tensor: torch.Tensor, member: Any) -> Any:
        hold_up(tensor.nbytes)
        return allreduce(tensor, member)

    def slow_exchange(transfers: Any, member: Any) -> Any:
        hold_up(sum(out.nbytes for _, out, _ in transfers if out is not None))
        return exchange(transfers, member)

    collectives.allreduce_async, collectives.exchange_async = slow_allreduce, slow_exchange
    ddp = wrap(mlp(64, 512, 512, 8), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    plain_us = 0.2 * sum(each.nbytes for each in ddp.parameters())  # once it is slow, at the least
    try:
        settings = {"strategy": "auto", "adapt": True, "decide_by": 0, "timeout_s": 60.0}
        with (
            patch.object(OnlineSearch, "__call__", search_once_slow),
            registered(ddp, compressor="efsignsgd", **settings) as state,
        ):
            changed_at = last = 0
            for step in range(300):
                optimizer.zero_grad()
                inputs = batch(rank, step % 4, 64, rows=16)
                (ddp(inputs) - inputs[:, :8].sin()).square().mean().backward()
                optimizer.step()
                rows = state.history
                is_settled = bool(rows) and rows[-1]["event"] != "changed"
                if is_settled and rows[-1]["strategy"] == "plain" and not changed_at and step > 60:
                    changed_at, us_per_byte[0] = step, 0.2
                # Where others disturb a turn it may first take what is hardly better than plain.
                since = [row for row in rows if row["event"] == "switched" and row["step"] > changed_at > 0]
                has_switched = is_settled and bool(since) and since[-1]["measured_us"] < plain_us / 2
                if has_switched or 0 < changed_at < step - MOST:
                    last = last or step
                    if step > last + 5:
                        break
            equal = agreed(ddp)
            return {"changed_at": changed_at, "history": state.history, "equal": equal, "plain_us": plain_us}
    finally:
        collectives.allreduce_async, collectives.exchange_async = allreduce, exchange


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(__name__, (slowed,), 2, deadline_s=150)


def test_where_nothing_has_moved_when_it_is_measured_nothing_is_searched_for():
    world = World(plain_us=60_000, noise=0.002)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    searched = world.searches
    world.plain_us, world.when_measured_us = 120_000, 60_000  # until somebody looks
    run(world, planner, range(100, 200), {}, now)
    assert [row[1] for row in rows_of(planner)] == ["decided", "changed", "kept"]
    assert planner.history.rows[-1]["reason"] == "nothing has moved much"
    assert world.searches == searched


def test_a_link_that_is_as_it_was_when_it_is_measured_was_a_disturbance_once():
    world = World(plain_us=60_000, noise=0.002)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    searched, step = world.searches, 100
    for rows in (3, 5):  # told again at once, it is searched for
        world.plain_us, world.when_measured_us = 1_200_000, 60_000
        while len(rows_of(planner)) < rows and step < 200:
            now, step = run(world, planner, range(step, step + 1), {}, now), step + 1
        if rows == 3:
            assert [row[1] for row in rows_of(planner)] == ["decided", "changed", "kept"]
            assert planner.history.rows[-1]["reason"] == "the link is as it was"
            assert world.searches == searched
    assert world.searches == searched + 1
    assert planner.probed_us > 0


def test_what_a_turn_costs_is_told():
    world = World(noise=0.002)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    assert planner.probed_us == 0
    world.plain_us, world.when_measured_us = 3_300, 1_000
    run(world, planner, range(100, 400), {}, now)
    assert [row[1:] for row in rows_of(planner)] == [("decided", "plain"), ("changed", "plain"), ("kept", "plain")]
    assert world.groups.soundings == 0
    assert 0 < planner.probed_us < 1e5


def test_ranks_decide_anew_together(played):
    everybody = played(slowed)
    events = [[(row["step"], row["event"], row["strategy"]) for row in told["history"]] for told in everybody]
    assert events[0] == events[1]
    assert all(told["equal"] for told in everybody)
    changed_at, rows = everybody[0]["changed_at"], everybody[0]["history"]
    assert changed_at, ("plain was never the one in use, and settled", rows)
    later = [row for row in rows if row["step"] > changed_at]
    switched = [row for row in later if row["event"] == "switched"]
    assert switched, rows
    changed = [row for row in later if row["event"] == "changed" and row["step"] <= switched[0]["step"]]
    assert "times slower" in changed[-1]["reason"], rows
    assert switched[-1]["measured_us"] < everybody[0]["plain_us"] / 2, rows
