"""A thread that looks at the state of things twice a second, and touches nothing outside this process."""

from __future__ import annotations

import threading
from collections.abc import Callable

LOOK_S = 0.5


class Watchdog:
    """Calls ``look`` until it is stopped."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="espresso-watchdog", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Does not wait."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look()
