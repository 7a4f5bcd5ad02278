"""Lanes: threads that carry out tasks in one total order.

::

    total order   t0 t1 t2 t3 ...              the same on every rank
    lanes         training  [t0 t3 ...]        each lane sees its own tasks, in that order
                  inter     [t1 t4 ...]
                  intra     [t2 t4 ...]        t4 is flat: it holds both links

A task starts when its bucket is there, the task before it in its partition is done, and it is at the
head of every lane it holds. Nothing is ever re-sorted, so collectives match on every rank. Tasks run on
threads of their lane and may block there; nothing waits in a callback or in the thread of backward.

What is of no matter to other ranks (``Node.gives_way``) holds up nothing while it cannot start: of encodes and
decodes the first one runs that can, so that an exchange that takes longer than was predicted keeps its decode from
starting, and not the next bucket's encode, which the link would then wait for.

Exchanges only have to *begin* in that order: one may begin while up to ``IN_FLIGHT`` ahead of it on its
lanes are on the wire. What they send leaves one after the other, but a long way is travelled together.
Offloaded steps likewise: so many as the pool is wide are under way at the same time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

from espresso.strategies.plan import Lane

_THREAD_OF = {
    Lane.TRAINING: "training",
    Lane.OFFLOAD: "offload",
    Lane.COPY: "copy",
    Lane.INTRA: "intra",
    Lane.INTER_OUT: "inter",
    Lane.INTER_IN: "inter",
    Lane.SERVER_IN: "push",
    Lane.SERVER: "server",
    Lane.SERVER_OUT: "pull",
}


_LINKS, _POOL = ("intra", "inter"), "offload"

LAUNCH: Literal["launch"] = "launch"
"""A queue that holds tasks to the total order beside their lanes: NCCL wants all launches in one order."""

Queue = Lane | Literal["launch"]

IN_FLIGHT = 8
"""Exchanges of one lane that are on the wire at the same time, at most."""

OVERTAKEN = 16
"""Of a lane so many tasks that wait are passed by, at most: each is looked at whenever something may start."""


@dataclass(eq=False)
class Node:
    """A task of one iteration.

    Attributes:
        run: does the work, blocking; called on a thread of the node's last lane. Of an exchange it does the first part,
            and returns the rest.
        travels: whether it is an exchange: something of the kind may be on the wire before it.
        gives_way: whether what is behind it on its lanes may start while it cannot.
        issue: for work that the backend carries out by itself: starts it without blocking and returns a
            ``torch.futures.Future``. Called where the node becomes ready, which saves two thread switches.
        bucket: its bucket's number, for gating and for error messages.
        label: what people call it in errors and traces.
    """

    lanes: tuple[Queue, ...]
    bucket: int
    run: Callable[[], Any]
    label: Callable[[], str]
    after: Node | None = None
    issue: Callable[[], Any] | None = None
    travels: bool = False
    gives_way: bool = False
    started: bool = False
    on_wire: bool = False
    done: bool = False
    start_ns: int = 0
    end_ns: int = 0
    on_done: Callable[[Node], None] | None = field(default=None, repr=False)


class _Team:
    """Daemon threads that run what they are given, in order; a further one starts when all are busy.

    Args:
        most: threads; one keeps jobs apart.
        on_failure: told what a job raises.
    """

    def __init__(self, name: str, most: int, on_failure: Callable[[BaseException], None]) -> None:
        self._name, self._most, self._on_failure = name, most, on_failure
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock, self._num_jobs = threading.Lock(), 0
        self.threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._num_jobs += 1
            if len(self.threads) < min(self._num_jobs, self._most):
                self.threads.append(threading.Thread(target=self._loop, name=f"espresso-{self._name}", daemon=True))
                self.threads[-1].start()
        self._queue.put(job)

    def stop(self) -> None:
        for _ in self.threads:
            self._queue.put(None)

    def _loop(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                return
            try:
                job()
            except BaseException as error:
                self._on_failure(error)
            del job
            with self._lock:
                self._num_jobs -= 1


def _lets_by(node: Node, lane: Queue) -> bool:
    """Whether what is behind it on the lane may be under way before it is done."""
    if not node.started:
        return node.gives_way
    return node.on_wire or lane is Lane.OFFLOAD


class Lanes:
    """The scheduler. Thread-safe; ``on_failure`` is called once, with the first exception and its node.

    Args:
        offload_width: offloaded steps under way at the same time, at most.

    Attributes:
        failed: whether there was such an exception.
    """

    def __init__(self, on_failure: Callable[[BaseException, Node | None], None], offload_width: int = 1) -> None:
        self.lock = threading.RLock()
        """Of the scheduler and of its owner: callbacks run in both directions."""
        self._queues: dict[Queue, deque[Node]] = {lane: deque() for lane in (*Lane, LAUNCH)}
        self._under_way: Counter[Queue] = Counter()
        self._ready: set[int] = set()
        self._offload_width = offload_width
        self._to_issue: deque[Node] = deque()
        self._issuing = threading.Lock()
        self._teams: dict[str, _Team] = {}
        self._on_failure = on_failure
        self.failed = False
        self._closed = False

    def enqueue(self, nodes: Iterable[Node]) -> None:
        """Append nodes, in the total order, to their lanes. They wait for their buckets."""
        with self.lock:
            for node in nodes:
                for lane in node.lanes:
                    self._queues[lane].append(node)

    def drop(self, unwanted: Callable[[Node], bool]) -> None:
        """Take nodes that have not started off all lanes (a bucket that will not come as planned)."""
        with self.lock:
            for lane, queue in self._queues.items():
                self._queues[lane] = deque(node for node in queue if node.started or not unwanted(node))

    def bucket_ready(self, buckets: Sequence[int]) -> None:
        """Open the gate of these buckets and start what can start."""
        with self.lock:
            self._ready.update(buckets)
            self._pump()
        self._issue()

    def begin_iteration(self) -> None:
        """Close all gates. Every lane must be empty."""
        with self.lock:
            self._ready.clear()

    def pending(self) -> list[Node]:
        """Nodes not done, in lane order, without repeats; the ones under way first."""
        with self.lock:
            nodes = list(dict.fromkeys(node for queue in self._queues.values() for node in queue))
        return sorted(nodes, key=lambda node: not node.started)

    def fail(self, error: BaseException, node: Node | None = None) -> None:
        """Cancel the order on all lanes. What runs runs out; nothing new starts."""
        with self.lock:
            if self.failed or self._closed:
                return
            self.failed = True
            for queue in self._queues.values():
                queue.clear()
        self._on_failure(error, node)

    def submit(self, thread: str, job: Callable[[], None]) -> None:
        """Run ``job`` on a thread of the scheduler, outside the order (used between iterations)."""
        with self.lock:
            if not self._closed:
                self._team(thread).submit(job)

    def close(self) -> list[threading.Thread]:
        """Stop the threads once they are idle, and return them. Does not wait: a lane may sit in a collective."""
        with self.lock:
            self._closed = True
            for queue in self._queues.values():
                queue.clear()
            threads = [thread for team in self._teams.values() for thread in team.threads]
            for team in self._teams.values():
                team.stop()
            self._teams.clear()
        return threads

    def _team(self, name: str) -> _Team:
        if name not in self._teams:
            most = IN_FLIGHT if name in _LINKS else self._offload_width if name == _POOL else 1
            self._teams[name] = _Team(name, most, self.fail)
        return self._teams[name]

    def _pump(self) -> None:
        """Start every node whose turn has come; those to issue are queued until the lock is free."""
        for lane, queue in self._queues.items():
            waiting = 0
            for node in queue:
                if not node.started and self._may_start(node):
                    self._start(node)
                waiting += not node.started
                if waiting > OVERTAKEN or not _lets_by(node, lane):
                    break

    def _start(self, node: Node) -> None:
        node.started = True
        self._under_way.update(node.lanes)
        if node.issue is not None:
            self._to_issue.append(node)
        else:
            lane = node.lanes[-1]
            assert isinstance(lane, Lane)
            self._team(_THREAD_OF[lane]).submit(partial(self._run, node))

    def _may_start(self, node: Node) -> bool:
        return (
            node.bucket in self._ready
            and (node.after is None or node.after.done)
            and all(self._has_turn(node, lane) for lane in node.lanes)
        )

    def _has_turn(self, node: Node, lane: Queue) -> bool:
        """Whether nothing is ahead of it, or only what lets it by, and the lane has room beside what is under way."""
        room = self._offload_width if lane is Lane.OFFLOAD else IN_FLIGHT if node.travels else 1
        ahead = itertools.takewhile(lambda other: other is not node, self._queues[lane])
        return self._under_way[lane] < room and all(_lets_by(other, lane) for other in ahead)

    def _launched(self, node: Node) -> None:
        """An exchange has begun: the next one may."""
        with self.lock:
            node.on_wire = True
            self._pump()

    def _issue(self) -> None:
        """Start what the backend carries out by itself, in the thread at hand, in the order of the queue."""
        # Looked at again after every release: what comes while another thread issues is left to that thread.
        while self._to_issue and self._issuing.acquire(blocking=False):
            try:
                while self._to_issue and not self.failed:
                    self._issue_one(self._to_issue.popleft())
                if self.failed:
                    self._to_issue.clear()
            finally:
                self._issuing.release()

    def _issue_one(self, node: Node) -> None:
        assert node.issue is not None
        node.start_ns = time.perf_counter_ns()
        try:
            future = node.issue()
            if node.travels:
                self._launched(node)
            future.add_done_callback(partial(self._issued_done, node))
        except Exception as error:  # whatever it is, it is reported through on_failure
            self.fail(error, node)

    def _issued_done(self, node: Node, future: Any) -> None:
        try:
            future.value()
            self._finish(node)
        except Exception as error:
            self.fail(error, node)

    def _run(self, node: Node) -> None:
        if self.failed or self._closed:
            return
        node.start_ns = time.perf_counter_ns()
        try:
            rest = node.run()
            if rest is not None:
                self._launched(node)
                self._issue()
                rest()
            self._finish(node)
        except Exception as error:
            self.fail(error, node)

    def _finish(self, node: Node) -> None:
        node.end_ns = time.perf_counter_ns()
        with self.lock:
            if self.failed or self._closed:
                return
            node.done = True
            self._under_way.subtract(node.lanes)
            for lane in node.lanes:
                self._queues[lane].remove(node)  # at the head, but for what it overtook or was on the wire with
            self._pump()
        self._issue()
        if node.on_done is not None:
            node.on_done(node)
