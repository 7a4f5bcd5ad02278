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

MAX_LINEAR, MAX_NATURAL = 127, 31
"""The largest s of dithering."""


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


@dataclass(frozen=True)
class _Dithered(Levels):
    """Its number of levels and its norm are parameters."""

    levels: int = 7
    norm: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("levels", low=1, high=MAX_NATURAL if self.is_natural else MAX_LINEAR)
        self.check_choice("norm", ("max", "l2"))

    @property
    def num_levels(self) -> int:
        """The parameter."""
        return self.levels

    @property
    def scaled_by(self) -> Norm:
        """The parameter."""
        return Norm[self.norm.upper()]


@dataclass(frozen=True)
class Qsgd(_Dithered):
    """Linear dithering under the paper's norm, |x|_2 of a block (its bucket).

    Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD, NeurIPS 2017.

    Variance at most min(d / 4 s^2, sqrt(d) / s) |x|^2. The paper's Elias coding is left out: sizes are known before
    the exchange.

    Attributes:
        levels: s, from 1 to 127; 7 makes codes of 4 bits.
        norm: ``l2``, or ``max`` as the paper's own experiments have it.
    """

    name: ClassVar[str] = "qsgd"
    algorithm: ClassVar[int] = 12

    norm: str = "l2"


@dataclass(frozen=True)
class Dithering(_Dithered):
    """Stochastic rounding to s levels of the block's norm.

    Linear: QSGD's paper. Natural: Horvath, Ho, Horvath, Sahu, Canini, Richtarik: Natural Compression for Distributed
    Deep Learning, MSML 2022. Both as BytePS-Compress names them (Zhong et al., 2021).

    Linear: variance at most min(d S^2 / 4 s^2, S |x|_1 / s). Natural, with u = 2^(1-s): at most
    (1/8 + min(sqrt(d) u, d u^2 / 4)) |x|^2. d is the block's length.

    Attributes:
        levels: s, from 1 to 127 (linear) or 31 (natural).
        norm: S, ``max`` or ``l2``.
        partition: ``linear`` or ``natural``.
    """

    name: ClassVar[str] = "dithering"
    algorithm: ClassVar[int] = 13

    partition: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("partition", ("linear", "natural"))

    @property
    def is_natural(self) -> bool:
        """The parameter."""
        return self.partition == "natural"


@dataclass(frozen=True)
class Natural(Levels):
    """Each number is rounded to a power of two, up or down, without bias; one byte an element, no scales.

    Horvath et al.: Natural Compression for Distributed Deep Learning, MSML 2022.

    Body: d bytes, code = m | sign << 7 (1 = negative): level m > 0 is 2^(m - 100), 0 is zero. Rounding and draws are
    those of natural dithering with S = 1. From 2^-99 on the variance is at most
    |x|^2 / 8; a smaller number becomes 2^-99 or zero, still without bias. A number above 2^27 counts as not finite, as
    in a cast. (The paper spends 9 bits and has float32's whole range.) ``count`` is unused.

    Attributes:
        block: elements that are worked on together; it does not show in the payload's numbers.
    """

    name: ClassVar[str] = "natural"
    algorithm: ClassVar[int] = 14
    num_levels: ClassVar[int] = 127
    scaled_by: ClassVar[Norm] = Norm.NONE
    is_natural: ClassVar[bool] = True
    unit_level: ClassVar[int] = 100
    top_exponent: ClassVar[int | None] = 27

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """One byte an element."""
        return 0, numel


@dataclass(frozen=True)
class TernGrad(Levels):
    """S * sign(x) with probability |x| / S, else 0; S = max |x| of the block. Two bits an element.

    Wen, Xu, Yan, Wu, Wang, Chen, Li: TernGrad, NeurIPS 2017.

    Linear dithering with one level under the max norm. w = 2. The variance is
    exactly S |x|_1 - |x|^2.

    Deviations from the paper: scales belong to blocks rather than layers, which lowers the variance; gradients are not
    clipped, which would bias them.
    """

    name: ClassVar[str] = "terngrad"
    algorithm: ClassVar[int] = 15
    num_levels: ClassVar[int] = 1
    scaled_by: ClassVar[Norm] = Norm.MAX
