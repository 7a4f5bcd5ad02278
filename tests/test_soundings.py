"""A link that hides behind computing is sounded now and then."""

from __future__ import annotations

import pytest

from espresso.live.sounding import APART, RARELY, SHARE, Soundings
from espresso.live.turns import TRY_MOST
from espresso.live.watch import Cause, Vitals
from tests.world import SOUNDS_MS, World, planner_of, rows_of, run

WITHIN = 40


def test_a_link_that_hides_is_sounded_and_a_faster_one_looked_into():
    """Steps take as long as before: the exchange was hidden, and is."""
    world = World(plain_us=60_000, noise=0.002)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    assert world.soundings >= 2
    assert len(rows_of(planner)) == 1
    world.sounds_us, world.when_measured_us = 5_000.0, 500
    now = run(world, planner, range(100, 100 + 2 * WITHIN), {}, now)
    assert [row[1:] for row in rows_of(planner)[1:]] == [("changed", "signs"), ("switched", "plain")]
    assert "the link is 4 times faster" in planner.history.rows[1]["reason"]
    (changed, *_), (switched, *_) = rows_of(planner)[1:]
    assert switched - changed <= TRY_MOST, "what a step took was known, so plain alone was tried, and once"
    world.soundings = 0
    run(world, planner, range(180, 300), {}, now)
    assert world.soundings == 0, "what encodes nothing has nothing to save"


def test_a_faster_link_is_looked_into_once():
    world = World(plain_us=60_000, noise=0.002)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    world.sounds_us = 5_000.0
    run(world, planner, range(100, 700), {}, now)
    assert [row[1:] for row in rows_of(planner)] == [("decided", "signs"), ("changed", "signs"), ("kept", "signs")]


def test_one_fast_sounding_is_no_faster_link():
    rows, soundings = [Vitals(10_000.0, 8_000.0, 2_000.0, 5_000.0, 3_000.0)], Soundings()

    def heard(link_ms: float, step: int) -> float | None:
        change = soundings.take(step, rows, 1e3 * link_ms, cost_us=1e3)
        return None if change is None else change.ratio(Cause.LINK)

    # A bucket that happens to be full, a busy core, the same again; then the link is faster.
    times = [8.0, 3.0, 9.0, 3.0, 30.0, 8.0, 3.9, 8.1, 3.0, 2.0]
    assert [heard(ms, 10 * number) for number, ms in enumerate(times)] == [None] * 9 + [pytest.approx(0.25, rel=0.05)]
    soundings.begin()
    assert [heard(ms, 100 + at) for at, ms in enumerate((20.0, 20.0, *[8.0] * 6))] == [None] * 8, "slow at first"
    soundings.begin()
    assert [heard(ms, 200 + ms) for ms in (0.4, 0.3, 0.1, 0.1)] == [None] * 4, "less than can be told"


def test_a_link_so_fast_that_nothing_would_show_is_sounded_rarely_until_it_is_slower():
    rows, soundings, step = [Vitals(10_000.0, 8_000.0, 2_000.0, 5_000.0, 3_000.0)], Soundings(), 1000
    apart, found = [], []
    for link_ms in [0.3] * 6 + [20.0] * 6 + [0.3, 0.3]:
        change = soundings.take(step, rows, 1e3 * link_ms, cost_us=2e4)
        found.append(None if change is None else change.ratio(Cause.LINK))
        after = next(at for at in range(step, step + 10_000) if soundings.is_due(at, rows))
        apart.append(after - step)
        step = after
    assert found == [None] * 13 + [pytest.approx(0.025)], "slower is no change: what runs sends little; faster is one"
    assert apart[5] >= RARELY * apart[11] / 2
    assert apart[12] == 0, "looked at again at once"


def test_soundings_are_apart_so_that_what_disturbs_one_does_not_disturb_them_all():
    rows, soundings = [Vitals(10_000.0, 8_000.0, 2_000.0, 5_000.0, 3_000.0)], Soundings()
    assert soundings.is_due(50, rows)
    soundings.take(50, rows, 8_000.0, cost_us=100.0)
    assert [soundings.is_due(step, rows) for step in (51, 50 + APART - 1, 50 + APART)] == [False, False, True]


def test_soundings_are_many_at_first_and_later_a_two_hundredth_of_the_time():
    world = World(plain_us=60_000)
    planner = planner_of(world)
    now = run(world, planner, range(120), {})
    assert world.soundings >= 8
    now = run(world, planner, range(120, 1_000), {}, now)
    assert 8 * SOUNDS_MS < world.sounding_ms < 0.02 * now / 1e6
    world.sounding_ms = 0.0
    end = run(world, planner, range(1_000, 4_000), {}, now)
    most = SHARE * (end - now) / 1e6  # a sounding's own time says when the next one is
    assert 0.5 * most < world.sounding_ms <= 1.2 * most


def test_a_turn_that_keeps_the_strategy_does_not_begin_soundings_anew():
    """They are many at first, and another strategy's were heard already."""
    world = World(plain_us=60_000, noise=0.002)
    planner = planner_of(world)
    now = run(world, planner, range(2_000), {})
    world.sounding_ms, world.compute = 0.0, 1.5
    end = run(world, planner, range(2_000, 2_200), {}, now)
    assert [event for _, event, _ in rows_of(planner)[1:]] == ["changed", "kept"]
    assert world.sounding_ms <= 5 * SOUNDS_MS + SHARE * (end - now) / 1e6
