"""What a rank holds of a partition between two steps, what it keeps between iterations, and what a step compiles to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from espresso.comm.collectives import Rest
from espresso.comm.keep.residual import Residual
from espresso.comm.keep.store import ResidualStore
from espresso.comm.memory import Memory
from espresso.comm.parameter_server import Line
from espresso.comm.parameter_server.wire import Key
from espresso.comm.program.part import Part
from espresso.compressors.base import Array, Bytes, Codec, Correction, DrawKey, Encoding, Feedback, Layout, Starts
from espresso.compressors.momentum import MomentumCorrection
from espresso.strategies import Run, Site, Stage
from espresso.strategies.flow import Span

Action = Callable[[], Rest | None]
"""Carries out a step; of an exchange it returns the rest."""


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
        keys: of the partition, the same on every rank.
        line: of this rank's key; None where it pushes nothing.
        answer: what is held once it is back.
        pull: brings it; None where nothing comes.
        copies: what is copied to the device then.
    """

    keys: tuple[Key, ...]
    line: Line | None
    answer: Numbers | Payload
    pull: Action | None = None
    copies: Mapping[Stage, Action] = field(default_factory=dict)


Held = Numbers | Payload | Vector | Matrices | Pushed


# -- what is kept ---------------------------------------------------------------------------------

FIRST = 64
"""Numbers that are looked at before all are."""


@dataclass(frozen=True)
class Kept:
    """What a rank keeps at a compression from one iteration to the next.

    A residual where the compressor has error feedback; at the first compression of a job with momentum a velocity, and
    at home where nothing is compressed. Both are laid out alike, so that one list of starts serves both.

    Attributes:
        correction: moves the velocity; None without one.
        waits, silent: see :class:`~espresso.comm.keep.store.ResidualStore`; of sums, elsewhere than at ``Site.LOCAL``,
            nobody is silent alone, and of velocities nobody.
    """

    residual: Residual | None = None
    velocity: Residual | None = None
    correction: MomentumCorrection | None = None
    waits: bool = False
    silent: Collection[str] = frozenset()

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
            self.around(encoding, lambda encoding: codec.encode(encoding, payload))
        else:
            self.correction.encode(encoding, payload, self.velocity.feedback(at))

    def advance(self, encoding: Encoding, at: Starts) -> Encoding:
        """What to encode into a vector, once the velocity has moved on."""
        if self.velocity is None or self.correction is None:
            return encoding
        return self.correction.advance(encoding, self.velocity.feedback(at))

    def around(self, encoding: Encoding, encode: Callable[[Encoding], object]) -> None:
        """Encode; segments without any gradient keep what they owe, if they are to (``waits``)."""
        feedback, source, residual = encoding.feedback, encoding.source, self.residual
        if feedback is None or residual is None or not self.waits:
            encode(encoding)
            return
        rows = zip(encoding.starts, encoding.layout.numels, feedback.starts, strict=True)
        idle = [
            slice(at, at + n)
            for start, n, at in rows
            if n and (residual.tensor_at(at) in self.silent or not _any(source[start : start + n]))
        ]
        old = feedback.old.copy() if idle else feedback.old  # the buffer itself may be lent to who saves it
        for part in idle:
            old[part] = 0
        encode(replace(encoding, feedback=replace(feedback, old=old)))
        for part in idle:
            feedback.new[part] = feedback.old[part]

    def settle(self, key: DrawKey) -> None:
        """All is written."""
        for residual in (self.residual, self.velocity):
            if residual is not None:
                residual.settle(key)


def gain_of(part: Part) -> float:
    """What of a residual comes back, at every site, where the job's store says nothing else.

    Momentum correction is defined with all of it.
    """
    return part.traits.gain_at(part.context.gain_scale) if part.context.velocities is None else 1.0


def keep(part: Part, index: int, codec: Codec, memory: Memory) -> Kept:
    """What the compression at this step keeps, in the memory where it runs."""
    flow, velocities = part.flows[index], part.context.velocities
    assert flow.site is not None
    if not flow.before.active:
        return Kept()
    residual = velocity = correction = None
    if part.keeps_residual:
        residual = _new(
            part, part.context.store, flow.before.region, flow.site, memory,
            gain=gain_of(part), storage=part.choice.compressor.residual_dtype, holds=part.traits.rounds > 1,
        )  # fmt: skip
    if velocities is not None and part.is_first(index):
        velocity = _new(part, velocities, flow.before.region, flow.site, memory)
        correction = MomentumCorrection(codec, velocities.rule, memory.mover)
    store = part.context.store
    is_gradient = flow.site is Site.LOCAL and velocities is None
    silent = store.silent if is_gradient else frozenset()
    return Kept(residual, velocity, correction, store.waits, silent)


def _any(numbers: Array) -> bool:
    """Whether one is not zero; most often the first few say so."""
    return bool(numbers[:FIRST].any() or numbers.any())


def _new(part: Part, store: ResidualStore, span: Span, site: Site, memory: Memory, **kept: Any) -> Residual:
    cluster = part.context.cluster
    node = part.context.rank // cluster.ranks_per_node
    replica = node if site.replicas(cluster) > 1 else 0
    return store.new_residual(site, part.home.runs_in(span), part.home.wide, replica, memory, **kept)


def load(part: Part) -> tuple[Kept, list[Action]]:
    """2: what happens before the first step, in order: the numbers come home, with what an earlier plan left for them.

    With it what is kept at home: a velocity, where nothing is compressed in a job with momentum.
    """
    velocities, is_compressed, kept = part.context.velocities, part.choice.option.is_compressed, Kept()
    actions: list[Action] = [part.home.fetch]
    if velocities is None:
        actions.append(lambda: _add_carry(part))
    elif is_compressed:
        # A carried residual must not pass through a velocity, which would send it again and again: it waits until its
        # tensor is raw or has a local site. A carried velocity c enters as a gradient. By either rule c would yet give
        # mu/(1-mu) c in all, and a gradient g gives 1/(1-mu) g: so mu c is its worth. With Nesterov it is then a step
        # ahead of itself, which sends all of it all the same.
        actions.append(lambda: _add(part, velocities, velocities.rule.momentum))
    else:
        velocity = _new(part, velocities, (0, part.partition.numel), Site.LOCAL, part.context.memory)
        kept = Kept(velocity=velocity)
        actions += [_moving(part, velocity, velocities.rule), lambda: _add_carry(part)]
    if not is_compressed:
        actions.append(lambda: _divide(part))
    return kept, actions


def _moving(part: Part, velocity: Residual, rule: Correction) -> Action:
    """Send the velocity in place of the gradient."""
    home, memory = part.home, part.context.memory
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
        velocity.settle(part.key(Site.LOCAL))

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
            idle = store.waits and (run.tensor in store.silent or not part.home.stretch(run).any())
            if carried is not None and not idle:
                values = torch.from_numpy(carried[run.tensor_start : run.tensor_start + run.numel])
                _add_to(part, run, values, weight, store)


def _add_to(part: Part, run: Run, carried: torch.Tensor, weight: float, store: ResidualStore) -> None:
    """What a narrow type rounds off stays carried, but on a device."""
    mine = part.home.stretch(run)
    values = carried.to(mine.device)
    factor = weight * part.home.round.grad_scale
    total = torch.add(mine.to(values.dtype), values, alpha=factor)
    mine.copy_(total)
    left = None
    if mine.dtype is not values.dtype and not part.context.memory.host_copies:  # backward would wait for it
        left = total.sub_(mine).div_(factor).numpy()
    store.used_carry(run.tensor, run.tensor_start, run.numel, left)


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
