"""No compression on the host: the raw kernels of every codec, one pass; or the numbers for a reduction."""

from __future__ import annotations

from espresso.cpu_offload.codec import DecodeCall, EncodeCall, bits_dtype, infinity_bits
from espresso.cpu_offload.kernels import all_finite
from espresso.cpu_offload.summable import SummableHostCodec


class HostNone(SummableHostCodec):
    """``none``: payloads are copies."""

    def encode_vector(self, call: EncodeCall) -> bool:
        """All segments are raw."""
        return self.encode_raw_segments(call)

    def decode_vector(self, call: DecodeCall) -> bool:
        """All segments are raw."""
        self.decode_raw_segments(call)
        return bool(all_finite(call.numbers.view(bits_dtype(call.layout)), infinity_bits(call.layout)))
