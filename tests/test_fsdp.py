"""HSDP: fully_shard inside a host, espresso between hosts; four ranks, two hosts, in one process start."""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

import espresso
import espresso.fsdp
from benchmarks.guard import lying, zeroed
from espresso.comm.execute.assignment import Record
from espresso.fsdp import private
from espresso.fsdp.layout import sum_and_divide
from espresso.live import online_search
from espresso.live.candidates import Candidate
from espresso.live.change import Cause, Change, Finding
from espresso.live.guard import Guard
from espresso.live.planner import AutoPlanner
from espresso.live.state import EspressoState
from espresso.live.watch import Vitals, Watch
from espresso.model.job import Job, Profile
from espresso.optim import CompressedAdam, scale_residuals
from espresso.strategies import PLAIN, Cluster, Strategy, TensorSpec, plan
from tests.ddp import ALLGATHER, Played, Said, batch, mlp
from tests.fsdp import (
    KINDS,
    Narrow,
    Rows,
    Tiny,
    accumulated_reduced,
    accumulated_unreduced,
    digest,
    everybody,
    held_back,
    loss_of,
    mesh,
    plain,
    registered,
    replicas_agree,
    residual_of,
    shard,
    tiny,
    train,
    uniform,
)
from tests.workers import run_ranks

# -- scenarios -------------------------------------------------------------------------------------


def exact(rank: int) -> dict[str, bool]:
    """Whether ``none`` gives native HSDP's parameters after every step, bit for bit; with other flags, too."""
    bf16, same = torch.bfloat16, {}
    half = {"mp_policy": MixedPrecisionPolicy(bf16, bf16), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    narrow = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=bf16), "reshard_after_forward": False, "again": True}
    wide = {"mp_policy": MixedPrecisionPolicy(bf16, torch.float32), "ignored": ("shift",)}
    for name, settings in {"float32": {}, "half": half, "narrow": narrow, "wide": wide}.items():
        kinds = KINDS if name == "float32" else [plain, accumulated_unreduced, accumulated_reduced, held_back]
        native = train(shard(tiny(), native=True, **settings), rank, kinds)
        model = shard(tiny(), **settings)
        with registered(model, "none", uniform()).errors():
            same[name] = train(model, rank, kinds) == native
    return same


def signs(rank: int) -> dict[str, Any]:
    """Every kind of step with one bit a number; replicas are compared after each."""
    model = shard(tiny())
    state = registered(model)
    train(model, rank)
    figures, text = state.metrics(), state.summary()
    last = state.session.observer.last
    assert last is not None
    overlaps = False
    for _ in range(10):  # in one of them at least, whoever else has the core
        train(model, rank, [plain])
        latest = state.session.observer.last
        assert latest is not None
        overlaps |= min(interval.start_ns for interval in latest.intervals) < latest.ready_ns[-1]
    state.close()
    return {
        "metrics": figures,
        "summary": text,
        "slots": [[slot.tensor for slot in bucket.slots] for bucket in last.buckets],
        "overlaps": overlaps,
    }


def conserved(rank: int) -> dict[str, Any]:
    """What was sent and what is kept is what came in; padding is in no mean; infs on one shard alone change nothing."""
    model = shard(Rows())
    state = registered(model)
    came, sent = torch.zeros(5, 4), torch.zeros(5, 4)
    replica, found = rank // 2, {}
    for step in range(6):
        rows = (
            torch.full((5, 4), 2.0) if step == 0 else torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        )
        rows = rows * (1 + replica)
        model.zero_grad()
        if step == 3:  # an overflow, in the last rows, which the second shard holds
            before = residual_of(state, "weight")
            rows[4, 0] = float("inf")
            model(rows).backward()
            assert not model.weight.grad.full_tensor().isfinite().all()
            found["kept"] = torch.equal(before, residual_of(state, "weight"))
            continue
        model(rows).backward()
        gradient = model.weight.grad.full_tensor()
        if step == 0:
            found["first"] = gradient.unique().tolist()
        came, sent = came + rows / (1 + replica) * 1.5, sent + gradient
    kept, start = torch.zeros(20), 12 * (rank % 2)
    mine = residual_of(state, "weight")
    kept[start : start + mine.numel()] = mine
    kept = torch.stack(everybody(kept)).sum(0).view(5, 4) / 2
    found["error"] = float((came - sent - kept).abs().max())
    found["skipped"] = state.metrics()["espresso/skipped_steps"]
    state.close()
    return found


def begins_late(rank: int) -> tuple[bool, bool]:
    """A compressor that was given, and begins in the third step; in the fourth the rows of the second shard overflow.
    Whether something was kept by then, and is the same afterwards.
    """
    model = shard(Rows())
    option = "comp > flat.allreduce > transform > flat.allreduce > dec"
    spec = "powersgd:rank=1,start_iter=2,raw_below=1,min_saving=1"
    before = torch.zeros(0)
    with registered(model, strategy=uniform(option, spec)) as state:
        for step in range(6):
            rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            if step == 3:
                before = residual_of(state, "weight")
                rows[4, 0] = float("inf")
            model.zero_grad()
            model(rows).backward()
            if step == 3:
                kept = torch.equal(before, residual_of(state, "weight"))
    return bool(before.any()), kept


def resumed(rank: int) -> list[bool]:
    """From a checkpoint on as without it, with velocities; another shard's state is refused."""
    digests, saved = [], {}
    for part in range(3):  # whole, first half, second half
        model = shard(tiny())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = registered(model, strategy=uniform(ALLGATHER, "efsignsgd:raw_below=1,momentum=0.75"))
        if part == 2:
            model.load_state_dict(saved["model"])
            state.load_state_dict(saved["espresso"])
        for step in range(3 if part == 2 else 0, 3 if part == 1 else 6):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = {"model": copy.deepcopy(model.state_dict()), "espresso": copy.deepcopy(state.state_dict())}
        digests.append(digest(model))
        if part == 1:
            theirs = everybody(saved["espresso"])
            with pytest.raises(espresso.CheckpointError, match="is of rank"):
                state.load_state_dict(theirs[rank ^ 1])
        state.close()
    return [digests[0] == digests[2], digests[0] != digests[1]]


def flushed_after_a_load(rank: int) -> list[int]:
    """One shard has nothing of the last layer, which owes something in the other's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh()["shard"])
    sum_and_divide(model)
    state = registered(model, strategy=uniform(ALLGATHER, "topk:ratio=0.1,raw_below=1"))

    def step(number: int) -> None:
        model.zero_grad()
        model(
            torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + rank))
        ).square().mean().backward()

    for number in range(3):
        step(number)
    saved = everybody(state.gather_state_dict())[0]
    state.flush()
    state.load_state_dict(saved)
    assert not state.session.flushes, "a flush of before the load is over"
    state.flush()
    took = 0
    for number in range(3, 9):
        took += state.session.flushes
        step(number)
    held = len(state.session.model.tensors)
    state.close()
    return [took, held]


def owed_to_a_raw_job(rank: int) -> tuple[bool, bool]:
    """A raw job is given what it owes; the first step has an inf in the rows of the second shard. Whether the first
    keeps what it owes then, and has sent it after a step that counts.
    """
    model = shard(Rows())
    state = registered(model)
    model(torch.randn(5, 4, generator=torch.Generator().manual_seed(rank // 2))).backward()
    saved = state.state_dict()
    state.close()
    model = shard(Rows())
    state = registered(model, "none", uniform())
    state.load_state_dict(saved)
    kept = []
    for number in (float("inf"), 1.0):
        rows = torch.ones(5, 4)
        rows[4, 0] = number
        model.zero_grad()
        model(rows).backward()
        kept.append(bool(state.session.store.carry))
    state.close()
    return kept[0], kept[1]


def narrow(rank: int) -> dict[str, Any]:
    """However a strategy is given: what every rank's checkpoint says, and whether a job goes on from its own ranks'."""
    found: dict[str, Any] = {}

    def by_size(tensors: Sequence[TensorSpec], cluster: Cluster) -> Strategy:  # of all of a tensor, not of a shard
        strategy = uniform(ALLGATHER, "efsignsgd:raw_below=1")(tensors, cluster)
        return strategy.with_choices({tensor.name: PLAIN for tensor in tensors if tensor.numel < 10})

    wholes = tuple(TensorSpec(name, tuple(p.shape)) for name, p in Narrow().named_parameters())
    for way, given in {"whole": by_size(wholes, Cluster(2, 1)), "function": by_size, "used": uniform()}.items():
        saved, averages = [], []
        for resumed in (False, True):
            model = shard(Narrow())
            state = registered(model, strategy=given)
            if way == "used":
                state.use(uniform(ALLGATHER, "topk:ratio=0.1,raw_below=1")(state.session.model.tensors, Cluster(2, 1)))
            if resumed:
                state.load_state_dict(saved[0])
            for step in range(2 if resumed else 0, 4):
                if step == 2 and not resumed:
                    saved = [copy.deepcopy(state.state_dict()), state.gather_state_dict()]
                model.zero_grad()
                model(torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
            averages.append([parameter.grad.to_local().tolist() for parameter in model.parameters()])
            held = sorted(tensor.name for tensor in state.session.model.tensors)
            state.close()
        said = {text for texts in everybody([each["strategy"] for each in saved]) for text in texts}
        choices = [Strategy.from_json(json.loads(text)).choices for text in said]
        compressed = [sorted(name for name, choice in each.items() if choice != PLAIN) for each in choices]
        found[way] = {"compressed": compressed, "resumed": averages[0] == averages[1]}
    return found | {"held": held}


def used_apart(rank: int) -> tuple[list[str], bool]:
    """What one shard's ranks are given is refused, or is another choice than the other shard's; then all is well."""
    model = shard(Rows())
    state = registered(model, strategy=uniform())
    tensors, first = state.session.model.tensors, rank % 2 == 0
    signs, few = (uniform(ALLGATHER, f"{name},raw_below=1")(tensors, Cluster(2, 1)) for name in
                  ("efsignsgd:block=64", "topk:ratio=0.1"))  # fmt: skip
    said = []
    for given in (signs if first else "signs", signs if first else few, few):
        try:
            state.use(given)  # type: ignore[arg-type]
            said.append("taken")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    model(torch.ones(5, 4)).backward()
    agree = replicas_agree(model)
    state.close()
    return said, agree


def owed(state: EspressoState) -> dict[str, torch.Tensor]:
    """The part of the average that was not sent yet, of whole tensors; on every rank."""
    shards, groups = state.session.model.shards, state.session.groups
    assert shards is not None
    total = {tensor.name: torch.zeros(tensor.numel, dtype=torch.float64) for tensor in shards.wholes}
    kept = state.session.store.lend()
    for mine in everybody([(e.tensor, shards.starts[e.tensor] + e.start, torch.from_numpy(e.read())) for e in kept]):
        for name, at, values in mine:
            total[name][at : at + values.numel()] += values / groups.num_ranks
    return total


def distributed_checkpoint(rank: int) -> dict[str, Any]:
    """Saved by 2 replicas of 2 shards; loaded by as many, by 4 replicas of 1, by 1 replica of 4."""
    (folder, *_) = everybody(tempfile.mkdtemp())
    model = shard(tiny())
    state = registered(model)
    for step in range(3):
        loss_of(model, rank, step).backward()
        model.zero_grad()
    dcp.save({"espresso": state}, checkpoint_id=folder)
    whole = state.gather_state_dict()
    there, digests, found = owed(state), [], {"owed": max(float(values.abs().max()) for values in owed(state).values())}
    for shards in (2, 2, 4, 1):
        if shards != 2 or digests:
            model = shard(tiny(), shards)
            state = registered(model, shards=shards)
            dcp.load({"espresso": state}, checkpoint_id=folder)
            here = owed(state)
            found[f"{4 // shards}x{shards}"] = max(float((here[name] - there[name]).abs().max()) for name in there)
        if shards == 2:
            loss_of(model, rank, 3).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.0 if parameter.grad is None else 0.1 * parameter.grad
            digests.append((digest(model), state.session.executor.next_step))
        if shards == 4:  # one rank cannot read its part of it
            spoilt = dict(whole)
            if rank == 3:
                spoilt["parts"] = {number: torch.zeros(5, dtype=torch.uint8) for number in whole["parts"]}
            began = time.monotonic()
            with pytest.raises(espresso.CheckpointError, match=r"malformed|part \d+|cannot load"):
                state.load_state_dict(spoilt)
            found["refused"] = time.monotonic() - began < 5.0
        state.close()
    return found | {"same": digests[0] == digests[1]}


class Tasks(nn.Module):
    """Two tasks, each with a scale of one number, which the first shard holds; a step trains one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])

    def forward(self, inputs: torch.Tensor, task: int) -> torch.Tensor:
        return self.body(inputs) * self.scales[task]


class Twice(nn.Module):
    """A module of two tasks that is called for each: backward reduces it twice, while the model itself is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tasks = nn.Linear(16, 16), Tasks()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(inputs)
        for task in range(2):
            hidden = self.tasks(hidden, task)
        return hidden


def twice(*, native: bool = False) -> Any:
    torch.manual_seed(0)
    model = Twice()
    fully_shard(model.tasks, mesh=mesh() if native else mesh()["shard"])
    return shard(model, native=native)


def parts_of_a_batch(rank: int) -> list[Any]:
    """A module whose two calls in a pass train different parameters is reduced twice: as natively, and replicas stay
    equal. Exchanges there were.
    """
    digests, exchanges = [], []
    for compressor in ("native", "none", "efsignsgd"):
        native = compressor == "native"
        model = twice(native=native)
        state = None if native else registered(model, compressor, uniform() if compressor == "none" else None)
        for step in range(2):
            inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            model(inputs).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.001 * parameter.grad
                    parameter.grad = None
            assert replicas_agree(model)
        digests.append(digest(model))
        if state is not None:
            exchanges.append(state.metrics()["espresso/steps"])
            state.close()
    return [digests[0] == digests[1], digests[1] != digests[2], exchanges]


def evaluated(rank: int) -> dict[str, Any]:
    """A forward pass alone leaves the model's own parameters whole: before and between registrations, and before a
    comparison of the replicas.
    """
    found: dict[str, Any] = {"warned": [], "buckets": []}
    model = shard(tiny())
    shards = dict(model.named_parameters())

    def evaluate() -> None:
        with torch.no_grad():
            loss_of(model, rank, 0)
        assert not isinstance(model.head.weight, DTensor)

    for _ in range(2):
        evaluate()
        with Said() as said:
            state = registered(model)
        found["warned"] += said.warnings
        train(model, rank, [plain])
        last = state.session.observer.last
        assert last is not None
        found["buckets"].append(sum(len(bucket.slots) for bucket in last.buckets))
        evaluate()
        state.check_replicas()
        if not found.get("apart"):
            with torch.no_grad():
                shards["head.weight"].to_local().add_(float(rank // 2))
            with pytest.raises(espresso.DisagreementError) as caught:
                state.check_replicas()
            found["apart"] = str(caught.value)
            with torch.no_grad():
                shards["head.weight"].to_local().fill_(0.0)
        state.close()
    return found


def compared_while_whole(rank: int) -> list[float]:
    """Replicas are compared in every step, also where modules are whole then: between two calls of one in a pass, and
    where they stay whole after backward. Exchanges there were.
    """
    exchanges = []
    for resharded in (True, False):
        model = twice()
        model.set_reshard_after_backward(resharded)
        with registered(model, check_every=1) as state:
            for step in range(2):
                inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
                model(inputs).square().sum().backward()
            state.check_replicas()
            exchanges.append(state.metrics()["espresso/steps"])
    return exchanges


def roots_beside_each_other(rank: int) -> list[Any]:
    """Modules that were sharded, and what holds them was not: one exchange for all, as natively; two where the last
    comes twice.
    """
    found = []
    for calls in (1, 2):
        digests, exchanges = [], 0.0
        for native in (True, False):
            torch.manual_seed(0)
            model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), Tasks()])
            for module in model:
                fully_shard(module, mesh=mesh() if native else mesh()["shard"])
            sum_and_divide(model)
            state = None if native else registered(model, "none", uniform())
            for step in range(3):
                hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
                for layer in (model[0], model[1], *(partial(model[2], task=task) for task in range(calls))):
                    hidden = layer(hidden)
                hidden.square().sum().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter -= 0.001 * parameter.grad
                            parameter.grad = None
            digests.append(digest(model))
            if state is not None:
                exchanges = state.metrics()["espresso/steps"]
                state.close()
        found.append((digests[0] == digests[1], exchanges))
    return found


def unfrozen(rank: int) -> dict[str, Any]:
    """A parameter trains from the second step on: what is said, and whether a new state takes it."""
    model = shard(tiny())
    state = registered(model)
    train(model, rank, [plain])
    model.shift.requires_grad_()
    with pytest.raises(espresso.EspressoError) as caught:
        loss_of(model, rank, 1).backward()
    found: dict[str, Any] = {"said": str(caught.value)}
    began = time.monotonic()
    state.close()
    found["closed"] = time.monotonic() - began < 5.0
    model.zero_grad()
    with registered(model) as again:
        train(model, rank, [plain] * 2)
        found["steps"] = again.metrics()["espresso/steps"]
        found["taken"] = "shift" in {tensor.name for tensor in again.session.model.wholes}
    return found


def scaled(rank: int) -> list[Any]:
    """A loss scale with an overflow on one rank: every rank skips that step, as natively."""
    found = []
    for compressor in ("native", "none", "efsignsgd"):
        model = shard(tiny(), native=compressor == "native")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        given = {"strategy": uniform()} if compressor == "none" else {}
        state = None if compressor == "native" else registered(model, compressor, grad_scaler=scaler, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = loss_of(model, rank, step) * (float("inf") if (rank, step) == (3, 1) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((digest(model), scaler.get_scale(), replicas_agree(model)))
        if state is not None:
            assert state.metrics()["espresso/skipped_steps"] == 1
            state.close()
    return found


def several_groups(rank: int) -> bool:
    """A module whose parameters FSDP reduces in two groups, and a strategy that was made for whole tensors."""
    digests = []
    for native in (True, False):
        model = tiny()
        other = DeviceMesh.from_group(mesh()["shard"].get_group(), "cpu")
        info = FSDPMeshInfo(other, shard_mesh_dim=0)
        apart = {id(parameter) for name, parameter in model.named_parameters() if name.endswith("norm.weight")}

        def place(parameter: nn.Parameter, apart: set[int] = apart, info: Any = info) -> Any:
            return ShardPlacementResult(Shard(0), info) if id(parameter) in apart else None

        tensors = [TensorSpec(n, tuple(p.shape)) for n, p in model.named_parameters()]
        shard(model, shard_placement_fn=None if native else place, native=native)
        state = None if native else registered(model, "none", uniform()(tensors, Cluster(2, 1)))
        digests.append(train(model, rank, [plain] * 2))
        if state is not None:
            assert len(state.session.observer.last.buckets) == 5  # type: ignore[union-attr]
            state.close()
    return digests[0] == digests[1]


def switched_off(rank: int) -> list[Any]:
    """``ESPRESSO_DISABLE=1``: native HSDP, whose checkpoints a job goes on from that has espresso on."""
    native = train(shard(tiny(), native=True), rank, [plain] * 2)
    os.environ["ESPRESSO_DISABLE"] = "1"
    model = shard(tiny())
    state = registered(model)
    del os.environ["ESPRESSO_DISABLE"]
    found = [train(model, rank, [plain] * 2) == native, state.summary()]
    with registered(shard(tiny())) as on:
        return [*found, [on.load_state_dict(saved) for saved in (state.state_dict(), state.gather_state_dict())]]


def off_on_one_rank(rank: int) -> tuple[str, float]:
    """``ESPRESSO_DISABLE=1`` on rank 0; rank 3 shares no group with it. Afterwards all register."""
    told, took_s = "", 0.0
    for off in (rank == 0, False):
        os.environ["ESPRESSO_DISABLE"] = str(int(off))
        began = time.monotonic()
        try:
            registered(shard(tiny())).close()
        except espresso.DisagreementError as error:
            told, took_s = str(error), time.monotonic() - began
    del os.environ["ESPRESSO_DISABLE"]
    return told, took_s


def left_alone(rank: int) -> tuple[list[str], list[bool]]:
    """A parameter that trains and that FSDP does not reduce: what is warned of; whether averages are the same on both
    replicas, of what FSDP reduces and of that parameter.
    """
    model = shard(tiny(), ignored=("gain",))
    with Said() as said:
        state = registered(model)
    loss_of(model, rank, 0).backward()
    state.check_replicas()
    state.close()
    head, gain = everybody((model.head.weight.grad.to_local().sum().item(), model.gain.grad.sum().item()))[rank ^ 2]
    return said.warnings, [head == model.head.weight.grad.to_local().sum().item(), gain == model.gain.grad.sum().item()]


def moments(rank: int) -> list[list[float]]:
    """Of steps that were recorded: when the last gradient was there, all averages were, and the script had them."""
    model = shard(tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with closing(registered(model)) as state:
        for step in range(6):
            loss_of(model, rank, step).backward()
            optimizer.step()
        steps = state.session.recorder.flight().steps
        return [[max(each.ready_us), each.done_us, each.script.averaged_us] for each in steps]


def broken(rank: int) -> dict[str, Any]:
    """The network between two replicas of one shard breaks: every rank hears of it, long before a time-out."""
    model = shard(tiny())
    state = registered(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, rank, 0).backward()
    if rank == 2:
        state.session.groups.break_off()
    start, found = time.monotonic(), {}
    try:
        loss_of(model, rank, 1).backward()
    except espresso.EspressoError as error:
        found["backward"] = str(error)
    found["seconds"] = time.monotonic() - start
    try:
        optimizer.step()
    except espresso.EspressoError as error:
        found["step"] = str(error)
    state.close()
    return found


def reentrant(rank: int) -> str:
    """The words where one of two blocks runs a backward pass of its own in that of the model."""
    model = shard(tiny())
    model.blocks[0] = checkpoint_wrapper(model.blocks[0], CheckpointImpl.REENTRANT)
    state = registered(model)
    try:
        loss_of(model, rank, 0).backward()
    except espresso.EspressoError as error:
        return str(error)
    finally:
        state.close()
    return "accepted"


def begins_alike(rank: int) -> list[bool]:
    """Whether every rank begins with rank 0's parameters and buffers, where each drew its own."""

    def drawn(seed: int) -> nn.Module:
        model = tiny(seed)
        model.register_buffer("positions", torch.randn(7))
        model.register_buffer("strided", torch.randn(4, 8)[:, ::2])
        model.register_buffer("expanded", torch.randn(3, 1).expand(3, 5))
        return model

    model, first = drawn(rank), drawn(0)
    state = espresso.fsdp.hybrid_shard(model, shards=2, strategy=uniform(), timeout_s=15.0, offload_threads=1)
    assert state.session.recorder.facts["sharded"] is True
    state.close()
    theirs = [parameter.full_tensor() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    pairs = [*zip(theirs, first.parameters(), strict=True), *zip(model.buffers(), first.buffers(), strict=True)]
    return [torch.equal(mine, its) for mine, its in pairs]


def turns_of_tasks(rank: int) -> tuple[bool, bool]:
    """The first shard's buckets change from step to step, and the second's look alike."""
    torch.manual_seed(0)
    model = shard(Tasks())
    short = {"warmup_steps": 3, "profile_steps": 3, "race_steps": 3, "race_rounds": 1, "decide_by": 0}
    with registered(model, "efsignsgd", "auto", **short) as state:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(60):
            optimizer.zero_grad()
            model(
                torch.randn(4, 16, generator=torch.Generator().manual_seed(4 * step + rank)), step % 2
            ).sum().backward()
            optimizer.step()
        state.flush()
        for step in range(4):
            model(torch.ones(4, 16), step % 2).sum().backward()
        return state.decided, replicas_agree(model)


@contextmanager
def signs_found(rank: int) -> Iterator[None]:
    """Only the first shard's search finds something, however small the model is."""
    search = online_search.find_candidates

    def find(job: Job, *more: Any) -> tuple[list[Candidate], Any]:
        _, result = search(job, *more)
        strategy = uniform(ALLGATHER, "efsignsgd:raw_below=1")(job.tensors, job.cluster)
        buckets = job.buckets or ()
        return [Candidate("signs", strategy, plan(strategy, buckets).order, buckets, 1.0)][rank % 2 :], result

    with patch.object(online_search, "find_candidates", find):
        yield


@contextmanager
def told_of_a_change() -> Iterator[list[int]]:
    """The third window tells of a slower link; of how many ranks each told."""
    test, seen = Watch.test, list[int]()

    def changed(self: Watch, iteration: int, rows: tuple[Vitals, ...]) -> Change | None:
        test(self, iteration, rows)
        seen.append(len(rows))
        slower = Change((Finding(Cause.LINK, 3.0),), iteration - 8, (1e4, 3e4))
        return slower if len(seen) == 3 else None

    with patch.object(Watch, "test", changed):
        yield seen


def automatic(rank: int) -> dict[str, Any]:
    """Measured, searched, raced."""
    torch.manual_seed(rank)  # the helper sends rank 0's weights to the others
    model = Tiny()
    short = {"warmup_steps": 3, "profile_steps": 2, "race_steps": 3, "race_rounds": 1, "decide_by": 0}
    state = espresso.fsdp.hybrid_shard(
        model, blocks=model.blocks, shards=2, compressor="efsignsgd", timeout_s=60.0, offload_threads=1, **short
    )
    before, sent = state.decided, set()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with signs_found(rank):
        for step in range(40):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            sent.add(state.metrics()["espresso/bytes_sent"])
            if state.decided:
                break
    agree, verdict = replicas_agree(model), state.verdict
    decider = state.session.decider
    assert isinstance(decider, AutoPlanner)
    (raced,) = decider._candidates
    decider.resume(raced.strategy, state.session.follower.in_force)  # whatever was faster
    said = {text for saved in (state.state_dict(), state.gather_state_dict()) for text in everybody(saved["strategy"])}
    state.load_state_dict(everybody(state.gather_state_dict())[1])  # as the second shard says it
    assert state.strategy is not None
    assert state.strategy.choices == raced.strategy.choices
    found = {"before": before, "after": state.decided, "verdict": verdict, "advice": state.advice, "agree": agree}
    found |= {"said": said, "held": len(state.session.model.tensors)}
    state.close()
    return found | {"sent": sorted(sent)}


def shards_of_nothing(rank: int) -> list[dict[str, Any]]:
    """The second shard has nothing of the layer whose gradient comes first, or of the whole model."""
    found = []
    for widths in ((64, 64, 1), (64, 1)):
        model = mlp(*widths)
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        short = {"warmup_steps": 3, "profile_steps": 2, "race_steps": 3, "race_rounds": 1, "decide_by": 0}
        state = espresso.fsdp.hybrid_shard(
            model, layers, shards=2, compressor="efsignsgd", timeout_s=15.0, offload_threads=1, adapt=True, **short
        )
        with signs_found(rank), told_of_a_change():
            for step in range(200):
                model(batch(rank, step, 64)).square().mean().backward()
                model.zero_grad()
                if len(state.history) >= 3:
                    break
        assert replicas_agree(model)
        assert state.session.search is not None
        job = state.session.search.job
        held = None if job is None else [len(bucket.slots) for bucket in job.laid_out]
        history = [(row["step"], row["event"], row["strategy"]) for row in state.history]
        found.append({"held": held, "history": history, "verdict": state.verdict})
        state.close()
    return found


def as_many_steps(rank: int) -> tuple[int, int, float]:
    """Steps that were profiled, where those of the second shard are far apart."""
    profile_of = online_search.profile_of

    def profile(per_rank: Any) -> Profile:
        return replace(profile_of(per_rank), spread=0.5 * (rank % 2))

    online_search.profile_of = profile
    torch.manual_seed(rank)
    model = Tiny()
    short = {"warmup_steps": 3, "profile_steps": 2, "race_steps": 3, "race_rounds": 1, "decide_by": 40}
    state = espresso.fsdp.hybrid_shard(
        model, blocks=model.blocks, shards=2, compressor="efsignsgd", timeout_s=60.0, offload_threads=1,
        compile_beside=False, **short,
    )  # fmt: skip
    for step in range(20):
        loss_of(model, rank, step).backward()
        model.zero_grad()
        assert state.session.search is not None
        job = state.session.search.job
        if job is not None:
            break
    online_search.profile_of = profile_of
    state.close()
    assert job is not None
    assert job.profile is not None
    return step, job.profile.num_steps, job.profile.spread


def decides_again(rank: int) -> list[tuple[int, str, str]]:
    """What is told of a change is the same in all shards, and so is what they do about it."""
    torch.manual_seed(rank)
    model = Tiny()
    short = {"warmup_steps": 3, "profile_steps": 2, "race_steps": 3, "race_rounds": 1, "decide_by": 0}
    state = espresso.fsdp.hybrid_shard(
        model, blocks=model.blocks, shards=2, compressor="efsignsgd", timeout_s=60.0, offload_threads=1, adapt=True,
        **short,
    )  # fmt: skip
    with told_of_a_change() as seen:
        for step in range(200):  # a race takes as long as it needs to tell its arms apart
            loss_of(model, rank, step).backward()
            model.zero_grad()
            if len(state.history) >= 3:
                break
    assert set(seen) == {4}
    assert replicas_agree(model)
    history = [(row["step"], row["event"], row["strategy"]) for row in state.history]
    state.close()
    return history


def backs_off(rank: int) -> list[tuple[int, str, str, set[str]]]:
    """One rank's encoder lies about a tensor of which another shard has nothing: all shards leave it exact.

    In one shard a rank lacks what the guard looks at of another tensor, which says nothing then: shards keep in step.
    """
    model = shard(Narrow())
    state = registered(model, adapt=True)
    end = Guard.end

    def lacking(guard: Guard, record: Record) -> bool:
        if rank == 3 and guard._check is not None:
            del guard._check.buffers["other"]
        return end(guard, record)

    lies = lying(zeroed("row") if rank == 0 else lambda _, values: values)
    with lies, patch.object(Guard, "end", lacking):
        for step in range(100):
            rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            model(rows).backward()
            model.zero_grad()
            if state.history[-1]["event"] == "backed_off":
                break
    assert state.strategy is not None
    exact = {name for name, choice in state.strategy.known.items() if choice == PLAIN}
    told = [(row["step"], row["event"], row["reason"], exact) for row in state.history if row["event"] != "changed"]
    assert state.session.guard is not None
    assert ("other" in state.session.guard.figures) is (rank % 2 == 0)
    state.close()
    return told


def without_shards(rank: int) -> dict[str, Any]:
    """What ``shards`` is where it is left away: as a launcher says, on unlike hosts, and where no launcher says it."""

    def laid() -> Any:
        try:
            return espresso.fsdp.hybrid_mesh("cpu").shape
        except espresso.EspressoError as error:
            return f"{type(error).__name__}: {error}"

    found, said = {"said": laid()}, dict(os.environ)
    try:
        os.environ.update({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"} if rank == 3 else {})
        found["unlike"] = laid()
        del os.environ["LOCAL_WORLD_SIZE"]
        found["unknown"] = laid()
    finally:
        os.environ.update(said)
    return found


def refused(rank: int) -> dict[str, str]:
    """The words of every refusal."""
    from torch.distributed._composable.replicate import replicate as by_ddp
    from torch.distributed._composable.replicate_with_fsdp import replicate as by_fsdp

    def words(act: Callable[[], Any]) -> str:
        try:
            act().close()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    once = shard(Rows())
    state = registered(once)
    eager = shard(Rows())
    eager.weight.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[union-attr]
    apart = Rows()
    with torch.no_grad():
        apart.weight.fill_(rank // 2)
    found = {
        "nothing": words(lambda: registered(Rows())),
        "native": words(lambda: registered(shard(Rows(), native=True))),
        "replicate_ddp": words(lambda: registered(by_ddp(Rows()))),
        "replicate_fsdp": words(lambda: registered(by_fsdp(Rows(), mesh=mesh()["replicate"]))),
        "ddp": words(lambda: registered(nn.parallel.DistributedDataParallel(Rows()))),
        "twice": words(lambda: registered(once)),
        "eager": words(lambda: registered(eager)),
        "group": words(lambda: espresso.fsdp.register(shard(Rows()), mesh()["shard"])),
        "mesh": words(lambda: espresso.fsdp.register(shard(Rows()), mesh())),
        "apart": words(lambda: registered(shard(apart))),
        "hybrid_again": words(lambda: espresso.fsdp.hybrid_shard(once)),
        "scaled": words(lambda: scale_residuals(state, torch.optim.SGD(once.parameters(), 0.1))),
        "adam": words(lambda: CompressedAdam(once, warmup_steps=3, exchange=state)),
    }
    given: dict[str, dict[str, Any]] = {
        "shards_3": {"shards": 3},
        "shards_text": {"shards": "2"},
        "blocks": {"blocks": [nn.Linear(2, 2)]},
        "no_blocks": {"blocks": None},
        "policy": {"mp_policy": torch.bfloat16},
    }
    for name, arguments in given.items():
        found[name] = words(lambda arguments=arguments: espresso.fsdp.hybrid_shard(Rows(), **arguments))  # type: ignore[misc]
    found["model"] = words(lambda: espresso.fsdp.hybrid_shard("Rows"))  # type: ignore[arg-type]
    state.close()
    try:
        once(torch.ones(5, 4)).backward()
    except espresso.EspressoError as error:
        found["closed"] = str(error)
    more = shard(Rows())
    registered(more).close()
    for number, off in enumerate(("0", "1", "0")):
        os.environ["ESPRESSO_DISABLE"] = off
        more.zero_grad()
        again = registered(more, "none")
        more(torch.full((5, 4), float(rank))).backward()
        mine = more.weight.grad.to_local()
        theirs = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(theirs, mine, group=mesh()["replicate"].get_group())
        found[f"again {number}"] = str(bool(mine.any()) and torch.equal(*theirs))
        again.close()
    found["hooks"] = str(len(more.weight._post_accumulate_grad_hooks or ()))
    with pytest.raises(TypeError, match="eror_budget"):
        registered(more, eror_budget=2.0)
    with pytest.raises(espresso.EspressoError, match="is closed"):  # a refusal leaves what says so
        more(torch.ones(5, 4)).backward()
    return found


SCENARIOS = (
    several_groups,
    switched_off,
    off_on_one_rank,
    left_alone,
    moments,
    scaled,
    broken,
    reentrant,
    exact,
    signs,
    conserved,
    begins_late,
    resumed,
    flushed_after_a_load,
    owed_to_a_raw_job,
    narrow,
    used_apart,
    distributed_checkpoint,
    parts_of_a_batch,
    evaluated,
    compared_while_whole,
    roots_beside_each_other,
    unfrozen,
    begins_alike,
    turns_of_tasks,
    automatic,
    shards_of_nothing,
    as_many_steps,
    decides_again,
    backs_off,
    without_shards,
    refused,
)


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(__name__, SCENARIOS, 4, ranks_per_node=2, deadline_s=220.0)


@pytest.mark.slow
def test_none_is_native_hsdp_bit_for_bit(played: Played) -> None:
    for same in played(exact):
        assert same == {"float32": True, "half": True, "narrow": True, "wide": True}


def test_several_groups_of_a_module(played: Played) -> None:
    assert played(several_groups) == [True] * 4


def test_switched_off_it_is_native_hsdp(played: Played) -> None:
    for same, summary, dropped in played(switched_off):
        assert same
        assert summary.startswith("off: ESPRESSO_DISABLE=1")
        assert dropped == [(), ()]


def test_a_rank_that_is_off_is_named_at_once_on_all_others(played: Played) -> None:
    for rank, (told, seconds) in enumerate(played(off_on_one_rank)):
        why = f"espresso is off on rank 0 (ESPRESSO_DISABLE) and not on rank {rank}: set it on all ranks or on none"
        assert told == (why if rank else "")
        assert seconds < 10


def test_the_script_has_its_averages_when_they_are_there(played: Played) -> None:
    for steps in played(moments):
        assert len(steps) > 2
        assert steps == [sorted(each) for each in steps]


def test_a_parameter_that_fully_shard_leaves_alone_is_warned_of(played: Played) -> None:
    for said, same in played(left_alone):
        assert said == [
            "fully_shard has left these parameters alone, so nobody averages their gradients: ['gain']",
        ]
        assert same == [True, False]


def test_an_overflow_in_one_shard_skips_the_step_on_every_rank(played: Played) -> None:
    for native, none, compressed in played(scaled):
        assert native == none
        assert native[1:] == compressed[1:] == (512.0, True)


def test_a_failure_reaches_every_rank(played: Played) -> None:
    for rank, found in enumerate(played(broken)):
        assert re.match(rf"espresso on rank {rank} failed in iteration 1", found["backward"]), found
        assert "DDP" not in found["backward"]
        assert found["step"] == found["backward"]
        assert found["seconds"] < 12


def test_reentrant_checkpointing_of_some_blocks_is_named(played: Played) -> None:
    assert all("checkpoint activations with use_reentrant=False" in told for told in played(reentrant))


def test_compressed_steps_of_every_kind_keep_replicas_equal(played: Played) -> None:
    for found in played(signs):
        figures = found["metrics"]
        assert 0 < figures["espresso/bytes_sent"] < figures["espresso/bytes_raw"] / 6
        assert figures["espresso/residual_norm"] > 0
        assert figures["espresso/skipped_steps"] == 0
        assert figures["espresso/steps"] == len(KINDS) + 1  # one is of two exchanges
        assert "efsignsgd" in found["summary"]
        assert found["overlaps"], "the first exchange begins while backward goes on"
        # Backward goes from the last block to the first; the rest is the model's own.
        blocks = [{name.rsplit(".", 2)[0] for name in names} for names in found["slots"]]
        assert blocks[:2] == [{"blocks.1"}, {"blocks.0"}]
        assert [name for name in found["slots"][2] if name != "gain"] == [
            "embedding.weight",
            "head.weight",
            "head.bias",
        ]


def test_nothing_is_lost_and_padding_is_in_no_mean(played: Played) -> None:
    for found in played(conserved):
        assert found["first"] == [3.0]
        assert found["error"] < 1e-5
        assert found["kept"]
        assert found["skipped"] == 1


def test_an_overflow_in_one_shard_keeps_what_a_compressor_that_begins_late_owes(played: Played) -> None:
    assert played(begins_late) == [(True, True)] * 4


def test_resumes_as_if_uninterrupted(played: Played) -> None:
    assert played(resumed) == [[True, True]] * 4


def test_a_flush_after_a_load_ends_in_all_shards_at_once(played: Played) -> None:
    took, held = zip(*played(flushed_after_a_load), strict=True)
    assert len(set(took)) == 1
    assert 0 < took[0] < 6
    assert len(set(held)) == 2, "a shard lacks a tensor"


def test_infs_of_a_shard_void_a_raw_jobs_steps_while_it_owes(played: Played) -> None:
    assert played(owed_to_a_raw_job) == [(True, False)] * 4


def test_every_rank_says_the_whole_strategy_also_of_what_its_shard_lacks(played: Played) -> None:
    found = played(narrow)
    assert [each["held"] for each in found] == [["other", "row", "weight"], ["other", "weight"]] * 2
    for way, names in {
        "whole": ["row", "weight"],
        "function": ["row", "weight"],
        "used": ["other", "row", "weight"],
    }.items():
        for each in found:
            assert each[way]["compressed"] == [names], way
            assert each[way]["resumed"], way


def test_shards_take_a_strategy_together_or_none_does(played: Played) -> None:
    for rank, ((refused, other, taken), agree) in enumerate(played(used_apart)):
        assert refused.startswith(
            "TypeError: state.use takes a Strategy" if rank % 2 else "DisagreementError: shard 1 of the model refuses"
        )
        assert other.startswith("DisagreementError: shard 1 of tensor 'weight' was given another choice")
        assert (taken, agree) == ("taken", True)


def test_what_is_owed_survives_other_shards_and_replicas(played: Played) -> None:
    for found in played(distributed_checkpoint):
        assert found["same"]
        assert found["owed"] > 1e-4
        assert found["2x2"] == 0.0
        assert found["4x1"] < 1e-6
        assert found["1x4"] < 1e-6
        assert found["refused"]


def test_a_module_that_is_reduced_twice_in_a_pass(played: Played) -> None:
    assert played(parts_of_a_batch) == [[True, True, [4, 4]]] * 4


def test_a_model_that_was_evaluated_is_registered_and_compared(played: Played) -> None:
    for rank, found in enumerate(played(evaluated)):
        assert found["warned"] == []
        assert len(set(found["buckets"])) == 1
        assert f"parameter 'head.weight' on rank {2 + rank % 2} differs from rank {rank % 2}" in found["apart"]


def test_replicas_are_compared_while_modules_are_whole(played: Played) -> None:
    assert played(compared_while_whole) == [[4, 4]] * 4


def test_modules_that_were_sharded_beside_each_other_are_one_exchange(played: Played) -> None:
    assert played(roots_beside_each_other) == [[(True, 3), (True, 6)]] * 4


def test_a_parameter_that_is_unfrozen_later_is_named_as_such(played: Played) -> None:
    everybody = played(unfrozen)
    # A rank whose exchanges are under way may hear first of another that is closed already.
    assert any("unfrozen" in found["said"] and "close()" in found["said"] for found in everybody)
    for found in everybody:
        assert "module '' has other parameters" not in found["said"]
        assert found["closed"]
        assert (found["steps"], found["taken"]) == (2, True)


def test_every_rank_begins_with_rank_0s_parameters_and_buffers(played: Played) -> None:
    for same in played(begins_alike):
        assert len(same) == len([*Tiny().parameters()]) + 3
        assert all(same)


def test_shards_whose_buckets_change_apart_decide_together(played: Played) -> None:
    assert played(turns_of_tasks) == [(True, True)] * 4


def test_automatic_mode_decides(played: Played) -> None:
    found = played(automatic)
    assert [(each["before"], each["after"], each["agree"], each["advice"]) for each in found] == [
        (False, True, True, "")
    ] * 4
    (verdict,) = {each["verdict"] for each in found}
    assert re.search(r"plain [\d.]+ ms, signs [\d.]+ ms a step", verdict)
    assert len({text for each in found for text in each["said"]}) == 1
    assert len({each["held"] for each in found}) == 2, "a shard lacks a tensor"
    for each in found:
        few, many = each["sent"]
        assert 0 < few < many / 6, "signs were raced"


def test_automatic_mode_decides_where_a_shard_has_nothing_of_a_bucket_or_of_the_model(played: Played) -> None:
    layer, whole = zip(*played(shards_of_nothing), strict=True)
    assert [each["held"] for each in layer] == [[2, 2], [0, 2]] * 2
    assert [each["held"] for each in whole] == [[2], None] * 2
    for found in (layer, whole):
        assert len({each["verdict"] for each in found}) == 1
        assert [each["history"] for each in found] == [found[0]["history"]] * 4
        assert [event for _, event, _ in found[0]["history"]][:2] == ["decided", "changed"]


def test_shards_profile_as_many_steps_as_the_one_that_needs_most(played: Played) -> None:
    assert played(as_many_steps) == [(6, 4, 0.0), (6, 4, 0.5)] * 2


def test_shards_decide_again_together(played: Played) -> None:
    histories = played(decides_again)
    assert histories == [histories[0]] * 4
    events = [event for _, event, _ in histories[0]]
    assert events[:2] == ["decided", "changed"]
    assert events[2] in ("kept", "switched")


def test_an_encoder_that_lies_in_one_shard_has_all_of_them_back_off(played: Played) -> None:
    (decided, (step, event, reason, exact)), *others = played(backs_off)
    assert decided[1] == "decided"
    assert step < 100
    assert event == "backed_off"
    assert "(row): what was sent and kept is not what came in" in reason
    assert exact == {"row"}
    assert others == [[decided, (step, event, reason, exact)]] * 3


def test_shards_are_the_ranks_of_a_host_or_asked_for(played: Played) -> None:
    for found in played(without_shards):
        assert found["said"] == (2, 2)
        assert found["unlike"] == (
            "DisagreementError: rank 3 has another shards= (by default the ranks of a host) than rank 0 (2 on rank 0, 1"
            " on rank 3); start all ranks alike"
        )
        assert found["unknown"].startswith("TopologyError: no launcher says how many ranks this host has: give shards=")


def test_refusals_name_what_and_what_to_do(played: Played) -> None:
    for rank, found in enumerate(played(refused)):
        assert found["nothing"].startswith(
            "TypeError: espresso.fsdp.register needs modules that were given fully_shard"
        )
        assert 'mesh["shard"]' in found["native"]
        assert "native HSDP" in found["native"]
        assert "espresso.register" in found["replicate_ddp"]
        assert "hybrid_shard(model, shards=1)" in found["replicate_fsdp"]
        assert "use espresso.register" in found["ddp"]
        assert "has an all-reduce hook already" in found["twice"]
        assert "an optimizer in backward" in found["eager"]
        assert "must meet in this rank" in found["group"]
        assert "one dimension of the mesh" in found["mesh"]
        assert f"parameter 'weight' on rank {2 + rank % 2} differs from rank {rank % 2}" in found["apart"]
        assert "is closed" in found["closed"]
        assert [found[f"again {number}"] for number in range(3)] == ["True"] * 3
        assert found["hooks"] == "1", "the last one's, who says that it is closed"
        assert (
            found["hybrid_again"] == "ValueError: the model was given fully_shard already: use espresso.fsdp.register"
        )
        for what in ("scaled", "adam"):
            assert found[what].startswith("UnsupportedModelError: scale_residuals and CompressedAdam change gradients")
        assert found["shards_3"].startswith("TopologyError: shards=3 does not divide the 4 ranks")
        assert found["shards_text"] == "TypeError: shards must be a whole number or None, got '2' (str)"
        assert found["blocks"].startswith(
            "ValueError: blocks must be modules inside the model, as model.blocks, got Lin"
        )
        assert found["no_blocks"].endswith("got None")
        assert found["policy"].startswith(
            "TypeError: mp_policy must be a MixedPrecisionPolicy or None, got torch.bfloat16"
        )
        assert found["model"] == "TypeError: espresso.fsdp.hybrid_shard needs a model, got 'Rows' (str)"


def default_group(rank: int) -> list[float]:
    """``init_process_group()`` names no backend: each device has its own. Gloo's takes no factors."""
    dist.init_process_group()
    model: Any = Rows()
    with espresso.fsdp.hybrid_shard(model, shards=2, strategy=uniform(), timeout_s=15.0, offload_threads=1):
        model.set_gradient_divide_factor(4.0)
        model(torch.full((5, 4), 1.0 + rank)).backward()
    averages: list[float] = model.weight.grad.full_tensor().unique().tolist()
    dist.destroy_process_group()
    return averages


def test_hybrid_shard_where_the_group_names_no_backend() -> None:
    assert [outcome.value for outcome in run_ranks(default_group, 2, init=False)] == [[0.75]] * 2


def test_hybrid_shard_without_a_process_group() -> None:
    with pytest.raises(espresso.TopologyError, match="call init_process_group before"):
        espresso.fsdp.hybrid_shard(Rows(), shards=1)


def test_only_versions_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    private.check_version()
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(
        espresso.UnsupportedModelError, match=r"tried with torch 2\.13, 2\.14, and this is torch 2\.9\.1"
    ):
        private.check_version()


def test_private_parts_of_pytorch_stay_in_one_file() -> None:
    files = sorted(Path(espresso.fsdp.__file__).parent.glob("*.py"))
    reach = {path.name: re.findall(r"(?<!self)\._[a-z]\w*", path.read_text()) for path in files}
    assert {name for name, found in reach.items() if found} == {"private.py"}
