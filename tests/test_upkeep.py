"""Connections to hosts far apart are kept from idling, and a rank that stopped is not waited for."""

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espresso
from espresso.comm import collectives, groups, upkeep
from espresso.comm.alarm import Progress
from espresso.comm.errors import DisagreementError
from espresso.comm.parameter_server import transport
from espresso.strategies import Cluster, Scope
from tests.ddp import strategy_for
from tests.workers import run_ranks


def comes_true(said: Callable[[], bool]) -> bool:
    """Whether it does in ten seconds."""
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        if said():
            return True
        time.sleep(0.02)
    return False


def is_silent(line: upkeep.Line) -> bool:
    """Whether no beat is sent for a third of a second."""
    before = line.sent
    time.sleep(0.3)
    return line.sent == before


def counted(rank: int) -> tuple[bool, bool, bool, bool, float]:
    """Whether bursts are looked after, beats heard in rest, none sent while there is progress, and none after the other
    rank's stopped; a sum."""
    upkeep.EVERY_S, groups.is_far = 0.02, lambda ends: True  # type: ignore[attr-defined]
    made = groups.Groups(timeout_s=20)
    assert made._upkeep is not None
    (line,) = made._upkeep.lines
    hears = comes_true(lambda: line.heard > 2 * upkeep.MOST_UNHEARD)
    made.barrier()
    steps = itertools.count()
    made.alarm.report = lambda: Progress(next(steps))
    rests_when_busy = comes_true(lambda: is_silent(line))
    made.alarm.report = Progress
    made.barrier()
    if rank:
        made._upkeep.stop()
    stops_unheard = comes_true(lambda: is_silent(line))
    mine, theirs = torch.full((1000,), float(rank + 1)), torch.zeros(1000)
    member = made.scopes[Scope.FLAT].connection(0)
    collectives.allgather(mine, [theirs] * 2, member)()
    spreads = bool(made._upkeep._ends)
    made.close()
    return spreads, hears, rests_when_busy, stops_unheard, float((mine + theirs).mean())


def test_beats_go_on_in_pauses_and_only_to_ranks_that_are_heard() -> None:
    for outcome in run_ranks(counted, 2):
        assert outcome.value == (True, True, True, True, 3.0)


def under_comparison(rank: int) -> bool:
    level: Any = dist
    level.set_debug_level(level.DebugLevel.DETAIL)
    groups.is_far = lambda ends: True  # type: ignore[attr-defined]
    made = groups.Groups(timeout_s=20)
    made.barrier()
    beating = made._upkeep is None or bool(made._upkeep.lines)
    made.close()
    return beating


def test_no_beats_where_torch_compares_operations() -> None:
    outcomes = run_ranks(under_comparison, 2)
    assert [outcome.value for outcome in outcomes] == [False, False]


def left_behind(rank: int) -> bool:
    """Whether a thread goes on for a state that was dropped without being closed."""
    groups.is_far = lambda ends: True  # type: ignore[attr-defined]
    state = espresso.register(DistributedDataParallel(nn.Linear(4, 4)), timeout_s=20).start()
    names = {thread.name for thread in threading.enumerate()}
    assert "espresso-upkeep" in names
    del state
    until = time.monotonic() + 20.0
    while "espresso-upkeep" in names and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
        names = {thread.name for thread in threading.enumerate()}
    return "espresso-upkeep" in names


def test_a_state_that_is_dropped_leaves_no_thread_behind() -> None:
    assert [outcome.value for outcome in run_ranks(left_behind, 2)] == [False, False]


def trials(rank: int, is_observed: bool, folder: str) -> list[tuple[int, int, int]]:
    """Of jobs of one model, dropped one after the other: process groups, sockets, and hooks on a parameter."""
    net, found = nn.Linear(4, 4), list[tuple[int, int, int]]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def trial(number: int) -> None:
        ddp = DistributedDataParallel(net, find_unused_parameters=True)
        settings: Any = {"artifacts_dir": f"{folder}/{number}", "ranks_per_node": 1, "timeout_s": 20}
        if is_observed:
            espresso.observe(ddp, **settings)
        else:
            espresso.register(ddp, strategy=strategy_for(ddp, Cluster(2, 1)), **settings)
        for _ in range(4):
            ddp(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    def rests() -> bool:
        gc.collect()
        return not any(thread.name.startswith("espresso-") for thread in threading.enumerate())

    for number in range(4):
        trial(number)
        assert comes_true(rests)
        hooks: Any = net.weight
        found.append((len(dist.distributed_c10d._world.pg_names), sockets(), len(hooks._post_accumulate_grad_hooks)))
    dist.destroy_process_group()  # and what was dropped last goes with it
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    groups.Groups(timeout_s=20).close()
    assert {path.name for path in Path(folder).glob("*/*")}, "what was seen is on disk"
    return found


def sockets() -> int:
    return sum(os.readlink(path).startswith("socket") for path in Path("/proc/self/fd").glob("*") if path.is_symlink())


@pytest.mark.parametrize("is_observed", [False, True])
def test_jobs_that_are_dropped_leave_nothing_to_those_that_follow(tmp_path: Path, is_observed: bool) -> None:
    for outcome in run_ranks(trials, 2, is_observed, str(tmp_path), deadline_s=60.0):
        made, opened, hooks = zip(*outcome.value, strict=True)
        assert len({*made}) == len({*hooks}) == 1, outcome.value
        assert opened[-1] < opened[0] + 4, "each job has four"


def refused(rank: int) -> int:
    """Hooks on a parameter after a start that failed."""
    net: Any = nn.Linear(4, 4)
    with pytest.raises(DisagreementError):
        espresso.register(
            DistributedDataParallel(net, find_unused_parameters=True), ("efsignsgd", "dgc")[rank], timeout_s=20
        )
    gc.collect()
    return len(net.weight._post_accumulate_grad_hooks)


def test_a_start_that_fails_leaves_no_hooks() -> None:
    assert [outcome.value for outcome in run_ranks(refused, 2)] == [0, 0]


def test_a_job_looks_at_its_connections_again_after_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, looks = list[None](), list[int]()
    monkeypatch.setattr(upkeep, "EVERY_S", 0.001)
    monkeypatch.setattr(upkeep, "spread_bursts", lambda ends: looks.append(len(turns) - 1))
    beside = upkeep.Upkeep([], {}, lambda: turns.append(None))
    try:
        assert comes_true(lambda: len(looks) > 3)
    finally:
        beside.stop()
    assert looks[:4] == [1, 2, 4, 8]


def told(store: dist.TCPStore, rank: int) -> tuple[list[int], int, int]:
    """What the other end sends under six tags, over how many connections; beats heard on one of them meanwhile."""
    mine = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    link = transport.GlooTransport(mine, rank, 2, 20.0, connections=3)
    try:
        places = [np.zeros(1, np.uint8) for _ in range(6)]
        waits = [link.receive(transport.Channel.DATA, 1 - rank, 16 + i, place) for i, place in enumerate(places)]
        for i in range(6):
            number = np.full(1, 10 * rank + i, np.uint8)
            link.send(transport.Channel.DATA, 1 - rank, 16 + i, number).wait(20.0)
        transport.wait_for(waits, transport.Deadline(20.0))
        time.sleep(1.0)
        assert link._upkeep is not None
        ways = {id(link._group(transport.Channel.DATA, tag)) for tag in range(16, 22)}
        return [int(place[0]) for place in places], len(ways), link._upkeep.lines[0].heard
    finally:
        link.close()


def test_servers_connections_are_kept_up_and_payloads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "is_far", lambda ends: True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as ends:
        found = list(ends.map(lambda rank: told(store, rank), range(2)))
    for rank, (numbers, ways, heard) in enumerate(found):
        assert numbers == [10 * (1 - rank) + i for i in range(6)]
        assert ways == 3
        assert heard > 2
