"""Blockwise quantizers on a GPU: int8, int4, fp8; kernels in blockwise.cu. One launch, one pass each way."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from espresso.compressors.blockwise import Blockwise, Codes
from espresso.compressors.cuda.codec import CudaCodec, DecodeCall, EncodeCall
from espresso.compressors.cuda.runtime import Device


class CudaBlockwise(CudaCodec):
    """``int8``, ``int4`` and ``fp8`` with the residual fused."""

    file: ClassVar[str] = "blockwise.cu"
    malformed_body: ClassVar[str] = "a block's scale is negative or not finite"

    def __init__(self, compressor: Blockwise, device: Device) -> None:
        super().__init__(compressor, device)
        self._params = compressor
        whole = compressor.codes is Codes.INTEGER
        self._form = f"int{compressor.code_bits}" if whole else compressor.codes.name.lower()

    def launch_bodies(self, call: EncodeCall) -> None:
        """One launch."""
        self._launch_encode(call, f"encode_{self._form}")

    def launch_sum(self, call: DecodeCall) -> None:
        """One launch."""
        self._launch_decode(call, f"decode_{self._form}")

    def encode_arguments(self, call: EncodeCall) -> tuple[Any, ...]:
        """Block and levels."""
        return np.int32(self._params.block), np.int32(self._params.levels)

    def decode_arguments(self, call: DecodeCall) -> tuple[Any, ...]:
        """The same."""
        return np.int32(self._params.block), np.int32(self._params.levels)
