"""An executor driven by hand, as DDP would drive it: for tests inside ``run_ranks`` workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from espresso.comm.execute.executor import Assignment, Executor, Record
from espresso.comm.execute.iteration import Side
from espresso.comm.groups import Groups
from espresso.comm.keep.store import Address, Piece, ResidualStore, Velocities
from espresso.comm.parameter_server import Client, Link
from espresso.comm.program import TORCH_DTYPES, Codecs
from espresso.compressors.base import Correction
from espresso.live.codecs import HostCodecs
from espresso.strategies import (
    NONE,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Slot,
    Strategy,
    TensorSpec,
    parse_option,
    plan,
)
from espresso.strategies.list_scheduling import list_order

Array = npt.NDArray[Any]


def reduce_bucket(
    executor: Executor, bucket: Bucket, buffer: torch.Tensor, *, is_last: bool, grad_scale: float | None
) -> torch.futures.Future[torch.Tensor]:
    """Give an executor a bucket that is described already."""
    return executor.reduce(
        bucket.index, buffer, is_last=is_last, grad_scale=lambda: grad_scale, describe=lambda: bucket
    )


class Script:
    """A planner that does what the test says next, and keeps what the executor reported."""

    def __init__(self) -> None:
        self.next: Assignment | None = None
        self.records: list[Record] = []
        self.num_followed = 0
        self.work: Callable[[], None] | None = None

    def assign(self, iteration: int) -> Assignment:
        assert self.next is not None
        return self.next

    def note(self, record: Record) -> None:
        self.records.append(record)

    def after(self, record: Record) -> Callable[[], None] | None:
        self.num_followed += 1
        work, self.work = self.work, None
        return work


class Exchange:
    """Groups, codecs, residuals and an executor; ``step`` is one backward pass."""

    def __init__(
        self,
        ranks_per_node: int,
        *,
        timeout_s: float = 20.0,
        transactional: bool = True,
        codecs: Codecs | None = None,
        process_group: Any = None,
        seed: int = 0,
        correction: Correction | None = None,
        client: Client | None = None,
        host_copies: bool = False,
    ) -> None:
        self._client = client
        self.groups = Groups(process_group, ranks_per_node=ranks_per_node, timeout_s=timeout_s, host_copies=host_copies)
        self.codecs: Codecs = HostCodecs(2) if codecs is None else codecs
        self._timeout_s = timeout_s
        self.seed = seed
        self._correction = correction
        self._equip(transactional)

    def renew(
        self,
        *,
        transactional: bool = True,
        correction: Correction | None = None,
        gain: float | None = 1.0,
        timeout_s: float | None = None,
    ) -> Exchange:
        """A new executor without residuals over the same groups: much cheaper than another exchange."""
        self._timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._correction = correction
        self.executor.close(keeps_groups=True)
        self.executor.leave()
        self.groups.alarm.forget()
        self._equip(transactional, gain)
        return self

    def _equip(self, transactional: bool, gain: float | None = 1.0) -> None:
        """With the classical feedback gain, exact on dyadic numbers over any number of steps, unless told otherwise."""
        self.store = ResidualStore(transactional=transactional, gain=gain)
        self.script = Script()
        self.velocities = None
        if self._correction is not None:
            self.velocities = Velocities(self._correction, transactional=transactional)
        self.link = None
        if self._client is not None:
            namespace = self.groups.from_rank_0(self._client.new_namespace())
            self.link = Link(self._client, self.groups.ranks, self.store, self._timeout_s, namespace)
        self.executor = Executor(
            self.groups,
            self.codecs,
            self.script,
            store=self.store,
            seed=self.seed,
            timeout_s=self._timeout_s,
            velocities=self.velocities,
            servers=self.link,
            side=self.side(),
        )

    def side(self) -> Side | None:
        """Where tasks run; None: on the host."""
        return None

    def planned(self, assignment: Assignment, buckets: Sequence[Bucket]) -> Assignment:
        """:func:`planned`, with the copies that this exchange makes."""
        return planned(assignment, buckets, host_copies=self.groups.host_copies)

    @property
    def rank(self) -> int:
        return self.groups.rank

    def warm_up(self, specs: Iterable[str], dtypes: Iterable[str] = ("float32",)) -> None:
        """Compile on rank 0, then read its cache on the others."""
        assert isinstance(self.codecs, HostCodecs)
        for turn in (True, False):
            if (self.rank == 0) is turn:
                self.codecs.warm_up({CompressorSpec.parse(spec) for spec in specs}, set(dtypes))
            self.groups.barrier()

    def step(
        self,
        assignment: Assignment,
        buckets: Sequence[Bucket],
        gradients: Sequence[torch.Tensor],
        *,
        grad_scale: float | None = 1.0,
    ) -> list[torch.Tensor]:
        """Average copies of ``gradients`` (one flat tensor per bucket); returns them."""
        self.script.next = assignment
        buffers = [gradient.clone() for gradient in gradients]
        futures = [
            reduce_bucket(
                self.executor, bucket, buffer, is_last=bucket.index == len(buckets) - 1, grad_scale=grad_scale
            )
            for bucket, buffer in zip(buckets, buffers, strict=True)
        ]
        for future, buffer in zip(futures, buffers, strict=True):
            assert future.wait() is buffer or torch.equal(future.wait(), buffer) or buffer.isnan().any()
        return buffers

    @property
    def record(self) -> Record:
        return self.script.records[-1]

    def kept(self, numels: Mapping[str, int]) -> dict[str, Array]:
        """Everything this rank answers for, by tensor, in float64."""
        return kept_by(self.store, numels)

    def sites(self) -> set[str]:
        """The sites where this rank keeps something that is not zero."""
        return {each.site.value for each in self.store.lend() if each.site is not None and np.any(each.read())}

    def close(self) -> None:
        self.executor.close()
        self.executor.leave()
        if isinstance(self.codecs, HostCodecs):
            self.codecs.close()
        self.groups.close()


def kept_by(store: ResidualStore, numels: Mapping[str, int]) -> dict[str, Array]:
    """What a rank's store answers for, by tensor, in float64."""
    total = {name: np.zeros(numel, np.float64) for name, numel in numels.items()}
    for each in store.lend():
        if each.replica == 0:
            total[each.tensor][each.start : each.start + each.numel] += each.read()
    return total


def snapshot(store: ResidualStore) -> tuple[dict[Address, list[Piece]], dict[str, Array]]:
    """Copies of all that a store keeps, by address, and of what it carries: what it loads."""
    pieces: dict[Address, list[Piece]] = {}
    for each in store.lend():
        if each.site is not None:
            pieces.setdefault((each.tensor, each.site), []).append((each.start, each.read(), each.replica))
    return pieces, {tensor: values.copy() for tensor, values in store.carry.items()}


def make_buckets(*buckets: Mapping[str, int], dtype: str = "float32") -> tuple[Bucket, ...]:
    """Buckets from {tensor: elements}, numbered in this order."""
    made = []
    for index, tensors in enumerate(buckets):
        offset, slots = 0, []
        for name, numel in tensors.items():
            slots.append(Slot(name, offset, numel))
            offset += numel
        made.append(Bucket(index, tuple(slots), dtype))
    return tuple(made)


def numels_of(buckets: Iterable[Bucket]) -> dict[str, int]:
    return {slot.tensor: slot.numel for bucket in buckets for slot in bucket.slots}


def strategy_of(
    buckets: Sequence[Bucket],
    cluster: Any,
    choice: Choice | Mapping[str, Choice],
    *,
    partition_bytes: int = 0,
) -> Strategy:
    """A strategy for the tensors of ``buckets``: one choice for all, or one per tensor."""
    tensors = [TensorSpec(s.tensor, (s.numel,), bucket.dtype) for bucket in buckets for s in bucket.slots]
    if isinstance(choice, Choice):
        return Strategy.uniform(tensors, cluster, choice, partition_bytes=partition_bytes)
    return Strategy(tuple(tensors), dict(choice), cluster, partition_bytes)


def uniform(
    option: str = "flat.allreduce", compressor: str = "none", **settings: Any
) -> Callable[[Iterable[TensorSpec], Cluster], Strategy]:
    """What ``espresso.register`` takes as a strategy: one choice for all tensors, uncompressed where the option is.

    Args:
        settings: of ``Strategy.uniform``.
    """
    parsed = parse_option(option)
    choice = Choice(parsed, CompressorSpec.parse(compressor) if parsed.is_compressed else NONE)
    return lambda tensors, cluster: Strategy.uniform(tensors, cluster, choice, **settings)


def planned(assignment: Assignment, buckets: Sequence[Bucket], *, host_copies: bool = False) -> Assignment:
    """The same strategy with a total order for exactly these buckets, as list scheduling would find it."""
    laid = plan(assignment.strategy, buckets, host_copies=host_copies)
    # Arbitrary but equal on all ranks: later buckets' short tasks overtake earlier buckets' long ones.
    durations = [1.0 + (7 * task.index) % 11 for task in laid.tasks]
    order = list_order(laid, [5.0 * bucket.index for bucket in buckets], durations)
    return replace(assignment, order=order, buckets=tuple(buckets))


def integers(buckets: Sequence[Bucket], rank: int, num_ranks: int, draw: int = 0) -> list[torch.Tensor]:
    """Small multiples of ``num_ranks``: sums and averages are exact in every type we support."""
    random = np.random.default_rng([draw, rank])
    return [
        torch.from_numpy(random.integers(-7, 8, bucket.numel) * num_ranks).to(TORCH_DTYPES[bucket.dtype])
        for bucket in buckets
    ]


def exact_average(buckets: Sequence[Bucket], num_ranks: int, draw: int = 0) -> list[torch.Tensor]:
    """The average of everybody's ``integers``."""
    everybody = [integers(buckets, rank, num_ranks, draw) for rank in range(num_ranks)]
    return [
        (sum(tensor.double() for tensor in column) / num_ranks).to(column[0].dtype)
        for column in zip(*everybody, strict=True)
    ]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of the bits, wherever they are."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]
