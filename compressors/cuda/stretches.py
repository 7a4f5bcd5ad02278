"""Tables of stretches and tiles for kernels that take no payload: made once for equal arguments, then reused."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

KEPT = 4096
"""Tables kept, a few kilobytes each: a plan uses up to seven for each of its partitions, and one that has to be made
again in every step makes the host wait for its upload."""

Table = npt.NDArray[np.int64]


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
