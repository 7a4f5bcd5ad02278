"""What every host codec shares: argument checks, the header, raw segments, and the split over a pool.

An algorithm implements two hooks on :class:`EncodeCall` and :class:`DecodeCall`, which hold the arrays as
kernels take them: flat, typed, contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import (
    Array,
    Bytes,
    Compressor,
    Decoding,
    DrawKey,
    Encoding,
    Feedback,
    Layout,
    PayloadError,
    Starts,
)
from espresso.compressors.payload import read_header, write_header
from espresso.cpu_offload.kernels import decode_raw, encode_raw, fill_nan, filter_chunks
from espresso.cpu_offload.pool import WorkerPool
from espresso.cpu_offload.work import RESIDUAL, SOURCE, Table, Work, split_parts, work_of

PARTS_PER_THREAD = 4
"""More parts than threads even out a thread that was interrupted."""

STREAM_FROM_BYTES = 1 << 22
"""A layout of this size or more writes its residuals past the caches: backward evicts them anyway."""


@dataclass(frozen=True, slots=True)
class EncodeCall:
    """One encode as kernels see it. ``old`` and ``new`` are dummies when ``has_feedback`` is false.

    ``stream``: residuals are too large to be still in a cache when the next iteration reads them.
    """

    layout: Layout
    work: Work
    table: Table
    source: Array
    scale: Any
    old: Array
    new: Array
    has_feedback: bool
    stream: bool
    payload: Bytes
    numbers: Array
    words: npt.NDArray[np.uint32]
    bits: Array
    infinity: Any
    key: DrawKey
    gain: Any


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """One decode as kernels see it: ``num_rows`` payloads, ``row_bytes`` apart in flat views."""

    layout: Layout
    work: Work
    table: Table
    target: Array
    scale: Any
    num_rows: int
    row_bytes: int
    payload: Bytes
    numbers: Array
    words: npt.NDArray[np.uint32]
    key: DrawKey


class HostCodec:
    """A compressor on the host; :class:`espresso.compressors.Codec` says what the methods promise.

    Args:
        compressor: its parameters.
        pool: shares large calls out over threads; None runs on the calling thread. Results are the same.
    """

    fuses_gain: ClassVar[bool] = False
    """Whether ``encode_bodies`` writes residuals with their gain; else one more pass does."""

    def __init__(self, compressor: Compressor, pool: WorkerPool | None = None) -> None:
        self.compressor = compressor
        self.pool = pool

    def encode(self, encoding: Encoding, payload: Bytes) -> bool:
        """Encode ``scale * source + residual``; fused, the passes over memory are counted per algorithm."""
        layout = encoding.layout
        if payload.dtype != np.uint8 or payload.shape != (layout.num_bytes,) or not payload.flags.c_contiguous:
            raise ValueError(
                f"payload must be contiguous uint8[{layout.num_bytes}], got {payload.dtype}{list(payload.shape)}"
            )
        work = work_of(layout)
        payload.view(np.uint64)[work.tails] = 0
        table = fill_table("source", layout, work, encoding.source, encoding.starts, encoding.feedback)
        numbers, bits = payload.view(layout.dtype), payload.view(bits_dtype(layout))
        call = encode_call(encoding, work, table, payload, numbers, payload.view(np.uint32), bits)
        finite = self.encode_raw_segments(call)
        if work.segments.size:
            finite = self.encode_bodies(call) and finite
            if not self.fuses_gain:
                self.filter_residuals(call, work.chunks)
        write_header(payload, layout, finite)
        return finite

    def decode(self, decoding: Decoding, payloads: npt.NDArray[np.uint8]) -> bool:
        """Write ``scale * sum of the decoded payloads``; one pass over the target, rows summed in order."""
        layout = decoding.layout
        if payloads.dtype != np.uint8 or payloads.ndim != 2 or (payloads.size and payloads.strides[1] != 1):
            raise ValueError(f"payloads must be uint8[rows, {layout.num_bytes}] with contiguous rows")
        work = work_of(layout)
        table = fill_table("target", layout, work, decoding.target, decoding.starts)
        finite = all([read_header(row, layout) for row in payloads])
        if not finite:
            fill_nan(table, decoding.target)
            return False
        flat, row_bytes = flat_rows(payloads)
        numbers, words = flat.view(layout.dtype), flat.view(np.uint32)
        call = decode_call(decoding, work, table, len(payloads), row_bytes, flat, numbers, words)
        self.decode_raw_segments(call)
        if work.segments.size:
            self.decode_bodies(call)
        return True

    def encode_bodies(self, call: EncodeCall) -> bool:
        """Encode the compressed segments; return whether all was finite."""
        raise NotImplementedError

    def decode_bodies(self, call: DecodeCall) -> None:
        """Decode and sum the compressed segments; raise PayloadError for a malformed body."""
        raise NotImplementedError

    def run_chunks(self, kernel: Callable[[int, int], Any], num_chunks: int) -> list[Any]:
        """Call ``kernel(first, end)`` over runs of chunks, shared out over the pool."""
        if self.pool is None or self.pool.num_threads == 1:
            return [kernel(0, num_chunks)] if num_chunks else []
        return self.pool.run(kernel, split_parts(num_chunks, PARTS_PER_THREAD * self.pool.num_threads))

    def run_segments(self, work: Work, fused: Callable[[int, int], Any], split: Callable[[int], Any]) -> list[Any]:
        """Run whole segments in parallel with ``fused(first, end)``, large ones one by one with ``split(position)``.

        One thread takes everything in a single fused call.
        """
        if self.pool is None or self.pool.num_threads == 1:
            return [fused(0, work.segments.size)]
        return [split(position) for position in work.split] + self.pool.run(fused, work.fused)

    def encode_raw_segments(self, call: EncodeCall) -> bool:
        """Copy the raw segments; return whether all was finite."""
        chunks = call.work.raw_chunks

        def run_part(first: int, end: int) -> bool:
            return bool(
                encode_raw(
                    call.table, chunks, first, end, call.source, call.scale, call.old, call.new,
                    call.has_feedback, call.numbers, call.bits, call.infinity, call.gain,
                )
            )  # fmt: skip

        return all(self.run_chunks(run_part, len(chunks)))

    def filter_residuals(self, call: EncodeCall, chunks: Table) -> None:
        """The gain of :class:`espresso.compressors.Feedback`, for residuals that were written without."""
        if call.has_feedback and call.gain != 1:
            self.run_chunks(
                lambda first, end: filter_chunks(call.table, chunks, first, end, call.old, call.new, call.gain),
                len(chunks),
            )

    def decode_raw_segments(self, call: DecodeCall) -> None:
        """Sum the raw segments."""
        chunks = call.work.raw_chunks

        def run_part(first: int, end: int) -> None:
            decode_raw(
                call.table,
                chunks,
                first,
                end,
                call.target,
                call.scale,
                call.num_rows,
                call.row_bytes,
                call.numbers,
            )

        self.run_chunks(run_part, len(chunks))


def encode_call(
    encoding: Encoding, work: Work, table: Table, payload: Bytes, numbers: Array, words: Array, bits: Array
) -> EncodeCall:
    """An encode into a payload or a vector."""
    layout, feedback = encoding.layout, encoding.feedback
    return EncodeCall(
        layout=layout,
        work=work,
        table=table,
        source=encoding.source,
        scale=layout.dtype.type(encoding.scale),
        old=encoding.source if feedback is None else feedback.old,
        new=np.empty(0, layout.dtype) if feedback is None else feedback.new,
        has_feedback=feedback is not None,
        stream=streams(layout),
        payload=payload,
        numbers=numbers,
        words=words,
        bits=bits,
        infinity=infinity_bits(layout),
        key=encoding.key,
        gain=layout.dtype.type(1.0 if feedback is None else feedback.gain),
    )


def decode_call(
    decoding: Decoding, work: Work, table: Table, num_rows: int, row_bytes: int, payload: Bytes, numbers: Array,
    words: Array,
) -> DecodeCall:  # fmt: skip
    """A decode of payloads or of a vector."""
    layout = decoding.layout
    return DecodeCall(
        layout=layout,
        work=work,
        table=table,
        target=decoding.target,
        scale=layout.dtype.type(decoding.scale),
        num_rows=num_rows,
        row_bytes=row_bytes,
        payload=payload,
        numbers=numbers,
        words=words,
        key=decoding.key,
    )


def streams(layout: Layout) -> bool:
    """Whether residuals of this layout are written past the caches."""
    return layout.num_elements * layout.dtype.itemsize >= STREAM_FROM_BYTES


def bits_dtype(layout: Layout) -> type[np.uint32] | type[np.uint64]:
    """The unsigned type as wide as the layout's numbers."""
    return np.uint32 if layout.dtype.itemsize == 4 else np.uint64


def infinity_bits(layout: Layout) -> Any:
    """The bit pattern of infinity: magnitudes from here on are not finite."""
    return layout.dtype.type(np.inf).view(bits_dtype(layout))


def check_array(what: str, array: Array, layout: Layout) -> None:
    """Raise ValueError unless kernels can take the array."""
    if array.dtype != layout.dtype or array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(
            f"{what} must be a contiguous 1-D {layout.dtype} array, got {array.dtype}{list(array.shape)}"
            f" with strides {array.strides}"
        )


def fill_table(
    what: str, layout: Layout, work: Work, array: Array, starts: Starts, feedback: Feedback | None = None
) -> Table:
    """The segment table of one call; checks that every segment lies inside its arrays, since kernels do not."""
    check_array(what, array, layout)
    check_range("starts", starts, layout, array.size)
    table = work.table.copy()
    table[:, SOURCE] = starts
    if feedback is not None:
        check_array("feedback.old", feedback.old, layout)
        check_array("feedback.new", feedback.new, layout)
        check_range("feedback.starts", feedback.starts, layout, min(feedback.old.size, feedback.new.size))
        table[:, RESIDUAL] = feedback.starts
    return table


def check_range(what: str, starts: Starts, layout: Layout, size: int) -> None:
    """Raise ValueError unless every ``starts[i] + numels[i]`` stays inside ``size``."""
    if starts.shape != layout.numels.shape:
        raise ValueError(f"{what} has shape {starts.shape} for {len(layout.segments)} segments")
    bad = np.flatnonzero((starts < 0) | (starts + layout.numels > size))
    if bad.size:
        index = int(bad[0])
        raise ValueError(
            f"{what}[{index}] = {starts[index]}: segment {index} of {layout.numels[index]} elements"
            f" ends outside its array of {size}"
        )


def flat_rows(payloads: npt.NDArray[np.uint8]) -> tuple[Bytes, int]:
    """A flat view over all rows, gaps between them included, and the distance of rows in bytes."""
    rows, width = payloads.shape
    stride = payloads.strides[0] if rows > 1 else width
    if stride % 8 or stride < 0 or payloads.ctypes.data % 8:
        raise ValueError(f"payload rows must be 8-byte aligned and ascending, got a stride of {stride} bytes")
    size = stride * (rows - 1) + width if rows else 0
    return np.lib.stride_tricks.as_strided(payloads.reshape(-1)[:0] if not rows else payloads[0], (size,), (1,)), stride


def malformed(code: int, layout: Layout, what: str) -> PayloadError:
    """The error for a kernel's code ``1 + row * num_segments + segment``."""
    row, segment = divmod(int(code) - 1, len(layout.segments))
    return PayloadError(f"payload {row}, segment {segment} ({layout.segments[segment].tensor!r}): {what}")
