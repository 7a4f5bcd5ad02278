"""One or two bits an element: what scaled sign, onebit and twobit share.

Body, d elements in n = ceil(d/block) blocks, the last of which may be shorter, with m means each (``count`` = n) and p
bits an element::

    0      n*m*s          means, numbers of the layout's dtype (s = 4 or 8 bytes), block after block
                          m = 1: mean |x| of the block, >= 0
                          m = 2, p = 1: the mean of its elements that are not negative, >= 0 (0 where there are none),
                          then that of the negative ones, <= 0 (-0 where there are none)
                          m = 2, p = 2: mean |x| of its inner elements, >= 0 (0 where there are none), then that of
                          its outer ones, at least as large (M where there are none)
    n*m*s  4*ceil(d/32)   sign words, uint32: bit j of word w is the sign of element 32*w + j, 1 = negative;
                          bits past the end are zero
    then   4*ceil(d/32)   p = 2: as many words in the same order, 1 = outer; bits past the end are zero

sign(0), sign(-0) are +. An element decodes to the mean of its sign (m = 2), or to the mean with its sign (m = 1); with
two bits to the mean of its part, inner or outer, with its sign. M is mean |x| of the block in the layout's dtype, as
with m = 1; outer is |x| > M.

The sums have a fixed shape, so that backends agree bit for bit: the block, padded with zeros to whole groups of 16,
goes into 64 lanes of the layout's dtype (lane = element mod 64), |x|; or max(x, 0) and max(-x, 0); or |x| where it is
inner, else 0, and |x| where it is outer, else 0. Lanes are added in float64 by halving (lane i and i + 32, then i and
i + 16, ...). A sum that is not finite is taken again in float64, element by element. It is divided by its count in
float64 and rounded to the layout's dtype. An inner mean that rounding took above M is M, and so is an outer mean below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.base import DAMPED, Traits
from espresso.compressors.common import BaseCompressor

MAX_BLOCK = 1 << 16


@dataclass(frozen=True)
class Signs(BaseCompressor):
    """One or two bits an element and one or two means per block; biased, so that it needs error feedback.

    Attributes:
        block: elements that share their means, a multiple of 32 up to 65536; 0 for the whole segment.
    """

    traits: ClassVar[Traits] = Traits(feedback_gain=DAMPED)
    planes: ClassVar[int] = 1
    """Bits of an element."""

    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("block", low=0, high=MAX_BLOCK, multiple=32)
        if self.num_means == 2 and not self.block:
            raise ValueError(
                f"compressor {self.name}: two means are taken per block, so that block must be above 0;"
                " onebit:means=1,block=0 has one for the segment"
            )

    @property
    def num_means(self) -> int:
        """Means per block, 1 or 2."""
        raise NotImplementedError

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """Number of blocks, and means plus words of bits."""
        num_blocks = -(-numel // self.block) if self.block else 1
        return num_blocks, itemsize * num_blocks * self.num_means + self.planes * 4 * -(-numel // 32)


@dataclass(frozen=True)
class EfSignSgd(Signs):
    """C(x) = mean|x| * sign(x) per block, one bit an element; one mean.

    Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.

    Deviation from the paper: it takes one scale per tensor, ``block=0`` here. Then numbers whose gradient is zero (of
    units that are not active) receive that scale with either sign; small blocks keep it away from them. The error is
    |x|^2 - |x|_1^2 / d in every block, so that error feedback contracts in each by itself.
    """

    name: ClassVar[str] = "efsignsgd"
    algorithm: ClassVar[int] = 5
    num_means: ClassVar[int] = 1


@dataclass(frozen=True)
class OneBit(Signs):
    """C(x) = the mean of the block's elements that have x's sign.

    Seide, Fu, Droppo, Li, Yu: 1-Bit Stochastic Gradient Descent, Interspeech 2014. The single mean is
    BytePS-Compress's: Zhong et al.: Compressed Communication for Distributed Deep Learning, 2021.

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

    @property
    def num_means(self) -> int:
        """As the parameter says."""
        return self.means


@dataclass(frozen=True)
class TwoBit(Signs):
    """C(x) = sign(x) times the mean |x| of x's part of the block: the elements up to its mean |x|, or those above.

    Ours, after Seide et al. (:class:`OneBit`): what shares a code decodes to its mean. So <x - C, C> = 0, and the error
    is at most scaled sign's with the same block, which has one mean for both parts: of normal numbers an eighth of
    |x|^2, where scaled sign's is .36. That is still much in every step: with a feedback gain of 1 three of four small
    models end worst (docs/convergence.md). The cut is the mean, which takes one look, and not the best one (Max:
    Quantizing for Minimum Distortion, 1960), which leaves .12.

    Attributes:
        block: elements that share their means, a multiple of 32 from 32 to 65536.
    """

    name: ClassVar[str] = "twobit"
    algorithm: ClassVar[int] = 18
    num_means: ClassVar[int] = 2
    planes: ClassVar[int] = 2
