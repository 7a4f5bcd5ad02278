"""What a search chooses from: priced candidates per unit, deduplicated, as the kernels' flat arrays.

A *unit* is what gets one choice: a tensor in the paper's mode, a bucket or a part of one in DDP's. Units of
equal size share their candidates. Which leaves are offered is decided here, by compressor and device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np

from espresso.model.arrays import Reals, Wholes
from espresso.model.job import Job
from espresso.model.payload_sizes import Shapes, Stretches, create_compressor, share_of_stretches
from espresso.model.pricing import Pricer
from espresso.search.candidate_kernels import CHAIN, LONGEST, chain_features, first_of_equals, undominated
from espresso.strategies import (
    DTYPES,
    NONE,
    PLAIN,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Strategy,
    compressed_options,
    options_for,
)
from espresso.strategies.constraints import FREE, Constraints
from espresso.strategies.plan import partition_spans

Size = tuple[int, str, Stretches]
"""(elements, dtype, stretches): see :attr:`Unit.size`."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors of one bucket that share a choice.

    Attributes:
        kind: what constraints ask of all of them.
        within: elements of its bucket, of which others may travel with it.
    """

    bucket: int
    tensors: tuple[str, ...]
    numel: int
    dtype: str
    shapes: Shapes | None = None
    kind: str = FREE
    within: int = 0

    @property
    def size(self) -> Size:
        """Units with equal sizes cost the same: (elements, dtype, stretches), their shapes if those matter."""
        return self.numel, self.dtype, len(self.tensors) if self.shapes is None else self.shapes

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPES[self.dtype]

    def parts_within(self, partition_bytes: int) -> int:
        """Into how many partitions a plan may cut it with all of its bucket; 0 where it is alone or nothing is cut."""
        limit = partition_bytes // DTYPES[self.dtype]
        return -(-self.within // limit) if 0 < limit < self.within and self.numel < self.within else 0


Leaves = tuple[Choice, ...] | Mapping[str, tuple[Choice, ...]]
"""What units may take: all the same, or by their kinds."""


def leaves_of(leaves: Leaves, unit: Unit) -> tuple[Choice, ...]:
    """What a unit may take."""
    return leaves if isinstance(leaves, tuple) else leaves[unit.kind]


def grouped(units: Iterable[Unit]) -> dict[tuple[Size, tuple[str, int]], list[int]]:
    """Places of units by their size, and by kind and bucket: those of a group have the same candidates."""
    groups: dict[tuple[Size, tuple[str, int]], list[int]] = {}
    for number, unit in enumerate(units):
        groups.setdefault((unit.size, (unit.kind, unit.within)), []).append(number)
    return groups


def units_of(job: Job, constraints: Constraints | None = None) -> tuple[Unit, ...]:
    """One unit per tensor (paper) or per bucket (DDP) that holds any, in the order in which they become ready.

    Under constraints one for each kind of tensors in a bucket. Small vectors that stay exact are no unit where others
    of their bucket are: they travel with them, or beside them, and cost next to nothing either way.
    """
    if constraints is None:
        full = (bucket for bucket in job.laid_out if bucket.slots)
        return tuple(unit_of(job, bucket, [slot.tensor for slot in bucket.slots]) for bucket in full)
    return _units_by(job, constraints, lambda name: "")


def units_for(job: Job, strategy: Strategy, constraints: Constraints | None = None) -> tuple[Unit, ...]:
    """One unit per group of the plan: the tensors of a bucket to which a strategy gives the same choice."""
    return _units_by(job, constraints or Constraints(), lambda name: strategy.choices[name])


def _units_by(job: Job, constraints: Constraints, choice: Callable[[str], Hashable]) -> tuple[Unit, ...]:
    specs = {tensor.name: tensor for tensor in job.tensors}
    units: list[Unit] = []
    for bucket in job.laid_out:
        names = [slot.tensor for slot in bucket.slots]
        decided = [name for name in names if not constraints.is_dropped(specs[name])] or names
        groups: dict[Hashable, list[str]] = {}
        for name in decided:
            groups.setdefault((constraints.kind_of(specs[name]), choice(name)), []).append(name)
        units += [unit_of(job, bucket, members, constraints.kind_of(specs[members[0]])) for members in groups.values()]
    return tuple(units)


def unit_of(job: Job, bucket: Bucket, names: Sequence[str], kind: str = FREE) -> Unit:
    """These tensors of a bucket as one unit."""
    numels = {slot.tensor: slot.numel for slot in bucket.slots}
    shapes = None
    if job.costs.has_rounds:
        of = {tensor.name: tensor.shape for tensor in job.tensors}
        shapes = tuple(of[name] for name in names)
    numel = sum(numels[name] for name in names)
    return Unit(bucket.index, tuple(names), numel, bucket.dtype, shapes, kind, bucket.numel)


@lru_cache(maxsize=256)
def choices_for(cluster: Cluster, spec: CompressorSpec, devices: tuple[Device, ...]) -> tuple[Choice, ...]:
    """Every compressed leaf that the compressor's traits allow, its computations on these devices."""
    traits = create_compressor(spec).traits
    options = compressed_options(cluster, devices, summable=traits.summable, rounds=traits.rounds)
    return tuple(Choice(option, spec) for option in options)


@lru_cache(maxsize=64)
def raw_choices(cluster: Cluster) -> tuple[Choice, ...]:
    """The uncompressed leaves, plain flat allreduce first."""
    leaves = [Choice(o) for o in options_for(cluster, devices=(Device.TRAINING,)) if not o.is_compressed]
    return (PLAIN, *(choice for choice in leaves if choice != PLAIN))


def compressed_choices(job: Job, specs: Iterable[CompressorSpec], device: Device) -> tuple[Choice, ...]:
    """The compressed leaves of every compressor that the job can price on this device."""
    return tuple(
        choice
        for spec in specs
        if spec != NONE and device in job.costs.devices(spec)
        for choice in choices_for(job.cluster, spec, (device,))
    )


def compressed_leaves(job: Job, specs: Sequence[CompressorSpec]) -> tuple[tuple[Choice, ...], tuple[Choice, ...]]:
    """Compressed leaves (for Algorithm 1, offloaded): the first on the training device where it has costs."""
    first: tuple[Choice, ...] = ()
    moved: tuple[Choice, ...] = ()
    for spec in specs:
        training = compressed_choices(job, (spec,), Device.TRAINING)
        offloaded = compressed_choices(job, (spec,), Device.OFFLOAD)
        first += training or offloaded
        moved += offloaded
    return first, moved


@lru_cache(maxsize=64)
def _every(
    cluster: Cluster, priced: tuple[tuple[CompressorSpec, tuple[Device, ...]], ...], host_copies: bool
) -> tuple[Choice, ...]:
    return raw_choices(cluster) + tuple(
        choice
        for spec, devices in priced
        for choice in choices_for(cluster, spec, devices)
        if not (host_copies and choice.option.moves_matrices)
    )


def every_choice(job: Job, specs: Iterable[CompressorSpec]) -> tuple[Choice, ...]:
    """The whole space: raw leaves, and every compressed one with each of its compressions on any device.

    Where devices are copied between, matrices of several rounds are transformed where they were compressed.
    """
    priced = [(spec, job.costs.devices(spec)) for spec in specs if spec != NONE]
    return _every(job.cluster, tuple(row for row in priced if row[1]), job.host_copies)


class _Interned:
    """Choices as small numbers, found by identity first: hashing a choice walks all its steps."""

    def __init__(self) -> None:
        self._by_identity: dict[int, tuple[Choice, int]] = {}
        self._by_value: dict[Choice, int] = {}

    def number(self, choice: Choice) -> int:
        found = self._by_identity.get(id(choice))
        if found is None:
            number = self._by_value.setdefault(choice, len(self._by_value))
            # The choice is kept, so that its identity stays its own.
            found = self._by_identity[id(choice)] = (choice, number)
        return found[1]


_interned = _Interned()


@dataclass(frozen=True)
class _Block:
    """Candidates of one size for a list of choices, in order."""

    leaves: tuple[Choice, ...]
    numbers: Wholes


def _features(starts: Wholes, task_set: Wholes, task_us: Reals, task_beside: Reals) -> Reals:
    features = np.zeros((len(starts), LONGEST + 1))
    chain_features(starts, task_set, task_us, task_beside, features)
    return features


class Candidates:
    """Candidates of every size for one job, pricing and partition size.

    Attributes:
        choices: by candidate number.
    """

    def __init__(self, pricer: Pricer, partition_bytes: int) -> None:
        self.choices: list[Choice] = []
        self._pricer = pricer
        self._partition_bytes = partition_bytes
        self._columns: list[tuple[Wholes, ...]] = []
        self._rows: list[tuple[Wholes, Reals, Reals]] = []
        self._num_rows = 0
        self._number: dict[tuple[Size, int], int] = {}
        self._blocks: dict[tuple[Size, int], _Block] = {}
        self._distinct: dict[tuple[Size, int, bool], Wholes] = {}
        self._frozen: tuple[Wholes, Wholes, Wholes, Wholes, Reals, Reals] | None = None
        self._kinds_of: Callable[[Iterable[Choice]], Wholes] | None = None
        self._kinds: Wholes = np.empty(0, dtype=np.int64)

    def number(self, size: Size, choice: Choice) -> int:
        """The candidate of one choice at one size."""
        found = self._number.get((size, _interned.number(choice)))
        return int(self._add(size, (choice,))[0]) if found is None else found

    def many(self, size: Size, choices: Sequence[Choice]) -> Wholes:
        """int64[choices]: the candidates of several choices at one size; nothing is remembered of the list."""
        known = [self._number.get((size, _interned.number(choice)), -1) for choice in choices]
        fresh = [choice for choice, number in zip(choices, known, strict=True) if number < 0]
        numbers = np.array(known, dtype=np.int64)
        if fresh:
            numbers[numbers < 0] = self._add(size, fresh)
        return numbers

    def numbers(self, size: Size, leaves: tuple[Choice, ...]) -> Wholes:
        """int64[leaves]: the candidates of several choices at one size, in the same order."""
        block = self._blocks.get((size, id(leaves)))
        if block is None:
            # The block keeps ``leaves`` alive, so that its identity stays its own.
            block = self._blocks[size, id(leaves)] = _Block(leaves, self.many(size, leaves))
        return block.numbers

    def _add(self, size: Size, leaves: Sequence[Choice]) -> Wholes:
        whole = [leaf.option.num_rounds > 1 for leaf in leaves]
        if any(whole):
            count, full, tail = (np.empty(len(leaves), dtype=np.int64) for _ in range(3))
            for kind in (False, True):
                where = np.flatnonzero(np.array(whole) == kind)
                if where.size:
                    rows = self._rows_of(size, [leaves[index] for index in where.tolist()], whole=kind)
                    count[where], full[where], tail[where] = rows
        else:
            count, full, tail = self._rows_of(size, leaves, whole=False)
        first = len(self.choices)
        for number, choice in enumerate(leaves, start=first):
            self._number[size, _interned.number(choice)] = number
        self.choices += leaves
        self._columns.append((count, full, tail))
        self._frozen = None
        return np.arange(first, len(self.choices))

    def _rows_of(self, size: Size, leaves: Sequence[Choice], *, whole: bool) -> tuple[Wholes, Wholes, Wholes]:
        """(partitions, row of a full one, row of the last) of every leaf; ``whole`` ones are never cut."""
        numel, dtype, runs = size
        if whole:
            row = self._price(leaves, numel, dtype, runs)
            return np.ones(len(leaves), dtype=np.int64), row, row
        spans = partition_spans(numel, self._partition_bytes // DTYPES[dtype])
        lengths = [stop - start for start, stop in spans]
        tail = self._price(leaves, lengths[-1], dtype, share_of_stretches(runs, lengths[-1], numel))
        full = tail
        if lengths[0] != lengths[-1]:
            full = self._price(leaves, lengths[0], dtype, share_of_stretches(runs, lengths[0], numel))
        return np.full(len(leaves), len(lengths), dtype=np.int64), full, tail

    def _price(self, leaves: Sequence[Choice], elements: int, dtype: str, segments: Stretches) -> Wholes:
        """Append the chains of ``leaves`` at one length; returns the row at which each starts."""
        starts = np.empty(len(leaves), dtype=np.int64)
        # Leaves of one compressor lie together; each run is priced at once.
        for spec, group in groupby(range(len(leaves)), key=lambda index: leaves[index].compressor):
            members = list(group)
            options = [leaves[index].option for index in members]
            sets, us, beside = self._pricer.columns(options, (spec, elements, dtype, segments))
            stride = sets.shape[1]
            starts[members] = self._num_rows + stride * np.arange(len(members))
            self._rows.append((sets.ravel(), us.ravel(), beside.reshape(-1, 2)))
            self._num_rows += sets.size
        return starts

    def kinds(self, kinds_of: Callable[[Iterable[Choice]], Wholes] | None) -> Wholes:
        """int64[candidates]: the kind of each candidate's choice (:class:`espresso.search.budgets.Ledger`)."""
        if kinds_of is None:
            return np.zeros(len(self.choices), dtype=np.int64)
        if kinds_of != self._kinds_of:
            self._kinds_of, self._kinds = kinds_of, np.empty(0, dtype=np.int64)
        self._kinds = np.append(self._kinds, kinds_of(self.choices[len(self._kinds) :]))
        return self._kinds

    def arrays(self) -> tuple[Wholes, Wholes, Wholes, Wholes, Reals, Reals]:
        """(count, full, tail, task_set, task_us, task_beside) as the kernels take them."""
        if self._frozen is None:
            count, full, tail = (np.concatenate(column) for column in zip(*self._columns, strict=True))
            sets, us, beside = (np.concatenate(column) for column in zip(*self._rows, strict=True))
            self._columns = [(count, full, tail)]
            self._rows = [(sets, us, beside)]
            self._frozen = (count, full, tail, sets, us, beside)
        return self._frozen

    def alone_us(self, numbers: Wholes) -> Reals:
        """Every candidate's time if nothing else ran, its partitions pipelined over their slowest stage."""
        count, full, tail, task_set, task_us, task_beside = self.arrays()
        stages = _features(full[numbers], task_set, task_us, task_beside)
        last = _features(tail[numbers], task_set, task_us, task_beside)
        return np.asarray(last[:, CHAIN] + (count[numbers] - 1) * stages[:, LONGEST])

    def distinct(self, size: Size, leaves: tuple[Choice, ...], *, prune: bool) -> Wholes:
        """The candidates of ``leaves`` at a size that can matter, in the same order.

        Of equal task sequences the first stays; that is exact. With ``prune`` a candidate also goes if an
        earlier or cheaper one is no worse in every lane's total, in the length of the chain, in the host
        time it burns and in how soon it holds the training lane. That is a heuristic: list scheduling has
        anomalies, and a candidate worse in all of these can, rarely, finish earlier.
        """
        key = (size, id(leaves), prune)
        found = self._distinct.get(key)
        if found is None:
            numbers = self.numbers(size, leaves)
            count, full, tail, task_set, task_us, task_beside = self.arrays()
            one = _features(full[numbers], task_set, task_us, task_beside)
            last = _features(tail[numbers], task_set, task_us, task_beside)
            features = (count[numbers] - 1)[:, None] * one + last
            features[:, LONGEST] = 0.0
            keep = np.ones(len(numbers), dtype=np.bool_)
            if prune:
                undominated(features, keep)
            else:
                first_of_equals(
                    features, full[numbers], tail[numbers], task_set, task_us, task_beside, keep
                )  # fmt: skip
            found = self._distinct[key] = numbers[keep]
        return found


PARTS = (2, 3, 4, 6, 8, 16)
LEAST_PARTITION_BYTES = 1 << 20


def partition_sizes(units: Sequence[Unit]) -> tuple[int, ...]:
    """The partition sizes worth trying: never cutting, then those that cut the largest unit into a few equal parts."""
    largest = max(unit.num_bytes for unit in units)
    sizes = [0]
    for parts in PARTS:
        # Rounded up to whole cache lines, as partitions are.
        size = -(-largest // (parts * 512)) * 512
        if size >= LEAST_PARTITION_BYTES:
            sizes.append(size)
    return tuple(sizes)
