"""This process's TCP connections: which there are, and what the job's among them have done, as the kernel counts it.

Of a card that is thinner than the others' the connections are busy all the time that an exchange takes; the others
send what they have and wait. No traffic of our own is needed to see that.

Between hosts far apart a window holds megabytes, and after the pause of a step TCP sends all of it at once: more than a
router's queue takes. What is lost there keeps the window small. :func:`spread_bursts` has the kernel send it over a
round trip instead.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

_INFO = struct.Struct("=16xI60xI16xI8xQQ20xI16xQQQ")
"""Of Linux's ``tcp_info``, the fields of :class:`_Info`: at 16, 80, 100, 112, 120, 148, and from 168 on."""

_MAX_PACING_RATE = 47
"""``SO_MAX_PACING_RATE``, which Python does not name: bytes a second; all ones for none."""

_UNLIMITED, _PACED = 2**64 - 1, 2**63 - 2
"""The first is not paced at all, the second at TCP's own rate; kernels of before 4.20 take its lower half."""

FAR_US: float = 1000
"""A least round trip above it is no local network's."""

WIDE_BYTES = 1 << 18
"""Of a window: a smaller one fits into queues."""


@dataclass(frozen=True)
class Sent:
    """Some connections together, since they were made.

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


class Tally:
    """What this process's connections to some hosts have done; of one that was closed what was last seen of it, so that
    no figure ever goes back.

    Args:
        hosts: their addresses. What the process sends elsewhere, a checkpoint to a store say, is none of the job's.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = hosts
        self._seen: dict[int, _Info] = {}

    def sent(self) -> Sent | None:
        """So far; None where there are no such connections, or the system does not tell."""
        for connection, _, peer, info in _to_other_hosts():
            if peer in self._hosts:
                self._seen[os.fstat(connection.fileno()).st_ino] = info
        rows = list(self._seen.values())  # (a signal may have another look taken in the midst of this one)
        if not rows:
            return None
        num_bytes, busy = sum(row.num_bytes for row in rows), sum(row.busy_us for row in rows)
        waited = sum(row.peer_us + row.room_us for row in rows)
        return Sent(num_bytes, float(busy), float(waited), float(median(row.rtt_us for row in rows)))


def is_far(ends: Mapping[str, Collection[int]]) -> bool:
    """Whether the connections with these local ends (ports by address) go far, as far as the system tells."""
    rtts = [info.rtt_us for _, info in _with(ends)]
    return bool(rtts) and median(rtts) > FAR_US


def spread_bursts(ends: Mapping[str, Collection[int]]) -> int:
    """Pace those of the connections with these local ends (ports by address) that are far, have wide windows, and had
    to send something again; how many now are.

    Nothing bounds their rate: TCP's own, a window and a fifth in a round trip, is what is kept to.
    """
    count = 0
    for connection, info in _with(ends):
        if info.rtt_us <= FAR_US or info.window * info.mss <= WIDE_BYTES or not info.resent or info.limit != _UNLIMITED:
            continue
        try:
            connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("=Q", _PACED))
        except OSError:
            continue  # closed, or a system without it
        count += 1
    return count


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
            copy = os.dup(number)
        except OSError:
            continue  # closed in this moment
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue  # and opened again as something else
        with found:
            if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                yield found


class _Info(NamedTuple):
    mss: int
    window: int
    """In segments."""
    resent: int
    limit: int
    num_bytes: int
    rtt_us: int
    busy_us: int
    peer_us: int
    room_us: int


def _with(ends: Mapping[str, Collection[int]]) -> Iterator[tuple[socket.socket, _Info]]:
    for connection, (address, port), _, info in _to_other_hosts():
        if port in ends.get(address, ()):
            yield connection, info


def _to_other_hosts() -> Iterator[tuple[socket.socket, tuple[str, int], str, _Info]]:
    """Each with its local end and its peer's address."""
    for connection in tcp_sockets():
        try:
            (mine, port), peer = connection.getsockname()[:2], connection.getpeername()[0]
            if peer == mine:
                continue  # on this host
            data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # it only listens, or is closed by its peer
        if len(data) >= _INFO.size:
            peer, mine = (address.partition("%")[0] for address in (peer, mine))  # without the card that IPv6 may name
            yield connection, (mine, port), peer, _Info(*_INFO.unpack_from(data))
