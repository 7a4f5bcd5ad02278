"""8-bit blockwise quantization. Dettmers: 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.blockwise import Blockwise


@dataclass(frozen=True)
class Int8(Blockwise):
    """L = 127: an error of at most absmax/254 per element. Body: :mod:`espresso.compressors.blockwise`."""

    name: ClassVar[str] = "int8"
    algorithm: ClassVar[int] = 3
    code_bits: ClassVar[int] = 8

    @property
    def levels(self) -> int:
        """127."""
        return 127
