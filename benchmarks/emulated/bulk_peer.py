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

CHUNK = bytes(256 * 1024)
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


def widen(end: socket.socket, option: int, window: int) -> None:
    """Give a socket room for a long way, where that is permitted; 0 leaves the system's.

    The link is to be measured, not what the system lets one connection have under way.
    """
    if window:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, option, window)


def receive(duration_s: float, window: int) -> None:
    """Accept one sender and count what arrives, leaving out the first third: the bucket starts full.

    Counted from and to moments at which all that had arrived was read: what a reader that woke up late finds waiting
    came earlier.
    """
    with socket.create_server(("0.0.0.0", 0)) as server:
        server.settimeout(20)
        widen(server, _SO_RCVBUFFORCE, window)
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        connection, _ = server.accept()
    buffer = bytearray(len(CHUNK))
    with connection:
        connection.settimeout(20)
        start = time.perf_counter()
        count_from = start + duration_s / 3
        arrived, counted, first, last = 0, 0, 0.0, 0.0
        while size := connection.recv_into(buffer):
            now = time.perf_counter()
            arrived += size
            if now < count_from or size == len(buffer):
                continue
            if not first:
                first, arrived = now, 0
            last, counted = now, arrived
    sys.stdout.write(json.dumps({"bytes": counted, "seconds": last - first}) + "\n")


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
