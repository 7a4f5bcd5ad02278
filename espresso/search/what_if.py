"""What a job would take under other conditions, with the best strategy of each: ``espresso what-if``."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from espresso.model.job import Job, JobError
from espresso.model.payload_sizes import compressed
from espresso.model.what_if import FARTHEST, Change, changed, extrapolates, own_gbit
from espresso.search.result import SearchResult
from espresso.search.search import search
from espresso.search.terms import Terms
from espresso.strategies import Choice, Cluster, CompressorSpec, Strategy

PAYS = 1.02
"""Compression pays where the best strategy is so much faster than the best that compresses nothing."""

STATED_GBIT = (0.01, 1600.0)
"""Rates between which a job with stated links is asked."""

CLOSE = 1.05
"""How near the rate at which compression stops paying is found."""

RAW = ("uncompressed", "cheapest raw leaf")


@dataclass(frozen=True)
class Prediction:
    """A job under one set of conditions.

    Attributes:
        inter_gbit: nominal rate between machines; None where there is one machine.
        plain_us: flat allreduce of everything.
        raw_us: the best strategy that compresses nothing, of those that were looked at: all where it matters.
        best_us: the best strategy; ``strategy`` is it.
        lower_bound_us: certified.
        far: how many times from what was measured, by what.
        search_ms: wall time of the search.
    """

    cluster: Cluster
    inter_gbit: float | None
    rtt_ms: float | None
    plain_us: float
    raw_us: float
    best_us: float
    lower_bound_us: float
    strategy: Strategy
    far: dict[str, float]
    search_ms: float

    @property
    def gain(self) -> float:
        """Steps a second of the best strategy over plain's."""
        return self.plain_us / self.best_us if self.best_us else 1.0

    @property
    def pays(self) -> bool:
        """Whether compressing gains anything that is worth it."""
        return self.strategy.compresses and self.raw_us >= PAYS * self.best_us

    @property
    def main_choice(self) -> Choice:
        """What most bytes get."""
        by_bytes: Counter[Choice] = Counter()
        for tensor in self.strategy.tensors:
            by_bytes[self.strategy.choices[tensor.name]] += tensor.num_bytes
        return by_bytes.most_common(1)[0][0]

    def to_json(self) -> dict[str, Any]:
        """A row of ``espresso what-if --json``."""
        choice = self.main_choice
        return {
            "nodes": self.cluster.num_nodes,
            "ranks_per_node": self.cluster.ranks_per_node,
            "ranks": self.cluster.num_ranks,
            "inter_gbit": self.inter_gbit,
            "rtt_ms": self.rtt_ms,
            "plain_us": self.plain_us,
            "raw_us": self.raw_us,
            "best_us": self.best_us,
            "lower_bound_us": self.lower_bound_us,
            "gain": self.gain,
            "pays": self.pays,
            "compressed": len(compressed(self.strategy)),
            "tensors": len(self.strategy.tensors),
            "option": str(choice.option),
            "compressor": str(choice.compressor),
            "extrapolates": self.far,
            "search_ms": self.search_ms,
        }


def combinations(
    nodes: Sequence[int], ranks_per_node: Sequence[int], gbits: Sequence[float], rtts_ms: Sequence[float], base: Change
) -> list[Change]:
    """Every combination; an empty list is what the job has."""
    as_it_is = (None,)
    return [
        replace(base, num_nodes=n, ranks_per_node=k, inter_gbit=rate, rtt_ms=rtt)
        for n, k, rate, rtt in itertools.product(
            nodes or as_it_is, ranks_per_node or as_it_is, gbits or as_it_is, rtts_ms or as_it_is
        )
    ]


def predict(job: Job, specs: Sequence[CompressorSpec], change: Change, *, all_kinds: bool = False) -> Prediction:
    """Search the job under other conditions, as ``espresso search`` does: what was measured on a live run as automatic
    mode does, others for few kinds.

    Args:
        all_kinds: the fastest strategy, with however many kinds of choices.

    Raises:
        RangeError, JobError: see :func:`espresso.model.what_if.changed`.
    """
    other = changed(job, change)
    terms = Terms.usual(job, specs)
    terms = replace(terms, all_kinds=terms.all_kinds or all_kinds)
    result = search(other, specs, partitions=terms.partitions, terms=terms)
    known = other.cluster.num_nodes > 1
    return Prediction(
        other.cluster,
        (change.inter_gbit or own_gbit(job)) if known else None,
        change.rtt_ms,
        result.uncompressed_us,
        _raw_us(other, specs, terms, result),
        result.predicted_us,
        result.lower_bound_us,
        result.strategy,
        extrapolates(job, change),
        result.search_ms,
    )


def _raw_us(job: Job, specs: Sequence[CompressorSpec], terms: Terms, result: SearchResult) -> float:
    """The best strategy that compresses nothing: searched for where it is not clear that compressing pays less."""
    raw_us = min([result.uncompressed_us, *(result.baselines[name] for name in RAW if name in result.baselines)])
    if not result.strategy.compresses:
        return min(raw_us, result.predicted_us)
    if raw_us < PAYS * result.predicted_us:
        return raw_us
    raw = replace(terms, races=False, constraints=replace(terms.constraints, most_compressions=0))
    with suppress(JobError):  # some tensors are forced to be compressed
        found = search(job, specs, partitions=terms.partitions, terms=raw, certified=False)
        raw_us = min(raw_us, found.predicted_us)
    return raw_us


def stops_paying(
    job: Job, specs: Sequence[CompressorSpec], change: Change, tell: Callable[[str], None] | None = None
) -> float | None:
    """From which rate between machines on compression no longer pays, in Gb/s.

    Returns:
        infinity if it pays at the fastest rate that may be asked for, None if it does not at the slowest.
    """
    least, most = STATED_GBIT
    if job.costs.links.curves:
        own = own_gbit(job)
        least, most = own / FARTHEST["rate"], own * FARTHEST["rate"]

    def pays(gbit: float) -> bool:
        if tell is not None:
            tell(f"does compression pay at {gbit:.3g} Gb/s?")
        # (What few kinds may take is as much as a gain that counts, and is not always taken.)
        return predict(job, specs, replace(change, inter_gbit=gbit), all_kinds=True).pays

    # (A thousandth inside, so that rounding does not leave the range.)
    low, high = least * 1.001, most / 1.001
    if pays(high):
        return math.inf
    if not pays(low):
        return None
    while high / low > CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high
