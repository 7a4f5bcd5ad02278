"""Velocities of momentum correction: kept, moved, saved and discarded as residuals are.

A velocity sits at the first compression site of its tensor, or at ``Site.LOCAL`` where the tensor is raw. All
of them are sums over ranks of what one rank alone would keep, so a change of plan moves them like
residuals: what finds no place of its own is carried and enters through this rank's own gradient.
"""

from __future__ import annotations

import math

import torch

from espresso.comm.keep.store import ResidualStore
from espresso.comm.memory import HOST, Memory
from espresso.compressors.base import Correction
from espresso.strategies import Bucket


class Velocities(ResidualStore):
    """All velocities of this rank, and the rule that moves them."""

    def __init__(self, rule: Correction, *, transactional: bool = True) -> None:
        super().__init__(transactional=transactional)
        self.rule = rule

    def clip(
        self, bucket: Bucket, buffer: torch.Tensor, num_ranks: int, grad_scale: float, memory: Memory = HOST
    ) -> None:
        """Scale every tensor of a bucket down to the rule's norm, in place; no copy.

        A norm that is not finite leaves its tensor alone: the step will be skipped.
        """
        if not self.rule.clip_norm:
            return
        limit = self.rule.clip_norm / math.sqrt(num_ranks) * grad_scale
        memory.clip([buffer[slot.offset : slot.offset + slot.numel] for slot in bucket.slots], limit)
