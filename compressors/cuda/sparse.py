"""Top-k and DGC on a GPU; kernels in sparse.cu. Six launches, one pass over memory; decode is one launch."""

from __future__ import annotations

import threading
import weakref
from typing import ClassVar

import numpy as np
import torch

from espresso.compressors.base import Layout
from espresso.compressors.common import BaseCompressor
from espresso.compressors.cuda.codec import TILE, CudaCodec, EncodeCall
from espresso.compressors.cuda.runtime import Device
from espresso.compressors.dgc import Dgc
from espresso.compressors.sparse import RUN, Selection, sample_size
from espresso.compressors.threshold import Threshold
from espresso.compressors.topk import TopK

SELECT_THREADS = 1024
STATE_BYTES = 48
_MASK = 2**64 - 1


class CudaSparse(CudaCodec):
    """A sampled sparsifier with the residual fused."""

    file: ClassVar[str] = "sparse.cu"
    malformed_body: ClassVar[str] = "its count or indices are out of range or out of order"

    def __init__(self, compressor: BaseCompressor, device: Device, selection: Selection) -> None:
        super().__init__(compressor, device)
        self._selection = selection
        self._samplings: weakref.WeakKeyDictionary[Layout, _Samplings] = weakref.WeakKeyDictionary()
        self._making = threading.Lock()

    def launch_bodies(self, call: EncodeCall) -> None:
        """Sample, filter, select, emit."""
        segments, tiles = len(call.layout.segments), call.tables.num_tiles
        if not tiles:
            self._launch_encode(call, "emit", more=self._candidates(call))
            return
        how, samplings = self._selection, self._samplings_of(call.layout)
        sample = call.scratch.bytes_of("sample", call.layout.dtype.itemsize * samplings.num_samples)
        candidates = self._candidates(call)
        if samplings.num_tiles and not how.threshold:
            step = np.uint64(call.key.step & _MASK)
            more = (samplings.table, samplings.tiles, np.int64(samplings.num_tiles), step, sample)
            self._launch_encode(call, "gather", more=more, grid=samplings.num_tiles)
        self._launch_encode(
            call,
            "threshold",
            more=(samplings.table, sample, candidates[0], call.layout.dtype.type(how.threshold)),
            grid=segments,
            threads=SELECT_THREADS,
        )
        self._launch_encode(call, "filter", more=candidates)
        limits = (np.float64(how.enough), np.int32(how.attempts), np.int32(how.exact))
        self._launch_encode(
            call, "select", more=(*candidates, *limits), grid=segments, threads=SELECT_THREADS
        )
        self._launch_encode(call, "count", more=candidates)
        self._launch_encode(call, "emit", more=candidates)

    def _candidates(self, call: EncodeCall) -> tuple[torch.Tensor, ...]:
        """States, counts per tile, and room for every element to be a candidate, touched only where used."""
        tiles, itemsize = call.tables.num_tiles, call.layout.dtype.itemsize
        need = call.scratch.bytes_of
        return (
            need("states", STATE_BYTES * len(call.layout.segments)),
            need("found", 4 * tiles),
            need("above", 4 * tiles),
            need("equal", 4 * tiles),
            need("index", 4 * tiles * TILE),
            need("value", itemsize * tiles * TILE),
            need("pool", itemsize * tiles * TILE),
        )

    def _samplings_of(self, layout: Layout) -> _Samplings:
        with self._making:
            found = self._samplings.get(layout)
            if found is None:
                found = self._samplings[layout] = _Samplings(
                    layout, self._selection, self.device.torch_device
                )
        return found


class _Samplings:
    """How every segment is sampled: the table of ``Sampling`` in sparse.cu, and tiles of samples to gather."""

    def __init__(self, layout: Layout, how: Selection, device: torch.device) -> None:
        rows = np.zeros((len(layout.segments), 3), np.int64)
        tiles: list[tuple[int, int]] = []
        first = 0
        counts = zip(layout.numels.tolist(), layout.counts.tolist(), layout.raw.tolist(), strict=True)
        for index, (numel, k, raw) in enumerate(counts):
            if raw:
                continue
            num_runs, rank = sample_size(numel, k, how.part, how.slack)
            rows[index] = num_runs, rank, first
            tiles += [(index, low) for low in range(0, num_runs * RUN, TILE)]
            first += num_runs * RUN
        self.num_samples = first
        self.num_tiles = len(tiles)
        self.table = torch.from_numpy(rows).to(device)
        self.tiles = torch.from_numpy(np.array(tiles, np.int64).reshape(-1, 2)).to(device)


class CudaTopK(CudaSparse):
    """``topk``, exact: what is sampled does not show in the result."""

    def __init__(self, compressor: TopK, device: Device) -> None:
        super().__init__(compressor, device, compressor.selection())


class CudaDgc(CudaSparse):
    """``dgc``."""

    def __init__(self, compressor: Dgc, device: Device) -> None:
        super().__init__(compressor, device, compressor.selection())


class CudaThreshold(CudaSparse):
    """``threshold``: nothing is sampled."""

    def __init__(self, compressor: Threshold, device: Device) -> None:
        super().__init__(compressor, device, compressor.selection())
