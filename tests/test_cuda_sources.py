"""The CUDA sources without a GPU, run by the emulation against the Numba twins (``make cuda`` compiles them).

The emulation shows that indices, layouts and arithmetic are the host's, byte for byte. It is not a run on a GPU.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from compressor_cases import DTYPES, SPECS, dyadic, make_layout, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from espresso.compressors import (
    Codec,
    Decoding,
    DrawKey,
    Encoding,
    Feedback,
    Layout,
    PayloadError,
    Segment,
    SummableCodec,
    compressor_ids,
    create,
    cuda_codec,
    host_codec,
)
from espresso.compressors.base import DitheringCodec
from espresso.compressors.cuda import CudaDevice, CudaUnavailableError, source_of, sources
from espresso.compressors.cuda.codec import CudaSummableCodec
from espresso.compressors.cuda.runtime import CubinCache
from tests import emulator
from tests.emulator import COMPILER, EmulatedDevice, build

GOLDEN = Path(__file__).parent / "golden" / "compressors.json"

#: Block sizes with registers of their own, and longer segments than one tile; beside the suite's specs.
MORE_SPECS = (
    "efsignsgd:raw_below=300",
    "twobit:raw_below=1,block=2048",
    "int8:raw_below=1",
    "int4:raw_below=1",
    "int8:raw_below=1,block=4096",
    "topk:raw_below=300,ratio=0.3",
    "topk:ratio=0.01,least=150",
    "dgc:ratio=0.001",
    "stc:raw_below=300,ratio=0.5",
)


def has_cuda(spec: str) -> bool:
    """Whether this id has a GPU codec."""
    try:
        cuda_codec(create(spec), EmulatedDevice())
    except ValueError as error:
        assert "no GPU codec" in str(error)  # noqa: PT017 (the other outcome is fine)
        return False
    return True


def ids(spec: str) -> str:
    return spec.replace(":raw_below=1", "")


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulation of kernels needs g++")
specs = [spec for spec in (*SPECS, *MORE_SPECS) if has_cuda(spec)]
every = pytest.mark.parametrize("spec", specs, ids=ids)
both = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """The emulation's, compiled before the first test."""
    if COMPILER is not None:
        build(sources())


def test_every_id_has_a_gpu_codec() -> None:
    assert [name for name in compressor_ids() if not has_cuda(name)] == []


@needs_compiler
@both
@pytest.mark.parametrize("spec", ["bf16:raw_below=1", "int8:raw_below=1"])
def test_numbers_are_moved_as_on_the_host_before_they_are_rounded(spec: str, dtype: Any) -> None:
    compressor, key = create(spec), DrawKey(seed=1, step=2**40 + 3, site=3, rank=2)
    layout, starts = make_layout(compressor, (7, 256, 1021, 5003), dtype)
    source = numbers(int(starts[-1] + 5003), dtype, 1)
    source[[3, 300, 900]] = np.inf, np.nan, 0
    found = []
    for codec in (host_codec(compressor), cuda_codec(compressor, EmulatedDevice(order=2))):
        moved = source.copy()
        cast(DitheringCodec, codec).dither(Encoding(layout, moved, starts, key=key))
        found.append(moved)
    assert found[0].tobytes() == found[1].tobytes()
    inside = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, layout.numels, strict=True)])
    finite = inside[np.isfinite(source[inside])]
    assert np.isfinite(found[0][finite]).all()
    assert 0.5 < np.mean(found[0][finite] != source[finite]) < 1.0


GAIN = 0.3
"""Other than 1, so that a kernel which forgets it shows; that of 1 runs in tests/test_device_executor.py."""


class Run:
    """One encode and one decode of three rows by a codec."""

    def __init__(
        self, codec: Codec, layout: Layout, starts: np.ndarray, source: np.ndarray, old: np.ndarray | None
    ) -> None:
        key = DrawKey(seed=1, step=2**40 + 3, site=3)
        self.payload = np.full(layout.num_bytes, 0xA5, np.uint8)
        self.kept, self.decoded = np.full_like(source, 7), np.full_like(source, 7)
        feedback = None if old is None else Feedback(old, self.kept, starts, GAIN)
        self.finite = codec.encode(
            Encoding(layout, source, starts, scale=0.3, feedback=feedback, key=key), self.payload
        )
        rows = np.zeros((3, layout.num_bytes + 16), np.uint8)[:, : layout.num_bytes]
        rows[:] = self.payload
        self.decoded_finite = codec.decode(Decoding(layout, self.decoded, starts, scale=1 / 3, key=key), rows)

    def check_equal(self, other: Run) -> None:
        assert self.finite == other.finite == self.decoded_finite == other.decoded_finite
        if not self.finite:
            assert self.payload[5] == other.payload[5] == 1
            return
        assert self.payload.tobytes() == other.payload.tobytes()
        assert self.kept.tobytes() == other.kept.tobytes()
        assert self.decoded.tobytes() == other.decoded.tobytes()


def compare(spec: str, dtype: Any, sizes: Any, change: Any = None, *, order: int = 0, feedback: bool = True) -> Run:
    """Both backends on the same input."""
    compressor = create(spec)
    layout, starts = make_layout(compressor, sizes, dtype)
    total = int(starts[-1] + sizes[-1])
    source, old = numbers(total, dtype, 1), numbers(total, dtype, 2)
    if change is not None:
        change(source, old)
    given = old if feedback else None
    host = Run(host_codec(compressor), layout, starts, source, given)
    device = Run(cuda_codec(compressor, EmulatedDevice(order)), layout, starts, source, given)
    host.check_equal(device)
    return device


@needs_compiler
@every
@both
def test_bytes_are_those_of_the_host(spec: str, dtype: Any) -> None:
    """Payload, residual and decoded sum; threads forward, backward and shuffled; with and without a residual."""
    odd = (0, 1, 7, 8, 9, 31, 32, 33, 127, 1021, 1024, 5003)
    assert compare(spec, dtype, odd, order=1).finite
    assert compare(spec, dtype, (33, 70_001, 4096), order=11).finite
    assert compare(spec, dtype, odd, feedback=False).finite


def watched(spec: str, device: EmulatedDevice) -> None:
    """An encode with a residual and a decode of three rows; also as vectors, where there are such."""
    dtype = np.float32
    codec = cuda_codec(create(spec), device)
    sizes = (0, 1, 33, 5003, 9001)
    layout, starts = make_layout(codec.compressor, sizes, dtype)
    source, old = (torch.from_numpy(numbers(sum(sizes) + int(starts[0]) + 64, dtype, seed)) for seed in (1, 2))
    payloads, key = torch.zeros((3, layout.num_bytes), dtype=torch.uint8), DrawKey(seed=1)
    for number, row in enumerate(payloads):
        feedback = Feedback(old, torch.zeros_like(old), starts, GAIN)
        codec.encode(Encoding(layout, source.roll(number), starts, feedback=feedback, key=key), row)
    codec.decode(Decoding(layout, source, starts, key=key), payloads)
    if isinstance(codec, CudaSummableCodec):
        kind: Any = getattr(torch, codec.value_dtype(layout))
        values = torch.zeros(codec.num_values(layout), dtype=kind)
        codec.encode_values(Encoding(layout, source, starts, feedback=feedback, key=key), values)
        codec.decode_values(Decoding(layout, source, starts, key=key), values)


@needs_compiler
@every
def test_no_two_threads_race(spec: str) -> None:
    """Whatever order threads and blocks run in; nor does one read shared memory that its block has not written."""
    device = EmulatedDevice(11, races=True)
    watched(spec, device)
    assert device.launches
    assert device.found == []


BARRIER, FENCE = "__syncthreads();", "__threadfence();"
BLOCK_0, TOPK, STC = "efsignsgd:block=0", "topk:ratio=0.1", "stc:ratio=0.1"


@needs_compiler
@pytest.mark.parametrize(
    ("file", "spec", "without", "before", "after"),
    [
        ("signs.cu", BLOCK_0, BARRIER, "half /= 2) {\n        ", "\n        if (threadIdx.x < half)"),
        ("signs.cu", BLOCK_0, "tree[threadIdx.x] = (double)lane;", "", ""),
        ("blockwise.cu", "int8", "__syncwarp();", "", "\n        write_codes"),
        ("sparse.cu", TOPK, FENCE, "", "\n    __syncthreads();\n    if (threadIdx.x == 0) last"),
        ("ternary.cu", STC, BARRIER, "* TILE) : T(0);\n        }\n        ", ""),
    ],
)  # fmt: skip
def test_what_is_missing_is_found(
    file: str,
    spec: str,
    without: str,
    before: str,
    after: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A barrier, a fence or a first write taken out of a source: the watch for races says so."""
    whole = source_of(file)
    assert whole.count(before + without + after) == 1
    spoilt = whole.replace(before + without + after, before + after)
    monkeypatch.setattr(emulator, "source_of", lambda _: spoilt)
    monkeypatch.setattr(emulator, "BUILD", tmp_path)
    monkeypatch.setattr(emulator, "_LIBRARIES", {})
    device = EmulatedDevice(11, races=True)
    with contextlib.suppress(PayloadError):  # what was spoilt may show as well
        watched(spec, device)
    assert device.found != []


@needs_compiler
@every
def test_subnormal_numbers_stay(spec: str) -> None:
    """All numbers below the least normal one; test_gpu.py shows that a device keeps them too."""

    def shrink(source: np.ndarray, old: np.ndarray) -> None:
        source *= np.float32(1e-39)
        old *= np.float32(1e-39)

    assert compare(spec, np.float32, (33, 5003), shrink).finite


@needs_compiler
@pytest.mark.parametrize("spec", ["int8:raw_below=1", "int4:raw_below=1", "fp8:raw_below=1"])
@both
def test_numbers_next_to_infinity_count_as_it(spec: str, dtype: Any) -> None:
    def spoil(source: np.ndarray, old: np.ndarray) -> None:
        source[3], old[3] = 0, np.finfo(dtype).max

    assert not compare(spec, dtype, (33, 5003), spoil).finite


def test_the_compiler_is_told_what_the_host_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither fused multiply-add nor flushing; and not by CuPy's own compilation, which adds flushing last."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "new"))
    cache = CubinCache(FakeCompiler(), (9, 0))
    assert cache.path("none.cu").read_bytes() == b"for sm_90"
    assert cache.path("none.cu").read_bytes() == b"for sm_90"
    cache.path("none.cu").write_bytes(b"")  # spoilt, or another user's
    assert cache.path("none.cu").read_bytes() == b"", "only loading it tells"
    (options,) = FakeCompiler.compiled
    assert cache.path("none.cu", anew=True).read_bytes() == b"for sm_90"
    assert options == (
        "--std=c++17",
        "--fmad=false",
        "--ftz=false",
        "--device-as-default-execution-space",
        "--gpu-architecture=sm_90",
    )
    assert CubinCache(FakeCompiler(), (12, 5)).options[-1] == "--gpu-architecture=compute_120"


class FakeCompiler:
    """CuPy's binding of NVRTC, as far as it is used."""

    NVRTCError = RuntimeError
    compiled: ClassVar[list[tuple[str, ...]]] = []

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def getSupportedArchs(self) -> tuple[int, ...]:
        return 75, 90, 120

    def createProgram(self, text: str, name: str, headers: tuple[()], names: tuple[()]) -> int:
        return 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.compiled.append(options)

    def getCUBIN(self, program: int) -> bytes:
        return b"for sm_90"

    def destroyProgram(self, program: int) -> None:
        pass


@needs_compiler
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "dgc:ratio=0.01", "threshold:threshold=0.5", "randomk:ratio=0.1"])
def test_a_negative_zero_is_kept_alike(spec: str) -> None:
    """What is sent leaves gain * 0 + (1 - gain) * old behind, where the sign of a zero depends on how it is added."""
    run = compare(spec, np.float32, (33, 5003), lambda source, old: old.fill(-0.0))
    assert (run.kept == 0).sum() > 5


@needs_compiler
@every
@both
def test_zeros_keep_their_signs_alike(spec: str, dtype: Any) -> None:
    """Of both signs, in whole groups and in what is left of a segment, whatever the gain."""

    def thin(source: np.ndarray, old: np.ndarray) -> None:
        for number, array in enumerate((source, old)):
            array[(np.arange(array.size) // (number + 1)) % 4 != 0] = -0.0
            array[::7] = 0.0

    run = compare(spec, dtype, (33, 4097, 1029), thin)
    assert run.finite


@needs_compiler
@every
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_non_finite_is_flagged(spec: str, value: float) -> None:
    """In the middle, in a raw segment, in the residual."""

    def spoil(source: np.ndarray, old: np.ndarray) -> None:
        (old if value > 0 else source)[4400] = value

    run = compare(spec, np.float32, (5003, 8), spoil)
    assert not run.finite
    assert np.isnan(run.decoded[:5003]).all()


@needs_compiler
def test_every_fallback_of_the_sparsifiers() -> None:
    """Inputs that mislead samples: ties, structure, hardly any numbers, nothing at all."""
    shapes = {
        "ties": lambda n: np.random.default_rng(0).integers(-3, 4, n).astype(float),
        "nearly empty": lambda n: np.where(np.arange(n) % 997 == 5, 1.0 + np.arange(n), 0),
        "one run": lambda n: np.where(np.arange(n) < n // 50, 1e6 + np.arange(n), 1e-6),
        "hidden": lambda n: np.where(np.arange(n) % 1000 == 999, 1e3, 1.0),
        "ascending": lambda n: np.arange(n) / n,
        "zeros": lambda n: np.zeros(n),
        "steep": lambda n: np.exp(-np.arange(n) / 300.0),
    }
    for number, make in enumerate(shapes.values()):
        for spec in ("topk:ratio=0.01", "dgc:ratio=0.01", "dgc:ratio=0.001", "stc:ratio=0.03"):
            compare(
                spec,
                np.float32,
                (30_011,),
                lambda source, old, make=make: (
                    source.__setitem__(slice(None), make(source.size)),
                    old.fill(0),
                ),
                order=number,
            )


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_golden_bytes(dtype: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    for spec in filter(has_cuda, SPECS):
        codec = cuda_codec(create(spec), EmulatedDevice())
        layout, starts = make_layout(codec.compressor, (3, 37, 70, 300), dtype)
        total = int(starts[-1] + 300)
        source = ((np.arange(total) * 37 % 101 - 50) / 16).astype(dtype)
        payload = np.empty(layout.num_bytes, np.uint8)
        codec.encode(Encoding(layout, source, starts, key=DrawKey(seed=9, step=8, site=7)), payload)
        assert payload.tobytes().hex() == golden[f"{spec} {dtype}"], spec


@needs_compiler
@pytest.mark.parametrize("spec", ["none", "fp16:raw_below=1", "bf16", "randomk:ratio=0.05"])
@both
def test_vectors_are_those_of_the_host(spec: str, dtype: Any) -> None:
    compressor = create(spec)
    layout, starts = make_layout(compressor, (1021, 33, 5003), dtype)
    total, key = int(starts[-1] + 5003), DrawKey(seed=4)
    for spoilt in (False, True):
        source = dyadic(total, dtype, 1)
        source[4000] = np.inf if spoilt else 1
        outcomes = []
        for codec in (host_codec(compressor), cuda_codec(compressor, EmulatedDevice(1))):
            assert isinstance(codec, SummableCodec)
            kind = codec.value_dtype(layout)
            values = np.zeros(codec.num_values(layout), np.uint16 if kind == "bfloat16" else kind)
            old, new, target = numbers(total, dtype), np.zeros(total, dtype), np.zeros(total, dtype)
            finite = codec.encode_values(
                Encoding(layout, source, starts, feedback=Feedback(old, new, starts), key=key), values
            )
            again = codec.decode_values(Decoding(layout, target, starts, scale=0.5, key=key), values)
            outcomes.append((finite, again, values, new, target))
        host, device = outcomes
        assert host[:2] == device[:2] == (not spoilt, not spoilt)
        if not spoilt:
            assert all(a.tobytes() == b.tobytes() for a, b in zip(host[2:], device[2:], strict=True))


@needs_compiler
@pytest.mark.parametrize("spec", ["efsignsgd", "twobit", "int8", "topk:ratio=0.02", "randomk:ratio=0.1"])
def test_corrupted_payloads_are_survived(spec: str) -> None:
    """Any bytes decode to numbers or to a PayloadError; what lies around the target stays as it was."""
    codec = cuda_codec(create(f"{spec}{',' if ':' in spec else ':'}raw_below=1"), EmulatedDevice())
    layout, starts = make_layout(codec.compressor, (33, 1021), np.float32)
    good = np.empty(layout.num_bytes, np.uint8)
    codec.encode(Encoding(layout, numbers(1057, np.float32), starts), good)
    guarded = np.zeros(4000, np.float32)

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=12))
    def check(edits: list[tuple[float, int]]) -> None:
        payload = good.copy()
        for place, value in edits:
            payload[int(place * payload.size)] = value
        guarded[:] = 7
        with contextlib.suppress(PayloadError):
            codec.decode(Decoding(layout, guarded, starts + 1000), payload.reshape(1, -1))
        assert (guarded[:1000] == 7).all()
        assert (guarded[1033:1036] == 7).all()
        assert (guarded[2057:] == 7).all()

    check()


@needs_compiler
def test_malformed_payloads_are_named() -> None:
    codec = cuda_codec(create("topk:ratio=0.01"), EmulatedDevice())
    layout, starts = make_layout(codec.compressor, (1000, 9000), np.float32)
    payload, target = np.empty(layout.num_bytes, np.uint8), np.zeros(10_003, np.float32)
    codec.encode(Encoding(layout, numbers(10_003, np.float32), starts), payload)
    for at, says in (
        (0, "magic"),
        (4, "version"),
        (5, "flags"),
        (12, "digest"),
        (24, "segment 0"),
        (44, "segment 1"),
    ):
        bad = payload.copy()
        bad[at] ^= 0x42
        with pytest.raises(PayloadError, match=says):
            codec.decode(Decoding(layout, target, starts), bad.reshape(1, -1))
    with pytest.raises(PayloadError, match="bytes"):
        codec.decode(Decoding(layout, target, starts), payload[:-8].reshape(1, -1).copy())
    for place, kind, value in (
        (0, np.uint32, 91),
        (0, np.uint32, 2**32 - 1),
        (4, np.uint32, 1),
        (368, np.uint16, 9000),
        (546, np.uint16, 0),
        (546, np.uint16, 65535),
    ):
        bad = payload.copy()
        bad[int(layout.offsets[1]) + place :][:4].view(kind)[0] = value
        with pytest.raises(PayloadError, match="layer1"):
            codec.decode(Decoding(layout, target, starts), bad.reshape(1, -1))


@needs_compiler
def test_headers_are_looked_at_without_segments() -> None:
    """A rank's part of a small partition may be empty; its payload is a header."""
    for name in ("none", "int8", "topk"):
        codec = cuda_codec(create(name), EmulatedDevice())
        layout = codec.compressor.layout([])
        starts, target = np.zeros(0, np.int64), np.zeros(0, np.float32)
        rows = np.zeros((3, layout.num_bytes), np.uint8)
        for row in rows:
            codec.encode(Encoding(layout, target, starts), row)
        assert codec.decode(Decoding(layout, target, starts), rows)
        rows[2, 4] += 1
        with pytest.raises(PayloadError, match="version"):
            codec.decode(Decoding(layout, target, starts), rows)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_a_threshold_below_every_number_is_one(dtype: Any) -> None:
    """1e-60 is zero in float32, which to kernels means that there is none; zeros are never sent all the same."""

    def thin(source: np.ndarray, old: np.ndarray) -> None:
        source[::3], old[::3] = 0, 0

    run = compare("threshold:threshold=1e-60,ratio=0.9,raw_below=1", dtype, (33, 4096, 9001), thin)
    assert run.finite


class FailingDevice(EmulatedDevice):
    """One launch of a kernel fails."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self._kernel = kernel

    def launch(self, file: str, kernel: str, *more: Any) -> None:
        if kernel == self._kernel:
            self._kernel = ""
            raise RuntimeError("the driver has no memory")
        super().launch(file, kernel, *more)


@needs_compiler
@pytest.mark.parametrize(
    ("spec", "kernel"),
    [("topk", "count_f32"), ("topk", "emit_f32"), ("dgc", "filter_f32"), (BLOCK_0, "encode_f32")],
)
def test_a_launch_that_fails_leaves_nothing_to_the_next_encode(spec: str, kernel: str) -> None:
    """Of several launches: what the first found (a NaN, counts, histograms) is not the next call's."""
    codec = cuda_codec(create(spec), FailingDevice(kernel))
    layout, starts = make_layout(codec.compressor, (9001,), np.float32)
    source = numbers(int(starts[0]) + 9001, np.float32)
    spoilt = np.where(np.arange(source.size) == 4321, np.float32(np.nan), source)
    payload, wanted = (np.empty(layout.num_bytes, np.uint8) for _ in range(2))
    with pytest.raises(RuntimeError, match="no memory"):
        codec.encode(Encoding(layout, spoilt, starts), payload)
    assert codec.encode(Encoding(layout, source, starts), payload)
    host_codec(codec.compressor).encode(Encoding(layout, source, starts), wanted)
    assert payload.tobytes() == wanted.tobytes()


class Elsewhere(EmulatedDevice):
    """A device whose memory is not the host's."""

    torch_device = torch.device("meta")

    def launch(self, *arguments: Any) -> None:
        raise AssertionError("nothing is to be launched")


def test_arrays_that_are_not_on_the_device_are_refused() -> None:
    """torch would copy a NumPy array there, and the results with it; an address of the host is none of the device's."""
    codec = cuda_codec(create("none"), Elsewhere())
    layout, starts = make_layout(codec.compressor, (300,), np.float32)
    there = {
        "source": torch.empty(310, device="meta"),
        "payload": torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta"),
    }
    for name, tensor in there.items():
        here = torch.zeros(tensor.shape, dtype=tensor.dtype)
        for other, says in ((here, "is on cpu"), (here.numpy(), "is a NumPy array")):
            given: Any = {**there, name: other}
            with pytest.raises(ValueError, match=f"{name} {says}, this codec works on meta"):
                codec.encode(Encoding(layout, given["source"], starts), given["payload"])
    with pytest.raises(ValueError, match="payloads is on cpu"):
        codec.decode(Decoding(layout, there["source"], starts), torch.zeros((1, layout.num_bytes), dtype=torch.uint8))
    values = torch.zeros(300)
    assert isinstance(codec, SummableCodec)
    with pytest.raises(ValueError, match="values is on cpu"):
        codec.encode_values(Encoding(layout, there["source"], starts), values)


@needs_compiler
def test_one_launch_serves_all_segments() -> None:
    """Sixty small tensors: as many launches as for one."""
    for spec in ("efsignsgd", "twobit", "int8", "fp16", "randomk:ratio=0.1", "topk"):
        device = EmulatedDevice()
        codec = cuda_codec(create(spec), device)
        layout = codec.compressor.layout([Segment(f"t{i}", 0, 300) for i in range(60)])
        starts = np.arange(60, dtype=np.int64) * 300
        source, payload = numbers(18_000, np.float32), np.empty((1, layout.num_bytes), np.uint8)
        codec.encode(Encoding(layout, source, starts), payload[0])
        assert len(device.launches) == 1
        codec.decode(Decoding(layout, source, starts), payload)
        assert len(device.launches) == 2


@needs_compiler
@pytest.mark.parametrize(("spec", "launches"), [("topk", 4), ("threshold:threshold=1", 3), ("stc", 4)])
def test_sparsifiers_launch_the_same_for_any_number_of_long_segments(spec: str, launches: int) -> None:
    device = EmulatedDevice()
    codec = cuda_codec(create(spec), device)
    layout = codec.compressor.layout([Segment(f"t{i}", 0, n) for i, n in enumerate((5000, 300, 9000))])
    starts = np.array([0, 5000, 5300], np.int64)
    codec.encode(Encoding(layout, numbers(14_300, np.float32), starts), np.empty(layout.num_bytes, np.uint8))
    assert len(device.launches) == launches


@needs_compiler
def test_wrong_arguments_are_refused() -> None:
    codec = cuda_codec(create("int8"), EmulatedDevice())
    layout, starts = make_layout(codec.compressor, (300, 400), np.float32)
    source, payload = numbers(703, np.float32), np.empty(layout.num_bytes, np.uint8)
    with pytest.raises(ValueError, match=r"source must be .* float32"):
        codec.encode(Encoding(layout, source.astype(np.float64), starts), payload)
    with pytest.raises(ValueError, match="payload must be"):
        codec.encode(Encoding(layout, source, starts), payload[:-1])
    with pytest.raises(ValueError, match="segment 1 of 400 elements ends outside"):
        codec.encode(Encoding(layout, source, starts + 1), payload)
    with pytest.raises(ValueError, match="ends outside"):
        codec.encode(
            Encoding(layout, source, starts, feedback=Feedback(source[:10], source[:10].copy(), starts)), payload
        )


def test_a_missing_device_is_explained() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(CudaUnavailableError, match="no CUDA device"):
        CudaDevice()


def test_a_missing_cupy_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaUnavailableError, match="CuPy"):
        CudaDevice()
