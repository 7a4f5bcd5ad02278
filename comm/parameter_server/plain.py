"""Plain numbers as a codec: what goes to a server instead of a payload that would be larger.

The vector of ``none``: lossless, so that nothing new is kept, and what was kept before goes with the numbers, at once,
or as slowly as the feedback gain says. The bytes are the numbers themselves, without a header: a flag in the message
says which of the two it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from espresso.compressors import Codec, Compressor, Layout, Segment, SummableCodec, Traits, create, host_codec
from espresso.compressors.base import Decoding, Encoding


class PlainNumbers(Compressor):
    """The layout of plain numbers: the segments' elements one after the other."""

    name: ClassVar[str] = "plain_numbers"
    traits: ClassVar[Traits] = Traits(summable=True, lossless=True, error_feedback=True)

    def layout(self, segments: Sequence[Segment], dtype: npt.DTypeLike = np.float32) -> Layout:
        """That of ``none``'s vector; ``dtype`` is float32 or float64."""
        layout = create("none").layout(segments, dtype)
        return replace(layout, num_bytes=layout.num_elements * layout.dtype.itemsize)


class PlainCodec:
    """Reads and writes plain numbers where the codec of ``none`` does: on the host or on a device."""

    def __init__(self, none: Codec) -> None:
        self.compressor: Compressor = PlainNumbers()
        self._none = cast(SummableCodec, none)

    def encode(self, encoding: Encoding, payload: Any) -> bool:
        """As :meth:`espresso.compressors.Codec.encode`; with a gain of 1 the new residual is zero."""
        return self._none.encode_values(encoding, payload.view(encoding.source.dtype))

    def decode(self, decoding: Decoding, payloads: Any) -> bool:
        """As :meth:`espresso.compressors.Codec.decode`; rows are added up in their order."""
        rows = [payload.view(decoding.target.dtype) for payload in payloads]
        values = rows[0] if len(rows) == 1 else rows[0] + rows[1]
        for row in rows[2:]:
            values += row
        return self._none.decode_values(decoding, values)


@cache
def _plain() -> Codec:
    return PlainCodec(host_codec(create("none")))


def smaller(codec: Codec, segments: Sequence[Segment], dtype: npt.DTypeLike) -> Codec:
    """``codec``, or plain numbers where its payload of these segments would be no smaller than they are."""
    plain = sum(segment.numel for segment in segments) * np.dtype(dtype).itemsize
    return codec if codec.compressor.layout(segments, dtype).num_bytes < plain else _plain()


def is_plain(codec: Codec) -> bool:
    """Whether :func:`smaller` chose plain numbers."""
    return codec is _plain()
