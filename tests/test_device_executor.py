"""The executor of GPU jobs on real ranks: on emulated kernels and streams that keep vector clocks, and on a GPU.

Its results and residuals are those of the host's executor bit for bit, and every order it rests on is one that events
enforce. What more a real device adds (NCCL, waiting for nothing) is in tests/test_gpu.py.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.exchange import Exchange, digest, integers, make_buckets, numels_of, planned, strategy_of
from benchmarks.rank_pool import NUM_RANKS, POOL
from espresso.comm.errors import EspressoError
from espresso.comm.execute.device import CudaStreams, DevicePass, DeviceSide
from espresso.comm.execute.executor import Assignment
from espresso.comm.keep.store import ResidualStore
from espresso.comm.memory import DeviceMemory
from espresso.compressors import Correction, DrawKey, Encoding
from espresso.compressors.cuda import CudaCodec
from espresso.live.codec_costs import measure_compressor
from espresso.live.codecs import DeviceCodecs
from espresso.live.guard import BAND, ROUNDING
from espresso.live.parts import NUM_PARTS
from espresso.live.recorder import now_us
from espresso.live.runtime import DeviceRuntime
from espresso.live.sounding import Soundings
from espresso.live.watch import WINDOW, Watch
from espresso.strategies import (
    NONE,
    PLAIN,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Run,
    Site,
    Strategy,
    TensorSpec,
    parse_option,
)
from tests.backends import DEVICES, build_for, cuda_device, needs_compiler
from tests.ddp import agreed, batch, measure_briefly, mlp, registered, sgd, strategy_for, wrap
from tests.emulator import EmulatedDevice
from tests.emulator.streams import TracedStreams, happens_before
from tests.workers import run_ranks

SIZES = ({"a": 3000, "b": 100}, {"c": 2000}, {"d": 500, "e": 700})
LARGER = {"emulated": 1, "cuda": 40}
"""On a device kernels should be at work side by side."""
OPTIONS = (
    "comp > flat.allgather > dec",
    "comp@offload > flat.allgather > dec@offload",
    "comp > flat.all_to_all > dec@offload > comp@offload > flat.allgather > dec",
    "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather",
    "intra.reduce > comp@offload > inter.gather > dec > comp > inter.broadcast > dec@offload > intra.broadcast",
    "intra.reduce_scatter > inter.allreduce > intra.allgather",
)
COMPRESSORS = ("topk:ratio=0.05", "int8", "efsignsgd", "dgc:ratio=0.05", "efsignsgd", "none")


WATCHED = 10
"""Steps after the decision."""


class WatchedMemory(DeviceMemory):
    """An emulated device's, which notes when it is allocated from."""

    def __init__(self, streams: TracedStreams) -> None:
        super().__init__(EmulatedDevice())
        self.filled: list[Any] = []
        self._streams = streams

    def zeros(self, shape: Any, dtype: Any) -> Any:
        made = super().zeros(shape, dtype)
        self.filled.append(self._streams.record())
        return made


class WatchedSide(DeviceSide):
    """Keeps the last pass, whose events tell what was ordered."""

    def begin(self, record: Any, patience_s: float) -> DevicePass:
        self.record, self.run = record, super().begin(record, patience_s)
        return self.run


class DeviceExchange(Exchange):
    """An exchange whose model is on a device, ``"emulated"`` or ``"cuda"``."""

    def __init__(self, ranks_per_node: int, where: str = "emulated", **more: Any) -> None:
        self.where = where
        self.accelerator = EmulatedDevice() if where == "emulated" else cuda_device()
        self.streams = TracedStreams() if where == "emulated" else CudaStreams(self.accelerator.torch_device)
        super().__init__(ranks_per_node, codecs=DeviceCodecs(self.accelerator, 1), host_copies=True, **more)

    def step(self, assignment: Any, buckets: Any, gradients: Any, **more: Any) -> list[torch.Tensor]:
        """There and back."""
        there = [gradient.to(self.accelerator.torch_device) for gradient in gradients]
        return [average.cpu() for average in super().step(assignment, buckets, there, **more)]

    def renew(self, *, transactional: bool = True, correction: Any = None) -> DeviceExchange:
        super().renew(transactional=transactional, correction=correction)
        return self

    def side(self) -> DeviceSide:
        assert isinstance(self.codecs, DeviceCodecs)
        if self.where != "emulated":
            return DeviceSide(self.streams, DeviceMemory(self.accelerator), self.codecs.notes)
        self.memory = WatchedMemory(self.streams)
        self.last = WatchedSide(self.streams, self.memory, self.codecs.notes)
        return self.last


def sized(where: str, **more: Any) -> Any:
    return make_buckets(*({n: LARGER[where] * numel for n, numel in sizes.items()} for sizes in SIZES), **more)


def choice_of(text: str, name: str) -> Choice:
    option = parse_option(text)
    return Choice(option, CompressorSpec.parse(name)) if option.is_compressed else Choice(option)


def normal(buckets: Any, rank: int, step: int) -> list[torch.Tensor]:
    random = np.random.default_rng([step, rank])
    return [torch.from_numpy(random.standard_normal(b.numel).astype(np.float32)) for b in buckets]


def exact_average(buckets: Any) -> list[torch.Tensor]:
    """Of everybody's ``integers``."""
    everybody = [integers(buckets, rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    return [
        (sum(tensor.double() for tensor in column) / NUM_RANKS).to(column[0].dtype)
        for column in zip(*everybody, strict=True)
    ]


def run_both(rank: int, where: str) -> list[str]:
    """Both executors on the same gradients, options and compressors; the names of those that differ."""
    host, device = Exchange(2), DeviceExchange(2, where)
    host.warm_up(COMPRESSORS)
    buckets = sized(where)
    wrong = []
    for text, name in zip(OPTIONS, COMPRESSORS, strict=True):
        strategy = strategy_of(
            buckets, host.groups.cluster, choice_of(text, name), partition_bytes=6000 * LARGER[where]
        )
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


@pytest.mark.parametrize("where", DEVICES)
def test_results_and_residuals_are_the_hosts(where: str) -> None:
    build_for(where)
    assert POOL.run(run_both, where) == [[]] * NUM_RANKS


def run_switches(rank: int, where: str) -> list[str]:
    """One strategy after another on the same residuals, some of them draining; the switches that differ."""
    host, device = Exchange(2), DeviceExchange(2, where)
    host.warm_up(COMPRESSORS)
    buckets = sized(where)
    wrong = []
    for number in range(2 * len(OPTIONS)):
        text, name = OPTIONS[number * 5 % len(OPTIONS)], COMPRESSORS[number % (len(COMPRESSORS) - 1)]
        partition_bytes = (0, 6000 * LARGER[where])[number % 2]
        strategy = strategy_of(buckets, host.groups.cluster, choice_of(text, name), partition_bytes=partition_bytes)
        assignment = Assignment(strategy, drain=number % 3 == 2)
        gradients, kept, got = normal(buckets, rank, number), [], []
        for exchange in (host, device):
            laid = exchange.planned(assignment, buckets) if number % 4 else assignment
            got.append(digest(exchange.step(laid, buckets, gradients)))
            exchange.executor.conclude()
            kept.append(exchange.kept(numels_of(buckets)))
        same = all(np.array_equal(kept[0][tensor], kept[1][tensor]) for tensor in kept[0])
        if got[0] != got[1] or not same:
            wrong.append(f"switch {number}, to {text} with {name}: {'residuals' if got[0] == got[1] else 'averages'}")
    if not any(values.any() for values in device.kept(numels_of(buckets)).values()):
        wrong.append("nothing kept")
    host.close()
    device.close()
    return wrong


@pytest.mark.parametrize("where", DEVICES)
def test_switches_hand_over_what_the_hosts_do(where: str) -> None:
    build_for(where)
    assert POOL.run(run_switches, where) == [[]] * NUM_RANKS


def run_with_settings(rank: int, where: str) -> list[str]:
    """Momentum in every form and residuals of every width, on both executors; the names of those that differ."""
    host, device = Exchange(2), DeviceExchange(2, where)
    host.warm_up(["dgc:ratio=0.05", "topk:ratio=0.05"])
    buckets = sized(where)
    wrong = []
    for what, settings in SETTINGS.items():
        exchanges = (host, device)
        for exchange in exchanges:
            exchange.renew(correction=settings.get("correction"), transactional=settings.get("transactional", True))
            exchange.store.storage = settings.get("storage", "float32")
        choice = Choice(parse_option(settings["option"]), CompressorSpec.parse(settings["compressor"]))
        choices = {name: PLAIN if name in ("b", "e") else choice for name in numels_of(buckets)}
        strategy = strategy_of(buckets, host.groups.cluster, choices, partition_bytes=6000 * LARGER[where])
        for step in range(3):
            scale = 2.0**step
            gradients = [g * scale for g in normal(buckets, rank, step)]
            if what.startswith("clipped"):  # squares that have the same sum in every order: a GPU has its own
                gradients = [(4 * g / scale).round() * scale for g in gradients]
            got = []
            for exchange in exchanges:
                assignment = Assignment(strategy)
                if step > 1:
                    assignment = exchange.planned(assignment, buckets)
                got.append(digest(exchange.step(assignment, buckets, gradients, grad_scale=scale)))
            if got[0] != got[1]:
                wrong.append(f"{what}: step {step}")
        device.executor.conclude()
        numels = numels_of(buckets)
        for store in ("store", "velocities"):
            kept = [held(getattr(exchange, store), numels) for exchange in exchanges]
            if any(not np.array_equal(kept[0][tensor], kept[1][tensor]) for tensor in kept[0]):
                wrong.append(f"{what}: {store}")
            if kept[0] and not any(values.any() for values in kept[0].values()):
                wrong.append(f"{what}: nothing kept in {store}")
        if device.store.num_bytes != host.store.num_bytes:
            wrong.append(f"{what}: {device.store.num_bytes} bytes of residuals, {host.store.num_bytes} on the host")
    host.close()
    device.close()
    return wrong


class LettingGo(DeviceMemory):
    """Notes on which stream arrays are let go."""

    def __init__(self, streams: TracedStreams) -> None:
        super().__init__(EmulatedDevice())
        self.gone: list[tuple[Any, str]] = []
        self._streams = streams

    def let_go(self, array: Any) -> None:
        self.gone.append((array, self._streams.record()[0]))


@pytest.mark.parametrize("transactional", [True, False])
def test_a_residual_that_is_replaced_is_let_go_where_it_was_read(transactional: bool) -> None:
    """Made on backward's stream and read on a lane's: freed without a word it would be backward's again at once."""
    streams = TracedStreams()
    memory = LettingGo(streams)
    runs = (Run("a", 0, 0, 0, 100),)
    residual = ResidualStore(transactional=transactional).new_residual(Site.LOCAL, runs, np.float32, 0, memory)
    residual.begin()
    before = residual.old
    with streams.on("training"):
        residual.feedback(np.zeros(1, np.int64))
        residual.settle(DrawKey())
    if transactional:
        assert memory.gone == []
    else:
        ((gone, stream),) = memory.gone
        assert gone is before
        assert stream == "training"
        assert residual.old is not before


def test_letting_go_tells_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda = True
        streams: ClassVar[list[str]] = []

        def record_stream(self, stream: str) -> None:
            self.streams.append(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    memory = DeviceMemory(EmulatedDevice())
    memory.let_go(OnGpu())
    memory.let_go(torch.zeros(3))
    assert OnGpu.streams == ["of cpu"]


def held(store: Any, numels: Any) -> dict[str, Any]:
    """Everything in a store, by tensor."""
    if store is None:
        return {}
    total = {name: np.zeros(numel) for name, numel in numels.items()}
    for each in store.lend():
        total[each.tensor][each.start : each.start + each.numel] += each.read()
    return total


SHARDED = "comp > flat.all_to_all > dec > comp > flat.allgather > dec"
SETTINGS: dict[str, dict[str, Any]] = {
    "momentum": {"correction": Correction(0.75), "option": OPTIONS[0], "compressor": "dgc:ratio=0.05"},
    "nesterov, one buffer": {
        "correction": Correction(0.75, nesterov=True), "option": SHARDED, "compressor": "dgc:ratio=0.05",
        "transactional": False,
    },
    "clipped, on the pool": {
        "correction": Correction(0.75, clip_norm=20.0), "option": OPTIONS[1], "compressor": "topk:ratio=0.05",
    },
    "bf16 on both": {"storage": "bf16", "option": OPTIONS[2], "compressor": "topk:ratio=0.05"},
    "int8, one buffer": {
        "storage": "int8", "option": OPTIONS[3], "compressor": "dgc:ratio=0.05", "transactional": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("where", DEVICES)
def test_momentum_and_narrow_residuals_are_the_hosts(where: str) -> None:
    build_for(where)
    assert POOL.run(run_with_settings, where) == [[]] * NUM_RANKS


LEAVES = (
    "comp > flat.allreduce > transform > flat.allreduce > dec",
    "comp > intra.reduce_scatter > inter.allreduce > intra.allgather > transform > intra.reduce_scatter"
    " > inter.allreduce > intra.allgather > dec@offload",
    "comp@offload > flat.allreduce > transform@offload > flat.allreduce > dec",
)
MATRICES = {"w": (60, 40), "bias": (60,), "conv": (24, 8, 3, 3), "thin": (300, 2)}
POWERSGD = "powersgd:rank=3,start_iter=0"


def run_two_rounds(rank: int, where: str) -> list[dict[str, Any]]:
    """PowerSGD on the device and on the host: averages, what is kept, Q, and bits that all ranks must share."""
    host, device = Exchange(2), DeviceExchange(2, where)
    host.warm_up([POWERSGD])
    device.warm_up([POWERSGD])
    sizes = {name: int(np.prod(shape)) for name, shape in MATRICES.items()}
    names = list(sizes)
    buckets = make_buckets(*({n: sizes[n] for n in part} for part in (names[:2], names[2:])))
    tensors = tuple(TensorSpec(name, shape) for name, shape in MATRICES.items())
    rows = []
    for text, storage in (
        (LEAVES[0], "float32"),
        (LEAVES[1], "float32"),
        (LEAVES[2], "float32"),
        (LEAVES[0], "bf16"),
    ):
        choice = Choice(parse_option(text), CompressorSpec.parse(POWERSGD))
        plain = Assignment(Strategy.uniform(tensors, host.groups.cluster, choice))
        row: dict[str, Any] = {"text": text, "storage": storage, "digests": []}
        for exchange in (host, device):
            exchange.renew()
            exchange.store.storage = storage
        for step in range(3):
            got = []
            for exchange in (host, device):
                assignment = exchange.planned(plain, buckets) if step else plain
                got.append(exchange.step(assignment, buckets, normal(buckets, rank, step)))
            row["digests"].append(digest(got[1]))
            row["apart"] = max(float((a - b).abs().max()) for a, b in zip(*got, strict=True))
        device.executor.conclude()
        row["kept"], on_host = device.kept(sizes), host.kept(sizes)
        row["kept apart"] = max(float(np.abs(row["kept"][n] - on_host[n]).max()) for n in sizes)
        row["factors"] = digest(torch.from_numpy(v) for v in device.executor.factors.snapshot().values())
        row["sites"] = device.sites()
        before = {name: values.copy() for name, values in device.executor.factors.snapshot().items()}
        spoilt = normal(buckets, rank, 7)
        if rank == 1:
            spoilt[0][5] = float("nan")
        average = device.step(plain, buckets, spoilt)[0]
        device.executor.conclude()
        after, kept = device.executor.factors.snapshot(), device.kept(sizes)
        row["discarded"] = (
            bool(average.isnan().any()) and not device.record.finite
            and all(np.array_equal(before[n], after[n]) for n in before)
            and all(np.array_equal(kept[n], row["kept"][n]) for n in kept)
        )  # fmt: skip
        rows.append(row)
    spec, place = CompressorSpec.parse(POWERSGD), DeviceRuntime(device.accelerator, device.streams).place
    timed = measure_compressor(device.groups, device.codecs, spec, [Device.TRAINING], largest=400, place=place)
    rows.append({"timed": [cost.launch_us for cost in timed]})
    host.close()
    device.close()
    return rows


@pytest.mark.parametrize("where", DEVICES)
def test_powersgd_on_a_device(where: str) -> None:
    build_for(where)
    answers = POOL.run(run_two_rounds, where)
    for everybody in zip(*answers, strict=True):
        first = everybody[0]
        if "timed" in first:
            assert all(len(row["timed"]) == 3 and min(row["timed"]) > 0 for row in everybody)
            continue
        where = first["text"], first["storage"]
        assert all(row["digests"] == first["digests"] for row in everybody), where
        assert all(row["factors"] == first["factors"] for row in everybody), where
        rounding = 5e-5 if first["storage"] == "float32" else 0.1
        for row in everybody:
            assert 0 <= row["apart"] < rounding, where
            assert row["kept apart"] < rounding, where
            assert np.abs(row["kept"]["w"]).max() > 0.1
            assert not row["kept"]["bias"].any()
            assert row["discarded"], where
            assert row["sites"] == {"local"}


def run_split(rank: int) -> str:
    device = DeviceExchange(2)
    buckets = make_buckets({"w": 2400})
    text = "comp > flat.allreduce > transform@offload > flat.allreduce > dec"
    choice = Choice(parse_option(text), CompressorSpec.parse(POWERSGD))
    strategy = Strategy.uniform((TensorSpec("w", (60, 40)),), device.groups.cluster, choice)
    try:
        device.step(Assignment(strategy), buckets, normal(buckets, rank, 0))
    except Exception as error:
        return str(error)
    finally:
        device.close()
    return "ran"


@needs_compiler
def test_matrices_stay_where_they_were_compressed() -> None:
    assert all("both on the pool" in message for message in POOL.run(run_split))


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
    memory = device.memory
    for _ in range(2):
        memory.filled.clear()
        device.step(assignment, buckets, normal(buckets, rank, 0))
        marks, laid = device.last.run, device.last.record.plan
        assert laid is not None
        times = {interval.task: (begin, end) for interval, begin, end in marks.intervals}
        firsts = [begin for begin, _ in times.values()]
        if any(not happens_before(filled, begin) for filled in memory.filled for begin in firsts):
            wrong.append("a task before what was made for it was filled with zeros")
        for task in laid.tasks:
            if task.index not in times:
                continue
            begin, end = times[task.index]
            bucket = laid.groups[laid.partitions[task.partition].group].bucket
            if not happens_before(marks.ready[bucket], begin):
                wrong.append(f"{task.step} before backward")
            if task.after in times and not happens_before(times[task.after][1], begin):
                wrong.append(f"{task.step} before what it follows")
            if not happens_before(end, marks.end):
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


@needs_compiler
def test_every_order_is_enforced_by_events() -> None:
    build_for("emulated")
    assert POOL.run(run_traced) == [[]] * NUM_RANKS


def run_alone(rank: int, where: str) -> list[str]:
    """Averages that the library makes without tasks: exact, and what follows waits for them."""
    device = DeviceExchange(2, where)
    buckets = sized(where)
    assignment = Assignment(strategy_of(buckets, device.groups.cluster, PLAIN))
    wrong = []
    for grad_scale in (None, 1.0, None):  # the third is looked at
        device.executor._averager.look_every = 1
        time.sleep(0.2 * (rank == 0))  # the others' averages come in the library's thread
        got = device.step(assignment, buckets, integers(buckets, rank, NUM_RANKS), grad_scale=grad_scale)
        device.executor.conclude()
        if digest(got) != digest(exact_average(buckets)):
            wrong.append("not the average")
        if not device.record.whole or not device.record.finite:
            wrong.append("through tasks, or not finite")
        if where == "emulated" and device.record.iteration == 2:
            marks = device.last.run
            if not all(happens_before(end, marks.end) for _, _, end in marks.intervals):
                wrong.append("a verdict before the averages")
        noted = [interval.num_bytes > 0 for interval in device.record.intervals]
        if device.record.iteration == 2 and noted != [True] * 3:
            wrong.append("exchanges that were looked at are not noted")
    spoilt = integers(buckets, rank, NUM_RANKS)
    if rank == 1:
        spoilt[1][7] = float("inf")
    for grad_scale in (1.0, None):  # a plain step without loss scaling is not looked at
        device.step(assignment, buckets, spoilt, grad_scale=grad_scale)
        device.executor.conclude()
        if device.record.finite is not (grad_scale is None):
            wrong.append(f"an inf, loss scale {grad_scale}: finite is {device.record.finite}")
    device.close()
    return wrong


def run_malformed(rank: int) -> str:
    """What is said where a decoder of plain numbers finds that they cannot be."""
    device = DeviceExchange(2)
    buckets = make_buckets(*SIZES)
    choice = Choice(parse_option(OPTIONS[0]), NONE)
    device.last.found_by_decoders = lambda: [torch.tensor([0, 7])]
    device.step(Assignment(strategy_of(buckets, device.groups.cluster, choice)), buckets, normal(buckets, rank, 0))
    try:
        device.executor.conclude()
    except EspressoError as error:
        return str(error)
    finally:
        device.close()
    return "nothing"


@needs_compiler
def test_payloads_of_plain_numbers_are_looked_at() -> None:
    build_for("emulated")
    assert all("malformed payload (code 0x7)" in said for said in POOL.run(run_malformed))


@pytest.mark.parametrize("where", DEVICES)
def test_averages_without_tasks(where: str) -> None:
    build_for(where)
    assert POOL.run(run_alone, where) == [[]] * NUM_RANKS


def run_nan(rank: int, where: str) -> tuple[bool, bool, bool, bool]:
    """A NaN on one rank: seen everywhere, residuals as before; the next iteration commits."""
    device = DeviceExchange(2, where)
    device.warm_up(["efsignsgd"])
    buckets = sized(where)
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


@pytest.mark.parametrize("where", DEVICES)
def test_a_nan_discards_the_iteration(where: str) -> None:
    build_for(where)
    assert POOL.run(run_nan, where) == [(True, False, True, True)] * NUM_RANKS


def run_judged_alone(rank: int, where: str) -> tuple[bool, bool, bool]:
    """One rank looks at its figures while the last step is not judged: nobody else is asked until the next one."""
    device = DeviceExchange(2, where)
    buckets = sized(where)
    assignment = Assignment(strategy_of(buckets, device.groups.cluster, Choice(parse_option(OPTIONS[5]))))
    told: list[int] = []
    device.script.work = lambda: told.extend(device.groups.everywhere(rank))
    device.step(assignment, buckets, normal(buckets, rank, 0))
    if rank == 0:
        device.executor.judge()
    judged, early = len(device.script.records) == 1, bool(device.script.num_followed)
    device.groups.barrier()
    device.step(assignment, buckets, normal(buckets, rank, 1))
    device.executor.conclude()
    device.close()
    return judged is (rank == 0), early, told == list(range(NUM_RANKS))


@pytest.mark.parametrize("where", DEVICES)
def test_a_step_judged_alone_asks_nobody(where: str) -> None:
    build_for(where)
    assert POOL.run(run_judged_alone, where) == [(True, False, True)] * NUM_RANKS


def run_integers(rank: int, where: str) -> bool:
    """Uncompressed options average exactly, in the bucket's own type."""
    device = DeviceExchange(2, where)
    buckets = sized(where, dtype="bfloat16")
    strategy = strategy_of(buckets, device.groups.cluster, Choice(parse_option(OPTIONS[5])))
    got = device.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))
    device.close()
    return digest(got) == digest(exact_average(buckets))


@pytest.mark.parametrize("where", DEVICES)
def test_uncompressed_options_are_exact(where: str) -> None:
    assert all(POOL.run(run_integers, where))


def run_registered(rank: int) -> tuple[str, bool, bool, float, list[str]]:
    """``espresso.register`` in automatic mode on a model that passes for one on a device, and a checkpoint."""
    import espresso
    import espresso.live.session
    from espresso.live.runtime import DeviceRuntime

    streams = TracedStreams()
    espresso.live.session.runtime_of = lambda device: DeviceRuntime(EmulatedDevice(), streams)
    measure_briefly()
    ddp = wrap(mlp(16, 24, 8))
    state = espresso.register(
        ddp, ["efsignsgd", "topk:ratio=0.05"], ranks_per_node=1, offload_threads=2, race_steps=3, race_rounds=1,
        decide_by=0, compile_beside=False,
    )  # fmt: skip
    watched = 0
    for step in range(80):
        ddp.zero_grad()
        ddp(batch(rank, step, 16)).square().mean().backward()
        sgd(ddp)
        watched += state.decided
        if watched == WATCHED:
            break
    job = state.job
    assert job is not None
    measured = job.host_copies and len(job.costs.compute) >= 2 and max(job.gaps_us) > 0
    saved = state.state_dict()
    outcome = state.verdict, agreed(ddp), measured, float(saved["step"]), [row["event"] for row in state.history]
    state.close()
    return outcome


@needs_compiler
def test_automatic_mode_measures_and_decides_on_a_device() -> None:
    build_for("emulated")
    outcomes = [outcome.value for outcome in run_ranks(run_registered, 2, deadline_s=150)]
    for verdict, agree, measured, step, events in outcomes:
        assert verdict == outcomes[0][0] != ""
        assert agree
        assert measured
        assert step > 10
        assert events[0] == "decided"


def run_gathered(rank: int) -> tuple[int, bool]:
    """A checkpoint is gathered after every step; rank 0 alone has each window at hand, and sounds the link at once."""
    import espresso.live.session

    streams = TracedStreams()
    espresso.live.session.runtime_of = lambda device: DeviceRuntime(EmulatedDevice(), streams)
    ddp = wrap(mlp(16, 24, 8))
    strategy = strategy_for(ddp, Cluster(2, 1), OPTIONS[0], "efsignsgd")
    gathered, sounded = [], False
    with (
        patch.object(Watch, "is_ready", rank == 0),
        patch.object(Soundings, "is_due", lambda soundings, step, rows: True),
        registered(ddp, compressor="efsignsgd", strategy="auto", adapt=True) as state,
    ):
        session = state.start().session
        session.adopt(strategy, session.check(strategy), 0, None, decides_on=True)
        for step in range(3 * WINDOW):
            ddp(batch(rank, step, 16)).square().mean().backward()
            gathered.append(state.gather_state_dict())
            sounded |= session.decider.watch.sounding is not None
        return len([body for body in gathered if len(body["parts"]) == NUM_PARTS]), sounded


@needs_compiler
def test_a_gathered_checkpoint_is_behind_what_the_planner_asks_of_all_ranks() -> None:
    build_for("emulated")
    assert [outcome.value for outcome in run_ranks(run_gathered, 2, deadline_s=100)] == [(3 * WINDOW, True)] * 2


def run_flushed_twice(rank: int) -> tuple[bool, float]:
    """One rank looks at its figures between two flushes: no rank runs another plan than the others then."""
    import espresso.live.session

    streams = TracedStreams()
    espresso.live.session.runtime_of = lambda device: DeviceRuntime(EmulatedDevice(), streams)
    ddp = wrap(mlp(16, 24, 8))
    with registered(ddp, OPTIONS[0], "efsignsgd", timeout_s=10.0) as state:
        for step in range(4):
            if step >= 2:
                state.flush()
            ddp.zero_grad()
            ddp(batch(rank, step, 16)).square().mean().backward()
            sgd(ddp)
            if rank == 0:
                state.metrics()
        return agreed(ddp), state.metrics()["espresso/residual_norm"]


@needs_compiler
def test_a_rank_that_looks_between_two_flushes_is_in_none_of_its_own() -> None:
    build_for("emulated")
    assert [outcome.value for outcome in run_ranks(run_flushed_twice, 2, deadline_s=60)] == [(True, 0.0)] * 2


class Lying:
    """From some step on a rank sends half of its gradient, and keeps its books as if all were sent."""

    def __init__(self) -> None:
        self.encode = CudaCodec.encode
        self.lies = False

    def __enter__(self) -> Lying:
        lying = self

        def encode(codec: CudaCodec, encoding: Encoding, payload: Any) -> bool:
            finite = lying.encode(codec, encoding, payload)
            if lying.lies:
                lying.encode(codec, replace(encoding, scale=encoding.scale / 2, feedback=None), payload)
            return finite

        CudaCodec.encode = encode  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        CudaCodec.encode = self.encode  # type: ignore[method-assign]


def run_guarded(rank: int, where: str, compressor: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Sound steps, then one rank lies. Gradients are views of the buckets, and zeroed in place after each step."""
    import espresso.live.session

    if where == "emulated":
        streams = TracedStreams()
        espresso.live.session.runtime_of = lambda device: DeviceRuntime(EmulatedDevice(), streams)
    place = "cpu" if where == "emulated" else where
    ddp = wrap(mlp(64, 128, 128, 8).to(place), gradient_as_bucket_view=True)
    lies_from, seen = 100, {}
    with (
        registered(ddp, OPTIONS[0], compressor, ranks_per_node=1, adapt=True, **settings) as state,
        Lying() as lying,
    ):
        for step in range(2 * lies_from):
            lying.lies = rank == 1 and step >= lies_from
            if step == lies_from:
                seen = {"sound": state.history, "metrics": state.metrics()}
            ddp.zero_grad(set_to_none=False)
            inputs = batch(rank, step % 8, 64).to(place)
            (ddp(inputs) - inputs[:, :8].sin()).square().mean().backward()
            sgd(ddp, 0.05)
            if any(row["event"] == "backed_off" for row in state.history):
                break
        return seen | {"history": state.history, "agreed": agreed(ddp), "took": step - lies_from}


@pytest.mark.parametrize(
    ("compressor", "settings"),
    [
        ("efsignsgd", {}),
        ("efsignsgd:momentum=0.9", {"transactional": False, "residual_dtype": "bf16"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", DEVICES)
def test_averages_on_a_device_are_looked_at(where: str, compressor: str, settings: dict[str, Any]) -> None:
    """They are gone by the time that the step is judged; an encoder that lies is noticed nonetheless."""
    build_for(where)
    for outcome in run_ranks(run_guarded, 2, where, compressor, settings, deadline_s=200):
        found = outcome.value
        assert [row["event"] for row in found["sound"] if row["event"] != "changed"] == ["decided"]
        for group in ("0", "2", "4"):
            kept = found["metrics"][f"espresso/residual_ratio/{group}"]
            assert found["metrics"][f"espresso/lost/{group}"] < (BAND + ROUNDING["bf16"] * kept if settings else 1e-3)
            assert found["metrics"][f"espresso/deviation/{group}"] > 1e-3
            assert kept > 1e-3
        assert "backed_off" in [row["event"] for row in found["history"]]
        assert 0 <= found["took"] <= 100
        assert found["agreed"]


class LateStreams(TracedStreams):
    """A copy to the host is there once the host has waited for an event behind it, and no sooner."""

    def __init__(self) -> None:
        super().__init__()
        self._under_way: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def copied(self, side: DeviceSide, numbers: torch.Tensor) -> torch.Tensor:
        """In place of the side's own."""
        there = torch.full_like(numbers, 1e6)
        self._under_way.append((self.record(), there, numbers.clone()))
        return there

    def wait_here(self, event: Any, timeout_s: float) -> bool:
        here = [each for each in self._under_way if happens_before(each[0], event)]
        self._under_way = [each for each in self._under_way if not happens_before(each[0], event)]
        for _, there, numbers in here:
            there.copy_(numbers)
        return True


def run_late(rank: int, spec: str) -> dict[str, Any]:
    """The guard looks at every other step; copies are as late as may be."""
    import espresso.live.session

    streams = LateStreams()
    espresso.live.session.runtime_of = lambda device: DeviceRuntime(EmulatedDevice(), streams)
    ddp = wrap(mlp(64, 128, 8), bucket_cap_mb=0.02)
    with (
        patch("espresso.live.guard.EVERY", 1),
        patch.object(DeviceSide, "copied", lambda side, numbers: streams.copied(side, numbers)),
        registered(ddp, OPTIONS[0], spec, ranks_per_node=1, adapt=True) as state,
    ):
        for step in range(12):
            ddp.zero_grad(set_to_none=False)
            inputs = batch(rank, step, 64)
            (ddp(inputs) - inputs[:, :8].sin()).square().mean().backward()
            sgd(ddp, 0.05)
        return {"events": [row["event"] for row in state.history], "metrics": state.metrics()}


@needs_compiler
@pytest.mark.parametrize("spec", ["bf16", "efsignsgd"])
def test_a_check_waits_for_its_copies(spec: str) -> None:
    """Also where nothing is kept, and so nothing else is read."""
    build_for("emulated")
    for outcome in run_ranks(run_late, 2, spec, deadline_s=100):
        assert "backed_off" not in outcome.value["events"]
        for group in ("0", "2"):
            assert outcome.value["metrics"][f"espresso/lost/{group}"] < 0.01


def run_marked(rank: int) -> list[int]:
    """Steps whose script is another one's. Every other has two forward passes, and asks for metrics between them."""
    import espresso.live.session

    streams = TracedStreams()
    espresso.live.session.runtime_of = lambda device: DeviceRuntime(EmulatedDevice(), streams)
    ddp = wrap(mlp(16, 24, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    began = []
    with registered(ddp) as state:
        for step in range(6):
            began.append(now_us())
            if step % 2:
                with ddp.no_sync():
                    ddp(batch(rank, step, 16)).square().mean().backward()
                state.metrics()
            ddp(batch(rank, step, 16)).square().mean().backward()
            optimizer.step()
        began.append(now_us())
        state.metrics()
        steps = state.session.recorder.flight().steps
    assert [each.number for each in steps] == list(range(6))
    return [
        each.number
        for each, begin, end in zip(steps, began, began[1:], strict=False)
        if not begin <= (each.script.entered_us or 0) <= (each.script.optimizer_end_us or 0) <= end
        or each.script.passes != 1 + each.number % 2
    ]


@needs_compiler
def test_a_step_that_is_judged_late_is_recorded_with_its_own_script() -> None:
    build_for("emulated")
    assert [outcome.value for outcome in run_ranks(run_marked, 2, deadline_s=60)] == [[], []]


def run_scheduled(rank: int) -> tuple[list[float], list[float], bool]:
    """DGC in full with its warm-up, and PowerSGD from its third step on, through ``espresso.register``."""
    import espresso.live.session

    streams = TracedStreams()
    espresso.live.session.runtime_of = lambda device: DeviceRuntime(EmulatedDevice(), streams)
    sent: dict[str, list[float]] = {}
    same = True
    for option, spec in (
        (OPTIONS[0], "dgc:ratio=0.001,warmup_epochs=1,momentum=0.5,clip_norm=1"),
        (LEAVES[0], "powersgd:rank=1,start_iter=2"),
    ):
        ddp = wrap(mlp(40, 60, 20))
        with registered(ddp, option, spec, timeout_s=60.0) as state:
            for step in range(4):
                if step % 2 == 0:
                    state.set_epoch(step // 2)
                ddp.zero_grad()
                ddp(batch(rank, step, 40)).square().mean().backward()
                sgd(ddp)
                same &= agreed(ddp)
                sent.setdefault(option, []).append(state.metrics()["espresso/bytes_sent"])
            same &= state.metrics()["espresso/skipped_steps"] == 0
            same &= state.metrics()["espresso/residual_norm"] > 0
    return sent[OPTIONS[0]], sent[LEAVES[0]], bool(same)


@needs_compiler
def test_schedules_run_on_a_device() -> None:
    build_for("emulated")
    for dgc, powersgd, same in (o.value for o in run_ranks(run_scheduled, 2, deadline_s=150)):
        assert same
        for sent in (dgc, powersgd):  # buckets are rebuilt once: headers differ
            assert min(sent[:2]) > 2 * max(sent[2:])
