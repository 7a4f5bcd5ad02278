"""The certificate's data: every unit's undominated candidates as rows of costs (see ``bound_kernels``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from espresso.model.job import Job
from espresso.model.payload_sizes import share_of_stretches
from espresso.model.pricing import Pricer
from espresso.model.timeline_kernels import NUM_LANES, limits_of
from espresso.search.bound_kernels import COSTS, NUM_RESOURCES, WIDTH, join_partitions, leaf_features, pareto
from espresso.search.candidates import Size, Unit
from espresso.search.error_budget import ErrorTable
from espresso.strategies import DTYPES, Choice, CompressorSpec, Option
from espresso.strategies.plan import partition_spans

Wholes = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

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
        kind_of: int64[candidates]: a row's compressor, as a column of ``errors``.
        first, last: int64[units]: each unit's candidates among ``rows``.
        origin: for every row (index into the leaves, partition size).
        cores: cores shared by everything, 0 under the paper's assumption.
        backward_cores: what backward demands.
        resources: how many bound the makespan (:mod:`espresso.search.bound_kernels`).
        errors: float64[units, kinds]: what a compressor adds to the error; zeros without a budget.
        budget: the most that errors may add up to.
        giants: int64[few], in order of release.
        kinds: compressor to column of ``errors``.
    """

    release_us: Reals
    backward_us: float
    rows: Reals
    kind_of: Wholes
    first: Wholes
    last: Wholes
    origin: tuple[tuple[int, int], ...]
    cores: float
    backward_cores: float
    resources: int
    errors: Reals
    budget: float
    giants: Wholes
    kinds: dict[object, int] = field(default_factory=dict)

    @property
    def has_budget(self) -> bool:
        return self.budget < np.inf


Undominated = tuple[Reals, list[tuple[int, int]]]


def undominated_leaves(
    pricer: Pricer,
    size: Size,
    leaves: tuple[Choice, ...],
    partitions: Sequence[int],
    *,
    compressors_apart: bool = False,
) -> Undominated:
    """The rows of a size's leaves at every partition size, dominated ones dropped.

    Safe for the bound: it prices a candidate with weights that are never negative, so one that is no less in
    every cost never is a minimum alone. (It says nothing about list schedules: there a dominated candidate
    can, rarely, finish earlier.) Under an error budget compressors differ in a cost that rows do not hold,
    and are kept apart.

    Returns:
        float64[kept, WIDTH] and for every row its (index into ``leaves``, partition size).
    """
    numel, dtype, _ = size
    blocks: list[Reals] = []
    origin: list[tuple[int, int]] = []
    seen: set[tuple[tuple[int, int], ...]] = set()
    for limit in partitions:
        spans = partition_spans(numel, limit // DTYPES[dtype])
        if (key := tuple(spans)) in seen:
            continue
        seen.add(key)
        for run in _runs(pricer, leaves):
            # Compressors of several rounds are never cut.
            cuts = spans if run.options[0].num_rounds == 1 else [(0, numel)]
            tail = _leaf_features(pricer, run, cuts[-1][1] - cuts[-1][0], size)
            full = tail if len(cuts) == 1 else _leaf_features(pricer, run, cuts[0][1], size)
            rows = np.empty((len(run.options), WIDTH))
            join_partitions(full, tail, len(cuts), rows)
            kept = _undominated(rows)
            blocks.append(rows[kept])
            origin += [(run.start + index, limit) for index in kept.tolist()]
    rows = np.concatenate(blocks)
    if compressors_apart or len(blocks) == 1:
        return rows, origin
    kept = _undominated(rows)
    return rows[kept], [origin[index] for index in kept]


def _undominated(rows: Reals) -> Wholes:
    order = np.argsort(rows[:, :COSTS].sum(axis=1), kind="stable")
    front = np.empty(len(rows), dtype=np.int64)
    return np.sort(front[: pareto(rows, order, front)])


@dataclass(frozen=True)
class _Run:
    """Leaves of one compressor, which lie together and are priced at once: the first one's index, the options."""

    start: int
    compressor: CompressorSpec
    options: tuple[Option, ...]


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


def _leaf_features(pricer: Pricer, run: _Run, elements: int, size: Size) -> Reals:
    numel, dtype, runs = size
    segments = runs if elements == numel else share_of_stretches(runs, elements, numel)
    numbers = pricer.catalogue.padded(run.options)
    sets, us, beside = pricer.shape_costs(numbers, (run.compressor, elements, dtype, segments))
    out = np.empty((len(run.options), COSTS + 2 * NUM_RESOURCES))
    leaf_features(numbers, sets, us, beside, limits_of(pricer.costs), out)
    return out


def _remembered(
    pricer: Pricer, size: Size, leaves: tuple[Choice, ...], partitions: tuple[int, ...], apart: bool
) -> Undominated:
    # The leaves are kept with the answer, so that their identity stays their own.
    rows, names, _ = pricer.remember(
        ("undominated", size, id(leaves), partitions, apart),
        lambda: (
            *undominated_leaves(pricer, size, leaves, partitions, compressors_apart=apart),
            leaves,
        ),
    )
    return rows, names


def relax(
    job: Job,
    units: Sequence[Unit],
    leaves: tuple[Choice, ...],
    partitions: Sequence[int],
    pricer: Pricer,
    errors: ErrorTable | None = None,
) -> Relaxation:
    """The linear program of a job: see :mod:`espresso.search.bounds`."""
    where: dict[Size, tuple[int, int]] = {}
    blocks: list[Reals] = []
    origin: list[tuple[int, int]] = []
    total = 0
    for unit in units:
        if unit.size not in where:
            rows, names = _remembered(pricer, unit.size, leaves, tuple(partitions), errors is not None)
            where[unit.size] = (total, total + len(rows))
            blocks.append(rows)
            origin += names
            total += len(rows)
    spans = np.array([where[unit.size] for unit in units], dtype=np.int64)
    ready = np.array(job.ready_us)
    contention = job.costs.contention
    kinds = np.zeros(total, dtype=np.int64)
    table = np.zeros((len(units), 1))
    if errors is not None:
        column = errors.columns
        kinds = np.array([column[leaves[leaf].compressor] for leaf, _ in origin], dtype=np.int64)
        table = errors.of_units(units)
    return Relaxation(
        ready[[unit.bucket for unit in units]],
        float(ready[-1]),
        np.concatenate(blocks),
        kinds,
        spans[:, 0].copy(),
        spans[:, 1].copy(),
        tuple(origin),
        contention.cores or 0.0,
        contention.backward_cores,
        NUM_RESOURCES if job.costs.links.in_flight > 1 else NUM_LANES,
        table,
        np.inf if errors is None else errors.budget,
        _giants(units),
        {} if errors is None else {spec: column for spec, column in errors.columns.items()},
    )


def _giants(units: Sequence[Unit]) -> Wholes:
    total = sum(unit.numel for unit in units)
    largest = sorted(range(len(units)), key=lambda index: -units[index].numel)[:MOST_GIANTS]
    return np.array(sorted(index for index in largest if units[index].numel >= GIANT_SHARE * total), dtype=np.int64)


__all__ = ["Relaxation", "relax", "undominated_leaves"]
