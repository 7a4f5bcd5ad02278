"""No compression: every segment travels raw. An ordinary compressor, so that any option can run with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.common import BaseCompressor
from espresso.compressors.payload import MAX_SEGMENT


@dataclass(frozen=True)
class NoCompression(BaseCompressor):
    """The payload holds the numbers themselves: lossless, and summable as a vector of the layout's dtype.

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
