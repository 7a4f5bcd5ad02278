"""One end of a bulk transfer over TCP; ``bulk_rate`` starts one of each as a file, with no imports of ours.

bulk_peer.py receive SECONDS WINDOW   prints the port, then a JSON line with bytes and seconds
bulk_peer.py send ADDRESS PORT SECONDS WINDOW
bulk_peer.py echo                     prints the port, then sends back what comes, until stdin ends
bulk_peer.py ask ADDRESS PORT TIMES   prints the shortest round trip in seconds
"""

import contextlib
import json
import select
import socket
import sys
import time
from collections.abc import Iterable, Iterator

CHUNK = bytes(256 * 1024)
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


def widen(end: socket.socket, option: int, window: int) -> None:
    """Give a socket room for a long way, where that is permitted; 0 leaves the system's.

    The link is to be measured, not what the system lets one connection have under way.
    """
    if window:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, option, window)


def count(reads: Iterable[tuple[float, int]], begin: float, full: int) -> tuple[int, float]:
    """Bytes and seconds of (moment, bytes) from ``begin`` on.

    Counted from and to moments at which all that had arrived was read, which a read of less than ``full`` shows: what a
    reader that woke up late finds waiting came earlier. A reader that never catches up is the bound itself: then all
    counts, from its first read on.
    """
    caught, every = list[tuple[float, int]](), list[tuple[float, int]]()
    arrived = 0
    for now, size in reads:
        arrived += size
        if now >= begin:
            for moments in (every, caught) if size < full else (every,):
                moments[1:] = [(now, arrived)]
    for moments in (caught, every):
        if len(moments) == 2 and moments[1][0] > moments[0][0]:
            return moments[1][1] - moments[0][1], moments[1][0] - moments[0][0]
    raise ValueError(f"{arrived} bytes came, and fewer than two reads to count between")


def receive(duration_s: float, window: int) -> None:
    """Accept one sender and count what arrives, leaving out the first third: the bucket starts full."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        server.settimeout(20)
        widen(server, _SO_RCVBUFFORCE, window)
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        connection, _ = server.accept()
    buffer = bytearray(len(CHUNK))

    def reads() -> Iterator[tuple[float, int]]:
        while size := connection.recv_into(buffer):
            yield time.perf_counter(), size

    with connection:
        connection.settimeout(20)
        counted, seconds = count(reads(), time.perf_counter() + duration_s / 3, len(buffer))
    sys.stdout.write(json.dumps({"bytes": counted, "seconds": seconds}) + "\n")


def send(address: str, port: int, duration_s: float, window: int) -> None:
    """Send as fast as the network takes it."""
    with socket.create_connection((address, port), timeout=20) as connection:
        widen(connection, _SO_SNDBUFFORCE, window)
        end = time.perf_counter() + duration_s
        while time.perf_counter() < end:
            connection.sendall(CHUNK)


def echo() -> None:
    """Answer datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("0.0.0.0", 0))
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        while select.select([server, sys.stdin], [], [])[0] == [server]:
            data, sender = server.recvfrom(64)
            server.sendto(data, sender)


def ask(address: str, port: int, times: int) -> None:
    """Small datagrams to and fro, one at a time; one that is lost counts as a second."""
    took = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(1.0)
        for number in range(times):
            start = time.perf_counter()
            try:
                client.sendto(str(number).encode(), (address, port))
                while int(client.recv(64)) != number:
                    pass
                took.append(time.perf_counter() - start)
            except OSError:  # lost, or there is no way at all
                took.append(1.0)
    sys.stdout.write(f"{min(took)}\n")


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(float(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "echo":
        echo()
    elif sys.argv[1] == "ask":
        ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
