"""DDP's buckets, laid anew in a running job: real DDP, on two ranks."""

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espresso
from espresso.comm.ddp_buckets import BucketLayout
from espresso.comm.hook import espresso_hook
from espresso.strategies import Cluster
from tests.ddp import Played, batch, mlp, registered, sgd, strategy_for

WIDE = (300, 900, 900, 900, 7)
"""Layers of 1 and 3 MB: DDP takes the first of them alone, then all."""


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def same(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return all((a is None) == (b is None) and (a is None or b is None or torch.equal(a, b)) for a, b in pairs)


class Halves(nn.Module):
    """Uses one half of itself or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([mlp(300, 900, 900, 7), mlp(300, 900, 900, 7)])
        self.turn = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return self.halves[self.turn % 2](inputs)


def ending_frozen() -> nn.Module:
    model = mlp(*WIDE)
    model[6].requires_grad_(False)
    return model


def freezing(ddp: DistributedDataParallel, step: int) -> None:
    """One layer in the first steps of the new buckets; another one from before it was wrapped until shortly before."""
    ddp.module[0].requires_grad_(step not in (3, 4))
    ddp.module[6].requires_grad_(step > 1)


def judging(ddp: DistributedDataParallel, step: int) -> None:
    """As a GAN's critic in its generator's step: all is frozen in the first forward pass that has the new buckets."""
    if step == 3:
        ddp.requires_grad_(False)
        ddp(batch(0, step, 300).requires_grad_()).sum().backward()
        ddp.requires_grad_(True)


Before = Callable[[DistributedDataParallel, int], None]

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Before | None]] = {
    "as it comes": (lambda: mlp(*WIDE), {}, None),
    "views": (lambda: mlp(*WIDE), {"gradient_as_bucket_view": True}, None),
    "unused parameters": (Halves, {"find_unused_parameters": True}, None),
    "some frozen": (ending_frozen, {"find_unused_parameters": True}, freezing),
    "all frozen": (lambda: mlp(*WIDE), {}, judging),
}


def laid_anew(rank: int) -> dict[str, tuple[list[bool], list[int]]]:
    found = {}
    for name, (make, flags, before) in CASES.items():
        model = make()
        plain = DistributedDataParallel(copy.deepcopy(model), **flags)
        ddp = DistributedDataParallel(model, **flags)
        equal, counts = [], []
        with registered(ddp) as state:
            layout = BucketLayout(ddp, state, espresso_hook)
            for step in range(8):
                if step == 3:
                    assert layout(1.0)
                for each in (ddp, plain):
                    each.zero_grad(set_to_none=step % 2 == 0)
                    if before is not None:
                        before(each, step)
                    if step in (3, 5):  # gradients that are there already, of a step without an exchange
                        with each.no_sync():
                            each(batch(rank, 100 + step, 300)).square().mean().backward()
                    each(batch(rank, step, 300)).square().mean().backward()
                equal.append(same(gradients(ddp), gradients(plain)))
                for each in (ddp, plain):
                    sgd(each)
                last = state.session.observer.last
                assert last is not None
                counts.append(len(last.buckets))
        found[name] = equal, counts
    return found


def refused(rank: int) -> list[bool]:
    found = []
    for flags in ({"bucket_cap_mb": 3}, {"static_graph": True}):
        ddp = DistributedDataParallel(mlp(20, 5), **flags)
        with registered(ddp) as state:
            found.append(BucketLayout(ddp, state, espresso_hook)(1.0))
    return found


def asked_twice(rank: int) -> int:
    """Two sizes asked for before one forward pass; the number of buckets then."""
    ddp = DistributedDataParallel(mlp(64, 512, 512, 512, 8))
    plain = strategy_for(ddp, Cluster(2, 1))
    with registered(ddp) as state:
        for cap in (5.0, 1.0):
            state.use(replace(plain, bucket_cap_mb=cap))
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(rank, step, 64)).square().mean().backward()
        return int(ddp.bucket_bytes_cap)


def looked_at_first(rank: int) -> tuple[list[int], bool]:
    """Between the wish and the next step: a copy of the model, a saved one, an evaluation of each."""
    ddp = DistributedDataParallel(mlp(*WIDE))
    counts = []
    with registered(ddp) as state:
        for step in range(6):
            if step == 3:
                assert BucketLayout(ddp, state, espresso_hook)(1.0)
                copied = copy.deepcopy(ddp)
                with torch.inference_mode():
                    same = torch.equal(ddp(batch(rank, 0, 300)), copied(batch(rank, 0, 300)))
                copied(batch(rank, step, 300)).square().mean().backward()
                assert torch.equal(loaded(saved(ddp)).module[0].weight, ddp.module[0].weight)
            ddp.zero_grad()
            ddp(batch(rank, step, 300)).square().mean().backward()
            sgd(ddp)
            counts.append(len(state.session.observer.last.buckets))
        state.check_replicas()
    return counts, same


def asked_for_before_join(rank: int) -> tuple[list[int], bool]:
    """Rank 1 has no inputs in ``join()``: no rank's buckets change."""
    ddp = DistributedDataParallel(mlp(*WIDE))
    counts = []

    def step(number: int) -> None:
        ddp.zero_grad()
        ddp(batch(rank, number, 300)).square().mean().backward()
        sgd(ddp)
        counts.append(len(state.session.observer.last.buckets))

    with registered(ddp) as state:
        for number in range(3):
            step(number)
        assert BucketLayout(ddp, state, espresso_hook)(1.0)
        with ddp.join():
            for number in range(2 * (1 - rank)):
                step(number)
        for number in range(3):
            step(number)
        state.check_replicas()
        equal = len(set(state.session.groups.all_objects(counts[-1]))) == 1
    return [counts[2], counts[-1]], equal


def saved(model: nn.Module) -> io.BytesIO:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return file


def loaded(file: io.BytesIO) -> Any:
    return torch.load(file, weights_only=False)


def by_itself(rank: int) -> tuple[int, int, bool]:
    """Automatic mode, told by its search that smaller buckets are better."""
    ddp = DistributedDataParallel(mlp(*WIDE))
    state = espresso.register(ddp, "efsignsgd", profile_steps=3, race_steps=3, race_rounds=1, decide_by=0, timeout_s=60)
    search = state.session.search
    assert search is not None
    finds = search.decide

    def wants_smaller(job):
        answer = finds(job)
        search.bucket_cap_mb = 1.0
        return answer

    search.decide = wants_smaller
    counts, steps = [], 0
    while not state.decided:
        steps += 1
        assert steps < 60
        ddp.zero_grad()
        ddp(batch(rank, steps, 300)).square().mean().backward()
        sgd(ddp)
        counts.append(len(state.session.observer.last.buckets))
    job, strategy = state.job, state.strategy
    assert strategy is not None
    assert strategy.bucket_cap_mb == 1.0  # whoever resumes lays them alike
    state.check_replicas()
    state.close()
    return counts[2], counts[-1], job is not None and len(job.buckets) == counts[-1]


SCENARIOS = (laid_anew, refused, asked_twice, looked_at_first, asked_for_before_join, by_itself)


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(__name__, SCENARIOS, 2)


def test_buckets_stay_where_a_join_comes_first(played):
    for (before, after), equal in played(asked_for_before_join):
        assert after == before > 1
        assert equal


def test_gradients_stay_ddps_bit_for_bit(played):
    for found in played(laid_anew):
        for name, (equal, counts) in found.items():
            assert equal == [True] * 8, name
            assert counts[-1] > counts[2], (name, counts)
            assert counts[5:] == [counts[-1]] * 3, (name, counts)


def test_a_size_that_was_given_and_a_static_graph_stay(played):
    assert played(refused) == [[False, False]] * 2


def test_of_two_sizes_the_later_one_counts(played):
    assert played(asked_twice) == [1 << 20] * 2


def test_copies_and_evaluations_in_between_change_nothing(played):
    for counts, same in played(looked_at_first):
        assert same
        assert counts[-1] > counts[2]


def test_automatic_mode_decides_for_the_new_buckets(played):
    for before, after, is_of_job in played(by_itself):
        assert after > before
        assert is_of_job
