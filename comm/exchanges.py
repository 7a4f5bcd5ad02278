"""The communication steps of one partition as actions: routines over numbers, routines over payloads, bytes sent.

Numbers are one tensor that a step reads and writes in place. Payloads lie in buffers of shape [sources, atoms, stride],
sources in rank order; a step that gathers or shuffles them makes the buffer that the next one works on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from espresso.comm import collectives
from espresso.comm.groups import Member
from espresso.comm.memory import Memory
from espresso.strategies import Cluster, Form, Phase, Routine, Scope, StepFlow, cut
from espresso.strategies.flow import Span

Action = Callable[[], None]
Exchanged = tuple[Action, torch.Tensor, int]
"""A routine over payloads: the action, the buffer that is held after it, and the bytes this rank sends."""


def bytes_sent(flow: StepFlow, member: Member, total: int) -> int:
    """The bytes this rank sends in a step whose total array has ``total`` bytes."""
    if not flow.participates:
        return 0
    peers = member.size
    is_root = member.index == flow.root
    share = {
        Routine.ALLREDUCE: 2 * (peers - 1) / peers,
        Routine.REDUCE: 0.0 if is_root else 1.0,
        Routine.GATHER: 0.0 if is_root else 1 / peers,
        Routine.BROADCAST: float(peers - 1) if is_root else 0.0,
        Routine.REDUCE_SCATTER: (peers - 1) / peers,
        Routine.ALLGATHER: (peers - 1) / peers,
        Routine.ALL_TO_ALL: (peers - 1) / peers,
    }
    assert flow.step.routine is not None
    return round(share[flow.step.routine] * total)


# -- numbers ---------------------------------------------------------------------------------------


def exchange_numbers(
    flow: StepFlow,
    member: Member,
    whole: Callable[[], torch.Tensor],
    span: Span,
    memory: Memory,
    dtype: torch.dtype,
) -> Action:
    """A routine over numbers.

    Args:
        whole: gives this iteration's numbers, ``span`` of the partition or of a vector.
        memory: where they are.
        dtype: theirs.
    """
    routine = flow.step.routine
    if span[0] == span[1]:
        return lambda: None  # the same on all ranks of the group: a second round in which nothing takes part
    if routine is Routine.ALLREDUCE:
        return lambda: collectives.allreduce(whole(), member)
    if routine is Routine.REDUCE:
        return lambda: collectives.reduce(whole(), member, flow.root)
    if routine is Routine.BROADCAST:
        return lambda: collectives.broadcast(whole(), member, flow.root)
    shards = [(low - span[0], high - span[0]) for low, high in cut(span, member.size)]
    if routine is Routine.ALLGATHER:

        def gather_shards() -> None:
            parts = [whole()[low:high] for low, high in shards]
            collectives.allgather(parts[member.index], parts, member)

        return gather_shards
    assert routine is Routine.REDUCE_SCATTER
    mine = shards[member.index]
    if flow.step.form is Form.HALF:
        return _scatter_halves(whole, shards, member, memory)
    received = [
        None if peer == member.index else memory.numbers(mine[1] - mine[0], dtype) for peer in range(member.size)
    ]

    def reduce_scatter() -> None:
        parts = [whole()[low:high] for low, high in shards]
        collectives.all_to_all(parts, received, member)
        sum_in_rank_order(parts[member.index], received)

    return reduce_scatter


def _scatter_halves(
    whole: Callable[[], torch.Tensor], shards: Sequence[Span], member: Member, memory: Memory
) -> Action:
    """A reduce-scatter of numbers that travel as float16; every contribution is rounded, our own too."""
    mine = shards[member.index]
    received = [memory.numbers(mine[1] - mine[0], torch.float16) for _ in range(member.size)]

    def reduce_scatter() -> None:
        parts = [whole()[low:high] for low, high in shards]
        halves = [part.to(torch.float16) for part in parts]
        collectives.all_to_all(halves, received, member)
        received[member.index].copy_(halves[member.index])
        total = parts[member.index]
        total.copy_(received[0])
        for half in received[1:]:
            total.add_(half)

    return reduce_scatter


def sum_in_rank_order(mine: torch.Tensor, received: Sequence[torch.Tensor | None]) -> None:
    """``mine`` becomes the sum of all contributions, added in rank order; ``received`` is None at our place.

    The first received buffer serves as the accumulator, so nothing is allocated.
    """
    parts = [mine if part is None else part for part in received]
    if len(parts) == 1 or mine.numel() == 0:
        return
    total = parts[1] if parts[0] is mine else parts[0]
    torch.add(parts[0], parts[1], out=mine if len(parts) == 2 else total)
    for position, part in enumerate(parts[2:], start=3):
        torch.add(total, part, out=mine if position == len(parts) else total)


# -- payloads --------------------------------------------------------------------------------------


def exchange_payload(flow: StepFlow, member: Member, held: torch.Tensor, memory: Memory, cluster: Cluster) -> Exchanged:
    """A routine over payloads.

    Args:
        held: the buffer that this rank holds before the step.
        memory: where buffers are.
    """
    sources, stride = flow.before.multiplicity, held.shape[2]
    if flow.step.routine is Routine.BROADCAST:
        return _broadcast_payload(flow, member, held, memory)
    if flow.step.phase is Phase.SECOND:
        return _gather_atoms(flow, member, held, memory)
    out = _payloads(memory, (flow.after.multiplicity, len(flow.after.atoms), stride))
    places = [out[p * sources : (p + 1) * sources] for p in range(member.size)]
    sent = bytes_sent(flow, member, held.nbytes if flow.step.routine is Routine.ALL_TO_ALL else out.nbytes)
    if flow.step.routine is Routine.ALL_TO_ALL:
        each = len(flow.after.atoms)
        parts = [_packed(held[:, p * each : (p + 1) * each]) for p in range(member.size)]

        def exchange() -> None:
            outgoing = [part() for part in parts]
            collectives.all_to_all(outgoing, places, member)
            places[member.index].copy_(outgoing[member.index])

        return exchange, out, sent
    if flow.step.routine is Routine.GATHER:

        def gather() -> None:
            collectives.gather(held, places, member, flow.root)
            places[member.index].copy_(held)

        return gather, out, sent
    assert flow.step.routine is Routine.ALLGATHER
    if flow.step.scope is Scope.FLAT and cluster.is_hierarchical and out.nbytes:  # crosses links of both kinds
        mine, together = held.view(-1), out.view(-1)
        return (lambda: collectives.allgather_ring(mine, together, member)), out, sent

    def allgather() -> None:
        collectives.allgather(held, places, member)
        places[member.index].copy_(held)

    return allgather, out, sent


def _gather_atoms(flow: StepFlow, member: Member, held: torch.Tensor, memory: Memory) -> Exchanged:
    """All-gather of disjoint shards: the atoms of rank i of the group go to place i, sources stay."""
    sources, each, stride = held.shape
    out = _payloads(memory, (sources, member.size * each, stride))
    direct = sources == 1
    places = [out[:, p * each : (p + 1) * each] if direct else torch.zeros_like(held) for p in range(member.size)]

    def allgather() -> None:
        collectives.allgather(held, places, member)
        places[member.index].copy_(held)
        if not direct:
            for peer, place in enumerate(places):
                out[:, peer * each : (peer + 1) * each] = place

    return allgather, out, bytes_sent(flow, member, out.nbytes)


def _broadcast_payload(flow: StepFlow, member: Member, held: torch.Tensor, memory: Memory) -> Exchanged:
    shape = (flow.after.multiplicity, len(flow.after.atoms), held.shape[2])
    out = held
    if held.shape[:2] != shape[:2]:
        assert member.index != flow.root, "the root holds what it broadcasts"
        out = _payloads(memory, shape)
    return (lambda: collectives.broadcast(out, member, flow.root)), out, bytes_sent(flow, member, out.nbytes)


def _payloads(memory: Memory, shape: tuple[int, int, int]) -> torch.Tensor:
    return memory.tensor(memory.zeros(shape, np.uint8))


def _packed(part: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that returns ``part`` as a contiguous tensor: itself, or a copy into a kept buffer."""
    if part.is_contiguous():
        return lambda: part
    buffer = torch.empty_like(part, memory_format=torch.contiguous_format)
    return lambda: buffer.copy_(part)
