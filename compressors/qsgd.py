"""QSGD. Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD, NeurIPS 2017."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.levels import Levels, Norm


@dataclass(frozen=True)
class Qsgd(Levels):
    """Linear dithering under the paper's norm, |x|_2 of a block (its bucket). Body: :mod:`espresso.compressors.levels`.

    Variance at most min(d / 4 s^2, sqrt(d) / s) |x|^2. The paper's Elias coding is left out: sizes are known before
    the exchange.

    Attributes:
        levels: s, from 1 to 127; 7 makes codes of 4 bits.
        norm: ``l2``, or ``max`` as the paper's own experiments have it.
    """

    name: ClassVar[str] = "qsgd"
    algorithm: ClassVar[int] = 12

    levels: int = 7
    norm: str = "l2"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("levels", low=1, high=127)
        self.check_choice("norm", ("max", "l2"))

    @property
    def num_levels(self) -> int:
        """The parameter."""
        return self.levels

    @property
    def scaled_by(self) -> Norm:
        """The parameter."""
        return Norm[self.norm.upper()]
