"""Stochastic quantizers on the host. Format: :mod:`espresso.compressors.levels`; passes: ``level_kernels``."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from espresso.compressors.base import Bytes, Encoding
from espresso.compressors.error_feedback import ErrorFeedback
from espresso.compressors.levels import TINY, Levels
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, HostCodec, malformed
from espresso.cpu_offload.draws import rank_salt
from espresso.cpu_offload.level_kernels import decode_chunks, encode_chunks
from espresso.cpu_offload.pool import WorkerPool


class HostLevels(HostCodec):
    """An unbiased quantizer; one pass to encode, one over the target to decode.

    Training gives it no residual. Asked for one it goes the long way of
    :class:`~espresso.compressors.error_feedback.ErrorFeedback`.
    """

    top_exponent: ClassVar[int | None] = None
    """Numbers above two to this power count as not finite; None takes all that are."""

    unit_level: ClassVar[int | None] = None
    """The level that stands for 1 where there are no scales; None for the largest level."""

    def __init__(self, compressor: Levels, pool: WorkerPool | None = None) -> None:
        super().__init__(compressor, pool)
        self._params = compressor
        self._levels = compressor.num_levels if self.unit_level is None else self.unit_level

    def encode(self, encoding: Encoding, payload: Bytes) -> bool:
        """As :meth:`espresso.compressors.Codec.encode`."""
        if encoding.feedback is not None:
            return ErrorFeedback(self).encode(encoding, payload)
        return super().encode(encoding, payload)

    def encode_bodies(self, call: EncodeCall) -> bool:
        """One pass, chunks in any order."""
        chunks, params, kind = call.work.chunks, self._params, call.layout.dtype.type
        magnitude = call.bits.dtype.type(np.iinfo(call.bits.dtype).max >> 1)
        salt, top, octets = rank_salt(call.key), self.top_exponent, call.payload
        natural, limit = params.is_natural, call.infinity
        cap = 1.0 if natural else float(params.num_levels)
        if top is not None:
            cap = 2.0**top
            limit = call.bits.dtype.type(kind(cap).view(call.bits.dtype) + 1)

        def run_part(first: int, end: int) -> bool:
            return bool(
                encode_chunks(
                    call.table, chunks, first, end, call.source, call.scale, call.numbers, call.words, octets,
                    params.block, params.code_bits, params.scaled_by.value, natural,
                    1.0 if natural else float(params.num_levels), kind(cap), self._levels,
                    TINY[call.layout.dtype.itemsize], limit, magnitude, salt,
                )
            )  # fmt: skip

        return all(self.run_chunks(run_part, len(chunks)))

    def decode_bodies(self, call: DecodeCall) -> None:
        """Sum the rows block by block."""
        chunks, params = call.work.chunks, self._params

        def run_part(first: int, end: int) -> int:
            return int(
                decode_chunks(
                    call.table, chunks, first, end, call.target, call.scale, call.num_rows, call.row_bytes,
                    call.numbers, call.words, call.payload, params.block, params.code_bits,
                    params.scaled_by.value, params.is_natural, self._levels,
                )
            )  # fmt: skip

        code = max(self.run_chunks(run_part, len(chunks)), default=0)
        if code:
            raise malformed(code, call.layout, "a block's scale is negative or not finite")
