"""What servers hold of a state goes when all its workers have left it, and not before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import espresso
from benchmarks.exchange import integers, make_buckets, numels_of, reduce_bucket, strategy_of
from benchmarks.rank_pool import NUM_RANKS, POOL
from espresso.comm.errors import EspressoError
from espresso.comm.execute.executor import Assignment
from espresso.comm.keep.store import ResidualStore
from espresso.comm.parameter_server import Line, Link, connect
from espresso.comm.parameter_server.server import Server
from espresso.comm.parameter_server.sums import KeySum
from espresso.comm.parameter_server.transport import Channel
from espresso.comm.parameter_server.wire import Header, Op, Tag
from espresso.live.server_profile import raw_keys
from espresso.strategies import Choice, Cluster, CompressorSpec
from espresso.strategies.tree import two_way_option
from tests.ddp import batch, mlp, strategy_for, wrap
from tests.servers import NUM_SERVERS, client, exchange_over, serving
from tests.test_server_blame import Worker, table
from tests.test_server_blame import serving as serving_by_hand

TWO_WAY = two_way_option(Cluster(NUM_RANKS, 1, NUM_SERVERS))
TOPK = "topk:ratio=0.05,raw_below=1"
PARTITION_BYTES = 512
CLOSED: list[espresso.EspressoState] = []
"""Still there: when they go, their end comes once more."""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with serving(POOL) as running:
        yield running


def held() -> int:
    """Keys at all servers of this process; a thread of a server may hold on to the last that it saw."""
    gc.collect()
    return sum(type(each) is KeySum for each in gc.get_objects())  # no proxy is asked, which may be of what is gone


# -- by hand ---------------------------------------------------------------------------------------


class Leaver(Worker):
    def close(self, namespace: int) -> None:
        """Leave a state; the answer to a question says that the server has read it."""
        header = Header(Op.CLOSE, self.transport.rank, namespace).pack()
        self.transport.send(Channel.CONTROL, self.server, Tag.HEADER, header).wait(10.0)
        self.say(Op.FETCH, (namespace, frozenset(), 0, 1))
        self.hear()

    def tag_of(self, number: int) -> int:
        """That of a key of a new state of this worker alone."""
        self.say(Op.INSTALL, table((self.transport.rank,), number, timeout_s=20.0))
        return int(self.hear().tags[number])


@pytest.mark.parametrize("last_leaves_the_job", [False, True])
def test_a_state_goes_with_its_last_worker_and_the_others_push_until_then(last_leaves_the_job):
    with serving_by_hand(4) as (transports, (server,)):
        first, second, third, other = (Leaver(transport, 4) for transport in transports)
        # The third takes part and pushes nothing of this key.
        shared = replace(table((0, 1), 1, timeout_s=20.0), workers=(0, 1, 2))
        for worker in (first, second, third):
            worker.say(Op.INSTALL, shared)
        (tag,) = {worker.hear().tags[1] for worker in (first, second, third)}
        third.close(0)
        third.close(0)  # twice is once
        third.close(77)  # of a state that there never was
        for _ in range(2):
            for worker in (first, second):
                worker.push(1, tag)
            assert [worker.pull(tag) for worker in (first, second)] == [2.0, 2.0]
        first.close(0)
        assert other.tag_of(5 << 16) != tag
        if last_leaves_the_job:
            second.leave()
            farewell = np.empty(Header(Op.LEAVE, 0).pack().nbytes, np.uint8)
            second.transport.receive(Channel.CONTROL, 4, Tag.NOTICE, farewell).wait(10.0)
        else:
            second.close(0)
        assert other.tag_of(6 << 16) == tag  # the lowest that no key has
        assert server.error is None


# -- in jobs ---------------------------------------------------------------------------------------


def run_pushed_and_pulled(rank: int) -> int:
    """Buffers of pushes that are still held once their answers are there."""
    client().num_servers = NUM_SERVERS
    link = Link(client(), range(NUM_RANKS), ResidualStore(), 20.0, 9)
    keys = raw_keys(6, 4096, range(NUM_RANKS))
    lines = [Line(key) for key in keys]
    numels = {stretch.tensor: stretch.numel for key in keys for stretch in key.stretches}
    link.install(keys, dict(enumerate(lines)), numels, None, "s")
    answers = [np.zeros(4096, np.uint8) for _ in lines]
    pushed: list[Any] = []
    for line, answer in zip(lines, answers, strict=True):
        data = np.zeros(4096, np.uint8)
        link.push(line, data, answer, 0, 1.0)
        pushed.append(weakref.ref(data))
    del data
    for line in lines:
        link.pull(line)
    gc.collect()
    return sum(data() is not None for data in pushed)


def test_a_worker_holds_on_to_nothing_that_is_answered(servers):
    assert POOL.run(run_pushed_and_pulled) == [0] * NUM_RANKS


def run_states(rank: int, count: int = 3) -> list[float]:
    """One state after the other; that of before is closed. Sums of what came back."""
    buckets = make_buckets({"a": 4000, "b": 7}, {"c": 333, "d": 64})
    strategy = strategy_of(
        buckets, Cluster(NUM_RANKS, 1, NUM_SERVERS), Choice(TWO_WAY, CompressorSpec.parse(TOPK)),
        partition_bytes=PARTITION_BYTES,
    )  # fmt: skip
    found = []
    for _ in range(count):
        exchange = exchange_over(NUM_RANKS, NUM_SERVERS, rank)
        assert exchange is not None
        for step in range(2):
            results = exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS, step))
        found.append(float(sum(result.sum() for result in results)))
    exchange.groups.barrier()
    return found


def test_states_that_were_closed_are_not_held(servers):
    counts = []
    for _ in range(3):
        results = POOL.run(run_states)
        assert all(result == results[0] for result in results)
        assert len(set(results[0])) == 1  # each begins without residuals
        counts.append(held())
    keys_of_one = 35
    assert counts[0] >= keys_of_one
    assert counts[-1] < counts[0] + keys_of_one


def run_ddp(rank: int, closes: bool) -> None:
    """A state of DDP that goes through the servers, and then goes."""
    connect(client())
    client().num_servers = NUM_SERVERS
    ddp = wrap(mlp(20, 60, 5))
    strategy = strategy_for(ddp, Cluster(NUM_RANKS, 1, NUM_SERVERS), str(TWO_WAY), TOPK, PARTITION_BYTES)
    state = espresso.register(ddp, TOPK, strategy, ranks_per_node=1, timeout_s=15.0, offload_threads=1)
    for step in range(2):
        ddp(batch(rank, step, 20)).square().mean().backward()
    connect(None)
    if closes:
        state.close()
        CLOSED.append(state)
    del ddp, state
    gc.collect()


@pytest.mark.parametrize("closes", [True, False])
def test_states_of_ddp_that_were_closed_or_dropped_are_not_held(servers, closes):
    counts = []
    for _ in range(3):
        POOL.run(run_ddp, closes)
        POOL.run(run_states, 1)  # all servers have read that it went, and their threads have seen other keys
        counts.append(held())
    assert counts[-1] <= counts[0]


def run_saving(rank: int) -> tuple[bool, str]:
    """What saving says where the state was closed in the middle of an iteration, and after one."""
    buckets = make_buckets({"a": 1021, "b": 7}, {"c": 333, "d": 64})
    strategy = strategy_of(
        buckets, Cluster(NUM_RANKS, 1, NUM_SERVERS), Choice(TWO_WAY, CompressorSpec.parse(TOPK)),
    )  # fmt: skip
    gradients = integers(buckets, rank, NUM_RANKS, 0)
    exchange = exchange_over(NUM_RANKS, NUM_SERVERS, rank)
    assert exchange is not None
    exchange.step(Assignment(strategy), buckets, gradients)
    exchange.script.next = Assignment(strategy)
    reduce_bucket(exchange.executor, buckets[0], gradients[0].clone(), is_last=False, grad_scale=1.0).wait()
    exchange.groups.barrier()
    exchange.executor.close(keeps_groups=True)
    exchange.executor.leave()
    is_kept = any(np.any(values) for values in exchange.kept(numels_of(buckets)).values())
    exchange.groups.barrier()

    exchange.renew()
    exchange.step(Assignment(strategy), buckets, gradients)
    exchange.executor.close(keeps_groups=True)
    exchange.executor.leave()
    try:
        exchange.kept(numels_of(buckets))
    except EspressoError as error:
        return is_kept, str(error)
    return is_kept, ""


def test_saving_what_the_servers_let_go_of_is_an_error(servers):
    for is_kept, said in POOL.run(run_saving):
        assert is_kept
        assert "was closed; save it before that" in said
