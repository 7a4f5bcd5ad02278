"""Random-k on the host. Format and the drawing of positions: :mod:`espresso.compressors.randomk`.

Encode and decode make one pass each; positions are drawn stratum by stratum, in time proportional to k.

Keys, with mix = splitmix64's finaliser and all arithmetic modulo 2^64::

    salt    = mix(mix(mix(seed) + step) + site)
    segment = mix(mix(salt ^ hash(tensor)) + start)       hash: 8 bytes of BLAKE2b, little-endian
    U       = mix(segment + 2^63) mod d
    stratum = mix(segment + c)
    round r of the permutation maps halves (l, r) to (r, l ^ (mix(stratum + 65536 r + right) mod 2^half))
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Array, Layout, Starts
from espresso.compressors.draws import salt_of
from espresso.compressors.randomk import ROUNDS, STRATUM
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, SummableHostCodec
from espresso.cpu_offload.jit import Scalar, fence, kernel, prefetch, room
from espresso.cpu_offload.kernels import (
    can_stream,
    clear_block,
    clear_blocks,
    copy_block,
    fill_q,
    mix64,
    neutral_block,
    segment_key,
)
from espresso.cpu_offload.vectors import GROUP, drop_group
from espresso.cpu_offload.work import (
    COUNT,
    HIGH,
    LOW,
    NUMEL,
    OFFSET,
    RESIDUAL,
    SEGMENT,
    SOURCE,
    Table,
)

GROUPS = STRATUM // GROUP

AHEAD = 1024
"""Elements between what is streamed and what is prefetched, so that memory works while positions are drawn."""

Positions = npt.NDArray[np.int64]


@kernel
def first_slot(row: Table, key: int, element: int) -> Scalar:
    """s(x): how many slots lie before an element that begins a stratum, or before the end."""
    numel = np.uint64(row[NUMEL])
    shift = mix64(key + np.uint64(1 << 63)) % numel
    return np.int64((shift + np.uint64(row[COUNT]) * np.uint64(element)) // numel)


@kernel
def draw(key: int, stratum: int, num: int, positions: Positions) -> None:
    """``positions[j]`` = P(j), distinct numbers below ``num``."""
    stratum_key = mix64(key + np.uint64(stratum))
    half = np.uint64(1)
    while (np.uint64(1) << (half + half)) < np.uint64(num):
        half += np.uint64(1)
    mask = (np.uint64(1) << half) - np.uint64(1)
    for j in range(len(positions)):
        x = np.uint64(j)
        while True:
            left, right = x >> half, x & mask
            for r in range(ROUNDS):
                mixed = mix64(stratum_key + np.uint64(65536 * r) + right)
                left, right = right, left ^ (mixed & mask)
            x = (left << half) | right
            if x < np.uint64(num):
                break
        positions[j] = x


@kernel
def encode_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, new: Array,
    has_feedback: bool, stream: bool, numbers: Array, salt: int, infinity: int,
) -> Scalar:  # fmt: skip
    """Gather the drawn positions of q and clear them in the residual. One pass. Returns whether all of q is finite."""
    drawn = room(STRATUM, np.int64)
    dropped = room(GROUPS, np.uint16)
    q, zeros, kept = (
        room(STRATUM, source.dtype),
        room(STRATUM, source.dtype),
        room(STRATUM, source.dtype),
    )
    neutral_block(zeros, STRATUM)
    one = source.dtype.type(1)
    unlike = np.uint16(0)
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        key = segment_key(row, salt)
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], STRATUM):
            high = min(low + STRATUM, chunks[chunk, HIGH])
            num = high - low
            at, to = row[SOURCE] + low, row[RESIDUAL] + low
            begin, stop = first_slot(row, key, low), first_slot(row, key, high)
            positions = drawn[: stop - begin]
            draw(key, low // STRATUM, num, positions)
            mark(dropped, positions)
            body = numbers[row[OFFSET] // numbers.itemsize + begin :][: stop - begin]
            if has_feedback and num % GROUP == 0:
                unlike |= drop_groups(source, at, scale, old, to, new, to, num, dropped, infinity, stream)
                for j in range(len(positions)):
                    body[j] = source[at + positions[j]] * scale + old[to + positions[j]]
            else:
                fill_q(q, source, at, scale, old, to, num, has_feedback)
                groups = (num + GROUP - 1) // GROUP * GROUP
                clear_block(q, num, groups - num)
                unlike |= drop_groups(q, 0, one, zeros, 0, kept, 0, groups, dropped, infinity, False)
                for j in range(len(positions)):
                    body[j] = q[positions[j]]
                if has_feedback:
                    copy_block(new, to, kept, num)
    return unlike == 0


@kernel
def mark(dropped: npt.NDArray[np.uint16], positions: Positions) -> None:
    """Set the bits of the positions and no others."""
    clear_block(dropped, 0, len(dropped))
    for j in range(len(positions)):
        dropped[positions[j] // GROUP] |= np.uint16(1) << np.uint16(positions[j] % GROUP)


@kernel
def drop_groups(
    source: Array, at: int, scale: float, old: Array, kept: int, new: Array, to: int, num: int,
    dropped: npt.NDArray[np.uint16], infinity: int, stream: bool,
) -> Scalar:  # fmt: skip
    """Residual of ``num`` elements, a multiple of a group; nonzero if one is not finite."""
    unlike = np.uint16(0)
    stream = can_stream(stream, new, to)
    for i in range(0, num, GROUP):
        prefetch(source, at + i + AHEAD)
        prefetch(old, kept + i + AHEAD)
        unlike |= drop_group(source, at + i, scale, old, kept + i, new, to + i, dropped[i // GROUP], infinity, stream)
    if stream:
        fence()
    return unlike


@kernel
def decode_chunks(
    table: Table, chunks: Table, first: int, end: int, target: Array, scale: float, num_rows: int, row_bytes: int,
    numbers: Array, salt: int,
) -> None:  # fmt: skip
    """Zeros, and ``scale`` times the rows' sum at the drawn positions. One pass over the target."""
    drawn = room(STRATUM, np.int64)
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        key = segment_key(row, salt)
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], STRATUM):
            high = min(low + STRATUM, chunks[chunk, HIGH])
            begin, stop = first_slot(row, key, low), first_slot(row, key, high)
            positions = drawn[: stop - begin]
            draw(key, low // STRATUM, high - low, positions)
            out = target[row[SOURCE] + low :][: high - low]
            clear_blocks(out, 0, high - low)
            for j in range(len(positions)):
                total = out.dtype.type(0)
                for source in range(num_rows):
                    total += numbers[(source * row_bytes + row[OFFSET]) // numbers.itemsize + begin + j]
                out[positions[j]] = total * scale


class HostRandomK(SummableHostCodec):
    """``randomk`` with the residual fused; as payloads or as a vector of values for a reduction."""

    def segment_values(self, layout: Layout) -> Starts:
        """k numbers, or all of a raw segment."""
        return np.where(layout.raw, layout.numels, layout.counts)

    def encode_bodies(self, call: EncodeCall) -> bool:
        """One pass, chunks in any order."""
        salt = np.uint64(salt_of(call.key))
        return all(
            self.share(
                encode_chunks, call, call.work.chunks, *call.given, call.stream, call.numbers, salt, call.infinity
            )
        )

    def decode_bodies(self, call: DecodeCall) -> None:
        """One pass, chunks in any order."""
        self.share(decode_chunks, call, call.work.chunks, *call.given, call.numbers, np.uint64(salt_of(call.key)))

    def encode_vector(self, call: EncodeCall) -> bool:
        """As payloads; a number that is not finite and was not drawn shows as a NaN in the vector's first place."""
        finite = self.encode_raw_segments(call)
        finite = self.encode_bodies(call) and finite
        self.filter_residuals(call, call.work.chunks)
        if not finite:
            call.numbers[:1] = np.nan
        return finite

    def decode_vector(self, call: DecodeCall) -> bool:
        """As payloads."""
        self.decode_raw_segments(call)
        self.decode_bodies(call)
        return bool(np.isfinite(call.numbers).all())
