"""Sampled sparsifiers on the host. Body: :mod:`espresso.compressors.sparse`.

Encode makes two passes: a sample that sets a threshold (a hundredth of a pass), and one pass over the input that
collects what passes and writes the rest to the residual. The top k of the few that passed are sent; those few of them
that are not go back to the residual. Too few: the threshold falls and the pass repeats. A fixed threshold is raised
where a small sample says that more than k would pass; too few then, and the pass is made with the fixed one.

Magnitudes are compared as unsigned integers (the bits without the sign): the same order as the numbers', and
infinities and NaNs lie on top, so that they are always among the candidates and never need a look of their own.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from espresso.compressors import sparse
from espresso.compressors.base import Array
from espresso.compressors.sparse import RUN, SPAN, Selection, Sparsifier
from espresso.cpu_offload.codec import STREAM_SOON_BYTES, DecodeCall, EncodeCall, HostCodec
from espresso.cpu_offload.jit import Scalar, fence, kernel, prefetch, room, trailing_zeros
from espresso.cpu_offload.kernels import (
    BLOCK,
    add_kept,
    can_stream,
    clear_block,
    clear_blocks,
    cut_of,
    fill_q,
    keep_block,
    kth_largest,
    mix64,
    neutral_block,
)
from espresso.cpu_offload.pool import WorkerPool
from espresso.cpu_offload.ternary import AHEAD, emit_ternary, scatter_ternary
from espresso.cpu_offload.vectors import GROUP, filter_group
from espresso.cpu_offload.work import (
    CHUNK,
    COUNT,
    END_CHUNK,
    FIRST_CHUNK,
    HASH,
    HIGH,
    LOW,
    NUMEL,
    OFFSET,
    RESIDUAL,
    SEGMENT,
    SOURCE,
    Table,
)

LOWER_BY = 0.8

RUNS_AHEAD = 8
"""Runs of a sample from the one that is read to the one that is asked for."""

WORD = 4 * GROUP
"""Elements whose comparisons are looked at together."""

RAISE_FROM, RAISE_RUNS, RAISE_SLACK = 1 << 16, 64, 4.0
"""A fixed threshold that more than k pass is raised by a sample of so many runs, in segments from so many elements on;
its rank lies so many standard deviations below k, so that k pass the raised one nearly always."""

assert CHUNK == SPAN, "the slots of a chunk are those of a span"

sample_size = kernel(sparse.sample_size)
num_ends, ends_at = kernel(sparse.num_ends), kernel(sparse.ends_at)

Histogram = npt.NDArray[np.int64]


@kernel
def start_of_run(run: int, stride: int, salt: int) -> Scalar:
    """The first element of a run of a sample: somewhere in its stride."""
    if stride == RUN:
        return run * stride
    return run * stride + np.int64(mix64(np.uint64(salt) + np.uint64(run)) % np.uint64(stride - RUN))


@kernel
def sample_threshold(
    row: Table, source: Array, scale: float, old: Array, has_feedback: bool, num_runs: int, rank: int, salt: int,
    sample: Array, magnitude: int, histogram: Histogram,
) -> Scalar:  # fmt: skip
    """The ``rank``-th largest magnitude, as bits, of ``num_runs`` runs; of everything if they cover the segment.

    At least 1, so that zeros never pass. ``sample`` has room for the runs.
    """
    numel = row[NUMEL]
    q_bits = room(RUN, sample.dtype)
    q = q_bits.view(source.dtype)
    stride = max(numel // num_runs, RUN)
    taken = 0
    for run in range((numel + RUN - 1) // RUN if stride == RUN else num_runs):
        if stride > RUN:  # each run is a miss of the cache or two, in each array: several at once
            ahead = start_of_run(run + RUNS_AHEAD, stride, salt)
            for end in (0, RUN - 1):
                prefetch(source, row[SOURCE] + ahead + end)
                if has_feedback:
                    prefetch(old, row[RESIDUAL] + ahead + end)
        low = start_of_run(run, stride, salt)
        num = min(RUN, numel - low)
        fill_q(q, source, row[SOURCE] + low, scale, old, row[RESIDUAL] + low, num, has_feedback)
        for i in range(num):
            sample[taken + i] = q_bits[i] & magnitude
        taken += num
    if rank > taken:
        return sample.dtype.type(1)
    found, _ = kth_largest(sample, taken, rank, histogram)
    return max(sample.dtype.type(found), sample.dtype.type(1))


@kernel
def first_threshold(
    row: Table, source: Array, scale: float, old: Array, has_feedback: bool, part: float, slack: float, fixed: int,
    salt: int, sample: Array, magnitude: int, histogram: Histogram,
) -> Scalar:  # fmt: skip
    """The fixed threshold, if there is one, raised where a sample says that more than k would pass; else a sample's.

    What is raised changes nothing in what is sent as long as k pass (``is_enough``): the top k are among them.
    """
    if not fixed:
        num_runs, rank = sample_size(row[NUMEL], row[COUNT], part, slack)
    elif row[NUMEL] < RAISE_FROM:
        return fixed
    else:
        expected = RAISE_RUNS * RUN * (row[COUNT] / row[NUMEL])
        num_runs, rank = RAISE_RUNS, np.int64(expected + RAISE_SLACK * np.sqrt(expected) + 1)
    sampled = sample_threshold(
        row, source, scale, old, has_feedback, num_runs, rank, salt ^ row[HASH], sample, magnitude, histogram
    )
    return max(fixed, sampled)


@kernel
def is_enough(num: int, k: int, enough: float, fixed: int, threshold: int) -> Scalar:
    """Whether the pass need not be repeated: ``num`` passed, of a fixed threshold that was raised all k."""
    return threshold <= 1 or num >= (k if fixed and threshold > fixed else enough * k)


@kernel
def filter_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, new: Array,
    has_feedback: bool, stream: bool, threshold: int, magnitude: int, index: npt.NDArray[np.uint32], value: Array,
    found: Table, gain: float,
) -> None:  # fmt: skip
    """Collect what has at least the threshold's magnitude, and write what is kept if all of it is sent to ``new``.

    One pass. Chunk c leaves ``found[c]`` candidates, ascending, in ``index`` and ``value`` (bits) from its LOW on.
    """
    q_bits, kept_bits = room(BLOCK, value.dtype), room(BLOCK, value.dtype)
    q, kept = q_bits.view(source.dtype), kept_bits.view(source.dtype)
    zeros, one = room(BLOCK, source.dtype), source.dtype.type(1)
    neutral_block(zeros, BLOCK)
    values = value.view(source.dtype)
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        low, stop = chunks[chunk, LOW], chunks[chunk, HIGH]
        begin = count = low
        if has_feedback:
            num = (stop - low) // WORD * WORD
            count = filter_groups(
                source, row[SOURCE] + low, scale, old, row[RESIDUAL] + low, new, row[RESIDUAL] + low, num, low, stream,
                threshold, magnitude, index, values, count, gain,
            )  # fmt: skip
            low += num
        while low < stop:
            num = min(BLOCK, stop - low)
            fill_q(q, source, row[SOURCE] + low, scale, old, row[RESIDUAL] + low, num, has_feedback)
            clear_block(q_bits, num, BLOCK - num)
            padded = (num + WORD - 1) // WORD * WORD
            count = filter_groups(
                q, 0, one, zeros, 0, kept, 0, padded, low, False, threshold, magnitude, index, values, count, one
            )
            if has_feedback:
                keep_block(new, row[RESIDUAL] + low, kept, old, row[RESIDUAL] + low, num, gain)
            low += num
        found[chunk] = count - begin


@kernel
def filter_groups(
    source: Array, at: int, scale: float, old: Array, kept: int, new: Array, to: int, num: int, low: int, stream: bool,
    threshold: int, magnitude: int, index: npt.NDArray[np.uint32], values: Array, count: int,
    gain: float,
) -> Scalar:  # fmt: skip
    """Residual and candidates of ``num`` elements, a multiple of ``WORD``, the first of which is ``low``.

    Where what passes is dense, the end of a run of ones is what no processor foresees: so several groups make one run.
    A candidate is computed again rather than read back, for what was just streamed is no longer near.
    """
    stream, sent = can_stream(stream, new, to), np.uint64(count)
    for first in range(0, num, WORD):
        mask = np.uint64(0)
        for group in range(first, first + WORD, GROUP):
            here, there, target = at + group, kept + group, to + group
            if stream:  # two constants: the loop is a quarter slower where the store asks
                passes = filter_group(source, here, scale, old, there, new, target, magnitude, threshold, gain, True)
            else:
                passes = filter_group(source, here, scale, old, there, new, target, magnitude, threshold, gain, False)
            mask |= passes << np.uint64(group - first)
        these, theirs = source[at + first :], old[kept + first :]
        while mask:
            i = np.uint64(trailing_zeros(mask))
            index[sent] = np.uint64(low + first) + i
            values[sent] = these[i] * scale + theirs[i]
            sent += np.uint64(1)
            mask &= mask - np.uint64(1)
    if stream:
        fence()
    return np.int64(sent)


@kernel
def emit_segment(
    row: Table, chunks: Table, first: int, end: int, new: Array, has_feedback: bool, magnitude: int, infinity: int,
    index: npt.NDArray[np.uint32], value: Array, found: Table, chosen: Array, histogram: Histogram,
    words: npt.NDArray[np.uint32], bits: Array, gain: float,
) -> Scalar:  # fmt: skip
    """Write the top k of the candidates to the body, the others back to the residual; False if one is not finite.

    Nearly all candidates are sent, so the filter counted on it: touching each one's residual here would cost two
    misses of the cache apiece, at a ratio of 1 % nearly a third of the whole encode.
    """
    k = row[COUNT]
    numbers = value.view(new.dtype)
    cut, ties = cut_of(chunks, first, end, k, magnitude, value, found, chosen, histogram)
    at = row[OFFSET]
    values = bits[at // bits.itemsize + 8 // bits.itemsize :][:k]
    ends, places = ends_and_places(words, at, row[NUMEL], k, bits.itemsize)
    worst = chosen.dtype.type(0)
    sent = 0
    for chunk in range(first, end):
        low = chunks[chunk, LOW]
        for i in range(low, low + found[chunk]):
            size = chosen.dtype.type(value[i] & magnitude)
            worst = max(worst, size)
            if size > cut or (size == cut and ties > 0):
                ties -= size == cut
                values[sent] = value[i]
                places[sent] = index[i] - low
                sent += 1
            elif has_feedback:
                add_kept(new, row[RESIDUAL] + index[i], numbers[i], gain)
        if chunk + 1 < end:
            ends[chunk - first] = sent
    words[at // 4] = sent
    words[at // 4 + 1] = 0
    clear_block(values, sent, k - sent)
    clear_block(places, sent, k - sent)
    return worst < infinity


@kernel
def exact_threshold(
    row: Table, source: Array, scale: float, old: Array, has_feedback: bool, magnitude: int, everything: Array,
    histogram: Histogram,
) -> Scalar:  # fmt: skip
    """The k-th largest magnitude of the whole segment, at least 1: for when samples mislead."""
    numel = row[NUMEL]
    q_bits = everything[:numel]
    fill_q(q_bits.view(source.dtype), source, row[SOURCE], scale, old, row[RESIDUAL], numel, has_feedback)
    for i in range(numel):
        q_bits[i] &= magnitude
    found, _ = kth_largest(q_bits, numel, row[COUNT], histogram)
    return max(everything.dtype.type(found), everything.dtype.type(1))


@kernel
def ends_and_places(words: npt.NDArray[np.uint32], at: int, numel: int, k: int, itemsize: int) -> Any:
    """What the body at byte ``at`` has behind its values."""
    num, first = num_ends(numel), (at + ends_at(k, itemsize)) // 4
    return words[first:][:num], words.view(np.uint16)[2 * (first + num) :][:k]


@kernel
def scatter_chunks(
    table: Table, chunks: Table, first: int, end: int, target: Array, scale: float, num_rows: int, row_bytes: int,
    numbers: Array, words: npt.NDArray[np.uint32],
) -> Scalar:  # fmt: skip
    """Fill chunks with zeros and scatter-add every row's slots that fall into them, rows in order.

    Every index is checked: in the chunk and ascending. The parts that chunks take of a row meet end to end,
    because one's end is where the next begins, so a row passes only if all its indices are good.
    """
    for chunk in range(first, end):
        segment = chunks[chunk, SEGMENT]
        row = table[segment]
        low, high = chunks[chunk, LOW], chunks[chunk, HIGH]
        out = target[row[SOURCE] + low :][: high - low]
        clear_blocks(out, 0, high - low)
        for source in range(num_rows):
            at = source * row_bytes + row[OFFSET]
            k = row[COUNT]
            num = np.int64(words[at // 4])
            bad = 1 + source * len(table) + segment
            if num > k or words[at // 4 + 1] != 0:
                return bad
            values = numbers[(at + 8) // numbers.itemsize :][:k]
            ends, places = ends_and_places(words, at, row[NUMEL], k, numbers.itemsize)
            span = low // SPAN
            begin = np.int64(ends[span - 1]) if span else 0
            stop = np.int64(ends[span]) if span < len(ends) else num
            if not begin <= stop <= num:
                return bad
            previous = np.int64(-1)
            for slot in range(begin, stop):
                place = np.int64(places[slot])
                if place <= previous or place >= high - low:
                    return bad
                previous = place
                out[place] += values[slot]
        if scale != 1:
            for i in range(len(out)):
                out[i] *= scale
    return 0


@kernel
def lowered(threshold: int, one: Array, like: Array) -> Scalar:
    """The bits of LOWER_BY times the threshold; at least 1. ``one`` is room for one number, ``like`` has its dtype."""
    one[0] = threshold
    number = one.view(like.dtype)
    number[0] *= like.dtype.type(LOWER_BY)
    return max(one[0], one.dtype.type(1))


@kernel
def encode_segments(
    table: Table, chunks: Table, segments: Table, first: int, end: int, source: Array, scale: float, old: Array,
    new: Array, has_feedback: bool, stream: bool, magnitude: int, infinity: int, part: float, slack: float,
    enough: float, attempts: int, exact: bool, fixed: int, salt: int, index: npt.NDArray[np.uint32], value: Array,
    found: Table, chosen: Array, histogram: Histogram, words: npt.NDArray[np.uint32], bits: Array, gain: float,
    is_ternary: bool,
) -> Scalar:  # fmt: skip
    """Sample, filter until enough passes, emit; for each of a run of segments. False if one is not finite."""
    finite = True
    for position in range(first, end):
        row = table[segments[position]]
        low, high = row[FIRST_CHUNK], row[END_CHUNK]
        threshold = first_threshold(
            row, source, scale, old, has_feedback, part, slack, fixed, salt, chosen, magnitude, histogram
        )
        for attempt in range(attempts + 2):
            filter_chunks(
                table, chunks, low, high, source, scale, old, new, has_feedback, stream, threshold, magnitude, index,
                value, found, gain,
            )  # fmt: skip
            if is_enough(found[low:high].sum(), row[COUNT], enough, fixed, threshold):
                break
            if fixed:
                threshold = fixed
            elif attempt < attempts:
                threshold = lowered(threshold, chosen[:1], source)
            elif exact:
                threshold = exact_threshold(row, source, scale, old, has_feedback, magnitude, chosen, histogram)
            else:
                break
        if is_ternary:
            finite &= emit_ternary(
                row, chunks, low, high, new, has_feedback, magnitude, infinity, index, value, found, chosen,
                histogram, words, bits, gain,
            )  # fmt: skip
        else:
            finite &= emit_segment(
                row, chunks, low, high, new, has_feedback, magnitude, infinity, index, value, found, chosen,
                histogram, words, bits, gain,
            )  # fmt: skip
    return finite


class Scratch(threading.local):
    """Buffers of one thread, kept between calls: fresh pages would cost more than the arithmetic.

    ``index`` and ``value`` hold a segment's candidates: as long as the longest segment, touched only where used.
    """

    def __init__(self) -> None:
        self.index = np.empty(0, np.uint32)
        self.value: Array = np.empty(0, np.uint32)
        self.chosen: Array = np.empty(0, np.uint32)
        self.histogram = np.empty(1 << 11, np.int64)

    def reserve(self, numel: int, dtype: np.dtype[Any]) -> None:
        """Make room for the candidates of a segment."""
        if self.index.size < numel + AHEAD or self.value.dtype != dtype:
            self.index = np.empty(numel + AHEAD, np.uint32)
            self.value = np.empty(numel + RUN, dtype)
            self.chosen = np.empty(numel + RUN, dtype)


class HostSparse(HostCodec):
    """``topk``, ``dgc``, ``threshold`` and ``stc`` with the residual fused."""

    fuses_gain: ClassVar[bool] = True
    stream_from: ClassVar[int] = STREAM_SOON_BYTES
    malformed_body: ClassVar[str] = "its count or indices are out of range or out of order"

    def __init__(self, compressor: Sparsifier, pool: WorkerPool | None = None) -> None:
        super().__init__(compressor, pool)
        self._selection = compressor.selection()
        self._is_ternary = compressor.is_ternary
        self._scratch = Scratch()

    def encode_bodies(self, call: EncodeCall) -> bool:
        """Whole segments where they are small; large ones share the pass over the input."""
        work, how = call.work, self._selection
        found = np.empty(len(work.chunks), dtype=np.int64)

        def fused(first: int, end: int) -> bool:
            scratch = self._scratch
            scratch.reserve(int(call.table[work.segments[first:end], NUMEL].max()), call.bits.dtype)
            return bool(
                encode_segments(
                    call.table, work.chunks, work.segments, first, end, *call.given, call.stream, call.magnitude,
                    call.infinity, how.part, how.slack, how.enough, how.attempts, how.exact, threshold_bits(call, how),
                    call.key.step, scratch.index, scratch.value, found, scratch.chosen, scratch.histogram, call.words,
                    call.bits, call.gain, self._is_ternary,
                )
            )  # fmt: skip

        def split(position: int) -> bool:
            return self._encode_large(call, int(work.segments[position]), found)

        return all(self.run_segments(work, fused, split))

    def decode_bodies(self, call: DecodeCall) -> None:
        """Zero-fill and scatter-add, chunk by chunk: one pass over the target and one over the slots."""
        self.share_decode(scatter_ternary if self._is_ternary else scatter_chunks, call, call.numbers, call.words)

    def _encode_large(self, call: EncodeCall, segment: int, found: Any) -> bool:
        """``encode_segments`` for one segment, with the filter shared out over the pool."""
        how, row = self._selection, call.table[segment]
        mine = slice(int(row[FIRST_CHUNK]), int(row[END_CHUNK]))
        chunks, found = call.work.chunks[mine], found[mine]
        scratch, magnitude, bits = self._scratch, call.magnitude, call.bits
        scratch.reserve(int(row[NUMEL]), bits.dtype)
        index, value = scratch.index, scratch.value  # the pool's threads have scratch of their own
        fixed = threshold_bits(call, how)
        threshold = first_threshold(
            row, call.source, call.scale, call.old, call.has_feedback, how.part, how.slack, fixed, call.key.step,
            scratch.chosen, magnitude, scratch.histogram,
        )  # fmt: skip
        for attempt in range(how.attempts + 2):
            bound = bits.dtype.type(threshold)
            self.share(
                filter_chunks, call, chunks, *call.given, call.stream, bound, magnitude, index, value, found, call.gain
            )
            if is_enough(int(found.sum()), row[COUNT], how.enough, fixed, bound):
                break
            if fixed:
                threshold = fixed
            elif attempt < how.attempts:
                threshold = lowered(bound, scratch.chosen[:1], call.source)
            elif how.exact:
                threshold = exact_threshold(
                    row, call.source, call.scale, call.old, call.has_feedback, magnitude, scratch.chosen,
                    scratch.histogram,
                )  # fmt: skip
            else:
                break
        emit = emit_ternary if self._is_ternary else emit_segment
        return bool(
            emit(
                row, chunks, 0, len(chunks), call.new, call.has_feedback, magnitude, call.infinity, index,
                value, found, scratch.chosen, scratch.histogram, call.words, bits, call.gain,
            )
        )  # fmt: skip


def threshold_bits(call: EncodeCall, how: Selection) -> Any:
    """The fixed threshold as bits; 0 if there is none. At least 1 otherwise, so that zeros never pass."""
    bits = call.layout.dtype.type(how.threshold).view(call.bits.dtype)
    return max(bits, call.bits.dtype.type(1)) if how.threshold else bits
