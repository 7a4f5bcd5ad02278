"""Chrome Trace Event JSON: predicted and measured lanes in one file, for Perfetto or chrome://tracing.

Every timeline is a process of the trace (``predicted``, ``measured host.rank``), every lane a thread of it. A lane with
several exchanges under way has as many threads, since a viewer takes what overlaps in one for calls in calls.
Format: "Trace Event Format" (Chromium project); only complete events (``X``) and metadata (``M``) are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from espresso.flight.form import TRACE
from espresso.show.lane_events import LaneEvent, sorted_lanes
from espresso.strategies.fields import save

MAX_TENSORS_IN_NAME = 2


def write_trace(
    path: str | Path,
    predicted: Sequence[LaneEvent],
    measured: Sequence[LaneEvent] | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> int:
    """Write the trace file and return the number of intervals in it.

    Args:
        path: file to write; replaced if it exists.
        predicted: from :func:`espresso.show.lane_events.predicted_events`.
        measured: from :mod:`espresso.show.flight_events`; any number of ranks and iterations.
        metadata: shown by Perfetto under "Info and stats"; must be JSON.

    Raises:
        OSError: the file cannot be written.
    """
    body = trace_body(predicted, measured, metadata=metadata)
    save(path, body, indent=None)
    return sum(event["ph"] == "X" for event in body["traceEvents"])


def trace_body(
    predicted: Sequence[LaneEvent],
    measured: Sequence[LaneEvent] | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What ``write_trace`` writes: metadata events first, then intervals by time."""
    processes = [("predicted", list(predicted))] if predicted else []
    processes += _measured_processes(measured or [])
    names: list[dict[str, Any]] = []
    intervals: list[dict[str, Any]] = []
    for pid, (name, events) in enumerate(processes, start=1):
        rows = _rows(events)
        names += _metadata(pid, name, [lane for lane, _ in rows])
        for tid, (_, members) in enumerate(rows, start=1):
            intervals += [_interval(event, pid, tid) for event in members]
    # Longer first at equal starts: viewers nest an event in the one before it.
    intervals.sort(key=lambda event: (event["ts"], -event["dur"]))
    return _body(names + intervals, metadata or {})


def _body(events: list[dict[str, Any]], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The head comes first: who looks for ranks' traces in a folder reads no further."""
    return {"otherData": {"kind": TRACE, **metadata}, "displayTimeUnit": "ms", "traceEvents": events}


def _rows(events: Sequence[LaneEvent]) -> list[tuple[str, list[LaneEvent]]]:
    """Every lane once for each event that is under way in it at the same time."""
    rows: list[tuple[str, list[LaneEvent]]] = []
    for lane in sorted_lanes(events):
        mine: list[tuple[str, list[LaneEvent]]] = []
        for event in sorted((e for e in events if e.lane == lane), key=lambda e: (e.start_us, e.end_us)):
            free = next((members for _, members in mine if members[-1].end_us <= event.start_us), None)
            if free is None:
                mine.append((f"{lane} {len(mine) + 1}" if mine else lane, [event]))
            else:
                free.append(event)
        rows += mine
    return rows


def write_history(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the events of a job (``state.history``) as spans on one lane: what led to each, and the strategy in use.

    Raises:
        OSError: the file cannot be written.
    """
    lanes = {"events": 1, "in use": 2}
    spans: list[dict[str, Any]] = []

    def span(lane: str, name: str, start_us: float, end_us: float, row: Mapping[str, Any]) -> None:
        times = {"ts": round(start_us, 3), "dur": round(end_us - start_us, 3)}
        spans.append({"ph": "X", "name": name, "cat": lane, **times, "pid": 1, "tid": lanes[lane], "args": dict(row)})

    ends = [row["at_us"] + row["took_us"] for row in rows]
    for row, end, until in zip(rows, ends, [*ends[1:], *ends[-1:]], strict=True):
        span("events", f"{row['event']}: {row['reason']}", row["at_us"], end, row)
        span("in use", row["strategy"], end, until, row)
    save(path, _body(_metadata(1, "espresso decides", list(lanes)) + spans, {}), indent=None)


def _measured_processes(events: Iterable[LaneEvent]) -> list[tuple[str, list[LaneEvent]]]:
    """One process a rank; one a rank and iteration where there are several: each iteration starts at zero."""
    groups: dict[tuple[int, int], list[LaneEvent]] = {}
    for event in events:
        groups.setdefault((event.rank, event.iteration), []).append(event)
    several = len({iteration for _, iteration in groups}) > 1
    processes = []
    for (rank, iteration), members in sorted(groups.items()):
        host = members[0].host
        name = f"measured {host}.{rank}" if host else f"measured rank {rank}"
        processes.append((f"{name}, iteration {iteration}" if several else name, members))
    return processes


def _metadata(pid: int, name: str, lanes: Sequence[str]) -> list[dict[str, Any]]:
    def entry(kind: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "ts": 0, "name": kind, "pid": pid, "tid": tid, "args": args}

    entries = [entry("process_name", 0, {"name": name}), entry("process_sort_index", 0, {"sort_index": pid})]
    for tid, lane in enumerate(lanes, start=1):
        entries.append(entry("thread_name", tid, {"name": lane}))
        entries.append(entry("thread_sort_index", tid, {"sort_index": tid}))
    return entries


def _interval(event: LaneEvent, pid: int, tid: int) -> dict[str, Any]:
    shown = ", ".join(event.tensors[:MAX_TENSORS_IN_NAME])
    more = len(event.tensors) - MAX_TENSORS_IN_NAME
    label = f"{shown} +{more}" if more > 0 else shown
    args: dict[str, Any] = {"tensors": list(event.tensors), "bytes": event.num_bytes, "step": event.step}
    if event.option:
        args["option"] = event.option
    if event.partition >= 0:
        args["partition"] = event.partition
    return {
        "ph": "X",
        "name": f"{event.step}: {label}" if label else event.step,
        "cat": event.kind.value,
        "ts": round(event.start_us, 3),
        "dur": round(event.duration_us, 3),
        "pid": pid,
        "tid": tid,
        "args": args,
    }
