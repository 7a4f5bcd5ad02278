"""Sparse ternary bodies: as documented, alike on both backends, refused if spoilt, and owing what values owe."""

from __future__ import annotations

import contextlib
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from compressor_cases import make_layout, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sparse_bodies import SPAN, backends, both, encoded, make

from espresso.compressors import (
    Decoding,
    Encoding,
    Feedback,
    Layout,
    PayloadError,
    create,
)
from espresso.search.error_budget import normal_sensitivity
from espresso.strategies import CompressorSpec

SIZES = (1, 127, 128, 129, 4095, 4096, 4097, SPAN, 2 * SPAN + 4099)
LONG = 2 * SPAN + 4099


class Parsed:
    """A body, read as the format's documentation says, number by number."""

    def __init__(self, layout: Layout, payload: np.ndarray, segment: int = 0) -> None:
        end = [*layout.offsets[1:], layout.num_bytes][segment]
        raw = payload[layout.offsets[segment] : end].tobytes()
        numel, k, s = int(layout.numels[segment]), int(layout.counts[segment]), layout.dtype.itemsize
        tiles, groups = -(-numel // 4096), -(-numel // 128)
        at = 8 + tiles * s
        self.means = np.frombuffer(raw, layout.dtype, tiles, 8)
        self.ends = np.frombuffer(raw, np.uint32, tiles - 1, at).tolist()
        at += 4 * (tiles - 1)
        self.counts = list(raw[at : at + groups])
        self.slots = list(raw[at + groups : at + groups + k])
        used = at + groups + k
        count, zero = np.frombuffer(raw, np.uint32, 2)
        assert zero == 0
        assert len(raw) == -(-used // 8) * 8
        assert not any(raw[used:])
        assert not any(self.slots[count:])
        assert sum(self.counts) == count <= k
        assert self.ends == np.cumsum([sum(self.counts[at : at + 32]) for at in range(0, groups, 32)])[:-1].tolist()
        self.indices: list[int] = []
        self.values: list[Any] = []
        slots = iter(self.slots)
        for group, num in enumerate(self.counts):
            for _ in range(num):
                byte = next(slots)
                self.indices.append(128 * group + byte % 128)
                mean = self.means[self.indices[-1] // 4096]
                self.values.append(-mean if byte >= 128 else mean)
        assert self.indices == sorted(set(self.indices))


@backends
@both
@pytest.mark.parametrize("size", SIZES)
def test_a_body_is_as_documented(backend: str, dtype: Any, size: int) -> None:
    """Signs of the largest, the mean of what is sent of a tile, and in the residual what both leave."""
    codec = make(backend, "stc:raw_below=1,ratio=0.05")
    source, old = numbers(size, dtype), numbers(size, dtype, 5)
    layout, starts = make_layout(codec.compressor, (size,), dtype)
    payload, new = np.full(layout.num_bytes, 0xA5, np.uint8), np.full(size, 7, dtype)
    assert codec.encode(Encoding(layout, source, starts, feedback=Feedback(old, new, starts, 0.25)), payload)
    q, body, k = source + old, Parsed(layout, payload), int(layout.counts[0])
    sent, wanted = body.indices, np.zeros(size, dtype)
    assert 0.8 * k <= len(sent) <= k
    assert sent == np.sort(np.argsort(-np.abs(q), kind="stable")[: len(sent)]).tolist()
    for tile in range(0, size, 4096):
        mine = [i for i in sent if tile <= i < tile + 4096]
        mean = math.fsum(abs(float(q[i])) for i in mine) / len(mine) if mine else 0.0
        assert float(body.means[tile // 4096]) == pytest.approx(mean, rel=1e-7 if dtype is np.float32 else 1e-14)
        wanted[mine] = np.copysign(body.means[tile // 4096], q[mine])
    assert np.array_equal(body.values, wanted[sent])
    assert np.array_equal(new, dtype(0.25) * (q - wanted) + dtype(0.75) * old)
    decoded = np.full(size, 7, dtype)
    assert codec.decode(Decoding(layout, decoded, starts), np.stack([payload] * 3))
    assert np.array_equal(decoded, wanted + wanted + wanted)


@backends
def test_the_edges_of_groups_and_tiles(backend: str) -> None:
    """Tiles and groups with nothing in them, full ones, and fewer numbers than there is room for."""
    codec = make(backend, "stc:ratio=0.05")
    places = [0, 127, 128, 4095, *range(8192, 8320), LONG - 1]  # nothing in the second tile
    source = np.zeros(LONG, np.float32)
    source[places] = np.arange(len(places)) - 3
    layout, starts, payload = encoded(codec, source)
    body = Parsed(layout, payload)
    assert body.indices == [place for place in places if source[place]]
    assert body.means[:2].tolist() == [2.0, 0.0]  # of 3, 2 and 1
    assert body.counts[64] == 128
    decoded = np.empty_like(source)
    assert codec.decode(Decoding(layout, decoded, starts), payload.reshape(1, -1))
    assert np.array_equal(np.sign(decoded), np.sign(source))
    assert decoded[LONG - 1] == source[LONG - 1]


@cache
def good(backend: str) -> tuple[Any, Layout, np.ndarray, np.ndarray]:
    """A codec, and a body of three tiles and a part with 6 of 620 slots used: 3, 2, 0 and 1."""
    codec = make(backend, "stc:ratio=0.05")
    source = np.zeros(12_400, np.float32)
    source[[0, 5, 4000, 4096, 4100, 12_390]] = 1, -2, 3, 4, 5, -6
    return codec, *encoded(codec, source)


@backends
@pytest.mark.parametrize(
    ("what", "entry", "value"),
    [
        ("count", 0, 5),
        ("count", 0, 7),
        ("count", 0, 2**32 - 1),
        ("count", 1, 1),
        ("means", 0, -1.0),
        ("means", 2, math.nan),
        ("means", 3, math.inf),
        ("ends", 0, 2),
        ("ends", 0, 4),
        ("ends", 1, 2),
        ("ends", 2, 6),
        ("ends", 2, 2**32 - 1),
        ("counts", 0, 1),
        ("counts", 1, 1),
        ("counts", 96, 2),
        ("slots", 0, 5),  # twice
        ("slots", 1, 0),
        ("slots", 1, 128),  # twice, with the other sign
        ("slots", 5, 112),  # beyond the segment
    ],
)
def test_spoilt_bodies_are_named(backend: str, what: str, entry: int, value: float) -> None:
    codec, layout, starts, whole = good(backend)
    payload = whole.copy()
    body = payload[int(layout.offsets[0]) :]
    parts = {
        "count": body[:8].view(np.uint32), "means": body[8:24].view(np.float32), "ends": body[24:36].view(np.uint32),
        "counts": body[36:133], "slots": body[133:],
    }  # fmt: skip
    assert parts["ends"].tolist() == [3, 5, 5]
    assert parts["slots"][:6].tolist() == [0, 128 + 5, 4000 % 128, 0, 4, 128 + 12_390 % 128]
    parts[what][entry] = value
    with pytest.raises(PayloadError, match=r"segment 0 .*out of range or out of order"):
        codec.decode(Decoding(layout, np.zeros(12_400, np.float32), starts), payload.reshape(1, -1))


@backends
def test_what_is_spoilt_decodes_or_is_refused(backend: str) -> None:
    """Any bytes: numbers or a PayloadError, and nothing beside the target."""
    codec, layout, starts, whole = good(backend)
    at = int(layout.offsets[0])
    guarded = np.zeros(12_400 + 2000, np.float32)

    @settings(max_examples=300 if backend == "host" else 15, deadline=None, derandomize=True)
    @given(
        st.lists(st.tuples(st.integers(0, whole.size - at - 1), st.integers(0, 255)), min_size=1, max_size=6),
    )
    def check(edits: list[tuple[int, int]]) -> None:
        payload = whole.copy()
        for place, value in edits:
            payload[at + place] = value
        guarded[:] = 7
        with contextlib.suppress(PayloadError):
            codec.decode(Decoding(layout, guarded, starts + 1000), payload.reshape(1, -1))
        assert (guarded[:1000] == 7).all()
        assert (guarded[-1000:] == 7).all()

    check()


def test_signs_of_the_largest_owe_what_their_values_owe() -> None:
    """For the bytes of one number in a hundred, signs of five in a hundred go, and owe half as much."""
    specs = [CompressorSpec.parse(text) for text in ("stc:ratio=0.05", "dgc:ratio=0.05", "dgc:ratio=0.01")]
    signs, values, few = (normal_sensitivity(specs).of(spec, "") for spec in specs)
    assert 0.9 * values < signs < 1.1 * values
    assert signs < 0.5 * few
    sizes = [create(spec).body_size(1 << 20, 4)[1] for spec in specs]
    assert sizes[0] < sizes[2] < sizes[1] / 4.9
