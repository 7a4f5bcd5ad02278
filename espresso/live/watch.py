"""Whether a running job is still what its strategy was chosen for, and if not, what has changed.

::

    every step         vitals of this rank, from the executor's record            no communication
    every window       their medians are gathered, and nobody waits for it        some numbers a rank
    two steps later    all ranks test the same rows, so they agree without another word

The test is a two-sided CUSUM of clipped scores, for each of a few streams (the slowest rank's step, the least wait for
the link ...). A score is the distance of a window's logarithm from the baseline's median, in units of its spread, and
the spread is at least ``LEAST_SPREAD``: what differs by less than a sixth is no change, however quiet the job.

False alarms: a window's figure is the median of its steps, so that one disturbed step in four counts nothing, and one
disturbed window cannot raise an alarm alone (``CLIP - SLACK < ALARM``), however far it is out, unless its steps take so
long that another one would cost as much as a look (``URGENT``). Of windows that are normal with the baseline's spread
one in some 10^9 would; where a part p of them, at random, is out by any amount, one in ``1 / (5 p^2)`` does for each
stream (p = 0.3 %: 22 000 windows). ``tests/test_watch.py`` counts them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import NamedTuple

import torch

from espresso.comm.execute.assignment import Record
from espresso.comm.groups import Groups
from espresso.comm.member import Gathering
from espresso.live.change import FASTER, TELLING, URGENT, Cause, Change, Finding
from espresso.strategies import RANK_LANES

WINDOW = 4
"""Steps of a window."""

LONG_WINDOW, SHORT_STEP_US = 8, 5_000.0
"""A window of steps shorter than this is longer, unless it may raise an alarm: a gather costs some 50 us of a core."""

LAG = 1
"""Steps between a gather's beginning and the look at it: it travels beside a whole step."""

LEAST_SPREAD, FIRST_SPREAD, MOST_SPREAD = 0.1, 0.3, 0.6
"""Of a logarithm: the least that the test takes for noise, what it takes while a baseline has few windows, the most."""

SLACK, CLIP, ALARM, MOST = 1.5, 6.0, 6.0, 12.0
"""Of the CUSUM, in spreads; at most as much as eight windows that are as ever take back."""

FEW, MANY = 4, 16
"""Windows of a baseline: before the spread is taken from them, and at most."""

NEGLIGIBLE, LEAST_US = 0.03, 500.0
"""A part of a step, and a time, below which times count as equal."""

LOOK_US, LASTS = 200_000.0, 2
"""What a look costs. If a window's steps take ``URGENT`` times longer, and all in all so much, nobody waits for a
second one; where no link is to blame, and so many more windows take less, those are waited for.
"""

MOST_HOMES = 8
"""Conditions in which the strategy in use has stood its test."""

SOUND_BYTES = 3 << 16
"""Of a sounding, out of a host: short, and more than its bucket lets through at once (128 KiB, say)."""


class Vitals(NamedTuple):
    """One step of one rank, or the median of several, in microseconds.

    Attributes:
        step: from one averaged gradient to the next.
        compute: from there to the last bucket's being ready: optimizer, forward, backward, data.
        tail: from there to the end.
        wire: while any exchange ran; 0 where nothing is recorded of them (plain averages).
        codec: all encoding and decoding together, likewise.
        link: of a window: what a sounding took that is over; 0 where there is none.
    """

    step: float
    compute: float
    tail: float
    wire: float
    codec: float
    link: float = 0.0


def _times_of(record: Record, previous_ns: int) -> tuple[float, float, float]:
    """Step, compute and tail of an iteration; ``previous_ns`` is when the one before it was done."""
    ready = record.ready_ns[-1]
    times = record.done_ns - previous_ns, ready - previous_ns, record.done_ns - ready
    step, compute, tail = (max(ns, 0) / 1e3 for ns in times)
    return step, compute, tail


def _busy_of(record: Record) -> tuple[float, float]:
    """While any exchange ran, several at once or one; and encoding and decoding, all together."""
    wire = codec = until = 0
    for run in () if record.whole else sorted(record.intervals, key=lambda run: run.start_ns):
        if run.lane in RANK_LANES:  # of whole buckets only some iterations have any
            codec += run.end_ns - run.start_ns
        else:
            wire += max(run.end_ns - max(run.start_ns, until), 0)
            until = max(run.end_ns, until)
    return wire / 1e3, codec / 1e3


class Stream:
    """A CUSUM over one figure's logarithms.

    Attributes:
        middle: the baseline's; None before the first window.
    """

    def __init__(self, expected: float | None = None) -> None:
        self._baseline: list[float] = []
        self._sums = [0.0, 0.0]
        self.middle: float | None = None
        self._spread = FIRST_SPREAD
        if expected is not None:
            self.learn(expected)

    def score(self, value: float) -> float:
        """How far a window is out, in spreads."""
        return 0.0 if self.middle is None else max(-CLIP, min((value - self.middle) / self._spread, CLIP))

    @property
    def is_quiet(self) -> bool:
        """Whether nothing adds up."""
        return not any(self._sums)

    @property
    def is_near(self) -> bool:
        """Whether another window may raise the alarm."""
        return max(self._sums) + CLIP - SLACK >= ALARM

    def take(self, value: float) -> bool:
        """Take a window; whether it raises the alarm."""
        score = self.score(value)
        scores = score - SLACK, -score - SLACK
        self._sums = [min(max(total + more, 0.0), MOST) for total, more in zip(self._sums, scores, strict=True)]
        # A window that is as ever raises none.
        return any(total >= ALARM and more > 0 for total, more in zip(self._sums, scores, strict=True))

    def learn(self, value: float) -> None:
        """Take a window into the baseline."""
        if len(self._baseline) == MANY:
            return
        self._baseline.append(value)
        self.middle = middle = median(self._baseline)
        spread = 1.4826 * median(abs(each - middle) for each in self._baseline)
        least = LEAST_SPREAD if len(self._baseline) > FEW else FIRST_SPREAD
        self._spread = min(max(spread, least), MOST_SPREAD)

    def forgive(self) -> None:
        """Begin to sum anew."""
        self._sums = [0.0, 0.0]


_STREAMS = ("step", "slowest", "fastest", "tail", "wire", "codec")


class Watch:
    """Looks at every iteration of a decided job. All ranks make the same calls.

    Attributes:
        latest: every rank's medians of the latest window.
        length: steps of the window to come.
        sounding: a gather that is under way, or over and not heard by all ranks, for what it takes.
        is_waiting: the latest window says that something has changed, and it has to show that it lasts.
        came_home: a change was over since somebody measured again, who may forget this.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._names: Sequence[int] = groups.ranks  # of the rows of a window
        self.latest: tuple[Vitals, ...] = ()
        self._homes: deque[tuple[Vitals, ...]] = deque(maxlen=MOST_HOMES)
        self.came_home = self.is_waiting = False
        self.begin()

    def begin(self, step_us: float | None = None, *, is_another: bool = True, stands: bool = True) -> None:
        """Watch a strategy from the next iteration on.

        Args:
            step_us: what a step of it is known to take.
            is_another: not the one that was watched so far.
            stands: nothing better was found under the conditions as they are. When they are so again nobody looks.
        """
        self._stands = stands
        if is_another:
            self._homes.clear()
        self._streams = {name: Stream() for name in _STREAMS}
        if step_us:
            self._streams["step"] = Stream(math.log(step_us))
        self._previous_ns: int | None = None
        self._window: list[tuple[float, float, float]] = []
        self._busy: list[tuple[float, float]] = []  # of every other step, since there are many tasks
        self._gathering: tuple[int, Gathering] | None = None
        self.sounding: Gathering | None = None
        self.length = WINDOW
        self._alarms = 0  # that were waited for since all was quiet
        self._before: list[tuple[Vitals, ...]] = []  # the windows of the baseline
        # What is out of the way, and then back, is noise, and belongs to the baseline as well.
        self._pending: list[tuple[int, dict[str, float], tuple[Vitals, ...]]] = []

    def skip(self, record: Record) -> None:
        """An iteration ran something else: the next one is timed from its end."""
        if self._previous_ns is not None:
            self._previous_ns = record.done_ns

    def take(self, record: Record) -> bool:
        """Note an iteration. Whether there is a window to look at: then all ranks call :meth:`look`."""
        previous, self._previous_ns = self._previous_ns, record.done_ns
        if previous is None:
            return False
        self._window.append(_times_of(record, previous))
        if len(self._window) % 2 == 0:
            self._busy.append(_busy_of(record))
        if self._gathering is not None and len(self._window) == LAG:
            return True
        if len(self._window) == self.length:
            columns = (*zip(*self._window, strict=True), *zip(*self._busy, strict=True))
            mine = Vitals(*map(median_low, columns))
            if self.sounding is not None:
                mine = mine._replace(link=self.sounding.took_us)
            self._window, self._busy = [], []
            self._gathering = (
                record.iteration,
                self._groups.start_gather(torch.tensor(mine, dtype=torch.float64, device="cpu")),
            )
        return False

    @property
    def is_told(self) -> bool:
        """Whether the latest window was gathered, if it has to be."""
        return self._gathering is None or self._gathering[1].is_done

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`look` would return at once. It never does where other shards of the job have to agree."""
        return self.is_told and (self._gathering is None or self._groups.beside is None)

    def look(self) -> Change | None:
        """Test the window that was gathered; may wait for it."""
        if self._gathering is None:
            return None
        (iteration, gathering), self._gathering = self._gathering, None
        rows, beside = gathering.rows().tolist(), self._groups.beside
        if beside is not None:
            told = beside.all_objects((tuple(self._groups.ranks), rows))
            self._names = [name for names, _ in told for name in names]
            rows = [row for _, theirs in told for row in theirs]
        return self.test(iteration, tuple(Vitals(*row) for row in rows))

    def test(self, iteration: int, rows: tuple[Vitals, ...]) -> Change | None:
        """Test a window, every rank's medians."""
        self.latest, self.is_waiting = rows, False
        step_us = max(row.step for row in rows)
        is_urgent, first = self._is_urgent(step_us), iteration - self.length + 1
        values = _values(rows, self._floor(step_us))
        alarms = [self._streams[name].take(value) for name, value in values.items()]
        is_near = any(stream.is_near for stream in self._streams.values())
        self.length = LONG_WINDOW if step_us < SHORT_STEP_US and not is_near else WINDOW
        self._pending = [*self._pending[1 - MANY :], (first, values, rows)]
        if is_urgent or any(alarms):
            return None if self._comes_home(rows) else self._that_lasts(self._explain())
        if all(stream.is_quiet for stream in self._streams.values()):
            self._alarms = 0
            for _, known, theirs in self._pending:
                self._before = [*self._before, theirs][:MANY]
                for name, value in known.items():
                    self._streams[name].learn(value)
            self._pending = []
            if self._stands and len(self._before) >= FEW:
                self._homes.append(_middle(self._before))
                self._stands = False
        return None

    def _that_lasts(self, change: Change) -> Change | None:
        """What a machine does for a moment shows in compute or encoding: where that is less dear than a look, it has
        to last.
        """
        before_us, now_us = change.step_us
        wait_us = (LASTS - self._alarms) * self.length * max(now_us - before_us, change.at_stake_us)
        if change.ratio(Cause.LINK) is None and self._alarms < LASTS and wait_us < LOOK_US:
            self._alarms += 1
            self.is_waiting = True
            return None
        return change

    def _comes_home(self, rows: tuple[Vitals, ...]) -> bool:
        """Whether all is again as it was when the strategy in use stood its test; then it is watched against that."""
        for home in self._homes:
            was_us, now_us = (max(row.step for row in theirs) for theirs in (home, rows))
            alike = abs(math.log(now_us / was_us)) <= TELLING
            if alike and not list(_findings(home, rows, _floor(min(was_us, now_us)))):
                self.begin(was_us, is_another=False, stands=False)
                self.came_home = True
                return True
        return False

    def sound(self) -> None:
        """Begin a sounding, unless one is under way: a gather for which nobody waits. All ranks together."""
        if self.sounding is None:
            each = max(SOUND_BYTES // max(self._groups.num_ranks - 1, 1), 1)
            self.sounding = self._groups.start_gather(torch.zeros(each, dtype=torch.uint8, device="cpu"), timed=True)

    def heard(self) -> bool:
        """Whether the latest window has what a sounding took on every rank. Then it is over, and another may begin."""
        if self.sounding is None or not all(row.link for row in self.latest):
            return False
        self.sounding = None
        return True

    def now(self, finding: Finding, step: int) -> Change:
        """Something that is no matter of time, and the time that steps take."""
        us, compute_us = (max(column) for column in zip(*((row.step, row.compute) for row in self.latest), strict=True))
        return Change((finding,), step, (us, us), (compute_us, compute_us))

    def hush(self) -> None:
        """Wait until no sounding is under way."""
        if self.sounding is not None:
            self.sounding.rows()

    def forgive(self) -> None:
        """Nothing is done about what was found: go on against the same baseline."""
        self._pending = []
        for stream in self._streams.values():
            stream.forgive()

    def _is_urgent(self, step_us: float) -> bool:
        known = self._streams["step"].middle
        was_us = math.inf if known is None else math.exp(known)
        return step_us > URGENT * was_us and (step_us - was_us) * self.length > LOOK_US

    def _floor(self, step_us: float) -> float:
        known = self._streams["step"].middle
        return _floor(step_us if known is None else min(math.exp(known), step_us))

    def _explain(self) -> Change:
        now = self._pending[-1][2]  # the one before it may lie across the change
        known = self._streams["step"].middle
        assert known is not None  # an alarm needs a baseline
        before = _middle(self._before) if self._before else None
        was = math.exp(known)
        findings: list[Finding] = []
        if before is not None:
            floor = _floor(min(was, max(row.step for row in now)))
            findings = [replace(each, ranks=tuple(self._names[at] for at in each.ranks))
                        for each in _findings(before, now, floor)]  # fmt: skip
        step_us = max(row.step for row in now)
        if not findings:
            findings = [Finding(Cause.STEP, step_us / was)]
        compute_us = tuple(max((row.compute for row in rows), default=0.0) for rows in (before or (), now))
        codec_us = max(row.codec for row in now)
        exposed_us = min(row.tail for row in now) + codec_us
        change = Change(tuple(findings), self._pending[0][0], (was, step_us), compute_us, exposed_us)
        return replace(change, hidden_us=codec_us if FASTER * (change.ratio(Cause.LINK) or 1.0) <= 1 else 0.0)


def _floor(step_us: float) -> float:
    return max(NEGLIGIBLE * step_us, LEAST_US)


def _values(rows: Sequence[Vitals], floor: float) -> dict[str, float]:
    """The streams' figures of a window."""
    figures = (
        max(row.step for row in rows),
        max(row.compute for row in rows),
        min(row.compute for row in rows),
        # Whoever comes last waits for the link alone, the others for the last one too.
        min(row.tail for row in rows),
        min(row.wire for row in rows),
        max(row.codec for row in rows),
    )
    return {name: math.log(max(value, floor)) for name, value in zip(_STREAMS, figures, strict=True)}


def _middle(windows: Sequence[Sequence[Vitals]]) -> tuple[Vitals, ...]:
    """Every rank's median over some windows."""
    return tuple(Vitals(*(median(column) for column in zip(*rows, strict=True))) for rows in zip(*windows, strict=True))


def _findings(before: Sequence[Vitals], now: Sequence[Vitals], floor: float) -> Sequence[Finding]:
    """What moved between two times, every rank's medians."""

    def ratio(old: float, new: float) -> float:
        return max(new, floor) / max(old, floor)

    found = []
    on_wire = [min(row.wire or row.tail for row in rows) for rows in (before, now)]
    moved = ratio(*on_wire)
    if abs(math.log(moved)) > TELLING:
        found.append(Finding(Cause.LINK, moved))
    compute = [ratio(old.compute, new.compute) for old, new in zip(before, now, strict=True)]
    others = [rank for rank, each in enumerate(compute) if abs(math.log(each)) > TELLING]
    if others:
        worst = max((compute[rank] for rank in others), key=lambda each: abs(math.log(each)))
        alike = len(others) == len(compute) and max(compute) < 1.3 * min(compute)
        found.append(Finding(Cause.JOB, worst) if alike else Finding(Cause.COMPUTE, worst, tuple(others)))
    codec = ratio(*(max(row.codec for row in rows) for rows in (before, now)))
    if abs(math.log(codec)) > TELLING and not others:
        found.append(Finding(Cause.ENCODERS, codec))
    return found
