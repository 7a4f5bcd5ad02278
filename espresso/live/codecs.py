"""The codecs of one rank: on the training device and on the offload pool, made once per spec."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from espresso.compressors import registry
from espresso.compressors.base import Array, Codec
from espresso.compressors.rehearsal import warm_up
from espresso.cpu_offload import WorkerPool, available_cores
from espresso.cpu_offload.placement import allowed_cores, cores_of_threads
from espresso.cpu_offload.work import FUSED
from espresso.strategies import CompressorSpec, Device

if TYPE_CHECKING:
    import torch

    from espresso.compressors.cuda import Device as Accelerator

MOST_AT_ONCE = 8
"""Offloaded compressions, unless asked for: a sparsifier takes one thread for segments of up to 4 MB."""


class HostCodecs:
    """In a CPU job the training device's codecs run on their lane's thread, the offloaded ones on the pool.

    Args:
        offload_threads: of the pool; None takes the cores this process may use.
        offload_width: offloaded compressions at once; None takes one for each thread, and at most ``MOST_AT_ONCE``.
    """

    def __init__(self, offload_threads: int | None = None, offload_width: int | None = None) -> None:
        threads = available_cores() if offload_threads is None else offload_threads
        self.pool = WorkerPool(threads, cores_of_threads(threads, allowed_cores()))
        self.offload_width = offload_width or min(self.pool.num_threads, MOST_AT_ONCE)
        self._codecs: dict[tuple[CompressorSpec, Device], Codec] = {}
        self._lock = threading.Lock()

    def __call__(self, spec: CompressorSpec, device: Device) -> Codec:
        with self._lock:
            codec = self._codecs.get((spec, device))
            if codec is None:
                codec = self._codecs[spec, device] = self._make(spec, device)
        return codec

    def _make(self, spec: CompressorSpec, device: Device) -> Codec:
        return registry.host_codec(registry.create(spec), self.pool if device is Device.OFFLOAD else None)

    def warm_up(self, specs: Iterable[CompressorSpec], dtypes: Iterable[str]) -> None:
        """Compile the kernels of these compressors for these gradient types."""
        work = sorted({"float64" if dtype == "float64" else "float32" for dtype in dtypes})
        for spec in sorted(specs, key=str):
            self._warm_up(spec, work)

    def _warm_up(self, spec: CompressorSpec, work: Sequence[str]) -> None:
        shared = (FUSED + 1,) if self.pool.num_threads > 1 else ()  # elements of a segment that threads share
        warm_up(self(spec, Device.OFFLOAD), work, sizes=(1, 5000, *shared))

    def close(self) -> None:
        self.pool.close()


class DeviceCodecs(HostCodecs):
    """Codecs of the training device launch on the GPU and wait for nothing; offloaded ones run on the pool.

    Args:
        accelerator: where kernels run.
        offload_threads, offload_width: see :class:`HostCodecs`.
    """

    def __init__(
        self, accelerator: Accelerator, offload_threads: int | None = None, offload_width: int | None = None
    ) -> None:
        super().__init__(offload_threads, offload_width)
        self._accelerator = accelerator

    def _make(self, spec: CompressorSpec, device: Device) -> Codec:
        if device is Device.OFFLOAD:
            return super()._make(spec, device)
        codec: Codec = registry.cuda_codec(registry.create(spec), self._accelerator, waits=False)
        return codec

    def notes(self) -> list[torch.Tensor]:
        """The status of every codec, on the device: whoever reads them zeroes them."""
        with self._lock:
            codecs: list[Any] = [codec for (_, device), codec in self._codecs.items() if device is not Device.OFFLOAD]
        return [codec.status for codec in codecs]

    def _warm_up(self, spec: CompressorSpec, work: Sequence[str]) -> None:
        super()._warm_up(spec, work)
        warm_up(self(spec, Device.TRAINING), work, here=self._there)

    def _there(self, array: Array) -> torch.Tensor:
        import torch

        return torch.from_numpy(array).to(self._accelerator.torch_device)
