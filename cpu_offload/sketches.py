"""Sketches on the host: numbers added up in a few groups with random signs, and their sum of squares."""

from __future__ import annotations

import numpy as np

from espresso.compressors.base import Array
from espresso.cpu_offload.jit import Scalar, sum_kernel

_SPREAD = 40503
"""Times a number, without its lowest byte: as good as random (Knuth's multiplicative hash)."""


@sum_kernel
def sketch(values: Array, signs: Array, found: Array) -> Scalar:
    """Fill float64 ``found``: of the groups all but its last number, which is the sum of squares.

    Neighbours go to different groups, and those as far apart as a row of a matrix is long as well, so that a row or a
    column which holds most of a tensor is in all of them.

    Args:
        values: float32 or float64, no longer than ``signs``.
        signs: float32, 1 or -1.
    """
    groups = found.size - 1
    found[:] = 0.0
    whole = values.size // groups
    squares = 0.0
    for row in range(whole):
        at = row * groups
        turn = (row * _SPREAD >> 8) % groups
        for i in range(groups - turn):
            number = np.float64(values[at + i])
            found[turn + i] += number * signs[at + i]
            squares += number * number
        for i in range(groups - turn, groups):
            number = np.float64(values[at + i])
            found[turn + i - groups] += number * signs[at + i]
            squares += number * number
    for i in range(whole * groups, values.size):
        number = np.float64(values[i])
        found[i % groups] += number * signs[i]
        squares += number * number
    found[groups] = squares
