"""What each parameter server gets of the gradients, and how long the busiest card and processor take with it.

Of one unit of gradients that all workers push (and, as much, pull)::

    card of a worker's machine   1 / n + x (n - 2) / n     n machines, x: what servers on this one get; what its own
                                                           workers give them does not cross the card
    card of a dedicated server   x
    processor of a server        x

Every share is what the server has room for in the least time in which all of them have room for everything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from espresso.strategies import Cluster, Sharing, shares_by_rule

_BISECTIONS = 50


@dataclass(frozen=True, slots=True)
class Load:
    """What one unit of gradients does to the busiest of a kind, in units of all of it.

    Attributes:
        worker_card: what crosses the busiest card of the workers' machines.
        server_card: the same of servers of their own, on cards as fast as the fastest of them.
        processor: what the busiest processor works on, counted as the fastest would.
    """

    worker_card: float
    server_card: float
    processor: float


@dataclass(frozen=True, slots=True)
class _Kind:
    """Servers that are alike: how many, how many on the machine of each, card and processor (1: the fastest)."""

    colocated: bool
    count: int
    near: int
    card: float = 1.0
    processor: float = 1.0


@lru_cache(maxsize=4096)
def shared_out(
    cluster: Cluster,
    worker_us: float,
    server_us: float,
    busy_us: float,
    speeds: tuple[tuple[float, float], ...] = (),
    sharing: Sharing = Sharing.MEASURED,
) -> Load:
    """The load under the best shares, or under BytePS's rule.

    Args:
        worker_us, server_us: per KB over the card of a worker's machine and of a dedicated server.
        busy_us: per KB on one server's processor.
        speeds: (card, processor) of every server as a part of the fastest; empty: all are alike.
    """
    kinds = _kinds(cluster, speeds)
    if sharing is Sharing.SIZES:
        colocated, dedicated = shares_by_rule(cluster.num_nodes, cluster.num_colocated, cluster.num_dedicated)
        return _load(cluster, kinds, [colocated if kind.colocated else dedicated for kind in kinds])
    nodes = cluster.num_nodes
    low, high = worker_us / nodes if nodes > 1 else 0.0, 2 * (worker_us + server_us + busy_us) + 1e-12
    high /= min((speed for pair in speeds for speed in pair), default=1.0)

    def room(us: float) -> list[float]:
        """What one server of each kind gets done."""
        found = []
        for kind in kinds:
            most = min(us * kind.processor / busy_us, 1.0) if busy_us else 1.0
            if not kind.colocated:
                most = min(most, us * kind.card / server_us if server_us else 1.0)
            elif nodes > 2 and worker_us:
                crosses = us * kind.card / worker_us - 1 / nodes
                most = min(most, max(crosses, 0.0) * nodes / (nodes - 2) / kind.near)
            found.append(most)
        return found

    def total(us: float) -> float:
        return sum(most * kind.count for most, kind in zip(room(us), kinds, strict=True))

    for _ in range(_BISECTIONS if total(low) < 1.0 else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < 1.0 else (low, middle)
    us = high if total(low) < 1.0 else low
    return _load(cluster, kinds, [most / total(us) for most in room(us)])


def _kinds(cluster: Cluster, speeds: tuple[tuple[float, float], ...]) -> list[_Kind]:
    beside = cluster.num_colocated
    if not speeds:
        each, more = divmod(beside, cluster.num_nodes)
        kinds = [_Kind(True, more * (each + 1), each + 1), _Kind(True, (cluster.num_nodes - more) * each, each)]
        return [kind for kind in (*kinds, _Kind(False, cluster.num_dedicated, 1)) if kind.count]
    on = Counter(server % cluster.num_nodes for server in range(beside))
    rows = [_Kind(True, 1, on[server % cluster.num_nodes], *speeds[server]) for server in range(beside)]
    rows += [_Kind(False, 1, 1, *speeds[server]) for server in range(beside, cluster.num_servers)]
    return rows


def _load(cluster: Cluster, kinds: list[_Kind], shares: list[float]) -> Load:
    nodes = cluster.num_nodes
    worker = 1 / nodes if cluster.num_colocated < nodes else 0.0
    server = processor = 0.0
    for kind, share in zip(kinds, shares, strict=True):
        processor = max(processor, share / kind.processor)
        if kind.colocated:
            worker = max(worker, (1 / nodes + share * kind.near * (nodes - 2) / nodes) / kind.card)
        else:
            server = max(server, share / kind.card)
    return Load(worker, server, processor)
