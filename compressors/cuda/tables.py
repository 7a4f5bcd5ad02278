"""The tables that kernels read, on the device: rows of segments and tiles of work. Made once, then reused.

``Row`` and ``Tile`` of common.cuh say what the columns are: keep both in step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from espresso.compressors.base import Layout, Starts
from espresso.compressors.common import BaseCompressor
from espresso.compressors.draws import tensor_hash
from espresso.compressors.payload import check_range

NUMEL, OFFSET, COUNT, SOURCE, RESIDUAL, HASH, START, RAW, BODY_END, END, FIRST_TILE, END_TILE = range(12)
NUM_COLUMNS = 12

KEPT_PER_LAYOUT = 16
"""Row tables kept: a plan uses one or two for each of its layouts."""

Table = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tables:
    """What all calls with one layout share.

    Attributes:
        rows: int64[num_segments, NUM_COLUMNS] on the host; SOURCE and RESIDUAL are a call's own.
        tiles: int64[num_tiles, 2] on the device: segment and first element. Every segment has at least one.
        header: uint8, header and segment table with the flags clear.
    """

    rows: Table
    num_tiles: int
    tiles: torch.Tensor
    header: torch.Tensor


class TableCache:
    """Tables of the layouts of one codec on one device. Safe to use from several threads."""

    def __init__(self, compressor: BaseCompressor, tile: int, device: torch.device) -> None:
        self._compressor, self._tile, self._device = compressor, tile, device
        self._tables: weakref.WeakKeyDictionary[Layout, dict[bool, Tables]] = weakref.WeakKeyDictionary()
        self._rows: weakref.WeakKeyDictionary[Layout, dict[Any, torch.Tensor]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def tables(
        self, layout: Layout, vector: Table | None = None, change: Callable[[Table], None] | None = None
    ) -> Tables:
        """Tables of a payload, or of a plain vector whose segments begin at the bytes ``vector``."""
        with self._lock:
            made = self._tables.setdefault(layout, {})
            found = made.get(vector is not None)
            if found is None:
                found = made[vector is not None] = self._make(layout, vector, change)
        return found

    def rows(
        self, layout: Layout, tables: Tables, starts: Starts, size: int, kept: Starts | None, kept_size: int
    ) -> torch.Tensor:
        """The row table of calls with these starts, on the device.

        Raises:
            ValueError: a segment ends outside its array of ``size`` (``kept_size``) elements: kernels do not look.
        """
        vector = tables.header.numel() == 0
        key = (vector, size, starts.tobytes(), kept_size, b"" if kept is None else kept.tobytes())
        with self._lock:
            made = self._rows.setdefault(layout, {})
            found = made.get(key)
            if found is None:
                check_range("starts", starts, layout, size)
                rows = tables.rows.copy()
                rows[:, SOURCE] = starts
                if kept is not None:
                    check_range("feedback.starts", kept, layout, kept_size)
                    rows[:, RESIDUAL] = kept
                while len(made) >= KEPT_PER_LAYOUT:
                    made.pop(next(iter(made)))
                found = made[key] = self._upload(rows)
        return found

    def _make(self, layout: Layout, vector: Table | None, change: Callable[[Table], None] | None) -> Tables:
        rows = np.zeros((len(layout.segments), NUM_COLUMNS), np.int64)
        rows[:, NUMEL], rows[:, COUNT], rows[:, RAW] = layout.numels, layout.counts, layout.raw
        rows[:, HASH] = [tensor_hash(segment.tensor) for segment in layout.segments]
        rows[:, START] = [segment.tensor_start for segment in layout.segments]
        if vector is None:
            rows[:, OFFSET] = layout.offsets
            rows[:, BODY_END] = layout.offsets + self._body_bytes(layout)
            rows[:, END] = np.append(layout.offsets, layout.num_bytes)[1:]
        else:
            rows[:, OFFSET] = vector
            if change is not None:
                change(rows)
        tiles: list[tuple[int, int]] = []
        for index, numel in enumerate(layout.numels.tolist()):
            rows[index, FIRST_TILE] = len(tiles)
            tiles += [(index, low) for low in range(0, max(numel, 1), self._tile)]
            rows[index, END_TILE] = len(tiles)
        header = np.frombuffer(layout.header if vector is None else b"", np.uint8)
        flat = np.array(tiles, np.int64).reshape(-1, 2)
        return Tables(rows, len(tiles), self._upload(flat), self._upload(header))

    def _body_bytes(self, layout: Layout) -> Table:
        itemsize = layout.dtype.itemsize
        return np.array(
            [
                numel * itemsize if raw else self._compressor.body_size(numel, itemsize)[1]
                for numel, raw in zip(layout.numels.tolist(), layout.raw.tolist(), strict=True)
            ],
            np.int64,
        )

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self._device)


KEPT = 4096
"""Tables kept, a few kilobytes each: a plan uses up to seven for each of its partitions, and one that has to be made
again in every step makes the host wait for its upload."""


@dataclass(frozen=True)
class Stretches:
    """On the device: rows as the kernel reads them, and its tiles (row, first item)."""

    rows: torch.Tensor
    tiles: torch.Tensor
    num_tiles: int


class StretchCache:
    """Tables on one device, by content. Safe to use from several threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[bytes, bytes, bytes], Stretches] = {}
        self._lock = threading.Lock()

    def stretches(self, rows: Table, lengths: Table, tile: int | Table) -> Stretches:
        """Row i has ``lengths[i]`` items, of which a tile takes up to ``tile`` (or ``tile[i]``)."""
        tile = np.broadcast_to(np.asarray(tile, np.int64), lengths.shape)
        key = (tile.tobytes(), rows.tobytes(), lengths.tobytes())
        with self._lock:
            found = self._made.get(key)
            if found is None:
                while len(self._made) >= KEPT:
                    self._made.pop(next(iter(self._made)))
                counts = -(-lengths // tile)
                index = np.repeat(np.arange(len(lengths)), counts)
                low = (np.arange(index.size) - np.repeat(np.cumsum(counts) - counts, counts)) * tile[index]
                tiles = np.stack([index, low], axis=1).astype(np.int64)
                found = self._made[key] = Stretches(self._upload(rows), self._upload(tiles), len(tiles))
        return found

    def _upload(self, table: Table) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(table)).to(self._device)
