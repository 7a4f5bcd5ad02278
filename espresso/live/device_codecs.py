"""The codecs of one rank of a GPU job: on the GPU, launched without waiting, and on the host's pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from espresso.comm.keep.store import FactorStore
from espresso.compressors import registry
from espresso.compressors.base import Codec, Decoding, Encoding, Feedback, Segment, SummableCodec
from espresso.compressors.cuda import Device as Accelerator
from espresso.cpu_offload import warm_up
from espresso.live.host_codecs import HostCodecs
from espresso.strategies import CompressorSpec, Device


class DeviceCodecs(HostCodecs):
    """Codecs of the training device launch on the GPU; offloaded ones run on the pool, as in a CPU job.

    Args:
        accelerator: where kernels run.
        offload_threads: of the pool; None takes the cores this process may use.
    """

    def __init__(self, accelerator: Accelerator, offload_threads: int | None = None) -> None:
        super().__init__(offload_threads)
        self._accelerator = accelerator
        self._launching: dict[CompressorSpec, Any] = {}

    def __call__(self, spec: CompressorSpec, device: Device) -> Codec:
        if device is Device.OFFLOAD:
            return super().__call__(spec, device)
        with self._lock:
            found: Codec | None = self._launching.get(spec)
            if found is None:
                found = registry.cuda_codec(registry.create(spec), self._accelerator, waits=False)
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

    def _launch_once(self, codec: Any, dtype: np.dtype[Any]) -> None:
        if codec.compressor.traits.rounds > 1:
            launch_rounds(codec, dtype, self._accelerator.torch_device)
            return
        sizes = [1, 5000]
        layout = codec.compressor.layout([Segment(f"warm-up {i}", 0, n) for i, n in enumerate(sizes)], dtype)
        starts = np.array([0, 1], np.int64)
        here = self._accelerator.torch_device
        kind = torch.float64 if dtype.itemsize == 8 else torch.float32
        source: Any = torch.linspace(-1, 1, sum(sizes), dtype=kind, device=here)
        feedback = Feedback(torch.zeros_like(source), torch.empty_like(source), starts)  # type: ignore[arg-type]
        payloads: Any = torch.zeros((2, layout.num_bytes), dtype=torch.uint8, device=here)
        for row in payloads:
            codec.encode(Encoding(layout, source, starts, feedback=feedback), row)
        codec.decode(Decoding(layout, torch.empty_like(source), starts), payloads)
        if isinstance(codec, SummableCodec):
            kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16}
            wanted = kinds.get(codec.value_dtype(layout), kind)
            values: Any = torch.zeros(codec.num_values(layout), dtype=wanted, device=here)
            codec.encode_values(Encoding(layout, source, starts, feedback=feedback), values)
            codec.decode_values(Decoding(layout, torch.empty_like(source), starts), values)


class Rehearsal:
    """One matrix and what several rounds need of it on a device, for a codec that is warmed up or measured.

    Args:
        side: rows and columns.
    """

    def __init__(self, codec: Any, side: int, dtype: np.dtype[Any], device: torch.device) -> None:
        segments = [Segment("matrix", 0, side * side, (side, side)), Segment("bias", 0, 3, (3,))]
        self._codec, self._layout = codec, codec.compressor.layout(segments, dtype)
        kind = torch.float64 if dtype.itemsize == 8 else torch.float32
        self._starts = np.array([0, side * side], np.int64)
        draw = torch.Generator().manual_seed(0)
        self._source = torch.randn(side * side + 3, generator=draw, dtype=kind).to(device)
        self._target = torch.empty_like(self._source)
        old: Any = torch.zeros_like(self._source)
        new: Any = torch.zeros_like(self._source)
        self._feedback = Feedback(old, new, self._starts)
        self._vectors = [torch.zeros(codec.num_values(self._layout, n), dtype=kind, device=device) for n in (0, 1)]
        self._factors = FactorStore()

    def encode(self) -> None:
        """The first vector, from the last step's Q once there is one."""
        encoding = Encoding(self._layout, self._source, self._starts, feedback=self._feedback)
        self._codec.encode_values(encoding, self._vectors[0], self._factors)

    def transform(self) -> None:
        """The second vector."""
        self._codec.transform_values(self._layout, *self._vectors, feedback=self._feedback)

    def decode(self) -> None:
        """The average, and Q for the next step."""
        self._codec.decode_values(Decoding(self._layout, self._target, self._starts), *self._vectors, self._factors)
        self._factors.commit()


def launch_rounds(codec: Any, dtype: np.dtype[Any], device: torch.device) -> None:
    """Compile all kernels of a codec of several rounds: twice, since the second step starts from the first's Q."""
    rehearsal = Rehearsal(codec, 64, dtype, device)
    for _ in range(2):
        rehearsal.encode()
        rehearsal.transform()
        rehearsal.decode()
