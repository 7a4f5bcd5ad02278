"""Messages from rank to rank: what rank 0's clock says, and what a node's card sends."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from espresso.comm.groups import Groups

MUCH, MUCH_S = (1 << 18, 1 << 20, 1 << 20), 0.1
"""Bytes by which a card is looked at, the first to open the connection's window; after so long nothing more is sent."""


def round_trips(groups: Groups, clock: Callable[[], float], count: int = 8) -> list[tuple[float, float, float]]:
    """Ask rank 0 for the time: (sent, its answer, back) by every rank's ``clock``. Collective; none on rank 0."""
    group, now, trips = groups.for_pairs(), torch.zeros(1, dtype=torch.float64, device="cpu"), []
    with groups.explained(f"the ranks' look at rank {groups.ranks[0]}'s clock"):
        if groups.rank:
            for _ in range(count):
                sent = clock()
                group.send([now], 0, 0).wait()
                group.recv([now], 0, 0).wait()
                trips.append((sent, float(now), clock()))
            return trips
        for peer in range(1, groups.num_ranks):
            for _ in range(count):
                group.recv([now], peer, 0).wait()
                now[0] = clock()
                group.send([now], peer, 0).wait()
    return []


def card_rate(groups: Groups, clock: Callable[[], float]) -> float | None:
    """What this node's card sends to the next node while nothing else is sent, in bytes a unit of ``clock``.

    Collective. None with one node, and on ranks that are not their node's first. A node that sends does not
    receive, since answers would wait behind what it sends itself.
    """
    per_node, nodes = groups.cluster.ranks_per_node, groups.cluster.num_nodes
    node, local = divmod(groups.rank, per_node)
    if nodes == 1 or local:
        return None
    rate = None
    with groups.explained("the ranks' look at their network cards"):
        for turn in range(3 if nodes % 2 else 2):
            if _turn(node, nodes) == turn:
                rate = _send_much(groups, (node + 1) % nodes * per_node, clock)
            elif _turn((node - 1) % nodes, nodes) == turn:
                _receive_much(groups, (node - 1) % nodes * per_node)
    return rate


def _turn(node: int, nodes: int) -> int:
    """When a node sends, of as few turns as keep senders from receiving; the last of an odd number has its own."""
    return 2 if nodes % 2 and node == nodes - 1 else node % 2


def _send_much(groups: Groups, peer: int, clock: Callable[[], float]) -> float:
    """The best of some sends; every one says how many bytes come, and the last that none do."""
    group, answer, started = groups.for_pairs(), torch.zeros(1, device="cpu"), time.perf_counter()
    rates: list[float] = []
    for num_bytes in MUCH:
        if rates and time.perf_counter() - started > MUCH_S:
            break
        begin = clock()
        group.send([torch.tensor([num_bytes], device="cpu")], peer, 0).wait()
        group.send([torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")], peer, 0).wait()
        group.recv([answer], peer, 0).wait()
        rates.append(num_bytes / (clock() - begin))
    group.send([torch.tensor([0], device="cpu")], peer, 0).wait()
    return max(rates[1:] or rates)  # (what a card lets through in a burst after a rest is gone by then)


def _receive_much(groups: Groups, peer: int) -> None:
    group, answer, num_bytes = groups.for_pairs(), torch.zeros(1, device="cpu"), torch.tensor([0], device="cpu")
    while group.recv([num_bytes], peer, 0).wait() and int(num_bytes):
        group.recv([torch.zeros(int(num_bytes), dtype=torch.uint8, device="cpu")], peer, 0).wait()
        group.send([answer], peer, 0).wait()
