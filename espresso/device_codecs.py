"""The codecs of one rank of a GPU job: on the GPU, launched without waiting, and on the host's pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from espresso.compressors import registry
from espresso.compressors.base import Codec, DrawKey, Feedback, Layout, Segment, Starts, SummableCodec
from espresso.compressors.cuda import CudaCodec, CudaSummableCodec
from espresso.compressors.cuda import Device as Accelerator
from espresso.compressors.cuda.codec import STATUS_WORDS
from espresso.cpu_offload import warm_up
from espresso.host_codecs import HostCodecs
from espresso.strategies import CompressorSpec, Device


class LaunchingCodec:
    """A GPU codec whose calls only launch and answer True: what they find is noted in ``status``, on the device.

    Args:
        codec: of the GPU.
    """

    def __init__(self, codec: CudaCodec) -> None:
        self.compressor = codec.compressor
        self.status = torch.zeros(STATUS_WORDS, dtype=torch.int64, device=codec.device.torch_device)
        self._codec = codec

    def encode(
        self,
        layout: Layout,
        source: Any,
        starts: Starts,
        payload: Any,
        *,
        scale: float = 1.0,
        feedback: Feedback | None = None,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """As :meth:`espresso.compressors.Codec.encode`; whether all was finite is in the payload only."""
        self._codec.launch_encode(layout, source, starts, payload, scale=scale, feedback=feedback, key=key)
        return True

    def decode(
        self,
        layout: Layout,
        payloads: Any,
        target: Any,
        starts: Starts,
        *,
        scale: float = 1.0,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """As :meth:`espresso.compressors.Codec.decode`; what was found is in ``status``."""
        self._codec.launch_decode(layout, payloads, target, starts, self.status, scale=scale, key=key)
        return True


class LaunchingSummableCodec(LaunchingCodec):
    """The same for vectors."""

    def __init__(self, codec: CudaSummableCodec) -> None:
        super().__init__(codec)
        self._summable = codec

    def num_values(self, layout: Layout) -> int:
        """The vector's length."""
        return self._summable.num_values(layout)

    def value_dtype(self, layout: Layout) -> str:
        """The numbers' type."""
        return self._summable.value_dtype(layout)

    def encode_values(
        self,
        layout: Layout,
        source: Any,
        starts: Starts,
        values: Any,
        *,
        scale: float = 1.0,
        feedback: Feedback | None = None,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """As :meth:`espresso.compressors.SummableCodec.encode_values`."""
        self._summable.launch_encode_values(
            layout, source, starts, values, scale=scale, feedback=feedback, key=key
        )
        return True

    def decode_values(
        self,
        layout: Layout,
        values: Any,
        target: Any,
        starts: Starts,
        *,
        scale: float = 1.0,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """As :meth:`espresso.compressors.SummableCodec.decode_values`; what was found is in ``status``."""
        self._summable.launch_decode_values(layout, values, target, starts, self.status, scale=scale, key=key)
        return True


class DeviceCodecs(HostCodecs):
    """Codecs of the training device launch on the GPU; offloaded ones run on the pool, as in a CPU job.

    Args:
        accelerator: where kernels run.
        offload_threads: of the pool; None takes the cores this process may use.
    """

    def __init__(self, accelerator: Accelerator, offload_threads: int | None = None) -> None:
        super().__init__(offload_threads)
        self._accelerator = accelerator
        self._launching: dict[CompressorSpec, LaunchingCodec] = {}

    def __call__(self, spec: CompressorSpec, device: Device) -> Codec:
        if device is Device.OFFLOAD:
            return super().__call__(spec, device)
        with self._lock:
            found = self._launching.get(spec)
            if found is None:
                codec = registry.cuda_codec(registry.create(spec), self._accelerator)
                assert isinstance(codec, CudaCodec)
                found = (
                    LaunchingSummableCodec(codec)
                    if isinstance(codec, CudaSummableCodec)
                    else LaunchingCodec(codec)
                )
                self._launching[spec] = found
        return found

    def notes(self) -> list[torch.Tensor]:
        """The status of every codec, on the device: whoever reads them zeroes them."""
        with self._lock:
            return [codec.status for codec in self._launching.values()]

    def warm_up(self, specs: Iterable[CompressorSpec], dtypes: Iterable[str]) -> None:
        """Compile the kernels of these compressors, the host's and the GPU's."""
        work = sorted({"float64" if dtype == "float64" else "float32" for dtype in dtypes})
        for spec in sorted(specs, key=str):
            warm_up(super().__call__(spec, Device.OFFLOAD), work, split=self.pool.num_threads > 1)
            for dtype in work:
                self._launch_once(self(spec, Device.TRAINING), np.dtype(dtype))

    def _launch_once(self, codec: Codec, dtype: np.dtype[Any]) -> None:
        sizes = [1, 5000]
        layout = codec.compressor.layout([Segment(f"warm-up {i}", 0, n) for i, n in enumerate(sizes)], dtype)
        starts = np.array([0, 1], np.int64)
        here = self._accelerator.torch_device
        kind = torch.float64 if dtype.itemsize == 8 else torch.float32
        source: Any = torch.linspace(-1, 1, sum(sizes), dtype=kind, device=here)
        feedback = Feedback(torch.zeros_like(source), torch.empty_like(source), starts)  # type: ignore[arg-type]
        payloads: Any = torch.zeros((2, layout.num_bytes), dtype=torch.uint8, device=here)
        for row in payloads:
            codec.encode(layout, source, starts, row, feedback=feedback)
        codec.decode(layout, payloads, torch.empty_like(source), starts)  # type: ignore[arg-type]
        if isinstance(codec, SummableCodec):
            kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16}
            wanted = kinds.get(codec.value_dtype(layout), kind)
            values: Any = torch.zeros(codec.num_values(layout), dtype=wanted, device=here)
            codec.encode_values(layout, source, starts, values, feedback=feedback)
            codec.decode_values(layout, values, torch.empty_like(source), starts)  # type: ignore[arg-type]
