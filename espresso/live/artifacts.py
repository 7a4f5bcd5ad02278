"""Files that a run leaves for people: job, strategy, and the lanes as they ran."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from espresso.comm.execute.executor import Record
from espresso.comm.groups import Groups
from espresso.model.job import Job
from espresso.strategies import DTYPES, Strategy


class Artifacts:
    """Writes into a directory on rank 0; without a directory it writes nothing."""

    def __init__(self, directory: str | None, groups: Groups) -> None:
        self._directory = None if directory is None else Path(directory)
        self._groups = groups
        if self._directory is not None and groups.rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)

    @property
    def wanted(self) -> bool:
        return self._directory is not None

    def job(self, job: Job) -> None:
        """``job.json`` here, and wherever ``espresso profile`` asked for it."""
        if self._directory is not None:
            job.save(self._directory / "job.json")
        asked = os.environ.get("ESPRESSO_JOB_PATH")
        if asked:
            job.save(asked)

    def strategy(self, strategy: Strategy) -> None:
        if self._directory is not None and self._groups.rank == 0:
            strategy.save(self._directory / "strategy.json")

    def measured(self, record: Record, origin_ns: int) -> None:
        """``measured.json``: the recorded intervals of all ranks. Collective."""
        rows = interval_rows(record, origin_ns, self._groups.rank)
        everybody = self._groups.all_objects(rows)
        if self._directory is not None and self._groups.rank == 0:
            rows = [row for theirs in everybody for row in theirs]
            (self._directory / "measured.json").write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")


def interval_rows(record: Record, origin_ns: int, rank: int) -> list[dict[str, Any]]:
    """A recorded iteration as JSON rows, in microseconds from ``origin_ns`` (the first ready gradient)."""
    laid = record.plan
    if laid is None:
        return []
    rows = _backward_rows(record, origin_ns, rank)
    for interval in sorted(record.intervals, key=lambda i: i.start_ns):
        task = laid.tasks[interval.task]
        part = laid.partitions[interval.partition]
        group = laid.groups[part.group]
        runs = group.segments(part.start, part.stop)
        rows.append(
            {
                "lane": interval.lane.value,
                "step": str(task.step),
                "tensors": list(dict.fromkeys(run.tensor for run in runs)),
                "bytes": part.numel * DTYPES[group.dtype],
                "start_us": (interval.start_ns - origin_ns) / 1e3,
                "end_us": (interval.end_ns - origin_ns) / 1e3,
                "iteration": record.iteration,
                "rank": rank,
                "partition": interval.partition,
                "option": str(group.choice.option),
            }
        )
    return rows


def _backward_rows(record: Record, origin_ns: int, rank: int) -> list[dict[str, Any]]:
    """Backward as the stretches between one bucket's arrival and the next."""
    rows = []
    begin = origin_ns
    for bucket, at in zip(record.buckets, record.ready_ns, strict=True):
        rows.append(
            {
                "lane": "backward",
                "step": "backward",
                "tensors": [slot.tensor for slot in bucket.slots],
                "bytes": bucket.numel * DTYPES[bucket.dtype],
                "start_us": (begin - origin_ns) / 1e3,
                "end_us": (at - origin_ns) / 1e3,
                "iteration": record.iteration,
                "rank": rank,
                "partition": bucket.index,
                "option": "",
            }
        )
        begin = at
    return rows


def mark_registered(steps: int, needed: int, *, writes_here: bool) -> None:
    """Tell ``espresso profile`` that the script registered, how far it came, and who writes the job.

    Args:
        writes_here: whether rank 0, which writes ``job.json``, runs on this node.
    """
    asked = os.environ.get("ESPRESSO_JOB_PATH")
    if asked:
        body = {"steps": steps, "needed": needed, "writes_here": writes_here}
        Path(asked + ".registered").write_text(json.dumps(body), encoding="utf-8")
