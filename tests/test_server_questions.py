"""Several states ask the servers at the same time, on each worker in an order of its own."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

import espresso
from benchmarks.rank_pool import NUM_RANKS, POOL
from espresso.comm.keep.store import ResidualStore
from espresso.comm.parameter_server import Client, Line, Link, connect, wire
from espresso.comm.parameter_server.transport import Channel
from espresso.comm.parameter_server.wire import Key, Stretch
from espresso.compressors import create
from espresso.compressors.base import Segment
from espresso.live import server_profile
from espresso.live.codecs import HostCodecs
from espresso.live.server_profile import Probe, raw_keys
from espresso.strategies import Cluster, CompressorSpec, Site
from tests.ddp import batch, mlp, strategy_for, wrap
from tests.servers import NUM_SERVERS, client, serving
from tests.test_parameter_server import TWO_WAY
from tests.test_server_blame import Message, Plug
from tests.test_server_blame import serving as serving_by_hand

SIZE, NUM_KEYS = 4096, 6


class State:
    """A state's keys at all servers, and what this worker pushes of them."""

    def __init__(self, client: Client, namespace: int, num_workers: int, timeout_s: float) -> None:
        self._link = Link(client, range(num_workers), ResidualStore(), timeout_s, namespace)
        self._keys = raw_keys(NUM_KEYS, SIZE, range(num_workers))
        self._lines = [Line(key) for key in self._keys]
        self.error = ""

    def install(self) -> None:
        numels = {stretch.tensor: stretch.numel for key in self._keys for stretch in key.stretches}
        try:
            self._link.install(self._keys, dict(enumerate(self._lines)), numels, None, "s")
        except Exception as error:
            self.error = str(error)

    def exchange(self, value: float) -> set[float]:
        """What comes back of everybody's ``value``."""
        data = np.full(SIZE // 4, value, np.float32).view(np.uint8)
        answers = [np.zeros(SIZE, np.uint8) for _ in self._lines]
        for line, answer in zip(self._lines, answers, strict=True):
            self._link.push(line, data, answer, 0, 1.0)
        for line in self._lines:
            self._link.pull(line)
        return set(np.concatenate(answers).view(np.float32).tolist())


def install_side_by_side(states: list[State], reverse: bool) -> list[str]:
    """Each in a thread of its own, one begun after the other; what went wrong."""
    threads = [threading.Thread(target=state.install, daemon=True) for state in states[:: -1 if reverse else 1]]
    for thread in threads:
        thread.start()
        time.sleep(0.3)  # it has asked
    for thread in threads:
        thread.join(30.0)
    return [state.error for state in states]


def run_opposite_orders(rank: int) -> tuple[list[str], list[set[float]]]:
    client().num_servers = NUM_SERVERS
    states = [State(client(), namespace, NUM_RANKS, 5.0) for namespace in (0, 1)]
    errors = install_side_by_side(states, reverse=rank % 2 == 1)
    return errors, [] if any(errors) else [state.exchange(float(10**number)) for number, state in enumerate(states)]


def test_workers_that_ask_for_two_states_in_opposite_orders_get_both():
    with serving(POOL) as servers:
        for errors, sums in POOL.run(run_opposite_orders):
            assert errors == ["", ""]
            assert sums == [{float(NUM_RANKS)}, {10.0 * NUM_RANKS}]
        assert [server.error for server in servers] == [None] * NUM_SERVERS


class Far(Plug):
    """A worker's transport whose control messages to one server take a while, in order."""

    def __init__(self, near: Plug, far: int) -> None:
        self._switch, self.rank, self.size, self.tags = near._switch, near.rank, near.size, near.tags
        self._far = far

    def send(self, channel: Channel, peer: int, tag: int, data: Any) -> Message:
        if channel is Channel.DATA or peer != self._far:
            return super().send(channel, peer, tag, data)
        message, way = Message(data, peer), (channel, self.rank, peer, tag)
        arrive = threading.Timer(1.0, self._switch.pass_on, (message, ("receive", *way), ("send", *way)))
        arrive.daemon = True
        arrive.start()
        time.sleep(0.02)  # timers that end together end in any order
        return message


def test_a_server_hears_of_one_state_while_its_answer_about_another_is_not_taken():
    """A worker takes its answers from one server after the other, and what it says comes to some servers later.

    ::

        server 0 hears   worker 1: b, a   then worker 0: a, b     a's last table is worker 0's, whose next is b's
        server 1 hears   worker 0: a, b   then worker 1: b, a     b's last table is worker 1's, whose next is a's
    """
    with serving_by_hand(2, 2) as (transports, servers):
        found: dict[int, list[str]] = {}

        def work(rank: int) -> None:
            speaks = Client(Far(transports[rank], 2 + rank), 2)
            states = [State(speaks, namespace, 2, 5.0) for namespace in (0, 1)]
            found[rank] = install_side_by_side(states, reverse=rank == 1)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert found == {0: ["", ""], 1: ["", ""]}
        assert [server.error for server in servers] == [None, None]


class Thin(Plug):
    """A transport whose card sends one control message after the other, and takes a while for each."""

    def __init__(self, plug: Plug) -> None:
        self._switch, self.rank, self.size, self.tags = plug._switch, plug.rank, plug.size, plug.tags
        self._waiting: SimpleQueue[tuple[Message, Any]] = SimpleQueue()
        threading.Thread(target=self._send_on, daemon=True).start()

    def send(self, channel: Channel, peer: int, tag: int, data: Any) -> Message:
        if channel is Channel.DATA:
            return super().send(channel, peer, tag, data)
        message = Message(data, peer)
        self._waiting.put((message, (channel, self.rank, peer, tag)))
        return message

    def _send_on(self) -> None:
        while True:
            message, way = self._waiting.get()
            time.sleep(0.03)
            self._switch.pass_on(message, ("receive", *way), ("send", *way))


def test_a_question_has_time_while_pieces_of_it_or_of_its_answers_come(monkeypatch):
    """Each takes a thin card longer than the time-out. Two servers answer at the same time, and are told in turn."""
    monkeypatch.setattr(wire, "PIECE_BYTES", 1 << 12)
    numel, timeout_s = 20 << 10, 0.5
    codecs, spec = HostCodecs(1), CompressorSpec.parse("efsignsgd:raw_below=8")
    size = create(spec).layout([Segment("w", 0, numel)], np.float32).num_bytes
    keys = [
        Key(-1, -1, (0,), (Stretch("w", at, numel),), "float32", spec, True, True, True, False, size, size, 0, 0)
        for at in (0, numel)
    ]
    kept = np.arange(1, 2 * numel + 1, dtype=np.float32)
    with serving_by_hand(1, 2, timeout_s=timeout_s) as ((transport,), servers):
        speaks = Client(transport, 1)
        link, numels = Link(speaks, (0,), ResidualStore(), timeout_s, 0), {"w": kept.size}
        link.install(keys, {}, numels, None, "s")
        link.load({("w", Site.SERVER): [(0, kept, 0)]}, numels)
        speaks.transport = Thin(transport)
        for server in servers:
            server.transport = Thin(server.transport)
        once = {start: values for start, values, _ in link.snapshot()["w", Site.SERVER]}
        assert np.array_equal(np.concatenate([once[0], once[numel]]), kept)
        link.load({("w", Site.SERVER): [(0, kept, 0)]}, numels)
        twice = {held.start: held.values for one in servers for held in one._held.fetch(0, frozenset(), 0, 1)}
        assert np.array_equal(np.concatenate([twice[0], twice[numel]]), 2 * kept)
        assert [server.error for server in servers] == [None, None]
    codecs.close()


def run_two_in_automatic_mode(rank: int) -> tuple[list[tuple[bool, str]], int]:
    """Two models decide in one backward pass; whether the servers were measured, and what was wrong. The numbers that
    this rank gave to states of the servers.
    """
    connect(client())
    client().num_servers = NUM_SERVERS
    before = client().new_namespace()
    models = [wrap(mlp(20, 60, 5, seed=seed)) for seed in (1, 2)]
    states = [
        espresso.register(
            ddp, "fp16", ranks_per_node=1, timeout_s=15.0, offload_threads=1, compile_beside=False, adapt=False,
            warmup_steps=3, profile_steps=1, race_steps=3, race_rounds=1, decide_by=0,
        )
        for ddp in models
    ]  # fmt: skip
    begun: list[Any] = []
    both = threading.Barrier(2)

    class Late(Probe):
        """Both models begin to measure the servers together; on odd ranks the second's keys go first."""

        def __init__(self, client: Client, groups: Any, *more: Any) -> None:
            if groups not in begun:
                begun.append(groups)
                both.wait(10.0)
            if (groups is states[0].session.groups) == (rank % 2 == 1):
                time.sleep(0.1)
            super().__init__(client, groups, *more)

    server_profile.Probe = Late  # type: ignore[misc]
    try:
        for step in range(4):
            losses = [ddp(batch(rank, step, 20)).square().mean() for ddp in models]
            torch.stack(losses).sum().backward()
        ended = [(state.session.groups in begun, str(state.session.executor.error or "")) for state in states]
        return ended, (client().new_namespace() - before) // client().num_workers - 1
    finally:
        server_profile.Probe = Probe  # type: ignore[misc]
        connect(None)
        for state in states:
            state.close()


def run_with_matrices(rank: int) -> tuple[bool, str]:
    """Automatic mode between a compressor of several rounds, which no server runs, and one that they do."""
    connect(client())
    client().num_servers = NUM_SERVERS
    ddp = wrap(mlp(256, 256, 5, seed=1))
    state = espresso.register(
        ddp, ["powersgd:rank=2", "fp16"], ranks_per_node=1, timeout_s=15.0, offload_threads=1, compile_beside=False,
        adapt=False, warmup_steps=3, profile_steps=1, race_steps=3, race_rounds=1, decide_by=0,
    )  # fmt: skip
    try:
        for step in range(24):
            ddp(batch(rank, step, 256)).square().mean().backward()
        specs = {cost.spec for cost in state.session.decider._search.job.costs.compute}
        return "powersgd:rank=2" in specs and state.decided, str(state.session.executor.error or "")
    finally:
        connect(None)
        state.close()


def run_introduced(rank: int) -> str:
    """A compressor that comes while the job runs, and whose kernels take a server longer than the time-out."""
    connect(client())
    client().num_servers = 1
    cluster = Cluster(NUM_RANKS, 1, num_servers=1)
    ddp = wrap(mlp(20, 60, 5, seed=1))
    state = espresso.register(
        ddp, "fp16", strategy_for(ddp, cluster, TWO_WAY, "fp16"), ranks_per_node=1, timeout_s=2.0, offload_threads=1
    )
    try:
        for step, spec in enumerate(("fp16", "int8")):
            if step:
                state.use(strategy_for(ddp, cluster, TWO_WAY, spec))
            ddp(batch(rank, step, 20)).square().mean().backward()
        return str(state.error or "")
    finally:
        connect(None)
        state.close()


def test_servers_compile_a_compressor_that_is_introduced_before_it_is_pushed():
    prepared: list[str] = []

    def prepare(specs: Any, dtypes: Any) -> None:
        prepared.extend(spec.name for spec in specs)
        time.sleep(3.0 * ("int8" in prepared))

    with serving(POOL, prepare=prepare):
        assert POOL.run(run_introduced) == [""] * NUM_RANKS
    assert set(prepared) == {"fp16", "int8"}
    assert prepared[-1] == "int8"


def test_servers_are_not_asked_for_compressors_that_they_do_not_run():
    with serving(POOL):
        assert POOL.run(run_with_matrices) == [(True, "")] * NUM_RANKS


def test_two_models_in_automatic_mode_decide_in_one_backward_pass():
    with serving(POOL):
        # Of a model's numbers, which are few, its state takes one, and all probes together two.
        assert POOL.run(run_two_in_automatic_mode) == [([(True, "")] * 2, 6)] * NUM_RANKS
