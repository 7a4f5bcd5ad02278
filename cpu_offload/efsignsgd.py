"""Scaled sign on the host. Format and paper: :mod:`espresso.compressors.efsignsgd`.

Encode makes two passes over the input: sum of |q|, then signs and residual. Segments of up to a million elements
finish both on one thread before the next begins, so that the second finds them in cache; longer ones
take the second pass backwards, to begin with what the first left there.

The sum has a fixed shape, whatever the number of threads: 128 lanes over blocks of 4096 elements (lane =
element mod 128), the lanes added in float64 by halving, the blocks of a chunk and then the chunks in order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from espresso.compressors.base import Array
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, HostCodec, malformed
from espresso.cpu_offload.intrinsics import fence
from espresso.cpu_offload.kernels import BLOCK, clear_block, copy_block, fill_q, keep
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
WORDS = 32


@njit(nogil=True, cache=True)
def sum_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, has_feedback: bool,
    sums: npt.NDArray[np.float64],
) -> None:  # fmt: skip
    """``sums[c]`` = sum of |q| of chunk c, in the fixed shape of this module."""
    q = np.empty(SUM_BLOCK, source.dtype)
    lanes = np.empty(LANES, source.dtype)
    tree = np.empty(LANES, np.float64)
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        total = 0.0
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], SUM_BLOCK):
            num = min(SUM_BLOCK, chunks[chunk, HIGH] - low)
            fill_q(q, source, row[SOURCE] + low, scale, old, row[RESIDUAL] + low, num, has_feedback)
            if num < SUM_BLOCK:
                clear_block(q, num, SUM_BLOCK - num)
            clear_block(lanes, 0, LANES)
            for i in range(0, SUM_BLOCK, LANES):
                for lane in range(LANES):
                    lanes[lane] += abs(q[i + lane])
            total += add_lanes(lanes, tree)
        if not np.isfinite(total):
            total = plain_sum(table, chunks, chunk, source, scale, old, has_feedback)
        sums[chunk] = total


@njit(nogil=True, cache=True)
def add_lanes(lanes: Array, tree: npt.NDArray[np.float64]) -> float:
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


@njit(nogil=True, cache=True)
def plain_sum(
    table: Table, chunks: Table, chunk: int, source: Array, scale: float, old: Array, has_feedback: bool
) -> float:
    """Sum of |q| in float64: tells an overflow of the lanes from a number that is not finite itself."""
    row = table[chunks[chunk, SEGMENT]]
    total = 0.0
    for i in range(chunks[chunk, LOW], chunks[chunk, HIGH]):
        q = source[row[SOURCE] + i] * scale
        if has_feedback:
            q += old[row[RESIDUAL] + i]
        total += abs(np.float64(q))
    return total


@njit(nogil=True, cache=True)
def write_scale(table: Table, segment: int, sums: npt.NDArray[np.float64], numbers: Array) -> bool:
    """Store the mean of |q| in the segment's body; returns whether it is finite."""
    row = table[segment]
    total = 0.0
    for chunk in range(row[FIRST_CHUNK], row[END_CHUNK]):
        total += sums[chunk]
    numbers[row[OFFSET] // numbers.itemsize] = total / row[NUMEL]
    return np.isfinite(total)


@njit(nogil=True, cache=True)
def sign_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, new: Array,
    has_feedback: bool, stream: bool, numbers: Array, words: npt.NDArray[np.uint32],
) -> None:  # fmt: skip
    """Pack the signs of q and write the residual; chunks from the last to the first."""
    q = np.empty(BLOCK, source.dtype)
    packed = np.empty(WORDS, np.uint32)
    for chunk in range(end - 1, first - 1, -1):
        row = table[chunks[chunk, SEGMENT]]
        magnitude = numbers[row[OFFSET] // numbers.itemsize]
        first_word = row[OFFSET] // 4 + numbers.itemsize // 4
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], BLOCK):
            num = min(BLOCK, chunks[chunk, HIGH] - low)
            fill_q(q, source, row[SOURCE] + low, scale, old, row[RESIDUAL] + low, num, has_feedback)
            if num < BLOCK:
                clear_block(q, num, BLOCK - num)
            width = (num + 31) // 32
            pack_signs(q, packed, width)
            copy_block(words, first_word + low // 32, packed, width)
            if has_feedback:
                for i in range(BLOCK):
                    q[i] -= -magnitude if q[i] < 0 else magnitude
                keep(new, row[RESIDUAL] + low, q, num, stream)
    fence()


@njit(nogil=True, cache=True)
def pack_signs(q: Array, packed: npt.NDArray[np.uint32], width: int) -> None:
    """Bit j of ``packed[w]`` = whether ``q[j * width + w]`` is negative; q is zero from its end on."""
    clear_block(packed, 0, WORDS)
    if width == WORDS:
        zero, one = np.uint32(0), np.uint32(1)
        for j in range(0, 32, 4):  # four rows a turn: LLVM vectorises this, and not one row a turn
            q0, q1 = q[j * WORDS : (j + 1) * WORDS], q[(j + 1) * WORDS : (j + 2) * WORDS]
            q2, q3 = q[(j + 2) * WORDS : (j + 3) * WORDS], q[(j + 3) * WORDS : (j + 4) * WORDS]
            bit = one << np.uint32(j)
            bit0, bit1, bit2, bit3 = (
                np.uint32(bit),
                np.uint32(bit * 2),
                np.uint32(bit * 4),
                np.uint32(bit * 8),
            )
            for word in range(WORDS):
                low = (bit0 if q0[word] < 0 else zero) | (bit1 if q1[word] < 0 else zero)
                high = (bit2 if q2[word] < 0 else zero) | (bit3 if q3[word] < 0 else zero)
                packed[word] = np.uint32(packed[word] | np.uint32(low | high))
    else:
        for j in range(32):
            for word in range(width):
                if q[j * width + word] < 0:
                    packed[word] |= np.uint32(1) << np.uint32(j)


@njit(nogil=True, cache=True)
def encode_segments(
    table: Table, chunks: Table, segments: Table, first: int, end: int, source: Array, scale: float, old: Array,
    new: Array, has_feedback: bool, stream: bool, numbers: Array, words: npt.NDArray[np.uint32],
    sums: npt.NDArray[np.float64],
) -> bool:  # fmt: skip
    """Both passes over each of a run of segments; returns whether all is finite."""
    finite = True
    for position in range(first, end):
        segment = segments[position]
        low, high = table[segment, FIRST_CHUNK], table[segment, END_CHUNK]
        sum_chunks(table, chunks, low, high, source, scale, old, has_feedback, sums)
        if write_scale(table, segment, sums, numbers):
            sign_chunks(
                table, chunks, low, high, source, scale, old, new, has_feedback, stream, numbers, words
            )
        else:
            finite = False
    return finite


@njit(nogil=True, cache=True)
def decode_chunks(
    table: Table, chunks: Table, first: int, end: int, target: Array, scale: float, num_rows: int, row_bytes: int,
    numbers: Array, words: npt.NDArray[np.uint32],
) -> int:  # fmt: skip
    """``target = scale * sum over rows of +-magnitude``, rows in order. One pass over the target."""
    for chunk in range(first, end):
        segment = chunks[chunk, SEGMENT]
        row = table[segment]
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], BLOCK):
            num = min(BLOCK, chunks[chunk, HIGH] - low)
            out = target[row[SOURCE] + low :][:num]
            width = (num + 31) // 32
            if not num_rows:
                clear_block(out, 0, num)
            for source in range(num_rows):
                at = source * row_bytes + row[OFFSET]
                magnitude = numbers[at // numbers.itemsize]
                if not 0 <= magnitude < np.inf:
                    return 1 + source * len(table) + segment
                packed = words[at // 4 + numbers.itemsize // 4 + low // 32 :][:width]
                last = source == num_rows - 1
                unpack_signs(packed, magnitude, out, source > 0, scale if last else out.dtype.type(1))
    return 0


@njit(nogil=True, cache=True)
def unpack_signs(
    packed: npt.NDArray[np.uint32], magnitude: float, out: Array, accumulate: bool, scale: float
) -> None:
    """``out = (out + sign * magnitude) * scale``, or without the sum; ``scale`` is 1 but for the last row."""
    width = len(packed)
    for j in range(32):
        bit = np.uint32(1) << np.uint32(j)
        piece = out[j * width : (j + 1) * width]
        if accumulate:
            for word in range(len(piece)):
                value = -magnitude if packed[word] & bit else magnitude
                piece[word] = (piece[word] + value) * scale
        else:
            for word in range(len(piece)):
                value = -magnitude if packed[word] & bit else magnitude
                piece[word] = value * scale


class HostEfSignSgd(HostCodec):
    """``efsignsgd`` with the residual fused: two passes over the input to encode, one over the target to decode."""

    def encode_bodies(self, call: EncodeCall) -> bool:
        """Sum, scale, signs; whole segments where they are small, chunk by chunk where they are large."""
        chunks, segments = call.work.chunks, call.work.segments
        sums = np.empty(len(chunks), dtype=np.float64)

        def fused(first: int, end: int) -> bool:
            return bool(
                encode_segments(
                    call.table, chunks, segments, first, end, call.source, call.scale, call.old, call.new,
                    call.has_feedback, call.stream, call.numbers, call.words, sums,
                )
            )  # fmt: skip

        def split(position: int) -> bool:
            segment = int(segments[position])
            base, stop = call.table[segment, FIRST_CHUNK], call.table[segment, END_CHUNK]

            def sum_part(first: int, end: int) -> None:
                sum_chunks(
                    call.table, chunks, base + first, base + end, call.source, call.scale, call.old,
                    call.has_feedback, sums,
                )  # fmt: skip

            def sign_part(first: int, end: int) -> None:
                sign_chunks(
                    call.table, chunks, base + first, base + end, call.source, call.scale, call.old, call.new,
                    call.has_feedback, call.stream, call.numbers, call.words,
                )  # fmt: skip

            self.run_chunks(sum_part, int(stop - base))
            if not write_scale(call.table, segment, sums, call.numbers):
                return False
            self.run_chunks(sign_part, int(stop - base))
            return True

        return all(self.run_segments(call.work, fused, split))

    def decode_bodies(self, call: DecodeCall) -> None:
        """Sum the rows block by block."""
        chunks = call.work.chunks

        def kernel(first: int, end: int) -> int:
            return int(
                decode_chunks(
                    call.table, chunks, first, end, call.target, call.scale, call.num_rows, call.row_bytes,
                    call.numbers, call.words,
                )
            )  # fmt: skip

        code = max(self.run_chunks(kernel, len(chunks)), default=0)
        if code:
            raise malformed(code, call.layout, "the scale is negative or not finite")
