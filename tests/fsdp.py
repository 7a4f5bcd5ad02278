"""HSDP for tests: models of odd sizes, four ranks of two hosts, and the kinds of steps there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import espresso
import espresso.fsdp
from benchmarks import exchange
from espresso.fsdp.layout import sum_and_divide
from espresso.live.state import EspressoState
from tests.ddp import ALLGATHER

VOCABULARY, WIDTH, ROWS = 37, 10, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 23), nn.Linear(23, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = inputs + self.down(torch.tanh(self.up(self.norm(inputs))))
        return hidden


class Tiny(nn.Module):
    """A language model of odd sizes: 37 rows do not split in two, nor does one row, and one tensor is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.shift = nn.Parameter(torch.ones(3, WIDTH), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) * self.gain[0] + self.shift[0]
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Rows(nn.Module):
    """Gradients that are what it is called with, whatever the parameters are: five rows, three in one of two shards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.weight * rows).sum() + (self.other * rows[0].repeat(2)).sum()


class Narrow(Rows):
    """With a tensor of one row, of which the second of two shards has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(1, 20))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return Rows.forward(self, rows) + (self.row * rows.view(1, 20)).sum()


@cache
def mesh(shards: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (4 // shards, shards), mesh_dim_names=("replicate", "shard"))


def shard(
    model: Any,
    shards: int = 2,
    *,
    native: bool = False,
    ignored: Sequence[str] = (),
    again: bool = False,
    **settings: Any,
) -> Any:
    """``fully_shard`` every block and the model, over both dimensions or over the shards alone.

    Args:
        ignored: parameters that stay as they are.
        again: blocks run again in backward (activation checkpointing).
    """
    for index, block in enumerate(model.blocks if again else ()):
        model.blocks[index] = checkpoint_wrapper(block)
    settings["ignored_params"] = {getattr(model, name) for name in ignored}
    for module in (*getattr(model, "blocks", ()), model):
        fully_shard(module, mesh=mesh(shards) if native else mesh(shards)["shard"], **settings)
    sum_and_divide(model)
    return model


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


uniform = partial(exchange.uniform, partition_bytes=0)
"""A strategy's function: one choice for all tensors."""


def registered(
    model: nn.Module, compressor: str = "efsignsgd", strategy: Any = None, *, shards: int = 2, **config: Any
) -> EspressoState:
    """Given efsignsgd by all-gather if nothing else is said."""
    strategy = uniform(ALLGATHER, f"{compressor}:raw_below=1") if strategy is None else strategy
    return espresso.fsdp.register(
        model, mesh(shards)["replicate"], compressor, strategy, timeout_s=15.0, offload_threads=1, **config
    )


def loss_of(model: nn.Module, rank: int, step: int, part: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    tokens = torch.randint(VOCABULARY, (ROWS, 5), generator=draw)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def digest(model: nn.Module) -> str:
    """Of this rank's shards, bit for bit."""
    return exchange.digest(p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())


def everybody(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def residual_of(state: EspressoState, name: str) -> torch.Tensor:
    """What this rank has not sent of its shard of a tensor."""
    kept = [each for each in state.session.store.lend() if each.tensor == name and each.site is not None]
    return torch.cat([torch.from_numpy(each.read()) for each in sorted(kept, key=lambda each: each.start)])


def replicas_agree(model: nn.Module) -> bool:
    first, second, third, fourth = everybody(digest(model))
    return bool(first == third and second == fourth)


# -- kinds of steps --------------------------------------------------------------------------------


def plain(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, rank, step).backward()


def accumulated_unreduced(model: Any, rank: int, step: int) -> None:
    for part in range(3):
        model.set_requires_gradient_sync(part == 2)
        loss_of(model, rank, step, part).backward()


def accumulated_reduced(model: Any, rank: int, step: int) -> None:
    for part in range(2):
        loss_of(model, rank, step, part).backward()


def held_back(model: Any, rank: int, step: int) -> None:
    for part in range(3):
        model.set_requires_all_reduce(part == 2)
        loss_of(model, rank, step, part).backward()


def clipped(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, rank, step).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm.full_tensor() > 0.05  # type: ignore[attr-defined]


KINDS = (plain, plain, plain, accumulated_unreduced, accumulated_reduced, held_back, clipped, plain)


def train(model: nn.Module, rank: int, kinds: Sequence[Callable[..., None]] = KINDS, **adam: Any) -> list[str]:
    """One AdamW step of each kind; every other one keeps gradients as zeros instead of dropping them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **adam)
    digests = []
    for step, kind in enumerate(kinds):
        kind(model, rank, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert replicas_agree(model), f"after step {step}"
        digests.append(digest(model))
    return digests
