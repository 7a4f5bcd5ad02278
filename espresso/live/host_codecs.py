"""The codecs of one rank: on the training device and on the offload pool, made once per spec."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from espresso.compressors import registry
from espresso.compressors.base import Codec
from espresso.cpu_offload import WorkerPool, available_cores, warm_up
from espresso.strategies import CompressorSpec, Device


class HostCodecs:
    """In a CPU job the training device's codecs run on their lane's thread, the offloaded ones on the pool.

    Args:
        offload_threads: of the pool; None takes the cores this process may use.
    """

    def __init__(self, offload_threads: int | None = None) -> None:
        self.pool = WorkerPool(available_cores() if offload_threads is None else offload_threads)
        self._codecs: dict[tuple[CompressorSpec, Device], Codec] = {}
        self._lock = threading.Lock()

    def __call__(self, spec: CompressorSpec, device: Device) -> Codec:
        with self._lock:
            codec = self._codecs.get((spec, device))
            if codec is None:
                pool = self.pool if device is Device.OFFLOAD else None
                codec = self._codecs[spec, device] = registry.host_codec(registry.create(spec), pool)
        return codec

    def warm_up(self, specs: Iterable[CompressorSpec], dtypes: Iterable[str]) -> None:
        """Compile the kernels of these compressors for these gradient types."""
        work = {"float64" if dtype == "float64" else "float32" for dtype in dtypes}
        for spec in sorted(specs, key=str):
            warm_up(self(spec, Device.TRAINING), sorted(work), split=self.pool.num_threads > 1)

    def close(self) -> None:
        self.pool.close()
