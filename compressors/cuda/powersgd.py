"""PowerSGD on a GPU; kernels in powersgd.cu. Six launches a step for any number of matrices.

Encode (one launch, two where it starts from the last step) reads gradient and residual and writes M; transform (four)
reads M for Q, and once more to subtract; decode (one) writes the target.

Own kernels, no ``torch.matmul``: a BLAS chooses its order of additions by shape, alignment and architecture, launches
once a matrix, and may round to TF32, while these thin products are bound by memory. A rank's own products (M Q, M' P)
add in another order than the host twin's, which leaves that to its compiler, so vectors agree within rounding, not bit
for bit: relative to the norms of the two vectors, a sum of n products is off by at most n * 2^-24 (2^-53 in float64)
on either side. What replicas must agree on follows from the reduced vectors in a fixed order: equal on every GPU.
Orthonormalising is the host's Gram-Schmidt in double with another shape of sums; subtracting and decoding round as
the host's do.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from espresso.compressors.base import Decoding, DrawKey, Encoding, Factors, Feedback, Layout, Starts
from espresso.compressors.cuda.codec import THREADS, TILE, new_status, numbers_on, suffix
from espresso.compressors.cuda.runtime import Device
from espresso.compressors.cuda.tables import StretchCache, Stretches, Table
from espresso.compressors.payload import check_range
from espresso.compressors.powersgd import PowerSgd, matrix_of, random_start, start_key

FILE = "powersgd.cu"
ROWS, COLUMNS, RANK, SOURCE, RESIDUAL, P, Q, PARTIAL, CHUNKS, STEP = range(10)
"""Of a row of the table: ``Matrix`` of powersgd.cu."""

COLUMNS_TILE, ROWS_CHUNK, ORTHO_THREADS = 32, 256, 512
WIDE = 4096
"""From so many columns on a row takes a whole thread block."""

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Shape:
    """What all calls with one layout share: the table without the call's starts, and sizes."""

    rows: Table
    matrices: tuple[int, ...]
    first: int
    second: int
    partial: int


class CudaPowerSgd:
    """``powersgd``; see :class:`espresso.compressors.base.RoundsCodec`. Results are ready on torch's current stream.

    Args:
        compressor, device, waits, status: as for :class:`~espresso.compressors.cuda.codec.CudaCodec`.
    """

    def __init__(self, compressor: PowerSgd, device: Device, *, waits: bool = True) -> None:
        self.compressor, self.device, self.waits = compressor, device, waits
        self.status = new_status(device)
        self._tables = StretchCache(device.torch_device)
        self._shapes: weakref.WeakKeyDictionary[Layout, _Shape] = weakref.WeakKeyDictionary()
        self._drawn: weakref.WeakKeyDictionary[Layout, tuple[DrawKey, Tensor]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def num_values(self, layout: Layout, number: int) -> int:
        """How many numbers the vector of a round has."""
        return self.compressor.num_values(layout, number)

    def encode_values(self, encoding: Encoding, values: Any, factors: Factors) -> None:
        """P = M Q of every matrix; raw segments as they are."""
        layout, source, feedback = encoding.layout, encoding.source, encoding.feedback
        assert feedback is not None, "a compressor of several rounds keeps a residual"
        shape = self._shape(layout)
        self._check(layout, values, 0, feedback)
        self._check_numbers("source", source, layout, encoding.starts)
        rows = self._rows(shape, encoding.starts, feedback)
        tiles = self._tiles(shape, rows)
        start = self.start(layout, shape, rows, encoding.key, factors)
        self._launch(
            "encode",
            layout,
            tiles,
            source,
            layout.dtype.type(encoding.scale),
            feedback.old,
            feedback.new,
            start,
            values,
            layout.dtype.type(feedback.gain),
        )

    def transform_values(self, layout: Layout, summed: Any, values: Any, *, feedback: Feedback) -> None:
        """Orthonormalise P in place, make Q = M' P, leave what is kept of M - P Q' in ``feedback.new``."""
        shape = self._shape(layout)
        self._check(layout, summed, 0, feedback)
        self._check(layout, values, 1, feedback)
        rows = self._rows(shape, np.zeros_like(layout.numels), feedback)
        kept, of_matrices = feedback.new, rows[:, RANK] > 0
        one_each = self._tables.stretches(rows, of_matrices.astype(np.int64), 1)
        self._launch("orthonormalise", layout, one_each, summed, threads=ORTHO_THREADS)
        blocks = np.where(of_matrices, -(-rows[:, COLUMNS] // COLUMNS_TILE) * rows[:, CHUNKS], 0)
        partial = torch.empty(shape.partial, dtype=kept.dtype, device=self.device.torch_device)  # type: ignore[call-overload]
        self._launch("multiply", layout, self._tables.stretches(rows, blocks, 1), kept, summed, partial)
        sizes = rows[:, RANK] * rows[:, COLUMNS]
        gathered = self._tables.stretches(rows, sizes, TILE)
        self._launch("gather", layout, gathered, np.int64(TILE), partial, values)
        gain = layout.dtype.type(feedback.gain)
        tiles = self._tiles(shape, rows)
        self._launch("subtract", layout, tiles, summed, values, feedback.old, kept, gain)

    def decode_values(self, decoding: Decoding, first: Any, second: Any, factors: Factors) -> bool:
        """Write ``scale * P Q'``; keep Q for the next step."""
        layout, target = decoding.layout, decoding.target
        status = new_status(self.device) if self.waits else self.status
        shape = self._shape(layout)
        self._check_numbers("target", target, layout, decoding.starts)
        rows = self._rows(shape, decoding.starts, None)
        self._launch(
            "decode",
            layout,
            self._tiles(shape, rows),
            first,
            second,
            target,
            layout.dtype.type(decoding.scale),
            status,
        )
        if self.compressor.warm_start and shape.matrices:
            kept = second.clone()  # the vector is the next step's too
            for index in shape.matrices:
                begin = int(shape.rows[index, Q])
                size = int(shape.rows[index, RANK] * shape.rows[index, COLUMNS])
                factors.write(layout.segments[index].tensor, kept[begin : begin + size])
        return not (self.waits and int(status[0]))

    # -- where Q begins ----------------------------------------------------------------------------

    def start(self, layout: Layout, shape: _Shape, rows: Table, key: DrawKey, factors: Factors) -> Tensor:
        """Q of the last step; random where there is none, or where it has died (a step without gradients)."""
        drawn = self._draw(layout, shape, key)
        pieces, any_kept = [], False
        for index in shape.matrices:
            begin, size = int(rows[index, Q]), int(rows[index, RANK] * rows[index, COLUMNS])
            name = layout.segments[index].tensor
            kept: Any = factors.read(name) if self.compressor.warm_start else None
            if kept is not None and kept.numel() == size:
                pieces.append(kept.reshape(-1).to(drawn.dtype))
                any_kept = True
            else:
                pieces.append(drawn[begin : begin + size])
        if not any_kept:
            return drawn
        start = torch.empty_like(drawn)
        ranks = np.where(rows[:, RANK] > 0, rows[:, RANK], 0)
        self._launch("start", layout, self._tables.stretches(rows, ranks, 1), torch.cat(pieces), drawn, start)
        return start

    def _draw(self, layout: Layout, shape: _Shape, key: DrawKey) -> Tensor:
        """Random starts, drawn on the host as its twin does; with a warm start once."""
        key = start_key(self.compressor, key)
        with self._lock:
            held = self._drawn.get(layout)
            if held is not None and held[0] == key:
                return held[1]
            numbers = np.empty(shape.second, layout.dtype)
            for index in shape.matrices:
                rank, columns, begin = (int(shape.rows[index, at]) for at in (RANK, COLUMNS, Q))
                drawn = random_start(layout.segments[index].tensor, rank, columns, key)
                numbers[begin : begin + rank * columns] = drawn.reshape(-1)
            tensor = torch.from_numpy(numbers)
            if self.device.torch_device.type == "cuda":
                tensor = tensor.pin_memory().to(self.device.torch_device, non_blocking=True)
            self._drawn[layout] = key, tensor
            return tensor

    # -- tables ------------------------------------------------------------------------------------

    def _shape(self, layout: Layout) -> _Shape:
        with self._lock:
            found = self._shapes.get(layout)
            if found is None:
                found = self._shapes[layout] = _shape_of(layout)
        return found

    def _rows(self, shape: _Shape, starts: Starts, feedback: Feedback | None) -> Table:
        rows = shape.rows.copy()
        rows[:, SOURCE] = starts
        if feedback is not None:
            rows[:, RESIDUAL] = feedback.starts
        return rows

    def _tiles(self, shape: _Shape, rows: Table) -> Stretches:
        lengths = np.where(rows[:, RANK] > 0, rows[:, ROWS], rows[:, COLUMNS])
        return self._tables.stretches(rows, lengths, rows[:, STEP])

    def _launch(self, kernel: str, layout: Layout, made: Stretches, *arguments: Any, threads: int = THREADS) -> None:
        if made.num_tiles:
            self.device.launch(
                FILE,
                f"{kernel}_{suffix(layout)}",
                made.num_tiles,
                threads,
                (made.rows, made.tiles, *arguments),
            )

    # -- arguments ---------------------------------------------------------------------------------

    def _check(self, layout: Layout, values: Any, number: int, feedback: Feedback) -> None:
        size = self.num_values(layout, number)
        if tuple(numbers_on(self.device, f"the vector of round {number}", values, layout).shape) != (size,):
            raise ValueError(f"the vector of round {number} must have {size} elements, got {list(values.shape)}")
        for what, kept in (("old", feedback.old), ("new", feedback.new)):
            self._check_numbers(f"feedback.{what}", kept, layout, feedback.starts)

    def _check_numbers(self, what: str, numbers: Any, layout: Layout, starts: Starts) -> None:
        check_range(what, starts, layout, numbers_on(self.device, what, numbers, layout).numel())


def _shape_of(layout: Layout) -> _Shape:
    rows = np.zeros((len(layout.segments), 10), np.int64)
    matrices = []
    first = second = partial = 0
    counts = zip(layout.segments, layout.counts.tolist(), layout.numels.tolist(), strict=True)
    for index, (segment, rank, numel) in enumerate(counts):
        height, width = matrix_of(segment.shape) if rank else (1, numel)
        chunks = -(-height // ROWS_CHUNK)
        rows[index, [ROWS, COLUMNS, RANK, P, Q]] = height, width, rank, first, second
        rows[index, [PARTIAL, CHUNKS, STEP]] = partial, chunks, _step(width) if rank else TILE
        first += rank * height if rank else numel
        second += rank * width
        partial += chunks * rank * width
        if rank:
            matrices.append(index)
    return _Shape(rows, tuple(matrices), first, second, partial)


def _step(columns: int) -> int:
    """Rows of a tile: one that takes the block, or some for each of its eight warps."""
    return 1 if columns >= WIDE else 8 * min(max(1, 1024 // columns), 8)
