"""Error feedback around any codec: q = scale * g + e, send C(q), keep e' = q - D(C(q)), or its low-pass filter.

Seide et al., 1-bit SGD, Interspeech 2014; Karimireddy et al., ICML 2019. Codecs with a fused path do the same in
fewer passes over memory and are tested against this one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Bytes, Codec, Decoding, Encoding


class ErrorFeedback:
    """Gives error feedback to a codec that encodes without; a codec itself, so wrappers compose.

    Five passes over memory and two temporaries of the segments' length: use it where there is no fused path.

    Args:
        codec: only its ``encode`` without feedback and its ``decode`` are used.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.compressor = codec.compressor

    def encode(self, encoding: Encoding, payload: Bytes) -> bool:
        """As :meth:`espresso.compressors.Codec.encode`."""
        layout, feedback = encoding.layout, encoding.feedback
        if feedback is None:
            return self.codec.encode(encoding, payload)
        packed = np.concatenate(([0], np.cumsum(layout.numels)[:-1])).astype(np.int64)[: len(layout.segments)]
        total = np.empty(layout.num_elements, dtype=layout.dtype)
        for numel, start, kept, at in zip(layout.numels, encoding.starts, feedback.starts, packed, strict=True):
            total[at : at + numel] = encoding.source[start : start + numel] * layout.dtype.type(encoding.scale)
            total[at : at + numel] += feedback.old[kept : kept + numel]
        finite = self.codec.encode(Encoding(layout, total, packed, key=encoding.key), payload)
        decoded = np.empty_like(total)
        self.codec.decode(Decoding(layout, decoded, packed, key=encoding.key), payload.reshape(1, -1))
        if finite:
            total -= decoded
        gain = layout.dtype.type(feedback.gain)
        for numel, kept, at in zip(layout.numels, feedback.starts, packed, strict=True):
            left = total[at : at + numel]
            if gain != 1:
                left = gain * left + (1 - gain) * feedback.old[kept : kept + numel]
            feedback.new[kept : kept + numel] = left
        return finite

    def decode(self, decoding: Decoding, payloads: npt.NDArray[np.uint8]) -> bool:
        """As :meth:`espresso.compressors.Codec.decode`."""
        return self.codec.decode(decoding, payloads)
