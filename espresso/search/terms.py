"""What a strategy must meet beside being fast: budgets, constraints, and how many kinds of choices it may have.

A job that was measured on a live run says with which terms it was searched, so that ``espresso search job.json``
arrives at what that run took into its race. ``Terms()`` asks for nothing: the shortest predicted iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from espresso.model.job import OFFERED, TERMS, Job
from espresso.model.links import JobError
from espresso.search.budgets import Budgets
from espresso.strategies import NONE, RESIDUAL_DTYPES, CompressorSpec
from espresso.strategies.constraints import Constraints
from espresso.strategies.fields import as_json, faults, number, read_as, whole

EXACT_VECTORS = 16384
"""Vectors of at most this many elements stay exact unless the user says otherwise: biases and the weights of norms are
a thousandth of a model's bytes, and an error in one of them moves every unit of a layer alike."""

NEAR = 1.02
"""Strategies this near each other are as fast, predicted or in a race: less than half of the twentieth by which a step
may be above the best. A finer line would tell noise apart: of 76 pairs predicted to be within a tenth
(benchmarks/results/prediction_*) three in four are off by more than that."""

MAX_CANDIDATES = 2
"""Of what a search finds, so many race against plain beside a simple one: more would take too many steps."""

HARMLESS, HARMLESS_ADAPTIVE = 4.0, 2.5
"""Gradients that a strategy may owe where espresso chooses between compressors; the second where the optimizer divides
by what it remembers of squared gradients, as Adam does (docs/convergence.md)."""

MB = 1e6
_GONE = ("least_sent", "exact_tensors", "sign_block")
"""Rules of earlier versions, in the jobs that they wrote: budgets took their place."""


@dataclass(frozen=True)
class Terms:
    """What a search keeps to.

    Attributes:
        error_budget: gradients that a strategy may owe (:mod:`espresso.search.budgets`); None: any number.
        residual_budget_mb: memory of all residuals of a rank, in millions of bytes; None: any.
        races: whether what is found races against plain DDP, which stands for all that compress nothing, and a simple
            strategy beside it.
        all_kinds: whether strategies that are nearly as fast with fewer kinds of choices are left aside.
        residual_dtype, transactional: how residuals are kept (:class:`espresso.live.config.Config`); within
            ``residual_budget_mb`` those of some tensors perhaps in fewer bits.
        partition_bytes: the one partition size that is searched; None: those that fit the job.
        constraints: the user's own limits.
    """

    error_budget: float | None = None
    residual_budget_mb: float | None = None
    races: bool = False
    all_kinds: bool = True
    residual_dtype: str = "float32"
    transactional: bool = True
    partition_bytes: int | None = None
    constraints: Constraints = field(default_factory=Constraints)

    def __post_init__(self) -> None:
        with faults(JobError):
            for name in ("error_budget", "residual_budget_mb"):
                if getattr(self, name) is not None:
                    number(getattr(self, name), name)
            if self.partition_bytes is not None:
                whole(self.partition_bytes, "partition_bytes")
        if self.residual_dtype not in RESIDUAL_DTYPES:
            known = ", ".join(RESIDUAL_DTYPES)
            raise JobError(f"residual_dtype must be one of {known}, got {self.residual_dtype!r:.80}")

    @property
    def budgets(self) -> Budgets:
        return Budgets(
            math.inf if self.error_budget is None else self.error_budget,
            math.inf if self.residual_budget_mb is None else self.residual_budget_mb * MB,
        )

    @property
    def partitions(self) -> tuple[int, ...] | None:
        """What :func:`espresso.search.search.search` takes."""
        return None if self.partition_bytes is None else (self.partition_bytes,)

    def to_meta(self) -> dict[str, Any]:
        """An entry for ``Job.meta`` and for a strategy's notes."""
        return {TERMS: as_json(self)}

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Terms | None:
        """The terms in a job's meta or a strategy's notes; None where there are none.

        Raises:
            JobError: the entry is none of ours.
        """
        body = meta.get(TERMS)
        if body is None:
            return None
        if isinstance(body, dict):
            body = {name: value for name, value in body.items() if name not in _GONE}
            if "for_exactness" in body:
                body["races"] = bool(body.pop("for_exactness"))
            if "exact_vectors" in body:  # of a version with rules
                constraints = {"exact_vectors": body.pop("exact_vectors")}
                body = {"constraints": constraints, "races": True, "all_kinds": False, **body}
        with faults(JobError):
            return read_as(cls, body, f"meta.{TERMS}")

    @classmethod
    def usual(cls, job: Job, specs: Sequence[CompressorSpec], *, automatic: bool = False) -> Terms:
        """What a search of these compressors keeps to where nobody says otherwise: as the live run that measured the
        job, else few kinds, or automatic mode's terms.

        Errors are bounded as where the compressors are registered: one that is named may owe any number, unless a live
        run of it alone had a budget; several what the live run's might, else as much as is harmless beside any
        optimizer.

        Raises:
            JobError: see :meth:`of`.
        """
        live, several = cls.of(job.meta), sum(spec != NONE for spec in specs) > 1
        terms = live or (AUTOMATIC if automatic else cls(all_kinds=False))
        if not several and job.meta.get(OFFERED) != "; ".join(map(str, specs)):
            return replace(terms, error_budget=None)
        if several and terms.error_budget is None:
            return replace(terms, error_budget=HARMLESS_ADAPTIVE)
        return terms


AUTOMATIC = Terms(races=True, all_kinds=False, constraints=Constraints(exact_vectors=EXACT_VECTORS))
"""Automatic mode's, unless the user says otherwise."""
