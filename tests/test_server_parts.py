"""The parts of the parameter server, each alone: roles, places of keys, messages, plain payloads, slots, stores."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from benchmarks.rank_pool import RANKS
from espresso.comm.environment import Launch
from espresso.comm.errors import EspressoError, ProtocolError, TopologyError
from espresso.comm.keep.store import ResidualStore
from espresso.comm.parameter_server import Client, Line, Link, transport, wire
from espresso.comm.parameter_server.board import MpiMail
from espresso.comm.parameter_server.holdings import Holdings
from espresso.comm.parameter_server.join import ServerSettings, assign_roles
from espresso.comm.parameter_server.places import Bearing, balance, place
from espresso.comm.parameter_server.plain import PlainCodec, smaller
from espresso.comm.parameter_server.server import Server
from espresso.comm.parameter_server.sums import KeySum, Slots
from espresso.comm.parameter_server.transport import Channel, Deadline, GlooTransport, LinkError, wait_for
from espresso.comm.parameter_server.wire import Flag, Header, Held, Key, Op, Stretch, Table
from espresso.compressors import create
from espresso.compressors.base import Decoding, Encoding, Feedback, Segment
from espresso.live.codecs import HostCodecs
from espresso.live.server_profile import raw_keys
from espresso.model.servers import shared_out
from espresso.strategies import Cluster, CompressorSpec, Device, Run, Sharing, Site, shares_by_rule
from tests.test_server_blame import connected


def test_roles():
    nodes = [("a",), ("a",), ("a",), ("b",), ("b",), ("b",)]
    assert assign_roles(nodes, ServerSettings(servers=2)).workers == (0, 1, 2, 3)
    per_node = assign_roles(nodes, ServerSettings(servers_per_node=1))
    assert (per_node.workers, per_node.servers) == ((0, 1, 3, 4), (2, 5))
    with pytest.raises(TopologyError, match="6 servers of 6 ranks leave no worker"):
        assign_roles(nodes, ServerSettings(servers=9))
    both = assign_roles([*nodes, ("c",)], ServerSettings(servers=1, servers_per_node=1))
    assert (both.workers, both.servers) == ((0, 1, 3, 4), (2, 5, 6))
    # One of the last ranks shares a machine with workers: those come first.
    assert assign_roles([*nodes[:3], ("c",), ("a",)], ServerSettings(servers=2)).servers == (4, 3)
    with pytest.raises(ValueError, match="or both"):
        ServerSettings()


@pytest.mark.parametrize(("of_job", "used"), [(None, 0.25), (1.0, 1.0)])
def test_a_server_gives_back_as_much_as_its_key_says_unless_the_job_does(of_job, used):
    spec, numel = CompressorSpec.parse("efsignsgd:raw_below=8"), 512
    size = create(spec).layout([Segment("w", 0, numel)], np.float32).num_bytes
    key = Key(
        1, 0, (0, 1), (Stretch("w", 0, numel),), "float32", spec, True, True, True, False, size, size, 0, 0, gain=0.25
    )
    codecs = HostCodecs(1)
    summed = KeySum(key, codecs, ResidualStore(gain=of_job), 0, 0)
    assert summed.residual is not None
    assert summed.residual.gain == used
    codecs.close()


def test_a_key_that_moves_hands_over_what_it_kept_and_no_more():
    spec, numel = CompressorSpec.parse("efsignsgd:raw_below=8"), 512
    size = create(spec).layout([Segment("w", numel, numel)], np.float32).num_bytes
    key = Key(1, 0, (0, 1), (Stretch("w", numel, numel),), "float32", spec, True, True, True, False, size, size, 0, 0)
    table = Table(0, (0, 1), (key,), {"w": 2 * numel}, None, "s", True, None, frozenset(), 1.0)
    codecs = HostCodecs(1)
    holdings, kept = Holdings(0, codecs, 1), np.arange(1, numel + 1, dtype=np.float32)
    holdings.install(table)
    holdings.place(0, [Held("w", numel, kept)])
    installed, _ = holdings.install(replace(table, keys=(replace(key, number=2, server=1),)))
    (orphan,) = installed.orphans
    assert (orphan.tensor, orphan.start, orphan.values.nbytes) == ("w", numel, kept.nbytes)
    assert np.array_equal(orphan.values, kept)
    assert holdings.fetch(0, frozenset(), 0, 1) == []  # it is the worker's now
    codecs.close()


def test_balance_is_even_in_bytes_and_counts_what_is_there():
    assert balance([8, 1, 1, 1, 5], 2, [0, 0]) == [0, 1, 1, 1, 1]
    assert balance([3], 3, [5, 0, 9]) == [1]
    random = np.random.default_rng(0)
    loads = random.integers(1, 4 << 20, 200).tolist()
    total = np.bincount(balance(loads, 3, [0, 0, 0]), weights=loads)
    assert total.max() < 1.01 * total.min()


def parts_of(keys: list[Key], bearing: Bearing) -> list[float]:
    """What part of all bytes each server gets."""
    found = place(keys, bearing, [])
    return list(np.bincount(found, [key.raw_bytes for key in keys], len(bearing.near)) / sum(k.raw_bytes for k in keys))


def test_a_slower_card_or_processor_gets_less_and_machines_share_their_card():
    keys = raw_keys(300, 4096, range(4))
    alike = Bearing.alike(range(3), (0.0,) * 3)
    assert parts_of(keys, alike) == pytest.approx([1 / 3] * 3, abs=0.01)
    assert parts_of(keys, replace(alike, card_us=(1.0, 2.0, 2.0))) == pytest.approx([0.5, 0.25, 0.25], abs=0.01)
    busy = replace(alike, card_us=(1e-3,) * 3, processor_us=(1.0, 1.0, 2.0))
    assert parts_of(keys, busy) == pytest.approx([0.4, 0.4, 0.2], abs=0.01)
    assert parts_of(keys, Bearing.alike((0, 0, 2), (0.0,) * 3)) == pytest.approx([0.25, 0.25, 0.5], abs=0.01)
    by_size = replace(busy, sharing=Sharing.SIZES)
    assert parts_of(keys, by_size) == pytest.approx([1 / 3] * 3, abs=0.01)


@pytest.mark.parametrize("dedicated", [1, 2, 4, 8])
@pytest.mark.parametrize("machines", [2, 4, 8])
def test_both_kinds_get_what_bytepss_rule_says_where_only_alike_cards_count(machines, dedicated):
    """The rule, the placing of keys and the model's shares are three ways to the same split."""
    cluster = Cluster(machines, 1, machines + dedicated, True, dedicated)
    rule = shared_out(cluster, 1.0, 1.0, 1e-9, (), Sharing.SIZES)
    found = shared_out(cluster, 1.0, 1.0, 1e-9)
    assert max(found.worker_card, found.server_card) == pytest.approx(max(rule.worker_card, rule.server_card))
    near = (1 / machines,) * machines + (0.0,) * dedicated
    parts = parts_of(raw_keys(1000, 4096, range(4)), Bearing.alike(range(machines + dedicated), near))
    assert sum(parts[machines:]) <= dedicated * shares_by_rule(machines, machines, dedicated)[1] + 0.01
    busiest = max(1 / machines + parts[0] * (machines - 2) / machines, parts[machines])
    assert busiest == pytest.approx(max(rule.worker_card, rule.server_card), abs=0.01)


def test_a_key_of_few_on_its_way_back_from_a_server_of_its_own_is_waited_for():
    """One of three keys would come back when what the servers beside the workers hold has long been there."""
    bearing = Bearing.alike((0, 1, 2, 3, 3), (1 / 3,) * 3 + (0.0,) * 2)
    assert sorted(place(raw_keys(3, 4096, range(3)), bearing, ())) == [0, 1, 2]
    slower = replace(bearing, card_us=(1.0,) * 3 + (1.1,) * 2)
    assert max(place(raw_keys(4, 4096, range(3)), slower, ())) == 2  # beside the workers nothing is waited for
    assert sum(parts_of(raw_keys(300, 4096, range(3)), bearing)[3:]) == pytest.approx(0.4, abs=0.01)


def test_the_rule_counts_machines_whose_workers_are_few():
    uneven = Bearing.alike(range(3), (0.75, 0.25, 0.0), Sharing.SIZES)
    assert parts_of(raw_keys(300, 4096, range(4)), uneven) == pytest.approx([0.25, 0.25, 0.5], abs=0.01)


def test_servers_of_both_kinds_are_never_slower_than_the_better_kind_alone():
    for work in (1e-6, 0.3, 3.0):
        for server_us in (0.2, 1.0, 5.0):
            times = []
            for apart, beside in ((2, 0), (0, 4), (2, 4)):
                cluster = Cluster(4, 1, apart + beside, beside > 0, apart if beside else 0)
                load = shared_out(cluster, 1.0, server_us, work)
                times.append(max(load.worker_card, load.server_card * server_us, load.processor * work))
            assert times[2] <= min(times[:2]) * (1 + 1e-9)


def test_headers_round_trip_and_strangers_are_refused():
    header = Header(Op.PUSH, 3, 77, Flag.RAW | Flag.KEPT, 12, 1 << 33, 0.25)
    assert Header.unpack(header.pack()) == header
    residuals = Header(Op.ANSWER, 4, num_bytes=5 << 30)
    assert Header.unpack(residuals.pack()) == residuals
    with pytest.raises(ProtocolError, match="do all machines run the same espresso"):
        Header.unpack(np.zeros(56, np.uint8))
    wrong = header.pack()
    wrong[5] = 99
    with pytest.raises(ProtocolError, match="unknown parameter-server operation 99 from rank 3"):
        Header.unpack(wrong)


def test_a_body_travels_in_pieces(monkeypatch):
    monkeypatch.setattr(wire, "PIECE_BYTES", 1000)
    here, there = connected(2)
    kept = (Held("w", 3, np.arange(2000, dtype=np.float32)),)
    sends = wire.say(here, 1, 16, Op.ANSWER, kept)
    header = wire.hear(there, 0, 16, Deadline(5.0))
    found = wire.Body(there, 0, 16, header).read(Deadline(5.0))
    wait_for(sends, Deadline(5.0))
    assert (header.op, len(sends)) == (Op.ANSWER, 10)
    assert np.array_equal(found[0].values, kept[0].values)


def test_payloads_larger_than_raw_go_raw():
    codec = HostCodecs(1)(CompressorSpec.parse("topk:ratio=0.9,raw_below=1"), Device.TRAINING)
    segments = [Segment("w", 0, 100)]
    plain = smaller(codec, segments, np.float32)
    assert isinstance(plain, PlainCodec)
    assert smaller(codec, [Segment("w", 0, 10_000)], np.float32) is not codec  # 6 bytes for each of 9000
    assert smaller(HostCodecs(1)(CompressorSpec("int8"), Device.TRAINING), [Segment("w", 0, 5000)], "f4") is not None
    layout = plain.compressor.layout(segments)
    assert layout.num_bytes == 400
    source, starts = np.arange(100, dtype=np.float32), np.zeros(1, np.int64)
    old, new = np.ones(100, np.float32), np.full(100, 7, np.float32)
    payload = np.zeros((2, 400), np.uint8)
    assert plain.encode(Encoding(layout, source, starts, scale=2.0, feedback=Feedback(old, new, starts)), payload[0])
    payload[1] = payload[0]
    out = np.empty_like(source)
    assert plain.decode(Decoding(layout, out, starts, scale=0.5), payload)
    assert np.array_equal(out, 2 * source + 1)  # what was kept is sent, and nothing is kept
    assert not new.any()
    feedback = Feedback(old, new, starts, 0.25)  # 4 are owed: one of them goes, three stay
    assert plain.encode(Encoding(layout, source, starts, scale=2.0, feedback=feedback), payload[0])
    assert np.array_equal(payload[0].view(np.float32), 2 * source + 1)
    assert np.array_equal(new, np.full(100, 0.75, np.float32))


def test_slots_wait_for_memory_and_reuse_it():
    slots = Slots(100)
    first = slots.take(80)
    got = []
    waiting = threading.Thread(target=lambda: got.append(slots.take(40)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    slots.give(first)
    waiting.join(5.0)
    assert got[0].nbytes == 40
    slots.give(got[0])
    assert slots.take(40) is got[0]
    slots.give(got[0])
    assert slots.take(500).nbytes == 500  # larger than the limit: alone, but not never


def test_a_store_places_what_a_server_is_given():
    store = ResidualStore()
    residual = store.new_residual(Site.SERVER, [Run("w", 10, 0, 0, 5)], np.float32, 0)
    store.adopt([residual], {"w": 15})
    store.place("w", Site.SERVER, (12, np.ones(3, np.float32), 0))
    assert residual.old.tolist() == [0, 0, 1, 1, 1]


# -- over MPI --------------------------------------------------------------------------------------


def run_large_message() -> tuple[list[int], list[int]]:
    """What comes of a message of three pieces that are taken one by one, and of three messages taken as one."""
    from mpi4py import MPI

    me, data = transport.MpiTransport(MPI.COMM_SELF, [0]), np.arange(25, dtype=np.uint8)
    parts, whole = [np.zeros(size, np.uint8) for size in (10, 10, 5)], np.zeros(25, np.uint8)
    transport.MPI_BYTES = 10
    waits = [me.send(Channel.DATA, 0, 16, data), me.receive(Channel.DATA, 0, 17, whole)]
    transport.MPI_BYTES = 25
    waits += [me.receive(Channel.DATA, 0, 16, part) for part in parts]
    waits += [me.send(Channel.DATA, 0, 17, piece) for piece in transport.cut(data, 10)]
    wait_for(waits, Deadline(20.0))
    me.close()
    return np.concatenate(parts).tolist(), whole.tolist()


def run_failed_message() -> tuple[str, list[int]]:
    """What is said of a message that is too large for its place, and what comes of another one meanwhile."""
    from mpi4py import MPI

    transport.MPI_BYTES = 1 << 20
    me, large, place = transport.MpiTransport(MPI.COMM_SELF, [0]), np.ones(1000, np.uint8), np.zeros(8, np.uint8)
    # Open MPI writes to itself past a place's end, where there is room here, and of few bytes it does not tell.
    too_short = me.receive(Channel.DATA, 0, 16, np.zeros(1000, np.uint8)[:4])
    waits = me.receive(Channel.DATA, 0, 17, place)
    me.send(Channel.DATA, 0, 16, large)
    said = ""
    try:
        too_short.wait(20.0)
    except LinkError as error:
        said = str(error)
    me.send(Channel.DATA, 0, 17, large[:8]).wait(20.0)
    waits.wait(20.0)
    me.close()
    return said, place.tolist()


def run_another_world() -> str:
    """What is said of a world of one where the launcher says three."""
    try:
        MpiMail(Launch("openmpi", 1, 3, 1, 3, None), 5.0)
    except TopologyError as error:
        return str(error)
    return ""


OVER_MPI = (run_large_message, run_failed_message, run_another_world)


def play(pipe: Any) -> None:
    """In a process of its own, which is MPI's whole world."""
    pipe.send({scenario.__name__: scenario() for scenario in OVER_MPI})
    from mpi4py import MPI

    MPI.Finalize()


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    pytest.importorskip("mpi4py")
    ours, theirs = RANKS.Pipe()
    process = RANKS.Process(target=play, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the end of a process that failed is heard
    assert ours.poll(100.0)
    found: dict[str, Any] = ours.recv()
    process.join(20.0)
    return found


def test_a_message_that_mpi_cannot_count_goes_in_pieces(played):
    assert played["run_large_message"] == (list(range(25)), list(range(25)))


def test_a_message_that_fails_is_no_other_messages_failure(played):
    said, other = played["run_failed_message"]
    assert "truncated" in said.lower()
    assert other == [1] * 8


def test_a_world_of_mpi_that_is_not_the_launchers_says_both_sizes(played):
    said = "the variables of openmpi say rank 1 of 3, MPI says rank 0 of 1: start the job with the mpirun of"
    assert played["run_another_world"].startswith(said)


# -- in threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_two_jobs_that_push_in_any_order_share_a_servers_memory(reverse):
    """Two models in one backward pass: each worker's threads push theirs in an order of its own. Memory for one."""
    size, timeout_s = 1 << 16, 10.0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connected_as(rank: int) -> GlooTransport:
        return GlooTransport(dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False), rank, 3)

    def serve() -> None:
        codecs = HostCodecs(1)
        with suppress(EspressoError):  # its workers leave without a word
            Server(connected_as(2), 2, codecs, engines=1, memory_bytes=3 * size, timeout_s=timeout_s).serve()
        codecs.close()

    def work(rank: int) -> None:
        client, states = Client(connected_as(rank), 2), []
        for namespace in (0, 2):
            link, keys = Link(client, (0, 1), ResidualStore(), timeout_s, namespace), raw_keys(1, size, (0, 1))
            line = Line(keys[0])
            link.install(keys, {0: line}, {"probe 0": size // 4}, None, "probe")
            states.append((link, line, np.ones(size // 4, np.float32).view(np.uint8), np.zeros(size, np.uint8)))
        for link, line, numbers, answer in states[:: -1 if reverse and rank else 1]:
            link.push(line, numbers, answer, 0, 1.0)
            time.sleep(0.2)
        for link, line, _, answer in states:
            link.pull(line)
            sums.append(float(answer.view(np.float32).sum()))

    sums: list[float] = []
    threads = [threading.Thread(target=serve, daemon=True)]
    threads += [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join(30.0)
    assert sums == [2.0 * size / 4] * 4
