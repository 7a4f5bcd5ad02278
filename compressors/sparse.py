"""The body that top-k, DGC and other sparsifiers share.

Body of a segment of d elements with k slots (``count`` = k = ratio * d, rounded to nearest, in [least, d];
least is 1 unless a parameter says otherwise)::

    0          4   n, how many slots count, 0 <= n <= k
    4          4   zero
    8          k*s values, s = 4 or 8 bytes, in the layout's dtype
    8 + k*s    4*k indices, uint32, ascending and below d, relative to the segment

Slots from n on are zero. A zero is never sent, so n < k where fewer than k numbers are non-zero. Duplicate
or unsorted indices are malformed: decoders scatter-add without looking back, and ranks must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Bytes, Layout

PREFIX_BYTES = 8

FEEDBACK_GAIN = 0.25
"""Of what is selected by magnitude: with an eighth, a short run ends before all is sent; with all of it, a number that
waited for a hundred steps arrives in one (docs/convergence.md)."""

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


def num_slots(numel: int, ratio: float, least: int = 1) -> int:
    """k for a segment: ``ratio * numel`` to the nearest, at least ``least`` and at most all (0 if empty)."""
    return min(numel, max(least, int(ratio * numel + 0.5)))


def sparse_body_size(numel: int, itemsize: int, ratio: float, least: int = 1) -> tuple[int, int]:
    """k, and the bytes of a body with k slots."""
    k = num_slots(numel, ratio, least)
    return k, PREFIX_BYTES + k * (itemsize + 4)


def sent_slots(layout: Layout, payload: Bytes) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
    """(segment, indices that count) of every compressed segment of a payload that we encoded."""
    for segment in np.flatnonzero(~layout.raw).tolist():
        offset, k = int(layout.offsets[segment]), int(layout.counts[segment])
        count = int(payload[offset : offset + 4].view(np.uint32)[0])
        at = offset + PREFIX_BYTES + k * layout.dtype.itemsize
        yield segment, payload[at : at + 4 * count].view(np.uint32)
