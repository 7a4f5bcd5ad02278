"""What workers say of servers, and servers of workers, that refuse, hang, die or are not there."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from benchmarks.exchange import integers, make_buckets, strategy_of
from benchmarks.ports import free_port
from benchmarks.rank_pool import NUM_RANKS, POOL, RanksFailed
from espresso.comm.errors import EspressoError
from espresso.comm.execute.executor import Assignment
from espresso.comm.parameter_server import Client, Line
from espresso.comm.parameter_server.secret import Door, Secret, knock
from espresso.comm.parameter_server.transport import GlooTransport, LinkError
from espresso.comm.parameter_server.wire import Header, Key, Op, Stretch
from espresso.strategies import NONE
from tests.servers import client, exchange_over, serving
from tests.test_parameter_server import RAW, TOPK, TWO_WAY, choice_of


@pytest.fixture(scope="module")
def servers():
    with serving(POOL) as running:
        yield running


def run_other_strategy(rank: int, num_servers: int = 1) -> str:
    exchange = exchange_over(NUM_RANKS, num_servers, rank)
    buckets = make_buckets({"a": 100})
    spec = "topk:ratio=0.5" if rank == 2 else "topk:ratio=0.25"
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(TWO_WAY, spec))
    try:
        exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))
    except Exception as error:
        return str(error)
    return "no error"


def test_another_strategy_on_one_worker_is_refused_at_the_handshake(servers):
    for text in POOL.run(run_other_strategy):
        assert "server rank 4 refuses: worker rank 2 has another strategy than rank 0 (hash" in text


def run_refused_twice(rank: int) -> tuple[list[str], list[Any]]:
    """Both servers refuse; what they answer afterwards."""
    texts = [run_other_strategy(rank, 2) for _ in range(2)]
    client().num_servers = 2
    body = (set(), set())
    return texts, list(client().ask_all(Op.PREPARE, {0: body, 1: body}, 10.0).values())


def test_servers_that_have_refused_answer_the_next_question(servers):
    for texts, answers in POOL.run(run_refused_twice):
        assert all("refuses: worker rank 2 has another strategy" in text for text in texts)
        assert answers == [None, None]


class Silent:
    """A transport on which sends to one server fail."""

    rank, size = 0, 3

    def send(self, channel, peer, tag, data):
        return SilentPending(peer)

    def receive(self, channel, peer, tag, data):
        return SilentPending(0)

    def close(self):
        pass


class SilentPending:
    def __init__(self, peer):
        self.peer = peer

    def wait(self, timeout_s=None):
        if self.peer == 1:
            raise LinkError("rank 1: gone", 1)
        if self.peer == 0:
            threading.Event().wait()


def test_a_push_that_is_not_taken_names_its_own_server():
    mine = Client(Silent(), 1, addresses=("10.0.0.1", "10.0.0.2"))
    lines = [
        Line(Key(
            number, number, (0,), (Stretch(f"w{number}", 0, 4 << 20),), "float32", NONE, False, False, False,
            True, 16 << 20, 16 << 20, 0, 0,
        ))
        for number in range(2)
    ]  # fmt: skip
    data = np.zeros(16 << 20, np.uint8)
    mine.push(lines[0], data, data, Header(Op.PUSH, 0, 0), 1.0)
    # The window is full of the first server's push.
    with pytest.raises(EspressoError, match=r"server rank 1 \(10.0.0.1\) did not take the push of key 0 \(w0"):
        mine.push(lines[1], data, data, Header(Op.PUSH, 0, 1), 1.0)


def raised_by(exchange: Any, assignment: Assignment, buckets: Any, rank: int) -> str:
    """What one more round raised."""
    try:
        exchange.step(assignment, buckets, integers(buckets, rank, NUM_RANKS))
    except Exception as error:
        return str(error)
    return "no error"


def run_missing_table(rank: int) -> str:
    """Rank 3 never says which keys it would use."""
    exchange = exchange_over(NUM_RANKS, 1, rank, timeout_s=1.5)
    assert exchange is not None
    buckets = make_buckets({"weights": 300})
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(RAW, TOPK))
    return "" if rank == 3 else raised_by(exchange, Assignment(strategy), buckets, rank)


def test_a_worker_that_never_offers_its_keys_is_named():
    with serving(POOL):
        for text in POOL.run(run_missing_table)[:3]:
            assert "server rank 4 reports: worker rank 3 died, left or hangs" in text, text
            assert "no table of keys within 1.35 s" in text, text
        POOL.close()


def run_missing_worker(rank: int) -> str:
    """Rank 3 stays away from the second round."""
    exchange = exchange_over(NUM_RANKS, 2, rank, timeout_s=1.5)
    buckets = make_buckets({"weights": 300})
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(RAW, TOPK))
    exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))
    return "" if rank == 3 else raised_by(exchange, Assignment(strategy), buckets, rank)


def test_a_worker_that_hangs_is_named_by_the_server_with_the_key():
    with serving(POOL):
        texts = POOL.run(run_missing_worker)[:3]
        for text in texts:
            assert "server rank 4 reports: worker rank 3 died, left or hangs while key" in text
            assert "(weights[0:300]) waited for its push" in text
            assert "no push within 1.35 s" in text
        POOL.close()


def test_a_server_that_dies_is_said_to_have_closed_its_connection():
    """No time-out has passed, so that none is spoken of."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    dies = (
        "import os, time; import torch.distributed as dist;"
        "from espresso.comm.parameter_server.transport import GlooTransport;"
        f"kept = GlooTransport(dist.TCPStore('127.0.0.1', {port}, is_master=False), 1, 2); time.sleep(0.5); os._exit(1)"
    )
    with subprocess.Popen([sys.executable, "-c", dies]):
        asking = Client(GlooTransport(store, 0, 2), 1)
        with pytest.raises(EspressoError, match=r"server rank 1 .*[Cc]onnection (closed|reset) by peer"):
            asking.ask_all(Op.FETCH, {0: (0, frozenset(), 0, 1)}, 300.0)
    # What its listener heard may have been first.
    assert re.match(r"server rank 1 did not answer 'fetch' \(rank 1: ", str(asking._unanswered))


def test_an_answer_that_does_not_come_names_server_and_key():
    with serving(POOL) as running:
        POOL.run(run_round, 20.0)
        with running[0]._lock:  # it hangs
            texts = POOL.run(run_round, 1.0)
        for text in texts:
            assert "server rank 4 did not answer the push of key" in text
            assert "Timed out waiting" in text
            assert "(weights[0:300])" in text
            assert "step 3/3 'flat.pull' of bucket 0" in text
        POOL.close()  # a transfer that timed out has closed its connections


_kept: list[Any] = []


def run_round(rank: int, timeout_s: float) -> str:
    """One more round of the same exchange; what it raised."""
    buckets = make_buckets({"weights": 300})
    if not _kept:
        exchange = exchange_over(NUM_RANKS, 2, rank)
        strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(RAW, TOPK))
        _kept.extend((exchange, Assignment(strategy)))
    exchange, assignment = _kept
    exchange.link.timeout_s = timeout_s
    return raised_by(exchange, assignment, buckets, rank)


def test_a_worker_that_dies_is_named_with_the_key_that_waits_for_it():
    with pytest.raises(RanksFailed, match=r"^no answer from rank 3$"), serving(POOL) as running:
        POOL.run(run_dying_worker)
    assert "worker rank 3 died or left while key" in str(running[0].error or running[1].error)


def run_dying_worker(rank: int) -> None:
    import os
    import time

    exchange = exchange_over(NUM_RANKS, 1, rank)
    buckets = make_buckets({"weights": 300})
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(RAW, TOPK))
    exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))
    if rank == 3:
        time.sleep(1.0)
        os._exit(1)
    with pytest.raises(Exception, match=r"server rank 4 reports: worker rank 3 died or left while key \d+ \(weights"):
        exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))


def test_a_closed_door_names_rank_and_address():
    secret = Secret(b"a secret of the job")
    door = Door("127.0.0.1", secret)
    knock(0, 5, "127.0.0.1", door.port, secret, 2.0)
    door.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(LinkError, match=rf"worker rank 2 cannot reach server rank 5 at 127.0.0.1:{port}"):
            knock(2, 5, "127.0.0.1", port, secret, 2.0)
