"""A strategy that was given, and what deciders share: a verdict, and tensors that have to stay exact."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from espresso.comm.execute.executor import Assignment, Record
from espresso.comm.groups import Groups
from espresso.compressors.schedule import translate
from espresso.live.history import Event, History
from espresso.live.orderer import Orderer, Work
from espresso.live.patience import SUPPOSED_US, Patience
from espresso.live.watch import Watch
from espresso.strategies import PLAIN, CompressorSpec, Strategy

InForce = Mapping[CompressorSpec, CompressorSpec]
"""For every compressor as given the one that runs."""


@dataclass
class Verdict:
    """What automatic mode decided, and why."""

    name: str
    reason: str
    measured_us: dict[str, float] = field(default_factory=dict)
    predicted_us: dict[str, float] = field(default_factory=dict)


class Exact:
    """Tensors that stay exact, whatever is found: some after the first alarm of the guard, all after the second."""

    def __init__(self) -> None:
        self._tensors: set[str] = set()
        self._alarms = 0

    def add(self, tensors: Collection[str]) -> None:
        """An alarm."""
        self._tensors.update(tensors)
        self._alarms += 1

    def of(self, strategy: Strategy) -> Strategy:
        """The strategy without their compression."""
        names = strategy.known if self._alarms > 1 else self._tensors & strategy.known.keys()
        return strategy.with_choices(dict.fromkeys(names, PLAIN)) if self._alarms else strategy

    def named(self, name: str) -> str:
        """What that is called."""
        return "plain" if self._alarms > 1 else f"{name.partition(' without ')[0]} without {len(self._tensors)} tensors"


class FixedPlanner:
    """Always the same strategy, but for compressors that change with step or epoch.

    Args:
        history: where it is told what has changed, if anything is watched; the strategy stays.
        verdict: why this one; by default that it was given.

    Attributes:
        given: the strategy as given, of compressors that change with step or epoch.
    """

    probed_us = 0.0
    """Nothing is measured."""

    def __init__(
        self,
        strategy: Strategy,
        groups: Groups,
        in_force: InForce | None = None,
        *,
        history: History | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        self.given, self._groups, self._history = strategy, groups, history
        self.watch = None if history is None else Watch(groups)
        self.verdict = verdict or Verdict("given", "the strategy was given")
        self._exact, self._patience = Exact(), Patience()
        self.follow(in_force or {})  # which begins to watch

    def back_off(self, tensors: Collection[str], step: int) -> str:
        """Leave these tensors exact from the next iteration on; returns the new name."""
        self._exact.add(tensors)
        self.given = self._exact.of(self.given)
        self.verdict = Verdict(self._exact.named("given"), "tensors whose averages were out of their band are exact")
        self.follow(self._in_force)
        return self.verdict.name

    def restart(self) -> None:
        """Iterations are counted from elsewhere on."""
        self._patience = Patience()
        if self.watch is not None:
            self.watch.begin()

    def follow(self, in_force: InForce) -> None:
        """Run the same options with these compressors, from the iteration on that is about to be assigned."""
        self._in_force = in_force
        self._orderer = Orderer(translate(self.given, in_force), self._groups)
        if self.watch is not None:
            self.watch.begin()

    @property
    def decided(self) -> bool:
        return True

    @property
    def strategy(self) -> Strategy:
        return self._orderer.strategy

    def assign(self, iteration: int) -> Assignment:
        """What this iteration runs; must not block."""
        return self._orderer.assignment

    def skip(self, record: Record) -> None:
        """Take note of an iteration that ran something else."""
        if self.watch is not None:
            self.watch.skip(record)

    def after(self, record: Record) -> Work | None:
        """Take note of an iteration; what is returned runs while every rank is inside the same hook call."""
        ordering, watch = self._orderer.note(record), self.watch
        if watch is None or not watch.take(record):
            return ordering
        if not watch.is_ready:
            return partial(self._look, watch, record.iteration, ordering)
        self._look(watch, record.iteration)
        return ordering

    def _look(self, watch: Watch, step: int, ordering: Work | None = None) -> None:
        change = watch.look()
        if change is not None and not self._patience.permits(change, step):
            watch.forgive()
        elif change is not None and self._history is not None:
            self._patience.took(step, SUPPOSED_US, brought=False)
            reason = f"{change}; the strategy was given, and stays"
            self._history.add(step, Event.CHANGED, reason, self.verdict.name, measured_us=change.step_us[1])
            watch.begin(change.step_us[1])
        if ordering is not None:
            ordering()
