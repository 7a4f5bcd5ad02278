"""The loss scale that gradients carry: residuals are kept without it."""

from __future__ import annotations

from typing import Protocol


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
