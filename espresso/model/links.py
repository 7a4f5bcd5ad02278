"""Links: what a routine costs, from measured curves or a line of overhead, rate and latency.

A cost has two parts. *Occupancy* (a fixed overhead, and bytes over a rate) holds the lanes. *Latency* holds nothing and
delays what follows in the same chain. At most ``Links.in_flight`` exchanges are under way on a link, latency included.
With one, which is the papers' convention and the default, latency occupies its lane as all else does. What a card, a
container or a cloud lets through at once after a rest (a token bucket) is ``Links.burst_bytes``.

Conventions: allreduce costs the cheaper of ring and double tree; a flat routine is timed by the slowest link, the ranks
of a node sharing the NIC; a rooted routine is charged at its root. The executor's exchanges send to all peers at once
(all-to-all, reduce-scatter, all-gather): they pay the latency once, however many take part. An allreduce, and a flat
all-gather with several ranks on a node, is a ring, and pays it in every round.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from espresso.model.servers import Load
from espresso.strategies import Cluster, Form, FormError, Routine, Scope, Step
from espresso.strategies.fields import SMALLEST, number, whole

Points = tuple[tuple[float, float], ...]
"""Knots ``(x, microseconds)`` of a piecewise linear curve, x rising."""

KB = 1000.0
"""Bytes in the KB of ``beta_us_per_kb``: links are sold in powers of ten."""


class JobError(FormError):
    """A job, its costs or its file is malformed, or lacks something that was asked of it."""


def interpolate(points: Points, x: float) -> float:
    """The curve at ``x``: linear between knots, by the nearest slope outside them, never below zero.

    One knot is a line through the origin.
    """
    if len(points) == 1:
        ((x0, y0),) = points
        return y0 * x / x0 if x0 else y0
    right = min(max(bisect_right(points, x, key=lambda point: point[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.0)


def check_points(points: Points, where: str) -> None:
    """Raise :class:`JobError` for a curve without knots, or whose knots do not rise in x."""
    if not points:
        raise JobError(f"{where} has no points")
    for (x0, _), (x1, _) in pairwise(points):
        if x1 - x0 < SMALLEST:
            raise JobError(f"{where}: points must rise in x, but {x1:g} follows {x0:g}")
    for x, y in points:
        number(x, f"{where} at {x!r}", positive=x != 0)
        number(y, f"{where} at {x!r}")


MOST_IN_FLIGHT = 64
"""Exchanges, or offloaded steps, at once."""


class Cost(NamedTuple):
    """What an exchange takes, in microseconds: of its lanes, and beyond that until its data are there."""

    occupancy_us: float
    latency_us: float = 0.0

    @property
    def alone_us(self) -> float:
        """From its start until its data are there, if nothing is in the way."""
        return self.occupancy_us + self.latency_us


class Burst(NamedTuple):
    """A card's token bucket: what a full one saves an exchange, and what none takes less than, in microseconds.

    An exchange takes as much less as there is in it; a lane that rests gets a microsecond back in each.
    """

    credit_us: float = 0.0
    least_us: float = 0.0


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A link: overhead per message, time per 1000 bytes, and latency.

    For ``inter`` beta is one direction of one machine's NIC, for ``intra`` of one device's port.

    Attributes:
        alpha_us: what every message takes of the lane.
        latency_us: on the way, one way; holds nothing. Files without it have all of the latency in ``alpha_us``.
    """

    alpha_us: float
    beta_us_per_kb: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        number(self.alpha_us, "alpha_us")
        number(self.beta_us_per_kb, "beta_us_per_kb")
        number(self.latency_us, "latency_us")

    def cost(self, num_bytes: float, messages: float = 1, rounds: float | None = None) -> Cost:
        """Of ``messages``, in ``rounds`` that wait for each other (by default all of them do)."""
        occupancy = self.alpha_us * messages + self.beta_us_per_kb * num_bytes / KB
        return Cost(occupancy, self.latency_us * (messages if rounds is None else rounds))


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """A measured routine.

    Attributes:
        points: (total_bytes, us of the lane), bytes as in :meth:`espresso.model.costs.CostModel.comm`.
        latency_us: beyond that until the data are there: of one call alone, all its rounds together. Files without it
            have all of the latency in ``points``.
        spread_us: what one call in ten takes beyond it, where the way varies.
    """

    routine: Routine
    scope: Scope
    form: Form
    points: Points
    latency_us: float = 0.0
    spread_us: float = 0.0

    def __post_init__(self) -> None:
        where = f"link curve {self.scope.value}.{self.routine.value}"
        check_points(self.points, where)
        if self.points[-1][0] == 0:
            raise JobError(f"{where}: its only point is at 0 bytes, which does not say what a byte takes")
        number(self.latency_us, f"{where}: latency_us")
        number(self.spread_us, f"{where}: spread_us")

    @property
    def alone(self) -> Points:
        """(total_bytes, us) of one call alone: what was measured."""
        return tuple((num_bytes, us + self.latency_us) for num_bytes, us in self.points)


def routine_cost(routine: Routine, link: AlphaBeta, peers: int, total_bytes: float, node_ranks: int = 1) -> Cost:
    """The collective cost models of the literature (ALGORITHMS: allreduce the cheaper of ring and tree).

    Args:
        peers: ranks in the group; one rank costs nothing.
        total_bytes: S, the whole array: what is reduced, or what all ranks hold together after a gather.
        node_ranks: ranks of one node inside the group that share ``link`` (flat routines on a NIC). Rings
            and trees cross the NIC once per node; an all-to-all crosses it with every rank's shards.
    """
    if peers <= 1:
        return Cost(0.0)
    share = (peers - 1) / peers
    depth = math.ceil(math.log2(peers))
    if routine is Routine.ALLREDUCE:
        ring = link.cost(2 * share * total_bytes, 2 * (peers - 1))
        tree = link.cost(2 * total_bytes, 2 * depth)
        return min(ring, tree, key=_alone)
    if routine in (Routine.REDUCE_SCATTER, Routine.ALLGATHER):
        is_ring = routine is Routine.ALLGATHER and node_ranks > 1
        return link.cost(share * total_bytes, peers - 1, peers - 1 if is_ring else 1)
    if routine is Routine.ALL_TO_ALL:
        crossing = node_ranks * (peers - node_ranks) / peers if node_ranks > 1 else share
        return link.cost(crossing * total_bytes, peers - 1, 1)
    return link.cost(total_bytes, depth)


_alone = attrgetter("alone_us")


@dataclass(frozen=True, slots=True)
class Servers:
    """What a push or a pull meets: the card of a server of its own (None: like a worker's), and how much of all of it.

    Partitions are shared out over the servers, so each is charged its share of all servers' cards together.
    """

    nic: AlphaBeta | None
    load: Load

    def cost(self, worker: AlphaBeta, total_bytes: float) -> Cost:
        """Of ``total_bytes`` of all workers: as long as the busiest card needs."""
        nic = worker if self.nic is None else self.nic
        costs = [worker.cost(total_bytes * self.load.worker_card)]
        if self.load.server_card:
            costs.append(nic.cost(total_bytes * self.load.server_card))
        return max(costs, key=_alone)


@dataclass(frozen=True)
class Links:
    """The links: measured curves, an alpha-beta line per scope, or both (a curve goes before a line).

    Attributes:
        in_flight: exchanges that may be under way on one link at a time, latency included; with one, latency
            occupies its lane.
        burst_bytes: what a machine's card lets through at once after a rest: a token bucket.

    Raises:
        JobError: neither a curve nor a line, or two curves for the same routine.
    """

    intra: AlphaBeta | None = None
    inter: AlphaBeta | None = None
    curves: tuple[LinkCurve, ...] = ()
    in_flight: int = 1
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        whole(self.in_flight, "in_flight", least=1, most=MOST_IN_FLIGHT)
        number(self.burst_bytes, "burst_bytes")
        if self.intra is None and self.inter is None and not self.curves:
            raise JobError("give an alpha-beta line for a scope or measured curves")
        if len(self._by_key) != len(self.curves):
            raise JobError("two curves for one routine, scope and form")

    @cached_property
    def _by_key(self) -> dict[tuple[Routine, Scope, Form], LinkCurve]:
        return {(c.routine, c.scope, c.form): c for c in self.curves}

    def measured(self, routine: Routine, scope: Scope, form: Form) -> LinkCurve | None:
        """The routine's curve in this form, else in another one: bytes are bytes on the wire."""
        for candidate in (form, Form.RAW, Form.PAYLOAD, Form.SUMMABLE):
            curve = self._by_key.get((routine, scope, candidate))
            if curve is not None:
                return curve
        return None

    def burst(self, cluster: Cluster) -> Burst:
        """The token bucket of a machine's card as time; none where several exchanges are under way."""
        if not self.burst_bytes or self.in_flight > 1 or cluster.num_nodes == 1:
            return Burst()
        curve = self.crossing
        if curve is not None:
            return Burst(self.burst_bytes * us_per_byte(curve, cluster), curve.alone[0][1])
        return Burst() if self.inter is None else Burst(self.inter.beta_us_per_kb * self.burst_bytes / KB)

    @property
    def crossing(self) -> LinkCurve | None:
        """A gather of payloads between machines, if one was measured."""
        curves = (self._by_key.get((Routine.ALLGATHER, scope, Form.PAYLOAD)) for scope in (Scope.INTER, Scope.FLAT))
        return next((curve for curve in curves if curve is not None), None)

    @property
    def late(self) -> Links:
        """The same where every exchange takes what one in ten does."""
        slow = (replace(c, latency_us=c.latency_us + c.spread_us, spread_us=0.0) for c in self.curves)
        return replace(self, curves=tuple(slow))

    def cost(self, step: Step, cluster: Cluster, total_bytes: float, servers: Servers | None = None) -> Cost:
        """See :meth:`espresso.model.costs.CostModel.comm`; ``servers`` where there are any."""
        found = self._cost(step, cluster, total_bytes, servers)
        return Cost(found.alone_us) if self.in_flight == 1 else found

    def _cost(self, step: Step, cluster: Cluster, total_bytes: float, servers: Servers | None) -> Cost:
        assert step.routine is not None
        assert step.scope is not None
        peers = group_size(step.scope, cluster)
        to_servers = step.routine in (Routine.PUSH, Routine.PULL)
        if peers <= 1 and not to_servers:
            return Cost(0.0)
        curve = self.measured(step.routine, step.scope, step.form)
        if curve is not None:
            return Cost(interpolate(curve.points, total_bytes), curve.latency_us)
        if to_servers:
            assert servers is not None
            return servers.cost(self._line(step, Scope.INTER), total_bytes)
        if step.scope is Scope.FLAT:
            return self._flat(step, cluster, total_bytes)
        return routine_cost(step.routine, self._line(step, step.scope), peers, total_bytes)

    def _flat(self, step: Step, cluster: Cluster, total_bytes: float) -> Cost:
        assert step.routine is not None
        costs = []
        if cluster.ranks_per_node > 1:
            intra = self._line(step, Scope.INTRA)
            costs.append(routine_cost(step.routine, intra, cluster.num_ranks, total_bytes))
        if cluster.num_nodes > 1:
            inter = self._line(step, Scope.INTER)
            costs.append(routine_cost(step.routine, inter, cluster.num_ranks, total_bytes, cluster.ranks_per_node))
        return max(costs, key=_alone)

    def _line(self, step: Step, scope: Scope) -> AlphaBeta:
        line = self.intra if scope is Scope.INTRA else self.inter
        if line is None:
            raise JobError(f"links: no cost for {step}: measure it, or give an alpha-beta line for {scope.value}")
        return line


def group_size(scope: Scope, cluster: Cluster) -> int:
    """Ranks in one group of a scope."""
    if scope is Scope.FLAT:
        return cluster.num_ranks
    return cluster.ranks_per_node if scope is Scope.INTRA else cluster.num_nodes


RING_PASSES = {Routine.ALLREDUCE: 2, Routine.REDUCE_SCATTER: 1, Routine.ALLGATHER: 1, Routine.ALL_TO_ALL: 1}
"""How often a ring or a direct exchange passes the array round."""


def on_link(routine: Routine, peers: int) -> tuple[float, float]:
    """How many messages a rank sends, and its bytes on a link per byte of the whole array."""
    passes = RING_PASSES.get(routine)
    return (1, 1.0) if passes is None else (passes * (peers - 1), passes * (peers - 1) / peers)


def on_busiest_link(curve: LinkCurve, cluster: Cluster) -> tuple[float, float]:
    """Messages of a routine, and bytes on its busiest link per byte of the whole array."""
    peers = group_size(curve.scope, cluster)
    messages, share = on_link(curve.routine, peers)
    if curve.routine not in (Routine.ALLREDUCE, Routine.REDUCE_SCATTER, Routine.ALLGATHER):
        ranks = cluster.ranks_per_node if curve.scope is Scope.FLAT and cluster.num_nodes > 1 else 1
        messages = routine_cost(curve.routine, AlphaBeta(1.0, 0.0), peers, 0.0, ranks).occupancy_us
        share = routine_cost(curve.routine, AlphaBeta(0.0, 1.0), peers, 1000.0, ranks).occupancy_us
    return messages, share


def us_per_byte(curve: LinkCurve, cluster: Cluster) -> float:
    """What a byte more takes on the busiest link, by the two largest sizes."""
    (less, less_us), (most, most_us) = ((0.0, 0.0), *curve.alone)[-2:]
    return max(most_us - less_us, 0.0) / (most - less) / on_busiest_link(curve, cluster)[1]


AT_ONCE = (Routine.ALL_TO_ALL, Routine.REDUCE_SCATTER, Routine.ALLGATHER)
"""Routines whose messages do not wait for one another, but for gathers of payloads that go round a ring."""


def num_rounds(curve: LinkCurve, cluster: Cluster) -> float:
    """How many of a routine's messages wait for one another."""
    is_gather = (curve.routine, curve.form) == (Routine.ALLGATHER, Form.PAYLOAD)
    is_ring = is_gather and cluster.crosses_both(curve.scope)
    return 1 if curve.routine in AT_ONCE and not is_ring else on_busiest_link(curve, cluster)[0]


def fit_line(points: Sequence[tuple[float, float]], messages: float, factor: float) -> AlphaBeta:
    """Alpha and beta of a link from a routine's measured (total_bytes, us): least squares on relative error.

    Args:
        messages: how often the routine pays alpha.
        factor: bytes on the link per byte of the array.

    Example:
        >>> fit_line([(1000, 12.0), (2000, 14.0)], messages=1, factor=1.0)
        AlphaBeta(alpha_us=10.0, beta_us_per_kb=2.0)
    """
    weights = [1 / max(us, 1e-9) ** 2 for _, us in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
        if spread
        else 0.0
    )
    slope = max(slope, 0.0)
    intercept = max(mean_y - slope * mean_x, 0.0)
    return AlphaBeta(round(intercept / messages, 9), round(slope * KB / factor, 9))
