"""What links and compressors cost, measured on real ranks: with stalls, late processors, shared cores, cold caches."""

import doctest
import itertools
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from espresso.comm.execute import host
from espresso.comm.groups import Groups
from espresso.flight.processors import Delays
from espresso.live import beside as live_beside
from espresso.live import codec_costs, points, profiler
from espresso.live.beside import Computing
from espresso.live.change import Change
from espresso.live.codec_costs import measure_compressor, measure_compressors
from espresso.live.codecs import HostCodecs
from espresso.live.heap import keep_freed_memory
from espresso.live.machine import cores_per_rank
from espresso.live.profiler import Place, measure_links
from espresso.live.remeasure import Remeasured
from espresso.model.links import LinkCurve, Links, interpolate
from espresso.strategies import CompressorSpec, Device, Form, Routine, Scope
from tests.ddp import Played
from tests.timeline_jobs import compute, make_job
from tests.workers import run_ranks


def stalled_links(rank: int) -> list[tuple[float, float]]:
    """The first routine's curve, with two stalls of 0.2 s on rank 0 where a routine is timed for the first time."""
    calls = 0

    def settle() -> None:
        nonlocal calls
        calls += 1
        # Per size: once to warm up, once alone, three loops. The first size's second try adds a call.
        if rank == 0 and calls in (2, 13):
            time.sleep(0.2)

    groups = Groups(timeout_s=20)
    try:
        links, _ = measure_links(groups, place=Place(settle=settle))
        return list(links.curves[0].points)
    finally:
        groups.close()


FEW = [(Routine.ALLREDUCE, Form.RAW), (Routine.ALLGATHER, Form.PAYLOAD), (Routine.ALL_TO_ALL, Form.PAYLOAD)]
"""Routines that are measured where what holds them up is a sleep: all go the same way."""


@contextmanager
def held_up(us_of: Callable[[int, int], float]) -> Iterator[Groups]:
    """Hosts of a rank each whose exchange with this number, of so many bytes, is there so much later."""
    start_of, numbers = profiler.starter, itertools.count()

    def starter(*which: Any, **more: Any) -> Any:
        start = start_of(*which, **more)

        def begin() -> Any:
            rest, there = start(), time.perf_counter() + us_of(next(numbers), which[3]) / 1e6

            def wait() -> None:
                rest()
                time.sleep(max(there - time.perf_counter(), 0.0))

            return wait

        return begin

    groups = Groups(timeout_s=20, ranks_per_node=1)
    try:
        with patch.object(profiler, "starter", starter), patch.object(profiler, "_routines", lambda member: FEW):
            yield groups
    finally:
        groups.close()


def on_a_device(rank: int) -> set[str]:
    """Where exchanges are measured whose gradients are on a device that passes for one."""
    start_of, asked = profiler.starter, set[str]()

    def starter(*which: Any) -> Any:
        asked.add(which[-1].type)
        return start_of(*which[:-1], torch.device("cpu"))

    groups, place = Groups(timeout_s=20, ranks_per_node=1), Place(torch.device("meta"))
    try:
        links, _ = measure_links(groups, largest=1 << 18)
        profiler.starter = starter
        profiler.measure_burst(groups, replace(links, in_flight=1), place)
        profiler.time_behind(groups, Scope.FLAT, 4096, 4096, place)
        return asked
    finally:
        profiler.starter = start_of
        groups.close()


def test_exchanges_are_measured_where_gradients_are(pair) -> None:
    assert pair(on_a_device) == [{"meta"}] * 2


def links_held_up(rank: int, us_of: Callable[[int, int], float], largest: float = math.inf) -> Links:
    """What is measured of them."""
    with held_up(us_of) as groups:
        return measure_links(groups, largest=largest)[0]


def far(number: int, size: int) -> float:
    """A connection that starts slowly for what is no longer small."""
    return 20_000.0 if size < 1 << 16 else 90_000.0


def mostly_late(number: int, size: int) -> float:
    """Three of four exchanges find a processor that wakes late."""
    return 20_000.0 if number % 4 else 0.0


class Bucket:
    """A card of 80 Mb/s that lets through 128 KiB at once after a rest, as :func:`links_held_up` takes it."""

    RATE, SIZE = 10.0, float(1 << 17)

    def __init__(self) -> None:
        self._sent_us = 0.0

    def __call__(self, number: int, size: int) -> float:
        now_us = 1e6 * time.perf_counter()
        self._sent_us = max(self._sent_us, now_us) + size / 2 / self.RATE
        return max(self._sent_us - now_us - self.SIZE / self.RATE, 0.0)


def steady(number: int, size: int) -> float:
    """A card of the same rate that lets nothing through beyond it, for one exchange at a time."""
    return size / 2 / Bucket.RATE


def found_again(rank: int, us_of: Callable[[int, int], float]) -> float:
    """What a probe finds of a card where the link was measured before it was so slow."""
    with held_up(us_of) as groups:
        curves = tuple(
            LinkCurve(Routine.ALLGATHER, Scope.FLAT, form, ((65_536.0, 100.0), (1_048_576.0, 1_000.0)))
            for form in (Form.RAW, Form.PAYLOAD)
        )
        job = make_job([1000], [0], costs=compute(1.0, 1.0))
        job = replace(job, costs=replace(job.costs, links=Links(curves=curves)))
        slower = Change((), 0, (1.0, 2.0))
        return Remeasured(job, slower).job(job, slower, groups, Place()).costs.links.burst_bytes


def timed(rank: int) -> tuple[float, float]:
    """Rank 3 comes late, and waits for nobody."""
    groups = Groups(timeout_s=20)
    try:
        mine = torch.zeros(1 << 16, dtype=torch.uint8)
        groups.start_gather(mine).rows()
        time.sleep(0.2 * (rank == 3))
        gathering = groups.start_gather(mine, timed=True)
        before = gathering.took_us
        while not gathering.took_us:
            time.sleep(0.001)
        return before, gathering.took_us
    finally:
        groups.close()


def test_a_gather_is_timed_and_who_comes_last_waits_for_the_link_alone():
    found = [outcome.value for outcome in run_ranks(timed, 4)]
    assert [before for before, _ in found[:3]] == [0.0] * 3
    assert all(took > 150_000.0 for _, took in found[:3])
    assert 0 < found[3][1] < 100_000.0


def links_far_apart(rank: int) -> Links:
    return links_held_up(rank, far)


def test_latency_is_told_from_what_holds_a_link(pair):
    for links in pair(links_far_apart):
        assert links.in_flight > 1
        for curve in links.curves:
            assert 10_000.0 < curve.latency_us <= curve.alone[0][1], curve.routine
            assert curve.alone[0][1] >= 20_000.0
            # Neither latency nor a slow start makes a routine too slow to be measured at larger sizes.
            # The allreduce of a whole bucket is measured larger: it grows by round trips.
            assert curve.alone[-1][0] == (profiler.WHOLE_FAR if curve.routine is Routine.ALLREDUCE else 1 << 22)


def test_a_token_bucket_is_found_and_its_size():
    def found() -> Iterator[float]:
        for outcome in run_ranks(links_held_up, 2, Bucket(), 1 << 19):
            # On a busy machine ranks are late as if they were far apart.
            far = outcome.value.in_flight > 1
            gather = Links(curves=outcome.value.curves).crossing
            yield 0.0 if far else interpolate(gather.points, 1 << 18) * Bucket.RATE / (1 << 17)
            yield 0.0 if far else outcome.value.burst_bytes / Bucket.SIZE

    assert any(all(0.7 < ratio < 1.3 for ratio in found()) for _ in range(6))


def test_a_token_bucket_that_a_fast_link_hid_is_found_once_it_is_slow():
    def found() -> Iterator[float]:
        return (outcome.value / Bucket.SIZE for outcome in run_ranks(found_again, 2, Bucket()))

    assert any(all(0.7 < ratio < 1.3 for ratio in found()) for _ in range(6))
    assert any(all(outcome.value == 0.0 for outcome in run_ranks(found_again, 2, steady)) for _ in range(3))


def test_what_only_most_exchanges_wait_for_is_no_latency():
    def highest_us() -> float:
        outcomes = run_ranks(links_held_up, 2, mostly_late)
        return max(curve.latency_us for outcome in outcomes for curve in outcome.value.curves)

    # On a busy machine the others take a while too, and so long in one run of many.
    assert any(highest_us() < 10_000.0 for _ in range(2))


def encoded(rank: int) -> list[tuple[int, float]]:
    """Of two sizes: how many different groups of numbers are encoded in a row, and what one is then said to take."""
    spec, numbers, rows = CompressorSpec.parse("int8"), list[int](), list[int]()
    codecs = HostCodecs(1)
    codec: Any = codecs(spec, Device.TRAINING)
    encode = codec.encode

    def noted(encoding: Any, payload: Any) -> None:
        numbers.append(id(encoding))
        encode(encoding, payload)

    def timed(step: Callable[[], object]) -> float:
        numbers.clear()
        step()
        rows.append(len(set(numbers)))
        return 800.0

    codec.encode = noted
    groups = Groups(timeout_s=20)
    try:
        found = []
        for size in (1 << 12, 1 << 14):
            rows.clear()
            cost = measure_compressor(
                groups, codecs, spec, [Device.TRAINING], largest=1 << 14, sizes=[size], place=Place(time_us=timed)
            )[0]
            found.append((max(rows), cost.time_us(size)))
        return found
    finally:
        groups.close()
        codecs.close()


def test_compressors_are_timed_in_a_row_each_with_its_own_numbers(pair):
    assert pair(encoded) == [[(4, pytest.approx(200.0)), (1, pytest.approx(800.0))]] * 2


def kept_beside(rank: int) -> int:
    """Bytes that a process holds more of after compressors were measured."""
    groups, codecs, specs = Groups(timeout_s=60), HostCodecs(1), [CompressorSpec.parse(s) for s in ("bf16", "int8")]
    try:
        codecs.warm_up(specs, ["float32"])
        keep_freed_memory()
        before = resident_bytes()
        measure_compressors(groups, codecs, specs, [Device.TRAINING], largest=1 << 22)
        return resident_bytes() - before
    finally:
        groups.close()
        codecs.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_measuring_needed_is_given_back():
    (outcome,) = run_ranks(kept_beside, 1)
    assert outcome.value < 20e6, "an array of the largest size takes 17 MB, and there were a dozen"


def on_one_core(rank: int) -> tuple[float, float]:
    """Microseconds of an encode by ranks that share a core with somebody: with what they wait for it, and without."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(mine)])
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    groups, codecs, spec = Groups(timeout_s=60), HostCodecs(1), CompressorSpec.parse("efsignsgd")
    try:
        codecs.warm_up([spec], ["float32"])
        groups.barrier(patient=True)
        size = 1 << 22  # four in a row are longer than a time slice: what is shorter mostly waits for nobody
        together, apart = (
            measure_compressor(groups, codecs, spec, [Device.TRAINING], largest=4 * size, sizes=[size], cores=cores)[
                0
            ].time_us(size)
            for cores in (1.0, 0.5)
        )
        return together, apart
    finally:
        busy.kill()
        busy.wait()
        groups.close()
        codecs.close()
        os.sched_setaffinity(0, mine)


@pytest.mark.skipif(Delays.open() is None, reason="the system does not say how long a thread waited for a core")
def test_of_a_core_that_ranks_share_compressors_are_timed_alone(pair):
    """The timeline counts that they share it."""
    for together, apart in pair(on_one_core):
        assert apart < 0.8 * together


def test_a_stall_is_not_taken_for_the_links_rate(pair):
    for curve in pair(stalled_links):
        sizes = [size for size, _ in curve]
        assert sizes[:3] == [4096.0, 65536.0, 262144.0]
        assert len(sizes) > 3, "a stall ended the measurement"
        assert max(us for _, us in curve[:3]) < 100_000.0


def beside(rank: int) -> tuple[float, float]:
    """Of half a core, what 0.1 s of work on it takes from what computes beside it, and what waiting does.

    Of six tries the nearest to half: a neighbour's work on the same core takes its part of both.
    """
    mine, groups = os.sched_getaffinity(0), Groups(timeout_s=20)
    os.sched_setaffinity(0, [min(mine)])
    numbers = np.ones(1 << 16, np.float32)

    def work() -> None:
        until = time.perf_counter() + 0.1
        while time.perf_counter() < until:
            np.abs(numbers, out=numbers)

    try:
        computing = Computing(groups)
        half_us = 0.5e5 * cores_per_rank(groups)
        busy, idle = ([computing.taken_us(run) / half_us for _ in range(6)] for run in (work, partial(time.sleep, 0.1)))
        return min(busy, key=lambda taken: abs(taken - 1)), min(idle)
    finally:
        groups.close()
        os.sched_setaffinity(0, mine)


def test_what_an_exchange_takes_is_what_computations_beside_it_lose(pair):
    """Half of a core that both want; of a wait nothing."""
    for busy, idle in pair(beside):
        assert 0.7 < busy < 1.3
        assert idle < 0.3


def handled(rank: int) -> tuple[float, float]:
    """What handing over takes in microseconds, and where each of the three tasks of a bucket computes for 1 ms more."""
    mine, run = os.sched_getaffinity(0), host._run
    os.sched_setaffinity(0, {min(mine)})
    groups, codecs = Groups(timeout_s=20), HostCodecs(1)

    def longer(work: Any) -> Any:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        return run(work)

    try:
        usual = statistics.median(live_beside.measure_handling(groups, codecs) for _ in range(3))
        with patch.object(host, "_run", longer):
            return usual, live_beside.measure_handling(groups, codecs)
    finally:
        groups.close()
        codecs.close()
        os.sched_setaffinity(0, mine)


def test_what_carrying_a_plan_out_takes_is_what_computations_beside_it_lose(pair):
    for usual_us, longer_us in pair(handled):
        assert 1 < usual_us < 2000
        assert 700 < longer_us - usual_us < 5000  # three tasks for two that compress: 1500 on a quiet machine


def forgotten(rank: int) -> list[str]:
    """What happens to a codec that is timed: caches emptied, compressions, decodes."""
    happened: list[str] = []
    emptied = codec_costs._forgetting

    def forgetting(num_bytes: int) -> Callable[[], None]:
        forget = emptied(num_bytes)

        def noted() -> None:
            happened.append(f"emptied of {num_bytes} bytes")
            forget()

        return noted

    def timed(step: Callable[[], object]) -> float:
        happened.append("timed")
        return 1.0

    codec_costs._forgetting = forgetting
    groups, codecs, spec = Groups(timeout_s=20), HostCodecs(1), CompressorSpec.parse("efsignsgd")
    try:
        measure_compressor(
            groups, codecs, spec, [Device.TRAINING], largest=1 << 14, sizes=[1 << 14], place=Place(time_us=timed)
        )
        return happened
    finally:
        codec_costs._forgetting = emptied
        groups.close()
        codecs.close()


@pytest.mark.parametrize("module", [live_beside, points])
def test_what_is_said_of_measurements_holds(module: Any) -> None:
    failed, tried = doctest.testmod(module)
    assert (bool(tried), failed) == (True, 0)


def test_compressors_are_timed_on_numbers_that_are_in_no_cache(pair):
    """A step goes through weights, gradients and averages of all parameters between two compressions of the same."""
    assert pair(forgotten) == [[f"emptied of {12 << 14} bytes", "timed", "timed"] * 5] * 2


@pytest.fixture(scope="module")
def pair() -> Played:
    has_delays = (on_one_core,) if Delays.open() is not None else ()
    scenarios = (on_a_device, links_far_apart, encoded, *has_delays, stalled_links, beside, handled, forgotten)
    return Played(__name__, scenarios, 2, is_brief=False)
