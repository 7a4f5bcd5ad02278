"""What happened on which lane and when: the rows that traces, pictures and tables are made of.

Predicted rows come from a :class:`~espresso.model.timeline.Timeline`, measured ones from flight records.
Both use one clock, microseconds: zero is when the iteration's first gradient is ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from espresso.strategies import Form, FormError, Lane, Stage

if TYPE_CHECKING:
    from espresso.model.timeline import Timeline

BACKWARD_LANE, STEP_LANE, SCRIPT_LANE = "backward", "step", "script"
LANE_ORDER = (STEP_LANE, SCRIPT_LANE, BACKWARD_LANE, *(lane.value for lane in Lane))
"""Lanes from top to bottom; ones that are not named here follow in alphabetical order."""


class Kind(Enum):
    """What a row shows, as its colour and its category."""

    BACKWARD = "backward"
    COMPRESS = "compress"
    DECOMPRESS = "decompress"
    TRANSFORM = "transform"
    AGGREGATE = "aggregate"
    COPY = "host copy"
    EXCHANGE_RAW = "exchange, raw"
    EXCHANGE_COMPRESSED = "exchange, compressed"
    OTHER = "other"


class EventError(FormError):
    """An interval ends before it starts."""


@dataclass(frozen=True, slots=True)
class LaneEvent:
    """One interval on one lane.

    Attributes:
        step: the step as option ids write it (``comp``, ``inter.allgather``), or ``backward``.
        tensors: names of the tensors it serves.
        num_bytes: bytes it sends, reads or writes; 0 where that means nothing.
        option: id of the option it is a step of, if known.
        partition: number of its partition in the plan, or -1.
        iteration: which iteration it was measured in; 0 for predictions.
        latency_us: at its end, while its data are on the way and the lane is free for others.
    """

    lane: str
    step: str
    tensors: tuple[str, ...]
    num_bytes: int
    start_us: float
    end_us: float
    kind: Kind
    option: str = ""
    partition: int = -1
    iteration: int = 0
    rank: int = 0
    host: str = ""
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.end_us >= self.start_us:
            raise EventError(
                f"{self.step} on lane {self.lane} ends before it starts ({self.start_us} to {self.end_us} us)"
            )

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


def kind_of(step: str, compressed: bool | None = None) -> Kind:
    """The kind of a step from its text; ``compressed`` says what an exchange carries.

    >>> kind_of("dec@offload").value
    'decompress'
    """
    word = step.partition("@")[0]
    named = {
        "comp": Kind.COMPRESS,
        "dec": Kind.DECOMPRESS,
        "transform": Kind.TRANSFORM,
        "sum": Kind.AGGREGATE,
    }
    named |= {"backward": Kind.BACKWARD, "copy_to_host": Kind.COPY, "copy_to_device": Kind.COPY}
    if word in named:
        return named[word]
    if "." in word:
        return Kind.EXCHANGE_COMPRESSED if compressed else Kind.EXCHANGE_RAW
    return Kind.OTHER


def predicted_events(timeline: Timeline) -> list[LaneEvent]:
    """A timeline's tasks on every lane they hold, and backward on a lane of its own, bucket by bucket."""
    buckets = timeline.plan.buckets
    starts = (0.0, *timeline.bucket_ready_us)
    events = [
        LaneEvent(
            lane=BACKWARD_LANE,
            step="backward",
            tensors=tuple(slot.tensor for slot in bucket.slots),
            num_bytes=0,
            start_us=start,
            end_us=end,
            kind=Kind.BACKWARD,
        )
        for bucket, start, end in zip(buckets, starts, timeline.bucket_ready_us, strict=False)
        if end > start
    ]
    plan = timeline.plan
    for task in sorted(plan.tasks, key=lambda task: timeline.start_us[task.index]):
        part = plan.partitions[task.partition]
        group = plan.groups[part.group]
        step = str(task.step) if task.stage is Stage.STEP else task.stage.value
        events += [
            LaneEvent(
                lane=lane.value,
                step=step,
                tensors=tuple(run.tensor for run in group.segments(part.start, part.stop)),
                num_bytes=round(timeline.works[task.index].num_bytes),
                start_us=timeline.start_us[task.index],
                end_us=timeline.end_us[task.index],
                kind=kind_of(step, compressed=task.step.form not in (Form.RAW, Form.HALF)),
                option=str(group.choice.option),
                partition=part.index,
                latency_us=timeline.end_us[task.index] - timeline.freed_us[task.index],
            )
            for lane in timeline.lanes(task.index)
        ]
    return events


def last_iteration(events: Sequence[LaneEvent]) -> list[LaneEvent]:
    """The events of the lowest rank's newest iteration: what a picture shows."""
    rank = min((event.rank for event in events), default=0)
    mine = [event for event in events if event.rank == rank]
    newest = max((event.iteration for event in mine), default=0)
    return [event for event in mine if event.iteration == newest]


def sorted_lanes(events: Iterable[LaneEvent]) -> list[str]:
    """The lanes in use, from top to bottom."""
    names = {event.lane for event in events}
    rank = {name: position for position, name in enumerate(LANE_ORDER)}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))


def busy_us(events: Iterable[LaneEvent]) -> dict[str, float]:
    """How long each lane is in use; overlapping intervals count once, and what is only on the way not at all."""
    busy: dict[str, float] = {}
    until: dict[str, float] = {}
    for event in sorted(events, key=lambda e: e.start_us):
        start, end = max(event.start_us, until.get(event.lane, event.start_us)), event.end_us - event.latency_us
        busy[event.lane] = busy.get(event.lane, 0.0) + max(0.0, end - start)
        until[event.lane] = max(end, until.get(event.lane, end))
    return busy
