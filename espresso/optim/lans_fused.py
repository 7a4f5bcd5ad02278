"""LANS on the CPU in three passes over memory: ‖g‖; moments with ‖x‖, ‖r‖, ‖c‖; the parameter."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from espresso.compressors.base import Array
from espresso.cpu_offload import WorkerPool
from espresso.optim import lans_kernels as kernels
from espresso.optim.base import Row
from espresso.optim.lans_tensors import Settings

_BLOCKS_PER_PART = 64
"""What one thread takes at a time. It does not show in the result."""

_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def is_possible(param: Tensor) -> bool:
    """Whether this parameter can be stepped here: float32 or float64 on the CPU, without holes in memory."""
    return (
        param.device.type == "cpu"
        and param.dtype in (torch.float32, torch.float64)
        and any(_is_laid_out(param, layout) for layout in _LAYOUTS)
    )


def step(row: Row, settings: Settings) -> None:
    """One step of one parameter; it and its moments change in place."""
    grad = row.grad
    if grad.stride() != row.param.stride() or grad.dtype != row.param.dtype:
        grad = torch.empty_like(row.param).copy_(grad)
    x, g, m, v = map(_flat, (row.param, grad, row.exp_avg, row.exp_avg_sq))
    if not len(x):
        return
    kind = x.dtype.type
    num_blocks = -(-len(x) // kernels.BLOCK)
    norms = np.empty(num_blocks)
    _share(num_blocks, lambda first, end: kernels.block_norms(g, first, end, norms))
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
        lambda first, end: kernels.update_moments(x, g, m, v, first, end, numbers, betas, sums),
    )
    size, of_r, of_c = np.sqrt(np.cumsum(sums, axis=0)[-1]).tolist()
    rates = np.array([settings.lr * beta1 * _trust(size, of_r), settings.lr * (1.0 - beta1) * _trust(size, of_c)], kind)
    _share(num_blocks, lambda first, end: kernels.apply(x, g, m, v, first, end, numbers, rates))


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
