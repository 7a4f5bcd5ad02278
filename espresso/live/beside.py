"""What exchanges, and carrying plans out, take from computations beside them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from espresso.comm.execute.handling import Handling
from espresso.comm.groups import Groups
from espresso.comm.memory import Codecs
from espresso.live.machine import cores_per_rank

_NUMBERS = 1 << 18
"""Of one piece of work: a MB in and out, as gradients are read and written; about 0.1 ms."""

_BUCKETS, _PASSES, _TIMES = 4, 5, 3
"""Of the plan that is carried out, how often at a time, and how many times; 0.2 s in all."""

_FREE_S = 0.025
"""So long threads compute before and after an exchange, with nothing beside them."""


class Computing:
    """Threads that compute while exchanges run: one for each core that the rank may count as its own.

    What the process burns while an exchange is under way tells little: the kernel sends and receives in interrupts that
    it counts for nobody, and a thread that only waits burns more where a core is idle. At 1 Gb/s it was counted as .05
    of a core, or as .25, while computations beside took a third longer.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups, self._cores = groups, cores_per_rank(groups)

    def taken_us(self, run: Callable[[], None], most: float = math.inf) -> float:
        """Microseconds of a core that ``run`` takes; what half of the ranks lose, the same on all. Collective.

        Args:
            most: cores that it can take.
        """
        self._groups.barrier()
        before, _ = self._rate(_rest)
        self._groups.barrier()
        beside, lasted_us = self._rate(run)
        after, _ = self._rate(_rest)
        cores = min(self._cores * lost(before, beside, after), most)
        taken_us: float = median(self._groups.all_objects(cores * lasted_us))
        return taken_us

    def _rate(self, run: Callable[[], None]) -> tuple[float, float]:
        """(pieces of work per microsecond beside ``run``, microseconds that it lasted)."""
        done: list[int] = []
        ended = threading.Event()

        def compute() -> None:
            numbers, out, pieces = np.ones(_NUMBERS, np.float32), np.empty(_NUMBERS, np.float32), 0
            while not ended.is_set():
                np.abs(numbers, out=out)
                pieces += 1
            done.append(pieces)

        threads = [threading.Thread(target=compute, daemon=True) for _ in range(max(int(self._cores), 1))]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            run()
        finally:
            lasted_us = (time.perf_counter() - begin) * 1e6
            ended.set()
            for thread in threads:
                thread.join()
        return sum(done) / lasted_us, lasted_us


def measure_handling(groups: Groups, codecs: Codecs) -> float:
    """What carrying out a compression takes of a core besides what is priced: ``Contention.handling_us``. Collective.

    By a plan of small buckets that threads carry out as in a step, while others compute; where that is too much noise
    (its threads, and those that compute, wait for the interpreter), no more than all the time of a core.
    """
    computing = Computing(groups)
    with Handling(codecs, _BUCKETS) as handled:

        def passes() -> None:
            for _ in range(_PASSES):
                handled()

        handled()
        taken_us = median(computing.taken_us(passes, most=1.0) for _ in range(_TIMES))
    return taken_us / _PASSES / handled.num_tasks


def lost(before: float, beside: float, after: float) -> float:
    """The part of work that is not done beside something: rates of work before it, beside it, and after.

    A processor that others keep busy may do no work at all while it rests: nothing is known then.

    >>> lost(3.0, 3.0, 5.0), lost(1.0, 2.0, 1.0), lost(0.0, 0.0, 0.0)
    (0.25, 0.0, 0.0)
    """
    alone = (before + after) / 2.0
    return max(1.0 - beside / alone, 0.0) if alone else 0.0


def _rest() -> None:
    time.sleep(_FREE_S)
