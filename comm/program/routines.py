"""Step 3b: a routine over what is held: numbers at home, a vector, or payloads.

Numbers are one tensor that a step reads and writes in place. Payloads lie in buffers of shape [sources, atoms, stride],
sources in rank order; a step that gathers or shuffles them makes the buffer that the next one works on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from espresso.comm import collectives
from espresso.comm.collectives import Rest
from espresso.comm.member import Member
from espresso.comm.memory import Memory
from espresso.comm.program.held import Action, Compiled, Matrices, Numbers, Payload, Vector
from espresso.comm.program.part import Part
from espresso.strategies import Cluster, Form, Phase, Routine, StepFlow, cut
from espresso.strategies.flow import Span, shard_values

Exchanged = tuple[Action, torch.Tensor, int]
"""A routine over payloads: the action, the buffer that is held after it, and the bytes of the whole array."""


def exchange(part: Part, index: int, held: Numbers | Payload | Vector | Matrices) -> Compiled:
    """Move what is held over the step's scope."""
    flow, context = part.flows[index], part.context
    assert flow.step.scope is not None
    member = context.members[flow.step.scope].connection(part.partition.index)
    if isinstance(held, Payload):
        action, buffer, total = _exchange_payload(flow, member, held.buffer, context.memory, context.cluster)
        return Compiled(replace(held, buffer=buffer), action, bytes_sent=_bytes_sent(flow, member, total))
    if isinstance(held, Numbers):
        (low, high), dtype = _whole(flow, flow.before.region, flow.after.region), part.home.dtype
    else:
        before, after = (shard_values(held.values.numel(), state.value_cuts) for state in (flow.before, flow.after))
        (low, high), dtype = _whole(flow, before, after), held.values.dtype

    def whole() -> torch.Tensor:
        values = part.home.tensor if isinstance(held, Numbers) else held.values
        return values[low:high]

    action = _exchange_numbers(flow, member, whole, (low, high), context.memory, dtype)
    width = 2 if flow.step.form is Form.HALF else dtype.itemsize
    return Compiled(held, action, bytes_sent=_bytes_sent(flow, member, (high - low) * width))


def _whole(flow: StepFlow, before: Span, after: Span) -> Span:
    """What the routine's group holds together: before a step that scatters, after one that gathers."""
    return after if flow.step.phase is Phase.SECOND else before


def _bytes_sent(flow: StepFlow, member: Member, total: int) -> int:
    """The bytes this rank sends in a step whose whole array has ``total`` bytes."""
    if not flow.participates:
        return 0
    peers = member.size
    is_root = member.index == flow.root
    share = (peers - 1) / peers  # reduce-scatter, all-gather, all-to-all: a part for each of the others
    if flow.step.routine is Routine.ALLREDUCE:
        share *= 2
    elif flow.step.routine is Routine.BROADCAST:
        share = peers - 1 if is_root else 0
    elif flow.step.routine is Routine.REDUCE:
        share = 0 if is_root else 1
    elif flow.step.routine is Routine.GATHER:
        share = 0 if is_root else 1 / peers
    return round(share * total)


# -- numbers ---------------------------------------------------------------------------------------


def _exchange_numbers(
    flow: StepFlow, member: Member, whole: Callable[[], torch.Tensor], span: Span, memory: Memory, dtype: torch.dtype
) -> Action:
    """A routine over numbers; ``whole`` gives this iteration's, ``span`` of the partition or of a vector."""
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

        def gather_shards() -> Rest:
            parts = [whole()[low:high] for low, high in shards]
            return collectives.allgather(parts[member.index], parts, member)

        return gather_shards
    assert routine is Routine.REDUCE_SCATTER
    me, halves = member.index, flow.step.form is Form.HALF
    numel, travels = shards[me][1] - shards[me][0], torch.float16 if halves else dtype
    received = [None if peer == me else memory.numbers(numel, travels) for peer in range(member.size)]

    def reduce_scatter() -> Rest:
        parts = [whole()[low:high] for low, high in shards]
        outgoing = [part.to(travels) for part in parts] if halves else parts  # all are rounded, our own too
        rest = collectives.all_to_all(outgoing, received, member)

        def add_up() -> None:
            rest()
            if not halves:
                collectives.sum_in_rank_order(parts[me], received)
                return
            total = parts[me] if dtype.itemsize >= 4 else parts[me].float()
            for peer, half in enumerate(received):
                add = total.add_ if peer else total.copy_
                add(outgoing[me] if half is None else half)
            if total is not parts[me]:
                parts[me].copy_(total)

        return add_up

    return reduce_scatter


# -- payloads --------------------------------------------------------------------------------------


def _exchange_payload(
    flow: StepFlow, member: Member, held: torch.Tensor, memory: Memory, cluster: Cluster
) -> Exchanged:
    """A routine over payloads; ``held`` is the buffer that this rank holds before the step."""
    routine, me = flow.step.routine, member.index
    sources, each, stride = flow.before.multiplicity, len(flow.after.atoms), held.shape[2]
    shape = (flow.after.multiplicity, each, stride)
    if routine is Routine.BROADCAST:
        assert held.shape == shape or me != flow.root, "the root holds what it broadcasts"
        out = held if held.shape == shape else _payloads(memory, shape)
        return (lambda: collectives.broadcast(out, member, flow.root)), out, out.nbytes
    ring = flow.step.scope is not None and cluster.crosses_both(flow.step.scope)
    if flow.step.phase is Phase.SECOND:
        return _gather_atoms(member, held, memory, ring)
    out = _payloads(memory, shape)
    places = [out[p * sources : (p + 1) * sources] for p in range(member.size)]
    if routine is Routine.ALL_TO_ALL:
        parts = [_packed(held[:, p * each : (p + 1) * each]) for p in range(member.size)]

        def shuffle() -> Rest:
            outgoing = [part() for part in parts]
            rest = collectives.all_to_all(outgoing, places, member)
            places[me].copy_(outgoing[me])
            return rest

        return shuffle, out, held.nbytes
    if ring and routine is Routine.ALLGATHER and out.nbytes:
        mine, together = held.view(-1), out.view(-1)
        return (lambda: collectives.allgather_ring(mine, together, member)), out, out.nbytes

    def gather() -> Rest:
        if routine is Routine.GATHER:
            rest = collectives.gather(held, places, member, flow.root)
        else:
            rest = collectives.allgather(held, places, member)
        places[me].copy_(held)
        return rest

    return gather, out, out.nbytes


def _gather_atoms(member: Member, held: torch.Tensor, memory: Memory, ring: bool) -> Exchanged:
    """All-gather of disjoint shards: the atoms of rank i of the group go to place i, sources stay."""
    sources, each, stride = held.shape
    out = _payloads(memory, (sources, member.size * each, stride))
    shares = [out[:, p * each : (p + 1) * each] for p in range(member.size)]
    direct = sources == 1
    together = out if direct else held.new_zeros((member.size, *held.shape))
    places = list(together.view(member.size, *held.shape))

    def allgather() -> Rest:
        if ring and out.nbytes:
            rest = collectives.allgather_ring(held.view(-1), together.view(-1), member)
        else:
            rest = collectives.allgather(held, places, member)
            places[member.index].copy_(held)
        return rest if direct else partial(spread, rest)

    def spread(rest: Rest) -> None:
        rest()
        for share, place in zip(shares, places, strict=True):
            share.copy_(place)

    return allgather, out, out.nbytes


def _payloads(memory: Memory, shape: tuple[int, int, int]) -> torch.Tensor:
    return memory.tensor(memory.zeros(shape, np.uint8))


def _packed(part: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that returns ``part`` as a contiguous tensor: itself, or a copy into a kept buffer."""
    if part.is_contiguous():
        return lambda: part
    buffer = torch.empty_like(part, memory_format=torch.contiguous_format)
    return lambda: buffer.copy_(part)
