"""The host worker pool: Python threads that call nogil kernels.

Numba's own threading layers are unsafe under concurrent calls, so kernels are single-threaded and the
pool splits work at fixed places. Who runs a part never shows in the result.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, TypeVar

from espresso.cpu_offload.placement import Cores, allowed_cores

T = TypeVar("T")
Part = tuple[int, int]


class WorkerPool:
    """``num_threads`` threads, the caller's own included; one thread means that everything runs inline.

    Safe to use from several threads at once. Use it as a context manager or call :meth:`close`.

    Args:
        num_threads: at least 1; None takes the cores this process may use.
        cores: for every thread those it may run on; the caller's own thread, the first, stays where it is.

    Example:
        >>> with WorkerPool(2) as pool:
        ...     pool.run(lambda low, high: high - low, [(0, 3), (3, 4)])
        [3, 1]
    """

    def __init__(self, num_threads: int | None = None, cores: Sequence[Cores] = ()) -> None:
        num_threads = available_cores() if num_threads is None else num_threads
        if num_threads < 1:
            raise ValueError(f"a worker pool needs at least one thread, got {num_threads}")
        self.num_threads = num_threads
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._owner = os.getpid()
        self._threads = [
            threading.Thread(
                target=self._work, args=(cores[index] if cores else None,), name=f"espresso-pool-{index}", daemon=True
            )
            for index in range(1, num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, task: Callable[[int, int], T], parts: Sequence[Part]) -> list[T]:
        """Call ``task(low, high)`` for every part, in any order on any thread; results in the order of the parts.

        Raises:
            Exception: what a task raised, with its traceback, after all started parts have ended.
        """
        num_helpers = min(len(self._threads), len(parts) - 1)
        if num_helpers <= 0 or os.getpid() != self._owner:  # a forked child has no threads
            return [task(low, high) for low, high in parts]
        job = _Job(task, parts)
        for _ in range(num_helpers):
            self._jobs.put(job)  # type: ignore[arg-type]
        job.take_part()
        return job.results()

    def close(self) -> None:
        """End the threads once what is queued has run. A closed pool runs everything inline."""
        threads, self._threads = self._threads, []
        if os.getpid() != self._owner:
            return
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self, cores: Cores | None) -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)  # of this thread alone
        while (job := self._jobs.get()) is not None:
            job.take_part()
            del job  # has arrays of the training, which wait for nothing else


class _Job(Generic[T]):
    """One ``run``: parts are handed out by a counter until none is left or one has failed."""

    def __init__(self, task: Callable[[int, int], T], parts: Sequence[Part]) -> None:
        self._task = task
        self._parts = parts
        self._next = itertools.count()  # atomic under the interpreter lock
        self._results: dict[int, T] = {}
        self._error: BaseException | None = None
        self._left = len(parts)
        self._lock = threading.Lock()
        self._done = threading.Event()

    def take_part(self) -> None:
        while (index := next(self._next)) < len(self._parts):
            try:
                if self._error is None:
                    self._results[index] = self._task(*self._parts[index])
            except BaseException as error:
                self._error = error
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._done.set()

    def results(self) -> list[T]:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return [self._results[index] for index in range(len(self._parts))]


def available_cores() -> int:
    """The cores this process may run on."""
    return len(allowed_cores()) or os.cpu_count() or 1
