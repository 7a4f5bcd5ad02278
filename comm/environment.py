"""The launchers' environment variables, read in one place.

torchrun sets ``RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK``; Open MPI, PMI (MPICH, Intel
MPI) and SLURM have names of their own. ``read_environment`` maps the first complete set it finds, and
``export_environment`` writes it back under torchrun's names, so that
``torch.distributed.init_process_group("gloo")`` works under ``mpirun`` and ``srun`` too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
import struct
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from espresso.comm.errors import DisagreementError, TopologyError


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher says of this process. ``node`` is its node's number where the launcher tells it.

    Attributes:
        launcher: ``torchrun``, ``openmpi``, ``pmi`` or ``slurm``.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int | None


_NAMES: dict[str, tuple[str, str, str, str | None, str | None]] = {
    # launcher: rank, world size, local rank, local world size, node
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        None,
    ),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", None),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
}


def read_environment(environment: Mapping[str, str] | None = None) -> Launch | None:
    """The launcher's variables, or None when no launcher set any (a script that passes ranks by hand).

    Raises:
        TopologyError: a variable is not a whole number, or rank and world size contradict each other.
    """
    env = os.environ if environment is None else environment
    for launcher, (rank, size, local_rank, local_size, node) in _NAMES.items():
        if launcher == "pmi" and local_rank not in env and _is_sruns(env, rank, size):
            continue
        if rank in env and size in env:
            launch = Launch(
                launcher,
                _number(env, rank),
                _number(env, size),
                _number(env, local_rank) if local_rank in env else 0,
                _local_size(env, local_size),
                _number(env, node) if node is not None and node in env else None,
            )
            _check(launch, rank, size, local_rank, local_size)
            return launch
    return None


def _is_sruns(env: Mapping[str, str], rank: str, size: str) -> bool:
    """Whether PMI's variables are ``srun --mpi=pmi2``'s, which says no more than these two of them."""
    both = [env.get(name) for name in (rank, size, "SLURM_PROCID", "SLURM_NTASKS")]
    return None not in both and both[:2] == both[2:]


def told_world_size() -> int:
    """What ``WORLD_SIZE`` says; 1 where nobody has set it.

    Raises:
        TopologyError: it is not a whole number.
    """
    return _number(os.environ, "WORLD_SIZE") if os.environ.get("WORLD_SIZE") else 1


def export_environment(environment: MutableMapping[str, str] | None = None) -> Launch | None:
    """Write ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` from whichever launcher ran us.

    ``MASTER_ADDR`` and ``MASTER_PORT`` stay the user's; on one host they default to loopback and 29500.
    """
    env = os.environ if environment is None else environment
    launch = read_environment(env)
    if launch is None:
        return None
    # Not setdefault: half a set left over from elsewhere must not be mixed with ours.
    env["RANK"], env["WORLD_SIZE"] = str(launch.rank), str(launch.world_size)
    env.setdefault("LOCAL_RANK", str(launch.local_rank))
    if launch.local_world_size:
        env.setdefault("LOCAL_WORLD_SIZE", str(launch.local_world_size))
    if is_one_host(launch, env):
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env.setdefault("MASTER_PORT", "29500")
    return launch


def is_one_host(launch: Launch, env: Mapping[str, str]) -> bool:
    """Whether all ranks are on this machine, as far as the launcher says; one that says nothing is one shell's."""
    is_wide = env.get("SLURM_NNODES", "1") != "1"
    return launch.local_world_size == launch.world_size or (not launch.local_world_size and not is_wide)


def export_worker(rank: int, size: int, local_rank: int, local_size: int, master: str) -> None:
    """Write torchrun's names for a world of workers, smaller than the launcher's by its parameter servers.

    ``MASTER_ADDR`` and ``MASTER_PORT`` stay where somebody has set them; else they are rank 0's address and 29500.
    """
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    os.environ |= {name: str(value) for name, value in own.items()}
    os.environ.setdefault("MASTER_ADDR", master)
    os.environ.setdefault("MASTER_PORT", "29500")


def local_address() -> str:
    """The address under which other machines reach this one.

    That of the card in ``GLOO_SOCKET_IFNAME``, else the one that traffic to ``MASTER_ADDR`` leaves by, else the one
    of this host's name, else loopback.
    """
    card = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            if card:
                packed = struct.pack("256s", card.encode()[:15])
                # SIOCGIFADDR: the address of a card.
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, packed)[20:24])
            # Connecting a datagram socket sends nothing; it only chooses a route.
            probe.connect((os.environ.get("MASTER_ADDR", socket.gethostname()), 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def build() -> str:
    """What this process runs: two ranks with the same text understand each other."""
    from espresso import __version__

    return f"espresso {__version__} (sources {_sources()})"


def check_settings(everybody: Mapping[int, Mapping[str, Any]]) -> None:
    """All ranks must have the same settings.

    Args:
        everybody: theirs, by rank.

    Raises:
        DisagreementError: names the first rank that has another one than the first of all, the setting, and both
            values.
    """
    first, wanted = next(iter(everybody.items()))
    for rank, theirs in everybody.items():
        for what in {**wanted, **theirs}:
            one, other = (values.get(what, "nothing") for values in (wanted, theirs))
            if one != other:
                raise DisagreementError(
                    f"rank {rank} has another {what} than rank {first} ({one!r} on rank {first}, {other!r} on rank"
                    f" {rank}); start all ranks alike"
                )


def check_builds(everybody: Mapping[int, str]) -> None:
    """All ranks must run the same.

    Raises:
        DisagreementError: names the first rank that runs something else than the first of all.
    """
    first, wanted = next(iter(everybody.items()))
    for rank, theirs in everybody.items():
        if theirs != wanted:
            raise DisagreementError(
                f"rank {rank} runs {theirs}, rank {first} runs {wanted}; install the same on all machines"
            )


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for folder in ("strategies", "compressors", "comm"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        value = int(env[name])
    except ValueError:
        raise TopologyError(f"environment variable {name} is {env[name]!r}, expected a whole number") from None
    if value < 0:
        raise TopologyError(f"environment variable {name} is {value}, expected at least 0")
    return value


def _local_size(env: Mapping[str, str], name: str | None) -> int:
    """Ranks on this node; 0 when the launcher does not say. SLURM writes those of all nodes of a step, ``2(x3),1``."""
    if name is None or name not in env:
        return 0
    if name not in _NAMES["slurm"]:
        return _number(env, name)
    sizes: list[int] = []
    for part in env[name].split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        sizes += [int(found[1])] * int(found[2] or 1) if found else []
    node = _number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    return sizes[node] if node < len(sizes) else 0


def _check(launch: Launch, rank: str, size: str, local_rank: str, local_size: str | None) -> None:
    wrong = None
    if launch.rank >= launch.world_size:
        wrong = f"{rank}={launch.rank} is not below {size}={launch.world_size}"
    elif launch.local_world_size:
        if launch.local_rank >= launch.local_world_size:
            wrong = f"{local_rank}={launch.local_rank} is not below {local_size}={launch.local_world_size}"
        elif launch.local_world_size > launch.world_size:
            wrong = f"{local_size}={launch.local_world_size} is above {size}={launch.world_size}"
    if wrong is not None:
        raise TopologyError(
            f"{wrong}; the launcher's variables contradict each other (are some left over from another launch?)"
        )
