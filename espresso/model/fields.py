"""Reading numbers and objects out of JSON so that every fault is named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, TypeVar

_E = TypeVar("_E", bound=Enum)


class JobError(ValueError):
    """A job, its costs or its file is malformed, or lacks something that was asked of it."""


def check_keys(body: Any, where: str, required: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raise :class:`JobError` naming the first unknown or missing key of a JSON object."""
    required, optional = set(required), set(optional)
    if not isinstance(body, dict):
        raise JobError(f"{where} must be a JSON object, got {type(body).__name__}")
    unknown = sorted(set(body) - required - optional)
    if unknown:
        raise JobError(f"{where} has an unknown key {unknown[0]!r}; known are {sorted(required | optional)}")
    missing = sorted(required - set(body))
    if missing:
        raise JobError(f"{where} lacks the key {missing[0]!r}")


KINDS = {
    "espresso-job": "a job",
    "espresso-strategy": "a strategy",
    "espresso-cluster": "a cluster",
    "espresso-sensitivity": "a sensitivity",
}
"""What a file says it is."""


def other_kind(body: Any, wanted: str) -> str | None:
    """What to say of a file of another kind than ``wanted``; None if it may be of that kind."""
    kind = body.get("kind") if isinstance(body, dict) else None
    if kind == wanted or not isinstance(kind, str) or kind not in KINDS:
        return None
    return f"this is {KINDS[kind]} file, and {KINDS[wanted]} file is wanted here"


def check_kind(body: Any, wanted: str) -> None:
    """Raise :class:`JobError` for a file of another kind, before anything is said of its keys."""
    fault = other_kind(body, wanted)
    if fault is not None:
        raise JobError(fault)


def number(value: Any, where: str, *, positive: bool = False) -> float:
    """``value`` as a finite float of at least zero (above zero where ``positive``)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JobError(f"{where} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise JobError(f"{where} must be finite and {'above' if positive else 'at least'} zero, got {value!r}")
    return float(value)


def whole(value: Any, where: str, *, least: int = 0) -> int:
    """``value`` as a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise JobError(f"{where} must be a whole number of at least {least}, got {value!r}")
    return value


def text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise JobError(f"{where} must be text, got {value!r}")
    return value


def items(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise JobError(f"{where} must be a list, got {type(value).__name__}")
    return value


def member(kind: type[_E], value: Any, where: str) -> _E:
    """The enum member with this value."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(item.value) for item in kind)
        raise JobError(f"{where} is {value!r}, which is none of {known}") from None


def curve(value: Any, where: str) -> tuple[tuple[float, float], ...]:
    """Points ``[[x, us], …]`` with x rising: the knots of a piecewise linear curve."""
    points = []
    for position, point in enumerate(items(value, where)):
        here = f"{where}[{position}]"
        if not isinstance(point, Sequence) or isinstance(point, str) or len(point) != 2:
            raise JobError(f"{here} must be a pair of numbers, got {point!r}")
        points.append((number(point[0], here), number(point[1], here)))
    return tuple(points)
