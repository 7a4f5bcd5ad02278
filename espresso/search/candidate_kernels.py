"""The candidates' kernels: what pruning compares, and the rows that stay."""

from __future__ import annotations

from espresso.model.arrays import Flags, Reals, Wholes
from espresso.model.jit import inner_kernel, kernel
from espresso.model.timeline_kernels import LANES_OF_SET, NUM_LANES

CHAIN, HOST, TRAINING_FIRST, LONGEST = range(NUM_LANES, NUM_LANES + 4)
"""Columns of :func:`chain_features`."""


@kernel
def chain_features(starts: Wholes, task_set: Wholes, task_us: Reals, task_beside: Reals, features: Reals) -> None:
    """What pruning compares, for chains that start at rows ``starts``; ``features`` float64[n, LONGEST + 1] of zeros.

    Columns: totals of the lanes, length of the chain, host time, training work first, longest task.
    """
    for i in range(starts.shape[0]):
        row = starts[i]
        if task_set[row] == 0:
            features[i, TRAINING_FIRST] = task_us[row]
        while task_set[row] >= 0:
            us = task_us[row]
            lanes = LANES_OF_SET[task_set[row]]
            for k in range(3):
                if k == 0 or lanes[k] != lanes[k - 1]:
                    features[i, lanes[k]] += us
            features[i, CHAIN] += us + task_beside[row, 1]
            features[i, HOST] += us * task_beside[row, 0]
            features[i, LONGEST] = max(features[i, LONGEST], us)
            row += 1


@kernel
def undominated(features: Reals, keep: Flags) -> None:
    """Leaves ``keep`` bool[n], all true before, at rows that no other matches or beats everywhere.

    (The other must be earlier or strictly better somewhere.)
    """
    n, width = features.shape
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            no_worse = True
            better = j < i
            for k in range(width):
                if features[j, k] > features[i, k]:
                    no_worse = False
                    break
                if features[j, k] < features[i, k]:
                    better = True
            if no_worse and better:
                keep[i] = False
                break


@kernel
def first_of_equals(
    features: Reals,
    full: Wholes,
    tail: Wholes,
    task_set: Wholes,
    task_us: Reals,
    task_beside: Reals,
    keep: Flags,
) -> None:
    """Leaves ``keep``, all true before, at rows whose task sequences differ from those of every earlier row."""
    n, width = features.shape
    for i in range(n):
        for j in range(i):
            same = True
            for k in range(width):
                if features[j, k] != features[i, k]:
                    same = False
                    break
            if (
                same
                and _equal_chains(full[i], full[j], task_set, task_us, task_beside)
                and _equal_chains(tail[i], tail[j], task_set, task_us, task_beside)
            ):
                keep[i] = False
                break


@inner_kernel
def _equal_chains(a: int, b: int, task_set: Wholes, task_us: Reals, task_beside: Reals) -> bool:
    while task_set[a] == task_set[b]:
        if task_set[a] < 0:
            return True
        if task_us[a] != task_us[b] or task_beside[a, 0] != task_beside[b, 0] or task_beside[a, 1] != task_beside[b, 1]:
            return False
        a += 1
        b += 1
    return False
