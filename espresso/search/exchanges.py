"""Several units at once, where budgets bind: what one gives back another may spend, which no single move can do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from espresso.search.budgets import ROUNDING
from espresso.search.candidates import Leaves, leaves_of
from espresso.search.evaluator import Evaluator
from espresso.search.local_search import Guide

Wholes = npt.NDArray[np.int64]

MOST_TRIED = 20_000
"""Strategies that a pass may look at: about a fifth of a second of small jobs, and large ones need it less."""
LEAST_EACH = 4
"""Candidates of a unit, without which trying all units together says little."""
PASSES = 3


def exchange(evaluator: Evaluator, led: Guide, leaves: Leaves, strategy: Wholes, makespan_us: float) -> float:
    """Improve a strategy within its budgets; ``strategy`` is changed. Small jobs try all units, others pairs of them.

    Returns:
        Its makespan.
    """
    if led.ledger is None:
        return makespan_us
    units = at_once = len(strategy)
    each = int(MOST_TRIED ** (1 / units))
    if each < LEAST_EACH:
        at_once = 2
        each = int((MOST_TRIED / math.comb(units, 2)) ** 0.5)
    if each < 2:
        return makespan_us
    together = list(itertools.combinations(range(units), at_once))
    listed = [[int(number) for number in row if number >= 0] for row in led.lists]
    if len(together) == 1:
        listed = [row + _others(evaluator, leaves, unit, row) for unit, row in enumerate(listed)]
    kinds = led.ledger.kinds_of(evaluator.candidates.choices)
    offered = [_by_kind(kinds, row) for row in listed]
    for _ in range(PASSES):
        before = makespan_us
        for members in together:
            makespan_us = _try(evaluator, led, kinds, strategy, makespan_us, members, offered, each)
        if makespan_us >= before or len(together) == 1:
            break
    return makespan_us


def _try(
    evaluator: Evaluator, led: Guide, kinds: Wholes, strategy: Wholes, best: float, units: tuple[int, ...],
    offered: list[list[int]], each: int,
) -> float:  # fmt: skip
    """The best of all combinations of the first few that these units may take."""
    mesh = np.meshgrid(*(_with(offered[unit], int(strategy[unit]), each) for unit in units), indexing="ij")
    rows = np.repeat(strategy[None], mesh[0].size, axis=0)
    for unit, column in zip(units, mesh, strict=True):
        rows[:, unit] = column.ravel()
    everyone = np.arange(len(strategy))
    spent = led.spends[:, everyone, kinds[rows]].sum(axis=2)
    rows = rows[(spent <= led.limits[:, None] * (1 + ROUNDING)).all(axis=0)]
    if not len(rows):
        return best
    index, found, _ = evaluator.batch(np.ascontiguousarray(rows), best * (1 - ROUNDING), cut=True)
    if index < 0:
        return best
    strategy[:] = rows[index]
    return found


def _with(numbers: list[int], present: int, each: int) -> Wholes:
    return np.array([present, *[number for number in numbers if number != present][: each - 1]], dtype=np.int64)


def _others(evaluator: Evaluator, leaves: Leaves, unit: int, listed: list[int]) -> list[int]:
    """What the program never likes, and a list schedule may: the quickest alone first."""
    size = evaluator.units[unit].size
    rest = np.setdiff1d(
        evaluator.candidates.distinct(size, leaves_of(leaves, evaluator.units[unit]), prune=False), listed
    )
    return [int(number) for number in rest[np.argsort(evaluator.candidates.alone_us(rest), kind="stable")]]


def _by_kind(kinds: Wholes, listed: list[int]) -> list[int]:
    """The first of every kind, then the second, and so on."""
    turns: dict[int, Iterator[int]] = {}
    place = [next(turns.setdefault(int(kinds[number]), itertools.count())) for number in listed]
    return [number for _, number in sorted(zip(place, listed, strict=True), key=lambda pair: pair[0])]


__all__ = ["exchange"]
