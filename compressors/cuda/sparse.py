"""Sparsifiers on a GPU; kernels in candidates.cuh, sparse.cu and ternary.cu. One pass over memory each way.

Encode is four launches (three with a fixed threshold), or one where every segment fits a tile; decode is one.
"""

from __future__ import annotations

import threading
import weakref
from typing import ClassVar

import numpy as np
import torch

from espresso.compressors.base import Layout
from espresso.compressors.cuda.codec import TILE, CudaCodec, EncodeCall
from espresso.compressors.cuda.runtime import Device
from espresso.compressors.sparse import RUN, Selection, Sparsifier, sample_size

SAMPLE_THREADS = 1024
STATE_BYTES = 72
HISTOGRAM_BYTES = 4 << 11
_MASK = 2**64 - 1


class CudaSparse(CudaCodec):
    """``topk``, ``dgc`` and ``threshold`` with the residual fused. What top-k samples does not show in its result."""

    file: ClassVar[str] = "sparse.cu"
    malformed_body: ClassVar[str] = "its count or indices are out of range or out of order"

    def __init__(self, compressor: Sparsifier, device: Device, *, waits: bool = True) -> None:
        super().__init__(compressor, device, waits=waits)
        self._selection = compressor.selection()
        self._samplings: weakref.WeakKeyDictionary[Layout, _Samplings] = weakref.WeakKeyDictionary()
        self._making = threading.Lock()

    def launch_bodies(self, call: EncodeCall) -> None:
        """Sample, filter, count, emit."""
        how, samplings = self._selection, self._samplings_of(call.layout)
        candidates = self._candidates(call, samplings)
        fixed = call.layout.dtype.type(how.threshold)
        if how.threshold:  # to kernels zero means that there is none
            fixed = max(fixed, np.finfo(call.layout.dtype).smallest_subnormal)
        if samplings.num_large:
            if not how.threshold:
                size = call.layout.dtype.itemsize * samplings.num_samples
                step = np.uint64(call.key.step & _MASK)
                sampled = (np.int64(samplings.num_tiles), step, call.scratch.bytes_of("sample", size))
                more = (*candidates, samplings.tiles, *sampled)
                self._launch_encode(call, "sample", more, grid=samplings.num_tiles, threads=SAMPLE_THREADS)
            limits = (fixed, np.float64(how.enough), np.int32(how.attempts), np.int32(how.exact))
            self._launch_encode(call, "filter", (*candidates, *limits))
            self._launch_encode(call, "count", candidates)
        self._launch_encode(call, "emit", (*candidates, fixed))

    def _candidates(self, call: EncodeCall, samplings: _Samplings) -> tuple[torch.Tensor, ...]:
        """States, counts per tile, and room for every element to be a candidate, touched only where used."""
        tiles = call.tables.num_tiles if samplings.num_large else 0
        need = call.scratch.bytes_of
        return (
            samplings.table,
            need("states", STATE_BYTES * len(call.layout.segments), zero=True),
            need("histograms", HISTOGRAM_BYTES * samplings.num_large, zero=True),
            need("found", 4 * tiles),
            need("above", 4 * tiles),
            need("equal", 4 * tiles),
            need("index", 4 * tiles * TILE),
            need("value", call.layout.dtype.itemsize * tiles * TILE),
            need("list", 4 * tiles * TILE),
        )

    def _samplings_of(self, layout: Layout) -> _Samplings:
        with self._making:
            found = self._samplings.get(layout)
            if found is None:
                found = self._samplings[layout] = _Samplings(layout, self._selection, self.device.torch_device)
        return found


class CudaTernary(CudaSparse):
    """``stc``."""

    file: ClassVar[str] = "ternary.cu"


class _Samplings:
    """How every segment is sampled: the table of ``Sampling`` in candidates.cuh, and tiles of samples.

    Segments of one tile are not sampled, nor are any where the threshold is fixed.
    """

    def __init__(self, layout: Layout, how: Selection, device: torch.device) -> None:
        rows = np.zeros((len(layout.segments), 5), np.int64)
        tiles: list[tuple[int, int]] = []
        first = large = 0
        counts = zip(layout.numels.tolist(), layout.counts.tolist(), layout.raw.tolist(), strict=True)
        for index, (numel, k, raw) in enumerate(counts):
            if raw or numel <= TILE:
                continue
            mine: list[tuple[int, int]] = []
            if not how.threshold:
                num_runs, rank = sample_size(numel, k, how.part, how.slack)
                mine = [(index, low) for low in range(0, num_runs * RUN, TILE)]
                rows[index, :3] = num_runs, rank, first
                first += num_runs * RUN
            rows[index, 3:] = len(mine), large
            tiles += mine
            large += 1
        self.num_samples, self.num_tiles, self.num_large = first, len(tiles), large
        self.table = torch.from_numpy(rows).to(device)
        self.tiles = torch.from_numpy(np.array(tiles, np.int64).reshape(-1, 2)).to(device)
