"""The compressors on the host, and sketches: Numba kernels, and the worker pool that shares them out.

May import: compressors, jit.
"""

from espresso.cpu_offload.codec import HostCodec
from espresso.cpu_offload.pool import WorkerPool, available_cores

__all__ = ["HostCodec", "WorkerPool", "available_cores"]
