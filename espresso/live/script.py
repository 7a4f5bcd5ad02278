"""What of the training script an exchange has to know: the scale of its losses, and the steps of its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from espresso.comm.errors import EspressoError
from espresso.compressors.base import gain_scale

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
        if self._scaler is None or not getattr(self._scaler, "is_enabled", lambda: True)():
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


class OurOptimizers:
    """Which optimizers step parameters of the job: ``ours`` has the ``id`` of each of those.

    ``meet`` is called with every group that has some when its optimizer is first seen, or has more of them, and may
    refuse it.
    """

    def __init__(self, ours: Collection[int], meet: Callable[[str, dict[str, Any]], None] = lambda *_: None) -> None:
        self._ours, self._meet = ours, meet
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        num_groups, is_ours = self._seen.get(optimizer, (0, False))
        if num_groups != len(optimizer.param_groups):  # more come while a job trains
            groups = self._of(optimizer)
            for group in groups:
                self._meet(type(optimizer).__name__, group)
            is_ours = bool(groups)
            self._seen[optimizer] = len(optimizer.param_groups), is_ours
        return is_ours

    def _of(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        return [group for group in optimizer.param_groups if any(id(each) in self._ours for each in group["params"])]

    def groups(self) -> list[dict[str, Any]]:
        """Those with parameters of the job."""
        return [group for optimizer in self for group in self._of(optimizer)]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        """Of those that were seen, and still are there."""
        return (optimizer for optimizer, (_, is_ours) in list(self._seen.items()) if is_ours)


_GUARDS: weakref.WeakSet[StepGuard] = weakref.WeakSet()


class StepGuard:
    """Looks at every step of an optimizer of the job's parameters.

    After a failed exchange ``optimizer.step()`` raises the original error, which DDP has worded as a cast. Who averages
    some of these parameters' gradients next looks in place of this one.

    Args:
        ours: ``id`` of every parameter whose gradients the job averages.
        has_momentum: whether gradients carry momentum already (momentum correction), so that the optimizer's must
            be 0.
        error: the first error of the exchange, if there was one.
    """

    def __init__(self, ours: Collection[int], *, has_momentum: bool, error: Callable[[], EspressoError | None]) -> None:
        self._ours = OurOptimizers(ours, _refuse_momentum) if has_momentum else OurOptimizers(ours)
        self._error = error
        self._ids: frozenset[int] = frozenset(ours)
        for earlier in [each for each in _GUARDS if not each._ids.isdisjoint(ours)]:
            earlier.remove()  # its job may have failed, or been closed
        self._refused: EspressoError | None = None
        self._handle = register_optimizer_step_pre_hook(self._check)
        _GUARDS.add(self)

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
        seen = list(self._ours)
        rows = [row for optimizer in seen for row in list(optimizer.state.values())]
        return not seen or not all(isinstance(row, dict) and row.keys() <= _OF_SGD for row in rows)

    @property
    def gain_scale(self) -> float:
        """Of feedback gains, beside the optimizers that were seen; 1 while none was."""
        return gain_scale(momentum_of(self._ours.groups()), adapts=self.optimizer_adapts)

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        is_ours, error = optimizer in self._ours, self._refused or self._error()
        if error is not None and is_ours:
            if self._refused is not None:
                self._refused = None
                self._handle.remove()
            raise error


def momentum_of(groups: Iterable[Mapping[str, Any]]) -> float | None:
    """The most that an optimizer's group has, or its first beta; None where none says.

    Of what moves with the learning rate (``OneCycleLR``, ``CyclicLR``) the most that it comes to: gains stay.
    """
    found = []
    for group in groups:
        betas = group.get("betas")
        said = betas[0] if isinstance(betas, list | tuple) and betas else group.get("momentum")
        for momentum in (said, group.get("max_momentum")):
            if isinstance(momentum, int | float | torch.Tensor) and 0 <= momentum < 1:
                found.append(float(momentum))
    return max(found, default=None)


def _refuse_momentum(name: str, group: dict[str, Any]) -> None:
    betas: Collection[float] = group.get("betas") or (0.0,)
    for what, value in (("momentum", group.get("momentum", 0.0)), ("beta1", next(iter(betas)))):
        if value:
            raise ValueError(
                f"{name} has {what}={value}, and the compressor's momentum correction applies momentum already: set"
                f" the optimizer's to 0 (with plain SGD), or leave the compressor's momentum at 0"
            )
