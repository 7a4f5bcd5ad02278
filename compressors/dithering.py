"""Linear and natural dithering, as BytePS-Compress names them.

Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD, NeurIPS 2017 (linear); Horvath, Ho, Horvath, Sahu, Canini, Richtarik:
Natural Compression for Distributed Deep Learning, MSML 2022 (natural); Zhong et al., 2021 (BytePS-Compress).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.levels import Levels, Norm

MAX_LINEAR, MAX_NATURAL = 127, 31


@dataclass(frozen=True)
class Dithering(Levels):
    """Stochastic rounding to s levels of the block's norm. Body: :mod:`espresso.compressors.levels`.

    Linear: variance at most min(d S^2 / 4 s^2, S |x|_1 / s). Natural, with u = 2^(1-s): at most
    (1/8 + min(sqrt(d) u, d u^2 / 4)) |x|^2. d is the block's length.

    Attributes:
        levels: s, from 1 to 127 (linear) or 31 (natural).
        norm: S, ``max`` or ``l2``.
        partition: ``linear`` or ``natural``.
    """

    name: ClassVar[str] = "dithering"
    algorithm: ClassVar[int] = 13

    levels: int = 7
    norm: str = "max"
    partition: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("norm", ("max", "l2"))
        self.check_choice("partition", ("linear", "natural"))
        self.check_int("levels", low=1, high=MAX_NATURAL if self.is_natural else MAX_LINEAR)

    @property
    def num_levels(self) -> int:
        """The parameter."""
        return self.levels

    @property
    def scaled_by(self) -> Norm:
        """The parameter."""
        return Norm[self.norm.upper()]

    @property
    def is_natural(self) -> bool:
        """The parameter."""
        return self.partition == "natural"
