"""Stochastic quantizers on the host. Body, formulas and draws: :mod:`espresso.compressors.levels`.

Encode makes one pass: a block stays in the first-level cache between its norm and its codes.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Array, Bytes, Encoding
from espresso.compressors.blockwise import MAX_BLOCK, NEARLY, TINY
from espresso.compressors.draws import rank_salt
from espresso.compressors.error_feedback import ErrorFeedback
from espresso.compressors.levels import Levels, Norm
from espresso.cpu_offload.blockwise import add_block
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, HostCodec
from espresso.cpu_offload.jit import Scalar, as_number, as_type, kernel, room
from espresso.cpu_offload.kernels import BLOCK, clear_block, copy_block, fetch_block, fill_q, segment_key
from espresso.cpu_offload.level_vectors import (
    ROW,
    add_plane,
    fill_draws,
    linear_group,
    natural_group,
    plane_of,
    sum_squares,
)
from espresso.cpu_offload.vectors import GROUP, largest
from espresso.cpu_offload.work import COUNT, HIGH, LOW, OFFSET, SEGMENT, SOURCE, Table

NO_NORM, L2 = Norm.NONE.value, Norm.L2.value
PLANE = 32

Octets = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


@kernel
def encode_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, numbers: Array, words: Words,
    octets: Octets, block: int, width: int, norm: int, natural: bool, divisor: float, cap: float, levels: int,
    tiny: float, limit: int, magnitude: int, salt: int,
) -> Scalar:  # fmt: skip
    """Norm and codes block by block. Returns whether all is finite (and below ``limit``, as bits)."""
    itemsize = numbers.itemsize
    q, zeros = room(MAX_BLOCK, source.dtype), room(MAX_BLOCK, source.dtype)
    codes, draws = room(MAX_BLOCK, np.uint8), room(ROW, np.uint32)
    one = source.dtype.type(1)
    clear_block(zeros, 0, block)
    finite = True
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        key = segment_key(row, salt)
        body = row[OFFSET] + row[COUNT] * itemsize
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], block):
            num = min(block, chunks[chunk, HIGH] - low)
            at = row[SOURCE] + low
            if num == block:
                size, good = norm_of(source, at, scale, zeros, num, norm, magnitude, limit)
            else:
                fill_q(q, source, at, scale, zeros, 0, num, False)
                clear_block(q, num, block - num)
                size, good = norm_of(q, 0, one, zeros, block, norm, magnitude, limit)
            step, inverse = factors(size, divisor, tiny, norm, one)
            good = good and np.isfinite(step)
            finite = finite and good
            if norm != NO_NORM:
                numbers[row[OFFSET] // itemsize + low // block] = step
            if num == block:
                take_levels(
                    source,
                    at,
                    scale,
                    zeros,
                    num,
                    low,
                    key,
                    inverse,
                    cap,
                    levels,
                    natural,
                    width,
                    draws,
                    codes,
                )
            else:
                take_levels(q, 0, one, zeros, num, low, key, inverse, cap, levels, natural, width, draws, codes)
            if width == 8:
                copy_block(octets, body + low, codes, num)
            else:
                pack_planes(codes, num, width, words, body // 4 + low // PLANE * width)
    return finite


@kernel
def norm_of(
    source: Array, at: int, scale: float, zeros: Array, num: int, norm: int, magnitude: int, limit: int
) -> Scalar:
    """S in float64 and whether all is finite; ``num`` is a multiple of a group."""
    if norm == L2:
        size = np.sqrt(sum_squares(source, at, scale, zeros, 0, num))
        return size, bool(size < np.float64(as_number(limit, scale)))
    bits = largest(source, at, scale, zeros, 0, num, magnitude)
    return np.float64(as_number(bits, scale)), bool(bits < limit)


@kernel
def factors(size: float, divisor: float, tiny: float, norm: int, one: float) -> Scalar:
    """What codes are multiplied by, and what numbers are; of the type of ``one``."""
    if norm == NO_NORM:
        return one, one
    if not tiny <= size < np.inf:
        return one - one, one - one
    return as_type(size / divisor, one), as_type(divisor / size, one)


@kernel
def take_levels(
    source: Array, at: int, scale: float, zeros: Array, num: int, low: int, key: int, inverse: float, cap: float,
    levels: int, natural: bool, width: int, draws: Words, codes: Octets,
) -> None:  # fmt: skip
    """Codes of the elements from ``low`` of the segment on; whole groups, readable beyond ``num``."""
    sign = 1 << (width - 1)
    bias = 127 if source.itemsize == 4 else 1023
    smallest, lift = as_type(2.0 ** (1 - levels), scale), as_type(2.0 ** (levels - 1), scale)
    for i in range(0, num, ROW):
        fill_draws(key, (low + i) // ROW, draws)
        for group in range(0, min(ROW, num - i), GROUP):
            here = i + group
            if natural:
                natural_group(
                    source, at + here, scale, zeros, here, inverse, cap, draws, group, codes, here, sign, smallest,
                    lift, bias - levels,
                )  # fmt: skip
            else:
                linear_group(source, at + here, scale, zeros, here, inverse, cap, draws, group, codes, here, sign)


@kernel
def pack_planes(codes: Octets, num: int, width: int, words: Words, place: int) -> None:
    """``width`` words for every 32 codes; those past the end count as zero."""
    padded = (num + PLANE - 1) // PLANE * PLANE
    clear_block(codes, num, padded - num)
    for i in range(0, padded, PLANE):
        for plane in range(width):
            words[place] = plane_of(codes, i, np.uint8(1 << plane))
            place += 1


@kernel
def unpack_planes(words: Words, place: int, num: int, width: int, codes: Octets) -> None:
    """The reverse; ``codes`` has room for whole words."""
    for i in range(0, num, PLANE):
        clear_block(codes, i, PLANE)
        for plane in range(width):
            add_plane(words[place], codes, i, np.uint8(1 << plane))
            place += 1


@kernel
def widen_levels(codes: Octets, values: Array, width: int, natural: bool, levels: int) -> None:
    """``values[i]`` = what ``codes[i]`` stands for, before the scale."""
    sign = np.uint32(1 << (width - 1))
    mask, base = np.uint32(sign - np.uint32(1)), np.uint32(127 - levels)
    if natural:
        for i in range(len(values)):
            code = np.uint32(codes[i])
            level = np.uint32(code & mask)
            power = np.uint32(np.uint32(level + base) << np.uint32(23)).view(np.float32)
            value = np.float32(power) if level else np.float32(0)
            values[i] = -value if code & sign else value
    else:
        for i in range(len(values)):
            code = np.uint32(codes[i])
            value = np.float32(np.uint32(code & mask))
            values[i] = -value if code & sign else value


@kernel
def decode_chunks(
    table: Table, chunks: Table, first: int, end: int, target: Array, scale: float, num_rows: int, row_bytes: int,
    numbers: Array, words: Words, octets: Octets, block: int, width: int, norm: int, natural: bool, levels: int,
) -> Scalar:  # fmt: skip
    """``target = scale * sum over rows of level * step``, rows in order. One pass over the target."""
    itemsize = numbers.itemsize
    codes, values = room(MAX_BLOCK, np.uint8), room(MAX_BLOCK, target.dtype)
    one = target.dtype.type(1)
    for chunk in range(first, end):
        segment = chunks[chunk, SEGMENT]
        row = table[segment]
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], block):
            num = min(block, chunks[chunk, HIGH] - low)
            out = target[row[SOURCE] + low :][:num]
            fetch_block(target, row[SOURCE] + low + max(block, BLOCK), block)
            if not num_rows:
                clear_block(out, 0, num)
            for source in range(num_rows):
                at = source * row_bytes + row[OFFSET]
                body = at + row[COUNT] * itemsize
                step = one
                if norm != NO_NORM:
                    step = numbers[at // itemsize + low // block]
                if not 0 <= step < np.inf:
                    return 1 + source * len(table) + segment
                if width == 8:
                    widen_levels(octets[body + low :][:num], values[:num], width, natural, levels)
                else:
                    unpack_planes(words, body // 4 + low // PLANE * width, num, width, codes)
                    widen_levels(codes[:num], values[:num], width, natural, levels)
                factor = scale if source == num_rows - 1 else one
                add_block(values[:num], step, out, source > 0, factor)
    return 0


class HostLevels(HostCodec):
    """An unbiased quantizer; one pass to encode, one over the target to decode.

    Training gives it no residual. Asked for one it goes the long way of
    :class:`~espresso.compressors.error_feedback.ErrorFeedback`.
    """

    compressor: Levels
    malformed_body: ClassVar[str] = "a block's scale is negative or not finite"

    def encode(self, encoding: Encoding, payload: Bytes) -> bool:
        """As :meth:`espresso.compressors.Codec.encode`."""
        if encoding.feedback is not None:
            return ErrorFeedback(self).encode(encoding, payload)
        return super().encode(encoding, payload)

    def encode_bodies(self, call: EncodeCall) -> bool:
        """One pass, chunks in any order."""
        how, kind, bits = self.compressor, call.layout.dtype.type, call.bits.dtype
        limit = call.infinity - NEARLY if how.top_exponent is None else bits.type(kind(how.cap).view(bits) + 1)
        return all(
            self.share(
                encode_chunks, call, call.work.chunks, call.source, call.scale, call.numbers, call.words, call.payload,
                how.block, how.code_bits, how.scaled_by.value, how.is_natural, how.divisor, kind(how.cap),
                how.unit_level, TINY[call.layout.dtype.itemsize], limit, call.magnitude,
                np.uint64(rank_salt(call.key)),
            )
        )  # fmt: skip

    def decode_bodies(self, call: DecodeCall) -> None:
        """Sum the rows block by block."""
        how = self.compressor
        self.share_decode(
            decode_chunks, call, call.numbers, call.words, call.payload, how.block, how.code_bits, how.scaled_by.value,
            how.is_natural, how.unit_level,
        )  # fmt: skip
