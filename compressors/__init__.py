"""How a tensor becomes a payload: the protocol, the algorithms, the wire format and error feedback.

May import: strategies.
"""

from espresso.compressors.base import (
    Codec,
    Compressor,
    Correction,
    Decoding,
    DrawKey,
    Encoding,
    Feedback,
    Layout,
    PayloadError,
    Segment,
    SummableCodec,
    Traits,
)
from espresso.compressors.error_feedback import ErrorFeedback
from espresso.compressors.momentum import MomentumCorrection
from espresso.compressors.registry import (
    compressor_ids,
    create,
    cuda_codec,
    host_codec,
    spec_of,
)

__all__ = [
    "Codec",
    "Compressor",
    "Correction",
    "Decoding",
    "DrawKey",
    "Encoding",
    "ErrorFeedback",
    "Feedback",
    "Layout",
    "MomentumCorrection",
    "PayloadError",
    "Segment",
    "SummableCodec",
    "Traits",
    "compressor_ids",
    "create",
    "cuda_codec",
    "host_codec",
    "spec_of",
]
