"""Compressors that change over a training: which are in force, by step and epoch."""

from __future__ import annotations

import logging

from espresso.compressors.schedule import Schedule

logger = logging.getLogger("espresso")

REMIND_AFTER = 1000
"""Steps after which a warm-up that nobody moves on is worth a warning."""


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
        if step == REMIND_AFTER and self.epoch is None and not self.schedule.is_fixed:
            logger.warning(
                "the compressor warms up by epochs, but nobody called state.set_epoch(epoch) in %d steps, nor gave"
                " steps_per_epoch to register: its first ratio stays",
                step,
            )
        return self.epoch or 0
