"""The backends of the conformance suite. A new one is an entry of ``MAKERS`` and a line of ``BACKENDS``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from espresso.compressors import Decoding, Encoding, Feedback, cuda_codec, host_codec
from espresso.compressors.cuda import CudaDevice, CudaSummableCodec, Device, sources
from tests.emulator import COMPILER, EmulatedDevice, build

_current = "numba"


def make_codec(compressor: Any, pool: Any = None) -> Any:
    """The codec of a compressor on the backend that the suite runs on just now. All take NumPy arrays."""
    return MAKERS[_current](compressor, pool)


def on_device(codec: Any) -> OnDevice:
    """The adapter of a GPU codec."""
    if codec.compressor.traits.rounds > 1:
        return RoundsOnDevice(codec)
    return SummableOnDevice(codec) if isinstance(codec, CudaSummableCodec) else OnDevice(codec)


class OnDevice:
    """A GPU codec that takes NumPy arrays: copies them there and back."""

    def __init__(self, codec: Any) -> None:
        self.codec, self.compressor = codec, codec.compressor
        self._device = codec.device.torch_device

    def _there(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, copy=True)

    def _feedback(self, feedback: Feedback | None) -> Any:
        if feedback is None:
            return None
        old, new = self._there(feedback.old), self._there(feedback.new)
        return Feedback(old, new, feedback.starts, feedback.gain)  # type: ignore[arg-type]

    def _encoding(self, encoding: Encoding) -> Any:
        return replace(encoding, source=self._there(encoding.source), feedback=self._feedback(encoding.feedback))

    def encode(self, encoding: Encoding, payload: Any) -> bool:
        return self._encode(self.codec.encode, encoding, payload)

    def _encode(self, encode: Any, encoding: Encoding, out: Any, *more: Any) -> bool:
        there, mine = self._there(out), self._encoding(encoding)
        finite = encode(mine, there, *more)
        out[:] = there.cpu().numpy()
        if encoding.feedback is not None:
            encoding.feedback.new[:] = mine.feedback.new.cpu().numpy()
        return bool(finite)

    def decode(self, decoding: Decoding, payloads: Any) -> bool:
        return self._decode(self.codec.decode, decoding, self._there(payloads))

    def _decode(self, decode: Any, decoding: Decoding, *given: Any) -> bool:
        there: Any = self._there(decoding.target)
        try:
            return bool(decode(replace(decoding, target=there), *given))
        finally:
            decoding.target[:] = there.cpu().numpy()


class SummableOnDevice(OnDevice):
    """The same for vectors."""

    def num_values(self, layout: Any) -> int:
        return int(self.codec.num_values(layout))

    def value_dtype(self, layout: Any) -> str:
        return str(self.codec.value_dtype(layout))

    def encode_values(self, encoding: Encoding, values: Any) -> bool:
        return self._encode(self.codec.encode_values, encoding, values)

    def decode_values(self, decoding: Decoding, values: Any) -> bool:
        return self._decode(self.codec.decode_values, decoding, self._there(values))


class RoundsOnDevice(OnDevice):
    """The same for a codec of several rounds; factors are kept as NumPy arrays."""

    def num_values(self, layout: Any, number: int) -> int:
        return int(self.codec.num_values(layout, number))

    def encode_values(self, encoding: Encoding, values: Any, factors: Any) -> None:
        self._encode(self.codec.encode_values, encoding, values, HostFactors(factors, self._there))

    def transform_values(self, layout: Any, summed: Any, values: Any, *, feedback: Any) -> None:
        first, second, kept = self._there(summed), self._there(values), self._feedback(feedback)
        self.codec.transform_values(layout, first, second, feedback=kept)
        summed[:], values[:], feedback.new[:] = (t.cpu().numpy() for t in (first, second, kept.new))

    def decode_values(self, decoding: Decoding, first: Any, second: Any, factors: Any) -> bool:
        there = HostFactors(factors, self._there)
        return self._decode(self.codec.decode_values, decoding, self._there(first), self._there(second), there)


class HostFactors:
    """Keeps a device's factors as NumPy arrays."""

    def __init__(self, factors: Any, there: Any) -> None:
        self._factors, self._there = factors, there

    def read(self, tensor: str) -> Any:
        kept = self._factors.read(tensor)
        return None if kept is None else self._there(kept)

    def write(self, tensor: str, values: Any) -> None:
        self._factors.write(tensor, values.cpu().numpy().copy())


_devices: dict[str, Device] = {}


def cuda_device() -> Device:
    """One for the whole session: its kernels are compiled once."""
    return _devices.setdefault("cuda", CudaDevice())


MAKERS = {
    "numba": host_codec,
    "cuda": lambda compressor, pool: on_device(cuda_codec(compressor, cuda_device())),
    "emulated": lambda compressor, pool: on_device(cuda_codec(compressor, EmulatedDevice())),
}

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation of kernels needs g++")

BACKENDS = [pytest.param("numba")]
if torch.cuda.is_available():  # without one, test_gpu.py says so: no need to repeat it a thousand times
    BACKENDS.append(pytest.param("cuda", marks=pytest.mark.gpu))
if os.environ.get("ESPRESSO_TEST_EMULATED"):  # minutes over the whole suite
    BACKENDS.append(pytest.param("emulated", marks=needs_compiler))

DEVICES = [pytest.param("emulated", marks=needs_compiler)]
"""What a model may be on that is not on the host."""
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


def build_for(where: str) -> None:
    """Compile what ranks will load."""
    if where == "emulated":
        build(sources())


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs every test of a module that imports it on every backend."""
    global _current
    _current = request.param
    yield
    _current = "numba"
