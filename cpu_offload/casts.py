"""Casts on the host: what fp16 and bf16 share. One pass to encode, one over the target to decode."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from espresso.compressors.base import Layout
from espresso.cpu_offload.cast_kernels import decode_casts, encode_casts
from espresso.cpu_offload.codec import DecodeCall, EncodeCall
from espresso.cpu_offload.kernels import all_finite
from espresso.cpu_offload.summable import SummableHostCodec
from espresso.cpu_offload.work import Table


class HostCast(SummableHostCodec):
    """A cast to 16 bits; an overflow counts as non-finite."""

    is_half: ClassVar[bool]

    def value_dtype(self, layout: Layout) -> str:
        """``float16`` or ``bfloat16``."""
        return "float16" if self.is_half else "bfloat16"

    def encode_bodies(self, call: EncodeCall) -> bool:
        """Cast the compressed segments."""
        return self._encode(call, call.work.chunks)

    def decode_bodies(self, call: DecodeCall) -> None:
        """Sum the compressed segments."""
        self._decode(call, call.work.chunks)

    def encode_vector(self, call: EncodeCall) -> bool:
        """Cast all segments."""
        finite = self._encode(call, call.work.all_chunks)
        self.filter_residuals(call, call.work.all_chunks)
        return finite

    def decode_vector(self, call: DecodeCall) -> bool:
        """Widen all segments."""
        self._decode(call, call.work.all_chunks)
        infinity = np.uint16(0x7C00 if self.is_half else 0x7F80)
        return bool(all_finite(call.payload.view(np.uint16), infinity))

    def _encode(self, call: EncodeCall, chunks: Table) -> bool:
        shorts = call.payload.view(np.uint16)

        def run_part(first: int, end: int) -> bool:
            return bool(
                encode_casts(
                    call.table, chunks, first, end, call.source, call.scale, call.old, call.new, call.has_feedback,
                    shorts, self.is_half,
                )
            )  # fmt: skip

        return all(self.run_chunks(run_part, len(chunks)))

    def _decode(self, call: DecodeCall, chunks: Table) -> None:
        shorts = call.payload.view(np.uint16)

        def run_part(first: int, end: int) -> None:
            decode_casts(
                call.table, chunks, first, end, call.target, call.scale, call.num_rows, call.row_bytes, shorts,
                self.is_half,
            )  # fmt: skip

        self.run_chunks(run_part, len(chunks))
