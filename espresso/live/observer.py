"""What the iterations of a live job tell: totals for the user's logger, and observations while it is profiled."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median_high

from espresso.comm.execute.assignment import Record
from espresso.live.profiler import GradientClock, Observation

RECENT_STEPS = 20
"""Steps whose median is the step time that is reported."""


class Observer:
    """Takes note of every iteration.

    Args:
        clock: attaches a clock to the model; None where the model is gone.

    Attributes:
        last: the latest iteration; None before the first.
        observations: of the profiled iterations.
    """

    def __init__(self, clock: Callable[[], GradientClock | None]) -> None:
        self._attach = clock
        self._clock: GradientClock | None = None
        self._step_us: list[float] = []
        self.last: Record | None = None
        self.num_steps = self.num_skipped = 0
        self.observations: list[Observation] = []

    @property
    def step_us(self) -> float:
        """The median of the latest steps; 0 before the second."""
        return median_high(self._step_us) if self._step_us else 0.0

    def profile(self, begin: bool) -> None:
        """Begin or end to note when each gradient is ready."""
        if begin and self._clock is None:
            self._clock = self._attach()
        elif not begin:
            self.detach()

    def detach(self) -> None:
        """Take the clock off the model."""
        if self._clock is not None:
            self._clock.detach()
            self._clock = None

    def take(self, record: Record) -> None:
        """Note an iteration."""
        previous, self.last = self.last, record
        self.num_steps += 1
        self.num_skipped += not record.finite
        if previous is not None:
            self._step_us = [*self._step_us[1 - RECENT_STEPS :], (record.done_ns - previous.done_ns) / 1e3]
            if record.assignment.deferred:
                self.observations.append(self._observe(record, previous.done_ns))
        if self._clock is not None:
            self._clock.begin()

    def _observe(self, record: Record, previous_ns: int) -> Observation:
        clock = self._clock
        ready = {} if clock is None else dict(clock.ready_ns)
        for bucket, at in zip(record.buckets, record.ready_ns, strict=True):
            for slot in bucket.slots:
                ready.setdefault(slot.tensor, at)
        begin = min(ready.values())
        forward = previous_ns if clock is None else max(clock.forward_ns, previous_ns)
        return Observation(
            {name: (at - begin) / 1e3 for name, at in ready.items()},
            tuple((at - begin) / 1e3 for at in record.ready_ns),
            (begin - forward) / 1e3,
            (forward - previous_ns) / 1e3,
        )
