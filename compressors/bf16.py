"""Cast to bfloat16 (the upper half of a float32), round to nearest even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.common import BaseCompressor


@dataclass(frozen=True)
class Bf16(BaseCompressor):
    """Two bytes a number; relative error at most 2^-8 on normal numbers, range of float32.

    Body: ``numel`` bfloat16 numbers. Summable: the same numbers, raw segments included, can go through a
    reduction.
    """

    name: ClassVar[str] = "bf16"
    traits: ClassVar[Traits] = Traits(summable=True, error_feedback=False)
    algorithm: ClassVar[int] = 2

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """Count unused; two bytes a number."""
        return 0, 2 * numel
