"""Whose address that is: Gloo's errors name an address and a port, people look for a rank.

Every rank tells the others the local ends of its TCP connections once its groups are connected. The other end of one
of them, as an error names it, is then a local end of the rank that is meant.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

Ends = Mapping[str, Sequence[int]]
"""Ports by address, as Gloo writes addresses."""

_PROC = Path("/proc/self")
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:(\d+)")


def local_ends() -> dict[str, tuple[int, ...]]:
    """The local ends of this process's TCP sockets; nothing where the system does not tell."""
    found: dict[str, set[int]] = {}
    try:
        mine = set(_socket_inodes())
        for table in ("tcp", "tcp6"):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in mine:
                    address, _, port = fields[1].partition(":")
                    found.setdefault(readable(address), set()).add(int(port, 16))
    except OSError:
        return {}
    return {address: tuple(sorted(ports)) for address, ports in found.items()}


def _socket_inodes() -> list[str]:
    inodes = []
    for entry in (_PROC / "fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # closed in this moment
        if target.startswith("socket:["):
            inodes.append(target[8:-1])
    return inodes


def readable(address: str) -> str:
    """``0100007F`` is 127.0.0.1: words of four bytes, in the order of the machine."""
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


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
