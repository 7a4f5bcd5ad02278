"""Blockwise quantizers on a GPU: int8, int4, fp8; kernels in blockwise.cu. One launch, one pass each way."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from espresso.compressors.base import DrawKey, Layout
from espresso.compressors.blockwise import Blockwise, Codes
from espresso.compressors.cuda.codec import CudaCodec


class CudaBlockwise(CudaCodec):
    """``int8``, ``int4`` and ``fp8`` with the residual fused."""

    file: ClassVar[str] = "blockwise.cu"
    malformed_body: ClassVar[str] = "a block's scale is negative or not finite"

    compressor: Blockwise

    @property
    def form(self) -> str:
        """The codes'."""
        codes = self.compressor.codes
        return f"_int{self.compressor.code_bits}" if codes is Codes.INTEGER else f"_{codes.name.lower()}"

    def arguments(self, layout: Layout, key: DrawKey) -> tuple[Any, ...]:
        """Block and levels."""
        return np.int32(self.compressor.block), np.int32(self.compressor.levels)
