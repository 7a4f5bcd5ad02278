"""What a thread and its process had of the processors, as the system counts it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import NamedTuple


class Spent(NamedTuple):
    """Processor time so far: of a thread, and of all its process."""

    thread: int
    own_s: float
    process_s: float

    @classmethod
    def now(cls) -> Spent:
        # The system's number: Python gives that of a thread that ended to the next one.
        return cls(threading.get_native_id(), time.thread_time(), time.process_time())


class Delays:
    """How long a thread could have run and had no core, as Linux's scheduler counts it: a microsecond a look."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls) -> Delays | None:
        """Of the thread that calls; None where the system does not count it."""
        try:
            found = cls(os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC))
            found.read()
        except (OSError, ValueError, IndexError):
            return None
        return found

    def read(self) -> float:
        """In microseconds, since the thread began."""
        return int(os.pread(self._descriptor, 96, 0).split()[1]) / 1e3
