"""Blockwise quantizers: what int8, int4 and fp8 share.

Body of d elements, cut into blocks of B (the last may be shorter), one after the other, each::

    0  s      scale = absmax / L, a number of the layout's dtype (s = 4 or 8 bytes)
    s  codes  int8: n bytes, code i of element i, two's complement
              int4: h = ceil(n/2) bytes; byte i holds the code of element i in its low nibble and that of element
              i + h in its high nibble (0 past the end), two's complement
              fp8: n bytes, code i of element i, a floating-point number of 8 bits

An element decodes to ``code * scale``; code = q * (L / absmax) rounded to nearest even, so -L <= code <= L. A block
whose absmax lies below TINY (2^-100, or 2^-1000 for float64) has scale 0 and codes 0: 1/scale would overflow there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.common import BaseCompressor

MAX_BLOCK = 4096
TINY = {4: 2.0**-100, 8: 2.0**-1000}
NEARLY = 4
"""Numbers so near to infinity, in units of the last bit, count as it: L times their scale may be infinite."""


class Codes(Enum):
    """What a code is."""

    INTEGER = 0
    E4M3 = 1
    E5M2 = 2


@dataclass(frozen=True)
class Blockwise(BaseCompressor):
    """A linear quantizer with one scale per block, deterministic, hence biased: it needs error feedback.

    Attributes:
        block: elements that share a scale, a power of two from 32 to 4096.
    """

    traits: ClassVar[Traits] = Traits()
    code_bits: ClassVar[int]

    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_power_of_two("block", low=32, high=MAX_BLOCK)

    @property
    def codes(self) -> Codes:
        """Integers, unless a subclass says otherwise."""
        return Codes.INTEGER

    @property
    def levels(self) -> int:
        """L, the code of a block's largest magnitude."""
        raise NotImplementedError

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """Number of blocks, and scales plus codes."""
        full, rest = divmod(numel, self.block)
        num_blocks = full + (rest > 0)
        codes = numel if self.code_bits == 8 else full * self.block // 2 + -(-rest // 2)
        return num_blocks, num_blocks * itemsize + codes


_FORMATS = {"e4m3": (Codes.E4M3, 448), "e5m2": (Codes.E5M2, 57344)}
"""Of fp8: the codes, and the largest number."""


@dataclass(frozen=True)
class Int8(Blockwise):
    """L = 127: an error of at most absmax/254 per element.

    Dettmers: 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016.
    """

    name: ClassVar[str] = "int8"
    algorithm: ClassVar[int] = 3
    code_bits: ClassVar[int] = 8
    levels: ClassVar[int] = 127


@dataclass(frozen=True)
class Int4(Blockwise):
    """L = 7: an error of at most absmax/14 per element."""

    name: ClassVar[str] = "int4"
    algorithm: ClassVar[int] = 4
    code_bits: ClassVar[int] = 4
    levels: ClassVar[int] = 7


@dataclass(frozen=True)
class Fp8(Blockwise):
    """Blocks are scaled so that their largest number is the format's: relative error at most 2^-4 (E4M3) or 2^-3.

    Micikevicius et al.: FP8 Formats for Deep Learning, 2022 (E4M3 and E5M2).

    That bound is for normal codes; below 2^-6 (2^-14) of a code the error is at most 2^-10 (2^-17) of one, times the
    scale. A code: sign, then 4 (5) bits of exponent
    biased by 7 (15), then 3 (2) bits of mantissa. Encoders saturate: neither NaN nor infinity has a code here, and
    decoders read the patterns that are NaN or infinity elsewhere as the numbers that would come next.

    Attributes:
        format: ``e4m3`` or ``e5m2``.
    """

    name: ClassVar[str] = "fp8"
    algorithm: ClassVar[int] = 10
    code_bits: ClassVar[int] = 8

    format: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("format", tuple(_FORMATS))

    @property
    def codes(self) -> Codes:
        """The 8-bit format."""
        return _FORMATS[self.format][0]

    @property
    def levels(self) -> int:
        """The format's largest number."""
        return _FORMATS[self.format][1]
