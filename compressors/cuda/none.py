"""No compression on a GPU; kernels in none.cu."""

from __future__ import annotations

from typing import ClassVar

from espresso.compressors.cuda.codec import CudaSummableCodec


class CudaNone(CudaSummableCodec):
    """``none``: payloads are copies."""

    file: ClassVar[str] = "none.cu"
