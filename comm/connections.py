"""This process's TCP connections: which there are, and what those to other hosts have done, as the kernel counts it.

Of a card that is thinner than the others' the connections are busy all the time that an exchange takes; the others
send what they have and wait. No traffic of our own is needed to see that.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

_INFO = struct.Struct("=120xQ20xI16xQQQ")
"""Of Linux's ``tcp_info``: bytes_acked at 120, min_rtt at 148, then busy_time, rwnd_limited, sndbuf_limited at 168."""


@dataclass(frozen=True)
class Sent:
    """All connections to other hosts together, since they were made.

    Attributes:
        num_bytes: acknowledged by their peers.
        busy_us: that something was on the way.
        window_us: of it, waiting for a window or for room in the send buffer.
        rtt_us: the least round trip of the connection in the middle.
    """

    num_bytes: int
    busy_us: float
    window_us: float
    rtt_us: float


def sent() -> Sent | None:
    """What was sent so far; None where there are no such connections, or the system does not tell."""
    rows = list(_rows())
    if not rows:
        return None
    acked, rtt, busy, peer, room = zip(*rows, strict=True)
    return Sent(sum(acked), float(sum(busy)), float(sum(peer) + sum(room)), float(median(rtt)))


def tcp_sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, whoever opened them, each until the next is asked for.

    None where the system does not tell, or where new sockets have a time-out: Python would give it to these as well.
    """
    if socket.getdefaulttimeout() is not None:
        return
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for number in numbers:
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            found = socket.socket(fileno=os.dup(number))
        except OSError:
            continue  # closed in this moment
        with found:
            if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                yield found


def _rows() -> Iterator[tuple[int, int, int, int, int]]:
    for connection in tcp_sockets():
        try:
            if connection.getpeername()[0] == connection.getsockname()[0]:
                continue  # on this host
            data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # it only listens, or is closed by its peer
        if len(data) >= _INFO.size:
            yield _INFO.unpack_from(data)
