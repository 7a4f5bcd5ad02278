"""Some faults of ``python -m benchmarks.chaos``, and its judgement; a start's are in ``test_lifecycle.py``."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from benchmarks.chaos.faults import FAULTS, Ending
from benchmarks.chaos.places import PLACES
from benchmarks.chaos.trial import Plan, Verdict, blames, play
from benchmarks.emulated import why_not_permitted

TIMEOUT_S = {Ending.GOES_ON: 12.0}
"""Of the jobs, if not 4 seconds: who is to go on must not lose a rank that a busy machine keeps waiting."""

WITHIN_S = 800.0
"""With nothing compiled a slow machine took 250 s for all, and more than 340 where it was busy besides (warm 18)."""

AT_ONCE = 4
"""Trials that run at the same time: most of their time is waiting."""

LOOPBACK = (
    ("killed", "hierarchical", "save", 0),
    ("stopped for good", "all-gather", "steady", 2),
    ("stopped a while", "automatic", "profile", 3),
    ("exception in the script", "automatic", "search", 0),
    ("memory limit", "two-way", "switch", 3),
    ("garbage on every port", "all-gather", "steady", 0),
    ("full disk", "plain", "start-up", 0),
    ("another build on one rank", "plain", "start-up", 2),
)
TWO_HOSTS = (("host down", "hierarchical", "steady", 0), ("host down a while", "all-gather", "warm-up", 1))
REFUSAL = why_not_permitted()


def plan_of(fault: str, kind: str, phase: str, victim: int, place: str) -> Plan:
    return Plan(
        next(one for one in FAULTS if one.name == fault),
        next(one for one in PLACES if one.name == place),
        kind,
        phase,
        victim,
        delay_s=0.05,
    )


@pytest.fixture(scope="module")
def verdicts() -> Iterator[dict[Plan, Future[Verdict]]]:
    plans = [plan_of(*row, "loopback") for row in LOOPBACK]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun: dict[Plan, Future[Verdict]] = {}
        for plan in plans:
            begun[plan] = pool.submit(play, plan, TIMEOUT_S.get(plan.fault.ending, 4.0))
            wait([begun[plans[0]]], WITHIN_S)  # with nothing on disk it compiles for all, once
        yield begun


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S)
@pytest.mark.parametrize("row", LOOPBACK, ids=lambda row: ", ".join(map(str, row)))
def test_a_job_goes_on_or_its_survivors_name_the_rank(row, verdicts):
    verdict = verdicts[plan_of(*row, "loopback")].result(WITHIN_S)
    assert not verdict.wrong, f"{verdict.wrong}\n{verdict.log}"


@pytest.mark.slow
@pytest.mark.skipif(REFUSAL is not None, reason=f"no network namespaces: {REFUSAL}")
@pytest.mark.parametrize("row", TWO_HOSTS, ids=lambda row: ", ".join(map(str, row)))
def test_a_job_on_two_hosts_goes_on_or_its_survivors_name_the_host(row):
    plan = plan_of(*row, "two hosts")
    verdict = play(plan, TIMEOUT_S.get(plan.fault.ending, 4.0))
    assert not verdict.wrong, f"{verdict.wrong}\n{verdict.log}"


@pytest.mark.parametrize(
    ("fault", "text", "is_right"),
    [
        ("killed", "espresso on rank 0 failed in iteration 3: Connection closed. That is rank 1: it died", True),
        ("killed", "espresso on rank 1 failed in iteration 3: Connection closed. That is rank 0: it died", False),
        ("killed", "That is rank 2, which failed first: Timed out. Rank 1 does not answer", True),
        ("killed", "That is rank 1: it died. Ranks 1, 2 do not answer", False),
        ("killed", "That is rank 1: it died. Rank 2 is behind", False),
        ("killed", "Rank 2 does not answer: stopped, dead, or not to be reached from rank 1", False),
        ("killed", "no progress for 9 s; waiting for 'flat.allgather' with ranks 0, 1", False),
        ("killed", "worker rank 1 died while key 3 waited: server rank 4 lost it", True),
        ("another build on one rank", "rank 1 runs espresso 2, rank 0 runs espresso 1", True),
        ("another build on one rank", "rank 2 runs espresso 2, rank 0 runs espresso 1", False),
        ("host down", "Ranks 2, 3 do not answer: stopped, dead, or not to be reached from rank 0", True),
        ("host down", "That is rank 2: it died. Rank 1 does not answer", False),
        ("host down", "Rank 3 failed first: Timed out. Ranks 0, 1 do not answer", True),
        ("host down", "Rank 1 failed first: Timed out. Ranks 0, 2 do not answer", False),
        ("server killed", "server rank 4 (127.0.0.1) is gone", True),
        ("server killed", "That is rank 1: it died", False),
    ],
)
def test_what_an_error_of_rank_0_blames(fault, text, is_right):
    plan = plan_of(fault, "plain", "steady", 1, "two hosts")
    assert plan.fault.ending is not Ending.GOES_ON
    assert blames(plan, 0, text) is is_right
