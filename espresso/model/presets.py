"""Jobs from published traces, on a named cluster or one described in a file.

The figures lie in ``espresso/data`` with their sources. A cluster file is JSON::

    {"schema_version": 1, "kind": "espresso-cluster",
     "intra": {"alpha_us": 20, "beta_us_per_kb": 0.02},
     "inter": {"alpha_us": 50, "beta_us_per_kb": 0.1},
     "copy": {"alpha_us": 10, "beta_us_per_kb": 0.1, "shares_intra": false},
     "pool_is_the_nodes": true, "note": "free text"}

A link may have a ``latency_us`` of its own, and the file an ``in_flight`` (:mod:`espresso.model.links`) and an
``offload_width`` (:class:`espresso.model.costs.CostModel`). ``espresso links -o`` writes one, with what it measured
beside the lines; a link that was not there to measure is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from espresso.model.costs import (
    COMMON_OPS,
    ComputeCost,
    CopyCost,
    CostModel,
    ServerCosts,
)
from espresso.model.job import Job
from espresso.model.links import (
    RING_PASSES,
    AlphaBeta,
    JobError,
    LinkCurve,
    Links,
    Points,
    fit_line,
    group_size,
    num_rounds,
    on_link,
)
from espresso.strategies import Cluster, Device, Mode, Scope, TensorSpec, fields

CLUSTER_KIND = "espresso-cluster"


@dataclass(frozen=True)
class _ClusterFile:
    """A cluster file, below its head.

    Attributes:
        pool_is_the_nodes: whether a node has one offload pool for all its ranks, or one for each.
        servers: what a parameter server there can do; None takes the stated figures.
        measured: a remark.
        in_flight, offload_width: see :class:`espresso.model.links.Links`, :class:`espresso.model.costs.CostModel`.
    """

    intra: AlphaBeta | None = None
    inter: AlphaBeta | None = None
    copy: CopyCost | None = None
    pool_is_the_nodes: bool = True
    note: str = ""
    servers: ServerCosts | None = None
    measured: Any = None
    in_flight: int = 1
    offload_width: int = 1


@dataclass(frozen=True, kw_only=True)
class ClusterPreset(_ClusterFile):
    """A cluster's links, without its shape."""

    name: str

    @classmethod
    def read(cls, name: str, body: Any, where: str) -> ClusterPreset:
        return cls(name=name, **vars(fields.read_as(_ClusterFile, body, where)))


def trace_names() -> tuple[str, ...]:
    """The published traces that come with the package."""
    return tuple(
        sorted(entry.name.removesuffix(".json") for entry in _data("traces").iterdir() if entry.name.endswith(".json"))
    )


def cluster_names() -> tuple[str, ...]:
    """The cluster presets that come with the package."""
    return tuple(published_costs()["clusters"])


def _data(*parts: str) -> Any:
    return files("espresso").joinpath("data", *parts)


@cache
def published_costs() -> dict[str, Any]:
    """The published figures as they are: compressor times, clusters, the paper's tables."""
    body: dict[str, Any] = fields.parse(_data("published_costs.json").read_bytes())
    return body


def load_cluster(name_or_path: str | Path) -> ClusterPreset:
    """A preset by name, or a cluster file.

    Raises:
        JobError: no such preset, or a faulty file; names the fault.
    """
    name = str(name_or_path)
    if name in cluster_names():
        row = published_costs()["clusters"][name]
        said = {key: row[key] for key in ("intra", "inter", "copy")}
        note = f"{row['testbed']}; {published_costs()['clusters_note']}"
        return ClusterPreset.read(name, said | {"note": note}, name)
    _check_is_file(name_or_path, f"a cluster preset ({', '.join(cluster_names())})")

    def read(body: Any) -> ClusterPreset:
        return ClusterPreset.read(name, fields.without_head(body, CLUSTER_KIND), "the cluster")

    return fields.load(name, read, JobError)


def measured_cluster(
    curves: Sequence[LinkCurve], cluster: Cluster, measured: Any, in_flight: int = 1
) -> dict[str, Any]:  # fmt: skip
    """A cluster file from measured links: for each scope the medians of its routines' latencies and rates.

    A scope that this cluster does not have is left out.
    """
    lines = {scope: _median_line(curves, scope, cluster) for scope in Scope}
    intra = lines[Scope.INTRA] or (lines[Scope.FLAT] if cluster.num_nodes == 1 else None)
    inter = lines[Scope.INTER] or (lines[Scope.FLAT] if cluster.ranks_per_node == 1 else None)
    if intra is None and inter is None:
        raise JobError("no link was measured")
    return {
        **fields.head(CLUSTER_KIND),
        **{name: fields.as_json(line) for name, line in (("intra", intra), ("inter", inter)) if line is not None},
        "in_flight": in_flight,
        "note": f"measured by espresso links on {cluster}; medians over the routines of a scope",
        "measured": measured,
    }


def _median_line(curves: Sequence[LinkCurve], scope: Scope, cluster: Cluster) -> AlphaBeta | None:
    peers = group_size(scope, cluster)
    mine = [curve for curve in curves if curve.scope is scope and curve.routine in RING_PASSES and peers > 1]
    if not mine:
        return None
    counts = [on_link(curve.routine, peers) for curve in mine]
    lines = [fit_line(curve.alone, *count) for curve, count in zip(mine, counts, strict=True)]
    each = [curve.latency_us / messages for curve, (messages, _) in zip(mine, counts, strict=True)]
    rounds = [num_rounds(curve, cluster) for curve in mine]
    return AlphaBeta(
        statistics.median(max(line.alpha_us - late, 0.0) for line, late in zip(lines, each, strict=True)),
        statistics.median(line.beta_us_per_kb for line in lines),
        statistics.median(curve.latency_us / count for curve, count in zip(mine, rounds, strict=True)),
    )


def _check_is_file(name_or_path: str | Path, alternative: str) -> None:
    if not Path(name_or_path).is_file():
        raise JobError(f"{str(name_or_path)!r} is neither a file nor {alternative}")


@cache
def published_servers() -> ServerCosts:
    """The stated figures of a parameter server whose cluster file says nothing of it."""
    body = {key: value for key, value in published_costs()["server"].items() if key != "note"}
    return fields.read_as(ServerCosts, body, "server")


@cache
def published_compute() -> tuple[ComputeCost, ...]:
    """The published compressor times as cost entries, by bare compressor name.

    GPU: up to one size a shard costs the figure given, above it in proportion; a batch of shards costs at
    least the figure and otherwise the sum of its shares. Host: the published points; the launch is where the
    line through the two smallest sizes meets zero.
    """
    figures = published_costs()
    gpu = figures["gpu"]
    costs = []
    for op in COMMON_OPS:
        for name, us in gpu[f"{op.value}_us"].items():
            points: Points = ((0.0, 0.0), (float(gpu["per_elements"]), float(us)))
            costs.append(ComputeCost(name, Device.TRAINING, op, points, floor_us=float(us)))
    for name, rows in figures["cpu"].items():
        if name == "columns":
            continue
        for column, op in enumerate(COMMON_OPS, start=1):
            (x0, y0), (x1, y1) = ((row[0], row[column]) for row in rows[:2])
            launch = max(y0 - x0 * (y1 - y0) / (x1 - x0), 0.0)
            points = ((0.0, 0.0), *((float(row[0]), max(float(row[column]) - launch, 0.0)) for row in rows))
            costs.append(ComputeCost(name, Device.OFFLOAD, op, points, launch_us=launch))
    return tuple(costs)


def job_from_trace(
    trace: str | Path,
    num_nodes: int,
    ranks_per_node: int,
    cluster: str | Path | ClusterPreset,
    *,
    servers: int = 0,
    servers_per_node: int = 0,
) -> Job:
    """A job in the paper's mode: a trace's backward pass with the published compressor costs.

    Args:
        trace: a name from :func:`trace_names`, or a trace file of the same form.
        cluster: a preset's name, a cluster file, or a preset.
        servers: parameter servers beside the workers; their cards are like the workers'.
        servers_per_node: such that run on the workers' machines.

    Raises:
        JobError: an unknown trace or cluster, or a faulty file.
        ValueError: a cluster shape below one.
    """
    name = str(trace)
    preset = cluster if isinstance(cluster, ClusterPreset) else load_cluster(cluster)
    beside = servers_per_node * num_nodes
    shape = Cluster(num_nodes, ranks_per_node, servers + beside, beside > 0, servers if beside else 0)
    _check_links(shape, preset)
    if name not in trace_names():
        _check_is_file(trace, f"a published trace ({', '.join(trace_names())})")
        return fields.load(trace, lambda body: _job(body, shape, preset), JobError)
    return _job(fields.parse(_data("traces", f"{name}.json").read_bytes()), shape, preset)


def _check_links(cluster: Cluster, preset: ClusterPreset) -> None:
    """Refuse a shape with links that the cluster's file does not know."""
    for name, line, where, is_there in (
        ("intra", preset.intra, "between ranks of a machine", cluster.ranks_per_node > 1),
        ("inter", preset.inter, "between machines", cluster.num_nodes > 1 or cluster.num_servers > 0),
    ):
        if line is None and is_there:
            raise JobError(
                f"{preset.name} knows no links {where}, and {cluster} has some: measure them with espresso links on"
                f" such a cluster, or give the file {name!r}"
            )


@dataclass(frozen=True)
class _Trace:
    """A trace file: a backward pass. ``gap_us`` and ``source`` are remarks."""

    model: str
    tensors: tuple[tuple[str, int, float], ...]
    source: str = ""
    columns: tuple[str, ...] = ("name", "numel", "gap_us")
    gap_us: str = ""
    forward_us: float = 0.0
    optimizer_us: float = 0.0


def _job(body: Any, cluster: Cluster, preset: ClusterPreset) -> Job:
    found = fields.read_as(_Trace, body, "the trace")
    if found.columns != _Trace.columns:
        raise JobError(f"columns must be name, numel, gap_us; got {fields.shown(found.columns)}")
    costs = CostModel(
        Links(preset.intra, preset.inter, in_flight=preset.in_flight),
        published_compute(),
        preset.copy,
        offload_ranks_per_pool=cluster.ranks_per_node if preset.pool_is_the_nodes else 1,
        servers=preset.servers or published_servers() if cluster.num_servers else None,
        offload_width=preset.offload_width,
    )
    return Job(
        model=found.model,
        tensors=tuple(TensorSpec(name, (numel,)) for name, numel, _ in found.tensors),
        gaps_us=tuple(gap for _, _, gap in found.tensors),
        cluster=cluster,
        costs=costs,
        mode=Mode.PAPER,
        # The traces hold backward only; F is then backward and communication, forward at zero.
        forward_us=found.forward_us,
        optimizer_us=found.optimizer_us,
        source=f"{found.source}; compressors: {published_costs()['source']}",
        meta={"cluster_preset": preset.name, "cluster_note": preset.note},
    )
