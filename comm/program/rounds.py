"""The compute steps of a compressor of several rounds, for one partition: encode, transform, decode.

::

    encode      M, first vector P      ── summed over ranks ──┐
    transform   P orthonormal, second vector Q, residual   <──┘── Q summed ──┐
    decode      average = P Q' / ranks, Q kept for the next step           <─┘

On a device the vectors live there; an offloaded step works on mirrors in host memory. M stays where the residual is,
so encode and transform run on the same side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from espresso.comm.keep.factors import FactorStore
from espresso.comm.keep.residual import FULL, Residual
from espresso.comm.memory import Array, Memory
from espresso.compressors.base import DrawKey, Feedback, Layout, RoundsCodec

Starts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Factors:
    """What was kept, as arrays of the memory that a step works in."""

    store: FactorStore
    memory: Memory

    def read(self, tensor: str) -> Array | None:
        kept = self.store.read(tensor)
        return None if kept is None else self.memory.here(kept)

    def write(self, tensor: str, values: Array) -> None:
        self.store.write(tensor, values)


class Rounds:
    """Buffers and actions of one partition.

    Args:
        residual: of this partition; its memory is where encode and transform run.
        kept_at: where its segments begin.
        key: of this iteration.
        memory: where the vectors live that collectives sum.
    """

    def __init__(
        self,
        layout: Layout,
        starts: Starts,
        factors: FactorStore,
        residual: Residual,
        kept_at: Starts,
        key: Callable[[], DrawKey],
        memory: Memory,
    ) -> None:
        self._layout, self._starts, self._factors = layout, starts, factors
        self.residual, self._kept_at, self._key, self._memory = residual, kept_at, key, memory
        self._vectors: list[Array] = []
        self._mirrors: dict[int, Array] = {}
        # Narrow residuals are unpacked into room that other steps use in between, so M is kept here.
        self._packed = residual.storage != FULL
        self._matrix: Array | None = None

    def vector(self, codec: RoundsCodec) -> torch.Tensor:
        """Make the next round's vector; the collectives that follow sum it in place."""
        size = codec.num_values(self._layout, len(self._vectors))
        values = self._memory.zeros(size, self._layout.dtype)
        self._vectors.append(values)
        return self._memory.tensor(values)

    def copier(self, host: Memory, numbers: Sequence[int], *, to_host: bool) -> Callable[[], None]:
        """Copies vectors between where they live and their mirrors on the host."""
        pairs = [(self._memory.tensor(self._vectors[n]), host.tensor(self._array(n, host))) for n in numbers]

        def copy() -> None:
            for here, there in pairs:
                target, source = (there, here) if to_host else (here, there)
                target.copy_(source, non_blocking=True)

        return copy

    def encode(self, codec: RoundsCodec, memory: Memory, source: Array, starts: Starts, scale: float) -> None:
        """The first vector; M is left in the new residual."""
        feedback = self._feedback()
        codec.encode_values(
            self._layout, source, starts, self._array(0, memory), scale=scale, feedback=feedback,
            key=self._key(), factors=_Factors(self._factors, memory),
        )  # fmt: skip
        if self._packed:
            if self._matrix is None:
                self._matrix = memory.zeros(len(feedback.new), self._layout.dtype)
            self._matrix[:] = feedback.new

    def transform(self, codec: RoundsCodec, memory: Memory) -> None:
        """The second vector, and the residual."""
        feedback = self._feedback()
        if self._matrix is not None:
            feedback.new[:] = self._matrix
        codec.transform_values(self._layout, self._array(0, memory), self._array(1, memory), feedback=feedback)
        self.residual.settle()

    def decode(self, codec: RoundsCodec, memory: Memory, target: Array, scale: float) -> bool:
        """The average."""
        first, second = (self._array(number, memory) for number in (0, 1))
        return codec.decode_values(
            self._layout, first, second, target, self._starts, scale=scale,
            factors=_Factors(self._factors, memory),
        )  # fmt: skip

    def _feedback(self) -> Feedback:
        return Feedback(*self.residual.buffers(), self._kept_at, self.residual.gain)

    def _array(self, number: int, memory: Memory) -> Array:
        """A vector, or its mirror, as a step in this memory takes it."""
        if memory is self._memory:
            return self._vectors[number]
        if number not in self._mirrors:
            self._mirrors[number] = memory.zeros(len(self._vectors[number]), self._layout.dtype)
        return self._mirrors[number]
