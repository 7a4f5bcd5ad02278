"""What a job keeps between two runs, and its form in a checkpoint: read whole, checked whole, then taken over.

A ``state_dict()`` is one rank's; loading another rank's is an error. A gathered one holds all ranks' and can be
loaded by any number of ranks: a residual acts on the *average*, so with P' instead of P ranks it is scaled by P'/P, and
the rank that takes it over adds it to its own contribution.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from espresso.comm.keep.store import Address, Array, Piece
from espresso.compressors.schedule import check_choices
from espresso.strategies import Site, Strategy, StrategyError, TensorSpec
from espresso.strategies.fields import shown

VERSION = 2
MOST = 2**62
"""Counters of a checkpoint stay below this."""

_RANK, _GATHERED = "espresso-rank", "espresso-gathered"
_ROW_KEYS = {"tensor", "site", "start", "replica", "values"}
_KEYS = {
    "version", "kind", "rank", "num_ranks", "model", "step", "epoch", "strategy",
    "residuals", "carry", "velocities", "velocity_carry", "factors",
}  # fmt: skip
_FLOATS = (torch.float16, torch.float32, torch.float64)


class CheckpointError(ValueError):
    """A checkpoint of another rank, another model, another version, or no checkpoint at all."""


@dataclass(frozen=True)
class Stored:
    """What one store of a rank holds.

    Attributes:
        pieces: by (tensor, site): (first element, values, replica).
        carry: what enters with this rank's next gradient, by tensor.
    """

    pieces: Mapping[Address, Sequence[Piece]] = field(default_factory=dict)
    carry: Mapping[str, Array] = field(default_factory=dict)

    def to_dict(self, held: str, carried: str) -> dict[str, Any]:
        """The two entries of a checkpoint."""
        rows = [
            {"tensor": name, "site": site.value, "start": start, "replica": replica, "values": torch.from_numpy(values)}
            for (name, site), parts in self.pieces.items()
            for start, values, replica in parts
        ]
        return {held: rows, carried: {name: torch.from_numpy(values) for name, values in self.carry.items()}}

    @classmethod
    def parse(cls, body: Mapping[str, Any], held: str, carried: str) -> Stored:
        """Read the two entries, or raise CheckpointError."""
        pieces: dict[Address, list[Piece]] = {}
        for row in _entry(body, held, list):
            if not isinstance(row, dict) or set(row) != _ROW_KEYS:
                wanted = ", ".join(sorted(_ROW_KEYS))
                raise CheckpointError(f"a residual should have the entries {wanted}: {shown(row)}")
            name, what = _name(row["tensor"]), f"residual of {row['tensor']!r}"
            sites = {site.value: site for site in Site}
            if not isinstance(row["site"], str) or row["site"] not in sites:
                raise CheckpointError(f"{what}: unknown site {shown(row['site'])}")
            start, replica = (_count(row[entry], f"{what}: {entry}") for entry in ("start", "replica"))
            pieces.setdefault((name, sites[row["site"]]), []).append((start, _values(what, row["values"]), replica))
        return cls(pieces, _arrays(body, carried))

    def check_model(self, numels: Mapping[str, int], what: str) -> None:
        """Whether all of it lies inside the model's tensors; else CheckpointError."""
        for (name, _), parts in self.pieces.items():
            end = max(start + values.size for start, values, _ in parts)
            if end > numels.get(name, -1):
                raise CheckpointError(f"residual of {name!r} ends at {end}, outside the model's tensor")
        for name, values in self.carry.items():
            if values.size != numels.get(name):
                raise CheckpointError(f"{what} of {name!r} has {values.size} elements, unlike the model's tensor")


@dataclass(frozen=True)
class Kept:
    """What one rank keeps.

    Attributes:
        model: a digest of the parameters' names, shapes and dtypes.
        step: the number of the next iteration.
        strategy: the one that was decided; None before.
        factors: of compressors of several rounds, by tensor; equal on all ranks.
    """

    rank: int
    num_ranks: int
    model: str
    step: int = 0
    epoch: int | None = None
    strategy: Strategy | None = None
    residuals: Stored = Stored()
    velocities: Stored = Stored()
    factors: Mapping[str, Array] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return {
            "version": VERSION,
            "kind": _RANK,
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "model": self.model,
            "step": self.step,
            "epoch": self.epoch,
            "strategy": None if self.strategy is None else self.strategy.to_json(),
            **self.residuals.to_dict("residuals", "carry"),
            **self.velocities.to_dict("velocities", "velocity_carry"),
            "factors": {name: torch.from_numpy(values) for name, values in self.factors.items()},
        }

    @classmethod
    def parse(cls, body: Any) -> Kept:
        """Read one rank's checkpoint, or raise CheckpointError."""
        _check_kind(body, (_RANK,))
        if set(body) != _KEYS:
            odd = min(map(shown, set(body) ^ _KEYS))
            raise CheckpointError(f"the checkpoint has an unknown or missing entry {odd}")
        return cls(
            rank=_count(body["rank"], "entry 'rank'"),
            num_ranks=_count(body["num_ranks"], "entry 'num_ranks'"),
            model=_entry(body, "model", str),
            step=_count(body["step"], "entry 'step'"),
            epoch=None if body["epoch"] is None else _count(body["epoch"], "entry 'epoch'"),
            strategy=_strategy(body["strategy"]),
            residuals=Stored.parse(body, "residuals", "carry"),
            velocities=Stored.parse(body, "velocities", "velocity_carry"),
            factors=_arrays(body, "factors"),
        )

    def check_model(self, tensors: Sequence[TensorSpec]) -> None:
        """Whether strategy, residuals and factors fit these tensors; else CheckpointError."""
        numels = {tensor.name: tensor.numel for tensor in tensors}
        self.residuals.check_model(numels, "carry")
        self.velocities.check_model(numels, "velocity_carry")
        for name, values in self.factors.items():
            if values.size > numels.get(name, -1):
                raise CheckpointError(f"factors of {name!r} have {values.size} elements, unlike the model's tensor")
        try:
            if self.strategy is not None:
                self.strategy.check_model(tuple(tensors), self.strategy.cluster)
                check_choices(self.strategy)
        except ValueError as error:
            raise CheckpointError(f"the strategy in the checkpoint: {error}") from error


@dataclass(frozen=True)
class Checkpoint:
    """One rank's, or all ranks'."""

    ranks: tuple[Kept, ...]
    is_gathered: bool = False

    @classmethod
    def parse(cls, body: Any) -> Checkpoint:
        """Read a ``state_dict()`` or a gathered one.

        Raises:
            CheckpointError: it is malformed, says what.
        """
        _check_kind(body, (_RANK, _GATHERED))
        if body["kind"] == _RANK:
            return cls((Kept.parse(body),))
        ranks = body.get("ranks")
        if not isinstance(ranks, list) or not ranks:
            raise CheckpointError("the gathered checkpoint holds no ranks")
        found = tuple(map(Kept.parse, ranks))
        for number, kept in enumerate(found):
            if (kept.rank, kept.num_ranks) != (number, len(found)):
                raise CheckpointError(f"place {number} of {len(found)} holds rank {kept.rank} of {kept.num_ranks}")
        return cls(found, is_gathered=True)

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`parse` reads."""
        ranks = [kept.to_dict() for kept in self.ranks]
        if not self.is_gathered:
            return ranks[0]
        return {"version": VERSION, "kind": _GATHERED, "model": self.ranks[0].model, "ranks": ranks}

    def of(self, rank: int, num_ranks: int, model: str, tensors: Sequence[TensorSpec]) -> Kept:
        """What a rank of a job takes over.

        Raises:
            CheckpointError: another rank's, or of another model.
        """
        for kept in self.ranks:
            if kept.model != model:
                raise CheckpointError("the checkpoint is of a model with other parameters (names, shapes or dtypes)")
        first = self.ranks[0]
        if not self.is_gathered and (first.rank, first.num_ranks) != (rank, num_ranks):
            raise CheckpointError(
                f"the checkpoint is of rank {first.rank} of {first.num_ranks}, this is rank {rank} of"
                f" {num_ranks}; load this rank's own, or one made by gather_state_dict()"
            )
        for kept in self.ranks:
            kept.check_model(tensors)
        if not self.is_gathered:
            return first
        if len(self.ranks) == num_ranks:
            mine = self.ranks[rank]
            residuals, velocities = mine.residuals, mine.velocities
        else:
            scale, dealt = num_ranks / len(self.ranks), self.ranks[rank::num_ranks]
            residuals = _resized((kept.residuals for kept in dealt), scale)
            velocities = _resized((kept.velocities for kept in dealt), scale)
        return Kept(
            rank, num_ranks, model, first.step, first.epoch, first.strategy, residuals, velocities, first.factors
        )


def _resized(dealt: Iterable[Stored], scale: float) -> Stored:
    """What other ranks answered for, as this rank's own contribution, scaled to keep the average."""
    carry: dict[str, Array] = {}
    pieces: dict[Address, list[Piece]] = {}
    for stored in dealt:
        for (name, _), parts in stored.pieces.items():
            for start, values, replica in parts:
                if replica == 0:
                    pieces.setdefault((name, Site.LOCAL), []).append((start, values * values.dtype.type(scale), 0))
        for name, values in stored.carry.items():
            scaled = values * scale
            carry[name] = carry[name] + scaled if name in carry else scaled
    return Stored(pieces, carry)


# -- reading entries ---------------------------------------------------------------------------------


def _check_kind(body: Any, kinds: Sequence[str]) -> None:
    if not isinstance(body, dict) or not isinstance(body.get("kind"), str) or body["kind"] not in kinds:
        raise CheckpointError(f"this is not an espresso state_dict (it has no kind {' or '.join(map(repr, kinds))})")
    version = body.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(f"checkpoint version {shown(version)} is not supported; this version reads {VERSION}")


def _entry(body: Mapping[str, Any], entry: str, kind: type) -> Any:
    if not isinstance(body[entry], kind):
        raise CheckpointError(f"entry {entry!r} should be {kind.__name__}, got {shown(body[entry])}")
    return body[entry]


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < MOST:
        raise CheckpointError(f"{what} should be a whole number of at least 0, got {shown(value)}")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"a tensor's name should be str, got {shown(value)}")
    return value


def _arrays(body: Mapping[str, Any], entry: str) -> dict[str, Array]:
    return {_name(name): _values(f"{entry} of {name!r}", v) for name, v in _entry(body, entry, dict).items()}


def _values(what: str, values: Any) -> Array:
    """A copy of the numbers of a tensor."""
    if not isinstance(values, torch.Tensor) or values.dim() != 1 or values.dtype not in _FLOATS:
        raise CheckpointError(f"{what}: the values should be a floating-point tensor of one dimension")
    if values.is_meta or values.layout is not torch.strided:
        raise CheckpointError(f"{what}: the values are on the meta device or sparse; the checkpoint holds no numbers")
    if values.numel() * values.element_size() > values.untyped_storage().nbytes():
        raise CheckpointError(f"{what}: the tensor claims {values.numel()} numbers and does not hold them")
    found: Array = values.detach().cpu().numpy().copy()
    if not np.isfinite(found).all():
        raise CheckpointError(f"{what}: the values are not finite; the checkpoint is damaged")
    return found


def _strategy(body: Any) -> Strategy | None:
    try:
        return None if body is None else Strategy.from_json(body)
    except StrategyError as error:
        raise CheckpointError(f"the strategy in the checkpoint: {error}") from error


# -- beside it ---------------------------------------------------------------------------------------


def checksum(parameter: torch.Tensor) -> int:
    """A checksum of a parameter's bytes."""
    flat = parameter.detach().cpu().contiguous().reshape(-1)  # a scalar cannot be viewed as bytes
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
