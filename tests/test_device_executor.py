"""The executor of GPU jobs on real ranks, with emulated kernels and streams that keep vector clocks instead of a GPU.

Its results and residuals are those of the host's executor bit for bit, and every order it rests on is one that events
enforce. What a real device adds (concurrency, NCCL, pinned copies) is in tests/test_gpu.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.exchange import Exchange, digest, integers, make_buckets, numels_of, planned, strategy_of
from benchmarks.rank_pool import NUM_RANKS, POOL
from espresso.comm import Assignment
from espresso.comm.device_executor import DeviceExecutor
from espresso.comm.memory import DeviceMemory
from espresso.compressors.cuda import sources
from espresso.device_codecs import DeviceCodecs
from espresso.strategies import Choice, CompressorSpec, parse_option
from tests.ddp import agreed, batch, mlp, sgd, wrap
from tests.emulator import COMPILER, EmulatedDevice, build
from tests.emulator.streams import TracedStreams, happens_before
from tests.workers import run_ranks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulation of kernels needs g++")

SIZES = ({"a": 3000, "b": 100}, {"c": 2000}, {"d": 500, "e": 700})
OPTIONS = (
    "comp > flat.allgather > dec",
    "comp@offload > flat.allgather > dec@offload",
    "comp > flat.all_to_all > dec@offload > comp@offload > flat.allgather > dec",
    "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather",
    "intra.reduce > comp@offload > inter.gather > dec > comp > inter.broadcast > dec@offload > intra.broadcast",
    "intra.reduce_scatter > inter.allreduce > intra.allgather",
)
COMPRESSORS = ("topk:ratio=0.05", "int8", "efsignsgd", "dgc:ratio=0.05", "efsignsgd", "none")


class DeviceExchange(Exchange):
    """An exchange whose model is on an emulated device."""

    def __init__(self, ranks_per_node: int) -> None:
        self.streams = TracedStreams()
        super().__init__(ranks_per_node, codecs=DeviceCodecs(EmulatedDevice(), 1), host_copies=True)

    def _make_executor(self) -> DeviceExecutor:
        codecs = self.codecs
        assert isinstance(codecs, DeviceCodecs)
        return DeviceExecutor(
            self.groups,
            codecs,
            self.script,
            store=self.store,
            seed=self.seed,
            timeout_s=self._timeout_s,
            streams=self.streams,
            memory=DeviceMemory(torch.device("cpu")),
            note_taker=codecs.notes,
        )


def normal(buckets: Any, rank: int, step: int) -> list[torch.Tensor]:
    random = np.random.default_rng([step, rank])
    return [torch.from_numpy(random.standard_normal(b.numel).astype(np.float32)) for b in buckets]


def run_both(rank: int) -> list[str]:
    """Both executors on the same gradients, options and compressors; the names of those that differ."""
    host, device = Exchange(2), DeviceExchange(2)
    host.warm_up(COMPRESSORS)
    buckets = make_buckets(*SIZES)
    wrong = []
    for text, name in zip(OPTIONS, COMPRESSORS, strict=True):
        option = parse_option(text)
        choice = Choice(option, CompressorSpec.parse(name)) if option.is_compressed else Choice(option)
        strategy = strategy_of(buckets, host.groups.cluster, choice, partition_bytes=6000)
        host.renew()
        device.renew()
        assignment = Assignment(strategy, record=True)
        for step in range(2):
            gradients = normal(buckets, rank, step)
            expected = host.step(planned(assignment, buckets), buckets, gradients)
            got = device.step(device.planned(assignment, buckets), buckets, gradients)
            if digest(got) != digest(expected):
                wrong.append(f"{text} with {name}: step {step}")
        device.executor.conclude()
        kept = [exchange.kept(numels_of(buckets)) for exchange in (host, device)]
        if any(not np.array_equal(kept[0][tensor], kept[1][tensor]) for tensor in kept[0]):
            wrong.append(f"{text} with {name}: residuals")
    host.close()
    device.close()
    return wrong


def test_results_and_residuals_are_the_hosts() -> None:
    build(sources())
    assert POOL.run(run_both) == [[]] * NUM_RANKS


def run_traced(rank: int) -> list[str]:
    """What is not ordered by events: tasks of a partition, tasks on a lane, backward before, DDP's future after."""
    device = DeviceExchange(2)
    device.warm_up(["efsignsgd"])
    buckets = make_buckets(*SIZES)
    # Flat steps hold the lanes of two streams: only events keep them apart from hierarchical ones.
    turns = [Choice(parse_option(OPTIONS[i]), CompressorSpec.parse("efsignsgd")) for i in (4, 0)]
    choices = {name: turns[number % 2] for number, name in enumerate(numels_of(buckets))}
    strategy = strategy_of(buckets, device.groups.cluster, choices, partition_bytes=4096)
    assignment = device.planned(Assignment(strategy, record=True), buckets)
    wrong = []
    for _ in range(2):
        device.step(assignment, buckets, normal(buckets, rank, 0))
        verdict = device.executor._pending
        assert verdict is not None
        marks, laid = verdict.marks, verdict.iteration.record.plan
        assert laid is not None
        times = {interval.task: (begin, end) for interval, begin, end in marks.times}
        for task in laid.tasks:
            if task.index not in times:
                continue
            begin, end = times[task.index]
            bucket = laid.groups[laid.partitions[task.partition].group].bucket
            if not happens_before(marks.ready[bucket], begin):
                wrong.append(f"{task.step} before backward")
            if task.after in times and not happens_before(times[task.after][1], begin):
                wrong.append(f"{task.step} before what it follows")
            if not happens_before(end, verdict.event):
                wrong.append(f"{task.step} after the verdict")
        for lane in {lane for task in laid.tasks for lane in task.lanes}:
            mine = [i for i in laid.order if lane in laid.tasks[i].lanes and i in times]
            wrong += [
                f"{laid.tasks[two].step} before {laid.tasks[one].step} on {lane}"
                for one, two in pairwise(mine)
                if not happens_before(times[one][1], times[two][0])
            ]
    device.close()
    return wrong


def test_every_order_is_enforced_by_events() -> None:
    build(sources())
    assert POOL.run(run_traced) == [[]] * NUM_RANKS


def run_nan(rank: int) -> tuple[bool, bool, bool, bool]:
    """A NaN on one rank: seen everywhere, residuals as before; the next iteration commits."""
    device = DeviceExchange(2)
    device.warm_up(["efsignsgd"])
    buckets = make_buckets(*SIZES)
    choice = Choice(parse_option(OPTIONS[0]), CompressorSpec.parse("efsignsgd"))
    assignment = Assignment(strategy_of(buckets, device.groups.cluster, choice))
    device.step(assignment, buckets, normal(buckets, rank, 0))
    device.executor.conclude()
    before = device.kept(numels_of(buckets))
    spoilt = normal(buckets, rank, 1)
    if rank == 1:
        spoilt[0][5] = float("nan")
    got = device.step(assignment, buckets, spoilt)
    device.executor.conclude()
    after = device.kept(numels_of(buckets))
    finite = device.record.finite
    device.step(assignment, buckets, normal(buckets, rank, 2))
    device.executor.conclude()
    moved = device.kept(numels_of(buckets))
    outcome = (
        bool(got[0][5].isnan()),
        finite,
        all(np.array_equal(before[name], after[name]) for name in before),
        device.record.finite and any(not np.array_equal(before[name], moved[name]) for name in before),
    )
    device.close()
    return outcome


def test_a_nan_discards_the_iteration() -> None:
    build(sources())
    assert POOL.run(run_nan) == [(True, False, True, True)] * NUM_RANKS


def run_integers(rank: int) -> bool:
    """Uncompressed options average exactly, in the bucket's own type."""
    device = DeviceExchange(2)
    buckets = make_buckets(*SIZES, dtype="bfloat16")
    strategy = strategy_of(buckets, device.groups.cluster, Choice(parse_option(OPTIONS[5])))
    got = device.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))
    everybody = [integers(buckets, other, NUM_RANKS) for other in range(NUM_RANKS)]
    expected = [
        (sum(tensor.double() for tensor in column) / NUM_RANKS).to(column[0].dtype)
        for column in zip(*everybody, strict=True)
    ]
    device.close()
    return digest(got) == digest(expected)


def test_uncompressed_options_are_exact() -> None:
    assert all(POOL.run(run_integers))


def run_registered(rank: int) -> tuple[str, bool, bool, float]:
    """``espresso.register`` in automatic mode on a model that passes for one on a device, and a checkpoint."""
    import espresso
    import espresso.state
    from espresso.runtime import DeviceRuntime

    streams = TracedStreams()
    espresso.state.runtime_of = lambda device: DeviceRuntime(EmulatedDevice(), streams)
    ddp = wrap(mlp(16, 24, 8))
    state = espresso.register(
        ddp, "efsignsgd", ranks_per_node=1, offload_threads=2, race_steps=3, race_rounds=1
    )
    for step in range(40):
        ddp.zero_grad()
        ddp(batch(rank, step, 16)).square().mean().backward()
        sgd(ddp)
        if state.decided:
            break
    job = state.job
    assert job is not None
    measured = job.host_copies and len(job.costs.compute) >= 2 and max(job.gaps_us) > 0
    saved = state.state_dict()
    outcome = state.verdict, agreed(ddp), measured, float(saved["step"])
    state.close()
    return outcome


def test_automatic_mode_measures_and_decides_on_a_device() -> None:
    build(sources())
    outcomes = [outcome.value for outcome in run_ranks(run_registered, 2, deadline_s=150)]
    for verdict, agree, measured, step in outcomes:
        assert verdict == outcomes[0][0] != ""
        assert agree
        assert measured
        assert step > 10
