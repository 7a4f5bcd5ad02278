"""Where kernels come from and how they are launched. CuPy compiles and launches; every byte of memory is torch's.

CuPy allocates nothing here, so torch and CuPy cannot disagree about an allocator and there is no second pool: scratch
and tables are torch tensors, and kernels get their addresses. Launches go to torch's current stream of the device,
so that they are ordered with torch's own work; CuPy's current stream, a different one, is never used.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

COMPILER_OPTIONS = ("--std=c++17", "--fmad=false")
"""Fused multiply-add rounds once where the host's kernels round twice: payload bytes would differ."""

_FOLDER = Path(__file__).parent
_INCLUDE = '#include "common.cuh"'


class CudaUnavailableError(RuntimeError):
    """CuPy or a CUDA device is missing; says which, and what to do."""


class Device(Protocol):
    """Where codecs run: a GPU, or the tests' emulation of one on the host."""

    torch_device: torch.device

    def lane(self) -> int:
        """Identifies the current stream: what is launched on one lane runs in the order of the launches."""
        ...

    def launch(self, file: str, kernel: str, grid: int, threads: int, arguments: Sequence[Any]) -> None:
        """Launch a kernel of ``file`` on the current stream.

        Args:
            arguments: NumPy scalars of exactly the kernel's types, and tensors, whose addresses are passed.
        """
        ...


def sources() -> tuple[str, ...]:
    """The names of all CUDA sources."""
    return tuple(sorted(path.name for path in _FOLDER.glob("*.cu")))


@cache
def source_of(file: str) -> str:
    """A CUDA source with what it includes put in its place: a cache keyed by the text then sees every change."""
    text = (_FOLDER / file).read_text()
    return text.replace(_INCLUDE, (_FOLDER / "common.cuh").read_text())


class CudaDevice:
    """A GPU. Kernels are compiled by NVRTC for its architecture at first use, and kept on disk by CuPy.

    Args:
        index: torch's number of the device; None takes the current one.

    Raises:
        CudaUnavailableError: no CuPy, no device, or CuPy sees other devices than torch.
    """

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise CudaUnavailableError(
                "torch sees no CUDA device: the GPU compressors need one (and torch's CUDA build)"
            )
        self._cupy = _import_cupy()
        self._index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", self._index)
        self._check_same_device()
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], Any] = {}
        self._streams: dict[int, Any] = {}
        self._lock = threading.Lock()

    def lane(self) -> int:
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def launch(self, file: str, kernel: str, grid: int, threads: int, arguments: Sequence[Any]) -> None:
        """On torch's current stream of this device."""
        lane = self.lane()
        stream = self._streams.get(lane)
        if stream is None:
            stream = self._streams[lane] = self._cupy.cuda.Stream.from_external(_Stream(lane))
        function = self._kernels.get((file, kernel)) or self._load(file, kernel)
        values = tuple(
            np.uint64(value.data_ptr()) if isinstance(value, torch.Tensor) else value for value in arguments
        )
        with self._cupy.cuda.Device(self._index), stream:
            function((grid,), (threads,), values)

    def _load(self, file: str, kernel: str) -> Any:
        """One module a source; CuPy's disk cache is keyed by text, options and architecture."""
        with self._lock, self._cupy.cuda.Device(self._index):
            module = self._modules.get(file)
            if module is None:
                code = source_of(file)
                module = self._modules[file] = self._cupy.RawModule(code=code, options=COMPILER_OPTIONS)
            self._kernels[file, kernel] = module.get_function(kernel)
        return self._kernels[file, kernel]

    def _check_same_device(self) -> None:
        """CuPy and torch count devices alike, unless somebody changed CUDA_VISIBLE_DEVICES between them."""
        runtime, count = self._cupy.cuda.runtime, self._cupy.cuda.runtime.getDeviceCount()
        mine = torch.cuda.get_device_properties(self.torch_device)
        ours, theirs = (mine.name, getattr(mine, "pci_bus_id", None)), ("nothing", None)
        if self._index < count:
            other = runtime.getDeviceProperties(self._index)
            theirs = (other["name"].decode(), None if ours[1] is None else other["pciBusID"])
        if count != torch.cuda.device_count() or ours != theirs:
            raise CudaUnavailableError(
                f"torch has {torch.cuda.device_count()} devices and calls number {self._index} {ours}, CuPy has"
                f" {count} and calls it {theirs}: set CUDA_VISIBLE_DEVICES before either is imported"
            )


class _Stream:
    """A CUDA stream of somebody else's, as CuPy takes it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise CudaUnavailableError(
            "the GPU compressors need CuPy, which cannot be imported"
            f" ({error}): pip install 'espresso-ddp[cuda]', or cupy-cuda12x for CUDA 12"
        ) from error
    return cupy
