"""A measured job brought up to date: links by short probes, compute and encoders by what live steps told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from espresso.comm.groups import Groups
from espresso.live.candidates import Moved
from espresso.live.change import TELLING, Cause, Change
from espresso.live.points import at_rate, rising
from espresso.live.profiler import Place, cores_taken, measure_burst, time_behind
from espresso.model.bucket_caps import in_buckets
from espresso.model.costs import ComputeCost
from espresso.model.job import Job
from espresso.model.links import LinkCurve, Links, interpolate, num_rounds, on_busiest_link
from espresso.strategies import Cluster, Form, Routine, Scope, Strategy

BURST_BYTES = 1 << 19
"""Of the whole array: gathered first, so that a token bucket is empty, and timed right behind that."""

SMALL_BYTES, SMALL_COUNT = 1 << 14, 8
LARGE_BYTES, FAST_US, FREED_US = 1 << 22, 2_000.0, 8_000.0
"""What is timed instead where the other takes no longer; nor this long where the link has become faster."""

AGAIN_US, MOST_TRIES = 20_000.0, 5
"""A gather that takes ``SLOWER`` times what was known, or as many times less, is timed again while all tries together
are this short: whoever else has the core makes one take twenty times as long, and where a limit is gone one of
``BURST_BYTES`` takes 1.6 ms or 4."""

PARTS = 4
"""Parts of a gather that took much longer than was known are timed as well, since on a slow link it is the only one,
and what holds one up (a lost packet: 200 ms) would be taken for the link. The middle one of three counts: what a card
has gathered in such a pause it lets through at once behind it (one of twelve parts took 6.2 ms where others took 11).
"""

UNSURE = 0.03
"""Of a curve on a slow link. After 730 ms had sunk to what no limit leaves, a plain step was predicted at 39 ms, and by
a fresh job at 32: a hundredth of what had been measured stayed."""

SLOWER, REST_BYTES = 1.5, 1 << 18
"""Where a gather of so much takes so many times what it did when a token bucket was looked for, it is looked for again:
a fast link hides it, or its noise is taken for one."""

Probes = Mapping[Scope, Sequence[tuple[float, float]]]
"""(bytes of the whole array, microseconds) of two gathers of payloads, which stand for all routines on their scope."""


MOST_CODEC = 4.0
"""Encoders are not taken for more than so many times slower, or faster, than they were measured."""


class Remeasured:
    """Keeps a job up to date.

    Attributes:
        moved: what measuring again found last.

    Links and compute follow from the job as it was measured first, by what probes and live steps took then and take
    now: one change after another would pile up their noise. Under another strategy backward takes another time beside
    its encoders, so that what computing took then is reckoned from what it took under that one before the change.
    """

    def __init__(self, job: Job, change: Change, in_use: Strategy | None = None) -> None:
        self._first, self._first_compute_us = job, change.compute_us[0] or _compute_us(job)
        self._in_use = in_use
        self._codec = self._scale = self._batch = 1.0
        self.moved = Moved(1.0, 0.0)
        links = job.costs.links
        self._burst_bytes, self._burst_at_us = links.burst_bytes, _gather_us(links)
        self._taken, self._taken_with = job.costs.contention.comm_cpu, links

    def scale(self, change: Change) -> float:
        """So many times what it took when the job was measured computing takes now."""
        return change.compute_us[1] / self._first_compute_us

    def job(self, job: Job, change: Change, groups: Groups, place: Place, in_use: Strategy | None = None) -> Job:
        """The job with the costs of what changed measured again. Collective: all ranks call it together.

        Args:
            in_use: the strategy of the steps that were watched.
        """
        were, given = (self._scale, self._codec, self._batch), job
        compute = change.ratio(Cause.COMPUTE, Cause.JOB)
        if in_use != self._in_use and (compute is not None or change.came_home):
            before_us, now_us = change.compute_us
            self._in_use, self._first_compute_us = in_use, (before_us or now_us) / self._scale
        scale = self.scale(change)
        if compute is not None or change.came_home:
            self._scale = scale
            job = with_compute(job, self._first, scale)
        if change.came_home:  # to a batch between the first and this one
            home = scale / (compute or 1.0)
            self._batch = max(min(home, 1.0), min(self._batch, max(home, 1.0)))
        self._batch *= change.ratio(Cause.JOB) or 1.0
        # A core that somebody else uses slows encoders as well, whether or not any runs now.
        if change.ratio(Cause.COMPUTE) is not None or change.came_home:
            self._codec = max(1.0, min(scale / self._batch, MOST_CODEC))
        codec = change.ratio(Cause.ENCODERS)
        if codec is not None:
            self._codec = max(1 / MOST_CODEC, min(self._codec * codec, MOST_CODEC))
        job = _with_codecs(job, self._first, self._codec)
        # Always: a change of the link may have gone unseen in an earlier turn, or behind what else changed.
        probes = probe(groups, place, given.costs.links)
        of_links = _link_ratios(given.costs.links, probes)
        as_before = bool(of_links) and all(abs(math.log(ratio)) < TELLING for ratio in of_links)
        if as_before and change.blames_link and not (change.again or change.came_home):
            (self._scale, self._codec, self._batch), self.moved = were, Moved(1.0, 0.0)
            return given
        others = [now / was for now, was in zip((self._scale, self._codec), were[:2], strict=True)]
        of_others = [(1.0, abs(math.log(ratio))) for ratio in others]
        self.moved = Moved.of_all([(ratio, abs(math.log(ratio))) for ratio in of_links] + of_others)
        links = with_probes(self._first.costs.links, probes, groups.cluster)
        gather_us = _gather_us(links)
        if gather_us > SLOWER * self._burst_at_us:
            self._burst_bytes, self._burst_at_us = measure_burst(groups, links, place, (REST_BYTES,)), gather_us
        links = replace(links, burst_bytes=self._burst_bytes)
        if self._taken and SLOWER * gather_us < _gather_us(self._taken_with):
            before = taken_now(self._taken, self._taken_with, links)  # pushes and pulls are not measured again
            self._taken, self._taken_with = before | cores_taken(groups, links.curves), links
        taken = taken_now(self._taken, self._taken_with, links)
        contention = replace(job.costs.contention, comm_cpu=taken)
        return replace(job, costs=replace(job.costs, links=links, contention=contention))


def taken_now(taken: Mapping[str, float], was: Links, links: Links) -> dict[str, float]:
    """The cores that exchanges take, on links on which they last longer, or less long, than on those before.

    A byte costs a processor the same, whatever its link. Of a slow one's exchanges next to nothing is seen, and noise:
    so what they take is measured anew where links have become faster.
    """
    found = {}
    for key, share in taken.items():
        scope, _, routine = key.partition(".")
        kind = Routine(routine or Routine.ALLGATHER), Scope(scope), Form.RAW if routine else Form.PAYLOAD
        then, now = was.measured(*kind), links.measured(*kind)
        lasts = 1.0
        if then is not None and now is not None:
            size, us = then.points[-1]
            lasts = max(interpolate(now.points, size), 1.0) / max(us, 1.0)
        found[key] = min(share / lasts, max(share, 1.0))
    return found


def probe(groups: Groups, place: Place, known: Links) -> Probes:
    """Time a small and a large gather on every scope. Collective; the same on all ranks.

    Args:
        known: what they took before.
    """
    found: dict[Scope, Sequence[tuple[float, float]]] = {}
    for scope, member in groups.scopes.items():
        if member.size == 1:
            continue
        columns = groups.cluster.columns(scope)
        gather = known.measured(Routine.ALLGATHER, scope, Form.PAYLOAD)
        for large in (BURST_BYTES, LARGE_BYTES):
            usual_us = math.inf if gather is None else interpolate(gather.alone, float(large * columns))
            large_us, spent_us, tries = math.inf, 0.0, 0
            while not usual_us / SLOWER < large_us < SLOWER * usual_us and spent_us < AGAIN_US and tries < MOST_TRIES:
                took_us = time_behind(groups, scope, BURST_BYTES, large, place)
                large_us, spent_us, tries = min(large_us, took_us), spent_us + took_us, tries + 1
            if large_us > SLOWER * usual_us:  # a part of it takes at least its part
                part = large // PARTS
                part_us = time_behind(groups, scope, part, part, place, PARTS - 1, median)
                large_us = min(large_us, PARTS * part_us)
            if large_us > (FREED_US if SLOWER * large_us < usual_us < math.inf else FAST_US):
                break
        small_us = time_behind(groups, scope, SMALL_BYTES, SMALL_BYTES, place, SMALL_COUNT)
        found[scope] = rising([(float(SMALL_BYTES * columns), small_us), (float(large * columns), large_us)])
    return found


def use_up_rest(groups: Groups, place: Place) -> None:
    """Send what cards and clouds let through at once after a pause, so that it flatters nobody. Collective."""
    for scope, member in groups.scopes.items():
        if member.size > 1:
            time_behind(groups, scope, BURST_BYTES, SMALL_BYTES, place)


def with_probes(links: Links, probes: Probes, cluster: Cluster) -> Links:
    """Every measured curve with what its link takes more, or less, than when it was measured.

    A gather of S bytes took a + b S, and takes da + db S more. A routine that waits n times as often for a message, and
    has f times the bytes on its busiest link, takes n da + f db S more. Where that is less than nothing, it sinks no
    further than n a + f b S does; and what a slow link's curves are off by (:data:`UNSURE`) is no time that stays.
    """

    def changed(curve: LinkCurve) -> LinkCurve:
        probed = probes.get(curve.scope)
        gather = links.measured(Routine.ALLGATHER, curve.scope, Form.PAYLOAD)
        if probed is None or gather is None:
            return curve
        was = [max(interpolate(gather.alone, size), 1.0) for size, _ in probed]
        more = [us - old for (_, us), old in zip(probed, was, strict=True)]
        (old_round, old_byte), (per_round, per_byte) = (_line([size for size, _ in probed], us) for us in (was, more))
        least = min(1.0, *(us / old for (_, us), old in zip(probed, was, strict=True)))
        rounds = num_rounds(curve, cluster) / num_rounds(gather, cluster)
        factor = on_busiest_link(curve, cluster)[1] / on_busiest_link(gather, cluster)[1]

        def now_us(size: float, us: float) -> float:
            added = rounds * per_round + factor * per_byte * size
            of_link = rounds * old_round + factor * old_byte * size
            if added >= 0.0:
                return us + added
            share = max(least, 1.0 + added / of_link) if of_link > 0.0 else least
            return max(share * us, us + added - UNSURE * us)

        alone = at_rate(rising([(size, now_us(size, us)) for size, us in curve.alone]))
        latency_us = min(max(curve.latency_us + rounds * per_round, least * curve.latency_us), alone[0][1])
        spread_us = curve.spread_us * latency_us / curve.latency_us if curve.latency_us else 0.0
        points = tuple((size, us - latency_us) for size, us in alone)
        return replace(curve, points=points, latency_us=latency_us, spread_us=spread_us)

    return replace(links, curves=tuple(map(changed, links.curves)))


def _line(sizes: Sequence[float], us: Sequence[float]) -> tuple[float, float]:
    """What no byte takes, and one byte more, by the first and the last."""
    per_byte = (us[-1] - us[0]) / (sizes[-1] - sizes[0])
    return us[0] - per_byte * sizes[0], per_byte


def _link_ratios(before: Links, probes: Probes) -> list[float]:
    """Of the larger gather on each scope, what it takes now to what it took."""
    gathers = {scope: before.measured(Routine.ALLGATHER, scope, Form.PAYLOAD) for scope in probes}
    return [
        probes[scope][-1][1] / max(interpolate(gather.alone, probes[scope][-1][0]), 1.0)
        for scope, gather in gathers.items()
        if gather is not None
    ]


def _gather_us(links: Links) -> float:
    """What is gathered after a rest, as it is without one."""
    return 0.0 if links.crossing is None else interpolate(links.crossing.alone, REST_BYTES)


def _compute_us(job: Job) -> float:
    """From one averaged gradient to the next one's last bucket, as it was measured."""
    return max(job.forward_us + sum(job.gaps_us) + job.optimizer_us, 1.0)


def with_compute(job: Job, first: Job, ratio: float) -> Job:
    """The job with what computing took in ``first``, times ``ratio``, in the job's own buckets."""
    if job.buckets is not None and job.buckets != first.buckets:
        first = in_buckets(first, job.buckets)
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

    handling_us = first.costs.contention.handling_us * ratio
    contention = replace(job.costs.contention, handling_us=handling_us)
    return replace(job, costs=replace(job.costs, compute=tuple(map(scaled, job.costs.compute)), contention=contention))
