"""What happened in a rank's last steps, in one form.

::

    Flight      a rank: its host, its clock, its stretches and its steps
    Stretch     steps with the same strategy and buckets; their plan says what a task's number means
    Step        an iteration: the script's moments, when buckets were ready, a span for every task that was looked at
    Script      forward, backward, optimizer, as the training script ran them

Times are microseconds of the rank's own ``perf_counter``; :mod:`espresso.flight.clocks` puts ranks on one clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from espresso.strategies import Bucket, Cluster, FormError, Plan, Slot, Strategy, Task, plan
from espresso.strategies import fields as forms
from espresso.strategies.fields import faults, shown

KIND = "espresso-flight"
NAME = "flight-{rank:05d}.json"
TRACE = "espresso-trace"
"""The kind of the traces that we write for viewers, said before their events; none is a rank's."""

MOST_BYTES = 64 << 20
"""Of a file; :data:`MOST_VALUES` keeps what we write far below."""

MOST_VALUES = 300_000
"""Numbers in the steps of a file: older steps are left out."""

MOST_RANKS = 4096
"""Files of one run."""


class FlightError(FormError):
    """A flight record is malformed, or those of a run do not belong together."""


@dataclass(slots=True)
class Script:
    """The moments of the training script in one step; None for what was not seen.

    Of several forward passes in a step (gradient accumulation under ``no_sync``) the moments are the last one's.

    Attributes:
        began_us: the end of the step before: of its optimizer, else of its exchange.
        input_us: how long it was, in all, between passes: waiting for input, mostly.
        earlier_us: how long the passes before the last took.
        passes: forward passes.
        entered_us: DDP's forward pass began; until ``forward_us`` it broadcasts buffers.
        forward_us, forward_end_us: the module's.
        backward_us: the gradient of its output was there.
        backward_end_us: all gradients of this rank were there.
        averaged_us: all averages were there, and backward returned.
        optimizer_us, optimizer_end_us: ``optimizer.step()``.
        beside_us: processor time of the process's other threads until the next step began: exchanges, compression.
        waited_us: that the script's own thread could have run until then and had no core: others used it, or a quota.
    """

    began_us: float | None = None
    input_us: float = 0.0
    earlier_us: float = 0.0
    passes: int = 0
    entered_us: float | None = None
    forward_us: float | None = None
    forward_end_us: float | None = None
    backward_us: float | None = None
    backward_end_us: float | None = None
    averaged_us: float | None = None
    optimizer_us: float | None = None
    optimizer_end_us: float | None = None
    beside_us: float | None = None
    waited_us: float | None = None


class Span(NamedTuple):
    """A task as it ran.

    Attributes:
        task: its number in the plan of its stretch.
        issue_us: what it waits for was there.
        start_us: it had its lanes; of an exchange: the library was called.
        end_us: its result was there.
        num_bytes: that it sent from this rank; 0 for what is no exchange.
    """

    task: int
    issue_us: float
    start_us: float
    end_us: float
    num_bytes: int

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True)
class StepRecord:
    """An iteration on one rank.

    Attributes:
        number: the iteration's.
        stretch: the place of its stretch in :attr:`Flight.stretches`.
        ready_us: when each bucket came from backward.
        done_us: when all averages were there.
        hook_us: processor time of backward's thread in the hook, all buckets together.
        finite: whether they were.
        bytes_sent, bytes_raw: by this rank, and what it would have sent uncompressed.
        spans: of its tasks. Plain exchanges are looked at in some steps only, so that it costs next to nothing.
    """

    number: int
    stretch: int
    script: Script
    ready_us: tuple[float, ...]
    done_us: float
    finite: bool = True
    bytes_sent: int = 0
    bytes_raw: int = 0
    spans: tuple[Span, ...] = ()
    hook_us: float = 0.0

    @property
    def num_values(self) -> int:
        """Numbers in a file."""
        return 25 + len(self.ready_us) + len(Span._fields) * len(self.spans)


@dataclass(frozen=True)
class Stretch:
    """Steps that ran the same: a strategy over the same buckets."""

    strategy: Strategy
    buckets: tuple[Bucket, ...]
    host_copies: bool = False

    @cached_property
    def plan(self) -> Plan:
        """What the tasks' numbers mean."""
        return plan(self.strategy, self.buckets, host_copies=self.host_copies)

    def task(self, span: Span) -> Task:
        return self.plan.tasks[span.task]


class Tick(NamedTuple):
    """A look at rank 0's clock: at this moment ours was so far ahead, give or take."""

    at_us: float
    ahead_us: float
    error_us: float


class Traffic(NamedTuple):
    """What a rank's TCP connections to the job's other hosts have done, from the beginning to a moment.

    Attributes:
        num_bytes: sent and acknowledged.
        busy_us: that something was on the way.
        window_us: of it, waiting for the peer's window or for room in the send buffer: a second connection would help.
        rtt_us: the least round trip.
    """

    at_us: float
    num_bytes: int
    busy_us: float
    window_us: float
    rtt_us: float


@dataclass(frozen=True)
class Flight:
    """A rank's record.

    Attributes:
        rank, num_ranks: its place among those that train together.
        host: what people call its machine.
        cluster: as the job saw it.
        stretches, steps: oldest first.
        ticks: looks at rank 0's clock, oldest first; none on rank 0.
        traffic: of its connections, now and then.
        facts: the ranks in the world that train together (``group``), a text that is this run's alone (``run``), cores
            of a rank (``cores``), bytes of DDP's buffers (``buffer_bytes``), ``bucket_cap_mb``, what the host's card
            sent at the start when nothing else did, in bytes a microsecond (``card_rate``), whether the exchange was
            observed from outside (``observed``), whether the ranks are replicas of a shard (``sharded``), and what else
            is known.
        other_groups: no part of the file: the ranks of other groups that left records beside it.
    """

    rank: int
    num_ranks: int
    host: str
    cluster: Cluster
    stretches: tuple[Stretch, ...]
    steps: tuple[StepRecord, ...]
    ticks: tuple[Tick, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    other_groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        with faults(FlightError):
            forms.whole(self.num_ranks, "num_ranks", least=1)
            forms.whole(self.rank, "rank", most=self.num_ranks - 1)
            for step in self.steps:
                self._check(step)
            for before, after in pairwise(self.steps):
                if after.number <= before.number:
                    raise FlightError(f"step {after.number} follows step {before.number}")

    def _check(self, step: StepRecord) -> None:
        where = f"step {step.number}"
        forms.whole(step.number, where)
        forms.whole(step.stretch, f"{where}: stretch", most=len(self.stretches) - 1)
        stretch = self.stretches[step.stretch]
        if len(step.ready_us) != len(stretch.buckets):
            raise FlightError(f"{where} has {len(step.ready_us)} ready times for {len(stretch.buckets)} buckets")
        for span in step.spans:
            forms.whole(span.task, f"{where}: task", most=len(stretch.plan.tasks) - 1)
            if not span.issue_us <= span.start_us <= span.end_us:
                raise FlightError(f"{where}: task {span.task} ends before it starts, or starts before it may")

    def of(self, step: StepRecord) -> Stretch:
        """What a step ran."""
        return self.stretches[step.stretch]

    def name_of(self, rank: int) -> int:
        """What the job calls a rank of this one's group, as launchers and names of files do."""
        group = self.facts.get("group")
        return int(group[rank]) if isinstance(group, list) and len(group) == self.num_ranks else rank

    @property
    def name(self) -> int:
        """What the job calls this rank."""
        return self.name_of(self.rank)

    def fact(self, name: str, default: float) -> float:
        """A number among the facts."""
        found = self.facts.get(name)
        return float(found) if isinstance(found, int | float) else default

    def to_json(self) -> dict[str, Any]:
        steps, values = list(self.steps), sum(step.num_values for step in self.steps)
        while values > MOST_VALUES and len(steps) > 1:
            values -= steps.pop(0).num_values
        stretches = tuple(
            _Stretch(
                each.strategy.to_json(),
                tuple(
                    _Bucket(tuple((slot.tensor, slot.offset, slot.numel) for slot in bucket.slots), bucket.dtype)
                    for bucket in each.buckets
                ),
                each.host_copies,
            )
            for each in self.stretches
        )
        body = _File(
            self.rank, self.num_ranks, self.host, self.cluster, stretches, tuple(steps), self.ticks, self.traffic,
            self.facts,
        )  # fmt: skip
        values_of: dict[str, Any] = forms.as_json(body)
        return forms.head(KIND) | values_of | {"steps": _rounded(values_of["steps"])}

    @classmethod
    def from_json(cls, body: Any) -> Flight:
        """Read what ``to_json`` wrote.

        Raises:
            FlightError: an unknown or missing key, or a faulty value, by name.
        """
        with faults(FlightError):
            found = forms.read_as(_File, forms.without_head(body, KIND), "the flight record")
            stretches = tuple(row.stretch() for row in found.stretches)
            return cls(
                found.rank, found.num_ranks, found.host, found.cluster, stretches, found.steps, found.ticks,
                found.traffic, found.facts or {},
            )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        forms.save(path, self.to_json(), indent=None)

    @classmethod
    def load(cls, path: str | Path) -> Flight:
        """Read a file.

        Raises:
            FlightError: it is not JSON or no flight record; the message begins with the path.
            OSError: it cannot be read.
        """
        return forms.load(path, cls.from_json, FlightError, most=MOST_BYTES)


def load_run(folder: str | Path) -> list[Flight]:
    """The flight records of all ranks in a folder, in rank order.

    Where ranks train in several groups (a module's shards, each with its replicas) they are those of the first group,
    and say which the others are.

    Raises:
        FlightError: none there, one is malformed, or they are not those of one run.
        OSError: the folder or a file cannot be read.
    """
    paths = sorted(Path(folder).glob("flight-*.json"))
    if not paths:
        raise FlightError(f"{folder}: holds no flight records (flight-00000.json …)")
    if len(paths) > MOST_RANKS:
        raise FlightError(f"{folder}: holds {len(paths)} flight records; at most {MOST_RANKS} are read")
    flights = [Flight.load(path) for path in paths]
    first = flights[0].facts.get("group")
    for flight in flights:
        group = flight.facts.get("group")
        # Groups of one run have no rank in common.
        if group != first and isinstance(group, list) and isinstance(first, list) and set(first) & set(group):
            raise FlightError(
                f"flight records of ranks {_listed(first)} and of ranks {_listed(group)} lie in {folder}: they are of"
                " different runs; remove the older ones"
            )
    groups: dict[str, list[Flight]] = {}
    for flight in flights:
        groups.setdefault(str(flight.facts.get("group")), []).append(flight)
    mine, *others = groups.values()
    check_run(mine)
    if others:
        names = tuple(tuple(flight.name for flight in group) for group in others)
        mine = [replace(flight, other_groups=names) for flight in mine]
    return sorted(mine, key=lambda flight: flight.rank)


def _listed(ranks: list[Any]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def check_run(flights: Sequence[Flight]) -> None:
    """Whether these are records of different ranks of one run; ranks may be missing.

    Raises:
        FlightError: two of one rank, or of different runs.
    """
    ranks = [flight.rank for flight in flights]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise FlightError(f"two of the flight records are rank {twice}'s; a folder holds one run")
    sizes = sorted({flight.num_ranks for flight in flights})
    if len(sizes) > 1:
        raise FlightError(f"the flight records are of runs with {sizes[0]} and {sizes[-1]} ranks")
    runs = {str(flight.facts["run"]): flight.rank for flight in flights if "run" in flight.facts}
    if len(runs) > 1:
        one, other, *_ = runs.values()
        raise FlightError(
            f"rank {one}'s and rank {other}'s flight records are of different runs: remove the older ones"
        )


def _rounded(value: Any) -> Any:
    """Tenths of a microsecond are enough."""
    if isinstance(value, float):
        return round(value, 1)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class _Bucket:
    """A bucket in a file; a slot is tensor, offset and elements."""

    slots: tuple[tuple[str, int, int], ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class _Stretch:
    """A stretch in a file."""

    strategy: Any
    buckets: tuple[_Bucket, ...]
    host_copies: bool = False

    def stretch(self) -> Stretch:
        buckets = tuple(
            Bucket(index, tuple(Slot(*slot) for slot in row.slots), row.dtype) for index, row in enumerate(self.buckets)
        )
        found = Stretch(Strategy.from_json(self.strategy), buckets, self.host_copies)
        known = {tensor.name: tensor.numel for tensor in found.strategy.tensors}
        for slot in (slot for bucket in buckets for slot in bucket.slots):
            if known.get(slot.tensor) != slot.numel or slot.offset < 0:
                raise FlightError(f"a bucket holds {shown(slot.tensor)}, which is not in the strategy like this")
        try:
            _ = found.plan
        except (ValueError, KeyError) as error:
            raise FlightError(f"a stretch's strategy does not fit its buckets: {error}") from None
        return found


@dataclass(frozen=True)
class _File:
    """A flight record, below its head."""

    rank: int
    num_ranks: int
    host: str
    cluster: Cluster
    stretches: tuple[_Stretch, ...]
    steps: tuple[StepRecord, ...]
    ticks: tuple[Tick, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    facts: Mapping[str, Any] | None = None
