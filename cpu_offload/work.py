"""A layout cut into pieces of work: fixed chunks, so that results never depend on the number of threads."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from espresso.compressors import Layout
from espresso.compressors.draws import tensor_hash
from espresso.cpu_offload.pool import Part

CHUNK = 1 << 16
"""Elements of a chunk: a multiple of every block size; three arrays of it fit the second-level cache."""

FUSED = 1 << 20
"""Segments up to this many elements are encoded whole by one thread, so that a second pass finds the first in cache."""

Table = npt.NDArray[np.int64]

# Columns of the segment table that kernels read, one row per segment.
NUMEL, OFFSET, COUNT, SOURCE, RESIDUAL, HASH, START, FIRST_CHUNK, END_CHUNK = range(9)
NUM_COLUMNS = 9

# Columns of the chunk table: segment, first element and end within the segment.
SEGMENT, LOW, HIGH = range(3)


@dataclass(frozen=True)
class Work:
    """What one layout's encodes and decodes loop over.

    Attributes:
        table: int64[num_segments, NUM_COLUMNS], the columns that do not change between calls filled in.
        chunks: int64[num_chunks, 3] of the compressed segments, in order.
        raw_chunks: the same for segments that travel raw.
        all_chunks: both, in the order of the segments.
        segments: indices of the compressed segments.
        fused: runs of ``segments`` (positions in it) that one thread encodes whole.
        split: positions in ``segments`` of those large enough to be shared by threads.
        tails: the last 8-byte word of every body, where its padding may lie.
    """

    table: Table
    chunks: Table
    raw_chunks: Table
    all_chunks: Table
    segments: Table
    fused: tuple[Part, ...]
    split: tuple[int, ...]
    tails: Table


_CACHE: weakref.WeakKeyDictionary[Layout, Work] = weakref.WeakKeyDictionary()


def work_of(layout: Layout) -> Work:
    """The work of a layout, made once and kept as long as the layout."""
    work = _CACHE.get(layout)
    if work is None:
        work = _CACHE[layout] = _make_work(layout)
    return work


def split_parts(num_items: int, num_parts: int) -> list[Part]:
    """Cut ``range(num_items)`` into at most ``num_parts`` even runs."""
    num_parts = min(num_items, num_parts)
    return [(i * num_items // num_parts, (i + 1) * num_items // num_parts) for i in range(num_parts)]


def _make_work(layout: Layout) -> Work:
    table = np.zeros((len(layout.segments), NUM_COLUMNS), dtype=np.int64)
    table[:, NUMEL], table[:, OFFSET], table[:, COUNT] = layout.numels, layout.offsets, layout.counts
    table[:, HASH] = [tensor_hash(segment.tensor) for segment in layout.segments]
    table[:, START] = [segment.tensor_start for segment in layout.segments]
    rows: list[tuple[int, int, int]] = []
    raw_rows: list[tuple[int, int, int]] = []
    all_rows: list[tuple[int, int, int]] = []
    for index, numel in enumerate(layout.numels.tolist()):
        pieces = [(index, low, min(low + CHUNK, numel)) for low in range(0, numel, CHUNK)]
        wanted = raw_rows if layout.raw[index] else rows
        table[index, FIRST_CHUNK], table[index, END_CHUNK] = len(wanted), len(wanted) + len(pieces)
        wanted += pieces
        all_rows += pieces
    segments = np.flatnonzero(~layout.raw).astype(np.int64)
    fused, split = _group(layout.numels[segments].tolist())
    ends = np.append(layout.offsets, layout.num_bytes)[1:]
    tails = (ends[layout.numels > 0] // 8 - 1).astype(np.int64)
    return Work(table, _chunks(rows), _chunks(raw_rows), _chunks(all_rows), segments, fused, split, tails)


def _chunks(rows: Sequence[tuple[int, int, int]]) -> Table:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _group(numels: Sequence[int]) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Runs of small segments that together reach half of FUSED, and the large segments."""
    fused: list[Part] = []
    split: list[int] = []
    first, total = 0, 0
    for position, numel in enumerate(numels):
        large = numel > FUSED
        if total and (large or total + numel > FUSED // 2):
            fused.append((first, position))
            first, total = position, 0
        if large:
            split.append(position)
            first = position + 1
        elif numel:
            total += numel
    if first < len(numels) and total:
        fused.append((first, len(numels)))
    return tuple(fused), tuple(split)
