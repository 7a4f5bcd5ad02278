"""Shapes of steps: what a task's price depends on, apart from its size.

The decision tree has thousands of leaves but few different steps: a step's cost depends on how the region is cut, how
many payloads are held and who shares the link, not on the leaf around it. A :class:`Catalogue` finds those *shapes*
once per cluster; :class:`espresso.model.pricing.Pricer` prices each shape once per size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import is_not

import numpy as np

from espresso.model.arrays import Wholes
from espresso.strategies import Cluster, Form, Lane, Option, Phase, Routine, Scope, Stage, State, Step, StepKind
from espresso.strategies.flow import SHARD_ALIGN, advance, check_fits, payload_splits
from espresso.strategies.plan import lanes_of, stages_of

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


@dataclass(frozen=True, slots=True)
class Hold:
    """What a rank holds of a partition, apart from the partition's size (see :class:`State`).

    ``path`` lists the parts of every cut that led to the region; the first, largest shard is meant. ``is_wide``: its
    numbers have at least 32 bits, as those of options that compress do.
    """

    path: tuple[int, ...]
    splits: tuple[int, ...]
    value_parts: int
    multiplicity: int
    form: Form
    round: int = 0
    is_wide: bool = False


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
class _Place:
    """Where a rank stands within an option, apart from the option: what its next step's shape depends on.

    Attributes:
        outer: what it held before the first steps that wait for their second, in their order.
        active: ranks of a node that take part now.
        hierarchical, compressed: whether the option is.
        size: of the partition that is meant.
    """

    state: State
    outer: tuple[tuple[Scope, State], ...]
    active: int
    hierarchical: bool
    compressed: bool
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
        self._holds: dict[tuple[State, bool, bool], Hold] = {}
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
        begin = _Place(State(True, (0, size)), (), ranks, option.is_hierarchical, option.is_compressed, size)
        place = self._place(begin)
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
        before, after = self._hold(place.state, place), self._hold(after_step, place)
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

    def _hold(self, state: State, place: _Place) -> Hold:
        key = (state, place.hierarchical, place.compressed)
        found = self._holds.get(key)
        if found is None:
            cluster = self.cluster
            parts = place.size // state.elements
            if parts == 1:
                path: tuple[int, ...] = ()
            elif place.hierarchical and parts == cluster.num_ranks:
                path = (cluster.ranks_per_node, cluster.num_nodes)
            else:
                path = (parts,)
            value_parts = 1
            for count, _ in state.value_cuts:
                value_parts *= count
            found = self._holds[key] = Hold(
                path, state.atom_splits, value_parts, state.multiplicity, state.form, state.round, place.compressed
            )
        return found


@lru_cache(maxsize=64)
def catalogue(cluster: Cluster, host_copies: bool, copy_shares_intra: bool) -> Catalogue:
    """One catalogue per cluster and way of copying, shared by all pricers."""
    return Catalogue(cluster, host_copies, copy_shares_intra)
