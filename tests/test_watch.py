"""The watch over a decided job: what it takes for a change, what for noise, and what it says has changed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from espresso.live.change import Cause, Change, Finding
from espresso.live.history import History
from espresso.live.patience import MOST_DOUBLINGS, REST, Patience
from espresso.live.remeasure import Remeasured, with_compute
from espresso.live.watch import LONG_WINDOW, WINDOW, Stream, Vitals, Watch
from espresso.model.bucket_caps import rebucketed
from espresso.model.presets import job_from_trace
from tests.test_bucket_caps import ddp_job

STEP = Vitals(step=100e3, compute=60e3, tail=40e3, wire=30e3, codec=5e3)
PLAIN = Vitals(step=100e3, compute=98e3, tail=2e3, wire=0.0, codec=0.0)


class Nobody:
    """Groups whose messages the test makes itself, of ranks 1 and 3."""

    beside, ranks = None, (1, 3)


class Shard:
    """Groups of a shard's replicas, ranks 0 and 2, beside another's, 1 and 3."""

    ranks = (0, 2)

    def __init__(self, theirs: list[Vitals]) -> None:
        self.beside = SimpleNamespace(all_objects=lambda mine: [mine, ((1, 3), theirs)])


def noisy(random: np.random.Generator, vitals: Vitals, spread: float = 0.05) -> Vitals:
    return Vitals(*(value * math.exp(spread * random.standard_normal()) for value in vitals))


def watched(before: tuple[Vitals, ...], now: tuple[Vitals, ...], windows: int = 6, seed: int = 0) -> Change | None:
    """What a watch says of some windows of one kind and then of another; and that it says nothing of the first."""
    random, watch = np.random.default_rng(seed), Watch(Nobody())
    for window in range(windows):
        assert watch.test(window * WINDOW, tuple(noisy(random, row) for row in before)) is None
    for window in range(windows, windows + 4):
        change = watch.test(window * WINDOW, tuple(noisy(random, row) for row in now))
        if change is not None:
            return change
    return None


def scaled(vitals: Vitals, **factors: float) -> Vitals:
    return vitals._replace(**{name: getattr(vitals, name) * factor for name, factor in factors.items()})


@pytest.mark.parametrize(
    ("now", "cause", "ranks", "told"),
    [
        ((scaled(STEP, wire=3, tail=3, step=1.8),) * 2, Cause.LINK, (), "the link is 3 times slower"),
        ((scaled(STEP, wire=0.2, tail=0.5, step=0.8),) * 2, Cause.LINK, (), "the link is 5 times faster"),
        # A rank that is late makes the other wait; whoever comes last waits for the link alone.
        (
            (scaled(STEP, compute=2, step=1.6), scaled(STEP, tail=2.5, wire=3, step=1.6)),
            Cause.COMPUTE,
            (1,),
            "compute of rank 1 is 2 times slower",
        ),
        (
            (scaled(STEP, compute=2, step=1.6),) * 2,
            Cause.JOB,
            (),
            "the job's own compute (batch, accumulation) is 2 times slower",
        ),
        ((scaled(STEP, codec=6, tail=1.6, step=1.25),) * 2, Cause.ENCODERS, (), "encoding is 6 times slower"),
    ],
    ids=["slower link", "faster link", "one rank's core", "batch", "encoders"],
)
def test_it_says_what_has_changed(now, cause, ranks, told):
    change = watched((STEP, STEP), now)
    assert change is not None
    assert change.findings[0].cause is cause
    assert change.findings[0].ranks == ranks
    assert told in re.sub(r"\d\.\d+(?= times)", lambda factor: f"{float(factor[0]):.0f}", str(change))
    assert change.since >= 5 * WINDOW


def test_ranks_of_another_shard_have_their_own_names():
    theirs = [PLAIN, PLAIN]
    watch, found, ours = Watch(Shard(theirs)), None, torch.tensor([PLAIN, PLAIN], dtype=torch.float64)
    for window in range(10):
        if window == 6:
            theirs[1] = scaled(PLAIN, step=2.0, compute=2.0)
        watch._gathering = window * WINDOW, SimpleNamespace(rows=lambda: ours)
        found = found or watch.look()
    assert found is not None
    assert found.findings[0].ranks == (3,)


def test_a_plain_job_sees_the_link_in_what_it_waits_at_the_end():
    slow = PLAIN._replace(step=1000e3, tail=900e3)
    change = watched((PLAIN, PLAIN), (slow, slow))
    assert change is not None
    assert [finding.cause for finding in change.findings] == [Cause.LINK]
    assert change.findings[0].ratio > 100
    assert "the link is" in str(change)
    assert "slower" in str(change)


def test_a_change_right_after_the_decision_is_measured_by_what_was_raced():
    watch = Watch(Nobody())
    watch.begin(20e3)
    slow = PLAIN._replace(step=300e3, tail=280e3)
    found = [watch.test(window * WINDOW, (slow, slow)) for window in range(3)]
    change = next(each for each in found if each is not None)
    assert change.step_us[0] == pytest.approx(20e3)
    assert change.findings == (Finding(Cause.STEP, pytest.approx(15.0)),)


def test_a_link_that_became_faster_behind_computing_may_save_what_encoding_takes():
    before = (STEP._replace(wire=50e3),) * 2
    found = [watched(before, (STEP._replace(wire=50e3 / factor),) * 2) for factor in (1.5, 3.2, 8.0)]
    assert all(change is not None for change in found)
    assert [change.hidden_us for change in found] == [0.0, pytest.approx(5e3, rel=0.2), pytest.approx(5e3, rel=0.2)]
    assert [change.is_urgent for change in found] == [False, True, True]
    slower = watched(before, (STEP._replace(wire=400e3),) * 2)
    assert not slower.is_urgent, "steps take as long as before"


@pytest.mark.parametrize(
    ("link", "now_us", "is_urgent"), [(4.0, 1.4e5, True), (2.0, 1.4e5, False), (4.0, 1.2e5, False)]
)
def test_steps_that_are_longer_by_a_link_three_times_slower_are_looked_into_at_once(link, now_us, is_urgent):
    assert Change((Finding(Cause.LINK, link),), 100, (1e5, now_us)).is_urgent is is_urgent


@pytest.mark.parametrize(
    ("stood", "is_another", "looks"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_what_the_strategy_in_use_stood_is_no_change_when_it_returns(stood, is_another, looks):
    watch, number = Watch(Nobody()), 0
    busy = scaled(STEP, compute=2, step=1.6)

    def windows(vitals: Vitals, count: int) -> list[Change]:
        nonlocal number
        number += count
        found = [watch.test(at * WINDOW, (vitals,) * 2) for at in range(number - count, number)]
        return [change for change in found if change is not None]

    watch.begin(stands=stood)
    assert windows(STEP, 8) == []
    assert windows(busy, 3)
    watch.begin(busy.step, is_another=is_another)
    assert windows(busy, 8) == []
    assert bool(windows(STEP, 4)) is looks
    assert watch.came_home is not looks  # what was measured for the busy time holds no longer


def test_where_the_link_is_measured_to_be_as_it_was_and_nothing_else_moved_the_step_changed():
    told = Change((Finding(Cause.LINK, 3.0),), 0, (1e4, 2e4))
    assert str(told.with_link(1.0)) == "the step is 2 times slower; a step took 10.0 ms, now 20.0"
    assert str(told.with_link(4.0)) == "the link is 4 times slower; a step took 10.0 ms, now 20.0"
    both = replace(told, findings=(*told.findings, Finding(Cause.ENCODERS, 1.5)))
    assert str(both.with_link(1.0)) == "encoding is 1.5 times slower; a step took 10.0 ms, now 20.0"


def test_a_window_that_costs_as_much_as_a_look_is_enough():
    for factor, is_found in ((10.0, True), (1.9, False)):
        watch = Watch(Nobody())
        for window in range(3):
            assert watch.test(window * WINDOW, (PLAIN, PLAIN)) is None
        slow = scaled(PLAIN, step=factor, tail=1 + 50 * (factor - 1))
        assert bool(watch.test(3 * WINDOW, (slow, slow))) is is_found
    watch = Watch(Nobody())
    watch.begin(2e3)  # short steps: another window costs little
    assert watch.test(WINDOW, (scaled(PLAIN, step=0.2),) * 2) is None


def test_short_steps_have_longer_windows_unless_the_next_may_raise_an_alarm():
    watch, told, step = Watch(Nobody()), [], 0
    assert watch.length == WINDOW
    for us in [2_000] * 6 + [4_500] * 2:
        step += watch.length
        change = watch.test(step, (Vitals(us, 1e3, us - 1e3, 0.0, 0.0),))
        told.append((watch.length, change and change.since))
    # It began with the window that was out of the way.
    assert told == [(LONG_WINDOW, None)] * 6 + [(WINDOW, None), (WINDOW, WINDOW + 5 * LONG_WINDOW + 1)]


def test_what_no_link_is_to_blame_for_has_to_last_where_waiting_costs_less_than_a_look():
    normal = Vitals(4e3, 3e3, 500.0, 500.0, 500.0)
    busy, far = scaled(normal, step=2, compute=2.3), scaled(normal, step=2, tail=9, wire=9)

    def alarms(*windows: Vitals, times: float = 1.0) -> list[bool]:
        watch = Watch(Nobody())
        rows = [scaled(each, **dict.fromkeys(Vitals._fields, times)) for each in [normal] * 8 + [*windows]]
        return [watch.test(4 * number, (row, row)) is not None for number, row in enumerate(rows)][8:]

    assert alarms(*[busy] * 4) == [False, False, False, True]
    assert alarms(*[far] * 2) == [False, True]
    assert alarms(*[busy] * 2, times=10) == [False, True]  # steps of 40 ms: two windows more cost more
    assert not any(alarms(*[busy] * 3, *[normal] * 8, *[busy] * 2))
    assert any(alarms(*[busy, normal] * 6)), "now and then is lasting too"
    faster = scaled(normal, step=0.5, compute=0.4)
    assert alarms(*[faster] * 2, times=100) == [False, True]  # .2 s a step, twice that at stake


def test_it_waits_in_windows_that_would_be_told_if_waiting_were_dearer():
    watch, waits = Watch(Nobody()), []
    for us in [4e3] * 8 + [8e3] * 2 + [4e3] * 8 + [8e3] * 4:
        watch.test(0, (Vitals(us, us - 1e3, 1e3, 0.0, 0.0),) * 2)
        waits.append(watch.is_waiting)
    assert waits == [False] * 9 + [True] + [False] * 9 + [True, True, False]


def test_a_window_as_ever_raises_no_alarm_whatever_was_before():
    stream = Stream()
    for _ in range(8):
        stream.learn(0.0)
    assert [stream.take(math.log(value)) for value in (3, 3, 1, 3)] == [False, True, False, True]
    assert not stream.take(math.log(1 / 3))  # out the other way
    assert not any(stream.take(0.0) for _ in range(8))
    assert stream.is_quiet


def false_alarms(windows: int, disturbed: float, seed: int, spread: float = 0.1) -> int:
    """Alarms of one stream on windows that are normal, but for a part that is anywhere."""
    random, stream, alarms = np.random.default_rng(seed), Stream(), 0
    values = spread * random.standard_normal(windows)
    out = random.random(windows) < disturbed
    values[out] += random.choice([-1, 1], out.sum()) * random.exponential(3.0, out.sum())
    for value in values:
        if stream.take(value):
            alarms += 1
            stream.forgive()
        elif stream.is_quiet:
            stream.learn(value)
    return alarms


def test_false_alarms_are_as_rare_as_stated():
    """1 / (5 p^2) windows between two for a stream; none without disturbances."""
    assert false_alarms(10_000, 0.0, 0) == 0
    windows, p = 10_000, 0.03
    found = sum(false_alarms(windows, p, seed) for seed in range(3))
    assert 0 < found <= 3 * windows * 5 * p**2


def test_compute_that_changed_before_a_baseline_is_held_against_the_measured_job():
    """80 ms, then 380 right after the decision, then 80 again: the job is as it was measured."""
    job = job_from_trace("lstm", 2, 1, "pcie-25g")
    job = replace(job, forward_us=80e3 - sum(job.gaps_us), optimizer_us=0.0)
    watch = Watch(Nobody())

    def seen(compute_us: float, windows: int) -> Change | None:
        row = Vitals(compute_us + 20e3, compute_us, 20e3, 0.0, 0.0)
        changes = [watch.test(4 * number, (row, row)) for number in range(1, windows + 1)]
        return next((change for change in changes if change is not None), None)

    watch.begin(100e3)
    first = seen(380e3, 8)
    assert first.compute_us == (0.0, 380e3)
    known = Remeasured(job, first)
    watch.begin(400e3)
    assert seen(380e3, 8) is None
    again = seen(80e3, 8)
    assert again.ratio(Cause.COMPUTE, Cause.JOB) == pytest.approx(80 / 380)
    assert known.scale(again) == pytest.approx(1.0)


def test_times_follow_the_job_into_other_buckets():
    job = ddp_job([300_000] * 4, [100.0] * 4)
    other = rebucketed(job, 1.0)
    assert len(other.buckets) != len(job.buckets)
    slower = with_compute(other, job, 2.0)
    assert slower.bucket_ready_us == pytest.approx([2 * us for us in other.bucket_ready_us])


def test_a_small_difference_is_no_change_and_a_large_one_takes_two_windows():
    stream = Stream()
    for _ in range(8):
        stream.learn(0.0)
    assert not any(stream.take(math.log(1.15)) for _ in range(500))
    assert [stream.take(math.log(3)) for _ in range(2)] == [False, True]


def seen_from(step: int, now_us: float, exposed_us: float = math.inf) -> Change:
    return Change((Finding(Cause.LINK, 1.5),), step, (1e5, now_us), exposed_us=exposed_us)


def first_permitted(patience: Patience, change: Change, limit: int = 10_000) -> int:
    """Asked at every step from the change's beginning on."""
    return next((step for step in range(change.since, limit) if patience.permits(change, step)), limit)


def test_a_change_is_looked_into_once_it_has_cost_as_much_as_a_look():
    assert first_permitted(Patience(), seen_from(40, 1.25e5)) == 50  # .025 s a step, .25 s supposed
    assert first_permitted(Patience(), seen_from(40, 1.25e5, exposed_us=2e4)) == 53  # compression can do less about it
    assert first_permitted(Patience(), seen_from(40, 9.5e4)) == 65  # what sends more may have gained twice as much
    assert first_permitted(Patience(), seen_from(40, 8e4, exposed_us=2e4)) == 53
    assert first_permitted(Patience(), seen_from(40, 1e5)) == 10_000  # nothing is at stake
    freed = replace(seen_from(40, 1e5), compute_us=(5e4, 2.5e4))  # steps are as they were, and computing is not
    assert first_permitted(Patience(), freed) == 50
    assert first_permitted(Patience(), replace(freed, compute_us=(0.0, 2.5e4))) == 10_000  # nobody knows what it took
    patience = Patience()
    patience.took(600, cost_us=1e6, brought=True)
    assert first_permitted(patience, seen_from(598, 1.25e5)) == 640
    patience.took(640, cost_us=1e5, brought=True)
    assert first_permitted(patience, seen_from(640, 5e5)) == 640 + REST


def test_turns_in_a_row_that_brought_nothing_cost_more_until_one_brings_something():
    patience, steps, now = Patience(), [], 0
    for _ in range(MOST_DOUBLINGS + 2):
        steps.append(first_permitted(patience, seen_from(now, 1.25e5)) - now)
        now += steps[-1]
        patience.took(now, cost_us=1e6, brought=False)
    assert steps == [10, 80, 160, 320, 320]
    assert first_permitted(patience, seen_from(now, 3e5)) == now + REST  # greater than all that came to nothing
    patience.took(now, cost_us=1e6, brought=True)
    assert first_permitted(patience, seen_from(now, 1.25e5)) == now + 40


def test_turns_that_brought_nothing_say_nothing_of_another_cause_or_direction():
    def seen(cause: Cause, ratio: float, *more: Finding) -> Change:
        return Change((*more, Finding(cause, ratio)), 0, (1e5, 1.25e5))

    def waited(change: Change) -> int:
        begun = patience._rests_until + 100
        return first_permitted(patience, replace(change, since=begun)) - begun

    patience = Patience()
    for _ in range(MOST_DOUBLINGS):
        first_permitted(patience, seen(Cause.COMPUTE, 1.3))
        patience.took(0, cost_us=1e6, brought=False)
    others = seen(Cause.LINK, 1.3), seen(Cause.LINK, 0.7), seen(Cause.COMPUTE, 0.7)
    assert [waited(change) for change in others] == [40] * 3
    # A machine's noise shows in one of them or another, and moves the link a little as well.
    alike = seen(Cause.JOB, 1.3), seen(Cause.STEP, 1.3), seen(Cause.JOB, 1.3, Finding(Cause.LINK, 1.2))
    assert [waited(change) for change in alike] == [40 * 2**MOST_DOUBLINGS] * 3
    patience.took(0, cost_us=1e6, brought=True)
    assert waited(alike[0]) == 40, "another strategy is in use"


def test_a_turn_behind_another_that_brings_nothing_counts_for_its_own_kind():
    patience = Patience()
    slower, faster = seen_from(100, 1.25e5), Change((Finding(Cause.STEP, 0.8),), 100, (1.25e5, 1e5))
    first_permitted(patience, slower)
    patience.took(100, cost_us=1e6, brought=True)
    patience.follows(faster)
    patience.took(100, cost_us=1e6, brought=False)
    assert first_permitted(patience, slower) == 140
    assert first_permitted(patience, replace(faster, since=150)) == 150 + 40, "once for nothing: two prices of 25 ms"


def test_part_of_the_price_of_looking_into_a_severe_change_is_there_as_far_as_that_was_earned():
    severe = partial(seen_from, now_us=1.9e5)  # .09 s a step
    hidden = replace(severe(40), findings=(Finding(Cause.LINK, 0.25),), step_us=(1e5, 1e5), hidden_us=1e5)
    assert hidden.is_severe
    assert first_permitted(Patience(), hidden) == 40, "also where steps are no slower"
    patience = Patience()
    assert first_permitted(patience, severe(40)) == 40
    patience.took(40, cost_us=3e6, brought=True)
    assert first_permitted(patience, severe(100)) == 123  # a thousand steps of .1 s earn one second, and no more
    patience.took(123, cost_us=3e6, brought=False)
    assert (
        first_permitted(patience, seen_from(220, 1.95e5)) == 250
    )  # a tenth was earned since; worse than what was idle


def test_steps_twice_as_long_are_looked_into_at_once_and_again_for_one_price_less():
    patience, urgent = Patience(), partial(seen_from, now_us=2.2e5)  # .12 s a step
    patience.took(40, cost_us=1e6, brought=True)
    assert first_permitted(patience, urgent(100)) == 100
    patience.took(100, cost_us=1e6, brought=False)
    assert first_permitted(patience, urgent(200)) == 207
    patience.took(207, cost_us=1e6, brought=False)
    assert first_permitted(patience, urgent(300)) == 324
    patience.took(324, cost_us=1e6, brought=True)
    assert first_permitted(patience, seen_from(340, 4e4)) == 340, "faster"


def test_soundings_are_paid_from_what_was_earned_and_go_on_where_nothing_is_left():
    for cost_us, first in ((0, 100), (4e5, 104), (9e5, 110), (9e6, 112)):
        patience = Patience()
        patience.permits(seen_from(30, 1e5), 30)
        patience.took(40, cost_us=1e6, brought=True)
        patience.sounded(cost_us)
        assert first_permitted(patience, seen_from(100, 1.9e5)) == first


def test_what_owes_more_than_it_may_is_replaced_at_once_and_again_for_a_hundredth_of_the_time():
    patience, mild = Patience(), seen_from(135, 1.2e5)
    owed = Change((Finding(Cause.OWED, 2.0),), 40, (1e5, 1e5))
    assert first_permitted(patience, owed) == 40
    patience.took(40, cost_us=1e5, brought=True)
    assert first_permitted(patience, owed) == 140, ".1 s of 10"
    assert not patience.permits(mild, 135)
    patience.took(135, cost_us=1e6, brought=False)
    assert first_permitted(patience, owed) == 135 + REST, "other turns are paid for otherwise"


def test_what_a_change_cost_that_is_over_does_not_count_for_the_next_one():
    patience = Patience()
    patience.took(40, cost_us=1e6, brought=True)
    mild = partial(seen_from, now_us=1.2e5)  # .02 s a step
    assert not any(patience.permits(mild(100), step) for step in range(100, 149))
    assert first_permitted(patience, mild(149)) == 151, "it goes on"
    patience = Patience()
    patience.took(40, cost_us=1e6, brought=True)
    assert not any(patience.permits(mild(100), step) for step in range(100, 149))
    assert first_permitted(patience, mild(200)) == 250


def test_a_switch_pays_once_the_change_has_lasted():
    assert Patience.pays_after(100.0, 90.0, losses_less=False, is_clear=True, price_us=100.0) == 10.0
    assert Patience.pays_after(100.0, 90.0, losses_less=False, is_clear=False, price_us=100.0) == math.inf
    assert Patience.pays_after(100.0, 97.0, losses_less=False, is_clear=True, price_us=0.0) == math.inf
    for as_fast_us in (99.0, 101.9):
        assert Patience.pays_after(100.0, as_fast_us, losses_less=True, is_clear=False, price_us=100.0) == 0.0
    assert Patience.pays_after(100.0, 102.1, losses_less=True, is_clear=True, price_us=0.0) == math.inf


def test_history_has_the_same_rows_everywhere_and_one_log_line_on_rank_0(caplog):
    from espresso.live.history import Event

    told: list[int] = []
    with caplog.at_level("INFO", logger="espresso"):
        for speaks in (True, False):
            history = History(speaks, lambda rows: told.append(len(rows)))
            history.add(3, Event.BACKED_OFF, "why", "plain", measured_us=5.0)
            assert {"step", "event", "reason", "strategy", "predicted_us", "measured_us"} <= history.rows[0].keys()
            assert history.rows[0]["event"] == "backed_off"
    assert [record.getMessage() for record in caplog.records] == ["step 3, backed off: why; in use: plain"]
    assert told == [1]
