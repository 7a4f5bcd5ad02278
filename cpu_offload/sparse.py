"""Sampled sparsifiers on the host: what top-k and DGC share.

Encode makes two passes: a sample that sets a threshold (a hundredth of a pass), and one pass over the input that
collects what passes and writes the rest to the residual. The top k of the few that passed are sent; those few of them
that are not go back to the residual. Too few: the threshold falls and the pass repeats. A fixed threshold is raised
where a small sample says that more than k would pass; too few then, and the pass is made with the fixed one.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np

from espresso.compressors.base import Array
from espresso.compressors.sparse import RUN, Selection, Sparsifier
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, HostCodec
from espresso.cpu_offload.pool import WorkerPool
from espresso.cpu_offload.sparse_kernels import (
    emit_segment,
    encode_segments,
    exact_threshold,
    filter_chunks,
    first_threshold,
    is_enough,
    lowered,
    scatter_chunks,
)
from espresso.cpu_offload.work import COUNT, END_CHUNK, FIRST_CHUNK, NUMEL


class Scratch(threading.local):
    """Buffers of one thread, kept between calls: fresh pages would cost more than the arithmetic.

    ``index`` and ``value`` hold a segment's candidates: as long as the longest segment, touched only where used.
    """

    def __init__(self) -> None:
        self.index = np.empty(0, np.uint32)
        self.value: Array = np.empty(0, np.uint32)
        self.chosen: Array = np.empty(0, np.uint32)
        self.histogram = np.empty(1 << 11, np.int64)

    def reserve(self, numel: int, dtype: np.dtype[Any]) -> None:
        """Make room for the candidates of a segment."""
        if self.index.size < numel + RUN or self.value.dtype != dtype:
            self.index = np.empty(numel + RUN, np.uint32)
            self.value = np.empty(numel + RUN, dtype)
            self.chosen = np.empty(numel + RUN, dtype)


class HostSparse(HostCodec):
    """``topk``, ``dgc`` and ``threshold`` with the residual fused."""

    fuses_gain: ClassVar[bool] = True
    malformed_body: ClassVar[str] = "its count or indices are out of range or out of order"

    def __init__(self, compressor: Sparsifier, pool: WorkerPool | None = None) -> None:
        super().__init__(compressor, pool)
        self._selection = compressor.selection()
        self._scratch = Scratch()

    def encode_bodies(self, call: EncodeCall) -> bool:
        """Whole segments where they are small; large ones share the pass over the input."""
        work, how = call.work, self._selection
        found = np.empty(len(work.chunks), dtype=np.int64)

        def fused(first: int, end: int) -> bool:
            scratch = self._scratch
            scratch.reserve(int(call.table[work.segments[first:end], NUMEL].max()), call.bits.dtype)
            return bool(
                encode_segments(
                    call.table, work.chunks, work.segments, first, end, *call.given, call.stream, call.magnitude,
                    call.infinity, how.part, how.slack, how.enough, how.attempts, how.exact, threshold_bits(call, how),
                    call.key.step, scratch.index, scratch.value, found, scratch.chosen, scratch.histogram, call.words,
                    call.bits, call.gain,
                )
            )  # fmt: skip

        def split(position: int) -> bool:
            return self._encode_large(call, int(work.segments[position]), found)

        return all(self.run_segments(work, fused, split))

    def decode_bodies(self, call: DecodeCall) -> None:
        """Zero-fill and scatter-add, chunk by chunk: one pass over the target and one over the slots."""
        self.share_decode(scatter_chunks, call, call.numbers, call.words)

    def _encode_large(self, call: EncodeCall, segment: int, found: Any) -> bool:
        """``encode_segments`` for one segment, with the filter shared out over the pool."""
        how, row = self._selection, call.table[segment]
        mine = slice(int(row[FIRST_CHUNK]), int(row[END_CHUNK]))
        chunks, found = call.work.chunks[mine], found[mine]
        scratch, magnitude, bits = self._scratch, call.magnitude, call.bits
        scratch.reserve(int(row[NUMEL]), bits.dtype)
        index, value = scratch.index, scratch.value  # the pool's threads have scratch of their own
        fixed = threshold_bits(call, how)
        threshold = first_threshold(
            row, call.source, call.scale, call.old, call.has_feedback, how.part, how.slack, fixed, call.key.step,
            scratch.chosen, magnitude, scratch.histogram,
        )  # fmt: skip
        for attempt in range(how.attempts + 2):
            bound = bits.dtype.type(threshold)
            self.share(
                filter_chunks, call, chunks, *call.given, call.stream, bound, magnitude, index, value, found, call.gain
            )
            if is_enough(int(found.sum()), row[COUNT], how.enough, fixed, bound):
                break
            if fixed:
                threshold = fixed
            elif attempt < how.attempts:
                threshold = lowered(bound, scratch.chosen[:1], call.source)
            elif how.exact:
                threshold = exact_threshold(
                    row, call.source, call.scale, call.old, call.has_feedback, magnitude, scratch.chosen,
                    scratch.histogram,
                )  # fmt: skip
            else:
                break
        return bool(
            emit_segment(
                row, chunks, 0, len(chunks), call.old, call.new, call.has_feedback, magnitude, call.infinity, index,
                value, found, scratch.chosen, scratch.histogram, call.words, bits, call.gain,
            )
        )  # fmt: skip


def threshold_bits(call: EncodeCall, how: Selection) -> Any:
    """The fixed threshold as bits; 0 if there is none. At least 1 otherwise, so that zeros never pass."""
    bits = call.layout.dtype.type(how.threshold).view(call.bits.dtype)
    return max(bits, call.bits.dtype.type(1)) if how.threshold else bits
