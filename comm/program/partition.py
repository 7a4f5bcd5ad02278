"""A plan compiled for one rank: every step becomes an action on buffers that are allocated once.

Raw numbers live in one place, the partition's *home*: a view of DDP's bucket where codecs can read its type
and the group is one stretch of it (or only codecs touch the numbers: they know where each tensor begins), else
a workspace of our own. Reductions, gathers and decodes
write home at the coordinates of their region, so nothing is copied between steps. Payloads live in
buffers of shape [sources, atoms, stride], sources in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, cast

import numpy as np
import torch

from espresso.comm import collectives
from espresso.comm.errors import EspressoError
from espresso.comm.exchanges import bytes_sent, exchange_numbers, exchange_payload
from espresso.comm.groups import Member
from espresso.comm.keep.factors import FactorStore
from espresso.comm.keep.residual import Residual
from espresso.comm.keep.store import ResidualStore
from espresso.comm.keep.velocities import Velocities
from espresso.comm.memory import HOST, Array, Memory
from espresso.comm.parameter_server import Described, Line, Link, describe
from espresso.comm.parameter_server.plain import DevicePlain, is_plain, smaller
from espresso.comm.program.rounds import Rounds
from espresso.compressors.base import Codec, DrawKey, Feedback, Layout, Segment, Starts
from espresso.compressors.momentum import MomentumCorrection
from espresso.strategies import (
    DTYPES,
    NONE,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    Group,
    Partition,
    Phase,
    Plan,
    Routine,
    Run,
    Scope,
    Site,
    Stage,
    StepFlow,
    StepKind,
    trace,
)
from espresso.strategies.flow import Span, shard_values

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Codecs(Protocol):
    """Where the codec of a compressor for a device comes from."""

    def __call__(self, spec: CompressorSpec, device: Device) -> Codec: ...


@dataclass(frozen=True, slots=True)
class Round:
    """What changes from iteration to iteration: its number, the loss scale, and whether carries are sent."""

    step: int
    grad_scale: float = 1.0
    drain: bool = True


@dataclass(frozen=True)
class Context:
    """What all partitions of a program share."""

    cluster: Cluster
    rank: int
    members: dict[Scope, Member]
    codecs: Codecs
    store: ResidualStore
    seed: int = 0
    velocities: Velocities | None = None
    servers: Link | None = None
    memory: Memory = HOST
    host: Memory = HOST
    factors: FactorStore = field(default_factory=FactorStore)


class PartitionProgram:
    """One partition on this rank: buffers, residuals, and one action per step it takes part in.

    ``actions[i]`` is None where this rank has nothing to do in step i.
    """

    def __init__(self, plan: Plan, partition: Partition, context: Context) -> None:
        self.plan, self.partition, self.context = plan, partition, context
        self.group: Group = plan.groups[partition.group]
        self.choice = self.group.choice
        self.flows = plan.flows(partition.index, context.rank)
        self.runs = self.group.segments(partition.start, partition.stop)
        self.tensors = tuple(dict.fromkeys(run.tensor for run in self.runs))
        self.finite: bool | None = None
        self.bytes_sent = 0
        self.residuals: list[Residual] = []
        self.velocities: list[Residual] = []
        self.described: Described | None = None
        self.line: Line | None = None
        self._take_answer: Callable[[], None] | None = None
        self._compresses = compressed = self.choice.option.is_compressed
        native = TORCH_DTYPES[self.group.dtype]
        self.work = torch.float64 if native is torch.float64 else torch.float32
        self.dtype = self.work if compressed else native
        self._memory = context.memory
        together = self._moves_numbers() or self._memory.host_copies
        self._in_place = self.dtype is native and (self._is_one_stretch() or not together)
        self._own = None if self._in_place else self._memory.numbers(partition.numel, self.dtype)
        self._first = min((run.bucket_start for run in self.runs), default=0)
        self._last = max((run.bucket_start + run.numel for run in self.runs), default=0)
        self.home: torch.Tensor = torch.empty(0, dtype=self.dtype)
        self.numbers: Array = np.empty(0)
        self._mirror: torch.Tensor | None = None
        self._copies: dict[tuple[int, Stage], Callable[[], None]] = {}
        self.buffer: torch.Tensor = torch.empty(0, dtype=native)
        self.round = Round(0)
        self._payload: Array = np.empty(0, np.uint8)
        self._layouts: list[tuple[Layout, Starts]] = []
        self._made: dict[Span, tuple[Layout, Starts]] = {}
        self._values: torch.Tensor = torch.empty(0)
        self._rounds: Rounds | None = None
        self._keeps_residual = compressed and self._codec(Device.TRAINING).compressor.traits.error_feedback
        self.actions: list[Callable[[], None] | None] = [self._compile(i) for i in range(len(self.flows))]
        if context.velocities is not None and not compressed:
            self._keep_velocity((0, partition.numel), Site.LOCAL, self._memory)

    # -- one iteration ---------------------------------------------------------------------------

    @cached_property
    def num_bytes_raw(self) -> int:
        """Bytes a ring allreduce of this partition would send from this rank."""
        ranks = self.context.cluster.num_ranks
        return round(2 * (ranks - 1) / ranks * self.partition.numel * DTYPES[self.group.dtype])

    @cached_property
    def issues(self) -> bool:
        """Whether the whole option is one library allreduce, which runs without a thread of ours."""
        return len(self.flows) == 1 and self.flows[0].step.routine is Routine.ALLREDUCE

    def bind(self, buffer: torch.Tensor, now: Round) -> None:
        """Point home at this iteration's bucket buffer."""
        self.buffer, self.round, self.finite = buffer, now, None
        if self._in_place:
            self.home = buffer[self._first : self._last]
        else:
            assert self._own is not None
            self.home = self._own
        if self._compresses:
            self.numbers = self._memory.array(self.home)

    def load(self) -> None:
        """Before the first step: fetch the numbers, add what is carried, divide if nothing is compressed."""
        if not self._in_place:
            for run in self.runs:
                self._at_home(run).copy_(self._bucket_slice(run.bucket_start, run.numel))
        if self.context.velocities is not None:
            self._move_velocity(self.context.velocities)
        self._add_carry()
        if not self._compresses:
            self.home.mul_(1.0 / self.context.cluster.num_ranks)

    def finish(self, check: bool) -> None:
        """After the last step: write home back to the bucket; with ``check``, see whether it is finite."""
        if not self._in_place:
            for run in self.runs:
                self._bucket_slice(run.bucket_start, run.numel).copy_(self._at_home(run))
        narrowed = self.buffer.dtype is not self.dtype
        if check and (self.finite is None or narrowed):
            self.finite = self._memory.all_finite(
                [self._bucket_slice(run.bucket_start, run.numel) for run in self.runs if run.numel]
            )

    def action(self, step_index: int, stage: Stage) -> Callable[[], None]:
        """What to do in a step, or in the copy before or after it."""
        found = self.actions[step_index] if stage is Stage.STEP else self._copies[step_index, stage]
        assert found is not None
        return found

    def issue(self) -> Any:
        """Start the one allreduce of this partition; returns a future."""
        self.load()
        return collectives.allreduce_async(self.home, self.context.members[Scope.FLAT]).get_future()

    def _is_one_stretch(self) -> bool:
        shifts = {run.bucket_start - run.group_start for run in self.group.runs if run.numel}
        return len(shifts) <= 1

    def _moves_numbers(self) -> bool:
        """Whether a routine works on the numbers themselves, which must then lie side by side."""
        steps = [flow.step for flow in self.flows]
        return any(step.routine is not None and step.form is Form.RAW for step in steps)

    def _home_start(self, run: Run) -> int:
        return run.bucket_start - self._first if self._in_place else run.group_start - self.partition.start

    def _at_home(self, run: Run) -> torch.Tensor:
        start = self._home_start(run)
        return self.home[start : start + run.numel]

    def _bucket_slice(self, start: int, numel: int) -> torch.Tensor:
        return self.buffer[start : start + numel]

    def _add_carry(self) -> None:
        store = self.context.store
        # With momentum a residual must not pass through a velocity, which would send it again and again: it waits
        # until its tensor is raw or has a local site.
        waits = self._compresses and self.context.velocities is not None
        if not self.round.drain or not store.carry or waits:
            return
        for run in self.runs:
            carried = store.carry.get(run.tensor)
            if carried is not None:
                self._add_to(run, torch.from_numpy(carried), 1.0, store)

    def _add_to(self, run: Run, carried: torch.Tensor, weight: float, store: ResidualStore) -> None:
        """Add what is carried of a stretch to our gradient; what a narrow type rounds off stays carried."""
        mine = self._at_home(run)
        values = carried[run.tensor_start : run.tensor_start + run.numel].to(mine.device)
        wide = mine.to(values.dtype)
        total = torch.add(wide, values, alpha=weight * self.round.grad_scale)
        mine.copy_(total)
        left = None
        if mine.dtype is not values.dtype:
            left = total.sub_(mine).div_(weight * self.round.grad_scale).cpu().numpy()
        store.used_carry(run.tensor, run.tensor_start, left)

    # -- momentum --------------------------------------------------------------------------------

    def _keep_velocity(self, span: Span, site: Site, memory: Memory) -> Residual:
        assert self.context.velocities is not None
        velocity = self._new_residual(self.context.velocities, span, site, memory)
        self.velocities.append(velocity)
        return velocity

    def _move_velocity(self, store: Velocities) -> None:
        """Raw: send the velocity in place of the gradient. Compressed: add velocities carried from elsewhere."""
        if self._compresses:
            weight = 1.0 if store.rule.nesterov else store.rule.momentum
            for run in self.runs:
                carried = store.carry.get(run.tensor)
                if carried is not None:
                    self._add_to(run, torch.from_numpy(carried), weight, store)
            return
        (velocity,) = self.velocities
        scale = self.round.grad_scale
        wide = self.home.to(self.work)  # itself where it is that wide already
        numbers = self._memory.array(wide)
        starts = np.array([self._home_start(run) for run in self.runs], np.int64)
        numels = np.array([run.numel for run in self.runs], np.int64)
        feedback = self._feedback(velocity, np.array(velocity.starts, np.int64))
        assert feedback is not None
        self._memory.mover.advance(store.rule, numels, numbers, starts, 1.0 / scale, feedback, numbers, starts)
        if scale != 1.0 or wide is not self.home:
            self.home.copy_(wide.mul_(scale))
        self._settle(velocity)

    # -- compilation -----------------------------------------------------------------------------

    def _compile(self, index: int) -> Callable[[], None] | None:
        flow = self.flows[index]
        kind = flow.step.kind
        if flow.step.device is Device.SERVER:
            return None  # the servers' own
        if flow.step.routine is Routine.PUSH:
            return self._compile_push(flow, index)
        if flow.step.routine is Routine.PULL:
            return self._compile_pull(flow, index)
        if kind is StepKind.COMPRESS:
            action = self._compile_compress(flow, index)
        elif kind is StepKind.TRANSFORM:
            action = self._compile_transform(flow, index)
        elif kind is StepKind.DECOMPRESS:
            action = self._compile_decompress(flow, index)
        elif flow.step.form is Form.PAYLOAD:
            action = self._compile_payload(flow)
        else:
            action = self._compile_numbers(flow)
        return action if flow.participates else None

    def _codec(self, device: Device) -> Codec:
        return self.context.codecs(self.choice.compressor, device)

    # -- offloaded steps of a job on a device: they work on mirrors in host memory ---------------

    def _is_copied(self, device: Device | None) -> bool:
        return device is Device.OFFLOAD and self._memory.host_copies

    def _memory_of(self, device: Device | None) -> Memory:
        return self.context.host if self._is_copied(device) else self._memory

    def _numbers_for(self, device: Device | None) -> Callable[[], Array]:
        """Home as an array where a step runs."""
        if not self._is_copied(device):
            return lambda: self.numbers
        if self._mirror is None:
            self._mirror = self.context.host.numbers(self.partition.numel, self.dtype)
        array = self.context.host.array(self._mirror)
        return lambda: array

    def _copy_before(self, index: int, span: Span | None, here: torch.Tensor, there: torch.Tensor) -> None:
        """Before an offloaded step ``there`` receives a payload or vector (``here``), or home's ``span``."""
        self._copies[index, Stage.COPY_TO_HOST] = self._copier(span, here, there, to_host=True)

    def _copy_after(self, index: int, span: Span | None, here: torch.Tensor, there: torch.Tensor) -> None:
        """After it, the other way."""
        self._copies[index, Stage.COPY_TO_DEVICE] = self._copier(span, here, there, to_host=False)

    def _copier(
        self, span: Span | None, here: torch.Tensor, there: torch.Tensor, *, to_host: bool
    ) -> Callable[[], None]:
        def copy() -> None:
            mine, host = here, there
            if span is not None:
                assert self._mirror is not None
                mine, host = self.home[span[0] : span[1]], self._mirror[span[0] : span[1]]
            target, source = (host, mine) if to_host else (mine, host)
            target.copy_(source, non_blocking=True)

        return copy

    def _wire_codec(self, codec: Any, region: Span, device: Device) -> Any:
        """``codec``; on the way to a server plain numbers, where its payload would be no smaller."""
        if not self.choice.option.uses_servers:
            return codec
        dtype = np.float64 if self.work is torch.float64 else np.float32
        chosen = smaller(codec, self._segments(region)[0], dtype)
        on_host = self._memory_of(device) is self.context.host
        return chosen if on_host or not is_plain(chosen) else DevicePlain(self.context.codecs(NONE, device))

    def _runs(self, span: Span) -> list[Run]:
        """The stretches of tensors in a range of the partition."""
        return list(self.group.segments(self.partition.start + span[0], self.partition.start + span[1]))

    def _segments(self, span: Span) -> tuple[list[Segment], Starts]:
        """The segments of a range of the partition, and where each begins in home."""
        runs = self._runs(span)
        segments = [Segment(run.tensor, run.tensor_start, run.numel, run.shape) for run in runs]
        return segments, np.array([self._home_start(run) for run in runs], np.int64)

    def _lay_out(self, index: int, codec: Codec) -> int:
        """Layouts of every atom any rank encodes at this step; returns the stride all of them use."""
        dtype = np.float64 if self.work is torch.float64 else np.float32
        made: dict[Span, tuple[Layout, Starts]] = {}
        for rank in range(self.context.cluster.num_ranks):
            after = trace(self.choice.option, self.context.cluster, self.partition.numel, rank, self.partition.root)[
                index
            ].after
            for span in after.atoms:
                if span not in made:
                    segments, starts = self._segments(span)
                    made[span] = (codec.compressor.layout(segments, dtype), starts)
        self._made = made
        return max((layout.num_bytes for layout, _ in made.values()), default=0)

    def _compile_compress(self, flow: StepFlow, index: int) -> Callable[[], None]:
        assert flow.step.device is not None
        assert flow.site is not None
        codec = self._codec(flow.step.device)
        first = not any(f.step.kind is StepKind.COMPRESS for f in self.flows[:index])
        residual = self._residual(flow, flow.site) if flow.before.active and self._keeps_residual else None
        velocity = None
        if first and flow.before.active and self.context.velocities is not None:
            velocity = self._keep_velocity(flow.before.region, flow.site, self._memory_of(flow.step.device))
        if flow.step.form is Form.SUMMABLE:
            return self._compile_compress_values(flow, index, codec, residual, velocity)
        codec = self._wire_codec(codec, flow.after.region, flow.step.device)
        stride = self._lay_out(index, codec)
        atoms = flow.after.atoms
        memory, numbers = self._memory_of(flow.step.device), self._numbers_for(flow.step.device)
        shape = (1, len(atoms), stride)
        payload = self._payload = memory.zeros(shape, np.uint8)
        if self._is_copied(flow.step.device):
            self._payload = self._memory.zeros(shape, np.uint8)
            here, there = self._memory.tensor(self._payload), memory.tensor(payload)
            self._copy_before(index, flow.before.region, here, there)
            self._copy_after(index, None, here, there)
        jobs = [
            (
                layout,
                starts,
                self._kept_at(residual, span),
                self._kept_at(velocity, span),
                payload[0, number, : layout.num_bytes],
            )
            for number, span in enumerate(atoms)
            for layout, starts in (self._made[span],)
        ]
        site = flow.site
        corrected = self._corrected(codec, flow)

        def run() -> None:
            scale = 1.0 / self.round.grad_scale if first and self._is_unscaled else 1.0
            key = self._key(site)
            for layout, starts, kept_at, moved_at, out in jobs:
                feedback = self._feedback(residual, kept_at)
                moved = self._feedback(velocity, moved_at)
                if moved is None or corrected is None:
                    codec.encode(layout, numbers(), starts, out, scale=scale, feedback=feedback, key=key)
                else:
                    corrected.encode(
                        layout, numbers(), starts, out,
                        scale=scale, feedback=feedback, velocity=moved, key=key,
                    )  # fmt: skip
            self._settle(residual)
            self._settle(velocity)

        return run

    def _corrected(self, codec: Codec, flow: StepFlow) -> MomentumCorrection | None:
        velocities = self.context.velocities
        if velocities is None:
            return None
        return MomentumCorrection(codec, velocities.rule, self._memory_of(flow.step.device).mover)

    @property
    def _is_unscaled(self) -> bool:
        """Whether what is encoded has the loss scale taken out: where anything of it is kept."""
        return self._keeps_residual or self.context.velocities is not None

    def _compile_compress_values(
        self, flow: StepFlow, index: int, codec: Any, residual: Residual | None, velocity: Residual | None
    ) -> Callable[[], None]:
        region = flow.before.region
        segments, starts = self._segments(region)
        dtype = np.float64 if self.work is torch.float64 else np.float32
        layout = codec.compressor.layout(segments, dtype)
        if self.choice.option.num_rounds > 1:
            assert residual is not None
            return self._compile_first_round(flow, index, codec, layout, starts, residual, velocity)
        memory, source = self._memory_of(flow.step.device), self._numbers_for(flow.step.device)
        size, kind = codec.num_values(layout), TORCH_DTYPES[codec.value_dtype(layout)]
        values = self._values = memory.numbers(size, kind)
        if self._is_copied(flow.step.device):
            self._values = self._memory.numbers(size, kind)
            self._copy_before(index, flow.before.region, self._values, values)
            self._copy_after(index, None, self._values, values)
        self._layouts = [(layout, starts)]
        vector = memory.array(values)
        ranks = self.context.cluster.num_ranks
        site = flow.site
        assert site is not None
        kept_at, moved_at = self._kept_at(residual, region), self._kept_at(velocity, region)
        corrected = self._corrected(codec, flow)

        def run() -> None:
            # Divide first where nothing is kept: the sum of a cast must not overflow.
            scale = 1.0 if self._keeps_residual else 1.0 / ranks
            unscale = 1.0 / self.round.grad_scale if self._is_unscaled else 1.0
            mine, source_starts = source(), starts
            moved = self._feedback(velocity, moved_at)
            if moved is None or corrected is None:
                scale *= unscale
            else:
                mine, source_starts = corrected.advance(layout, mine, starts, moved, unscale)
            feedback = self._feedback(residual, kept_at)
            codec.encode_values(
                layout, mine, source_starts, vector, scale=scale, feedback=feedback, key=self._key(site)
            )
            self._settle(residual)
            self._settle(velocity)

        return run

    # -- several rounds --------------------------------------------------------------------------

    def _compile_first_round(
        self,
        flow: StepFlow,
        index: int,
        codec: Any,
        layout: Layout,
        starts: Starts,
        residual: Residual,
        velocity: Residual | None,
    ) -> Callable[[], None]:
        region, site, device = flow.before.region, flow.site, flow.step.device
        assert site is not None
        memory, numbers = self._memory_of(device), self._numbers_for(device)
        kept_at, moved_at = self._kept_at(residual, region), self._kept_at(velocity, region)
        rounds = self._rounds = Rounds(
            layout, starts, self.context.factors, residual, kept_at, lambda: self._key(site), self._memory
        )
        self._values = rounds.vector(codec)
        if self._is_copied(device):
            self._copy_before(index, region, self._values, self._values)
            self._copies[index, Stage.COPY_TO_DEVICE] = rounds.copier(memory, (0,), to_host=False)
        corrected = self._corrected(codec, flow)

        def run() -> None:
            source, source_starts, scale = numbers(), starts, 1.0 / self.round.grad_scale
            moved = self._feedback(velocity, moved_at)
            if moved is not None and corrected is not None:
                source, source_starts = corrected.advance(layout, source, starts, moved, scale)
                scale = 1.0
            rounds.encode(codec, memory, source, source_starts, scale)
            self._settle(velocity)

        return run

    def _compile_transform(self, flow: StepFlow, index: int) -> Callable[[], None]:
        assert flow.step.device is not None
        rounds, device = self._rounds, flow.step.device
        assert rounds is not None
        memory, codec = self._memory_of(device), self._codec(device)
        assert memory is rounds.residual.memory, "plans keep matrices where they were compressed"
        self._values = rounds.vector(cast(Any, codec))
        if self._is_copied(device):
            self._copies[index, Stage.COPY_TO_HOST] = rounds.copier(memory, (0,), to_host=True)
            self._copies[index, Stage.COPY_TO_DEVICE] = rounds.copier(memory, (0, 1), to_host=False)
        return partial(rounds.transform, cast(Any, codec), memory)

    def _compile_last_round(self, flow: StepFlow, index: int, codec: Any, rounds: Rounds) -> Callable[[], None]:
        ranks, device = self.context.cluster.num_ranks, flow.step.device
        memory, numbers = self._memory_of(device), self._numbers_for(device)
        if self._is_copied(device):
            self._copies[index, Stage.COPY_TO_HOST] = rounds.copier(memory, (0, 1), to_host=True)
            self._copy_after(index, flow.after.region, self._values, self._values)

        def run() -> None:
            self.finite = rounds.decode(codec, memory, numbers(), self.round.grad_scale / ranks)

        return run

    def _compile_decompress(self, flow: StepFlow, index: int) -> Callable[[], None]:
        assert flow.step.device is not None
        codec: Any = self._codec(flow.step.device)
        last = not any(f.step.kind is StepKind.DECOMPRESS for f in self.flows[index + 1 :])
        ends = index == len(self.flows) - 1
        ranks = self.context.cluster.num_ranks
        if self._rounds is not None:
            return self._compile_last_round(flow, index, codec, self._rounds)
        memory, numbers = self._memory_of(flow.step.device), self._numbers_for(flow.step.device)
        copied = self._is_copied(flow.step.device)
        if flow.step.form is Form.SUMMABLE:
            layout, starts = self._layouts[0]
            vector = self._values
            if copied:
                vector = memory.numbers(vector.numel(), vector.dtype)
                self._copy_before(index, None, self._values, vector)
                self._copy_after(index, flow.after.region, self._values, vector)
            values = memory.array(vector)

            def run_values() -> None:
                scale = self.round.grad_scale if self._is_unscaled else 1.0
                scale = scale / ranks if self._keeps_residual else scale
                finite = codec.decode_values(layout, values, numbers(), starts, scale=scale, key=self._key(Site.LOCAL))
                self.finite = finite if ends else None

            return run_values
        codec = self._wire_codec(codec, flow.before.region, flow.step.device)
        payload, made = self._payload, self._made
        if copied:
            payload = memory.zeros(tuple(payload.shape), np.uint8)
            here, there = self._memory.tensor(self._payload), memory.tensor(payload)
            self._copy_before(index, None, here, there)
            self._copy_after(index, flow.after.region, here, there)
        jobs = [
            (*made[span], payload[:, number, : made[span][0].num_bytes])
            for number, span in enumerate(flow.before.atoms)
        ]
        site = self._site_before(index)

        def run() -> None:
            scale = 1.0
            if last:
                scale = (self.round.grad_scale if self._is_unscaled else 1.0) / ranks
            key = DrawKey(self.context.seed, self.round.step, list(Site).index(site), -1)
            finite = True
            for layout, starts, sources in jobs:
                finite &= codec.decode(layout, sources, numbers(), starts, scale=scale, key=key)
            self.finite = finite if ends else None

        return run

    def _site_before(self, index: int) -> Site:
        sites = [f.site for f in self.flows[:index] if f.site is not None]
        if sites[-1] is Site.SERVER and self._codec(Device.TRAINING).compressor.traits.summable:
            return sites[0]  # the server draws as the ranks did
        return sites[-1]

    def _residual(self, flow: StepFlow, site: Site) -> Residual:
        # Momentum correction is defined with all of the residual.
        traits = self._codec(Device.TRAINING).compressor.traits
        gain = traits.feedback_gain if self.context.velocities is None else 1.0
        residual = self._new_residual(
            self.context.store, flow.before.region, site, self._memory_of(flow.step.device), gain
        )
        self.residuals.append(residual)
        return residual

    def _new_residual(
        self, store: ResidualStore, span: Span, site: Site, memory: Memory, gain: float = 1.0
    ) -> Residual:
        start = self.partition.start
        runs = self.group.segments(start + span[0], start + span[1])
        node = self.context.rank // self.context.cluster.ranks_per_node
        replica = node if site.replicas(self.context.cluster) > 1 else 0
        dtype = np.float64 if self.work is torch.float64 else np.float32
        return store.new_residual(site, runs, dtype, replica, memory, gain=gain)

    def _kept_at(self, residual: Residual | None, span: Span) -> Starts:
        """Where the segments of a range of the partition begin in the residual's buffers."""
        starts = [0 if residual is None else residual.locate(run.group_start) for run in self._runs(span)]
        return np.array(starts, np.int64)

    def _feedback(self, residual: Residual | None, starts: Starts) -> Feedback | None:
        if residual is None:
            return None
        return Feedback(*residual.buffers(), starts, residual.gain)

    def _settle(self, residual: Residual | None) -> None:
        if residual is None:
            return
        residual.settle()

    def _key(self, site: Site) -> DrawKey:
        shared = site.replicas(self.context.cluster) > 1
        rank = -1 if shared else self.context.rank
        return DrawKey(self.context.seed, self.round.step, list(Site).index(site), rank)

    # -- parameter servers -----------------------------------------------------------------------

    def _compile_push(self, flow: StepFlow, index: int) -> Callable[[], None] | None:
        """Describe the partition's keys; what is sent and where the answer goes is one buffer or two."""
        link = self.context.servers
        if link is None:
            raise EspressoError(
                f"option '{self.choice.option}' goes through parameter servers, and this job has none;"
                " start it with python -m espresso.launch --servers N"
            )
        assert flow.step.scope is not None
        compresses = flow.step.form is Form.PAYLOAD
        names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
        self.described = describe(
            self.partition,
            self.choice,
            self.context.cluster,
            self.context.rank,
            self.context.members[Scope.FLAT].ranks,
            self._codec(Device.TRAINING) if compresses else None,
            names[self.dtype],
            lambda span: self._segments(span)[0],
            self.context.seed,
        )
        if self.described.mine is None:
            return None
        key = self.described.keys[self.described.mine]
        line = self.line = Line(key)
        self.bytes_sent += key.up_bytes
        region = flow.before.region
        sent = self._payload.reshape(-1)[: key.up_bytes] if compresses else None
        if key.two_way:
            self._payload = self._memory.zeros(tuple(self._payload.shape), np.uint8)
        answer = self._payload.reshape(-1)[: key.down_bytes] if key.two_way else None
        ranks = self.context.cluster.num_ranks

        def data() -> Array:
            return self._region_bytes(region) if sent is None else sent

        def place() -> Array:
            return self._region_bytes(region) if answer is None else answer

        given, taken = data, place
        if self._memory.host_copies:  # servers take and give bytes of the host
            numbers = (region[1] - region[0]) * self.dtype.itemsize
            up, down = (
                self.context.host.zeros(numbers if bytes_ is None else len(bytes_), np.uint8)
                for bytes_ in (sent, answer)
            )
            given, taken = (lambda: up), (lambda: down)
            self._copies[index, Stage.COPY_TO_HOST] = self._byte_copier(data, up, to_host=True)
            self._take_answer = self._byte_copier(place, down, to_host=False)

        def push() -> None:
            scale = 1.0
            if compresses and not key.two_way:  # the server decodes last
                scale = (self.round.grad_scale if self._keeps_residual else 1.0) / ranks
            link.push(line, given(), taken(), self.round.step, scale)

        return push

    def _compile_pull(self, flow: StepFlow, index: int) -> Callable[[], None] | None:
        link, line = self.context.servers, self.line
        if line is None or link is None:
            return None
        if self._take_answer is not None:
            self._copies[index, Stage.COPY_TO_DEVICE] = self._take_answer
        return partial(link.pull, line)

    def _byte_copier(self, here: Callable[[], Array], mirror: Array, *, to_host: bool) -> Callable[[], None]:
        """Between bytes on the device, which may lie elsewhere in every iteration, and their mirror."""
        host = self.context.host.tensor(mirror)

        def copy() -> None:
            mine = self._memory.tensor(here())
            target, source = (host, mine) if to_host else (mine, host)
            target.copy_(source, non_blocking=True)

        return copy

    def _region_bytes(self, region: Span) -> Array:
        """The bytes of a range of home."""
        return self._memory.array(self.home[region[0] : region[1]].view(torch.uint8))

    # -- communication ---------------------------------------------------------------------------

    def _compile_numbers(self, flow: StepFlow) -> Callable[[], None]:
        """A routine over numbers: home, or a summable payload's vector."""
        assert flow.step.scope is not None
        member = self.context.members[flow.step.scope]
        if flow.step.form is Form.SUMMABLE:
            length = self._values.numel()
            inner = shard_values(length, flow.after.value_cuts)
            outer = shard_values(length, flow.before.value_cuts)
        else:
            outer, inner = flow.before.region, flow.after.region
        if flow.step.phase is Phase.SECOND:
            outer, inner = inner, outer
        values = self._values if flow.step.form is Form.SUMMABLE else None

        def whole() -> torch.Tensor:
            store = self.home if values is None else values
            return store[outer[0] : outer[1]]

        dtype = self.dtype if values is None else values.dtype
        each = 2 if flow.step.form is Form.HALF else dtype.itemsize
        self.bytes_sent += bytes_sent(flow, member, (outer[1] - outer[0]) * each)
        return exchange_numbers(flow, member, whole, outer, self._memory, dtype)

    def _compile_payload(self, flow: StepFlow) -> Callable[[], None]:
        assert flow.step.scope is not None
        member = self.context.members[flow.step.scope]
        action, self._payload, sent = exchange_payload(flow, member, self._payload, self._memory, self.context.cluster)
        self.bytes_sent += sent
        return action
