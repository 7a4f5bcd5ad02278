"""Iterations in which every tensor takes the one flat allreduce, as in plain DDP.

Nothing is to be ordered then: buckets go to the library as they come, without lanes, programs, or a callback
for each; on a device from backward's stream. What the hook costs in such an iteration is what it costs where
compression does not pay.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from espresso.comm import collectives
from espresso.comm.errors import EspressoError
from espresso.comm.execute.assignment import Interval
from espresso.comm.execute.iteration import Iteration
from espresso.comm.execute.programs import described
from espresso.comm.member import Member
from espresso.comm.witness import worded
from espresso.strategies import Bucket, Lane, ring_bytes

LOOK_NS = 300_000
"""What a look at one exchange's end takes where ranks have one core: a thread that wakes up in the middle of backward,
where else the ends of all are found at once (6 ms a step of 19 buckets, ``benchmarks.overhead --recorder``)."""

LOOK_SHARE = 0.002
"""Of a step that looks may take, over many steps; twice as much before they become rarer."""

MOST_EVERY = 64
IN_A_ROW = 3
"""Iterations that had to be hurried, after which all are: one may just have paused in its backward pass."""


@dataclass
class Averager:
    """What stays from one such iteration to the next.

    Attributes:
        member: the group of all ranks.
        known: buckets by number, with their elements: they are described again where their size changes, and where
            exchanges are looked at: DDP may put the same tensors into another order.
        collects_early: whether somebody waits for buckets before the last is there, in every iteration. DDP waits for
            nothing before that; a hook around ours may.
        look_every: of so many iterations one looks at the end of every exchange. A power of two, so that ranks which
            do not quite agree still look together.
    """

    member: Member
    known: dict[int, tuple[int, Bucket]] = field(default_factory=dict)
    collects_early: bool = False
    look_every: int = 16
    may_look: bool = True
    _began: tuple[int, int] = (-1, 0)
    _step_ns: int = 0
    _hurried: tuple[int, int] = (-1, 0)

    def hurried(self, iteration: int) -> None:
        """Nothing came for long before this iteration's last bucket."""
        before, times = self._hurried
        if before != iteration:
            self._hurried = iteration, times + 1 if before == iteration - 1 else 1
            self.collects_early = self.collects_early or self._hurried[1] == IN_A_ROW

    def looks(self, iteration: int) -> bool:
        """Whether this iteration looks at the end of every exchange."""
        now, (before, began) = time.perf_counter_ns(), self._began
        self._began = iteration, now
        if before == iteration - 1 and self.known:
            took = now - began
            # A pause between two steps (an evaluation, a checkpoint) makes no step longer.
            self._step_ns = min(took, self._step_ns + self._step_ns // 4) if self._step_ns else took
            wanted = LOOK_NS * len(self.known) / (LOOK_SHARE * max(self._step_ns, 1))
            if wanted > 2 * self.look_every and self.look_every < MOST_EVERY:
                self.look_every *= 2
            elif wanted < self.look_every / 2 and self.look_every > 1:
                self.look_every //= 2
        return self.may_look and iteration % self.look_every == 0


class Averaging:
    """The allreduces of one iteration: a course.

    A bucket is never cut here: an option of one step has no second step to be pipelined with.

    Args:
        on_done: called with a bucket's number when its sum is there, in the caller's thread or the library's.
        on_failure: called with what the library or ``on_done`` raised.
    """

    def __init__(
        self,
        iteration: Iteration,
        averager: Averager,
        on_done: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._iteration, self._averager = iteration, averager
        self._scale = 1.0 / averager.member.size
        iteration.record.whole = True
        self._looks = averager.looks(iteration.record.iteration)
        self._on_done, self._on_failure = on_done, on_failure
        # Each entry is taken by exactly one caller of `_collect`: popping a deque is atomic.
        self._under_way: deque[tuple[int, Any, int]] = deque()
        self._finite: list[bool] = []
        self._hurries = False

    def take(self, index: int, buffer: torch.Tensor, describe: Callable[[], Bucket]) -> Averaging:
        known = self._averager.known.get(index)
        if self._looks or known is None or known[0] != buffer.numel():
            self._averager.known[index] = (buffer.numel(), describe())
        if self._iteration.last_seen:
            self._fill_record(index + 1)  # first: the watchdog may collect the last bucket as soon as it has begun
        buffer.mul_(self._scale)
        self._iteration.run.prepared(index)
        member = self._averager.member.connection(index)
        began = time.perf_counter_ns()
        self._under_way.append((index, collectives.allreduce_async(buffer, member), began))
        if self._iteration.last_seen or self._averager.collects_early or self._hurries or self._looks:
            self._collect()
        return self

    def end(self) -> None:
        self._fill_record(self._iteration.num_seen)
        self._collect()

    def hurry(self) -> None:
        if not self._iteration.last_seen:
            self._hurries = True
            self._averager.hurried(self._iteration.record.iteration)
            self._collect()

    def waiting_for(self) -> list[str]:
        iteration, known = self._iteration, self._averager.known
        return [self._label(i) for i in range(iteration.num_seen) if i not in iteration.complete and i in known]

    def place(self) -> int:
        iteration = self._iteration
        return next((i for i in range(iteration.num_seen) if i not in iteration.complete), iteration.num_seen)

    def is_finite(self) -> bool:
        return all(self._finite)

    def _fill_record(self, num_buckets: int) -> None:
        record, ranks = self._iteration.record, self._averager.member.size
        record.buckets = tuple(self._averager.known[i][1] for i in range(num_buckets))
        record.bytes_raw = sum(ring_bytes(bucket.numel, bucket.dtype, ranks) for bucket in record.buckets)
        record.bytes_sent = record.bytes_raw

    def _collect(self) -> None:
        """Report what has arrived, now, and what has not when it does."""
        while self._under_way:
            try:
                index, work, began = self._under_way.popleft()
            except IndexError:
                return
            future = work.get_future()
            conclude = partial(self._conclude, index, work, began, threading.get_ident())
            if future.done():
                conclude(future)
            else:
                future.add_done_callback(conclude)

    def _conclude(self, index: int, work: Any, began: int, asked_by: int, future: Any) -> None:
        iteration = self._iteration
        exchange = self._exchange(index, began) if self._looks else None
        look = [iteration.buffers[index]] if iteration.checks and iteration.buffers[index].numel() else []
        asked = threading.get_ident() == asked_by
        try:
            self._finite.append(iteration.run.landed(index, work, exchange, look, asked=asked))
        except Exception as error:  # whatever the library raises is reported
            wrapped = EspressoError(f"{self._label(index)}: {worded(error)}")
            wrapped.__cause__ = error
            self._on_failure(wrapped)
            return
        iteration.touch()
        try:
            self._on_done(index)
        except Exception as error:  # the library's thread would drop it
            self._on_failure(error)

    def _exchange(self, index: int, began: int) -> Interval:
        """Of a bucket, to now."""
        bucket, ranks = self._averager.known[index][1], self._averager.member.size
        sent, ready = ring_bytes(bucket.numel, bucket.dtype, ranks), self._iteration.record.ready_ns[index]
        return Interval(index, Lane.INTER_OUT, began, time.perf_counter_ns(), ready, sent)

    def _label(self, index: int) -> str:
        tensors = [slot.tensor for slot in self._averager.known[index][1].slots]
        return described("step 1/1 'flat.allreduce'", index, tensors, self._averager.member.ranks)
