"""8 and 4-bit blockwise quantization. Dettmers: 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016."""

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
    levels: ClassVar[int] = 127


@dataclass(frozen=True)
class Int4(Blockwise):
    """L = 7: an error of at most absmax/14 per element. Body: :mod:`espresso.compressors.blockwise`."""

    name: ClassVar[str] = "int4"
    algorithm: ClassVar[int] = 4
    code_bits: ClassVar[int] = 4
    levels: ClassVar[int] = 7
