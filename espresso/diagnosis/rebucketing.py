"""A recorded turn with other buckets: what their exchanges would take, and when they would be ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from espresso.diagnosis.replay import OUTSIDE_ALPHA_US, Costs, Line, bucket_bytes
from espresso.diagnosis.turns import Part, Turn
from espresso.model.bucket_caps import filled
from espresso.strategies import DTYPES, Bucket, StepKind, Strategy, TensorSpec, plan


def fit(costs: Costs, us_per_byte: float | None = None) -> Line:
    """A line through what plain exchanges took, over the bytes of their buckets.

    Args:
        us_per_byte: its slope, where all buckets are of one size and tell none.
    """
    rows = []
    for task in costs.plan.tasks:
        if task.step.kind is StepKind.COMMUNICATE and costs.task_us[task.index] > 0:
            part = costs.plan.partitions[task.partition]
            size = part.numel * DTYPES[costs.plan.groups[part.group].dtype]
            rows.append((float(size), costs.task_us[task.index]))
    if not rows:
        return Line(0.0, 0.0)
    mean_x, mean_y = sum(x for x, _ in rows) / len(rows), sum(y for _, y in rows) / len(rows)
    spread = sum((x - mean_x) ** 2 for x, _ in rows)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in rows) / spread if spread > (0.05 * mean_x) ** 2 else 0.0
    floor = min(y for _, y in rows)
    if slope <= 0.0 and us_per_byte is not None:
        slope = min(us_per_byte, (mean_y - min(OUTSIDE_ALPHA_US, 0.5 * floor)) / mean_x)
    if slope <= 0.0 or mean_y - slope * mean_x < 0.0:
        alpha = min(OUTSIDE_ALPHA_US, 0.5 * floor)
        return Line(alpha, (mean_y - alpha) / mean_x)
    return Line(min(mean_y - slope * mean_x, floor), slope)


def rebucketed(turn: Turn, before: Sequence[Bucket], cap_bytes: float) -> tuple[tuple[Bucket, ...], Turn]:
    """The buckets that another cap gives, and the turn with them.

    Within a bucket gradients come evenly by their bytes, the tensors in the order in which DDP put them there.
    """
    tensors = [TensorSpec(slot.tensor, (slot.numel,), bucket.dtype) for bucket in before for slot in bucket.slots]
    found = filled(tensors, cap_bytes)
    parts = []
    for part in turn.parts:
        arrivals = _arrivals(part, before)
        parts.append(replace(part, ready=tuple(arrivals[last] for _, last in found)))
    return tuple(bucket for bucket, _ in found), replace(turn, parts=tuple(parts))


def _arrivals(part: Part, buckets: Sequence[Bucket]) -> list[float]:
    """When each tensor's gradient was there."""
    arrivals, last = [], 0.0
    for bucket, at in zip(buckets, part.ready, strict=True):
        done = accumulate(slot.numel for slot in bucket.slots)
        arrivals += [last + (at - last) * numel / max(bucket.numel, 1) for numel in done]
        last = at
    return arrivals


def plain_costs(
    strategy: Strategy, buckets: Sequence[Bucket], line: Line, latency_us: float, core_us: float, hook_us: float
) -> Costs:
    """What plain exchanges of these buckets take."""
    laid, sizes = plan(replace(strategy, partition_bytes=0), buckets), [bucket_bytes(b) for b in buckets]
    task_us = tuple(line.us(size) for size in sizes)
    return Costs(laid, task_us, (latency_us,) * len(sizes), {}, sent=tuple(sizes), core_us=core_us, hook_us=hook_us)
