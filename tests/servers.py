"""Parameter servers in this process, for workers that are ranks of a pool: no further processes to start."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from benchmarks.exchange import Exchange
from benchmarks.ports import free_port
from benchmarks.rank_pool import NUM_RANKS, RankPool
from espresso.comm.errors import EspressoError
from espresso.comm.parameter_server import Client
from espresso.comm.parameter_server.server import Server
from espresso.comm.parameter_server.transport import GlooTransport
from espresso.live.codecs import HostCodecs

NUM_SERVERS = 3
_here: dict[Any, Any] = {}


@contextmanager
def serving(pool: RankPool, *, engines: int = 2, memory_bytes: int = 1 << 30, **more: Any) -> Iterator[list[Server]]:
    """Three servers for the four ranks of ``pool``; they end when the ranks leave, with the block."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    codecs = HostCodecs(1)
    servers: dict[int, Server] = {}
    size = NUM_RANKS + NUM_SERVERS

    def serve(number: int) -> None:
        mine = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        transport = GlooTransport(mine, NUM_RANKS + number, size)
        servers[number] = Server(
            transport, NUM_RANKS, codecs, engines=engines, memory_bytes=memory_bytes, timeout_s=20.0, **more
        )
        with suppress(EspressoError):  # the server keeps it in ``error``
            servers[number].serve()

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(NUM_SERVERS)]
    for thread in threads:
        thread.start()
    pool.run(_connect, port, size)
    deadline = time.monotonic() + 20.0
    while len(servers) < NUM_SERVERS and time.monotonic() < deadline:
        time.sleep(0.01)  # workers that have connected may be ahead of the servers' threads
    try:
        yield [servers[number] for number in range(NUM_SERVERS)]
    finally:
        if pool.running:
            pool.run(_leave)
        for thread in threads:
            thread.join(20.0)
        del store
        codecs.close()


def _connect(rank: int, port: int, size: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    _here["client"] = Client(GlooTransport(store, rank, size), NUM_RANKS)


def _leave(rank: int) -> None:
    for key in [key for key in _here if key != "client"]:
        exchange = _here.pop(key)
        if exchange is not None:
            exchange.close()
    _here.pop("client").leave(5.0)


def client() -> Client:
    """This rank's connection."""
    found: Client = _here["client"]
    return found


def exchange_over(
    num_workers: int, num_servers: int, rank: int, ranks_per_node: int = 1, timeout_s: float = 20.0
) -> Exchange | None:
    """A fresh exchange of the first workers over the first servers; None on ranks that do not take part.

    The process groups below it are made once: making them takes longer than a test.
    """
    client().num_servers = num_servers
    key = ("exchange", num_workers, ranks_per_node, timeout_s)
    if key not in _here:
        group = dist.new_group(list(range(num_workers))) if num_workers < NUM_RANKS else None
        _here[key] = None
        if rank < num_workers:
            _here[key] = Exchange(ranks_per_node, client=client(), process_group=group, timeout_s=timeout_s)
    exchange: Exchange | None = _here[key]
    if exchange is None:
        return None
    exchange.groups.cluster = replace(exchange.groups.cluster, num_servers=num_servers)
    return exchange.renew()
