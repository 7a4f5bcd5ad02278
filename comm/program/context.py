"""What all partitions of a program share, and what every iteration tells them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from espresso.comm.groups import Member
from espresso.comm.keep.factors import FactorStore
from espresso.comm.keep.store import ResidualStore
from espresso.comm.keep.velocities import Velocities
from espresso.comm.memory import HOST, Memory
from espresso.comm.parameter_server import Link
from espresso.compressors.base import Codec
from espresso.strategies import Cluster, CompressorSpec, Device, Scope

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Codecs(Protocol):
    """Where the codec of a compressor for a device comes from."""

    def __call__(self, spec: CompressorSpec, device: Device) -> Codec: ...


@dataclass(frozen=True, slots=True)
class Round:
    """What changes from iteration to iteration: its number, the loss scale, and whether carries are sent."""

    step: int
    grad_scale: float = 1.0
    drain: bool = True


@dataclass(frozen=True)
class Context:
    """What all partitions of a program share."""

    cluster: Cluster
    rank: int
    members: dict[Scope, Member]
    codecs: Codecs
    store: ResidualStore
    seed: int = 0
    velocities: Velocities | None = None
    servers: Link | None = None
    memory: Memory = HOST
    host: Memory = HOST
    factors: FactorStore = field(default_factory=FactorStore)
