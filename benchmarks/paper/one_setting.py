"""How many of a cluster's ratios one setting for all of them brings within 25 %.

Causes are named row by row and may contradict one another; here all rows of a cluster have the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from benchmarks.paper.causes import Cause, Setting
from benchmarks.paper.published import NVLINK, PCIE
from benchmarks.paper.ratios import SETTLED, Ratio, figure_16_ratios, figures_12_and_13_ratios, scaling_factors
from benchmarks.paper.rows import AND, Row, beside, near

MOST_TOGETHER = 2
"""Causes beside the forward pass."""


def one_setting() -> Iterator[Row]:
    """Our conventions, the forward pass, and the best one and two causes beside it."""
    every = [*scaling_factors(), *figures_12_and_13_ratios(), *figure_16_ratios()]
    for cluster in (NVLINK, PCIE):
        ratios = [ratio for ratio in every if ratio.case.cluster == cluster]
        yield _row(cluster, Setting(), ratios)
        for number in range(MOST_TOGETHER + 1):
            others = [cause for cause in Cause if cause not in SETTLED]
            settings = [Setting(SETTLED | set(some)) for some in itertools.combinations(others, number)]
            yield _row(cluster, max(settings, key=lambda setting: _within(setting, ratios)), ratios)


def _within(setting: Setting, ratios: Sequence[Ratio]) -> int:
    return sum(near(ratio.ours(setting) / ratio.published) for ratio in ratios)


def _row(cluster: str, setting: Setting, ratios: Sequence[Ratio]) -> Row:
    names = AND.join(cause.value for cause in Cause if cause in setting) or "our conventions"
    note = f"of {len(ratios)} ratios within 25 %"
    return beside("one setting for all", f"{cluster}, {names}", None, float(_within(setting, ratios)), note)
