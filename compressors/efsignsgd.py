"""Scaled sign, the compressor of EF-SignSGD.

Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.common import BaseCompressor


@dataclass(frozen=True)
class EfSignSgd(BaseCompressor):
    """C(x) = mean|x| * sign(x) per segment, one bit an element; sign(0) and sign(-0) are +.

    Body, d elements (``count`` = number of words)::

        0  4 or 8       scale = mean |x|, a number of the layout's dtype
        .  4*ceil(d/32) sign words, uint32: bit j of word w is the sign of element 32*w + j, 1 = negative;
                        bits past the end are zero

    The mean is a reduction of fixed shape (``espresso.cpu_offload.efsignsgd``), so backends agree bit for bit.
    """

    name: ClassVar[str] = "efsignsgd"
    traits: ClassVar[Traits] = Traits()
    algorithm: ClassVar[int] = 5

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """Number of sign words, and scale plus words."""
        num_words = -(-numel // 32)
        return num_words, itemsize + 4 * num_words
