"""Recorded steps through the timeline's scheduler: what a step takes, and what it would take if something changed.

A turn's buckets are ready when the last rank has them; tasks then take what they were measured to take, on the lanes of
the plan and in the order in which they ran. A finding's gain is the difference of two replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from espresso.diagnosis.turns import Part, Run, Turn
from espresso.flight.form import Span
from espresso.strategies import DTYPES, LINK_LANES, Bucket, Lane, Plan, Routine, StepKind
from espresso.strategies.list_scheduling import Schedule, Width, schedule_tasks

MOST_REPLAYED = 32
"""Turns, spread over all."""

FEW_CORES = 2.0
"""A rank with fewer carries out exchanges on the core of its backward pass."""

LEAST_KEPT = 0.02
"""Of an exchange, however fast the card."""

LEAST_LATENCY_US = 1000.0
"""A shorter latency is not told from how ranks wait for one another."""

SETTLED = 3
"""Rounds in which backward passes and the exchanges beside them are fitted to each other."""

LEAST_OWN = 0.3
"""Of a recorded backward pass, however much it shared its core."""

EVEN_BYTES = 50_000
"""An exchange of nothing takes as much processor time as so many bytes."""

IN_FLIGHT = (2, 4, 8)
"""Exchanges of a link under way at once, where latency makes it matter: which of them is told by the steps."""

CLOSE = 0.01
"""Errors of a replay that are no farther apart are alike."""


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
        sent: bytes of every task on the card that sends most of them.
        core_us: processor time of all exchanges of a step, where they have no core beside backward's; else 0.
        hook_us: processor time of a step's backward pass in the hook.
    """

    plan: Plan
    task_us: tuple[float, ...]
    latency_us: tuple[float, ...]
    coding_us: dict[int, tuple[float, ...]]
    in_flight: int = IN_FLIGHT[0]
    sent: tuple[int, ...] = ()
    core_us: float = 0.0
    hook_us: float = 0.0

    @property
    def exchanges(self) -> list[int]:
        return [task.index for task in self.plan.tasks if task.step.kind is StepKind.COMMUNICATE]

    @property
    def exchange_us(self) -> float:
        """All exchanges, one after the other."""
        return sum(self.task_us[index] + self.latency_us[index] for index in self.exchanges)

    def at_rate(self, now: float, then: float) -> Costs:
        """With cards that send ``then`` bytes a microsecond instead of ``now``.

        Exchanges under way together share a card: which of them held it is not known of each, only of all.
        """
        held_us = sum(us for us, sent in zip(self.task_us, self.sent, strict=True) if sent)
        kept = max(1 - sum(self.sent) * (1 / now - 1 / then) / held_us, LEAST_KEPT) if held_us else 1.0
        task_us = tuple(us * kept if sent else us for us, sent in zip(self.task_us, self.sent, strict=True))
        return replace(self, task_us=task_us)

    def at_pace(self, pace: float, rate: float | None) -> Costs:
        """With what is not the wire's part of an exchange ``pace`` times as fast; as it is where no rate is known."""
        if rate is None:
            return self
        beside = [max(us - sent / rate, 0.0) if sent else 0.0 for us, sent in zip(self.task_us, self.sent, strict=True)]
        task_us = tuple(us - own * (1 - 1 / pace) for us, own in zip(self.task_us, beside, strict=True))
        return replace(self, task_us=task_us)

    def faster(self, factor: float) -> Costs:
        """With exchanges that take so much less of their time."""
        exchanges = set(self.exchanges)
        return replace(self, task_us=tuple(us * factor if i in exchanges else us for i, us in enumerate(self.task_us)))

    def idle(self) -> Costs:
        """Without any of it."""
        nothing = (0.0,) * len(self.task_us)
        return replace(self, task_us=nothing, latency_us=nothing, core_us=0.0, hook_us=0.0)

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
    hook_us = median(median(step.hook_us for step in flight.steps) for flight in run.flights)
    return replace(_likeliest(run), hook_us=hook_us)


def _likeliest(run: Run) -> Costs:
    latencies = _latencies(run)
    if not any(latencies):
        return _measured(run, latencies, IN_FLIGHT[0])

    def error(costs: Costs) -> float:
        return abs(median(replay(turn, costs) / turn.measured - 1 for turn in sample(run.turns)))

    each = [(error(costs), costs) for costs in (_measured(run, latencies, width) for width in IN_FLIGHT)]
    close = min(off for off, _ in each) + CLOSE
    # Of those that explain the steps, the one that leaves least to the exchanges themselves.
    return min((costs for off, costs in each if off <= close), key=lambda costs: costs.exchange_us)


def _measured(run: Run, latencies: Sequence[float], in_flight: int) -> Costs:
    laid = run.stretch.plan
    taken: dict[int, list[float]] = {}
    coding: dict[int, list[list[float]]] = {}
    starts: dict[int, list[float]] = {}
    sent = [0] * len(laid.tasks)
    for ranks in run.spans():
        begin = min(span.start_us for spans in ranks for span in spans)
        link = _Link(latencies, in_flight)
        for task, spans in _in_order(ranks):
            starts.setdefault(task, []).append(max(span.start_us for span in spans) - begin)
            if laid.tasks[task].step.kind is StepKind.COMMUNICATE:
                sent[task] = max(span.num_bytes for span in spans)
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
    core_us = _core_us(run, sum(max(each) for each in coding_us.values()))
    return Costs(laid.with_order(order), tuple(task_us), tuple(latencies), coding_us, in_flight, tuple(sent), core_us)


def _core_us(run: Run, coding_us: float) -> float:
    """Processor time that a step's exchanges take from backward: nothing where other cores are free for them."""
    if min(flight.fact("cores", FEW_CORES) for flight in run.flights) >= FEW_CORES or run.stretch.host_copies:
        return 0.0
    beside = [[s.script.beside_us for s in f.steps if s.script.beside_us is not None] for f in run.flights]
    return max(median(median(rank) for rank in beside if rank) - coding_us, 0.0) if any(beside) else 0.0


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
    """What every task spends on the way: its rounds, by the round trip between the ranks that are farthest apart.

    A round is a whole trip where a library's receiver first says that it is ready (Gloo's do); no task spends more than
    it ever lasted.
    """
    rows = [[2 * tick.error_us for tick in flight.ticks] for flight in run.flights]
    rows += [[look.rtt_us for look in flight.traffic if look.rtt_us > 0] for flight in run.flights]
    # (The least that a pair saw is the way alone, without queues.)
    trip = max((min(row) for row in rows if row), default=0.0)
    if trip < LEAST_LATENCY_US:
        return (0.0,) * len(run.stretch.plan.tasks)
    rounds = {Routine.ALLREDUCE: 2 * (run.num_ranks - 1), None: 0}
    least: dict[int, float] = {}
    for ranks in run.spans():
        for task, spans in _in_order(ranks):
            lasted = median(span.end_us for span in spans) - max(span.start_us for span in spans)
            least[task] = min(least.get(task, lasted), max(lasted, 0.0))
    tasks = run.stretch.plan.tasks
    most = (trip * rounds.get(task.step.routine, 1) for task in tasks)
    return tuple(min(us, least.get(task.index, us)) for us, task in zip(most, tasks, strict=True))


def _from_outside(run: Run) -> Costs:
    """Of a job whose exchanges nobody saw: what they must have taken for the averages to come when they came."""
    laid = run.stretch.plan
    sizes = [bucket_bytes(bucket) for bucket in laid.buckets]
    sent = tuple(round(size * passes_of(run.num_ranks)) for size in sizes)
    core_us = _core_us(run, 0.0)
    wanted = median(min(part.exposed for part in turn.parts) for turn in run.turns)

    def costs(us_per_byte: float) -> Costs:
        line = Line(OUTSIDE_ALPHA_US, us_per_byte)
        task_us = tuple(line.us(size) for size in sizes)
        return Costs(laid, task_us, (0.0,) * len(sizes), {}, sent=sent, core_us=core_us)

    low, high = 0.0, 10.0  # a byte in 10 us: below a modem
    for _ in range(40):
        middle = (low + high) / 2
        found = median(exposed(turn, costs(middle)) for turn in sample(run.turns))
        low, high = (middle, high) if found < wanted else (low, middle)
    return costs(low)


def passes_of(num_ranks: int) -> float:
    """How many times a bucket's bytes an all-reduce sends from every rank."""
    return 2 * (num_ranks - 1) / num_ranks


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


def _forward(turn: Turn, broadcasts: bool) -> tuple[list[float], list[float], float]:
    """When all ranks have each bucket; when each began backward; and the last gradient of all."""
    synced = broadcasts and turn.broadcast > 0.0
    barrier = max(part.lead for part in turn.parts) + turn.broadcast if synced else 0.0
    starts = [max(part.lead, barrier) + part.forward + part.loss for part in turn.parts]
    ready: list[float] = []
    for bucket in range(len(turn.parts[0].ready)):
        at = max(start + part.ready[bucket] for start, part in zip(starts, turn.parts, strict=True))
        ready.append(max([at, *ready[-1:]]))
    end = max(start + part.backward for start, part in zip(starts, turn.parts, strict=True))
    return ready, starts, end


def _ends(costs: Costs, ready: Sequence[float]) -> float:
    return max(_scheduled(costs, ready).end_us, default=0.0)


def _scheduled(costs: Costs, ready: Sequence[float]) -> Schedule:
    widths = dict.fromkeys(LINK_LANES, Width(1, costs.in_flight)) if any(costs.latency_us) else {}
    return schedule_tasks(
        costs.plan, ready, costs.task_us, latency_us=costs.latency_us, widths=widths, order=costs.plan.order
    )


def shared(turn: Turn, costs: Costs, then: Turn, costs_then: Costs) -> Turn:
    """``then`` with backward passes that hand over other buckets than those of ``turn``, as recorded, and share their
    core with other exchanges.

    An exchange takes processor time as long as it lasts; what of that falls into a backward pass makes it longer.
    """
    if not costs.core_us and costs_then.hook_us == costs.hook_us:
        return then
    before, changed = _taken(turn, costs), then
    for _ in range(SETTLED):
        after = _taken(changed, costs_then)
        changed = replace(
            then,
            parts=tuple(
                part.with_backward(max(part.backward + more - less, LEAST_OWN * part.backward))
                for part, more, less in zip(then.parts, after, before, strict=True)
            ),
        )
    return changed


def _taken(turn: Turn, costs: Costs) -> list[float]:
    """Processor time that the hook and exchanges took from each rank's backward pass."""
    if not costs.core_us:
        return [costs.hook_us] * len(turn.parts)
    ready, starts, _ = _forward(turn, True)
    run = _scheduled(costs, ready)
    weights = {i: EVEN_BYTES + costs.sent[i] for i in costs.exchanges}
    a_weight = costs.core_us / sum(weights.values())
    taken = []
    for start, part in zip(starts, turn.parts, strict=True):
        own = 0.0
        for i, weight in weights.items():
            lasts, hidden = run.end_us[i] - run.start_us[i], min(run.end_us[i], start + part.backward) - run.start_us[i]
            own += weight * (min(max(hidden, 0.0) / lasts, 1.0) if lasts > 0 else 0.0)
        taken.append(costs.hook_us + own * a_weight)
    return taken


def with_part(turn: Turn, place: int, part: Part) -> Turn:
    """A turn in which one rank did something else."""
    return replace(turn, parts=(*turn.parts[:place], part, *turn.parts[place + 1 :]))
