"""Saving and loading what the hook keeps: residuals, velocities, step and epoch, the strategy in use.

``state_dict()`` is one rank's; loading another rank's is an error. ``gather_state_dict()`` holds all
ranks' and can be loaded by any number of ranks: a residual acts on the *average*, so with P' instead of P
ranks it is scaled by P'/P, and the rank that takes it over adds it to its own contribution.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from espresso.comm.keep.store import Address, Piece, ResidualStore
from espresso.strategies import Site, Strategy, StrategyError

if TYPE_CHECKING:
    from espresso.live.state import EspressoState

VERSION = 2
_ROW_KEYS = {"tensor", "site", "start", "replica", "values"}
_KEYS = {
    "version", "kind", "rank", "num_ranks", "model", "step", "epoch", "strategy",
    "residuals", "carry", "velocities", "velocity_carry", "factors",
}  # fmt: skip
_KEPT = (("residuals", "carry"), ("velocities", "velocity_carry"))
"""(what sites hold, what is carried) of every store."""


class CheckpointError(ValueError):
    """A checkpoint of another rank, another model, another version, or no checkpoint at all."""


def save(state: EspressoState) -> dict[str, Any]:
    """This rank's state as tensors and plain values, copies all of them."""
    groups, executor = state._groups, state._executor
    decided = state.strategy if state.decided else None
    return {
        "version": VERSION,
        "kind": "espresso-rank",
        "rank": 0 if groups is None else groups.rank,
        "num_ranks": 0 if groups is None else groups.num_ranks,
        "model": _model_digest(state),
        "step": 0 if executor is None else executor.next_step,
        "epoch": state._epoch,
        "strategy": None if decided is None else decided.to_json(),
        **_rows("residuals", "carry", state._store),
        **_rows("velocities", "velocity_carry", state._velocities),
        "factors": {name: torch.from_numpy(values) for name, values in state._factors.snapshot().items()},
    }


def _rows(held: str, carried: str, store: ResidualStore | None) -> dict[str, Any]:
    pieces, carry = ({}, {}) if store is None else store.snapshot()
    rows = [
        {
            "tensor": name,
            "site": site.value,
            "start": start,
            "replica": replica,
            "values": torch.from_numpy(values),
        }
        for (name, site), parts in pieces.items()
        for start, values, replica in parts
    ]
    return {held: rows, carried: {name: torch.from_numpy(values) for name, values in carry.items()}}


def gather(state: EspressoState) -> dict[str, Any]:
    """All ranks' states, on every rank. Collective."""
    if state._groups is None:
        raise CheckpointError("nothing to gather before the first step; call state.start() or train a step")
    ranks = state._groups.all_objects(save(state))
    return {"version": VERSION, "kind": "espresso-gathered", "model": ranks[0]["model"], "ranks": ranks}


def check(body: Any) -> dict[str, Any]:
    """A well-formed checkpoint, or CheckpointError."""
    if not isinstance(body, dict) or body.get("kind") not in ("espresso-rank", "espresso-gathered"):
        raise CheckpointError(
            "this is not an espresso state_dict (it has no kind 'espresso-rank' or 'espresso-gathered')"
        )
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint version {body.get('version')!r} is not supported; this version reads {VERSION}"
        )
    if body["kind"] == "espresso-gathered":
        ranks = body.get("ranks")
        if not isinstance(ranks, list) or not ranks:
            raise CheckpointError("the gathered checkpoint holds no ranks")
        for rank in ranks:
            check(rank)
        return body
    if set(body) != _KEYS:
        odd = sorted(set(body) ^ _KEYS)[0]
        raise CheckpointError(f"the checkpoint has an unknown or missing entry {odd!r}")
    for entry, kind in (
        ("rank", int),
        ("num_ranks", int),
        ("step", int),
        ("epoch", int | None),
        ("residuals", list),
        ("carry", dict),
        ("velocities", list),
        ("velocity_carry", dict),
        ("factors", dict),
    ):
        if not isinstance(body[entry], kind):
            wanted = getattr(kind, "__name__", str(kind))
            raise CheckpointError(f"entry {entry!r} should be {wanted}, got {body[entry]!r:.60}")
    for name, values in body["factors"].items():
        _check_values(f"factors of {name!r}", values)
    for held, carried in _KEPT:
        for row in body[held]:
            _check_row(row)
        for name, values in body[carried].items():
            _check_values(f"{carried} of {name!r}", values)
    return body


def _check_row(row: Any) -> None:
    if not isinstance(row, dict) or set(row) != _ROW_KEYS:
        raise CheckpointError(f"a residual should have the entries {', '.join(sorted(_ROW_KEYS))}: {row!r:.80}")
    if row["site"] not in {site.value for site in Site}:
        raise CheckpointError(f"residual of {row['tensor']!r}: unknown site {row['site']!r}")
    for entry in ("start", "replica"):
        if not isinstance(row[entry], int) or row[entry] < 0:
            raise CheckpointError(f"residual of {row['tensor']!r}: {entry} is {row[entry]!r:.40}")
    _check_values(f"residual of {row['tensor']!r}", row["values"])


def _check_values(what: str, values: Any) -> None:
    if not isinstance(values, torch.Tensor) or values.dim() != 1 or not values.is_floating_point():
        raise CheckpointError(f"{what}: the values should be a floating-point tensor of one dimension")
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{what}: the values are not finite; the checkpoint is damaged")


def _check_model(state: EspressoState, body: dict[str, Any]) -> None:
    """Whether a rank's body is of this model, and all that it keeps lies inside the model's tensors."""
    numels = {tensor.name: tensor.numel for tensor in state._tensors}
    for held, carried in _KEPT:
        ends = [(row["tensor"], row["start"] + row["values"].numel()) for row in body[held]]
        for name, end in ends:
            if name not in numels or end > numels[name]:
                raise CheckpointError(f"residual of {name!r} ends at {end}, outside the model's tensor")
        for name, values in body[carried].items():
            if values.numel() != numels.get(name):
                raise CheckpointError(f"{carried} of {name!r} has {values.numel()} elements, unlike the model's tensor")


def load(state: EspressoState, body: Any) -> None:
    """Take over a checkpoint. Checks everything before it changes anything."""
    check(body)
    groups, executor = state._groups, state._executor
    assert groups is not None
    assert executor is not None
    if body["model"] != _model_digest(state):
        raise CheckpointError("the checkpoint is of a model with other parameters (names, shapes or dtypes)")
    gathered = body["kind"] == "espresso-gathered"
    if not gathered and (body["rank"], body["num_ranks"]) != (groups.rank, groups.num_ranks):
        raise CheckpointError(
            f"the checkpoint is of rank {body['rank']} of {body['num_ranks']}, this is rank {groups.rank} of"
            f" {groups.num_ranks}; load this rank's own, or one made by gather_state_dict()"
        )
    ranks = body["ranks"] if gathered else [body]
    for number, rank in enumerate(ranks):
        _check_model(state, rank)
        if gathered and (rank["rank"], rank["num_ranks"]) != (number, len(ranks)):
            raise CheckpointError(f"place {number} of {len(ranks)} holds rank {rank['rank']} of {rank['num_ranks']}")
    strategy = _strategy(state, ranks[0])
    state._epoch = ranks[0]["epoch"]
    if strategy is not None and strategy.cluster.shape == groups.cluster.shape:
        state.resume(strategy)
    executor.restart(ranks[0]["step"])
    state._factors.load({name: _numpy(values) for name, values in ranks[0]["factors"].items()})
    numels = {t.name: t.numel for t in state._tensors}
    for (held, carried), store in zip(_KEPT, (state._store, state._velocities), strict=True):
        if store is None:
            continue
        if gathered and len(ranks) != groups.num_ranks:
            pieces, carry = _resized(ranks, held, carried, groups.rank, groups.num_ranks)
        else:
            mine = ranks[groups.rank] if gathered else body
            pieces = _pieces(mine, held)
            carry = {name: _numpy(values) for name, values in mine[carried].items()}
        store.load(pieces, carry, numels)


def _strategy(state: EspressoState, body: dict[str, Any]) -> Strategy | None:
    """The strategy to go on with: what automatic mode had decided, unless the user gives one now."""
    if body["strategy"] is None or isinstance(state._given, Strategy):
        return None
    try:
        strategy = Strategy.from_json(body["strategy"])
        strategy.check_model(state._tensors, strategy.cluster)
    except StrategyError as error:
        raise CheckpointError(f"the strategy in the checkpoint: {error}") from error
    return strategy


def _pieces(body: dict[str, Any], held: str) -> dict[Address, list[Piece]]:
    pieces: dict[Address, list[Piece]] = {}
    for row in body[held]:
        piece = (row["start"], _numpy(row["values"]), row["replica"])
        pieces.setdefault((row["tensor"], Site(row["site"])), []).append(piece)
    return pieces


def _resized(
    ranks: list[dict[str, Any]], held: str, carried: str, rank: int, num_ranks: int
) -> tuple[dict[Address, list[Piece]], dict[str, Any]]:
    """Everything the old ranks answer for, dealt out to the new ones as carry, scaled to keep the average."""
    scale = num_ranks / len(ranks)
    carry: dict[str, Any] = {}
    pieces: dict[Address, list[Piece]] = {}
    for old in ranks[rank::num_ranks]:
        for (name, _), parts in _pieces(old, held).items():
            for start, values, replica in parts:
                if replica == 0:
                    pieces.setdefault((name, Site.LOCAL), []).append((start, values * values.dtype.type(scale), 0))
        for name, values in old[carried].items():
            scaled = _numpy(values) * scale
            carry[name] = carry[name] + scaled if name in carry else scaled
    return pieces, carry


def _numpy(values: Any) -> Any:
    return values.detach().cpu().numpy().copy() if isinstance(values, torch.Tensor) else np.array(values)


def _model_digest(state: EspressoState) -> str:
    text = repr(sorted((t.name, t.shape, t.dtype) for t in state._tensors))
    return hashlib.sha256(text.encode()).hexdigest()


def checksum(parameter: torch.Tensor) -> int:
    """A checksum of a parameter's bytes."""
    flat = parameter.detach().cpu().contiguous().reshape(-1)  # a scalar cannot be viewed as bytes
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())


class PerRank:
    """A state as ``torch.distributed.checkpoint`` wants it: one opaque entry per rank.

    Example:
        >>> dcp.save({"espresso": PerRank(state)}, checkpoint_id=path)   # doctest: +SKIP
    """

    def __init__(self, state: EspressoState) -> None:
        self._state = state

    def _key(self) -> str:
        groups = self._state.start()._groups
        assert groups is not None
        return f"rank_{groups.rank}"

    def state_dict(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save(save(self._state), buffer)
        return {self._key(): buffer}

    def load_state_dict(self, body: dict[str, Any]) -> None:
        buffer = body[self._key()]
        buffer.seek(0)
        self._state.load_state_dict(torch.load(buffer, weights_only=True))
