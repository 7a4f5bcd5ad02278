"""The compressors on a GPU: CUDA sources, and codecs that launch them through CuPy. Twins of ``espresso.cpu_offload``.

Nothing here imports CuPy or needs a GPU until a :class:`~espresso.compressors.cuda.runtime.CudaDevice` is made.
May import: compressors, jit.
"""

from espresso.compressors.cuda.codec import CudaCodec, CudaSummableCodec
from espresso.compressors.cuda.runtime import CudaDevice, CudaUnavailableError, Device, source_of, sources

__all__ = [
    "CudaCodec",
    "CudaDevice",
    "CudaSummableCodec",
    "CudaUnavailableError",
    "Device",
    "source_of",
    "sources",
]
