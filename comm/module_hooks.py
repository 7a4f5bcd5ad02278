"""Hooks on modules that belong to a running job, and not to copies of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StaysBehind:
    """A hook that stays behind when its module is copied or saved."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _nothing, ()


def _does_nothing(*_: Any) -> None:
    """What a copy has in its place."""


def _nothing() -> Callable[..., None]:
    return _does_nothing
