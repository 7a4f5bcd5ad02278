"""What a rank holds of a partition between two steps, and what compiling a step gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from espresso.comm.keep.residual import Residual
from espresso.comm.parameter_server import Described, Line
from espresso.comm.program.kept import Kept
from espresso.compressors.base import Layout, Starts
from espresso.strategies import Stage
from espresso.strategies.flow import Span

Action = Callable[[], None]


class Placed(NamedTuple):
    """A layout, and where each of its segments begins at home."""

    layout: Layout
    starts: Starts


# -- what is held ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """The numbers at home, and nothing beside them."""


@dataclass(frozen=True)
class Payload:
    """Bytes of one or several ranks: uint8[sources, atoms, stride], sources in rank order.

    Attributes:
        atoms: how each payload that any rank made is laid out, by its range of the partition.
    """

    buffer: torch.Tensor
    atoms: Mapping[Span, Placed]


@dataclass(frozen=True)
class Vector:
    """A payload that adds up: plain numbers, summed in place."""

    values: torch.Tensor
    placed: Placed


@dataclass(frozen=True)
class Matrices:
    """Vectors of a compressor of several rounds, the last of which is summed in place.

    Attributes:
        residual: of the compression; what it writes is M until the transform. Its segments begin at ``kept_at``.
    """

    vectors: tuple[torch.Tensor, ...]
    placed: Placed
    residual: Residual
    kept_at: Starts

    @property
    def values(self) -> torch.Tensor:
        """The vector of this round."""
        return self.vectors[-1]


@dataclass(frozen=True)
class Pushed:
    """Something of this partition is at a server.

    Attributes:
        line: of this rank's key; None where it pushes nothing.
        answer: what is held once it is back.
        pull: brings it; None where nothing comes.
        copies: what is copied to the device then.
    """

    described: Described
    line: Line | None
    answer: Numbers | Payload
    pull: Action | None = None
    copies: Mapping[Stage, Action] = field(default_factory=dict)


Held = Numbers | Payload | Vector | Matrices | Pushed


# -- one step --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """One step of a partition on this rank.

    Attributes:
        held: after it.
        action: None where this rank has nothing to do.
        copies: between device and host, before and after it.
        kept: what it keeps from one iteration to the next.
    """

    held: Held
    action: Action | None = None
    copies: Mapping[Stage, Action] = field(default_factory=dict)
    bytes_sent: int = 0
    kept: Kept = field(default_factory=Kept)
