"""Natural compression. Horvath et al.: Natural Compression for Distributed Deep Learning, MSML 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.levels import Levels, Norm


@dataclass(frozen=True)
class Natural(Levels):
    """Each number is rounded to a power of two, up or down, without bias; one byte an element, no scales.

    Body: d bytes, code = m | sign << 7 (1 = negative): level m > 0 is 2^(m - 100), 0 is zero. Rounding and draws are
    those of natural dithering (:mod:`espresso.compressors.levels`) with S = 1. From 2^-99 on the variance is at most
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
