"""What of the training script an exchange has to know: the scale of its losses, and the steps of its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from espresso.comm.errors import EspressoError

_OF_SGD = {"momentum_buffer", "step"}
"""What stochastic gradient descent, with momentum or without, keeps of a parameter."""


class Scaler(Protocol):
    """What is asked of ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...


class LossScale:
    """A scaler's scale, or one that was told by hand; None without either.

    A scaler on a device answers when backward has come as far as the question, so it is asked once an iteration.
    """

    def __init__(self, scaler: Scaler | None = None) -> None:
        self._scaler = scaler
        self._by_hand: float | None = None
        self._asked: list[float] = []

    def begin(self) -> None:
        """A new iteration."""
        self._asked.clear()

    def __call__(self) -> float | None:
        if self._scaler is None:
            return self._by_hand
        if not self._asked:
            self._asked.append(float(self._scaler.get_scale()))
        return self._asked[0]

    def set(self, scale: float) -> None:
        """Tell it by hand.

        Raises:
            ValueError: not a positive finite number.
        """
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"the loss scale must be positive and finite, got {scale!r}")
        self._by_hand = scale


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
        self._refused: EspressoError | None = None
        self._handle = register_optimizer_step_pre_hook(self._check)

    def remove(self) -> None:
        """Look no more."""
        self._handle.remove()

    def refuse(self, error: EspressoError) -> None:
        """Have the next step raise, and then none: these gradients were not averaged. Also after :meth:`remove`."""
        self._handle.remove()
        self._refused, self._handle = error, register_optimizer_step_pre_hook(self._check)

    @property
    def optimizer_adapts(self) -> bool:
        """Whether steps depend on what the optimizer remembers of earlier gradients beside their sum, as Adam's second
        moments; so it is assumed while none was seen.
        """
        seen = [optimizer for optimizer, is_ours in list(self._is_ours.items()) if is_ours]
        rows = [row for optimizer in seen for row in list(optimizer.state.values())]
        return not seen or not all(isinstance(row, dict) and row.keys() <= _OF_SGD for row in rows)

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._is_ours:
            self._is_ours[optimizer] = self._look(optimizer)
        error = self._refused or self._error()
        if error is not None and self._is_ours[optimizer]:
            if self._refused is not None:
                self._refused = None
                self._handle.remove()
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
