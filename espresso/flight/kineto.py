"""Kineto's JSON, as ``torch.profiler`` exports it, one file a rank: flight records of jobs that never heard of us.

::

    with profile(…) as profiler: …; profiler.step()      each step
    profiler.export_chrome_trace(f"rank{rank}.json")

What is looked for: ``ProfilerStep#n``, ``DistributedDataParallel.forward``, the autograd engine's functions,
``Optimizer.step#…``, and all-reduces of Gloo (``gloo:all_reduce``) and NCCL. Exchanges are buckets by their order.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from espresso.flight.form import TRACE, Flight, FlightError, Script, Span, StepRecord, Stretch, check_run, load_run
from espresso.strategies import Bucket, Cluster, Slot, Strategy, TensorSpec, ring_bytes
from espresso.strategies import fields as forms

MOST_BYTES = 512 << 20
"""Of a trace: some hundred steps of a large model."""

_STEP = re.compile(r"ProfilerStep#(\d{1,15})")
_DTYPES = {"float": "float32", "Float": "float32", "Half": "float16", "c10::Half": "float16"}
_DTYPES |= {"BFloat16": "bfloat16", "c10::BFloat16": "bfloat16"}
UNKNOWN_NUMEL = 1 << 18
"""Elements of an exchange whose size the trace does not tell."""

_ON_DEVICE = ("kernel", "gpu_user_annotation")
"""Categories of what ran on a GPU: kernels, and the host's annotations once more, as they lie over those."""


@dataclass(frozen=True)
class _Event:
    name: str
    start: float
    end: float
    args: Mapping[str, Any]
    on_device: bool

    @property
    def numel(self) -> tuple[int, str]:
        """Elements and type of what an exchange moves."""
        found = self.args.get("In msg nelems")
        dims = self.args.get("Input Dims")
        if not isinstance(found, int) and isinstance(dims, list):
            found = _elements(dims)
        types = self.args.get("Input type")
        dtype = self.args.get("dtype") or (types[0] if isinstance(types, list) and types else None)
        known = _DTYPES.get(str(dtype), "float32")
        return (found if isinstance(found, int) and 0 < found < 1 << 40 else UNKNOWN_NUMEL), known


def _elements(dims: Any) -> int:
    """Of the first tensor in a list, perhaps nested."""
    while isinstance(dims, list) and dims and isinstance(dims[0], list):
        dims = next((each for each in dims if each), [])
    sizes = [size for size in dims if isinstance(size, int) and size > 0] if isinstance(dims, list) else []
    return prod(sizes[:8]) if sizes else 0


def load_any(folder: str | Path) -> list[Flight]:
    """A run's flight records, or else its Kineto traces; traces that we wrote ourselves are left out.

    Raises:
        FlightError: neither is there, or one is malformed.
        OSError: the folder or a file cannot be read.
    """
    there = Path(folder)
    if not there.is_dir():
        raise FlightError(f"{there}: is no folder; name the one in which a run left its flight records or traces")
    paths = [] if any(there.glob("flight-*.json")) else sorted((*there.glob("*.json"), *there.glob("*.json.gz")))
    traces = [path for path in paths if _looks_like_a_trace(path)]
    return load_traces(traces) if traces else load_run(there)


def _looks_like_a_trace(path: Path) -> bool:
    if path.suffix == ".gz":  # reading it says what is wrong
        return True
    with path.open("rb") as file:
        head, events, _ = file.read(1 << 20).partition(b"traceEvents")
    return bool(events) and TRACE.encode() not in head


def load_traces(paths: Sequence[str | Path]) -> list[Flight]:
    """Kineto's traces of a run, one file a rank.

    Raises:
        FlightError: one is malformed, holds no steps, or they are not of one run.
        OSError: a file cannot be read.
    """
    flights = []
    for place, path in enumerate(paths):

        def read(body: Any, place: int = place) -> Flight:
            return flight_of(body, rank=place, num_ranks=len(paths))

        flights.append(forms.load(path, read, FlightError, most=MOST_BYTES))
    check_run(flights)
    return sorted(flights, key=lambda flight: flight.rank)


def flight_of(body: Any, *, rank: int = 0, num_ranks: int = 1) -> Flight:
    """A trace as a flight record.

    Args:
        body: JSON values.
        rank, num_ranks: where the trace does not say them.

    Raises:
        FlightError: no trace, or one without a whole step.
    """
    if not isinstance(body, dict) or not isinstance(body.get("traceEvents"), list):
        raise FlightError("this is no trace: it has no list of traceEvents")
    told = body.get("distributedInfo")
    told = told if isinstance(told, dict) else {}
    rank, num_ranks = _whole(told.get("rank"), rank), max(_whole(told.get("world_size"), num_ranks), 1)
    events = _events(body["traceEvents"])
    on_host, device = ([event for event in events if event.on_device is there] for there in (False, True))
    kernels = [event for event in device if _is_kernel(event.name)]
    # On a GPU the host only says when they were launched, and may be in its next step when they run.
    exchanges = kernels or [e for e in on_host if e.name.lower() in ("gloo:all_reduce", "nccl:all_reduce")]
    windows = _from_start_to_start(device) if kernels else {}
    steps: list[StepRecord] = []
    stretches: dict[tuple[tuple[int, str], ...], int] = {}
    for number, start, end in _steps(on_host):
        exchanged = _within(exchanges, *windows.get(number, (start, end)))
        step, shape = _step(number, _within(on_host, start, end), exchanged, stretches, num_ranks)
        if step is not None:
            stretches.setdefault(shape, len(stretches))
            steps.append(step)
    if len(steps) < 2:
        raise FlightError(
            "the trace holds fewer than two whole steps of DistributedDataParallel; profile more, call"
            " profiler.step() after each, and record the CPU's activities"
        )
    cluster = Cluster(num_ranks, 1)
    made = tuple(_stretch(shape, cluster, on_device=bool(kernels)) for shape in stretches)
    host = body.get("host_name")
    name = host if isinstance(host, str) and host else f"rank {rank}"
    return Flight(rank, num_ranks, name, cluster, made, tuple(steps), facts={"source": "kineto", "buffer_bytes": 1})


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 16 else default


def _events(rows: list[Any]) -> list[_Event]:
    found = []
    for row in rows:
        if not isinstance(row, dict) or row.get("ph") != "X":
            continue
        name, start, took, args = row.get("name"), row.get("ts"), row.get("dur"), row.get("args")
        if isinstance(name, str) and isinstance(start, int | float) and isinstance(took, int | float) and took >= 0:
            known = args if isinstance(args, dict) else {}
            found.append(_Event(name, float(start), float(start + took), known, row.get("cat") in _ON_DEVICE))
    return sorted(found, key=lambda event: event.start)


def _steps(events: Sequence[_Event]) -> list[tuple[int, float, float]]:
    """(number, from, to): the profiler's own, else from one optimizer's end to the next."""
    marked = _marked(events)
    if marked:
        return [(number, *marked[number]) for number in sorted(marked)]
    ends = [event.end for event in events if event.name.startswith("Optimizer.step#")]
    return [(number, a, b) for number, (a, b) in enumerate(itertools.pairwise(ends))]


def _marked(events: Sequence[_Event]) -> dict[int, tuple[float, float]]:
    """From where to where the profiler's steps go, by number."""
    marked: dict[int, tuple[float, float]] = {}
    for event in events:
        if match := _STEP.fullmatch(event.name):
            start, end = marked.get(int(match[1]), (event.start, event.end))
            marked[int(match[1])] = min(start, event.start), max(end, event.end)
    return marked


def _from_start_to_start(events: Sequence[_Event]) -> dict[int, tuple[float, float]]:
    """The same of a device, where a mark ends with what the main thread launched."""
    starts = sorted((start, number) for number, (start, _) in _marked(events).items())
    return {number: (start, after) for (start, number), (after, _) in itertools.pairwise([*starts, (math.inf, 0)])}


def _within(events: Sequence[_Event], start: float, end: float) -> Sequence[_Event]:
    first, last = (bisect_left(events, at, key=lambda event: event.start) for at in (start, end))
    return events[first:last]


def _is_kernel(name: str) -> bool:
    low = name.lower()
    return "nccl" in low and "kernel" in low and "allreduce" in low


def _step(
    number: int, events: Sequence[_Event], exchanges: Sequence[_Event], stretches: Mapping[Any, int], num_ranks: int
) -> tuple[StepRecord | None, tuple[tuple[int, str], ...]]:
    """What the host did in a step and what was exchanged, and the sizes of that; None: it is not whole."""
    forward = [event for event in events if event.name == "DistributedDataParallel.forward"]
    backward = [event for event in events if event.name.startswith("autograd::engine::evaluate_function")]
    optimizer = [event for event in events if event.name.startswith("Optimizer.step#")]
    if not forward or not backward or not exchanges:
        return None, ()
    last = forward[-1]
    backward = [event for event in backward if event.start >= last.start]
    # Before the optimizer begins: what a script averages behind it (its loss, say) is no gradient. Kernels are not told
    # apart so: the host runs ahead of them.
    ended = max((event.end for event in backward), default=last.end)
    until = next((event.start for event in optimizer if event.start >= ended), math.inf)
    exchanges = [event for event in exchanges if last.end <= event.start and (event.on_device or event.start < until)]
    if not backward or not exchanges:
        return None, ()
    sent = [e for e in events if e.name.lower() in ("gloo:broadcast", "nccl:broadcast") and e.start >= last.start]
    prepared = max((e.end for e in sent if e.start < last.end), default=last.start)
    begin, gone = backward[0].start, max(event.end for event in backward)
    done = max([gone, *(event.end for event in exchanges)])
    script = Script(
        began_us=events[0].start,
        passes=len(forward),
        input_us=max(forward[0].start - events[0].start, 0.0),
        earlier_us=max(last.start - forward[0].start, 0.0),
        entered_us=last.start,
        forward_us=min(prepared, last.end),
        forward_end_us=last.end,
        backward_us=begin,
        backward_end_us=gone,
        averaged_us=done,
        optimizer_us=optimizer[0].start if optimizer else None,
        optimizer_end_us=optimizer[-1].end if optimizer else None,
    )
    shape = tuple(event.numel for event in exchanges)
    spans = tuple(
        Span(task, event.start, event.start, event.end, ring_bytes(numel, dtype, num_ranks))
        for task, (event, (numel, dtype)) in enumerate(zip(exchanges, shape, strict=True))
    )
    sent_bytes = sum(span.num_bytes for span in spans)
    ready = tuple(event.start for event in exchanges)
    place = stretches.get(shape, len(stretches))
    return StepRecord(number, place, script, ready, done, True, sent_bytes, sent_bytes, spans), shape


def _stretch(shape: tuple[tuple[int, str], ...], cluster: Cluster, *, on_device: bool) -> Stretch:
    """Plain exchanges of buckets that hold one tensor each."""
    tensors = tuple(TensorSpec(f"bucket {place}", (numel,), dtype) for place, (numel, dtype) in enumerate(shape))
    buckets = tuple(Bucket(place, (Slot(each.name, 0, each.numel),), each.dtype) for place, each in enumerate(tensors))
    return Stretch(Strategy.uniform(tensors, cluster, partition_bytes=0), buckets, host_copies=on_device)
