"""What a job keeps between two runs, and its form in a checkpoint: read whole, checked whole, then taken over.

Every rank saves its own :mod:`parts <espresso.live.parts>`, and loads those that are::

    version, kind, model, cluster, shards, step, epoch, strategy, factors   the same on every rank
    parts                                                                   by number: of rank  number * P // NUM_PARTS

On the cluster that saved it a rank finds exactly what it kept. On another, what it finds becomes an addend of
its own: P' ranks instead of P scale it by P'/P, which keeps its effect on the average. What several ranks hold alike is
saved once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from espresso.comm.keep.store import Address, Array, Piece
from espresso.compressors.schedule import check_choices
from espresso.live.parts import (
    FACTOR,
    NUM_PARTS,
    RESIDUAL,
    VELOCITY,
    CheckpointError,
    Part,
    Place,
    Row,
    check_rows,
    count,
    part_of,
    parts_of,
)
from espresso.strategies import Cluster, Site, Strategy, StrategyError, TensorSpec
from espresso.strategies.fields import parse, shown

VERSION = 3
KIND = "espresso"

_KEYS = {"version", "kind", "model", "cluster", "shards", "step", "epoch", "strategy", "factors", "parts"}


@dataclass(frozen=True)
class Stored:
    """What a store takes over.

    Attributes:
        pieces: by (tensor, site): (first element, values, replica).
        carry: what enters with this rank's next gradient, by tensor.
    """

    pieces: Mapping[Address, Sequence[Piece]] = field(default_factory=dict)
    carry: Mapping[str, Array] = field(default_factory=dict)


class Sharing(Protocol):
    """What a rank's shards are of; see :mod:`espresso.live.shards`."""

    @property
    def numels(self) -> dict[str, int]:
        """Elements of the shards that are here."""
        ...

    def mine(self, rows: Sequence[Row], *, is_same: bool) -> list[Row]:
        """Of rows of whole tensors in this rank's parts what is here, as rows of shards; ``is_same``: all of them are.

        Else all ranks together.
        """
        ...


@dataclass(frozen=True)
class Kept:
    """What a rank goes on with.

    Attributes:
        step: the number of the next iteration.
        factors: of compressors of several rounds, by tensor; equal on all ranks.
    """

    step: int = 0
    epoch: int | None = None
    residuals: Stored = Stored()
    velocities: Stored = Stored()
    factors: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: one rank's parts, those of several, or all.

    Attributes:
        model: the tensors whose gradients were averaged.
        cluster: (nodes, ranks per node) of the job that saved it.
        factors: as in :class:`Kept`.
        parts: by number; each is read when it is taken over.
        num_shards: that the model was cut into; so many such jobs saved it together. Rows are addressed within whole
            tensors.
    """

    model: tuple[TensorSpec, ...]
    cluster: tuple[int, int] = (1, 1)
    step: int = 0
    epoch: int | None = None
    strategy: Strategy | None = None
    factors: Part = field(default_factory=Part)
    parts: Mapping[int, Part] = field(default_factory=dict)
    num_shards: int = 1

    @property
    def num_ranks(self) -> int:
        """Whose gradients were averaged."""
        return self.cluster[0] * self.cluster[1]

    def with_parts(self, numbers: Iterable[int]) -> Checkpoint:
        """With these parts alone; those that it has not are empty."""
        return replace(self, parts={number: self.parts.get(number, Part()) for number in numbers})

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`parse` reads: texts, numbers, and leaves that become tensors of bytes when they are pickled."""
        return {
            "version": VERSION,
            "kind": KIND,
            "model": json.dumps([[tensor.name, list(tensor.shape), tensor.dtype] for tensor in self.model]),
            "cluster": list(self.cluster),
            "shards": self.num_shards,
            "step": self.step,
            "epoch": self.epoch,
            "strategy": None if self.strategy is None else json.dumps(self.strategy.to_json()),
            "factors": self.factors,
            "parts": {str(number): part for number, part in self.parts.items()},
        }

    @classmethod
    def parse(cls, body: Any) -> Checkpoint:
        """Read a ``state_dict()`` or a gathered one.

        Raises:
            CheckpointError: it is malformed, says what.
        """
        if not isinstance(body, Mapping) or body.get("kind") != KIND:
            raise CheckpointError(f"this is not an espresso state_dict (it has no kind {KIND!r})")
        version = body.get("version")
        if type(version) is not int or version != VERSION:
            raise CheckpointError(f"checkpoint version {shown(version)} is not supported; this version reads {VERSION}")
        if set(body) != _KEYS:
            odd = min(map(shown, set(body) ^ _KEYS))
            raise CheckpointError(f"the checkpoint has an unknown or missing entry {odd}")
        return cls(
            model=_tensors(body["model"]),
            cluster=_cluster(body["cluster"]),
            num_shards=count(body["shards"], "entry 'shards'"),
            step=count(body["step"], "entry 'step'"),
            epoch=None if body["epoch"] is None else count(body["epoch"], "entry 'epoch'"),
            strategy=_strategy(body["strategy"]),
            factors=part_of(body["factors"]),
            parts=parts_of(body["parts"]),
        )

    def rows(self, numbers: Iterable[int] | None = None) -> list[Row]:
        """What these parts hold; all of them, if None.

        Raises:
            CheckpointError: a part is malformed.
        """
        numbers = self.parts if numbers is None else numbers
        return [row for number in numbers for row in self.parts[number].rows(f"part {number}")]

    def found(
        self,
        place: Place,
        cluster: Cluster,
        tensors: Sequence[TensorSpec],
        *,
        strict: bool = True,
        num_shards: int = 1,
    ) -> Found:
        """What a rank of a job finds for itself, read and checked whole; nobody else is asked.

        Args:
            tensors: of the model, whole.
            num_shards: that the job cuts each of them into.
            strict: refuse a checkpoint of another model; else keep what fits by name and shape.

        Raises:
            CheckpointError: another rank's, or of another model.
        """
        missing = [number for number in place.parts if number not in self.parts]
        if missing:
            num_savers = self.num_ranks * self.num_shards
            owner = next(iter(self.parts), 0) * num_savers // NUM_PARTS
            raise CheckpointError(
                f"the checkpoint is of rank {owner} of {num_savers}, this is rank {place.rank} of"
                f" {place.num_ranks}; load this rank's own, one made by gather_state_dict(), or with"
                " torch.distributed.checkpoint"
            )
        dropped = self._differences(tensors)
        if strict and dropped:
            raise CheckpointError(
                f"the checkpoint is of a model with other parameters (names, shapes or dtypes): {dropped[0]}"
            )
        there = {tensor.name: tensor.shape for tensor in self.model}
        fitting = {tensor.name: tensor.numel for tensor in tensors if there.get(tensor.name) == tensor.shape}
        rows, shared = self.rows(place.parts), self.factors.rows("entry 'factors'")
        check_rows(rows + shared, {tensor.name: tensor.numel for tensor in self.model})
        cut_alike = self.num_shards == num_shards
        is_same = self.cluster == cluster.shape and cut_alike
        factors = _in_one([*shared, *(row for row in rows if row.held == FACTOR and is_same)] if cut_alike else [])
        rows = [row for row in rows if row.tensor in fitting and row.held != FACTOR]
        if not is_same:  # an addend of this rank's own, scaled to keep the average
            scale = cluster.num_ranks / self.num_ranks
            rows = [
                replace(row, site=row.site and Site.LOCAL, values=row.values * row.values.dtype.type(scale))
                for row in rows
            ]
        return Found(self, rows, fitting, factors, is_same, tuple(dropped))

    def _differences(self, tensors: Sequence[TensorSpec]) -> list[str]:
        """What the checkpoint's model has and this one has not, and what does not fit of the strategy."""
        ours = {tensor.name: tensor for tensor in tensors}
        found = []
        for theirs in self.model:
            mine = ours.get(theirs.name)
            if mine is None:
                found.append(f"{theirs.name!r} is not in the model")
            elif (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                here, there = (f"{list(tensor.shape)} {tensor.dtype}" for tensor in (mine, theirs))
                found.append(f"{theirs.name!r} is {there} in the checkpoint, {here} in the model")
        known = {tensor.name for tensor in self.model}
        new = [tensor.name for tensor in tensors if tensor.name not in known]
        if new or found:
            found.append(f"the strategy is for another model{f', without {new[0]!r}' if new else ''}")
        elif self.strategy is not None:
            try:
                self.strategy.check_model(tuple(tensors), self.strategy.cluster)
                check_choices(self.strategy)
            except ValueError as error:
                raise CheckpointError(f"the strategy in the checkpoint: {error}") from error
        return found


@dataclass(frozen=True)
class Found:
    """What of a checkpoint is a rank's, before ranks that share a copy of the model pass on each other's shards.

    Attributes:
        rows: residuals and velocities, of whole tensors.
        fitting: elements of the tensors that fit.
        factors: as in :class:`Kept`.
        is_same: the checkpoint is of a job that was cut as this one is.
        dropped: what the checkpoint has and the model cannot take, in people's words.
    """

    checkpoint: Checkpoint
    rows: list[Row]
    fitting: Mapping[str, int]
    factors: Mapping[str, Array]
    is_same: bool
    dropped: tuple[str, ...]

    @property
    def strategy(self) -> Strategy | None:
        """The one to go on with."""
        return None if self.dropped else self.checkpoint.strategy

    @property
    def owing(self) -> set[str]:
        """Tensors of which something is owed."""
        return {row.tensor for row in self.rows if row.held == RESIDUAL}

    def kept(self, shards: Sharing | None = None) -> Kept:
        """What the rank takes over.

        Args:
            shards: which of the rows are this rank's, where it has shards of the tensors; then all ranks together.
        """
        rows, fitting = self.rows, self.fitting
        if shards is not None:
            rows, fitting = shards.mine(rows, is_same=self.is_same), shards.numels
        return Kept(
            step=self.checkpoint.step,
            epoch=self.checkpoint.epoch,
            residuals=_stored(rows, RESIDUAL, fitting),
            velocities=_stored(rows, VELOCITY, fitting),
            factors={name: values for name, values in self.factors.items() if name in fitting},
        )


def _in_one(rows: Iterable[Row]) -> dict[str, Array]:
    """Numbers of each tensor, of which a checkpoint may have cut some."""
    found: dict[str, Array] = {}
    for row in sorted(rows, key=lambda row: row.start):
        found[row.tensor] = np.concatenate([found[row.tensor], row.values]) if row.tensor in found else row.values
    return found


def _stored(rows: Iterable[Row], held: str, numels: Mapping[str, int]) -> Stored:
    """Pieces by address; what is carried, in one array for each tensor."""
    pieces: dict[Address, list[Piece]] = {}
    carry: dict[str, Array] = {}
    for row in rows:
        if row.held != held:
            continue
        if row.site is not None:
            pieces.setdefault((row.tensor, row.site), []).append((row.start, row.values, 0))
            continue
        whole = carry.setdefault(row.tensor, np.zeros(numels[row.tensor], row.values.dtype))
        whole[row.start : row.start + row.values.size] += row.values
    return Stored(pieces, carry)


# -- reading entries ---------------------------------------------------------------------------------


def _cluster(body: Any) -> tuple[int, int]:
    if not isinstance(body, list | tuple) or len(body) != 2:
        raise CheckpointError(f"entry 'cluster' should be nodes and ranks per node, got {shown(body)}")
    nodes, per_node = (count(value, "entry 'cluster'") for value in body)
    if not nodes or not per_node:
        raise CheckpointError(f"entry 'cluster' should be nodes and ranks per node, got {shown(body)}")
    return nodes, per_node


def _text(body: Any, entry: str) -> Any:
    if not isinstance(body, str):
        raise CheckpointError(f"entry {entry!r} should be a text, got {shown(body)}")
    try:
        return parse(body.encode())
    except ValueError as error:
        raise CheckpointError(f"entry {entry!r}: {error}") from error


def _tensors(body: Any) -> tuple[TensorSpec, ...]:
    rows = _text(body, "model")
    try:
        return tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in rows)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"entry 'model' is not a list of tensors ({error})") from error


def _strategy(body: Any) -> Strategy | None:
    try:
        return None if body is None else Strategy.from_json(_text(body, "strategy"))
    except StrategyError as error:
        raise CheckpointError(f"the strategy in the checkpoint: {error}") from error
