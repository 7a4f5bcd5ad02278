"""Which ranks share a node, and the groups of every scope on real ranks."""

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import espresso
from benchmarks.rank_pool import POOL
from espresso.comm.errors import TopologyError
from espresso.comm.groups import Groups
from espresso.comm.nodes import cluster_from_nodes, node_key, why_flat
from espresso.comm.pairs import MUCH, card_rate
from espresso.flight.processors import Delays
from espresso.live import codec_costs, profiler
from espresso.live.beside import Computing
from espresso.live.codec_costs import measure_compressor
from espresso.live.codecs import HostCodecs
from espresso.live.machine import cores_per_rank
from espresso.live.profiler import LinkReport, Place, measure_links
from espresso.strategies import Choice, Cluster, CompressorSpec, Device, Routine, Scope, Strategy, parse_option
from tests.workers import run_ranks


def nodes(text: str) -> list[tuple[str, int, int | None]]:
    """One letter per rank: its host."""
    return [(letter, 0, None) for letter in text]


@pytest.mark.parametrize(
    ("hosts", "cluster"),
    [("a", (1, 1)), ("aaa", (1, 3)), ("abcd", (4, 1)), ("aabb", (2, 2)), ("bbbaaaccc", (3, 3))],
)
def test_even_nodes_form_a_cluster(hosts, cluster):
    assert cluster_from_nodes(nodes(hosts)) == Cluster(*cluster)


def test_uneven_nodes_leave_flat_options_and_the_reason_names_them():
    assert cluster_from_nodes(nodes("aab")) == Cluster(3, 1)
    assert why_flat(nodes("aab")) == "nodes have different numbers of ranks (a: ranks 0,1; b: ranks 2)"
    assert cluster_from_nodes(nodes("abab")) == Cluster(4, 1)
    assert "not consecutive (a: ranks 0,2; b: ranks 1,3;" in str(why_flat(nodes("abab")))
    assert why_flat(nodes("aabb")) is None


def test_long_rank_lists_are_cut_short():
    assert "a: ranks 0,1,2,3,4,5,6,7,…; b: ranks 9" in str(why_flat(nodes("aaaaaaaaab")))


def test_hosts_namespaces_and_launchers_tell_nodes_apart():
    same_host = [("host", 1, 0), ("host", 1, 1), ("host", 2, 0), ("host", 2, None)]
    assert cluster_from_nodes(same_host) == Cluster(4, 1)


def test_the_key_of_this_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    host, namespace, number = node_key()
    assert (host, number) == (socket.gethostname(), None)
    assert namespace == os.stat("/proc/self/ns/net").st_ino
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert node_key() == (host, namespace, 1)


def test_groups_need_torch_distributed():
    with pytest.raises(TopologyError, match="init_process_group"):
        Groups()


# On real ranks: two nodes of two, as the launcher's variables say


def describe(rank: int, ranks_per_node: int | None) -> tuple[Cluster, dict[str, tuple[tuple[int, ...], int]]]:
    groups = Groups(ranks_per_node=ranks_per_node, timeout_s=20)
    members = {scope.value: (m.ranks, m.index) for scope, m in groups.scopes.items()}
    for member in groups.scopes.values():
        # Every group works, and is neither the default one nor another's.
        total = torch.tensor([1 << rank])
        dist.all_reduce(total, group=member.group)
        assert int(total) == sum(1 << other for other in member.ranks)
        assert member.group is not dist.group.WORLD
    assert len({id(m.group) for m in groups.scopes.values()} | {id(groups.control.group)}) == len(members) + 1
    cluster = groups.cluster
    groups.close()
    groups.close()
    return cluster, members


def connect(rank: int) -> dict[str, tuple[int, bool]]:
    groups = Groups(ranks_per_node=2, timeout_s=20, connections=3)
    found = {}
    for scope, member in groups.scopes.items():
        ways = [member.connection(number) for number in range(6)]
        for way in ways[:3]:
            total = torch.tensor([1 << rank])
            dist.all_reduce(total, group=way.group)
            assert int(total) == sum(1 << other for other in member.ranks)
        found[scope.value] = len({id(way.group) for way in ways}), ways[0] is member and ways[3:] == ways[:3]
    groups.close()
    return found


def test_exchanges_go_in_turn_over_several_connections_between_nodes():
    for found in POOL.run(connect):
        assert found == {"flat": (3, True), "intra": (1, True), "inter": (3, True)}


def look_at_cards(rank: int, ranks_per_node: int) -> list[float | None]:
    groups = Groups(ranks_per_node=ranks_per_node, timeout_s=20)
    try:
        looks = itertools.count()  # a clock by which every send takes one
        return groups.all_objects(card_rate(groups, lambda: float(next(looks))))
    finally:
        groups.close()


@pytest.mark.parametrize(("ranks_per_node", "known"), [(2, (0, 2)), (1, (0, 1, 2, 3)), (4, ())])
def test_the_first_rank_of_a_node_says_what_its_card_sends(ranks_per_node, known):
    for rates in POOL.run(look_at_cards, ranks_per_node):
        assert tuple(rank for rank, rate in enumerate(rates) if rate is not None) == known
        # (Of a machine too busy to send more within the time only the first is known.)
        assert all(rate in (MUCH[0], max(MUCH)) for rate in rates if rate is not None)


def test_scopes_of_two_nodes_of_two_ranks():
    for rank, (cluster, members) in enumerate(POOL.run(describe, None)):
        node, local = divmod(rank, 2)
        assert cluster == Cluster(2, 2)
        assert members == {
            "flat": ((0, 1, 2, 3), rank),
            "intra": ((2 * node, 2 * node + 1), local),
            "inter": ((local, local + 2), node),
        }


@pytest.mark.parametrize(("ranks_per_node", "cluster"), [(1, (4, 1)), (4, (1, 4))])
def test_ranks_per_node_overrides_the_launcher(ranks_per_node, cluster):
    for rank, (found, members) in enumerate(POOL.run(describe, ranks_per_node)):
        assert found == Cluster(*cluster)
        assert members == {"flat": ((0, 1, 2, 3), rank)}


def refuse(rank: int, ranks_per_node: int) -> str:
    try:
        Groups(ranks_per_node=ranks_per_node, timeout_s=20)
    except TopologyError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("ranks_per_node", [3, 0, 8])
def test_ranks_per_node_must_divide_the_ranks(ranks_per_node):
    for text in POOL.run(refuse, ranks_per_node):
        assert f"ranks_per_node={ranks_per_node} does not divide the 4 ranks" in text


def in_a_subgroup(rank: int) -> tuple[int, Cluster, tuple[int, ...], list[int], str] | None:
    subgroup = dist.new_group([1, 3], backend="gloo")
    # A rank may be in groups that its peers are not in: a stage of a pipeline, say.
    more = [dist.new_group([3, 2], backend="gloo") for _ in range(2)]
    if rank not in (1, 3):
        return None
    assert len(more) == 2
    groups = Groups(subgroup, timeout_s=20)
    told = groups.from_rank_0(f"from {rank}")
    everybody = groups.all_objects(rank)
    groups.barrier()
    found = groups.rank, groups.cluster, groups.scopes[Scope.FLAT].ranks, everybody, told
    groups.close()
    return found


def test_a_subgroup_has_ranks_of_its_own():
    answers = POOL.run(in_a_subgroup)
    assert answers == [
        None,
        (0, Cluster(2, 1), (1, 3), [1, 3], "from 1"),
        None,
        (1, Cluster(2, 1), (1, 3), [1, 3], "from 1"),
    ]


def uneven(rank: int) -> tuple[bool, float]:
    """A step on three ranks and one, with a compressor."""
    os.environ["GROUP_RANK"] = "0" if rank < 3 else "1"
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    choice = Choice(parse_option("comp > flat.allgather > dec"), CompressorSpec.parse("efsignsgd"))
    try:
        with closing(espresso.register(model, "efsignsgd", lambda t, c: Strategy.uniform(t, c, choice))) as state:
            model(torch.full((2, 64), 1.0 + rank)).sum().backward()
            weight = model.module.weight.grad
            assert weight is not None
            return state.session.groups.cluster == Cluster(4, 1), float(weight.sum())
    finally:
        os.environ["GROUP_RANK"] = str(rank // 2)


def test_a_job_on_uneven_nodes_runs_flat():
    answers = POOL.run(uneven)
    assert answers == [(True, answers[0][1])] * 4
    assert answers[0][1] > 0


def stalled_links(rank: int) -> list[tuple[float, float]]:
    """The first routine's curve, with two stalls of 0.2 s on rank 0 where a routine is timed for the first time."""
    calls = 0

    def settle() -> None:
        nonlocal calls
        calls += 1
        # Per size: once to warm up, once alone, three loops. The first size's second try adds a call.
        if rank == 0 and calls in (2, 13):
            time.sleep(0.2)

    groups = Groups(timeout_s=20)
    try:
        return list(measure_links(groups, place=Place(settle=settle)).curves[0].points)
    finally:
        groups.close()


def links_held_up(rank: int, us_of: Callable[[int, int], float]) -> LinkReport:
    """What is measured where the exchange with this number, of so many bytes, is there so much later."""
    start_of, numbers = profiler.starter, itertools.count()

    def starter(*which: Any, **more: Any) -> Any:
        start = start_of(*which, **more)

        def begin() -> Any:
            rest, there = start(), time.perf_counter() + us_of(next(numbers), which[3]) / 1e6

            def wait() -> None:
                rest()
                time.sleep(max(there - time.perf_counter(), 0.0))

            return wait

        return begin

    profiler.starter = starter
    groups = Groups(timeout_s=20)
    try:
        return measure_links(groups)
    finally:
        profiler.starter = start_of
        groups.close()


def far(number: int, size: int) -> float:
    """A connection that starts slowly for what is no longer small."""
    return 30_000.0 if size < 1 << 16 else 120_000.0


def mostly_late(number: int, size: int) -> float:
    """Three of four exchanges find a processor that wakes late."""
    return 20_000.0 if number % 4 else 0.0


def test_latency_is_told_from_what_holds_a_link():
    for outcome in run_ranks(links_held_up, 2, far):
        assert outcome.value.in_flight > 1
        for curve in outcome.value.curves:
            assert 15_000.0 < curve.latency_us <= curve.alone[0][1], curve.routine
            assert curve.alone[0][1] >= 30_000.0
            # Neither latency nor a slow start makes a routine too slow to be measured at larger sizes.
            # The allreduce of a whole bucket is measured larger: it grows by round trips.
            assert curve.alone[-1][0] == (profiler.WHOLE_FAR if curve.routine is Routine.ALLREDUCE else 1 << 22)


def test_what_only_most_exchanges_wait_for_is_no_latency():
    for outcome in run_ranks(links_held_up, 2, mostly_late):
        # (On a busy machine the others take a while too.)
        assert all(curve.latency_us < 10_000.0 for curve in outcome.value.curves)


def encoded(rank: int) -> list[tuple[int, float]]:
    """Of two sizes: how many different groups of numbers are encoded in a row, and what one is then said to take."""
    spec, numbers, rows = CompressorSpec.parse("int8"), list[int](), list[int]()
    codecs = HostCodecs(1)
    codec: Any = codecs(spec, Device.TRAINING)
    encode = codec.encode

    def noted(encoding: Any, payload: Any) -> None:
        numbers.append(id(encoding))
        encode(encoding, payload)

    def timed(step: Callable[[], object]) -> float:
        numbers.clear()
        step()
        rows.append(len(set(numbers)))
        return 800.0

    codec.encode = noted
    groups = Groups(timeout_s=20)
    try:
        found = []
        for size in (1 << 12, 1 << 14):
            rows.clear()
            cost = measure_compressor(
                groups, codecs, spec, [Device.TRAINING], largest=1 << 14, sizes=[size], place=Place(time_us=timed)
            )[0]
            found.append((max(rows), cost.time_us(size)))
        return found
    finally:
        groups.close()
        codecs.close()


def test_compressors_are_timed_in_a_row_each_with_its_own_numbers():
    for outcome in run_ranks(encoded, 2):
        assert outcome.value == [(4, pytest.approx(200.0)), (1, pytest.approx(800.0))]


def on_one_core(rank: int) -> tuple[float, float]:
    """Microseconds of an encode by ranks that share a core with somebody: with what they wait for it, and without."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(mine)])
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    groups, codecs, spec = Groups(timeout_s=60), HostCodecs(1), CompressorSpec.parse("efsignsgd")
    try:
        codecs.warm_up([spec], ["float32"])
        groups.barrier(patient=True)
        size = 1 << 21
        together, apart = (
            measure_compressor(groups, codecs, spec, [Device.TRAINING], largest=4 * size, sizes=[size], cores=cores)[
                0
            ].time_us(size)
            for cores in (1.0, 0.5)
        )
        return together, apart
    finally:
        busy.kill()
        busy.wait()
        groups.close()
        codecs.close()
        os.sched_setaffinity(0, mine)


@pytest.mark.skipif(Delays.open() is None, reason="the system does not say how long a thread waited for a core")
def test_of_a_core_that_ranks_share_compressors_are_timed_alone():
    """The timeline counts that they share it."""
    for outcome in run_ranks(on_one_core, 2):
        together, apart = outcome.value
        assert apart < 0.8 * together


def test_a_stall_is_not_taken_for_the_links_rate():
    for outcome in run_ranks(stalled_links, 2):
        sizes = [size for size, _ in outcome.value]
        assert sizes[:3] == [4096.0, 65536.0, 262144.0]
        assert len(sizes) > 3, "a stall ended the measurement"
        assert max(us for _, us in outcome.value[:3]) < 100_000.0


def beside(rank: int) -> tuple[float, float, float]:
    """Cores that 0.1 s of work on its core takes from what computes beside it, and waiting; their number."""
    mine, groups = os.sched_getaffinity(0), Groups(timeout_s=20)
    os.sched_setaffinity(0, [min(mine)])
    numbers = np.ones(1 << 16, np.float32)

    def work() -> None:
        until = time.perf_counter() + 0.1
        while time.perf_counter() < until:
            np.abs(numbers, out=numbers)

    try:
        computing = Computing(groups)
        busy, idle = (min(computing.taken_us(run) / 1e5 for _ in range(3)) for run in (work, partial(time.sleep, 0.1)))
        return busy, idle, cores_per_rank(groups)
    finally:
        groups.close()
        os.sched_setaffinity(0, mine)


def test_what_an_exchange_takes_is_what_computations_beside_it_lose():
    """Half of a core that both want; of a wait nothing."""
    for outcome in run_ranks(beside, 2):
        busy, idle, cores = outcome.value
        assert 0.25 * cores < busy < 0.75 * cores
        assert idle < 0.15 * cores


def forgotten(rank: int) -> list[str]:
    """What happens to a codec that is timed: caches emptied, compressions, decodes."""
    happened: list[str] = []
    emptied = codec_costs._forgetting

    def forgetting(num_bytes: int) -> Callable[[], None]:
        forget = emptied(num_bytes)

        def noted() -> None:
            happened.append(f"emptied of {num_bytes} bytes")
            forget()

        return noted

    def timed(step: Callable[[], object]) -> float:
        happened.append("timed")
        return 1.0

    codec_costs._forgetting = forgetting
    groups, codecs, spec = Groups(timeout_s=20), HostCodecs(1), CompressorSpec.parse("efsignsgd")
    try:
        measure_compressor(
            groups, codecs, spec, [Device.TRAINING], largest=1 << 14, sizes=[1 << 14], place=Place(time_us=timed)
        )
        return happened
    finally:
        codec_costs._forgetting = emptied
        groups.close()
        codecs.close()


def test_compressors_are_timed_on_numbers_that_are_in_no_cache():
    """A step goes through weights, gradients and averages of all parameters between two compressions of the same."""
    for outcome in run_ranks(forgotten, 2):
        assert outcome.value == [f"emptied of {12 << 14} bytes", "timed", "timed"] * 5
