"""The shape of a cluster: how many nodes, how many ranks on each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cluster:
    """``num_nodes`` machines with ``ranks_per_node`` ranks each; rank = node * ranks_per_node + local rank.

    Raises:
        ValueError: either number is below one.
    """

    num_nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        for field in ("num_nodes", "ranks_per_node"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"cluster: {field} must be a whole number of at least 1, got {value!r}")

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def is_hierarchical(self) -> bool:
        """Whether intra and inter steps differ: several nodes *and* several ranks on each."""
        return self.num_nodes > 1 and self.ranks_per_node > 1

    def __str__(self) -> str:
        return f"{self.num_nodes} nodes x {self.ranks_per_node} ranks"
