"""Stochastic quantizers: what dithering, QSGD, natural compression and TernGrad share.

Body of d elements in n = ceil(d/block) blocks, the last of which may be shorter (``count`` = n), with codes of w
bits, w = 1 + the bits of the largest level::

    0    n*s   scales, numbers of the layout's dtype (s = 4 or 8 bytes), >= 0
    n*s  codes
         w < 8: planes, 4*w*ceil(d/32) bytes: bit j of uint32 word w*g + p is bit p of the code of element 32*g + j;
                bits past the end are zero
         w = 8: d bytes, code i of element i

    code = level | sign << (w - 1), sign 1 = negative

With S the block's norm (max |x| or |x|_2) and u in [0, 1) drawn for every element:

    linear    v = min(|x| * (s / S), s);  level = floor(v) + (u < v - floor(v));         decoded: level * (S / s)
    natural   v = min(|x| * (1 / S), 1);  v is rounded up or down to a power of two, up with a probability equal to the
              part of the way that it has gone; below the smallest, 2^(1-s), to that or to zero. Level m > 0 stands for
              2^(m-s), level 0 for zero;  decoded: 2^(m-s) * S

The scale on the wire is S / s (linear) or S (natural), 0 where S is below TINY (as int8); then every level is 0.
|x|_2 is the square root of the sum of x * x in float64, in 64 lanes (lane = element mod 64) that are added by halving
(lane i and i + 32, then i and i + 16, ...); quotients are taken in float64 and rounded to the dtype.

Draws depend on the key, the tensor and the element only. Element e of a segment takes word (e mod 64) div 16 of
Philox4x32-10 (Salmon et al., SC 2011) with the counter (c mod 2^32, c div 2^32, 0, 0), c = 16 (e div 64) + e mod 16,
and the segment's key (low word, high word), all modulo 2^64, mix = splitmix64's finaliser::

    salt = mix(mix(mix(mix(seed) + step) + site) + rank)        rank -1 is 2^64 - 1
    key  = mix(mix(salt ^ hash(tensor)) + start)                 hash: 8 bytes of BLAKE2b, little-endian

From the word x: u = (x div 2^8) 2^-24 for float32, x 2^-32 for float64. Natural rounding adds x div 2^9 (float32) or
x 2^20 (float64) to the bits of v and drops the mantissa: the carry is the rounding up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.blockwise import MAX_BLOCK
from espresso.compressors.common import BaseCompressor


class Norm(Enum):
    """What a block is scaled by."""

    NONE = 0
    MAX = 1
    L2 = 2


@dataclass(frozen=True)
class Levels(BaseCompressor):
    """An unbiased quantizer: its error averages out over ranks and steps, and it must not have error feedback.

    (What it loses is not small against what it sends, so that a residual would grow.)

    Attributes:
        block: elements that share a scale, a power of two from 64 to 4096.
    """

    traits: ClassVar[Traits] = Traits(error_feedback=False, stochastic=True)
    top_exponent: ClassVar[int | None] = None
    """Numbers above two to this power count as not finite; None takes all that are."""

    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_power_of_two("block", low=64, high=MAX_BLOCK)

    @property
    def num_levels(self) -> int:
        """s: the largest level, which stands for the norm."""
        raise NotImplementedError

    @property
    def scaled_by(self) -> Norm:
        """S."""
        raise NotImplementedError

    @property
    def is_natural(self) -> bool:
        """Whether levels are powers of two."""
        return False

    @property
    def unit_level(self) -> int:
        """The level that stands for S."""
        return self.num_levels

    @property
    def divisor(self) -> float:
        """What S is divided by for a step: s, or 1 where levels are powers of two."""
        return 1.0 if self.is_natural else float(self.num_levels)

    @property
    def cap(self) -> float:
        """The largest v."""
        return self.divisor if self.top_exponent is None else 2.0**self.top_exponent

    @property
    def code_bits(self) -> int:
        """w: the sign, and the bits of the largest level."""
        return 1 + self.num_levels.bit_length()

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """Number of blocks, and scales plus codes."""
        num_blocks = -(-numel // self.block)
        codes = numel if self.code_bits == 8 else 4 * self.code_bits * -(-numel // 32)
        return num_blocks, num_blocks * itemsize + codes
