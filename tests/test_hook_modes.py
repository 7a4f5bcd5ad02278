"""The hook together with everything DDP can be told: each setting is compared with plain DDP, bit for bit."""

from __future__ import annotations

import copy
import math
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import espresso
from espresso.comm.execute import executor
from espresso.comm.hook import espresso_hook
from espresso.live.state import EspressoState
from espresso.strategies import Cluster
from tests.ddp import (
    ALLGATHER,
    SHARDED,
    Halves,
    IntegerNet,
    Played,
    agreed,
    batch,
    digest,
    kept_on_all_ranks,
    mlp,
    registered,
    same,
    sgd,
    strategy_for,
    train,
    wrap,
)

SUMMED = "comp > flat.allreduce > dec"
ARMS = (("flat.allreduce", "none"), (ALLGATHER, "none"), (SHARDED, "efsignsgd"))
"""Two ranks: their sums are the same in any order, so lossless arms equal plain DDP on any numbers."""


def test_find_unused_parameters(played):
    check(played(find_unused))


def test_what_no_rank_used_loses_nothing(played):
    """DDP drops its average in that step, and with it would go what error feedback sent."""
    for found in played(unused_by_all):
        for lost, waiting in found:
            assert lost == 0.0
            assert waiting > 1000, "what is owed of it waits, also where all is flushed"


def test_what_has_no_gradient_in_a_part_of_a_tensor_stays_owed_there(played):
    for found in played(used_in_part):
        for lost, waiting in found:
            assert lost == 0.0
            assert waiting > 1000


def test_a_gradient_that_an_earlier_step_left_is_none(played):
    for found in played(left_over):
        for lost, waiting in found:
            assert lost == 0.0
            assert waiting > 1000


def test_what_an_earlier_step_left_in_a_view_stays_with_what_is_kept_of_it(played):
    for apart, waiting in played(left_in_views):
        assert apart < 1e-4
        assert waiting > 1000


def test_what_an_earlier_step_left_is_no_alarm(played):
    assert not any("backed_off" in events for events in played(left_over_and_looked_at))


def test_of_velocities_nobody_is_silent(played):
    """What compression takes off a velocity is kept, whether or not its parameter was used."""
    _, (before, after) = played(velocity_of_the_unused)
    assert after != before


def test_what_one_rank_did_not_use_is_sent_once_it_does(played):
    """Plain steps go on sending, and a flush goes on, on both ranks."""
    everybody = played(unused_by_one)
    for lost, _, under_way in everybody:
        assert lost == 0.0
        assert under_way == [True, True, False]
    assert [keeps for _, keeps, _ in everybody] == [[False, False, False], [True, True, False]]


def test_what_a_rank_long_has_no_gradient_for_is_tried_seldom(played):
    """Or all plain steps to come would look for it, and be slower than the library's."""
    everybody = played(unused_for_long)
    assert all(lost == 0.0 for rows in everybody for lost, _ in rows)
    assert everybody[1][0][1] == [True] * 9 + [False]  # used from step 10 on, tried in step 12
    assert everybody[1][1][1] == [True] * 7 + [False] * 3, "a flush tries each of its steps"


def test_static_graph(played):
    check(played(static_graph))


def test_gradient_as_bucket_view(played):
    check(played(bucket_view))


def test_other_flags(played):
    check(played(other_flags))


def test_a_compiled_model(played):
    check(played(compiled))


def test_no_sync_accumulates(played):
    check(played(no_sync))


def test_frozen_and_ignored_parameters(played):
    check(played(frozen_and_ignored))


def test_parameters_that_are_frozen_or_unfrozen_once_wrapped(played):
    check(played(frozen_once_wrapped))


def test_tied_parameters(played):
    check(played(tied))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_mixed_dtypes(played, dtype):
    results = [result[dtype] for result in played(mixed_dtypes)]
    if dtype == "float16":
        # DDP halves before it adds and so rounds subnormal numbers; a decode adds in fp32 and halves the sum.
        assert results[0][ALLGATHER] == results[1][ALLGATHER]
        results = [result | {ALLGATHER: result["plain"]} for result in results]
    check(results)


def test_channels_last(played):
    check(played(channels_last))


def test_several_forwards_before_one_backward(played):
    check(played(two_forwards))


def test_skipped_buckets(played):
    check(played(skipped_buckets))


def test_where_the_first_bucket_is_skipped_another_one_is_the_first(played):
    for steps, after in played(first_of_those_that_come):
        assert after == "closed"
        assert [[is_first for _, is_first in step] for step in steps] == [
            [True] + [False] * (len(step) - 1) for step in steps
        ]
        assert {step[0][0] > 0 for step in steps} == {False, True}


def test_a_state_that_was_given_the_bare_model_learns_ddps_flags(played):
    for late, early in played(bound_before_it_was_wrapped):
        assert early == late
        assert len(set(late)) == len(late)


def test_what_is_owed_of_branches_that_come_later_waits_for_them(played):
    for before, after in played(resumed_where_some_come_later):
        assert before == after > 0


def test_default_devices_and_types_are_the_scripts_own(played):
    assert played(other_defaults) == [True] * 2


def test_create_graph(played):
    check(played(create_graph))


def test_join_that_divides_by_the_ranks_with_inputs(played):
    for result in played(dividing_otherwise):
        assert len(result) == 6
        assert all(digests == result["plain"] for digests in result.values())
        assert len(set(result["plain"])) == 8


def test_flush_sends_all_that_is_owed(played):
    for owed, left, distance, moved, sent, raw in played(flushed):
        assert owed > 0
        assert left == 0
        assert distance < 1e-5 * moved
        assert 0 < sent < raw, "the step after it compresses again"


def test_gains_follow_a_strategys_momentum_and_nothing_is_lost(played):
    for before, after, distance, moved in played(beside_less_momentum):
        assert (before, after) == ({1 / 16}, {1 / 2})
        assert distance < 1e-5 * moved


def test_unregister_goes_back_to_plain_averaging(played):
    for distance, moved, threads, after in played(unregistered):
        assert distance < 1e-5 * moved
        assert threads == []
        assert after == "closed"


def test_after_unregister_a_script_goes_on_as_it_was(played):
    for off, epochs, kept in played(asked_after_leaving):
        assert off
        assert epochs == [3, 3, None]
        assert set(kept.values()) == {0.0}


def test_a_job_that_is_off_runs_as_it_is(played):
    for equal, text, passed_on in played(switched_off):
        assert equal
        assert text == "off: ESPRESSO_DISABLE=1; gradients are averaged as by plain DDP"
        assert passed_on


def test_fp16_compress_wrapper_composes(played):
    for equal, name in played(wrapped_hook):
        assert equal
        assert name == "espresso.comm.hook.espresso_hook"


def test_join_with_uneven_inputs(played):
    for equal, losses in played(uneven):
        assert equal
        assert losses[2] < losses[1] < losses[0]


def test_join_loses_nothing(played):
    """What uneven ranks put in is in the parameters or in the residuals, joined ranks' included."""
    for distance, moved, kept in played(uneven_conservation):
        assert kept > 0
        assert distance < 1e-4 * moved


def check(results: list[dict[str, Any]]) -> None:
    """Lossless arms equal plain DDP; the lossy one compressed, trained, and is the same everywhere."""
    for result in results:
        assert result["flat.allreduce"] == result["plain"]
        assert result[ALLGATHER] == result["plain"]
        assert result[SHARDED] == results[0][SHARDED]
        assert result[SHARDED] != result["plain"], "nothing was compressed"
        assert len(set(result[SHARDED])) == len(result[SHARDED]), "parameters did not move"


# -- scenarios, on two ranks -----------------------------------------------------------------------

Step = Callable[[DistributedDataParallel, int], None]


def compare(
    model: nn.Module,
    step: Step,
    num_steps: int = 6,
    once_wrapped: Callable[[DistributedDataParallel], None] = lambda ddp: None,
    **settings: Any,
) -> dict[str, list[str]]:
    """Digests after every step, with plain DDP and with every arm."""
    results = {}
    for option, compressor in (("plain", ""), *ARMS):
        ddp = wrap(copy.deepcopy(model), **settings)
        once_wrapped(ddp)
        if option == "plain":
            results[option] = run(ddp, step, num_steps)
        else:
            with registered(ddp, option, compressor):
                results[option] = run(ddp, step, num_steps)
    return results


def run(ddp: DistributedDataParallel, step: Step, num_steps: int) -> list[str]:
    digests = []
    for number in range(num_steps):
        ddp.zero_grad()
        step(ddp, number)
        sgd(ddp)
        assert agreed(ddp), f"replicas differ after step {number}"
        digests.append(digest(ddp.module))
    return digests


class Branches(nn.Module):
    """A trunk and three branches, of which each step uses those named."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(20, 60, 30)
        self.branches = nn.ModuleList([mlp(30, 40, 5, seed=seed) for seed in range(3)])

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        trunk = self.trunk(x)
        return torch.stack([self.branches[number](trunk) for number in used]).sum(0)


def find_unused(rank: int) -> dict[str, list[str]]:
    """Branch 0 alternates, branch 1 is used by rank 0 only, branch 2 by nobody at first."""

    def step(ddp: DistributedDataParallel, number: int) -> None:
        used = [0] if number % 2 == 0 else []
        used += [1] if rank == 0 or number % 2 == 1 else []
        used += [2] if number > 3 else []
        ddp(batch(rank, number, 20), used).square().mean().backward()

    return compare(Branches(), step, find_unused_parameters=True)


def unused_by_all(rank: int) -> list[tuple[float, float]]:
    """What plain DDP averaged, less what ours did and what the ranks keep; and what is kept of the second half."""
    found = []
    for option, compressor in (
        (ALLGATHER, "topk:ratio=0.1"),
        (SHARDED, "topk:ratio=0.1"),
        (SUMMED, "randomk:ratio=0.1"),
    ):
        plain, ours = (wrap(Halves(), find_unused_parameters=True) for _ in range(2))
        sums = {name: torch.zeros(3000) for name, _ in plain.module.named_parameters()}
        with registered(ours, option, compressor, feedback_gain=1.0) as state:
            for step in range(9):
                if step == 6:
                    state.flush()
                for sign, ddp in ((1, plain), (-1, ours)):
                    ddp.zero_grad()
                    ddp(10 * step + rank, step in (0, 1, 8)).backward()
                    for name, parameter in ddp.module.named_parameters():
                        if parameter.grad is not None:
                            sums[name] += sign * parameter.grad
                if step == 7:
                    waiting = float(kept_on_all_ranks(state, ours)["now_and_then"].abs().sum())
            kept = kept_on_all_ranks(state, ours)
        lost = max(float((sums[name] - kept[name].reshape(-1) / 2).abs().max()) for name in sums)
        found.append((lost, waiting))
    return found


def left_over(rank: int) -> list[tuple[float, float]]:
    """What plain DDP averaged of the second half in steps that use it, less what ours did and what the ranks keep: in
    the others its gradient is what an earlier step left, as with an optimizer for each half. Also with what is carried.
    """
    found = []
    for carries in (False, True):
        plain, ours = (wrap(Halves(), find_unused_parameters=True) for _ in range(2))
        apart, waiting = torch.zeros(3000), 0.0
        with registered(ours, ALLGATHER, "topk:ratio=0.1", feedback_gain=1.0) as state:
            for step in range(9):
                if carries and step == 2:  # what is owed by now is sent by plain steps
                    state.use(strategy_for(ours, Cluster(2, 1)))
                is_used = step in (0, 1, 5, 8)
                for sign, ddp in ((1, plain), (-1, ours)):
                    ddp.module.always.grad = None
                    if is_used:
                        ddp.module.now_and_then.grad = None
                    ddp(10 * step + rank, is_used).backward()
                    if is_used:
                        apart += sign * ddp.module.now_and_then.grad
                if step == 4:
                    waiting = float(kept_on_all_ranks(state, ours)["now_and_then"].abs().sum())
            kept = kept_on_all_ranks(state, ours)["now_and_then"]
        found.append((float((apart - kept / 2).abs().max()), waiting))
    return found


def left_in_views(rank: int) -> tuple[float, float]:
    """Where gradients are views of buckets what an earlier step left is sent again, and DDP keeps that: what a gradient
    and what is kept of it come to after such steps, less what they came to before; and what is kept.
    """
    ddp = wrap(Halves(), find_unused_parameters=True, gradient_as_bucket_view=True)
    found = []
    with registered(ddp, ALLGATHER, "topk:ratio=0.1", feedback_gain=1.0) as state:
        for step, is_used in enumerate((True, True, False, False)):
            if is_used:
                ddp.zero_grad()
            ddp(10 * step + rank, is_used).backward()
            kept = kept_on_all_ranks(state, ddp)["now_and_then"]
            found.append(ddp.module.now_and_then.grad + kept / 2)
    return float((found[3] - found[1]).abs().max()), float(kept.abs().sum())


def left_over_and_looked_at(rank: int) -> list[str]:
    """Every second step has what the one before left of the second half: what the guard said."""
    ddp = wrap(Halves(), find_unused_parameters=True)
    with registered(ddp, ALLGATHER, "topk:ratio=0.1", adapt=True) as state:
        for step in range(10):
            ddp.module.always.grad = None
            if step % 2 == 0:
                ddp.module.now_and_then.grad = None
            ddp(10 * step + rank, step % 2 == 0).backward()
            state.metrics()  # judges the step
        return [row["event"] for row in state.history if row["event"] != "changed"]


def velocity_of_the_unused(rank: int) -> tuple[float, float]:
    """Rank 1 does not use the second half from the fourth step on; its velocity goes on. What it keeps of the half
    before and after.
    """
    ddp, owed = wrap(Halves(), find_unused_parameters=True), []
    compressor = "randomk:ratio=0.1,momentum=0.5"
    with registered(ddp, SUMMED, compressor) as state:
        for step in range(6):
            ddp.zero_grad()
            ddp(10 * step + rank, rank == 0 or step < 3).backward()
            kept = state.session.store.kept({"now_and_then": np.arange(3000)})["now_and_then"]
            owed.append(float(np.abs(kept).sum()))
    return owed[2], owed[5]


def unused_by_one(rank: int) -> tuple[float, list[bool], list[bool]]:
    """Compressed steps, plain ones, compressed ones and a flush; of the plain ones rank 1 uses the second half in the
    third, and so of the flush. What plain DDP averaged, less what ours did; whether this rank keeps something after
    each plain step; whether the flush is under way after each of its.
    """
    plain, ours = (wrap(Halves(), find_unused_parameters=True) for _ in range(2))
    apart = {name: torch.zeros(3000) for name, _ in plain.module.named_parameters()}
    keeps, under_way = [], []
    with registered(ours, ALLGATHER, "topk:ratio=0.1", feedback_gain=1.0) as state:
        compressed = state.strategy
        for step in range(12):
            if step == 3:
                state.use(strategy_for(ours, Cluster(2, 1)))
            elif step == 6:
                state.use(compressed)
            elif step == 9:
                state.flush()
            for sign, ddp in ((1, plain), (-1, ours)):
                ddp.zero_grad()
                ddp(10 * step + rank, rank == 0 or step not in (3, 4, 9, 10)).backward()
                for name, parameter in ddp.module.named_parameters():
                    apart[name] += sign * parameter.grad
            keeps.append(bool(state.session.store.lend()))
            under_way.append(state.session.flushes)
    return max(float(values.abs().max()) for values in apart.values()), keeps[3:6], under_way[9:]


def unused_for_long(rank: int) -> list[tuple[float, list[bool]]]:
    """Compressed steps, and plain ones, of which the first seven use the second half on rank 0 alone: what plain DDP
    averaged, less what ours did; whether this rank keeps something after each plain step. Then with a flush after
    these seven.
    """
    return [_unused_for_long(rank, flushes=flushes) for flushes in (False, True)]


def _unused_for_long(rank: int, *, flushes: bool) -> tuple[float, list[bool]]:
    plain, ours = (wrap(Halves(), find_unused_parameters=True) for _ in range(2))
    apart = {name: torch.zeros(3000) for name, _ in plain.module.named_parameters()}
    keeps = []
    with (
        registered(ours, ALLGATHER, "topk:ratio=0.1", feedback_gain=1.0) as state,
        patch.object(executor, "OFTEN", 2),
        patch.object(executor, "SELDOM", 4),
    ):
        for step in range(13):
            if step == 3:
                state.use(strategy_for(ours, Cluster(2, 1)))
            if step == 10 and flushes:
                state.flush()
            for sign, ddp in ((1, plain), (-1, ours)):
                ddp.zero_grad()
                ddp(10 * step + rank, rank == 0 or step not in range(3, 10)).backward()
                for name, parameter in ddp.module.named_parameters():
                    apart[name] += sign * parameter.grad
            keeps.append(bool(state.session.store.lend()))
    return max(float(values.abs().max()) for values in apart.values()), keeps[3:]


class Tail(nn.Module):
    """Gradients that are small integers, from an element on."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3000, dtype=dtype))

    def forward(self, key: int, first: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(key)
        return (self.weight * torch.randint(-8, 9, (3000,), generator=draw).to(self.weight))[first:].sum()


def used_in_part(rank: int) -> list[tuple[float, float]]:
    """Steps of top-k, then one of plain averages in three partitions, the first without a gradient: what plain DDP
    averaged, less what ours did and what the ranks keep; and what is kept.
    """
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        plain, ours = (wrap(Tail(dtype), find_unused_parameters=True) for _ in range(2))
        apart = torch.zeros(3000)
        with registered(ours, ALLGATHER, "topk:ratio=0.1", feedback_gain=1.0) as state:
            for step in range(4):
                if step == 3:
                    size = 1000 * dtype.itemsize
                    state.use(strategy_for(ours, Cluster(2, 1), partition_bytes=size))
                for sign, ddp in ((1, plain), (-1, ours)):
                    ddp.zero_grad()
                    ddp(10 * step + rank, 1024 if step == 3 else 0).backward()
                    apart += sign * ddp.module.weight.grad
            kept = kept_on_all_ranks(state, ours)["weight"]
        found.append((float((apart - kept / 2).abs().max()), float(kept.abs().sum())))
    return found


def static_graph(rank: int) -> dict[str, list[str]]:
    """A static graph in which a layer is used twice (checkpointing does that) and a branch never."""

    def step(ddp: DistributedDataParallel, number: int) -> None:
        ddp(batch(rank, number, 20), [0, 1, 1]).square().mean().backward()

    return compare(Branches(), step, static_graph=True)


def bucket_view(rank: int) -> dict[str, list[str]]:
    return compare(mlp(20, 60, 30, 40, 5), square_loss(rank), gradient_as_bucket_view=True)


def other_flags(rank: int) -> dict[str, list[str]]:
    """Replicas are equal to begin with, so nobody has to send them."""
    flags = {"init_sync": False, "forward_sync_buffers": False, "batched_grad_copy": True}
    mesh = init_device_mesh("cpu", (2,))
    return compare(mlp(20, 60, 30, 40, 5), square_loss(rank), device_mesh=mesh, **flags)


def compiled(rank: int) -> dict[str, list[str]]:
    """DDP around a compiled model."""

    def step(ddp: DistributedDataParallel, number: int) -> None:
        ddp(batch(rank, number, 20)).square().mean().backward()

    # PyTorch wants no bucket smaller than the first one, of a megabyte.
    return compare(torch.compile(mlp(20, 60, 30, 40, 5), backend="eager"), step, bucket_cap_mb=2)


def no_sync(rank: int) -> dict[str, list[str]]:
    def step(ddp: DistributedDataParallel, number: int) -> None:
        with ddp.no_sync():
            for part in range(2):
                ddp(batch(rank, 10 * number + part, 20)).square().mean().backward()
        ddp(batch(rank, 10 * number + 9, 20)).square().mean().backward()

    return compare(mlp(20, 60, 30, 40, 5), step)


def frozen_and_ignored(rank: int) -> dict[str, list[str]]:
    model = mlp(20, 60, 30, 40, 5)
    model[0].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])

    def step(ddp: DistributedDataParallel, number: int) -> None:
        square_loss(rank)(ddp, number)
        assert model[0].weight.grad is None
        ddp.module[2].bias.grad = None  # nobody averaged it

    return compare(model, step)


def frozen_once_wrapped(rank: int) -> dict[str, list[str]]:
    """Between wrapping and registering one layer is frozen, and another one, which DDP does not average, no more."""
    model = mlp(20, 60, 30, 40, 5)
    model[6].requires_grad_(False)

    def once_wrapped(ddp: DistributedDataParallel) -> None:
        ddp.module[2].requires_grad_(False)
        ddp.module[6].requires_grad_(True)

    def step(ddp: DistributedDataParallel, number: int) -> None:
        square_loss(rank)(ddp, number)
        for parameter in ddp.module[6].parameters():
            parameter.grad = None  # nobody averaged it

    return compare(model, step, once_wrapped=once_wrapped, find_unused_parameters=True)


class Chosen(nn.Module):
    """Three branches, of which each step uses those named."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([mlp(20, 60, 30, 40, 5, seed=seed) for seed in range(3)])

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return torch.stack([self.branches[number](x) for number in used]).sum(0)


SKIPS = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}


def skipped_buckets(rank: int) -> dict[str, list[str]]:
    """Of buckets without gradients the first come not, then the last, then those between."""
    turns = ([0, 1, 2], [0, 1, 2], [0], [0], [0], [2], [1, 2], [1], [0, 2], [0, 1, 2])

    def step(ddp: DistributedDataParallel, number: int) -> None:
        ddp(batch(rank, number, 20), turns[number]).square().mean().backward()

    return compare(Chosen(), step, len(turns), **SKIPS)


def bound_before_it_was_wrapped(rank: int) -> list[list[str]]:
    """A state that was given the bare model learns DDP's flags; of some turns no rank uses a branch."""
    turns, found = ([0, 1, 2], [0, 1, 2], [0], [2], [0], [1, 2], [0, 1, 2]), []

    def step(ddp: DistributedDataParallel, number: int) -> None:
        ddp(batch(rank, number, 20), turns[number]).square().mean().backward()

    for is_early in (False, True):
        model = Chosen()
        strategy = strategy_for(model, Cluster(2, 1), SHARDED, "efsignsgd")
        state = EspressoState("efsignsgd", strategy, ranks_per_node=1, timeout_s=15.0)
        if is_early:
            state.bind(model).start()
        ddp = wrap(model, **SKIPS)
        ddp.register_comm_hook(state if is_early else state.bind(ddp), espresso_hook)
        found.append(run(ddp, step, len(turns)))
        state.close()
    return found


def resumed_where_some_come_later(rank: int) -> tuple[float, float]:
    """What was owed of branches that no step has used since the job was resumed; before, and after some steps."""

    def owed(state: EspressoState, ddp: DistributedDataParallel) -> float:
        kept = kept_on_all_ranks(state, ddp.module)
        return math.fsum(float(values.abs().sum()) for name, values in kept.items() if name.startswith("branches.2"))

    def step(ddp: DistributedDataParallel, number: int, used: list[int]) -> None:
        ddp.zero_grad()
        ddp(batch(rank, number, 20), used).square().mean().backward()

    ddp = wrap(Chosen(), bucket_cap_mb=0.001, **SKIPS)
    with registered(ddp, ALLGATHER, "topk:ratio=0.1") as state:
        for number in range(4):
            step(ddp, number, [0, 1, 2])
        before, saved = owed(state, ddp), state.state_dict()
    ddp = wrap(Chosen(), bucket_cap_mb=0.001, **SKIPS)
    with registered(ddp, ALLGATHER, "topk:ratio=0.1") as state:
        state.load_state_dict(saved)
        for number in range(4, 8):
            step(ddp, number, [0])
        after = owed(state, ddp)
        step(ddp, 8, [0, 1, 2])
        return before, after


def other_defaults(rank: int) -> bool:
    """What the script makes its own tensors of, once the model is there."""
    ddp, batches = wrap(mlp(20, 300, 30)), [batch(rank, number, 20) for number in range(40)]
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    brief = {"profile_steps": 3, "race_steps": 3, "race_rounds": 1, "decide_by": 0}
    try:
        with registered(ddp, strategy="auto", compressor="efsignsgd", adapt=True, **brief) as state:
            for inputs in batches:
                ddp.zero_grad()
                ddp(inputs).square().mean().backward()
                sgd(ddp)
            state.check_replicas()
            return state.decided and len(state.metrics()) > 0
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def first_of_those_that_come(rank: int) -> tuple[list[list[tuple[int, bool]]], str]:
    """In every step DDP's number of each bucket that came, and whether it was said to be the first; at last whether a
    state that is unregistered closes where the first does not come.
    """
    ddp = wrap(Chosen(), **SKIPS)
    steps: list[list[tuple[int, bool]]] = []
    with registered(ddp) as state:
        state.before_exchange.append(lambda bucket, scale, is_first: steps[-1].append((bucket.index(), is_first)))
        for number, used in enumerate(([0, 1, 2], [0, 1, 2], [0], [2], [0])):
            steps.append([])
            ddp(batch(rank, number, 20), used).square().mean().backward()
        steps.append([])
        state.unregister()
        for number in (5, 6):
            ddp(batch(rank, number, 20), [0]).square().mean().backward()
        return steps, repr(state).rpartition("; ")[2].rstrip(">")


def create_graph(rank: int) -> dict[str, list[str]]:
    class Squares(nn.Module):
        """As PyTorch's own test has it: with layers plain DDP fails."""

        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.linspace(1, 2, 3000))

        def forward(self) -> torch.Tensor:
            return (self.p.pow(2) * (1 + rank)).sum()

    def step(ddp: DistributedDataParallel, number: int) -> None:
        with warnings.catch_warnings(action="ignore"):  # of the circle of references
            ddp().backward(create_graph=True)

    return compare(Squares(), step)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(50, 16)
        self.middle = mlp(16, 40, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(tokens)))


def tied(rank: int) -> dict[str, list[str]]:
    def step(ddp: DistributedDataParallel, number: int) -> None:
        tokens = torch.arange(12).roll(number + rank).reshape(3, 4)
        ddp(tokens).square().mean().backward()

    return compare(Tied(), step)


def mixed_dtypes(rank: int) -> dict[str, dict[str, list[str]]]:
    class Mixed(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.first = mlp(20, 60, 30)
            self.second = mlp(30, 50, 40, dtype=dtype)
            self.third = mlp(40, 30, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            middle = self.second(self.first(x).to(self.second[0].weight.dtype))
            return self.third(middle.float())

    dtypes = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return {name: compare(Mixed(dtype), square_loss(rank)) for name, dtype in dtypes.items()}


def channels_last(rank: int) -> dict[str, list[str]]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4))

    def step(ddp: DistributedDataParallel, number: int) -> None:
        image = batch(rank, number, 3 * 64).reshape(4, 3, 8, 8).to(memory_format=torch.channels_last)
        ddp(image).square().mean().backward()

    return compare(model.to(memory_format=torch.channels_last), step)


def two_forwards(rank: int) -> dict[str, list[str]]:
    def step(ddp: DistributedDataParallel, number: int) -> None:
        outputs = [ddp(batch(rank, 10 * number + part, 20)) for part in range(2)]
        (outputs[0] * outputs[1]).square().mean().backward()

    return compare(mlp(20, 60, 30, 40, 5), step)


def wrapped_hook(rank: int) -> tuple[bool, str]:
    """Integers are exact in fp16, so the wrapped hook equals plain DDP."""
    plain, ours = wrap(IntegerNet()), wrap(IntegerNet())
    strategy = strategy_for(ours, Cluster(2, 1), ALLGATHER)
    state = EspressoState("none", strategy, ours.process_group, ranks_per_node=1, timeout_s=15.0).bind(ours)
    ours.register_comm_hook(state, fp16_compress_wrapper(espresso_hook))
    for ddp in (plain, ours):
        train(ddp, range(5), lambda step, ddp=ddp: ddp(10 * step + rank))
    last = state.session.observer.last
    assert last is not None
    halved = all(bucket.dtype == "float16" for bucket in last.buckets)
    state.close()
    return same(plain, ours) and halved, f"{espresso_hook.__module__}.{espresso_hook.__qualname__}"


def uneven(rank: int) -> tuple[bool, list[float]]:
    """Rank 1 has twice the batches of rank 0; three epochs, with error feedback. The mean loss of each. Replicas are
    compared all along, where they take steps.
    """
    ddp = wrap(mlp(20, 60, 30, 40, 5))
    epochs = []
    with registered(ddp, SHARDED, "efsignsgd", check_every=1):
        for _ in range(3):
            losses = []
            with ddp.join():
                for number in range(4 + 4 * rank):
                    ddp.zero_grad()
                    loss = ddp(batch(rank, number, 20)).square().mean()
                    loss.backward()
                    sgd(ddp, 0.05)
                    losses.append(float(loss))
            epochs.append(sum(losses) / len(losses))
        return agreed(ddp), epochs


def uneven_conservation(rank: int) -> tuple[float, float, float]:
    """Plain DDP and ours with the same uneven inputs, whose gradients do not depend on the parameters.

    A joined rank takes no optimizer steps of its own: the last rank's parameters count, as DDP does.
    """
    plain, ours = wrap(IntegerNet()), wrap(IntegerNet())
    with registered(ours, SHARDED, "efsignsgd") as state:
        for ddp in (plain, ours):
            with ddp.join():
                for number in range(3 + 5 * rank):
                    ddp.zero_grad()
                    ddp(10 * number + rank).backward()
                    sgd(ddp)
        kept = kept_on_all_ranks(state, ours)
    assert agreed(ours)
    distance = moved = 0.0
    for (name, p), q in zip(ours.module.named_parameters(), plain.module.parameters(), strict=True):
        left = p.detach() - 0.125 * kept[name] / 2
        distance = max(distance, float((left - q.detach()).abs().max()))
        moved = max(moved, float(q.abs().max()))
    return distance, moved, sum(float(values.abs().sum()) for values in kept.values())


def dividing_otherwise(rank: int) -> dict[str, list[str]]:
    """Rank 1 has twice the inputs of rank 0: powers of two are exact, so lossless arms equal plain DDP. Some after a
    state has left, or where buckets may be skipped, though none is.
    """
    results = {}
    arms = [*ARMS[:2], ("left", "none"), ("skips", "none"), ("left, skips", "none")]
    for option, compressor in (("plain", ""), *arms):
        ddp, digests = wrap(IntegerNet(), **(SKIPS if "skips" in option else {})), []
        way = option if ">" in option or "." in option else ALLGATHER
        ours = registered(ddp, way, compressor) if compressor else nullcontext()
        with ours as state, ddp.join(divide_by_initial_world_size=False):
            if "left" in option:
                state.unregister()
            for number in range(4 + 4 * rank):
                ddp.zero_grad()
                ddp(10 * number + rank).backward()
                sgd(ddp)
                digests.append(digest(ddp.module))
        everybody: list[list[str]] = [[], []]
        dist.all_gather_object(everybody, digests, group=ddp.process_group)
        results[option] = everybody[1]  # who joins early takes no steps of its own
    return results


def flushed(rank: int) -> tuple[float, float, float, float, float, float]:
    """An inf comes between: the flush waits for a step that counts."""
    plain, ours = wrap(IntegerNet()), wrap(IntegerNet())
    with registered(ours, SHARDED, "efsignsgd") as state:
        for ddp in (plain, ours):
            train(ddp, range(6), lambda step, ddp=ddp: ddp(10 * step + rank))
        owed = state.metrics()["espresso/residual_norm"]
        state.flush()
        ours.zero_grad()
        (ours(0) * float("inf")).backward()
        for ddp in (plain, ours):
            train(ddp, range(6, 7), lambda step, ddp=ddp: ddp(10 * step + rank))
        left, distance, moved = state.metrics()["espresso/residual_norm"], *apart(ours, plain)
        train(ours, range(2), lambda step: ours(10 * step + rank))
        metrics = state.metrics()
        return owed, left, distance, moved, metrics["espresso/bytes_sent"], metrics["espresso/bytes_raw"]


def beside_less_momentum(rank: int) -> tuple[set[float], set[float], float, float]:
    plain, ours = wrap(IntegerNet()), wrap(IntegerNet())
    gains = []
    with registered(ours, SHARDED, "efsignsgd") as state:
        for step in range(8):
            if step == 4:
                strategy = strategy_for(ours, Cluster(2, 1), ALLGATHER, "efsignsgd")
                state.use(replace(strategy, gain_scale=8.0))
            if step == 7:
                state.flush()
            for ddp in (plain, ours):
                train(ddp, range(step, step + 1), lambda step, ddp=ddp: ddp(10 * step + rank))
            gains.append({residual.gain for residual in state.session.store.live})
        return gains[3], gains[6], *apart(ours, plain)


def unregistered(rank: int) -> tuple[float, float, list[str], str]:
    before = {thread.ident for thread in threading.enumerate()}
    plain, ours = wrap(IntegerNet()), wrap(IntegerNet())
    with registered(ours, SHARDED, "efsignsgd") as state:
        for ddp in (plain, ours):
            train(ddp, range(6), lambda step, ddp=ddp: ddp(10 * step + rank))
        state.unregister()
        for ddp in (plain, ours):
            train(ddp, range(6, 10), lambda step, ddp=ddp: ddp(10 * step + rank))
        left = [t.name for t in threading.enumerate() if t.ident not in before and t.name.startswith("espresso")]
        return *apart(ours, plain), left, repr(state).rpartition("; ")[2].rstrip(">")


def asked_after_leaving(rank: int) -> tuple[bool, Any, Any]:
    """A script that goes on as it was after ``unregister()``: whether it is off, the epochs of its checkpoints, and
    what a job that goes on from the gathered one keeps.
    """
    first, ddp, again = (wrap(IntegerNet()) for _ in range(3))
    compressor = "dgc:ratio=0.1,warmup_epochs=4"
    with registered(first, ALLGATHER, compressor) as state:
        train(first, range(2), lambda step: first(10 * step + rank))
        other = state.gather_state_dict()
    with registered(ddp, ALLGATHER, compressor) as state:
        train(ddp, range(2), lambda step: ddp(10 * step + rank))
        state.unregister()
        train(ddp, range(2, 5), lambda step: ddp(10 * step + rank))
        state.set_epoch(3)
        state.check_replicas()
        gathered = state.gather_state_dict()
        epochs = [gathered["epoch"], state.state_dict()["epoch"]]
        state.load_state_dict(other)
        epochs.append(state.gather_state_dict()["epoch"])
        off = state.is_off
    with registered(again, ALLGATHER, compressor) as state:
        state.load_state_dict(gathered)
        return off, epochs, {name: float(kept.abs().max()) for name, kept in kept_on_all_ranks(state, again).items()}


def apart(left: nn.Module, right: nn.Module) -> tuple[float, float]:
    """The largest distance of two parameters, and the largest parameter."""
    pairs = [(p.detach(), q.detach()) for p, q in zip(left.parameters(), right.parameters(), strict=True)]
    return max(float((p - q).abs().max()) for p, q in pairs), max(float(q.abs().max()) for _, q in pairs)


def switched_off(rank: int) -> tuple[bool, str, bool]:
    """A checkpoint goes through a job that is off, and on after it."""
    plain, ours, first = (wrap(mlp(20, 60, 30, 5)) for _ in range(3))
    with registered(first, SHARDED, "efsignsgd") as state:
        run(first, square_loss(rank), 3)
        saved, kept = state.state_dict(), kept_on_all_ranks(state, first)
    os.environ["ESPRESSO_DISABLE"] = "1"
    try:
        with registered(ours, SHARDED, "efsignsgd") as state:
            state.load_state_dict(saved)
            state.set_epoch(0)
            state.flush()
            with state.errors():
                equal = run(ours, square_loss(rank), 3) == run(plain, square_loss(rank), 3)
            state.check_replicas()
            state.unregister()
            text, passed = state.summary(), state.state_dict()
            assert state.decided
            assert state.rank == rank
            assert set(state.metrics().values()) == {0.0}
        # What espresso refuses otherwise: who meets a refusal can go on without it.
        sparse = wrap(torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 2)))
        frozen = wrap(torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 2)))
        frozen.module[0].requires_grad_(False)
        hooked = wrap(mlp(20, 5))
        hooked.register_comm_hook(None, allreduce_hook)
        for model in (sparse, frozen, hooked, mlp(20, 5)):
            assert espresso.register(model, ranks_per_node=1).is_off
    finally:
        del os.environ["ESPRESSO_DISABLE"]
    again = wrap(mlp(20, 60, 30, 5))
    with registered(again, SHARDED, "efsignsgd") as state:
        state.load_state_dict(passed)
        now = kept_on_all_ranks(state, again)
    return equal, text, all(torch.equal(now[name], values) for name, values in kept.items())


def square_loss(rank: int) -> Step:
    def step(ddp: DistributedDataParallel, number: int) -> None:
        ddp(batch(rank, number, 20)).square().mean().backward()

    return step


SCENARIOS = (
    find_unused,
    unused_by_all,
    left_over,
    left_in_views,
    left_over_and_looked_at,
    velocity_of_the_unused,
    unused_by_one,
    unused_for_long,
    used_in_part,
    static_graph,
    bucket_view,
    other_flags,
    compiled,
    no_sync,
    frozen_and_ignored,
    frozen_once_wrapped,
    tied,
    mixed_dtypes,
    channels_last,
    two_forwards,
    wrapped_hook,
    uneven,
    uneven_conservation,
    skipped_buckets,
    bound_before_it_was_wrapped,
    resumed_where_some_come_later,
    other_defaults,
    first_of_those_that_come,
    create_graph,
    flushed,
    beside_less_momentum,
    unregistered,
    asked_after_leaving,
    switched_off,
    dividing_otherwise,
)


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(__name__, SCENARIOS, 2, deadline_s=150)
