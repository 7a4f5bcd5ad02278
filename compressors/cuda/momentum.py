"""Momentum correction on a GPU; kernels in momentum.cu. One launch moves all velocities, one masks them.

Twin of :class:`espresso.compressors.momentum.HostMover`: the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from espresso.compressors.base import Compressor, Correction, Feedback, Layout, Starts
from espresso.compressors.cuda.codec import THREADS, TILE, suffix
from espresso.compressors.cuda.runtime import Device
from espresso.compressors.cuda.tables import StretchCache

FILE = "momentum.cu"


class CudaMover:
    """Launches on torch's current stream and waits for nothing.

    Args:
        device: where kernels run.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tables = StretchCache(device.torch_device)

    def advance(
        self,
        rule: Correction,
        numels: Starts,
        source: Any,
        starts: Starts,
        scale: float,
        velocity: Feedback,
        out: Any,
        out_starts: Starts,
    ) -> None:
        """As :meth:`espresso.compressors.momentum.Mover.advance`."""
        old: Any = velocity.old
        new: Any = velocity.new
        for what, tensor, at in (
            ("source", source, starts), ("velocity", new, velocity.starts), ("out", out, out_starts)
        ):  # fmt: skip
            _check_inside(what, tensor, at, numels)
        assert old.dtype is source.dtype is new.dtype is out.dtype, "one type of numbers"
        rows = np.stack([numels, starts, velocity.starts, out_starts], axis=1)
        made = self._tables.stretches(rows, numels, TILE)
        kind = np.float32 if source.dtype is torch.float32 else np.float64
        aside = out.data_ptr() != new.data_ptr()
        if made.num_tiles:
            self._device.launch(
                FILE,
                f"advance_{'f32' if kind is np.float32 else 'f64'}",
                made.num_tiles,
                THREADS,
                (
                    made.rows, made.tiles, np.int64(TILE), source, kind(scale), kind(rule.momentum),
                    np.int32(rule.nesterov), old, new, out if aside else np.uint64(0),
                ),
            )  # fmt: skip

    def empty(self, numel: int, layout: Layout) -> Any:
        """As :meth:`espresso.compressors.momentum.Mover.empty`."""
        kind = torch.float32 if layout.dtype.itemsize == 4 else torch.float64
        return torch.empty(numel, dtype=kind, device=self._device.torch_device)

    def mask(self, compressor: Compressor, layout: Layout, payload: Any, velocity: Feedback) -> None:
        """As :meth:`espresso.compressors.momentum.Mover.mask`; the kernel looks whether all was finite."""
        if not compressor.traits.masks:
            return
        new: Any = velocity.new
        _check_inside("velocity", new, velocity.starts, layout.numels)
        slots = np.where(layout.raw, 0, layout.counts)
        made = self._tables.stretches(
            np.stack([layout.numels, layout.offsets, slots, velocity.starts], axis=1), slots, TILE
        )
        if made.num_tiles:
            arguments = (made.rows, made.tiles, np.int64(TILE), payload, new)
            self._device.launch(FILE, f"mask_{suffix(layout)}", made.num_tiles, THREADS, arguments)


def _check_inside(what: str, tensor: torch.Tensor, starts: Starts, numels: Starts) -> None:
    """Kernels do not look."""
    ends = starts + numels
    if not tensor.is_contiguous() or (numels.size and (starts.min() < 0 or ends.max() > tensor.numel())):
        raise ValueError(f"{what}: a stretch ends outside its {tensor.numel()} contiguous elements")
