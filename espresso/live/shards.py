"""Shards of tensors: where a rank's belong in the whole, and what of a checkpoint is a rank's.

In a checkpoint everything is addressed within whole tensors, so that it is the same for every way of sharding them,
none included. A rank that loads one saved over other shards finds rows of others' shards in its parts: the ranks that
share a copy of the model pass them on to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from espresso.comm.errors import DisagreementError
from espresso.comm.groups import Groups
from espresso.comm.keep.store import Stretch
from espresso.comm.witness import worded
from espresso.live.parts import FACTOR, Row, row_of
from espresso.strategies import Choice, Strategy, TensorSpec


@dataclass(frozen=True)
class Shards:
    """What this rank's tensors are shards of.

    Attributes:
        group: the ranks that hold one copy of the model together, this one among them.
        wholes: all tensors of the model, also those of which nothing is here.
        starts: of the tensors that are here, the first element in the whole.
    """

    group: dist.ProcessGroup
    wholes: tuple[TensorSpec, ...]
    starts: Mapping[str, int]

    def told(self, strategy: Strategy | Exception, beside: Groups) -> Strategy:
        """A strategy for the tensors that are here, with what it is on other shards for those that are not.

        All ranks of ``beside`` together.

        Args:
            strategy: or why it is refused here.

        Raises:
            Exception: that one.
            DisagreementError: it is refused for another shard, or shards of one tensor were given unlike choices.
        """
        if isinstance(strategy, Exception):
            beside.all_objects((worded(strategy), None))
            raise strategy
        found: dict[str, Choice] = {}
        for rank, (refusal, body) in enumerate(beside.all_objects(("", strategy.to_json()))):
            if refusal:
                raise DisagreementError(f"shard {rank} of the model refuses its strategy: {refusal}")
            for name, choice in Strategy.from_json(body).choices.items():
                if found.setdefault(name, choice) != choice:
                    raise DisagreementError(
                        f"shard {rank} of tensor {name!r} was given another choice than those before it ({choice},"
                        f" not {found[name]}); a tensor has one choice on all its shards"
                    )
        return replace(strategy, elsewhere={n: choice for n, choice in found.items() if n not in strategy.choices})

    def whole(self, held: str, stretch: Stretch) -> Stretch:
        """A stretch of a shard as one of the whole tensor; a factor is addressed by itself."""
        return stretch if held == FACTOR else replace(stretch, start=stretch.start + self.starts[stretch.tensor])


@dataclass(frozen=True)
class Taker:
    """Finds what of a checkpoint is a rank's. See :class:`~espresso.live.checkpoint.Sharing`.

    Attributes:
        beside: the groups of the ranks that hold one copy of the model together.
        numels: of the shards that are here.
    """

    shards: Shards
    beside: Groups
    numels: dict[str, int]

    def mine(self, rows: Sequence[Row], *, is_same: bool) -> list[Row]:
        return [mine for row in (rows if is_same else self._everybody(rows)) for mine in self._cut(row)]

    def _everybody(self, rows: Sequence[Row]) -> list[Row]:
        """Those that any rank which holds a part of this copy found."""
        plain = [(r.held, r.tensor, None if r.site is None else r.site.value, r.start, r.values) for r in rows]
        return [row_of(row) for theirs in self.beside.all_objects(plain) for row in theirs]

    def _cut(self, row: Row) -> list[Row]:
        first = self.shards.starts.get(row.tensor, 0)
        low, high = max(row.start, first), min(row.start + row.values.size, first + self.numels.get(row.tensor, 0))
        if low >= high:
            return []
        return [replace(row, start=low - first, values=row.values[low - row.start : high - row.start])]
