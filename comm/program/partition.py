"""A plan compiled for one rank: every step of a partition becomes an action on buffers that are allocated once.

::

    1 bind     home points at this iteration's bucket
    2 load     the numbers come home, with what is carried; divided where nothing is compressed
    3 steps    compiled as a fold: each takes what is held and gives an action, and what is held then

               numbers ── 3a compress ──> payload  ── 3b routines ──> payload  ── 3c decompress ──> numbers
                                          vector                      vector
                                          matrices ── 3b, 3d transform, 3b ──> matrices
               numbers ── 3b routines ──> numbers
               numbers or payload ── 3e push ──> pushed ── 3f pull ──> numbers or payload

    4 finish   the numbers go back to the bucket, and are looked at

Raw numbers live in one place, the partition's *home*; reductions, gathers and decodes write there, so nothing is copied
between steps. Payloads live in buffers of shape [sources, atoms, stride], sources in rank order.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from espresso.comm import collectives
from espresso.comm.keep.residual import Residual
from espresso.comm.parameter_server import Line
from espresso.comm.parameter_server.wire import Key
from espresso.comm.program import coding
from espresso.comm.program.held import Action, Compiled, Held, Matrices, Numbers, Payload, Pushed, Vector, load
from espresso.comm.program.part import Context, Home, Part, Round
from espresso.comm.program.routines import exchange
from espresso.comm.program.servers import pull, push
from espresso.strategies import Device, Form, Partition, Plan, Routine, Scope, Stage, StepKind, ring_bytes


class PartitionProgram:
    """One partition on this rank: its buffers, what it keeps, and one action per step it takes part in.

    Attributes:
        actions: None where this rank has nothing to do in a step.
        residuals, velocities: what its compressions keep.
        keys, line: its keys at the parameter servers, and this rank's use of one of them.
    """

    def __init__(self, plan: Plan, partition: Partition, context: Context) -> None:
        self.partition, self.context = partition, context
        self.group = plan.groups[partition.group]
        self.flows = plan.flows(partition.index, context.rank)
        self._home = Home(context, self.group, partition, self.flows)
        self.tensors = tuple(dict.fromkeys(run.tensor for run in self._home.runs))
        part = Part(context, self.group, partition, self.flows, self._home)
        self._steps = _compile_steps(part)
        raw, self._loads = load(part)
        kept = [*(step.kept for step in self._steps), raw]
        self.actions = [
            step.action if flow.participates else None for step, flow in zip(self._steps, self.flows, strict=True)
        ]
        self.residuals: list[Residual] = [k.residual for k in kept if k.residual is not None]
        self.velocities: list[Residual] = [k.velocity for k in kept if k.velocity is not None]
        self.bytes_sent = sum(step.bytes_sent for step in self._steps)
        pushed = next((step.held for step in self._steps if isinstance(step.held, Pushed)), None)
        self.keys: tuple[Key, ...] = () if pushed is None else pushed.keys
        self.line: Line | None = None if pushed is None else pushed.line

    @property
    def finite(self) -> bool | None:
        """Whether the result is finite, once it is known."""
        return self._home.finite

    @cached_property
    def num_bytes_raw(self) -> int:
        """Bytes a ring allreduce of this partition would send from this rank."""
        return ring_bytes(self.partition.numel, self.group.dtype, self.context.cluster.num_ranks)

    @cached_property
    def issues(self) -> bool:
        """Whether the whole option is one library allreduce, which runs without a thread of ours."""
        return len(self.flows) == 1 and self.flows[0].step.routine is Routine.ALLREDUCE

    def bytes_of(self, step_index: int, stage: Stage) -> int:
        """Bytes that this rank sends in a step; a copy sends none."""
        return self._steps[step_index].bytes_sent if stage is Stage.STEP else 0

    def bind(self, buffer: torch.Tensor, now: Round) -> None:
        """1: point home at this iteration's bucket buffer."""
        self._home.bind(buffer, now)

    def load(self) -> None:
        """2: before the first step."""
        for action in self._loads:
            action()

    def action(self, step_index: int, stage: Stage) -> Action:
        """3: what to do in a step, or in the copy before or after it."""
        found = self.actions[step_index] if stage is Stage.STEP else self._steps[step_index].copies[stage]
        assert found is not None
        return found

    def issue(self) -> Any:
        """2 and 3 where the one step is an allreduce: start it; returns a future."""
        self.load()
        member = self.context.members[Scope.FLAT].connection(self.partition.index)
        return collectives.allreduce_async(self._home.tensor, member).get_future()

    def finish(self, check: bool) -> None:
        """4: write home back to the bucket; with ``check``, see whether it is finite."""
        home = self._home
        home.give_back()
        narrowed = home.buffer.dtype is not home.dtype
        if check and (home.finite is None or narrowed):
            home.finite = self.context.memory.all_finite(home.in_bucket())


def _compile_steps(part: Part) -> list[Compiled]:
    """3: the steps of a partition, each from what the one before it leaves."""
    held: Held = Numbers()
    steps: list[Compiled] = []
    for index in range(len(part.flows)):
        steps.append(_compile(part, index, held))
        held = steps[-1].held
    return steps


def _compile(part: Part, index: int, held: Held) -> Compiled:
    step = part.flows[index].step
    if step.device is Device.SERVER:
        return Compiled(held)  # the servers' own
    if isinstance(held, Pushed):
        return pull(held)  # 3f
    if step.kind is StepKind.COMMUNICATE:
        if step.routine is Routine.PUSH:
            assert isinstance(held, Numbers | Payload)
            return push(part, index, held)  # 3e
        return exchange(part, index, held)  # 3b
    if step.kind is StepKind.COMPRESS:  # 3a
        if step.form is Form.PAYLOAD:
            return coding.compress_payload(part, index)
        return coding.compress_matrices(part, index) if part.traits.rounds > 1 else coding.compress_vector(part, index)
    if isinstance(held, Matrices):
        if step.kind is StepKind.TRANSFORM:
            return coding.transform_matrices(part, index, held)  # 3d
        return coding.decompress_matrices(part, index, held)  # 3c
    if isinstance(held, Vector):
        return coding.decompress_vector(part, index, held)  # 3c
    assert isinstance(held, Payload)
    return coding.decompress_payload(part, index, held)  # 3c
