"""Sparse ternary bodies: as documented, alike on both backends, refused if spoilt, and owing what values owe."""

from __future__ import annotations

import contextlib
import math
from functools import cache
from itertools import pairwise
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
SPOILT = 12_395


class Parsed:
    """A body, read as the format's documentation says, number by number."""

    def __init__(self, layout: Layout, payload: np.ndarray, segment: int = 0) -> None:
        end = [*layout.offsets[1:], layout.num_bytes][segment]
        raw = payload[layout.offsets[segment] : end].tobytes()
        numel, k, s = int(layout.numels[segment]), int(layout.counts[segment]), layout.dtype.itemsize
        tiles = -(-numel // 4096)
        self.bits = max([bits for bits in range(8) if 2**bits * k < numel], default=0)
        groups = -(-numel // 2**self.bits)
        at = 8 + tiles * s
        self.means = np.frombuffer(raw, layout.dtype, tiles, 8)
        self.ends = np.frombuffer(raw, np.uint32, tiles - 1, at).tolist()
        at += 4 * (tiles - 1)
        words = k // 32 + tiles + -(-groups // 32), k * (self.bits + 1) // 32 + tiles
        behind = at + 4 * words[0]
        uppers, lowers = (int.from_bytes(part, "little") for part in (raw[at:behind], raw[behind:]))
        used = at + 4 * sum(words)
        count, zero = np.frombuffer(raw, np.uint32, 2).tolist()
        assert zero == 0
        assert len(raw) == -(-used // 8) * 8
        assert count <= k
        self.indices: list[int] = []
        self.values: list[Any] = []
        for tile, (first, last) in enumerate(pairwise([0, *self.ends, count])):
            upper = 32 * (first // 32 + tile * (4096 // 2**self.bits // 32 + 1))
            lower = 32 * (first * (self.bits + 1) // 32 + tile)
            for slot in range(last - first):
                while not uppers >> upper & 1:
                    upper += 1
                uppers ^= 1 << upper
                group = upper - 32 * (first // 32 + tile * (4096 // 2**self.bits // 32 + 1)) - slot
                found = lowers >> lower & (2 ** (self.bits + 1) - 1)
                lowers ^= found << lower
                lower += self.bits + 1
                self.indices.append(4096 * tile + 2**self.bits * group + found % 2**self.bits)
                self.values.append(-self.means[tile] if found >> self.bits else self.means[tile])
        assert uppers == lowers == 0  # nothing else is said
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
    decoded = np.empty_like(source)
    assert codec.decode(Decoding(layout, decoded, starts), payload.reshape(1, -1))
    assert np.array_equal(np.sign(decoded), np.sign(source))
    assert decoded[LONG - 1] == source[LONG - 1]


@cache
def good(backend: str) -> tuple[Any, Layout, np.ndarray, np.ndarray]:
    """A codec, and a body of three tiles and a part with 6 of 620 slots used: 3, 2, 0 and 1."""
    codec = make(backend, "stc:ratio=0.05")
    source = np.zeros(SPOILT, np.float32)
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
        ("uppers", 0, 1),
        ("uppers", 0, 7),
        ("uppers", 8, 1),  # behind the tile's bits
        ("uppers", 27, 1 << 7),  # a group that is not there
        ("lowers", 0, 0),  # twice
        ("lowers", 0, 16 << 5),  # twice, with the other sign
        ("lowers", 0, 7 | 5 << 5),
        ("lowers", 3, 15),  # beyond the segment
    ],
)
def test_spoilt_bodies_are_named(backend: str, what: str, entry: int, value: float) -> None:
    codec, layout, starts, whole = good(backend)
    payload = whole.copy()
    body = payload[int(layout.offsets[0]) :]
    parts = {
        "count": body[:8].view(np.uint32), "means": body[8:24].view(np.float32), "ends": body[24:36].view(np.uint32),
        "uppers": body[36:228].view(np.uint32), "lowers": body[228:628].view(np.uint32),
    }  # fmt: skip
    assert parts["ends"].tolist() == [3, 5, 5]
    assert {word: int(bits) for word, bits in enumerate(parts["uppers"]) if bits} == {
        0: 3, 252 // 32: 1 << 252 % 32, 9: 3, 27: 1 << 6,
    }  # fmt: skip
    assert {word: int(bits) for word, bits in enumerate(parts["lowers"]) if bits} == {
        0: (16 + 5) << 5, 1: 4 << 5, 3: 16 + 6,
    }  # fmt: skip
    parts[what][entry] = value
    with pytest.raises(PayloadError, match=r"segment 0 .*out of range or out of order"):
        codec.decode(Decoding(layout, np.zeros(SPOILT, np.float32), starts), payload.reshape(1, -1))


@backends
def test_what_is_spoilt_decodes_or_is_refused(backend: str) -> None:
    """Any bytes: numbers or a PayloadError, and nothing beside the target."""
    codec, layout, starts, whole = good(backend)
    at = int(layout.offsets[0])
    guarded = np.zeros(SPOILT + 2000, np.float32)

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
    """For fewer bytes than one number in a hundred, signs of five in a hundred go, and owe two thirds as much."""
    specs = [CompressorSpec.parse(text) for text in ("stc:ratio=0.05", "dgc:ratio=0.05", "dgc:ratio=0.01")]
    signs, values, few = (normal_sensitivity(specs).of(spec, "") for spec in specs)
    assert 0.9 * values < signs < 1.1 * values
    assert signs < 0.66 * few
    sizes = [create(spec).body_size(1 << 20, 4)[1] for spec in specs]
    assert sizes[0] < 0.83 * sizes[2]
    assert sizes[0] < sizes[1] / 6
