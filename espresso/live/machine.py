"""What this machine is, and how much of it is this rank's."""

from __future__ import annotations

import os
import platform
import socket
import time
from typing import Any

import numpy as np
import torch

from espresso.comm.groups import Groups


def cores_per_rank(groups: Groups) -> float:
    """Cores this rank may count as its own: each core it may use, shared with the other ranks there."""
    mine = (socket.gethostname(), _boot_id(), tuple(sorted(os.sched_getaffinity(0))))
    everybody = groups.all_objects(mine)
    shares = []
    for host, boot, cores in everybody:
        users = [set(c) for h, b, c in everybody if (h, b) == (host, boot)]
        shares.append(sum(1.0 / sum(core in user for user in users) for core in cores))
    return min(shares)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def machine_facts() -> dict[str, Any]:
    """Hardware and versions, for the record in job files and benchmarks."""
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
