"""A measured job brought up to date: links by short probes, compute and encoders by what live steps told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from espresso.comm.groups import Groups
from espresso.live.profiler import Place, rising, time_behind
from espresso.live.watch import Cause, Change
from espresso.model.bucket_caps import in_buckets
from espresso.model.costs import ComputeCost
from espresso.model.job import Job
from espresso.model.links import LinkCurve, Links, Points, interpolate
from espresso.strategies import Form, Routine, Scope

BURST_BYTES = 1 << 19
"""Of the whole array: gathered first, so that a token bucket is empty."""

SMALL_BYTES, SMALL_COUNT = 1 << 14, 8
LARGE_BYTES = ((2_000.0, 1 << 22), (15_000.0, 1 << 20), (math.inf, 1 << 18))
"""What is gathered behind it, by how many microseconds that took at most."""

Probes = Mapping[Scope, Sequence[tuple[float, float]]]
"""(bytes of the whole array, microseconds) of a gather of payloads, which stands for all routines on its scope: on one
link they slow down together."""


MOST_CODEC = 4.0
"""Encoders are not taken for more than so many times slower, or faster, than they were measured."""


class Remeasured:
    """Keeps a job up to date.

    Compute is scaled from the job as it was measured first, by what live steps took then and take now: factors of one
    change after another would pile up their noise.
    """

    def __init__(self, job: Job, change: Change) -> None:
        self._first, self._first_compute_us = job, change.compute_us[0]
        self._codec = 1.0

    def job(self, job: Job, change: Change, groups: Groups, place: Place) -> Job:
        """The job with the costs of what changed measured again. Collective: all ranks call it together."""
        if job.buckets != self._first.buckets:  # laid anew since
            self._first = in_buckets(self._first, job.laid_out)
        compute = change.ratio(Cause.COMPUTE, Cause.JOB)
        scale = change.compute_us[1] / self._first_compute_us
        if compute is not None:
            job = _with_compute(job, self._first, scale)
        codec = change.ratio(Cause.ENCODERS)
        if codec is not None:
            self._codec = max(1 / MOST_CODEC, min(self._codec * codec, MOST_CODEC))
        elif change.ratio(Cause.COMPUTE) is not None:
            # A core that somebody else uses slows encoders as well, whether or not any runs now.
            self._codec = max(1.0, min(scale, MOST_CODEC))
        job = _with_codecs(job, self._first, self._codec)
        # Always: a change of the link may have gone unseen in an earlier turn, or behind what else changed.
        return replace(job, costs=replace(job.costs, links=scaled_links(job.costs.links, probe(groups, place))))


def probe(groups: Groups, place: Place) -> Probes:
    """Time a small and a large gather on every scope. Collective; the same on all ranks."""
    found: dict[Scope, Sequence[tuple[float, float]]] = {}
    for scope, member in groups.scopes.items():
        if member.size == 1:
            continue
        columns = groups.cluster.ranks_per_node if scope is Scope.INTER else 1
        burst_us = time_behind(groups, scope, SMALL_BYTES, BURST_BYTES, place)
        large = next(size for most_us, size in LARGE_BYTES if burst_us <= most_us)
        large_us = time_behind(groups, scope, BURST_BYTES, large, place)
        small_us = time_behind(groups, scope, SMALL_BYTES, SMALL_BYTES, place, SMALL_COUNT)
        found[scope] = rising([(float(SMALL_BYTES * columns), small_us), (float(large * columns), large_us)])
    return found


def scaled_links(links: Links, probes: Probes) -> Links:
    """Every measured curve times what the probe of its scope says, size by size."""

    def scaled(curve: LinkCurve) -> LinkCurve:
        probed = probes.get(curve.scope)
        stands_for = links.measured(Routine.ALLGATHER, curve.scope, Form.PAYLOAD)
        if probed is None or stands_for is None:
            return curve
        before = stands_for.alone
        alone = rising([(size, us * _ratio_at(probed, before, size)) for size, us in curve.alone])
        latency_us = min(curve.latency_us * _ratio_at(probed, before, alone[0][0]), alone[0][1])
        spread_us = curve.spread_us * latency_us / curve.latency_us if curve.latency_us else 0.0
        points = tuple((size, us - latency_us) for size, us in alone)
        return replace(curve, points=points, latency_us=latency_us, spread_us=spread_us)

    return replace(links, curves=tuple(map(scaled, links.curves)))


def _ratio_at(probed: Sequence[tuple[float, float]], before: Points, size: float) -> float:
    """How many times longer an array of this size takes than before.

    Between two probes in proportion to bytes, since that is what a thinner link adds; beyond them as at the nearest.
    """
    sizes = [at for at, _ in probed]
    was = [max(interpolate(before, at), 1.0) for at in sizes]
    ratios = [us / old for (_, us), old in zip(probed, was, strict=True)]
    size = min(max(size, sizes[0]), sizes[-1])
    here = max(interpolate(before, size), 1.0)
    more = np.interp(size, sizes, [us - old for (_, us), old in zip(probed, was, strict=True)])
    return float(np.clip(1 + more / here, min(ratios), max(ratios)))


def _with_compute(job: Job, first: Job, ratio: float) -> Job:
    ready = first.bucket_ready_us
    return replace(
        job,
        gaps_us=tuple(gap * ratio for gap in first.gaps_us),
        bucket_ready_us=None if ready is None else tuple(at * ratio for at in ready),
        forward_us=first.forward_us * ratio,
        optimizer_us=first.optimizer_us * ratio,
    )


def _with_codecs(job: Job, first: Job, ratio: float) -> Job:
    known = {(cost.spec, cost.device, cost.op): cost for cost in first.costs.compute}

    def scaled(cost: ComputeCost) -> ComputeCost:
        was = known.get((cost.spec, cost.device, cost.op))
        if was is None:  # measured since then
            return cost
        return replace(cost, points=tuple((x, us * ratio) for x, us in was.points), launch_us=was.launch_us * ratio)

    return replace(job, costs=replace(job.costs, compute=tuple(map(scaled, job.costs.compute))))
