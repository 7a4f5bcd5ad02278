"""What automatic mode does with a search's result before anything trains with it, and the same offline.

The search minimises time alone. Automatic mode trades a little of it for exactness: small vectors stay raw
(:func:`leave_vectors`), a sum is compressed again only where that pays (:func:`compress_once`), and a quarter of the
time saved may go into payloads that say more (:func:`refine_signs`, :func:`send_at_least`) and into small tensors
(:func:`leave_tensors`). A job that was measured on a live run says with which settings (:class:`Automatic`), so that
``espresso search job.json`` arrives at what that run took into its race.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from espresso.model.job import Job, JobError
from espresso.strategies import (
    NONE,
    PLAIN,
    Bucket,
    Choice,
    CompressorSpec,
    Device,
    Strategy,
    TensorSpec,
    parse_option,
)
from espresso.strategies.fields import as_json, faults, read_as, whole

if TYPE_CHECKING:
    from espresso.compressors.base import Traits
    from espresso.search.result import Ranked, SearchResult

EXACT_VECTORS = 16384
"""Vectors of at most this many elements stay uncompressed unless the user says otherwise."""

TWICE_MUST_SAVE = 1.25
"""Compressing a sum again must save this factor of a step. Its error is no rank's own, and the residuals of both
ends push each other up: at a learning rate that plain training and one compression take well, two may diverge."""

EXACT_TENSORS = 16384
"""Tensors of any shape and at most this many elements stay uncompressed where there is time."""

LEAST_SENT = 2048
"""Top-k and DGC send at least so many numbers of a tensor unless the user says otherwise."""

SIGN_BLOCK = 64
"""Elements that share a mean of scaled sign and onebit unless the user says otherwise."""

MORE_MAY_TAKE = 0.25
"""What is sent beyond the search's choice may take this part of the time that compression saves."""

SIGNS_MAY_TAKE = 1.02
"""Finer signs may take this factor of a step. They cost in proportion to the model, and their work on the cores is not
priced; what is sent of small tensors costs large models nothing."""

FINE_TENSORS = 131_072
"""Where that is too much for the whole model, signs are finer in tensors of up to this many elements,"""

FINE_MAY_TAKE = 1.05
"""if that takes no more than this factor of a step,"""

FINE_SHARE = 0.1
"""and if they hold this part of what is compressed: a few small tensors among large ones would only split groups."""

SIMPLE_MAY_TAKE = 1.5
"""A strategy of one simple option is worth trying up to this factor of the best prediction: on cores that several
workers share, predictions are furthest off for strategies of many steps."""

SIMPLE = "everything once"
"""What that strategy is called."""

MAX_CANDIDATES = 2
"""Of the others, so many race against plain: more would take too many steps."""

_ONCE_FLAT = "comp > flat.allgather > dec"
_SUMMED_FLAT = "comp > flat.allreduce > dec"
_ONCE_HIERARCHICAL = "intra.reduce_scatter > comp > inter.allgather > dec > intra.allgather"
_KEY = "automatic"
_LATER = {"least_sent": 1, "exact_tensors": 0, "sign_block": 0}  # with what runs that do not say it ran


@dataclass(frozen=True, slots=True)
class Automatic:
    """The settings of ``espresso.register`` that its search depends on, beside the compressor.

    Attributes:
        exact_vectors: tensors of at most one dimension and this many elements stay uncompressed.
        least_sent: sparsifiers send at least this many numbers of a tensor, where there is time for it.
        partition_bytes: the one partition size that was searched; None: those that fit the job.
        exact_tensors: tensors of any shape and at most this many elements stay uncompressed, where there is time.
        sign_block: so many elements of a sign compressor share a mean, where there is time; 0: its default.
    """

    exact_vectors: int = EXACT_VECTORS
    partition_bytes: int | None = None
    least_sent: int = LEAST_SENT
    exact_tensors: int = EXACT_TENSORS
    sign_block: int = SIGN_BLOCK

    def __post_init__(self) -> None:
        for name in ("exact_vectors", "least_sent", "exact_tensors", "sign_block"):
            whole(getattr(self, name), name)
        if self.partition_bytes is not None:
            whole(self.partition_bytes, "partition_bytes")

    def to_meta(self) -> dict[str, Any]:
        """An entry for ``Job.meta``."""
        return {_KEY: as_json(self)}

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Automatic | None:
        """The settings of the run that a job was measured on; None for jobs from elsewhere.

        Raises:
            JobError: the entry is none of ours.
        """
        body = meta.get(_KEY)
        if body is None:
            return None
        with faults(JobError):
            return read_as(cls, _LATER | body if isinstance(body, dict) else body, f"meta.{_KEY}")

    @property
    def partitions(self) -> tuple[int, ...] | None:
        """What :func:`espresso.search.search.search` takes."""
        return None if self.partition_bytes is None else (self.partition_bytes,)


def trade_for_exactness(job: Job, result: SearchResult, settings: Automatic | None = None) -> SearchResult:
    """The result with more exact strategies; plain where none of them is predicted to beat it.

    Args:
        job: the one that was searched, with its own buckets.
        settings: of the run, live or imagined; None: the defaults.

    Returns:
        ``alternatives`` are the more exact forms of the search's own and of :func:`simplest`, best first, those not
        below plain left out; ``chosen`` is the first of them.
    """
    settings = settings or Automatic()
    simple = simplest(job, result)
    rows = [
        _saying_more(
            _more_exact(_with_bucket_cap(row, result.bucket_cap_mb), settings.exact_vectors),
            settings,
            result.uncompressed_us,
        )
        for row in (*result.alternatives, *([] if simple is None else [simple]))
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


def simplest(job: Job, result: SearchResult) -> Ranked | None:
    """Everything compressed once and exchanged in one routine: no step on numbers between the ranks of a node.

    Returns:
        The strategy, or None where its prediction rules it out, where the search compressed nothing or by several
        compressors, or where its compressor takes several rounds.
    """
    compressors = result.chosen.strategy.compressors - {NONE}
    if len(compressors) != 1:
        return None
    (spec,) = compressors
    traits = _traits_of(spec)
    if traits.rounds > 1 or Device.TRAINING not in job.costs.devices(spec):
        return None
    option = parse_option(_SUMMED_FLAT if traits.summable else _ONCE_FLAT)
    strategy = Strategy.uniform(
        job.tensors, job.cluster, Choice(option, spec), partition_bytes=result.chosen.strategy.partition_bytes
    )
    row = _priced(replace(result.chosen, name=SIMPLE, strategy=strategy, job=job))
    return row if row.predicted_us < SIMPLE_MAY_TAKE * result.predicted_us else None


def racers(result: SearchResult) -> tuple[Ranked, ...]:
    """Those of :func:`trade_for_exactness`'s alternatives that race against plain: the best two, and the simple one."""
    return tuple(row for place, row in enumerate(result.alternatives) if place < MAX_CANDIDATES or row.name == SIMPLE)


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


def _more_exact(row: Ranked, exact_vectors: int) -> Ranked:
    """The strategy, or the one that compresses every gradient once where that is nearly as fast."""
    found = _with_exact_vectors(row, exact_vectors)
    once = compress_once(row.strategy)
    if once == row.strategy:
        return found
    other = replace(row, name=f"{row.name}, compressed once", strategy=once)
    other = _with_exact_vectors(other, exact_vectors)
    return other if other.predicted_us <= TWICE_MUST_SAVE * found.predicted_us else found


def _saying_more(row: Ranked, settings: Automatic, uncompressed_us: float) -> Ranked:
    """With finer signs, more sent of small tensors, and the smallest exact: what there is time for, in this order.

    What is exact then rides in payloads where that takes no longer than a sum of its own.

    On small models a sparsifier's bytes did more spread over its tensors than in exact ones (docs/convergence.md).
    """
    limit = row.predicted_us + MORE_MAY_TAKE * (uncompressed_us - row.predicted_us)
    coarse = row
    for most, factor in ((None, SIGNS_MAY_TAKE), (FINE_TENSORS, FINE_MAY_TAKE)):
        if row is coarse and (most is None or _share_of_small(coarse.strategy, most) >= FINE_SHARE):
            finer = refine_signs(coarse.strategy, settings.sign_block, most)
            row = _first_within(coarse, [finer], min(limit, factor * coarse.predicted_us))
    least, given = settings.least_sent, row.strategy
    row = _first_within(row, (send_at_least(given, least // part) for part in (1, 2, 4)), limit)
    more = row.strategy
    sizes = {tensor.numel for tensor in given.tensors if tensor.numel <= settings.exact_tensors}
    row = _first_within(row, (leave_tensors(more, most) for most in sorted(sizes, reverse=True)), limit)
    return _first_within(row, [in_payloads(row.strategy, row.job.laid_out)], row.predicted_us)


def _share_of_small(strategy: Strategy, most: int) -> float:
    """The part that tensors of at most ``most`` elements have in what is compressed."""
    sizes = [t.numel for t in strategy.tensors if strategy.choices[t.name].option.is_compressed]
    return sum(size for size in sizes if size <= most) / max(1, sum(sizes))


def _first_within(row: Ranked, strategies: Iterable[Strategy], limit_us: float) -> Ranked:
    """The row with the first of the strategies that takes no longer; as it is where none does."""
    for strategy in strategies:
        if strategy != row.strategy:
            found = _priced(replace(row, strategy=strategy))
            if found.predicted_us <= limit_us:
                return found
    return row


def _with_exact_vectors(row: Ranked, exact_vectors: int) -> Ranked:
    """The strategy with small vectors left exact, and what it takes so."""
    return _priced(replace(row, strategy=leave_vectors(row.strategy, exact_vectors)))


def _priced(row: Ranked) -> Ranked:
    """The row with what its strategy takes, or would with what is exact in payloads (:func:`in_payloads`) if less."""
    from espresso.model.timeline import simulate

    riding = replace(row, strategy=in_payloads(row.strategy, row.job.laid_out))
    ways = (row,) if riding.strategy == row.strategy else (row, riding)
    predicted = min(simulate(way.plan, row.job, pricer=row.pricer).iteration_us for way in ways)
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


def send_at_least(strategy: Strategy, least: int) -> Strategy:
    """The strategy with sparsifiers told to send at least so many numbers of a tensor, unless their spec says it.

    A hundredth of a small tensor is a few numbers a step, and the others wait for hundreds of steps, while all of it
    is few bytes.
    """
    if least <= 1:
        return strategy
    return _with_parameter(strategy, "least", least)


def refine_signs(strategy: Strategy, block: int, most: int | None = None) -> Strategy:
    """The strategy with scaled sign and onebit told how many elements share a mean, unless their spec says it.

    In all tensors, or in those of at most ``most`` elements.

    A number much below its block's mean is sent as that mean again and again; with fewer in a block this happens less.
    """
    return _with_parameter(strategy, "block", block, most) if block else strategy


def _with_parameter(strategy: Strategy, key: str, value: int, most: int | None = None) -> Strategy:
    """The strategy with a parameter set where it makes a compressor finer, unless the spec says it."""
    more = {
        spec: CompressorSpec(spec.name, (*spec.params, (key, value)))
        for spec in strategy.compressors
        if all(said != key for said, _ in spec.params) and _traits_of(spec).finer == key
    }
    changes = {
        tensor.name: Choice(choice.option, more[choice.compressor])
        for tensor in strategy.tensors
        if (choice := strategy.choices[tensor.name]).compressor in more
        if most is None or tensor.numel <= most
    }
    return strategy.with_choices(changes) if changes else strategy


def _traits_of(spec: CompressorSpec) -> Traits:
    from espresso.compressors.registry import create

    return create(spec).traits


def leave_vectors(strategy: Strategy, most: int) -> Strategy:
    """The strategy with every tensor of at most one dimension and ``most`` elements uncompressed.

    Biases and the weights of norms are a thousandth of a model's bytes: there is next to nothing to save on
    them, and an error in one of them moves every unit of a layer alike.
    """
    return _leave(strategy, lambda tensor: len(tensor.shape) <= 1 and tensor.numel <= most)


def in_payloads(strategy: Strategy, buckets: Iterable[Bucket]) -> Strategy:
    """The strategy with what is summed apart raw in a payload of its bucket: so many exchanges fewer a step."""
    changes: dict[str, Choice] = {}
    for bucket in buckets:
        choices = {slot.tensor: strategy.choices[slot.tensor] for slot in bucket.slots}
        payloads = Counter(choice.option for choice in choices.values() if choice.option.carries_payloads)
        for option, _ in payloads.most_common(1):
            changes |= {name: Choice(option, NONE) for name, choice in choices.items() if choice == PLAIN}
    return strategy.with_choices(changes) if changes else strategy


def leave_tensors(strategy: Strategy, most: int) -> Strategy:
    """The strategy with nothing compressed of the tensors of at most ``most`` elements, whatever their shape."""
    choices = strategy.choices
    return _leave(strategy, lambda tensor: tensor.numel <= most and choices[tensor.name].option.is_compressed)


def _leave(strategy: Strategy, is_small: Callable[[TensorSpec], bool]) -> Strategy:
    changed = strategy.with_choices({t.name: PLAIN for t in strategy.tensors if is_small(t)})
    return changed if changed.num_compressed else strategy
