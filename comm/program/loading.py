"""Step 2: the numbers come home, with what an earlier plan left to be added to them."""

from __future__ import annotations

import numpy as np
import torch

from espresso.comm.keep.store import ResidualStore
from espresso.comm.program.held import Action
from espresso.comm.program.kept import Kept
from espresso.comm.program.part import Part
from espresso.compressors.base import Correction
from espresso.strategies import Run


def load(part: Part, kept: Kept) -> list[Action]:
    """What happens before the first step, in order.

    Args:
        kept: of the partition where nothing is compressed, see :func:`keep_raw`.
    """
    velocities, is_compressed = part.context.velocities, part.choice.option.is_compressed
    actions: list[Action] = [part.home.fetch]
    if velocities is None:
        actions.append(lambda: _add_carry(part))
    elif is_compressed:
        # A carried residual must not pass through a velocity, which would send it again and again: it waits until its
        # tensor is raw or has a local site. A carried velocity is added to what is encoded.
        weight = 1.0 if velocities.rule.nesterov else velocities.rule.momentum
        actions.append(lambda: _add(part, velocities, weight))
    else:
        actions += [_moving(part, kept, velocities.rule), lambda: _add_carry(part)]
    if not is_compressed:
        actions.append(lambda: _divide(part))
    return actions


def _moving(part: Part, kept: Kept, rule: Correction) -> Action:
    """Send the velocity in place of the gradient."""
    home, memory, velocity = part.home, part.context.memory, kept.velocity
    assert velocity is not None
    wide_type = torch.float64 if home.wide is np.float64 else torch.float32
    at = np.array(velocity.starts, np.int64)
    starts = np.array([home.start_of(run) for run in home.runs], np.int64)
    numels = np.array([run.numel for run in home.runs], np.int64)

    def move() -> None:
        scale = home.round.grad_scale
        wide = home.tensor.to(wide_type)  # itself where it is that wide already
        numbers = memory.array(wide)
        memory.mover.advance(rule, numels, numbers, starts, 1.0 / scale, velocity.feedback(at), numbers, starts)
        if scale != 1.0 or wide is not home.tensor:
            home.tensor.copy_(wide.mul_(scale))
        velocity.settle()

    return move


def _divide(part: Part) -> None:
    part.home.tensor.mul_(1.0 / part.num_ranks)


def _add_carry(part: Part) -> None:
    """Add the residuals that are carried."""
    if part.home.round.drain:
        _add(part, part.context.store, 1.0)


def _add(part: Part, store: ResidualStore, weight: float) -> None:
    """Add what is carried of each stretch to our gradient."""
    if store.carry:
        for run in part.home.runs:
            carried = store.carry.get(run.tensor)
            if carried is not None:
                values = torch.from_numpy(carried[run.tensor_start : run.tensor_start + run.numel])
                _add_to(part, run, values, weight, store)


def _add_to(part: Part, run: Run, carried: torch.Tensor, weight: float, store: ResidualStore) -> None:
    """What a narrow type rounds off stays carried."""
    mine = part.home.stretch(run)
    values = carried.to(mine.device)
    factor = weight * part.home.round.grad_scale
    total = torch.add(mine.to(values.dtype), values, alpha=factor)
    mine.copy_(total)
    left = None
    if mine.dtype is not values.dtype:
        left = total.sub_(mine).div_(factor).cpu().numpy()
    store.used_carry(run.tensor, run.tensor_start, left)
