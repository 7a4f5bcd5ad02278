"""The sparsifiers' body over several spans of elements: as documented, alike on both backends, refused if spoilt."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from compressor_cases import DTYPES, make_layout, numbers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from espresso.compressors import Decoding, Encoding, Feedback, Layout, PayloadError, create, cuda_codec, host_codec
from espresso.compressors.cuda.momentum import CudaMover
from espresso.compressors.momentum import HOST_MOVER
from espresso.compressors.sparse import SPAN, sent_slots
from tests.backends import needs_compiler, on_device
from tests.emulator import EmulatedDevice

SIZES = (7, SPAN - 1, SPAN, SPAN + 1, 2 * SPAN, 2 * SPAN + 1, 3 * SPAN + 77)
LONG = 3 * SPAN + 77
EDGES = (0, SPAN - 1, SPAN, 3 * SPAN + 5, LONG - 1)  # nothing in the third span
BACKENDS = ["host", pytest.param("device", marks=needs_compiler)]
backends = pytest.mark.parametrize("backend", BACKENDS)
both = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)


def make(backend: str, spec: str) -> Any:
    """A codec that takes NumPy arrays."""
    return host_codec(create(spec)) if backend == "host" else on_device(cuda_codec(create(spec), EmulatedDevice()))


def encoded(codec: Any, source: np.ndarray, sizes: Any = None) -> tuple[Layout, np.ndarray, np.ndarray]:
    """Layout, starts and payload."""
    layout, starts = make_layout(codec.compressor, sizes or (source.size,), source.dtype)
    payload = np.full(layout.num_bytes, 0xA5, np.uint8)
    assert codec.encode(Encoding(layout, source, starts), payload)
    return layout, starts, payload


def parsed(layout: Layout, payload: np.ndarray, segment: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Indices and values of a body, read as the format's documentation says, number by number."""
    end = [*layout.offsets[1:], layout.num_bytes][segment]
    raw = payload[layout.offsets[segment] : end].tobytes()
    numel, k, s = int(layout.numels[segment]), int(layout.counts[segment]), layout.dtype.itemsize
    spans = -(-numel // 65536)
    used = 8 + k * s + 4 * (spans - 1) + 2 * k
    assert len(raw) == -(-used // 8) * 8
    count, zero = np.frombuffer(raw, np.uint32, 2)
    values = np.frombuffer(raw, layout.dtype, k, 8)
    ends = np.frombuffer(raw, np.uint32, spans - 1, 8 + k * s)
    places = np.frombuffer(raw, np.uint16, k, 8 + k * s + 4 * (spans - 1))
    assert zero == 0
    assert count <= k
    assert not any(raw[used:])
    assert not values[count:].any()
    assert not places[count:].any()
    indices = []
    for slot in range(count):
        span = sum(int(end) <= slot for end in ends)
        indices.append(span * 65536 + int(places[slot]))
    return np.array(indices, np.int64), values[:count]


@backends
@both
@pytest.mark.parametrize("size", SIZES)
def test_a_body_is_as_documented(backend: str, dtype: Any, size: int) -> None:
    codec = make(backend, "topk:raw_below=1,ratio=0.002")
    source = numbers(size, dtype)
    layout, starts, payload = encoded(codec, source)
    indices, values = parsed(layout, payload)
    k = int(layout.counts[0])
    assert np.array_equal(indices, np.sort(np.argsort(-np.abs(source), kind="stable")[:k]))
    assert np.array_equal(values, source[indices])
    ((_, slots),) = sent_slots(layout, payload)
    assert slots.dtype == np.uint32
    assert np.array_equal(slots, indices)
    decoded, wanted = np.full(size, 7, dtype), np.zeros(size, dtype)
    assert codec.decode(Decoding(layout, decoded, starts), np.stack([payload] * 3))
    wanted[indices] = 3 * values
    assert np.allclose(decoded, wanted, rtol=1e-6, atol=0)
    assert np.array_equal(decoded != 0, wanted != 0)


@backends
@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "dgc:ratio=0.01", "threshold:threshold=0.5,ratio=0.01"])
@both
def test_the_edges_of_spans(backend: str, spec: str, dtype: Any) -> None:
    """Places 65535 and 0, a span without slots, fewer slots than there is room for, other segments around."""
    codec = make(backend, spec)
    sizes = (300, LONG, 5003, 2 * SPAN)
    _, starts = make_layout(codec.compressor, sizes, dtype)
    source = np.zeros(int(starts[-1]) + sizes[-1], dtype)
    for number, place in enumerate(EDGES):
        source[starts[1] + place] = number + 1
    source[starts[3] + 2 * SPAN - 1] = -1
    layout, _, payload = encoded(codec, source, sizes)
    assert [index.tolist() for _, index in sent_slots(layout, payload)] == [
        [],
        list(EDGES),
        [],
        [2 * SPAN - 1],
    ]
    assert parsed(layout, payload, 1)[0].tolist() == list(EDGES)
    at, k = int(layout.offsets[1]) + 8, int(layout.counts[1])
    ends = payload[at + k * source.itemsize :][:12].view(np.uint32)
    assert ends.tolist() == [2, 3, 3]
    decoded = np.full_like(source, 7)
    assert codec.decode(Decoding(layout, decoded, starts), payload.reshape(1, -1))
    for start, size in zip(starts, sizes, strict=True):
        assert np.array_equal(decoded[start : start + size], source[start : start + size])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(SIZES[1:]),
    st.lists(
        st.one_of(
            st.floats(0, 1, exclude_max=True),
            st.builds(lambda span, off: span * SPAN + off, st.integers(0, 3), st.integers(-2, 2)),
        ),
        max_size=40,
    ),
    st.sampled_from(["topk:ratio=0.002", "topk:ratio=0.0001", "threshold:ratio=0.001"]),
)
@example(2 * SPAN + 1, [2 * SPAN], "topk:ratio=0.002")
@example(SPAN, [SPAN - 1], "topk:ratio=0.002")
@example(LONG, [], "topk:ratio=0.0001")
def test_any_few_numbers_come_out_as_they_went_in(size: int, places: list[float], spec: str) -> None:
    """Where there are slots for all: nothing else is sent, and nothing is kept."""
    codec = make("host", spec)
    indices = sorted({int(p * size) if isinstance(p, float) else min(max(p, 0), size - 1) for p in places})
    indices = indices[: codec.compressor.body_size(size, 4)[0]]
    source = np.zeros(size, np.float32)
    source[indices] = 1 + np.arange(len(indices))
    layout, starts, payload = encoded(codec, source)
    ((_, slots),) = sent_slots(layout, payload)
    assert slots.tolist() == indices == parsed(layout, payload)[0].tolist()
    decoded = np.full_like(source, 7)
    assert codec.decode(Decoding(layout, decoded, starts), payload.reshape(1, -1))
    assert np.array_equal(decoded, source)


@cache
def good(backend: str) -> tuple[Any, Layout, np.ndarray, np.ndarray]:
    """A codec, and a body of four spans with 5 slots of 20 used (2, 1, 0 and 2 a span)."""
    codec = make(backend, "topk:ratio=0.0001")
    source = np.zeros(LONG, np.float32)
    source[list(EDGES)] = 1
    return codec, *encoded(codec, source)


def spoilt(backend: str, what: str, entry: int, value: int) -> None:
    """Decode a body, one of its numbers changed."""
    codec, layout, starts, whole = good(backend)
    payload, k = whole.copy(), int(layout.counts[0])
    assert k == 20
    body = payload[int(layout.offsets[0]) :]
    parts = {
        "count": body[:8].view(np.uint32),
        "ends": body[8 + 4 * k :][:12].view(np.uint32),
        "places": body[20 + 4 * k :][: 2 * k].view(np.uint16),
    }
    assert parts["ends"].tolist() == [2, 3, 3]
    parts[what][entry] = value
    codec.decode(Decoding(layout, np.zeros(LONG, np.float32), starts), payload.reshape(1, -1))


@backends
@pytest.mark.parametrize(
    ("what", "entry", "value"),
    [
        ("count", 0, 2),  # below an end
        ("count", 0, 21),
        ("count", 0, 2**32 - 1),
        ("count", 1, 1),
        ("ends", 0, 1),  # 65535 would then be in the second span, before its 0
        ("ends", 0, 4),  # above the next
        ("ends", 0, 2**32 - 1),
        ("ends", 1, 1),
        ("ends", 1, 6),
        ("ends", 2, 2),  # falls: nothing else would be wrong
        ("ends", 2, 6),  # beyond the count
        ("ends", 2, 2**31),
        ("ends", 2, 2**32 - 1),
        ("places", 0, 65535),  # twice
        ("places", 1, 0),
        ("places", 3, 76),  # twice, in the last span
        ("places", 3, 77),  # beyond the segment
        ("places", 4, 77),
        ("places", 4, 65535),
        ("places", 4, 0),
    ],
)
def test_spoilt_bodies_are_named(backend: str, what: str, entry: int, value: int) -> None:
    with pytest.raises(PayloadError, match=r"segment 0 .*out of range or out of order"):
        spoilt(backend, what, entry, value)


@backends
def test_what_is_spoilt_decodes_or_is_refused(backend: str) -> None:
    """Prefix, ends and places changed at random: numbers or a PayloadError, and nothing beside the target."""
    codec = make(backend, "topk:ratio=0.0001")
    layout, starts, good = encoded(codec, numbers(LONG, np.float32))
    at, k = int(layout.offsets[0]), int(layout.counts[0])
    words = [*range(8), *range(8 + 4 * k, good.size - at)]
    guarded = np.zeros(LONG + 2000, np.float32)

    @settings(max_examples=300 if backend == "host" else 15, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.sampled_from(words), st.integers(0, 255)), min_size=1, max_size=6))
    def check(edits: list[tuple[int, int]]) -> None:
        payload = good.copy()
        for place, value in edits:
            payload[at + place] = value
        guarded[:] = 7
        with contextlib.suppress(PayloadError):
            codec.decode(Decoding(layout, guarded, starts + 1000), payload.reshape(1, -1))
        assert (guarded[:1000] == 7).all()
        assert (guarded[-1000:] == 7).all()

    check()


@needs_compiler
@both
@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.01", "dgc:ratio=0.01", "threshold:threshold=2,ratio=0.05", "stc:ratio=0.03"]
)
def test_bytes_of_long_segments_are_those_of_the_host(spec: str, dtype: Any) -> None:
    """Payload, residual and the sum of three; threads of the device in any order."""
    sizes = (300, 2 * SPAN + 77, SPAN + 1, SPAN)
    outcomes = []
    for codec in (host_codec(create(spec)), cuda_codec(create(spec), EmulatedDevice(11))):
        layout, starts = make_layout(codec.compressor, sizes, dtype)
        total = int(starts[-1]) + sizes[-1]
        old, new, target = numbers(total, dtype, 9), np.zeros(total, dtype), np.zeros(total, dtype)
        rows = np.full((3, layout.num_bytes), 0xA5, np.uint8)
        for seed, row in enumerate(rows[:2]):
            source, feedback = numbers(total, dtype, seed), Feedback(old, new, starts, 0.25)
            assert codec.encode(Encoding(layout, source, starts, feedback=feedback), row)
        rows[2] = rows[0]
        assert codec.decode(Decoding(layout, target, starts, scale=1 / 3), rows)
        outcomes.append([part.tobytes() for part in (rows, new, target)])
    assert outcomes[0] == outcomes[1]


@needs_compiler
@pytest.mark.parametrize(("spec", "launches"), [("topk:ratio=0.01", 6), ("stc:ratio=0.03", 5)])
def test_no_two_threads_race_over_spans(spec: str, launches: int) -> None:
    device = EmulatedDevice(11, races=True)
    codec = cuda_codec(create(spec), device)
    layout, starts = make_layout(codec.compressor, (SPAN + 1, 300), np.float32)
    source = torch.from_numpy(numbers(SPAN + 304, np.float32))
    payload = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    feedback: Any = Feedback(source, source.clone(), starts)
    assert codec.encode(Encoding(layout, source, starts, feedback=feedback), payload)
    assert codec.decode(Decoding(layout, source.clone(), starts), payload.view(1, -1))
    if codec.compressor.traits.masks:
        CudaMover(device).mask(create(spec), layout, payload, feedback)
    assert len(device.launches) == launches
    assert device.found == []


@needs_compiler
@both
def test_velocities_are_masked_where_a_long_segment_sent(dtype: Any) -> None:
    compressor = create("dgc:ratio=0.02,momentum=0.9")  # more slots than a tile of slots
    sizes = (5003, LONG, 2 * SPAN)
    source = numbers(sum(sizes) + 6, dtype)
    source[8000:100_000] = 0  # a span without slots
    layout, starts, payload = encoded(host_codec(compressor), source, sizes)
    sent = np.zeros(source.size, bool)
    for segment, indices in compressor.sent(layout, payload):
        assert np.array_equal(indices, parsed(layout, payload, segment)[0])
        sent[starts[segment] + indices] = True
    assert sent.sum() > 4096
    old = np.ones_like(source)
    for mover in (HOST_MOVER, CudaMover(EmulatedDevice())):
        new = np.ones_like(source)
        given: list[Any] = [old, new, payload]
        if mover is not HOST_MOVER:
            given = [torch.from_numpy(array) for array in given]
        mover.mask(compressor, layout, given[2], Feedback(given[0], given[1], starts))
        assert np.array_equal(new == 0, sent)
