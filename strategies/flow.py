"""What one rank holds before and after each step of an option: the meaning both interpreters share.

The timeline reads sizes from it, the executor ranges. The grammar lets compressed communications
follow each other without a decode between them, so a state carries a *multiplicity*: the number of
unaggregated payloads held for every element. A first-step gather, allgather or all-to-all over p
ranks multiplies it by p, and so does a push, where the server holds them (numbers or payloads);
a second step leaves it, Comp and Dec set it to one.

A payload cannot be cut after it was made. So Comp encodes its region in *atoms*, one payload each:
the region cut as every all-to-all up to the next Dec will cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from espresso.strategies.cluster import Cluster
from espresso.strategies.option import Device, Form, Option, Phase, Routine, Scope, Step, StepKind

SHARD_ALIGN = 64
"""Shards start at multiples of this many elements of their region (words of bit masks, cache lines)."""

Span = tuple[int, int]
"""A half-open range of elements, in coordinates of its partition."""


class Site(Enum):
    """Where a compression sits, and so what its residual means.

    ``LOCAL`` encodes a rank's own gradient; the others encode sums, before the routine they name. A ``SERVER``
    encodes the sum of what was pushed to it and keeps that residual itself.
    """

    LOCAL = "local"
    INTER_FIRST = "inter_first"
    INTER_SECOND = "inter_second"
    INTRA_SECOND = "intra_second"
    FLAT_SECOND = "flat_second"
    SERVER = "server"

    def replicas(self, cluster: Cluster) -> int:
        """How many ranks hold the same residual range at this site: all nodes at the last intra step."""
        return cluster.num_nodes if self is Site.INTRA_SECOND else 1


def cut(span: Span, parts: int) -> list[Span]:
    """Cut a range into ``parts`` equal shards, aligned, the last ones shorter or empty. The only rule there is.

    >>> cut((0, 200), 2)
    [(0, 128), (128, 200)]
    """
    start, stop = span
    length = stop - start
    size = -(-length // (parts * SHARD_ALIGN)) * SHARD_ALIGN
    return [(min(start + i * size, stop), min(start + (i + 1) * size, stop)) for i in range(parts)]


def nested_cut(span: Span, splits: Sequence[int]) -> list[Span]:
    """Cut, cut every shard again, and so on; in order of position."""
    spans = [span]
    for parts in splits:
        spans = [shard for part in spans for shard in cut(part, parts)]
    return spans


@dataclass(frozen=True, slots=True)
class State:
    """What a rank holds of one partition.

    Attributes:
        active: whether it takes part now (after a rooted first step only the root does).
        region: the elements it holds.
        atom_splits: how the region is cut into payloads (meaningful for ``Form.PAYLOAD``).
        value_cuts: for ``Form.SUMMABLE``, the (parts, index) cuts applied to the payload's numbers.
        multiplicity: unaggregated payloads held for every atom; 0 when nothing is compressed.
        form: what the data is.
        round: for ``Form.SUMMABLE``, which of a compressor's vectors is held.
    """

    active: bool
    region: Span
    atom_splits: tuple[int, ...] = ()
    value_cuts: tuple[tuple[int, int], ...] = ()
    multiplicity: int = 0
    form: Form = Form.RAW
    round: int = 0

    @property
    def elements(self) -> int:
        return self.region[1] - self.region[0]

    @property
    def atoms(self) -> list[Span]:
        return nested_cut(self.region, self.atom_splits)


@dataclass(frozen=True, slots=True)
class StepFlow:
    """One step seen from one rank.

    Attributes:
        peers: number of ranks in the routine's group (1 for compute steps).
        index: this rank's place in that group.
        root: the root's place in that group (0 where the routine has none).
        site: where a compression sits, else None.
    """

    step: Step
    before: State
    after: State
    peers: int = 1
    index: int = 0
    root: int = 0
    site: Site | None = None

    @property
    def participates(self) -> bool:
        """Whether this rank does anything in this step."""
        return self.before.active or self.after.active


def shard_values(length: int, cuts: Sequence[tuple[int, int]]) -> Span:
    """The range of a summable payload's ``length`` numbers that ``cuts`` leave."""
    span = (0, length)
    for parts, index in cuts:
        span = cut(span, parts)[index]
    return span


def place(scope: Scope, cluster: Cluster, rank: int, root: int) -> tuple[int, int, int]:
    """(group size, this rank's index in it, the root's index in it) for a routine of ``scope``.

    ``root`` is a counter that rotates over partitions; every rank derives the same roots from it.
    """
    node, local = divmod(rank, cluster.ranks_per_node)
    if scope is Scope.FLAT:
        return cluster.num_ranks, rank, root % cluster.num_ranks
    if scope is Scope.INTRA:
        return cluster.ranks_per_node, local, root % cluster.ranks_per_node
    return cluster.num_nodes, node, (root // cluster.ranks_per_node) % cluster.num_nodes


@lru_cache(maxsize=65536)
def trace(option: Option, cluster: Cluster, size: int, rank: int = 0, root: int = 0) -> tuple[StepFlow, ...]:
    """Interpret ``option`` on a partition of ``size`` elements, as ``rank`` sees it.

    Raises:
        ValueError: a hierarchical option on a cluster that has only one scope.
    """
    check_fits(option, cluster)
    state = State(active=True, region=(0, size))
    outer: dict[Scope, State] = {}
    flows: list[StepFlow] = []
    for position, step in enumerate(option.steps):
        compresses = step.kind is StepKind.COMPRESS
        splits = payload_splits(option.steps, position, cluster) if compresses else ()
        flow = advance(step, splits, state, outer, cluster, rank, root)
        if compresses:
            flow = StepFlow(step, state, flow.after, site=_site(option, position))
        flows.append(flow)
        state = flow.after
    assert state.region == (0, size)
    assert state.form is Form.RAW
    return tuple(flows)


def check_fits(option: Option, cluster: Cluster) -> None:
    """Raise ValueError where a cluster has not the scopes or servers that an option uses."""
    if option.is_hierarchical and not cluster.is_hierarchical:
        raise ValueError(
            f"option '{option}' needs several nodes with several ranks each; on {cluster} use a flat option"
        )
    if option.uses_servers and not cluster.num_servers:
        raise ValueError(f"option '{option}' needs parameter servers, and {cluster} has none")


def payload_splits(steps: Sequence[Step], position: int, cluster: Cluster) -> tuple[int, ...]:
    """How what the compression at ``position`` encodes will be cut, before it is decoded again."""
    splits: list[int] = []
    for later in steps[position + 1 :]:
        if later.kind is StepKind.DECOMPRESS:
            break
        if later.routine is Routine.ALL_TO_ALL:
            assert later.scope is not None
            splits.append(place(later.scope, cluster, 0, 0)[0])
    return tuple(splits)


def advance(
    step: Step,
    splits: tuple[int, ...],
    state: State,
    outer: dict[Scope, State],
    cluster: Cluster,
    rank: int = 0,
    root: int = 0,
) -> StepFlow:
    """One step from ``state``, its site left open.

    Args:
        splits: of a compression, :func:`payload_splits`.
        outer: what was held before the first steps that wait for their second; updated.
    """
    if step.is_communication:
        return _communicate(step, state, outer, cluster, rank, root)
    if step.kind is StepKind.COMPRESS:
        after = State(state.active, state.region, splits, (), 1, step.form)
    elif step.kind is StepKind.TRANSFORM:
        after = State(state.active, state.region, multiplicity=1, form=Form.SUMMABLE, round=state.round + 1)
    else:
        after = State(state.active, state.region, value_cuts=state.value_cuts)
    return StepFlow(step, state, after)


def _site(option: Option, position: int) -> Site:
    if option.steps[position].device is Device.SERVER:
        return Site.SERVER
    if not any(step.is_communication for step in option.steps[:position]):
        return Site.LOCAL
    following = next(step for step in option.steps[position:] if step.is_communication)
    if following.scope is Scope.FLAT:
        return Site.FLAT_SECOND
    if following.scope is Scope.INTRA:
        return Site.INTRA_SECOND
    return Site.INTER_SECOND if following.phase is Phase.SECOND else Site.INTER_FIRST


def _communicate(
    step: Step, state: State, outer: dict[Scope, State], cluster: Cluster, rank: int, root: int
) -> StepFlow:
    assert step.scope is not None
    peers, index, root_index = place(step.scope, cluster, rank, root)
    gathers = step.form is Form.PAYLOAD and step.phase is not Phase.SECOND
    multiplicity = state.multiplicity * (peers if gathers else 1)
    if step.routine is Routine.PUSH:
        multiplicity = max(state.multiplicity, 1) * peers
    active, region, splits, cuts = state.active, state.region, state.atom_splits, state.value_cuts
    if step.phase is Phase.FIRST:
        outer[step.scope] = state
        if step.routine in (Routine.REDUCE, Routine.GATHER):
            active = active and index == root_index
        elif step.routine is Routine.PUSH:
            pass  # the rank keeps its place: what comes back is of the same region
        elif step.form is Form.SUMMABLE:
            cuts = (*cuts, (peers, index))
        else:
            region, splits = cut(region, peers)[index], splits[1:]
    elif step.phase is Phase.SECOND:
        before = outer.pop(step.scope)
        active = before.active
        if step.routine is Routine.ALLGATHER:
            if step.form is Form.SUMMABLE:
                cuts = before.value_cuts
            else:
                region = before.region
                splits = (peers, *splits) if step.form is Form.PAYLOAD else ()
    after = State(active, region, splits, cuts, multiplicity, state.form, state.round)
    return StepFlow(step, state, after, peers, index, root_index)
