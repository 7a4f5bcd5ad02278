"""LANS: an Adam for large batches whose step is normalised block by block, in the manner of Nesterov.

Zheng, Lin, Zha, Li: Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes, 2020. A block is a
parameter tensor x with gradient g; at its step t, counted from 1::

    ĝ = g / (‖g‖ + ε)                     g itself where ‖g‖ = 0
    m ← β1 m + (1-β1) ĝ                   v ← β2 v + (1-β2) ĝ²
    m̂ = m / (1-β1^t)    v̂ = v / (1-β2^t)     both left out without bias correction
    den = √v̂ + ε        r = m̂/den + λx        c = ĝ/den + λx
    x ← x - η [ β1 τ(r) r + (1-β1) τ(c) c ]    τ(u) = ‖x‖/‖u‖, or 1 if either norm is 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from espresso.optim import lans_fused
from espresso.optim.base import MOMENTS, AdaptiveOptimizer, Group, Row, Settings, by_kind


class LANS(AdaptiveOptimizer):
    """LANS as an ordinary optimizer; it knows nothing of how gradients were exchanged.

    Three implementations of the same formula, equal up to rounding. ``fused`` (Numba, three passes over memory, CPU,
    float32 and float64) sums norms in blocks of fixed size, so that its result does not depend on the number of
    threads: ranks with different numbers of threads stay bit-identical. ``foreach`` runs on any device, without waiting
    for the device, with three temporaries of the parameters' size. With both off, tensors go one by one.

    Args:
        params: parameters, named parameters or groups of them.
        lr: η. A step moves every tensor by about η times its norm, whatever the gradient's size.
        betas: β1 and β2.
        eps: ε, added to the gradient's norm and to the denominator.
        weight_decay: λ, inside the normalisation.
        bias_correction: divide the moments by 1-β^t.
        maximize: climb instead of descend.
        foreach: use the multi-tensor implementation; None does so for what ``fused`` leaves, off the CPU.
        fused: use the fused one; None does so for what it can do.

    Raises:
        ValueError: a setting out of range. TypeError: complex or integer parameters.
        RuntimeError: ``fused=True`` with a parameter that it cannot do, or together with ``foreach=True``.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = LANS(model.parameters(), lr=0.02)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if foreach and fused:
            raise RuntimeError("foreach and fused cannot both be true")
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer; with ``fused=True`` every parameter has to allow it."""
        super().add_param_group(param_group)
        unfit = [p for p in param_group["params"] if not lans_fused.is_possible(p)]
        if param_group["fused"] and unfit:
            self.param_groups.pop()
            raise RuntimeError(
                "fused=True needs parameters of float32 or float64 on the CPU, got"
                f" {unfit[0].dtype} on {unfit[0].device}; leave fused at None to use it where it can be"
            )

    def _step_group(self, group: Group, rows: list[Row]) -> None:
        settings = Settings(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            bias_correction=group["bias_correction"],
            maximize=group["maximize"],
        )
        fused = [] if group["foreach"] or group["fused"] is False else list(filter(_fusable, rows))
        for row in fused:
            lans_fused.step(self._laid_alike(row), settings)
        taken = set(map(id, fused))
        others = [row for row in rows if id(row) not in taken]
        for alike in by_kind(others):
            # On a CPU a call costs little and temporaries of all tensors at once cost caches.
            together = group["foreach"] or (group["foreach"] is None and alike[0].param.device.type != "cpu")
            for rows_of_a_call in [alike] if together else [[row] for row in alike]:
                step_together(rows_of_a_call, settings)

    def _laid_alike(self, row: Row) -> Row:
        """With moments laid out as the parameter is: it may have changed its memory format, or they be another's."""
        state = self.state[row.param]
        apart = [name for name in MOMENTS if state[name].stride() != row.param.stride()]
        state.update({name: torch.empty_like(row.param).copy_(state[name]) for name in apart})
        return replace(row, **{name: state[name] for name in MOMENTS}) if apart else row


def _fusable(row: Row) -> bool:
    return lans_fused.is_possible(row.param) and row.grad.device == row.param.device


def step_together(rows: Sequence[Row], settings: Settings) -> None:
    """One step, in multi-tensor operations, of all rows, which share device and dtype. Norms stay on the device.

    Parameters and moments change in place.
    """
    beta1, beta2, eps = settings.beta1, settings.beta2, settings.eps
    first = [row.exp_avg for row in rows]
    second = [row.exp_avg_sq for row in rows]
    work = first[0].dtype
    params = [row.param.to(work) for row in rows]  # itself, but for halves
    # A copy in any case: gradients belong to the user.
    unit = [row.grad.to(work, copy=True) for row in rows]
    torch._foreach_mul_(unit, [_inverse(norm, eps, settings.maximize) for norm in _norms(unit)])
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

    sizes = _norms(params)
    for direction, share in ((momentum, beta1), (unit, 1.0 - beta1)):
        norms = _norms(direction)
        torch._foreach_mul_(direction, list(map(_trust, sizes, norms)))
        torch._foreach_add_(params, direction, alpha=-settings.lr * share)
    for row, updated in zip(rows, params, strict=True):
        if updated is not row.param:
            row.param.copy_(updated)


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In double precision: in single, squares of what is above 1e19 overflow."""
    return list(torch._foreach_norm(list(tensors), dtype=torch.float64))


def _inverse(norm: Tensor, eps: float, negative: bool) -> Tensor:
    """What the gradient is multiplied by: 1 / (‖g‖ + ε), and 1 for a zero gradient."""
    factor = torch.where(norm == 0, torch.ones_like(norm), (norm + eps).reciprocal())
    return -factor if negative else factor


def _trust(size: Tensor, norm: Tensor) -> Tensor:
    """τ: ‖x‖/‖u‖, or 1 if either is 0."""
    return torch.where((size == 0) | (norm == 0), torch.ones_like(norm), size / norm)
