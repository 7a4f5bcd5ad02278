"""Signs on a GPU, efsignsgd and onebit; kernels in signs.cu. One launch and pass with blocks, three and two without."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from espresso.compressors.cuda.codec import TILE, CudaCodec, DecodeCall, EncodeCall
from espresso.compressors.cuda.runtime import Device
from espresso.compressors.signs import Signs

LANES = 128
"""Threads of the kernel that sums a segment."""


class CudaSigns(CudaCodec):
    """``efsignsgd`` and ``onebit`` with the residual fused."""

    file: ClassVar[str] = "signs.cu"
    malformed_body: ClassVar[str] = "a mean has the wrong sign or is not finite"

    def __init__(self, compressor: Signs, device: Device) -> None:
        self._block, self._means = compressor.block, compressor.num_means
        super().__init__(compressor, device)

    def tile_elements(self) -> int:
        """Whole blocks."""
        return self._block * max(1, TILE // self._block) if self._block else TILE

    def launch_bodies(self, call: EncodeCall) -> None:
        """Sums and scales first where a segment has one mean."""
        if not self._block and call.tables.num_tiles:
            sums = call.scratch.bytes_of("sums", 8 * call.tables.num_tiles)
            self._launch_encode(call, "sum", more=(sums,), threads=LANES)
            self._launch_encode(call, "scale", more=(sums,), grid=len(call.layout.segments))
        self._launch_encode(call, "encode")

    def encode_arguments(self, call: EncodeCall) -> tuple[Any, ...]:
        """Block and means."""
        return np.int32(self._block), np.int32(self._means)

    def decode_arguments(self, call: DecodeCall) -> tuple[Any, ...]:
        """Block and means."""
        return np.int32(self._block), np.int32(self._means)
