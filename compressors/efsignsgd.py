"""Scaled sign, the compressor of EF-SignSGD.

Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.signs import Signs


@dataclass(frozen=True)
class EfSignSgd(Signs):
    """C(x) = mean|x| * sign(x) per block, one bit an element. Body: :mod:`espresso.compressors.signs`, one mean.

    Deviation from the paper: it takes one scale per tensor, ``block=0`` here. Then numbers whose gradient is zero (of
    units that are not active) receive that scale with either sign; small blocks keep it away from them. The error is
    |x|^2 - |x|_1^2 / d in every block, so that error feedback contracts in each by itself.
    """

    name: ClassVar[str] = "efsignsgd"
    algorithm: ClassVar[int] = 5
    num_means: ClassVar[int] = 1
