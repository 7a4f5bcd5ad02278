"""Iterations in which every tensor takes the one flat allreduce, as in plain DDP.

Nothing is to be ordered then: buckets go to the library as they come, without lanes, programs, or a callback
for each. What the hook costs in such an iteration is what it costs where compression does not pay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from espresso.comm import collectives
from espresso.comm.groups import Member


class Averaging:
    """The allreduces of one iteration.

    A bucket is never cut here: an option of one step has no second step to be pipelined with.

    Args:
        member: the group of all ranks.
        on_done: called with a bucket's number when its sum is there, in the caller's thread or the library's.
        on_failure: called with a bucket's number and what the library raised.
    """

    def __init__(
        self, member: Member, on_done: Callable[[int], None], on_failure: Callable[[int, Exception], None]
    ) -> None:
        self._member = member
        self._scale = 1.0 / member.size
        self._on_done, self._on_failure = on_done, on_failure
        # Each entry is taken by exactly one caller of `collect`: popping a deque is atomic.
        self._under_way: deque[tuple[int, Any]] = deque()
        self.num_started = 0

    def start(self, buffer: torch.Tensor) -> None:
        """Divide ``buffer`` by the number of ranks and begin to sum it over them, in place."""
        buffer.mul_(self._scale)
        self._under_way.append((self.num_started, collectives.allreduce_async(buffer, self._member)))
        self.num_started += 1

    def collect(self) -> None:
        """Report what has arrived, now, and what has not when it does. Called once DDP may wait for it."""
        while self._under_way:
            try:
                index, work = self._under_way.popleft()
            except IndexError:
                return
            future = work.get_future()
            if future.done():
                self._conclude(index, future)
            else:
                future.add_done_callback(partial(self._conclude, index))

    def _conclude(self, index: int, future: Any) -> None:
        try:
            future.value()
        except Exception as error:  # whatever the library raises is reported
            self._on_failure(index, error)
            return
        self._on_done(index)
