"""Signs with one mean per segment (``block=0``). Format and paper: :mod:`espresso.compressors.signs`.

Encode makes two passes over the input: sum of |q|, then signs and residual. Segments of up to a million elements
finish both on one thread before the next begins, so that the second finds them in cache; longer ones
take the second pass backwards, to begin with what the first left there.

The sum has a fixed shape, whatever the number of threads: 128 lanes over blocks of 4096 elements (lane =
element mod 128), the lanes added in float64 by halving, the blocks of a chunk and then the chunks in order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Array
from espresso.cpu_offload.intrinsics import fence, room
from espresso.cpu_offload.jit import Scalar, kernel
from espresso.cpu_offload.kernels import BLOCK, can_stream, clear_block, fill_q, keep_block, neutral_block
from espresso.cpu_offload.sign_blocks import AHEAD, sign_block
from espresso.cpu_offload.vectors import GROUP, add_magnitudes
from espresso.cpu_offload.work import (
    END_CHUNK,
    FIRST_CHUNK,
    HIGH,
    LOW,
    NUMEL,
    OFFSET,
    RESIDUAL,
    SEGMENT,
    SOURCE,
    Table,
)

LANES = 128
SUM_BLOCK = 4096

Halves = npt.NDArray[np.uint16]


@kernel
def sum_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, has_feedback: bool,
    sums: npt.NDArray[np.float64],
) -> None:  # fmt: skip
    """``sums[c]`` = sum of |q| of chunk c, in the fixed shape of this module."""
    one = source.dtype.type(1)
    q, zeros = room(SUM_BLOCK, source.dtype), room(SUM_BLOCK, source.dtype)
    clear_block(zeros, 0, SUM_BLOCK)
    lanes = room(LANES, source.dtype)
    tree = room(LANES, np.float64)
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        total = 0.0
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], SUM_BLOCK):
            num = min(SUM_BLOCK, chunks[chunk, HIGH] - low)
            at, kept = row[SOURCE] + low, row[RESIDUAL] + low
            clear_block(lanes, 0, LANES)
            if has_feedback and num == SUM_BLOCK:
                add_rows(lanes, source, at, scale, old, kept)
            else:
                fill_q(q, source, at, scale, old, kept, num, has_feedback)
                clear_block(q, num, SUM_BLOCK - num)
                add_rows(lanes, q, 0, one, zeros, 0)
            total += add_lanes(lanes, tree)
        if not np.isfinite(total):
            total = plain_sum(table, chunks, chunk, source, scale, old, has_feedback)
        sums[chunk] = total


@kernel
def add_rows(lanes: Array, source: Array, at: int, scale: float, old: Array, kept: int) -> None:
    """Add the |q| of a block to the lanes."""
    for low in range(0, SUM_BLOCK, LANES):
        for lane in range(0, LANES, GROUP):
            add_magnitudes(source, at + low + lane, scale, old, kept + low + lane, lanes, lane)


@kernel
def add_lanes(lanes: Array, tree: npt.NDArray[np.float64]) -> Scalar:
    """Sum of the lanes in float64, by halving."""
    half = LANES
    for lane in range(LANES):
        tree[lane] = lanes[lane]
    while half > 1:
        half //= 2
        low, high = tree[:half], tree[half : 2 * half]
        for lane in range(half):
            low[lane] += high[lane]
    return tree[0]


@kernel
def plain_sum(
    table: Table, chunks: Table, chunk: int, source: Array, scale: float, old: Array, has_feedback: bool
) -> Scalar:
    """Sum of |q| in float64: tells an overflow of the lanes from a number that is not finite itself."""
    row = table[chunks[chunk, SEGMENT]]
    total = 0.0
    for i in range(chunks[chunk, LOW], chunks[chunk, HIGH]):
        q = source[row[SOURCE] + i] * scale
        if has_feedback:
            q += old[row[RESIDUAL] + i]
        total += abs(np.float64(q))
    return total


@kernel
def write_scale(table: Table, segment: int, sums: npt.NDArray[np.float64], numbers: Array) -> Scalar:
    """Store the mean of |q| in the segment's body; returns whether it is finite."""
    row = table[segment]
    total = 0.0
    for chunk in range(row[FIRST_CHUNK], row[END_CHUNK]):
        total += sums[chunk]
    numbers[row[OFFSET] // numbers.itemsize] = total / row[NUMEL]
    return np.isfinite(total)


@kernel
def sign_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, new: Array,
    has_feedback: bool, stream: bool, numbers: Array, halves: Halves, gain: float,
) -> None:  # fmt: skip
    """Pack the signs of q and write the residual; chunks from the last to the first."""
    one = source.dtype.type(1)
    q, zeros, kept = room(BLOCK, source.dtype), room(BLOCK, source.dtype), room(BLOCK, source.dtype)
    neutral_block(zeros, BLOCK)
    for chunk in range(end - 1, first - 1, -1):
        row = table[chunks[chunk, SEGMENT]]
        size = numbers[row[OFFSET] // numbers.itemsize]
        low, stop = chunks[chunk, LOW], chunks[chunk, HIGH]
        place = (row[OFFSET] + numbers.itemsize) // 2
        if has_feedback:
            num = (stop - low) // GROUP * GROUP
            at, to = row[SOURCE] + low, row[RESIDUAL] + low
            direct, half = can_stream(stream, new, to), place + low // GROUP
            sign_block(source, at, scale, old, to, new, to, num, size, -size, halves, half, direct, AHEAD, gain)
            low += num
        while low < stop:
            num = min(BLOCK, stop - low)
            fill_q(q, source, row[SOURCE] + low, scale, old, row[RESIDUAL] + low, num, has_feedback)
            clear_block(q, num, BLOCK - num)
            groups = (num + GROUP - 1) // GROUP * GROUP
            half = place + low // GROUP
            sign_block(q, 0, one, zeros, 0, kept, 0, groups, size, -size, halves, half, False, 0, one)
            if has_feedback:
                keep_block(new, row[RESIDUAL] + low, kept, old, row[RESIDUAL] + low, num, gain)
            low += num
    fence()


@kernel
def encode_segments(
    table: Table, chunks: Table, segments: Table, first: int, end: int, source: Array, scale: float, old: Array,
    new: Array, has_feedback: bool, stream: bool, numbers: Array, halves: Halves,
    sums: npt.NDArray[np.float64], gain: float,
) -> Scalar:  # fmt: skip
    """Both passes over each of a run of segments; returns whether all is finite."""
    finite = True
    for position in range(first, end):
        segment = segments[position]
        low, high = table[segment, FIRST_CHUNK], table[segment, END_CHUNK]
        sum_chunks(table, chunks, low, high, source, scale, old, has_feedback, sums)
        if write_scale(table, segment, sums, numbers):
            sign_chunks(table, chunks, low, high, source, scale, old, new, has_feedback, stream, numbers, halves, gain)
        else:
            finite = False
    return finite
