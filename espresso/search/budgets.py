"""What a strategy may cost beside time, and what each choice costs of it: error, and memory for residuals.

Both add up over tensors, so that the search and its bound can put a price on them:

- error: a strategy owes ``sqrt(sum over tensors of share x compressions x owed²)`` gradients, ``share`` being a
  tensor's part of the model's elements and ``owed`` how many of its gradients a compressor keeps back
  (:mod:`espresso.search.error_budget`). Raw tensors owe nothing; of a sum that is compressed again
  the square counts twice.
- memory: the bytes of all residuals of a rank, of rooted steps the root's: elements kept at every site of an option,
  times what an element takes. Within a budget of memory every compressor is a choice with its residual kept in fewer
  bits as well (:func:`narrower`): that owes as much, loses what the rounding loses
  (:mod:`espresso.comm.keep.residual`), and takes the time of packing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from espresso.model.arrays import Reals, Wholes
from espresso.model.job import Job
from espresso.model.links import JobError
from espresso.search.candidates import Unit
from espresso.search.error_budget import Sensitivity, has_rounds, keeps_back
from espresso.strategies import (
    DTYPES,
    NONE,
    RESIDUAL_DTYPES,
    Choice,
    Cluster,
    CompressorSpec,
    Option,
    Plan,
    TensorSpec,
    trace,
)
from espresso.strategies.flow import SHARD_ALIGN, Site

ALIGNED = 16
"""Elements to which the executor rounds every stretch of a residual up."""

MOST_REMEMBERED, MOST_LISTS = 1 << 16, 64
"""Options and lists of leaves; a hierarchical cluster has 4341, and each compression of them runs on either device."""

UNKNOWN = 1e15
ROUNDING = 1e-9
"""Sums round; a budget gives this much of itself."""

FULL = RESIDUAL_DTYPES[0]

BYTES_KEPT = dict(zip(RESIDUAL_DTYPES, (4.0, 2.0, 1.0 + 4 / 256), strict=True))
"""Of an element of a residual, by how it is stored; twice as many where steps can be undone."""


@dataclass(frozen=True)
class Budgets:
    """The most that a strategy may cost.

    Attributes:
        error: gradients that it may owe.
        residual_bytes: of all residuals of a rank.
    """

    error: float = math.inf
    residual_bytes: float = math.inf

    def __post_init__(self) -> None:
        for name in ("error", "residual_bytes"):
            value = getattr(self, name)
            if math.isnan(value) or value < 0:
                raise JobError(
                    f"{'an error' if name == 'error' else 'a memory'} budget is at least zero, got {value!r}"
                )

    @property
    def binds(self) -> bool:
        """Whether any of them can be exceeded."""
        return min(self.error, self.residual_bytes) < math.inf


Kind = tuple[CompressorSpec, int, float]
"""(compressor, compressions, elements kept over elements): choices of a kind spend alike."""

_RAW: Kind = (NONE, 0, 0.0)


class Ledger:
    """What the choices of one job's tensors spend.

    Args:
        sensitivity: what compressors owe; None: error is not known, and may not be bounded.
        partly: compressors of which it may say only what they owe of some tensors.
        storage, transactional: how the job keeps residuals (:class:`espresso.live.config.Config`).

    Attributes:
        limits: float64[budgets], of those that bind: of error its square.

    Raises:
        JobError: an error budget without a sensitivity, or a compressor that it does not know.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        cluster: Cluster,
        specs: Sequence[CompressorSpec],
        sensitivity: Sensitivity | None,
        budgets: Budgets,
        *,
        partly: Sequence[CompressorSpec] = (),
        storage: str = FULL,
        transactional: bool = True,
    ) -> None:
        if sensitivity is None and budgets.error < math.inf:
            raise JobError("an error budget needs to know what compressors owe: give a sensitivity")
        self.budgets, self._cluster, self._kept_as = budgets, cluster, (storage, transactional)
        self._numel = {tensor.name: tensor.numel for tensor in tensors}
        self._words = {tensor.name: tensor.numel * _words(tensor.dtype) for tensor in tensors}
        self._known = {NONE, *map(_owes_as, (*specs, *partly))} if sensitivity is not None else set()
        total = sum(self._numel.values()) or 1
        self._squares: dict[CompressorSpec, dict[str, float]] = {} if sensitivity is None else {
            _owes_as(spec): {
                n: size / total * sensitivity.of(spec, n) ** 2 if size else 0.0
                for n, size in self._numel.items() if spec in specs or not size or sensitivity.knows(spec, (n,))
            }
            for spec in (*partly, *specs)
        }  # fmt: skip
        self._kinds: dict[Kind, int] = {_RAW: 0}
        self._of_choice: dict[int, tuple[Choice, int]] = {}
        self._options = _options_on(cluster)
        self.limits = np.array([v for v in (budgets.error**2, budgets.residual_bytes) if v < math.inf])

    def kind(self, choice: Choice) -> int:
        """The number of a choice's kind; a new one where there is none."""
        known = self._of_choice.get(id(choice))
        if known is None:
            # The choice is kept, so that its identity stays its own: hashing one walks all its steps.
            number = self._kinds.setdefault(self._options.kind(choice), len(self._kinds))
            known = self._of_choice[id(choice)] = choice, number
        return known[1]

    def of_leaves(self, leaves: tuple[Choice, ...]) -> Wholes:
        """int64[leaves]: their kinds; new numbers where there are none."""
        kinds, of, _ = self._options.of(leaves)
        return np.array([self._kinds.setdefault(kind, len(self._kinds)) for kind in kinds], dtype=np.int64)[of]

    def kinds_of(self, choices: Iterable[Choice]) -> Wholes:
        """int64[choices]."""
        return np.array([self.kind(choice) for choice in choices], dtype=np.int64)

    def shares_of(self, leaves: tuple[Choice, ...]) -> Reals:
        """float64[leaves, 2]: what orders the choices of one compressor in error and in memory."""
        return self._options.of(leaves)[2]

    def of_units(self, units: Sequence[Unit]) -> Reals:
        """float64[budgets that bind, units, kinds]: what each kind spends on each unit."""
        names = [name for unit in units for name in unit.tensors]
        owner = np.repeat(np.arange(len(units)), [len(unit.tensors) for unit in units])

        def summed(values: Mapping[str, float]) -> Reals:
            weights = np.array([values.get(name, UNKNOWN) for name in names], dtype=np.float64)
            return np.asarray(np.bincount(owner, weights, len(units)), dtype=np.float64)

        elements = {dtype: summed(self._elements(dtype)) for dtype in RESIDUAL_DTYPES}
        squares = {spec: summed(values) for spec, values in self._squares.items()}
        whole = np.zeros((2, len(units), len(self._kinds)))
        for (spec, compressions, kept), column in self._kinds.items():
            if spec != NONE:
                # Of what nobody gave a sensitivity for more than any budget, and still a number.
                owed = squares.get(_owes_as(spec))
                whole[0, :, column] = UNKNOWN if owed is None else compressions * owed
                held_as = spec.residual_dtype or self._kept_as[0]
                whole[1, :, column] = kept * bytes_kept(spec, *self._kept_as) * elements[held_as]
        bind = [
            which for which, limit in enumerate((self.budgets.error, self.budgets.residual_bytes)) if limit < math.inf
        ]
        return np.ascontiguousarray(whole[bind])

    def _spends(self, kind: Kind, tensors: Sequence[str]) -> tuple[float, float]:
        spec, compressions, kept = kind
        if spec == NONE:
            return 0.0, 0.0
        squares = self._squares.get(_owes_as(spec))
        # Of what nobody gave a sensitivity for more than any budget.
        each = [math.inf] if squares is None else [squares.get(name, math.inf) for name in tensors]
        owed = compressions * sum(each)
        elements = self._elements(spec.residual_dtype or self._kept_as[0])
        return owed, kept * bytes_kept(spec, *self._kept_as) * sum(elements[name] for name in tensors)

    def _elements(self, dtype: str) -> Mapping[str, int]:
        """By tensor: numbers of the usual width."""
        return self._words if dtype == FULL else self._numel

    def knows(self, choices: Iterable[Choice]) -> bool:
        """Whether it is known what all of these owe."""
        return {_owes_as(choice.compressor) for choice in choices} <= self._known

    def spent(self, choices: Mapping[str, Choice]) -> tuple[float, float]:
        """(squared error, bytes) of a strategy, by tensor name."""
        by_kind: dict[Kind, list[str]] = {}
        kinds = list(self._kinds)
        for name, choice in choices.items():
            number = self.kind(choice)
            if number >= len(kinds):
                kinds = list(self._kinds)
            by_kind.setdefault(kinds[number], []).append(name)
        rows = [self._spends(kind, names) for kind, names in by_kind.items()]
        return sum(row[0] for row in rows), sum(row[1] for row in rows)

    def error(self, choices: Mapping[str, Choice]) -> float | None:
        """Gradients that a strategy owes; None where that is not known."""
        owed = math.sqrt(self.spent(choices)[0])
        return owed if math.isfinite(owed) else None

    def allows(self, choices: Mapping[str, Choice]) -> bool:
        """Whether a strategy keeps to the budgets."""
        squared, num_bytes = self.spent(choices)
        slack = 1 + ROUNDING
        fits = num_bytes <= self.budgets.residual_bytes * slack
        return fits and (self.budgets.error == math.inf or squared <= self.budgets.error**2 * slack)


def _words(dtype: str) -> int:
    """Numbers of the usual width in one of a residual that is kept in full: those of wide gradients are as wide."""
    return max(DTYPES[dtype] // 4, 1)


def bytes_kept(spec: CompressorSpec, storage: str, transactional: bool) -> float:
    """What an element of a compressor's residual takes in a job that keeps them so.

    Of one that a compressor of several rounds keeps narrowly there is an unpacked twin between its rounds.
    """
    kept = spec.residual_dtype or storage
    twin = BYTES_KEPT[FULL] if kept != FULL and has_rounds(spec) else 0.0
    return BYTES_KEPT[kept] * (2 if transactional else 1) + twin


def narrower(spec: CompressorSpec, job: Job, storage: str) -> tuple[CompressorSpec, ...]:
    """The compressor with its residual in fewer bits than the job keeps them in, where it is known what that takes on
    every device that it has.
    """
    if spec.residual_dtype or not keeps_back(spec):
        return ()
    dtypes, devices = RESIDUAL_DTYPES[RESIDUAL_DTYPES.index(storage) + 1 :], set(job.costs.devices(spec))
    return tuple(spec.kept_as(dtype) for dtype in dtypes if devices <= set(job.costs.devices(CompressorSpec(dtype))))


@lru_cache(maxsize=256)
def _owes_as(spec: CompressorSpec) -> CompressorSpec:
    return spec.kept_as("")


class _Options:
    """What a cluster's options keep, by identity: hashing one walks all its steps."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[int, tuple[Option, int, float]] = {}
        self._lists: dict[int, tuple[tuple[Choice, ...], tuple[Kind, ...], Wholes, Reals]] = {}

    def kind(self, choice: Choice) -> Kind:
        if choice.compressor == NONE:
            return _RAW
        option = choice.option
        known = self._known.get(id(option))
        if known is None:
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            # The option is kept, so that its identity stays its own; likewise the leaves below.
            known = option, option.num_compressions, _kept_share(option, self._cluster)
            self._known[id(option)] = known
        return choice.compressor, known[1], known[2] if keeps_back(choice.compressor) else 0.0

    def of(self, leaves: tuple[Choice, ...]) -> tuple[tuple[Kind, ...], Wholes, Reals]:
        """The kinds that there are among the leaves; which of them each is, and its compressions and part kept.

        The latter are int64[leaves] and float64[leaves, 2].
        """
        known = self._lists.get(id(leaves))
        if known is None:
            if len(self._lists) >= MOST_LISTS:
                self._lists.clear()
            kinds = [self.kind(choice) for choice in leaves]
            numbers: dict[Kind, int] = {}
            of = np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds], dtype=np.int64)
            shares = np.array([kind[1:] for kind in kinds], dtype=np.float64).reshape(-1, 2)
            known = self._lists[id(leaves)] = leaves, tuple(numbers), of, shares
        return known[1:]


@lru_cache(maxsize=8)
def _options_on(cluster: Cluster) -> _Options:
    return _Options(cluster)


@lru_cache(maxsize=1 << 14)
def _kept_share(option: Option, cluster: Cluster) -> float:
    """Elements that a rank keeps at all sites of an option, over those of a tensor; of rooted steps the root."""
    whole = SHARD_ALIGN * cluster.num_ranks**2
    flows = [flow for flow in trace(option, cluster, whole, 0, 0) if flow.site not in (None, Site.SERVER)]
    return sum(flow.before.region[1] - flow.before.region[0] for flow in flows) / whole


def residual_bytes(plan: Plan, rank: int, storage: str, transactional: bool) -> float:
    """What a rank's residuals will take under a plan, as the executor lays them out."""
    total = 0.0
    for part in plan.partitions:
        group = plan.groups[part.group]
        if group.choice.compressor == NONE or not keeps_back(group.choice.compressor):
            continue
        for flow in plan.flows(part.index, rank):
            if flow.site in (None, Site.SERVER) or not flow.before.active:
                continue
            start, stop = flow.before.region
            runs = group.segments(part.start + start, part.start + stop)
            elements = sum(-(-run.numel // ALIGNED) * ALIGNED for run in runs)
            if (group.choice.compressor.residual_dtype or storage) == FULL:
                elements *= _words(group.dtype)
            total += elements * bytes_kept(group.choice.compressor, storage, transactional)
    return total
