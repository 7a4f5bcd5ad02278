"""The same job under other conditions: another network, more machines, another device, a host repaired.

Every change is one of costs; tensors, space and timeline stay. What was *stated* as a line of overhead, rate and
latency holds for any number of machines: the formulas of :mod:`espresso.model.links` say what it costs. What was
*measured* is carried over, routine by routine, and no further than :data:`FARTHEST` says::

    us(S) = overhead + rest(S)                  overhead: of its messages; no rate changes it
    extra(S) = rest(S) - b S / R                what is not the wire: processors, waiting; no rate changes that either
    us'(S) = overhead * m'/m + b'/b * max((rest(S) - extra(S)) * R/R' + extra(S), busy * us(S))

m are its messages and b its bytes on one link in the old and the new shape, R the rate of the link between machines, by
the fastest routine, and busy the share of its time in which it burnt a core: faster than that core it does not get on
any network. Of rooted routines b is the most that a link may carry, so there only work of a core counts as extra.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from espresso.model.costs import ComputeCost, CostModel, measured_as
from espresso.model.job import GAIN_SCALE, SENSITIVITY, SHARES, TERMS, Job
from espresso.model.links import (
    KB,
    RING_PASSES,
    JobError,
    LinkCurve,
    num_rounds,
    on_busiest_link,
)
from espresso.model.presets import cluster_names
from espresso.model.probe import Probe
from espresso.strategies import Cluster, CompressorSpec, Routine, Scope
from espresso.strategies.fields import faults, number

FARTHEST: Mapping[str, float] = {"rate": 30.0, "nodes": 8.0, "ranks_per_node": 4.0, "device": 8.0, "size": 8.0}
"""How many times more or less than what was measured a prediction may be asked for."""

LONGEST_RTT_MS = 1000.0

REACHED = 0.95
"""Of a network's nominal rate, by a bulk transfer: headers of Ethernet, IP and TCP take the rest."""

PRESET_REACHED = 0.8
"""The same in the cluster presets, as their note says."""

LONG_RTT_MS, IN_FLIGHT = 1.0, 8
"""From such a round trip on the executor's eight exchanges in flight are counted, as in a measured job."""

GLOO_WAYS = 2
"""Of a round on the host: the receiver's word that it is ready, and the data (``benchmarks.growth``)."""

_UNITS = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0}


class RangeError(JobError):
    """A prediction was asked for that lies too far from what was measured."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is different; None: as the job has it.

    Attributes:
        inter_gbit: nominal rate of the network between machines, one direction of one machine's card.
        rtt_ms: round trip between machines, in place of the job's latency.
        here, there: probes of the device that the job was measured on and of the one that is asked about.
    """

    num_nodes: int | None = None
    ranks_per_node: int | None = None
    inter_gbit: float | None = None
    rtt_ms: float | None = None
    here: Probe | None = None
    there: Probe | None = None

    def __post_init__(self) -> None:
        with faults(JobError):
            if self.inter_gbit is not None:
                number(self.inter_gbit, "the rate between machines", positive=True)
            if self.rtt_ms is not None:
                number(self.rtt_ms, "the round trip")
        if (self.here is None) != (self.there is None):
            raise JobError("another device needs two probes: of the one the job was measured on and of the other")


def parse_gbit(text: str) -> float:
    """Gb/s of a rate as ``tc`` takes it.

    Raises:
        JobError: not a positive number with a unit.

    Example:
        >>> parse_gbit("100mbit")
        0.1
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise JobError(f"rate {text!r} is not a positive number with a unit, such as 100mbit or 25gbit")
    return float(match[1]) * _UNITS[match[2]]


def shown_gbit(gbit: float) -> str:
    """A rate for people: ``1.5 Gb/s``, ``80 Mb/s``."""
    return f"{gbit:.3g} Gb/s" if gbit >= 0.9995 else f"{1e3 * gbit:.3g} Mb/s"


def reached_share(job: Job) -> float:
    """What a bulk transfer reaches of the nominal rate that people name."""
    return PRESET_REACHED if job.meta.get("cluster_preset") in cluster_names() else REACHED


def own_gbit(job: Job) -> float:
    """The nominal rate of the job's network between machines: of its line, else of its fastest measured routine.

    Raises:
        JobError: the job knows nothing of links between machines.
    """
    best = _own_beta(job)
    if not best and job.costs.links.inter is not None:
        best = job.costs.links.inter.beta_us_per_kb
    if job.cluster.num_nodes == 1 and not job.costs.links.inter:
        raise JobError("the job ran on one machine: nothing is known of a network between machines; profile on two")
    if not best:
        raise JobError("the job's links between machines have no limit that was measured")
    return 8.0 / best / reached_share(job)


def changed(job: Job, change: Change) -> Job:
    """The job under other conditions.

    Raises:
        RangeError: too far from what was measured.
        JobError: the job knows nothing of what is asked, say of links inside a machine.
    """
    cluster = replace(
        job.cluster,
        num_nodes=change.num_nodes or job.cluster.num_nodes,
        ranks_per_node=change.ranks_per_node or job.cluster.ranks_per_node,
    )
    measured = bool(job.costs.links.curves)
    if measured:
        _check_far(job.cluster.num_nodes, cluster.num_nodes, "nodes", "machines")
        _check_far(job.cluster.ranks_per_node, cluster.ranks_per_node, "ranks_per_node", "ranks on a machine")
        _check_scopes(job, cluster)
    if change.rtt_ms is not None and change.rtt_ms > LONGEST_RTT_MS:
        raise RangeError(f"a round trip of {change.rtt_ms:g} ms is beyond {LONGEST_RTT_MS:g} ms")
    if change.rtt_ms is not None and cluster.num_nodes == 1:
        raise JobError("one machine has no round trip between machines: ask for two (--nodes 2)")
    cluster = _with_servers(job, cluster)
    costs = _links_changed(job, cluster, change)
    hosts = job.hosts if cluster.num_nodes == job.cluster.num_nodes else ()
    job = replace(job, cluster=cluster, costs=_shared_cores(costs, job.cluster, cluster), hosts=hosts)
    return job if change.here is None or change.there is None else on_device(job, change.here, change.there)


def _with_servers(job: Job, cluster: Cluster) -> Cluster:
    """Servers on the workers' machines come and go with these; those of their own stay.

    Raises:
        JobError: not every machine has as many of them, or they were measured to differ.
    """
    old, colocated = job.cluster, job.cluster.num_colocated
    if not colocated or cluster.num_nodes == old.num_nodes:
        return cluster
    if colocated % old.num_nodes or (job.costs.servers is not None and job.costs.servers.speeds):
        raise JobError(
            f"the {colocated} servers on the job's {old.num_nodes} machines are not alike: nothing says where those of"
            f" {cluster.num_nodes} machines would be; ask for other nodes with a job that has none, or as many on each"
        )
    return replace(cluster, num_servers=colocated // old.num_nodes * cluster.num_nodes + old.num_apart)


def on_device(job: Job, here: Probe, there: Probe) -> Job:
    """The job on another device: computing by the rate of matrix products, compressors and optimizer by that of copies.

    Raises:
        RangeError: a device so much faster or slower.
    """
    product, copy = here.matmul_gflops / there.matmul_gflops, here.copy_gb_per_s / there.copy_gb_per_s
    for what, factor in (("its matrix products", product), ("its copies", copy)):
        _check_far(1.0, factor, "device", f"the time of {what}")
    return scaled(job, compute=product, compression=copy)


def of_model(job: Job, other: Job, specs: Collection[CompressorSpec]) -> Job:
    """Another model on this job's machines: its tensors, buckets and passes, this job's costs.

    What compressors and links take of its sizes lies between what was measured of this job's, on the same lines.

    Args:
        specs: the compressors that are asked about.

    Raises:
        RangeError: its buckets are so much larger than this job's, and than what was measured of a compressor.
    """
    largest, known = (max(bucket.numel for bucket in each.laid_out) for each in (other, job))
    wanted = {name for spec in specs for name in measured_as(spec)}
    for cost in (cost for cost in job.costs.compute if cost.spec in wanted):
        measured = max(cost.points[-1][0], known)
        _check_far(measured, max(largest, measured), "size", f"elements in a bucket, for {cost.spec},")
    own = {SENSITIVITY, GAIN_SCALE} | ({TERMS} & other.meta.keys())  # of a model and its optimizer
    meta = {key: value for key, value in job.meta.items() if key not in own}
    meta |= {key: value for key, value in other.meta.items() if key in own}
    return replace(other, cluster=job.cluster, costs=job.costs, hosts=job.hosts, meta=meta)


def scaled(job: Job, *, compute: float = 1.0, compression: float = 1.0, link: float = 1.0) -> Job:
    """The job with its times multiplied: see :class:`espresso.model.job.Host` for which is which."""
    costs, links = job.costs, job.costs.links
    busy = {key: cores * compression for key, cores in costs.contention.comm_cpu.items()}
    crossing, own_beta = _crossing(job.cluster), _own_beta(job)
    curves = tuple(
        _carried(curve, job.cluster, job.cluster, link, beta_us_per_kb=own_beta) if curve.scope in crossing else curve
        for curve in links.curves
    )
    inter = links.inter
    if inter is not None:
        inter = replace(inter, beta_us_per_kb=inter.beta_us_per_kb * link)
    return replace(
        job,
        gaps_us=tuple(gap * compute for gap in job.gaps_us),
        bucket_ready_us=None if job.bucket_ready_us is None else tuple(at * compute for at in job.bucket_ready_us),
        forward_us=job.forward_us * compute,
        optimizer_us=job.optimizer_us * compression,
        costs=replace(
            costs,
            links=replace(links, inter=inter, curves=curves),
            compute=tuple(_slowed(cost, compression) for cost in costs.compute),
            contention=replace(costs.contention, comm_cpu=busy, handling_us=costs.contention.handling_us * compression),
        ),
    )


def repaired(job: Job, host: str) -> Job:
    """The job of an uneven cluster if this host were no slower than the slowest of the others.

    Raises:
        JobError: there is no host of that name, or no other.
    """
    others = [one for one in job.hosts if one.name != host]
    if len(others) == len(job.hosts) or not others:
        known = ", ".join(one.name for one in job.hosts) or "none: its machines are alike"
        raise JobError(f"no host {host!r} beside others; the job has {known}")
    shares = {what: max(getattr(one, what) for one in others) for what in SHARES}
    return replace(scaled(job, **shares), hosts=())


def slowest(job: Job) -> list[str]:
    """The hosts alone whose repair would change anything."""
    found = []
    for host in job.hosts:
        others = [one for one in job.hosts if one is not host]
        if others and any(max(getattr(one, what) for one in others) < getattr(host, what) for what in SHARES):
            found.append(host.name)
    return found


def extrapolates(job: Job, change: Change) -> dict[str, float]:
    """How many times from what was measured: ``rate``, ``nodes``, ``ranks_per_node``; empty where links are stated."""
    if not job.costs.links.curves:
        return {}
    far = {
        "nodes": (change.num_nodes or job.cluster.num_nodes) / job.cluster.num_nodes,
        "ranks_per_node": (change.ranks_per_node or job.cluster.ranks_per_node) / job.cluster.ranks_per_node,
    }
    if change.inter_gbit is not None:
        far["rate"] = change.inter_gbit / own_gbit(job)
    return far


def _slowed(cost: ComputeCost, factor: float) -> ComputeCost:
    points = tuple((elements, us * factor) for elements, us in cost.points)
    return replace(cost, points=points, launch_us=cost.launch_us * factor, floor_us=cost.floor_us * factor)


def _shared_cores(costs: CostModel, old: Cluster, new: Cluster) -> CostModel:
    """More ranks on a machine share its cores and its pool."""
    if old.ranks_per_node == new.ranks_per_node:
        return costs
    cores = costs.contention.cores
    if cores is not None:
        shared = cores * old.ranks_per_node / new.ranks_per_node
        costs = replace(costs, contention=replace(costs.contention, cores=shared))
    if costs.offload_ranks_per_pool == old.ranks_per_node:
        costs = replace(costs, offload_ranks_per_pool=new.ranks_per_node)
    return costs


def _check_far(measured: float, asked: float, what: str, words: str) -> None:
    most = FARTHEST[what]
    if not 1 / most <= asked / measured <= most:
        raise RangeError(
            f"{asked:g} {words} is {max(asked / measured, measured / asked):.3g} times from the measured {measured:g},"
            f" and predictions reach {most:g} times; measure nearer to it"
        )


def _crossing(cluster: Cluster) -> tuple[Scope, ...]:
    """The scopes whose routines cross the network between machines."""
    return (Scope.FLAT, Scope.INTER) if cluster.num_nodes > 1 else ()


def _check_scopes(job: Job, cluster: Cluster) -> None:
    """Whether measured curves and lines can say what every routine of the new shape costs."""
    known = {curve.scope for curve in job.costs.links.curves}
    if job.costs.links.intra is not None and job.costs.links.inter is not None:
        return
    if cluster.num_nodes > 1 and job.cluster.num_nodes == 1:
        raise JobError("the job ran on one machine: nothing is known of a network between machines; profile on two")
    if cluster.is_hierarchical and Scope.INTRA not in known:
        raise JobError("the job had one rank on a machine: nothing is known of links inside one; profile with two")
    if cluster.num_nodes == 1 and cluster.ranks_per_node > 1 and job.cluster.num_nodes > 1:
        raise JobError("flat routines were measured across machines; profile on one machine to ask about one")


def _links_changed(job: Job, cluster: Cluster, change: Change) -> CostModel:
    costs, links = job.costs, job.costs.links
    ratio, inter, own_beta = 1.0, links.inter, _own_beta(job)
    if change.inter_gbit is not None:
        if cluster.num_nodes == 1:
            raise JobError("one machine has no network between machines to change")
        if links.curves:
            own = own_gbit(job)
            _check_far(own, change.inter_gbit, "rate", "Gb/s between machines")
            ratio = own / change.inter_gbit
        if inter is not None:
            inter = replace(inter, beta_us_per_kb=8.0 / (change.inter_gbit * reached_share(job)))
    ways = GLOO_WAYS if costs.copy is None else 1
    late_us = None if change.rtt_ms is None else 500.0 * change.rtt_ms * ways
    if inter is not None and late_us is not None:
        inter = replace(inter, latency_us=late_us)
    crossing = _crossing(job.cluster)
    curves, busy = [], dict(costs.contention.comm_cpu)
    for curve in links.curves:
        key = f"{curve.scope.value}.{curve.routine.value}"
        crosses = curve.scope in crossing
        share = costs.contention.comm_cpu.get(key, costs.contention.comm_cpu.get(curve.scope.value, 0.0))
        on_link = (ratio, own_beta) if crosses else (1.0, 0.0)
        made = _carried(curve, job.cluster, cluster, on_link[0], share, on_link[1])
        longer = _share_of_time(curve, made, job.cluster, cluster)
        for name in (key, curve.scope.value) if curve.routine is Routine.ALLGATHER else (key,):
            if name in busy:
                busy[name] = costs.contention.comm_cpu[name] * longer
        if crosses and late_us is not None:
            made = replace(made, latency_us=late_us * num_rounds(curve, cluster))
        curves.append(made)
    in_flight = links.in_flight
    if change.rtt_ms is not None and change.rtt_ms >= LONG_RTT_MS:
        in_flight = max(in_flight, IN_FLIGHT)
    return replace(
        costs,
        links=replace(links, inter=inter, curves=tuple(curves), in_flight=in_flight),
        contention=replace(costs.contention, comm_cpu=busy),
    )


def _beta(curve: LinkCurve, cluster: Cluster) -> float:
    """Microseconds per 1000 bytes on the link, from the least to the largest size: what a card lets through in bursts
    after a rest bends the curve between them.
    """
    (least, least_us), (most, most_us) = curve.points[0], curve.points[-1]
    if len(curve.points) == 1:
        least, least_us = 0.0, 0.0
    return (most_us - least_us) / (on_busiest_link(curve, cluster)[1] * (most - least) / KB)


def _own_beta(job: Job) -> float:
    """Of the network between machines, by its fastest routine whose bytes on a link are exact; 0 without one whose time
    rises with its bytes.
    """
    crossing = _crossing(job.cluster)
    rings = [curve for curve in job.costs.links.curves if curve.scope in crossing and curve.routine in RING_PASSES]
    return min((beta for curve in rings if (beta := _beta(curve, job.cluster)) > 0.0), default=0.0)


def _carried(
    curve: LinkCurve, old: Cluster, new: Cluster, ratio: float, busy: float = 0.0, beta_us_per_kb: float = 0.0
) -> LinkCurve:
    """The curve in another shape, at a rate ``ratio`` times slower; the formula is at the top of this page.

    Args:
        busy: cores that the routine burns while it is under way.
        beta_us_per_kb: of the link, as its fastest routine has it.
    """
    (old_messages, old_share), (messages, share) = on_busiest_link(curve, old), on_busiest_link(curve, new)
    if (old, ratio) == (new, 1.0) or not old_messages or not messages:
        return curve
    (least, least_us), exact = curve.points[0], curve.routine in RING_PASSES
    overhead = max(least_us - beta_us_per_kb * old_share * least / KB, 0.0)
    points = []
    for num_bytes, us in curve.points:
        rest, work = us - overhead, min(busy, 1.0) * us
        extra = max(rest - beta_us_per_kb * old_share * num_bytes / KB, 0.0)
        extra = extra if exact else min(extra, work)
        rest = max((rest - extra) * ratio + extra, min(work, rest))
        points.append((num_bytes, overhead * messages / old_messages + rest * share / old_share))
    rounds = num_rounds(curve, new) / num_rounds(curve, old)
    return replace(curve, points=tuple(points), latency_us=curve.latency_us * rounds)


def _share_of_time(before: LinkCurve, after: LinkCurve, old: Cluster, new: Cluster) -> float:
    """The old time of the largest size over its new one, the bytes on the link made equal: a core's work stays."""
    more = on_busiest_link(after, new)[1] / max(on_busiest_link(before, old)[1], 1e-12)
    return min(before.points[-1][1] * more / max(after.points[-1][1], 1e-9), 1e3)
