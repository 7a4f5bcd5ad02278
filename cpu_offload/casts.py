"""No compression and casts on the host. One pass to encode, one over the target to decode.

Casts work in integer arithmetic: Numba has no half precision, and this vectorises everywhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Array, Encoding, Layout
from espresso.compressors.casts import Cast
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, SummableHostCodec
from espresso.cpu_offload.dither import dither_cast
from espresso.cpu_offload.jit import Scalar, kernel, room
from espresso.cpu_offload.kernels import BLOCK, all_finite, clear_block, fetch_block, fill_q
from espresso.cpu_offload.work import HIGH, LOW, OFFSET, RESIDUAL, SEGMENT, SOURCE, Table

Bits16 = npt.NDArray[np.uint16]
Bits32 = npt.NDArray[np.uint32]

_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)


@kernel
def narrow(q: Array, single: npt.NDArray[np.float32], bits: Bits32) -> None:
    """``single = float32(q)`` (``bits`` is its view), rounded to odd where q is wider: so the next is right."""
    if q.itemsize == 4:
        for i in range(len(q)):
            single[i] = q[i]
        return
    for i in range(len(q)):
        single[i] = np.float32(q[i])
        inexact = np.float64(single[i]) != q[i] and q[i] == q[i]
        toward_zero = abs(np.float64(single[i])) > abs(q[i])
        bits[i] = np.uint32((bits[i] - np.uint32(toward_zero)) | np.uint32(inexact))


@kernel
def to_half(single: npt.NDArray[np.float32], bits: Bits32, out: Bits16) -> None:
    """IEEE half precision, nearest even; subnormals by adding 0.5, whose last bit weighs what a half's last weighs."""
    for i in range(len(out)):
        sign = np.uint32(bits[i] & _SIGN)
        size = np.uint32(bits[i] ^ sign)
        normal = np.uint32((size - np.uint32(0x37FFF001) + ((size >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13))
        shifted = np.float32(abs(single[i]) + np.float32(0.5))
        tiny = np.uint32(np.float32(shifted).view(np.uint32) - np.uint32(0x3F000000))
        huge = np.uint32(0x7E00) if size > _INFINITY else np.uint32(0x7C00)
        half = tiny if size < np.uint32(0x38800000) else (huge if size >= np.uint32(0x47800000) else normal)
        out[i] = np.uint16(half | (sign >> np.uint32(16)))


@kernel
def from_half(half: Bits16, bits: Bits32) -> None:
    """Half precision to float32 bits: rebiased by a multiplication, which is exact for subnormals as well."""
    for i in range(len(half)):
        wide = np.uint32(half[i])
        scaled = np.uint32((wide & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
        size = np.float32(scaled).view(np.uint32)
        if scaled >= np.float32(65536.0):
            size = np.uint32(size | _INFINITY)
        bits[i] = np.uint32(size | np.uint32((wide & np.uint32(0x8000)) << np.uint32(16)))


@kernel
def to_bfloat(bits: Bits32, out: Bits16) -> None:
    """The upper half of a float32, nearest even."""
    for i in range(len(out)):
        rounded = np.uint32(bits[i] + np.uint32(0x7FFF) + np.uint32((bits[i] >> np.uint32(16)) & np.uint32(1)))
        is_nan = np.uint32(bits[i] & ~_SIGN) > _INFINITY
        kept = np.uint32(bits[i] | np.uint32(0x400000)) if is_nan else rounded
        out[i] = np.uint16(kept >> np.uint32(16))


@kernel
def widen(short: Bits16, bits: Bits32, is_half: bool) -> None:
    """16-bit numbers to float32 bits."""
    if is_half:
        from_half(short, bits)
    else:
        for i in range(len(short)):
            bits[i] = np.uint32(short[i]) << np.uint32(16)


@kernel
def encode_casts(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, new: Array,
    has_feedback: bool, shorts: Bits16, is_half: bool,
) -> Scalar:  # fmt: skip
    """Cast q into ``shorts``; residual = what the cast lost. One pass. False if a result is not finite."""
    q_buffer = room(BLOCK, source.dtype)
    single_buffer = room(BLOCK, np.float32)
    infinity = np.uint16(0x7C00 if is_half else 0x7F80)
    worst = np.uint16(0)
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], BLOCK):
            num = min(BLOCK, chunks[chunk, HIGH] - low)
            q, single = q_buffer[:num], single_buffer[:num]
            bits = single.view(np.uint32)
            fill_q(q, source, row[SOURCE] + low, scale, old, row[RESIDUAL] + low, num, has_feedback)
            narrow(q, single, bits)
            out = shorts[row[OFFSET] // 2 + low :][:num]
            if is_half:
                to_half(single, bits, out)
            else:
                to_bfloat(bits, out)
            for i in range(num):
                worst = max(worst, np.uint16(out[i] & infinity))
            if has_feedback:
                widen(out, bits, is_half)
                kept = new[row[RESIDUAL] + low :][:num]
                for i in range(num):
                    kept[i] = q[i] - single[i]
    return worst != infinity


@kernel
def decode_casts(
    table: Table, chunks: Table, first: int, end: int, target: Array, scale: float, num_rows: int, row_bytes: int,
    shorts: Bits16, is_half: bool,
) -> None:  # fmt: skip
    """``target = scale * sum over rows`` of 16-bit bodies, rows in order. One pass over the target."""
    buffer = room(BLOCK, np.float32)
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], BLOCK):
            num = min(BLOCK, chunks[chunk, HIGH] - low)
            single = buffer[:num]
            bits = single.view(np.uint32)
            out = target[row[SOURCE] + low :][:num]
            fetch_block(target, row[SOURCE] + low + BLOCK, BLOCK)
            if not num_rows:
                clear_block(out, 0, num)
            for source in range(num_rows):
                widen(shorts[(source * row_bytes + row[OFFSET]) // 2 + low :][:num], bits, is_half)
                if source:
                    for i in range(num):
                        out[i] += single[i]
                else:
                    for i in range(num):
                        out[i] = single[i]
            for i in range(num):
                out[i] *= scale


class HostNone(SummableHostCodec):
    """``none``, as payloads or as a vector: all segments are raw."""

    def encode_vector(self, call: EncodeCall) -> bool:
        """One pass."""
        return self.encode_raw_segments(call)

    def decode_vector(self, call: DecodeCall) -> bool:
        """One pass, and one over the vector."""
        self.decode_raw_segments(call)
        return bool(all_finite(call.bits, call.infinity))


class HostCast(SummableHostCodec):
    """``fp16`` and ``bf16``; an overflow counts as non-finite."""

    compressor: Cast

    def value_dtype(self, layout: Layout) -> str:
        """``float16`` or ``bfloat16``."""
        return self.compressor.value_dtype

    def encode_bodies(self, call: EncodeCall) -> bool:
        """Cast the compressed segments."""
        return self._encode(call, call.work.chunks)

    def decode_bodies(self, call: DecodeCall) -> None:
        """Sum the compressed segments."""
        self._decode(call, call.work.chunks)

    def encode_vector(self, call: EncodeCall) -> bool:
        """Cast all segments."""
        finite = self._encode(call, call.work.all_chunks)
        self.filter_residuals(call, call.work.all_chunks)
        return finite

    def decode_vector(self, call: DecodeCall) -> bool:
        """Widen all segments."""
        self._decode(call, call.work.all_chunks)
        infinity = np.uint16(0x7C00 if self._is_half else 0x7F80)
        return bool(all_finite(call.payload.view(np.uint16), infinity))

    def dither(self, encoding: Encoding) -> None:
        """As :class:`espresso.compressors.base.DitheringCodec` says."""
        dither_cast(self, encoding, self.compressor.fraction)

    @property
    def _is_half(self) -> bool:
        return self.compressor.value_dtype == "float16"

    def _encode(self, call: EncodeCall, chunks: Table) -> bool:
        return all(self.share(encode_casts, call, chunks, *call.given, call.payload.view(np.uint16), self._is_half))

    def _decode(self, call: DecodeCall, chunks: Table) -> None:
        self.share(decode_casts, call, chunks, *call.given, call.payload.view(np.uint16), self._is_half)
