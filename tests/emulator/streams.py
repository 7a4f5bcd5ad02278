"""Streams that keep vector clocks instead of running anything apart: they show which waits a launch order rests on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

BACKWARD = "backward"
Clock = dict[str, int]
Event = tuple[str, Clock, int]
"""Stream, its vector clock, and the time in nanoseconds."""


class TracedStreams:
    """Everything runs at once, on the host.

    A clock says how far every stream had come, as far as the recording one can know by its own order and its waits:
    event a happens before event b if b's clock has reached a's on a's stream.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._here = threading.local()
        self._lock = threading.Lock()
        self._clocks: dict[str, Clock] = {}

    @property
    def _name(self) -> str:
        return getattr(self._here, "name", BACKWARD)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self._here.name = self._name, name
        try:
            yield
        finally:
            self._here.name = before

    def record(self) -> Event:
        with self._lock:
            mine = self._clocks.setdefault(self._name, {})
            mine[self._name] = mine.get(self._name, 0) + 1
            return self._name, dict(mine), time.perf_counter_ns()

    def wait(self, events: Iterable[Event]) -> None:
        with self._lock:
            mine = self._clocks.setdefault(self._name, {})
            for _, clock, _ in events:
                for name, count in clock.items():
                    mine[name] = max(mine.get(name, 0), count)

    def wait_here(self, event: Any, timeout_s: float) -> bool:
        return True

    def elapsed_us(self, begin: Any, end: Any) -> float:
        return (end[2] - begin[2]) / 1e3

    def new_future(self) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        return future


def happens_before(first: Event, second: Event) -> bool:
    """Whether the second event cannot come before the first."""
    name, clock, _ = first
    return second[1].get(name, 0) >= clock[name]
