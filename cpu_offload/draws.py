"""What random numbers depend on, on the host: :mod:`espresso.compressors.draws` as kernels take it."""

from __future__ import annotations

import numpy as np

from espresso.compressors import draws
from espresso.compressors.base import DrawKey


def shared_salt(key: DrawKey) -> np.uint64:
    """The part of the key that all segments share; the rank stays out, for what all ranks draw alike."""
    return np.uint64(draws.salt_of(key))


def rank_salt(key: DrawKey) -> np.uint64:
    """The same with the rank, so that the errors of ranks average out."""
    return np.uint64(draws.rank_salt(key))
