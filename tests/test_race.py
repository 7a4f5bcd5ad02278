"""The race of automatic mode: when it is run, and what becomes of what is carried meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.exchange import make_buckets, reduce_bucket, strategy_of
from espresso.comm.execute.executor import Assignment, Record
from espresso.live.candidates import Candidate, Moved
from espresso.live.history import History
from espresso.live.planner import AutoPlanner
from espresso.live.race import Arm, Race
from espresso.search.terms import Terms
from espresso.strategies import NONE, PLAIN, Choice, Cluster, CompressorSpec, Strategy, parse_option, plan
from tests.ddp import ALLGATHER
from tests.workers import run_ranks

BUCKETS = make_buckets({"a": 3000})
TWO = Cluster(2, 1)


class OneRank:
    """What a planner asks of groups."""

    rank, speaks, beside = 0, True, None

    def all_objects(self, value: Any) -> list[Any]:
        return [value]

    everywhere = all_objects

    def from_rank_0(self, value: Any) -> Any:
        return value


class Found:
    """A search that finds a new candidate each time, under so many names; profiled steps are so far apart."""

    uncompressed_us = 10.0

    def __init__(self, num_names: int = 1, apart: float = 0.0) -> None:
        self.names: list[str] = []
        self.profiled: list[int] = []
        self._num_names, self._apart = num_names, apart

    def __call__(self, records: Any) -> list[Candidate]:
        spec = CompressorSpec.parse(f"dgc:ratio=0.{len(self.names) + 1}")
        chosen = strategy_of(BUCKETS, TWO, Choice(parse_option(ALLGATHER), spec))
        self.names.append(str(spec))
        names = [str(spec) + "'" * number for number in range(self._num_names)]
        return [Candidate(name, chosen, plan(chosen, BUCKETS).order, BUCKETS, 1.0) for name in names]

    def spread(self, records: Any) -> float:
        self.profiled.append(len(records))
        return self._apart

    def after_trying(self) -> None:
        """Nothing to give back."""

    @property
    def is_measured(self) -> bool:
        return bool(self.names)

    def follow(self, in_force: Any) -> bool:
        return True

    def revise(self, change: Any) -> Moved:
        raise AssertionError("nobody watches this job")


def test_all_shards_count_the_same_losses() -> None:
    """They pick alike: also where a shard has nothing of a tensor."""
    buckets = make_buckets({"a": 3000, "b": 3000})
    signs = strategy_of(buckets, TWO, Choice(parse_option(ALLGATHER), CompressorSpec.parse("efsignsgd")))
    shard = signs.over(signs.tensors[:1])
    assert len(shard.choices) == 1
    assert Arm("signs", Assignment(shard)).losses == Arm("signs", Assignment(signs)).losses == 2


def test_what_a_script_does_between_two_steps_is_no_cost_of_a_race() -> None:
    assignment = Assignment(strategy_of(BUCKETS, TWO, PLAIN))
    arms = [Arm(name, replace(assignment)) for name in ("plain", "slow")]
    race, now_ns, steps = Race(arms, block=4, rounds=2), 0, 0
    while True:
        now_ns += 1_000_000 if race.assignment is arms[0].assignment else 3_000_000
        now_ns += 600 * 10**9 if steps == 6 else 0  # ten minutes of evaluation
        steps += 1
        if race.take(Record(0, assignment, done_ns=now_ns, buckets=BUCKETS)) and race.compare(OneRank()):
            break
    assert race.spent_us("plain") == pytest.approx(8 * 2000)


def planner_of(search: Found, *, race_rounds: int, decide_by: int, profile_only: bool = False) -> AutoPlanner:
    """Three plain steps, two of profile; blocks of three."""
    return AutoPlanner(
        strategy_of(BUCKETS, TWO, PLAIN), OneRank(), search, warmup_steps=3, profile_steps=2, race_steps=3,
        race_rounds=race_rounds, decide_by=decide_by, on_profile=lambda _: None,
        history=History(True), profile_only=profile_only,
    )  # fmt: skip


def run(planner: AutoPlanner, steps: int, before: Callable[[int], None] = lambda step: None) -> list[tuple[bool, bool]]:
    """Whether each step compressed, and whether the planner had decided after it; compression takes a tenth."""
    ran: list[tuple[bool, bool]] = []
    done_ns = 0
    for step in range(steps):
        before(step)
        assignment = planner.assign(step)
        compressed = assignment.strategy.compresses
        done_ns += 1 if compressed else 10
        work = planner.after(Record(step, assignment, done_ns=done_ns, buckets=BUCKETS))
        if work is not None:
            work()
        assert planner.decided == (planner.verdict is not None)
        ran.append((compressed, planner.decided))
    return ran


def test_where_the_guard_left_all_exact_that_is_why_nothing_races():
    search = Found()
    search.why_none = ""  # something is predicted to be faster
    planner = planner_of(search, race_rounds=2, decide_by=30)
    for _ in range(2):
        planner.back_off(["a"], 2)
    run(planner, 20)
    assert planner.verdict is not None
    assert (planner.verdict.name, "out of their band" in planner.verdict.reason) == ("plain", True)


def test_another_compressor_drops_the_race_and_runs_another():
    search = Found()
    planner = planner_of(search, race_rounds=1, decide_by=0)

    def before(step: int) -> None:
        if step in (8, 25):  # in the race, and after the decision
            planner.follow({})

    run(planner, 40, before)
    assert search.names == ["dgc:ratio=0.1", "dgc:ratio=0.2", "dgc:ratio=0.3"]
    assert planner.verdict is not None
    assert planner.verdict.name == "dgc:ratio=0.3"


@pytest.mark.parametrize(("decide_by", "race_from"), [(0, 5), (17, 5), (18, 6), (40, 28)])
def test_the_race_is_run_as_late_as_it_may(decide_by, race_from):
    """Blocks of three: plain, compressed, compressed, plain. All is plain until then, and compressed from then on."""
    ran = run(planner_of(Found(), race_rounds=2, decide_by=decide_by), race_from + 15)
    begin, end = race_from + 3, race_from + 9
    compressed = [*range(begin, end), *range(race_from + 12, race_from + 15)]
    assert [step for step, (was, _) in enumerate(ran) if was] == compressed
    assert [decided for _, decided in ran].index(True) == race_from + 11 == max(decide_by, 17) - 1


def test_it_says_what_it_is_doing():
    planner, said = planner_of(Found(), race_rounds=2, decide_by=20), []
    run(planner, 19, lambda step: said.append(planner.doing))
    race = "races plain, dgc:ratio=0.1 in"
    assert said[0] == "begins with the next step"
    assert said[1:4] == ["measures plain steps, from step 3 on"] * 3
    assert said[4] == "measures plain steps, 1 of 2 so far"
    assert said[5:8] == [f"{race} 12 steps, after {left} plain ones" for left in (3, 2, 1)]
    assert said[8:] == [f"{race} {left} steps" for left in range(12, 1, -1)]
    planner.follow({})
    assert planner.doing == "searches again after one of the next steps, which are plain"


@pytest.mark.parametrize(("decide_by", "more"), [(0, []), (29, []), (30, [3]), (31, [4]), (58, [4])])
def test_where_they_are_far_apart_more_steps_are_profiled_if_the_race_has_time(decide_by, more):
    """Twice as many at most. A race of four arms is over in time all the same."""
    search = Found(num_names=3, apart=0.051)
    ran = run(planner_of(search, race_rounds=2, decide_by=decide_by), 60)
    assert search.profiled == [2, *more]
    assert [decided for _, decided in ran].index(True) == max(decide_by, 29) - 1


def test_what_is_only_profiled_is_written_as_soon_as_it_may_be():
    search = Found(apart=0.051)
    ran = run(planner_of(search, race_rounds=2, decide_by=58, profile_only=True), 12)
    assert search.profiled == [2]
    assert [decided for _, decided in ran].index(True) == 4


def test_steps_that_are_near_each_other_are_enough():
    search = Found(apart=0.05)
    run(planner_of(search, race_rounds=2, decide_by=58), 12)
    assert search.profiled == [2]


def test_a_profile_that_is_broken_off_begins_anew():
    search = Found(apart=0.051)
    planner = planner_of(search, race_rounds=2, decide_by=58)
    run(planner, 14, lambda step: planner.restart() if step == 6 else None)
    assert search.profiled == [2, 2, 4]
    half = planner_of(Found(apart=0.051), race_rounds=2, decide_by=58)
    run(half, 6)
    half.resume(strategy_of(BUCKETS, TWO, PLAIN), {})
    assert half._observed == []


def _park(rank: int) -> dict[str, Any]:
    import torch

    from espresso.comm.execute.executor import Assignment, Executor
    from espresso.comm.groups import Groups
    from espresso.comm.keep.store import ResidualStore
    from espresso.live.codecs import HostCodecs
    from espresso.strategies import (
        Bucket,
        Choice,
        CompressorSpec,
        Slot,
        Strategy,
        TensorSpec,
        parse_option,
    )

    groups = Groups(timeout_s=20)
    tensors = (TensorSpec("w", (1000,)),)
    topk = Choice(parse_option("comp > flat.allgather > dec"), CompressorSpec.parse("topk:ratio=0.1"))
    compressed = Assignment(Strategy.uniform(tensors, groups.cluster, topk))
    plain = Strategy.uniform(tensors, groups.cluster)

    class Script:
        now = compressed

        def assign(self, iteration: int) -> Assignment:
            return self.now

        def note(self, record: Any) -> None: ...

        def after(self, record: Any) -> None: ...

    script, store = Script(), ResidualStore()
    executor = Executor(groups, HostCodecs(1), script, store=store)
    bucket = Bucket(0, (Slot("w", 0, 1000),))

    def step(assignment: Assignment, gradient: torch.Tensor) -> torch.Tensor:
        script.now = assignment
        return reduce_bucket(executor, bucket, gradient.clone(), is_last=True, grad_scale=1.0).wait()

    ramp = torch.arange(1000.0) + 1
    step(compressed, ramp)
    kept = store.norm()
    parked = step(Assignment(plain, drain=False), ramp)
    still = store.norm()
    drained = step(Assignment(plain), torch.zeros(1000))
    out = {
        "kept": kept,
        "still": still,
        "parked_is_plain": bool(torch.equal(parked, ramp)),
        "drained": float(drained.sum()),
        "left": store.norm(),
    }
    executor.close()
    groups.close()
    return out


def test_plain_block_parks_what_is_carried_and_draining_sends_it() -> None:
    for outcome in run_ranks(_park, 2):
        value = outcome.value
        assert value["kept"] > 0
        assert value["still"] == value["kept"]
        assert value["parked_is_plain"]
        # Top 10 % of 1..1000 was sent; the rest, 1..900 on each rank, comes with the drain.
        assert value["drained"] == 900 * 901 / 2
        assert value["left"] == 0


def raced(
    steps: dict[str, Callable[[int, int], float]],
    least: Mapping[str, float] | None = None,
    strategies: Mapping[str, Strategy] | None = None,
    **settings: Any,
) -> tuple[Race, int]:
    """A race whose arms take so long in a round's step, and how many rounds it had; a block's first step takes 20."""
    assignment = planner_of(Found(), race_rounds=2, decide_by=0).assign(0)
    given = dict.fromkeys(steps, assignment.strategy) | dict(strategies or {})
    arms = [Arm(name, replace(assignment, strategy=given[name]), (least or {}).get(name, 0.0)) for name in steps]
    race, now_ns, number, place = Race(arms, **{"block": 4, "rounds": 2, **settings}), 0, 0, 0
    while True:
        (name,) = (arm.name for arm in arms if arm.assignment is race.assignment)
        now_ns += int(1e3 * (20.0 if place % 4 == 0 else steps[name](number, place % 4 - 1)))
        place += 1
        if race.take(Record(0, assignment, done_ns=now_ns, buckets=BUCKETS)):
            number, place = number + 1, 0
            if race.compare(OneRank()):
                return race, number


@pytest.mark.parametrize(("names", "rounds"), [("pa", "paap"), ("pab", "pabpba"), ("pabc", "pabcpbcapcab")])
def test_each_of_several_follows_the_first_arm_in_its_turn(names, rounds) -> None:
    assignment = planner_of(Found(), race_rounds=2, decide_by=0).assign(0)
    race, ran = Race([Arm(name, replace(assignment)) for name in names], block=1, rounds=3), ""
    while len(ran) < len(rounds):
        ran += next(arm.name for arm in race.arms if arm.assignment is race.assignment)
        race.take(Record(0, assignment, done_ns=len(ran) * 1000, buckets=BUCKETS))
    assert ran == rounds


def test_a_burst_in_a_block_of_the_first_arm_makes_no_other_arm_faster() -> None:
    race, rounds = raced({"ours": lambda number, _: 5.0 if number else 12.0, "other": lambda *_: 6.0}, drop=1.25)
    assert (rounds, race.best()) == (2, "ours")


def test_what_a_token_bucket_lets_through_in_a_block_wins_no_race() -> None:
    steps = {"ours": lambda *_: 5.0, "sends": lambda *_: 3.0, "sparse": lambda *_: 4.0}
    assert raced(steps)[0].best() == "sends"
    race, _ = raced(steps, {"sends": 4.5, "sparse": 1.0})
    assert (race.best(), race.measured["sends"], race.is_clear("sparse", "sends")) == ("sparse", 4.5, True)


@pytest.mark.parametrize(("plain_us", "best"), [(101.9, "plain"), (102.1, "ours")])
def test_plain_stays_where_it_is_as_fast(plain_us, best) -> None:
    ours = strategy_of(BUCKETS, TWO, Choice(parse_option(ALLGATHER), CompressorSpec.parse("efsignsgd")))
    race, _ = raced({"plain": lambda *_: plain_us, "ours": lambda *_: 100.0}, strategies={"ours": ours})
    assert race.best() == best


@pytest.mark.parametrize(("terms", "best"), [(Terms(), "once"), (Terms(error_budget=2.0), "twice")])
def test_of_what_is_as_fast_the_least_compressed_stays_and_within_a_budget_the_fastest(terms, best) -> None:
    """A tensor that rides as plain numbers is not compressed."""
    buckets, spec = make_buckets({"a": 3000, "rides": 30}), CompressorSpec.parse("efsignsgd")
    options = {"once": ALLGATHER, "twice": "comp > flat.all_to_all > dec > comp > flat.allgather > dec"}
    strategies = {
        name: replace(strategy_of(buckets, TWO, Choice(parse_option(option), spec)), notes=terms.to_meta())
        for name, option in options.items()
    }
    strategies["once"] = strategies["once"].with_choices({"rides": Choice(parse_option(ALLGATHER), NONE)})
    strategies["twice"] = strategies["twice"].with_choices({"rides": PLAIN})
    race, _ = raced({"once": lambda *_: 102.0, "twice": lambda *_: 100.0}, strategies=strategies)
    assert race.best() == best


def test_what_is_not_clear_is_tried_for_more_rounds() -> None:
    noisy = (7.0, 10.0, 15.0)
    race, rounds = raced(
        {"ours": lambda _, place: noisy[place], "other": lambda _, place: noisy[place - 1] / 2}, drop=3.0
    )
    assert (rounds, race.is_clear("other", "ours")) == (2, False)
    race, rounds = raced(
        {"ours": lambda _, place: noisy[place], "other": lambda _, place: noisy[place - 1] / 2}, drop=3.0, most_rounds=9
    )
    assert 2 < rounds < 9
    assert race.is_clear("other", "ours")
    race, rounds = raced(
        {"ours": lambda _, place: noisy[place], "other": lambda _, place: noisy[place - 1] / 2},
        drop=3.0, most_rounds=9, doubts=False,
    )  # fmt: skip
    assert (rounds, race.is_clear("other", "ours")) == (2, True), "the search says so too"
    race, rounds = raced({"ours": lambda *_: 5.1, "other": lambda _, place: 5.0 + place / 10}, drop=3.0, most_rounds=9)
    assert rounds == 2, "a difference that is not worth a switch"


@pytest.mark.parametrize(
    ("first_block", "rounds", "best"), [(5.2, 2, "other"), (6.0, 2, "other"), (3.0, 1, "other"), (8.0, 1, "ours")]
)
def test_a_disturbed_block_beside_one_that_is_known_is_not_the_last_word(first_block, rounds, best) -> None:
    race, had = raced(
        {"ours": lambda *_: 5.0, "other": lambda number, _: 3.0 if number else first_block},
        known={"ours": 5.0}, drop=1.25, most_rounds=5, rounds=1, doubts=False,
    )  # fmt: skip
    assert (had, race.best()) == (rounds, best)


def test_blocks_after_the_first_round_are_shorter_and_what_was_in_use_needs_no_settling() -> None:
    ran: Counter[tuple[str, int]] = Counter()

    def arm(name: str, us: float) -> Callable[[int, int], float]:
        return lambda number, _: ran.update([(name, number)]) or us

    race, rounds = raced(
        {"ours": arm("ours", 5.2), "other": arm("other", 5.0)},
        known={"ours": 5.1}, block=8, later=4, settle=4, rounds=1, most_rounds=2, drop=1.25, doubts=False,
    )  # fmt: skip
    assert (rounds, race.measured["ours"]) == (2, 5.2)
    # Two of the eight steps and one of the four take what `raced` says.
    assert ran == {("other", 0): 6, ("ours", 1): 3, ("other", 1): 3}


@pytest.mark.parametrize(("first_block", "rounds", "best"), [(19.0, 2, "expected"), (15.0, 1, "other")])
def test_what_was_expected_to_be_the_fastest_has_another_block_where_its_only_one_is_far_behind(
    first_block, rounds, best
) -> None:
    race, had = raced(
        {
            "ours": lambda *_: 27.0,
            "expected": lambda number, _: 12.5 if number else first_block,
            "other": lambda *_: 13.7,
        },
        known={"ours": 27.0}, drop=1.25, most_rounds=5, rounds=1, doubts=False,
    )  # fmt: skip
    assert (had, race.best()) == (rounds, best)
