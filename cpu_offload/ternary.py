"""Sparse ternary bodies on the host. Body and the shape of a mean's sum: :mod:`espresso.compressors.ternary`.

What is sent is found as all sparsifiers find it (:mod:`espresso.cpu_offload.sparse`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.compressors import ternary
from espresso.compressors.base import Array
from espresso.compressors.ternary import COUNTED, LANES, TILE
from espresso.cpu_offload.jit import Scalar, kernel, prefetch, room
from espresso.cpu_offload.kernels import add_kept, clear_block, clear_blocks, cut_of
from espresso.cpu_offload.work import COUNT, HIGH, LOW, NUMEL, OFFSET, RESIDUAL, SEGMENT, SOURCE, Table

num_tiles, tile_ends_at = kernel(ternary.num_tiles), kernel(ternary.tile_ends_at)
counts_at, slots_at = kernel(ternary.counts_at), kernel(ternary.slots_at)


@kernel
def parts_of(words: npt.NDArray[np.uint32], at: int, numel: int, k: int, itemsize: int) -> Any:
    """The ends, counts and slots of the body at byte ``at``."""
    octets = words.view(np.uint8)
    ends = words[(at + tile_ends_at(numel, itemsize)) // 4 :][: num_tiles(numel) - 1]
    counts = octets[at + counts_at(numel, itemsize) : at + slots_at(numel, itemsize)]
    return ends, counts, octets[at + slots_at(numel, itemsize) :][:k]


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
    ends, counts, slots = parts_of(words, at, numel, k, bits.itemsize)
    clear_block(counts, 0, len(counts))
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
            for j in range(begin, begin + num):
                negative = numbers[j] < 0
                counts[index[j] // COUNTED] += 1
                slots[sent] = index[j] % COUNTED + (COUNTED if negative else 0)
                sent += 1
                if has_feedback:
                    left = numbers[j] - (-mean if negative else mean)
                    add_kept(new, row[RESIDUAL] + index[j], left, gain)
            if low + TILE < numel:
                ends[low // TILE] = sent
    words[at // 4] = sent
    words[at // 4 + 1] = 0
    clear_block(slots, sent, k - sent)
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
            ends, counts, slots = parts_of(words, at, row[NUMEL], row[COUNT], numbers.itemsize)
            slot = np.int64(ends[low // TILE - 1]) if low else 0
            for tile in range(low, high, TILE):
                mean = means[tile // TILE]
                stop = np.int64(ends[tile // TILE]) if tile + TILE < row[NUMEL] else num
                if not (0 <= mean < np.inf and slot <= stop <= num):
                    return bad
                for group in range(tile, min(tile + TILE, high), COUNTED):
                    behind = slot + np.int64(counts[group // COUNTED])
                    if behind > stop:
                        return bad
                    previous = np.int64(-1)
                    while slot < behind:
                        place = np.int64(slots[slot]) % COUNTED
                        if place <= previous or group + place >= high:
                            return bad
                        previous = place
                        out[group - low + place] += -mean if slots[slot] >= COUNTED else mean
                        slot += 1
                if slot != stop:
                    return bad
        if scale != 1:
            for i in range(len(out)):
                out[i] *= scale
    return 0
