"""Measuring what compressors cost on the live job: on all ranks at once, as links are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np

from espresso.comm.groups import Groups
from espresso.comm.program import Codecs
from espresso.compressors.base import Codec, Segment
from espresso.compressors.rehearsal import Step, rehearse
from espresso.flight.processors import Delays
from espresso.live.heap import give_freed_memory_back
from espresso.live.profiler import Place
from espresso.model.costs import COMMON_OPS, ComputeCost, Op
from espresso.strategies import CompressorSpec, Device

ENCODE_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
"""Elements at which a compressor is measured."""

IN_A_ROW = 4
"""Compressions that are measured one after the other, where the largest group is so large."""

REPEATS = 5
"""Of each: their median counts."""

STEP_BYTES, MOST_STEP_BYTES = 12, 1 << 27
"""Per element of the largest group, and at most: what a step goes through between two compressions of the same numbers
(weights, gradients, an optimizer's average), and so drives out of the caches."""

PROBED = (1 << 14, 1 << 20)
"""Elements at which a compressor is measured whose kin was measured at all sizes."""


def measure_compressors(
    groups: Groups,
    codecs: Codecs,
    specs: Sequence[CompressorSpec],
    devices: Sequence[Device],
    *,
    largest: int,
    place: Place | None = None,
    offload_width: int = 1,
    cores: float = 1.0,
) -> tuple[ComputeCost, ...]:
    """Costs of several compressors, on all ranks at once, at less than so many times the cost of one.

    The first of each algorithm is measured as :func:`measure_compressor` does. Of its kin, the same algorithm with
    other settings, two sizes on the first device say how much longer or shorter they take; between the sizes that
    factor is interpolated, and it holds on the other devices too.
    """
    whole: dict[str, tuple[ComputeCost, ...]] = {}
    found: list[ComputeCost] = []
    for spec in specs:
        give_freed_memory_back()  # what one needed is not kept beside what the next one needs
        first = whole.get(spec.name)
        if first is None:
            first = whole[spec.name] = measure_compressor(
                groups, codecs, spec, devices, largest=largest, place=place, offload_width=offload_width, cores=cores
            )
            found += first
            continue
        sizes = [size for size in PROBED if size <= largest] or [max(largest, 1)]
        probed = measure_compressor(
            groups, codecs, spec, devices[:1], largest=largest, place=place, cores=cores, sizes=sizes
        )
        found += [_scaled(cost, str(spec), first, probed) for cost in first]
    give_freed_memory_back()
    return tuple(found)


def _scaled(cost: ComputeCost, spec: str, first: Sequence[ComputeCost], probed: Sequence[ComputeCost]) -> ComputeCost:
    """The cost of a compressor whose kin has ``cost``."""
    mine = next(one for one in probed if one.op is cost.op)
    theirs = next(one for one in first if one.op is cost.op and one.device is mine.device)
    sizes = [size for size, _ in mine.points]
    factors = [mine.time_us(size) / max(theirs.time_us(size), 1e-3) for size in sizes]
    logs = np.log([max(size, 1.0) for size in sizes])
    points = []
    for size, _ in cost.points:
        factor = float(np.interp(math.log(max(size, 1.0)), logs, factors))
        points.append((size, max(factor * cost.time_us(size) - cost.launch_us, 0.0)))
    return replace(cost, spec=spec, points=tuple(points))


def measure_compressor(
    groups: Groups,
    codecs: Codecs,
    spec: CompressorSpec,
    devices: Iterable[Device],
    *,
    largest: int,
    place: Place | None = None,
    offload_width: int = 1,
    cores: float = 1.0,
    sizes: Sequence[int] = (),
) -> tuple[ComputeCost, ...]:
    """Encode (with its residual) and decode times of one compressor, on all ranks at once.

    Args:
        largest: elements of the largest group; sizes beyond it are not measured.
        offload_width: so many offloaded ones run at once, and so they are timed.
        cores: of a rank. With less than one, what it waited for a core is left out: the timeline counts that, and so
            would this, of what takes longer than the system's time slices.
        place: where the training device's codecs work.
        sizes: to measure at; by default all.

    Returns:
        Costs whose points are (elements, us), the slowest rank's medians; decode per payload. Of compressors of several
        rounds sizes are those of a square matrix.
    """
    costs = []
    sizes = sizes or [size for size in ENCODE_SIZES if size <= largest] or [max(largest, 1)]
    for device in devices:
        codec, here = codecs(spec, device), place if place and device is not Device.OFFLOAD else Place()
        rounds = codec.compressor.traits.rounds > 1
        width = offload_width if device is Device.OFFLOAD else 1
        most = IN_A_ROW if width == 1 else 1
        forget = _forgetting(min(STEP_BYTES * largest, MOST_STEP_BYTES) if here.is_host else 0)
        rows = [
            _time_codec(groups, codec, size, here, width, max(min(most, largest // size), 1), cores, forget)
            for size in sizes
        ]
        for op, column in zip(Op if rounds else COMMON_OPS, range(3), strict=False):
            launch = min(0.9 * rows[0][column], 50.0)
            points = [(float(size), max(row[column] - launch, 0.0)) for size, row in zip(sizes, rows, strict=True)]
            # Decoders of payloads read one of every rank; a sum is decoded once.
            share = groups.num_ranks if op is Op.DECODE and not rounds else 1
            scaled = tuple((size, us / share) for size, us in points)
            costs.append(ComputeCost(str(spec), device, op, scaled, launch_us=launch))
    return tuple(costs)


def _forgetting(num_bytes: int) -> Callable[[], None]:
    """What drives everything else out of caches of this size."""
    others = np.zeros(num_bytes, np.uint8)
    return partial(others.fill, 1)


def _time_codec(
    groups: Groups,
    codec: Codec,
    size: int,
    place: Place,
    width: int,
    in_a_row: int,
    cores: float,
    forget: Callable[[], None],
) -> tuple[float, ...]:
    """Microseconds of an encode, of the decode of a payload of every rank, and of a transform where there is one.

    Of ``width`` of them at once it is the time of all; else of one of so many in a row, each with its own numbers, as
    partitions of a bucket are: one alone finds its numbers in the cache, or everything cold, as they do not.
    """
    side = max(math.isqrt(size), 1)
    shape = (side, side) if codec.compressor.traits.rounds > 1 else (size,)
    probe = Segment("probe", 0, math.prod(shape), shape)
    made = [
        rehearse(codec, [probe], rows=groups.num_ranks, scale=1.0 / groups.num_ranks, here=place.here)
        for _ in range(width * in_a_row)
    ]
    times: list[list[float]] = []
    delays = Delays.open() if cores < 1 and place.is_host else None

    def time_us(step: Step) -> float:
        waited_us = delays.read() if delays else 0.0
        took_us = place.time_us(step)
        return took_us - (delays.read() - waited_us if delays else 0.0)

    with ThreadPoolExecutor(width) as others:
        steps = [
            partial(_in_a_row, each) if width == 1 else partial(_at_once, others, each)
            for each in zip(*made, strict=True)
        ]
        for _ in range(REPEATS):
            forget()
            groups.barrier()
            times.append([time_us(step) / in_a_row for step in steps])
    medians = tuple(median(column) for column in zip(*times, strict=True))
    return tuple(map(max, zip(*groups.all_objects(medians), strict=True)))


def _in_a_row(steps: Sequence[Step]) -> None:
    for step in steps:
        step()


def _at_once(threads: ThreadPoolExecutor, steps: Sequence[Step]) -> None:
    for done in [threads.submit(step) for step in steps]:
        done.result()
