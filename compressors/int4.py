"""4-bit blockwise quantization: int8's scheme with 15 levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.blockwise import Blockwise


@dataclass(frozen=True)
class Int4(Blockwise):
    """L = 7: an error of at most absmax/14 per element. Body: :mod:`espresso.compressors.blockwise`."""

    name: ClassVar[str] = "int4"
    algorithm: ClassVar[int] = 4
    code_bits: ClassVar[int] = 4

    @property
    def levels(self) -> int:
        """7."""
        return 7
