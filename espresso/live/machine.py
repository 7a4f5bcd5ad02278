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
from espresso.comm.nodes import boot_id


def cores_per_rank(groups: Groups) -> float:
    """Cores this rank may count as its own: each core it may use, shared with the other ranks there.

    Collective the first time, with the jobs beside this one.
    """
    if groups.cores is None:
        mine = (socket.gethostname(), boot_id(), tuple(sorted(os.sched_getaffinity(0))))
        everybody = groups.everywhere(mine)
        shares = []
        for host, boot, cores in everybody:
            users = [set(c) for h, b, c in everybody if (h, b) == (host, boot)]
            shares.append(sum(1.0 / sum(core in user for user in users) for core in cores))
        groups.cores = min(shares)
    return groups.cores


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
