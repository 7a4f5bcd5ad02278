"""What the iterations of a live job tell: totals for the user's logger, and observations while it is profiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high, quantiles
from typing import Any

import torch

from espresso.comm.execute.assignment import Record
from espresso.model.job import Host, Profile

RECENT_STEPS = 20
"""Steps whose median is the step time that is reported."""


class GradientClock:
    """When gradients become ready and forward passes begin, while it is attached to a module.

    Attributes:
        ready_ns: parameter name to the time its gradient was ready, in this iteration.
        forward_ns: when the latest forward pass began, or 0.
    """

    def __init__(self, module: torch.nn.Module, names: Mapping[int, str]) -> None:
        self.ready_ns: dict[str, int] = {}
        self.forward_ns = 0
        self._handles: list[Any] = [module.register_forward_pre_hook(self._forward)]
        for parameter in module.parameters():
            name = names.get(id(parameter))
            if name is not None and parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(self._stamp(name)))

    def begin(self) -> None:
        """Forget the last iteration."""
        self.ready_ns = {}

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __reduce__(self) -> tuple[type[GradientClock], tuple[torch.nn.Module, dict[int, str]]]:
        """A copy of a model is not measured: its clock is attached to nothing."""
        return GradientClock, (torch.nn.Module(), {})

    def _forward(self, *_: Any) -> None:
        self.forward_ns = time.perf_counter_ns()

    def _stamp(self, name: str) -> Callable[[torch.Tensor], None]:
        def stamp(_: torch.Tensor) -> None:
            self.ready_ns[name] = time.perf_counter_ns()

        return stamp


@dataclass(frozen=True)
class Observation:
    """One profiled iteration on one rank, in microseconds.

    Attributes:
        tensor_ready_us: by name, from the first ready gradient.
        bucket_ready_us: when each bucket came to the hook.
        forward_us: forward's beginning (else the last iteration's end) to the first ready gradient.
        optimizer_us: the last iteration's end to forward's beginning.
    """

    tensor_ready_us: Mapping[str, float]
    bucket_ready_us: tuple[float, ...]
    forward_us: float
    optimizer_us: float


ALIKE = 0.9
"""Machines whose computing takes this share of the slowest one's are taken for alike: medians scatter by so much."""


def hosts_of(per_rank: Sequence[Sequence[Observation]], ranks_per_node: int) -> tuple[Host, ...]:
    """Each machine's share of the slowest one's forward and backward; none where all are alike.

    Ranks wait for one another at the exchange, which is in neither.
    """
    each = [max(m.tensor_ready_us.values(), default=0.0) + m.forward_us for m in map(_median, per_rank)]
    nodes = [max(each[first : first + ranks_per_node]) for first in range(0, len(each), ranks_per_node)]
    slowest = max(nodes)
    if slowest <= 0 or min(nodes) >= ALIKE * slowest:
        return ()
    return tuple(Host(f"node {n}", compute=max(us, 0.01 * slowest) / slowest) for n, us in enumerate(nodes))


def profile_of(per_rank: Sequence[Sequence[Observation]]) -> Profile:
    """How many steps :func:`combine` takes medians of, and how far they are apart: on the rank where it is most."""
    backward = [
        [max(o.tensor_ready_us.values(), default=0.0) for o in _in_last_buckets(observations)]
        for observations in per_rank
    ]
    return Profile(min(map(len, backward)), max(map(_spread, backward)))


def _spread(values: Sequence[float]) -> float:
    """Of normal numbers the standard deviation over the mean. By quartiles: one stall among many is no spread, steps of
    two kinds are.
    """
    first, middle, third = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (0.0, 0.0, 0.0)
    return (third - first) / 1.349 / middle if middle > 0 else 0.0


def combine(per_rank: Sequence[Sequence[Observation]]) -> Observation:
    """The median over iterations on each rank, then the maximum over ranks; of those with the last one's buckets."""
    medians = [_median(observations) for observations in per_rank]
    names = medians[0].tensor_ready_us
    return Observation(
        {name: max(m.tensor_ready_us.get(name, 0.0) for m in medians) for name in names},
        tuple(map(max, zip(*(m.bucket_ready_us for m in medians), strict=True))),
        max(m.forward_us for m in medians),
        max(m.optimizer_us for m in medians),
    )


def _in_last_buckets(observations: Sequence[Observation]) -> list[Observation]:
    return [o for o in observations if len(o.bucket_ready_us) == len(observations[-1].bucket_ready_us)]


def _median(observations: Sequence[Observation]) -> Observation:
    observations = _in_last_buckets(observations)
    names = observations[-1].tensor_ready_us
    return Observation(
        {n: median(o.tensor_ready_us[n] for o in observations if n in o.tensor_ready_us) for n in names},
        tuple(median(times) for times in zip(*(o.bucket_ready_us for o in observations), strict=True)),
        median(o.forward_us for o in observations),
        median(o.optimizer_us for o in observations),
    )


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
        self.num_skipped = 0
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
        self.num_skipped += not record.finite
        if previous is not None:
            self._step_us = [*self._step_us[1 - RECENT_STEPS :], (record.done_ns - previous.done_ns) / 1e3]
            if record.assignment.deferred:
                self.observations.append(self._observe(record, previous.done_ns))
        if self._clock is not None:
            self._clock.begin()

    def _observe(self, record: Record, previous_ns: int) -> Observation:
        clock, held = self._clock, {slot.tensor for bucket in record.buckets for slot in bucket.slots}
        # FSDP's passes that exchange nothing stamp gradients too, of modules that the last one may not use.
        ready = {} if clock is None else {name: at for name, at in clock.ready_ns.items() if name in held}
        for bucket, at in zip(record.buckets, record.ready_ns, strict=True):
            for slot in bucket.slots:
                ready.setdefault(slot.tensor, at)
        begin = min(ready.values(), default=record.ready_ns[0])
        forward = previous_ns if clock is None else max(clock.forward_ns, previous_ns)
        return Observation(
            {name: (at - begin) / 1e3 for name, at in ready.items()},
            tuple((at - begin) / 1e3 for at in record.ready_ns),
            (begin - forward) / 1e3,
            (forward - previous_ns) / 1e3,
        )
