"""Which ranks share a node, and the cluster that nodes make."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from espresso.comm.environment import read_environment
from espresso.comm.errors import TopologyError
from espresso.strategies import Cluster

NodeKey = tuple[Any, ...]


def node_key() -> NodeKey:
    """What identifies this process's node: host name, network namespace, and the launcher's node number.

    Two ranks share a node when all three are equal. The namespace tells emulated hosts and containers
    apart, the launcher's number several torchrun agents on one host.
    """
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        namespace = 0
    launch = read_environment()
    return socket.gethostname(), namespace, None if launch is None else launch.node


def cluster_from_nodes(keys: Sequence[NodeKey]) -> Cluster:
    """The cluster that ranks with these node keys (in rank order) form.

    Raises:
        TopologyError: nodes of unequal size, or a node whose ranks are not consecutive.
    """
    nodes: dict[NodeKey, list[int]] = {}
    for rank, key in enumerate(keys):
        nodes.setdefault(key, []).append(rank)
    sizes = sorted({len(ranks) for ranks in nodes.values()})
    described = "; ".join(f"{key[0]}: ranks {compact(ranks)}" for key, ranks in nodes.items())
    remedy = "Pass ranks_per_node=1 to treat every rank as a node of its own: all flat options still work"
    if len(sizes) > 1:
        raise TopologyError(f"nodes have different numbers of ranks ({described}). {remedy}.")
    for ranks in nodes.values():
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            raise TopologyError(
                f"the ranks of a node are not consecutive ({described}). Start them node by node"
                f" (mpirun --map-by slot), or: {remedy}."
            )
    return Cluster(len(nodes), sizes[0])


def compact(ranks: Sequence[int]) -> str:
    """Ranks for people: the first of them."""
    return ",".join(map(str, ranks[:8])) + (",…" if len(ranks) > 8 else "")
