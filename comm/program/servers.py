"""Steps 3e and 3f: push to a parameter server, and pull its answer into home or another payload.

Servers take and give bytes of the host. In a job on a device a copy before the push and another after the pull stand
between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from espresso.comm.errors import EspressoError
from espresso.comm.parameter_server import Described, Line, describe
from espresso.comm.program.context import TORCH_DTYPES
from espresso.comm.program.held import Action, Compiled, Numbers, Payload, Pushed
from espresso.comm.program.mirrors import copy
from espresso.comm.program.part import Part
from espresso.strategies import Device, Form, Routine, Scope, Stage
from espresso.strategies.flow import Span

Bytes = Callable[[], torch.Tensor]
"""Where bytes are in this iteration."""


def push(part: Part, index: int, held: Numbers | Payload) -> Compiled:
    """Send this rank's key; the receive of the answer is posted with it."""
    link, host = part.context.servers, part.context.host
    if link is None:
        raise EspressoError(
            f"option '{part.choice.option}' goes through parameter servers, and this job has none;"
            " start it with python -m espresso.launch --servers N"
        )
    described = _describe(part, compresses=isinstance(held, Payload))
    answer = _answer(part, index, held)
    if described.mine is None:
        return Compiled(Pushed(described, None, answer))
    key = described.keys[described.mine]
    line, region = Line(key), part.flows[index].before.region
    given = _bytes_of(part, held, region, key.up_bytes)
    taken = _bytes_of(part, answer, region, key.down_bytes)
    before: dict[Stage, Action] = {}
    after: dict[Stage, Action] = {}
    if part.context.memory.host_copies:
        up, down = (host.tensor(host.zeros(size, np.uint8)) for size in (key.up_bytes, key.down_bytes))
        before[Stage.COPY_TO_HOST] = copy([partial(_twins, given, up)], Stage.COPY_TO_HOST)
        after[Stage.COPY_TO_DEVICE] = copy([partial(_twins, taken, down)], Stage.COPY_TO_DEVICE)
        given, taken = (lambda: up), (lambda: down)
    decodes_last = isinstance(held, Payload) and not key.two_way  # the server does

    def run() -> None:
        scale = 1.0
        if decodes_last:
            scale = (part.home.round.grad_scale if part.keeps_residual else 1.0) / part.num_ranks
        link.push(line, host.array(given()), host.array(taken()), part.home.round.step, scale)

    pushed = Pushed(described, line, answer, partial(link.pull, line), after)
    return Compiled(pushed, run, before, bytes_sent=key.up_bytes)


def pull(held: Pushed) -> Compiled:
    """Wait for the answer."""
    return Compiled(held.answer, held.pull, held.copies)


def _describe(part: Part, *, compresses: bool) -> Described:
    """The keys of the partition, as all its ranks describe them."""
    context = part.context
    return describe(
        part.partition,
        part.choice,
        context.cluster,
        context.rank,
        context.members[Scope.FLAT].ranks,
        part.codec(Device.TRAINING) if compresses else None,
        next(name for name, dtype in TORCH_DTYPES.items() if dtype is part.home.dtype),
        lambda span: part.home.segments(span)[0],
        context.seed,
    )


def _answer(part: Part, index: int, held: Numbers | Payload) -> Numbers | Payload:
    """What the pull brings: a payload where the server compresses, else numbers, which go home."""
    back = next(flow for flow in part.flows[index:] if flow.step.routine is Routine.PULL)
    if back.step.form is not Form.PAYLOAD:
        return Numbers()
    assert isinstance(held, Payload)
    return replace(held, buffer=torch.zeros_like(held.buffer))


def _bytes_of(part: Part, held: Numbers | Payload, region: Span, size: int) -> Bytes:
    """The bytes of what is held of a region."""
    if isinstance(held, Payload):
        payload = held.buffer.view(-1)[:size]
        return lambda: payload
    return lambda: part.home.tensor[region[0] : region[1]].view(torch.uint8)


def _twins(here: Bytes, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return here(), there
