"""Sketches on the host: a stretch of numbers added up in a few groups with random signs, and the sum of squares."""

from __future__ import annotations

import numpy as np

from espresso.compressors.base import Array
from espresso.cpu_offload.jit import Scalar, sum_kernel

RUN = 64
"""Numbers that go to one group before the next group has its turn; what is left over goes to all of them in turn."""


@sum_kernel
def sketch(values: Array, signs: Array, found: Array) -> Scalar:
    """Fill float64 ``found``: of the groups all but its last number, which is the sum of squares.

    Args:
        values: float32 or float64, no longer than ``signs``.
        signs: float32, 1 or -1.
    """
    groups = found.size - 1
    found[:] = 0.0
    whole = values.size // RUN
    for run in range(whole):
        added = squares = 0.0
        for i in range(RUN):
            number = np.float64(values[run * RUN + i])
            added += number * signs[run * RUN + i]
            squares += number * number
        found[run % groups] += added
        found[groups] += squares
    for i in range(whole * RUN, values.size):
        number = np.float64(values[i])
        found[i % groups] += number * signs[i]
        found[groups] += number * number
