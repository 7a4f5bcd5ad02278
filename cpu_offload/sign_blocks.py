"""Signs with one or two means per block. Format and the shape of sums: :mod:`espresso.compressors.signs`.

Encode makes one pass: a block's gradient and residual are still in the first-level cache when, after the sums,
signs and residual are taken. The second look prefetches what comes after, or memory would idle meanwhile.
Residuals that do not begin on a 16-byte boundary are written the ordinary way, which reads what it overwrites: two
thirds of the aligned rate (a buffer drained line by line was slower still, a third).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Array
from espresso.cpu_offload.intrinsics import address, fence, prefetch, room
from espresso.cpu_offload.jit import Scalar, kernel
from espresso.cpu_offload.kernels import BLOCK, clear_block, copy_block, fill_q
from espresso.cpu_offload.vectors import (
    GROUP,
    STREAM_ALIGNMENT,
    sign_group,
    sign_group_stream,
    sum_magnitudes,
    sum_sides,
    unpack_group,
)
from espresso.cpu_offload.work import COUNT, HIGH, LOW, NUMEL, OFFSET, RESIDUAL, SEGMENT, SOURCE, Table

AHEAD = 1024
"""Elements between what is worked on and what is prefetched, at least: measured best from 256 to 2048."""

Halves = npt.NDArray[np.uint16]


@kernel
def encode_blocks(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, new: Array,
    has_feedback: bool, stream: bool, numbers: Array, halves: Halves, block: int,
    means: int, rooms: Array,
) -> Scalar:  # fmt: skip
    """Means, signs and residual of the blocks that begin in these chunks; returns whether all is finite.

    Without feedback ``old`` is a block of zeros and ``new`` a block of anything: both stay in the cache.
    ``rooms`` is three blocks of numbers, the second of zeros.
    """
    one = source.dtype.type(1)
    q, zeros, kept = rooms[0], rooms[1], rooms[2]
    ahead = max(block, AHEAD)
    finite = True
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        scales = row[OFFSET] // numbers.itemsize
        signs = (row[OFFSET] + means * row[COUNT] * numbers.itemsize) // 2
        begin = (chunks[chunk, LOW] + block - 1) // block
        stop = (chunks[chunk, HIGH] + block - 1) // block
        place = address(new) + row[RESIDUAL] * new.itemsize
        direct = stream and place % STREAM_ALIGNMENT == 0  # a block is a whole number of lines
        for index in range(begin, stop):
            low = index * block
            num = min(block, row[NUMEL] - low)
            at, half = row[SOURCE] + low, signs + low // GROUP
            to = row[RESIDUAL] + low if has_feedback else 0
            whole = num % GROUP == 0
            if whole:
                above, below, negative = sum_block(source, at, scale, old, to, num, means)
            else:
                fill_q(q, source, at, scale, old, to, num, True)
                padded = (num + GROUP - 1) // GROUP * GROUP
                clear_block(q, num, padded - num)
                above, below, negative = sum_block(q, 0, one, zeros, 0, padded, means)
            if not np.isfinite(above + below):
                above, below = plain_sum(source, at, scale, old, to, num, means)
                finite = finite and np.isfinite(above + below)
            if means == 1:
                plus = source.dtype.type(above / num)
                minus = -plus
                numbers[scales + index] = plus
            else:
                plus = source.dtype.type(above / max(num - negative, 1.0))
                minus = -source.dtype.type(below / max(negative, 1.0))
                numbers[scales + 2 * index] = plus
                numbers[scales + 2 * index + 1] = minus
            if not whole:
                sign_block(q, 0, one, zeros, 0, kept, 0, padded, plus, minus, halves, half, False, 0)
                copy_block(new, to, kept, num)
            else:
                sign_block(source, at, scale, old, to, new, to, num, plus, minus, halves, half, direct, ahead)
    fence()
    return finite


@kernel
def sum_block(source: Array, at: int, scale: float, old: Array, kept: int, num: int, means: int) -> Scalar:
    """The sum of |q| and two zeros; or those of either side and how many are negative."""
    if means == 1:
        return sum_magnitudes(source, at, scale, old, kept, num), 0.0, 0.0
    return sum_sides(source, at, scale, old, kept, num)


@kernel
def sign_block(
    source: Array, at: int, scale: float, old: Array, kept: int, new: Array, to: int, num: int, plus: float,
    minus: float, halves: Halves, half: int, stream: bool, ahead: int,
) -> None:  # fmt: skip
    """Signs and residual of ``num`` elements, a multiple of a group; asks for what lies ``ahead`` meanwhile."""
    if stream:
        for i in range(0, num, GROUP):
            prefetch(source, at + i + ahead)
            prefetch(old, kept + i + ahead)
            halves[half + i // GROUP] = sign_group_stream(
                source, at + i, scale, old, kept + i, new, to + i, plus, minus
            )
    else:
        for i in range(0, num, GROUP):
            prefetch(source, at + i + ahead)
            prefetch(old, kept + i + ahead)
            halves[half + i // GROUP] = sign_group(
                source, at + i, scale, old, kept + i, new, to + i, plus, minus
            )


@kernel
def plain_sum(source: Array, at: int, scale: float, old: Array, kept: int, num: int, means: int) -> Scalar:
    """The sums element by element: tells an overflow of the lanes from a number that is not finite itself."""
    above = below = 0.0
    for i in range(num):
        q = np.float64(source[at + i] * scale + old[kept + i])
        if means == 2 and q < 0:
            below -= q
        else:
            above += abs(q)
    return above, below


@kernel
def decode_blocks(
    table: Table, chunks: Table, first: int, end: int, target: Array, scale: float, num_rows: int, row_bytes: int,
    numbers: Array, halves: Halves, block: int, means: int,
) -> Scalar:  # fmt: skip
    """``target = scale * sum over rows of their means by sign``, rows in order; ``block`` 0 means the whole segment.

    One pass over the target.
    """
    tail = room(GROUP, target.dtype)
    clear_block(tail, 0, GROUP)
    one = target.dtype.type(1)
    for chunk in range(first, end):
        segment = chunks[chunk, SEGMENT]
        row = table[segment]
        length = block if block else row[NUMEL] + GROUP
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], BLOCK):
            high = min(low + BLOCK, chunks[chunk, HIGH])
            whole = high - (high - low) % GROUP
            at, first_index = row[SOURCE], low // length
            if not num_rows:
                clear_block(target, at + low, high - low)
            for source in range(num_rows):
                body = source * row_bytes + row[OFFSET]
                scales = body // numbers.itemsize
                signs = (body + means * row[COUNT] * numbers.itemsize) // 2
                factor = scale if source == num_rows - 1 else one
                start, index = low, first_index
                while start < high:
                    stop = min((index + 1) * length, high)
                    plus = numbers[scales + means * index]
                    minus = numbers[scales + 2 * index + 1] if means == 2 else -plus
                    if not (0 <= plus < np.inf and -np.inf < minus <= 0):
                        return 1 + source * len(table) + segment
                    for i in range(start, min(stop, whole), GROUP):
                        unpack_group(
                            halves[signs + i // GROUP], plus, minus, target, at + i, source > 0, factor
                        )
                    if stop > whole:
                        copy_block(tail, 0, target[at + whole :], high - whole)
                        unpack_group(halves[signs + whole // GROUP], plus, minus, tail, 0, source > 0, factor)
                        copy_block(target, at + whole, tail, high - whole)
                    start, index = stop, index + 1
    return 0
