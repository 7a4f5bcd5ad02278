"""Times that were measured, cleared of what disturbed them: pure functions of (bytes, microseconds)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence


def usual(times: Sequence[float]) -> float:
    """The first decile. Where a processor wakes late (a virtual one that was idle: 4 ms), most short exchanges that are
    measured alone wait for it, at times four in five, and few between the computations of a step.

    >>> usual([4000.0, 4000.0, 110.0, 4000.0, 100.0, 4000.0, 4000.0, 4000.0, 4000.0, 4000.0])
    110.0
    """
    return sorted(times)[len(times) // 10]


def rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points with every time lowered to the least of those at larger sizes.

    What a larger array took bounds what a smaller one takes, so a time above it is a disturbance.

    >>> rising([(1, 50.0), (2, 20.0), (3, 30.0)])
    ((1, 20.0), (2, 20.0), (3, 30.0))
    """
    bounded: list[tuple[float, float]] = []
    least = float("inf")
    for size, us in reversed(points):
        least = min(least, us)
        bounded.append((size, least))
    return tuple(reversed(bounded))


def straight(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points with every time lowered to the lines between those at smaller and larger sizes.

    On a local network a byte takes no less at larger sizes; a time above the line is that of a processor which woke
    late again and again (256 KB: 3.9 ms, between .3 for 64 KB and 4.4 for a MB).

    >>> straight([(1, 2.0), (2, 9.0), (3, 4.0), (4, 7.0)])
    ((1, 2.0), (2, 3.0), (3, 4.0), (4, 7.0))
    """

    def on_lines(at: int) -> Iterator[float]:
        size, us = points[at]
        yield us
        for (less, less_us), (more, more_us) in itertools.product(points[:at], points[at + 1 :]):
            yield less_us + (more_us - less_us) * (size - less) / (more - less)

    return tuple((size, min(on_lines(at))) for at, (size, _) in enumerate(points))


def at_rate(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points with every time raised to what its bytes take at the rate between the two largest, or of the largest.

    What a card lets through at once after a rest (a token bucket) it takes back from what comes next.

    >>> at_rate([(1, 0.5), (2, 4.0), (4, 6.0), (8, 14.0)])
    ((1, 1.75), (2, 4.0), (4, 7.0), (8, 14.0))
    """
    if len(points) < 2:
        return tuple(points)
    (size, us), (most, most_us) = points[-2:]
    us_per_byte = min((most_us - us) / (most - size), most_us / most)
    return tuple((num_bytes, max(took_us, us_per_byte * num_bytes)) for num_bytes, took_us in points)
