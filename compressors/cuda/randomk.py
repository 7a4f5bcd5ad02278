"""Random-k on a GPU; kernels in randomk.cu. One launch, one pass each way."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from espresso.compressors.base import DrawKey, Layout, Starts
from espresso.compressors.cuda.codec import CudaSummableCodec
from espresso.compressors.draws import salt_of
from espresso.compressors.randomk import STRATUM


class CudaRandomK(CudaSummableCodec):
    """``randomk`` with the residual fused; a thread block takes a stratum."""

    file: ClassVar[str] = "randomk.cu"

    def tile_elements(self) -> int:
        """A stratum."""
        return STRATUM

    def segment_values(self, layout: Layout) -> Starts:
        """k numbers, or all of a raw segment."""
        return np.where(layout.raw, layout.numels, layout.counts)

    def arguments(self, layout: Layout, key: DrawKey) -> tuple[Any, ...]:
        """What the draws depend on."""
        return (np.uint64(salt_of(key)),)
