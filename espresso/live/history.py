"""What was decided in a job, when and why: one row for each event, the same on every rank but for its times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

logger = logging.getLogger("espresso")


MOST_ROWS = 1000
"""The latest events are kept; a log has them all."""


class Event(StrEnum):
    """What happened."""

    DECIDED = "decided"
    CHANGED = "changed"
    KEPT = "kept"
    SWITCHED = "switched"
    BACKED_OFF = "backed_off"


class History:
    """The events of a job.

    Args:
        speaks: whether this is rank 0.
        on_event: called there with all rows after every event; may write them to a file.
    """

    def __init__(self, speaks: bool, on_event: Callable[[Sequence[dict[str, Any]]], None] = lambda rows: None) -> None:
        self._speaks, self._on_event = speaks, on_event
        self._began_ns = time.perf_counter_ns()
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        step: int,
        event: Event,
        reason: str,
        strategy: str,
        *,
        predicted_us: float = 0.0,
        measured_us: float = 0.0,
        since_ns: int | None = None,
    ) -> None:
        """Add an event.

        Args:
            strategy: the name of the one in use from here on.
            predicted_us, measured_us: of a step of it; 0 where nothing was predicted or measured.
            since_ns: when what led to it began (``perf_counter_ns``).
        """
        now_ns = time.perf_counter_ns()
        begun = now_ns if since_ns is None else since_ns
        self.rows.append(
            {
                "step": step,
                "event": event.value,
                "reason": reason,
                "strategy": strategy,
                "predicted_us": predicted_us,
                "measured_us": measured_us,
                "at_us": (begun - self._began_ns) / 1e3,
                "took_us": (now_ns - begun) / 1e3,
            }
        )
        del self.rows[:-MOST_ROWS]
        if self._speaks:
            logger.info("step %d, %s: %s; in use: %s", step, event.value.replace("_", " "), reason, strategy)
            self._on_event(self.rows)
