"""Tasks made after everything was set, on 30 November 2026: trained once, and nothing was changed by what they showed.

| name    | what is different                         | data                                 | optimizer | metric   |
| ------- | ----------------------------------------- | ------------------------------------ | --------- | -------- |
| depths  | recurrent in both directions, a class for | brackets among other signs           | Adam      | accuracy |
|         | every place                               |                                      |           |          |
| outline | down to coarse maps and up again, past    | discs, squares and noise, a class    | SGD with  | accuracy |
|         | connections                               | for every pixel                      | momentum  |          |
| experts | each place goes through the one of eight  | 8x8 digits, in patches               | AdamW     | accuracy |
|         | networks that a gate says                 |                                      |           |          |
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.suite.held_out import digits_batch
from benchmarks.suite.task import Task, classifier

# At every place of a row of brackets and three other signs, how many brackets are open, up to four.


class Depths(nn.Module):
    """Two recurrent layers that read from both ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(5, width)
        self.reads = nn.GRU(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 5)

    def forward(self, row: Tensor) -> Tensor:
        """(batch, length) to logits (batch, depths, length)."""
        return torch.as_tensor(self.head(self.reads(self.letters(row))[0]).transpose(1, 2))


def _depths(seed: int, tiny: bool) -> Task:
    length, width = (6, 24) if tiny else (24, 320)

    def batch(generator: torch.Generator, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
        row = torch.randint(5, (size, length), generator=generator)
        change = (row == 0).long() - (row == 1).long()
        depth, depths = torch.zeros(size, dtype=torch.long), []
        for place in range(length):
            depth = (depth + change[:, place]).clamp(0, 4)
            depths.append(depth)
        return (row,), torch.stack(depths, 1)

    return classifier("depths", seed, lambda: Depths(width), batch, 16, 5e-3 if tiny else 1e-3)


# A picture has a disc, a square, both or none, under noise; every pixel is nothing, disc or square.


class Outline(nn.Module):
    """Convolutions down to a quarter of the picture and up again, each height beside what came from it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [1, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(self._block(a + b, a) for a, b in ((2 * width, 4 * width), (width, 2 * width)))
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(),
        )  # fmt: skip

    def forward(self, picture: Tensor) -> Tensor:
        """(batch, side, side) to logits (batch, 3, side, side)."""
        held, kept = picture[:, None], list[Tensor]()
        for block in self.down:
            held = block(held if not kept else functional.max_pool2d(held, 2))
            kept.append(held)
        for block, before in zip(self.up, kept[-2::-1], strict=True):
            held = block(torch.cat([before, functional.interpolate(held, scale_factor=2)], 1))
        return torch.as_tensor(self.head(held))


def _outline(seed: int, tiny: bool) -> Task:
    side, width = (16, 4) if tiny else (32, 48)

    def batch(generator: torch.Generator, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
        at = torch.arange(side, dtype=torch.float32) / side
        down, across, radius = torch.rand(3, 2, size, 1, 1, generator=generator)  # each of a disc and of a square
        down, across, radius = (at[:, None] - down).abs(), (at - across).abs(), 0.1 + 0.2 * radius
        disc = torch.hypot(down[0], across[0]) < radius[0]
        square = torch.maximum(down[1], across[1]) < radius[1]
        kinds = torch.where(disc, 1, torch.where(square, 2, 0))
        picture = (kinds > 0).float() + 0.7 * torch.randn(kinds.shape, generator=generator)
        return (picture,), kinds

    def momentum(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    return classifier("outline", seed, lambda: Outline(width), batch, 6, optimizer=momentum, tested=256)


# Digits in sixteen patches: at every place one of eight networks, with the gate's say as its weight.


class Expert(nn.Module):
    """Networks of which every place goes through one."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.before, self.gate = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, held: Tensor) -> Tensor:
        """(places, width) to the same."""
        seen = self.before(held)
        said, chosen = self.gate(seen).softmax(-1).max(-1)
        out = torch.zeros_like(held)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, mine, expert(seen[mine]) * said[mine, None])
        return held + out


class Experts(nn.Module):
    """Patches through layers of experts, attention between them, then the mean of all places."""

    def __init__(self, width: int, experts: int, layers: int) -> None:
        super().__init__()
        self.first, self.places = nn.Linear(4, width), nn.Parameter(torch.randn(16, width) / 10)
        self.between = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(layers))
        self.layers = nn.ModuleList(Expert(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 64) to logits (batch, 10)."""
        patches = images.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        held = self.first(patches) + self.places
        for attention, layer in zip(self.between, self.layers, strict=True):
            held = held + attention(held, held, held, need_weights=False)[0]
            held = layer(held.flatten(0, 1)).view_as(held)
        return torch.as_tensor(self.head(held.mean(1)))


def _experts(seed: int, tiny: bool) -> Task:
    width, experts, layers = (16, 2, 1) if tiny else (192, 8, 3)

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3 if tiny else 1e-3)

    return classifier(
        "experts", seed, lambda: Experts(width, experts, layers), digits_batch, 8 if tiny else 24, optimizer=adamw
    )


UNSEEN: dict[str, Callable[[int, bool], Task]] = {"depths": _depths, "outline": _outline, "experts": _experts}
