"""The faults: what each does to a job, where it can be played, and what must come of it."""

import os
import random
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from benchmarks.chaos.places import Job, Place, enter_network

SHORT_S = 1.5
"""Less than any time-out: the job goes on."""

PATIENCE_S = 60.0
"""How long a rank may take to come to its next step: it may be searching."""


class Ending(Enum):
    """What must come of a fault: the job goes on, or all survivors end with an error that names who it was."""

    GOES_ON = auto()
    NAMES_RANK = auto()
    NAMES_HOST = auto()
    NAMES_SERVER = auto()


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        play: does it, to a job and a victim's rank; may take as long as the fault lasts.
        at_start: it is there from the start instead (a setting of the job).
        stays: the victim never goes on, and does not end by itself.
        else_at_start: how a job may end instead while its connections are made.
    """

    name: str
    ending: Ending
    play: Callable[[Job, int], None]
    at_start: bool = False
    stays: bool = False
    else_at_start: Ending | None = None
    needs_hosts: bool = False
    needs_servers: bool = False

    def fits(self, place: Place) -> bool:
        """Whether it can be played there."""
        return (place.num_hosts > 1 or not self.needs_hosts) and (place.num_servers > 0 or not self.needs_servers)


def _signal(number: signal.Signals, pids: Callable[[Job, int], Sequence[int]]) -> Callable[[Job, int], None]:
    def play(job: Job, victim: int) -> None:
        for pid in pids(job, victim):
            with suppress(ProcessLookupError):  # it was faster, and has ended
                os.kill(pid, number)

    return play


def _of_rank(job: Job, victim: int) -> Sequence[int]:
    return [job.pid(victim)]


def _of_servers(job: Job, victim: int) -> Sequence[int]:
    return job.server_pids()


def _stop_for(seconds: Callable[[Job], float]) -> Callable[[Job, int], None]:
    def play(job: Job, victim: int) -> None:
        _signal(signal.SIGSTOP, _of_rank)(job, victim)
        time.sleep(seconds(job))
        _signal(signal.SIGCONT, _of_rank)(job, victim)

    return play


def _from_within(what: str) -> Callable[[Job, int], None]:
    def play(job: Job, victim: int) -> None:
        partial = job.folder / "fault.partial"
        partial.write_text(what)
        partial.rename(job.folder / f"fault{victim}")
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and job.alive():  # it obeys between two steps
            if any("fault" in line or "result" in line for line in job.told()[victim]):
                return
            time.sleep(0.02)

    return play


def _garbage(job: Job, victim: int) -> None:
    """Random bytes to every port that a process of the job listens on."""
    draw = random.Random(victim)
    for pid in job.alive():
        thread = threading.Thread(target=_disturb, args=(pid, draw))  # which enters the process's network
        thread.start()
        thread.join()


def _disturb(pid: int, draw: random.Random) -> None:
    with suppress(OSError):
        enter_network(f"/proc/{pid}/ns/net")
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            for address in _listening(pid, "tcp" if kind == socket.SOCK_STREAM else "udp"):
                family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
                with suppress(OSError), socket.socket(family, kind) as sender:
                    sender.settimeout(1.0)
                    sender.connect(address)
                    sender.sendall(draw.randbytes(draw.choice((1, 7, 48, 64, 1024))))


def _listening(pid: int, kind: str) -> Iterator[tuple[str, int]]:
    """Where a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(link))
    for table in (kind, f"{kind}6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            if words[3] in ("0A", "07") and f"socket:[{words[9]}]" in inodes:
                nowhere = not address.strip("0")
                yield ("127.0.0.1" if nowhere else _readable(address)), int(port, 16)


def _readable(address: str) -> str:
    """``0100007F`` is 127.0.0.1: words of four bytes, in the order of the machine."""
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _host_down_for(seconds: float | None) -> Callable[[Job, int], None]:
    def play(job: Job, victim: int) -> None:
        assert job.network is not None
        host = job.network.hosts[job.place.host_of(victim)]
        host.set_up(False)
        if seconds is not None:
            time.sleep(seconds)
            host.set_up(True)

    return play


def _blackhole(job: Job, victim: int) -> None:
    assert job.network is not None
    for host in job.network.hosts:
        for other in job.network.hosts:
            if other is not host:
                command = ["ip", "-n", str(host.namespace), "route", "add", "blackhole", f"{other.address}/32"]
                subprocess.run(command, check=True)


def _trickle(job: Job, victim: int) -> None:
    assert job.network is not None
    job.network.change(rate="8bit", host=job.place.host_of(victim))


def _nothing(job: Job, victim: int) -> None:
    pass


FAULTS = (
    Fault("killed", Ending.NAMES_RANK, _signal(signal.SIGKILL, _of_rank)),
    Fault("stopped for good", Ending.NAMES_RANK, _signal(signal.SIGSTOP, _of_rank), stays=True),
    Fault("stopped past the time-out", Ending.NAMES_RANK, _stop_for(lambda job: job.work.timeout_s + 2.0)),
    Fault("stopped a while", Ending.GOES_ON, _stop_for(lambda job: SHORT_S)),
    Fault("exception in the script", Ending.NAMES_RANK, _from_within("raise")),
    Fault("exception in backward", Ending.NAMES_RANK, _from_within("raise in backward")),
    Fault("memory limit", Ending.NAMES_RANK, _from_within("memory")),
    Fault("garbage on every port", Ending.GOES_ON, _garbage),
    Fault("full disk", Ending.GOES_ON, _nothing, at_start=True),
    Fault("another build on one rank", Ending.NAMES_RANK, _nothing, at_start=True),
    Fault("host down", Ending.NAMES_HOST, _host_down_for(None), needs_hosts=True),
    # A connection waits for a network that comes back; one that is to be made fails where there is no way.
    Fault(
        "host down a while",
        Ending.GOES_ON,
        _host_down_for(SHORT_S),
        else_at_start=Ending.NAMES_HOST,
        needs_hosts=True,
    ),
    Fault("blackhole", Ending.NAMES_HOST, _blackhole, needs_hosts=True),
    Fault("rate of 8 bit/s", Ending.NAMES_HOST, _trickle, needs_hosts=True),
    Fault("server killed", Ending.NAMES_SERVER, _signal(signal.SIGKILL, _of_servers), needs_servers=True),
    Fault("server stopped", Ending.NAMES_SERVER, _signal(signal.SIGSTOP, _of_servers), stays=True, needs_servers=True),
)


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A folder on a file system of one page that is full, where mounting is permitted; else one that cannot be made."""
    place = folder / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        yield Path("/proc/espresso")
        return
    try:
        (place / "filler").write_bytes(bytes(4096))
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)
