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
from espresso.cpu_offload.kernels import add_kept, clear_block, clear_blocks, cut_of
from espresso.cpu_offload.work import COUNT, HIGH, LOW, NUMEL, OFFSET, RESIDUAL, SEGMENT, SOURCE, Table

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
def emit_ternary(
    row: Table, chunks: Table, first: int, end: int, new: Array, has_feedback: bool, magnitude: int, infinity: int,
    index: npt.NDArray[np.uint32], value: Array, found: Table, chosen: Array, histogram: Table,
    words: npt.NDArray[np.uint32], bits: Array, gain: float,
) -> Scalar:  # fmt: skip
    """Write the top k of the candidates to the body, what is left of all to the residual; False if one is not finite.

    Tile by tile: what is sent moves to the front of the tile's candidates, to be looked at again with its mean known.
    """
    k, numel, at = row[COUNT], row[NUMEL], row[OFFSET]
    numbers = value.view(new.dtype)
    cut, ties = cut_of(chunks, first, end, k, magnitude, value, found, chosen, histogram)
    means = bits.view(new.dtype)[(at + 8) // bits.itemsize :][: num_tiles(numel)]
    place = place_bits(numel, k)
    ends, uppers, lowers = parts_of(words, at, numel, k, bits.itemsize, place)
    clear_block(uppers, 0, len(uppers))
    clear_block(lowers, 0, len(lowers))
    sums = room(LANES, np.float64)
    worst = chosen.dtype.type(0)
    sent = 0
    for chunk in range(first, end):
        i = chunks[chunk, LOW]
        stop = i + found[chunk]
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], TILE):
            begin, num = i, 0
            clear_block(sums, 0, LANES)
            while i < stop and index[i] < low + TILE:
                size = chosen.dtype.type(value[i] & magnitude)
                worst = max(worst, size)
                if size > cut or (size == cut and ties > 0):
                    ties -= size == cut
                    sums[num % LANES] += np.float64(abs(numbers[i])) / TILE
                    index[begin + num], value[begin + num] = index[i], value[i]
                    num += 1
                    if has_feedback:
                        prefetch(new, row[RESIDUAL] + index[i])
                elif has_feedback:
                    add_kept(new, row[RESIDUAL] + index[i], numbers[i], gain)
                i += 1
            half = LANES // 2
            while half:
                for lane in range(half):
                    sums[lane] += sums[lane + half]
                half //= 2
            mean = new.dtype.type(sums[0] / num * TILE if num else 0.0)
            means[low // TILE] = mean
            upper, lower = first_upper(sent, low // TILE, place), first_lower(sent, low // TILE, place)
            held, width = np.int64(0), np.int64(0)
            for j in range(begin, begin + num):
                negative = numbers[j] < 0
                here = np.int64(index[j]) - low
                bit = j - begin + (here >> place)
                uppers[upper + bit // 32] |= np.uint32(1 << (bit % 32))
                slot = here & ((1 << place) - 1)
                held |= (slot | (1 << place) if negative else slot) << width
                width += place + 1
                if width >= 32:
                    lowers[lower] = np.uint32(held & 0xFFFFFFFF)
                    lower += 1
                    held >>= 32
                    width -= 32
                if has_feedback:
                    left = numbers[j] - (-mean if negative else mean)
                    add_kept(new, row[RESIDUAL] + index[j], left, gain)
            if width:
                lowers[lower] = np.uint32(held)
            sent += num
            if low + TILE < numel:
                ends[low // TILE] = sent
    words[at // 4] = sent
    words[at // 4 + 1] = 0
    return worst < infinity


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
                size = min(TILE, high - tile)
                groups = (size + (1 << place) - 1) >> place
                upper, lower = first_upper(begin, tile // TILE, place), first_lower(begin, tile // TILE, place)
                held, width = np.int64(0), np.int64(0)
                slot, previous = np.int64(0), np.int64(-1)
                for first in range(0, stop - begin + groups, 32):
                    ones = np.uint64(uppers[upper + first // 32])
                    while ones:
                        group = first + trailing_zeros(ones) - slot
                        ones &= ones - np.uint64(1)
                        if slot == stop - begin:
                            return bad
                        if width <= place:
                            held |= np.int64(lowers[lower]) << width
                            lower += 1
                            width += 32
                        here = group << place | held & ((1 << place) - 1)
                        if here <= previous or here >= size:
                            return bad
                        previous = here
                        out[tile - low + here] += -mean if held >> place & 1 else mean
                        held >>= place + 1
                        width -= place + 1
                        slot += 1
                if slot != stop - begin:
                    return bad
        if scale != 1:
            for i in range(len(out)):
                out[i] *= scale
    return 0
