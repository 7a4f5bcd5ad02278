"""What the compressor tests share: specs, inputs, one call that encodes and decodes, and slow references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from espresso.compressors import Decoding, DrawKey, Encoding, Feedback, Layout, Segment, create
from tests.backends import make_codec

# Small segments are compressed too (raw_below=1), so that odd lengths reach the kernels.
SPECS = (
    "none",
    "fp16:raw_below=1",
    "bf16:raw_below=1",
    "int8:raw_below=1,block=64",
    "int4:raw_below=1,block=64",
    "efsignsgd:raw_below=1",
    "efsignsgd:raw_below=1,block=0",
    "efsignsgd:raw_below=1,block=96",
    "onebit:raw_below=1",
    "onebit:raw_below=1,block=96",
    "onebit:raw_below=1,block=0,means=1",
    "twobit:raw_below=1",
    "twobit:raw_below=1,block=96",
    "fp8:raw_below=1,block=64",
    "fp8:raw_below=1,format=e5m2",
    "topk:raw_below=1,ratio=0.05",
    "dgc:raw_below=1,ratio=0.05",
    "threshold:raw_below=1,threshold=2,ratio=0.05",
    "stc:raw_below=1,ratio=0.05",
    "randomk:raw_below=1,ratio=0.05",
    "qsgd:raw_below=1",
    "qsgd:raw_below=1,levels=127",
    "dithering:raw_below=1,levels=5,block=64",
    "dithering:raw_below=1,levels=8,norm=l2,partition=natural",
    "natural:raw_below=1",
    "terngrad:raw_below=1",
)
DTYPES = (np.float32, np.float64)
ODD_SIZES = (0, 1, 7, 8, 9, 31, 32, 33, 127, 1021, 1024, 5003)
LARGE_SIZES = (70001, 300, 131072)


@dataclass
class Outcome:
    """One round trip: what went in (q), the payload, what came out and what was kept."""

    codec: Any
    layout: Layout
    starts: np.ndarray
    q: np.ndarray
    payload: np.ndarray
    finite: bool
    decoded: np.ndarray
    kept: np.ndarray


def numbers(count: int, dtype: Any, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Heavy-tailed numbers, as gradients are."""
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(count) * np.exp(rng.standard_normal(count))).astype(dtype)


def dyadic(count: int, dtype: Any, seed: int = 0) -> np.ndarray:
    """Small multiples of 1/8: sums and products of a few of them are exact."""
    return (np.random.default_rng(seed).integers(-64, 65, count) / 8).astype(dtype)


def make_layout(compressor: Any, sizes: Any, dtype: Any) -> tuple[Layout, np.ndarray]:
    """Segments of different tensors with gaps of three numbers between them."""
    segments = [Segment(f"layer{i}.weight", 10 * i, size) for i, size in enumerate(sizes)]
    starts = np.cumsum([0, *[size + 3 for size in sizes[:-1]]]).astype(np.int64)
    return compressor.layout(segments, dtype), starts


def round_trip(
    spec: str,
    sizes: Any,
    dtype: Any,
    *,
    make: Any = numbers,
    pool: Any = None,
    scale: float = 0.5,
    key: DrawKey | None = None,
    change: Any = None,
    wrap: Any = None,
    gain: float = 1.0,
) -> Outcome:
    """Encode with feedback and decode; ``change(source, starts)`` edits the input first."""
    key = key or DrawKey(seed=1, step=2, site=3)
    compressor = create(spec)
    codec = make_codec(compressor, pool)
    codec = wrap(codec) if wrap else codec
    layout, starts = make_layout(compressor, sizes, dtype)
    total = int(starts[-1] + sizes[-1]) if len(sizes) else 0
    source, old = make(total, dtype, 1), make(total, dtype, 2)
    if change:
        change(source, starts)
    kept, decoded = np.full(total, 7, dtype), np.full(total, 7, dtype)
    payload = np.full(layout.num_bytes, 0xA5, np.uint8)
    before = source.copy(), old.copy()
    finite = codec.encode(
        Encoding(layout, source, starts, scale=scale, feedback=Feedback(old, kept, starts, gain), key=key), payload
    )
    assert np.array_equal(source, before[0], equal_nan=True)
    assert np.array_equal(old, before[1])
    assert codec.decode(Decoding(layout, decoded, starts, key=key), payload.reshape(1, -1)) == finite
    inside = np.zeros(total, bool)
    for start, size in zip(starts, sizes, strict=True):
        inside[start : start + size] = True
    assert (kept[~inside] == 7).all()
    assert (decoded[~inside] == 7).all()
    q = source * layout.dtype.type(scale) + old
    return Outcome(codec, layout, starts, q[inside], payload, finite, decoded[inside], kept[inside])


def pieces(outcome: Outcome) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """q, decoded and kept of each segment."""
    cuts = np.cumsum(outcome.layout.numels)[:-1]
    return list(zip(*(np.split(a, cuts) for a in (outcome.q, outcome.decoded, outcome.kept)), strict=True))


def body(outcome: Outcome, index: int) -> bytes:
    """The bytes of one segment's body, padding included."""
    ends = [*outcome.layout.offsets[1:], outcome.layout.num_bytes]
    return outcome.payload[outcome.layout.offsets[index] : ends[index]].tobytes()


def reference_signs(raw: bytes, count: int, dtype: Any, block: int, means: int = 1, planes: int = 1) -> np.ndarray:
    """The body of signs, bit by bit as documented."""
    block = block or count
    values = np.frombuffer(raw, dtype, means * -(-count // block))
    words = np.frombuffer(raw, np.uint32, planes * -(-count // 32), values.nbytes).reshape(planes, -1)
    out = np.empty(count, dtype)
    for element in range(count):
        negative, *outer = (int(plane[element // 32]) >> element % 32 & 1 for plane in words)
        mine = values[means * (element // block) :][:means]
        if planes == 2:
            out[element] = (-1) ** negative * mine[outer[0]]
        else:
            out[element] = (-mine[0] if means == 1 else mine[1]) if negative else mine[0]
    past = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(planes, -1)[:, count:]
    assert not past.any()
    return out


def reference_top(q: np.ndarray, k: int) -> np.ndarray:
    """The k of largest magnitude, ties to the lower index; the rest zero."""
    order = sorted(range(len(q)), key=lambda i: (-abs(float(q[i])), i))[:k]
    out = np.zeros_like(q)
    out[order] = q[order]
    return out


def reference_blocks(q: np.ndarray, block: int, levels: int) -> np.ndarray:
    """Blockwise quantization, number by number."""
    out = np.zeros_like(q)
    for low in range(0, len(q), block):
        part = q[low : low + block]
        top = np.abs(part).max()
        if top > 0:
            out[low : low + block] = np.rint(part * (levels / top)) * (top / levels)
    return out
