"""A recorded run as lane events: all ranks, all their steps, on one clock; or one step beside its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from espresso.flight.clocks import Clock, align
from espresso.flight.form import Flight, FlightError, Script, Span, StepRecord, Stretch
from espresso.show.lane_events import BACKWARD_LANE, SCRIPT_LANE, STEP_LANE, Kind, LaneEvent, kind_of
from espresso.strategies import Form, Stage, Strategy


def flight_events(flights: Sequence[Flight]) -> list[LaneEvent]:
    """Every step's script and tasks, in microseconds from the first moment that anybody recorded."""
    clocks = align(flights)
    events = [event for flight in flights for event in _events(flight, clocks[flight.rank])]
    origin = min((event.start_us for event in events), default=0.0)
    return [_moved(event, -origin) for event in events]


def step_events(flights: Sequence[Flight], strategy: Strategy, first_ready_us: float = 0.0) -> list[LaneEvent]:
    """The newest step that ran this strategy and was looked at, of every rank, on all lanes that its tasks hold.

    Args:
        first_ready_us: what the prediction says of its first bucket: zero is when the first gradient is ready.

    Raises:
        FlightError: no rank recorded such a step.
    """
    events: list[LaneEvent] = []
    for flight in flights:
        looked = [step for step in flight.steps if step.spans and _ran(flight.of(step), strategy)]
        if looked:
            events += _of_step(flight, looked[-1], min(looked[-1].ready_us) - first_ready_us)
    if not events:
        raise FlightError("no step of these flight records ran this strategy with its exchanges looked at")
    return events


def _ran(stretch: Stretch, strategy: Strategy) -> bool:
    """Whether steps ran a strategy; whole buckets are averaged whatever it says of partitions."""
    theirs = stretch.strategy
    return theirs == strategy or (
        theirs.only_averages and replace(theirs, partition_bytes=strategy.partition_bytes) == strategy
    )


def _of_step(flight: Flight, step: StepRecord, zero_us: float) -> Iterator[LaneEvent]:
    stretch = flight.of(step)
    start = zero_us
    for bucket, end in zip(stretch.buckets, step.ready_us, strict=True):
        names = tuple(slot.tensor for slot in bucket.slots)
        event = LaneEvent(BACKWARD_LANE, "backward", names, 0, start, max(end, start), Kind.BACKWARD, rank=flight.name)
        yield replace(_moved(event, -zero_us), host=flight.host, iteration=step.number)
        start = event.end_us
    for span in step.spans:
        event = _moved(_of_span(flight, step, span, Clock()), -zero_us)
        for lane in stretch.task(span).lanes:
            yield replace(event, lane=lane.value, iteration=step.number)


def _moved(event: LaneEvent, us: float) -> LaneEvent:
    return replace(event, start_us=event.start_us + us, end_us=event.end_us + us)


def _events(flight: Flight, clock: Clock) -> Iterator[LaneEvent]:
    for step in flight.steps:
        for lane, name, kind, start, end in _of_script(step):
            begin = clock.common(start)
            yield LaneEvent(
                lane, name, (), 0, begin, max(clock.common(end), begin), kind, rank=flight.name, host=flight.host
            )
        for span in step.spans:
            yield _of_span(flight, step, span, clock)


def _of_script(step: StepRecord) -> Iterator[tuple[str, str, Kind, float, float]]:
    script: Script = step.script
    end = script.optimizer_end_us or script.averaged_us or step.done_us
    if script.began_us is not None:
        yield STEP_LANE, f"step {step.number}", Kind.OTHER, script.began_us, end
    ready = max(step.ready_us, default=step.done_us)
    backward = script.backward_us or script.forward_end_us
    gone = script.backward_end_us or ready
    rows = (
        ("input", Kind.OTHER, script.began_us, script.entered_us),
        ("broadcast of buffers", Kind.OTHER, script.entered_us, script.forward_us),
        ("forward", Kind.OTHER, script.forward_us, script.forward_end_us),
        ("backward", Kind.BACKWARD, backward, gone),
        ("waits for averages", Kind.OTHER, gone, script.averaged_us),
        ("optimizer", Kind.OTHER, script.optimizer_us, script.optimizer_end_us),
    )
    for name, kind, start, stop in rows:
        if start is not None and stop is not None and stop > start:
            yield SCRIPT_LANE, name, kind, start, stop


def _of_span(flight: Flight, step: StepRecord, span: Span, clock: Clock) -> LaneEvent:
    stretch = flight.of(step)
    laid, task = stretch.plan, stretch.task(span)
    part = laid.partitions[task.partition]
    group = laid.groups[part.group]
    name = str(task.step) if task.stage is Stage.STEP else task.stage.value
    begin = clock.common(span.start_us)
    return LaneEvent(
        task.lanes[0].value,
        name,
        tuple(run.tensor for run in group.segments(part.start, part.stop)),
        span.num_bytes,
        begin,
        max(clock.common(span.end_us), begin),
        kind_of(name, compressed=task.step.form not in (Form.RAW, Form.HALF)),
        str(group.choice.option),
        part.index,
        rank=flight.name,
        host=flight.host,
    )
