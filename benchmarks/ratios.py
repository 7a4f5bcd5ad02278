"""Ratios of paired measurements, with their intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Ratio:
    """A ratio of times and its 95 % interval."""

    value: float
    low: float
    high: float


FEW = 10
"""Pairs up to which Student's interval is used: ranks of so few say little."""


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> Ratio:
    """The typical ``times[i] / reference[i]`` with its 95 % interval, on logarithms.

    The pairs were measured one after the other, so that what slows the machine down slows both. Still a
    pause of the machine hits one of the two now and then. So the value is Hodges and Lehmann's estimate, the
    median over the means of all pairs of ratios, and its interval Wilcoxon's (signed ranks), which such
    outliers hardly move. Up to ``FEW`` pairs: the geometric mean with Student's t. With a single pair there
    is no interval: its ends are 0 and infinity.
    """
    logs = [math.log(a / b) for a, b in zip(times, reference, strict=True)]
    if len(logs) < 2:
        return Ratio(math.exp(logs[0]), 0.0, math.inf)
    low, value, high = _student(logs) if len(logs) <= FEW else _wilcoxon(logs)
    return Ratio(math.exp(value), math.exp(low), math.exp(high))


def half_interval(values: Sequence[float]) -> float:
    """Half of the mean's 95 % interval, by Student's t; 0 for one value."""
    count = len(values)
    return float(stats.t.ppf(0.975, count - 1)) * statistics.stdev(values) / math.sqrt(count) if count > 1 else 0.0


def _student(values: Sequence[float]) -> tuple[float, float, float]:
    mean, half = statistics.fmean(values), half_interval(values)
    return mean - half, mean, mean + half


def _wilcoxon(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower end, estimate and upper end from the sorted means of all pairs (each value with itself too)."""
    count = len(values)
    means = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    spread = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    outside = max(0, math.floor(len(means) / 2 - float(stats.norm.ppf(0.975)) * spread))
    return means[outside], statistics.median(means), means[-1 - outside]
