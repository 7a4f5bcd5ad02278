"""What planner and executor tell each other: what to run in an iteration, and what happened in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from espresso.strategies import Bucket, Lane, Plan, Strategy


@dataclass(frozen=True, slots=True)
class Assignment:
    """What to run in an iteration.

    Attributes:
        strategy: choices for every tensor.
        order: the total order as found by list scheduling for exactly these buckets, or None for the
            plain order (needed while the bucket structure is unknown).
        buckets: the structure ``order`` is for.
        deferred: start nothing before the last bucket is there, so that backward is measured undisturbed.
        record: have every task on its lane, also where all buckets might go straight to the library.
        drain: send what uncompressed tensors still carry from an earlier strategy. A plain block of a race
            parks it instead: the strategies it races against take it up again where they left it.
    """

    strategy: Strategy
    order: tuple[int, ...] | None = None
    buckets: tuple[Bucket, ...] | None = None
    deferred: bool = False
    record: bool = False
    drain: bool = True


@dataclass(frozen=True)
class Interval:
    """A task as it ran: ``perf_counter_ns`` times.

    Attributes:
        task: its number in the plan of all the iteration's buckets, also where every bucket was planned alone.
        issue_ns: what it waits for was there.
        num_bytes: that it sent from this rank.
    """

    task: int
    lane: Lane
    start_ns: int
    end_ns: int
    issue_ns: int = 0
    num_bytes: int = 0


@dataclass
class Record:
    """What happened in one iteration on this rank; times are ``perf_counter_ns``.

    Attributes:
        plan: what was followed; None where buckets were planned one by one.
        intervals: of all tasks; of buckets that went whole to the library (``whole``) in some iterations only.
        hook_ns: processor time of backward's thread in the hook, all buckets together.
    """

    iteration: int
    assignment: Assignment
    ready_ns: list[int] = field(default_factory=list)
    done_ns: int = 0
    finite: bool = True
    bytes_sent: int = 0
    bytes_raw: int = 0
    buckets: tuple[Bucket, ...] = ()
    intervals: list[Interval] = field(default_factory=list)
    plan: Plan | None = None
    whole: bool = False
    hook_ns: int = 0


class Planner(Protocol):
    """Decides what each iteration runs. ``assign`` and ``after`` come at counts that all ranks agree on."""

    def assign(self, iteration: int) -> Assignment:
        """The assignment of this iteration; must not block."""
        ...

    def note(self, record: Record) -> None:
        """Take note of an iteration; a rank may be alone in it, and asks nobody."""
        ...

    def after(self, record: Record) -> Callable[[], None] | None:
        """Begin what follows an iteration that was noted; a returned function runs before its last future completes.

        It may block and communicate: every rank is inside the same hook call then.
        """
        ...
