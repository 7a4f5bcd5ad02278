"""Start one group of workers per host, as torchrun would, and see them to their end."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.emulated.interrupts import interrupts_deferred
from benchmarks.emulated.network import Host, Network
from benchmarks.ports import free_port
from benchmarks.python_path import python_path

_POLL_S = 0.05
#: A worker that fails takes the others down with it; this is how long they may take to say why.
_GRACE_S = 3.0


class WorkerError(RuntimeError):
    """A worker ended with an error."""


class DeadlineError(RuntimeError):
    """Workers were still running at the deadline."""


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None


def cores_of(host: Host) -> set[int]:
    """The one core that a pinned host has; hosts share cores when there are too few, evenly."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[host.index % len(cores)]}


def worker_env(network: Network, host: Host, local_rank: int, num_local: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set, and those that keep a worker on its card and its core."""
    return {
        "RANK": str(host.index * num_local + local_rank),
        "WORLD_SIZE": str(len(network.hosts) * num_local),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(num_local),
        "GROUP_RANK": str(host.index),
        "GROUP_WORLD_SIZE": str(len(network.hosts)),
        "MASTER_ADDR": network.hosts[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": host.interface,
        "NCCL_SOCKET_IFNAME": host.interface,
        "NCCL_HOSTID": f"rank {host.index * num_local + local_rank}",  # it refuses a host's second rank on one GPU
        "OMP_NUM_THREADS": "1",
        # There is no name service between the hosts, and the TCP store would warn about it on every start.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def run_workers(
    network: Network,
    argv: Sequence[str],
    *,
    workers_per_host: int = 1,
    pin: bool = False,
    deadline_s: float = 600.0,
    env: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    on_poll: Callable[[], None] | None = None,
) -> None:
    """Run ``argv`` as every worker and return when all have ended well.

    Args:
        network: where they run.
        argv: the worker's command, the same on every rank.
        workers_per_host: ranks per host; consecutive ranks share a host.
        pin: one core for each host, shared by its workers.
        deadline_s: when the workers that still run are killed.
        env: variables on top of this process's own and torchrun's.
        log_dir: one file ``rank<N>.log`` per worker goes there; None leaves the output on the terminal.
        on_poll: called every so often while they run, for example to show progress.

    Raises:
        WorkerError: a worker ended with an error; the others are stopped.
        DeadlineError: a worker still ran at the deadline.
    """
    with _started(network, list(argv), workers_per_host, pin, env or {}, log_dir) as workers:
        _wait(workers, deadline_s, on_poll or (lambda: None))


@contextmanager
def _started(
    network: Network,
    argv: list[str],
    num_local: int,
    pin: bool,
    env: Mapping[str, str],
    log_dir: Path | None,
) -> Iterator[list[_Worker]]:
    port = 29500 if network.rate_bps is not None else free_port()
    workers: list[_Worker] = []
    with ExitStack() as stack:
        stack.callback(_stop, workers)
        for host in network.hosts:
            for local_rank in range(num_local):
                variables = worker_env(network, host, local_rank, num_local, port)
                rank = int(variables["RANK"])
                log = None if log_dir is None else log_dir / f"rank{rank}.log"
                output = None if log is None else stack.enter_context(log.open("wb"))
                with _on(cores_of(host) if pin else os.sched_getaffinity(0)):
                    process = subprocess.Popen(
                        host.command(argv),
                        env={**os.environ, "PYTHONPATH": python_path(), **variables, **env},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT if output else None,
                        # A session of its own: Ctrl-C reaches only us, and we stop the worker with its children.
                        start_new_session=True,
                    )
                workers.append(_Worker(rank, process, log))
        yield workers


@contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """What is started here has only these cores from its first instruction on: a process inherits its starter's."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _wait(workers: list[_Worker], deadline_s: float, on_poll: Callable[[], None]) -> None:
    deadline = time.monotonic() + deadline_s
    running = list(workers)
    while running:
        running = [worker for worker in running if worker.process.poll() is None]
        failed = [worker for worker in workers if worker.process.returncode not in (None, 0)]
        if failed:
            _let_end(running, min(deadline, time.monotonic() + _GRACE_S))
            raise WorkerError("; ".join(_describe(worker) for worker in failed))
        if running and time.monotonic() > deadline:
            late = ", ".join(str(worker.rank) for worker in running)
            raise DeadlineError(f"still running after {deadline_s:g} s and stopped: rank {late}")
        on_poll()
        time.sleep(_POLL_S)


def _let_end(workers: list[_Worker], deadline: float) -> None:
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in workers):
        time.sleep(_POLL_S)


def _describe(worker: _Worker) -> str:
    text = f"rank {worker.rank} ended with status {worker.process.returncode}"
    if worker.log is None:
        return text
    lines = worker.log.read_text(errors="replace").splitlines()[-25:]
    return "\n".join([f"{text}; the end of {worker.log}:", *lines])


def _stop(workers: list[_Worker]) -> None:
    """End what still runs, each with the processes that it started."""
    with interrupts_deferred():
        for sign, patience_s in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0)):
            alive = [worker for worker in workers if worker.process.poll() is None]
            for worker in alive:
                os.killpg(worker.process.pid, sign)
            _let_end(alive, time.monotonic() + patience_s)
