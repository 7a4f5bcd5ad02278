"""Stochastic quantizers on a GPU; kernels in levels.cu. One launch, one pass each way."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from espresso.compressors.base import DrawKey, Layout
from espresso.compressors.blockwise import TINY
from espresso.compressors.cuda.codec import CudaCodec
from espresso.compressors.draws import rank_salt
from espresso.compressors.levels import Levels


class CudaLevels(CudaCodec):
    """``dithering``, ``qsgd``, ``natural`` and ``terngrad``.

    Unlike the host's it has a fused residual; training gives it none.
    """

    file: ClassVar[str] = "levels.cu"
    malformed_body: ClassVar[str] = "a block's scale is negative or not finite"

    compressor: Levels

    def arguments(self, layout: Layout, key: DrawKey) -> tuple[Any, ...]:
        """Parameters and what the draws depend on."""
        params, kind = self.compressor, layout.dtype.type
        bits = np.uint32 if layout.dtype.itemsize == 4 else np.uint64
        limit = kind(np.inf).view(bits)
        if params.top_exponent is not None:
            limit = bits(kind(params.cap).view(bits) + bits(1))
        return (
            np.int32(params.block),
            np.int32(params.code_bits),
            np.int32(params.scaled_by.value),
            np.int32(params.is_natural),
            np.float64(params.divisor),
            kind(params.cap),
            np.int32(params.unit_level),
            np.float64(TINY[layout.dtype.itemsize]),
            limit,
            np.uint64(rank_salt(key)),
        )
