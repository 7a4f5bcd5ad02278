"""Where a job runs: forked ranks on loopback or emulated hosts, torchrun, mpirun, with servers or without."""

import atexit
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.worker import Work, run
from benchmarks.emulated import Network, open_network
from benchmarks.ports import free_port
from benchmarks.python_path import ROOT, python_path
from benchmarks.rank_pool import RANKS, torchrun_variables

_NEW_NETWORK = 0x40000000


@dataclass(frozen=True)
class Place:
    """A way to start a job.

    Attributes:
        num_hosts: emulated hosts; 0 is loopback.
        launcher: ``forked``, ``torchrun`` or ``mpirun``; the latter two end a whole job when a rank of it dies.
    """

    name: str
    num_ranks: int
    num_hosts: int = 0
    launcher: str = "forked"
    num_servers: int = 0

    def host_of(self, rank: int) -> int:
        """The emulated host of a rank."""
        return rank * max(self.num_hosts, 1) // self.num_ranks


PLACES = (
    Place("loopback", 4),
    Place("two hosts", 4, num_hosts=2),
    Place("torchrun", 3, launcher="torchrun"),
    Place("mpirun", 3, launcher="mpirun"),
    Place("torchrun, a server", 2, launcher="torchrun", num_servers=1),
    Place("mpirun, a server", 2, launcher="mpirun", num_servers=1),
)


@dataclass
class Job:
    """A running job.

    Attributes:
        processes: what we started: the ranks, or their launcher.
    """

    place: Place
    work: Work
    folder: Path
    network: Network | None
    processes: list[Any] = field(default_factory=list)

    def told(self) -> dict[int, list[dict[str, Any]]]:
        """What every rank told so far; a line that is being written is left out."""
        found = {}
        for rank in range(self.place.num_ranks):
            path = self.folder / f"rank{rank}.jsonl"
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            found[rank] = [json.loads(line) for line in lines if line.endswith("\n")]
        return found

    def pid(self, rank: int) -> int:
        """Of a rank that has told something."""
        return int(self.told()[rank][0]["pid"])

    def server_pids(self) -> list[int]:
        """Processes behind the launcher that are no worker."""
        others = {lines[0]["pid"] for lines in self.told().values() if lines} | self.launcher_pids()
        return [pid for pid in self.alive() if pid not in others and b"espresso.launch" in _command(pid)]

    def launcher_pids(self) -> set[int]:
        """Of what was started to start the ranks."""
        return {process.pid for process in self.processes if isinstance(process, subprocess.Popen)}

    def alive(self) -> list[int]:
        """All processes of this job that run: those with its folder in their environment, or those that we forked."""
        if self.place.launcher == "forked":
            return [process.pid for process in self.processes if process.is_alive()]
        mark = f"ESPRESSO_CHAOS={self.folder}".encode()
        # A launcher that has just begun may have no environment yet.
        launchers = {process.pid for process in self.processes if process.poll() is None}
        return sorted(launchers | {pid for pid in _pids() if mark in _environment(pid)})

    def log(self) -> str:
        """What all ranks printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))


def _pids() -> Iterator[int]:
    yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() if _is_running(pid) else b""
    except OSError:
        return b""


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@contextmanager
def started(place: Place, work: Work, folder: Path) -> Iterator[Job]:
    """Start a job; when the block is left, end what is left of it."""
    with _network(place, work) as network:
        job = Job(place, work, folder, network)
        try:
            if place.launcher == "forked":
                _fork(job)
            else:
                _launch(job)
            yield job
        finally:
            _end(job)


@contextmanager
def _network(place: Place, work: Work) -> Iterator[Network | None]:
    if not place.num_hosts:
        yield None
        return
    # Automatic mode compresses on a slow network only.
    with open_network(place.num_hosts, "1gbit" if work.option else "50mbit") as network:
        yield network if network.rate_bps else None


def _fork(job: Job) -> None:
    place, port = job.place, free_port()
    per_host = place.num_ranks // max(place.num_hosts, 1)
    for rank in range(place.num_ranks):
        env = torchrun_variables(rank, place.num_ranks, per_host, port)
        namespace = None
        if job.network is not None:
            host = job.network.hosts[place.host_of(rank)]
            namespace = host.namespace
            env |= {"MASTER_ADDR": job.network.hosts[0].address, "GLOO_SOCKET_IFNAME": host.interface}
        process = RANKS.Process(target=_rank, args=(job.work, env, namespace, str(job.folder / f"rank{rank}.log")))
        process.start()
        job.processes.append(process)


def enter_network(path: str) -> None:
    """Have this thread, and the processes it starts, use the network of a namespace."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(descriptor)


def _rank(work: Work, env: dict[str, str], namespace: str | None, log: str) -> None:
    """In the forked process: become the rank."""
    os.setsid()
    if namespace is not None:
        enter_network(f"/run/netns/{namespace}")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    try:
        run(work)
    finally:
        atexit._run_exitfuncs()  # as at the end of a script; a forked process ends without


def _launch(job: Job) -> None:
    place = job.place
    total = place.num_ranks + place.num_servers
    if place.launcher == "torchrun":
        argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(total)]
        argv += ["--master-port", str(free_port())]
        python: list[str] = []
    else:
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "mpirun"
        argv = [mpirun, "--allow-run-as-root", "--oversubscribe", "-np", str(total)]
        python = [sys.executable]
    if place.num_servers:
        argv += [*python, "-m", "espresso.launch", "--servers", str(place.num_servers)]
        argv += ["--timeout-s", str(job.work.timeout_s), "-m", "benchmarks.chaos.worker"]
    else:
        argv += [*python, "-m", "benchmarks.chaos.worker"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), "ESPRESSO_CHAOS": str(job.folder)}
    env |= {"MASTER_PORT": str(free_port())} if place.launcher == "mpirun" else {}
    with (job.folder / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            [*argv, job.work.to_json()], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
    job.processes.append(process)


def _end(job: Job) -> None:
    """End what is left, and only what we started."""
    for process in job.processes:
        pid = process.pid
        try:
            os.killpg(pid, signal.SIGKILL)
            os.killpg(pid, signal.SIGCONT)
        except (ProcessLookupError, PermissionError):
            pass
    for pid in job.alive():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for process in job.processes:
        if isinstance(process, subprocess.Popen):
            process.wait()
        else:
            process.join()
    until = time.monotonic() + 2.0
    while job.alive() and time.monotonic() < until:
        time.sleep(0.05)
