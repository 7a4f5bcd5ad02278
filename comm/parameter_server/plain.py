"""Plain numbers as a codec: what goes instead of a payload that would be larger.

Lossless, so that nothing new is kept, and what was kept before goes with the numbers: at once, or as slowly as the
feedback gain says. The bytes are the numbers themselves, without a header: a flag in the message says which of the
two it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import (
    Bytes,
    Codec,
    Compressor,
    Decoding,
    Encoding,
    Layout,
    Segment,
    Traits,
)
from espresso.compressors.common import Steady


class PlainNumbers(Steady):
    """The layout of plain numbers: the segments' elements one after the other."""

    name: ClassVar[str] = "plain_numbers"
    traits: ClassVar[Traits] = Traits(summable=True, lossless=True, error_feedback=True)

    def layout(self, segments: Sequence[Segment], dtype: npt.DTypeLike = np.float32) -> Layout:
        """``dtype`` is float32 or float64."""
        wide = np.dtype(dtype)
        numels = np.array([segment.numel for segment in segments], np.int64)
        ends = np.cumsum(numels) * wide.itemsize
        return Layout(
            segments=tuple(segments),
            dtype=wide,
            num_bytes=int(ends[-1]) if len(ends) else 0,
            header=b"",
            numels=numels,
            offsets=ends - numels * wide.itemsize,
            counts=np.zeros_like(numels),
            raw=np.ones(len(numels), np.bool_),
        )

    def sent(self, layout: Layout, payload: Bytes) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """Everything."""
        return ((index, np.arange(numel, dtype=np.uint32)) for index, numel in enumerate(layout.numels))

    def params(self) -> dict[str, Any]:
        return {}


class PlainCodec:
    """Reads and writes plain numbers; rows are added up in their order."""

    def __init__(self) -> None:
        self.compressor: Compressor = PlainNumbers()

    def encode(self, encoding: Encoding, payload: Bytes) -> bool:
        """As :meth:`espresso.compressors.Codec.encode`; with a gain of 1 the new residual is zero."""
        layout, feedback = encoding.layout, encoding.feedback
        numbers = payload.view(layout.dtype)
        finite = True
        for index, (numel, at) in enumerate(_places(layout)):
            out = numbers[at : at + numel]
            start = encoding.starts[index]
            np.multiply(encoding.source[start : start + numel], layout.dtype.type(encoding.scale), out=out)
            if feedback is not None:
                kept = slice(feedback.starts[index], feedback.starts[index] + numel)
                out += feedback.old[kept]
                # The buffers hold gain times what is owed, and that much of it went just now.
                np.multiply(
                    feedback.old[kept],
                    layout.dtype.type(1) - layout.dtype.type(feedback.gain),
                    out=feedback.new[kept],
                )
            finite &= bool(np.isfinite(out).all())
        return finite

    def decode(self, decoding: Decoding, payloads: npt.NDArray[np.uint8]) -> bool:
        """As :meth:`espresso.compressors.Codec.decode`; the first row is copied, the others added to it."""
        layout, finite = decoding.layout, True
        for index, (numel, at) in enumerate(_places(layout)):
            out = decoding.target[decoding.starts[index] : decoding.starts[index] + numel]
            for row, payload in enumerate(payloads):
                values = payload.view(layout.dtype)[at : at + numel]
                if row == 0:
                    out[:] = values
                else:
                    out += values
            out *= layout.dtype.type(decoding.scale)
            finite &= bool(np.isfinite(out).all())
        return finite


class DevicePlain:
    """The same on a GPU: the vector of ``none``, whose finiteness its codec notes.

    Args:
        codec: of ``none``, on the device.
    """

    def __init__(self, codec: Any) -> None:
        self.compressor: Compressor = PlainNumbers()
        self._codec = codec
        self._layouts: weakref.WeakKeyDictionary[Layout, Layout] = weakref.WeakKeyDictionary()

    def encode(self, encoding: Encoding, payload: Any) -> bool:
        """As :meth:`PlainCodec.encode`; the answer is on the device."""
        values = payload.view(encoding.source.dtype)
        return bool(self._codec.encode_values(replace(encoding, layout=self._layout(encoding.layout)), values))

    def decode(self, decoding: Decoding, payloads: Any) -> bool:
        """As :meth:`PlainCodec.decode`, of the one row that a server answers."""
        values = payloads[0].view(decoding.target.dtype)
        return bool(self._codec.decode_values(replace(decoding, layout=self._layout(decoding.layout)), values))

    def _layout(self, layout: Layout) -> Layout:
        found = self._layouts.get(layout)
        if found is None:
            found = self._layouts[layout] = self._codec.compressor.layout(layout.segments, layout.dtype)
        return found


def _places(layout: Layout) -> list[tuple[int, int]]:
    """(elements, first number) of every segment."""
    return [
        (int(numel), int(offset) // layout.dtype.itemsize)
        for numel, offset in zip(layout.numels, layout.offsets, strict=True)
    ]


_PLAIN: Codec = PlainCodec()


def smaller(codec: Codec, segments: Sequence[Segment], dtype: npt.DTypeLike) -> Codec:
    """``codec``, or plain numbers where its payload of these segments would be no smaller than they are."""
    plain = _PLAIN.compressor.layout(segments, dtype).num_bytes
    return codec if codec.compressor.layout(segments, dtype).num_bytes < plain else _PLAIN


def is_plain(codec: Codec) -> bool:
    """Whether :func:`smaller` chose plain numbers."""
    return codec is _PLAIN
