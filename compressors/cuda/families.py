"""No compression, casts, blockwise and stochastic quantizers, signs, random-k on a GPU. One launch, one pass each way.

(Signs without blocks take three launches and two passes to encode.) A codec names its CUDA source.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from espresso.compressors.base import DrawKey, Encoding, Layout, Starts
from espresso.compressors.blockwise import NEARLY, TINY, Blockwise, Codes
from espresso.compressors.casts import Cast
from espresso.compressors.cuda.codec import TILE, CudaCodec, CudaSummableCodec, EncodeCall
from espresso.compressors.cuda.tables import RAW, Table
from espresso.compressors.draws import rank_salt, salt_of
from espresso.compressors.levels import Levels
from espresso.compressors.randomk import STRATUM
from espresso.compressors.signs import Signs


class CudaNone(CudaSummableCodec):
    """``none``: payloads are copies."""

    file: ClassVar[str] = "none.cu"


class CudaCast(CudaSummableCodec):
    """``fp16`` and ``bf16``; an overflow counts as non-finite."""

    file: ClassVar[str] = "casts.cu"

    compressor: Cast

    @property
    def form(self) -> str:
        """``_half`` or ``_bfloat``."""
        return "_half" if self.compressor.value_dtype == "float16" else "_bfloat"

    def value_dtype(self, layout: Layout) -> str:
        """``float16`` or ``bfloat16``."""
        return self.compressor.value_dtype

    def vector_rows(self, rows: Table) -> None:
        """In a vector raw segments are cast as well."""
        rows[:, RAW] = 0

    def dither(self, encoding: Encoding) -> None:
        """As :class:`espresso.compressors.base.DitheringCodec` says."""
        spare = np.finfo(encoding.layout.dtype).nmant - self.compressor.fraction
        self._dither(encoding, spare=spare)


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

    def dither(self, encoding: Encoding) -> None:
        """As :class:`espresso.compressors.base.DitheringCodec` says, for whole numbers."""
        self._dither(encoding, block=self.compressor.block, levels=self.compressor.levels)


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


class CudaTwoBit(CudaSigns):
    """``twobit`` with the residual fused."""

    malformed_body: ClassVar[str] = "a block's means are negative, out of order or not finite"

    @property
    def form(self) -> str:
        """Two bits."""
        return "_two"

    def arguments(self, layout: Layout, key: DrawKey) -> tuple[Any, ...]:
        """Block."""
        return (np.int32(self.compressor.block),)


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
        limit = bits(kind(np.inf).view(bits) - NEARLY)
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
