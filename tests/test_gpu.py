"""What only a GPU shows: ``make gpu``. Skipped visibly without one.

The conformance suite (tests/test_compressors.py and test_compressors_wire.py) runs there too, on its cuda backend.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from compressor_cases import DTYPES, SPECS, make_layout, numbers

from espresso.comm.keep.store import ResidualStore
from espresso.comm.memory import HOST, DeviceMemory
from espresso.compressors import (
    Correction,
    Decoding,
    DrawKey,
    Encoding,
    Feedback,
    Segment,
    create,
    cuda_codec,
    host_codec,
)
from espresso.compressors.cuda import CudaCodec
from espresso.compressors.cuda.momentum import CudaMover
from espresso.compressors.momentum import HOST_MOVER
from espresso.strategies import Run, Site
from tests.backends import cuda_device, on_device
from tests.workers import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

GOLDEN = Path(__file__).parent / "golden" / "compressors.json"
LONG = (1 << 20, 300, 70_001, (1 << 21) + 17)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_of_the_host(spec: str, dtype: Any) -> None:
    """Long segments, where thread blocks really run side by side; twice, since a race may hide once."""
    compressor = create(spec)
    layout, starts = make_layout(compressor, LONG, dtype)
    total = int(starts[-1] + LONG[-1])
    source, old = numbers(total, dtype, 1), numbers(total, dtype, 2)
    key = DrawKey(seed=5, step=6, site=1)
    outcomes = []
    device = on_device(cuda_codec(compressor, cuda_device()))
    for codec in (host_codec(compressor), device, device):
        payload, kept, decoded = (
            np.zeros(layout.num_bytes, np.uint8),
            np.zeros_like(source),
            np.zeros_like(source),
        )
        codec.encode(
            Encoding(layout, source, starts, scale=0.7, feedback=Feedback(old, kept, starts), key=key), payload
        )
        codec.decode(Decoding(layout, decoded, starts, scale=1 / 3, key=key), np.stack([payload] * 3))
        outcomes.append((payload.tobytes(), kept.tobytes(), decoded.tobytes()))
    assert outcomes[0] == outcomes[1]
    assert outcomes[1] == outcomes[2]


@pytest.mark.parametrize("spec", SPECS)
def test_subnormal_numbers_are_not_flushed(spec: str) -> None:
    """CuPy compiles with ``-ftz=true`` by itself, with which gradients and halves below 2^-126 become zero."""
    compressor, key = create(spec), DrawKey(seed=5)
    layout, starts = make_layout(compressor, (33, 70_001), np.float32)
    total = int(starts[-1] + 70_001)
    source, old = (numbers(total, np.float32, seed) * np.float32(1e-39) for seed in (1, 2))
    outcomes = []
    for codec in (host_codec(compressor), on_device(cuda_codec(compressor, cuda_device()))):
        payload, kept, decoded = np.zeros(layout.num_bytes, np.uint8), np.zeros_like(old), np.zeros_like(old)
        codec.encode(Encoding(layout, source, starts, feedback=Feedback(old, kept, starts), key=key), payload)
        codec.decode(Decoding(layout, decoded, starts), payload.reshape(1, -1))
        outcomes.append((payload.tobytes(), kept.tobytes(), decoded.tobytes()))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spec", SPECS)
def test_golden_bytes(spec: str, dtype: str) -> None:
    codec = on_device(cuda_codec(create(spec), cuda_device()))
    layout, starts = make_layout(codec.compressor, (3, 37, 70, 300), dtype)
    total = int(starts[-1] + 300)
    source = ((np.arange(total) * 37 % 101 - 50) / 16).astype(dtype)
    payload = np.empty(layout.num_bytes, np.uint8)
    codec.encode(Encoding(layout, source, starts, key=DrawKey(seed=9, step=8, site=7)), payload)
    assert payload.tobytes().hex() == json.loads(GOLDEN.read_text())[f"{spec} {dtype}"]


class Large:
    """An encode whose input is still being made on the current stream when it is launched."""

    def __init__(self, spec: str) -> None:
        codec = cuda_codec(create(spec), cuda_device(), waits=False)
        assert isinstance(codec, CudaCodec)
        self.codec = codec
        self.layout = codec.compressor.layout([Segment("t", 0, 1 << 20)])
        self.starts = np.zeros(1, np.int64)
        self.data = torch.randn(1 << 20, device="cuda")
        self.expected = self.encoded(self.data)

    def encoded(self, source: torch.Tensor) -> torch.Tensor:
        payload = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device="cuda")
        self.codec.encode(Encoding(self.layout, source, self.starts), payload)
        return payload

    def race(self) -> torch.Tensor:
        """Payload of data that arrives late on a stream of its own, read on that stream."""
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            source = torch.zeros_like(self.data)
            torch.cuda._sleep(50_000_000)  # some tens of milliseconds
            source.copy_(self.data)
            payload = self.encoded(source)
            copied = payload.cpu()
        torch.cuda.synchronize()
        return copied


@pytest.mark.parametrize("spec", ["efsignsgd", "int8", "topk:ratio=0.01"])
def test_kernels_run_on_torchs_current_stream(spec: str) -> None:
    """CuPy has a current stream of its own; a launch there would encode what is not there yet."""
    large = Large(spec)
    assert torch.equal(large.race(), large.expected.cpu())


def test_the_race_is_one_that_can_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: launched on another stream, the same encode reads zeros."""
    large = Large("efsignsgd")
    elsewhere = torch.cuda.Stream().cuda_stream
    monkeypatch.setattr(type(large.codec.device), "lane", lambda self: int(elsewhere))
    assert not torch.equal(large.race(), large.expected.cpu())


def test_launching_waits_for_nothing() -> None:
    large = Large("efsignsgd")
    target, payload = torch.zeros_like(large.data), large.encoded(large.data)
    large.codec.decode(Decoding(large.layout, target, large.starts), payload.view(1, -1))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        done = torch.cuda.Event()
        large.codec.encode(Encoding(large.layout, large.data, large.starts), payload)
        large.codec.decode(Decoding(large.layout, target, large.starts), payload.view(1, -1))
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_memory_is_shared_and_all_of_it_is_torchs() -> None:
    """CuPy arrays and DLPack capsules go in without a copy; CuPy allocates nothing by itself."""
    import cupy

    large = Large("int8")
    before = cupy.get_default_memory_pool().total_bytes()
    array = cupy.asarray(large.data)
    assert array.data.ptr == large.data.data_ptr() == torch.from_dlpack(array).data_ptr()
    assert torch.equal(large.encoded(array), large.expected)
    assert torch.equal(large.encoded(torch.from_dlpack(array)), large.expected)
    assert cupy.get_default_memory_pool().total_bytes() == before


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_powersgd_and_its_twin(dtype: Any) -> None:
    """Vectors within rounding, over three steps."""
    from tests.test_powersgd import both_twins

    both_twins("cuda", dtype)


@pytest.mark.parametrize("nesterov", [False, True])
def test_velocities_are_those_of_the_host(nesterov: bool) -> None:
    """New velocities, what is added, and what is masked: bit for bit."""
    rule, compressor = Correction(0.9, nesterov), create("dgc:ratio=0.01")
    numels = np.array(LONG, np.int64)
    layout, starts = make_layout(compressor, LONG, np.float32)
    total = int(starts[-1] + LONG[-1])
    source, old = numbers(total, np.float32, 1), numbers(total, np.float32, 2)
    payload = np.zeros(layout.num_bytes, np.uint8)
    host_codec(compressor).encode(Encoding(layout, source, starts), payload)
    outcomes = []
    for where, mover in (("cpu", HOST_MOVER), ("cuda", CudaMover(cuda_device()))):
        arrays = [torch.from_numpy(a).to(where) for a in (source, old, np.zeros_like(old), np.zeros_like(old), payload)]
        given: list[Any] = [a.numpy() if where == "cpu" else a for a in arrays]
        velocity = Feedback(given[1], given[2], starts)
        mover.advance(rule, numels, given[0], starts, 0.5, velocity, given[3], starts)
        mover.mask(compressor, layout, given[4], velocity)
        outcomes.append([arrays[i].cpu().numpy().tobytes() for i in (2, 3)])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_narrow_residuals_are_those_of_the_host(storage: str) -> None:
    runs = (Run("a", 0, 0, 0, LONG[0]), Run("b", 0, LONG[0], LONG[0], LONG[2]))
    kept = []
    for memory in (HOST, DeviceMemory(cuda_device())):
        residual = ResidualStore(storage=storage).new_residual(Site.LOCAL, runs, np.float32, 0, memory)
        residual.begin()
        for step in range(2):
            new = residual.feedback(np.zeros(1, np.int64)).new
            new[:] = memory.here(numbers(len(new), np.float32, step))
            residual.settle(DrawKey(step=step))
            residual.commit()
        kept.append(
            [residual.read(start, run.numel).tobytes() for run, start in zip(runs, residual.starts, strict=True)]
        )
        assert residual.num_bytes < 0.6 * 8 * sum(run.numel for run in runs)
    assert kept[0] == kept[1]


# -- the hook ---------------------------------------------------------------------------------------


def train(options: list[tuple[str, str]]) -> list[str]:
    """Steps with integer gradients through each option; the names of those whose average is not exact."""
    from tests.ddp import IntegerNet, agreed, registered, sgd, wrap

    size, wrong = dist.get_world_size(), []
    for option, compressor in options:
        plain, ours = IntegerNet().cuda(), IntegerNet().cuda()
        ddp = wrap(ours, device_ids=[0])
        with registered(ddp, option, compressor, ranks_per_node=2 if size == 4 else 1, timeout_s=60.0) as state:
            for step in range(4):
                keys = [100 * step + other for other in range(size)]
                ddp.zero_grad()
                ddp(keys[dist.get_rank()]).backward()
                sgd(ddp)
                plain.zero_grad()
                for key in keys:
                    (plain(key) / size).backward()
                sgd(plain)
            if not agreed(ddp):
                wrong.append(f"{option} {compressor}: replicas differ")
            same = all(torch.allclose(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
            if not same:
                wrong.append(f"{option} {compressor}: not the average")
            if state.metrics()["espresso/skipped_steps"]:
                wrong.append(f"{option} {compressor}: steps were skipped")
    dist.destroy_process_group()
    return wrong


EXACT = [
    ("flat.allreduce", "none"),
    ("comp > flat.allgather > dec", "none"),
    ("comp@offload > flat.allgather > dec@offload", "none"),
    ("comp > flat.all_to_all > dec > comp > flat.allgather > dec", "topk:ratio=1,raw_below=1"),
    ("intra.reduce_scatter > comp > inter.allgather > dec > intra.allgather", "none"),
]


def join(rank: int, backend: str) -> None:
    """Several ranks on one GPU: NCCL refuses the second, unless it takes each for a host of its own."""
    os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(0)
    dist.init_process_group(backend)


def run_exact(rank: int, backend: str) -> list[str]:
    join(rank, backend)
    return train([(option, name) for option, name in EXACT if "intra" not in option or dist.get_world_size() == 4])


@pytest.mark.parametrize(("backend", "size"), [("nccl", 1), ("nccl", 2), ("nccl", 4), ("gloo", 4)])
def test_averages_are_exact(backend: str, size: int) -> None:
    """Several ranks on one GPU; over NCCL through sockets, as between hosts."""
    outcomes = run_ranks(run_exact, size, backend, init=False, deadline_s=230)
    assert [o.value for o in outcomes] == [[]] * size


POWERSGD = "comp > flat.allreduce > transform > flat.allreduce > dec"
WAYS = {
    "signs": ("comp > flat.allgather > dec", "efsignsgd", {}),
    "bf16 residuals": ("comp > flat.allgather > dec", "efsignsgd", {"residual_dtype": "bf16"}),
    "int8 residuals": ("comp > flat.allgather > dec", "topk:ratio=0.1", {"residual_dtype": "int8"}),
    "momentum": ("comp > flat.allgather > dec", "dgc:ratio=0.1,momentum=0.5,nesterov=true,clip_norm=5", {}),
    "powersgd": (POWERSGD, "powersgd:rank=2,start_iter=2", {}),
    "powersgd, bf16": (POWERSGD, "powersgd:rank=2,start_iter=2", {"residual_dtype": "bf16"}),
    "powersgd on the pool": (
        "comp@offload > flat.allreduce > transform@offload > flat.allreduce > dec@offload",
        "powersgd:rank=2,start_iter=2",
        {},
    ),
}


def run_lossy(rank: int, backend: str) -> dict[str, tuple[bool, bool, float]]:
    join(rank, backend)
    outcomes = {way: learn(rank, *settings) for way, settings in WAYS.items()}
    dist.destroy_process_group()
    return outcomes


def learn(rank: int, option: str, spec: str, settings: dict[str, Any]) -> tuple[bool, bool, float]:
    """(the loss falls and replicas agree, fewer bytes than raw, what is kept)"""
    from torch import nn

    from tests.ddp import agreed, mlp, registered, sgd, wrap

    ddp = wrap(mlp(64, 128, 10).cuda(), device_ids=[0])
    losses = []
    with registered(ddp, option, spec, ranks_per_node=1, timeout_s=60.0, **settings) as state:
        for step in range(30):
            draw = torch.Generator().manual_seed(step % 3 + 10 * rank)
            inputs = torch.randn(32, 64, generator=draw).cuda()
            targets = (inputs[:, :10].argmax(1)).long()
            ddp.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs), targets)
            loss.backward()
            sgd(ddp, 0.5)
            losses.append(float(loss))
        kept = state.metrics()["espresso/residual_norm"]
        sent = state.metrics()["espresso/bytes_sent"] < state.metrics()["espresso/bytes_raw"]
    return agreed(ddp) and losses[-1] < 0.6 * losses[0], sent, kept


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_compressed_training_learns_and_replicas_agree(backend: str) -> None:
    for outcome in run_ranks(run_lossy, 2, backend, init=False, deadline_s=200):
        assert set(outcome.value) == set(WAYS)
        for way, (learns, sent, kept) in outcome.value.items():
            assert learns, way
            assert sent, way
            assert kept > 0, way


AUTOMATIC: dict[str, tuple[str, dict[str, Any]]] = {
    "signs": ("efsignsgd", {}),
    "nothing chosen": ("auto", {}),
    "bf16 residuals": ("auto", {"residual_dtype": "bf16", "residual_budget_mb": 4.0}),
}
WATCHED = 150
"""Steps after the decision, with its watch and its soundings."""


def run_auto(rank: int, backend: str) -> dict[str, dict[str, Any]]:
    join(rank, backend)
    outcomes = {way: decide(rank, *settings) for way, settings in AUTOMATIC.items()}
    dist.destroy_process_group()
    return outcomes


def decide(rank: int, spec: str, settings: dict[str, Any]) -> dict[str, Any]:
    import espresso
    from tests.ddp import agreed, mlp, sgd, wrap

    ddp = wrap(mlp(256, 512, 512, 10).cuda(), device_ids=[0], bucket_cap_mb=0.5)
    decided, losses = 0, []
    with espresso.register(ddp, spec, offload_threads=1, ranks_per_node=1, compile_beside=False, **settings) as state:
        for step in range(60 + WATCHED):
            draw = torch.Generator().manual_seed(step % 4 + 100 * rank)
            inputs = torch.randn(16, 256, generator=draw).cuda()
            ddp.zero_grad()
            loss = (ddp(inputs) - inputs[:, :10].sin()).square().mean()
            loss.backward()
            sgd(ddp, 0.05)
            losses.append(float(loss))
            decided += not state.decided
        metrics = state.metrics()
        events = [row["event"] for row in state.history]
        return {
            "verdict": state.verdict, "agreed": agreed(ddp), "decided": decided, "events": events,
            "skipped": metrics["espresso/skipped_steps"], "falls": losses[-1] < 0.7 * losses[0],
        }  # fmt: skip


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_automatic_mode_decides_and_goes_on_looking(backend: str) -> None:
    first, second = (o.value for o in run_ranks(run_auto, 2, backend, init=False, deadline_s=230))
    assert set(first) == set(AUTOMATIC)
    for way in AUTOMATIC:
        for mine in (first[way], second[way]):
            assert mine["verdict"] == first[way]["verdict"] != "", way
            assert mine["agreed"], way
            assert mine["decided"] < 60, way
            assert mine["events"][0] == "decided", way
            assert mine["skipped"] == 0, way
            assert mine["falls"], way


def run_without_waiting(rank: int) -> dict[str, bool]:
    """Steady iterations over NCCL with waits forbidden inside backward; the guard looks at every other one."""
    join(rank, "nccl")
    with patch("espresso.live.guard.EVERY", 1):
        outcomes = {way: runs_ahead(*WAYS[way]) for way in WAYS if "pool" not in way}
        outcomes["plain"] = runs_ahead("flat.allreduce", "none", {})
    dist.destroy_process_group()
    return outcomes


def runs_ahead(option: str, spec: str, settings: dict[str, Any]) -> bool:
    from tests.ddp import mlp, registered, sgd, wrap

    ddp = wrap(mlp(256, 512, 10).cuda(), device_ids=[0])
    inputs = torch.randn(64, 256, device="cuda")
    with registered(ddp, option, spec, timeout_s=60.0, **settings) as state:
        for step in range(8):
            ddp.zero_grad()
            loss = ddp(inputs).square().mean()
            torch.cuda.set_sync_debug_mode("error" if step > 5 else "default")
            try:
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            sgd(ddp, 0.01)
        return state.metrics()["espresso/skipped_steps"] == 0.0


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_waits_for_the_device_in_steady_state(size: int) -> None:
    for outcome in run_ranks(run_without_waiting, size, init=False, deadline_s=200):
        assert all(outcome.value.values()), outcome.value
        assert len(outcome.value) == len(WAYS)
