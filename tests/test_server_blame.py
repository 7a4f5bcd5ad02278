"""What a server says when a worker does not take what it sends, and what it does meanwhile for the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from espresso.comm.errors import EspressoError
from espresso.comm.keep.store import ResidualStore
from espresso.comm.parameter_server import Client, Line, Link
from espresso.comm.parameter_server.server import Server
from espresso.comm.parameter_server.transport import Channel, LinkError
from espresso.comm.parameter_server.wire import (
    BODIES,
    HEADER_BYTES,
    Flag,
    Header,
    Installed,
    Key,
    Op,
    Stretch,
    Table,
    Tag,
)
from espresso.live.codecs import HostCodecs
from espresso.strategies import NONE

BYTES = 4096


class Switch:
    """Messages between the ranks of one process: they pass when sent and received, and nothing ever closes.

    Over Gloo a time-out closes the connection, so that several threads hear of it at once.
    """

    def __init__(self) -> None:
        self._waiting: dict[Any, deque[Message]] = {}
        self._lock = threading.Lock()

    def pass_on(self, message: Message, there: Any, here: Any) -> Message:
        """Match with what waits ``there``, else wait ``here``."""
        with self._lock:
            if not self._waiting.get(there):
                self._waiting.setdefault(here, deque()).append(message)
                return message
            other = self._waiting[there].popleft()
        source, target = (message, other) if here[0] == "send" else (other, message)
        target.data[:] = source.data
        source.over.set()
        target.over.set()
        return message


@dataclass
class Message:
    data: Any
    peer: int
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.over.wait(timeout_s):
            raise LinkError(f"rank {self.peer}: no message within {timeout_s:g} s", self.peer)


class Plug:
    """One rank's transport; it notes the tags of data."""

    def __init__(self, switch: Switch, rank: int, size: int) -> None:
        self._switch, self.rank, self.size = switch, rank, size
        self.tags: set[int] = set()

    def send(self, channel: Channel, peer: int, tag: int, data: Any) -> Message:
        self.tags |= {tag} if channel is Channel.DATA else set()
        way = (channel, self.rank, peer, tag)
        return self._switch.pass_on(Message(data, peer), ("receive", *way), ("send", *way))

    def receive(self, channel: Channel, peer: int, tag: int, data: Any) -> Message:
        way = (channel, peer, self.rank, tag)
        return self._switch.pass_on(Message(data, peer), ("send", *way), ("receive", *way))

    def close(self) -> None:
        pass


def connected(size: int) -> list[Plug]:
    """The transports of so many ranks in this process."""
    switch = Switch()
    return [Plug(switch, rank, size) for rank in range(size)]


@contextmanager
def serving(
    num_workers: int, num_servers: int = 1, timeout_s: float = 20.0, silence_s: float = 60.0, **more: Any
) -> Iterator[tuple[list[Any], list[Server]]]:
    """The workers' transports, and servers that run in threads."""
    codecs = HostCodecs(1)

    def serve(server: Server) -> None:
        with suppress(EspressoError):  # the server keeps it in ``error``
            server.serve()

    transports = connected(num_workers + num_servers)
    servers = [
        Server(one, num_workers, codecs, timeout_s=timeout_s, silence_s=silence_s, **more)
        for one in transports[num_workers:]
    ]
    for server in servers:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
    yield transports[:num_workers], servers
    codecs.close()


def table(workers: tuple[int, ...], number: int, timeout_s: float) -> Table:
    namespace = number >> 16
    tensor = f"w{namespace}"
    key = Key(
        number, 0, workers, (Stretch(tensor, 0, BYTES // 4),), "float32", NONE, False, False, False, True,
        BYTES, BYTES, 0, 0,
    )  # fmt: skip
    return Table(namespace, workers, (key,), {tensor: BYTES // 4}, None, "s", True, None, frozenset(), timeout_s)


class Worker:
    """Speaks the protocol by hand, to the one server."""

    def __init__(self, transport: Any, server: int) -> None:
        self.transport, self.server = transport, server

    def say(self, op: Op, body: Any) -> None:
        data = BODIES.pack(body)
        header = Header(op, self.transport.rank, Tag.FIRST, num_bytes=data.nbytes).pack()
        for tag, message in ((Tag.HEADER, header), (Tag.BODY, data)):
            self.transport.send(Channel.CONTROL, self.server, tag, message).wait(10.0)

    def hear(self, timeout_s: float = 10.0) -> Any:
        header = np.empty(HEADER_BYTES, np.uint8)
        self.transport.receive(Channel.CONTROL, self.server, Tag.FIRST, header).wait(timeout_s)
        body = np.empty(Header.unpack(header).num_bytes, np.uint8)
        self.transport.receive(Channel.CONTROL, self.server, Tag.FIRST + 1, body).wait(timeout_s)
        return BODIES.unpack(body)

    def push(self, number: int, tag: int) -> None:
        self.announce(number)
        self.send(tag)

    def announce(self, number: int) -> None:
        header = Header(Op.PUSH, self.transport.rank, number, Flag.RAW, 0, BYTES).pack()
        self.transport.send(Channel.CONTROL, self.server, Tag.HEADER, header).wait(10.0)

    def send(self, tag: int) -> None:
        data = np.ones(BYTES // 4, np.float32).view(np.uint8)
        self.transport.send(Channel.DATA, self.server, tag, data).wait(10.0)

    def leave(self) -> None:
        header = Header(Op.LEAVE, self.transport.rank).pack()
        self.transport.send(Channel.CONTROL, self.server, Tag.HEADER, header).wait(10.0)

    def pull(self, tag: int) -> float:
        answer = np.empty(BYTES, np.uint8)
        self.transport.receive(Channel.DATA, self.server, tag, answer).wait(10.0)
        return float(answer.view(np.float32)[0])


def wait_for_error(server: Server, seconds: float) -> str:
    until = time.monotonic() + seconds
    while server.error is None and time.monotonic() < until:
        time.sleep(0.02)
    return str(server.error)


def test_a_worker_that_does_not_take_its_answer_is_named_not_the_one_that_offered_last():
    with serving(2, timeout_s=30.0) as (transports, (server,)):
        first, last = (Worker(transport, 2) for transport in transports)
        first.say(Op.INSTALL, table((0, 1), 1, timeout_s=2.0))
        first.say(Op.FETCH, (9, frozenset(), 0, 1))
        assert first.hear() == []  # its table has been taken; from here on it does not listen
        last.say(Op.INSTALL, table((0, 1), 1, timeout_s=2.0))
        assert isinstance(last.hear(), Installed)
        assert "worker rank 0 died or left" in wait_for_error(server, 10.0)


def test_a_worker_that_does_not_take_its_last_answer_holds_up_no_other_state():
    with serving(3, timeout_s=30.0) as (transports, (server,)):
        silent, busy, other = (Worker(transport, 3) for transport in transports)
        other.say(Op.INSTALL, table((2,), 7 << 16, timeout_s=20.0))
        other.hear()
        for worker in (silent, busy):
            worker.say(Op.INSTALL, table((0, 1), 1, timeout_s=3.0))
        tag = [worker.hear().tags[1] for worker in (silent, busy)][1]
        for worker in (silent, busy):
            worker.push(1, tag)
        assert busy.pull(tag) == 2.0
        for worker in (silent, busy):  # the first has not taken its answer of the key that goes
            worker.say(Op.INSTALL, table((0, 1), 2, timeout_s=3.0))
        time.sleep(0.3)
        begin = time.monotonic()
        other.say(Op.FETCH, (7, frozenset(), 0, 1))
        assert other.hear() == []
        assert time.monotonic() - begin < 1.5
        assert "worker rank 0 died or left" in wait_for_error(server, 10.0)


def test_a_worker_that_left_is_named_at_once_when_the_next_push_comes():
    """Also by a push that was announced before it left, and by a new plan."""
    with serving(2, timeout_s=30.0) as (transports, (server,)):
        leaver, pusher = (Worker(transport, 2) for transport in transports)
        for worker in (leaver, pusher):
            worker.say(Op.INSTALL, table((0, 1), 1, timeout_s=20.0))
        tag = [worker.hear().tags[1] for worker in (leaver, pusher)][1]
        pusher.announce(1)
        time.sleep(0.3)
        leaver.leave()
        time.sleep(0.3)
        pusher.send(tag)
        assert "worker rank 0 died or left" in wait_for_error(server, 3.0)
    with serving(2, timeout_s=30.0) as (transports, (server,)):
        leaver, planner = (Worker(transport, 2) for transport in transports)
        leaver.leave()
        time.sleep(0.3)
        planner.say(Op.INSTALL, table((0, 1), 1, timeout_s=20.0))
        assert "worker rank 0 died or left" in wait_for_error(server, 3.0)


def test_nothing_follows_a_farewell():
    """A state is closed in one thread, slowly, while another one leaves."""
    with serving(1) as ((transport,), _):
        client, send = Client(transport, 1), transport.send
        said: list[Op] = []
        closes, leaves = threading.Event(), threading.Event()

        def slowly(channel: Channel, peer: int, tag: int, data: Any) -> Message:
            op = Header.unpack(data).op
            if op is Op.CLOSE:
                closes.set()
                leaves.wait(0.5)
            said.append(op)
            if op is Op.LEAVE:
                leaves.set()
            return send(channel, peer, tag, data)

        transport.send = slowly
        closer = threading.Thread(target=client.close_state, args=(0, 2.0))
        closer.start()
        assert closes.wait(10.0)
        client.leave(10.0)
        closer.join(10.0)
        client.close_state(0, 2.0)
        assert said == [Op.CLOSE, Op.LEAVE]


def test_tags_stay_below_what_every_mpi_has():
    with serving(1, 2) as (transports, servers):
        client = Client(transports[0], 1)
        for namespace in (3, 40_000):
            link = Link(client, (0,), ResidualStore(), 10.0, namespace)
            for turn in range(3):
                keys = [table((0,), 1, 1.0).keys[0] for _ in range(20)]
                lines = {index: Line(key) for index, key in enumerate(keys)}
                link.install(keys, lines, {"w0": BYTES // 4}, None, "s")
                data, answers = np.full(BYTES, turn, np.uint8), [np.zeros(BYTES, np.uint8) for _ in keys]
                for line, answer in zip(lines.values(), answers, strict=True):
                    link.push(line, data, answer, 0, 1.0)
                for line in lines.values():
                    link.pull(line)
                assert all((answer == turn).all() for answer in answers)
        client.leave(5.0)
        tags = set().union(*(transport.tags for transport in (*transports, *(s.transport for s in servers))))
        assert tags
        assert max(tags) <= 32767
        assert len({line.tag for line in lines.values()}) == 10  # ten keys at each of two servers


def test_more_keys_than_numbers_are_an_error():
    link = Link(Client(connected(2)[0], 1), (0,), ResidualStore(), 1.0, 3)
    keys = table((0,), 1, 1.0).keys * 65_537
    with pytest.raises(EspressoError, match="65537 keys of one job at its servers are more than 65536: use"):
        link.install(keys, {}, {"w0": BYTES // 4}, None, "s")
    with pytest.raises(EspressoError, match="state number 65536 of the servers' 65536"):
        Link(link.client, (0,), ResidualStore(), 1.0, 65_536)


def test_a_server_that_hears_nothing_ends_by_itself():
    with serving(1, silence_s=0.3) as (_, (server,)):
        text = wait_for_error(server, 10.0)
        assert "worker rank 0 died or left between its pushes" in text
        assert "no message within 0.3 s" in text


def test_a_worker_that_has_nothing_to_say_is_no_failure_while_it_lives():
    with serving(1, silence_s=0.5) as ((transport,), (server,)):
        send, said = transport.send, list[Op]()

        def listened(channel: Channel, peer: int, tag: int, data: Any) -> Message:
            said.append(Header.unpack(data).op)
            return send(channel, peer, tag, data)

        transport.send = listened
        client = Client(transport, 1, sign_s=0.02)
        assert wait_for_error(server, 1.2) == "None"
        client.leave(5.0)
        time.sleep(0.1)
        assert set(said[:-1]) == {Op.LIVES}
        assert said[-1] is Op.LEAVE  # which nothing follows


def test_a_server_that_compiles_has_time_as_long_as_it_says_that_it_lives():
    def prepare(specs: Any, dtypes: Any) -> None:
        time.sleep(2.7)

    with serving(1, prepare=prepare) as (transports, _):
        assert Client(transports[0], 1).ask_all(Op.PREPARE, {0: (set(), set())}, 2.0) == {0: None}


def test_a_question_to_servers_that_hang_has_one_time_out_for_all():
    client = Client(connected(4)[0], 1)
    begin = time.monotonic()
    with pytest.raises(LinkError, match=r"server rank 1 did not answer 'fetch' \(rank 1: no message within 0.99"):
        client.ask_all(Op.FETCH, dict.fromkeys(range(3), (0, frozenset(), 0, 1)), 1.0)
    with pytest.raises(LinkError, match=r"did not answer 'fetch'"):  # nor is anything else asked then
        client.ask_all(Op.RESET, {1: (0,)}, 5.0)
    assert time.monotonic() - begin < 3.0
