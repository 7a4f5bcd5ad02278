"""Signs on the host: efsignsgd and onebit, and the decoder of twobit (its encoder: :mod:`espresso.cpu_offload.twobit`).

Format and the shape of a block's sums: :mod:`espresso.compressors.signs`.

With one or two means per block encode makes one pass: a block's gradient and residual are still in the first-level
cache when, after the sums, signs and residual are taken. The second look prefetches what comes after, or memory would
idle meanwhile. Residuals that do not begin on a 16-byte boundary are written the ordinary way, which reads what it
overwrites: two thirds of the aligned rate (a buffer drained line by line was slower still, a third).

With one mean per segment (``block=0``) it makes two passes over the input: sum of |q|, then signs and residual.
Segments of up to a million elements finish both on one thread before the next begins, so that the second finds them in
cache; longer ones take the second pass backwards, to begin with what the first left there. That sum has a fixed shape,
whatever the number of threads: 128 lanes over blocks of 4096 elements (lane = element mod 128), the lanes added in
float64 by halving, the blocks of a chunk and then the chunks in order.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Array
from espresso.compressors.signs import Signs
from espresso.cpu_offload.codec import STREAM_SOON_BYTES, DecodeCall, EncodeCall, HostCodec
from espresso.cpu_offload.jit import Scalar, fence, kernel, prefetch, room
from espresso.cpu_offload.kernels import (
    BLOCK,
    can_stream,
    clear_block,
    clear_blocks,
    copy_block,
    fill_q,
    keep_block,
    neutral_block,
)
from espresso.cpu_offload.vectors import (
    GROUP,
    add_magnitudes,
    sign_group,
    sum_magnitudes,
    sum_sides,
    unpack_groups,
    unpack_planes,
)
from espresso.cpu_offload.work import (
    COUNT,
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

AHEAD = 1024
"""Elements between what is worked on and what is prefetched, at least: measured best from 256 to 2048."""

TOGETHER = 4
"""Rows that are decoded in one pass over the target."""

Halves = npt.NDArray[np.uint16]


@kernel
def encode_blocks(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, new: Array,
    has_feedback: bool, stream: bool, numbers: Array, halves: Halves, block: int,
    means: int, rooms: Array, gain: float,
) -> Scalar:  # fmt: skip
    """Means, signs and residual of the blocks that begin in these chunks; returns whether all is finite.

    Without feedback ``old`` is a block of zeros and ``new`` a block of anything: both stay in the cache.
    ``rooms`` is three blocks of numbers, the second of negative zeros.
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
        direct = can_stream(stream, new, row[RESIDUAL])  # a block is a whole number of lines
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
                sign_block(q, 0, one, zeros, 0, kept, 0, padded, plus, minus, halves, half, False, 0, one)
                keep_block(new, to, kept, old, to, num, gain)
            else:
                sign_block(source, at, scale, old, to, new, to, num, plus, minus, halves, half, direct, ahead, gain)
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
    minus: float, halves: Halves, half: int, stream: bool, ahead: int, gain: float,
) -> None:  # fmt: skip
    """Signs and residual of ``num`` elements, a multiple of a group; asks for what lies ``ahead`` meanwhile."""
    for i in range(0, num, GROUP):
        prefetch(source, at + i + ahead)
        prefetch(old, kept + i + ahead)
        halves[half + i // GROUP] = sign_group(
            source, at + i, scale, old, kept + i, new, to + i, plus, minus, gain, stream
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
    numbers: Array, halves: Halves, block: int, means: int, planes: int,
) -> Scalar:  # fmt: skip
    """``target = scale * sum over rows of their means by bits``, rows in order; ``block`` 0 means the whole segment.

    One pass over the target, ``TOGETHER`` rows at a time.
    """
    tail = room(GROUP, target.dtype)
    clear_block(tail, 0, GROUP)
    for chunk in range(first, end):
        segment = chunks[chunk, SEGMENT]
        row = table[segment]
        length = block if block else row[NUMEL] + GROUP
        plane = plane_halves(row[NUMEL]) if planes == 2 else 0
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], BLOCK):
            high = min(low + BLOCK, chunks[chunk, HIGH])
            at = row[SOURCE]
            if not num_rows:
                clear_block(target, at + low, high - low)
            done = 0
            while done < num_rows:
                taken = TOGETHER if num_rows - done >= TOGETHER else 1
                body = done * row_bytes + row[OFFSET]
                factor = scale if done + taken == num_rows else 1.0
                start, index = low, low // length
                while start < high:
                    stop = min((index + 1) * length, high)
                    if taken == TOGETHER:
                        bad = add_four(
                            target, at, start, stop, numbers, halves, body, row_bytes, row[COUNT], index, means, plane,
                            done > 0, factor, tail,
                        )  # fmt: skip
                    else:
                        bad = add_one(
                            target, at, start, stop, numbers, halves, body, row_bytes, row[COUNT], index, means, plane,
                            done > 0, factor, tail,
                        )  # fmt: skip
                    if bad >= 0:
                        return 1 + (done + bad) * len(table) + segment
                    start, index = stop, index + 1
                done += taken
    return 0


@kernel
def add_four(
    target: Array, at: int, start: int, stop: int, numbers: Array, halves: Halves, body: int, row_bytes: int,
    count: int, index: int, means: int, plane: int, accumulate: bool, factor: float, tail: Array,
) -> Scalar:  # fmt: skip
    """Add four rows' elements from ``start`` to ``stop``, all of block ``index``; the first bad row, or -1."""
    a, b, c, d = body, body + row_bytes, body + 2 * row_bytes, body + 3 * row_bytes
    plus_a, minus_a, signs_a = numbers_of(numbers, a, count, index, means)
    plus_b, minus_b, signs_b = numbers_of(numbers, b, count, index, means)
    plus_c, minus_c, signs_c = numbers_of(numbers, c, count, index, means)
    plus_d, minus_d, signs_d = numbers_of(numbers, d, count, index, means)
    plus, minus = (plus_a, plus_b, plus_c, plus_d), (minus_a, minus_b, minus_c, minus_d)
    for place in range(TOGETHER):
        if not are_means(plus[place], minus[place], plane):
            return place
    rows = (signs_a, signs_b, signs_c, signs_d)
    add_rows(target, at, start, stop, halves, rows, plane, plus, minus, accumulate, factor, tail)
    return -1


@kernel
def add_one(
    target: Array, at: int, start: int, stop: int, numbers: Array, halves: Halves, body: int, row_bytes: int,
    count: int, index: int, means: int, plane: int, accumulate: bool, factor: float, tail: Array,
) -> Scalar:  # fmt: skip
    """The same of one row."""
    plus, minus, signs = numbers_of(numbers, body, count, index, means)
    if not are_means(plus, minus, plane):
        return 0
    add_rows(target, at, start, stop, halves, (signs,), plane, (plus,), (minus,), accumulate, factor, tail)
    return -1


@kernel
def numbers_of(numbers: Array, body: int, count: int, index: int, means: int) -> Scalar:
    """Both means of a row's block, and where its signs begin among the 16-bit words."""
    scales = body // numbers.itemsize
    plus = numbers[scales + means * index]
    minus = numbers[scales + 2 * index + 1] if means == 2 else -plus
    return plus, minus, (body + means * count * numbers.itemsize) // 2


@kernel
def plane_halves(numel: int) -> Scalar:
    """16-bit words of one bit an element: whole words of 32."""
    return 2 * ((numel + 31) // 32)


@kernel
def are_means(plus: float, minus: float, plane: int) -> Scalar:
    """Whether they have their signs and are finite; of two planes, whether both are sizes in order."""
    if plane:
        return 0 <= plus <= minus < np.inf
    return 0 <= plus < np.inf and -np.inf < minus <= 0


@kernel
def add_rows(
    target: Array, at: int, start: int, stop: int, halves: Halves, rows: Scalar, plane: int, plus: Scalar,
    minus: Scalar, accumulate: bool, factor: float, tail: Array,
) -> None:  # fmt: skip
    """Add rows (tuples of one length) to the target; a last group that is not whole goes by way of ``tail``."""
    whole = stop - (stop - start) % GROUP
    for i in range(start, whole, GROUP):
        prefetch(target, at + i + AHEAD)  # as fetch_block says; here one line at a time is faster
        add_group(halves, rows, i // GROUP, plane, plus, minus, target, at + i, accumulate, factor)
    if stop > whole:
        copy_block(tail, 0, target[at + whole :], stop - whole)
        add_group(halves, rows, whole // GROUP, plane, plus, minus, tail, 0, accumulate, factor)
        copy_block(target, at + whole, tail, stop - whole)


@kernel
def add_group(
    halves: Halves, rows: Scalar, half: int, plane: int, plus: Scalar, minus: Scalar, target: Array, at: int,
    accumulate: bool, factor: float,
) -> None:  # fmt: skip
    """Of one bit an element, or of two, ``plane`` words apart."""
    if plane:
        unpack_planes(halves, rows, half, plus, minus, target, at, accumulate, factor, plane)
    else:
        unpack_groups(halves, rows, half, plus, minus, target, at, accumulate, factor)


LANES = 128
SUM_BLOCK = 4096


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
                add_to_lanes(lanes, source, at, scale, old, kept)
            else:
                fill_q(q, source, at, scale, old, kept, num, has_feedback)
                clear_block(q, num, SUM_BLOCK - num)
                add_to_lanes(lanes, q, 0, one, zeros, 0)
            total += add_lanes(lanes, tree)
        if not np.isfinite(total):
            total = plain_chunk_sum(table, chunks, chunk, source, scale, old, has_feedback)
        sums[chunk] = total


@kernel
def add_to_lanes(lanes: Array, source: Array, at: int, scale: float, old: Array, kept: int) -> None:
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
def plain_chunk_sum(
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
            if has_feedback:  # whatever was there before is another residual's
                clear_blocks(new, table[segment, RESIDUAL], table[segment, NUMEL])
    return finite


class HostSigns(HostCodec):
    """``efsignsgd`` and ``onebit`` with the residual fused; one pass over the target to decode."""

    compressor: Signs
    fuses_gain: ClassVar[bool] = True
    stream_from: ClassVar[int] = STREAM_SOON_BYTES
    malformed_body: ClassVar[str] = "a mean has the wrong sign or is not finite"

    def encode_bodies(self, call: EncodeCall) -> bool:
        """Sum, scale, signs: block by block, or else segment by segment."""
        return self._encode_blocks(call) if self.compressor.block else self._encode_segments(call)

    def _encode_blocks(self, call: EncodeCall) -> bool:
        halves, block, kind = call.payload.view(np.uint16), self.compressor.block, call.layout.dtype

        def run_part(first: int, end: int) -> bool:
            old, new, rooms = call.old, call.new, np.zeros((3, block), kind)
            rooms[1] = -0.0  # as neutral_block
            if not call.has_feedback:
                old, new = np.zeros(block, kind), np.empty(block, kind)
            given = (
                call.source, call.scale, old, new, call.has_feedback, call.stream and call.has_feedback, call.numbers,
                halves, block,
            )  # fmt: skip
            return bool(self.encode_run(call, first, end, given, rooms))

        return all(self.run_chunks(run_part, len(call.work.chunks)))

    def encode_run(self, call: EncodeCall, first: int, end: int, given: tuple[Any, ...], rooms: Array) -> Any:
        """The blocks of a run of chunks: means, bits and residuals; whether all is finite."""
        means = self.compressor.num_means
        return encode_blocks(call.table, call.work.chunks, first, end, *given, means, rooms, call.gain)

    def _encode_segments(self, call: EncodeCall) -> bool:
        """Whole segments where they are small, chunk by chunk where they are large."""
        chunks, segments, numbers = call.work.chunks, call.work.segments, call.numbers
        sums = np.empty(len(chunks), dtype=np.float64)
        written = call.stream, numbers, call.payload.view(np.uint16)

        def fused(first: int, end: int) -> bool:
            return bool(
                encode_segments(call.table, chunks, segments, first, end, *call.given, *written, sums, call.gain)
            )

        def split(position: int) -> bool:
            segment = int(segments[position])
            mine = chunks[call.table[segment, FIRST_CHUNK] : call.table[segment, END_CHUNK]]
            my_sums = sums[call.table[segment, FIRST_CHUNK] : call.table[segment, END_CHUNK]]
            self.share(sum_chunks, call, mine, call.source, call.scale, call.old, call.has_feedback, my_sums)
            if not write_scale(call.table, segment, sums, numbers):
                if call.has_feedback:
                    clear_blocks(call.new, call.table[segment, RESIDUAL], call.table[segment, NUMEL])
                return False
            self.share(sign_chunks, call, mine, *call.given, *written, call.gain)
            return True

        return all(self.run_segments(call.work, fused, split))

    def decode_bodies(self, call: DecodeCall) -> None:
        """Sum the rows, a few blocks at a time."""
        halves, how = call.payload.view(np.uint16), self.compressor
        self.share_decode(decode_blocks, call, call.numbers, halves, how.block, how.num_means, how.planes)
