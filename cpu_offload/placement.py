"""On which cores the pool's threads run: those nearest to the network card first.

1  ``ESPRESSO_POOL_CORES`` says which (``0-3,8``); "any" leaves it to the scheduler
2  else, on a machine with several NUMA nodes, as many threads as the card's node has cores of this rank run there, and
   the others on this rank's other cores
3  else (one node, or a system that says nothing of its card) the scheduler decides

The card is that of ``GLOO_SOCKET_IFNAME``, else of ``NCCL_SOCKET_IFNAME``. A thread is kept to a set of cores and not
to one of them, so that ranks of a machine need not agree. Roots rotate over a node's ranks, so none has more to do.
"""

from __future__ import annotations

import os
from pathlib import Path

Cores = frozenset[int]
VARIABLE = "ESPRESSO_POOL_CORES"
ANY = "any"
_SYSTEM = Path("/sys")


def cores_of_threads(num_threads: int, allowed: Cores, system: Path = _SYSTEM) -> list[Cores]:
    """For every thread of a pool the cores it may run on; empty where the scheduler decides.

    Args:
        allowed: this process's cores.

    Raises:
        ValueError: the variable names no cores, or none of this process.
    """
    said = os.environ.get(VARIABLE, "")
    if said == ANY:
        return []
    if said:
        try:
            chosen = _listed(said) & allowed
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from None
        if not chosen:
            raise ValueError(f"{VARIABLE}={said!r} has none of this process's cores ({_shown(allowed)})")
        return [chosen] * num_threads
    near = _near_card(system) & allowed
    far = allowed - near
    if not near or not far:
        return []
    return [near if thread < len(near) else far for thread in range(num_threads)]


def allowed_cores() -> Cores:
    """The cores this process may run on; none known where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _near_card(system: Path) -> Cores:
    """The cores of the card's NUMA node; none where the system does not say."""
    names = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME") or ""
    try:
        node = int((system / "class/net" / names.split(",")[0] / "device/numa_node").read_text())
        return _listed((system / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):  # no such card, a virtual one, or node -1
        return frozenset()


def _listed(text: str) -> Cores:
    """Cores as Linux lists them.

    Example:
        >>> sorted(_listed("0-2,8"))
        [0, 1, 2, 8]
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        try:
            found.update(range(int(low), int(high or low) + 1))
        except ValueError:
            raise ValueError(f"{text.strip()!r} is no list of cores such as 0-3,8") from None
    return frozenset(found)


def _shown(cores: Cores) -> str:
    return ",".join(map(str, sorted(cores)))
