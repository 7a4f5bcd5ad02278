"""Signs on a GPU, efsignsgd and onebit; kernels in signs.cu. One launch and pass with blocks, three and two without."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from espresso.compressors.base import DrawKey, Layout
from espresso.compressors.cuda.codec import TILE, CudaCodec, EncodeCall
from espresso.compressors.signs import Signs

LANES = 128
"""Threads of the kernel that sums a segment."""


class CudaSigns(CudaCodec):
    """``efsignsgd`` and ``onebit`` with the residual fused."""

    file: ClassVar[str] = "signs.cu"
    malformed_body: ClassVar[str] = "a mean has the wrong sign or is not finite"

    compressor: Signs

    def tile_elements(self) -> int:
        """Whole blocks."""
        block = self.compressor.block
        return block * max(1, TILE // block) if block else TILE

    def launch_bodies(self, call: EncodeCall) -> None:
        """Sums and scales first where a segment has one mean."""
        if not self.compressor.block and call.tables.num_tiles:
            sums = call.scratch.bytes_of("sums", 8 * call.tables.num_tiles)
            self._launch_encode(call, "sum", (sums,), threads=LANES)
            self._launch_encode(call, "scale", (sums,), grid=len(call.layout.segments))
        super().launch_bodies(call)

    def arguments(self, layout: Layout, key: DrawKey) -> tuple[Any, ...]:
        """Block and means."""
        return np.int32(self.compressor.block), np.int32(self.compressor.num_means)
