"""The recorded steps of all ranks, side by side, as a replay takes them.

A *turn* goes from one step's averages to the next step's. All ranks have the averages at the same moment, so within a
turn each rank's own durations say when it was ready, and no clocks are needed::

    averages | optimizer | input | prepare | forward | loss | backward ........ | averages
                                   (DDP's broadcast)           b0   b1   b2
                                                                [ exchange    ]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median

from espresso.flight.clocks import Clock, align
from espresso.flight.form import Flight, FlightError, Span, StepRecord, Stretch, check_run

WARM_STEPS = 2
"""Steps of a stretch that are left out: caches, connections and buffers are cold in them."""

MOST_TURNS = 240
"""The newest are looked at."""


@dataclass(frozen=True)
class Part:
    """What one rank did in a turn, in microseconds.

    Attributes:
        optimizer: averages to the optimizer's end, clipping included.
        input: between passes: waiting for input, mostly.
        earlier: passes under ``no_sync``.
        prepare: DDP's own work before the module's forward pass, its broadcast of buffers for one.
        forward, loss: the module's forward pass; from there to backward.
        ready: of every bucket, from backward's beginning.
        backward: to this rank's last gradient.
        exposed: from there to the averages.
        stepped: whether the optimizer ran in this turn.
    """

    optimizer: float
    input: float
    earlier: float
    prepare: float
    forward: float
    loss: float
    ready: tuple[float, ...]
    backward: float
    exposed: float
    stepped: bool

    @property
    def lead(self) -> float:
        """Up to the forward pass."""
        return self.optimizer + self.input + self.earlier

    @property
    def total(self) -> float:
        return self.lead + self.prepare + self.forward + self.loss + self.backward + self.exposed

    @property
    def own(self) -> float:
        """What it did by itself: nobody waits for anybody in it."""
        return self.lead + self.forward + self.loss + self.backward

    def with_backward(self, us: float) -> Part:
        """The same with a backward pass of another length."""
        pace = us / self.backward if self.backward > 0 else 1.0
        return replace(self, backward=us, ready=tuple(at * pace for at in self.ready))


@dataclass(frozen=True)
class Turn:
    """One step of all ranks; ``broadcast`` is what DDP's broadcast took once everybody was there."""

    number: int
    parts: tuple[Part, ...]
    broadcast: float

    @property
    def measured(self) -> float:
        """Its length: the median over ranks, who agree but for microseconds."""
        return median(part.total for part in self.parts)

    @property
    def last(self) -> int:
        """The place of the rank that everybody waited for."""
        return max(range(len(self.parts)), key=lambda place: self.parts[place].own)


class Run:
    """The records of one run, on one clock, cut into turns.

    Args:
        flights: of at least one rank.

    Attributes:
        clocks: by rank.
        stretch: what the newest steps ran of which there are turns: those in which every rank ran it.
        turns: oldest first.

    Raises:
        FlightError: records of different runs, or too few steps that all ranks recorded.
    """

    def __init__(self, flights: Sequence[Flight]) -> None:
        check_run(flights)
        self.flights = tuple(sorted(flights, key=lambda flight: flight.rank))
        if not self.flights or any(not flight.steps for flight in self.flights):
            raise FlightError("a flight record holds no steps: train some before it is written")
        self.clocks: Mapping[int, Clock] = align(self.flights)
        newest = min(flight.steps[-1].number for flight in self.flights)
        first = self.flights[0]
        self._steps = [{step.number: step for step in flight.steps} for flight in self.flights]
        if any(newest not in steps for steps in self._steps):
            raise FlightError("the ranks recorded different steps; were these files written at the same time?")
        # By their last steps: what runs now may have run before others, in a race.
        for place in dict.fromkeys(step.stretch for step in reversed(first.steps) if step.number <= newest):
            self.stretch: Stretch = first.stretches[place]
            self.turns = self._turns_of(place, newest)
            if self.turns:
                break
        else:
            raise FlightError("too few steps were recorded by all ranks to say anything; train a dozen or more")
        self._numbers = [turn.number for turn in self.turns]

    def _turns_of(self, wanted: int, newest: int) -> tuple[Turn, ...]:
        """The turns of our stretch, which has this place in the first flight."""
        numbers = [n for n, step in self._steps[0].items() if step.stretch == wanted and n <= newest]
        numbers = [n for n in numbers if all(n in steps and steps[n].finite for steps in self._steps)]
        alike = [{i for i, each in enumerate(flight.stretches) if each == self.stretch} for flight in self.flights]
        ranks = list(zip(self._steps, alike, strict=True))
        numbers = [n for n in numbers if all(steps[n].stretch in places for steps, places in ranks)]
        numbers = numbers[min(WARM_STEPS, len(numbers) // 4) :]
        return tuple(self._turn(a, b) for a, b in pairwise(numbers[-MOST_TURNS:]) if b == a + 1)

    @property
    def num_ranks(self) -> int:
        return self.flights[0].num_ranks

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Of every recorded rank, what people call its host: nodes of one name are numbered, where they are known."""
        per_node = self.flights[0].cluster.ranks_per_node
        nodes = [flight.rank // per_node for flight in self.flights]
        named = {(flight.host, node) for flight, node in zip(self.flights, nodes, strict=True)}
        is_known = self.flights[0].facts.get("source") != "kineto"
        twice = is_known and len({host for host, _ in named}) < len(named)
        return tuple(
            f"{flight.host}#{node}" if twice else flight.host for flight, node in zip(self.flights, nodes, strict=True)
        )

    def spans(self) -> Iterator[list[tuple[Span, ...]]]:
        """Of every turn in which all ranks looked at all tasks, every rank's spans, on the common clock."""
        for number in self._numbers:
            steps = [steps[number] for steps in self._steps]
            if all(len(step.spans) >= len(step.ready_us) for step in steps) and steps[0].spans:
                yield [
                    tuple(_common(span, self.clocks[flight.rank]) for span in step.spans)
                    for flight, step in zip(self.flights, steps, strict=True)
                ]

    def _turn(self, before: int, number: int) -> Turn:
        parts, entered, forward = [], [], []
        for flight, steps in zip(self.flights, self._steps, strict=True):
            script, clock = steps[number].script, self.clocks[flight.rank]
            entered.append(clock.common(script.entered_us or 0.0))
            forward.append(clock.common(script.forward_us or script.entered_us or 0.0))
            parts.append(part_of(steps[before], steps[number], self.stretch.host_copies))
        # A device's host only launches broadcasts before the forward pass.
        broadcast = 0.0 if self.stretch.host_copies else max(max(forward) - max(entered), 0.0)
        return Turn(number, tuple(parts), broadcast)


def part_of(before: StepRecord, step: StepRecord, on_device: bool = False) -> Part:
    """What a rank did from one step's averages to the next's.

    Where nobody saw the script, and on a GPU, whose host runs ahead, all up to the last gradient counts as backward.
    """
    script, earlier = step.script, before.script
    ended = earlier.optimizer_end_us
    if on_device or script.entered_us is None or script.forward_us is None or script.forward_end_us is None:
        ready = tuple(max(at - before.done_us, 0.0) for at in step.ready_us)
        last = max(ready)
        exposed = max(step.done_us - before.done_us - last, 0.0)
        return Part(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ready, last, exposed, stepped=ended is not None)
    averaged_before = earlier.averaged_us or before.done_us
    averaged = script.averaged_us or step.done_us
    optimizer = 0.0 if ended is None else max(ended - averaged_before, 0.0)
    begin = script.forward_end_us if script.backward_us is None else script.backward_us
    last = max(step.ready_us)
    end = last if script.backward_end_us is None else max(script.backward_end_us, last)
    lead = script.entered_us - averaged_before - optimizer
    return Part(
        optimizer=optimizer,
        input=max(lead - script.earlier_us, 0.0),
        earlier=script.earlier_us,
        prepare=max(script.forward_us - script.entered_us, 0.0),
        forward=max(script.forward_end_us - script.forward_us, 0.0),
        loss=max(begin - script.forward_end_us, 0.0),
        ready=tuple(max(at - begin, 0.0) for at in step.ready_us),
        backward=max(end - begin, 0.0),
        exposed=max(averaged - end, 0.0),
        stepped=ended is not None,
    )


def _common(span: Span, clock: Clock) -> Span:
    return span._replace(
        issue_us=clock.common(span.issue_us), start_us=clock.common(span.start_us), end_us=clock.common(span.end_us)
    )
