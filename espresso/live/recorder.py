"""The flight recorder of a running job: a bounded ring of its last steps, and who writes it down when.

::

    training script ── ScriptMarks ──> Script   forward, backward, optimizer
    executor ── Record ──> Recorder.take        readiness, tasks, ends          ring ──> steps() ──> every reader

The ring keeps what the executor noted anyway; it becomes :class:`~espresso.flight.form.StepRecord` when somebody reads.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from espresso.comm import connections
from espresso.comm.execute.assignment import Record
from espresso.comm.groups import Groups
from espresso.comm.pairs import card_rate, round_trips
from espresso.comm.parameter_server import connected
from espresso.diagnosis.overlap import measured_overlap
from espresso.flight.clocks import tick_of
from espresso.flight.form import NAME, Flight, Script, Span, StepRecord, Stretch, Tick, Traffic
from espresso.flight.processors import Delays, Spent
from espresso.live.machine import cores_per_rank
from espresso.strategies import Bucket, Strategy

logger = logging.getLogger("espresso")

KEPT_STEPS = 512
KEPT_INTERVALS = 60_000
"""Of all steps in the ring: some 10 MB."""

KEPT_STRETCHES = 32

TRIPS, FEW_TRIPS, MANY_RANKS = 8, 3, 64
"""Round trips of a rank: rank 0 answers one rank after the other."""

LOOKS_AFTER = (8, 64, 512, 4096)
"""Iterations after which clocks are looked at; then after every so many as the last."""

LOOKS_EVERY = 256
"""Iterations after which a rank looks at its own connections once more: half of those in the ring. It asks nobody."""

KEPT_LOOKS = 256
"""Looks at clocks and connections."""


def now_us() -> float:
    """The recorder's clock."""
    return time.perf_counter() * 1e6


class _Listening:
    """Who writes at a signal: every job of this process that asked for it. What was there before comes back at last."""

    def __init__(self) -> None:
        self._writes: list[Callable[[], None]] = []
        self._before: Any = None

    def __call__(self, *_: object) -> None:
        for write in list(self._writes):
            write()

    def add(self, number: int, write: Callable[[], None]) -> None:
        before = signal.getsignal(number)
        if before is not self:
            self._before = before
            signal.signal(number, self)
        self._writes.append(write)

    def end(self, number: int, write: Callable[[], None]) -> None:
        """Any thread may; again, it does nothing. Only the main one can put back what was there."""
        if write in self._writes:
            self._writes.remove(write)
        is_ours: bool = signal.getsignal(number) is self
        if not self._writes and is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(number, self._before)


_LISTENING: dict[int, _Listening] = {}


class Recorder:
    """The ring of one rank. Made by all ranks together.

    Attributes:
        script: of the step that is under way.
        facts: what else readers may want to know; see :class:`~espresso.flight.form.Flight`.
        ticks, traffic: what was seen of clocks and connections so far.
        keeps: whether iterations come into the ring.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        cores = cores_per_rank(groups)
        run = groups.from_rank_0(secrets.token_hex(8))
        self.facts: dict[str, Any] = {"group": list(groups.ranks), "cores": cores, "run": run}
        self.script = Script()
        self._exchanging = self.script
        self.ticks: deque[Tick] = deque(maxlen=KEPT_LOOKS)
        self.traffic: deque[Traffic] = deque(maxlen=KEPT_LOOKS)
        client = connected()
        self._tally = connections.Tally(groups.hosts.union(() if client is None else client.addresses))
        self._kept: deque[tuple[Record, Script]] = deque(maxlen=KEPT_STEPS)
        self._num_intervals = 0
        self.keeps, self._exchanged = True, False
        self._spent: Spent | None = None
        self._delays: Delays | None = None
        self._waited_us = 0.0
        self._lock = threading.RLock()  # of the ring: readers come from other threads, and from signals in this one
        self._stretches: list[tuple[Strategy, tuple[Bucket, ...], bool, Stretch]] = []

    # -- what happens --------------------------------------------------------------------------------

    def enter(self) -> None:
        """A forward pass begins."""
        now, script = now_us(), self.script
        if self._exchanged:
            self._note_processors(script)
            ended = script.optimizer_end_us or script.averaged_us or script.backward_end_us
            script = self.script = Script(began_us=ended)
            self._exchanged = False
        before = script.began_us
        if script.passes and script.entered_us is not None:
            before = script.backward_end_us or script.forward_end_us or now
            script.earlier_us += before - script.entered_us
            script.backward_us = script.backward_end_us = None
        if before is not None:
            script.input_us += now - before
        script.passes += 1
        script.entered_us = script.forward_us = now

    def _note_processors(self, script: Script) -> None:
        """What the step that has ended took of them, if its script ran in this thread."""
        before, now = self._spent, Spent.now()
        if before is not None and before.thread == now.thread:
            script.beside_us = 1e6 * max(now.process_s - before.process_s - (now.own_s - before.own_s), 0.0)
            if self._delays is not None:
                waited_us = self._delays.read()
                script.waited_us, self._waited_us = waited_us - self._waited_us, waited_us
        else:
            self._delays = Delays.open()
            self._waited_us = 0.0 if self._delays is None else self._delays.read()
        self._spent = now

    def begin(self) -> None:
        """An iteration begins to be exchanged: the next forward pass is another step's, whenever this one is taken."""
        self._exchanging, self._exchanged = self.script, True

    @property
    def has_begun(self) -> bool:
        """Whether the step that is under way has begun to be exchanged: its backward pass was seen."""
        return self._exchanged

    def take(self, record: Record) -> None:
        """The iteration is exchanged: it is in the ring from now on. What the script does next is added to it."""
        if not self.keeps:
            return
        with self._lock:
            if len(self._kept) == KEPT_STEPS:
                self._num_intervals -= len(self._kept[0][0].intervals)
            self._kept.append((record, self._exchanging))
            self._num_intervals += len(record.intervals)
            while self._num_intervals > KEPT_INTERVALS and len(self._kept) > 1:
                self._num_intervals -= len(self._kept.popleft()[0].intervals)
        if record.iteration % LOOKS_EVERY == LOOKS_EVERY - 1:
            self._look_at_traffic()

    def overlap(self) -> float | None:
        """The hidden part of all communication in the newest step that was looked at."""
        with self._lock:
            kept = [(record, script) for record, script in self._kept if record.intervals]
        if not kept:
            return None
        record, script = kept[-1]
        stretch = self._stretch(record)
        return measured_overlap(_step(record, script, 0, len(stretch.plan.tasks)), stretch.host_copies)

    @staticmethod
    def looks(iteration: int) -> bool:
        """Whether all ranks look at their clocks after this iteration: soon, seldom later."""
        return iteration in LOOKS_AFTER or iteration % LOOKS_AFTER[-1] == LOOKS_AFTER[-1] - 1

    def look(self) -> None:
        """Look at rank 0's clock and at this rank's connections. All ranks together."""
        if self._groups.num_ranks == 1:
            return
        self._look_at_traffic()
        trips = round_trips(self._groups, now_us, FEW_TRIPS if self._groups.num_ranks > MANY_RANKS else TRIPS)
        if trips:
            self.ticks.append(tick_of(trips))

    def look_at_card(self) -> None:
        """Find out what this host's card sends when nothing else does. All ranks together, before the first step."""
        rate = card_rate(self._groups, now_us)
        if rate is not None:
            self.facts["card_rate"] = rate

    # -- who reads -----------------------------------------------------------------------------------

    def flight(self, last: int = KEPT_STEPS) -> Flight:
        """All that this rank knows of the newest steps. The last may still be without its optimizer's moments."""
        groups = self._groups
        self._look_at_traffic()
        with self._lock:
            kept = list(self._kept)[max(len(self._kept) - last, 0) :]
        places: dict[int, int] = {}
        stretches: list[Stretch] = []
        steps: list[StepRecord] = []
        for record, script in kept:
            if steps and record.iteration <= steps[-1].number:  # the count went back: a checkpoint was loaded
                steps.clear()
            stretch = self._stretch(record)
            if id(stretch) not in places:
                places[id(stretch)] = len(stretches)
                stretches.append(stretch)
            steps.append(_step(record, script, places[id(stretch)], len(stretch.plan.tasks)))
        return Flight(
            groups.rank, groups.num_ranks, socket.gethostname(), groups.cluster, tuple(stretches), tuple(steps),
            tuple(self.ticks), tuple(self.traffic), dict(self.facts),
        )  # fmt: skip

    def write(self, path: str | os.PathLike[str], last: int = KEPT_STEPS) -> Path:
        """Write the newest steps: to a file, or into a folder under this rank's name there.

        Raises:
            OSError: it cannot be written.
        """
        there = Path(path)
        if there.suffix != ".json":
            there.mkdir(parents=True, exist_ok=True)
            there /= NAME.format(rank=self._groups.ranks[self._groups.rank])
        self.flight(last).save(there)
        return there

    def leave(self, path: str | os.PathLike[str] | None, why: str) -> None:
        """As :meth:`write`, where nobody waits for it: what goes wrong is a warning."""
        if path is None or not self._kept:
            return
        self.facts["written"] = why
        try:
            self.write(path)
        except Exception as error:  # nothing that is for people may stop a training, or hide how it failed
            logger.warning("the flight record cannot be written (%s); training goes on without", error)

    def listen(self, name: str, path: str | os.PathLike[str] | None) -> Callable[[], None]:
        """Write the ring when this process gets a signal; returns what ends that. In the main thread only."""
        number = getattr(signal, name)
        if threading.current_thread() is not threading.main_thread():
            logger.warning("%s writes no flight record: espresso was started outside the main thread", name)
            return lambda: None

        pid = os.getpid()

        def write() -> None:
            if os.getpid() != pid:  # a data loader's worker, that was forked off with what was recorded then
                return
            self.leave(path, f"asked for by {name}")

        listening = _LISTENING.setdefault(number, _Listening())
        listening.add(number, write)
        return lambda: listening.end(number, write)

    def _look_at_traffic(self) -> None:
        seen = self._tally.sent()
        if seen is not None:
            self.traffic.append(Traffic(now_us(), seen.num_bytes, seen.busy_us, seen.window_us, seen.rtt_us))

    def _stretch(self, record: Record) -> Stretch:
        strategy = record.assignment.strategy
        for theirs, buckets, whole, found in reversed(self._stretches):
            if theirs is strategy and whole == record.whole and buckets == record.buckets:
                return found
        runs = replace(strategy, partition_bytes=0) if record.whole else strategy
        made = Stretch(runs, record.buckets, self._groups.host_copies)
        self._stretches = [*self._stretches[1 - KEPT_STRETCHES :], (strategy, record.buckets, record.whole, made)]
        return made


def _step(record: Record, script: Script, stretch: int, num_tasks: int) -> StepRecord:
    spans = (
        Span(run.task, run.issue_ns / 1e3, run.start_ns / 1e3, run.end_ns / 1e3, run.num_bytes)
        for run in list(record.intervals)
        if run.task < num_tasks
    )
    return StepRecord(
        record.iteration,
        stretch,
        replace(script),
        tuple(at / 1e3 for at in record.ready_ns),
        record.done_ns / 1e3,
        record.finite,
        record.bytes_sent,
        record.bytes_raw,
        tuple(sorted(spans, key=lambda span: span.start_us)),
        record.hook_ns / 1e3,
    )
