"""PowerSGD: every matrix as a product of two thin ones, by one step of power iteration.

Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019. With M = gradient + residual of one rank, Q of the step before::

    P = M Q                 summed over ranks, then orthonormalised (Gram-Schmidt, in double)
    Q = M' P                summed over ranks; the average is P Q' / ranks, and Q starts the next step
    residual = M - P (M' P)'

The residual subtracts the rank's own product, not the common one as the paper does: the sum over ranks is the same,
and each rank keeps no more than what P does not span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Compressor, DrawKey, Layout, Segment, Traits
from espresso.compressors.casts import NoCompression
from espresso.compressors.common import BaseCompressor
from espresso.compressors.draws import tensor_hash
from espresso.compressors.payload import layout_dtype


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns): the first dimension, and all others together; (0, 0) if it has fewer than two."""
    if len(shape) < 2 or 0 in shape:
        return 0, 0
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0], columns


def start_key(compressor: PowerSgd, key: DrawKey) -> DrawKey:
    """What random starts depend on. With a warm start not on the step: then they are drawn once, also for a column
    that dies later, and a job that goes on from a checkpoint draws the same."""
    return replace(key, step=0) if compressor.warm_start else key


def random_start(tensor: str, rank: int, columns: int, key: DrawKey) -> npt.NDArray[np.float64]:
    """Q where no step has left one: float64[rank, columns], equal on all ranks."""
    seed = [key.seed & (2**63 - 1), tensor_hash(tensor) & (2**63 - 1), key.step]
    return np.random.default_rng(seed).standard_normal((rank, columns))


@dataclass(frozen=True)
class PowerSgd(BaseCompressor):
    """Two vectors a group, no payload: round 0 holds the P of all matrices, round 1 their Q.

    In order of the segments, for a matrix of n rows and m columns: rank x n numbers in round 0, one column of P after
    the other, rank x m in round 1 likewise. What travels raw stands as it is in round 0, and takes nothing in
    round 1. Raw are tensors of fewer than two dimensions, those under ``raw_below`` elements, and those that would
    save less than ``min_saving``: where (n + m) * rank * min_saving is above n * m.

    Shard rule: a tensor is never cut, neither into partitions nor into shards; the vectors are cut like any
    raw numbers.

    Attributes:
        rank: columns of P and Q; at most n and m.
        start_iter: steps before this one are exchanged raw.
        warm_start: begin with the last step's Q; else with a new random one in every step.
        min_saving: see above.
    """

    name: ClassVar[str] = "powersgd"
    traits: ClassVar[Traits] = Traits(summable=True, rounds=2)
    algorithm: ClassVar[int] = 16
    scheduled: ClassVar[frozenset[str]] = frozenset({"start_iter"})

    rank: int = 1
    start_iter: int = 10
    warm_start: bool = True
    min_saving: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("rank", low=1)
        self.check_int("start_iter", low=0)
        self.check_bool("warm_start")
        self.check_float("min_saving", low=1.0, high=1e9)

    @property
    def is_scheduled(self) -> bool:
        """Whether the first steps are raw."""
        return self.start_iter > 0

    @property
    def start_step(self) -> int:
        """The first step that compresses."""
        return self.start_iter

    def in_force(self, epoch: int, step: int) -> Compressor:
        """No compression before ``start_iter``."""
        return self if step >= self.start_iter else NoCompression()

    def layout(self, segments: Sequence[Segment], dtype: npt.DTypeLike = np.float32) -> Layout:
        """Ranks (``counts``) and what travels raw; ``num_bytes`` are those of both rounds.

        Raises:
            ValueError: a segment is only a part of its tensor, or the dtype is neither float32 nor float64.
        """
        number = layout_dtype(dtype)
        for segment in segments:
            size = int(np.prod(segment.shape, dtype=np.int64))
            if segment.tensor_start or segment.numel != size:
                raise ValueError(
                    f"powersgd works on whole tensors; {segment.tensor!r} of shape {list(segment.shape)} was given"
                    f" as {segment.numel} elements from {segment.tensor_start}"
                )
        ranks = np.array([self.rank_of(segment.shape) for segment in segments], np.int64)
        numels = np.array([segment.numel for segment in segments], np.int64)
        numbers = sum(first + second for first, second in map(self._numbers_of, segments))
        none = np.zeros(len(segments), np.int64)
        return Layout(tuple(segments), number, numbers * number.itemsize, b"", numels, none, ranks, ranks == 0)

    def rank_of(self, shape: tuple[int, ...]) -> int:
        """The rank used for a tensor, 0 if it travels raw."""
        rows, columns = matrix_of(shape)
        rank = min(self.rank, rows, columns)
        too_small = rows * columns < self.raw_below
        return 0 if too_small or rank * (rows + columns) * self.min_saving > rows * columns else rank

    def num_values(self, layout: Layout, number: int) -> int:
        """Numbers in the vector of a round."""
        return sum(self._numbers_of(segment)[number] for segment in layout.segments)

    def _numbers_of(self, segment: Segment) -> tuple[int, int]:
        rank = self.rank_of(segment.shape)
        rows, columns = matrix_of(segment.shape)
        return (rank * rows, rank * columns) if rank else (segment.numel, 0)
