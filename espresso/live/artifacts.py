"""Files that a run leaves for people: job, strategy, and the lanes as they ran."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from espresso.comm.execute.executor import Record
from espresso.comm.groups import Groups
from espresso.model.job import Job
from espresso.show.trace_events import write_history
from espresso.strategies import DTYPES, Strategy

logger = logging.getLogger("espresso")

SETTLED_AFTER = 5
"""Iterations after the decision before one is recorded for people: caches and buffers are warm then."""

_JOB_PATH = "ESPRESSO_JOB_PATH"


class Artifacts:
    """Writes into a directory on rank 0; without a directory it writes nothing.

    A file that cannot be written is a warning, once: nothing that is for people may stop a training.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, groups: Groups) -> None:
        self._directory = None if directory is None else Path(directory)
        self._groups = groups
        self._decided_at: int | None = None
        self._has_warned = self._are_left = False
        self._write(".", Path.stat)  # what cannot work is said at the start

    def job(self, job: Job) -> None:
        """``job.json`` here, and wherever ``espresso profile`` asked for it."""
        self._write("job.json", job.save)
        asked = os.environ.get(_JOB_PATH)
        if asked and self._groups.speaks:
            job.save(asked)

    def due(self, record: Record, strategy: Strategy) -> bool:
        """Whether this is the iteration to record: a steady one, some steps after the decision. Same on all ranks.

        Args:
            strategy: the one that was decided.
        """
        if self._are_left or self._directory is None:
            return False
        if self._decided_at is None:
            self._decided_at = record.iteration
        if strategy.num_compressed and not (record.plan is not None and record.intervals):
            return False
        return record.iteration >= self._decided_at + SETTLED_AFTER

    def leave(self, record: Record, strategy: Strategy, job: Job | None) -> None:
        """``strategy.json``, and ``measured.json``: the recorded intervals of all ranks. Collective, once."""
        self._are_left = True
        offset_us = 0.0 if job is None or job.bucket_ready_us is None else job.bucket_ready_us[0]
        rows = interval_rows(record, record.ready_ns[0] - int(offset_us * 1e3), self._groups.rank)
        everybody = [row for theirs in self._groups.all_objects(rows) for row in theirs]
        text = json.dumps(everybody, indent=0) + "\n"
        self._write("strategy.json", strategy.save)
        self._write("measured.json", lambda path: path.write_text(text, encoding="utf-8"))

    def history(self, rows: Sequence[dict[str, Any]]) -> None:
        """``history.json``: what was decided when, as a trace that Perfetto opens."""
        self._write("history.json", lambda path: write_history(path, rows))

    def _write(self, name: str, save: Callable[[Path], object]) -> None:
        if self._directory is None or not self._groups.speaks:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            save(self._directory / name)
        except OSError as error:
            if not self._has_warned:
                logger.warning("artifacts_dir cannot be written to (%s); training goes on without", error)
            self._has_warned = True


class ProfileMarks:
    """Tells ``espresso profile`` on this node how far the script came, and who writes the job.

    Args:
        is_told: whether this rank tells it.
        needed: iterations until the job is measured.
    """

    def __init__(self, *, is_told: bool, needed: int, groups: Groups) -> None:
        self._asked = os.environ.get(_JOB_PATH) if is_told else None
        # Rank 0 writes job.json: whether that is this node's affair.
        self._body = {"needed": needed, "writes_here": groups.rank == 0}

    def mark(self, steps: int) -> None:
        """So many iterations are done."""
        if self._asked:
            Path(self._asked + ".registered").write_text(json.dumps({"steps": steps, **self._body}), encoding="utf-8")


def interval_rows(record: Record, origin_ns: int, rank: int) -> list[dict[str, Any]]:
    """A recorded iteration as JSON rows, in microseconds from ``origin_ns`` (the first ready gradient).

    Backward is the stretches between one bucket's arrival and the next.
    """
    laid = record.plan
    if laid is None:
        return []

    def row(
        lane: str, step: str, tensors: Iterable[str], num_bytes: int, start_ns: int, end_ns: int, part: int, option: str
    ) -> dict[str, Any]:
        return {
            "lane": lane,
            "step": step,
            "tensors": list(dict.fromkeys(tensors)),
            "bytes": num_bytes,
            "start_us": (start_ns - origin_ns) / 1e3,
            "end_us": (end_ns - origin_ns) / 1e3,
            "iteration": record.iteration,
            "rank": rank,
            "partition": part,
            "option": option,
        }

    rows = []
    for bucket, start, end in zip(record.buckets, (origin_ns, *record.ready_ns), record.ready_ns, strict=False):
        names, size = (slot.tensor for slot in bucket.slots), bucket.numel * DTYPES[bucket.dtype]
        rows.append(row("backward", "backward", names, size, start, end, bucket.index, ""))
    for run in sorted(record.intervals, key=lambda i: i.start_ns):
        part = laid.partitions[run.partition]
        group = laid.groups[part.group]
        names, size = (s.tensor for s in group.segments(part.start, part.stop)), part.numel * DTYPES[group.dtype]
        step, option = str(laid.tasks[run.task].step), str(group.choice.option)
        rows.append(row(run.lane.value, step, names, size, run.start_ns, run.end_ns, run.partition, option))
    return rows
