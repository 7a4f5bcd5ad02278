"""Whose address that is: Gloo's errors name an address and a port, people look for a rank.

Every rank tells the others the local ends of its TCP connections once its groups are connected. The other end of one
of them, as an error names it, is then a local end of the rank that is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from espresso.comm.connections import tcp_sockets

Ends = Mapping[str, Sequence[int]]
"""Ports by address, as Gloo writes addresses."""

_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:(\d+)")


def local_ends() -> dict[str, tuple[int, ...]]:
    """The local ends of this process's TCP sockets; nothing where the system does not tell."""
    found: dict[str, set[int]] = {}
    for each in tcp_sockets():
        address, port = each.getsockname()[:2]
        found.setdefault(address.partition("%")[0], set()).add(port)
    return {address: tuple(sorted(ports)) for address, ports in found.items()}


def ends_since(before: Ends) -> dict[str, set[int]]:
    """The local ends that there were not yet."""
    return {address: set(ports) - set(before.get(address, ())) for address, ports in local_ends().items()}


def rank_in(text: str, everybody: Sequence[Ends]) -> int | None:
    """The rank whose address an error names, if it names just one.

    Gloo prints ports with their two bytes exchanged (as of PyTorch 2.13), so either order counts.

    Example:
        >>> rank_in("Connection closed by peer [10.0.0.2]:4711", [{"10.0.0.1": [80]}, {"10.0.0.2": [4711]}])
        1
    """
    named = [(address, port) for address, digits in _ADDRESS.findall(text) for port in _orders(int(digits))]
    ranks = {
        rank for rank, ends in enumerate(everybody) if any(port in ends.get(address, ()) for address, port in named)
    }
    return ranks.pop() if len(ranks) == 1 else None


def _orders(port: int) -> tuple[int, int]:
    """A port's two bytes as they are, and exchanged."""
    return port, (port & 0xFF) << 8 | port >> 8
