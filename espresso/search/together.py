"""Several units at once: what one gives back of a lane or a budget another may take, which no single move can do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from espresso.model.arrays import Wholes
from espresso.search.candidates import Leaves, leaves_of
from espresso.search.evaluator import Evaluator
from espresso.search.local_search import Guide, LocalSearch


def _each(units: int, at_once: int, tried: int) -> int:
    """Leaves of each of so many at once, of so many units, that can be tried."""
    number = math.comb(units, at_once) if at_once else 0
    return int((tried / number) ** (1 / at_once)) - 1 if number else 0  # what a unit has is tried too


def pairs_fit(units: int, tried: int) -> bool:
    """Whether every pair of so many units can be tried."""
    return _each(units, 2, tried) > 0


def move_together(
    evaluator: Evaluator,
    led: Guide,
    leaves: Leaves,
    strategy: Wholes,
    makespan_us: float,
    few: Wholes,
    tried: int,
    effort: int,
) -> tuple[float, int]:
    """Improve a strategy by pairs of a few units and by single ones, under budgets also by all of the few at once.

    Args:
        strategy: is changed.
        few: int64[n], in order of release. Of many the pairs are too many: nothing is tried.
        tried: combinations in a pass.
        effort: events that it may take, about.

    Returns:
        Its makespan, and the events that it took.
    """
    groups = []
    for at_once in dict.fromkeys((2, len(few)) if led.ledger is not None else (2,)):
        if (each := _each(len(few), at_once, tried)) > 0:
            groups += [(list(some), each) for some in itertools.combinations(range(len(few)), at_once)]
    if not groups:
        return makespan_us, 0
    most = max(each for _, each in groups)
    if led.ledger is not None and not pairs_fit(len(strategy), tried):
        most = min(most, led.lists.shape[1])  # of a giant what the program likes: all its leaves take long to price
    lists = _offered(evaluator, led, leaves, few, most)
    search = LocalSearch(evaluator, led)
    before = np.inf
    while makespan_us < before * (1 - 1e-5) and search.spent < effort:
        before = makespan_us
        for some, each in groups:
            mine = np.ascontiguousarray(lists[some, :each])
            makespan_us = search.together(strategy, makespan_us, few[some], mine, effort - search.spent)
        makespan_us = search.sweep(strategy, makespan_us, effort - search.spent)
    return makespan_us, search.spent


def _offered(evaluator: Evaluator, led: Guide, leaves: Leaves, few: Wholes, most: int) -> Wholes:
    """int64[few, most]: what is tried for each, -1 after the end.

    What is not dominated; if that is few, then what is: a chain of more tasks takes longer, and lets others pass in
    between. The quickest alone comes first. Under budgets what the program likes is before all that, and the first of
    every kind, then the second, and so on.
    """
    found = np.full((len(few), most), -1, dtype=np.int64)
    candidates = evaluator.candidates
    for row, unit in zip(found, few, strict=True):
        size, mine = evaluator.units[unit].size, leaves_of(leaves, evaluator.units[unit])
        listed = led.lists[unit][led.lists[unit] >= 0] if led.ledger is not None else np.empty(0, dtype=np.int64)
        for prune in (True, False):
            if len(listed) < most:
                more = candidates.distinct(size, mine, prune=prune)
                more = more[~np.isin(more, listed)]
                listed = np.append(listed, more[np.argsort(candidates.alone_us(more), kind="stable")])
        if led.ledger is not None:
            listed = _by_kind(led.ledger.kinds_of(candidates.choices[number] for number in listed), listed)
        row[: len(listed)] = listed[:most]
    return found


def _by_kind(kinds: Wholes, listed: Wholes) -> Wholes:
    turns: dict[int, Iterator[int]] = {}
    place = np.array([next(turns.setdefault(kind, itertools.count())) for kind in kinds.tolist()])
    return listed[np.argsort(place, kind="stable")]
