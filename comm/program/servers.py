"""Steps 3e and 3f: push to a parameter server, and pull its answer into home or another payload.

Servers take and give bytes of the host. In a job on a device a copy before the push and another after the pull stand
between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from espresso.comm.errors import EspressoError
from espresso.comm.parameter_server import Line
from espresso.comm.parameter_server.plain import is_plain, smaller
from espresso.comm.parameter_server.wire import Key, Stretch
from espresso.comm.program.coding import copy
from espresso.comm.program.held import Action, Compiled, Numbers, Payload, Pushed, gain_of
from espresso.comm.program.part import TORCH_DTYPES, Part
from espresso.compressors.base import Codec, Segment
from espresso.strategies import DTYPES, Device, Form, Routine, Scope, Site, Stage, StepFlow, StepKind, trace
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
    keys, key = _keys(part, part.codec(Device.TRAINING) if isinstance(held, Payload) else None)
    answer = _answer(part, index, held)
    if key is None:
        return Compiled(Pushed(keys, None, answer))
    line, region = Line(key), part.flows[index].before.region
    given = _bytes_of(part, held, region, key.up_bytes)
    taken = _bytes_of(part, answer, region, key.down_bytes)
    before: dict[Stage, Action] = {}
    after: dict[Stage, Action] = {}
    if part.context.memory.host_copies:
        up, down = (host.tensor(host.zeros(size, np.uint8)) for size in (key.up_bytes, key.down_bytes))
        source, target = given, taken
        before[Stage.COPY_TO_HOST] = copy([lambda: (source(), up)], Stage.COPY_TO_HOST)
        after[Stage.COPY_TO_DEVICE] = copy([lambda: (target(), down)], Stage.COPY_TO_DEVICE)
        given, taken = (lambda: up), (lambda: down)
    decodes_last = isinstance(held, Payload) and not key.two_way  # the server does

    def run() -> None:
        scale = 1.0
        if decodes_last:
            scale = part.rescale / part.num_ranks
        link.push(line, host.array(given()), host.array(taken()), part.home.round.step, scale)

    return Compiled(Pushed(keys, line, answer, partial(link.pull, line), after), run, before, bytes_sent=key.up_bytes)


def pull(held: Pushed) -> Compiled:
    """Wait for the answer."""
    return Compiled(held.answer, held.pull, held.copies)


def _keys(part: Part, codec: Codec | None) -> tuple[tuple[Key, ...], Key | None]:
    """The partition's keys, one per region that ranks push, the same on every rank; and which this rank pushes.

    Args:
        codec: of the choice's compressor; None where nothing is compressed.
    """
    cluster, option = part.context.cluster, part.choice.option
    ranks = part.context.members[Scope.FLAT].ranks
    keys: list[Key] = []
    mine = None
    for column in range(cluster.ranks_per_node) if option.is_hierarchical else (0,):
        flows = trace(option, cluster, part.partition.numel, column, part.partition.root)
        push = next(flow for flow in flows if flow.step.routine is Routine.PUSH)
        segments = [segment for segment in part.home.segments(push.before.region)[0] if segment.numel]
        if segments:
            workers = ranks if push.step.scope is Scope.FLAT else ranks[column :: cluster.ranks_per_node]
            keys.append(_key(part, segments, workers, codec, flows))
            if ranks[part.context.rank] in workers:
                mine = keys[-1]
    return tuple(keys), mine


def _key(
    part: Part, segments: Sequence[Segment], workers: tuple[int, ...], codec: Codec | None, flows: Sequence[StepFlow]
) -> Key:
    dtype = next(name for name, kind in TORCH_DTYPES.items() if kind is part.home.dtype)
    numbers = sum(segment.numel for segment in segments) * DTYPES[dtype]
    two_way = any(flow.step.kind is StepKind.COMPRESS and flow.step.device is Device.SERVER for flow in flows)
    chosen, up_bytes = None, numbers
    if codec is not None:
        chosen = smaller(codec, segments, part.home.wide)
        up_bytes = chosen.compressor.layout(segments, part.home.wide).num_bytes
    return Key(
        number=-1,
        server=-1,
        workers=workers,
        stretches=tuple(Stretch(segment.tensor, segment.tensor_start, segment.numel) for segment in segments),
        dtype=dtype,
        compressor=part.choice.compressor,
        coded=codec is not None,
        two_way=two_way,
        keeps_residual=codec is not None and two_way and part.traits.error_feedback,
        is_plain=chosen is None or is_plain(chosen),
        up_bytes=up_bytes,
        down_bytes=up_bytes if two_way else numbers,
        site=next((list(Site).index(flow.site) for flow in flows if flow.site is not None), 0),
        seed=part.context.seed,
        gain=gain_of(part),
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
