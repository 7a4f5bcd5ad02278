"""LANS in torch's multi-tensor operations; the formula is in :mod:`espresso.optim.lans`.

Nothing is read back from the device: norms stay tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espresso.optim.base import Row


@dataclass(frozen=True, slots=True)
class Settings:
    """A group's numbers; see :class:`espresso.optim.LANS`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    maximize: bool

    def corrections(self, step: int) -> tuple[float, float]:
        """1 - β1^t and 1 - β2^t, or ones."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1.0 - self.beta1**step, 1.0 - self.beta2**step


def step(rows: Sequence[Row], settings: Settings) -> None:
    """One step of all rows, which share device and dtype. Parameters and moments change in place."""
    beta1, beta2, eps = settings.beta1, settings.beta2, settings.eps
    first = [row.exp_avg for row in rows]
    second = [row.exp_avg_sq for row in rows]
    work = first[0].dtype
    params = [row.param.to(work) for row in rows]  # itself, but for halves
    # A copy in any case: gradients belong to the user.
    unit = [row.grad.to(work, copy=True) for row in rows]
    torch._foreach_mul_(unit, [_inverse(norm, eps, settings.maximize) for norm in torch._foreach_norm(unit)])
    torch._foreach_lerp_(first, unit, 1.0 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, unit, unit, 1.0 - beta2)

    corrections = [settings.corrections(row.step) for row in rows]
    den = torch._foreach_div(second, [by for _, by in corrections])
    torch._foreach_sqrt_(den)
    torch._foreach_add_(den, eps)
    momentum = torch._foreach_div(first, [by for by, _ in corrections])
    torch._foreach_div_(momentum, den)
    torch._foreach_div_(unit, den)
    if settings.weight_decay:
        torch._foreach_add_(momentum, params, alpha=settings.weight_decay)
        torch._foreach_add_(unit, params, alpha=settings.weight_decay)

    sizes = torch._foreach_norm(params)
    for direction, share in ((momentum, beta1), (unit, 1.0 - beta1)):
        norms = torch._foreach_norm(direction)
        torch._foreach_mul_(direction, list(map(_trust, sizes, norms)))
        torch._foreach_add_(params, direction, alpha=-settings.lr * share)
    for row, updated in zip(rows, params, strict=True):
        if updated is not row.param:
            row.param.copy_(updated)


def _inverse(norm: Tensor, eps: float, negative: bool) -> Tensor:
    """What the gradient is multiplied by: 1 / (‖g‖ + ε), and 1 for a zero gradient."""
    factor = torch.where(norm == 0, torch.ones_like(norm), (norm + eps).reciprocal())
    return -factor if negative else factor


def _trust(size: Tensor, norm: Tensor) -> Tensor:
    """τ: ‖x‖/‖u‖, or 1 if either is 0."""
    return torch.where((size == 0) | (norm == 0), torch.ones_like(norm), size / norm)
