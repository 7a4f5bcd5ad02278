"""Numba kernels of LANS over flat arrays of one type, in blocks of fixed size.

Sums of squares are made in double precision, eight interleaved sums per block added in one order, so that
they depend neither on threads nor on the width of the machine's vectors. Blocks are counted from the
tensor's first element; every kernel takes a range of them.

``np.divide`` instead of ``/``: Numba's operator looks for a zero divisor to raise an exception, and a loop that may
raise is not vectorised.
"""

from __future__ import annotations

import numpy as np

from espresso.compressors.base import Array
from espresso.cpu_offload.intrinsics import room
from espresso.cpu_offload.jit import Scalar, kernel

BLOCK = 1 << 10
"""Elements: a block of all operands stays in the first-level cache."""


@kernel
def sum_of_squares(values: Array, num: int) -> Scalar:
    """Of ``values[:num]``, in double precision and a fixed order."""
    a = b = c = d = e = f = g = h = 0.0
    whole = num - num % 8
    for i in range(0, whole, 8):
        eight = values[i : i + 8]
        a += np.float64(eight[0]) * np.float64(eight[0])
        b += np.float64(eight[1]) * np.float64(eight[1])
        c += np.float64(eight[2]) * np.float64(eight[2])
        d += np.float64(eight[3]) * np.float64(eight[3])
        e += np.float64(eight[4]) * np.float64(eight[4])
        f += np.float64(eight[5]) * np.float64(eight[5])
        g += np.float64(eight[6]) * np.float64(eight[6])
        h += np.float64(eight[7]) * np.float64(eight[7])
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for i in range(whole, num):
        total += np.float64(values[i]) * np.float64(values[i])
    return total


@kernel
def block_norms(values: Array, first: int, end: int, sums: Array) -> None:
    """``sums[b]`` = sum of squares of block b. One reading pass."""
    for block in range(first, end):
        low = block * BLOCK
        sums[block] = sum_of_squares(values[low:], min(BLOCK, len(values) - low))


@kernel
def directions(x: Array, g: Array, m: Array, v: Array, low: int, num: int, numbers: Array, r: Array, c: Array) -> None:
    """``r`` and ``c`` of ``num`` elements from ``low``, with the moments as they are after their update."""
    inverse, eps, decay, by1, by2 = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    xs, gs, ms, vs = x[low : low + num], g[low : low + num], m[low : low + num], v[low : low + num]
    for i in range(num):
        den = np.sqrt(np.divide(vs[i], by2)) + eps
        r[i] = np.divide(np.divide(ms[i], by1), den) + decay * xs[i]
        c[i] = np.divide(gs[i] * inverse, den) + decay * xs[i]


@kernel
def update_moments(
    x: Array, g: Array, m: Array, v: Array, first: int, end: int, numbers: Array, betas: Array, sums: Array
) -> None:
    """Decay and add to both moments; ``sums[b]`` = sums of squares of x, r and c of block b. One pass.

    Args:
        numbers: in the arrays' type: 1 / (‖g‖ + ε) with its sign, ε, λ, 1 - β1^t, 1 - β2^t.
        betas: in the arrays' type: β1, 1 - β1, β2, 1 - β2.
    """
    r, c = room(BLOCK, x.dtype), room(BLOCK, x.dtype)
    inverse = numbers[0]
    keep1, take1, keep2, take2 = betas[0], betas[1], betas[2], betas[3]
    for block in range(first, end):
        low = block * BLOCK
        num = min(BLOCK, len(x) - low)
        gs, ms, vs = g[low : low + num], m[low : low + num], v[low : low + num]
        for i in range(num):
            unit = gs[i] * inverse
            ms[i] = keep1 * ms[i] + take1 * unit
            vs[i] = keep2 * vs[i] + take2 * (unit * unit)
        directions(x, g, m, v, low, num, numbers, r, c)
        sums[block, 0] = sum_of_squares(x[low:], num)
        sums[block, 1] = sum_of_squares(r, num)
        sums[block, 2] = sum_of_squares(c, num)


@kernel
def apply(x: Array, g: Array, m: Array, v: Array, first: int, end: int, numbers: Array, rates: Array) -> None:
    """``x -= rates[0] * r + rates[1] * c``. One pass; r and c are worked out again rather than kept."""
    r, c = room(BLOCK, x.dtype), room(BLOCK, x.dtype)
    rate_r, rate_c = rates[0], rates[1]
    for block in range(first, end):
        low = block * BLOCK
        num = min(BLOCK, len(x) - low)
        directions(x, g, m, v, low, num, numbers, r, c)
        xs = x[low : low + num]
        for i in range(num):
            xs[i] -= rate_r * r[i] + rate_c * c[i]
