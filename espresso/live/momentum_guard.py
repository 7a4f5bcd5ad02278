"""Momentum correction wants the optimizer's own momentum at 0: seen when the optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class MomentumGuard:
    """Refuses a step of an optimizer that adds momentum to gradients which carry it already.

    Args:
        is_ours: whether the job averages the gradients of a parameter with this ``id``.
    """

    def __init__(self, is_ours: Callable[[int], bool]) -> None:
        self._is_ours = is_ours
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handle = register_optimizer_step_pre_hook(self._check)

    def remove(self) -> None:
        self._handle.remove()

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._seen:
            return
        for group in optimizer.param_groups:
            if any(self._is_ours(id(parameter)) for parameter in group["params"]):
                _refuse(type(optimizer).__name__, group)
        self._seen.add(optimizer)


def _refuse(name: str, group: dict[str, Any]) -> None:
    betas: Collection[float] = group.get("betas") or (0.0,)
    for what, value in (("momentum", group.get("momentum", 0.0)), ("beta1", next(iter(betas)))):
        if value:
            raise ValueError(
                f"{name} has {what}={value}, and the compressor's momentum correction applies momentum already: set"
                f" the optimizer's to 0 (with plain SGD), or leave the compressor's momentum at 0"
            )
