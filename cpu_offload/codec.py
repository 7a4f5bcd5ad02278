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
    Layout,
    PayloadError,
    Starts,
)
from espresso.compressors.payload import check_range, read_header, write_header
from espresso.cpu_offload.kernels import decode_raw, encode_raw, fill_nan, filter_chunks
from espresso.cpu_offload.pool import WorkerPool
from espresso.cpu_offload.work import OFFSET, RESIDUAL, SOURCE, Table, Work, split_parts, work_of

PARTS_PER_THREAD = 4
"""More parts than threads even out a thread that was interrupted."""

STREAM_FROM_BYTES = 1 << 22
"""A layout of this size or more writes its residuals past the caches: backward evicts them anyway."""

STREAM_SOON_BYTES = 1 << 20
"""Likewise of signs and sparsifiers. Buckets are cut into partitions of a little less than 4 MB, whose numbers are in
no cache: signs work at .8 of a copy's rate this way and at .56 the other, ``dgc`` at .52 and .47. 8 bits are slower."""

_BITS = {4: np.uint32, 8: np.uint64}
_INFINITY = {4: np.float32(np.inf).view(np.uint32), 8: np.float64(np.inf).view(np.uint64)}
_MAGNITUDE = {4: np.uint32((1 << 31) - 1), 8: np.uint64((1 << 63) - 1)}


@dataclass(frozen=True, slots=True)
class Call:
    """What kernels see of an encode or a decode.

    Attributes:
        table: one row a segment: where its numbers, its residual and its body begin.
        payload: of an encode, or all rows of a decode with the gaps between them; or a vector's bytes.
    """

    layout: Layout
    work: Work
    table: Table
    payload: Bytes
    key: DrawKey

    @property
    def numbers(self) -> Array:
        """The payload as numbers of the layout's dtype."""
        return self.payload.view(self.layout.dtype)

    @property
    def words(self) -> npt.NDArray[np.uint32]:
        """The payload in words of 32 bits."""
        return self.payload.view(np.uint32)

    @property
    def bits(self) -> Array:
        """The payload's numbers as unsigned integers of their width."""
        return self.payload.view(_BITS[self.layout.dtype.itemsize])

    @property
    def infinity(self) -> Any:
        """The bit pattern of infinity: magnitudes from here on are not finite."""
        return _INFINITY[self.layout.dtype.itemsize]

    @property
    def magnitude(self) -> Any:
        """The mask that takes the sign of a bit pattern away."""
        return _MAGNITUDE[self.layout.dtype.itemsize]


@dataclass(frozen=True, slots=True)
class EncodeCall(Call):
    """One encode. ``old`` and ``new`` are dummies when ``has_feedback`` is false.

    Attributes:
        stream: whether residuals are too large to be still in a cache when the next iteration reads them.
    """

    source: Array
    scale: Any
    old: Array
    new: Array
    has_feedback: bool
    gain: Any
    stream: bool

    @classmethod
    def of(cls, encoding: Encoding, payload: Bytes, stream_from: int) -> EncodeCall:
        """Checks that every segment lies inside its arrays, since kernels do not."""
        layout, feedback, source = encoding.layout, encoding.feedback, encoding.source
        work = work_of(layout)
        table = fill_table("source", layout, work, source, encoding.starts)
        old, new, gain = source, np.empty(0, layout.dtype), 1.0
        if feedback is not None:
            old, new, gain = feedback.old, feedback.new, feedback.gain
            check_array("feedback.old", old, layout)
            check_array("feedback.new", new, layout)
            check_range("feedback.starts", feedback.starts, layout, min(old.size, new.size))
            table[:, RESIDUAL] = feedback.starts
        kind = layout.dtype.type
        return cls(
            layout, work, table, payload, encoding.key, source, kind(encoding.scale), old, new, feedback is not None,
            kind(gain), layout.num_elements * layout.dtype.itemsize >= stream_from,
        )  # fmt: skip

    @property
    def given(self) -> tuple[Any, ...]:
        """What encode kernels take behind the chunks: source, scale, old, new, has_feedback."""
        return self.source, self.scale, self.old, self.new, self.has_feedback


@dataclass(frozen=True, slots=True)
class DecodeCall(Call):
    """One decode: ``num_rows`` payloads, ``row_bytes`` apart."""

    target: Array
    scale: Any
    num_rows: int
    row_bytes: int

    @property
    def given(self) -> tuple[Any, ...]:
        """What decode kernels take behind the chunks: target, scale, num_rows, row_bytes."""
        return self.target, self.scale, self.num_rows, self.row_bytes


class HostCodec:
    """A compressor on the host; :class:`espresso.compressors.Codec` says what the methods promise.

    Args:
        compressor: its parameters.
        pool: shares large calls out over threads; None runs on the calling thread. Results are the same.
    """

    fuses_gain: ClassVar[bool] = False
    """Whether ``encode_bodies`` writes residuals with their gain; else one more pass does."""

    stream_from: ClassVar[int] = STREAM_FROM_BYTES

    malformed_body: ClassVar[str] = "its body is malformed"
    """What is wrong with a body that a kernel refuses."""

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
        call = EncodeCall.of(encoding, payload, self.stream_from)
        payload.view(np.uint64)[call.work.tails] = 0
        finite = self.encode_raw_segments(call)
        if call.work.segments.size:
            finite = self.encode_bodies(call) and finite
            if not self.fuses_gain:
                self.filter_residuals(call, call.work.chunks)
        write_header(payload, layout, finite)
        return finite

    def decode(self, decoding: Decoding, payloads: npt.NDArray[np.uint8]) -> bool:
        """Write ``scale * sum of the decoded payloads``; one pass over the target, rows summed in order."""
        layout, target = decoding.layout, decoding.target
        if payloads.dtype != np.uint8 or payloads.ndim != 2 or (payloads.size and payloads.strides[1] != 1):
            raise ValueError(f"payloads must be uint8[rows, {layout.num_bytes}] with contiguous rows")
        work = work_of(layout)
        table = fill_table("target", layout, work, target, decoding.starts)
        finite = all([read_header(row, layout) for row in payloads])
        if not finite:
            fill_nan(table, target)
            return False
        flat, row_bytes = flat_rows(payloads)
        scale = layout.dtype.type(decoding.scale)
        call = DecodeCall(layout, work, table, flat, decoding.key, target, scale, len(payloads), row_bytes)
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

    def share(self, kernel: Callable[..., Any], call: Call, chunks: Table, *arguments: Any) -> list[Any]:
        """Call ``kernel(table, chunks, first, end, *arguments)`` over runs of chunks, shared out over the pool."""
        return self.run_chunks(lambda first, end: kernel(call.table, chunks, first, end, *arguments), len(chunks))

    def share_decode(self, kernel: Callable[..., Any], call: DecodeCall, *arguments: Any) -> None:
        """The same over the compressed segments, for kernels that answer 0 or the code of a malformed body.

        Raises:
            PayloadError: a body is malformed; names the payload and the segment.
        """
        code = max(self.share(kernel, call, call.work.chunks, *call.given, *arguments), default=0)
        if code:
            raise malformed(code, call.layout, self.malformed_body)

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
        return not len(chunks) or all(
            self.share(encode_raw, call, chunks, *call.given, call.numbers, call.bits, call.infinity, call.gain)
        )

    def filter_residuals(self, call: EncodeCall, chunks: Table) -> None:
        """The gain of :class:`espresso.compressors.Feedback`, for residuals that were written without."""
        if call.has_feedback and call.gain != 1:
            self.share(filter_chunks, call, chunks, call.old, call.new, call.gain)

    def decode_raw_segments(self, call: DecodeCall) -> None:
        """Sum the raw segments."""
        if len(call.work.raw_chunks):
            self.share(decode_raw, call, call.work.raw_chunks, *call.given, call.numbers)


def check_array(what: str, array: Array, layout: Layout) -> None:
    """Raise ValueError unless kernels can take the array."""
    if array.dtype != layout.dtype or array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(
            f"{what} must be a contiguous 1-D {layout.dtype} array, got {array.dtype}{list(array.shape)}"
            f" with strides {array.strides}"
        )


def fill_table(what: str, layout: Layout, work: Work, array: Array, starts: Starts) -> Table:
    """The segment table of one call."""
    check_array(what, array, layout)
    check_range("starts", starts, layout, array.size)
    table = work.table.copy()
    table[:, SOURCE] = starts
    return table


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


class SummableHostCodec(HostCodec):
    """:class:`espresso.compressors.SummableCodec` on the host.

    The vector has neither header nor table, numbers only: segment after segment, raw ones included.
    """

    def segment_values(self, layout: Layout) -> Starts:
        """How many numbers each segment has in the vector."""
        return layout.numels

    def value_dtype(self, layout: Layout) -> str:
        """The numbers' type; the layout's own unless a codec says otherwise."""
        return layout.dtype.name

    def num_values(self, layout: Layout) -> int:
        """The vector's length."""
        return int(self.segment_values(layout).sum())

    def encode_values(self, encoding: Encoding, values: Array) -> bool:
        """Encode ``scale * source + residual`` into the vector; returns whether all of it is finite."""
        self._check_values(encoding.layout, values)
        call = EncodeCall.of(encoding, values.view(np.uint8), self.stream_from)
        self._pack(encoding.layout, call.table, values)
        return self.encode_vector(call)

    def decode_values(self, decoding: Decoding, values: Array) -> bool:
        """Write ``scale * decoded``; returns whether the vector is finite."""
        layout = decoding.layout
        self._check_values(layout, values)
        work, target, scale = work_of(layout), decoding.target, layout.dtype.type(decoding.scale)
        table = fill_table("target", layout, work, target, decoding.starts)
        self._pack(layout, table, values)
        flat = values.view(np.uint8)
        return self.decode_vector(DecodeCall(layout, work, table, flat, decoding.key, target, scale, 1, flat.size))

    def encode_vector(self, call: EncodeCall) -> bool:
        """Encode every segment, raw ones included, at ``table[:, OFFSET]`` of the vector."""
        raise NotImplementedError

    def decode_vector(self, call: DecodeCall) -> bool:
        """The reverse; returns whether the vector is finite."""
        raise NotImplementedError

    def _pack(self, layout: Layout, table: Table, values: Array) -> None:
        ends = np.cumsum(self.segment_values(layout))
        table[1:, OFFSET] = ends[:-1] * values.itemsize
        table[:1, OFFSET] = 0

    def _check_values(self, layout: Layout, values: Array) -> None:
        kind: Any = self.value_dtype(layout)
        wanted = np.dtype(np.uint16 if kind == "bfloat16" else kind)
        size = self.num_values(layout)
        if values.dtype != wanted or values.shape != (size,) or not values.flags.c_contiguous:
            raise ValueError(
                f"values must be contiguous {wanted}[{size}] ({kind}), got {values.dtype}{list(values.shape)}"
            )
