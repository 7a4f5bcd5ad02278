"""Stochastic quantizers on a GPU; kernels in levels.cu. One launch, one pass each way."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from espresso.compressors.base import DrawKey, Layout
from espresso.compressors.cuda.codec import CudaCodec, DecodeCall, EncodeCall
from espresso.compressors.cuda.runtime import Device
from espresso.compressors.draws import rank_salt
from espresso.compressors.levels import TINY, Levels
from espresso.compressors.natural import TOP_EXPONENT, UNIT_LEVEL, Natural


class CudaLevels(CudaCodec):
    """``dithering``, ``qsgd`` and ``terngrad``. Unlike the host's it has a fused residual; training gives it none."""

    file: ClassVar[str] = "levels.cu"
    malformed_body: ClassVar[str] = "a block's scale is negative or not finite"

    top_exponent: ClassVar[int | None] = None
    """Numbers above two to this power count as not finite; None takes all that are."""

    unit_level: ClassVar[int | None] = None
    """The level that stands for 1 where there are no scales; None for the largest level."""

    def __init__(self, compressor: Levels, device: Device) -> None:
        super().__init__(compressor, device)
        self._params = compressor
        self._levels = compressor.num_levels if self.unit_level is None else self.unit_level

    def encode_arguments(self, call: EncodeCall) -> tuple[Any, ...]:
        """Parameters and what the draws depend on."""
        return self._arguments(call.layout, call.key)

    def decode_arguments(self, call: DecodeCall) -> tuple[Any, ...]:
        """The same."""
        return self._arguments(call.layout, call.key)

    def _arguments(self, layout: Layout, key: DrawKey) -> tuple[Any, ...]:
        params, kind = self._params, layout.dtype.type
        bits = np.uint32 if layout.dtype.itemsize == 4 else np.uint64
        cap, limit = 1.0 if params.is_natural else float(params.num_levels), kind(np.inf).view(bits)
        if self.top_exponent is not None:
            cap = 2.0**self.top_exponent
            limit = bits(kind(cap).view(bits) + bits(1))
        return (
            np.int32(params.block),
            np.int32(params.code_bits),
            np.int32(params.scaled_by.value),
            np.int32(params.is_natural),
            np.float64(1.0 if params.is_natural else params.num_levels),
            kind(cap),
            np.int32(self._levels),
            np.float64(TINY[layout.dtype.itemsize]),
            limit,
            np.uint64(rank_salt(key)),
        )


class CudaNatural(CudaLevels):
    """``natural``."""

    top_exponent: ClassVar[int | None] = TOP_EXPONENT
    unit_level: ClassVar[int | None] = UNIT_LEVEL

    def __init__(self, compressor: Natural, device: Device) -> None:
        super().__init__(compressor, device)
