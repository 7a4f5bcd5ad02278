"""Settings of an :class:`~espresso.live.state.EspressoState`, checked before anything starts."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields
from typing import Any

from espresso.comm.keep.residual import check_storage

logger = logging.getLogger("espresso")

_ENVIRONMENT = {
    "ESPRESSO_TIMEOUT_S": ("timeout_s", float),
    "ESPRESSO_RANKS_PER_NODE": ("ranks_per_node", int),
    "ESPRESSO_ARTIFACTS_DIR": ("artifacts_dir", str),
}


@dataclass(frozen=True)
class Config:
    """Keyword settings of ``espresso.register``.

    Attributes:
        timeout_s: a collective that takes longer fails, and so does a step that makes no progress. A rank that
            dies is noticed at once, through its closed connections; this is for one that hangs. Longer than
            the longest pause of a rank in which the others train on (an evaluation on rank 0, a checkpoint).
        ranks_per_node: overrides which ranks share a node; 1 leaves only the flat options.
        exact_vectors: automatic mode leaves tensors of at most one dimension and this many elements uncompressed
            (biases, norms): there is next to nothing to save on them. 0 leaves none.
        exact_tensors: tensors of any shape and at most this many elements too, as far as that keeps three quarters of
            the time that compression saves, of the sizes in the model up to the largest with which it does. 0 leaves
            none.
        sign_block: automatic mode has so many elements of ``efsignsgd`` and ``onebit`` share a mean, where that adds
            at most 2 % to a step, or 5 % in tensors of up to 131 072 elements alone, where they are a tenth of what is
            compressed. 0: the compressor's own 256.
        least_sent: automatic mode has top-k and DGC send at least this many numbers of a tensor, where that keeps
            three quarters of the time that compression saves, else a half or a quarter as many. Small tensors hold
            much of what training needs, and cost little. 1: the ratio alone.
        partition_bytes: groups above this size are cut and pipelined; None lets the search decide.
        seed: of the shared random numbers.
        transactional: keep residuals untouched by a non-finite iteration. False halves residual memory,
            and a step with an inf or NaN then damages the residuals it touched.
        residual_dtype: how residuals are kept between iterations: ``float32``, ``bf16`` (half the memory) or ``int8``
            (a quarter, blocks of 256). The narrow ones lose a rounding in every iteration (``comm/keep/residual.py``).
        feedback_gain: the part of what was not sent that is added to the next gradient, above 0 and up to 1, which is
            classical error feedback. Less damps its swing (``docs/convergence.md``); nothing is lost either way. None
            takes each compressor's own: 1/8 for signs and random-k, 1/4 for top-k and its kin, 1 for the others.
        offload_threads: threads of the host worker pool; None takes the cores this rank may use.
        warmup_steps: plain steps before measuring (DDP rebuilds its buckets in the second).
        profile_steps: plain steps in which gaps are measured.
        race_steps: steps of each block when strategies race against plain.
        race_rounds: how often the blocks alternate.
        decide_by: iterations after which automatic mode has decided. Until the race it trains on plain averages, the
            better for what is learnt first; 0 races as soon as the job is measured.
        steps_per_epoch: what compressors that warm up by epochs count with; None waits for ``state.set_epoch``.
        check_every: compare parameters between ranks every so many steps; 0 never.
        artifacts_dir: where strategy, job and measured intervals are written; None writes nothing.
    """

    timeout_s: float = 300.0
    ranks_per_node: int | None = None
    exact_vectors: int = 16384
    exact_tensors: int = 16384
    sign_block: int = 64
    least_sent: int = 2048
    partition_bytes: int | None = None
    seed: int = 0
    transactional: bool = True
    residual_dtype: str = "float32"
    feedback_gain: float | None = None
    offload_threads: int | None = None
    warmup_steps: int = 4
    profile_steps: int = 8
    race_steps: int = 5
    race_rounds: int = 2
    decide_by: int = 58
    steps_per_epoch: int | None = None
    check_every: int = 0
    artifacts_dir: str | None = None

    def __post_init__(self) -> None:
        positive = ("timeout_s", "profile_steps", "race_steps", "race_rounds")
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        for name in (
            "warmup_steps",
            "check_every",
            "exact_vectors",
            "exact_tensors",
            "sign_block",
            "decide_by",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")
        if self.sign_block % 32:
            raise ValueError(f"sign_block must be a multiple of 32, got {self.sign_block!r}")
        if self.least_sent < 1:
            raise ValueError(f"least_sent must be at least 1, got {self.least_sent!r}")
        check_storage(self.residual_dtype)
        if self.feedback_gain is not None and not 0 < self.feedback_gain <= 1:
            raise ValueError(f"feedback_gain must be above 0 and at most 1, got {self.feedback_gain!r}")
        if self.partition_bytes is not None and self.partition_bytes < 0:
            raise ValueError(f"partition_bytes must be at least 0, got {self.partition_bytes!r}")
        if self.steps_per_epoch is not None and self.steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be at least 1, got {self.steps_per_epoch!r}")
        if self.warmup_steps < 3:
            raise ValueError(
                f"warmup_steps={self.warmup_steps}: DDP rebuilds its buckets in the second step; allow at least 3"
            )
        if self.race_steps < 3:
            raise ValueError(f"race_steps={self.race_steps}: the first step of a block is dropped; allow at least 3")

    @property
    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks: every setting but where files are written."""
        return {name: value for name, value in vars(self).items() if name != "artifacts_dir"}

    @classmethod
    def from_keywords(cls, keywords: dict[str, Any]) -> Config:
        """A config from keyword arguments and the environment's overrides, which are logged when used.

        Raises:
            TypeError: an unknown keyword, by name.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(keywords) - known)
        if unknown:
            raise TypeError(f"espresso has no setting {unknown[0]!r}; settings are {', '.join(sorted(known))}")
        values = dict(keywords)
        for variable, (name, kind) in _ENVIRONMENT.items():
            if variable in os.environ:
                try:
                    values[name] = kind(os.environ[variable])
                except ValueError:
                    raise ValueError(f"{variable}={os.environ[variable]!r} is not a valid {kind.__name__}") from None
                logger.info("%s=%s overrides %s", variable, os.environ[variable], name)
        return cls(**values)
