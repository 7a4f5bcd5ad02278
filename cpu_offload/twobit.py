"""Two bits an element on the host: the encoder of twobit. Format and sums: :mod:`espresso.compressors.signs`.

One pass over memory. A block is looked at three times, the second and the third time in the first-level cache: for
its mean, for the means of what is up to it and above, and for bits and residual. As the encoder of signs
(:mod:`espresso.cpu_offload.signs`, which decodes both) it prefetches what comes after in the last look, and writes
residuals past the caches where they begin on a 16-byte boundary.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from espresso.compressors.base import Array
from espresso.cpu_offload.codec import EncodeCall
from espresso.cpu_offload.jit import Scalar, fence, kernel, prefetch
from espresso.cpu_offload.kernels import can_stream, clear_block, fill_q, keep_block
from espresso.cpu_offload.signs import AHEAD, Halves, HostSigns, plain_sum, plane_halves
from espresso.cpu_offload.vectors import GROUP, size_group, sum_magnitudes, sum_parts
from espresso.cpu_offload.work import COUNT, HIGH, LOW, NUMEL, OFFSET, RESIDUAL, SEGMENT, SOURCE, Table

WORD = 32
"""Elements of a word of bits: a last one that is not whole is padded with zeros, so that both planes end with them."""


@kernel
def encode_planes(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, new: Array,
    has_feedback: bool, stream: bool, numbers: Array, halves: Halves, block: int, rooms: Array, gain: float,
) -> Scalar:  # fmt: skip
    """Means, bits and residual of the blocks that begin in these chunks; returns whether all is finite.

    Without feedback ``old`` is a block of zeros and ``new`` a block of anything: both stay in the cache.
    ``rooms`` is three blocks of numbers, the second of negative zeros.
    """
    one = source.dtype.type(1)
    q, zeros, kept = rooms[0], rooms[1], rooms[2]
    ahead = max(block, AHEAD)
    finite = True
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        means, plane = row[OFFSET] // numbers.itemsize, plane_halves(row[NUMEL])
        signs = (row[OFFSET] + 2 * row[COUNT] * numbers.itemsize) // 2
        begin = (chunks[chunk, LOW] + block - 1) // block
        stop = (chunks[chunk, HIGH] + block - 1) // block
        direct = can_stream(stream, new, row[RESIDUAL])  # a block is a whole number of lines
        for index in range(begin, stop):
            low = index * block
            num = min(block, row[NUMEL] - low)
            at, half, place = row[SOURCE] + low, signs + low // GROUP, means + 2 * index
            to = row[RESIDUAL] + low if has_feedback else 0
            if num % WORD == 0:
                good = encode_block(
                    source, at, scale, old, to, new, to, num, num, numbers, place, halves, half, plane, direct, ahead,
                    gain,
                )  # fmt: skip
            else:
                padded = (num + WORD - 1) // WORD * WORD
                fill_q(q, source, at, scale, old, to, num, True)
                clear_block(q, num, padded - num)
                good = encode_block(
                    q, 0, one, zeros, 0, kept, 0, num, padded, numbers, place, halves, half, plane, False, 0, one
                )
                keep_block(new, to, kept, old, to, num, gain)
            finite = finite and good
    fence()
    return finite


@kernel
def encode_block(
    source: Array, at: int, scale: float, old: Array, kept: int, new: Array, to: int, num: int, padded: int,
    numbers: Array, place: int, halves: Halves, half: int, plane: int, stream: bool, ahead: int, gain: float,
) -> Scalar:  # fmt: skip
    """One block of ``num`` elements, with zeros behind them up to ``padded``; returns whether all is finite."""
    total = sum_magnitudes(source, at, scale, old, kept, padded)
    if not np.isfinite(total):
        total, _ = plain_sum(source, at, scale, old, kept, num, 1)
    mean = source.dtype.type(total / num)
    below, above, count = sum_parts(source, at, scale, old, kept, padded, mean)
    if not np.isfinite(below + above):
        below, above = plain_parts(source, at, scale, old, kept, num, mean)
    inner = min(source.dtype.type(below / max(num - count, 1.0)), mean)
    outer = max(source.dtype.type(above / max(count, 1.0)), mean)
    numbers[place] = inner
    numbers[place + 1] = outer
    for i in range(0, padded, GROUP):
        prefetch(source, at + i + ahead)
        prefetch(old, kept + i + ahead)
        sign, size = size_group(source, at + i, scale, old, kept + i, new, to + i, mean, inner, outer, gain, stream)
        halves[half + i // GROUP] = sign
        halves[half + plane + i // GROUP] = size
    return np.isfinite(below + above)


@kernel
def plain_parts(source: Array, at: int, scale: float, old: Array, kept: int, num: int, mean: float) -> Scalar:
    """The sums up to the mean and above it, element by element, as :func:`plain_sum`."""
    below = above = 0.0
    for i in range(num):
        size = abs(np.float64(source[at + i] * scale + old[kept + i]))
        if size > mean:
            above += size
        else:
            below += size
    return below, above


class HostTwoBit(HostSigns):
    """``twobit`` with the residual fused."""

    malformed_body: ClassVar[str] = "a block's means are negative, out of order or not finite"

    def encode_run(self, call: EncodeCall, first: int, end: int, given: tuple[Any, ...], rooms: Array) -> Any:
        """The same of two bits."""
        return encode_planes(call.table, call.work.chunks, first, end, *given, rooms, call.gain)
