"""What one search may choose from: compressors, leaves by kinds of units, terms and what choices spend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from espresso.model.job import SENSITIVITY, Job, JobError
from espresso.model.payload_sizes import PayloadBytes, create_compressor
from espresso.search.budgets import Ledger, narrower
from espresso.search.candidates import Unit, compressed_leaves, every_choice, raw_choices, units_of
from espresso.search.error_budget import Sensitivity, normal_sensitivity
from espresso.search.terms import Terms
from espresso.strategies import NONE, Choice, CompressorSpec
from espresso.strategies.constraints import EXACT, FREE, Constraints, parse_forced


@dataclass
class Space:
    """What one search may choose: everything but the job's buckets.

    Attributes:
        every: by the kinds of units that constraints make.
        certified: whether strategies are to be bounded.
    """

    specs: tuple[CompressorSpec, ...]
    training: tuple[Choice, ...]
    offloaded: tuple[Choice, ...]
    raw: tuple[Choice, ...]
    every: dict[str, tuple[Choice, ...]]
    payload: PayloadBytes
    terms: Terms
    ledger: Ledger
    certified: bool = True

    @property
    def budgets(self) -> Ledger | None:
        """What choices spend, if anything is bounded."""
        return self.ledger if self.terms.budgets.binds else None

    @property
    def constraints(self) -> Constraints | None:
        """If there are any."""
        return None if self.terms.constraints == Constraints() else self.terms.constraints

    def may(self, choice: Choice, kind: str) -> bool:
        """Whether tensors of a kind may take a choice: what others are forced to is not offered to all."""
        offered = kind != FREE or choice.compressor in (NONE, *self.specs)
        return offered and self.terms.constraints.allows(choice, kind)

    def forced(self, tensor: str, kind: str, *, narrow: bool) -> Choice:
        """What a tensor takes that may not have what others have: the first choice, or what keeps least."""
        leaves = self.every[kind]
        return min(leaves, key=lambda leaf: self.ledger.spent({tensor: leaf})[1]) if narrow else leaves[0]

    def units(self, job: Job) -> tuple[Unit, ...]:
        return units_of(job, self.constraints)


def check_specs(
    job: Job, compressor: CompressorSpec | str | Sequence[CompressorSpec | str]
) -> tuple[CompressorSpec, ...]:
    """Those to search for, without ``none``.

    Raises:
        JobError: the job has no costs for one of them.
    """
    given = (compressor,) if isinstance(compressor, CompressorSpec | str) else tuple(compressor)
    specs = tuple(spec if isinstance(spec, CompressorSpec) else CompressorSpec.parse(spec) for spec in given)
    for spec in specs:
        if spec != NONE and not job.costs.devices(spec):
            known = sorted({cost.spec for cost in job.costs.compute}) or ["none at all"]
            raise JobError(f"the job has no costs for compressor '{spec}'; it has {', '.join(known)}")
    return tuple(dict.fromkeys(spec for spec in specs if spec != NONE))


def sensitivity_of(job: Job, given: Sensitivity | None) -> Sensitivity | None:
    """What compressors owe: as given, else as it was measured on the job's run; None where nobody says.

    Raises:
        JobError: the job's is faulty.
    """
    if given is None and SENSITIVITY in job.meta:
        return Sensitivity.from_json(job.meta[SENSITIVITY])
    return given


def assumed(job: Job, specs: Iterable[CompressorSpec]) -> Sensitivity:
    """What compressors owe of normal numbers beside the job's optimizer, where nothing was measured."""
    specs = tuple(specs)
    corrected = any(create_compressor(spec).correction for spec in specs)
    return normal_sensitivity(specs, scale=job.gain_scale, corrected=corrected)


def _forced_apart(
    job: Job, terms: Terms, known: Sequence[CompressorSpec], sensitivity: Sensitivity
) -> tuple[CompressorSpec, ...]:
    """Compressors of which it is said what they owe of some tensors, which may be all that are forced to them.

    Raises:
        JobError: where a budget is kept to, it is not said of one of these.
    """
    found = []
    for tensor in job.tensors:
        kind = terms.constraints.kind_of(tensor)
        spec = NONE if kind in (FREE, EXACT) else parse_forced(kind)[0]
        if spec != NONE and spec not in known:
            if terms.error_budget is not None:
                sensitivity.of(spec, tensor.name)
            if sensitivity.knows(spec):
                found.append(spec)
    return tuple(dict.fromkeys(found))


def space_of(
    job: Job,
    specs: tuple[CompressorSpec, ...],
    payload: PayloadBytes,
    terms: Terms,
    sensitivity: Sensitivity | None,
    *,
    certified: bool = True,
) -> Space:
    """What a search of these compressors under these terms may choose from.

    Raises:
        JobError: an error budget for a compressor of which nothing is known; no option is what is forced.
    """
    forced = terms.constraints.forced()
    known = tuple(dict.fromkeys((*specs, *(spec for spec in forced if spec != NONE))))
    names = [tensor.name for tensor in job.tensors]
    sensitivity = sensitivity_of(job, sensitivity)
    asked = terms.error_budget is not None
    partly: tuple[CompressorSpec, ...] = ()
    if sensitivity is None and asked:
        sensitivity = assumed(job, known)
    elif sensitivity is not None:
        known = tuple(spec for spec in known if (asked and spec in specs) or sensitivity.knows(spec, names))
        partly = _forced_apart(job, terms, known, sensitivity)
    ledger = Ledger(
        job.tensors, job.cluster, known, sensitivity, terms.budgets, partly=partly,
        storage=terms.residual_dtype, transactional=terms.transactional,
    )  # fmt: skip
    if terms.error_budget is not None:
        specs = tuple(spec for spec in specs if spec in known)
    if terms.residual_budget_mb is not None:
        specs += tuple(more for spec in specs for more in narrower(spec, job, terms.residual_dtype))
        forced += tuple(more for spec in forced for more in narrower(spec, job, terms.residual_dtype))
    training, offloaded = compressed_leaves(job, specs)
    whole = every_choice(job, specs)
    every = {FREE: whole}
    for kind in {terms.constraints.kind_of(tensor) for tensor in job.tensors} | {FREE}:
        mine = terms.constraints.of(whole, kind)
        if forced and kind != FREE:
            said = terms.constraints.of(every_choice(job, check_specs(job, forced)), kind)
            mine = tuple(dict.fromkeys(said + mine))
        every[kind] = mine
        if not every[kind]:
            raise JobError(f"constraints: no option on {job.cluster} is what tensors are forced to ({kind!r})")
    if every[FREE] == whole:
        every[FREE] = whole  # the list that earlier searches have priced
    return Space(specs, training, offloaded, raw_choices(job.cluster), every, payload, terms, ledger, certified)
