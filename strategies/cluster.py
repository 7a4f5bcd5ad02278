"""The shape of a cluster: how many nodes, how many ranks on each, and the parameter servers beside them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from espresso.strategies.fields import whole
from espresso.strategies.option import Scope

MAX_RANKS = 1 << 16
"""Of a job: what a rank does in a step is worked out shard by shard."""


class Sharing(Enum):
    """How gradients are shared out over parameter servers.

    ``MEASURED``: every server gets what its card and its processor bear, as measured. ``SIZES``: BytePS's rule (Jiang
    et al., OSDI 2020): by the sizes of uncompressed gradients, and between two kinds by :func:`shares_by_rule`.
    """

    MEASURED = "measured"
    SIZES = "sizes"


def shares_by_rule(machines: int, colocated: int, dedicated: int) -> tuple[float, float]:
    """BytePS's rule: the part of all gradients for each colocated server of so many, and for each dedicated one."""
    n, k = machines, dedicated
    part = 0.0 if n == 1 else min(2 * k * (n - 1) / (n * (n + k) - 2 * k), 1.0)  # of all dedicated ones
    return ((1.0 - part) / colocated, part / max(k, 1)) if colocated else (0.0, 1.0 / max(k, 1))


@dataclass(frozen=True, slots=True)
class Cluster:
    """``num_nodes`` machines with ``ranks_per_node`` ranks each; rank = node * ranks_per_node + local rank.

    Attributes:
        num_servers: parameter servers that the workers can reach; no ranks, they hold no model.
        colocated: whether servers run on the workers' machines, in turn, and share their network cards.
        num_apart: how many of the servers, the last ones, have machines of their own although others are colocated.

    Raises:
        ValueError: a number is out of range.
    """

    num_nodes: int
    ranks_per_node: int
    num_servers: int = 0
    colocated: bool = False
    num_apart: int = 0

    def __post_init__(self) -> None:
        for field in ("num_nodes", "ranks_per_node"):
            whole(getattr(self, field), f"cluster: {field}", least=1, most=MAX_RANKS)
        whole(self.num_ranks, "cluster: the number of ranks", most=MAX_RANKS)
        whole(self.num_servers, "cluster: num_servers", most=MAX_RANKS)
        if not isinstance(self.colocated, bool):
            raise ValueError(f"cluster: colocated must be true or false, got {self.colocated!r}")
        whole(self.num_apart, "cluster: num_apart", most=max(self.num_servers - 1, 0) if self.colocated else 0)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def is_hierarchical(self) -> bool:
        """Whether intra and inter steps differ: several nodes *and* several ranks on each."""
        return self.num_nodes > 1 and self.ranks_per_node > 1

    def crosses_both(self, scope: Scope) -> bool:
        """Whether a scope's exchanges cross links inside nodes and between them, so that gathers go round a ring."""
        return scope is Scope.FLAT and self.is_hierarchical

    def columns(self, scope: Scope) -> int:
        """How many of a scope's exchanges share a node's card: each local rank has an inter scope of its own."""
        return self.ranks_per_node if scope is Scope.INTER else 1

    @property
    def num_colocated(self) -> int:
        return self.num_servers - self.num_apart if self.colocated else 0

    @property
    def num_dedicated(self) -> int:
        """Servers with machines of their own."""
        return self.num_servers - self.num_colocated

    @property
    def shape(self) -> tuple[int, int]:
        """(nodes, ranks on each): what a strategy is made for. Servers may come and go."""
        return self.num_nodes, self.ranks_per_node

    def to_json(self) -> dict[str, int | bool]:
        """As in job and strategy files; servers only where there are any."""
        body: dict[str, int | bool] = {"num_nodes": self.num_nodes, "ranks_per_node": self.ranks_per_node}
        if self.num_servers:
            body |= {"num_servers": self.num_servers, "colocated": self.colocated}
        if self.num_apart:
            body["num_apart"] = self.num_apart
        return body

    def __str__(self) -> str:
        ranks = f"{self.num_nodes} nodes x {self.ranks_per_node} ranks"
        if not self.num_servers:
            return ranks
        if self.num_apart:
            return f"{ranks} and {self.num_servers} servers, {self.num_colocated} of them colocated"
        return f"{ranks} and {self.num_servers} {'colocated ' if self.colocated else ''}servers"
