"""What a rank keeps at a compression from one iteration to the next.

A residual where the compressor has error feedback; at the first compression of a job with momentum a velocity, and at
home where nothing is compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from espresso.comm.keep.residual import Residual
from espresso.comm.keep.store import ResidualStore
from espresso.comm.memory import Memory
from espresso.comm.program.part import Part
from espresso.compressors.base import Bytes, Codec, Encoding, Feedback, Starts
from espresso.compressors.momentum import MomentumCorrection
from espresso.strategies import Run, Site
from espresso.strategies.flow import Span


@dataclass(frozen=True)
class Kept:
    """Residual and velocity are laid out alike, so that one list of starts serves both.

    Attributes:
        correction: moves the velocity; None without one.
    """

    residual: Residual | None = None
    velocity: Residual | None = None
    correction: MomentumCorrection | None = None

    def starts(self, runs: Sequence[Run]) -> Starts:
        """Where these runs begin in the buffers."""
        kept = self.residual or self.velocity
        return np.array([0 if kept is None else kept.locate(run.group_start) for run in runs], np.int64)

    def feedback(self, at: Starts) -> Feedback | None:
        """The residual's, for segments that begin there."""
        return None if self.residual is None else self.residual.feedback(at)

    def encode(self, codec: Codec, encoding: Encoding, at: Starts, payload: Bytes) -> None:
        """Into a payload, once the velocity has moved on."""
        if self.velocity is None or self.correction is None:
            codec.encode(encoding, payload)
        else:
            self.correction.encode(encoding, payload, self.velocity.feedback(at))

    def advance(self, encoding: Encoding, at: Starts) -> Encoding:
        """What to encode into a vector, once the velocity has moved on."""
        if self.velocity is None or self.correction is None:
            return encoding
        return self.correction.advance(encoding, self.velocity.feedback(at))

    def settle(self) -> None:
        """All is written."""
        for residual in (self.residual, self.velocity):
            if residual is not None:
                residual.settle()


def keep(part: Part, index: int, codec: Codec, memory: Memory) -> Kept:
    """What the compression at this step keeps, in the memory where it runs."""
    flow, velocities = part.flows[index], part.context.velocities
    assert flow.site is not None
    if not flow.before.active:
        return Kept()
    residual = velocity = correction = None
    if part.keeps_residual:
        # Momentum correction is defined with all of the residual.
        gain = part.traits.feedback_gain if velocities is None else 1.0
        residual = _new(part, part.context.store, flow.before.region, flow.site, memory, gain)
    if velocities is not None and part.is_first(index):
        velocity = _new(part, velocities, flow.before.region, flow.site, memory)
        correction = MomentumCorrection(codec, velocities.rule, memory.mover)
    return Kept(residual, velocity, correction)


def keep_raw(part: Part) -> Kept:
    """What a partition keeps at home: a velocity, where nothing is compressed in a job with momentum."""
    context = part.context
    if context.velocities is None or part.choice.option.is_compressed:
        return Kept()
    return Kept(velocity=_new(part, context.velocities, (0, part.partition.numel), Site.LOCAL, context.memory))


def _new(part: Part, store: ResidualStore, span: Span, site: Site, memory: Memory, gain: float = 1.0) -> Residual:
    cluster = part.context.cluster
    node = part.context.rank // cluster.ranks_per_node
    replica = node if site.replicas(cluster) > 1 else 0
    return store.new_residual(site, part.home.runs_in(span), part.home.wide, replica, memory, gain=gain)
