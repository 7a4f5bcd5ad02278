"""What random numbers depend on, on the host. Formulas: :mod:`espresso.compressors.levels` and ``randomk``."""

from __future__ import annotations

import numpy as np

from espresso.compressors.base import DrawKey
from espresso.cpu_offload.kernels import mix64


def shared_salt(key: DrawKey) -> np.uint64:
    """The part of the key that all segments share; the rank stays out, for what all ranks draw alike."""
    return np.uint64(_mix(_mix(_mix(key.seed) + key.step) + key.site))


def rank_salt(key: DrawKey) -> np.uint64:
    """The same with the rank, so that the errors of ranks average out."""
    return np.uint64(_mix(int(shared_salt(key)) + key.rank))


def _mix(value: int) -> int:
    """:func:`espresso.cpu_offload.kernels.mix64` on a Python integer."""
    return int(mix64(np.uint64(value % 2**64)))
