"""Step 3b: a routine over what is held: numbers at home, a vector, or payloads."""

from __future__ import annotations

from dataclasses import replace

import torch

from espresso.comm.exchanges import bytes_sent, exchange_numbers, exchange_payload
from espresso.comm.groups import Member
from espresso.comm.program.held import Compiled, Matrices, Numbers, Payload, Vector
from espresso.comm.program.part import Part
from espresso.strategies import Form, Phase, StepFlow
from espresso.strategies.flow import Span, shard_values


def exchange(part: Part, index: int, held: Numbers | Payload | Vector | Matrices) -> Compiled:
    """Move what is held over the step's scope."""
    flow = part.flows[index]
    assert flow.step.scope is not None
    member = part.context.members[flow.step.scope]
    if isinstance(held, Payload):
        cluster, memory = part.context.cluster, part.context.memory
        action, buffer, sent = exchange_payload(flow, member, held.buffer, memory, cluster)
        return Compiled(replace(held, buffer=buffer), action, bytes_sent=sent)
    if isinstance(held, Numbers):
        return _exchange_numbers(part, flow, member)
    return _exchange_vector(part, flow, member, held)


def _exchange_numbers(part: Part, flow: StepFlow, member: Member) -> Compiled:
    span = _whole(flow, flow.before.region, flow.after.region)
    home = part.home

    def whole() -> torch.Tensor:
        return home.tensor[span[0] : span[1]]

    width = 2 if flow.step.form is Form.HALF else home.dtype.itemsize
    action = exchange_numbers(flow, member, whole, span, part.context.memory, home.dtype)
    return Compiled(Numbers(), action, bytes_sent=bytes_sent(flow, member, (span[1] - span[0]) * width))


def _exchange_vector(part: Part, flow: StepFlow, member: Member, held: Vector | Matrices) -> Compiled:
    values = held.values
    before, after = (shard_values(values.numel(), state.value_cuts) for state in (flow.before, flow.after))
    span = _whole(flow, before, after)
    whole = values[span[0] : span[1]]
    action = exchange_numbers(flow, member, lambda: whole, span, part.context.memory, values.dtype)
    return Compiled(held, action, bytes_sent=bytes_sent(flow, member, whole.nbytes))


def _whole(flow: StepFlow, before: Span, after: Span) -> Span:
    """What the routine's group holds together: before a step that scatters, after one that gathers."""
    return after if flow.step.phase is Phase.SECOND else before
