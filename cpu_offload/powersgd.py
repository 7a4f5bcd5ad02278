"""PowerSGD on the host: three passes over the gradients beside the residual's own.

Encode reads gradient and residual, writes M where the new residual will be, and multiplies each row by Q while it is in
the cache. Transform reads M for Q = M' P, and once more to subtract the product. Decode writes the target. All
that ranks must agree on (orthonormalising, decoding) is done in a fixed order of additions, without a BLAS: those
choose their order by alignment, by cores and by processor. The thin products here are bound by memory anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from espresso.compressors.base import Array, Decoding, DrawKey, Encoding, Factors, Feedback, Layout
from espresso.compressors.payload import check_range
from espresso.compressors.powersgd import PowerSgd, matrix_of, random_start, start_key
from espresso.cpu_offload.codec import check_array
from espresso.cpu_offload.jit import Scalar, kernel, sum_kernel
from espresso.cpu_offload.kernels import keep_block
from espresso.cpu_offload.pool import WorkerPool
from espresso.cpu_offload.work import split_parts


class HostPowerSgd:
    """``powersgd``; see :class:`espresso.compressors.base.RoundsCodec` for what the methods promise.

    Args:
        compressor: its parameters.
        pool: shares the matrices of a call out over threads; None runs on the calling thread.
    """

    def __init__(self, compressor: PowerSgd, pool: WorkerPool | None = None) -> None:
        self.compressor = compressor
        self.pool = pool

    def num_values(self, layout: Layout, number: int) -> int:
        """How many numbers the vector of a round has."""
        return self.compressor.num_values(layout, number)

    def encode_values(self, encoding: Encoding, values: Array, factors: Factors) -> None:
        """P = M Q of every matrix; raw segments as they are."""
        layout, source, starts, feedback = encoding.layout, encoding.source, encoding.starts, encoding.feedback
        assert feedback is not None, "a compressor of several rounds keeps a residual"
        check_array("source", source, layout)
        check_range("starts", starts, layout, source.size)
        self._check(layout, values, 0, feedback)
        offsets = self._offsets(layout, 0)
        weight = layout.dtype.type(encoding.scale)

        def encode(index: int) -> None:
            rank, numel = int(layout.counts[index]), int(layout.numels[index])
            mine = source[starts[index] :][:numel]
            old, new = (a[feedback.starts[index] :][:numel] for a in (feedback.old, feedback.new))
            out = values[offsets[index] : offsets[index + 1]]
            if rank == 0:
                add_scaled(mine, weight, old, out)
                np.multiply(old, 1 - layout.dtype.type(feedback.gain), out=new)
                return
            segment = layout.segments[index]
            rows, columns = matrix_of(segment.shape)
            q = self.start(segment.tensor, rank, columns, layout.dtype, encoding.key, factors)
            left_products(mine, weight, old, new, rows, columns, q, out)

        self._each(layout, encode)

    def transform_values(self, layout: Layout, summed: Array, values: Array, *, feedback: Feedback) -> None:
        """Orthonormalise P in place, make Q = M' P, leave what is kept of M - P Q' in ``feedback.new``."""
        self._check(layout, summed, 0, feedback)
        self._check(layout, values, 1, feedback)
        first, second = self._offsets(layout, 0), self._offsets(layout, 1)

        def transform(index: int) -> None:
            rank = int(layout.counts[index])
            if rank == 0:
                return
            rows, columns = matrix_of(layout.segments[index].shape)
            p = summed[first[index] : first[index + 1]].reshape(rank, rows)
            q = values[second[index] : second[index + 1]].reshape(rank, columns)
            orthonormalise(p)
            kept, old = (a[feedback.starts[index] :][: rows * columns] for a in (feedback.new, feedback.old))
            right_products(kept, rows, columns, p, q)
            subtract_product(kept, rows, columns, p, q)
            keep_block(kept, 0, kept, old, 0, kept.size, layout.dtype.type(feedback.gain))

        self._each(layout, transform)

    def decode_values(self, decoding: Decoding, first: Array, second: Array, factors: Factors) -> bool:
        """Write ``scale * P Q'``; keep Q for the next step."""
        layout, target, starts = decoding.layout, decoding.target, decoding.starts
        check_array("target", target, layout)
        check_range("starts", starts, layout, target.size)
        left, right = self._offsets(layout, 0), self._offsets(layout, 1)
        weight = layout.dtype.type(decoding.scale)

        def decode(index: int) -> None:
            rank, numel = int(layout.counts[index]), int(layout.numels[index])
            out = target[starts[index] :][:numel]
            p = first[left[index] : left[index + 1]]
            if rank == 0:
                np.multiply(p, weight, out=out)
                return
            segment = layout.segments[index]
            rows, columns = matrix_of(segment.shape)
            q = second[right[index] : right[index + 1]].reshape(rank, columns)
            write_product(out, rows, columns, p.reshape(rank, rows), q, weight)
            if self.compressor.warm_start:
                factors.write(segment.tensor, q.copy())

        self._each(layout, decode)
        largest = float(np.max([np.max(np.abs(v), initial=0.0) for v in (first, second)]))  # NaN, where one has it
        # An element is at most rank products of a number up to 1 with one of Q.
        bound = largest * max(decoding.scale, 1.0) * max(int(layout.counts.max(initial=1)), 1)
        return math.isfinite(bound) and bound < float(np.finfo(layout.dtype).max)

    def start(
        self,
        tensor: str,
        rank: int,
        columns: int,
        dtype: np.dtype[np.floating],
        key: DrawKey,
        factors: Factors,
    ) -> Array:
        """Q of the last step; random where there is none, or where it has died (a step without gradients)."""
        kept = factors.read(tensor) if self.compressor.warm_start else None
        if kept is not None and kept.size == rank * columns:
            start = kept.reshape(rank, columns).astype(dtype)
            dead = ~start.any(axis=1)
            if not dead.any():
                return start
        else:
            start, dead = np.empty((rank, columns), dtype), np.ones(rank, bool)
        start[dead] = random_start(tensor, rank, columns, start_key(self.compressor, key))[dead]
        return start

    def _offsets(self, layout: Layout, number: int) -> list[int]:
        """Where every segment begins in the vector of a round, and where the last ends."""
        offsets = [0]
        for segment, rank, numel in zip(layout.segments, layout.counts.tolist(), layout.numels.tolist(), strict=True):
            raw = numel if number == 0 else 0
            offsets.append(offsets[-1] + (rank * matrix_of(segment.shape)[number] if rank else raw))
        return offsets

    def _each(self, layout: Layout, work: Callable[[int], None]) -> None:
        def part(first: int, end: int) -> None:
            for index in range(first, end):
                work(index)

        count = len(layout.segments)
        if self.pool is None or self.pool.num_threads == 1:
            part(0, count)
        else:
            self.pool.run(part, split_parts(count, count))

    def _check(self, layout: Layout, values: Array, number: int, feedback: Feedback) -> None:
        size = self.num_values(layout, number)
        if values.dtype != layout.dtype or values.shape != (size,) or not values.flags.c_contiguous:
            raise ValueError(
                f"the vector of round {number} must be contiguous {layout.dtype}[{size}],"
                f" got {values.dtype}{list(values.shape)}"
            )
        for what, kept in (("old", feedback.old), ("new", feedback.new)):
            check_array(f"feedback.{what}", kept, layout)
            check_range("feedback.starts", feedback.starts, layout, kept.size)


@kernel
def add_scaled(source: Array, scale: float, old: Array, out: Array) -> None:
    """``out = scale * source + old``."""
    for i in range(out.size):
        out[i] = scale * source[i] + old[i]


@sum_kernel
def _dot(row: Array, other: Array) -> Scalar:
    total = row.dtype.type(0)
    for j in range(row.size):
        total += row[j] * other[j]
    return total


@kernel
def left_products(
    source: Array, scale: float, old: Array, new: Array, rows: int, columns: int, q: Array, out: Array
) -> None:
    """``new = M = scale * source + old``, and ``out[k, i] = M[i] . q[k]``, row by row."""
    for i in range(rows):
        row = new[i * columns : (i + 1) * columns]
        mine = source[i * columns : (i + 1) * columns]
        before = old[i * columns : (i + 1) * columns]
        for j in range(columns):
            row[j] = scale * mine[j] + before[j]
        for k in range(q.shape[0]):
            out[k * rows + i] = _dot(row, q[k])


@kernel
def right_products(matrix: Array, rows: int, columns: int, p: Array, q: Array) -> None:
    """``q[k] = sum over i of p[k, i] * M[i]``, in the order of the rows."""
    q[:] = 0
    for i in range(rows):
        row = matrix[i * columns : (i + 1) * columns]
        for k in range(p.shape[0]):
            weight, out = p[k, i], q[k]
            for j in range(columns):
                out[j] += weight * row[j]


@kernel
def subtract_product(matrix: Array, rows: int, columns: int, p: Array, q: Array) -> None:
    """``M[i] -= sum over k of p[k, i] * q[k]``."""
    for i in range(rows):
        row = matrix[i * columns : (i + 1) * columns]
        for k in range(p.shape[0]):
            weight, part = p[k, i], q[k]
            for j in range(columns):
                row[j] -= weight * part[j]


@kernel
def write_product(target: Array, rows: int, columns: int, p: Array, q: Array, scale: float) -> None:
    """``target[i] = sum over k of (scale * p[k, i]) * q[k]``, in the order of k: the same bits everywhere."""
    for i in range(rows):
        row = target[i * columns : (i + 1) * columns]
        weight, part = scale * p[0, i], q[0]
        for j in range(columns):
            row[j] = weight * part[j]
        for k in range(1, p.shape[0]):
            weight, part = scale * p[k, i], q[k]
            for j in range(columns):
                row[j] += weight * part[j]


TINY = 1e-6
"""A column that loses all but this part of its length to the ones before it depends on them, and becomes zero."""


@kernel
def orthonormalise(p: Array) -> None:
    """Modified Gram-Schmidt on the rows of ``p`` (columns of P), twice, in double, in a fixed order.

    A column of zeros, or one that depends on those before it, becomes zero: it then sends nothing.
    """
    for k in range(p.shape[0]):
        row = p[k]
        length = _norm(row)
        for _ in range(2):
            for other in range(k):
                product = 0.0
                for i in range(row.size):
                    product += np.float64(p[other, i]) * np.float64(row[i])
                for i in range(row.size):
                    row[i] -= product * p[other, i]
        left = _norm(row)
        if not math.isfinite(left):
            row[:] = math.nan  # an inf must stay visible
        elif left <= TINY * length:
            row[:] = 0
        else:
            for i in range(row.size):
                row[i] /= left


@kernel
def _norm(row: Array) -> float:
    largest = 0.0
    for i in range(row.size):
        if abs(row[i]) > largest or math.isnan(row[i]):
            largest = abs(np.float64(row[i]))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    total = 0.0
    for i in range(row.size):
        part = np.float64(row[i]) / largest
        total += part * part
    return largest * math.sqrt(total)
