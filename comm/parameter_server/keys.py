"""A partition of the plan as keys: one per region that ranks push, the same list on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espresso.comm.parameter_server.plain import is_plain, smaller
from espresso.comm.parameter_server.wire import Coding, Key, Stretch
from espresso.compressors.base import Codec, Segment
from espresso.strategies import (
    DTYPES,
    Choice,
    Cluster,
    Device,
    Partition,
    Routine,
    Scope,
    Site,
    StepKind,
    trace,
)
from espresso.strategies.flow import Span


@dataclass(frozen=True)
class Described:
    """The keys of a partition, and which of them is this rank's (None: it has nothing to push)."""

    keys: tuple[Key, ...]
    mine: int | None


def describe(
    partition: Partition,
    choice: Choice,
    cluster: Cluster,
    rank: int,
    ranks: Sequence[int],
    codec: Codec | None,
    dtype: str,
    segments: Callable[[Span], list[Segment]],
    seed: int,
) -> Described:
    """The keys of one partition of a parameter-server leaf.

    Args:
        rank: this rank's place in the job's group.
        ranks: everybody's rank among the workers, by place.
        codec: of the choice's compressor; None where nothing is compressed.
        dtype: of the numbers on the wire where they travel plain.
        segments: the segments of a range of the partition.
    """
    keys: list[Key] = []
    mine = None
    columns = range(cluster.ranks_per_node) if choice.option.is_hierarchical else (0,)
    for column in columns:
        flows = trace(choice.option, cluster, partition.numel, column, partition.root)
        push = next(flow for flow in flows if flow.step.routine is Routine.PUSH)
        parts = [part for part in segments(push.before.region) if part.numel]
        if not parts:
            continue
        flat = push.step.scope is Scope.FLAT
        workers = ranks if flat else ranks[column :: cluster.ranks_per_node]
        if ranks[rank] in workers:
            mine = len(keys)
        two_way = any(f.step.kind is StepKind.COMPRESS and f.step.device is Device.SERVER for f in flows)
        site = next((list(Site).index(flow.site) for flow in flows if flow.site is not None), 0)
        keys.append(_key(parts, tuple(workers), choice, codec, dtype, two_way, site, seed))
    return Described(tuple(keys), mine)


def _key(
    parts: Sequence[Segment],
    workers: tuple[int, ...],
    choice: Choice,
    codec: Codec | None,
    dtype: str,
    two_way: bool,
    site: int,
    seed: int,
) -> Key:
    numbers = sum(part.numel for part in parts) * DTYPES[dtype]
    up, up_bytes = Coding.RAW, numbers
    keeps = False
    if codec is not None:
        chosen: Any = smaller(codec, parts, np.dtype(dtype))
        up = Coding.RAW if is_plain(chosen) else Coding.PAYLOAD
        up_bytes = chosen.compressor.layout(parts, np.dtype(dtype)).num_bytes
        keeps = two_way and codec.compressor.traits.error_feedback
    return Key(
        number=-1,
        server=-1,
        workers=workers,
        stretches=tuple(Stretch(part.tensor, part.tensor_start, part.numel) for part in parts),
        dtype=dtype,
        compressor=choice.compressor,
        coded=codec is not None,
        two_way=two_way,
        keeps_residual=keeps,
        up=up,
        down=up if two_way else Coding.RAW,
        up_bytes=up_bytes,
        down_bytes=up_bytes if two_way else numbers,
        site=site,
        seed=seed,
    )
