"""TernGrad. Wen, Xu, Yan, Wu, Wang, Chen, Li: TernGrad, NeurIPS 2017."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.levels import Levels, Norm


@dataclass(frozen=True)
class TernGrad(Levels):
    """S * sign(x) with probability |x| / S, else 0; S = max |x| of the block. Two bits an element.

    Linear dithering with one level under the max norm. Body: :mod:`espresso.compressors.levels`, w = 2. The variance is
    exactly S |x|_1 - |x|^2.

    Deviations from the paper: scales belong to blocks rather than layers, which lowers the variance; gradients are not
    clipped, which would bias them.
    """

    name: ClassVar[str] = "terngrad"
    algorithm: ClassVar[int] = 15
    num_levels: ClassVar[int] = 1
    scaled_by: ClassVar[Norm] = Norm.MAX
