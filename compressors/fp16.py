"""Cast to IEEE half precision, round to nearest even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.common import BaseCompressor


@dataclass(frozen=True)
class Fp16(BaseCompressor):
    """Two bytes a number; relative error at most 2^-11 on normal numbers.

    Body: ``numel`` half-precision numbers. A number that overflows counts as non-finite, as it would in
    PyTorch's fp16 hook. Summable: the same numbers, raw segments included, can go through a reduction.
    """

    name: ClassVar[str] = "fp16"
    traits: ClassVar[Traits] = Traits(summable=True, error_feedback=False)
    algorithm: ClassVar[int] = 1

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """Count unused; two bytes a number."""
        return 0, 2 * numel
