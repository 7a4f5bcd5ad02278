"""The certificate's data: every unit's undominated candidates as rows of costs (see ``bound_kernels``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from espresso.model.arrays import Reals, Wholes
from espresso.model.job import Job
from espresso.model.payload_sizes import share_of_stretches
from espresso.model.pricing import Pricer, SizeKey
from espresso.model.timeline_kernels import BURST_LANE, NUM_LANES, limits_of
from espresso.search.bound_kernels import CHAIN, COSTS, NUM_RESOURCES, WIDTH, join_partitions, leaf_features, pareto
from espresso.search.budgets import ROUNDING, Ledger
from espresso.search.candidates import Leaves, Size, Unit, grouped, leaves_of
from espresso.search.order_kernels import Tasks
from espresso.strategies import DTYPES, Choice, CompressorSpec, Option
from espresso.strategies.flow import SHARD_ALIGN
from espresso.strategies.plan import partition_spans

MOST_GIANTS = 6
GIANT_SHARE = 0.04
"""A unit with this share of all elements is a giant: few enough to branch on, large enough to matter."""


@dataclass(frozen=True)
class Relaxation:
    """The linear program's data, candidates pooled by unit size.

    Attributes:
        release_us: float64[units], undisturbed.
        backward_us: when the last is released.
        rows: float64[candidates, WIDTH], those of one size together.
        kind_of: int64[candidates]: a row's kind, as a column of ``spends``.
        first, last: int64[units]: each unit's candidates among ``rows``.
        origin: every row's choice.
        cores: cores shared by everything, 0 under the paper's assumption.
        backward_cores: what backward demands.
        resources: how many bound the makespan (:mod:`espresso.search.bound_kernels`).
        credit_us: what a card's full token bucket saves.
        beside_us: what forward and the optimizer take.
        spends: float64[budgets, units, kinds]: what a kind of choice spends of each budget; without one, empty.
        limits: float64[budgets].
        giants: int64[few], in order of release.
        ledger: what the budgets are of; None without.
        at: the first of the units that are handed over last, if the others' rows are of states
            (:mod:`espresso.search.states`); else 0.
        lapse_us: how long before that hand-over the links' lines of that unit begin.
    """

    release_us: Reals
    backward_us: float
    rows: Reals
    kind_of: Wholes
    first: Wholes
    last: Wholes
    origin: tuple[Choice, ...]
    cores: float
    backward_cores: float
    resources: int
    credit_us: float
    beside_us: float
    spends: Reals
    limits: Reals
    giants: Wholes
    ledger: Ledger | None = None
    at: int = 0
    lapse_us: float = 0.0

    @property
    def has_budget(self) -> bool:
        return len(self.limits) > 0


Undominated = tuple[Reals, list[int]]


def undominated_leaves(
    pricer: Pricer,
    size: Size,
    leaves: tuple[Choice, ...],
    partition_bytes: int,
    *,
    spends: Reals | None = None,
    parts_within: int = 0,
) -> Undominated:
    """The rows of a size's leaves, dominated ones dropped.

    Safe for the bound: it prices a candidate with weights that are never negative, so one that is no less in
    every cost never is a minimum alone. (It says nothing about list schedules: there a dominated candidate
    can, rarely, finish earlier.) Under a budget ``spends`` float64[leaves, any] are further costs, to be compared
    between leaves of one compressor; those of different compressors are kept apart. ``parts_within`` as
    :meth:`espresso.search.candidates.Unit.parts_within` says.

    Returns:
        float64[kept, WIDTH] and for every row its index into ``leaves``.
    """
    numel, dtype, _ = size
    blocks: list[Reals] = []
    origin: list[int] = []
    spans = partition_spans(numel, partition_bytes // DTYPES[dtype])
    for run in _runs(pricer, leaves):
        rows = _rows_of(pricer, size, run, spans)
        if parts_within and run.options[0].num_rounds == 1:
            rows = _cut_finer(pricer, size, run, rows, parts_within)
        kept = undominated(rows, None if spends is None else spends[run.start : run.start + len(rows)])
        blocks.append(rows[kept])
        origin += [run.start + index for index in kept.tolist()]
    rows = np.concatenate(blocks)
    if spends is not None or len(blocks) == 1:
        return rows, origin
    kept = undominated(rows)
    return rows[kept], [origin[index] for index in kept]


def leaf_rows(
    pricer: Pricer, size: Size, leaves: tuple[Choice, ...], partition_bytes: int, chosen: Wholes | None = None
) -> Reals:  # fmt: skip
    """float64[leaves, WIDTH] of all leaves, or of those ``chosen``, at one partition size."""
    spans = partition_spans(size[0], partition_bytes // DTYPES[size[1]])
    runs = _runs(pricer, leaves)
    if chosen is None:
        return np.concatenate([_rows_of(pricer, size, run, spans) for run in runs])
    rows = np.empty((len(chosen), WIDTH))
    for run in runs:
        mine = run.holds(chosen)
        if mine.any():
            rows[mine] = _rows_of(pricer, size, run, spans)[chosen[mine] - run.start]
    return rows


def leaves_with(pricer: Pricer, leaves: tuple[Choice, ...], compressors: Collection[CompressorSpec]) -> Wholes:
    """Which leaves have one of these."""
    spans = [(run.start, run.stop) for run in _runs(pricer, leaves) if run.compressor in compressors]
    return np.concatenate([np.arange(start, stop) for start, stop in spans])


def leaf_tasks(
    pricer: Pricer, size: Size, leaves: tuple[Choice, ...], partition_bytes: int, chosen: Wholes
) -> Tasks:  # fmt: skip
    """The tasks of the leaves ``chosen`` at one partition size, in rows (:mod:`espresso.search.order_kernels`)."""
    spans = partition_spans(size[0], partition_bytes // DTYPES[size[1]])
    runs = [run for run in _runs(pricer, leaves) if run.holds(chosen).any()]
    matrices = [pricer.catalogue.padded(run.options) for run in runs]
    shape = len(chosen), max(numbers.shape[1] for numbers in matrices)
    sets, whole, last = np.full(shape, -1), np.zeros(shape), np.zeros(shape)
    sizes = np.empty((len(chosen), 2), dtype=np.int64)
    for run, numbers in zip(runs, matrices, strict=True):
        mine, width = np.flatnonzero(run.holds(chosen)), numbers.shape[1]
        picked = numbers[chosen[mine] - run.start]
        cuts = _cuts(size, run, spans)
        for (start, stop), us in ((cuts[0], whole), (cuts[-1], last)):
            sets_by_shape, us_by_shape, _ = pricer.shape_costs(numbers, _partition(run, stop - start, size))
            us[mine, :width] = us_by_shape[picked]
            sets[mine, :width] = sets_by_shape[picked]
        sizes[mine] = np.stack([(picked >= 0).sum(axis=1), np.full(len(mine), len(cuts))], axis=1)
    return sets, whole, last, sizes


def _rows_of(pricer: Pricer, size: Size, run: _Run, spans: Sequence[tuple[int, int]]) -> Reals:
    cuts = _cuts(size, run, spans)
    tail = _leaf_features(pricer, run, cuts[-1][1] - cuts[-1][0], size)
    full = tail if len(cuts) == 1 else _leaf_features(pricer, run, cuts[0][1], size)
    rows = np.zeros((len(run.options), WIDTH))
    join_partitions(full, tail, len(cuts), pricer.costs.links.burst(pricer.cluster).credit_us, rows)
    return rows


def _cut_finer(pricer: Pricer, size: Size, run: _Run, rows: Reals, parts: int) -> Reals:
    """The least that rows can be where more of the bucket travels along, in any number of partitions up to ``parts``.

    Those are no smaller than as many of the unit alone, and the last, which has what rounding leaves, no smaller than
    ``least``. What passes a lane is no less than with few partitions or with many.
    """
    numel = size[0]
    each = min(-(-numel // (parts * SHARD_ALIGN)) * SHARD_ALIGN, numel)
    least = min(max(numel // parts - SHARD_ALIGN * (parts - 1), 1), numel)
    full, tail = (_leaf_features(pricer, run, elements, size) for elements in (each, least))
    credit = pricer.costs.links.burst(pricer.cluster).credit_us
    finer = np.zeros_like(rows)
    join_partitions(full, tail, parts, credit, finer)
    rows = np.minimum(rows, finer)
    loads, both = rows[:, :NUM_RESOURCES], np.minimum(full, tail)
    through = both[:, COSTS : COSTS + NUM_RESOURCES] + loads + both[:, COSTS + NUM_RESOURCES :]
    through[:, BURST_LANE] -= credit
    rows[:, CHAIN] = np.maximum(full[:, CHAIN], np.where(loads > 0.0, through, 0.0).max(axis=1))
    return rows


def _cuts(size: Size, run: _Run, spans: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    # Compressors of several rounds are not cut.
    return spans if run.options[0].num_rounds == 1 else [(0, size[0])]


def undominated(rows: Reals, spends: Reals | None = None) -> Wholes:
    more = np.zeros((len(rows), 0)) if spends is None else np.ascontiguousarray(spends)
    order = np.argsort(rows[:, :COSTS].sum(axis=1) + more.sum(axis=1), kind="stable")
    front = np.empty(len(rows), dtype=np.int64)
    return np.sort(front[: pareto(rows, more, order, front)])


@dataclass(frozen=True)
class _Run:
    """Leaves of one compressor, which lie together and are priced at once: the first one's index, the options."""

    start: int
    compressor: CompressorSpec
    options: tuple[Option, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.options)

    def holds(self, leaves: Wholes) -> npt.NDArray[np.bool_]:
        return (self.start <= leaves) & (leaves < self.stop)


def _runs(pricer: Pricer, leaves: tuple[Choice, ...]) -> list[_Run]:
    # The leaves are kept with the answer, so that their identity stays their own.
    found: tuple[list[_Run], object] = pricer.remember(("runs", id(leaves)), lambda: (_find_runs(leaves), leaves))
    return found[0]


def _find_runs(leaves: tuple[Choice, ...]) -> list[_Run]:
    runs = []
    start = 0
    for spec, members in groupby(leaves, key=attrgetter("compressor")):
        options = tuple(choice.option for choice in members)
        runs.append(_Run(start, spec, options))
        start += len(options)
    return runs


def _partition(run: _Run, elements: int, size: Size) -> SizeKey:
    numel, dtype, runs = size
    return run.compressor, elements, dtype, runs if elements == numel else share_of_stretches(runs, elements, numel)


def _leaf_features(pricer: Pricer, run: _Run, elements: int, size: Size) -> Reals:
    numbers = pricer.catalogue.padded(run.options)
    sets, us, beside = pricer.shape_costs(numbers, _partition(run, elements, size))
    out = np.empty((len(run.options), COSTS + 2 * NUM_RESOURCES))
    leaf_features(numbers, sets, us, beside, limits_of(pricer.costs, pricer.cluster), out)
    return out


def _remembered(
    pricer: Pricer, unit: Unit, leaves: tuple[Choice, ...], partition_bytes: int, ledger: Ledger | None
) -> Undominated:
    size, parts = unit.size, unit.parts_within(partition_bytes)

    # The leaves are kept with the answer, so that their identity stays their own. Any ledger orders them alike.
    def found() -> tuple[Reals, list[int], tuple[Choice, ...]]:
        spends = None if ledger is None else ledger.shares_of(leaves)
        return *undominated_leaves(pricer, size, leaves, partition_bytes, spends=spends, parts_within=parts), leaves

    rows, names, _ = pricer.remember(("undominated", size, parts, id(leaves), partition_bytes, ledger is None), found)
    return rows, names


def relax(
    job: Job,
    units: Sequence[Unit],
    leaves: Leaves,
    partition_bytes: int,
    pricer: Pricer,
    ledger: Ledger | None = None,
) -> Relaxation:
    """The linear program of a job: see :mod:`espresso.search.bounds`."""
    groups = grouped(units)
    found = []
    for members in groups.values():
        unit = units[members[0]]
        mine = leaves_of(leaves, unit)
        rows, names = _remembered(pricer, unit, mine, partition_bytes, ledger)
        # All leaves are numbered: what moves to any of them spends is looked up by its kind.
        kinds = np.zeros(len(rows), dtype=np.int64) if ledger is None else ledger.of_leaves(mine)[names]
        found.append((rows, kinds, [mine[leaf] for leaf in names]))
    spends, limits = np.zeros((0, len(units), 1)), np.zeros(0)
    if ledger is not None:
        spends, limits = ledger.of_units(units), ledger.limits
        found = [
            _affordable(*one, spends[:, members], limits) for one, members in zip(found, groups.values(), strict=True)
        ]
    ends = np.cumsum([len(rows) for rows, _, _ in found])
    spans = np.empty((len(units), 2), dtype=np.int64)
    for members, (rows, _, _), end in zip(groups.values(), found, ends, strict=True):
        spans[members] = end - len(rows), end
    ready = np.array(job.ready_us)
    contention = job.costs.contention
    return Relaxation(
        ready[[unit.bucket for unit in units]],
        float(ready[-1]),
        np.concatenate([rows for rows, _, _ in found]),
        np.concatenate([kinds for _, kinds, _ in found]),
        spans[:, 0].copy(),
        spans[:, 1].copy(),
        tuple(one for _, _, origin in found for one in origin),
        contention.cores or 0.0,
        contention.backward_cores,
        NUM_RESOURCES if job.costs.links.in_flight > 1 else NUM_LANES,
        pricer.costs.links.burst(job.cluster).credit_us,
        job.forward_us + job.optimizer_us,
        spends,
        limits,
        _giants(units),
        ledger,
    )


_Rows = tuple[Reals, Wholes, list[Choice]]
"""Rows of one size with their kinds and origins."""


def _affordable(rows: Reals, kinds: Wholes, origin: list[Choice], spends: Reals, limits: Reals) -> _Rows:
    """Those that on some unit spend no more than a whole budget: no strategy within it has the others.

    Args:
        spends: float64[budgets, units of this size, kinds].
    """
    slack = limits[:, None] * (1 + ROUNDING)
    kept = np.flatnonzero((spends.min(axis=1) <= slack).all(axis=0)[kinds])
    if len(kept) in (0, len(rows)):  # what is forced may be too much for any budget
        return rows, kinds, origin
    return rows[kept], kinds[kept], [origin[row] for row in kept.tolist()]


def _giants(units: Sequence[Unit]) -> Wholes:
    total = sum(unit.numel for unit in units)
    largest = sorted(range(len(units)), key=lambda index: -units[index].numel)[:MOST_GIANTS]
    return np.array(sorted(index for index in largest if units[index].numel >= GIANT_SHARE * total), dtype=np.int64)
