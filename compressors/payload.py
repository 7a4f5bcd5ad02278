"""The wire format that all algorithms share: header, segment table, bodies.

All numbers are little-endian. Byte by byte::

    0   4  magic "ESPR"
    4   1  version, 3
    5   1  flags: bit 0 = the encoded numbers held an inf or NaN (decoders answer NaN; bodies mean nothing)
    6   1  algorithm id (registry)
    7   1  bytes per number of the layout's dtype: 4 = float32, 8 = float64
    8   4  number of segments
    12  4  CRC-32 of the compressor's name and parameters, but ``LOCAL`` ones and ``ADDED`` defaults (common.py)
    16  8  payload bytes, header included
    24     segment table, 16 bytes per segment:
             8  number of elements; the top bit says that the segment travels raw
             8  offset of its body from the payload's first byte, a multiple of 8
    ...    bodies in the order of the table, each padded with zero bytes to a multiple of 8

A raw body is the segment's elements as plain numbers of the layout's dtype. Other bodies are documented
by their algorithms. Sender and receiver both know the layout, so a decoder compares the header's bytes with
the ones it expects (one memcmp, the flags byte apart) and explains a difference only when there is one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Bytes, Layout, PayloadError, Segment, Starts

MAGIC = b"ESPR"
VERSION = 3
FLAGS_AT = 5
FLAG_NON_FINITE = 1
ALIGNMENT = 8
MAX_SEGMENT = 2**32
"""Counts on the wire are 32-bit, and indices: a longer segment has to be cut into partitions."""

_HEADER = struct.Struct("<4sBBBBIIQ")
_ENTRY = struct.Struct("<QQ")
_RAW_BIT = 1 << 63
_FIELDS = (
    "magic",
    "version",
    "flags",
    "algorithm id",
    "bytes per number",
    "number of segments",
    "parameter digest",
    "payload bytes",
)

BodySize = Callable[[int, int], tuple[int, int]]
"""``(numel, itemsize) -> (count, body bytes before padding)`` of one compressed segment."""


def build_layout(
    *,
    algorithm: int,
    digest: int,
    raw_below: int,
    body_size: BodySize,
    segments: Sequence[Segment],
    dtype: npt.DTypeLike,
) -> Layout:
    """Lay out the payload of ``segments``; those under ``raw_below`` elements and exact ones travel raw.

    Raises:
        ValueError: the dtype is neither float32 nor float64, or a segment's length is impossible.
    """
    number = layout_dtype(dtype)
    itemsize = number.itemsize
    numels = np.array([segment.numel for segment in segments], dtype=np.int64)
    if numels.size and not 0 <= numels.min() <= numels.max() < MAX_SEGMENT:
        worst = max(segments, key=lambda s: (s.numel < 0, s.numel))
        raise ValueError(
            f"segment of {worst.tensor!r} has {worst.numel} elements; payloads hold 0 to {MAX_SEGMENT - 1}:"
            " cut the tensor with a smaller partition size"
        )
    raw = numels < max(raw_below, 1)  # an empty segment has an empty raw body
    raw |= np.array([segment.exact for segment in segments], dtype=np.bool_)
    counts = np.zeros(len(segments), dtype=np.int64)
    offsets = np.zeros(len(segments), dtype=np.int64)
    position = _HEADER.size + _ENTRY.size * len(segments)
    for index, numel in enumerate(numels.tolist()):
        count, size = (0, numel * itemsize) if raw[index] else body_size(numel, itemsize)
        counts[index], offsets[index] = count, position
        position += padded(size)
    header = bytearray(_HEADER.pack(MAGIC, VERSION, 0, algorithm, itemsize, len(segments), digest, position))
    for numel, offset, is_raw in zip(numels.tolist(), offsets.tolist(), raw.tolist(), strict=True):
        header += _ENTRY.pack(numel | (_RAW_BIT if is_raw else 0), offset)
    return Layout(tuple(segments), number, position, bytes(header), numels, offsets, counts, raw)


def layout_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype object, if codecs work in it."""
    number = np.dtype(dtype)
    if number not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ValueError(
            f"compressors work on float32 or float64, got {number}; convert 16-bit gradients to float32 first"
        )
    return number


def padded(num_bytes: int) -> int:
    """``num_bytes`` rounded up to the alignment of bodies."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def params_digest(name: str, params: Sequence[tuple[str, Any]]) -> int:
    """CRC-32 over name and parameters, so that two differently tuned senders do not misread each other."""
    return zlib.crc32(f"{name}:{','.join(f'{key}={value!r}' for key, value in params)}".encode())


def write_header(payload: Bytes, layout: Layout, finite: bool) -> None:
    """Put header and segment table in front of the bodies."""
    payload[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
    payload[FLAGS_AT] = 0 if finite else FLAG_NON_FINITE


def read_header(payload: Bytes, layout: Layout) -> bool:
    """Check a payload's header against its layout; return whether the encoded numbers were finite.

    Raises:
        PayloadError: something differs; the message names the field, what it is and what was expected.
    """
    expected = layout.header
    if payload.size != layout.num_bytes:
        raise PayloadError(f"payload has {payload.size} bytes, its layout says {layout.num_bytes}")
    got = payload[: len(expected)].tobytes()
    flags = got[FLAGS_AT]
    if flags & ~FLAG_NON_FINITE:
        raise PayloadError(f"payload header: unknown flags {flags:#04x}; is the sender a newer version?")
    if got[:FLAGS_AT] != expected[:FLAGS_AT] or got[FLAGS_AT + 1 :] != expected[FLAGS_AT + 1 :]:
        raise PayloadError(explain_difference(got, expected))
    return not flags & FLAG_NON_FINITE


def explain_difference(got: bytes, expected: bytes) -> str:
    """Name the first header field in which two headers differ."""
    fields = zip(_FIELDS, _HEADER.unpack_from(got), _HEADER.unpack_from(expected), strict=True)
    for name, value, wanted in fields:
        if name != "flags" and value != wanted:
            return f"payload header: {name} is {value!r}, expected {wanted!r}; do all ranks use the same strategy?"
    for index, at in enumerate(range(_HEADER.size, len(expected), _ENTRY.size)):
        value, wanted = _ENTRY.unpack_from(got, at), _ENTRY.unpack_from(expected, at)
        if value != wanted:
            return f"payload segment table: segment {index} is {_entry(value)}, expected {_entry(wanted)}"
    return "payload header: headers are equal"


def _entry(entry: tuple[int, int]) -> str:
    numel, offset = entry
    kind = "raw" if numel & _RAW_BIT else "compressed"
    return f"{numel & ~_RAW_BIT} {kind} elements at byte {offset}"


def check_range(what: str, starts: Starts, layout: Layout, size: int) -> None:
    """Raise ValueError unless every ``starts[i] + numels[i]`` stays inside ``size``: kernels do not look."""
    if starts.shape != layout.numels.shape:
        raise ValueError(f"{what} has shape {starts.shape} for {len(layout.segments)} segments")
    bad = np.flatnonzero((starts < 0) | (starts + layout.numels > size))
    if bad.size:
        index = int(bad[0])
        raise ValueError(
            f"{what}[{index}] = {starts[index]}: segment {index} of {layout.numels[index]} elements"
            f" ends outside its array of {size}"
        )
