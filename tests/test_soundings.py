"""A link that hides behind computing is sounded now and then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from espresso.live.change import Cause
from espresso.live.sounding import APART, FEW, SHARE, Soundings
from espresso.live.turns import TRY_MOST
from espresso.live.watch import Vitals
from tests.world import OneRank, Rows, World, planner_of, rows_of, run

WITHIN = 40
WAITS_US = 5_000.0
"""Of a sounding: its 20 ms, for the quarter of a step in which the link is in use; at the least."""


def rows_with(link_ms: float, wire_us: float) -> list[Vitals]:
    return [Vitals(10_000.0, 8_000.0, 2_000.0, wire_us, 3_000.0, link=1e3 * link_ms)]


def test_a_link_that_hides_is_sounded_and_a_faster_one_looked_into():
    """Steps take as long as before: the exchange was hidden, and is."""
    world = World(plain_us=60_000, noise=0.002)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    assert world.groups.soundings >= 2
    assert len(rows_of(planner)) == 1
    world.groups.sounds_us, world.when_measured_us = 5_000.0, 500
    now = run(world, planner, range(100, 100 + 2 * WITHIN), {}, now)
    assert [row[1:] for row in rows_of(planner)[1:]] == [("changed", "signs"), ("switched", "plain")]
    assert "the link is 4 times faster" in planner.history.rows[1]["reason"]
    (changed, *_), (switched, *_) = rows_of(planner)[1:]
    assert switched - changed <= TRY_MOST, "what a step took was known, so plain alone was tried, and once"
    world.groups.soundings = 0
    run(world, planner, range(180, 300), {}, now)
    assert world.groups.soundings == 0, "what encodes nothing has nothing to save"


def test_a_faster_link_is_looked_into_once():
    world = World(plain_us=60_000, noise=0.002)
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    world.groups.sounds_us = 5_000.0
    run(world, planner, range(100, 700), {}, now)
    assert [row[1:] for row in rows_of(planner)] == [("decided", "signs"), ("changed", "signs"), ("kept", "signs")]


def test_one_fast_sounding_is_no_faster_link():
    soundings = Soundings()

    def heard(link_ms: float, step: int) -> float | None:
        change, _ = soundings.take(step, rows_with(link_ms, 1_000.0))
        return None if change is None else change.ratio(Cause.LINK)

    # A bucket that happens to be full, a busy core, the same again; then the link is faster.
    times = [8.0, 3.0, 9.0, 3.0, 30.0, 8.0, 3.9, 8.1, 3.0, 2.0]
    assert [heard(ms, 10 * number) for number, ms in enumerate(times)] == [None] * 9 + [pytest.approx(0.375)]
    soundings.begin()
    assert [heard(ms, 100 + at) for at, ms in enumerate((20.0, 20.0, *[8.0] * 6))] == [None] * 8, "slow at first"
    soundings.begin()
    assert [heard(ms, 200 + ms) for ms in (0.4, 0.3, 0.1, 0.1)] == [None] * 4, "less than can be told"


def test_a_link_that_was_fast_is_sounded_on_and_slower_is_another_one():
    soundings, found = Soundings(), []
    for number, link_ms in enumerate([0.3] * 6 + [20.0] * 6 + [0.3, 0.3]):
        change, _ = soundings.take(10 * number, rows_with(link_ms, 10_000.0))
        found.append(None if change is None else change.ratio(Cause.LINK))
    assert found == [None] * 13 + [pytest.approx(0.15)], "slower is no change: what runs sends little; faster is one"


def test_soundings_are_apart_once_a_few_have_told_what_the_link_takes():
    rows, soundings = rows_with(8.0, 100.0), Soundings()
    for step in range(50, 50 + FEW):
        assert soundings.is_due(step, rows)
        soundings.take(step, rows)
    last = 50 + FEW - 1
    assert [soundings.is_due(step, rows) for step in (last + 1, last + APART - 1, last + APART)] == [False, False, True]


def test_what_a_sounding_costs_is_what_it_may_hold_up():
    late, last = Vitals(10_000.0, 8_000.0, 2_000.0, 5_000.0, 3_000.0, link=9_000.0), rows_with(8.0, 2_500.0)[0]
    assert Soundings().take(0, [late, last])[1] == pytest.approx(8_000.0 / 2)


def test_exchanges_that_run_at_once_use_the_link_once():
    world = World(plain_us=60_000, noise=0.0)
    planner = planner_of(world)
    now = run(world, planner, range(60), {})
    costs_us = []
    for step in range(60, 400):
        record = world.record(step, planner, now)
        encode, exchange = record.intervals
        part = (exchange.end_ns - exchange.start_ns) // 4
        again = [replace(exchange, end_ns=exchange.end_ns - part), replace(exchange, start_ns=exchange.start_ns + part)]
        record.intervals = [*again[::-1], exchange, encode]
        now, before_us = record.done_ns, planner.probed_us
        work = planner.after(record)
        if work is not None:
            work()
        costs_us.append(planner.probed_us - before_us)
    assert max(costs_us) == pytest.approx(20_000.0 * 4 / 20)  # 4 of a step's 20 ms


def test_soundings_are_many_at_first_and_later_a_hundredth_of_the_time():
    world = World(plain_us=60_000)
    planner = planner_of(world)
    now = run(world, planner, range(120), {})
    assert world.groups.soundings >= 6
    now = run(world, planner, range(120, 1_000), {}, now)
    assert 8 * WAITS_US < planner.probed_us < 0.02 * now / 1e3
    before_us = planner.probed_us
    end = run(world, planner, range(1_000, 4_000), {}, now)
    most = SHARE * (end - now) / 1e3  # what one costs says when the next one is
    assert 0.5 * most < planner.probed_us - before_us <= 1.2 * most


def test_a_turn_that_keeps_the_strategy_does_not_begin_soundings_anew():
    """They are many at first, and another strategy's were heard already."""
    world = World(plain_us=60_000, noise=0.002)
    planner = planner_of(world)
    run(world, planner, range(2_000), {})
    world.groups.soundings, world.compute = 0, 1.5
    run(world, planner, range(2_000, 2_200), {})
    assert [event for _, event, _ in rows_of(planner)[1:]] == ["changed", "kept"]
    assert world.groups.soundings <= 10


def test_a_sounding_under_way_is_over_before_a_turn_measures():
    waited: list[int] = []

    class Slow(Rows):
        def rows(self) -> torch.Tensor:
            waited.append(len(world.changes))
            return super().rows()

    class SlowLink(OneRank):
        def start_gather(self, mine: torch.Tensor, *, timed: bool = False) -> Rows:
            return Slow(mine) if timed else Rows(mine)

    world = World(plain_us=60_000, groups=SlowLink())
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    assert planner.watch is not None
    assert planner.watch.sounding is not None
    assert waited == [], "nobody waits for it otherwise"
    world.compute = 2.5
    run(world, planner, range(100, 130), {}, now)
    assert waited[:1] == [0]
    assert world.changes


def test_a_sounding_counts_once_all_ranks_have_heard_it():
    class Two(Rows):
        """The other rank's sounding takes longer than a window."""

        def rows(self) -> torch.Tensor:
            theirs = self._mine.clone()
            theirs[-1] *= world.other_heard
            return torch.stack([self._mine, theirs])

    class TwoRanks(OneRank):
        def start_gather(self, mine: torch.Tensor, *, timed: bool = False) -> Rows:
            self.soundings += timed
            return Rows(mine, 20_000.0) if timed else Two(mine)

    world = World(plain_us=60_000, groups=TwoRanks())
    world.other_heard = 0.0
    planner = planner_of(world)
    now = run(world, planner, range(100), {})
    assert (world.groups.soundings, planner.probed_us) == (1, 0.0)
    world.other_heard = 1.0
    run(world, planner, range(100, 120), {}, now)
    assert world.groups.soundings > 1
    assert planner.probed_us > 0
