"""Registry, parameters, warm-up schedule, momentum, worker pool."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from espresso import cpu_offload
from espresso.compressors import (
    Correction,
    Decoding,
    Encoding,
    Feedback,
    MomentumCorrection,
    Segment,
    compressor_ids,
    create,
    host_codec,
    spec_of,
)
from espresso.compressors.base import gain_scale
from espresso.compressors.rehearsal import DRAWS, rehearse, warm_up
from espresso.compressors.sparse import Dgc
from espresso.cpu_offload import WorkerPool
from espresso.cpu_offload.placement import allowed_cores, cores_of_threads
from espresso.strategies import CompressorSpec


def test_create_from_text_and_spec() -> None:
    assert create("dgc:ratio=0.02") == create(CompressorSpec("dgc", (("ratio", 0.02),))) == Dgc(ratio=0.02)
    assert create("topk:ratio=1").params() == {"ratio": 1.0}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nosuch", "no compressor 'nosuch'; known: none, fp16"),
        ("dgc:rate=1", "no parameter 'rate'; it has raw_below, ratio"),
        ("topk:ratio=0", r"ratio must be a number above 0.0 and at most 1.0, got 0"),
        ("topk:ratio=2", "got 2"),
        ("topk:ratio=true", "got True"),
        ("topk:ratio=nan", "got nan"),
        ("topk:raw_below=-1", "raw_below must be an integer of at least 0"),
        ("efsignsgd:block=100", "block must be an integer from 0 to 65536, a multiple of 32, got 100"),
        ("efsignsgd:block=-32", "got -32"),
        ("onebit:block=0", "two means are taken per block"),
        ("twobit:block=0", "compressor twobit: two means are taken per block"),
        ("twobit:block=100", "block must be an integer from 0 to 65536, a multiple of 32, got 100"),
        ("twobit:means=2", "no parameter 'means'; it has raw_below, block"),
        ("onebit:means=3", "means must be an integer from 1 to 2, got 3"),
        ("int8:block=100", "power of two"),
        ("int4:block=8", "from 32 to 4096"),
        ("fp8:format=e3m4", "format must be e4m3 or e5m2, got 'e3m4'"),
        ("threshold:threshold=0", "a number above 0.0"),
        ("dithering:levels=32,partition=natural", "levels must be an integer from 1 to 31, got 32"),
        ("dithering:norm=l1", "norm must be max or l2, got 'l1'"),
        ("qsgd:block=32", "from 64 to 4096"),
        ("dgc:momentum=1", "below 1"),
        ("dgc:nesterov=true", "needs a momentum"),
        ("dgc:nesterov=1,momentum=0.5", "true or false"),
    ],
)
def test_wrong_specs_name_the_fault(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        create(spec)


def test_compressors_do_not_import_the_host_backend() -> None:
    code = "import sys, espresso.compressors as c; c.create('dgc'); sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_dgc_warm_up_schedule() -> None:
    compressor = Dgc(ratio=0.001, warmup_epochs=4)
    ratios = [compressor.at_epoch(epoch).ratio for epoch in range(6)]
    assert ratios == pytest.approx([0.001**0.2, 0.001**0.4, 0.001**0.6, 0.001**0.8, 0.001, 0.001])
    with pytest.raises(ValueError, match="epoch"):
        compressor.at_epoch(-1)


def test_the_kernel_cache_notices_edits_of_helpers(tmp_path: Path) -> None:
    """A kernel that calls an edited helper in another file must not come from the cache; an unchanged one must."""
    root = Path(cpu_offload.__file__).parent
    package = tmp_path / "offload"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "jit.py").write_text((root / "jit.py").read_text())
    (package / "caller.py").write_text(
        "from offload.jit import kernel\nfrom offload.helper import helper\n"
        "@kernel\ndef caller():\n    return helper()\n"
    )
    code = "from offload.caller import caller; print(caller(), sum(caller.stats.cache_hits.values()))"
    seen = []
    for value in (1, 1, 2):
        text = f"from offload.jit import kernel\n@kernel\ndef helper():\n    return {value}\n"
        (package / "helper.py").write_text(text)
        path = os.pathsep.join([str(tmp_path), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},  # (stamped in whole seconds)
        )  # fmt: skip
        seen.append(done.stdout.split())
    assert seen == [["1", "0"], ["1", "1"], ["2", "0"]]


def test_pool_keeps_order_and_passes_errors_on() -> None:
    with WorkerPool(3) as pool:
        assert pool.run(lambda low, high: low * high, [(i, i + 1) for i in range(50)]) == [
            i * (i + 1) for i in range(50)
        ]

        def fail(low: int, high: int) -> None:
            if low == 7:
                raise RuntimeError("part seven")

        with pytest.raises(RuntimeError, match="part seven"):
            pool.run(fail, [(i, i) for i in range(20)])
        assert pool.run(lambda low, high: low, [(4, 4)]) == [4]
        assert pool.run(lambda low, high: low, []) == []
    assert pool.run(lambda low, high: low, [(1, 1), (2, 2)]) == [1, 2]
    with pytest.raises(ValueError, match="at least one thread"):
        WorkerPool(0)


def test_pool_uses_its_threads() -> None:
    barrier = threading.Barrier(3, timeout=20)
    with WorkerPool(3) as pool:
        names = pool.run(lambda low, high: (barrier.wait(), threading.current_thread().name)[1], [(0, 0)] * 3)
    assert len(set(names)) == 3


def test_threads_run_where_the_card_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, nodes = tmp_path / "class/net/eth7/device", tmp_path / "devices/system/node"
    for folder in (card, nodes / "node0", nodes / "node1"):
        folder.mkdir(parents=True)
    (card / "numa_node").write_text("1\n")
    (nodes / "node1/cpulist").write_text("2-3,6\n")
    near, far, allowed = frozenset({2, 3}), frozenset({0, 1}), frozenset(range(4))
    assert cores_of_threads(3, allowed, tmp_path) == []  # no card is named
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,eth8")
    assert cores_of_threads(3, allowed, tmp_path) == [near, near, far]
    assert cores_of_threads(3, near, tmp_path) == []  # all of this process's are near
    (card / "numa_node").write_text("-1\n")
    assert cores_of_threads(3, allowed, tmp_path) == []
    monkeypatch.setenv("ESPRESSO_POOL_CORES", "0-1,9")
    assert cores_of_threads(2, allowed, tmp_path) == [far, far]
    monkeypatch.setenv("ESPRESSO_POOL_CORES", "any")
    assert cores_of_threads(2, allowed, tmp_path) == []
    for said, wrong in (("9", "none of this process's cores"), ("one", "is no list of cores")):
        monkeypatch.setenv("ESPRESSO_POOL_CORES", said)
        with pytest.raises(ValueError, match=wrong):
            cores_of_threads(2, allowed, tmp_path)


def test_a_placed_thread_stays_on_its_cores() -> None:
    mine = allowed_cores()
    one = frozenset({min(mine)})
    barrier = threading.Barrier(2, timeout=20)
    with WorkerPool(2, [mine, one]) as pool:
        seen = pool.run(lambda low, high: (barrier.wait(), allowed_cores())[1], [(0, 0)] * 2)
    assert set(seen) == {mine, one}


def test_one_pool_serves_several_callers() -> None:
    codecs = [host_codec(create(spec)) for spec in ("efsignsgd", "topk", "int8")]
    source = np.linspace(-1, 1, 200_000, dtype=np.float32)
    with WorkerPool(2) as pool:
        shared = [host_codec(codec.compressor, pool) for codec in codecs]

        def encode(codec: object, out: list[bytes]) -> None:
            layout = codec.compressor.layout([Segment("w", 0, source.size)])  # type: ignore[attr-defined]
            payload = np.empty(layout.num_bytes, np.uint8)
            for _ in range(5):
                codec.encode(Encoding(layout, source, np.array([0])), payload)  # type: ignore[attr-defined]
            out.append(payload.tobytes())

        expected: list[list[bytes]] = [[] for _ in codecs]
        got: list[list[bytes]] = [[] for _ in codecs]
        for codec, out in zip(codecs, expected, strict=True):
            encode(codec, out)
        threads = [threading.Thread(target=encode, args=pair) for pair in zip(shared, got, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert got == expected


@pytest.mark.parametrize("name", ["topk", "dgc", "randomk"])
def test_a_count_stands_in_place_of_a_ratio(name: str) -> None:
    segments = [Segment("w", 0, 5000), Segment("short", 0, 300), Segment("v", 0, 90_000)]
    layout = create(f"{name}:k=200").layout(segments)
    assert layout.counts[[0, 2]].tolist() == [200, 200]
    assert bool(layout.raw[1]) is (name != "randomk"), "less than twice as long as k travels raw"
    assert create(f"{name}:k=0") == create(name)
    assert str(spec_of(create(f"{name}:k=200"))) == f"{name}:k=200"
    with pytest.raises(ValueError, match="k must be an integer of at least 0"):
        create(f"{name}:k=-1")


def test_momentum_is_a_parameter_of_every_compressor_and_not_of_its_payload() -> None:
    segments = [Segment("w", 0, 5000)]
    for name in compressor_ids():
        plain, moved = create(name), create(f"{name}:momentum=0.9,nesterov=true")
        assert plain.correction is None
        assert moved.correction == Correction(0.9, nesterov=True)
        assert spec_of(moved).params == (("momentum", 0.9), ("nesterov", True))
        same = plain.traits.rounds > 1 or moved.layout(segments).header == plain.layout(segments).header
        assert same is (name != "dgc"), "DGC's payloads have named their momentum from the first version on"
        with pytest.raises(ValueError, match=f"{name}: clip_norm needs a momentum above 0"):
            create(f"{name}:clip_norm=1.0")


@pytest.mark.parametrize(
    ("name", "beside_adam", "beside_half"),
    [
        ("efsignsgd", 1 / 32, 1 / 4),
        ("onebit", 1 / 32, 1 / 4),
        ("twobit", 1 / 32, 1 / 4),
        ("stc", 1 / 16, 1 / 4),
        ("randomk", 1 / 16, 1 / 4),
        ("int8", 1.0, 1.0),
        ("powersgd", 1.0, 1.0),
    ],
)
def test_feedback_gains_follow_the_optimizer(name: str, beside_adam: float, beside_half: float) -> None:
    traits = create(name).traits
    assert traits.gain_at(gain_scale(0.9, adapts=True)) == beside_adam
    assert traits.gain_at(gain_scale(0.5)) == traits.gain_at(gain_scale(0.5, adapts=True)) == beside_half
    assert traits.gain_at(gain_scale(0.99)) == traits.feedback_gain


def test_how_a_residual_is_kept_is_a_parameter_of_what_keeps_one_and_not_of_its_payload() -> None:
    segments = [Segment("w", 0, 5000)]
    for name in compressor_ids():
        plain = create(name)
        if not plain.traits.error_feedback:
            with pytest.raises(ValueError, match=f"compressor {name} keeps no residual: leave residual_dtype out"):
                create(f"{name}:residual_dtype=int8")
            continue
        narrow = CompressorSpec.parse(name).kept_as("int8")
        assert spec_of(create(narrow)) == narrow
        assert narrow.residual_dtype == "int8"
        assert narrow.kept_as("") == CompressorSpec.parse(name)
        assert plain.traits.rounds > 1 or create(narrow).layout(segments).header == plain.layout(segments).header
        with pytest.raises(ValueError, match=f"{name}: residual_dtype must be float32 or bf16 or int8, got 'int7'"):
            create(f"{name}:residual_dtype=int7")


def test_warm_up_compiles_what_encode_and_decode_call() -> None:
    from espresso.cpu_offload import signs

    codec = host_codec(create("efsignsgd"))
    warm_up(codec, (np.float32,))
    before = len(signs.encode_blocks.signatures), len(signs.decode_blocks.signatures)
    layout = codec.compressor.layout([Segment("w", 0, 5000)])
    payload = np.empty((1, layout.num_bytes), np.uint8)
    codec.encode(Encoding(layout, np.ones(5000, np.float32), np.array([0])), payload[0])
    codec.decode(Decoding(layout, np.ones(5000, np.float32), np.array([0])), payload)
    assert before == (len(signs.encode_blocks.signatures), len(signs.decode_blocks.signatures))
    assert min(before) >= 1


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_momentum_correction(nesterov: bool, dtype: type) -> None:
    """Against the paper's formulas step by step, and its law: sum sent + v = sum of what was added to v."""
    mu, ratio, steps = 0.5, 0.1, 6
    wrapper = MomentumCorrection(host_codec(create("dgc:ratio=0.1")), Correction(mu, nesterov))
    segments = [Segment("w", 0, 1000), Segment("b", 0, 10)]
    layout = wrapper.codec.compressor.layout(segments, dtype)
    starts = np.array([0, 1000])
    v, m = np.zeros(1010, dtype), np.zeros(1010, dtype)
    sent, added = np.zeros(1010), np.zeros(1010)
    expected_m = np.zeros(1010, dtype)
    rng = np.random.default_rng(0)
    payload = np.empty((1, layout.num_bytes), np.uint8)
    for _ in range(steps):
        g = (rng.integers(-64, 65, 1010) / 64).astype(dtype)
        new_v, new_m, decoded = np.empty_like(v), np.empty_like(m), np.empty_like(v)
        assert wrapper.encode(
            Encoding(layout, g, starts, feedback=Feedback(v, new_v, starts)),
            payload[0],
            velocity=Feedback(m, new_m, starts),
        )
        wrapper.codec.decode(Decoding(layout, decoded, starts), payload)
        expected_m = mu * (expected_m + g) if nesterov else mu * expected_m + g
        added += expected_m + g if nesterov else expected_m
        went = decoded != 0
        went[1000:] = False  # travels raw: its velocity is not masked
        assert np.count_nonzero(went[:1000]) <= ratio * 1000
        expected_m[went] = 0
        assert np.array_equal(new_m, expected_m)
        sent += decoded
        v, m = new_v, new_m
    assert np.array_equal(sent + v, added)
    assert np.count_nonzero(m) > 0
    with pytest.raises(ValueError, match="momentum"):
        MomentumCorrection(wrapper.codec, Correction(1.0))


def test_encoders_are_rehearsed_on_several_draws():
    """An unlucky sample costs ``dgc`` three passes instead of one: timed alone it would stand for all."""

    class Noting:
        compressor, seen = create(CompressorSpec.parse("dgc:ratio=0.01")), set[int]()

        def encode(self, encoding, payload):
            self.seen.add(encoding.key.step)
            return host.encode(encoding, payload)

        def decode(self, decoding, payloads):
            return host.decode(decoding, payloads)

    host = host_codec(Noting.compressor)
    encode, _ = rehearse(Noting(), [Segment("w", 0, 5000)])
    for _ in range(20):
        encode()
    assert len(Noting.seen) == DRAWS
