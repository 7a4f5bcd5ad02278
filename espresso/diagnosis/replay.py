"""Recorded steps through the timeline's scheduler: what a step takes, and what it would take if something changed.

A turn's buckets are ready when the last rank has them; tasks then take what they were measured to take, on the lanes of
the plan and in the order in which they ran. A finding's gain is the difference of two replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

from espresso.diagnosis.turns import Part, Run, Turn
from espresso.flight.form import Span
from espresso.strategies import DTYPES, Bucket, Lane, Plan, Routine, Slot, StepKind, Strategy, plan
from espresso.strategies.list_scheduling import Width, schedule_tasks

MOST_REPLAYED = 32
"""Turns, spread over all."""

LEAST_LATENCY_US = 1000.0
"""A shorter latency is not told from how ranks wait for one another."""

IN_FLIGHT = (2, 4, 8)
"""Exchanges of a link under way at once: as many as explain the steps best, where latency makes it matter."""

LINKS = (Lane.INTRA, Lane.INTER_OUT, Lane.INTER_IN, Lane.SERVER_IN, Lane.SERVER_OUT)


@dataclass(frozen=True)
class Line:
    """What an exchange takes: ``alpha_us`` and ``us_per_byte``, of the bytes of a bucket."""

    alpha_us: float
    us_per_byte: float

    def us(self, num_bytes: float) -> float:
        return self.alpha_us + self.us_per_byte * num_bytes


@dataclass(frozen=True)
class Costs:
    """What the tasks of a plan take, as measured.

    Attributes:
        plan: in the order in which its tasks ran.
        task_us: of every task, of its lanes.
        latency_us: of every task, beyond that.
        coding_us: of every task that is no exchange, every rank's.
        in_flight: exchanges of a link under way at once.
    """

    plan: Plan
    task_us: tuple[float, ...]
    latency_us: tuple[float, ...]
    coding_us: dict[int, tuple[float, ...]]
    in_flight: int = IN_FLIGHT[0]

    @property
    def exchanges(self) -> list[int]:
        return [task.index for task in self.plan.tasks if task.step.kind is StepKind.COMMUNICATE]

    @property
    def exchange_us(self) -> float:
        """All exchanges, one after the other."""
        return sum(self.task_us[index] + self.latency_us[index] for index in self.exchanges)

    def scaled(self, factor: float) -> Costs:
        """With exchanges that take so many times as long."""
        exchanges = set(self.exchanges)
        return replace(self, task_us=tuple(us * factor if i in exchanges else us for i, us in enumerate(self.task_us)))

    def without_latency(self) -> Costs:
        return replace(self, latency_us=(0.0,) * len(self.latency_us))

    def with_coding(self, pick: Callable[[tuple[float, ...]], float]) -> Costs:
        """With compression that takes what ``pick`` makes of all ranks' times."""
        task_us = list(self.task_us)
        for index, each in self.coding_us.items():
            task_us[index] = pick(each)
        return replace(self, task_us=tuple(task_us))


def costs_of(run: Run) -> Costs:
    """What the tasks took: of an exchange what it held its link, first come, first served, once all ranks had begun."""
    latencies = _latencies(run)
    if not any(latencies):
        return _measured(run, latencies, IN_FLIGHT[0])

    def error(costs: Costs) -> float:
        return abs(median(replay(turn, costs) - turn.measured for turn in sample(run.turns)))

    return min((_measured(run, latencies, width) for width in IN_FLIGHT), key=error)


def _measured(run: Run, latencies: Sequence[float], in_flight: int) -> Costs:
    laid = run.stretch.plan
    taken: dict[int, list[float]] = {}
    coding: dict[int, list[list[float]]] = {}
    starts: dict[int, list[float]] = {}
    for ranks in run.spans():
        begin = min(span.start_us for spans in ranks for span in spans)
        link = _Link(latencies, in_flight)
        for task, spans in _in_order(ranks):
            starts.setdefault(task, []).append(max(span.start_us for span in spans) - begin)
            if laid.tasks[task].step.kind is StepKind.COMMUNICATE:
                taken.setdefault(task, []).append(link.held_us(task, laid.tasks[task].lanes, spans))
            elif len(spans) == len(ranks):
                for row, span in zip(coding.setdefault(task, [[] for _ in spans]), spans, strict=True):
                    row.append(span.duration_us)
            else:  # only some ranks do it: roots
                taken.setdefault(task, []).append(max(span.duration_us for span in spans))
    if not taken and not coding:
        return _from_outside(run)
    coding_us = {task: tuple(map(_typical, rows)) for task, rows in coding.items()}
    task_us = [
        max(coding_us[task.index]) if task.index in coding_us else _typical(taken.get(task.index, [0.0]))
        for task in laid.tasks
    ]
    order = _topological(laid, {task: median(values) for task, values in starts.items()})
    return Costs(laid.with_order(order), tuple(task_us), tuple(latencies), coding_us, in_flight)


def _in_order(ranks: Sequence[Sequence[Span]]) -> list[tuple[int, list[Span]]]:
    """Every task with the spans of the ranks that take part in it, as the last of them began."""
    by_task: dict[int, list[Span]] = {}
    for spans in ranks:
        for span in spans:
            by_task.setdefault(span.task, []).append(span)
    return sorted(by_task.items(), key=lambda row: max(span.start_us for span in row[1]))


class _Link:
    """First come, first served: what an exchange held its lanes, from when it had them to when its data were there."""

    def __init__(self, latencies: Sequence[float], in_flight: int) -> None:
        self._latencies, self._in_flight = latencies, in_flight
        self._ends: dict[Lane, list[float]] = {lane: [] for lane in Lane}

    def held_us(self, task: int, lanes: Sequence[Lane], spans: Sequence[Span]) -> float:
        latency = self._latencies[task]
        start, end = max(span.start_us for span in spans), median(span.end_us for span in spans)
        before = [ends for ends in (self._ends[lane] for lane in lanes) if ends]
        begins = max([start + latency, *(ends[-1] for ends in before)])
        full = [ends[-self._in_flight] + latency for ends in before if len(ends) >= self._in_flight]
        for lane in lanes:
            self._ends[lane].append(max([end, *self._ends[lane][-1:]]))
        return max(end - max([begins, *full]), 0.0)


def _typical(values: Sequence[float]) -> float:
    """The mean of all but a tenth at either end: medians of many tasks would not add up to the median of a step."""
    cut = len(values) // 10
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def _topological(laid: Plan, place: dict[int, float]) -> list[int]:
    """The order in which tasks ran; where noise says otherwise, no task before the one it follows."""
    at: dict[int, float] = {}
    for task in laid.tasks:
        mine = place.get(task.index, 0.0)
        at[task.index] = mine if task.after is None else max(mine, at[task.after])
    return sorted(at, key=lambda task: (at[task], task))


def _latencies(run: Run) -> tuple[float, ...]:
    """What every task spends on the way: its rounds, by the round trip between the ranks that are farthest apart."""
    rows = [[2 * tick.error_us for tick in flight.ticks] for flight in run.flights]
    rows += [[look.rtt_us for look in flight.traffic if look.rtt_us > 0] for flight in run.flights]
    # (The least that a pair saw is the way alone, without queues.)
    trip = max((min(row) for row in rows if row), default=0.0)
    if trip < LEAST_LATENCY_US:
        return (0.0,) * len(run.stretch.plan.tasks)
    rounds = {Routine.ALLREDUCE: 2 * (run.num_ranks - 1), None: 0}
    return tuple(trip / 2 * rounds.get(task.step.routine, 1) for task in run.stretch.plan.tasks)


def _from_outside(run: Run) -> Costs:
    """Of a job whose exchanges nobody saw: what they must have taken for the averages to come when they came."""
    laid = run.stretch.plan
    sizes = [bucket_bytes(bucket) for bucket in laid.buckets]
    wanted = median(min(part.exposed for part in turn.parts) for turn in run.turns)

    def costs(us_per_byte: float) -> Costs:
        line = Line(OUTSIDE_ALPHA_US, us_per_byte)
        return Costs(laid, tuple(line.us(size) for size in sizes), (0.0,) * len(sizes), {})

    low, high = 0.0, 10.0  # a byte in 10 us: below a modem
    for _ in range(40):
        middle = (low + high) / 2
        found = median(exposed(turn, costs(middle)) for turn in sample(run.turns))
        low, high = (middle, high) if found < wanted else (low, middle)
    return costs(low)


OUTSIDE_ALPHA_US = 100.0
"""Overhead of an exchange that nobody saw."""


def sample(turns: Sequence[Turn]) -> list[Turn]:
    """At most :data:`MOST_REPLAYED`, spread over all."""
    stride = max(len(turns) / MOST_REPLAYED, 1.0)
    return [turns[int(place * stride)] for place in range(min(len(turns), MOST_REPLAYED))]


def bucket_bytes(bucket: Bucket) -> int:
    return bucket.numel * DTYPES[bucket.dtype]


def replay(turn: Turn, costs: Costs, *, broadcasts: bool = True) -> float:
    """Microseconds from averages to averages."""
    ready, _, end = _forward(turn, broadcasts)
    return max(end, _ends(costs, ready))


def exposed(turn: Turn, costs: Costs) -> float:
    """What of it is after the last gradient."""
    ready, _, end = _forward(turn, True)
    return max(_ends(costs, ready) - end, 0.0)


def _forward(turn: Turn, broadcasts: bool) -> tuple[list[float], float, float]:
    """When all ranks have each bucket; the first forward pass; and the last gradient of all."""
    synced = broadcasts and turn.broadcast > 0.0
    barrier = max(part.lead for part in turn.parts) + turn.broadcast if synced else 0.0
    starts = [max(part.lead, barrier) + part.forward + part.loss for part in turn.parts]
    ready: list[float] = []
    for bucket in range(len(turn.parts[0].ready)):
        at = max(start + part.ready[bucket] for start, part in zip(starts, turn.parts, strict=True))
        ready.append(max([at, *ready[-1:]]))
    end = max(start + part.backward for start, part in zip(starts, turn.parts, strict=True))
    return ready, min(starts), end


def _ends(costs: Costs, ready: Sequence[float]) -> float:
    widths = dict.fromkeys(LINKS, Width(1, costs.in_flight)) if any(costs.latency_us) else {}
    run = schedule_tasks(
        costs.plan, ready, costs.task_us, latency_us=costs.latency_us, widths=widths, order=costs.plan.order
    )
    return max(run.end_us, default=0.0)


def with_part(turn: Turn, place: int, part: Part) -> Turn:
    """A turn in which one rank did something else."""
    return replace(turn, parts=(*turn.parts[:place], part, *turn.parts[place + 1 :]))


def fit(costs: Costs, us_per_byte: float | None = None) -> Line:
    """A line through what plain exchanges took, over the bytes of their buckets.

    Args:
        us_per_byte: its slope, where all buckets are of one size and tell none.
    """
    rows = []
    for task in costs.plan.tasks:
        if task.step.kind is StepKind.COMMUNICATE and costs.task_us[task.index] > 0:
            part = costs.plan.partitions[task.partition]
            size = part.numel * DTYPES[costs.plan.groups[part.group].dtype]
            rows.append((float(size), costs.task_us[task.index]))
    if not rows:
        return Line(0.0, 0.0)
    mean_x, mean_y = sum(x for x, _ in rows) / len(rows), sum(y for _, y in rows) / len(rows)
    spread = sum((x - mean_x) ** 2 for x, _ in rows)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in rows) / spread if spread > (0.05 * mean_x) ** 2 else 0.0
    floor = min(y for _, y in rows)
    if slope <= 0.0 and us_per_byte is not None:
        slope = min(us_per_byte, 0.9 * mean_y / mean_x)
    if slope <= 0.0 or mean_y - slope * mean_x < 0.0:
        alpha = min(OUTSIDE_ALPHA_US, 0.5 * floor)
        return Line(alpha, (mean_y - alpha) / mean_x)
    return Line(min(mean_y - slope * mean_x, floor), slope)


def rebucketed(turn: Turn, before: Sequence[Bucket], cap_bytes: float) -> tuple[tuple[Bucket, ...], Turn]:
    """The buckets that another cap gives, and the turn with them.

    Within a bucket gradients come evenly by their bytes, the tensors in the order in which DDP put them there.
    """
    slots = [(slot, bucket.dtype) for bucket in before for slot in bucket.slots]
    filled: list[list[int]] = [[]]
    for index, (_slot, dtype) in enumerate(slots):
        held = filled[-1]
        if held and (slots[held[0]][1] != dtype or _bytes_of(slots, held) >= cap_bytes):
            filled.append(held := [])
        held.append(index)
    buckets = tuple(_bucket(place, [slots[i][0] for i in held], slots[held[0]][1]) for place, held in enumerate(filled))
    parts = []
    for part in turn.parts:
        arrivals = _arrivals(part, before)
        parts.append(replace(part, ready=tuple(arrivals[held[-1]] for held in filled)))
    return buckets, replace(turn, parts=tuple(parts))


def _bytes_of(slots: Sequence[tuple[Slot, str]], held: Sequence[int]) -> int:
    return sum(slots[index][0].numel * DTYPES[slots[index][1]] for index in held)


def _bucket(index: int, slots: Sequence[Slot], dtype: str) -> Bucket:
    ends = list(accumulate(slot.numel for slot in slots))
    return Bucket(
        index, tuple(Slot(s.tensor, end - s.numel, s.numel) for s, end in zip(slots, ends, strict=True)), dtype
    )


def _arrivals(part: Part, buckets: Sequence[Bucket]) -> list[float]:
    """When each tensor's gradient was there."""
    arrivals, last = [], 0.0
    for bucket, at in zip(buckets, part.ready, strict=True):
        done = accumulate(slot.numel for slot in bucket.slots)
        arrivals += [last + (at - last) * numel / max(bucket.numel, 1) for numel in done]
        last = at
    return arrivals


def plain_costs(strategy: Strategy, buckets: Sequence[Bucket], line: Line, latency_us: float) -> Costs:
    """What plain exchanges of these buckets take."""
    laid = plan(replace(strategy, partition_bytes=0), buckets)
    return Costs(laid, tuple(line.us(bucket_bytes(b)) for b in buckets), (latency_us,) * len(buckets), {})
