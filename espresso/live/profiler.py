"""Measuring what links cost on the live job.

Nothing here decides anything. Measurements run on all ranks at once, inside one hook call, so that ranks that share
cores or a network card measure what they will meet.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from espresso.comm import collectives
from espresso.comm.collectives import Rest
from espresso.comm.execute.lanes import IN_FLIGHT
from espresso.comm.groups import Groups
from espresso.comm.member import Member
from espresso.compressors.rehearsal import Here, Step
from espresso.live.beside import Computing
from espresso.live.points import at_rate, rising, straight, usual
from espresso.model.links import LinkCurve, Links, interpolate, on_busiest_link
from espresso.strategies import Form, Routine, Scope

HOST = torch.device("cpu")

LINK_SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Sizes of the whole array, in bytes, at which a routine is measured, until one takes ``SLOW_US``, or is at least half
of all that could be sent at once: beyond the last one a curve goes on as it is."""

WHOLE_FAR = 1 << 24
"""One more, for the allreduce of a whole bucket between hosts far apart. Gloo sends it in pieces of a MB, two at once,
so that it takes half a round trip a MB however fast the link (1 Gb/s, 100 ms, 40 MB: 2.3 s; 1.5 by the 4 MB before)."""

SLOW_US = 60_000.0
"""A routine that takes this long is not repeated back to back, nor measured at larger sizes."""

WHOLE = 5
"""So many times as long for the allreduce: whole buckets travel by it, and its last points say what a byte takes."""

SLOW_START = 4
"""Between hosts far apart: so long beyond so many times its latency. A size for which a connection merely starts too
slowly, or that lost a packet, would else be the last one, and its time taken for bytes."""

TRIES, STALLED = 3, 3.0
"""So often a slow one is timed, and between hosts far apart where it takes more than this many times what latency and
its bytes do by the last smaller size: the least counts. One stall (a lost packet, a neighbour's burst, eight ranks that
share two cores) would else be taken for the link's rate at all larger sizes."""

ALIKE = 10
"""Short exchanges of which the last but one says what the way varies by."""

BESIDE_US, MAX_BESIDE = 50_000.0, 50
"""So long an exchange is repeated beside computations, by what it takes alone, and so often at most: beside them a
short one takes several times as long."""

LOOP_US = 10_000.0
MAX_LOOP = 16
"""A short routine is repeated back to back for about so long: one run alone would measure how its ranks woke
up and what a network card lets through after a rest, and partitions follow one another in use as well."""

REPEATS = 3
"""Of that loop: of all their runs what is usual counts."""

REST_S = 0.025
"""A card's token bucket is taken to be full after so long: 128 KiB come back in that at 42 Mb/s."""

SAVED_US, SAVED = 500.0, 0.25
"""A gather after a rest that takes so much less, and by such a part of what it usually takes, found a token bucket."""

BURST_TRIES = 2
"""Rests before each size."""


LEAST_LATENCY_US = 1000.0
"""A latency below this stays in the points: over microseconds it is not told from how ranks wait for one another. What
is latency no exchange is without, so the shortest of ``ALIKE`` counts: where threads share a core, many take 4 ms."""


def measure_links(
    groups: Groups,
    *,
    progress: Callable[[str], None] | None = None,
    place: Place | None = None,
    largest: float = math.inf,
) -> tuple[Links, dict[str, float]]:
    """Measure every routine on every scope of the live groups. Collective: all ranks call it together.

    Points are (bytes of the whole array, microseconds): the slowest rank's, as is usual, rising with the bytes. On the
    inter scope all local ranks run their columns at once and the bytes are those of all of them. What is latency at the
    least size, and does not hold the link, is latency at every size.

    Args:
        largest: bytes of all gradients: nothing larger is sent at once.

    Returns:
        The links, and the cores that their exchanges take (:class:`espresso.model.costs.Contention`).
    """
    place = place or Place()
    curves: list[LinkCurve] = []
    for scope, member in groups.scopes.items():
        columns = groups.cluster.columns(scope)
        for routine, form in _routines(member):
            if progress is not None:
                progress(f"{scope.value}.{routine.value} ({form.value})")
            ring = groups.cluster.crosses_both(scope)
            points: list[tuple[float, float]] = []
            latency_us = 0.0
            for size in (*LINK_SIZES, WHOLE_FAR):
                grown_us = max(points[-1][1] - latency_us, 0.0) * size * columns / points[-1][0] if points else 0.0
                most = STALLED * (latency_us + grown_us) if latency_us else 0.0
                wall_us = _time_routine(groups, member, routine, form, size, ring, place, most)
                points.append((float(size * columns), wall_us))
                # (On a device exchanges wait for one another.)
                if size == LINK_SIZES[0] and wall_us > LEAST_LATENCY_US and place.is_host:
                    latency_us = _latency_us(groups, member, routine, form, ring)
                last = WHOLE_FAR if latency_us and routine is Routine.ALLREDUCE else LINK_SIZES[-1]
                is_enough = size == last or (size > LINK_SIZES[0] and 2 * size >= largest)
                slow_us = SLOW_US * (WHOLE if routine is Routine.ALLREDUCE else 1)
                if is_enough or wall_us - latency_us > slow_us + SLOW_START * latency_us:
                    break
            bounded = at_rate(rising(points) if latency_us else straight(rising(points)))
            latency_us = min(latency_us, bounded[0][1])
            held = tuple((num_bytes, us - latency_us) for num_bytes, us in bounded)
            curves.append(LinkCurve(routine, scope, form, held, latency_us))
        if any(curve.scope is scope and curve.latency_us for curve in curves):
            spread_us = _spread_us(groups, member)
            curves = [replace(c, spread_us=spread_us) if c.scope is scope and c.latency_us else c for c in curves]
    taken = cores_taken(groups, curves) if place.is_host else {}
    # Where latency says that it matters, several are under way at a time.
    links = Links(curves=tuple(curves), in_flight=IN_FLIGHT if any(curve.latency_us for curve in curves) else 1)
    return replace(links, burst_bytes=measure_burst(groups, links, place)), taken


def measure_burst(groups: Groups, links: Links, place: Place, sizes: Sequence[int] = LINK_SIZES[1:-1]) -> float:
    """Bytes that a card lets through at once after a rest: by what a gather takes less than its curve says, and less
    than the next but one behind it.

    Collective. Between hosts far apart it is not looked for, nor at sizes that are slow.
    """
    curve = links.crossing
    if curve is None or groups.cluster.num_nodes == 1 or links.in_flight > 1:
        return 0.0
    columns = groups.cluster.columns(curve.scope)
    ring = groups.cluster.crosses_both(curve.scope)
    found = 0.0
    for size in sizes:
        usual_us, rested_us = interpolate(curve.alone, float(size * columns)), math.inf
        if usual_us > SLOW_US:
            break
        start = starter(groups.scopes[curve.scope], curve.routine, curve.form, size, ring, place.device)

        def run(start: Callable[[], Rest] = start) -> None:
            start()()

        for _ in range(BURST_TRIES):
            time.sleep(REST_S)
            first, *_, last = _time_loop(groups, run, 3, place, apart=True)
            rested_us, usual_us = min(rested_us, first), min(usual_us, last)
        saved_us = usual_us - rested_us
        if saved_us > max(SAVED_US, SAVED * usual_us):
            found = max(found, saved_us / usual_us * on_busiest_link(curve, groups.cluster)[1] * size * columns)
    return found


def cores_taken(groups: Groups, curves: Sequence[LinkCurve]) -> dict[str, float]:
    """See :class:`espresso.model.costs.Contention`; what holds for a scope is measured with a gather of payloads.

    Collective. Each by the last point of its curve, over how long that holds the link: a step counts them for as long.
    """
    computing, taken = Computing(groups), {}
    for curve in curves:
        if (curve.routine, curve.form) not in ((Routine.ALLGATHER, Form.PAYLOAD), (Routine.ALLREDUCE, Form.RAW)):
            continue
        columns = groups.cluster.columns(curve.scope)
        ring = groups.cluster.crosses_both(curve.scope)
        num_bytes, held_us = curve.points[-1]
        start = starter(groups.scopes[curve.scope], curve.routine, curve.form, int(num_bytes) // columns, ring, HOST)
        count = max(min(int(BESIDE_US / max(held_us + curve.latency_us, 1.0)), MAX_BESIDE), 1)

        def exchange(start: Callable[[], Rest] = start, count: int = count) -> None:
            for _ in range(count):
                start()()

        key = curve.scope.value if curve.form is Form.PAYLOAD else f"{curve.scope.value}.{curve.routine.value}"
        taken[key] = computing.taken_us(exchange) / (count * max(held_us, 1.0))
    return taken


def _routines(member: Member) -> list[tuple[Routine, Form]]:
    if member.size == 1:
        return []
    raw = (
        Routine.ALLREDUCE,
        Routine.REDUCE_SCATTER,
        Routine.ALLGATHER,
        Routine.REDUCE,
        Routine.BROADCAST,
    )
    packed = (Routine.ALLGATHER, Routine.ALL_TO_ALL, Routine.GATHER, Routine.BROADCAST)
    return [(routine, Form.RAW) for routine in raw] + [(routine, Form.PAYLOAD) for routine in packed]


def _host_us(call: Step) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


@dataclass(frozen=True)
class Place:
    """Where a model's gradients are.

    Attributes:
        is_host: what is told is done before the next line runs; a device only takes orders.
        settle: waits until all is done there.
        time_us: microseconds of a call.
        here: brings an array of the host there.
    """

    device: torch.device = HOST
    settle: Callable[[], None] = lambda: None
    time_us: Callable[[Step], float] = _host_us
    here: Here = lambda array: array
    is_host: bool = True


def _time_routine(
    groups: Groups,
    member: Member,
    routine: Routine,
    form: Form,
    size: int,
    ring: bool,
    place: Place,
    most_us: float,
) -> float:
    """Microseconds of one routine; the slowest rank's, the same on all ranks.

    A slow one that takes more than ``most_us`` is timed again: something may have stalled.
    """
    start = starter(member, routine, form, size, ring, place.device)

    def run() -> None:
        start()()

    run()
    place.settle()
    wall_us = math.inf
    for _ in range(TRIES):
        wall_us = min(wall_us, *_time_loop(groups, run, 1, place))
        if wall_us <= max(SLOW_US, most_us):
            break
    if wall_us > SLOW_US:
        return wall_us
    count, walls = max(min(int(LOOP_US / max(wall_us, 1.0)), MAX_LOOP), 1), []
    for _ in range(REPEATS):
        again = _time_loop(groups, run, count + 1, place)
        walls += again[1:] or again
    return usual(walls)


def time_behind(
    groups: Groups, scope: Scope, behind: int, size: int, place: Place, count: int = 1,
    of: Callable[[Sequence[float]], float] = usual,
) -> float:  # fmt: skip
    """Microseconds of a gather of payloads, right behind another; of ``count`` what is usual. Collective.

    What has rested lets some bytes through at once (a card's or a cloud's token bucket): those behind it have to wait.
    """
    ring = groups.cluster.crosses_both(scope)
    first, start = (
        starter(groups.scopes[scope], Routine.ALLGATHER, Form.PAYLOAD, num_bytes, ring, place.device)
        for num_bytes in (behind, size)
    )
    groups.barrier()
    first()()
    place.settle()
    times = [time.perf_counter()]
    for _ in range(count):
        start()()
        place.settle()
        times.append(time.perf_counter())
    took_us: float = max(groups.all_objects(1e6 * of([b - a for a, b in itertools.pairwise(times)])))
    return took_us


def _latency_us(groups: Groups, member: Member, routine: Routine, form: Form, ring: bool) -> float:
    """What of a short routine does not hold the link: where several are under way, each of the others takes less."""
    starts = [starter(member.connection(i), routine, form, LINK_SIZES[0], ring, HOST) for i in range(IN_FLIGHT)]

    def together() -> None:
        for rest in [start() for start in starts]:
            rest()

    def alone() -> None:
        starts[0]()()

    alone_us = min(_time_loop(groups, alone, ALIKE, Place()))
    if alone_us <= LEAST_LATENCY_US:
        return 0.0
    together_us = min(_time_loop(groups, together, TRIES, Place()))
    latency_us = alone_us - max(together_us - alone_us, 0.0) / (IN_FLIGHT - 1)
    return latency_us if latency_us > LEAST_LATENCY_US else 0.0


def _spread_us(groups: Groups, member: Member) -> float:
    """What one in ten short exchanges, each alone, takes beyond most: the slower rank's."""
    start = starter(member, Routine.ALL_TO_ALL, Form.PAYLOAD, LINK_SIZES[0], False, HOST)
    slowest = sorted(_time_loop(groups, lambda: start()(), ALIKE, Place()))
    spread_us = slowest[-2] - median(slowest)
    return spread_us if spread_us > LEAST_LATENCY_US else 0.0


def _time_loop(
    groups: Groups, run: Callable[[], object], count: int, place: Place, *, apart: bool = False
) -> list[float]:
    """Microseconds of each of ``count`` runs, one after the other; the slowest rank's. On a device: of all together,
    shared out, unless each is waited for (``apart``).
    """
    groups.barrier()
    marks = [time.perf_counter()]
    for _ in range(count):
        run()
        if apart:
            place.settle()
        marks.append(time.perf_counter())
    place.settle()
    if not place.is_host and not apart:
        marks = [marks[0], time.perf_counter()]
    walls = [(b - a) * 1e6 * (len(marks) - 1) / count for a, b in itertools.pairwise(marks)]
    return [max(us) for us in zip(*groups.all_objects(walls), strict=True)]


def starter(
    member: Member, routine: Routine, form: Form, size: int, ring: bool, device: torch.device
) -> Callable[[], Rest]:
    """What begins an exchange of a tensor of ``size`` bytes, over and over in the same buffers."""
    peers = member.size
    each = max(size // peers // 8 * 8, 8)
    if routine is Routine.ALLREDUCE:
        numbers = torch.zeros(size // 4, dtype=torch.float32, device=device)
        return lambda: collectives.allreduce(numbers, member)
    if routine is Routine.REDUCE:
        numbers = torch.zeros(size // 4, dtype=torch.float32, device=device)
        return lambda: collectives.reduce(numbers, member, 0)
    if routine is Routine.BROADCAST:
        numbers = torch.zeros(size // 4, dtype=torch.float32, device=device)
        return lambda: collectives.broadcast(numbers, member, 0)
    whole = torch.zeros(each * peers, dtype=torch.uint8, device=device)
    parts = list(torch.split(whole, each))
    places = [torch.empty_like(part) for part in parts]
    mine = parts[member.index]
    if routine is Routine.REDUCE_SCATTER:
        shards = [part.view(torch.float32) for part in parts]
        received = [None if i == member.index else p.view(torch.float32) for i, p in enumerate(places)]

        def reduce_scatter() -> Rest:
            rest = collectives.all_to_all(shards, received, member)

            def add_up() -> None:
                rest()
                collectives.sum_in_rank_order(shards[member.index], received)

            return add_up

        return reduce_scatter
    if routine is Routine.ALL_TO_ALL:
        return lambda: collectives.all_to_all(parts, places, member)
    if routine is Routine.GATHER:
        return lambda: collectives.gather(mine, places, member, 0)
    if ring and form is Form.PAYLOAD:
        own = mine.clone()
        return lambda: collectives.allgather_ring(own, whole, member)
    return lambda: collectives.allgather(mine, places, member)
