"""Parts of a checkpoint: rows of numbers that ranks keep, dealt out to parts, and their form as bytes.

Residuals are addends: every rank keeps its own, and their sum over ranks acts on the average. So a checkpoint is cut
into ``NUM_PARTS`` parts, whatever the number of ranks; a rank saves those that are its own, and loads those that are.
That is what ``torch.distributed.checkpoint`` needs: names that are known before a file is opened, each saved by one
rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from espresso.comm.errors import ProtocolError
from espresso.comm.keep.store import Array, Stretch
from espresso.comm.messages import PLAIN
from espresso.strategies import Site
from espresso.strategies.fields import shown

NUM_PARTS = 840
"""Divisible by every number of ranks up to 8, and by most that people use; no more ranks than that save parts."""

MOST = 2**62
"""Counters of a checkpoint stay below this."""

RESIDUAL, VELOCITY, FACTOR = "residual", "velocity", "factor"


class CheckpointError(ValueError):
    """A checkpoint of another rank, another model, another version, or no checkpoint at all."""


@dataclass(frozen=True)
class Row:
    """Consecutive numbers of a tensor in a checkpoint.

    Attributes:
        held: ``residual``, ``velocity`` or ``factor``.
        site: None for what is carried.
        start: the first element within the tensor.
    """

    held: str
    tensor: str
    site: Site | None
    start: int
    values: Array


class Part:
    """Rows of a checkpoint: what a rank keeps, or what was read. Nothing is copied before it is pickled; it is its own
    copy.

    Pickled it is a tensor of bytes: one message (:mod:`espresso.comm.messages`) of rows (held, tensor, site, start,
    values).

    Args:
        kept: stretches, each with what it is: ``residual``, ``velocity`` or ``factor``.
        read: or such a tensor.
    """

    def __init__(self, kept: Iterable[tuple[str, Stretch]] = (), read: Any = None) -> None:
        self.kept, self._read = tuple(kept), read

    def packed(self) -> torch.Tensor:
        """Its bytes."""
        if self._read is not None:
            found: torch.Tensor = self._read
            return found
        rows = [(held, s.tensor, None if s.site is None else s.site.value, s.start, s.read()) for held, s in self.kept]
        return torch.from_numpy(PLAIN.pack(rows))

    def rows(self, what: str) -> list[Row]:
        """What it holds.

        Raises:
            CheckpointError: it is malformed; ``what`` names it.
        """
        if self._read is None:
            return [Row(held, s.tensor, s.site, s.start, s.read()) for held, s in self.kept]
        rows = _message(self._read, what)
        if not isinstance(rows, list):
            raise CheckpointError(f"{what} should be a list of rows, got {shown(rows)}")
        return [row_of(row) for row in rows]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = torch.Tensor.__reduce_ex__
        return reduced(self.packed(), protocol)

    def __deepcopy__(self, memo: Any) -> Part:
        return self


@dataclass(frozen=True)
class Place:
    """A rank among those that save together."""

    rank: int
    num_ranks: int

    @property
    def parts(self) -> range:
        """The numbers of its parts.

        Raises:
            CheckpointError: there are more ranks than parts.
        """
        if self.num_ranks > NUM_PARTS:
            raise CheckpointError(f"checkpoints are cut into {NUM_PARTS} parts, which {self.num_ranks} ranks exceed")
        first, end = (-(-rank * NUM_PARTS // self.num_ranks) for rank in (self.rank, self.rank + 1))
        return range(first, end)


def cut(stretches: Iterable[tuple[str, Stretch]], num_parts: int) -> list[Part]:
    """Deal stretches out in order, equally much to each part. What is packed is not cut."""
    kept = [(held, stretch) for held, stretch in stretches if stretch.numel and not stretch.replica]
    total = sum(stretch.numel for _, stretch in kept)
    shares: list[list[tuple[str, Stretch]]] = [[] for _ in range(num_parts)]
    position = 0
    for held, stretch in kept:
        low = 0
        while low < stretch.numel:
            number = position * num_parts // total
            left = -(-(number + 1) * total // num_parts) - position
            size = stretch.numel - low if stretch.loan.is_packed else min(left, stretch.numel - low)
            shares[number].append((held, stretch.cut(low, low + size)))
            low, position = low + size, position + size
    return [Part(share) for share in shares]


# -- reading -----------------------------------------------------------------------------------------


def count(value: Any, what: str) -> int:
    """A number that counts something, or CheckpointError; ``what`` names it."""
    if type(value) is not int or not 0 <= value < MOST:
        raise CheckpointError(f"{what} should be a whole number of at least 0, got {shown(value)}")
    return value


def _message(body: Any, what: str) -> Any:
    if not isinstance(body, torch.Tensor) or body.dim() != 1 or body.dtype is not torch.uint8:
        raise CheckpointError(f"{what} should be a tensor of bytes, got {shown(body)}")
    if body.is_meta or body.layout is not torch.strided or body.numel() > body.untyped_storage().nbytes():
        raise CheckpointError(f"{what} is a tensor that holds no bytes")
    try:
        return PLAIN.unpack(body.detach().cpu().contiguous().numpy())
    except (ProtocolError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{what} is damaged ({error})") from error


def part_of(body: Any) -> Part:
    """A part as it was saved, or as it was read."""
    return body if isinstance(body, Part) else Part(read=body)


def parts_of(body: Any) -> dict[int, Part]:
    """Parts by number, or CheckpointError."""
    if not isinstance(body, Mapping):
        raise CheckpointError(f"entry 'parts' should be a dictionary, got {shown(body)}")
    found = {}
    for name, part in body.items():
        number = int(name) if isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) < 4 else -1
        if not 0 <= number < NUM_PARTS:
            raise CheckpointError(f"there is no part {shown(name)}; parts are '0' to '{NUM_PARTS - 1}'")
        found[number] = part_of(part)
    return found


_SITES: dict[Any, Site | None] = {None: None, **{site.value: site for site in Site}}


def row_of(row: Any) -> Row:
    """Read a row, or raise CheckpointError."""
    match row:
        case (str(held), str(tensor), None | str() as site, start, values) if held in (RESIDUAL, VELOCITY, FACTOR):
            what = f"{held} of {tensor!r}"
            if site not in _SITES:
                raise CheckpointError(f"{what}: unknown site {shown(site)}")
            return Row(held, tensor, _SITES[site], count(start, f"{what}: start"), _values(what, values))
    raise CheckpointError(f"a row should be (held, tensor, site, start, values): {shown(row)}")


def _values(what: str, values: Any) -> Array:
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind != "f":
        raise CheckpointError(f"{what}: the values should be floating-point numbers of one dimension")
    if not np.isfinite(values).all():
        raise CheckpointError(f"{what}: the values are not finite; the checkpoint is damaged")
    return values


def check_rows(rows: Iterable[Row], numels: Mapping[str, int]) -> None:
    """Raise CheckpointError for a row outside its tensor."""
    for row in rows:
        if row.start + row.values.size > numels.get(row.tensor, -1):
            raise CheckpointError(
                f"{row.held} of {row.tensor!r} ends at {row.start + row.values.size}, outside the model's tensor"
            )
