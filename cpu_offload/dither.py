"""What numbers are moved by before they are rounded, so that rounding has no bias. On the host, in place.

To the nearest, a sum that is kept in few bits stops to grow once what is added is less than half of what numbers are
apart there. So each is moved first, at random and by up to half of that, which is::

    bf16    2^-7 times the power of two below it
    int8    the largest number of its block over 127

Element e of a segment draws ``x = e * 0x9E3779B1 xor key`` in 32 bits, ``key`` being the lower half of the segment's
(:mod:`espresso.compressors.levels`), and from it a signed number over 2^32::

    x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
"""

from __future__ import annotations

import numpy as np

from espresso.compressors.base import Array, Encoding
from espresso.compressors.blockwise import MAX_BLOCK
from espresso.compressors.draws import rank_salt
from espresso.cpu_offload.codec import EncodeCall, HostCodec
from espresso.cpu_offload.jit import as_number, kernel, room
from espresso.cpu_offload.kernels import BLOCK, segment_key
from espresso.cpu_offload.work import HIGH, LOW, SEGMENT, SOURCE, Table


def dither(codec: HostCodec, encoding: Encoding, block: int, levels: float) -> None:
    """Move the numbers of the source.

    Args:
        block: elements that have one scale; 0 where each number goes by its own exponent.
        levels: from zero to the largest of a block, or between two powers of two.
    """
    call = EncodeCall.of(encoding, np.empty(0, np.uint8), codec.stream_from)
    kind, infinity = call.source.dtype.type, call.infinity
    codec.share(
        dither_chunks, call, call.work.chunks, call.source, call.source.view(infinity.dtype), block, kind(levels),
        kind(2.0**-32), call.magnitude, infinity, np.uint64(rank_salt(call.key)),
    )  # fmt: skip


_ODD, _FIRST, _SECOND = np.uint32(0x9E3779B1), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_16, _15 = np.uint32(16), np.uint32(15)


@kernel
def dither_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, bits: Array, block: int, levels: float,
    scale: float, magnitude: int, infinity: int, salt: int,
) -> None:  # fmt: skip
    """What is not finite stays, and its block."""
    kind, whole = source.dtype.type, bits.dtype.type
    size = block if block else BLOCK
    moves = room(MAX_BLOCK, source.dtype)
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        key = np.uint32(segment_key(row, salt))
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], size):
            num = min(size, chunks[chunk, HIGH] - low)
            numbers, patterns = source[row[SOURCE] + low :][:num], bits[row[SOURCE] + low :][:num]
            top = whole(0)
            if block:
                for i in range(num):
                    top = max(top, whole(patterns[i] & magnitude))
            mask = whole(infinity) * whole(block == 0)
            for i in range(num):  # (in place the compiler would take them one by one)
                mixed = np.uint32(np.uint32(np.uint32(low + i) * _ODD) ^ key)
                mixed = np.uint32(np.uint32(mixed ^ np.uint32(mixed >> _16)) * _FIRST)
                mixed = np.uint32(np.uint32(mixed ^ np.uint32(mixed >> _15)) * _SECOND)
                mixed = np.uint32(mixed ^ np.uint32(mixed >> _16))
                own = whole(top | whole(patterns[i] & mask))
                own = whole(own * whole(own < infinity))
                moves[i] = kind(np.int32(mixed)) * (as_number(own, levels) / levels * scale)
            for i in range(num):
                numbers[i] += moves[i]
