"""CLAN, compressed Adam and rate-scaled residuals on real ranks."""

import copy
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import espresso
from espresso.live.names import named_gradients
from espresso.optim import CLAN, LANS, CompressedAdam, TwoWay, scale_residuals
from espresso.optim.exchange import ratio
from espresso.strategies import PLAIN, Cluster, CompressorSpec, Site, TensorSpec
from tests.ddp import (
    SHARDED,
    IntegerNet,
    Played,
    agreed,
    batch,
    digest,
    kept_on_all_ranks,
    mlp,
    registered,
    strategy_for,
    wrap,
)

STEPS = 8
SETTINGS: dict[str, Any] = {"timeout_s": 15.0, "offload_threads": 1, "ranks_per_node": 1}
RAW_BELOW = 200
"""Bytes: weights of the small models are compressed, biases are not."""


@contextmanager
def closing(optimizer: Any) -> Iterator[Any]:
    try:
        yield optimizer
    finally:
        optimizer.exchange.close()


def clan(ddp: Any, **settings: Any) -> Any:
    return closing(CLAN(ddp, raw_below_bytes=RAW_BELOW, **{**SETTINGS, **settings}))


def adam(ddp: Any, **settings: Any) -> Any:
    return closing(CompressedAdam(ddp, raw_below_bytes=RAW_BELOW, **{**SETTINGS, **settings}))


def learn(ddp: Any, optimizer: Any, rank: int, steps: range, schedule: Any = None) -> list[str]:
    digests = []
    for step in steps:
        optimizer.zero_grad()
        inputs = batch(rank, step, 20).to(next(ddp.parameters()).dtype)
        ddp(inputs).square().sum().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        assert agreed(ddp), f"replicas differ after step {step}"
        digests.append(digest(ddp.module))
    return digests


# -- the strategy ----------------------------------------------------------------------------------


def test_the_two_way_strategy():
    tensors = (TensorSpec("big", (200, 100)), TensorSpec("small", (100,)))
    policy = TwoWay(CompressorSpec("int8"), raw_below_bytes=1000)
    for cluster, option in (
        (Cluster(3, 1), SHARDED),
        (Cluster(1, 4), SHARDED),
        (
            Cluster(2, 2),
            "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather",
        ),
    ):
        halved = TwoWay(CompressorSpec("int8"), halves=True).option(cluster)
        assert str(halved).replace(":fp16", "") == option
        assert (":fp16" in str(halved)) == cluster.is_hierarchical
        strategy = policy(tensors, cluster)
        assert str(strategy.choices["big"].option) == option
        assert str(strategy.choices["big"].compressor) == "int8"
        assert not strategy.choices["small"].option.is_compressed
    assert not policy(tensors, Cluster(1, 1)).compresses
    with pytest.raises(ValueError, match="raw_below_bytes must be at least 0, got -1"):
        TwoWay(CompressorSpec("int8"), raw_below_bytes=-1)


def test_ratio_is_guarded():
    assert ratio(0.4, 0.1) == 4.0
    assert [ratio(0.0, 0.1), ratio(0.1, 0.0), ratio(0.0, 0.0), ratio(1e300, 1e-300)] == [1.0] * 4


# -- CLAN ------------------------------------------------------------------------------------------


def test_clan_with_identity_is_lans_bit_for_bit(played):
    for plain, identity, option, lossy in played(identity_is_lans):
        assert identity == plain
        assert len(set(plain)) == STEPS
        assert option == SHARDED
        assert lossy[-1] != plain[-1]


def test_clan_compresses_and_agrees_with_any_compressor_strategy_and_exchange(played):
    for results in played(clan_variants):
        for name, (compressed, sent, raw, better) in results.items():
            assert compressed == 1, f"{name}: of the weights one has 90 numbers, which travel raw"
            assert sent < 0.7 * raw, name
            assert better, name


def test_clan_resumes_bit_for_bit(played):
    for unbroken, resumed, forgotten in played(clan_resumed):
        assert resumed == unbroken
        assert forgotten != unbroken


def test_clan_refuses(played):
    for messages in played(clan_refusals):
        assert "RuntimeError: fused=True" in messages["lans first"]
        assert "ValueError: lr" in messages["rate"]
        assert "'strategy' belongs to espresso.register" in messages["two strategies"]
        assert "no compressor 'zip'" in messages["compressor"]
        must = "warmup_steps must be a whole number of at least 1, since the variance comes from it"
        assert messages["no warm-up"] == f"ValueError: {must}, got 0"
        assert messages["part of a step"] == f"TypeError: {must}, got 7.5 (float)"
        assert "automatic mode" in messages["auto"]
        assert messages["two optimizers"].startswith("ValueError: the given exchange has a CompressedAdam already")
        assert "CompressedAdam: the model is in join()" in messages["join"]
        assert "scale_residuals: the model is in join()" in messages["join, rescaled"]
        assert "no_sync()" in messages["two exchanges"]
        for what in ("CLAN", "CompressedAdam"):
            for how in ("copied", "pickled"):
                assert messages[f"{what}, {how}"].startswith(f"TypeError: {what} has the exchange of its model, so it")


# -- residuals in units of the rate ----------------------------------------------------------------


def test_scaled_residuals_conserve_the_parameters_movement(played):
    for scaled, unscaled, factor_at_zero in played(rates_followed):
        assert scaled == 0.0
        assert unscaled > 0.1
        assert factor_at_zero == 1.0


# -- compressed Adam -------------------------------------------------------------------------------


def test_warm_up_is_adamw_bit_for_bit(played):
    for ours, torchs in played(warm_up):
        assert ours == torchs


def test_compressed_adam_equals_the_reference(played):
    """With the identity compressor, momentum averaged over ranks is momentum of the averaged gradient; so it is where
    espresso is off, from the start or from some step on.
    """
    for results in played(frozen_variance):
        for (*settings, off), (apart, unfrozen, compressed_sites) in results.items():
            assert apart < 2e-6, (settings, off)
            assert unfrozen > 1e-4, (settings, off)
            assert compressed_sites == ({Site.LOCAL, Site.FLAT_SECOND} if off is None else set())


def test_compressed_adam_resumes_bit_for_bit(played):
    for unbroken, resumed, forgotten in played(adam_resumed):
        assert resumed == unbroken
        assert forgotten != unbroken


def test_a_new_process_goes_on_from_a_distributed_checkpoint(played):
    for found in played(loaded_anew):
        for name, (unbroken, resumed) in found.items():
            assert resumed == unbroken, name


def test_what_the_guard_left_exact_stays_so_where_a_checkpoint_is_loaded(played):
    assert played(backed_off) == [(True, False, False)] * 2


def test_compressed_adam_resumes_where_layers_missed_steps(played):
    assert played(branches_resumed) == [0.0, 0.0]


def test_compressed_adam_does_not_decay_what_never_moved(played):
    assert played(never_moved) == [0.0, 0.0]


def test_compressed_adam_and_what_ddp_leaves_alone(played):
    for largest_step, apart, kept in played(left_alone):
        assert largest_step < 0.1
        assert apart < 1e-4
        assert kept == 1.0


def test_compressed_adam_refuses_checkpoints_of_another_phase(played):
    for longer, undivided, older, bare in played(phases_refused):
        assert "the checkpoint is of step 8, after its warm-up; with warmup_steps=20 it would" in longer
        assert "momenta are compressed, divided; precondition=False needs them compressed, not div" in undivided
        assert "the checkpoint is of step 4, after its warm-up" in older, "as many as any layer took"
        assert "the checkpoint is of step 8, after its warm-up, and has no moments" in bare
        assert "get_state_dict of torch.distributed.checkpoint.state_dict" in bare


def test_compressed_adam_goes_on_from_a_checkpoint_of_adamw(played):
    assert all(0.0 < moved < 0.1 for moved in played(adamw_resumed))


def test_loss_scale_and_skipped_steps_do_not_show(played):
    for plain, scaled in played(scaled_losses):
        assert scaled == plain


def test_compressed_adam_follows_compressors_that_change_with_epoch_and_step(played):
    """Their first values were all that it knew of: of PowerSGD none."""
    for ratios, ranks in played(scheduled):
        assert [ratios[0], ratios[2]] == ["none", "dgc:ratio=0.05"]
        assert ratios[1] not in ratios[::2]
        assert ranks == ["none", "none", "powersgd:rank=2,start_iter=5"]


def test_what_momenta_lose_is_kept_also_of_what_a_rank_did_not_use(played):
    """It is no gradient that nobody has: a momentum goes on."""
    assert played(momentum_of_the_unused)[1] > 0


@pytest.fixture(scope="module")
def played():
    return Played(
        __name__,
        (
            identity_is_lans, clan_variants, clan_resumed, clan_refusals, rates_followed, warm_up, frozen_variance,
            adam_resumed, loaded_anew, backed_off, branches_resumed, never_moved, left_alone, phases_refused,
            adamw_resumed, scaled_losses, only_measured, scheduled, momentum_of_the_unused,
        ),
        2,
        deadline_s=120.0,
    )  # fmt: skip


def test_where_the_job_is_only_measured_nothing_replaces_that(played):
    for found in played(only_measured):
        assert found == {"adam": (True, 0.0), "resumed": (True, 0.0), "used": (True, 0.0)}


# -- scenarios, on two ranks -----------------------------------------------------------------------


def identity_is_lans(rank: int) -> Any:
    ddp = wrap(mlp(20, 30, 3))
    plain = learn(ddp, LANS(ddp.parameters(), lr=0.02), rank, range(STEPS))
    ddp = wrap(mlp(20, 30, 3))
    with clan(ddp, lr=0.02, compressor="none") as optimizer:
        identity = learn(ddp, optimizer, rank, range(STEPS))
        option = str(optimizer.exchange.strategy.choices["0.weight"].option)
    ddp = wrap(mlp(20, 30, 3))
    with clan(ddp, lr=0.02, compressor="int8") as optimizer:
        lossy = learn(ddp, optimizer, rank, range(STEPS))
    return plain, identity, option, lossy


def clan_variants(rank: int) -> Any:
    results = {}
    for name, settings in {
        "efsignsgd": {},
        "topk": {"compressor": "topk:ratio=0.1"},
        "int8": {"compressor": "int8"},
        "all-gather": {"strategy": True},
        "scaled residuals": {"scale_residuals": True},
        "exchange given": {"exchange": True},
    }.items():
        ddp = wrap(mlp(20, 30, 3))
        if "strategy" in settings:
            settings["strategy"] = strategy_for_weights(ddp)
        if "exchange" in settings:
            settings = {"exchange": espresso.register(ddp, strategy=strategy_for_weights(ddp), **SETTINGS)}
            optimizer = CLAN(ddp, lr=0.02, **settings)
        else:
            optimizer = CLAN(ddp, lr=0.02, raw_below_bytes=RAW_BELOW, **SETTINGS, **settings)
        with closing(optimizer):
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
            first = float(ddp(batch(rank, 0, 20)).square().sum())
            learn(ddp, optimizer, rank, range(STEPS), schedule)
            found = optimizer.exchange.metrics()
            better = float(ddp(batch(rank, 0, 20)).square().sum()) < first
            results[name] = (
                found["espresso/tensors_compressed"],
                found["espresso/bytes_sent"],
                found["espresso/bytes_raw"],
                better,
            )
    return results


def strategy_for_weights(ddp: Any) -> Any:
    """A strategy that compresses the weights, by all-gather."""
    whole = strategy_for(ddp, Cluster(2, 1), "comp > flat.allgather > dec", "efsignsgd")
    plain = strategy_for(ddp, Cluster(2, 1))
    return whole.with_choices({name: plain.choices[name] for name in whole.choices if name.endswith("bias")})


def settled(seed: int) -> Any:
    """With find_unused_parameters DDP does not rebuild its buckets: the same ones before and after the break."""
    return wrap(mlp(20, 30, 3, seed=seed), find_unused_parameters=True)


def clan_resumed(rank: int) -> Any:
    def trained(resume: str) -> list[str]:
        ddp = settled(0)
        with clan(ddp, lr=0.02, scale_residuals=True) as optimizer:
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            head = learn(ddp, optimizer, rank, range(4), schedule)
            if not resume:
                return head + learn(ddp, optimizer, rank, range(4, STEPS), schedule)
            saved = copy.deepcopy(
                (
                    ddp.module.state_dict(),
                    optimizer.state_dict(),
                    schedule.state_dict(),
                    optimizer.exchange.state_dict(),
                )
            )
        ddp = settled(9)
        ddp.module.load_state_dict(saved[0])
        with clan(ddp, lr=0.5, scale_residuals=True) as optimizer:
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            optimizer.load_state_dict(saved[1])
            schedule.load_state_dict(saved[2])
            if resume == "whole":
                optimizer.exchange.load_state_dict(saved[3])
            return head + learn(ddp, optimizer, rank, range(4, STEPS), schedule)

    return trained(""), trained("whole"), trained("without residuals")


def clan_refusals(rank: int) -> dict[str, str]:
    def message(action: Any) -> str:
        try:
            action()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    ddp = wrap(mlp(20, 30, 3))
    halves = wrap(mlp(20, 30, 3, dtype=torch.bfloat16))
    found = {
        "lans first": message(lambda: CLAN(halves, fused=True, **SETTINGS)),
        "rate": message(lambda: CLAN(ddp, lr=-1.0, **SETTINGS)),
        "compressor": message(lambda: CLAN(ddp, compressor="zip", **SETTINGS)),
        "no warm-up": message(lambda: CompressedAdam(ddp, warmup_steps=0)),
        "part of a step": message(lambda: CompressedAdam(ddp, warmup_steps=7.5)),
        "auto": message(lambda: CompressedAdam(ddp, warmup_steps=1, strategy="auto")),
    }
    # None of them left a hook behind.
    with adam(ddp, warmup_steps=1) as optimizer:
        found["two strategies"] = message(
            lambda: CLAN(ddp, exchange=optimizer.exchange, strategy=strategy_for_weights(ddp))
        )
        found["two optimizers"] = message(lambda: CompressedAdam(ddp, warmup_steps=1, exchange=optimizer.exchange))
        learn(ddp, optimizer, rank, range(2))
        ddp(batch(rank, 2, 20)).sum().backward()
        found["two exchanges"] = message(lambda: ddp(batch(rank, 3, 20)).sum().backward())
    for make in (clan, partial(adam, warmup_steps=1)):
        with make(wrap(mlp(20, 30, 3))) as optimizer:
            what = type(optimizer).__name__
            found[f"{what}, copied"] = message(partial(copy.deepcopy, optimizer))
            found[f"{what}, pickled"] = message(partial(pickle.dumps, optimizer))
    joined = wrap(mlp(20, 30, 3))
    with adam(joined, warmup_steps=4) as optimizer:
        found["join"] = message(lambda: join_with_more(joined, optimizer, rank))
    rescaled = wrap(mlp(20, 30, 3))
    with registered(rescaled, SHARDED, "efsignsgd") as state:
        sgd = torch.optim.SGD(rescaled.parameters(), lr=0.1)
        scale_residuals(state, sgd)
        found["join, rescaled"] = message(lambda: join_with_more(rescaled, sgd, rank))
    return found


def join_with_more(ddp: Any, optimizer: Any, rank: int) -> None:
    """Ranks with more batches than others, over the end of the warm-up."""
    with ddp.join():
        learn(ddp, optimizer, rank, range(3 + 3 * rank))


RATES = (0.0, 0.5, 0.25, 0.5, 0.0, 0.125, 0.0625)


def rates_followed(rank: int) -> Any:
    def off_by(scaled: bool) -> float:
        """How far SGD's parameters plus what is kept, at the last rate, are from uncompressed SGD's."""
        ddp = wrap(IntegerNet())
        exact = {name: torch.zeros(p.numel()) for name, p in named_gradients(ddp).items()}
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        with registered(ddp, SHARDED, "topk:ratio=0.25", feedback_gain=0.25) as state:
            if scaled:
                scale_residuals(state, optimizer)
            # With a rate of 0 what is sent is lost on purpose; the law is for the steps from the last one on.
            start: dict[str, torch.Tensor] = {}
            for step, rate in enumerate(RATES):
                optimizer.param_groups[0]["lr"] = rate
                if step == 5:
                    # Units of the residuals: the last rate above zero.
                    kept = kept_on_all_ranks(state, ddp)
                    start = {
                        name: p.detach() - 0.5 * kept[name].float() / 2 for name, p in named_gradients(ddp).items()
                    }
                    exact = {name: torch.zeros_like(total) for name, total in exact.items()}
                ddp.zero_grad()
                ddp(100 * step + rank).backward()
                optimizer.step()
                for other in range(2):
                    reference = IntegerNet()
                    reference(100 * step + other).backward()
                    for name, p in reference.named_parameters():
                        exact[name] += rate * p.grad / 2
            kept = kept_on_all_ranks(state, ddp)
            assert all(torch.isfinite(values).all() for values in kept.values())
            assert sum(float(values.abs().sum()) for values in kept.values()) > 0
            return max(
                float((p.detach() - RATES[-1] * kept[name].float() / 2 - start[name] + exact[name]).abs().max())
                for name, p in named_gradients(ddp).items()
            )

    return off_by(True), off_by(False), ratio(RATES[3], RATES[4])


def warm_up(rank: int) -> Any:
    ddp = wrap(mlp(20, 30, 3))
    torchs = learn(ddp, torch.optim.AdamW(ddp.parameters(), lr=0.02, weight_decay=0.1), rank, range(STEPS))
    ddp = wrap(mlp(20, 30, 3))
    with adam(ddp, lr=0.02, weight_decay=0.1, warmup_steps=STEPS + 1) as optimizer:
        return learn(ddp, optimizer, rank, range(STEPS)), torchs


def frozen_variance(rank: int) -> Any:
    results = {}
    kinds: list[tuple[bool, bool, int | None]] = [(False, True, None), (True, True, None), (False, False, None)]
    kinds += [(True, True, 0), (False, False, 0), (False, True, 1), (False, True, 5), (False, False, 5)]
    cases = [(torch.float32, *kind) for kind in kinds] + [(torch.float64, *kinds[0])]
    for dtype, maximize, precondition, off in cases:  # off: the step from which on espresso is
        os.environ["ESPRESSO_DISABLE"] = str(int(off == 0))
        ddp = wrap(mlp(20, 30, 3, dtype=dtype))
        want = [p.detach().double().numpy().copy() for p in ddp.parameters()]
        gradients: list[list[Any]] = []
        twin = mlp(20, 30, 3, dtype=dtype)
        with adam(
            ddp, lr=0.01, weight_decay=0.1, warmup_steps=3, compressor="none", maximize=maximize,
            precondition=precondition, deviation_floor=0.0,
        ) as optimizer:  # fmt: skip
            for step in range(STEPS):
                if step == off:
                    optimizer.exchange.unregister()
                twin.load_state_dict(ddp.module.state_dict())
                twin.zero_grad()
                for other in range(2):
                    (twin(batch(other, step, 20).to(dtype)).square().sum() / 2).backward()
                gradients.append([p.grad.double().numpy().copy() for p in twin.parameters()])
                learn(ddp, optimizer, rank, range(step, step + 1))
            strategy = optimizer.exchange.strategy
        option = None if off is not None else strategy.choices["0.weight"].option
        sites = {Site.LOCAL, Site.FLAT_SECOND} if str(option) == SHARDED else set()
        got = [p.detach().double().numpy() for p in ddp.parameters()]
        apart = [
            distance(
                [adam_reference(x, [g[i] for g in gradients], freeze_at, maximize) for i, x in enumerate(want)],
                got,
            )
            for freeze_at in (3, STEPS)
        ]
        results[str(dtype), maximize, precondition, off] = (*apart, sites)
    del os.environ["ESPRESSO_DISABLE"]
    return results


class Branches(torch.nn.Module):
    """Every other step one of two layers has no gradient; a third never has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(20, 3) for _ in range(3))

    def forward(self, inputs: torch.Tensor, which: int) -> Any:
        return self.layers[which](inputs)


ADAM: dict[str, Any] = {"lr": 0.01, "compressor": "none", "weight_decay": 0.1}


def branches() -> Any:
    return wrap(Branches(), find_unused_parameters=True)


def train_branches(ddp: Any, optimizer: Any, rank: int, steps: range, which: int | None = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(batch(rank, step, 20), step % 2 if which is None else which).square().sum().backward()
        optimizer.step()


def trained_branches(rank: int) -> tuple[Any, Any, Any]:
    """After 8 steps: the state of the model, that of the optimizer; the model 4 steps later."""
    ddp = branches()
    with adam(ddp, warmup_steps=6, **ADAM) as optimizer:
        train_branches(ddp, optimizer, rank, range(8))
        saved = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict()))
        train_branches(ddp, optimizer, rank, range(8, 12))
    return *saved, ddp


def momentum_of_the_unused(rank: int) -> float:
    """What a rank keeps of the first layer, whose compression begins in a step in which rank 1 uses the other."""
    ddp = branches()
    with adam(ddp, warmup_steps=4, lr=0.01, compressor="topk:ratio=0.1,raw_below=1") as optimizer:
        train_branches(ddp, optimizer, rank, range(4))
        train_branches(ddp, optimizer, rank, range(4, 5), rank)
        name, size = "layers.0.weight", ddp.module.layers[0].weight.numel()
        return float(np.abs(optimizer.exchange.session.store.kept({name: np.arange(size)})[name]).sum())


def largest(one: Any, other: Any) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def branches_resumed(rank: int) -> float:
    weights, saved, ddp = trained_branches(rank)
    again = branches()
    again.module.load_state_dict(weights)
    with adam(again, warmup_steps=6, **ADAM) as optimizer:
        optimizer.load_state_dict(saved)
        train_branches(again, optimizer, rank, range(8, 12))
    return largest(ddp, again)


def never_moved(rank: int) -> float:
    weights, saved, _ = trained_branches(rank)
    ddp = branches()
    never = ddp.module.layers[2].weight.detach().clone()
    ddp.module.load_state_dict(weights)
    with adam(ddp, warmup_steps=6, **ADAM) as optimizer:
        optimizer.load_state_dict(saved)
        train_branches(ddp, optimizer, rank, range(8, 10), which=2)  # it has a gradient now, and no variance
    return float((ddp.module.layers[2].weight - never).abs().max())


def left_alone(rank: int) -> tuple[float, float, float]:
    """What DDP is to ignore: its largest step after the warm-up, and how far it is from Adam's. What no rank uses in a
    step: what is left of its momentum, though gradients were set to zero.
    """
    model = mlp(20, 30, 3)
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    ddp = wrap(model)
    alone = ddp.module[2].weight
    want, gradients, steps = alone.detach().double().numpy().copy(), [], []
    with adam(
        ddp, params=ddp.parameters(), lr=0.01, weight_decay=0.1, warmup_steps=3, deviation_floor=0.0
    ) as optimizer:
        for step in range(STEPS):
            before = alone.detach().clone()
            optimizer.zero_grad()
            ddp(batch(rank, step, 20)).square().sum().backward()
            gradients.append(alone.grad.double().numpy().copy())
            optimizer.step()
            steps.append(float((alone - before).abs().max()))
    apart = distance([adam_reference(want, gradients, 3, False)], [alone.detach().double().numpy()])
    ddp = branches()
    with adam(ddp, warmup_steps=6, **ADAM) as optimizer:
        train_branches(ddp, optimizer, rank, range(9))  # of the last step the first layer still has gradients
        kept = optimizer.state[ddp.module.layers[0].weight]["exp_avg"]
        before = float(kept.norm())
        optimizer.zero_grad(set_to_none=False)
        ddp(batch(rank, 8, 20), 1).square().sum().backward()
        optimizer.step()
    return max(steps), apart, float(kept.norm()) / before


def phases_refused(rank: int) -> list[str]:
    """With a longer warm-up, with undivided momenta, of an older checkpoint, which does not tell its phase, and of one
    without moments.
    """
    _, saved, _ = trained_branches(rank)
    older = copy.deepcopy(saved)
    for group in older["param_groups"]:
        del group["phase"], group["steps"]
    longer, alike = {"warmup_steps": 20}, {"warmup_steps": 6}
    bare = {**saved, "state": {}}
    told = []
    for body, asked in ((saved, longer), (saved, {**alike, "precondition": False}), (older, longer), (bare, alike)):
        with adam(branches(), **ADAM, **asked) as optimizer, pytest.raises(ValueError, match=r".") as caught:
            optimizer.load_state_dict(body)
        told.append(str(caught.value))
    return told


def adamw_resumed(rank: int) -> float:
    ddp = branches()
    torchs = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    train_branches(ddp, torchs, rank, range(6))
    before = copy.deepcopy(ddp.module)
    with adam(ddp, warmup_steps=4, **ADAM) as optimizer:
        optimizer.load_state_dict(torchs.state_dict())
        train_branches(ddp, optimizer, rank, range(6, 8))
    return largest(ddp.module, before)


def adam_reference(x: Any, gradients: Any, freeze_at: int, maximize: bool) -> Any:
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        g = -g if maximize else g
        m = 0.9 * m + 0.1 * g
        if t <= freeze_at:
            v = 0.999 * v + 0.001 * g**2
        den = np.sqrt(v / (1 - 0.999 ** min(t, freeze_at))) + 1e-8
        x = (1 - 0.01 * 0.1) * x - 0.01 * (m / (1 - 0.9**t)) / den
    return x


def distance(left: Any, right: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


def adam_resumed(rank: int) -> Any:
    def trained(break_at: int, residuals: bool = True) -> list[str]:
        ddp = settled(0)
        with adam(ddp, lr=0.01, warmup_steps=3) as optimizer:
            head = learn(ddp, optimizer, rank, range(break_at))
            saved = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict(), optimizer.exchange.state_dict()))
        if break_at == STEPS:
            return head
        ddp = settled(9)
        ddp.module.load_state_dict(saved[0])
        with adam(ddp, lr=0.5, warmup_steps=3) as optimizer:
            optimizer.load_state_dict(saved[1])
            if residuals:
                optimizer.exchange.load_state_dict(saved[2])
            return head + learn(ddp, optimizer, rank, range(break_at, STEPS))

    unbroken = trained(STEPS)
    assert trained(2) == unbroken
    return unbroken, trained(5), trained(5, residuals=False)


def loaded_anew(rank: int) -> dict[str, tuple[list[str], list[str]]]:
    """Digests of an unbroken job whose rate changes, and of one that is broken off there and goes on in a new process,
    which knows nothing but a distributed checkpoint.
    """
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    head, rest, found = range(5), range(5, STEPS), {}
    for name, make in {"CLAN": partial(clan, scale_residuals=True), "Adam": partial(adam, warmup_steps=3)}.items():
        told = []
        for spans in ((head, rest), (head,), (rest,)):
            ddp, digests = settled(spans[0].start), []
            with make(ddp) as optimizer:
                if spans == (rest,):
                    saved = saved_of(ddp, optimizer)
                    dcp.load(saved, checkpoint_id=f"{folder[0]}/{name}")
                    set_state_dict(ddp, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
                for steps in spans:
                    optimizer.param_groups[0]["lr"] = 0.02 if steps is head else 0.005
                    digests += learn(ddp, optimizer, rank, steps)
                if spans == (head,):
                    dcp.save(saved_of(ddp, optimizer), checkpoint_id=f"{folder[0]}/{name}")
            told.append(digests)
        found[name] = told[0], told[1] + told[2]
    return found


def saved_of(ddp: Any, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(ddp, optimizer)
    return {"model": weights, "optimizer": moments, "espresso": optimizer.exchange}


def backed_off(rank: int) -> tuple[bool, bool, bool]:
    """Whether a weight is compressed: at first, when the guard has found it out, when a checkpoint is loaded then."""

    def compressed() -> bool:
        return optimizer.exchange.strategy.choices["0.weight"] != PLAIN

    ddp, found = wrap(mlp(20, 30, 3)), []
    with adam(ddp, warmup_steps=1) as optimizer:
        learn(ddp, optimizer, rank, range(2))
        found.append(compressed())
        optimizer.exchange.session.decider.back_off(["0.weight"], 2)
        found.append(compressed())
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        learn(ddp, optimizer, rank, range(2, 3))
        return *found, compressed()


def scheduled(rank: int) -> tuple[list[str], list[str]]:
    """What the first weight is compressed with: in the warm-up, after it, and when a schedule has ended."""

    def found(later: int, **settings: Any) -> list[str]:
        ddp = wrap(mlp(20, 30, 3))
        told = []
        with adam(ddp, lr=0.01, warmup_steps=2, **settings) as optimizer:
            for epoch, steps in enumerate((range(1), range(1, 3), range(3, later))):
                optimizer.exchange.set_epoch(epoch)
                learn(ddp, optimizer, rank, steps)
                told.append(str(optimizer.exchange.strategy.choices["0.weight"].compressor))
        return told

    compressor = "powersgd:rank=2,start_iter=5"
    option = "comp > flat.allreduce > transform > flat.allreduce > dec"
    whole, plain = (strategy_for(mlp(20, 30, 3), Cluster(2, 1), *kind) for kind in ((option, compressor), ()))
    strategy = plain.with_choices({"0.weight": whole.choices["0.weight"]})
    return found(6, compressor="dgc:ratio=0.05,warmup_epochs=2"), found(8, compressor=compressor, strategy=strategy)


def scaled_losses(rank: int) -> Any:
    """A power of two as loss scale, and a step skipped over an inf, as a GradScaler does."""

    def trained(scale: float) -> list[str]:
        ddp = wrap(mlp(20, 30, 3))
        digests = []
        with adam(ddp, lr=0.01, warmup_steps=2) as optimizer:
            optimizer.exchange.set_grad_scale(scale)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = ddp(batch(rank, step, 20)).square().sum() * scale
                if scale > 1 and step == 4 and rank == 0:
                    loss = loss * float("inf")
                loss.backward()
                gradients = [p.grad for p in ddp.parameters()]
                torch._foreach_mul_(gradients, 1.0 / scale)
                if not all(bool(torch.isfinite(g).all()) for g in gradients):
                    # Again, without the inf: residuals and moments are as if nothing had been.
                    optimizer.zero_grad()
                    (ddp(batch(rank, step, 20)).square().sum() * scale).backward()
                    torch._foreach_mul_([p.grad for p in ddp.parameters()], 1.0 / scale)
                optimizer.step()
                digests.append(digest(ddp.module))
        return digests

    return trained(1.0), trained(1024.0)


def only_measured(rank: int) -> dict[str, tuple[bool, float]]:
    """``ESPRESSO_PROFILE_ONLY`` in scripts that change the strategy: whether all was measured, tensors compressed."""
    found: dict[str, tuple[bool, float]] = {}
    short = {"profile_steps": 2}

    def measured(state: Any) -> tuple[bool, float]:
        return state.job is not None, state.metrics()["espresso/tensors_compressed"]

    def trained(ddp: Any, steps: int = STEPS) -> None:
        learn(ddp, torch.optim.SGD(ddp.parameters(), lr=0.001), rank, range(steps))

    ddp = wrap(mlp(20, 30, 3))
    with registered(ddp, SHARDED, "efsignsgd") as state:
        trained(ddp, 2)
        saved = state.state_dict()
    os.environ["ESPRESSO_PROFILE_ONLY"] = "1"
    try:
        ddp = wrap(mlp(20, 30, 3))
        with adam(ddp, lr=0.01, warmup_steps=3, **short) as optimizer:
            learn(ddp, optimizer, rank, range(STEPS))
            found["adam"] = measured(optimizer.exchange)
        ddp = wrap(mlp(20, 30, 3))
        with registered(ddp, compressor="efsignsgd", strategy="auto", **short) as state:
            state.load_state_dict(saved)
            trained(ddp)
            found["resumed"] = measured(state)
        ddp = wrap(mlp(20, 30, 3))
        with registered(ddp, SHARDED, "efsignsgd", **short) as state:
            trained(ddp, 2)
            state.use(strategy_for_weights(ddp))
            trained(ddp)
            found["used"] = measured(state)
    finally:
        del os.environ["ESPRESSO_PROFILE_ONLY"]
    return found
