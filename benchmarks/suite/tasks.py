"""The tasks: data ship with a dependency, or are made by the rule that stands at the task.

| name        | what is different                  | data                              | metric                 |
| ----------- | ---------------------------------- | --------------------------------- | ---------------------- |
| mlp         | dense, few large tensors           | 8x8 digits                        | accuracy               |
| resnet      | residual CNN, batch norm           | 8x8 digits                        | accuracy               |
| vit         | attention over patches             | 8x8 digits                        | accuracy               |
| gpt         | causal attention, embeddings       | Python's sources, by character    | accuracy               |
| lstm        | recurrent, weights used many times | Python's sources, by character    | accuracy               |
| recommender | giant embeddings, few rows a step  | pairs by a rule of hidden vectors | accuracy               |
| graph       | message passing, sums over nodes   | graphs of four kinds              | accuracy               |
| gan         | two models that take turns         | 8x8 digits                        | distance, less is more |

Eight more are in :mod:`benchmarks.suite.held_out` and :mod:`benchmarks.suite.unseen`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models import Workload, build_workload, digits, seeded
from benchmarks.suite.held_out import HELD_OUT
from benchmarks.suite.task import TEST, Optimizers, Task, classifier, descend, generator_of
from benchmarks.suite.unseen import UNSEEN

WORKLOADS = ("mlp", "resnet", "vit", "gpt", "lstm")
"""Those of :mod:`benchmarks.models`."""

# A recommender: user u likes item i where the dot product of their hidden vectors is above zero. Both are drawn with a
# cubic preference for small numbers, as popularity has it, so that some rows are met often and most hardly ever.

HIDDEN = 8


class Recommender(nn.Module):
    """Two embeddings, a small network over both."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.head = nn.Sequential(nn.Linear(3 * width, 256), nn.ReLU(), nn.Linear(256, 2))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """(batch,) and (batch,) to logits (batch, 2)."""
        left, right = self.user(users), self.item(items)
        return torch.as_tensor(self.head(torch.cat([left, right, left * right], 1)))


def _recommender(seed: int, tiny: bool) -> Task:
    users, items, width = (200, 100, 16) if tiny else (100_000, 40_000, 64)
    hidden_users = torch.randn(users, HIDDEN, generator=generator_of(0, 1))
    hidden_items = torch.randn(items, HIDDEN, generator=generator_of(0, 2))

    def batch(generator: torch.Generator, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
        drawn = torch.rand(2, size, generator=generator) ** 3
        u, i = (drawn[0] * users).long(), (drawn[1] * items).long()
        return (u, i), ((hidden_users[u] * hidden_items[i]).sum(1) > 0).long()

    return classifier("recommender", seed, lambda: Recommender(users, items, width), batch, 64 if tiny else 2048, 3e-3)


# Graphs of sixteen nodes and about as many edges, of four kinds: a ring with chords, two groups, a hub, edges anywhere.
# Nodes are renumbered at random and bear noise, so that only the edges tell.

NODES = 16


class MessagePassing(nn.Module):
    """Rounds of sums over neighbours, then one over all nodes."""

    def __init__(self, width: int, rounds: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.others = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(rounds))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(rounds))
        self.head = nn.Linear(width, 4)

    def forward(self, noise: Tensor, edges: Tensor) -> Tensor:
        """(batch, nodes, 4) and (batch, nodes, nodes) to logits (batch, 4)."""
        held = self.first(noise)
        for own, others, norm in zip(self.own, self.others, self.norms, strict=True):
            held = held + functional.relu(norm(own(held) + others(edges @ held)))
        return torch.as_tensor(self.head(held.mean(1)))


def _graphs(generator: torch.Generator, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    kinds = torch.randint(4, (size,), generator=generator)
    at = torch.arange(NODES)
    apart = (at[:, None] - at[None, :]).abs()
    same = (at[:, None] < NODES // 2) == (at[None, :] < NODES // 2)
    hub = (at[:, None] == 0) | (at[None, :] == 0)
    often = torch.stack(
        [
            torch.where((apart == 1) | (apart == NODES - 1), 0.8, 0.05),
            torch.where(same, 0.25, 0.02),
            torch.where(hub, 0.8, 0.03),
            torch.full((NODES, NODES), 0.13),
        ]
    )
    upper = (torch.rand(size, NODES, NODES, generator=generator) < often[kinds]).float().triu(1)
    order = torch.rand(size, NODES, generator=generator).argsort(1)
    edges = upper + upper.transpose(1, 2)
    edges = edges.gather(1, order[:, :, None].expand_as(edges)).gather(2, order[:, None, :].expand_as(edges))
    return (torch.randn(size, NODES, 4, generator=generator), edges), kinds


def _graph(seed: int, tiny: bool) -> Task:
    return classifier("graph", seed, lambda: MessagePassing(16 if tiny else 960), _graphs, 8, 3e-3 if tiny else 1e-4)


# A GAN on the digits: the discriminator learns from the real and the made, then the generator from the discriminator.
# The metric is the Fréchet distance between normal distributions fitted to what is made and to the test images.

NOISE = 32


def _gan(seed: int, tiny: bool) -> Task:
    width, rate = (32, 5e-3) if tiny else (1400, 2e-4)
    (images, _), (test, _) = digits()

    def make() -> list[nn.Module]:
        generator = nn.Sequential(
            nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid()
        )
        discriminator = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )
        return [generator, discriminator]

    def step(models: Sequence[nn.Module], optimizers: Optimizers, step: int, rank: int, world: int) -> float:
        (makes, judges), size = models, 64
        bare_makes, bare_judges = (getattr(model, "module", model) for model in models)
        drawn = generator_of(seed, step, rank)
        real = images[torch.randint(len(images), (size,), generator=drawn)]
        noise = torch.randn(size, NOISE, generator=drawn)
        with torch.no_grad():
            made = bare_makes(noise)
        said = judges(torch.cat([real, made]))[:, 0]
        truth = torch.cat([torch.ones(size), torch.zeros(size)])
        loss = descend(optimizers[1], functional.binary_cross_entropy_with_logits(said, truth))
        # Frozen, so that the generator's backward pass leaves the discriminator's buckets alone.
        bare_judges.requires_grad_(False)
        said = bare_judges(makes(noise))[:, 0]
        descend(optimizers[0], functional.binary_cross_entropy_with_logits(said, torch.ones(size)))
        bare_judges.requires_grad_(True)
        return loss

    @torch.no_grad()
    def distance(models: Sequence[nn.Module]) -> float:
        made = models[0](torch.randn(2048, NOISE, generator=generator_of(0, TEST)))
        return _frechet(made, test)

    return Task(
        "gan", seeded(seed, make), lambda model: torch.optim.Adam(model.parameters(), lr=rate, betas=(0.5, 0.9)),
        step, distance, less_is_more=True,
    )  # fmt: skip


def _frechet(left: Tensor, right: Tensor) -> float:
    """Between the normal distributions with the means and covariances of (n, features) and (m, features)."""
    a, b = left.double(), right.double()
    covariance_a, covariance_b = torch.cov(a.T), torch.cov(b.T)
    # The trace of the root of a product: of its eigenvalues, real and not below zero but for rounding.
    roots = torch.linalg.eigvals(covariance_a @ covariance_b).real.clamp(min=0).sqrt().sum()
    apart = (a.mean(0) - b.mean(0)).square().sum()
    return float(apart + covariance_a.trace() + covariance_b.trace() - 2 * roots)


MADE: dict[str, Callable[[int, bool], Task]] = (
    {"recommender": _recommender, "graph": _graph, "gan": _gan} | HELD_OUT | UNSEEN
)
NAMES = (*WORKLOADS, *MADE)


def build_task(name: str, seed: int = 0, *, tiny: bool = False) -> Task:
    """The task of that name; ``tiny`` ones have the structure and take a millisecond a step.

    Raises:
        ValueError: there is none of that name, or it has no tiny form.
    """
    if name in MADE:
        return MADE[name](seed, tiny)
    if name in WORKLOADS and not tiny:
        return _of_workload(build_workload(name, seed))
    raise ValueError(f"no {'tiny ' if tiny else ''}task is called {name!r}; there are {', '.join(NAMES)}")


def _of_workload(workload: Workload) -> Task:
    def step(models: Sequence[nn.Module], optimizers: Optimizers, step: int, rank: int, world: int) -> float:
        inputs, targets = workload.batch(step, rank, world)
        return descend(optimizers[0], workload.loss(models[0](inputs), targets))

    return Task(
        workload.name,
        lambda: [workload.make_model()],
        workload.make_optimizer,
        step,
        lambda models: workload.evaluate(models[0]).accuracy,
    )
