"""The compute steps of a compressor of several rounds, for one partition: encode, transform, decode.

::

    encode      M, first vector P      ── summed over ranks ──┐
    transform   P orthonormal, second vector Q, residual   <──┘── Q summed ──┐
    decode      average = P Q' / ranks, Q kept for the next step           <─┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from espresso.comm.factors import FactorStore
from espresso.compressors.base import DrawKey, Feedback, Layout, RoundsCodec

Array = npt.NDArray[Any]


class Rounds:
    """Buffers and actions of one partition.

    Args:
        feedback: the residual of this iteration, asked for at every step.
        key: of this iteration.
        packed: residuals are unpacked into room that other steps use in between, so M is kept here.
    """

    def __init__(
        self,
        layout: Layout,
        starts: npt.NDArray[np.int64],
        factors: FactorStore,
        feedback: Callable[[], Feedback],
        key: Callable[[], DrawKey],
        *,
        packed: bool = False,
    ) -> None:
        self._layout, self._starts, self._factors = layout, starts, factors
        self._feedback, self._key = feedback, key
        self._vectors: list[Array] = []
        self._packed = packed
        self._matrix: Array = np.empty(0)

    def vector(self, codec: RoundsCodec) -> torch.Tensor:
        """Make the next round's vector; the collectives that follow sum it in place."""
        values = np.zeros(codec.num_values(self._layout, len(self._vectors)), self._layout.dtype)
        self._vectors.append(values)
        return torch.from_numpy(values)

    def encode(self, codec: RoundsCodec, source: Array, starts: npt.NDArray[np.int64], scale: float) -> None:
        feedback = self._feedback()
        codec.encode_values(
            self._layout, source, starts, self._vectors[0], scale=scale, feedback=feedback, key=self._key(),
            factors=self._factors,
        )  # fmt: skip
        if self._packed:
            self._matrix = feedback.new.copy()

    def transform(self, codec: RoundsCodec) -> None:
        first, second = self._vectors
        feedback = self._feedback()
        if self._packed:
            np.copyto(feedback.new, self._matrix)
        codec.transform_values(self._layout, first, second, feedback=feedback)

    def decode(self, codec: RoundsCodec, target: Array, scale: float) -> bool:
        first, second = self._vectors
        return codec.decode_values(
            self._layout, first, second, target, self._starts, scale=scale, factors=self._factors
        )
