"""Prices: what the tasks of one partition cost, step by step, in one place for timeline, candidates and bound."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from espresso.model.arrays import Reals, Wholes
from espresso.model.costs import CostModel
from espresso.model.links import group_size
from espresso.model.payload_sizes import (
    PayloadBytes,
    Stretches,
    atom_sizes,
    create_compressor,
    first_shard,
    payload_bytes,
    round_bytes,
    share_of_stretches,
    width_of,
)
from espresso.model.step_shapes import Hold, Shape, catalogue
from espresso.strategies import (
    NONE,
    RANK_DEVICES,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    Option,
    Plan,
    Routine,
    Scope,
    Stage,
    StepKind,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """A priced task.

    Attributes:
        us: how long it holds its lanes when nothing contends.
        cores: what it demands of the host while it does.
        num_bytes: the routine's whole array S, or the bytes copied; 0 for computation.
        latency_us: beyond that until it is done: nothing is held, and what follows it waits.
    """

    shape: Shape
    us: float
    cores: float
    num_bytes: float
    latency_us: float = 0.0


SizeKey = tuple[CompressorSpec, int, str, Stretches]
"""(compressor, elements, dtype, segments) of a partition."""


class Pricer:
    """Prices tasks with one cost model on one cluster; remembers every price.

    Args:
        payload: for tests; by default the compressors' own layouts.
        free: price compression and host copies at nothing: the paper's upper bound.
    """

    def __init__(
        self, costs: CostModel, cluster: Cluster, payload: PayloadBytes = payload_bytes, *, free: bool = False
    ) -> None:
        self.costs = costs
        self.cluster = cluster
        self.catalogue = catalogue(cluster, costs.copy is not None, costs.copy is not None and costs.copy.shares_intra)
        self.payload = payload
        self._free = free
        self._density_counts = cluster.num_apart > 0 or bool(costs.servers and costs.servers.speeds)
        self._prices: dict[SizeKey, dict[int, Work]] = {}
        self._chains: dict[tuple[Option, SizeKey], tuple[Work, ...]] = {}
        self._derived: dict[Hashable, Any] = {}

    def chain(self, choice: Choice, elements: int, dtype: str, segments: Stretches = 1) -> tuple[Work, ...]:
        """The priced tasks of one partition, in order; they match the plan's tasks one to one."""
        size: SizeKey = (choice.compressor, elements, dtype, segments)
        found = self._chains.get((choice.option, size))
        if found is None:
            found = tuple(self.work(number, size) for number in self.catalogue.numbers(choice.option))
            self._chains[choice.option, size] = found
        return found

    def carrying(self, works: Sequence[Work], exact: int, dtype: str, segments: int) -> tuple[Work, ...]:
        """A chain whose payloads carry ``exact`` elements more, raw. Copying those is priced at nothing."""
        ridden = []
        for work in works:
            if work.shape.step.is_communication and work.shape.stage is Stage.STEP:
                num_bytes = work.num_bytes + self._moved(work.shape, (NONE, exact, dtype, segments))
                cost = self.costs.comm(work.shape.step, self.cluster, num_bytes)  # not to servers: nothing rides there
                work = replace(work, us=cost.occupancy_us, latency_us=cost.latency_us, num_bytes=num_bytes)
            ridden.append(work)
        return tuple(ridden)

    def columns(self, options: Sequence[Option], size: SizeKey) -> tuple[Wholes, Reals, Reals]:
        """Chains as arrays [options, longest chain + 1]: lane set (-1 after the end), us, and [..., 2] what is beside.

        Beside the time stand cores and latency.
        """
        numbers = self.catalogue.padded(options)
        sets, us, beside = self.shape_costs(numbers, size)
        return sets[numbers], us[numbers], beside[numbers]

    def shape_costs(self, numbers: Wholes, size: SizeKey) -> tuple[Wholes, Reals, Reals]:
        """As :meth:`columns`, by shape number, of every shape in ``numbers``; the last row ends a chain."""
        num_rows = len(self.catalogue.shapes) + 1
        sets, us, beside = np.empty(num_rows, dtype=np.int64), np.empty(num_rows), np.empty((num_rows, 2))
        sets[-1], us[-1], beside[-1] = -1, 0.0, 0.0
        cores, latency = beside.T
        for number in self.catalogue.used(numbers):
            work = self.work(number, size)
            sets[number], us[number] = work.shape.lane_set, work.us
            cores[number], latency[number] = work.cores, work.latency_us
        return sets, us, beside

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gave for this key the first time: for what is derived from prices."""
        if key not in self._derived:
            self._derived[key] = make()
        found: T = self._derived[key]
        return found

    def work(self, number: int, size: SizeKey) -> Work:
        """The price of a shape at a size."""
        prices = self._prices.setdefault(size, {})
        found = prices.get(number)
        if found is None:
            found = prices[number] = self._price(self.catalogue.shapes[number], size)
        return found

    def _price(self, shape: Shape, size: SizeKey) -> Work:
        spec, elements, _, _ = size
        step = shape.step
        cores = self.costs.contention.demand(step)
        if shape.stage is not Stage.STEP:
            hold = shape.before if shape.stage is Stage.COPY_TO_HOST else shape.after
            num_bytes = self._bytes(hold, size)
            return Work(shape, 0.0 if self._free else self.costs.copy_us(num_bytes), 0.0, num_bytes)
        if step.is_communication:
            num_bytes = self._moved(shape, size)
            to_servers = step.routine in (Routine.PUSH, Routine.PULL)
            density = self._density(shape, size) if to_servers else 1.0
            cost = self.costs.comm(step, self.cluster, num_bytes, density)
            return Work(shape, cost.occupancy_us, cores, num_bytes, cost.latency_us)
        is_ours = not self._free and step.device in RANK_DEVICES
        handling_us = self.costs.contention.handling_us if is_ours else 0.0
        is_copy = spec == NONE and step.kind is not StepKind.AGGREGATE  # priced at nothing more, as in ``carrying``
        if self._free or step.device is None or is_copy:
            return Work(shape, handling_us, min(cores, 1.0), 0.0)
        held = _after_path(elements, shape.before.path)
        if step.kind is StepKind.AGGREGATE:
            time = self.costs.sum_us(shape.before.multiplicity * self._bytes(shape.before, size))
        elif step.kind is StepKind.TRANSFORM:
            time = self.costs.transform_us(spec, step.device, held)
        elif step.kind is StepKind.COMPRESS:
            time = self.costs.encode_us(spec, step.device, held)
        else:
            time = self.costs.decode_us(spec, step.device, held, shape.before.multiplicity)
        if step.device is Device.OFFLOAD:
            time *= min(shape.sharers, self.costs.offload_ranks_per_pool)
            cores = (time * cores + handling_us) / (time + handling_us) if handling_us else cores
        elif step.device is Device.SERVER:
            time, cores = self._on_servers(time, shape, self._density(shape, size))
        return Work(shape, time + handling_us, cores, 0.0)

    def _moved(self, shape: Shape, size: SizeKey) -> float:
        """The routine's whole array S, as :meth:`CostModel.comm` counts it."""
        step = shape.step
        if step.routine in (Routine.PUSH, Routine.PULL):
            num_bytes = self._bytes(shape.before, size) * group_size(step.scope or Scope.FLAT, self.cluster)
        else:
            num_bytes = max(self._bytes(shape.before, size), self._bytes(shape.after, size))
        if step.form is Form.HALF:
            num_bytes *= 2 / width_of(size[2], is_wide=shape.before.is_wide)
        return num_bytes * (shape.sharers if step.scope is Scope.INTER else 1)

    def _density(self, shape: Shape, size: SizeKey) -> float:
        """Raw bytes for each byte that is pushed of such a partition; 1 where it does not matter."""
        spec, elements, dtype, segments = size
        if spec == NONE or not self._density_counts:
            return 1.0
        held = _after_path(elements, shape.before.path)
        payload = self.payload(spec, held, dtype, share_of_stretches(segments, held, elements))
        return max(held * width_of(dtype, is_wide=True) / max(payload, 1.0), 1.0)

    def _on_servers(self, time: float, shape: Shape, density: float) -> tuple[float, float]:
        """(time, cores) of a server's work: all regions of a partition come at once, one from each rank of a node."""
        regions = shape.sharers if shape.before.path else 1
        servers = self.costs.servers
        return self.costs.server_us(time * regions, self.cluster, density), servers.cores if servers else 0.0

    def _bytes(self, hold: Hold, size: SizeKey) -> float:
        spec, elements, dtype, segments = size
        held = _after_path(elements, hold.path)
        if hold.form is Form.RAW:
            return held * width_of(dtype, is_wide=hold.is_wide)
        if hold.form is Form.SUMMABLE and create_compressor(spec).traits.rounds > 1:
            return round_bytes(spec, elements, dtype, segments, hold.round) / hold.value_parts
        if hold.form is Form.SUMMABLE:
            return self.payload(spec, held, dtype, share_of_stretches(segments, held, elements)) / hold.value_parts
        return hold.multiplicity * sum(
            count * self.payload(spec, atom, dtype, share_of_stretches(segments, atom, elements))
            for atom, count in atom_sizes(held, hold.splits).items()
        )


_shared: list[Pricer] = []


def shared_pricer(costs: CostModel, cluster: Cluster, payload: PayloadBytes = payload_bytes) -> Pricer:
    """A pricer that later searches with an equal cost model find warm; the last few are kept."""
    mine = (costs, cluster, payload)
    found = next((one for one in _shared if (one.costs, one.cluster, one.payload) == mine), None)
    if found is None:
        found = Pricer(costs, cluster, payload)
    else:
        _shared.remove(found)
    _shared[:] = [found, *_shared[:7]]
    return found


def price_plan(plan: Plan, pricer: Pricer) -> list[Work]:
    """The price of every task of a plan, by task index."""
    works: list[Work] = []
    for part in plan.partitions:
        group = plan.groups[part.group]
        segments: Stretches = share_of_stretches(len(group.runs), part.numel, group.numel)
        if group.choice.option.num_rounds > 1:
            segments = tuple(run.shape for run in group.runs)
        riding = [run.numel for run in group.segments(part.start, part.stop) if run.exact]
        own = max(part.numel - sum(riding), 1) if riding else part.numel
        chain = pricer.chain(group.choice, own, group.dtype, segments)
        works += pricer.carrying(chain, sum(riding), group.dtype, len(riding)) if riding else chain
    assert len(works) == len(plan.tasks)
    return works


def _after_path(elements: int, path: tuple[int, ...]) -> int:
    for parts in path:
        elements = first_shard(elements, parts)
    return elements
