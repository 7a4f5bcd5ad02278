"""No compression and casts on a GPU; kernels in none.cu and casts.cu."""

from __future__ import annotations

from typing import ClassVar

from espresso.compressors.base import Layout
from espresso.compressors.casts import Cast
from espresso.compressors.cuda.codec import CudaSummableCodec
from espresso.compressors.cuda.tables import RAW, Table


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
