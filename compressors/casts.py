"""No compression, and casts to 16 bits, round to nearest even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.common import BaseCompressor
from espresso.compressors.payload import MAX_SEGMENT


@dataclass(frozen=True)
class NoCompression(BaseCompressor):
    """Every segment travels raw: lossless, and summable as a vector of the layout's dtype. Any option can run with it.

    Example:
        >>> NoCompression().traits.lossless
        True
    """

    name: ClassVar[str] = "none"
    traits: ClassVar[Traits] = Traits(summable=True, lossless=True, error_feedback=False)
    algorithm: ClassVar[int] = 0

    raw_below: int = MAX_SEGMENT

    @property
    def raw_limit(self) -> int:
        """All segments travel raw, whatever ``raw_below`` says."""
        return MAX_SEGMENT


@dataclass(frozen=True)
class Cast(BaseCompressor):
    """Two bytes a number. Body: ``numel`` numbers of ``value_dtype``.

    Summable: the same numbers, raw segments included, can go through a reduction.
    """

    traits: ClassVar[Traits] = Traits(summable=True, error_feedback=False)
    value_dtype: ClassVar[str]
    fraction: ClassVar[int]
    """Bits of a number behind its first."""

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """Count unused; two bytes a number."""
        return 0, 2 * numel


@dataclass(frozen=True)
class Fp16(Cast):
    """IEEE half precision: a relative error of at most 2^-11 on normal numbers.

    A number that overflows counts as non-finite, as it would in PyTorch's fp16 hook. Compressed twice, the sum over P
    ranks is cast as well: there the largest average is 65504 / P.
    """

    name: ClassVar[str] = "fp16"
    algorithm: ClassVar[int] = 1
    value_dtype: ClassVar[str] = "float16"
    fraction: ClassVar[int] = 10


@dataclass(frozen=True)
class Bf16(Cast):
    """Bfloat16, the upper half of a float32: a relative error of at most 2^-8, and float32's range."""

    name: ClassVar[str] = "bf16"
    algorithm: ClassVar[int] = 2
    value_dtype: ClassVar[str] = "bfloat16"
    fraction: ClassVar[int] = 7
