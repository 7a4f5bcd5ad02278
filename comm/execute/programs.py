"""Plans compiled for this rank, once per plan, and what they keep put in use; tasks as this rank carries them out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from espresso.comm.execute.assignment import Assignment
from espresso.comm.keep.residual import Residual
from espresso.comm.parameter_server import Line
from espresso.comm.parameter_server.wire import Key
from espresso.comm.program import Context, PartitionProgram
from espresso.strategies import Bucket, Plan, Strategy, Task, plan

Future = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """A task as this rank carries it out.

    Attributes:
        bucket: DDP's number.
        number: of the task in the plan of all the iteration's buckets.
        before: what this rank does before it in the same partition.
        finish: what is to be done after it, if it is its partition's last.
    """

    program: PartitionProgram
    task: Task
    bucket: int
    number: int
    before: Work | None
    finish: Callable[[], None] | None

    def label(self) -> str:
        """What people call it in errors."""
        flows, scope = self.program.flows, self.task.step.scope
        peers = () if scope is None else self.program.context.members[scope].ranks
        which = f"step {self.task.step_index + 1}/{len(flows)} '{self.task.step}'"
        return described(which, self.bucket, self.program.tensors, peers)


def described(which: str, bucket: int, tensors: Sequence[str], peers: Sequence[int]) -> str:
    """A step of a bucket in people's words: which one, of which tensors, with which ranks."""
    names = tensors[0] if len(tensors) == 1 else f"{tensors[0]} … {tensors[-1]}" if tensors else "nothing"
    ranks = f" with ranks {', '.join(map(str, peers[:8]))}{', …' if len(peers) > 8 else ''}" if peers else ""
    return f"{which} of bucket {bucket} (tensors {names}){ranks}"


@dataclass(frozen=True)
class Compiled:
    """A plan and its programs, one per partition."""

    strategy: Strategy
    plan: Plan
    programs: tuple[PartitionProgram, ...]

    @property
    def numels(self) -> dict[str, int]:
        return {slot.tensor: slot.numel for bucket in self.plan.buckets for slot in bucket.slots}

    @property
    def residuals(self) -> list[Residual]:
        return [residual for program in self.programs for residual in program.residuals]

    @property
    def velocities(self) -> list[Residual]:
        return [velocity for program in self.programs for velocity in program.velocities]


class Programs:
    """Compiles plans and keeps what is compiled as long as its residuals are in use.

    Either one plan of all buckets is in use, or plans of single buckets are: adopting one moves the residuals of
    the others, which are compiled again when they come back.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._of_plan: tuple[Assignment, Compiled] | None = None
        self._of_bucket: dict[Bucket, Compiled] = {}
        self._numels: dict[str, int] = {}

    def forget(self) -> None:
        """Let go of what was compiled and of the buckets that it holds: what runs next takes over what is kept."""
        self._of_plan = None
        self._of_bucket.clear()

    def of_plan(self, assignment: Assignment) -> Compiled:
        """For all buckets of an assignment, in its order.

        Raises:
            EspressoError: the servers do not agree, or are gone.
        """
        assert assignment.buckets is not None
        assert assignment.order is not None
        if self._of_plan is None or self._of_plan[0] is not assignment:
            self.forget()  # first: a job whose memory is nearly full has no room for the buffers of both
            compiled = self._compile(assignment.strategy, assignment.buckets, assignment.order)
            self._adopt(compiled, None)
            self._of_plan = (assignment, compiled)
        return self._of_plan[1]

    def of_bucket(self, strategy: Strategy, bucket: Bucket) -> Compiled:
        """For one bucket alone, in the plain order.

        Raises:
            EspressoError: the servers do not agree, or are gone.
        """
        found = self._of_bucket.get(bucket)
        if found is None or found.strategy is not strategy or not self._keeps(found):
            tensors = {slot.tensor for slot in bucket.slots}
            found = self._of_plan = None  # first, as above
            # What another bucket planned of the same tensors is no longer theirs, here or at servers.
            others = self._of_bucket.items()
            self._of_bucket = {b: c for b, c in others if c.numels.keys().isdisjoint(tensors)}
            found = self._compile(strategy, (bucket,))
            self._adopt(found, tensors)
            self._of_bucket[bucket] = found
        return found

    def _compile(
        self, strategy: Strategy, buckets: tuple[Bucket, ...], order: tuple[int, ...] | None = None
    ) -> Compiled:
        laid = plan(strategy, buckets, host_copies=self.context.memory.host_copies)
        laid = laid if order is None else laid.with_order(order)
        context = replace(self.context, gain_scale=strategy.gain_scale)
        programs = (PartitionProgram(laid, part, context) for part in laid.partitions)
        return Compiled(strategy, laid, tuple(programs))

    def _adopt(self, compiled: Compiled, only: Collection[str] | None) -> None:
        """What these programs keep is in use from now on, here and at the servers; what others kept moves there."""
        self._numels |= compiled.numels
        self.context.store.adopt(compiled.residuals, self._numels, only=only)
        if self.context.velocities is not None:
            self.context.velocities.adopt(compiled.velocities, self._numels, only=only)
        self._tell_servers(compiled, only)

    def _tell_servers(self, compiled: Compiled, only: Collection[str] | None) -> None:
        servers = self.context.servers
        if servers is None:
            return
        keys: list[Key] = []
        lines: dict[int, Line] = {}
        for program in compiled.programs:
            if program.line is not None:
                lines[len(keys) + program.keys.index(program.line.key)] = program.line
            keys += program.keys
        if servers.needs(keys, only):
            servers.install(keys, lines, self._numels, only, compiled.strategy.digest)
        else:
            servers.settle_waiting(self._numels)

    def _keeps(self, compiled: Compiled) -> bool:
        """Whether all that these programs keep is in use."""
        velocities = self.context.velocities
        return self.context.store.holds(compiled.residuals) and (
            velocities is None or velocities.holds(compiled.velocities)
        )
