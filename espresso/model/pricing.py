"""Chains: what the tasks of one partition cost, step by step.

The decision tree has thousands of leaves but few different steps: a step's cost depends on how the region
is cut, how many payloads are held and who shares the link, not on the leaf around it. A
:class:`Catalogue` finds those *shapes* once per cluster; a :class:`Pricer` prices each shape once per size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import is_not
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from espresso.model.costs import CostModel, group_size
from espresso.strategies import (
    DTYPES,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    Lane,
    Option,
    Phase,
    Plan,
    Routine,
    Scope,
    Stage,
    State,
    Step,
    StepKind,
)
from espresso.strategies.flow import SHARD_ALIGN, advance, check_fits, payload_splits
from espresso.strategies.plan import lanes_of, stages_of

if TYPE_CHECKING:
    from espresso.compressors.base import Compressor

LANE_SETS: tuple[tuple[Lane, ...], ...] = (
    (Lane.TRAINING,),
    (Lane.OFFLOAD,),
    (Lane.COPY,),
    (Lane.INTRA,),
    (Lane.INTER_OUT, Lane.INTER_IN),
    (Lane.INTRA, Lane.INTER_OUT, Lane.INTER_IN),
    (Lane.INTER_OUT, Lane.SERVER_IN),
    (Lane.INTER_IN, Lane.SERVER_OUT),
    (Lane.SERVER,),
)
"""Every combination of lanes a task can hold; kernels number them in this order."""

T = TypeVar("T")
Wholes = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

PayloadBytes = Callable[[CompressorSpec, int, str, int], int]
"""``(spec, elements, dtype, segments) -> bytes`` of one payload."""


@lru_cache(maxsize=256)
def create_compressor(spec: CompressorSpec) -> Compressor:
    """The registry's compressor for a spec, made once."""
    # Here and not above: pricing is the only reason to load the compressors.
    from espresso.compressors.registry import create

    return create(spec)


@lru_cache(maxsize=1 << 16)
def _layout_bytes(spec: CompressorSpec, numels: tuple[int, ...], dtype: str) -> int:
    from espresso.compressors.base import Segment

    segments, start = [], 0
    for numel in numels:
        segments.append(Segment("", start, numel))
        start += numel
    return create_compressor(spec).layout(segments, dtype).num_bytes


Shapes = tuple[tuple[int, ...], ...]
Stretches = int | Shapes
"""What a group consists of: how many stretches of tensors, or the shapes of whole ones where those matter."""


def count_of(stretches: Stretches) -> int:
    """How many stretches."""
    return stretches if isinstance(stretches, int) else len(stretches)


@lru_cache(maxsize=1 << 12)
def round_bytes(spec: CompressorSpec, elements: int, dtype: str, stretches: Stretches, number: int) -> int:
    """Bytes of the vector of one round; where no shapes are known, those of a square matrix of so many elements."""
    from espresso.compressors.base import Segment

    side = max(math.isqrt(elements), 1)
    shapes: Shapes = ((side, -(-elements // side)),) if isinstance(stretches, int) else stretches
    compressor: Any = create_compressor(spec)
    wide = "float64" if dtype == "float64" else "float32"
    layout = compressor.layout([Segment("", 0, math.prod(shape), shape) for shape in shapes], wide)
    return int(compressor.num_values(layout, number) * layout.dtype.itemsize)


_LARGE = 1 << 16


def payload_bytes(spec: CompressorSpec, elements: int, dtype: str = "float32", segments: int = 1) -> int:
    """Bytes of a payload of ``elements`` in ``segments`` stretches, from the compressor's own layout.

    Further segments cost what a second one does in a large payload (a table row, and what it rounds up),
    so that a size needs one layout and not one for every way of cutting it.
    """
    wide = "float64" if dtype == "float64" else "float32"
    size = _layout_bytes(spec, (elements,), wide)
    if segments > 1:
        two = _layout_bytes(spec, (_LARGE // 2, _LARGE // 2), wide)
        size += (segments - 1) * max(two - _layout_bytes(spec, (_LARGE,), wide), 0)
    return size


@dataclass(frozen=True, slots=True)
class Hold:
    """What a rank holds of a partition, apart from the partition's size (see :class:`State`).

    ``path`` lists the parts of every cut that led to the region; the first, largest shard is meant.
    """

    path: tuple[int, ...]
    splits: tuple[int, ...]
    value_parts: int
    multiplicity: int
    form: Form
    round: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """A task without its size: enough to price it for every size, compressor and dtype.

    Attributes:
        lane_set: index into :data:`LANE_SETS`.
        sharers: ranks of a node that do this step at the same time.
    """

    step: Step
    stage: Stage
    lane_set: int
    before: Hold
    after: Hold
    sharers: int


@dataclass(frozen=True, slots=True)
class Work:
    """A priced task.

    Attributes:
        us: its time when nothing contends.
        cores: what it demands of the host while it runs.
        num_bytes: the routine's whole array S, or the bytes copied; 0 for computation.
    """

    shape: Shape
    us: float
    cores: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank stands within an option, apart from the option: what its next step's shape depends on.

    Attributes:
        outer: what it held before the first steps that wait for their second, in their order.
        active: ranks of a node that take part now.
        hierarchical: whether the option is.
        size: of the partition that is meant.
    """

    state: State
    outer: tuple[tuple[Scope, State], ...]
    active: int
    hierarchical: bool
    size: int


class Catalogue:
    """The shapes of every option on one cluster, numbered as they are met."""

    def __init__(self, cluster: Cluster, host_copies: bool, copy_shares_intra: bool) -> None:
        self.cluster = cluster
        self.shapes: list[Shape] = []
        self._host_copies = host_copies
        self._copy_set = 3 if copy_shares_intra else 2
        self._numbers: dict[Shape, int] = {}
        self._options: dict[Option, tuple[int, ...]] = {}
        self._places: list[_Place] = []
        self._place_numbers: dict[_Place, int] = {}
        self._moves: dict[tuple[int, Step, tuple[int, ...]], tuple[tuple[int, ...], int]] = {}
        self._holds: dict[tuple[State, bool], Hold] = {}
        self._padded: dict[tuple[int, int, int], tuple[tuple[Option, ...], Wholes]] = {}
        # Matrices are kept with what occurs in them, so that their identities stay their own.
        self._used: dict[int, tuple[Wholes, list[int]]] = {}

    def numbers(self, option: Option) -> tuple[int, ...]:
        """The shape numbers of the option's tasks, in order, host copies included."""
        found = self._options.get(option)
        if found is None:
            found = self._options[option] = self._walk(option)
        return found

    def padded(self, options: Sequence[Option]) -> Wholes:
        """int64[options, longest + 1]: shape numbers, -1 after the end."""
        key = (id(options[0]), id(options[-1]), len(options))
        found = self._padded.get(key)
        # (Of equal lengths: that is in the key.)
        if found is None or (found[0] is not options and any(map(is_not, found[0], options))):
            rows = [self.numbers(option) for option in options]
            matrix = np.full((len(rows), max(map(len, rows)) + 1), -1, dtype=np.int64)
            for position, row in enumerate(rows):
                matrix[position, : len(row)] = row
            found = self._padded[key] = (tuple(options), matrix)
        return found[1]

    def used(self, numbers: Wholes) -> list[int]:
        """The shape numbers that occur in a matrix of :meth:`padded`."""
        found = self._used.get(id(numbers))
        if found is None:
            found = (numbers, [number for number in np.unique(numbers).tolist() if number >= 0])
            self._used[id(numbers)] = found
        return found[1]

    def _number(self, shape: Shape) -> int:
        number = self._numbers.setdefault(shape, len(self.shapes))
        if number == len(self.shapes):
            self.shapes.append(shape)
        return number

    def _walk(self, option: Option) -> tuple[int, ...]:
        """The option's shape numbers, from step to step through places that options share."""
        check_fits(option, self.cluster)
        steps = option.steps
        # Large enough that every cut is exact, so that a region's share of it tells how it was cut.
        size = SHARD_ALIGN * self.cluster.num_ranks**2
        ranks = self.cluster.ranks_per_node
        place = self._place(_Place(State(True, (0, size)), (), ranks, option.is_hierarchical, size))
        shapes: tuple[int, ...] = ()
        for position, step in enumerate(steps):
            compresses = step.kind is StepKind.COMPRESS
            key = (place, step, payload_splits(steps, position, self.cluster) if compresses else ())
            move = self._moves.get(key)
            if move is None:
                move = self._moves[key] = self._move(*key)
            shapes += move[0]
            place = move[1]
        return shapes

    def _place(self, place: _Place) -> int:
        number = self._place_numbers.setdefault(place, len(self._places))
        if number == len(self._places):
            self._places.append(place)
        return number

    def _move(self, number: int, step: Step, splits: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """One step from a place: the numbers of its shapes, and the place it leads to."""
        place, cluster = self._places[number], self.cluster
        outer = dict(place.outer)
        after_step = advance(step, splits, place.state, outer, cluster).after
        before = self._hold(place.state, place.size, place.hierarchical)
        after = self._hold(after_step, place.size, place.hierarchical)
        active = place.active
        own = LANE_SETS.index(lanes_of(step, cluster))
        shapes = [
            Shape(step, stage, own if stage is Stage.STEP else self._copy_set, before, after, active)
            for stage in stages_of(step, self._host_copies)
        ]
        if step.scope in (Scope.INTRA, Scope.FLAT):
            if step.routine in (Routine.REDUCE, Routine.GATHER):
                active = 1
            elif step.phase is Phase.SECOND:
                active = cluster.ranks_per_node
        following = replace(place, state=after_step, outer=tuple(outer.items()), active=active)
        return tuple(map(self._number, shapes)), self._place(following)

    def _hold(self, state: State, size: int, hierarchical: bool) -> Hold:
        key = (state, hierarchical)
        found = self._holds.get(key)
        if found is None:
            cluster = self.cluster
            parts = size // state.elements
            if parts == 1:
                path: tuple[int, ...] = ()
            elif hierarchical and parts == cluster.num_ranks:
                path = (cluster.ranks_per_node, cluster.num_nodes)
            else:
                path = (parts,)
            value_parts = 1
            for count, _ in state.value_cuts:
                value_parts *= count
            found = Hold(path, state.atom_splits, value_parts, state.multiplicity, state.form, state.round)
            self._holds[key] = found
        return found


@lru_cache(maxsize=64)
def catalogue(cluster: Cluster, host_copies: bool, copy_shares_intra: bool) -> Catalogue:
    """One catalogue per cluster and way of copying, shared by all pricers."""
    return Catalogue(cluster, host_copies, copy_shares_intra)


def first_shard(elements: int, parts: int) -> int:
    """Elements of the first, largest shard (:func:`espresso.strategies.cut`)."""
    return min(-(-elements // (parts * SHARD_ALIGN)) * SHARD_ALIGN, elements)


def atom_sizes(elements: int, splits: tuple[int, ...]) -> dict[int, int]:
    """Size to count of the payloads that a region is encoded in; empty ones included."""
    sizes = {elements: 1}
    for parts in splits:
        finer: dict[int, int] = {}
        for size, count in sizes.items():
            first = first_shard(size, parts)
            full = size // first if first else parts
            rest = size - full * first
            for piece, times in ((first, full), (rest, 1 if rest else 0)):
                finer[piece] = finer.get(piece, 0) + times * count
            finer[0] = finer.get(0, 0) + (parts - full - (1 if rest else 0)) * count
        sizes = {size: count for size, count in finer.items() if count}
    return sizes


SizeKey = tuple[CompressorSpec, int, str, Stretches]
"""(compressor, elements, dtype, segments) of a partition."""


class Pricer:
    """Prices tasks with one cost model on one cluster; remembers every price.

    Args:
        payload: for tests; by default the compressors' own layouts.
        free: price compression and host copies at nothing: the paper's upper bound.
    """

    def __init__(
        self, costs: CostModel, cluster: Cluster, payload: PayloadBytes = payload_bytes, *, free: bool = False
    ) -> None:
        self.costs = costs
        self.cluster = cluster
        self.catalogue = catalogue(cluster, costs.copy is not None, costs.copy is not None and costs.copy.shares_intra)
        self._payload = payload
        self._free = free
        self._prices: dict[SizeKey, dict[int, Work]] = {}
        self._chains: dict[tuple[Option, SizeKey], tuple[Work, ...]] = {}
        self._derived: dict[Hashable, Any] = {}

    def chain(self, choice: Choice, elements: int, dtype: str, segments: Stretches = 1) -> tuple[Work, ...]:
        """The priced tasks of one partition, in order; they match the plan's tasks one to one."""
        size: SizeKey = (choice.compressor, elements, dtype, segments)
        found = self._chains.get((choice.option, size))
        if found is None:
            found = tuple(self.work(number, size) for number in self.catalogue.numbers(choice.option))
            self._chains[choice.option, size] = found
        return found

    def columns(self, options: Sequence[Option], size: SizeKey) -> tuple[Wholes, Reals, Reals]:
        """Chains as arrays [options, longest chain + 1]: lane set (-1 after the end), us, cores."""
        numbers = self.catalogue.padded(options)
        sets, us, cores = self.shape_costs(numbers, size)
        return sets[numbers], us[numbers], cores[numbers]

    def shape_costs(self, numbers: Wholes, size: SizeKey) -> tuple[Wholes, Reals, Reals]:
        """By shape number: lane set, us, cores of every shape in ``numbers``; the last row ends a chain."""
        sets, us, cores = (np.empty(len(self.catalogue.shapes) + 1, dtype) for dtype in (np.int64, float, float))
        sets[-1], us[-1], cores[-1] = -1, 0.0, 0.0
        for number in self.catalogue.used(numbers):
            work = self.work(number, size)
            sets[number], us[number], cores[number] = work.shape.lane_set, work.us, work.cores
        return sets, us, cores

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gave for this key the first time: for what is derived from prices."""
        if key not in self._derived:
            self._derived[key] = make()
        found: T = self._derived[key]
        return found

    def work(self, number: int, size: SizeKey) -> Work:
        """The price of a shape at a size."""
        prices = self._prices.setdefault(size, {})
        found = prices.get(number)
        if found is None:
            found = prices[number] = self._price(self.catalogue.shapes[number], size)
        return found

    def _price(self, shape: Shape, size: SizeKey) -> Work:
        spec, elements, _, segments = size
        step = shape.step
        cores = self.costs.contention.demand(step)
        if shape.stage is not Stage.STEP:
            hold = shape.before if shape.stage is Stage.COPY_TO_HOST else shape.after
            num_bytes = self._bytes(hold, size)
            return Work(shape, 0.0 if self._free else self.costs.copy_us(num_bytes), 0.0, num_bytes)
        if step.is_communication:
            num_bytes = self._moved(shape, size)
            return Work(shape, self.costs.comm_us(step, self.cluster, num_bytes), cores, num_bytes)
        if self._free or step.device is None:
            return Work(shape, 0.0, cores, 0.0)
        held = _after_path(elements, shape.before.path)
        if step.kind is StepKind.AGGREGATE:
            time = self.costs.sum_us(shape.before.multiplicity * self._bytes(shape.before, size))
        elif step.kind is StepKind.TRANSFORM:
            time = self.costs.transform_us(spec, step.device, held, count_of(segments))
        elif step.kind is StepKind.COMPRESS:
            stretches = max(_share(segments, held, elements), sum(atom_sizes(held, shape.after.splits).values()))
            time = self.costs.encode_us(spec, step.device, held, stretches)
        else:
            time = self.costs.decode_us(spec, step.device, held, shape.before.multiplicity)
        if step.device is Device.OFFLOAD:
            time *= min(shape.sharers, self.costs.offload_ranks_per_pool)
        elif step.device is Device.SERVER:
            time, cores = self._on_servers(time, shape)
        return Work(shape, time, cores, 0.0)

    def _moved(self, shape: Shape, size: SizeKey) -> float:
        """The routine's whole array S, as :meth:`CostModel.comm_us` counts it."""
        step = shape.step
        if step.routine in (Routine.PUSH, Routine.PULL):
            num_bytes = self._bytes(shape.before, size) * group_size(step.scope or Scope.FLAT, self.cluster)
        else:
            num_bytes = max(self._bytes(shape.before, size), self._bytes(shape.after, size))
        if step.form is Form.HALF:
            num_bytes *= 2 / max(DTYPES[size[2]], 2)
        return num_bytes * (shape.sharers if step.scope is Scope.INTER else 1)

    def _on_servers(self, time: float, shape: Shape) -> tuple[float, float]:
        """(time, cores) of a server's work: all regions of a partition come at once, one from each rank of a node."""
        regions = shape.sharers if shape.before.path else 1
        servers = self.costs.servers
        return self.costs.server_us(time * regions, self.cluster), servers.cores if servers else 0.0

    def _bytes(self, hold: Hold, size: SizeKey) -> float:
        spec, elements, dtype, segments = size
        held = _after_path(elements, hold.path)
        if hold.form is Form.RAW:
            return held * DTYPES[dtype]
        if hold.form is Form.SUMMABLE and create_compressor(spec).traits.rounds > 1:
            return round_bytes(spec, elements, dtype, segments, hold.round) / hold.value_parts
        if hold.form is Form.SUMMABLE:
            return self._payload(spec, held, dtype, _share(segments, held, elements)) / hold.value_parts
        return hold.multiplicity * sum(
            count * self._payload(spec, atom, dtype, _share(segments, atom, elements))
            for atom, count in atom_sizes(held, hold.splits).items()
        )


_shared: dict[tuple[int, Cluster, PayloadBytes], Pricer] = {}


def shared_pricer(costs: CostModel, cluster: Cluster, payload: PayloadBytes = payload_bytes) -> Pricer:
    """A pricer that later searches with the same cost model find warm; the last few are kept."""
    key = (id(costs), cluster, payload)
    found = _shared.pop(key, None)
    if found is None:
        found = Pricer(costs, cluster, payload)
    # The pricer keeps ``costs`` alive, so that its identity stays its own.
    _shared[key] = found
    while len(_shared) > 8:
        _shared.pop(next(iter(_shared)))
    return found


def _after_path(elements: int, path: tuple[int, ...]) -> int:
    for parts in path:
        elements = first_shard(elements, parts)
    return elements


def _share(segments: Stretches, part: int, whole: int) -> int:
    """How many of a partition's segments lie in a part of it, about."""
    return max(1, -(-count_of(segments) * part // whole)) if whole else 1


def partition_segments(runs: Stretches, part: int, whole: int) -> int:
    """Segments of a partition of ``part`` of the ``whole`` elements of a group with ``runs`` stretches."""
    return _share(runs, part, whole)


def price_plan(plan: Plan, pricer: Pricer) -> list[Work]:
    """The price of every task of a plan, by task index."""
    works: list[Work] = []
    for part in plan.partitions:
        group = plan.groups[part.group]
        segments: Stretches = partition_segments(len(group.runs), part.numel, group.numel)
        if group.choice.option.num_rounds > 1:
            segments = tuple(run.shape for run in group.runs)
        works += pricer.chain(group.choice, part.numel, group.dtype, segments)
    assert len(works) == len(plan.tasks)
    return works
