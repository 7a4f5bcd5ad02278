"""GPU codecs as the executor calls them: they launch and answer True; what they find is noted on the device."""

from __future__ import annotations

from typing import Any

import torch

from espresso.compressors.base import Decoding, Encoding, Factors, Layout
from espresso.compressors.cuda.codec import STATUS_WORDS, CudaCodec, CudaSummableCodec
from espresso.compressors.cuda.powersgd import CudaPowerSgd


class LaunchingCodec:
    """A GPU codec whose calls only launch and answer True: what they find is noted in ``status``, on the device.

    Args:
        codec: of the GPU.
    """

    def __init__(self, codec: CudaCodec) -> None:
        self.compressor = codec.compressor
        self.status = torch.zeros(STATUS_WORDS, dtype=torch.int64, device=codec.device.torch_device)
        self._codec = codec

    def encode(self, encoding: Encoding, payload: Any) -> bool:
        """As :meth:`espresso.compressors.Codec.encode`; whether all was finite is in the payload only."""
        self._codec.launch_encode(encoding, payload)
        return True

    def decode(self, decoding: Decoding, payloads: Any) -> bool:
        """As :meth:`espresso.compressors.Codec.decode`; what was found is in ``status``."""
        self._codec.launch_decode(decoding, payloads, self.status)
        return True


class LaunchingSummableCodec(LaunchingCodec):
    """The same for vectors."""

    def __init__(self, codec: CudaSummableCodec) -> None:
        super().__init__(codec)
        self._summable = codec

    def num_values(self, layout: Layout) -> int:
        """The vector's length."""
        return self._summable.num_values(layout)

    def value_dtype(self, layout: Layout) -> str:
        """The numbers' type."""
        return self._summable.value_dtype(layout)

    def encode_values(self, encoding: Encoding, values: Any) -> bool:
        """As :meth:`espresso.compressors.SummableCodec.encode_values`."""
        self._summable.launch_encode_values(encoding, values)
        return True

    def decode_values(self, decoding: Decoding, values: Any) -> bool:
        """As :meth:`espresso.compressors.SummableCodec.decode_values`; what was found is in ``status``."""
        self._summable.launch_decode_values(decoding, values, self.status)
        return True


class LaunchingRoundsCodec:
    """The same for a codec of several rounds.

    Args:
        codec: of the GPU.
    """

    def __init__(self, codec: CudaPowerSgd) -> None:
        self.compressor = codec.compressor
        self.status = torch.zeros(STATUS_WORDS, dtype=torch.int64, device=codec.device.torch_device)
        self._codec = codec
        self.num_values = codec.num_values
        self.encode_values = codec.encode_values
        self.transform_values = codec.transform_values

    def decode_values(self, decoding: Decoding, first: Any, second: Any, factors: Factors) -> bool:
        """As :meth:`espresso.compressors.base.RoundsCodec.decode_values`; what was found is in ``status``."""
        self._codec.launch_decode_values(decoding, first, second, self.status, factors)
        return True


def launching(codec: Any) -> Any:
    """The launching form of a GPU codec."""
    if codec.compressor.traits.rounds > 1:
        return LaunchingRoundsCodec(codec)
    return LaunchingSummableCodec(codec) if isinstance(codec, CudaSummableCodec) else LaunchingCodec(codec)
