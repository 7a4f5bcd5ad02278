"""Stochastic quantizers on the host. Format: :mod:`espresso.compressors.levels`; passes: ``level_kernels``."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from espresso.compressors.base import Bytes, Encoding
from espresso.compressors.blockwise import TINY
from espresso.compressors.draws import rank_salt
from espresso.compressors.error_feedback import ErrorFeedback
from espresso.compressors.levels import Levels
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, HostCodec
from espresso.cpu_offload.level_kernels import decode_chunks, encode_chunks


class HostLevels(HostCodec):
    """An unbiased quantizer; one pass to encode, one over the target to decode.

    Training gives it no residual. Asked for one it goes the long way of
    :class:`~espresso.compressors.error_feedback.ErrorFeedback`.
    """

    compressor: Levels
    malformed_body: ClassVar[str] = "a block's scale is negative or not finite"

    def encode(self, encoding: Encoding, payload: Bytes) -> bool:
        """As :meth:`espresso.compressors.Codec.encode`."""
        if encoding.feedback is not None:
            return ErrorFeedback(self).encode(encoding, payload)
        return super().encode(encoding, payload)

    def encode_bodies(self, call: EncodeCall) -> bool:
        """One pass, chunks in any order."""
        how, kind, bits = self.compressor, call.layout.dtype.type, call.bits.dtype
        limit = call.infinity if how.top_exponent is None else bits.type(kind(how.cap).view(bits) + 1)
        return all(
            self.share(
                encode_chunks, call, call.work.chunks, call.source, call.scale, call.numbers, call.words, call.payload,
                how.block, how.code_bits, how.scaled_by.value, how.is_natural, how.divisor, kind(how.cap),
                how.unit_level, TINY[call.layout.dtype.itemsize], limit, call.magnitude,
                np.uint64(rank_salt(call.key)),
            )
        )  # fmt: skip

    def decode_bodies(self, call: DecodeCall) -> None:
        """Sum the rows block by block."""
        how = self.compressor
        self.share_decode(
            decode_chunks, call, call.numbers, call.words, call.payload, how.block, how.code_bits, how.scaled_by.value,
            how.is_natural, how.unit_level,
        )  # fmt: skip
