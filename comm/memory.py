"""Where a partition's numbers and payloads live: the one place that knows host memory from a GPU's.

Codecs take *arrays*: NumPy's on the host, torch tensors on a device. Collectives take tensors. Both share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Array = Any
"""What codecs of this memory take."""


class Memory(Protocol):
    """Buffers for programs and residuals.

    Attributes:
        host_copies: whether offloaded steps need copies between here and the host.
    """

    host_copies: bool

    def numbers(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for numbers, not initialised."""
        ...

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """A zero array of uint8, float32 or float64."""
        ...

    def tensor(self, array: Array) -> torch.Tensor:
        """The array as a tensor."""
        ...

    def array(self, tensor: torch.Tensor) -> Array:
        """The tensor as an array (bfloat16 as uint16 where NumPy has no such type)."""
        ...

    def all_finite(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all numbers are finite; or a note of the question, answered at the iteration's end, and True."""
        ...

    def square_sum(self, array: Array) -> float:
        """The sum of squares."""
        ...

    def read(self, array: Array, start: int, numel: int) -> npt.NDArray[Any]:
        """A copy of a stretch, on the host."""
        ...

    def add(self, array: Array, start: int, values: npt.NDArray[Any]) -> None:
        """Add host numbers to a stretch."""
        ...


def is_finite(tensor: torch.Tensor) -> bool:
    """One reading pass: the largest magnitude is NaN or inf exactly if an element is."""
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor, float("inf"))))


class HostMemory:
    """NumPy arrays and CPU tensors; pinned where a device copies from and to them.

    Args:
        pinned: page-locked, so that copies are asynchronous.
    """

    host_copies = False

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned

    def numbers(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=self._pinned)

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        if not self._pinned:
            return np.zeros(shape, dtype)
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.zeros(shape, dtype=kind, pin_memory=True).numpy()

    def tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array)

    def array(self, tensor: torch.Tensor) -> Array:
        return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()

    def all_finite(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(is_finite(tensor) for tensor in tensors)

    def square_sum(self, array: Array) -> float:
        return float(np.vdot(array, array))

    def read(self, array: Array, start: int, numel: int) -> npt.NDArray[Any]:
        copied: npt.NDArray[Any] = array[start : start + numel].copy()
        return copied

    def add(self, array: Array, start: int, values: npt.NDArray[Any]) -> None:
        array[start : start + values.size] += values


HOST = HostMemory()


class DeviceMemory:
    """Tensors of one device; arrays are tensors. What would make the host wait is noted instead.

    Args:
        device: of the model.
    """

    host_copies = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = HostMemory(pinned=device.type == "cuda")
        self._notes: list[torch.Tensor] = []

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
        """Launches the look on the current stream; the answer is in ``take_notes``."""
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
        array[start : start + values.size].add_(
            torch.from_numpy(np.ascontiguousarray(values)).to(array.device)
        )
