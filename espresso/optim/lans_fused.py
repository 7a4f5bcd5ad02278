"""LANS on the CPU in three passes over memory: ‖g‖; moments with ‖x‖, ‖r‖, ‖c‖; the parameter.

The kernels take flat arrays of one type, in blocks of fixed size. Sums of squares are made in double precision, eight
interleaved sums per block added in one order, so that they depend neither on threads nor on the width of the machine's
vectors. Blocks are counted from the tensor's first element; every kernel takes a range of them.

``np.divide`` instead of ``/``: Numba's operator looks for a zero divisor to raise an exception, and a loop that may
raise is not vectorised.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from espresso.compressors.base import Array
from espresso.cpu_offload import WorkerPool
from espresso.cpu_offload.jit import Scalar, kernel, room
from espresso.optim.base import Row, Settings

BLOCK = 1 << 10
"""Elements: a block of all operands stays in the first-level cache."""

_BLOCKS_PER_PART = 64
"""What one thread takes at a time. It does not show in the result."""

_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def is_possible(param: Tensor) -> bool:
    """Whether this parameter can be stepped here: float32 or float64 on the CPU, without holes in memory, and no
    tensor that another stands in for, as a DTensor.
    """
    return (
        type(param) in (Tensor, torch.nn.Parameter)
        and param.device.type == "cpu"
        and param.dtype in (torch.float32, torch.float64)
        and any(_is_laid_out(param, layout) for layout in _LAYOUTS)
    )


def step(row: Row, settings: Settings) -> None:
    """One step of one parameter; it and its moments, laid out alike, change in place."""
    grad = row.grad
    if grad.stride() != row.param.stride() or grad.dtype != row.param.dtype:
        grad = torch.empty_like(row.param).copy_(grad)
    x, g, m, v = map(_flat, (row.param, grad, row.exp_avg, row.exp_avg_sq))
    if not len(x):
        return
    kind = x.dtype.type
    num_blocks = -(-len(x) // BLOCK)
    norms = np.empty(num_blocks)
    _share(num_blocks, lambda first, end: block_norms(g, first, end, norms))
    norm = math.sqrt(np.cumsum(norms)[-1])
    inverse = 1.0 if norm == 0.0 else 1.0 / (norm + settings.eps)
    by1, by2 = settings.corrections(row.step)
    numbers = np.array(
        [-inverse if settings.maximize else inverse, settings.eps, settings.weight_decay, by1, by2], kind
    )
    beta1, beta2 = settings.beta1, settings.beta2
    betas = np.array([beta1, 1.0 - beta1, beta2, 1.0 - beta2], kind)
    sums = np.empty((num_blocks, 3))
    _share(
        num_blocks,
        lambda first, end: update_moments(x, g, m, v, first, end, numbers, betas, sums),
    )
    size, of_r, of_c = np.sqrt(np.cumsum(sums, axis=0)[-1]).tolist()
    rates = np.array([settings.lr * beta1 * _trust(size, of_r), settings.lr * (1.0 - beta1) * _trust(size, of_c)], kind)
    _share(num_blocks, lambda first, end: apply(x, g, m, v, first, end, numbers, rates))
    torch.autograd.graph.increment_version(row.param)  # NumPy wrote it


def _trust(size: float, norm: float) -> float:
    return 1.0 if size == 0.0 or norm == 0.0 else size / norm


def _is_laid_out(param: Tensor, layout: torch.memory_format) -> bool:
    dimensions = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(layout, param.dim())
    return param.dim() == dimensions and param.is_contiguous(memory_format=layout)


def _flat(tensor: Tensor) -> Array:
    """The tensor's memory as one row, in the order in which it lies there."""
    array: Array = tensor.detach().as_strided((tensor.numel(),), (1,)).numpy()
    return array


def _share(num_blocks: int, task: object) -> None:
    parts = [(first, min(first + _BLOCKS_PER_PART, num_blocks)) for first in range(0, num_blocks, _BLOCKS_PER_PART)]
    _pool(torch.get_num_threads()).run(task, parts)  # type: ignore[arg-type]


@cache
def _pool(num_threads: int) -> WorkerPool:
    """As many threads as torch uses in its own operations; made once and kept."""
    return WorkerPool(num_threads)


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
