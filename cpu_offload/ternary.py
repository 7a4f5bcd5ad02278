"""Sparse ternary bodies on the host. Body and the shape of a mean's sum: :mod:`espresso.compressors.ternary`.

What is sent is found as all sparsifiers find it (:mod:`espresso.cpu_offload.sparse`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.compressors import ternary
from espresso.compressors.base import Array
from espresso.compressors.ternary import LANES, TILE
from espresso.cpu_offload.jit import Scalar, kernel, prefetch, room, trailing_zeros
from espresso.cpu_offload.kernels import add_kept, all_finite, clear_block, clear_blocks, cut_of
from espresso.cpu_offload.work import COUNT, HIGH, LOW, NUMEL, OFFSET, RESIDUAL, SEGMENT, SOURCE, Table

AHEAD = 64
"""Candidates from the one that is written to the one whose residual is asked for; ``index`` is longer by as many."""

num_tiles, tile_ends_at = kernel(ternary.num_tiles), kernel(ternary.tile_ends_at)
place_bits, uppers_at = kernel(ternary.place_bits), kernel(ternary.uppers_at)
num_uppers, num_lowers = kernel(ternary.num_uppers), kernel(ternary.num_lowers)
first_upper, first_lower = kernel(ternary.first_upper), kernel(ternary.first_lower)


@kernel
def parts_of(words: npt.NDArray[np.uint32], at: int, numel: int, k: int, itemsize: int, bits: int) -> Any:
    """The ends, uppers and lowers of the body at byte ``at``."""
    ends = words[(at + tile_ends_at(numel, itemsize)) // 4 :][: num_tiles(numel) - 1]
    uppers = words[(at + uppers_at(numel, itemsize)) // 4 :]
    num = num_uppers(numel, k, bits)
    return ends, uppers[:num], uppers[num:][: num_lowers(numel, k, bits)]


@kernel
def keep_top(
    num: int, cut: int, ties: int, magnitude: int, index: npt.NDArray[np.uint32], value: Array, numbers: Array,
    has_feedback: bool, kept: Array, gain: float,
) -> Any:  # fmt: skip
    """Move those of ``num`` candidates to the front that are above the cut, or the next ties on it.

    Returns how many, and the ties that are left. The others go back to the residual.
    """
    sent = np.uint64(0)
    for i in range(num):
        if has_feedback:
            prefetch(kept, index[i + AHEAD])
        size = value.dtype.type(value[i] & magnitude)
        if size > cut or (size == cut and ties > 0):
            ties -= size == cut
            index[sent], value[sent] = index[i], value[i]
            sent += np.uint64(1)
        elif has_feedback:
            add_kept(kept, index[i], numbers[i], gain)
    return np.int64(sent), ties


@kernel
def code_tile(
    num: int, low: int, place: int, mean: float, index: npt.NDArray[np.uint32], numbers: Array,
    uppers: npt.NDArray[np.uint32], lowers: npt.NDArray[np.uint32], has_feedback: bool, kept: Array, gain: float,
) -> None:  # fmt: skip
    """Write places and signs of the ``num`` elements that are sent of the tile at ``low``, and what is left of them.

    What indices are made of is unsigned: of others Numba asks each time whether they count from the end, which is a
    third of the work. (Where the word's number is unsigned too, the loop is compiled to one of half the speed.)
    """
    bits, mask, sign = np.uint64(place), np.uint64((1 << place) - 1), np.uint64(1 << place)
    word, ones, at = np.uint64(0), np.uint32(0), np.uint64(0)
    held, width = np.uint64(0), np.uint64(0)
    for slot in range(num):
        if has_feedback:
            prefetch(kept, index[slot + AHEAD])
        negative = numbers[slot] < 0
        here = np.uint64(index[slot]) - np.uint64(low)
        bit = np.uint64(slot) + (here >> bits)
        ones = np.uint32(1) << np.uint32(bit % 32) | (ones if bit // 32 == word else np.uint32(0))
        word = bit // 32
        uppers[word] = ones
        held |= (here & mask | (sign if negative else np.uint64(0))) << width
        width += bits + np.uint64(1)
        if width >= 32:
            lowers[at] = np.uint32(held & np.uint64(0xFFFFFFFF))
            at += np.uint64(1)
            held >>= np.uint64(32)
            width -= np.uint64(32)
        if has_feedback:
            add_kept(kept, index[slot], numbers[slot] - (-mean if negative else mean), gain)
    if width:
        lowers[at] = np.uint32(held)


@kernel
def mean_of(numbers: Array, sums: npt.NDArray[np.float64]) -> Scalar:
    """The mean magnitude, in the shape that the format gives its sum; ``sums`` is room for the lanes."""
    num = len(numbers)
    clear_block(sums, 0, LANES)
    for first in range(0, num, LANES):
        these = numbers[first : min(first + LANES, num)]
        for lane in range(len(these)):
            sums[lane] += np.float64(abs(these[lane])) / TILE
    half = LANES // 2
    while half:
        for lane in range(half):
            sums[lane] += sums[lane + half]
        half //= 2
    return numbers.dtype.type(sums[0] / num * TILE if num else 0.0)


@kernel
def emit_ternary(
    row: Table, chunks: Table, first: int, end: int, new: Array, has_feedback: bool, magnitude: int, infinity: int,
    index: npt.NDArray[np.uint32], value: Array, found: Table, chosen: Array, histogram: Table,
    words: npt.NDArray[np.uint32], bits: Array, gain: float,
) -> Scalar:  # fmt: skip
    """Write the top k of the candidates to the body, what is left of all to the residual; False if one is not finite.

    Tile by tile: what is sent of its candidates, their mean, then each one's place and what is left of it.
    """
    k, numel, at = row[COUNT], row[NUMEL], row[OFFSET]
    numbers = value.view(new.dtype)
    cut, ties = cut_of(chunks, first, end, k, magnitude, value, found, chosen, histogram)
    means = bits.view(new.dtype)[(at + 8) // bits.itemsize :][: num_tiles(numel)]
    place = place_bits(numel, k)
    ends, uppers, lowers = parts_of(words, at, numel, k, bits.itemsize, place)
    clear_block(uppers, 0, len(uppers))
    clear_block(lowers, 0, len(lowers))
    sums, kept = room(LANES, np.float64), new[row[RESIDUAL] :]
    finite, sent = True, 0
    for chunk in range(first, end):
        i = chunks[chunk, LOW]
        stop = i + found[chunk]
        finite &= all_finite(value[i:stop], infinity)
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], TILE):
            begin = i
            while i < stop and index[i] < low + TILE:
                i += 1
            num = i - begin
            if cut:
                num, ties = keep_top(
                    num, cut, ties, magnitude, index[begin:], value[begin:], numbers[begin:], has_feedback, kept, gain
                )
            mean = mean_of(numbers[begin : begin + num], sums)
            means[low // TILE] = mean
            upper, lower = first_upper(sent, low // TILE, place), first_lower(sent, low // TILE, place)
            code_tile(
                num, low, place, mean, index[begin:], numbers[begin:], uppers[upper:], lowers[lower:], has_feedback,
                kept, gain,
            )  # fmt: skip
            sent += num
            if low + TILE < numel:
                ends[low // TILE] = sent
    words[at // 4] = sent
    words[at // 4 + 1] = 0
    return finite


@kernel
def add_tile(
    num: int, place: int, mean: float, uppers: npt.NDArray[np.uint32], lowers: npt.NDArray[np.uint32], out: Array
) -> Scalar:
    """Add ``num`` signed means to a tile; False if the places are malformed."""
    bits, mask = np.uint64(place), np.uint64((1 << place) - 1)
    slots, size, slot, end = np.uint64(num), np.uint64(len(out)), np.uint64(0), np.uint64(0)
    held, width, at = np.uint64(0), np.uint64(0), np.uint64(0)
    end_bit = num + ((len(out) + (1 << place) - 1) >> place)
    for first in range(0, end_bit, 64):
        ones = np.uint64(uppers[first // 32])
        if first + 32 < end_bit:
            ones |= np.uint64(uppers[first // 32 + 1]) << np.uint64(32)
        while ones:
            group = np.uint64(first) + np.uint64(trailing_zeros(ones)) - slot
            ones &= ones - np.uint64(1)
            if slot == slots:
                return False
            if width <= bits:
                held |= np.uint64(lowers[at]) << width
                at += np.uint64(1)
                width += np.uint64(32)
            here = group << bits | held & mask
            if here < end or here >= size:  # they ascend
                return False
            end = here + np.uint64(1)
            out[here] += -mean if held >> bits & np.uint64(1) else mean
            held >>= bits + np.uint64(1)
            width -= bits + np.uint64(1)
            slot += np.uint64(1)
    return slot == slots


@kernel
def scatter_ternary(
    table: Table, chunks: Table, first: int, end: int, target: Array, scale: float, num_rows: int, row_bytes: int,
    numbers: Array, words: npt.NDArray[np.uint32],
) -> Scalar:  # fmt: skip
    """Fill chunks with zeros and add every row's signed means to them, rows in order.

    Everything is checked: one tile's end is where the next begins, so that a row passes only if all of it is good.
    """
    for chunk in range(first, end):
        segment = chunks[chunk, SEGMENT]
        row = table[segment]
        low, high = chunks[chunk, LOW], chunks[chunk, HIGH]
        out = target[row[SOURCE] + low :][: high - low]
        clear_blocks(out, 0, high - low)
        for source in range(num_rows):
            at = source * row_bytes + row[OFFSET]
            num = np.int64(words[at // 4])
            bad = 1 + source * len(table) + segment
            if num > row[COUNT] or words[at // 4 + 1] != 0:
                return bad
            means = numbers[(at + 8) // numbers.itemsize :][: num_tiles(row[NUMEL])]
            place = place_bits(row[NUMEL], row[COUNT])
            ends, uppers, lowers = parts_of(words, at, row[NUMEL], row[COUNT], numbers.itemsize, place)
            stop = np.int64(ends[low // TILE - 1]) if low else 0
            for tile in range(low, high, TILE):
                mean, begin = means[tile // TILE], stop
                stop = np.int64(ends[tile // TILE]) if tile + TILE < row[NUMEL] else num
                if not (0 <= mean < np.inf and begin <= stop <= num):
                    return bad
                upper, lower = first_upper(begin, tile // TILE, place), first_lower(begin, tile // TILE, place)
                here = out[tile - low :][: min(TILE, high - tile)]
                if not add_tile(stop - begin, place, mean, uppers[upper:], lowers[lower:], here):
                    return bad
        if scale != 1:
            for i in range(len(out)):
                out[i] *= scale
    return 0
