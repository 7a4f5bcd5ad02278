"""The body that top-k, DGC and other sparsifiers share.

Body of a segment of d elements with k slots (``count`` = k = ratio * d, rounded to nearest, or as the parameter k
says, in [least, d]; least is 1 unless a parameter says otherwise)::

    0               4    n, how many slots count, 0 <= n <= k
    4               4    zero
    8               k*s  values, s = 4 or 8 bytes, in the layout's dtype
    8 + k*s         4*e  ends, uint32: how many slots lie in the first, the first two, ... spans of 65536 elements;
                         e = ceil(d / 65536) - 1, for in all spans lie n
    8 + k*s + 4*e   2*k  uint16, where a slot's element lies in its span: ascending within a span, and below d

Slots from n on are zero. A zero is never sent, so n < k where fewer than k numbers are non-zero. Ends that fall or
exceed n, duplicate or unsorted indices are malformed: decoders scatter-add without looking back, and ranks must agree.
Values come first and ends second, so that each lies at a multiple of its own size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import DAMPED, Bytes, Layout, Traits
from espresso.compressors.common import ADDED, BaseCompressor

PREFIX_BYTES = 8

SPAN = 1 << 16
"""Elements whose indices share their upper half, which the ends say."""

RUN = 16
"""Samples are taken in runs of a cache line."""

MIN_SAMPLE = 4096
"""Samples of a segment are at least this many; a segment less than twice as long is sampled whole."""


@dataclass(frozen=True, slots=True)
class Selection:
    """How a sparsifier goes from a sample to what it sends, on every backend.

    Attributes:
        part: the part of a segment that is sampled.
        slack: standard deviations by which the sample's rank is raised.
        enough: the pass repeats while fewer than ``enough * k`` pass.
        attempts: how often the threshold is lowered before the exact one is computed (or none).
        exact: whether the top k must be complete.
        threshold: above 0: this one, in place of a sample's. (The host raises it while k pass; that does not show.)
    """

    part: float
    slack: float
    enough: float
    attempts: int
    exact: bool
    threshold: float = 0.0


def sample_size(numel: int, k: int, part: float, slack: float) -> tuple[int, int]:
    """How many runs to sample and which rank of the sample to take as threshold.

    The rank that k would have in the sample, raised by ``slack`` standard deviations: with slack the threshold
    lies below the k-th magnitude most of the time, so that nothing of the top k is missed.
    """
    wanted = min(numel, max(MIN_SAMPLE, int(part * numel)))
    if 2 * wanted >= numel:
        return (numel + RUN - 1) // RUN, k
    expected = wanted * (k / numel)
    return (wanted + RUN - 1) // RUN, max(1, int(expected + slack * math.sqrt(expected) + 0.5))


def num_slots(numel: int, ratio: float, least: int = 1, k: int = 0) -> int:
    """k for a segment, or else ``ratio * numel`` to the nearest; at least ``least`` and at most all (0 if empty)."""
    return min(numel, max(least, k or int(ratio * numel + 0.5)))


def num_ends(numel: int) -> int:
    """How many ends a body has: one for each span but the last."""
    return max(numel - 1, 0) // SPAN


def ends_at(k: int, itemsize: int) -> int:
    """Where in a body the ends begin, in bytes."""
    return PREFIX_BYTES + k * itemsize


def places_at(numel: int, k: int, itemsize: int) -> int:
    """Where in a body the lower halves of the indices begin, in bytes."""
    return ends_at(k, itemsize) + 4 * num_ends(numel)


def sent_slots(layout: Layout, payload: Bytes) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
    """(segment, indices that count) of every compressed segment of a payload that we encoded."""
    for segment in np.flatnonzero(~layout.raw).tolist():
        numel, k, itemsize = int(layout.numels[segment]), int(layout.counts[segment]), layout.dtype.itemsize
        body = payload[int(layout.offsets[segment]) :]
        first, at = ends_at(k, itemsize), places_at(numel, k, itemsize)
        count = int(body[:4].view(np.uint32)[0])
        ends = body[first:at].view(np.uint32).astype(np.int64)
        spans = np.arange(len(ends) + 1, dtype=np.uint32) * np.uint32(SPAN)
        indices = np.repeat(spans, np.diff(ends, prepend=0, append=count))
        indices += body[at : at + 2 * count].view(np.uint16)
        yield segment, indices


class Sparsifier(BaseCompressor):
    """What sends k slots a segment. (Its fields belong to the subclasses: payloads' digests hold their order.)

    Attributes:
        is_ternary: bodies are those of :mod:`espresso.compressors.ternary`: signs and means in place of values.
        ratio: k / d, in (0, 1].
        least: k is at least this. A segment less than twice as long travels raw, which takes
            at most a third more bytes in float32 and keeps nothing back.
        k: the count itself, of every segment, in place of the ratio; 0 leaves it to the ratio.
    """

    is_ternary: ClassVar[bool] = False

    ratio: float
    least: int
    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_float("ratio", above=0.0)
        self.check_int("least", low=1)
        self.check_int("k", low=0)

    @property
    def raw_limit(self) -> int:
        """Segments with fewer elements travel raw."""
        return max(self.raw_below, 2 * self.least, 2 * self.k)

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """k, and the body of k slots."""
        k = num_slots(numel, self.ratio, self.least, self.k)
        return k, places_at(numel, k, itemsize) + 2 * k

    def sent(self, layout: Layout, payload: Bytes) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """What was chosen, segment by segment, where the traits say that it masks."""
        return sent_slots(layout, payload) if self.traits.masks else iter(())

    def selection(self) -> Selection:
        """How what is sent is found."""
        raise NotImplementedError


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Keeps the k numbers of largest magnitude in every segment; ties go to the lower index.

    Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018.

    Attributes:
        ratio, least, k: see :class:`Sparsifier`.
    """

    name: ClassVar[str] = "topk"
    traits: ClassVar[Traits] = Traits(exact_size=False, masks=True, sparse=True, feedback_gain=DAMPED)
    algorithm: ClassVar[int] = 6

    ratio: float = 0.01
    least: int = field(default=1, metadata=ADDED)
    k: int = field(default=0, metadata=ADDED)

    def selection(self) -> Selection:
        """A threshold somewhat below the k-th magnitude; if k pass, the top k are among them."""
        return Selection(part=0.01, slack=4.0, enough=1.0, attempts=2, exact=True)


@dataclass(frozen=True)
class Dgc(Sparsifier):
    """Sends the numbers above a threshold estimated from a sample; never more than k a segment.

    Deep Gradient Compression: Lin, Han, Mao, Wang, Dally, ICLR 2018.

    The threshold aims at k by a sample of magnitudes. Where it lets through fewer than 0.8 k it is lowered,
    at most ten times; where it lets through more than k, the k largest of those are selected exactly. (The
    paper raises the threshold by 1.3 there first. Selecting among the few that passed costs less than that
    second look and keeps exactly k.) So what is sent is always the top n of the segment, 0.8 k <= n <= k
    unless fewer are non-zero or the ten attempts did not suffice.

    Momentum and warm-up are kept by the training state (:mod:`espresso.compressors.momentum`,
    ``EspressoState.set_epoch``); a codec encodes with the ratio it is given.

    Attributes:
        ratio, least, k: see :class:`Sparsifier`.
        sample: the part of a segment that is sampled, in (0, 1]; small segments are sampled more densely.
        warmup_epochs: E of the warm-up that :meth:`at_epoch` follows; 0 means none.
    """

    name: ClassVar[str] = "dgc"
    traits: ClassVar[Traits] = Traits(exact_size=False, masks=True, sparse=True, feedback_gain=DAMPED)
    algorithm: ClassVar[int] = 7
    scheduled: ClassVar[frozenset[str]] = frozenset({"ratio", "warmup_epochs"})

    ratio: float = 0.01
    sample: float = 0.01
    warmup_epochs: int = 0
    least: int = field(default=1, metadata=ADDED)
    k: int = field(default=0, metadata=ADDED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_float("sample", above=0.0)
        self.check_int("warmup_epochs", low=0)
        if self.k and self.warmup_epochs:
            raise ValueError("compressor dgc: warmup_epochs lowers a ratio, and k is a count: leave one out")

    def _digested(self) -> list[tuple[str, Any]]:
        """As payloads were first written: momentum stands among the parameters."""
        found = dict(super()._digested())
        first = ("raw_below", "ratio", "sample", "momentum", "nesterov", "clip_norm", "warmup_epochs")
        return [(name, getattr(self, name)) for name in first] + [row for row in found.items() if row[0] not in first]

    @property
    def is_scheduled(self) -> bool:
        """Whether it warms up."""
        return self.warmup_epochs > 0

    def in_force(self, epoch: int, step: int) -> Dgc:
        """The compressor of this epoch."""
        return self.at_epoch(epoch) if self.is_scheduled else self

    def selection(self) -> Selection:
        """The threshold aims at k; it is lowered at most ten times where fewer than 0.8 k pass."""
        return Selection(part=self.sample, slack=0.0, enough=0.8, attempts=10, exact=False)

    def at_epoch(self, epoch: int) -> Dgc:
        """The compressor of an epoch: ratio ``max(base^((e+1)/(E+1)), base)`` while it warms up.

        Example:
            >>> [round(Dgc(ratio=0.001, warmup_epochs=2).at_epoch(e).ratio, 4) for e in range(3)]
            [0.1, 0.01, 0.001]
        """
        if epoch < 0:
            raise ValueError(f"compressor dgc: epoch must be at least 0, got {epoch}")
        exponent = min(1.0, (epoch + 1) / (self.warmup_epochs + 1))
        return replace(self, ratio=max(self.ratio**exponent, self.ratio), warmup_epochs=0)


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """Sends the numbers of at least the threshold's magnitude.

    What is compared is the gradient and, times the feedback gain, what is owed: so that of a number less than the
    threshold over the gain is owed, unless slots run out.

    Strom: Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015.

    Deviation from the paper: it sends the threshold with the number's sign, this one the number (as the peers do).
    Sizes are known before the exchange here, so that a segment has k = ratio * d slots: where more than k pass, the k
    largest are sent, and the rest is kept with the others until its turn comes.

    Attributes:
        threshold: in the units of the gradient (loss scale taken out), above 0.
        ratio: slots / d, in (0, 1].
    """

    name: ClassVar[str] = "threshold"
    traits: ClassVar[Traits] = Traits(exact_size=False, sparse=True, feedback_gain=DAMPED)
    algorithm: ClassVar[int] = 11

    threshold: float = 0.001
    ratio: float = 0.05
    least = 1
    k = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_float("threshold", above=0.0, high=1e30)

    @property
    def raw_limit(self) -> int:
        """Segments with fewer elements travel raw."""
        return self.raw_below

    def selection(self) -> Selection:
        """No sample and no second look."""
        return Selection(part=0.0, slack=0.0, enough=0.0, attempts=0, exact=False, threshold=self.threshold)
