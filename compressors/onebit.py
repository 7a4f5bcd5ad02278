"""Onebit: signs and the means of either side.

Seide, Fu, Droppo, Li, Yu: 1-Bit Stochastic Gradient Descent, Interspeech 2014. The single scale is BytePS-Compress's:
Zhong et al.: Compressed Communication for Distributed Deep Learning, 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.signs import Signs


@dataclass(frozen=True)
class OneBit(Signs):
    """C(x) = the mean of the block's elements that have x's sign. Body: :mod:`espresso.compressors.signs`.

    With two means <x - C, C> = 0 and the error is at most scaled sign's. ``means=1,block=0`` is BytePS's onebit: the
    mean of |x| of the whole segment with x's sign, the same numbers as ``efsignsgd:block=0``.

    Deviation from the paper: it takes two means per column of a weight matrix, this one two per block.

    Attributes:
        means: 2 (the paper's) or 1 (BytePS's). Two means need a block above 0.
    """

    name: ClassVar[str] = "onebit"
    algorithm: ClassVar[int] = 9

    means: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("means", low=1, high=2)
        if self.means == 2 and not self.block:
            raise ValueError(
                "compressor onebit: two means are taken per block, so that block must be above 0;"
                " block=0 goes with means=1"
            )

    @property
    def num_means(self) -> int:
        """As the parameter says."""
        return self.means
