"""What a task of the suite is, and what tasks are made of.

Everything is seeded: name, seed, step, rank and world size give the same weights and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models import seeded

Optimizers = Sequence[torch.optim.Optimizer]

TEST = 1 << 20
"""Steps from here on are for testing."""


@dataclass(frozen=True)
class Task:
    """One or more models that train together.

    Attributes:
        make_models: the same on every rank.
        make_optimizer: for one of them.
        step: ``(wrapped models, optimizers, step, rank, world size)``: one step of each, their loss.
        metric: of the bare models, on data that training does not see.
        less_is_more: whether a smaller metric is better.
    """

    name: str
    make_models: Callable[[], list[nn.Module]]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    step: Callable[[Sequence[nn.Module], Optimizers, int, int, int], float]
    metric: Callable[[Sequence[nn.Module]], float]
    less_is_more: bool = False


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """One step of the optimizer down ``loss``, whose value this returns."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def generator_of(seed: int, *more: int) -> torch.Generator:
    """The same numbers wherever all of these are the same."""
    mixed = seed + 17
    for number in more:
        mixed = (mixed * 1_000_003 + number + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(mixed)


def _adam(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=rate)


def classifier(
    name: str,
    seed: int,
    make: Callable[[], nn.Module],
    batch: Callable[[torch.Generator, int], tuple[tuple[Tensor, ...], Tensor]],
    size: int,
    rate: float = 0.0,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    tested: int = 2048,
) -> Task:
    """A model that says of which class an input is; ``batch`` draws so many inputs and their classes.

    Args:
        rate: of Adam, without an ``optimizer``.
        tested: inputs of the metric.
    """

    def step(models: Sequence[nn.Module], optimizers: Optimizers, step: int, rank: int, world: int) -> float:
        inputs, targets = batch(generator_of(seed, step, rank), size)
        return descend(optimizers[0], functional.cross_entropy(models[0](*inputs), targets))

    @torch.no_grad()
    def accuracy(models: Sequence[nn.Module]) -> float:
        # The test is the same for every seed.
        inputs, targets = batch(generator_of(0, TEST), tested)
        return float((models[0](*inputs).argmax(1) == targets).float().mean())

    return Task(name, seeded(seed, lambda: [make()]), optimizer or _adam(rate), step, accuracy)
