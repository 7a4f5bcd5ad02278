"""Stochastic quantizers against a slow reference of the documented formulas, draws included."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from compressor_cases import DTYPES, body, numbers, pieces, round_trip

from espresso.compressors import Decoding, DrawKey, Encoding, Segment, create, host_codec
from espresso.cpu_offload.level_vectors import fill_draws

both = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, word by word."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & MASK32, first >> 32 ^ c[3] ^ k[1], first & MASK32]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


def mix(value: int) -> int:
    x = value & MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def segment_key(key: DrawKey, segment: Segment) -> int:
    salt = mix(mix(mix(mix(key.seed) + key.step) + key.site) + key.rank)
    hashed = int.from_bytes(hashlib.blake2b(segment.tensor.encode(), digest_size=8).digest(), "little")
    return mix(mix(salt ^ hashed) + segment.tensor_start)


def draws(key: int, count: int) -> np.ndarray:
    """The word of each element."""
    out = np.zeros(count, np.uint32)
    for element in range(count):
        counter = 16 * (element // 64) + element % 16
        words = philox([counter & MASK32, counter >> 32, 0, 0], [key & MASK32, key >> 32])
        out[element] = words[element % 64 // 16]
    return out


def test_philox_gives_its_published_words() -> None:
    """The known answers that Random123 comes with."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ]  # fmt: skip


@pytest.mark.parametrize("key", [0, 0x9E3779B97F4A7C15])
@pytest.mark.parametrize("row", [0, 3, 1 << 40])
def test_the_kernel_draws_the_same(key: int, row: int) -> None:
    from espresso.cpu_offload.jit import kernel

    @kernel
    def fill(key: Any, row: Any, out: Any) -> None:
        fill_draws(key, row, out)

    out = np.zeros(64, np.uint32)
    fill(np.uint64(key), row, out)
    for element in (0, 1, 15, 16, 40, 63):
        counter = 16 * row + element % 16
        words = philox([counter & MASK32, counter >> 32, 0, 0], [key & MASK32, key >> 32])
        assert out[element] == words[element // 16]


def norm(part: np.ndarray, kind: str) -> float:
    """S, its squares summed in the documented shape."""
    if kind == "max":
        return float(np.abs(part).max())
    lanes = np.zeros(64)
    for row in np.r_[part.astype(np.float64), np.zeros(-len(part) % 64)].reshape(-1, 64):
        lanes += row * row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return float(np.sqrt(lanes[0]))


def reference(q: np.ndarray, words: np.ndarray, levels: int, kind: str, block: int, natural: bool) -> np.ndarray:
    """What is decoded, element by element as documented."""
    dtype, single = q.dtype.type, q.dtype == np.float32
    out = np.zeros_like(q)
    bits = np.uint32 if single else np.uint64
    for low in range(0, len(q), block):
        part = q[low : low + block]
        size = 1.0 if kind == "none" else norm(part, kind)
        divisor = 1.0 if natural else float(levels)
        step, inverse = dtype(size / divisor), dtype(divisor / size)
        for i, x in enumerate(part):
            word = int(words[low + i])
            u = dtype((word >> 8) * 2.0**-24) if single else dtype(word * 2.0**-32)
            v = abs(x) * inverse
            if natural:
                v = min(v, dtype(1)) if kind != "none" else v
                if v < 2.0 ** (1 - levels):
                    value = dtype(2.0 ** (1 - levels)) if u < v * dtype(2.0 ** (levels - 1)) else dtype(0)
                else:
                    fraction = 23 if single else 52
                    noise = word >> 9 if single else word << 20
                    power = int(dtype(v).view(bits)) + noise >> fraction
                    value = dtype(2.0 ** (power - (127 if single else 1023)))
            else:
                v = min(v, dtype(levels))
                whole = np.floor(v)
                value = whole + dtype(u < v - whole)
            out[low + i] = np.copysign(value * step, x)
    return out


CASES = [
    ("qsgd", 7, "l2", 256, False),
    ("qsgd:levels=127,norm=max,block=64", 127, "max", 64, False),
    ("dithering:levels=5,block=128", 5, "max", 128, False),
    ("dithering:levels=1,norm=l2", 1, "l2", 256, False),
    ("dithering:levels=8,partition=natural", 8, "max", 256, True),
    ("dithering:levels=31,norm=l2,partition=natural", 31, "l2", 256, True),
    ("natural", 100, "none", 256, True),
    ("terngrad", 1, "max", 256, False),
]


@both
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_numbers_are_those_of_the_documentation(dtype: type, case: tuple[Any, ...]) -> None:
    spec, levels, kind, block, natural = case
    spec += f"{',' if ':' in spec else ':'}raw_below=1"
    key = DrawKey(seed=3, step=1, site=2, rank=1)
    outcome = round_trip(spec, (700, 33), dtype, key=key)
    for segment, (q, decoded, _) in zip(outcome.layout.segments, pieces(outcome), strict=True):
        words = draws(segment_key(key, segment), len(q))
        assert np.array_equal(reference(q, words, levels, kind, block, natural), decoded)


def test_planes_lie_as_documented() -> None:
    """qsgd:levels=5: four bits a code; word 4g + p is bit p of elements 32g on."""
    outcome = round_trip("qsgd:levels=5,raw_below=1", (70,), np.float32)
    raw = body(outcome, 0)
    step = np.frombuffer(raw, np.float32, 1)[0]
    words = np.frombuffer(raw, np.uint32, 12, 4)
    for element, value in enumerate(outcome.decoded):
        code = sum((int(words[4 * (element // 32) + p]) >> element % 32 & 1) << p for p in range(4))
        assert value == np.copysign(np.float32(code & 7) * step, -1.0 if code & 8 else 1.0)
    assert all(int(word) >> 6 == 0 for word in words[8:12])


def test_draws_depend_on_rank_step_site_tensor_and_seed_only() -> None:
    def payload(**changes: Any) -> bytes:
        return round_trip("terngrad", (500,), np.float32, key=DrawKey(**{"seed": 1, **changes})).payload.tobytes()

    same = payload()
    assert payload() == same
    others = [payload(seed=2), payload(step=1), payload(site=1), payload(rank=0), payload(rank=1)]
    assert len({same, *others}) == 6


def variance_bound(case: tuple[Any, ...], q: np.ndarray) -> float:
    """ALGORITHMS.md, section 3, for one block."""
    spec, levels, kind, _, natural = case
    wide = q.astype(np.float64)
    square, first = (wide**2).sum(), np.abs(wide).sum()
    size = np.abs(wide).max() if kind == "max" else np.sqrt(square)
    if kind == "none":
        return float(square / 8)
    if natural:
        u = 2.0 ** (1 - levels)
        return float((1 / 8 + min(np.sqrt(len(q)) * u, len(q) * u * u / 4)) * square)
    if spec == "terngrad":
        return float(size * first - square)
    return float(min(len(q) * size**2 / (4 * levels**2), size * first / levels))


def variance(case: tuple[Any, ...], q: np.ndarray) -> np.ndarray:
    """Of each element of a block: the product of the distances to the two numbers it is rounded to."""
    _, levels, kind, _, natural = case
    wide = np.abs(q.astype(np.float64))
    size = 1.0 if kind == "none" else norm(q, kind)
    v = wide / size
    if natural:
        low = 2.0 ** np.floor(np.log2(np.maximum(v, 2.0 ** (1 - levels))))
        low, high = np.where(v < low, 0, low), np.where(v < low, low, 2 * low)
    else:
        low = np.floor(v * levels) / levels
        high = low + 1 / levels
    return np.asarray((high - v) * (v - low) * size**2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_unbiased_within_five_sigma_and_the_variance_is_bounded(case: tuple[Any, ...]) -> None:
    spec, block = case[0], case[3]
    spec += f"{',' if ':' in spec else ':'}raw_below=1"
    q = numbers(block, np.float32, 5)
    codec = host_codec(create(spec))
    layout = codec.compressor.layout([Segment("w", 0, block)])
    payload, out, at = np.empty((1, layout.num_bytes), np.uint8), np.empty_like(q), np.array([0])
    rounds = 2000
    total, squares = np.zeros(block), np.zeros(block)
    for step in range(rounds):
        key = DrawKey(step=step)
        codec.encode(Encoding(layout, q, at, key=key), payload[0])
        codec.decode(Decoding(layout, out, at, key=key), payload)
        error = out.astype(np.float64) - q
        total += error
        squares += error**2
    expected, scale = variance(case, q), np.abs(q).max()
    worst = np.abs(total / rounds) / (np.sqrt(expected / rounds) + 1e-6 * scale)
    assert worst.max() <= 5
    assert 0.8 < (worst**2).mean() < 1.2
    assert abs((total * np.sign(q)).sum() / rounds) <= 5 * np.sqrt(expected.sum() / rounds)
    assert squares.sum() / rounds == pytest.approx(expected.sum(), rel=0.1)
    bound = variance_bound(case, q)
    assert expected.sum() <= bound * (1 + 1e-6)
    if spec.startswith("terngrad"):
        assert expected.sum() == pytest.approx(bound, rel=1e-6)
    assert expected.sum() > 0


def test_natural_compression_counts_what_it_cannot_hold_as_not_finite() -> None:
    def at(value: float) -> Any:
        return round_trip("natural", (300,), np.float32, make=lambda n, t, s: np.full(n, value / 2, t), scale=1.0)

    assert at(2.0**27).finite
    assert (at(2.0**27).decoded == 2.0**27).all()
    assert not at(1.01 * 2.0**27).finite
    tiny = at(2.0**-103)
    assert set(np.unique(tiny.decoded)) == {0.0, 2.0**-99}
    assert 1 / 40 < (tiny.decoded != 0).mean() < 1 / 8
