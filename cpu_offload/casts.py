"""No compression and casts on the host. One pass to encode, one over the target to decode."""

from __future__ import annotations

import numpy as np

from espresso.compressors.base import Layout
from espresso.compressors.casts import Cast
from espresso.cpu_offload.cast_kernels import decode_casts, encode_casts
from espresso.cpu_offload.codec import DecodeCall, EncodeCall
from espresso.cpu_offload.kernels import all_finite
from espresso.cpu_offload.summable import SummableHostCodec
from espresso.cpu_offload.work import Table


class HostNone(SummableHostCodec):
    """``none``, as payloads or as a vector: all segments are raw."""

    def encode_vector(self, call: EncodeCall) -> bool:
        """One pass."""
        return self.encode_raw_segments(call)

    def decode_vector(self, call: DecodeCall) -> bool:
        """One pass, and one over the vector."""
        self.decode_raw_segments(call)
        return bool(all_finite(call.bits, call.infinity))


class HostCast(SummableHostCodec):
    """``fp16`` and ``bf16``; an overflow counts as non-finite."""

    compressor: Cast

    def value_dtype(self, layout: Layout) -> str:
        """``float16`` or ``bfloat16``."""
        return self.compressor.value_dtype

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
        infinity = np.uint16(0x7C00 if self._is_half else 0x7F80)
        return bool(all_finite(call.payload.view(np.uint16), infinity))

    @property
    def _is_half(self) -> bool:
        return self.compressor.value_dtype == "float16"

    def _encode(self, call: EncodeCall, chunks: Table) -> bool:
        return all(self.share(encode_casts, call, chunks, *call.given, call.payload.view(np.uint16), self._is_half))

    def _decode(self, call: DecodeCall, chunks: Table) -> None:
        self.share(decode_casts, call, chunks, *call.given, call.payload.view(np.uint16), self._is_half)
