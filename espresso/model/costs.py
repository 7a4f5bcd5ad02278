"""What everything costs: links, compressors, host copies, and how they slow one another.

Costs are measured or stated, never hidden in a method. A :class:`CostModel` answers three questions in
microseconds: what a routine takes (:meth:`CostModel.comm`), how long a compressor takes
(:meth:`CostModel.encode_us`, :meth:`CostModel.decode_us`), how long a host copy takes. Contention is a
field: what shares the cores with what is for the timeline to work out.

A batched decode of m payloads is one launch plus m shares. What routines cost is in :mod:`espresso.model.links`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import ClassVar

from espresso.model.links import (
    KB,
    MOST_IN_FLIGHT,
    AlphaBeta,
    Cost,
    JobError,
    Links,
    Points,
    Servers,
    check_points,
    interpolate,
)
from espresso.model.payload_sizes import create_compressor
from espresso.model.servers import Load, shared_out
from espresso.strategies import (
    RANK_DEVICES,
    RESIDUAL_DTYPES,
    Cluster,
    CompressorSpec,
    Device,
    Routine,
    Scope,
    Sharing,
    Step,
)
from espresso.strategies.fields import member, number, whole


class Op(Enum):
    """What a compressor does."""

    ENCODE = "encode"
    DECODE = "decode"
    TRANSFORM = "transform"


COMMON_OPS = (Op.ENCODE, Op.DECODE)
"""What every compressor does; those of several rounds transform between them too."""


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """One compressor operation on one device: ``max(floor, launch + work)``.

    Attributes:
        spec: the compressor as text; a bare name serves every parameter of that compressor.
        launch_us: fixed cost of one batched call.
        points: (elements, us beyond the launch).
        floor_us: no call is shorter than this (published figures for one size only).
    """

    spec: str
    device: Device
    op: Op
    points: Points
    launch_us: float = 0.0
    floor_us: float = 0.0

    RETIRED: ClassVar = {"segment_us": 0.0}

    def __post_init__(self) -> None:
        where = f"{self.op.value} of {self.spec!r} on {self.device.value}"
        check_points(self.points, where)
        for name in ("launch_us", "floor_us"):
            number(getattr(self, name), f"{where}: {name}")

    def time_us(self, elements: float, shares: float = 1) -> float:
        """Time for ``shares`` payloads of ``elements`` each in one launch; nothing for no elements."""
        if elements <= 0:
            return 0.0
        return max(self.floor_us, self.launch_us + shares * interpolate(self.points, elements))


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
        comm_cpu: cores that communication takes while it is on the wire, by ``scope.routine`` or ``scope``.
        handling_us: of a core, what carrying out a compression or decompression takes besides: handing it over between
            threads, and half of what that takes for the exchange between the two.
    """

    cores: float | None = None
    backward_cores: float = 1.0
    pool_threads: float = 1.0
    comm_cpu: Mapping[str, float] = field(default_factory=dict)
    handling_us: float = 0.0

    def __post_init__(self) -> None:
        number(self.handling_us, "handling_us")
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
        speeds: (card, processor) of every server as a part of the fastest; empty: all are alike.
        sharing: how gradients are shared out over them.
    """

    sum_us_per_kb: float
    engines: int = 1
    nic: AlphaBeta | None = None
    cores: float = 0.0
    speeds: tuple[tuple[float, float], ...] = ()
    sharing: Sharing = Sharing.MEASURED

    def __post_init__(self) -> None:
        number(self.sum_us_per_kb, "sum_us_per_kb")
        whole(self.engines, "engines", least=1)
        number(self.cores, "cores")
        for server, pair in enumerate(self.speeds):
            for speed in pair:
                number(speed, f"speeds of server {server}", positive=True)


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
        offload_width: offloaded steps that run at once on the pool, each as long as one alone.
        residual_dtype: how residuals are kept, where a compressor does not say.
    """

    links: Links
    compute: tuple[ComputeCost, ...] = ()
    copy: CopyCost | None = None
    contention: Contention = PAPER_CONTENTION
    offload_ranks_per_pool: int = 1
    servers: ServerCosts | None = None
    offload_width: int = 1
    residual_dtype: str = RESIDUAL_DTYPES[0]

    def __post_init__(self) -> None:
        if self.residual_dtype not in RESIDUAL_DTYPES:
            known = ", ".join(RESIDUAL_DTYPES)
            raise JobError(f"costs.residual_dtype must be one of {known}, got {self.residual_dtype!r:.80}")
        whole(self.offload_width, "offload_width", least=1, most=MOST_IN_FLIGHT)
        whole(self.offload_ranks_per_pool, "offload_ranks_per_pool", least=1)
        if len(self._by_key) != len(self.compute):
            keys = [(c.spec, c.device, c.op) for c in self.compute]
            spec, device, op = next(key for key in keys if keys.count(key) > 1)
            raise JobError(f"{op.value} of {spec!r} on {device.value} is given twice")

    @cached_property
    def _by_key(self) -> dict[tuple[str, Device, Op], ComputeCost]:
        return {(c.spec, c.device, c.op): c for c in self.compute}

    def in_turn(self, cluster: Cluster) -> bool:
        """Whether a task just follows the last one of its lane, for as long as it says: without shared cores, lanes of
        some width, exchanges in flight and token buckets.
        """
        is_alone = self.contention.cores is None and self.offload_width == self.links.in_flight == 1
        return is_alone and not self.links.burst(cluster).credit_us

    def comm(self, step: Step, cluster: Cluster, total_bytes: float, density: float = 1.0) -> Cost:
        """What one routine takes.

        Args:
            step: a communication step.
            cluster: gives the size of the routine's group and who shares a NIC.
            total_bytes: S, the whole array: reduced, or held by the group together after a gather, or what all
                ranks of the scope push or pull. For the
                inter scope the arrays of all ranks of a node that run the routine at the same time are added
                up, since they share the NIC; measured curves count the same way.
            density: to and from servers: raw bytes that the servers work on for each byte pushed.

        Raises:
            JobError: nothing is known of this routine.
        """
        servers = None
        if step.routine in (Routine.PUSH, Routine.PULL):
            servers = Servers(self._known_servers().nic, self._load(cluster, density))
        return self.links.cost(step, cluster, total_bytes, servers)

    def _load(self, cluster: Cluster, density: float) -> Load:
        """What servers get of what is pushed."""
        known = self._known_servers()
        worker = 0.0 if self.links.inter is None else self.links.inter.beta_us_per_kb
        nic = worker if known.nic is None else known.nic.beta_us_per_kb
        if known.speeds and len(known.speeds) != cluster.num_servers:
            raise JobError(f"costs.servers.speeds has {len(known.speeds)} servers, the cluster {cluster.num_servers}")
        busy = known.sum_us_per_kb * density / known.engines
        return shared_out(cluster, worker, nic, busy, known.speeds, known.sharing)

    def compute_cost(self, spec: CompressorSpec, device: Device, op: Op) -> ComputeCost:
        """The entry for this compressor, else for its bare name.

        A server whose compressors were not measured counts as fast as a host pool, else as the training device.

        Raises:
            JobError: neither was measured; says what was.
        """
        devices = (device,) if device is not Device.SERVER else (device, Device.OFFLOAD, Device.TRAINING)
        for place in devices:
            for key in measured_as(spec):
                cost = self._by_key.get((key, place, op))
                if cost is not None:
                    packs = op is Op.ENCODE and device is not Device.SERVER  # servers keep theirs in full
                    return self._with_packing(cost, self._kept_as(spec)) if packs else cost
        known = sorted({c.spec for c in self.compute if c.device is device}) or ["none at all"]
        raise JobError(
            f"no {op.value} cost for compressor '{spec}' on the {device.value} device; the job has {', '.join(known)}"
        )

    def _kept_as(self, spec: CompressorSpec) -> str:
        """How the compressor's residual is kept; one without a residual has nothing to pack."""
        says = spec.residual_dtype or self.residual_dtype
        return says if says == RESIDUAL_DTYPES[0] or create_compressor(spec).traits.error_feedback else ""

    def _with_packing(self, cost: ComputeCost, dtype: str) -> ComputeCost:
        """An encode whose residual is unpacked before it and packed after it, by the casts' own codecs.

        To round without bias is one more pass over what is packed: it counts as another encode.
        """
        casts = [self._by_key.get((dtype, cost.device, op)) for op in (*COMMON_OPS, Op.ENCODE)]
        parts = [cost, *(cast for cast in casts if cast is not None)]
        if len(parts) == 1:
            return cost
        sizes = sorted({size for part in parts for size, _ in part.points})
        points = tuple((size, sum(interpolate(part.points, size) for part in parts)) for size in sizes)
        launch, floor = sum(part.launch_us for part in parts), sum(part.floor_us for part in parts)
        return ComputeCost(cost.spec, cost.device, cost.op, points, launch_us=launch, floor_us=floor)

    def devices(self, spec: CompressorSpec) -> tuple[Device, ...]:
        """The devices of a rank on which encode and decode of this compressor have a cost."""
        return tuple(
            device
            for device in RANK_DEVICES
            if all(any((key, device, op) in self._by_key for key in measured_as(spec)) for op in COMMON_OPS)
        )

    @cached_property
    def has_rounds(self) -> bool:
        """Whether a compressor of several rounds was measured, for which the shapes of tensors matter."""
        return any(cost.op is Op.TRANSFORM for cost in self.compute)

    def encode_us(self, spec: CompressorSpec, device: Device, elements: float) -> float:
        """One batched encode of ``elements`` in all."""
        return self.compute_cost(spec, device, Op.ENCODE).time_us(elements)

    def decode_us(self, spec: CompressorSpec, device: Device, elements: float, multiplicity: float = 1) -> float:
        """One batched decode and sum of ``multiplicity`` payloads of ``elements`` each."""
        return self.compute_cost(spec, device, Op.DECODE).time_us(elements, multiplicity)

    def transform_us(self, spec: CompressorSpec, device: Device, elements: float) -> float:
        """Making the next round's vector, for ``elements`` of the tensors in all."""
        return self.compute_cost(spec, device, Op.TRANSFORM).time_us(elements)

    def server_us(self, busy_us: float, cluster: Cluster, density: float = 1.0) -> float:
        """Time on the lane of all servers' processors for work of ``busy_us`` on one engine thread.

        Partitions spread over servers and their engine threads, so each is charged its share of all of them.

        Raises:
            JobError: nothing is known of the servers.
        """
        return busy_us * self._load(cluster, density).processor / self._known_servers().engines

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


@lru_cache(maxsize=256)
def measured_as(spec: CompressorSpec) -> tuple[str, ...]:
    """Where to look for a compressor's costs: `block` and `least` change its speed by less than a third."""
    base = spec.kept_as("")
    return str(spec), str(base), str(base.without("least").without("block")), spec.name
