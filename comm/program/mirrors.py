"""Where compute steps work: beside the numbers, or on mirrors of them in host memory.

Offloaded steps of a job on a device take the host. A copy before the step fills its mirrors, another after it writes
back what it changed. In a job on the CPU all steps work in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from espresso.comm.memory import Array, Memory
from espresso.comm.program.held import Action
from espresso.comm.program.home import Home
from espresso.comm.program.part import Part
from espresso.compressors.base import Codec
from espresso.strategies import Device, Stage
from espresso.strategies.flow import Span

Twins = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Gives a tensor of the device, which may lie elsewhere in every iteration, and its mirror."""


@dataclass(frozen=True)
class Desk:
    """Where one compute step works, and with what.

    Attributes:
        memory: of the arrays that the codec takes.
        is_mirrored: whether that is the host's, and the numbers are a device's.
    """

    home: Home
    codec: Codec
    memory: Memory
    is_mirrored: bool

    def numbers(self) -> Array:
        """Home, as the codec takes it."""
        return self.home.mirror_array if self.is_mirrored else self.home.array

    def twin(self, held: torch.Tensor) -> torch.Tensor:
        """What the step works on in place of ``held``: itself, or a mirror."""
        if not self.is_mirrored:
            return held
        return self.memory.numbers(held.numel(), held.dtype).zero_().view(held.shape)

    def copies(self, before: Sequence[Twins], after: Sequence[Twins]) -> Mapping[Stage, Action]:
        """What is copied before and after the step; nothing where it works in place."""
        if not self.is_mirrored:
            return {}
        copied = {Stage.COPY_TO_HOST: before, Stage.COPY_TO_DEVICE: after}
        return {stage: copy(twins, stage) for stage, twins in copied.items()}

    def of_home(self, span: Span) -> Twins:
        """A range of home and its mirror."""
        low, high = span
        return lambda: (self.home.tensor[low:high], self.home.mirror[low:high])


def desk(part: Part, index: int) -> Desk:
    """Where a compute step works."""
    device, context = part.flows[index].step.device, part.context
    assert device is not None
    is_mirrored = device is Device.OFFLOAD and context.memory.host_copies
    return Desk(part.home, part.codec(device), context.host if is_mirrored else context.memory, is_mirrored)


def both(here: torch.Tensor, there: torch.Tensor) -> Twins:
    """A tensor that stays where it is, and its mirror."""
    return lambda: (here, there)


def copy(twins: Sequence[Twins], stage: Stage) -> Action:
    """Fills the mirrors before a step, or writes them back after it."""

    def run() -> None:
        for pair in twins:
            here, there = pair()
            source, target = (here, there) if stage is Stage.COPY_TO_HOST else (there, here)
            target.copy_(source, non_blocking=True)

    return run
