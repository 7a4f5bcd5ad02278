"""What a search chooses from: priced candidates per unit, deduplicated, as the kernels' flat arrays.

A *unit* is what gets one choice: a tensor in the paper's mode, a bucket or a part of one in DDP's. Units of
equal size share their candidates. Which leaves are offered is decided here, by compressor and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from espresso.chains import LANE_SETS, Pricer, SizeKey, create_compressor, partition_segments
from espresso.job import Job
from espresso.strategies import (
    DTYPES,
    NONE,
    PLAIN,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Lane,
    options_for,
)
from espresso.strategies.plan import partition_spans

Wholes = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors of one bucket that share a choice."""

    bucket: int
    tensors: tuple[str, ...]
    numel: int
    dtype: str

    @property
    def size(self) -> tuple[int, str, int]:
        """Units with equal sizes cost the same: (elements, dtype, stretches)."""
        return self.numel, self.dtype, len(self.tensors)

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPES[self.dtype]


def units_of(job: Job) -> tuple[Unit, ...]:
    """One unit per tensor (paper) or per bucket (DDP), in the order in which they become ready."""
    return tuple(
        Unit(bucket.index, tuple(slot.tensor for slot in bucket.slots), bucket.numel, bucket.dtype)
        for bucket in job.laid_out
    )


@lru_cache(maxsize=256)
def choices_for(
    cluster: Cluster, spec: CompressorSpec, device: Device, *, summable: bool
) -> tuple[Choice, ...]:
    """Every compressed leaf with all its compressions on one device."""
    return tuple(
        Choice(option, spec)
        for option in options_for(cluster, devices=(device,), summable=summable)
        if option.is_compressed
    )


def raw_choices(cluster: Cluster) -> tuple[Choice, ...]:
    """The uncompressed leaves, plain flat allreduce first."""
    leaves = [Choice(o) for o in options_for(cluster, devices=(Device.TRAINING,)) if not o.is_compressed]
    return (PLAIN, *(choice for choice in leaves if choice != PLAIN))


def is_summable(spec: CompressorSpec) -> bool:
    """Whether the compressor's payloads add up in a raw reduction (the registry's trait)."""
    return create_compressor(spec).traits.summable


def compressed_choices(
    job: Job, specs: Iterable[CompressorSpec], device: Device
) -> tuple[Choice, ...]:
    """The compressed leaves of every compressor that the job can price on this device."""
    return tuple(
        choice
        for spec in specs
        if spec != NONE and device in job.costs.devices(spec)
        for choice in choices_for(job.cluster, spec, device, summable=is_summable(spec))
    )


class Candidates:
    """Candidates of every size for one job, pricing and partition size.

    Attributes:
        choices: by candidate number.
    """

    def __init__(self, pricer: Pricer, partition_bytes: int) -> None:
        self.choices: list[Choice] = []
        self._pricer = pricer
        self._partition_bytes = partition_bytes
        self._count: list[int] = []
        self._full: list[int] = []
        self._tail: list[int] = []
        self._sets: list[Wholes] = []
        self._us: list[Reals] = []
        self._cores: list[Reals] = []
        self._rows = 0
        self._number: dict[tuple[tuple[int, str, int], Choice], int] = {}
        self._frozen: tuple[Wholes, Wholes, Wholes, Wholes, Reals, Reals] | None = None

    def number(self, size: tuple[int, str, int], choice: Choice) -> int:
        """The candidate of one choice at one size."""
        found = self._number.get((size, choice))
        return self.numbers(size, (choice,))[0] if found is None else found

    def numbers(self, size: tuple[int, str, int], choices: Sequence[Choice]) -> list[int]:
        """The candidates of several choices at one size, in the same order."""
        fresh = [choice for choice in choices if (size, choice) not in self._number]
        if fresh:
            numel, dtype, runs = size
            spans = partition_spans(numel, self._partition_bytes // DTYPES[dtype])
            lengths = [stop - start for start, stop in spans]
            for choice in fresh:
                tail = self._chain(choice, lengths[-1], dtype, partition_segments(runs, lengths[-1], numel))
                full = tail
                if len(lengths) > 1 and lengths[0] != lengths[-1]:
                    full = self._chain(choice, lengths[0], dtype, partition_segments(runs, lengths[0], numel))
                self._number[size, choice] = len(self.choices)
                self.choices.append(choice)
                self._count.append(len(lengths))
                self._full.append(full)
                self._tail.append(tail)
            self._frozen = None
        return [self._number[size, choice] for choice in choices]

    def _chain(self, choice: Choice, elements: int, dtype: str, segments: int) -> int:
        size: SizeKey = (choice.compressor, elements, dtype, segments)
        sets, us, cores = self._pricer.columns(choice.option, size)
        start = self._rows
        self._sets.append(sets)
        self._us.append(us)
        self._cores.append(cores)
        self._rows += len(sets)
        return start

    def arrays(self) -> tuple[Wholes, Wholes, Wholes, Wholes, Reals, Reals]:
        """(count, full, tail, task_set, task_us, task_cores) as the kernels take them."""
        if self._frozen is None:
            self._sets, self._us, self._cores = (
                [np.concatenate(self._sets)],
                [np.concatenate(self._us)],
                [np.concatenate(self._cores)],
            )
            self._frozen = (
                np.array(self._count, dtype=np.int64),
                np.array(self._full, dtype=np.int64),
                np.array(self._tail, dtype=np.int64),
                self._sets[0],
                self._us[0],
                self._cores[0],
            )
        return self._frozen

    def alone_us(self, numbers: Sequence[int]) -> Reals:
        """Every candidate's time if nothing else ran, its partitions pipelined over their slowest stage."""
        count, full, tail, task_set, task_us, _ = self.arrays()
        ends = np.flatnonzero(task_set < 0)
        times = []
        for number in numbers:
            start = int(full[number])
            stages = task_us[start : int(ends[np.searchsorted(ends, start)])]
            last = int(tail[number])
            chain = task_us[last : int(ends[np.searchsorted(ends, last)])].sum()
            times.append(chain + (count[number] - 1) * stages.max())
        return np.array(times)

    def distinct(self, numbers: Sequence[int], *, prune: bool) -> Wholes:
        """The candidates among ``numbers`` that can matter, in the same order.

        Of equal task sequences the first stays; that is exact. With ``prune`` a candidate also goes if an
        earlier or cheaper one is no worse in every lane's total, in the length of the chain, in the host
        time it burns and in how soon it holds the training lane. That is a heuristic: list scheduling has
        anomalies, and a longer task sequence can, rarely, finish earlier.
        """
        count, full, tail, task_set, task_us, task_cores = self.arrays()
        seen: set[tuple[bytes, ...]] = set()
        kept: list[int] = []
        features: list[Reals] = []
        ends = np.flatnonzero(task_set < 0)
        for number in numbers:
            rows = [(int(start), int(ends[np.searchsorted(ends, start)])) for start in (full[number], tail[number])]
            key = tuple(
                part.tobytes() for a, b in rows for part in (task_set[a:b], task_us[a:b], task_cores[a:b])
            )
            if key in seen:
                continue
            seen.add(key)
            kept.append(number)
            if prune:
                (a, b), (c, d) = rows
                one, last = _feature(task_set[a:b], task_us[a:b], task_cores[a:b]), None
                last = one if a == c else _feature(task_set[c:d], task_us[c:d], task_cores[c:d])
                features.append((count[number] - 1) * one + last)
        if prune and len(kept) > 1:
            matrix = np.array(features)
            alive = ~_dominated(matrix)
            kept = [number for number, stays in zip(kept, alive, strict=True) if stays]
        return np.array(kept, dtype=np.int64)


_HOLDS = np.array([[lane in lanes for lane in Lane] for lanes in LANE_SETS], dtype=np.float64)


def _feature(sets: Wholes, us: Reals, cores: Reals) -> Reals:
    """What pruning compares: six lane totals, the chain, host time, and training work that comes first."""
    leading = us[0] if sets[0] == 0 else 0.0
    return np.concatenate([us @ _HOLDS[sets], [us.sum(), us @ cores, leading]])


def _dominated(features: Reals) -> npt.NDArray[np.bool_]:
    """Rows that another row, earlier or strictly better somewhere, matches or beats everywhere."""
    no_worse = (features[:, None, :] >= features[None, :, :]).all(axis=2)
    better = (features[:, None, :] > features[None, :, :]).any(axis=2)
    earlier = np.arange(len(features))[:, None] > np.arange(len(features))[None, :]
    return np.asarray((no_worse & (better | earlier)).any(axis=1))


def partition_sizes(job: Job, units: Sequence[Unit]) -> tuple[int, ...]:
    """The partition sizes worth trying: never cutting, then every size that cuts something into few pieces."""
    largest = max(unit.num_bytes for unit in units)
    sizes = [0]
    for mib in (16, 4, 1):
        size = mib << 20
        if size < largest <= 256 * size:
            sizes.append(size)
    return tuple(sizes)

