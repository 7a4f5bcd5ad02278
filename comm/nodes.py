"""Which ranks share a node, and the cluster that nodes make."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from espresso.comm.environment import read_environment
from espresso.strategies import Cluster

NodeKey = tuple[Any, ...]


def node_key() -> NodeKey:
    """What identifies this process's node: host name, network namespace, the launcher's node number, and the kernel's
    boot.

    Two ranks share a node when all are equal. The namespace tells emulated hosts and containers apart, the launcher's
    number several torchrun agents on one host, and the boot machines of one name.
    """
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        namespace = 0
    launch = read_environment()
    return socket.gethostname(), namespace, None if launch is None else launch.node, boot_id()


def boot_id() -> str:
    """What the kernel drew when this machine was started; empty where it does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def cluster_from_nodes(keys: Sequence[NodeKey]) -> Cluster:
    """The cluster that ranks with these node keys (in rank order) form; of uneven nodes every rank is a node."""
    if why_flat(keys):
        return Cluster(len(keys), 1)
    return Cluster(len(set(keys)), keys.count(keys[0]))


def why_flat(keys: Sequence[NodeKey], names: Sequence[int] = ()) -> str | None:
    """Why hierarchical options cannot run: nodes of unequal size, or one whose ranks are not consecutive.

    Args:
        names: the ranks in the world, where these are some of it.
    """
    nodes: dict[NodeKey, list[int]] = {}
    for rank, key in enumerate(keys):
        nodes.setdefault(key, []).append(rank)
    named = {key: [names[rank] for rank in ranks] if names else ranks for key, ranks in nodes.items()}
    described = "; ".join(f"{key[0]}: ranks {compact(ranks)}" for key, ranks in named.items())
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        return f"nodes have different numbers of ranks ({described})"
    if any(ranks != list(range(ranks[0], ranks[0] + len(ranks))) for ranks in nodes.values()):
        return f"the ranks of a node are not consecutive ({described}; mpirun --map-by slot starts them node by node)"
    return None


def compact(ranks: Sequence[int]) -> str:
    """Ranks for people: the first of them."""
    return ",".join(map(str, ranks[:8])) + (",…" if len(ranks) > 8 else "")
