"""GPU codecs as the executor calls them: they launch and answer True; what they find is noted on the device."""

from __future__ import annotations

from typing import Any

import torch

from espresso.compressors.base import DrawKey, Factors, Feedback, Layout, Starts
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

    def encode(
        self,
        layout: Layout,
        source: Any,
        starts: Starts,
        payload: Any,
        *,
        scale: float = 1.0,
        feedback: Feedback | None = None,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """As :meth:`espresso.compressors.Codec.encode`; whether all was finite is in the payload only."""
        self._codec.launch_encode(layout, source, starts, payload, scale=scale, feedback=feedback, key=key)
        return True

    def decode(
        self,
        layout: Layout,
        payloads: Any,
        target: Any,
        starts: Starts,
        *,
        scale: float = 1.0,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """As :meth:`espresso.compressors.Codec.decode`; what was found is in ``status``."""
        self._codec.launch_decode(layout, payloads, target, starts, self.status, scale=scale, key=key)
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

    def encode_values(
        self,
        layout: Layout,
        source: Any,
        starts: Starts,
        values: Any,
        *,
        scale: float = 1.0,
        feedback: Feedback | None = None,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """As :meth:`espresso.compressors.SummableCodec.encode_values`."""
        self._summable.launch_encode_values(layout, source, starts, values, scale=scale, feedback=feedback, key=key)
        return True

    def decode_values(
        self,
        layout: Layout,
        values: Any,
        target: Any,
        starts: Starts,
        *,
        scale: float = 1.0,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """As :meth:`espresso.compressors.SummableCodec.decode_values`; what was found is in ``status``."""
        self._summable.launch_decode_values(layout, values, target, starts, self.status, scale=scale, key=key)
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

    def decode_values(
        self,
        layout: Layout,
        first: Any,
        second: Any,
        target: Any,
        starts: Starts,
        *,
        scale: float,
        factors: Factors,
    ) -> bool:
        """As :meth:`espresso.compressors.base.RoundsCodec.decode_values`; what was found is in ``status``."""
        self._codec.launch_decode_values(
            layout, first, second, target, starts, self.status, scale=scale, factors=factors
        )
        return True


def launching(codec: Any) -> Any:
    """The launching form of a GPU codec."""
    if codec.compressor.traits.rounds > 1:
        return LaunchingRoundsCodec(codec)
    return LaunchingSummableCodec(codec) if isinstance(codec, CudaSummableCodec) else LaunchingCodec(codec)
