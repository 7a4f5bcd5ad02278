"""Compile a codec's kernels before they are needed, on tiny inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Codec, Decoding, Encoding, Feedback, Segment, SummableCodec
from espresso.cpu_offload.work import FUSED


def warm_up(codec: Codec, dtypes: Sequence[npt.DTypeLike] = (np.float32,), *, split: bool = False) -> None:
    """Encode and decode a few hundred numbers, so that the kernels of these dtypes are compiled (or read from cache).

    Args:
        codec: any; call this at registration, before anything waits for a payload.
        dtypes: layout dtypes to come.
        split: also the kernels for segments that the pool's threads share; takes some megabytes for a moment.
    """
    if codec.compressor.traits.rounds > 1:
        _warm_up_rounds(codec, dtypes)
        return
    sizes = [1, 5000] + ([FUSED + 1] if split else [])
    for dtype in dtypes:
        segments = [Segment(f"warm-up {index}", 0, size) for index, size in enumerate(sizes)]
        layout = codec.compressor.layout(segments, dtype)
        starts = np.cumsum([0, *sizes[:-1]])
        source = np.linspace(-1, 1, layout.num_elements, dtype=layout.dtype)
        target = np.empty_like(source)
        feedback = Feedback(np.zeros_like(source), np.empty_like(source), starts)
        payloads = np.empty((2, layout.num_bytes), np.uint8)
        for row in payloads:
            codec.encode(Encoding(layout, source, starts, feedback=feedback), row)
        codec.decode(Decoding(layout, target, starts), payloads)
        if isinstance(codec, SummableCodec):
            kind = codec.value_dtype(layout)
            values = np.empty(codec.num_values(layout), np.uint16 if kind == "bfloat16" else kind)
            codec.encode_values(Encoding(layout, source, starts, feedback=feedback), values)
            codec.decode_values(Decoding(layout, target, starts), values)


def _warm_up_rounds(codec: Any, dtypes: Sequence[npt.DTypeLike]) -> None:
    for dtype in dtypes:
        layout = codec.compressor.layout([Segment("warm-up", 0, 5000, (50, 100)), Segment("bias", 0, 3, (3,))], dtype)
        starts = np.array([0, 5000])
        source = np.linspace(-1, 1, layout.num_elements, dtype=layout.dtype)
        feedback = Feedback(np.zeros_like(source), np.empty_like(source), starts)
        first, second = (np.empty(codec.num_values(layout, number), layout.dtype) for number in (0, 1))
        factors = _Forgetful()
        codec.encode_values(Encoding(layout, source, starts, feedback=feedback), first, factors=factors)
        codec.transform_values(layout, first, second, feedback=feedback)
        codec.decode_values(Decoding(layout, source, starts), first, second, factors=factors)


class _Forgetful:
    """Factors of a codec that is only tried."""

    def read(self, tensor: str) -> None:
        return None

    def write(self, tensor: str, values: Any) -> None:
        return None
