"""Where a partition's numbers and payloads live: the one place that knows host memory from a GPU's.

Both memories have the same methods; :class:`HostMemory` says what each does, :class:`DeviceMemory` what is different.
Codecs take *arrays*: NumPy's on the host, torch tensors on a device. Collectives take tensors. Both share memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from espresso.compressors import Codec, Compressor, cuda_codec, host_codec
from espresso.compressors.cuda import Device as Accelerator
from espresso.compressors.cuda.momentum import CudaMover
from espresso.compressors.momentum import HOST_MOVER, Mover
from espresso.strategies import CompressorSpec, Device

Array = Any
"""What codecs of this memory take."""


class Codecs(Protocol):
    """Where the codec of a compressor for a device comes from."""

    def __call__(self, spec: CompressorSpec, device: Device) -> Codec: ...


def is_finite(tensor: torch.Tensor) -> bool:
    """One reading pass, at the memory's speed: a NaN makes both extremes NaN, an inf is one of them.

    PyTorch's largest norm takes twelve times as long on a host, and ``isfinite`` with ``all`` forty times.
    """
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())


class _Rooms(threading.local):
    """Scratch arrays of one thread."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], Array] = {}


_ROOMS = _Rooms()


class HostMemory:
    """NumPy arrays and CPU tensors; pinned where a device copies from and to them.

    Args:
        pinned: page-locked, so that copies are asynchronous.

    Attributes:
        host_copies: whether offloaded steps need copies between here and the host.
        mover: moves velocities that are kept here.
    """

    host_copies = False
    mover: Mover = HOST_MOVER

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned

    def numbers(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for numbers, not initialised."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """A zero array of uint8, float32 or float64."""
        if not self._pinned:
            return np.zeros(shape, dtype)
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.zeros(shape, dtype=kind, device="cpu", pin_memory=True).numpy()

    def tensor(self, array: Array) -> torch.Tensor:
        """The array as a tensor."""
        return torch.from_numpy(array)

    def array(self, tensor: torch.Tensor) -> Array:
        """The tensor as an array (bfloat16 as uint16 where NumPy has no such type)."""
        return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()

    def all_finite(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all numbers are finite."""
        return all(is_finite(tensor) for tensor in tensors)

    def square_sum(self, array: Array) -> float:
        """The sum of squares."""
        return float(np.vdot(array, array))

    def read(self, array: Array, start: int, numel: int) -> npt.NDArray[Any]:
        """A copy of a stretch, on the host."""
        copied: npt.NDArray[Any] = array[start : start + numel].copy()
        return copied

    def add(self, array: Array, start: int, values: npt.NDArray[Any]) -> None:
        """Add host numbers to a stretch."""
        array[start : start + values.size] += values

    def here(self, array: Any) -> Array:
        """An array of any memory as one of this, itself where it is; waits for a device that has it."""
        return array.cpu().numpy() if isinstance(array, torch.Tensor) else array

    def codec(self, compressor: Compressor) -> Codec:
        """A codec for arrays of this memory."""
        return host_codec(compressor)

    def room(self, name: str, numel: int, dtype: npt.DTypeLike) -> Array:
        """Scratch of this thread, on a device of this stream: its content is whatever was left there."""
        key = name, np.dtype(dtype).name
        held = _ROOMS.held.get(key)
        if held is None or held.size < numel:
            held = _ROOMS.held[key] = np.zeros(numel, dtype)
        return held[:numel]

    def clip(self, tensors: Sequence[torch.Tensor], limit: float) -> None:
        """Scale each tensor down to this norm, in place, by one reading pass, and another where it is needed (two where
        squares leave single precision).

        One whose norm is not finite is left alone.
        """
        for tensor in tensors:
            norm = float(torch.linalg.vector_norm(tensor, dtype=_wide(tensor)))
            if norm == math.inf:
                norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
            if limit < norm < math.inf:
                tensor.mul_(limit / norm)

    def let_go(self, array: Array) -> None:
        """Before the last name of the array goes: nobody will use it but what runs on this stream already."""


HOST = HostMemory()


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


class DeviceMemory:
    """Tensors of one device; arrays are tensors. What would make the host wait is noted instead."""

    host_copies = True

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.device = accelerator.torch_device
        self.host = HostMemory(pinned=self.device.type == "cuda")
        self.mover: Mover = CudaMover(accelerator)
        self._notes: list[torch.Tensor] = []
        self._codecs: dict[Compressor, Codec] = {}
        self._rooms: dict[tuple[int, str, str], torch.Tensor] = {}
        self._lock = threading.Lock()

    def numbers(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.zeros(shape, dtype=kind, device=self.device)

    def tensor(self, array: Array) -> torch.Tensor:
        assert isinstance(array, torch.Tensor)
        return array

    def array(self, tensor: torch.Tensor) -> Array:
        return tensor

    def all_finite(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True: launches the look on the current stream; the answer is in ``take_notes``."""
        for tensor in tensors:
            self._notes.append(torch.isfinite(torch.linalg.vector_norm(tensor, float("inf"))))
        return True

    def take_notes(self) -> list[torch.Tensor]:
        """One truth value for every look since the last call, on the device; all streams must have come so far."""
        notes, self._notes = self._notes, []
        return notes

    def square_sum(self, array: Array) -> float:
        """Waits for the device."""
        return float(torch.dot(array, array))

    def read(self, array: Array, start: int, numel: int) -> npt.NDArray[Any]:
        """Waits for the device: between iterations only."""
        copied: npt.NDArray[Any] = array[start : start + numel].cpu().numpy().copy()
        return copied

    def add(self, array: Array, start: int, values: npt.NDArray[Any]) -> None:
        array[start : start + values.size].add_(torch.from_numpy(np.ascontiguousarray(values)).to(array.device))

    def here(self, array: Any) -> Array:
        return array if isinstance(array, torch.Tensor) else torch.from_numpy(array).to(self.device)

    def codec(self, compressor: Compressor) -> Codec:
        """What it finds is in its own status, which nobody reads: it is for payloads that never leave."""
        with self._lock:
            found = self._codecs.get(compressor)
            if found is None:
                found = self._codecs[compressor] = cuda_codec(compressor, self.accelerator, waits=False)
        return found

    def room(self, name: str, numel: int, dtype: npt.DTypeLike) -> Array:
        key = self.accelerator.lane(), name, np.dtype(dtype).name
        held = self._rooms.get(key)
        if held is None or held.numel() < numel:
            held = self._rooms[key] = self.zeros(numel, dtype)
        return held[:numel]

    def clip(self, tensors: Sequence[torch.Tensor], limit: float) -> None:
        """Two passes, and the host does not wait: what is short enough already is multiplied by one. Where squares
        leave single precision (1e19) a tensor is left alone.
        """
        if not tensors:
            return
        norms = torch.stack([torch.linalg.vector_norm(t, dtype=_wide(t)) for t in tensors]).to(torch.float64)
        clipped = (limit < norms) & torch.isfinite(norms)
        factors = torch.where(clipped, limit / norms, 1.0)
        for tensor, factor in zip(tensors, factors.to(_wide(tensors[0])).unbind(), strict=True):
            if tensor.dtype is factor.dtype:
                tensor.mul_(factor)
            else:  # a factor in the narrow type would be wrong by as much as that rounds
                tensor.copy_(tensor.to(factor.dtype).mul_(factor))

    def let_go(self, array: Array) -> None:
        """Residuals are made on backward's stream: torch would give it their memory before a lane has read them."""
        if array.is_cuda:
            array.record_stream(torch.cuda.current_stream(self.device))


Memory = HostMemory | DeviceMemory
"""Buffers for programs and residuals."""
