"""An inf in the middle: visible on every rank, and no damage to what is kept."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from espresso.comm.memory import is_finite
from espresso.live.checkpoint import Checkpoint
from espresso.live.state import EspressoState
from tests.ddp import (
    ALLGATHER,
    HIERARCHICAL,
    ROOTED,
    SHARDED,
    IntegerNet,
    Played,
    agreed,
    batch,
    digest,
    mlp,
    registered,
    sgd,
    wrap,
)

ARMS = (
    (ALLGATHER, "efsignsgd", 1),
    (SHARDED, "topk:ratio=0.05", 1),
    (HIERARCHICAL, "dgc:ratio=0.05", 2),
    (ROOTED, "efsignsgd", 2),
    ("comp > flat.allreduce > dec", "randomk:ratio=0.1", 1),
    ("comp > flat.allreduce > transform > flat.allreduce > dec", "powersgd:rank=2,start_iter=0", 1),
    ("comp > flat.allreduce > dec", "fp16", 1),
    (ALLGATHER, "none", 1),
)

MOMENTUM_ARMS = (
    (SHARDED, "dgc:ratio=0.05,momentum=0.75", 1),
    (HIERARCHICAL, "dgc:ratio=0.05,momentum=0.75,nesterov=true", 2),
)
"""For optimizers without momentum."""

Case = tuple[str, str, int]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1, 3, 16, 17, 1001])
def test_one_bad_number_anywhere_is_found(dtype, numel):
    largest = torch.finfo(dtype).max
    for bad in (math.inf, -math.inf, math.nan):
        for place in {0, numel // 2, numel - 1}:
            numbers = torch.full((numel,), largest, dtype=dtype)  # whose sum overflows
            assert is_finite(numbers)
            numbers[place] = bad
            assert not is_finite(numbers)


def test_inf_is_seen_everywhere_and_leaves_residuals_alone(played):
    """Rank 1 alone has an inf, then a NaN; a step that counts comes before, between and after."""
    for results in played(skipped_by_hand):
        for case, result in results.items():
            assert result["nonfinite"] == [False, True, False, True, True, False], case
            assert result["skipped"] == 3, case
            assert result["untouched"] == [True, True, True], case
            assert result["same as without"], f"{case}: a skipped step left a trace"


def test_inf_before_the_order_is_planned(played):
    """The first steps of a scaled job overflow, on ranks that keep residuals and on ranks that do not."""
    for planned in played(early_overflow):
        assert planned[-1]


def test_infs_in_plain_steps_count_where_they_are_expected(played):
    """With loss scaling. Without, a look at every average would cost time, and nobody skips the step."""
    for with_scale, without in played(plain_overflow):
        assert with_scale == 1
        assert without == 0


def test_grad_scaler_skips_on_all_ranks(played):
    everybody = played(scaled)
    for results in everybody:
        for case, (scales, skipped, finite) in results.items():
            assert scales == everybody[0][case][0]
            assert max(scales) > scales[0], "the scale never doubled"
            assert skipped == 2, case
            assert finite, case


def test_a_change_of_scale_changes_nothing(played):
    """Residuals are kept unscaled: powers of two as loss scales give the same parameters bit for bit."""
    for results in played(rescaled):
        for case, (unscaled, by_scaler, by_hand) in results.items():
            assert by_scaler == unscaled, case
            assert by_hand == unscaled, case


def test_overflow_made_by_a_cast_is_seen(played):
    for nonfinite in played(cast_overflow):
        assert nonfinite


def test_without_transactions_memory_halves_and_inf_is_still_seen(played):
    for small, large, nonfinite in played(not_transactional):
        assert 0 < small < 0.6 * large
        assert nonfinite


# -- scenarios, on two nodes of two ranks ----------------------------------------------------------


def backward(
    ddp: nn.Module,
    rank: int,
    step: int,
    poison: float | None,
    scale: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> bool:
    """One backward pass with, on rank 1, a non-finite gradient in one tensor; whether an average shows it."""
    ddp.zero_grad()
    loss = ddp(batch(rank, step, 20)).square().mean()
    if poison is not None and rank == 1:
        loss = loss + ddp.module[2].weight[3, 5] * poison
    scale(loss).backward()
    return any(not bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None)


def kept(state: EspressoState) -> dict[str, bytes]:
    """This rank's residuals and carry, dense, bit for bit: a change of plan moves them, and nothing else may."""
    checkpoint = Checkpoint.parse(state.state_dict())
    kept: dict[str, torch.Tensor] = {}
    for row in checkpoint.rows():
        here = kept.setdefault(f"{row.held} of {row.tensor}", torch.zeros(20_000))
        here[row.start :][: row.values.size] += torch.from_numpy(row.values)
    for row in checkpoint.factors.rows("factors"):
        kept[f"factors of {row.tensor}"] = torch.from_numpy(row.values)
    return {name: values.numpy().tobytes() for name, values in kept.items()}


def skipped_by_hand(rank: int) -> dict[Case, dict[str, object]]:
    """Six steps with three that are poisoned, and the same job without those three."""
    poisons = [None, math.inf, None, math.nan, -math.inf, None]
    results = {}
    for case in ARMS + MOMENTUM_ARMS:
        option, compressor, ranks_per_node = case
        ends, nonfinite, untouched = [], [], []
        for plan in (poisons, [None] * 3):
            ddp = wrap(mlp(20, 60, 30, 40, 5), find_unused_parameters=True)
            with registered(ddp, option, compressor, ranks_per_node=ranks_per_node) as state:
                count = 0
                for poison in [None] * 3 + plan:  # by the fourth step the order is planned
                    before = kept(state) if poison is not None else None
                    bad = backward(ddp, rank, count, poison)
                    if bad:
                        untouched.append(kept(state) == before)
                    else:
                        sgd(ddp)
                        count += 1
                    nonfinite.append(bad)
                    state.session.executor.restart(count)  # random numbers as if the skipped steps had not been
                skipped = state.metrics()["espresso/skipped_steps"]
                ends.append((digest(ddp), kept(state), skipped))
                assert agreed(ddp)
        results[case] = {
            "nonfinite": nonfinite[3:9],
            "skipped": ends[0][2],
            "untouched": untouched,
            "same as without": ends[0][:2] == ends[1][:2],
        }
    return results


def early_overflow(rank: int) -> list[bool]:
    ddp = wrap(mlp(20, 60, 30), bucket_cap_mb=25)
    planned = []
    with registered(ddp, ROOTED, "efsignsgd", ranks_per_node=2) as state:
        for step in range(8):
            assert backward(ddp, rank, step, math.inf if step < 3 else None) == (step < 3)
            last = state.session.observer.last
            assert last is not None
            planned.append(last.plan is not None)
    return planned


def scaled(rank: int) -> dict[Case, tuple[list[float], float, bool]]:
    """``GradScaler`` doubles every two good steps; rank 1 overflows in two of them."""
    results = {}
    for case in ARMS:
        option, compressor, ranks_per_node = case
        ddp = wrap(mlp(20, 60, 30, 40, 5))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scales = []
        with registered(ddp, option, compressor, ranks_per_node=ranks_per_node, grad_scaler=scaler) as state:
            for step in range(10):
                scale, before = scaler.get_scale(), digest(ddp)
                bad = backward(ddp, rank, step, math.inf if step in (3, 6) else None, scaler.scale)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                assert bad == (step in (3, 6)) == (scaler.get_scale() < scale) == (digest(ddp) == before)
                assert agreed(ddp)
            norm = state.metrics()["espresso/residual_norm"]
            results[case] = (scales, state.metrics()["espresso/skipped_steps"], math.isfinite(norm))
    return results


def rescaled(rank: int) -> dict[Case, tuple[str, str, str]]:
    results = {}
    # Not fp16: it rounds subnormal numbers differently under another scale, and keeps no residual.
    for case in (*ARMS[:1], *ARMS[2:3], *ARMS[4:6], *MOMENTUM_ARMS[1:]):
        option, compressor, ranks_per_node = case
        ends = []
        for how in ("unscaled", "scaler", "by hand"):
            ddp = wrap(mlp(20, 60, 30, 40, 5))
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=how == "scaler")
            settings = {"grad_scaler": scaler} if how == "scaler" else {}
            with registered(ddp, option, compressor, ranks_per_node=ranks_per_node, **settings) as state:
                for step in range(7):
                    if how == "by hand":
                        state.set_grad_scale(2.0 ** (step % 4))
                        backward(ddp, rank, step, None, partial(torch.mul, 2.0 ** (step % 4)))
                        for parameter in ddp.parameters():
                            parameter.grad /= 2.0 ** (step % 4)
                    else:
                        backward(ddp, rank, step, None, scaler.scale)
                    scaler.step(optimizer)
                    scaler.update()
            assert how != "scaler" or scaler.get_scale() > 64.0
            ends.append(digest(ddp))
        results[case] = (ends[0], ends[1], ends[2])
    return results


def plain_overflow(rank: int) -> tuple[float, float]:
    skipped = []
    for scaled in (True, False):
        ddp = wrap(mlp(20, 60, 30))
        with registered(ddp) as state:
            if scaled:
                state.set_grad_scale(1.0)
            for step in range(3):
                assert backward(ddp, rank, step, math.inf if step == 1 else None) == (step == 1)
            skipped.append(state.metrics()["espresso/skipped_steps"])
    return skipped[0], skipped[1]


def cast_overflow(rank: int) -> bool:
    """Finite in fp32, too large for fp16 on rank 3 alone."""
    ddp = wrap(IntegerNet())
    with registered(ddp, ALLGATHER, "fp16"):
        (ddp(rank) * (1e5 if rank == 3 else 1.0)).backward()
        return all(not bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.numel() > 500)


def not_transactional(rank: int) -> tuple[float, float, bool]:
    sizes, nonfinite = [], []
    for transactional in (False, True):
        ddp = wrap(mlp(20, 60, 30, 40, 5))
        with registered(ddp, ALLGATHER, "efsignsgd", transactional=transactional) as state:
            backward(ddp, rank, 0, None)
            sizes.append(state.metrics()["espresso/residual_bytes"])
            nonfinite.append(backward(ddp, rank, 1, math.inf))
    return sizes[0], sizes[1], all(nonfinite)


SCENARIOS = (
    skipped_by_hand,
    early_overflow,
    plain_overflow,
    scaled,
    rescaled,
    cast_overflow,
    not_transactional,
)


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(__name__, SCENARIOS, 4)
