"""DDP's bucket size as a dimension of the search: the same job in the buckets that another ``bucket_cap_mb`` gives.

``DistributedDataParallel(bucket_cap_mb=cap)`` fills a bucket per dtype, in the order in which gradients became ready
in the first iteration, until it holds at least cap MiB. A bucket is handed over with its last gradient. DDP fixes its
buckets when it is made; automatic mode has it lay them anew (``comm/ddp_buckets.py``), where it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from espresso.model.job import Job
from espresso.strategies import DTYPES, Bucket, Mode, TensorSpec

CAPS_MB = (1, 5, 10, 25, 50, 100, 200)
_MIB = 1 << 20


def rebucketed(job: Job, bucket_cap_mb: float) -> Job:
    """The job as DDP would run it with this cap; forward, costs and gaps stay.

    Raises:
        ValueError: the job is not in DDP mode, or the cap is not above zero.
    """
    if job.mode is not Mode.DDP:
        raise ValueError("only jobs in ddp mode have buckets")
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be above zero, got {bucket_cap_mb!r}")
    return in_buckets(job, [bucket for bucket, _ in filled(job.tensors, bucket_cap_mb * _MIB)])


def filled(tensors: Sequence[TensorSpec], cap_bytes: float) -> list[tuple[Bucket, int]]:
    """The buckets that DDP makes of gradients in the order in which they are ready, with the place of each one's last.

    Buckets are reduced in order: none before the one ahead of it is handed over.
    """
    full: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        held = filling.setdefault(tensor.dtype, [])
        held.append(index)
        if sum(tensors[one].num_bytes for one in held) >= cap_bytes:
            full.append(filling.pop(tensor.dtype))
    full = sorted([*full, *filling.values()], key=lambda held: held[-1])
    return [
        (Bucket.packed(place, [(tensors[i].name, tensors[i].numel) for i in held], tensors[held[0]].dtype), held[-1])
        for place, held in enumerate(full)
    ]


def as_asked(job: Job, bucket_cap_mb: float | None) -> Job:
    """The job in the buckets that a strategy asks for; as it is where it has them, or where nothing can be asked."""
    if bucket_cap_mb is None or job.mode is not Mode.DDP:
        return job
    laid = rebucketed(job, bucket_cap_mb)
    return job if held(laid) == held(job) else laid  # they were measured


def held(job: Job) -> list[set[str]]:
    """The gradients of each bucket."""
    return [{slot.tensor for slot in bucket.slots} for bucket in job.laid_out]


def in_buckets(job: Job, buckets: Sequence[Bucket]) -> Job:
    """The same gradients in these buckets: each is handed over with its last gradient, and none before another.

    A shard has buckets that hold nothing: they come with the one before them.
    """
    ready = dict(zip((tensor.name for tensor in job.tensors), accumulate(job.gaps_us), strict=True))
    full = (max((ready[slot.tensor] for slot in bucket.slots), default=0.0) for bucket in buckets)
    return replace(job, buckets=tuple(buckets), bucket_ready_us=tuple(accumulate(full, max)))


def caps_for(job: Job) -> tuple[float, ...]:
    """The caps that give this job different buckets, smallest first."""
    total = sum(tensor.numel * DTYPES[tensor.dtype] for tensor in job.tensors)
    kept: list[float] = []
    seen: set[tuple[Bucket, ...]] = set()
    for cap in CAPS_MB:
        buckets = rebucketed(job, cap).laid_out
        if buckets not in seen:
            seen.add(buckets)
            kept.append(cap)
        if cap * _MIB >= total:
            break
    return tuple(kept)
