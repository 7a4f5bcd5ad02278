"""The faults: what each does to a job, where it can be played, and what must come of it."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from benchmarks.chaos.places import Job, Place

SHORT_S = 1.5
"""Less than any time-out: the job goes on."""

PATIENCE_S = 60.0
"""How long a rank may take to come to its next step: it may be searching."""


class Ending(Enum):
    """What must come of a fault."""

    GOES_ON = auto()
    NAMES_RANK = auto()
    NAMES_HOST = auto()
    NAMES_SERVER = auto()
    EITHER = auto()


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        play: does it, to a job and a victim's rank; may take as long as the fault lasts.
        at_start: it is there from the start instead (a setting of the job).
    """

    name: str
    ending: Ending
    play: Callable[[Job, int], None]
    at_start: bool = False
    needs_hosts: bool = False
    needs_servers: bool = False

    def fits(self, place: Place) -> bool:
        """Whether it can be played there."""
        return (place.num_hosts > 1 or not self.needs_hosts) and (place.num_servers > 0 or not self.needs_servers)


def _kill(job: Job, victim: int) -> None:
    os.kill(job.pid(victim), signal.SIGKILL)


def _kill_server(job: Job, victim: int) -> None:
    for pid in job.server_pids():
        os.kill(pid, signal.SIGKILL)


def _stop_for(seconds: Callable[[Job], float]) -> Callable[[Job, int], None]:
    def play(job: Job, victim: int) -> None:
        pid = job.pid(victim)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds(job))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

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
    for address, port in _listening(job):
        with suppress(OSError), socket.create_connection((address, port), timeout=1.0) as connection:
            connection.sendall(draw.randbytes(draw.choice((1, 7, 64, 4096))))
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for address, port in _listening(job, "udp"):
            sender.sendto(draw.randbytes(48), (address, port))


def _listening(job: Job, kind: str = "tcp") -> Iterator[tuple[str, int]]:
    found = set()
    for pid in job.alive():
        inodes = set()
        with suppress(OSError):
            inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                words = line.split()
                port = int(words[1].rpartition(":")[2], 16)
                if words[3] in ("0A", "07") and f"socket:[{words[9]}]" in inodes:
                    found.add(("127.0.0.1", port))
    yield from sorted(found)


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
    Fault("killed", Ending.NAMES_RANK, _kill),
    Fault("stopped for good", Ending.NAMES_RANK, _stop_for(lambda job: job.work.timeout_s + 8.0)),
    Fault("stopped past the time-out", Ending.NAMES_RANK, _stop_for(lambda job: job.work.timeout_s + 2.0)),
    Fault("stopped a while", Ending.GOES_ON, _stop_for(lambda job: SHORT_S)),
    Fault("exception in the script", Ending.NAMES_RANK, _from_within("raise")),
    Fault("memory limit", Ending.NAMES_RANK, _from_within("memory")),
    Fault("garbage on every port", Ending.GOES_ON, _garbage),
    Fault("full disk", Ending.GOES_ON, _nothing, at_start=True),
    Fault("another build on one rank", Ending.NAMES_RANK, _nothing, at_start=True),
    Fault("host down", Ending.NAMES_HOST, _host_down_for(None), needs_hosts=True),
    Fault("host down a while", Ending.GOES_ON, _host_down_for(SHORT_S), needs_hosts=True),
    Fault("blackhole", Ending.NAMES_HOST, _blackhole, needs_hosts=True),
    Fault("rate of 8 bit/s", Ending.NAMES_HOST, _trickle, needs_hosts=True),
    Fault("server killed", Ending.NAMES_SERVER, _kill_server, needs_servers=True),
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
