"""What everything costs: links, compressors, host copies, and how they slow one another.

Costs are measured or stated, never hidden in a method. A :class:`CostModel` answers three questions in
microseconds: how long a routine takes (:meth:`CostModel.comm_us`), how long a compressor takes
(:meth:`CostModel.encode_us`, :meth:`CostModel.decode_us`), how long a host copy takes. Contention is a
field: what shares the cores with what is for the timeline to work out.

Conventions: latency occupies its lane; allreduce costs the cheaper of ring and double tree; a flat
routine is timed by the slowest link, the ranks of a node sharing the NIC; a rooted routine is charged at
its root; a batched decode of m payloads is one launch plus m shares.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise

from espresso.strategies import (
    RANK_DEVICES,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    FormError,
    Routine,
    Scope,
    Step,
)
from espresso.strategies.fields import member, number, whole

Points = tuple[tuple[float, float], ...]
"""Knots ``(x, microseconds)`` of a piecewise linear curve, x rising."""

KB = 1000.0
"""Bytes in the KB of ``beta_us_per_kb``: links are sold in powers of ten."""


class JobError(FormError):
    """A job, its costs or its file is malformed, or lacks something that was asked of it."""


class Op(Enum):
    """What a compressor does."""

    ENCODE = "encode"
    DECODE = "decode"
    TRANSFORM = "transform"


COMMON_OPS = (Op.ENCODE, Op.DECODE)
"""What every compressor does; those of several rounds transform between them too."""


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


def _check_points(points: Points, where: str) -> None:
    if not points:
        raise JobError(f"{where} has no points")
    for (x0, _), (x1, _) in pairwise(points):
        if x1 <= x0:
            raise JobError(f"{where}: points must rise in x, but {x1:g} follows {x0:g}")
    for x, y in points:
        number(x, f"{where} at {x!r}")
        number(y, f"{where} at {x!r}")


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A link: latency per message, and time per 1000 bytes.

    For ``inter`` beta is one direction of one machine's NIC, for ``intra`` of one device's port.
    """

    alpha_us: float
    beta_us_per_kb: float

    def __post_init__(self) -> None:
        number(self.alpha_us, "alpha_us")
        number(self.beta_us_per_kb, "beta_us_per_kb")

    def line_us(self, num_bytes: float, messages: float = 1) -> float:
        return self.alpha_us * messages + self.beta_us_per_kb * num_bytes / KB


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """A measured routine: points (total_bytes, us), total_bytes as in :meth:`CostModel.comm_us`."""

    routine: Routine
    scope: Scope
    form: Form
    points: Points

    def __post_init__(self) -> None:
        _check_points(self.points, f"link curve {self.scope.value}.{self.routine.value}")


def routine_us(routine: Routine, link: AlphaBeta, peers: int, total_bytes: float, node_ranks: int = 1) -> float:
    """The collective cost models of the literature (ALGORITHMS: allreduce the cheaper of ring and tree).

    Args:
        peers: ranks in the group; one rank costs nothing.
        total_bytes: S, the whole array: what is reduced, or what all ranks hold together after a gather.
        node_ranks: ranks of one node inside the group that share ``link`` (flat routines on a NIC). Rings
            and trees cross the NIC once per node; an all-to-all crosses it with every rank's shards.
    """
    if peers <= 1:
        return 0.0
    share = (peers - 1) / peers
    depth = math.ceil(math.log2(peers))
    if routine is Routine.ALLREDUCE:
        ring = link.line_us(2 * share * total_bytes, 2 * (peers - 1))
        tree = link.line_us(2 * total_bytes, 2 * depth)
        return min(ring, tree)
    if routine in (Routine.REDUCE_SCATTER, Routine.ALLGATHER):
        return link.line_us(share * total_bytes, peers - 1)
    if routine is Routine.ALL_TO_ALL:
        crossing = node_ranks * (peers - node_ranks) / peers if node_ranks > 1 else share
        return link.line_us(crossing * total_bytes, peers - 1)
    return link.line_us(total_bytes, depth)


def server_exchange_us(worker: AlphaBeta, server: AlphaBeta | None, cluster: Cluster, total_bytes: float) -> float:
    """A push or a pull of ``total_bytes`` in all: as long as the busier of workers' and servers' cards needs.

    Partitions are balanced over the servers by bytes, so a partition is charged its share of all servers' cards
    together. Colocated servers add what they send and receive to their machine's own card.
    """
    mine = total_bytes / cluster.num_nodes
    each = total_bytes / max(cluster.num_servers, 1)
    if cluster.colocated:
        remote = (cluster.num_nodes - 1) / cluster.num_nodes
        return worker.line_us(remote * (mine + each))
    nic = worker if server is None else server
    return max(worker.line_us(mine), nic.line_us(each))


@dataclass(frozen=True)
class Links:
    """The links: measured curves, an alpha-beta line per scope, or both (a curve goes before a line).

    Raises:
        JobError: neither a curve nor a line, or two curves for the same routine.
    """

    intra: AlphaBeta | None = None
    inter: AlphaBeta | None = None
    curves: tuple[LinkCurve, ...] = ()

    def __post_init__(self) -> None:
        if self.intra is None and self.inter is None and not self.curves:
            raise JobError("give an alpha-beta line for a scope or measured curves")
        if len(self._by_key) != len(self.curves):
            raise JobError("two curves for one routine, scope and form")

    @cached_property
    def _by_key(self) -> dict[tuple[Routine, Scope, Form], Points]:
        return {(c.routine, c.scope, c.form): c.points for c in self.curves}

    def measured(self, routine: Routine, scope: Scope, form: Form) -> Points | None:
        """The routine's curve in this form, else in another one: bytes are bytes on the wire."""
        for candidate in (form, Form.RAW, Form.PAYLOAD, Form.SUMMABLE):
            points = self._by_key.get((routine, scope, candidate))
            if points is not None:
                return points
        return None

    def time_us(self, step: Step, cluster: Cluster, total_bytes: float, server: AlphaBeta | None = None) -> float:
        """See :meth:`CostModel.comm_us`; ``server`` is the card of one parameter server."""
        assert step.routine is not None
        assert step.scope is not None
        peers = group_size(step.scope, cluster)
        to_servers = step.routine in (Routine.PUSH, Routine.PULL)
        if peers <= 1 and not to_servers:
            return 0.0
        points = self.measured(step.routine, step.scope, step.form)
        if points is not None:
            return interpolate(points, total_bytes)
        if to_servers:
            return server_exchange_us(self._line(step, Scope.INTER), server, cluster, total_bytes)
        if step.scope is Scope.FLAT:
            return self._flat_us(step, cluster, total_bytes)
        return routine_us(step.routine, self._line(step, step.scope), peers, total_bytes)

    def _flat_us(self, step: Step, cluster: Cluster, total_bytes: float) -> float:
        assert step.routine is not None
        times = []
        if cluster.ranks_per_node > 1:
            intra = self._line(step, Scope.INTRA)
            times.append(routine_us(step.routine, intra, cluster.num_ranks, total_bytes))
        if cluster.num_nodes > 1:
            inter = self._line(step, Scope.INTER)
            times.append(routine_us(step.routine, inter, cluster.num_ranks, total_bytes, cluster.ranks_per_node))
        return max(times)

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


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """One compressor operation on one device: ``max(floor, launch + work)``.

    Attributes:
        spec: the compressor as text; a bare name serves every parameter of that compressor.
        launch_us: fixed cost of one batched call.
        points: (elements, us beyond the launch).
        floor_us: no call is shorter than this (published figures for one size only).
        segment_us: cost of every further segment of a batch.
    """

    spec: str
    device: Device
    op: Op
    points: Points
    launch_us: float = 0.0
    floor_us: float = 0.0
    segment_us: float = 0.0

    def __post_init__(self) -> None:
        where = f"{self.op.value} of {self.spec!r} on {self.device.value}"
        _check_points(self.points, where)
        for name in ("launch_us", "floor_us", "segment_us"):
            number(getattr(self, name), f"{where}: {name}")

    def time_us(self, elements: float, shares: float = 1, segments: int = 1) -> float:
        """Time for ``shares`` payloads of ``elements`` each in one launch; nothing for no elements."""
        if elements <= 0:
            return 0.0
        work = shares * interpolate(self.points, elements) + self.segment_us * (segments - 1)
        return max(self.floor_us, self.launch_us + work)


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Copies between device and host, per rank."""

    alpha_us: float
    beta_us_per_kb: float
    shares_intra: bool = False

    def __post_init__(self) -> None:
        number(self.alpha_us, "alpha_us")
        number(self.beta_us_per_kb, "beta_us_per_kb")

    def time_us(self, num_bytes: float) -> float:
        return self.alpha_us + self.beta_us_per_kb * num_bytes / KB


@dataclass(frozen=True)
class Contention:
    """How work on the host slows other work on the host.

    With ``cores`` None nothing contends except that compression on the training device holds backward up
    (the paper's assumption). Otherwise all of a rank's activities share ``cores`` by max-min fair
    sharing, as the Linux scheduler does; an activity that gets less than it demands slows in proportion.

    Attributes:
        cores: cores a rank may use; below one where ranks share a core. None: the paper's assumption.
        backward_cores: what backward demands while it runs.
        pool_threads: what an offloaded task demands. A task on the training lane demands one core.
        comm_cpu: cores that communication burns while it is on the wire, by ``scope.routine`` or ``scope``.
    """

    cores: float | None = None
    backward_cores: float = 1.0
    pool_threads: float = 1.0
    comm_cpu: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.cores is not None:
            number(self.cores, "cores", positive=True)
        number(self.backward_cores, "backward_cores", positive=True)
        number(self.pool_threads, "pool_threads", positive=True)
        for key, value in self.comm_cpu.items():
            number(value, f"comm_cpu[{key!r}]")
            scope, _, routine = key.partition(".")
            member(Scope, scope, f"comm_cpu[{key!r}]: scope")
            if routine:
                member(Routine, routine, f"comm_cpu[{key!r}]: routine")

    @property
    def is_paper(self) -> bool:
        return self.cores is None

    def demand(self, step: Step) -> float:
        """Cores that a step demands while it runs."""
        if step.device is Device.SERVER:
            return 0.0  # see ServerCosts.cores
        if step.device is not None:
            return 1.0 if step.device is Device.TRAINING else self.pool_threads
        assert step.scope is not None
        assert step.routine is not None
        scope = step.scope.value
        return self.comm_cpu.get(f"{scope}.{step.routine.value}", self.comm_cpu.get(scope, 0.0))


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """What a parameter server can do.

    Attributes:
        nic: its network card, one direction; None: like a worker's.
        sum_us_per_kb: adding up raw numbers, per 1000 bytes of every contribution, on one engine thread.
        engines: partitions a server works on at the same time.
        cores: what servers at work take from the cores of a rank; 0 where they have machines of their own.
    """

    sum_us_per_kb: float
    engines: int = 1
    nic: AlphaBeta | None = None
    cores: float = 0.0

    def __post_init__(self) -> None:
        number(self.sum_us_per_kb, "sum_us_per_kb")
        whole(self.engines, "engines", least=1)
        number(self.cores, "cores")


PAPER_CONTENTION = Contention()
"""Training-device compression holds backward up; nothing else slows anything."""


@dataclass(frozen=True)
class CostModel:
    """Everything a step can cost.

    Attributes:
        links: routines.
        compute: encode and decode per compressor and device.
        copy: between device and host, of offloaded steps and of what servers get and give; None in a CPU job, where
            there are none.
        contention: what shares the cores.
        offload_ranks_per_pool: ranks of a node that share one offload pool (1: every rank has its own).
        servers: parameter servers; None where there are none.
    """

    links: Links
    compute: tuple[ComputeCost, ...] = ()
    copy: CopyCost | None = None
    contention: Contention = PAPER_CONTENTION
    offload_ranks_per_pool: int = 1
    servers: ServerCosts | None = None

    def __post_init__(self) -> None:
        whole(self.offload_ranks_per_pool, "offload_ranks_per_pool", least=1)
        if len(self._by_key) != len(self.compute):
            keys = [(c.spec, c.device, c.op) for c in self.compute]
            spec, device, op = next(key for key in keys if keys.count(key) > 1)
            raise JobError(f"{op.value} of {spec!r} on {device.value} is given twice")

    @cached_property
    def _by_key(self) -> dict[tuple[str, Device, Op], ComputeCost]:
        return {(c.spec, c.device, c.op): c for c in self.compute}

    def comm_us(self, step: Step, cluster: Cluster, total_bytes: float) -> float:
        """Time of one routine.

        Args:
            step: a communication step.
            cluster: gives the size of the routine's group and who shares a NIC.
            total_bytes: S, the whole array: reduced, or held by the group together after a gather, or what all
                ranks of the scope push or pull. For the
                inter scope the arrays of all ranks of a node that run the routine at the same time are added
                up, since they share the NIC; measured curves count the same way.

        Raises:
            JobError: nothing is known of this routine.
        """
        server = None if self.servers is None else self.servers.nic
        return self.links.time_us(step, cluster, total_bytes, server)

    def compute_cost(self, spec: CompressorSpec, device: Device, op: Op) -> ComputeCost:
        """The entry for this compressor, else for its bare name.

        A server whose compressors were not measured counts as fast as a host pool, else as the training device.

        Raises:
            JobError: neither was measured; says what was.
        """
        devices = (device,) if device is not Device.SERVER else (device, Device.OFFLOAD, Device.TRAINING)
        for place in devices:
            for key in _measured_as(spec):
                cost = self._by_key.get((key, place, op))
                if cost is not None:
                    return cost
        known = sorted({c.spec for c in self.compute if c.device is device}) or ["none at all"]
        raise JobError(
            f"no {op.value} cost for compressor '{spec}' on the {device.value} device; the job has {', '.join(known)}"
        )

    def devices(self, spec: CompressorSpec) -> tuple[Device, ...]:
        """The devices of a rank on which encode and decode of this compressor have a cost."""
        return tuple(
            device
            for device in RANK_DEVICES
            if all(any((key, device, op) in self._by_key for key in _measured_as(spec)) for op in COMMON_OPS)
        )

    @cached_property
    def has_rounds(self) -> bool:
        """Whether a compressor of several rounds was measured, for which the shapes of tensors matter."""
        return any(cost.op is Op.TRANSFORM for cost in self.compute)

    def encode_us(self, spec: CompressorSpec, device: Device, elements: float, segments: int = 1) -> float:
        """One batched encode of ``elements`` in all."""
        return self.compute_cost(spec, device, Op.ENCODE).time_us(elements, 1, segments)

    def decode_us(self, spec: CompressorSpec, device: Device, elements: float, multiplicity: float = 1) -> float:
        """One batched decode and sum of ``multiplicity`` payloads of ``elements`` each."""
        return self.compute_cost(spec, device, Op.DECODE).time_us(elements, multiplicity)

    def transform_us(self, spec: CompressorSpec, device: Device, elements: float, segments: int = 1) -> float:
        """Making the next round's vector, for ``elements`` of the tensors in all."""
        return self.compute_cost(spec, device, Op.TRANSFORM).time_us(elements, 1, segments)

    def server_us(self, busy_us: float, cluster: Cluster) -> float:
        """Time on the lane of all servers' processors for work of ``busy_us`` on one engine thread.

        Partitions spread over servers and their engine threads, so each is charged its share of all of them.

        Raises:
            JobError: nothing is known of the servers.
        """
        return busy_us / (max(cluster.num_servers, 1) * self._known_servers().engines)

    def sum_us(self, num_bytes: float) -> float:
        """Adding up raw contributions of ``num_bytes`` in all on one engine thread of a server."""
        return self._known_servers().sum_us_per_kb * num_bytes / KB

    def _known_servers(self) -> ServerCosts:
        if self.servers is None:
            raise JobError("the job says nothing of its parameter servers: give costs.servers (sum_us_per_kb …)")
        return self.servers

    def copy_us(self, num_bytes: float) -> float:
        """One copy between device and host; nothing where there are no host copies."""
        return 0.0 if self.copy is None else self.copy.time_us(num_bytes)


def _measured_as(spec: CompressorSpec) -> tuple[str, ...]:
    """Where to look for a compressor's costs: what automatic mode adds changes its speed by less than a third."""
    return str(spec), str(spec.without("least").without("block")), spec.name


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
