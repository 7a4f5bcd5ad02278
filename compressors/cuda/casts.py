"""Casts on a GPU, fp16 and bf16; kernels in casts.cu."""

from __future__ import annotations

from typing import ClassVar

from espresso.compressors.base import Layout
from espresso.compressors.cuda.codec import CudaSummableCodec, DecodeCall, EncodeCall
from espresso.compressors.cuda.tables import RAW, Table


class CudaCast(CudaSummableCodec):
    """A cast to 16 bits; an overflow counts as non-finite."""

    file: ClassVar[str] = "casts.cu"
    kind: ClassVar[str]
    dtype_name: ClassVar[str]

    def value_dtype(self, layout: Layout) -> str:
        """``float16`` or ``bfloat16``."""
        return self.dtype_name

    def launch_bodies(self, call: EncodeCall) -> None:
        """One launch."""
        self._launch_encode(call, f"encode_{self.kind}")

    def launch_sum(self, call: DecodeCall) -> None:
        """One launch."""
        self._launch_decode(call, f"decode_{self.kind}")

    def vector_rows(self, rows: Table) -> None:
        """In a vector raw segments are cast as well."""
        rows[:, RAW] = 0


class CudaFp16(CudaCast):
    """``fp16``."""

    kind: ClassVar[str] = "half"
    dtype_name: ClassVar[str] = "float16"


class CudaBf16(CudaCast):
    """``bf16``."""

    kind: ClassVar[str] = "bfloat"
    dtype_name: ClassVar[str] = "bfloat16"
