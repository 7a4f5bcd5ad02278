"""What numbers are moved by before they are rounded, so that rounding has no bias. On the host, in place.

To the nearest, a sum that is kept in few bits stops to grow once what is added is less than half of what numbers are
apart there. So each is moved first, at random, by what element e of a segment draws of 32 bits,
``x = e * 0x9E3779B1 xor key``, ``key`` being the lower half of the segment's (:mod:`espresso.compressors.levels`)::

    x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

    casts    the highest bits of x are added to the bits that do not fit, and those then cut off
    blocks   x as a signed number over 2^32, times the largest of the block over the levels, is added to all but that

What fits already stays as it is.
"""

from __future__ import annotations

import numpy as np

from espresso.compressors.base import Array, Encoding
from espresso.compressors.blockwise import MAX_BLOCK
from espresso.compressors.draws import rank_salt
from espresso.cpu_offload.codec import EncodeCall, HostCodec
from espresso.cpu_offload.jit import Scalar, as_number, kernel, room
from espresso.cpu_offload.kernels import BLOCK, segment_key
from espresso.cpu_offload.work import HIGH, LOW, SEGMENT, SOURCE, Table


def dither_cast(codec: HostCodec, encoding: Encoding, fraction: int) -> None:
    """Move the numbers of the source to some of so many bits behind the first."""
    call = EncodeCall.of(encoding, np.empty(0, np.uint8), codec.stream_from)
    whole = call.infinity.dtype.type
    spare = np.finfo(call.source.dtype).nmant - fraction
    codec.share(
        cut_chunks, call, call.work.chunks, call.source, call.source.view(whole), whole(max(spare - 32, 0)),
        whole(max(32 - spare, 0)), whole((1 << spare) - 1), call.infinity, np.uint64(rank_salt(call.key)),
    )  # fmt: skip


def dither_blocks(codec: HostCodec, encoding: Encoding, block: int, levels: float) -> None:
    """Move the numbers of the source, which have one scale a block and so many levels from zero to its largest."""
    call = EncodeCall.of(encoding, np.empty(0, np.uint8), codec.stream_from)
    kind = call.source.dtype.type
    codec.share(
        move_chunks, call, call.work.chunks, call.source, call.source.view(call.infinity.dtype), block, kind(levels),
        kind(2.0**-32), call.magnitude, call.infinity, np.uint64(rank_salt(call.key)),
    )  # fmt: skip


_ODD, _FIRST, _SECOND = np.uint32(0x9E3779B1), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_16, _15 = np.uint32(16), np.uint32(15)


@kernel
def drawn(key: int, element: int) -> Scalar:
    """Of a segment's element; 32 bits."""
    x = np.uint32(np.uint32(np.uint32(element) * _ODD) ^ np.uint32(key))
    y = np.uint32(np.uint32(x ^ np.uint32(x >> _16)) * _FIRST)
    z = np.uint32(np.uint32(y ^ np.uint32(y >> _15)) * _SECOND)
    return np.uint32(z ^ np.uint32(z >> _16))


@kernel
def cut_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, bits: Array, left: int, right: int, spare: int,
    infinity: int, salt: int,
) -> None:  # fmt: skip
    """``spare``: the bits that do not fit. What is not finite stays."""
    whole = bits.dtype.type
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        key = segment_key(row, salt)
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], BLOCK):
            patterns = bits[row[SOURCE] + low :][: min(BLOCK, chunks[chunk, HIGH] - low)]
            for i in range(len(patterns)):
                moved = whole(patterns[i] + whole(whole(whole(drawn(key, low + i)) << left) >> right))
                fits = whole(patterns[i] & infinity) == infinity
                patterns[i] = patterns[i] if fits else whole(moved & whole(~spare))


@kernel
def move_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, bits: Array, block: int, levels: float,
    scale: float, magnitude: int, infinity: int, salt: int,
) -> None:  # fmt: skip
    """A block with what is not finite stays."""
    kind, whole = source.dtype.type, bits.dtype.type
    moves, none = room(MAX_BLOCK, source.dtype), source.dtype.type(0)
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        key = segment_key(row, salt)
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], block):
            num = min(block, chunks[chunk, HIGH] - low)
            numbers, patterns = source[row[SOURCE] + low :][:num], bits[row[SOURCE] + low :][:num]
            top = whole(0)
            for i in range(num):
                top = max(top, whole(patterns[i] & magnitude))
            if top >= infinity:
                continue
            step = as_number(top, levels) / levels * scale
            for i in range(num):  # (in place the compiler would take them one by one)
                move = kind(np.int32(drawn(key, low + i))) * step
                moves[i] = none if whole(patterns[i] & magnitude) == top else move
            for i in range(num):
                numbers[i] += moves[i]
