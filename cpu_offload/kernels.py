"""Numba kernels that several algorithms share. Single-threaded, nogil, cached on disk.

Every loop over elements runs over a slice of one block: LLVM then sees stride 1 and vectorises. Assignments to
slices do not: Numba's own loop for them is several times slower than ``copy_block`` and ``clear_block``. What has to
run at the memory's speed is in :mod:`espresso.cpu_offload.vectors`.

Tables are those of :mod:`espresso.cpu_offload.work`; offsets in payload views are in the view's own items.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Array
from espresso.cpu_offload.jit import Scalar, address, kernel, prefetch
from espresso.cpu_offload.vectors import STREAM_ALIGNMENT
from espresso.cpu_offload.work import HASH, HIGH, LOW, NUMEL, OFFSET, RESIDUAL, SEGMENT, SOURCE, START, Table

BLOCK = 1024
"""Elements that kernels treat at a time: a few such blocks stay in the first-level cache."""

LINE_BYTES = 64
"""A cache line on every machine we know; elsewhere too much or too little is asked for, and nothing breaks."""


@kernel
def fill_q(q: Array, source: Array, at: int, scale: float, old: Array, kept: int, num: int, has_feedback: bool) -> None:
    """``q[:num] = scale * source[at:] + old[kept:]``, or without the residual."""
    out = q[:num]
    new = source[at : at + num]
    if has_feedback:
        residual = old[kept : kept + num]
        for i in range(num):
            out[i] = new[i] * scale + residual[i]
    else:
        for i in range(num):
            out[i] = new[i] * scale


@kernel
def copy_block(target: Array, at: int, source: Array, num: int) -> None:
    """``target[at:][:num] = source[:num]``."""
    out, values = target[at : at + num], source[:num]
    for i in range(num):
        out[i] = values[i]


@kernel
def clear_block(target: Array, at: int, num: int) -> None:
    """``target[at:][:num] = 0``."""
    out = target[at : at + num]
    for i in range(num):
        out[i] = 0


@kernel
def neutral_block(target: Array, num: int) -> None:
    """``target[:num] = -0.0``, which added to any number, a zero of either sign included, gives that number."""
    out = target[:num]
    for i in range(num):
        out[i] = -0.0


@kernel
def can_stream(stream: bool, new: Array, to: int) -> Scalar:
    """Whether residuals from ``new[to]`` on may be written past the caches: wanted, and aligned for it."""
    return stream and (address(new) + to * new.itemsize) % STREAM_ALIGNMENT == 0


@kernel
def fetch_block(target: Array, at: int, num: int) -> None:
    """Ask for ``target[at:][:num]``, soon to be overwritten; no harm where that is outside the array.

    A store into a line that no cache near the core holds waits for it, and unlike a load it is not foreseen:
    decoding into gradients that lay idle during an exchange took half as long again without this.
    """
    for i in range(0, num, LINE_BYTES // target.itemsize):
        prefetch(target, at + i)


@kernel
def clear_blocks(target: Array, at: int, num: int) -> None:
    """As :func:`clear_block`, for long stretches that are not in a cache."""
    for low in range(0, num, BLOCK):
        fetch_block(target, at + low + BLOCK, BLOCK)
        clear_block(target, at + low, min(BLOCK, num - low))


@kernel
def keep_block(new: Array, at: int, left: Array, old: Array, kept: int, num: int, gain: float) -> None:
    """``new[at:][:num] = gain * left + (1 - gain) * old[kept:]``; what is left itself with a gain of 1."""
    if gain == 1:
        copy_block(new, at, left, num)
        return
    out, values, before = new[at : at + num], left[:num], old[kept : kept + num]
    rest = new.dtype.type(1) - gain
    for i in range(num):
        out[i] = gain * values[i] + rest * before[i]


@kernel
def filter_chunks(table: Table, chunks: Table, first: int, end: int, old: Array, new: Array, gain: float) -> None:
    """``new = gain * new + (1 - gain) * old`` in these chunks, for encoders that do not do it themselves. One pass."""
    for chunk in range(first, end):
        low = table[chunks[chunk, SEGMENT], RESIDUAL] + chunks[chunk, LOW]
        num = chunks[chunk, HIGH] - chunks[chunk, LOW]
        keep_block(new, low, new[low : low + num], old, low, num, gain)


@kernel
def encode_raw(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, new: Array,
    has_feedback: bool, numbers: Array, bits: Array, infinity: int, gain: float,
) -> Scalar:  # fmt: skip
    """Copy q into the bodies of raw segments; their residual drains to 0. One pass. Returns whether all is finite."""
    worst = bits.dtype.type(0)
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        low, num = chunks[chunk, LOW], chunks[chunk, HIGH] - chunks[chunk, LOW]
        body = numbers[row[OFFSET] // numbers.itemsize + low :][:num]
        fill_q(body, source, row[SOURCE] + low, scale, old, row[RESIDUAL] + low, num, has_feedback)
        as_bits = bits[row[OFFSET] // bits.itemsize + low :][:num]
        chunk_worst = bits.dtype.type(0)
        for i in range(num):
            chunk_worst = max(chunk_worst, bits.dtype.type(as_bits[i] & infinity))
        worst = max(worst, chunk_worst)
        if has_feedback:
            clear_block(new, row[RESIDUAL] + low, num)
            if gain != 1:
                at = row[RESIDUAL] + low
                keep_block(new, at, new[at : at + num], old, at, num, gain)
    return worst != infinity


@kernel
def decode_raw(
    table: Table, chunks: Table, first: int, end: int, target: Array, scale: float, num_rows: int, row_bytes: int,
    numbers: Array,
) -> None:  # fmt: skip
    """``target = scale * sum over rows`` of raw bodies, rows in order. One pass over the target."""
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], BLOCK):
            num = min(BLOCK, chunks[chunk, HIGH] - low)
            out = target[row[SOURCE] + low :][:num]
            fetch_block(target, row[SOURCE] + low + BLOCK, BLOCK)
            if not num_rows:
                clear_block(out, 0, num)
            for source in range(num_rows):
                body = numbers[(source * row_bytes + row[OFFSET]) // numbers.itemsize + low :][:num]
                if source:
                    for i in range(num):
                        out[i] += body[i]
                else:
                    for i in range(num):
                        out[i] = body[i]
            for i in range(num):
                out[i] *= scale


def fill_nan(table: Table, target: Array) -> None:
    """Make every segment of the target NaN."""
    for start, numel in table[:, (SOURCE, NUMEL)].tolist():
        target[start : start + numel] = np.nan


@kernel
def add_kept(new: Array, at: int, left: float, gain: float) -> None:
    """What is kept of ``left``, where ``new`` has what is kept of nothing."""
    new[at] = left if gain == 1 else gain * left + new[at]


@kernel
def kth_largest(bits: Array, num: int, k: int, histogram: npt.NDArray[np.int64]) -> Scalar:
    """The k-th largest of ``bits[:num]`` (magnitudes, 1 <= k <= num) and how many equal to it belong to the top k.

    A radix selection of 11 bits a round, of what they are above the least; what shares the prefix found so far moves to
    the front, and is all that the next round looks at. (Numbers that passed a threshold begin with the same few bits:
    in a histogram of those each count waits for the one before.)
    """
    least = largest = bits[0]
    for i in range(num):
        least, largest = min(least, bits[i]), max(largest, bits[i])
    base, span = np.uint64(least), np.uint64(largest) - np.uint64(least)
    prefix = np.uint64(0)
    shift = 0
    while span >> np.uint64(shift):
        shift += 1
    while shift > 0:
        step = min(11, shift)
        shift -= step
        clear_block(histogram, 0, len(histogram))
        mask = np.uint64((1 << step) - 1)
        for i in range(num):
            histogram[((np.uint64(bits[i]) - base) >> np.uint64(shift)) & mask] += 1
        digit = (1 << step) - 1
        while histogram[digit] < k:
            k -= histogram[digit]
            digit -= 1
        prefix |= np.uint64(digit) << np.uint64(shift)
        kept = 0
        for i in range(num if shift else 0):
            value = bits[i]
            bits[kept] = value
            kept += ((np.uint64(value) - base) >> np.uint64(shift)) == (prefix >> np.uint64(shift))
        num = kept
    return base + prefix, k


@kernel
def cut_of(
    chunks: Table, first: int, end: int, k: int, magnitude: int, value: Array, found: Table, chosen: Array,
    histogram: npt.NDArray[np.int64],
) -> Scalar:  # fmt: skip
    """(cut, ties): of the candidates, as bits in ``value``, the top k are those above the cut and the first ties on it.

    Chunk c has ``found[c]`` of them from its LOW on. ``chosen`` has room for all.
    """
    total = 0
    for chunk in range(first, end):
        total += found[chunk]
    if total <= k:
        return chosen.dtype.type(0), total
    taken = 0
    for chunk in range(first, end):
        num = found[chunk]
        out, values = chosen[taken : taken + num], value[chunks[chunk, LOW] :][:num]
        for i in range(num):
            out[i] = values[i] & magnitude
        taken += num
    kth, ties = kth_largest(chosen, total, k, histogram)
    return chosen.dtype.type(kth), ties


@kernel
def mix64(value: int) -> Scalar:
    """A bijection of 64-bit numbers in which every input bit reaches every output bit (splitmix64's finaliser)."""
    x = np.uint64(value)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel
def segment_key(row: Table, salt: int) -> Scalar:
    """What a segment's draws depend on."""
    return mix64(mix64(np.uint64(salt) ^ np.uint64(row[HASH])) + np.uint64(row[START]))


@kernel
def all_finite(bits: Array, infinity: int) -> Scalar:
    """Whether no exponent has all bits set, as ``infinity`` has."""
    worst = bits.dtype.type(0)
    for i in range(len(bits)):
        worst = max(worst, bits.dtype.type(bits[i] & infinity))
    return worst != infinity
