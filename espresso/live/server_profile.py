"""Measuring parameter servers from the live job: what a push and a pull take, and what the servers' processors do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from espresso.comm.groups import Groups
from espresso.comm.keep.store import ResidualStore
from espresso.comm.parameter_server import Bearing, Client, Line, Link, connected
from espresso.comm.parameter_server.wire import Key, Stretch
from espresso.compressors import create
from espresso.live.points import rising
from espresso.live.profiler import LINK_SIZES, LOOP_US, MAX_LOOP, REPEATS, SLOW_US
from espresso.model.costs import ComputeCost, Op, ServerCosts
from espresso.model.links import LinkCurve
from espresso.strategies import NONE, CompressorSpec, Device, Form, Routine, Scope, Sharing

_SERVER_SIZES = (1 << 14, 1 << 18, 1 << 20)
_LARGEST_BYTES = 1 << 20
_BEARING_BYTES, _BEARING_KEYS, _BEARING_ROUNDS = 1 << 18, 4, 3
"""A server alone takes so many keys of so many bytes, so often: more than a card lets through at once."""


def raw_keys(count: int, num_bytes: int, workers: Sequence[int]) -> list[Key]:
    """``count`` uncompressed keys of ``num_bytes`` each, of all workers."""
    numel = max(num_bytes // 4, 1)
    return [
        Key(
            -1, -1, tuple(workers), (Stretch(f"probe {index}", 0, numel),), "float32", NONE, False, False, False,
            True, 4 * numel, 4 * numel, 0, 0,
        )
        for index in range(count)
    ]  # fmt: skip


class Probe:
    """Pushes and pulls of made-up keys, pipelined as in training.

    Args:
        namespace: see ``new_namespace``; that of a probe that was closed will do: there are not many.
    """

    def __init__(
        self,
        client: Client,
        groups: Groups,
        keys: Sequence[Key],
        namespace: int,
        bearing: Bearing | None = None,
        server: int | None = None,
    ) -> None:
        self._groups = groups
        self._link = Link(client, groups.ranks, ResidualStore(), groups.timeout_s, namespace, bearing)
        self._lines = [Line(key) for key in keys]
        self._data = [np.zeros(key.up_bytes, np.uint8) for key in keys]
        self._answers = [np.zeros(key.down_bytes, np.uint8) for key in keys]
        numels = {stretch.tensor: stretch.numel for key in keys for stretch in key.stretches}
        self._link.install(keys, dict(enumerate(self._lines)), numels, None, "probe", server)
        self._step = 0

    def run(self) -> None:
        """One round of every key."""
        for line, data, answer in zip(self._lines, self._data, self._answers, strict=True):
            self._link.push(line, data, answer, self._step, 1.0)
        for line in self._lines:
            self._link.pull(line)
        self._step += 1

    def close(self) -> None:
        self._link.leave()


def measure_bearing(groups: Groups, client: Client) -> Bearing | None:
    """What each server's card and processor bear, the same on all ranks. Collective; None where one is as good as all.

    Each server in turn takes keys of all workers. What a colocated server's own workers give it crosses no card.
    """
    known = client.bearing
    if client.num_servers < 2 or known.sharing is Sharing.SIZES:
        return None
    count, per_kb = _BEARING_KEYS, groups.num_ranks * _BEARING_BYTES / 1e3
    cards, processors = [], []
    namespace = groups.from_rank_0(client.new_namespace())
    for server in range(client.num_servers):
        us, _ = _time(groups, client, namespace, _BEARING_BYTES, count, _BEARING_ROUNDS, server=server)
        cards.append(us / per_kb / max(1.0 - known.near[server], 1 / groups.num_ranks))
        answer: Any = None
        if groups.rank == 0:
            answer = client.measure(None, (), groups.num_ranks, groups.timeout_s, server)
        processors.append(groups.from_rank_0(answer)["sum_us_per_kb"] / client.engines)
    return replace(known, card_us=tuple(cards), processor_us=tuple(processors))


def measure_exchange(groups: Groups, bearing: Bearing | None = None) -> tuple[tuple[LinkCurve, ...], dict[str, float]]:
    """Curves of push and pull, and the cores they burn. Collective; nothing where there are no servers.

    Pushes and pulls run at once, but for the first push and the last pull: a round of n keys takes n + 1 times what
    either takes. Points are (bytes of all workers, us).
    """
    client = connected()
    if client is None:
        return (), {}
    points: list[tuple[float, float]] = []
    cores, namespace = 0.0, groups.from_rank_0(client.new_namespace())
    for size in (size for size in LINK_SIZES if size <= _LARGEST_BYTES):
        single = _time(groups, client, namespace, size, 1, 1, bearing)[0]
        count = max(min(int(LOOP_US / max(single, 1.0)), MAX_LOOP), 2)
        us, cores = _time(groups, client, namespace, size, count, 1 if single > SLOW_US else REPEATS, bearing)
        points.append((float(size * groups.num_ranks), us))
        if us > SLOW_US:
            break
    curve = rising(points)
    scopes = (Scope.FLAT, Scope.INTER) if groups.cluster.is_hierarchical else (Scope.FLAT,)
    routines = (Routine.PUSH, Routine.PULL)
    curves = tuple(LinkCurve(r, scope, Form.RAW, curve) for scope in scopes for r in routines)
    return curves, {f"{scope.value}.{r.value}": cores / 2 for scope in scopes for r in routines}


def _time(
    groups: Groups,
    client: Client,
    namespace: int,
    size: int,
    count: int,
    repeats: int,
    bearing: Bearing | None = None,
    server: int | None = None,
) -> tuple[float, float]:
    """(microseconds of one key's push, or pull; cores burnt), the slowest rank's."""
    probe = Probe(client, groups, raw_keys(count, size, groups.ranks), namespace, bearing, server)
    probe.run()
    walls, busy = [], []
    for _ in range(repeats):
        groups.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        probe.run()
        walls.append(time.perf_counter() - wall)
        busy.append((time.process_time() - cpu) / max(walls[-1], 1e-9))
    everybody = groups.all_objects((median(walls) * 1e6 / (count + 1), median(busy)))
    probe.close()
    return max(us for us, _ in everybody), max(cores for _, cores in everybody)


def measure_processors(
    groups: Groups, specs: Sequence[CompressorSpec], bearing: Bearing | None = None
) -> tuple[ServerCosts | None, tuple[ComputeCost, ...]]:
    """What a server's engine thread needs to add up and to run each of ``specs``. Collective; None without servers.

    Those of several rounds, which none runs, are left out.
    """
    client = connected()
    if client is None:
        return None, ()
    costs: list[ComputeCost] = []
    servers: ServerCosts | None = None
    for spec in [spec for spec in specs if create(spec).traits.rounds == 1] or (None,):
        answer: Any = None
        if groups.rank == 0:
            answer = client.measure(spec, _SERVER_SIZES, groups.num_ranks, groups.timeout_s)
        answer = groups.from_rank_0(answer)
        speeds = () if bearing is None else bearing.speeds
        servers = servers or ServerCosts(answer["sum_us_per_kb"], client.engines, None, 0.0, speeds, client.sharing)
        for op, points in ((Op.ENCODE, answer["encode"]), (Op.DECODE, answer["decode"])) if spec else ():
            costs.append(ComputeCost(str(spec), Device.SERVER, op, tuple((float(size), us) for size, us in points)))
    return servers, tuple(costs)
