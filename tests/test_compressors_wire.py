"""Wire format: golden bytes, headers that do not match, and corrupted payloads."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from compressor_cases import SPECS, make_layout, numbers, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st

from espresso.compressors import Decoding, DrawKey, Encoding, PayloadError, Segment, create
from tests.backends import backend, make_codec  # noqa: F401 (the fixture runs every test on every backend)

GOLDEN = Path(__file__).parent / "golden" / "compressors.json"
every = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.replace(":raw_below=1", ""))


def golden_payload(spec: str, dtype: str) -> str:
    """A small payload of exact inputs: a tiny segment, an odd one, and longer ones of several scale blocks."""
    codec = make_codec(create(spec))
    layout, starts = make_layout(codec.compressor, (3, 37, 70, 300), dtype)
    total = int(starts[-1] + 300)
    source = ((np.arange(total) * 37 % 101 - 50) / 16).astype(dtype)
    payload = np.empty(layout.num_bytes, np.uint8)
    codec.encode(Encoding(layout, source, starts, key=DrawKey(seed=9, step=8, site=7)), payload)
    return payload.tobytes().hex()


@every
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_golden_bytes(spec: str, dtype: str) -> None:
    """The wire format does not change by accident. To change it on purpose: raise VERSION, then write anew."""
    if os.environ.get("ESPRESSO_WRITE_GOLDEN"):
        known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        known[f"{spec} {dtype}"] = golden_payload(spec, dtype)
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert golden_payload(spec, dtype) == json.loads(GOLDEN.read_text())[f"{spec} {dtype}"]


def test_header_bytes_are_those_of_the_documentation() -> None:
    layout = create("topk:ratio=0.5").layout([Segment("a", 0, 300), Segment("b", 0, 2)])
    head = layout.header
    assert head[:8] == b"ESPR" + bytes([3, 0, 6, 4])
    assert int.from_bytes(head[8:12], "little") == 2
    assert int.from_bytes(head[16:24], "little") == layout.num_bytes == 56 + (8 + 150 * 6 + 4) + 8
    assert int.from_bytes(head[24:32], "little") == 300
    assert int.from_bytes(head[32:40], "little") == 56
    assert int.from_bytes(head[40:48], "little") == 2 | 1 << 63
    assert len(head) == 56


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (0, "magic"),
        (4, "version"),
        (5, "flags"),
        (6, "algorithm"),
        (7, "bytes per number"),
        (8, "number of segments"),
        (12, "parameter digest"),
        (16, "payload bytes"),
        (24, "segment 0"),
        (44, "segment 1"),
    ],
)
def test_a_wrong_header_is_explained(at: int, says: str) -> None:
    outcome = round_trip("efsignsgd", (300, 400), np.float32)
    outcome.payload[at] ^= 0x42
    with pytest.raises(PayloadError, match=says):
        outcome.codec.decode(
            Decoding(outcome.layout, np.zeros(703, np.float32), outcome.starts), outcome.payload.reshape(1, -1)
        )


def test_a_payload_of_other_parameters_or_length_is_refused() -> None:
    outcome = round_trip("topk:ratio=0.1", (300,), np.float32)
    target, starts = np.zeros(300, np.float32), np.array([0])
    other = make_codec(create("dgc:ratio=0.1"))
    layout = other.compressor.layout(outcome.layout.segments)
    with pytest.raises(PayloadError, match="algorithm id is 6, expected 7"):
        other.decode(Decoding(layout, target, starts), outcome.payload.reshape(1, -1))
    with pytest.raises(PayloadError, match="bytes"):
        outcome.codec.decode(Decoding(outcome.layout, target, starts), outcome.payload[:-8].reshape(1, -1).copy())


@every
def test_corrupted_payloads_never_touch_other_memory(spec: str) -> None:
    """Any bytes decode to numbers or to a PayloadError; what lies around the target stays as it was."""
    outcome = round_trip(spec, (33, 1021), np.float32)
    body_at = len(outcome.layout.header)
    guarded, starts = np.zeros(4000, np.float32), outcome.starts + 1000

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=12))
    def check(edits: list[tuple[float, int]]) -> None:
        payload = outcome.payload.copy()
        for place, value in edits:
            payload[body_at + int(place * (payload.size - body_at))] = value
        guarded[:] = 7
        with contextlib.suppress(PayloadError):
            outcome.codec.decode(Decoding(outcome.layout, guarded, starts), payload.reshape(1, -1))
        assert (guarded[:1000] == 7).all()
        assert (guarded[1033:1036] == 7).all()
        assert (guarded[2057:] == 7).all()

    check()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(min_size=0, max_size=400))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    outcome = round_trip("efsignsgd", (300,), np.float32)
    data = data[: len(data) // 8 * 8]
    payload = np.zeros(len(data), np.uint8)
    payload[:] = np.frombuffer(data, np.uint8)
    with pytest.raises(PayloadError):
        outcome.codec.decode(
            Decoding(outcome.layout, np.zeros(300, np.float32), outcome.starts), payload.reshape(1, -1)
        )


def sparse_edit(at: int, kind: str, value: int) -> None:
    outcome = round_trip("topk:ratio=0.01", (1000,), np.float32)  # k = 10: n, 0, ten values, ten places
    payload = outcome.payload.copy()
    payload[int(outcome.layout.offsets[0]) + at :].view(kind)[0] = value
    outcome.codec.decode(Decoding(outcome.layout, np.zeros(1000, np.float32), np.array([0])), payload.reshape(1, -1))


@pytest.mark.parametrize(
    ("at", "kind", "value"),
    [
        (0, "<u4", 11),
        (0, "<u4", 2**32 - 1),
        (4, "<u4", 1),
        (48, "<u2", 1000),
        (66, "<u2", 1000),
        (66, "<u2", 65535),
        (54, "<u2", 0),
        (56, "<u2", 999),
    ],
    ids=["count", "huge count", "reserved", "first index", "last index", "huge index", "order", "order up"],
)
def test_malformed_sparse_bodies(at: int, kind: str, value: int) -> None:
    """The ends of longer segments: test_sparse_bodies.py."""
    with pytest.raises(PayloadError, match="layer0"):
        sparse_edit(at, kind, value)


def test_duplicate_indices_are_malformed() -> None:
    outcome = round_trip("topk:ratio=0.01", (200_000,), np.float32)
    at = int(outcome.layout.offsets[0]) + 8 + 2000 * 4 + 4 * 3
    places = outcome.payload[at : at + 4000].view(np.uint16)
    slot = 1500 if places[1500] > places[1499] else 1501  # not the first of its span
    assert places[slot] > places[slot - 1]
    places[slot] = places[slot - 1]
    with pytest.raises(PayloadError, match="out of order"):
        outcome.codec.decode(
            Decoding(outcome.layout, np.zeros(200_000, np.float32), outcome.starts), outcome.payload.reshape(1, -1)
        )


SCALED = ("efsignsgd", "efsignsgd:block=0", "onebit", "twobit", "int8", "fp8", "qsgd", "terngrad")


@pytest.mark.parametrize(
    ("spec", "place", "scale"),
    [(spec, 0, scale) for spec in SCALED for scale in (-1.0, np.inf, np.nan)]
    + [("onebit", 1, 1.0), ("onebit", 1, -np.inf), ("twobit", 1, 1e-9), ("twobit", 1, np.inf), ("twobit", 1, np.nan)],
)
def test_impossible_scales_are_malformed(spec: str, place: int, scale: float) -> None:
    outcome = round_trip(spec, (1000,), np.float32)
    outcome.payload[int(outcome.layout.offsets[0]) :][:8].view(np.float32)[place] = scale
    with pytest.raises(PayloadError, match=r"scale|mean"):
        outcome.codec.decode(
            Decoding(outcome.layout, np.zeros(1000, np.float32), outcome.starts), outcome.payload.reshape(1, -1)
        )


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        create("topk").layout([Segment("w", 0, 10)], np.float16)
    with pytest.raises(ValueError, match="partition size"):
        create("topk").layout([Segment("w", 0, 2**32)])


def test_wrong_arguments_are_refused() -> None:
    codec = make_codec(create("topk"))
    layout, starts = make_layout(codec.compressor, (300, 400), np.float32)
    source, payload = numbers(703, np.float32), np.empty(layout.num_bytes, np.uint8)
    with pytest.raises(ValueError, match=r"source must be .* float32"):
        codec.encode(Encoding(layout, source.astype(np.float64), starts), payload)
    with pytest.raises(ValueError, match="payload must be"):
        codec.encode(Encoding(layout, source, starts), payload[:-1])
    with pytest.raises(ValueError, match="segment 1 of 400 elements ends outside"):
        codec.encode(Encoding(layout, source, starts + 1), payload)
    with pytest.raises(ValueError, match="shape"):
        codec.encode(Encoding(layout, source, starts[:1]), payload)
