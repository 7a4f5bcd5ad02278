"""What a job's compressors are in this step: ratios that warm up, first steps that stay raw.

A spec as users write it may name a schedule (``dgc:warmup_epochs=4``). What runs is the spec *in force*:
payload sizes differ between the two, so a change makes plans, orders and costs anew, on every rank in the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cached_property

from espresso.compressors import registry
from espresso.compressors.base import Correction
from espresso.strategies import NONE, PLAIN, Choice, CompressorSpec, Strategy, StrategyError

logger = logging.getLogger("espresso")

REMIND_AFTER = 1000
"""Steps after which a warm-up that nobody moves on is worth a warning."""

LAST = 1 << 40
"""An epoch, and a step, by which every schedule has ended."""


class Schedule:
    """The compressors of one job.

    Args:
        specs: as given, schedules included.

    Raises:
        ValueError: an unknown compressor or parameter, or compressors that ask for different momentum.
    """

    def __init__(self, specs: Iterable[CompressorSpec]) -> None:
        self._compressors = {spec: registry.create(spec) for spec in specs if spec != NONE}
        self.correction = self._find_correction()

    @property
    def start_step(self) -> int:
        """The first step in which all of them compress."""
        return max((compressor.start_step for compressor in self._compressors.values()), default=0)

    @cached_property
    def is_fixed(self) -> bool:
        """Whether nothing ever changes. Asked for in every step."""
        return not any(compressor.is_scheduled for compressor in self._compressors.values())

    @property
    def is_steady(self) -> bool:
        """Whether nothing changes once all of them compress."""
        return self.in_force(0, self.start_step) == self.in_force(LAST, max(LAST, self.start_step))

    def also(self, specs: Iterable[CompressorSpec]) -> Schedule:
        """The schedule of these compressors too."""
        return Schedule({**self._compressors, **dict.fromkeys(specs)})

    def in_force(self, epoch: int, step: int) -> dict[CompressorSpec, CompressorSpec]:
        """For every spec as given the one that runs in this step."""
        return {
            spec: registry.spec_of(compressor.in_force(epoch, step)) if compressor.is_scheduled else spec
            for spec, compressor in self._compressors.items()
        }

    def waits_for_epochs(self, step: int) -> bool:
        """Whether what is in force in this step is another in later epochs."""
        return self.in_force(0, step) != self.in_force(LAST, step)

    def _find_correction(self) -> Correction | None:
        asked = {spec: c.correction for spec, c in self._compressors.items() if c.correction is not None}
        if len(set(asked.values())) > 1:
            listed = ", ".join(f"'{spec}'" for spec in asked)
            raise ValueError(
                f"momentum is one for the whole job, but its compressors differ in momentum, nesterov or clip_norm:"
                f" {listed}"
            )
        return next(iter(asked.values()), None)


class Follower:
    """Follows a schedule. The same on every rank.

    Attributes:
        epoch: as told by ``set_epoch``; None before.
        in_force: for every spec as given the one that runs.
    """

    def __init__(self, schedule: Schedule, epoch: int | None, steps_per_epoch: int | None, step: int = 0) -> None:
        self.schedule, self.epoch, self._steps_per_epoch = schedule, epoch, steps_per_epoch
        self.in_force = schedule.in_force(self._epoch_of(step), step)

    def following(self, schedule: Schedule, step: int, epoch: int | None) -> Follower:
        """A follower of another schedule, in the same job."""
        return Follower(schedule, epoch, self._steps_per_epoch, step)

    def moves(self, step: int) -> bool:
        """Go to a step; whether another compressor is in force from here on."""
        if self.schedule.is_fixed:
            return False
        before, self.in_force = self.in_force, self.schedule.in_force(self._epoch_of(step), step)
        if self.in_force == before:
            return False
        logger.info("from step %d on the compressor is %s", step, ", ".join(map(str, self.in_force.values())))
        return True

    def _epoch_of(self, step: int) -> int:
        if self._steps_per_epoch is not None:
            return step // self._steps_per_epoch
        if step == REMIND_AFTER and self.epoch is None and self.schedule.waits_for_epochs(step):
            logger.warning(
                "the compressor warms up by epochs, but nobody called state.set_epoch(epoch) in %d steps, nor gave"
                " steps_per_epoch to register: its first ratio stays",
                step,
            )
        return self.epoch or 0


def _misfit(choice: Choice) -> str | None:
    """Why there is no such compressor, or why it cannot take the option; None: it can."""
    if not choice.option.is_compressed:
        return None
    try:
        traits, rounds = registry.create(choice.compressor).traits, choice.option.num_rounds
    except (ValueError, TypeError) as error:
        return str(error)
    if traits.rounds != rounds:
        wanted = "go through the leaves with a transform step" if traits.rounds > 1 else "have no transform step"
        return f"option '{choice.option}' does not fit compressor '{choice.compressor}', whose options {wanted}"
    if choice.option.is_summable and not traits.summable:
        return f"option '{choice.option}' adds payloads up; those of '{choice.compressor}' do not add"
    return None


def check_choices(strategy: Strategy) -> None:
    """Check that every tensor's compressor exists, takes its parameters and goes with its option.

    Raises:
        StrategyError: names the first tensor whose do not.
    """
    faults = {choice: _misfit(choice) for choice in set(strategy.choices.values())}
    for name, choice in strategy.choices.items():
        if faults[choice] is not None:
            raise StrategyError(f"tensor {name!r}: {faults[choice]}")


def translate(strategy: Strategy, specs: Mapping[CompressorSpec, CompressorSpec]) -> Strategy:
    """The strategy with other compressors; a tensor whose compressor becomes ``none`` turns raw."""
    changes = {}
    for name, choice in strategy.known.items():
        spec = specs.get(choice.compressor, choice.compressor)
        if spec != choice.compressor:
            changes[name] = PLAIN if spec == NONE else Choice(choice.option, spec)
    return strategy.with_choices(changes) if changes else strategy
