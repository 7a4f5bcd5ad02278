"""What automatic mode does with a search's result before anything trains with it, and the same offline.

The search minimises time alone. Automatic mode trades a little of it for exactness: small vectors stay raw
(:func:`leave_vectors`), and a sum is compressed again only where that pays (:func:`compress_once`). A job that was
measured on a live run says with which settings (:class:`Automatic`), so that ``espresso search job.json`` arrives
at what that run took into its race.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from espresso._fields import check_keys, whole
from espresso.job import Job
from espresso.strategies import PLAIN, Choice, Strategy, parse_option

if TYPE_CHECKING:
    from espresso.search_result import Ranked, SearchResult

EXACT_VECTORS = 16384
"""Vectors of at most this many elements stay uncompressed unless the user says otherwise."""

TWICE_MUST_SAVE = 1.25
"""Compressing a sum again must save this factor of a step. Its error is no rank's own, and the residuals of both
ends push each other up: at a learning rate that plain training and one compression take well, two may diverge."""

_ONCE_FLAT = "comp > flat.allgather > dec"
_ONCE_HIERARCHICAL = "intra.reduce_scatter > comp > inter.allgather > dec > intra.allgather"
_KEY = "automatic"


@dataclass(frozen=True, slots=True)
class Automatic:
    """The settings of ``espresso.register`` that its search depends on, beside the compressor.

    Attributes:
        exact_vectors: tensors of at most one dimension and this many elements stay uncompressed.
        partition_bytes: the one partition size that was searched; None: those that fit the job.
    """

    exact_vectors: int = EXACT_VECTORS
    partition_bytes: int | None = None

    def to_meta(self) -> dict[str, Any]:
        """An entry for ``Job.meta``."""
        return {_KEY: {"exact_vectors": self.exact_vectors, "partition_bytes": self.partition_bytes}}

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Automatic | None:
        """The settings of the run that a job was measured on; None for jobs from elsewhere.

        Raises:
            JobError: the entry is none of ours.
        """
        body = meta.get(_KEY)
        if body is None:
            return None
        where = f"meta.{_KEY}"
        check_keys(body, where, ("exact_vectors", "partition_bytes"))
        size = body["partition_bytes"]
        return cls(
            whole(body["exact_vectors"], f"{where}.exact_vectors"),
            None if size is None else whole(size, f"{where}.partition_bytes"),
        )

    @property
    def partitions(self) -> tuple[int, ...] | None:
        """What :func:`espresso.search.search` takes."""
        return None if self.partition_bytes is None else (self.partition_bytes,)


def gentle(job: Job, result: SearchResult, exact_vectors: int = EXACT_VECTORS) -> SearchResult:
    """The result with gentler strategies; plain where none of them is predicted to beat it.

    Args:
        job: the one that was searched, with its own buckets.
        exact_vectors: see :class:`Automatic`.

    Returns:
        ``alternatives`` are the gentle forms of the search's own, best first, those not below plain left out;
        ``chosen`` is the first of them.
    """
    rows = [
        _gentler(_with_bucket_cap(row, result.bucket_cap_mb), exact_vectors)
        for row in result.alternatives
        if row.predicted_us < result.uncompressed_us and row.strategy.num_compressed
    ]
    rows = sorted(
        (row for row in _distinct(rows) if row.predicted_us < result.uncompressed_us),
        key=lambda row: row.predicted_us,
    )
    chosen = rows[0] if rows else _plain(job, result)
    return replace(
        result,
        chosen=chosen,
        predicted_us=chosen.predicted_us,
        alternatives=tuple(rows),
        # A bucket that is split by its vectors is outside the certificate's space.
        lower_bound_us=min(result.lower_bound_us, chosen.predicted_us),
        upper_bound_us=min(result.upper_bound_us, chosen.predicted_us),
    )


def _plain(job: Job, result: SearchResult) -> Ranked:
    notes = {"predicted_us": result.uncompressed_us, "mode": job.mode.value, "found_by": "uncompressed"}
    strategy = Strategy.uniform(job.tensors, job.cluster, PLAIN)
    return replace(
        result.chosen, name="uncompressed", strategy=replace(strategy, notes=notes), job=job,
        predicted_us=result.uncompressed_us,
    )  # fmt: skip


def _with_bucket_cap(row: Ranked, cap_mb: float | None) -> Ranked:
    return replace(row, strategy=replace(row.strategy, bucket_cap_mb=cap_mb))


def _distinct(rows: Sequence[Ranked]) -> Iterator[Ranked]:
    kept: list[Strategy] = []
    for row in rows:
        if row.strategy not in kept:
            kept.append(row.strategy)
            yield row


def _gentler(row: Ranked, exact_vectors: int) -> Ranked:
    """The strategy, or the one that compresses every gradient once where that is nearly as fast."""
    found = _with_exact_vectors(row, exact_vectors)
    once = compress_once(row.strategy)
    if once == row.strategy:
        return found
    other = replace(row, name=f"{row.name}, compressed once", strategy=once)
    other = _with_exact_vectors(other, exact_vectors)
    return other if other.predicted_us <= TWICE_MUST_SAVE * found.predicted_us else found


def _with_exact_vectors(row: Ranked, exact_vectors: int) -> Ranked:
    """The strategy with small vectors left exact, and what it takes so."""
    from espresso.timeline import simulate

    row = replace(row, strategy=leave_vectors(row.strategy, exact_vectors))
    predicted = simulate(row.plan, row.job, pricer=row.pricer).iteration_us
    notes = {**row.strategy.notes, "predicted_us": predicted, "found_by": row.name}
    return replace(row, strategy=replace(row.strategy, notes=notes), predicted_us=predicted)


def compress_once(strategy: Strategy) -> Strategy:
    """The strategy with an all-gather of payloads wherever a sum would be compressed again."""
    once = parse_option(_ONCE_HIERARCHICAL if strategy.cluster.is_hierarchical else _ONCE_FLAT)
    changes = {
        name: Choice(once, choice.compressor)
        for name, choice in strategy.choices.items()
        if choice.option.num_compressions > 1 and not choice.option.uses_offload
    }
    return strategy.with_choices(changes)


def leave_vectors(strategy: Strategy, most: int) -> Strategy:
    """The strategy with every tensor of at most one dimension and ``most`` elements uncompressed.

    Biases and the weights of norms are a thousandth of a model's bytes: there is next to nothing to save on
    them, and an error in one of them moves every unit of a layer alike.
    """
    small = {t.name: PLAIN for t in strategy.tensors if len(t.shape) <= 1 and t.numel <= most}
    changed = strategy.with_choices(small)
    return changed if changed.num_compressed else strategy


__all__ = ["EXACT_VECTORS", "Automatic", "compress_once", "gentle", "leave_vectors"]
