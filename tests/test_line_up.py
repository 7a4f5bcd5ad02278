"""Two jobs of one process that decide in the same backward pass: their races come one after the other, on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from espresso.live.planner import AutoPlanner
from tests.world import OneRank, World, planner_of, run

LATEST_S = 20.0


class Ranks:
    """Two ranks, threads here, which tell each other something."""

    def __init__(self) -> None:
        self.told: list[Any] = [None, None]
        self.meet = threading.Barrier(2)


@dataclass
class Told(OneRank):
    """A rank's groups.

    Attributes:
        asked: has this rank said anything since its search?
    """

    here: int = 0
    among: Ranks = field(default_factory=Ranks)
    searched: bool = False
    asked: threading.Event = field(default_factory=threading.Event)

    def everywhere(self, value: Any) -> list[Any]:
        self.among.told[self.here] = value
        if self.searched:
            self.asked.set()
        self.among.meet.wait(LATEST_S)
        told = list(self.among.told)
        self.among.meet.wait(LATEST_S)
        return told


@dataclass
class Searching(World):
    """Its search lasts until ``until``."""

    until: Callable[[], Any] = lambda: None

    def __call__(self, records: Any) -> Any:
        found = super().__call__(records)
        self.until()
        self.groups.searched = True  # type: ignore[attr-defined]
        return found


def test_two_jobs_that_decide_at_once_race_one_after_the_other_on_all_ranks():
    """The first job is done first on one rank, the second one on the other."""
    jobs = Ranks(), Ranks()
    groups = [[Told(here=rank, among=job) for rank in range(2)] for job in jobs]
    late = {(1, 0): groups[0][0], (0, 1): groups[1][1]}
    planners: list[list[AutoPlanner]] = [[], []]
    for job in range(2):
        for rank in range(2):
            after = late.get((job, rank))
            wait = (lambda: None) if after is None else (lambda after=after: after.asked.wait(LATEST_S))
            world = Searching(plain_us=60_000, groups=groups[job][rank], until=wait)
            planners[job].append(planner_of(world, decide_by=0))
    for job in range(2):
        for rank in range(2):
            planners[job][rank]._others_race = lambda job=job, rank=rank: planners[1 - job][rank].to_race
    threads = [
        threading.Thread(target=run, args=(planner._search, planner, range(5), {}), daemon=True)
        for both in planners
        for planner in both
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LATEST_S)
    pauses = [[planner._pause for planner in both] for both in planners]
    assert all(planner.to_race for both in planners for planner in both)
    assert pauses[0][0] == pauses[0][1]
    assert pauses[1][0] == pauses[1][1]
    first, then = sorted(both[0] for both in pauses)
    assert first == 0
    assert then == planners[0][0].to_race - pauses[0][0]
