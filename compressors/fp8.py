"""8-bit floating point with block scales.

Micikevicius et al.: FP8 Formats for Deep Learning, 2022 (E4M3 and E5M2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.blockwise import Blockwise, Codes

_FORMATS = {"e4m3": (Codes.E4M3, 448), "e5m2": (Codes.E5M2, 57344)}


@dataclass(frozen=True)
class Fp8(Blockwise):
    """Blocks are scaled so that their largest number is the format's: relative error at most 2^-4 (E4M3) or 2^-3.

    That bound is for normal codes; below 2^-6 (2^-14) of a code the error is at most 2^-10 (2^-17) of one, times the
    scale. Body: :mod:`espresso.compressors.blockwise` with one byte an element: sign, then 4 (5) bits of exponent
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
