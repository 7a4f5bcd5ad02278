"""What an optimizer's step is refused for: gradients that were not averaged, and momentum that is applied twice."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from espresso.comm.errors import EspressoError


class StepGuard:
    """Looks at every step of an optimizer of the job's parameters.

    After a failed exchange ``optimizer.step()`` raises the original error, which DDP has worded as a cast.

    Args:
        ours: ``id`` of every parameter whose gradients the job averages.
        has_momentum: whether gradients carry momentum already (momentum correction), so that the optimizer's must
            be 0.
        error: the first error of the exchange, if there was one.
    """

    def __init__(self, ours: Collection[int], *, has_momentum: bool, error: Callable[[], EspressoError | None]) -> None:
        self._ours, self._has_momentum, self._error = ours, has_momentum, error
        self._is_ours: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._handle = register_optimizer_step_pre_hook(self._check)

    def remove(self) -> None:
        """Look no more."""
        self._handle.remove()

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._is_ours:
            self._is_ours[optimizer] = self._look(optimizer)
        error = self._error()
        if error is not None and self._is_ours[optimizer]:
            raise error

    def _look(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = [
            group
            for group in optimizer.param_groups
            if any(id(parameter) in self._ours for parameter in group["params"])
        ]
        for group in groups if self._has_momentum else ():
            _refuse_momentum(type(optimizer).__name__, group)
        return bool(groups)


def _refuse_momentum(name: str, group: dict[str, Any]) -> None:
    betas: Collection[float] = group.get("betas") or (0.0,)
    for what, value in (("momentum", group.get("momentum", 0.0)), ("beta1", next(iter(betas)))):
        if value:
            raise ValueError(
                f"{name} has {what}={value}, and the compressor's momentum correction applies momentum already: set"
                f" the optimizer's to 0 (with plain SGD), or leave the compressor's momentum at 0"
            )
