"""Jobs from published traces, on a named cluster or one described in a file.

The figures lie in ``espresso/data`` with their sources. A cluster file is JSON::

    {"schema_version": 1, "kind": "espresso-cluster",
     "intra": {"alpha_us": 20, "beta_us_per_kb": 0.02},
     "inter": {"alpha_us": 50, "beta_us_per_kb": 0.1},
     "copy": {"alpha_us": 10, "beta_us_per_kb": 0.1, "shares_intra": false},
     "pool_is_the_nodes": true, "note": "free text"}

``espresso links -o`` writes one, with what it measured beside the lines.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from espresso.model.costs import (
    COMMON_OPS,
    AlphaBeta,
    ComputeCost,
    CopyCost,
    CostModel,
    LinkCurve,
    Links,
    Points,
    ServerCosts,
    fit_line,
    group_size,
    read_copy,
)
from espresso.model.fields import JobError, check_keys, check_kind, items, number, text, whole
from espresso.model.job import Job
from espresso.strategies import Cluster, Device, Mode, Routine, Scope, TensorSpec

CLUSTER_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ClusterPreset:
    """A cluster's links, without its shape.

    Attributes:
        pool_is_the_nodes: whether a node has one offload pool for all its ranks, or one for each.
        servers: what a parameter server there can do; None takes the stated figures.
    """

    name: str
    intra: AlphaBeta
    inter: AlphaBeta
    copy: CopyCost | None = None
    pool_is_the_nodes: bool = True
    note: str = ""
    servers: ServerCosts | None = None


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
    body: dict[str, Any] = json.loads(_data("published_costs.json").read_text(encoding="utf-8"))
    return body


def load_cluster(name_or_path: str | Path) -> ClusterPreset:
    """A preset by name, or a cluster file.

    Raises:
        JobError: no such preset, or a faulty file; names the fault.
    """
    name = str(name_or_path)
    if name in cluster_names():
        row = published_costs()["clusters"][name]
        return ClusterPreset(
            name,
            _line(row["intra"], f"{name}.intra"),
            _line(row["inter"], f"{name}.inter"),
            read_copy(row["copy"], f"{name}.copy"),
            note=f"{row['testbed']}; {published_costs()['clusters_note']}",
        )
    body = _read(name_or_path, f"a cluster preset ({', '.join(cluster_names())})")
    try:
        return _cluster_from_json(name, body)
    except JobError as error:
        raise JobError(f"{name}: {error}") from None


def measured_cluster(curves: Sequence[LinkCurve], cluster: Cluster, measured: Any) -> dict[str, Any]:
    """A cluster file from measured links: for each scope the medians of its routines' latencies and rates.

    A scope that this cluster does not have takes the other's line, and the note says so.
    """
    lines = {scope: _median_line(curves, scope, cluster) for scope in Scope}
    intra = lines[Scope.INTRA] or (lines[Scope.FLAT] if cluster.num_nodes == 1 else None)
    inter = lines[Scope.INTER] or (lines[Scope.FLAT] if cluster.ranks_per_node == 1 else None)
    note = f"measured by espresso links on {cluster}; medians over the routines of a scope"
    for name, line in (("intra", intra), ("inter", inter)):
        if line is None:
            note += f"; {name} was not there to measure and has the other scope's line"
    pair = (intra or inter, inter or intra)
    if pair[0] is None or pair[1] is None:
        raise JobError("no link was measured")
    return {
        "schema_version": CLUSTER_SCHEMA_VERSION,
        "kind": "espresso-cluster",
        **{
            name: {"alpha_us": line.alpha_us, "beta_us_per_kb": line.beta_us_per_kb}
            for name, line in zip(("intra", "inter"), pair, strict=True)
            if line is not None
        },
        "note": note,
        "measured": measured,
    }


def _median_line(curves: Sequence[LinkCurve], scope: Scope, cluster: Cluster) -> AlphaBeta | None:
    peers = group_size(scope, cluster)
    found = [
        fit_line(curve.points, *_ON_LINK[curve.routine](peers))
        for curve in curves
        if curve.scope is scope and curve.routine in _ON_LINK and peers > 1
    ]
    if not found:
        return None
    return AlphaBeta(
        statistics.median(line.alpha_us for line in found),
        statistics.median(line.beta_us_per_kb for line in found),
    )


# How often a routine over p ranks pays the latency, and its bytes on a link per byte of the array (costs.routine_us).
_ON_LINK: dict[Routine, Callable[[int], tuple[float, float]]] = {
    Routine.ALLREDUCE: lambda p: (2 * (p - 1), 2 * (p - 1) / p),
    Routine.REDUCE_SCATTER: lambda p: (p - 1, (p - 1) / p),
    Routine.ALLGATHER: lambda p: (p - 1, (p - 1) / p),
    Routine.ALL_TO_ALL: lambda p: (p - 1, (p - 1) / p),
}


def _cluster_from_json(name: str, body: Any) -> ClusterPreset:
    check_kind(body, "espresso-cluster")
    check_keys(
        body,
        "the cluster",
        ("schema_version", "kind", "intra", "inter"),
        ("copy", "pool_is_the_nodes", "note", "servers", "measured"),
    )
    if body["schema_version"] != CLUSTER_SCHEMA_VERSION:
        raise JobError(
            f"schema_version {body['schema_version']!r} is not supported; this version reads {CLUSTER_SCHEMA_VERSION}"
        )
    if body["kind"] != "espresso-cluster":
        raise JobError(f"kind is {body['kind']!r}, expected 'espresso-cluster'")
    pool = body.get("pool_is_the_nodes", True)
    if not isinstance(pool, bool):
        raise JobError(f"pool_is_the_nodes must be true or false, got {pool!r}")
    return ClusterPreset(
        name,
        _line(body["intra"], "intra"),
        _line(body["inter"], "inter"),
        read_copy(body.get("copy"), "copy"),
        pool,
        text(body.get("note", ""), "note"),
        ServerCosts.from_json(body.get("servers")),
    )


def _line(body: Any, where: str) -> AlphaBeta:
    check_keys(body, where, ("alpha_us", "beta_us_per_kb"))
    return AlphaBeta(
        number(body["alpha_us"], f"{where}.alpha_us"),
        number(body["beta_us_per_kb"], f"{where}.beta_us_per_kb"),
    )


def _read(name_or_path: str | Path, alternative: str) -> Any:
    path = Path(name_or_path)
    if not path.is_file():
        raise JobError(f"{str(name_or_path)!r} is neither a file nor {alternative}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: not a JSON file ({error})") from None


@cache
def published_servers() -> ServerCosts:
    """The stated figures of a parameter server whose cluster file says nothing of it."""
    body = {key: value for key, value in published_costs()["server"].items() if key != "note"}
    servers = ServerCosts.from_json(body, "server")
    assert servers is not None
    return servers


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
    colocated: bool = False,
) -> Job:
    """A job in the paper's mode: a trace's backward pass with the published compressor costs.

    Args:
        trace: a name from :func:`trace_names`, or a trace file of the same form.
        cluster: a preset's name, a cluster file, or a preset.
        servers: parameter servers beside the workers; their cards are like the workers'.
        colocated: they run on the workers' machines.

    Raises:
        JobError: an unknown trace or cluster, or a faulty file.
        ValueError: a cluster shape below one.
    """
    name = str(trace)
    known = name in trace_names()
    body = (
        json.loads(_data("traces", f"{name}.json").read_text(encoding="utf-8"))
        if known
        else _read(trace, f"a published trace ({', '.join(trace_names())})")
    )
    preset = cluster if isinstance(cluster, ClusterPreset) else load_cluster(cluster)
    try:
        return _job(body, Cluster(num_nodes, ranks_per_node, servers, colocated), preset)
    except JobError as error:
        raise JobError(f"trace {name}: {error}") from None


def _job(body: Any, cluster: Cluster, preset: ClusterPreset) -> Job:
    check_keys(body, "the trace", ("model", "tensors"), ("source", "columns", "gap_us", "forward_us", "optimizer_us"))
    if body.get("columns", ["name", "numel", "gap_us"]) != ["name", "numel", "gap_us"]:
        raise JobError(f"columns must be name, numel, gap_us; got {body['columns']}")
    tensors, gaps = [], []
    for position, row in enumerate(items(body["tensors"], "tensors")):
        where = f"tensors[{position}]"
        if not isinstance(row, list) or len(row) != 3:
            raise JobError(f"{where} must be [name, numel, gap_us], got {row!r}")
        tensors.append(TensorSpec(text(row[0], where), (whole(row[1], f"{where}: numel"),)))
        gaps.append(number(row[2], f"{where}: gap_us"))
    costs = CostModel(
        Links(preset.intra, preset.inter),
        published_compute(),
        preset.copy,
        offload_ranks_per_pool=cluster.ranks_per_node if preset.pool_is_the_nodes else 1,
        servers=preset.servers or published_servers() if cluster.num_servers else None,
    )
    return Job(
        model=text(body["model"], "model"),
        tensors=tuple(tensors),
        gaps_us=tuple(gaps),
        cluster=cluster,
        costs=costs,
        mode=Mode.PAPER,
        # The traces hold backward only; F is then backward and communication, forward at zero.
        forward_us=number(body.get("forward_us", 0.0), "forward_us"),
        optimizer_us=number(body.get("optimizer_us", 0.0), "optimizer_us"),
        source=f"{text(body.get('source', ''), 'source')}; compressors: {published_costs()['source']}",
        meta={"cluster_preset": preset.name, "cluster_note": preset.note},
    )


__all__ = [
    "ClusterPreset",
    "cluster_names",
    "job_from_trace",
    "load_cluster",
    "measured_cluster",
    "published_compute",
    "published_costs",
    "trace_names",
]
