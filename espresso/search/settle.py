"""From the fastest strategies to those that are run: of few kinds.

::

    fastest within the budgets ──> 1 exact tensors travel where they do soonest
                                   2 of what is nearly as fast the fewest kinds of choices, and exchanges
                                   3 residuals in as many bits as there is memory for

All of it keeps to the budgets and constraints, and moves tensor by tensor: every step is priced on the timeline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from espresso.model.job import Job
from espresso.model.payload_sizes import create_compressor
from espresso.search.budgets import ROUNDING
from espresso.search.candidates import units_of
from espresso.search.evaluator import Evaluator
from espresso.search.result import Ranked
from espresso.search.space import Space
from espresso.search.terms import EXACT_VECTORS, MAX_CANDIDATES, NEAR
from espresso.strategies import (
    NONE,
    PLAIN,
    RESIDUAL_DTYPES,
    Bucket,
    Choice,
    CompressorSpec,
    Device,
    Mode,
    Strategy,
    parse_option,
)

if TYPE_CHECKING:
    from espresso.search.result import SearchResult

SIMPLE = "everything once"
"""A strategy of one simple option, which is worth trying where it is predicted below plain: on a core that workers or
their own threads share, predictions are furthest off for strategies of many steps. In the races of benchmarks/results
it was faster than the search's by more than 2 % in 12 of 38 with a worker on each host, in 7 of 23 with two."""

MOST_TARGETS = 4
"""Kinds that one kind is merged into at most: those that hold most."""

_ONCE_FLAT = "comp > flat.allgather > dec"
_SUMMED_FLAT = "comp > flat.allreduce > dec"


def is_rider(choice: Choice) -> bool:
    """Whether a tensor travels as plain numbers in a payload of others."""
    return choice.compressor == NONE and choice.option.carries_payloads


def kinds_of(strategy: Strategy) -> Counter[Choice]:
    """Every kind of choice with the elements that have it. What rides is of its carrier's."""
    counts: Counter[Choice] = Counter()
    for tensor in strategy.tensors:
        choice = strategy.choices[tensor.name]
        if not is_rider(choice):
            counts[choice] += tensor.numel
    return counts


def in_payloads(strategy: Strategy, buckets: Iterable[Bucket], *, alone: bool = False) -> Strategy:
    """The strategy with what is summed apart raw in a payload of its bucket: so many exchanges fewer a step.

    Args:
        alone: where a bucket has no payload, have one of its own, exchanged as the others are. An allreduce is a ring
            and pays the latency in every round, an exchange of payloads once.
    """
    everywhere = Counter(c.option for c in strategy.choices.values() if alone and c.option.carries_payloads)
    changes: dict[str, Choice] = {}
    for bucket in buckets:
        choices = {slot.tensor: strategy.choices[slot.tensor] for slot in bucket.slots}
        payloads = Counter(choice.option for choice in choices.values() if choice.option.carries_payloads)
        for option, _ in (payloads or everywhere).most_common(1):
            changes |= {name: Choice(option, NONE) for name, choice in choices.items() if choice == PLAIN}
    return strategy.with_choices(changes) if changes else strategy


def _widest_gap(sizes: Iterable[int]) -> float:
    """The size below the widest gap, by factor, where some are larger than the vectors that stay exact."""
    known = sorted({max(size, 1) for size in sizes})
    gaps = [(high / low, low) for low, high in pairwise(known)]
    return max(gaps)[1] if gaps and known[-1] > EXACT_VECTORS else math.inf


@dataclass(frozen=True)
class Settled:
    """A strategy that may run, and what having few kinds costs it.

    Attributes:
        kinds_before, before_us: with all kinds.
    """

    row: Ranked
    kinds_before: int
    before_us: float


class Settler:
    """Prices and changes strategies of one job under the same terms."""

    def __init__(self, job: Job, space: Space) -> None:
        self._job, self._space, self._terms, self._ledger = job, space, space.terms, space.ledger
        self._numel = {tensor.name: tensor.numel for tensor in job.tensors}
        self._asked = {tensor.name: space.terms.constraints.kind_of(tensor) for tensor in job.tensors}
        self._units, self._evaluators = units_of(job), dict[int, Evaluator]()
        self._predicted: dict[object, float] = {}  # by partition size and choices: many are come upon twice
        self.plain_us = 0.0

    def settled(self, row: Ranked) -> Settled:
        """The strategy as it may run."""
        before = row = self.priced(row)
        # What is below plain stays so.
        limit_us = row.predicted_us * (NEAR if row.predicted_us * NEAR < self.plain_us else 1.0)
        if not self._terms.all_kinds:
            row = self._together(self.priced(self._fewer(row, limit_us)), limit_us)
        row = self._wider(row, limit_us)
        return Settled(row, len(kinds_of(before.strategy)), before.predicted_us)

    def priced(self, row: Ranked) -> Ranked:
        """The row with what its strategy takes, exact tensors where they travel soonest: all, the small ones or none in
        payloads of others.
        """
        apart = self._apart(row.strategy)
        ways = self._riding(apart), self._riding(apart, small=True), apart
        return min((self._simulated(replace(row, strategy=way)) for way in ways), key=lambda one: one.predicted_us)

    def _tried(self, row: Ranked, changes: Mapping[str, Choice]) -> Ranked:
        """The row with other choices, exact tensors where the row's travel soonest."""
        before, way = self._apart(row.strategy), self._apart(row.strategy.with_choices(changes))
        for small in (False, True):
            if row.strategy == self._riding(before, small=small):
                return self._simulated(replace(row, strategy=self._riding(way, small=small)))
        return self._simulated(replace(row, strategy=way))

    def _riding(self, strategy: Strategy, *, small: bool = False) -> Strategy:
        # Copies are priced at nothing, which is right beside a latency that was measured.
        alone = self._job.costs.links.in_flight > 1 and self._job.mode is Mode.DDP
        riding = in_payloads(strategy, self._job.laid_out, alone=alone)
        riders = [name for name, choice in riding.choices.items() if is_rider(choice)]
        largest = _widest_gap(self._numel[name] for name in riders) if small else math.inf
        forbidden = [n for n in riders if self._numel[n] > largest or not self._may(n, riding.choices[n])]
        riding = riding.with_choices(dict.fromkeys(forbidden, PLAIN)) if forbidden else riding
        most = self._terms.budgets.residual_bytes
        return riding if most == math.inf or self.bytes_kept(riding) <= most * (1 + ROUNDING) else strategy

    def bytes_kept(self, strategy: Strategy) -> float:
        """What residuals take on a rank: of what rides as much as of what it rides with."""
        carried: dict[str, Choice] = {}
        for bucket in self._job.laid_out:
            choices = {slot.tensor: strategy.choices[slot.tensor] for slot in bucket.slots}
            carriers = {c.option: c for c in reversed(choices.values()) if not is_rider(c)}
            carried |= {name: carriers[c.option] for name, c in choices.items() if is_rider(c) and c.option in carriers}
        return self._ledger.spent({**strategy.choices, **carried})[1]

    def _apart(self, strategy: Strategy) -> Strategy:
        riders = {name: PLAIN for name, choice in strategy.choices.items() if is_rider(choice)}
        return strategy.with_choices(riders) if riders else strategy

    def _simulated(self, row: Ranked) -> Ranked:
        key = row.strategy.partition_bytes, *row.strategy.choices.items()
        predicted = self._predicted.get(key)
        if predicted is None:
            predicted = self._evaluated(row) if self._job.mode is Mode.PAPER else row.timeline.iteration_us
            self._predicted[key] = predicted
        notes = {**row.strategy.notes, "predicted_us": predicted, "found_by": row.name}
        return replace(row, strategy=replace(row.strategy, notes=notes), predicted_us=predicted)

    def _evaluated(self, row: Ranked) -> float:
        """Where every tensor is a unit, kernels price a strategy without a plan."""
        size = row.strategy.partition_bytes
        evaluator = self._evaluators.get(size)
        if evaluator is None:
            evaluator = self._evaluators[size] = Evaluator(self._job, self._units, size, pricer=row.pricer)
        choices = [row.strategy.choices[unit.tensors[0]] for unit in self._units]
        return self._job.forward_us + evaluator.makespan(evaluator.encode(choices)) + self._job.optimizer_us

    def _may(self, name: str, choice: Choice) -> bool:
        return self._space.may(choice, self._asked[name])

    # -- 2 few kinds ---------------------------------------------------------------------------------

    def _fewer(self, row: Ranked, limit_us: float) -> Ranked:
        """Kinds are merged into others, the smallest first, while the step takes no longer and no more is owed."""
        owed = self._ledger.spent(row.strategy.choices)[0] * NEAR**2
        while (merged := self._merged(row, limit_us, owed)) is not None:
            row = merged
        return row

    def _merged(self, row: Ranked, limit_us: float, owed: float) -> Ranked | None:
        kinds = kinds_of(row.strategy)
        for kind, _ in reversed(kinds.most_common()):
            names = [name for name, choice in row.strategy.choices.items() if choice == kind]
            tried = []
            for other in [target for target, _ in kinds.most_common() if target != kind][:MOST_TARGETS]:
                if not all(self._may(name, other) for name in names):
                    continue
                changes = dict.fromkeys(names, other)
                changed = row.strategy.with_choices(changes)
                known = self._ledger.knows(changed.choices.values())
                if self._ledger.allows(changed.choices) and (
                    not known or self._ledger.spent(changed.choices)[0] <= owed
                ):
                    tried.append(self._tried(row, changes))
            best = min(tried, key=lambda one: one.predicted_us, default=None)
            if best is not None and best.predicted_us <= limit_us:
                return best
        return None

    def _together(self, row: Ranked, limit_us: float) -> Ranked:
        """Exact tensors in payloads of others, all or the small ones, if the step takes no longer: an exchange costs
        processors more than the timeline knows.
        """
        if self._job.costs.links.in_flight > 1:
            return row  # then they may have exchanges of their own there too
        apart = self._apart(row.strategy)
        for small in (False, True):
            riding = self._simulated(replace(row, strategy=self._riding(apart, small=small)))
            if riding.predicted_us <= limit_us:
                return riding
        return row

    # -- 3 residuals ---------------------------------------------------------------------------------

    def _wider(self, row: Ranked, limit_us: float) -> Ranked:
        """The residuals of a kind in more bits, where there is memory and a step is as fast: less is lost."""
        for kind, _ in reversed(kinds_of(row.strategy).most_common()):
            spec = kind.compressor
            if not spec.residual_dtype or spec.residual_dtype == self._terms.residual_dtype:
                continue
            names = [name for name, choice in row.strategy.choices.items() if choice == kind]
            narrow = RESIDUAL_DTYPES.index(spec.residual_dtype)
            for dtype in ("", *RESIDUAL_DTYPES[RESIDUAL_DTYPES.index(self._terms.residual_dtype) + 1 : narrow]):
                changes = dict.fromkeys(names, replace(kind, compressor=spec.kept_as(dtype)))
                if not all(self._may(name, choice) for name, choice in changes.items()):
                    continue
                tried = self._tried(row, changes)
                if self._ledger.allows(tried.strategy.choices) and tried.predicted_us <= limit_us:
                    row = tried
                    break
        return row

    # -- the simple strategy -------------------------------------------------------------------------

    def simplest(self, result: SearchResult) -> Ranked | None:
        """Everything compressed once by one compressor, and exchanged in one routine, uncut unless asked otherwise.

        By the compressor that holds most of what nothing is forced on, or where that takes several rounds or a budget
        rules it out by the one that is predicted to be fastest of those offered that may.

        Returns:
            The strategy, or None where the search compressed nothing, or where no compressor may.
        """
        strategy = result.chosen.strategy
        some = strategy.compressors - {NONE}
        used = Counter(
            {spec: sum(self._numel[n] for n, c in strategy.choices.items() if c.compressor == spec)
             for spec in some.intersection(self._space.specs) or some}
        )  # fmt: skip
        if not used:
            return None
        most = max(sorted(used, key=str), key=lambda one: used[one])
        row = self._everything(result, most)
        if row is None:
            others = [self._simulated(other) for spec in self._space.specs if (other := self._everything(result, spec))]
            row = min(others, key=lambda one: one.predicted_us, default=None)
        return None if row is None else self.priced(row)

    def _everything(self, result: SearchResult, spec: CompressorSpec) -> Ranked | None:
        strategy, traits = result.chosen.strategy, create_compressor(spec).traits
        if traits.rounds > 1 or Device.TRAINING not in self._job.costs.devices(spec):
            return None
        choice = Choice(parse_option(_SUMMED_FLAT if traits.summable else _ONCE_FLAT), spec)
        changes = {name: choice if self._may(name, choice) else c for name, c in strategy.choices.items()}
        whole = replace(self._apart(strategy).with_choices(changes), partition_bytes=self._terms.partition_bytes or 0)
        if not self._ledger.allows(whole.choices):
            return None
        return replace(result.chosen, name=SIMPLE, strategy=whole, job=self._job)


def racers(rows: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """Those of a search's alternatives that race against plain: the best two, and the simple one."""
    return tuple(row for place, row in enumerate(rows) if place < MAX_CANDIDATES or row.name == SIMPLE)
