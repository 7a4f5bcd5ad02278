"""PowerSGD: its codec against NumPy, every leaf of two rounds on real ranks, torch's own hook as an oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.exchange import Exchange, digest, make_buckets, numels_of, planned
from benchmarks.rank_pool import NUM_RANKS, POOL
from espresso.comm.execute.executor import Assignment
from espresso.comm.keep.store import FactorStore
from espresso.compressors import Decoding, DrawKey, Encoding, Feedback, Segment, create, cuda_codec, host_codec
from espresso.compressors.powersgd import PowerSgd, matrix_of
from espresso.compressors.schedule import check_choices
from espresso.cpu_offload import WorkerPool
from espresso.cpu_offload.powersgd import orthonormalise
from espresso.model.costs import (
    COMMON_OPS,
    ComputeCost,
    Contention,
    CopyCost,
    CostModel,
    Op,
)
from espresso.model.job import Job
from espresso.model.links import AlphaBeta, Links
from espresso.model.payload_sizes import compressed
from espresso.model.timeline import simulate
from espresso.search.candidates import every_choice
from espresso.search.search import lay_out, search
from espresso.strategies import (
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Mode,
    Strategy,
    StrategyError,
    TensorSpec,
    parse_option,
    plan,
    round_options,
)
from tests.backends import MAKERS, needs_compiler, on_device
from tests.ddp import Played, agreed, batch, registered, sgd, wrap
from tests.emulator import EmulatedDevice

FLAT = "comp > flat.allreduce > transform > flat.allreduce > dec"
SHAPES = {"w": (60, 40), "bias": (60,), "conv": (24, 8, 3, 3), "thin": (300, 2), "tiny": (5, 6)}
RANK = 3
SPEC = f"powersgd:rank={RANK},start_iter=0"
STEPS = 4


# The codec


class Step:
    """One rank's encode and transform of the matrices in SHAPES, alone: the sums are its own vectors."""

    def __init__(self, dtype: Any, pool: WorkerPool | None = None, *, backend: str = "numba", **more: Any) -> None:
        shapes = SHAPES | more
        self.codec: Any = MAKERS[backend](create(SPEC), pool)
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        segments = [Segment(n, 0, size, s) for (n, s), size in zip(shapes.items(), sizes, strict=True)]
        self.layout = self.codec.compressor.layout(segments, dtype)
        self.starts = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
        self.factors, self.old = FactorStore(), np.zeros(sum(sizes), dtype)
        self.gain = 1.0

    def run(self, gradient: Any, scale: float = 1.0) -> Any:
        new = np.full_like(self.old, np.nan)
        feedback = Feedback(self.old, new, self.starts, self.gain)
        first, second = (np.zeros(self.codec.num_values(self.layout, n), new.dtype) for n in (0, 1))
        encoding = Encoding(self.layout, gradient, self.starts, scale, feedback)
        self.codec.encode_values(encoding, first, self.factors)
        self.codec.transform_values(self.layout, first, second, feedback=feedback)
        out = np.full_like(gradient, np.nan)
        assert self.codec.decode_values(Decoding(self.layout, out, self.starts), first, second, self.factors)
        self.factors.commit()
        before, self.old = self.old, new
        self.first, self.second = first, second
        return before, out

    def part(self, name: str, values: Any) -> Any:
        index = list(SHAPES).index(name)
        start, numel = int(self.starts[index]), int(self.layout.numels[index])
        return values[start : start + numel].reshape(matrix_of(SHAPES[name]) if len(SHAPES[name]) > 1 else (-1, 1))


both_backends = pytest.mark.parametrize("backend", ["numba", pytest.param("emulated", marks=needs_compiler)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threads", [1, 2])
@both_backends
def test_the_codec_against_numpy(dtype, threads, backend):
    """P spans M Q; what is sent is M's projection onto it, what is kept the rest, and Q starts the next step."""
    tolerance = 2e-5 if dtype is np.float32 else 1e-12
    with WorkerPool(threads) as pool:
        step = Step(dtype, pool, backend=backend)
        assert step.layout.counts.tolist() == [RANK, 0, RANK, 0, 0]
        sizes = (RANK * 60 + 60 + RANK * 24 + 600 + 30, RANK * 40 + RANK * 72)
        random = np.random.default_rng(0)
        q = {}
        for turn in range(3):
            gradient = random.standard_normal(step.old.size).astype(dtype)
            kept_before, sent = step.run(gradient, scale=0.5)
            assert (step.first.size, step.second.size) == sizes
            for name in ("w", "conv"):
                m = 0.5 * step.part(name, gradient) + step.part(name, kept_before)
                p = np.linalg.qr(m @ q[name].T)[0] if turn else None
                if p is not None:
                    assert np.allclose(step.part(name, sent), p @ (p.T @ m), atol=50 * tolerance)
                residual = step.part(name, step.old)
                assert np.allclose(step.part(name, sent) + residual, m, atol=tolerance)
                kept = step.factors.read(name).reshape(RANK, -1)
                basis = np.linalg.qr(step.part(name, sent) @ np.linalg.pinv(kept.astype(float)).astype(dtype))[0]
                assert np.abs(basis.T @ residual).max() < 100 * tolerance, "what is kept is orthogonal to P"
                assert 0 < np.linalg.norm(residual) < np.linalg.norm(m)
                q[name] = kept.astype(float)
            for name in ("bias", "thin", "tiny"):
                assert np.array_equal(step.part(name, sent), dtype(0.5) * step.part(name, gradient))
                assert not step.part(name, step.old).any()


@both_backends
def test_warm_start_finds_the_matrix(backend):
    """The same matrix of rank 3 again and again: power iteration leaves nothing behind."""
    random = np.random.default_rng(1)
    step = Step(np.float64, backend=backend)
    gradient = np.zeros(step.old.size)
    for name in ("w", "conv"):
        rows, columns = matrix_of(SHAPES[name])
        step.part(name, gradient)[:] = random.standard_normal((rows, RANK)) @ random.standard_normal((RANK, columns))
    for _ in range(3):
        _, sent = step.run(gradient)
    assert np.abs(step.old).max() < 1e-9
    assert np.allclose(sent, gradient, atol=1e-9)


@both_backends
def test_a_step_of_zeros_sends_zeros_and_the_next_starts_afresh(backend):
    step = Step(np.float32, backend=backend)
    random = np.random.default_rng(2)
    _, sent = step.run(np.zeros(step.old.size, np.float32))
    assert not sent.any()
    gradient = random.standard_normal(step.old.size).astype(np.float32)
    _, sent = step.run(gradient)
    assert np.linalg.matrix_rank(step.part("w", sent)) == RANK


@pytest.mark.parametrize("spec", [SPEC, f"{SPEC},warm_start=false"])
@needs_compiler
def test_what_a_dead_column_starts_from_does_not_depend_on_when_it_died(spec):
    """Neither on how long a codec has run: both twins and one that goes on from a checkpoint begin alike."""
    vectors = {}
    for backend in ("numba", "emulated", "resumed"):
        codec: Any = MAKERS["numba" if backend == "numba" else "emulated"](create(spec), None)
        layout, starts = codec.compressor.layout([Segment("w", 0, 2400, (60, 40))]), np.zeros(1, np.int64)
        source = np.random.default_rng(1).standard_normal(2400).astype(np.float32)
        factors = FactorStore()
        for number in (7,) if backend == "resumed" else (0, 7):
            first = np.zeros(codec.num_values(layout, 0), np.float32)
            feedback = Feedback(np.zeros_like(source), np.empty_like(source), starts)
            kept = np.ones((RANK, 40), np.float32)
            kept[1] = 0
            factors.load({"w": kept.reshape(-1)})
            key = DrawKey(seed=3, step=number)
            codec.encode_values(Encoding(layout, source, starts, feedback=feedback, key=key), first, factors)
        vectors[backend] = first
    assert np.abs(vectors["numba"].reshape(RANK, -1)).max(axis=1).min() > 0.1
    assert np.allclose(vectors["numba"], vectors["emulated"], atol=1e-4)
    assert np.array_equal(vectors["emulated"], vectors["resumed"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_orthonormalising(dtype):
    random = np.random.default_rng(3)
    p = random.standard_normal((4, 1000)).astype(dtype)
    p[1] = p[0] + 1e-4 * p[1]  # nearly dependent
    p[3] = 2 * p[0] - p[2]  # dependent
    scaled = (p * dtype(1e-18)).copy()
    for q in (p, scaled):
        orthonormalise(q)
        assert np.allclose(q[:3] @ q[:3].T, np.eye(3), atol=1e-6 if dtype is np.float32 else 1e-12)
        assert not q[3].any()
    spoilt = np.ones((2, 5), dtype)
    spoilt[0, 2] = np.inf
    orthonormalise(spoilt)
    assert np.isnan(spoilt).any()


def both_twins(device_backend: str, dtype: Any) -> None:
    """Three steps of the host's codec and a device's: vectors within rounding, the same sums kept."""
    tolerance = 1e-5 if dtype is np.float32 else 1e-13
    twins = [Step(dtype, backend=backend, **LARGE) for backend in ("numba", device_backend)]
    random = np.random.default_rng(5)
    for turn in range(3):
        for step in twins:
            step.gain = (1.0, 0.5, 1.0)[turn]
        gradient = random.standard_normal(twins[0].old.size).astype(dtype)
        sent = [step.run(gradient, scale=0.5)[1] for step in twins]
        for what in (sent, *([getattr(s, name) for s in twins] for name in ("first", "second", "old"))):
            assert np.abs(what[0] - what[1]).max() < 20 * tolerance * np.abs(what[0]).max()
            assert np.isfinite(what[1]).all()


LARGE = {"wide": (9, 5000), "tall": (700, 33), "row": (16, 4096)}
"""Rows that take a thread block, several chunks of rows, and the border between the two forms."""


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_gpu_codec_and_its_twin(dtype):
    both_twins("emulated", dtype)


@needs_compiler
def test_the_gpu_codec_does_not_depend_on_the_order_of_threads():
    """Bit for bit: forward, backward and shuffled threads and blocks."""
    gradient = np.random.default_rng(6).standard_normal(Step(np.float32, **LARGE).old.size).astype(np.float32)
    results = []
    for order in (0, 1, 11):
        step = Step(np.float32, backend="emulated", **LARGE)
        step.codec = on_device(cuda_codec(create(SPEC), EmulatedDevice(order)))
        sent = [step.run(gradient)[1] for _ in range(2)]
        results.append([a.tobytes() for a in (*sent, step.first, step.second, step.old)])
    assert results[0] == results[1] == results[2]


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_gpu_codecs_threads_do_not_race(dtype):
    step = Step(dtype, backend="emulated", **LARGE)
    device = EmulatedDevice(11, races=True)
    step.codec, step.gain = on_device(cuda_codec(create(SPEC), device)), 0.5
    gradient = np.random.default_rng(6).standard_normal(step.old.size).astype(dtype)
    for _ in range(2):
        step.run(gradient)
    assert device.found == []


@both_backends
def test_a_gain_reaches_its_own_segments_and_no_further(backend):
    """Residuals of several groups may share a buffer; what travels raw keeps the part of the old that is still owed."""
    step, gap = Step(np.float32, backend=backend), 5
    kept_at = step.starts + gap * np.arange(len(step.starts))
    random = np.random.default_rng(8)
    old = random.standard_normal(step.old.size + gap * len(kept_at)).astype(np.float32)
    source = random.standard_normal(step.old.size).astype(np.float32)
    found = {}
    for gain in (1.0, 0.3):
        new = np.full_like(old, 7)
        first, second = (np.zeros(step.codec.num_values(step.layout, n), np.float32) for n in (0, 1))
        feedback = Feedback(old, new, kept_at, gain)
        encoding = Encoding(step.layout, source, step.starts, feedback=feedback)
        step.codec.encode_values(encoding, first, FactorStore())
        step.codec.transform_values(step.layout, first, second, feedback=feedback)
        ends = kept_at + step.layout.numels
        outside = np.concatenate([new[end : end + gap] for end in ends])
        assert (outside == 7).all()
        found[gain] = new
    part, rest = np.float32(0.3), np.float32(1) - np.float32(0.3)
    for begin, numel, rank in zip(kept_at, step.layout.numels, step.layout.counts, strict=True):
        mine = slice(begin, begin + numel)
        whole = found[1.0][mine] if rank else np.zeros(numel, np.float32)
        assert np.array_equal(found[1.0][mine], whole)
        assert np.array_equal(found[0.3][mine], part * whole + rest * old[mine])


@needs_compiler
def test_the_gpu_codec_orthonormalises_and_shows_what_is_not_finite():
    """Dependent columns become zero; an inf reaches every rank and the verdict."""
    codec: Any = cuda_codec(create("powersgd:rank=4,start_iter=0"), EmulatedDevice(1))
    layout = codec.compressor.layout([Segment("w", 0, 40_000, (1000, 40))])
    random = np.random.default_rng(3)
    p = random.standard_normal((4, 1000)).astype(np.float32)
    p[1] = p[0] + 1e-4 * p[1]
    p[3] = 2 * p[0] - p[2]
    for given in (p, p * np.float32(1e-18)):
        first, second = torch.from_numpy(given.reshape(-1).copy()), torch.zeros(160)
        kept = Feedback(torch.zeros(40_000), torch.ones(40_000), np.zeros(1, np.int64))  # type: ignore[arg-type]
        codec.transform_values(layout, first, second, feedback=kept)
        q = first.numpy().reshape(4, 1000)
        assert np.allclose(q[:3] @ q[:3].T, np.eye(3), atol=1e-6)
        assert not q[3].any()
    target, starts = torch.zeros(40_000), np.zeros(1, np.int64)
    assert codec.decode_values(Decoding(layout, target, starts, scale=1.0), first, second, factors=FactorStore())
    first[7] = float("inf")
    codec.transform_values(layout, first, second, feedback=kept)
    assert not codec.decode_values(Decoding(layout, target, starts, scale=1.0), first, second, factors=FactorStore())
    assert target.isnan().any()


@needs_compiler
def test_the_gpu_codec_launches_once_for_all_matrices():
    device = EmulatedDevice()
    codec: Any = cuda_codec(create(SPEC), device)
    segments = [Segment(f"w{i}", 0, 600, (30, 20)) for i in range(20)]
    layout, starts = codec.compressor.layout(segments), 600 * np.arange(20)
    source, new = torch.randn(12_000), torch.empty(12_000)
    first, second = (torch.zeros(codec.num_values(layout, n)) for n in (0, 1))
    kept, factors = Feedback(torch.zeros(12_000), new, starts), FactorStore()  # type: ignore[arg-type]
    for launches in (6, 7):
        device.launches.clear()
        codec.encode_values(
            Encoding(layout, source, starts, scale=1.0, feedback=kept, key=DrawKey()), first, factors=factors
        )
        codec.transform_values(layout, first, second, feedback=kept)
        codec.decode_values(Decoding(layout, source, starts, scale=1.0), first, second, factors=factors)
        factors.commit()
        assert len(device.launches) == launches


def test_what_travels_raw():
    compressor = PowerSgd(rank=2)
    assert compressor.rank_of((1000, 1000)) == 2
    assert compressor.rank_of((16, 16)) == 2
    assert compressor.rank_of((15, 16)) == 0  # below raw_below
    assert compressor.rank_of((100, 4)) == 0  # 2 * 104 * 2 > 400
    assert compressor.rank_of((100,)) == compressor.rank_of(()) == compressor.rank_of((0, 5)) == 0
    with pytest.raises(ValueError, match=r"whole tensors; 'w' of shape \[20, 30\] was given as 64 elements from 64"):
        compressor.layout([Segment("w", 64, 64, (20, 30))])
    for text, message in (("powersgd:rank=0", "rank"), ("powersgd:min_saving=0.5", "min_saving")):
        with pytest.raises(ValueError, match=message):
            create(text)


def test_options_and_compressors_that_do_not_go_together():
    tensors = (TensorSpec("a", (30, 30)),)
    for option, spec, message in (
        ("comp > flat.allgather > dec", "powersgd", r"tensor 'a'.*leaves with a transform step"),
        (FLAT, "efsignsgd", "have no transform step"),
        ("comp > flat.allreduce > dec", "efsignsgd", "do not add"),
    ):
        choice = Choice(parse_option(option), CompressorSpec.parse(spec))
        with pytest.raises(StrategyError, match=message):
            check_choices(Strategy.uniform(tensors, Cluster(2, 1), choice))


def test_groups_are_not_cut():
    tensors = tuple(TensorSpec(name, shape) for name, shape in SHAPES.items())
    choice = Choice(parse_option(FLAT), CompressorSpec.parse(SPEC))
    strategy = Strategy.uniform(tensors, Cluster(2, 1), choice, partition_bytes=1024)
    laid = plan(strategy, buckets_of())
    assert [part.numel for part in laid.partitions] == [bucket.numel for bucket in buckets_of()]
    assert [run.shape for group in laid.groups for run in group.runs] == list(SHAPES.values())


# Every leaf of two rounds, on two nodes of two ranks


def buckets_of(dtype: str = "float32") -> Any:
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    names = list(sizes)
    return make_buckets(*({n: sizes[n] for n in part} for part in (names[:2], names[2:3], names[3:])), dtype=dtype)


def run_leaves(rank: int, texts: list[str], dtype: str) -> dict[str, dict[str, Any]]:
    exchange = Exchange(2)
    exchange.warm_up({SPEC}, [dtype])
    buckets = buckets_of(dtype)
    numels = numels_of(buckets)
    tensors = tuple(TensorSpec(name, shape, dtype) for name, shape in SHAPES.items())
    results = {}
    for text in texts:
        exchange.renew()
        choice = Choice(parse_option(text), CompressorSpec.parse(SPEC))
        plain = Assignment(Strategy.uniform(tensors, exchange.groups.cluster, choice, partition_bytes=1024))
        digests, averages = [], {name: np.zeros(n) for name, n in numels.items()}
        given = {name: np.zeros(n) for name, n in numels.items()}
        for step in range(STEPS):
            random = np.random.default_rng([step, rank])
            mine = [torch.from_numpy(random.standard_normal(b.numel)).to(getattr(torch, dtype)) for b in buckets]
            got = exchange.step(plain if step < 2 else planned(plain, buckets), buckets, mine)
            digests.append(digest(got))
            for bucket, gradient, average in zip(buckets, mine, got, strict=True):
                for slot in bucket.slots:
                    here = slice(slot.offset, slot.offset + slot.numel)
                    given[slot.tensor] += gradient[here].double().numpy()
                    averages[slot.tensor] += average[here].double().numpy()
        record = exchange.record
        results[text] = {
            "digests": digests, "averages": averages, "given": given, "kept": exchange.kept(numels),
            "sent": record.bytes_sent, "raw": record.bytes_raw, "sites": exchange.sites(),
            "factors": digest(torch.from_numpy(v) for v in exchange.executor.factors.snapshot().values()),
        }  # fmt: skip
    exchange.close()
    return results


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_leaf_of_two_rounds(dtype):
    """Bit-identical on all ranks, nothing lost, and all pipelines agree."""
    texts = [str(leaf) for leaf in round_options(True, (Device.TRAINING,))]
    texts = texts if dtype == "float32" else texts[::4]
    texts.append(str(round_options(True)[-1])) if dtype == "float32" else None  # everything on the pool
    answers = POOL.run(run_leaves, texts, dtype, deadline_s=120)
    rounding = {"float32": 5e-5, "float64": 1e-12, "bfloat16": 0.1}[dtype]
    for text in texts:
        rows = [answer[text] for answer in answers]
        assert all(row["digests"] == rows[0]["digests"] for row in rows), text
        assert all(row["factors"] == rows[0]["factors"] for row in rows), text
        for name in SHAPES:
            kept, given = (sum(row[what][name] for row in rows) for what in ("kept", "given"))
            sent = rows[0]["averages"][name] * NUM_RANKS
            assert np.abs(sent + kept - given).max() < rounding, (text, name)
            assert (np.abs(kept).max() > 0.1) == (name in ("w", "conv"))
            assert np.abs(rows[0]["averages"][name] - answers[0][texts[0]]["averages"][name]).max() < 20 * rounding
        assert sum(row["sent"] for row in rows) < 0.6 * sum(row["raw"] for row in rows)
        assert set().union(*(row["sites"] for row in rows)) == {"local"}


# Costs, timeline and search


def job() -> Job:
    tensors = (TensorSpec("a", (1000, 2000)), TensorSpec("b", (1000,)), TensorSpec("c", (3000, 500)))
    compute = tuple(
        ComputeCost("powersgd", device, op, ((0.0, 0.0), (1e6, 400.0)), launch_us=10.0)
        for device in (Device.TRAINING, Device.OFFLOAD)
        for op in (*COMMON_OPS, Op.TRANSFORM)
    )
    costs = CostModel(Links(AlphaBeta(20, 0.1), AlphaBeta(50, 8.0)), compute, None, Contention(2.0, 1.0, 2.0, {}))
    return Job("toy", tensors, (0.0, 500.0, 4000.0), Cluster(2, 2), costs, mode=Mode.PAPER, forward_us=3000.0)


def test_the_search_prices_both_rounds_by_the_shapes():
    found = search(job(), CompressorSpec.parse("powersgd:rank=4"))
    best = found.alternatives[0]
    assert len(compressed(best.strategy)) >= 2
    assert found.lower_bound_us <= best.predicted_us < 0.25 * found.uncompressed_us
    laid = lay_out(job(), best.strategy)
    timeline = simulate(laid, job())
    assert timeline.iteration_us == pytest.approx(best.predicted_us)
    sent = zip(laid.tasks, timeline.works, strict=True)
    flat = [work.num_bytes for task, work in sent if task.partition == 0 and work.num_bytes]
    assert 4 * 4 * 1000 in flat or 4 * 4 * 1000 * 2 in flat
    assert 4 * 4 * 2000 in flat or 4 * 4 * 2000 * 2 in flat
    kinds = [str(task.step) for task in laid.tasks if task.partition == 0]
    assert kinds.count("transform") + kinds.count("transform@offload") == 1


def test_matrices_are_not_copied_between_devices():
    """On a host both sides share the memory; with a GPU the search is not offered such a split, and no plan has one."""
    spec, near = CompressorSpec.parse("powersgd:rank=4"), job()
    far = replace(near, costs=replace(near.costs, copy=CopyCost(5.0, 0.1)))
    offered, kept = ([c for c in every_choice(at, (spec,)) if c.option.is_compressed] for at in (near, far))
    assert (len(offered), len(kept)) == (72, 36)
    assert {choice.option.moves_matrices for choice in offered} == {True, False}
    assert not any(choice.option.moves_matrices for choice in kept)
    for choice in offered:
        split = Strategy.uniform(near.tensors, near.cluster, choice)
        assert simulate(lay_out(near, split), near).iteration_us > 0
        if choice.option.moves_matrices:
            with pytest.raises(StrategyError, match=r"'a'.*stay where they were compressed"):
                lay_out(far, split)
        else:
            assert simulate(lay_out(far, split), far).iteration_us > 0


# On live models


class Net(nn.Module):
    """One matrix and one bias, so that torch's hook has a single bucket (with more it times out on Gloo)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(48, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs).tanh()


def descend(ddp: Any, rank: int, steps: range) -> None:
    for step in steps:
        ddp.zero_grad()
        inputs = batch(rank, step % 3, 48, rows=16)
        (ddp(inputs) - inputs.roll(1, 1)[:, :1].sin()).square().mean().backward()
        sgd(ddp, 0.5)


def beside_torch(rank: int) -> tuple[float, float, bool, float]:
    """(distance to torch's parameters, how far those moved, replicas agree, bytes sent over raw)."""
    theirs = DistributedDataParallel(Net())
    hook = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    ours = wrap(Net(), bucket_cap_mb=25)
    begun = ours.module.layer.weight.detach().clone()
    with registered(ours, FLAT, "powersgd:rank=2,start_iter=2") as state:
        descend(ours, rank, range(2))
        assert state.metrics()["espresso/residual_norm"] == 0.0
        # The same first Q: torch keeps [columns, rank], and takes it as warm if both memories are there.
        codec: Any = host_codec(create("powersgd:rank=2"))
        start = codec.start("layer.weight", 2, 48, np.dtype(np.float32), DrawKey(0, 2), FactorStore())
        hook.p_memory_dict[0] = torch.zeros(2 * 64)
        hook.q_memory_dict[0] = torch.from_numpy(start.T.copy()).reshape(-1)
        theirs.register_comm_hook(hook, powerSGD_hook.powerSGD_hook)
        descend(theirs, rank, range(10))
        descend(ours, rank, range(2, 10))
        record = state.metrics()
        distance = float((ours.module.layer.weight - theirs.module.layer.weight).abs().max())
        moved = float((ours.module.layer.weight - begun).abs().max())
        assert record["espresso/residual_norm"] > 0
        return distance, moved, agreed(ours), record["espresso/bytes_sent"] / record["espresso/bytes_raw"]


def packed_residuals(rank: int) -> tuple[float, float, float, float]:
    ends, sizes = [], []
    for storage in ("bf16", "float32"):
        torch.manual_seed(0)
        ddp = wrap(nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48)))
        begun = ddp.module[0].weight.detach().clone()
        with registered(ddp, FLAT, "powersgd:rank=2,start_iter=0", residual_dtype=storage) as state:
            descend(ddp, rank, range(6))
            assert agreed(ddp)
            sizes.append(state.metrics()["espresso/residual_bytes"])
        ends.append(ddp.module[0].weight.detach())
    return float((ends[0] - ends[1]).abs().max()), float((ends[1] - begun).abs().max()), sizes[0], sizes[1]


def automatic(rank: int) -> tuple[bool, int, bool, set[str]]:
    ddp = wrap(nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 32)))
    with registered(ddp, compressor="powersgd:rank=2", strategy="auto", timeout_s=60.0) as state:
        decided_at = 0
        for step in range(60):
            ddp.zero_grad()
            ddp(batch(rank, step, 48)).square().mean().backward()
            sgd(ddp)
            if state.decided and not decided_at:
                decided_at = step + 1
        assert state.job is not None
        return (
            agreed(ddp),
            decided_at,
            bool(state.job.costs.has_rounds),
            {c.spec for c in state.job.costs.compute},
        )


def test_torchs_own_hook_goes_the_same_way(played):
    for distance, moved, same, share in played(beside_torch):
        assert same
        assert moved > 0.05
        assert distance < 1e-4 * moved + 1e-6
        assert share < 0.2


def test_packed_residuals_keep_their_matrix_between_the_rounds(played):
    """Several groups share the room that residuals are unpacked into."""
    for distance, moved, packed, full in played(packed_residuals):
        assert 0 < distance < 0.02 * moved
        assert packed == pytest.approx(full, rel=0.01), "two buffers of two bytes, a twin of four between rounds"


def test_automatic_mode_measures_and_decides(played):
    for same, decided_at, has_rounds, specs in played(automatic):
        assert same
        assert 0 < decided_at <= 60
        assert has_rounds
        assert specs == {"powersgd:rank=2"}


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(__name__, (beside_torch, packed_residuals, automatic), 2, ranks_per_node=1)
