"""The conformance suite: every compressor id, every dtype, the same promises."""

from __future__ import annotations

import numpy as np
import pytest
from compressor_cases import (
    DTYPES,
    LARGE_SIZES,
    ODD_SIZES,
    SPECS,
    body,
    dyadic,
    make_layout,
    numbers,
    pieces,
    reference_blocks,
    reference_signs,
    reference_top,
    round_trip,
)

from espresso.compressors import (
    Codec,
    Decoding,
    DrawKey,
    Encoding,
    ErrorFeedback,
    Feedback,
    Segment,
    SummableCodec,
    compressor_ids,
    create,
    host_codec,
    spec_of,
)
from espresso.cpu_offload import WorkerPool, work
from espresso.cpu_offload.codec import EncodeCall
from tests.backends import backend, make_codec  # noqa: F401 (the fixture runs every test on every backend)

every = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.replace(":raw_below=1", ""))
both = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)


def test_the_suite_covers_every_id() -> None:
    with_payloads = {name for name in compressor_ids() if create(name).traits.rounds == 1}
    assert {spec.partition(":")[0] for spec in SPECS} == with_payloads  # the others: test_powersgd.py


def test_ids_are_told_apart_on_the_wire() -> None:
    numbers_ = [create(name).algorithm for name in compressor_ids()]
    assert len(set(numbers_)) == len(numbers_)


@every
@both
def test_the_payload_is_as_large_as_it_says(spec: str, dtype: type) -> None:
    """Exact sizes depend on the lengths only; slots that may stay empty are zero, and the trait says which it is."""
    compressor, sizes = create(spec), (33, 1021)
    outcome = round_trip(spec, sizes, dtype, make=lambda n, t, s: np.where(np.arange(n) % 97, 0, 3).astype(t))
    number = np.dtype(dtype).itemsize
    bodies = [n * number if n < compressor.raw_limit else compressor.body_size(n, number)[1] for n in sizes]
    assert outcome.payload.size == 24 + 16 * len(sizes) + sum(-(-each // 8) * 8 for each in bodies)
    if not compressor.traits.exact_size:
        used = int(np.frombuffer(body(outcome, 1), np.uint32, 1)[0])
        assert used < outcome.layout.counts[1]


@every
def test_spec_round_trip(spec: str) -> None:
    compressor = create(spec)
    assert create(str(spec_of(compressor))) == compressor
    assert isinstance(make_codec(compressor), Codec)
    assert isinstance(make_codec(compressor), SummableCodec) == compressor.traits.summable


@every
@both
@pytest.mark.parametrize("sizes", [ODD_SIZES, LARGE_SIZES], ids=["odd", "large"])
def test_what_is_kept_is_what_was_not_sent(spec: str, dtype: type, sizes: tuple[int, ...]) -> None:
    outcome = round_trip(spec, sizes, dtype)
    assert outcome.finite
    assert np.array_equal(outcome.kept, outcome.q - outcome.decoded)
    name = spec.partition(":")[0]
    assert np.count_nonzero(outcome.kept) > 0 or name == "none"
    raw_bytes = outcome.q.nbytes
    assert name == "none" or sizes is ODD_SIZES or outcome.layout.num_bytes < 0.6 * raw_bytes


@every
@both
@pytest.mark.parametrize("gain", [1.0, 0.25])
def test_nothing_is_lost_over_steps(spec: str, dtype: type, gain: float) -> None:
    """Sum of D + e_T = sum of g + e_0, exactly on dyadic inputs where D is exact; e is what is kept over the gain."""
    codec = make_codec(create(spec))
    if codec.compressor.traits.stochastic and not codec.compressor.traits.error_feedback:
        pytest.skip("unbiased: has no residual, which would grow")
    layout, starts = make_layout(codec.compressor, (33, 1021), dtype)
    total = int(starts[-1] + 1021)
    residual, spare = np.zeros(total, dtype), np.zeros(total, dtype)
    sent, given = np.zeros(total), np.zeros(total)
    payload, decoded = np.empty((1, layout.num_bytes), np.uint8), np.zeros(total, dtype)
    for step in range(20):
        gradient, key = dyadic(total, dtype, step), DrawKey(step=step)
        codec.encode(
            Encoding(layout, gradient, starts, feedback=Feedback(residual, spare, starts, gain), key=key), payload[0]
        )
        codec.decode(Decoding(layout, decoded, starts, key=key), payload)
        residual, spare = spare, residual
        sent += decoded
        given += gradient
    inside = np.r_[0:33, 36:total]
    exact = spec.partition(":")[0] in ("none", "fp16", "topk", "dgc", "threshold", "randomk")
    tolerance = 0.0 if exact else 1e-4 if dtype is np.float32 else 1e-12
    assert np.abs(sent + residual / gain - given)[inside].max() <= tolerance


@every
@both
@pytest.mark.parametrize("gain", [1.0, 0.3])
def test_fused_feedback_equals_the_wrapper(spec: str, dtype: type, gain: float) -> None:
    fused = round_trip(spec, (5003, 33), dtype, gain=gain)
    wrapped = round_trip(spec, (5003, 33), dtype, wrap=ErrorFeedback, gain=gain)
    assert np.array_equal(fused.kept, wrapped.kept)
    assert fused.payload.tobytes() == wrapped.payload.tobytes()


@every
@both
def test_payload_is_written_completely(spec: str, dtype: type) -> None:
    codec = make_codec(create(spec))
    layout, starts = make_layout(codec.compressor, ODD_SIZES, dtype)
    source = numbers(int(starts[-1] + ODD_SIZES[-1]), dtype)
    clean, dirty = np.zeros(layout.num_bytes, np.uint8), np.full(layout.num_bytes, 255, np.uint8)
    for payload in (clean, dirty):
        codec.encode(Encoding(layout, source, starts), payload)
    assert np.array_equal(clean, dirty)
    assert layout.num_bytes % 8 == 0
    assert (layout.offsets % 8 == 0).all()


@every
@both
@pytest.mark.parametrize("sizes", [ODD_SIZES, LARGE_SIZES], ids=["small", "large"])
def test_what_is_kept_is_written_completely(spec: str, dtype: type, sizes: tuple[int, ...]) -> None:
    """Also where a gradient is not finite: in rooms that residuals share, another's numbers were there before."""
    codec = make_codec(create(spec))
    layout, starts = make_layout(codec.compressor, sizes, dtype)
    source = numbers(int(starts[-1] + sizes[-1]), dtype)
    source[starts[np.argmax(sizes)] + 1] = np.inf
    old, kept = np.zeros_like(source), []
    for before in (0.0, 7.0):
        new = np.full_like(source, before)
        encoding = Encoding(layout, source, starts, feedback=Feedback(old, new, starts))
        codec.encode(encoding, np.zeros(layout.num_bytes, np.uint8))
        kept.append([new[start : start + size] for start, size in zip(starts, sizes, strict=True)])
    if codec.compressor.traits.error_feedback:
        assert all(np.array_equal(*written, equal_nan=True) for written in zip(*kept, strict=True))


@every
@both
def test_decode_sums_in_row_order(spec: str, dtype: type) -> None:
    codec = make_codec(create(spec))
    layout, starts = make_layout(codec.compressor, (1021, 3000), dtype)
    total = int(starts[-1] + 3000)
    rows = np.zeros((3, layout.num_bytes + 16), np.uint8)[:, : layout.num_bytes]
    single = np.zeros((3, total), dtype)
    for index, row in enumerate(rows):
        codec.encode(Encoding(layout, numbers(total, dtype, index), starts), row)
        codec.decode(Decoding(layout, single[index], starts), row.reshape(1, -1))
    together = np.zeros(total, dtype)
    assert codec.decode(Decoding(layout, together, starts, scale=1 / 3), rows)
    assert np.array_equal(together, ((single[0] + single[1]) + single[2]) * dtype(1 / 3))
    codec.decode(Decoding(layout, together, starts), rows[:0])
    assert not together.any()


@every
@both
def test_zeros_stay_zeros(spec: str, dtype: type) -> None:
    outcome = round_trip(spec, ODD_SIZES, dtype, make=lambda count, kind, seed: np.zeros(count, kind))
    assert outcome.finite
    assert not outcome.decoded.any()
    assert not outcome.kept.any()


@every
@both
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [3, 4400, 5010])
def test_non_finite_is_visible(spec: str, dtype: type, value: float, place: int) -> None:
    def spoil(source: np.ndarray, starts: np.ndarray) -> None:
        source[place] = value

    outcome = round_trip(spec.replace("raw_below=1", "raw_below=20"), (5003, 8), dtype, change=spoil)
    assert not outcome.finite
    assert np.isnan(outcome.decoded).all()


@every
@both
def test_the_largest_numbers_do_no_damage(spec: str, dtype: type) -> None:
    """What is said to be finite is: an infinite residual would be kept for good."""

    def spoil(source: np.ndarray, starts: np.ndarray) -> None:
        source[3] = np.finfo(dtype).max

    outcome = round_trip(spec, (5003, 8), dtype, change=spoil, scale=1.0)
    assert not outcome.finite or (np.isfinite(outcome.decoded).all() and np.isfinite(outcome.kept).all())


@every
@both
def test_scaling_by_a_power_of_two_commutes(spec: str, dtype: type) -> None:
    one = round_trip(spec, (1021, 33), dtype)
    eight = round_trip(spec, (1021, 33), dtype, make=lambda count, kind, seed: 8 * numbers(count, kind, seed))
    normal = np.abs(one.q) > 1e-3  # half precision is linear on normals only
    assert np.array_equal(eight.decoded[normal], 8 * one.decoded[normal])


@every
@both
def test_any_number_of_threads_gives_the_same_bytes(spec: str, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = round_trip(spec, (200_000, 33, 1021, 150_001), dtype)
    monkeypatch.setattr(work, "FUSED", 100_000)  # so that threads share segments
    with WorkerPool(3) as pool:
        shared = round_trip(spec, (200_000, 33, 1021, 150_001), dtype, pool=pool)
    assert alone.payload.tobytes() == shared.payload.tobytes()
    assert np.array_equal(alone.kept, shared.kept)
    assert np.array_equal(alone.decoded, shared.decoded)


@both
def test_streamed_residuals_are_complete(dtype: type) -> None:
    """Layouts above the streaming threshold write the same residuals, at any alignment."""
    signs = "efsignsgd efsignsgd:block=0 efsignsgd:block=65536 onebit twobit twobit:block=65536"
    for spec in f"{signs} int8 fp8 fp8:format=e5m2 topk randomk".split():
        codec = make_codec(create(spec))
        count = (1 << 22) // np.dtype(dtype).itemsize + 777
        layout = codec.compressor.layout([Segment("w", 0, count)], dtype)
        source, target = numbers(count, dtype), np.empty(count, dtype)
        new = np.full(count + 8, 7, dtype)
        payload = np.empty((1, layout.num_bytes), np.uint8)
        for start in (1, 3, 4):
            new[:] = 7
            at = np.array([start])
            feedback = Feedback(np.zeros(count + 8, dtype), new, at)
            codec.encode(Encoding(layout, source, np.array([0]), feedback=feedback), payload[0])
            codec.decode(Decoding(layout, target, np.array([0])), payload)
            assert np.array_equal(new[start : start + count], source - target)
            assert (np.r_[new[:start], new[start + count :]] == 7).all()


def test_partitions_of_the_default_size_stream_where_that_is_faster() -> None:
    """A bucket is cut into equal parts of less than 4 MB: a threshold of 4 MB would let none of them by."""
    layout = create("efsignsgd").layout([Segment("w", 0, 1_006_272)], np.float32)
    encoding = Encoding(layout, numbers(1_006_272, np.float32), np.array([0]))
    streams = {
        spec: EncodeCall.of(encoding, np.empty(0, np.uint8), host_codec(create(spec)).stream_from).stream
        for spec in ("efsignsgd", "onebit", "twobit", "dgc", "topk", "int8", "randomk")
    }
    assert {spec for spec, streamed in streams.items() if not streamed} == {"int8", "randomk"}


# What each algorithm promises (ALGORITHMS.md section 3), against slow references.


@both
@pytest.mark.parametrize(("name", "bits"), [("fp16", 11), ("bf16", 8)])
def test_casts_round_to_nearest_even(dtype: type, name: str, bits: int) -> None:
    import torch

    special = np.array([0, -0.0, 1e-8, -6e-8, 5.9e-8, 6.1e-5, 65504, 65519.99, 2.0**-24, 2.0**-25, 1 + 2.0**-11])
    nearly = np.array([1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-8 + 2.0**-40, 2.0**-25 + 2.0**-60])
    x = np.concatenate([special, nearly, numbers(3000, np.float64), 10 ** numbers(500, np.float64)])
    x = x[np.abs(x) < 65520].astype(dtype)
    codec = make_codec(create(f"{name}:raw_below=1"))
    layout = codec.compressor.layout([Segment("w", 0, x.size)], dtype)
    payload, out = np.empty((1, layout.num_bytes), np.uint8), np.empty_like(x)
    assert codec.encode(Encoding(layout, x, np.array([0])), payload[0])
    codec.decode(Decoding(layout, out, np.array([0])), payload)
    kind = torch.float16 if name == "fp16" else torch.bfloat16
    if dtype is np.float32 or name == "fp16":  # torch rounds float64 to bfloat16 by way of float32, twice
        expected = torch.from_numpy(x).to(kind).double().numpy() if dtype is np.float32 else x.astype(np.float16)
        assert np.array_equal(out, expected.astype(dtype))
    normal = np.abs(x) > 1e-4
    assert (np.abs(out - x)[normal] <= 2.0**-bits * np.abs(x)[normal]).all()


def test_an_overflow_made_by_a_cast_is_not_finite() -> None:
    def spoil(source: np.ndarray, starts: np.ndarray) -> None:
        source[5] = 1e6

    assert not round_trip("fp16:raw_below=1", (300,), np.float32, change=spoil).finite
    assert round_trip("bf16:raw_below=1", (300,), np.float32, change=spoil).finite


@both
@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7)])
def test_blockwise_bounds(dtype: type, name: str, levels: int) -> None:
    outcome = round_trip(f"{name}:raw_below=1,block=64", ODD_SIZES, dtype)
    roundings = 0
    for q, decoded, _ in pieces(outcome):
        roundings += np.count_nonzero(decoded != reference_blocks(q, 64, levels))
        for low in range(0, len(q), 64):
            part, error = q[low : low + 64], (q - decoded)[low : low + 64]
            top = np.abs(part).max()
            assert np.abs(error).max() <= top / (2 * levels) * (1 + 1e-5)
            delta = max(1 / 64, 1 - 64 / (4 * levels**2))
            assert (error.astype(float) ** 2).sum() <= (1 - delta) * (part.astype(float) ** 2).sum() * (1 + 1e-5)
    assert roundings <= 3  # numbers that lie on a boundary


@both
@pytest.mark.parametrize(("name", "bits"), [("e4m3", 4), ("e5m2", 3)])
def test_fp8(dtype: type, name: str, bits: int) -> None:
    """Codes are those of PyTorch's type, and the relative error of normal ones is bounded."""
    import torch

    kind = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
    top, first_normal = (448.0, 2.0**-6) if name == "e4m3" else (57344.0, 2.0**-14)
    outcome = round_trip(f"fp8:raw_below=1,format={name},block=128", (1021, 128, 5), dtype)
    spread = round_trip(
        f"fp8:raw_below=1,format={name}",
        (4096,),
        dtype,
        make=lambda n, t, s: (10 ** np.clip(numbers(n, t, s), -9, 9)).astype(t),
    )
    for case, block in ((outcome, 128), (spread, 256)):
        for index, (q, decoded, _) in enumerate(pieces(case)):
            raw, at, size = body(case, index), 0, case.layout.dtype.itemsize
            for low in range(0, len(q), block):
                part = q[low : low + block]
                step = np.frombuffer(raw, dtype, 1, at)[0]
                assert step == dtype(np.abs(part).max()) / dtype(top)
                codes = np.frombuffer(raw, np.uint8, len(part), at + size).copy()
                at += size + len(part)
                scaled = part * (dtype(top) / np.abs(part).max())
                wanted = torch.from_numpy(scaled.astype(np.float32)).to(kind).view(torch.uint8).numpy()
                assert (codes != wanted).sum() <= (0 if dtype is np.float32 else 1)
                values = torch.from_numpy(codes).view(kind).float().numpy().astype(dtype)
                assert np.array_equal(values * step, decoded[low : low + block])
                normal = np.abs(scaled) >= first_normal
                error = np.abs(decoded[low : low + block] - part)
                assert (error[normal] <= 2.0**-bits * np.abs(part[normal]) * (1 + 1e-6)).all()
                small = first_normal * 2.0**-bits * step
                assert (error[~normal] <= small * (1 + 1e-6)).all()


@both
def test_threshold(dtype: type) -> None:
    """What is kept is below the threshold, unless more pass than there are slots: then the largest are sent."""
    roomy = round_trip("threshold:threshold=0.5,ratio=1", (5003, 300), dtype)
    for q, decoded, kept in pieces(roomy):
        assert (np.abs(kept) < 0.5).all()
        assert np.array_equal(decoded, np.where(np.abs(q) >= dtype(0.5), q, 0))
    tight = round_trip("threshold:threshold=0.5,ratio=0.01", (5003,), dtype)
    assert np.array_equal(tight.decoded, reference_top(tight.q, 50))


@both
@pytest.mark.parametrize("block", [0, 32, 96, 256, 1024, 65536])
def test_scaled_sign(dtype: type, block: int) -> None:
    outcome = round_trip(f"efsignsgd:raw_below=1,block={block}", (*ODD_SIZES, 70_001), dtype)
    for index, (q, decoded, _) in enumerate(pieces(outcome)):
        if not len(q):
            continue
        assert np.array_equal(reference_signs(body(outcome, index), len(q), dtype, block), decoded)
        assert np.array_equal(decoded < 0, q < 0)
        length = block or len(q)
        assert outcome.layout.counts[index] == -(-len(q) // length)
        for low in range(0, len(q), length):
            wide, out = q[low : low + length].astype(np.float64), decoded[low : low + length]
            assert abs(np.abs(out).max() / np.abs(wide).mean() - 1) < 1e-6
            expected = (wide**2).sum() - np.abs(wide).sum() ** 2 / len(wide)
            assert ((wide - out) ** 2).sum() == pytest.approx(expected, rel=1e-5, abs=1e-12)


@both
@pytest.mark.parametrize("block", [32, 96, 256, 65536])
def test_onebit(dtype: type, block: int) -> None:
    """The mean of either side: the error is orthogonal to what is sent, and at most scaled sign's."""
    outcome = round_trip(f"onebit:raw_below=1,block={block}", (*ODD_SIZES, 70_001), dtype)
    for index, (q, decoded, _) in enumerate(pieces(outcome)):
        assert np.array_equal(reference_signs(body(outcome, index), len(q), dtype, block, 2), decoded)
        for low in range(0, len(q), block):
            wide, out = q[low : low + block].astype(np.float64), decoded[low : low + block].astype(np.float64)
            for side in (wide >= 0, wide < 0):
                if side.any():
                    assert out[side] == pytest.approx(wide[side].mean(), rel=1e-6)
            error, size = wide - out, (wide**2).sum()
            assert abs((error * out).sum()) <= 1e-6 * size
            assert (error**2).sum() <= (size - np.abs(wide).sum() ** 2 / len(wide)) * (1 + 1e-6) + 1e-12


@both
@pytest.mark.parametrize("block", [32, 96, 256, 65536])
def test_twobit(dtype: type, block: int) -> None:
    """The mean of either part: the error is orthogonal to what is sent, and at most scaled sign's."""
    outcome = round_trip(f"twobit:raw_below=1,block={block}", (*ODD_SIZES, 70_001), dtype)
    for index, (q, decoded, _) in enumerate(pieces(outcome)):
        assert np.array_equal(reference_signs(body(outcome, index), len(q), dtype, block, 2, 2), decoded)
        assert np.array_equal(decoded < 0, q < 0)
        for low in range(0, len(q), block):
            wide, out = q[low : low + block].astype(np.float64), decoded[low : low + block].astype(np.float64)
            size, mean = np.abs(wide), np.abs(wide).mean()
            outer = np.where(np.abs(size - mean) > 1e-6 * mean, size, np.abs(out)) > mean  # rounding may take it past
            for part in (outer, ~outer):
                if part.any():
                    assert np.abs(out[part]) == pytest.approx(size[part].mean(), rel=2e-6)
            error, square = wide - out, (wide**2).sum()
            assert abs((error * out).sum()) <= 1e-6 * square
            assert (error**2).sum() <= (square - size.sum() ** 2 / len(wide)) * (1 + 1e-6) + 1e-12


def test_two_bits_leave_an_eighth_of_normal_numbers() -> None:
    """The best four levels leave 0.1175 (Max, 1960), one bit 1 - 2 / pi."""

    def normal(count: int, dtype: type, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(count).astype(dtype)

    for spec, part in (("twobit", 1 / 8), ("efsignsgd", 1 - 2 / np.pi)):
        outcome = round_trip(spec, (1 << 18,), np.float32, make=normal)
        assert (outcome.kept.astype(float) ** 2).sum() == pytest.approx(part * (outcome.q**2).sum(), rel=0.03)


def test_twobit_of_numbers_of_one_size_is_exact() -> None:
    """Whichever side rounding puts them on: the mean of seven times 0.1 is not 0.1."""
    for count in (7, 37, 256, 300):
        for value in (0.1, 1 / 3, 1e-42, 3e38):

            def fill(source: np.ndarray, starts: np.ndarray, value: float = value) -> None:
                source[:] = value
                source[::3] *= -1

            outcome = round_trip("twobit:raw_below=1", (count,), np.float32, change=fill, make=empty, scale=1.0)
            assert outcome.finite
            assert outcome.decoded == pytest.approx(outcome.q, rel=3e-7)


def test_means_of_two_bits_stay_in_order() -> None:
    """Numbers so alike that rounding takes the sums of the smaller ones past those of the larger."""
    for seed in (91, 187, 332):

        def alike(source: np.ndarray, starts: np.ndarray, seed: int = seed) -> None:
            rng = np.random.default_rng(seed)
            source[:] = np.float32(rng.uniform(1, 2)) * (1 + rng.integers(0, 3, source.size) * 2.0**-23)

        outcome = round_trip("twobit:block=4096", (4096,), np.float32, make=empty, change=alike, scale=1.0)
        inner, outer = np.frombuffer(body(outcome, 0), np.float32, 2)
        mean = np.float32(lane_sum(outcome.q) / 4096)
        below = outcome.q <= mean
        assert np.float32(lane_sum(outcome.q * below) / np.count_nonzero(below)) > mean, "no case of it"
        assert inner == mean <= outer


def test_one_mean_of_onebit_is_scaled_sign() -> None:
    for block in (0, 256):
        one = round_trip(f"onebit:raw_below=1,means=1,block={block}", ODD_SIZES, np.float32)
        sign = round_trip(f"efsignsgd:raw_below=1,block={block}", ODD_SIZES, np.float32)
        assert [body(one, i) for i in range(len(ODD_SIZES))] == [body(sign, i) for i in range(len(ODD_SIZES))]


@both
def test_the_sum_of_a_block_has_the_documented_shape(dtype: type) -> None:
    """Bit for bit, so that another backend can compute the same scale."""
    for block, numel in ((256, 256), (256, 201), (96, 96), (1024, 1000)):
        outcome = round_trip(f"efsignsgd:raw_below=1,block={block}", (numel,), dtype)
        assert np.abs(outcome.decoded[0]) == dtype(lane_sum(np.abs(outcome.q)) / numel)


@both
def test_the_sums_of_either_side_have_the_documented_shape(dtype: type) -> None:
    for block, numel in ((256, 256), (256, 201), (96, 96), (1024, 1000)):
        outcome = round_trip(f"onebit:raw_below=1,block={block}", (numel,), dtype)
        for side in (outcome.q >= 0, outcome.q < 0):
            mean = dtype(lane_sum(np.abs(outcome.q) * side) / np.count_nonzero(side))
            assert (np.abs(outcome.decoded[side]) == mean).all()


@both
def test_the_sums_of_both_parts_have_the_documented_shape(dtype: type) -> None:
    for block, numel in ((256, 256), (256, 201), (96, 96), (1024, 1000)):
        outcome = round_trip(f"twobit:raw_below=1,block={block}", (numel,), dtype)
        size = np.abs(outcome.q)
        mean = dtype(lane_sum(size) / numel)
        inner, outer = size <= mean, size > mean
        assert (np.abs(outcome.decoded[inner]) == dtype(lane_sum(size * inner) / np.count_nonzero(inner))).all()
        assert (np.abs(outcome.decoded[outer]) == dtype(lane_sum(size * outer) / np.count_nonzero(outer))).all()


def lane_sum(values: np.ndarray) -> float:
    """The sum in 64 lanes, which are added in float64 by halving."""
    lanes = np.zeros(64, values.dtype)
    for row in np.r_[values, np.zeros(-values.size % 64, values.dtype)].reshape(-1, 64):
        lanes += row
    wide = lanes.astype(np.float64)
    while len(wide) > 1:
        wide = wide[: len(wide) // 2] + wide[len(wide) // 2 :]
    return float(wide[0])


def empty(count: int, dtype: type, seed: int) -> np.ndarray:
    return np.zeros(count, dtype)


def test_a_small_block_keeps_scales_apart() -> None:
    """Zeros beside large numbers stay zeros in their own blocks; one scale per segment moves them."""

    def half(source: np.ndarray, starts: np.ndarray) -> None:
        source[:256], source[256:] = 3, 0

    for spec in ("efsignsgd", "twobit", "twobit:block=512"):
        apart = round_trip(spec, (512,), np.float32, make=empty, change=half, scale=1.0)
        assert np.array_equal(apart.decoded, apart.q)
    whole = round_trip("efsignsgd:block=0", (512,), np.float32, make=empty, change=half, scale=1.0)
    assert (whole.decoded == 1.5).all()


def test_scaled_sign_of_zeros_is_plus_and_padding_is_zero() -> None:
    def signs(source: np.ndarray, starts: np.ndarray) -> None:
        source[:] = [-0.0, 0.0, -1.0, 1.0] * 9 + [-0.0]

    outcome = round_trip(
        "efsignsgd:raw_below=1",
        (37,),
        np.float32,
        change=signs,
        make=lambda n, t, s: np.full(n, -0.0, t),
        scale=1.0,
    )
    assert np.array_equal(np.signbit(outcome.decoded), [False, False, True, False] * 9 + [False])
    words = np.frombuffer(body(outcome, 0), np.uint32, 2, 4)
    assert sum(int(word).bit_count() for word in words) == 9


def test_scaled_sign_survives_huge_numbers() -> None:
    for spec in ("efsignsgd", "efsignsgd:block=0", "onebit", "twobit"):
        outcome = round_trip(spec, (5003,), np.float32, make=lambda n, t, s: np.full(n, 2e38 if s == 1 else 1e38, t))
        assert outcome.finite
        assert (outcome.decoded == outcome.decoded[0]).all()
        assert outcome.decoded[0] == pytest.approx(2e38)


SHAPES = {
    "gradients": lambda n: numbers(n, np.float64),
    "ascending": lambda n: np.arange(n) / n,
    "constant": lambda n: np.ones(n),
    "ties": lambda n: np.random.default_rng(0).integers(-3, 4, n).astype(float),
    "nearly empty": lambda n: np.where(np.arange(n) % 997 == 5, 1.0 + np.arange(n), 0),
    "one run": lambda n: np.where(np.arange(n) < n // 50, 1e6 + np.arange(n), 1e-6),
    "hidden": lambda n: np.where(np.arange(n) % 1000 == 999, 1e3, 1.0),
}


@both
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["topk", "dgc"])
def test_sparsifiers_send_the_top(dtype: type, shape: str, name: str) -> None:
    def fill(source: np.ndarray, starts: np.ndarray) -> None:
        source[:] = SHAPES[shape](source.size)

    outcome = round_trip(
        f"{name}:ratio=0.01", (30_011,), dtype, change=fill, scale=1.0, make=lambda n, t, s: np.zeros(n, t)
    )
    k, count = 300, int(np.frombuffer(body(outcome, 0), np.uint32, 1)[0])
    assert outcome.layout.counts[0] == k
    nonzero = np.count_nonzero(outcome.q)
    assert count == np.count_nonzero(outcome.decoded) <= k
    assert count >= (1.0 if name == "topk" else 0.8) * min(k, nonzero)
    assert np.array_equal(outcome.decoded, reference_top(outcome.q, count))


@pytest.mark.parametrize("name", ["topk", "dgc"])
def test_at_least_so_many_are_sent_and_short_segments_are_raw(name: str) -> None:
    sizes = (200, 399, 400, 5003, 70_001)
    outcome = round_trip(f"{name}:ratio=0.01,least=200", sizes, np.float32)
    assert outcome.layout.raw.tolist() == [True, True, False, False, False]
    assert outcome.layout.counts.tolist() == [0, 0, 200, 200, 700]
    wide = outcome.layout.num_bytes - len(outcome.layout.header)
    assert wide <= sum(4 * size for size in sizes[:3]) + 12 * (200 + 700) + 8 * 5
    ends = np.cumsum(sizes)
    for end, size, k in zip(ends, sizes, (200, 399, 200, 200, 700), strict=True):
        sent, q = outcome.decoded[end - size : end], outcome.q[end - size : end]
        assert k * 0.8 <= np.count_nonzero(sent) <= k
        assert np.array_equal(sent, reference_top(q, np.count_nonzero(sent)))
    with pytest.raises(ValueError, match="least"):
        create(f"{name}:least=0")


@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_keeping_everything_is_the_identity(name: str) -> None:
    outcome = round_trip(f"{name}:raw_below=1,ratio=1", ODD_SIZES, np.float32)
    assert np.array_equal(outcome.decoded, outcome.q)


def test_randomk_draws() -> None:
    """k distinct positions, the same on every rank, others at every step, each with probability k/d."""
    hits = np.zeros(5003)
    seen = set()
    for step in range(400):
        draws = [
            round_trip("randomk:ratio=0.1", (5003,), np.float32, key=DrawKey(step=step, rank=rank)).kept == 0
            for rank in ((-1, 5) if step < 3 else (-1,))
        ]
        assert all(np.array_equal(draws[0], other) for other in draws)
        assert draws[0].sum() == 500
        seen.add(draws[0].tobytes())
        hits += draws[0]
    assert len(seen) == 400
    expected, spread = 400 * 500 / 5003, np.sqrt(400 * 0.1 * 0.9)
    assert abs(hits.mean() - expected) < 1e-9
    assert np.abs(hits - expected).max() < 5 * spread
    assert 0.8 < hits.std() / spread < 1.2


@pytest.mark.parametrize("spec", ["none", "fp16:raw_below=1", "bf16:raw_below=1", "randomk:ratio=0.05"])
@both
def test_values_are_summable(spec: str, dtype: type) -> None:
    """The vector decodes to what the payload decodes to, and the vectors' sum to the sum."""
    codec = make_codec(create(spec))
    assert isinstance(codec, SummableCodec)
    layout, starts = make_layout(codec.compressor, (1021, 33, 5003), dtype)
    total, key = int(starts[-1] + 5003), DrawKey(seed=4)
    kind = codec.value_dtype(layout)
    values = np.zeros((2, codec.num_values(layout)), np.uint16 if kind == "bfloat16" else kind)
    payload, plain = np.empty((2, layout.num_bytes), np.uint8), np.zeros(total, dtype)
    inputs = [dyadic(total, dtype, seed) for seed in (1, 2)]
    for index, source in enumerate(inputs):
        assert codec.encode_values(Encoding(layout, source, starts, key=key), values[index])
        codec.encode(Encoding(layout, source, starts, key=key), payload[index])
    codec.decode(Decoding(layout, plain, starts, key=key), payload)
    summed = np.zeros(total, dtype)
    if kind == "bfloat16":
        import torch

        both_rows = torch.from_numpy(values).view(torch.bfloat16)
        vector = (both_rows[0] + both_rows[1]).view(torch.uint16).numpy()
    else:
        vector = values[0] + values[1]
    assert codec.decode_values(Decoding(layout, summed, starts, key=key), vector)
    tolerance = 0.0 if kind != "bfloat16" else 0.1
    assert np.abs(summed - plain).max() <= tolerance
    inputs[0][4000] = np.inf
    feedback = Feedback(np.zeros(total, dtype), np.zeros(total, dtype), starts)
    assert not codec.encode_values(Encoding(layout, inputs[0], starts, key=key, feedback=feedback), values[0])
    assert not codec.decode_values(Decoding(layout, summed, starts, key=key), values[0])
