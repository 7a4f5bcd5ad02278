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


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> Ratio:
    """The geometric mean of ``times[i] / reference[i]``, by Student's t on the logarithms.

    The pairs were measured one after the other, so that what slows the machine down slows both. With a single
    pair there is no interval: its ends are 0 and infinity.
    """
    logs = [math.log(a / b) for a, b in zip(times, reference, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
