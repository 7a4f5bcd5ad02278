"""Scaled sign, the compressor of EF-SignSGD.

Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.common import BaseCompressor

MAX_BLOCK = 1 << 16


@dataclass(frozen=True)
class EfSignSgd(BaseCompressor):
    """C(x) = mean|x| * sign(x) per block, one bit an element; sign(0) and sign(-0) are +.

    Body, d elements in n = ceil(d/block) blocks, the last of which may be shorter (``count`` = n)::

        0    n*s            scales, numbers of the layout's dtype (s = 4 or 8 bytes): scale b = mean |x| of the
                            elements from b*block to (b+1)*block, or to the end
        n*s  4*ceil(d/32)   sign words, uint32: bit j of word w is the sign of element 32*w + j, 1 = negative;
                            bits past the end are zero

    The means are reductions of fixed shape (``espresso.cpu_offload.sign_blocks``), so backends agree bit for bit.

    Deviation from the paper: it takes one scale per tensor, ``block=0`` here. Then numbers whose gradient is zero (of
    units that are not active) receive that scale with either sign; small blocks keep it away from them. The error is
    |x|^2 - |x|_1^2 / d in every block, so that error feedback contracts in each by itself.

    Attributes:
        block: elements that share a scale, a multiple of 32 up to 65536; 0 for one scale per segment.
    """

    name: ClassVar[str] = "efsignsgd"
    traits: ClassVar[Traits] = Traits()
    algorithm: ClassVar[int] = 5

    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("block", low=0, high=MAX_BLOCK, multiple=32)

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """Number of scales, and scales plus sign words."""
        num_blocks = -(-numel // self.block) if self.block else 1
        return num_blocks, itemsize * num_blocks + 4 * -(-numel // 32)
