"""One partition on one rank: what all partitions share, where its numbers are, and what its steps know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from espresso.comm.keep.store import FactorStore, ResidualStore, Velocities
from espresso.comm.member import Member
from espresso.comm.memory import HOST, Array, Codecs, Memory
from espresso.comm.parameter_server import Link
from espresso.compressors.base import Codec, DrawKey, Segment, Starts, Traits
from espresso.strategies import Choice, Cluster, Device, Form, Group, Partition, Run, Scope, Site, StepFlow, StepKind
from espresso.strategies.flow import Span

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


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
    gain_scale: float = 1.0


class Home:
    """The numbers of one partition, in every iteration.

    A view of DDP's bucket where codecs can read its type and the group is one stretch of it (or only codecs touch the
    numbers: they know where each tensor begins), else a workspace of our own. Reductions, gathers and decodes write
    home at the coordinates of their region, so nothing is copied between steps.

    Attributes:
        runs: the stretches of tensors, in order.
        dtype: of the numbers while steps run.
        wide: float32, or float64 where gradients are: what codecs and residuals use.
        buffer: DDP's bucket of this iteration.
        tensor, array: the numbers of this iteration, as collectives and as codecs take them.
        round: this iteration.
        finite: whether a decoder that wrote the result found all of it finite; None where none said so.
    """

    def __init__(self, context: Context, group: Group, partition: Partition, flows: Sequence[StepFlow]) -> None:
        self._group, self._partition, self._memory, self._host = group, partition, context.memory, context.host
        self.runs = group.segments(partition.start, partition.stop)
        native, is_compressed = TORCH_DTYPES[group.dtype], group.choice.option.is_compressed
        self.wide: type[np.float32] | type[np.float64] = np.float64 if native is torch.float64 else np.float32
        self.dtype = torch.float32 if is_compressed and native is not torch.float64 else native
        # Routines move stretches of numbers, and copies between device and host do.
        moves_numbers = any(flow.step.routine is not None and flow.step.form is Form.RAW for flow in flows)
        contiguous = moves_numbers or self._memory.host_copies
        is_one_stretch = len({run.bucket_start - run.group_start for run in group.runs if run.numel}) <= 1
        self._in_place = self.dtype is native and (is_one_stretch or not contiguous)
        self._first = min((run.bucket_start for run in self.runs), default=0)
        self._last = max((run.bucket_start + run.numel for run in self.runs), default=0)
        self.buffer = torch.empty(0, dtype=native, device="cpu")
        self.tensor = self._memory.numbers(0 if self._in_place else partition.numel, self.dtype)
        self.array: Array = self._memory.array(self.tensor)
        self.round = Round(0)
        self.finite: bool | None = None

    def bind(self, buffer: torch.Tensor, now: Round) -> None:
        """Point at this iteration's bucket."""
        self.buffer, self.round, self.finite = buffer, now, None
        if self._in_place:
            self.tensor = buffer[self._first : self._last]
            self.array = self._memory.array(self.tensor)

    def fetch(self) -> None:
        """Take the numbers from the bucket."""
        if not self._in_place:
            for run, mine in zip(self.runs, self.in_bucket(), strict=True):
                self.stretch(run).copy_(mine)

    def give_back(self) -> None:
        """Write them to the bucket."""
        if not self._in_place:
            for run, mine in zip(self.runs, self.in_bucket(), strict=True):
                mine.copy_(self.stretch(run))

    def in_bucket(self) -> list[torch.Tensor]:
        """Where the numbers of each run belong."""
        return [self.buffer[run.bucket_start : run.bucket_start + run.numel] for run in self.runs]

    def stretch(self, run: Run) -> torch.Tensor:
        """The numbers of a run."""
        start = self.start_of(run)
        return self.tensor[start : start + run.numel]

    def start_of(self, run: Run) -> int:
        """Where a run begins here."""
        return run.bucket_start - self._first if self._in_place else run.group_start - self._partition.start

    def runs_in(self, span: Span) -> tuple[Run, ...]:
        """The stretches of tensors in a range of the partition."""
        start = self._partition.start
        return self._group.segments(start + span[0], start + span[1])

    def segments(self, span: Span) -> tuple[list[Segment], Starts]:
        """The segments of a range of the partition, and where each begins here."""
        runs = self.runs_in(span)
        segments = [Segment(run.tensor, run.tensor_start, run.numel, run.shape, run.exact) for run in runs]
        return segments, np.array([self.start_of(run) for run in runs], np.int64)

    @cached_property
    def mirror(self) -> torch.Tensor:
        """The numbers in host memory, for offloaded steps of a job on a device; made when the first asks."""
        return self._host.numbers(self._partition.numel, self.dtype)


@dataclass(frozen=True)
class Part:
    """A partition as its steps see it."""

    context: Context
    group: Group
    partition: Partition
    flows: tuple[StepFlow, ...]
    home: Home

    @property
    def choice(self) -> Choice:
        return self.group.choice

    @cached_property
    def traits(self) -> Traits:
        """Of the compressor."""
        return self.codec(Device.TRAINING).compressor.traits

    @cached_property
    def keeps_residual(self) -> bool:
        """Whether compressions have error feedback."""
        return self.choice.option.is_compressed and self.traits.error_feedback

    @property
    def rescale(self) -> float:
        """The loss scale of this iteration, where it is taken out before encoding: where anything is kept."""
        keeps = self.keeps_residual or self.context.velocities is not None
        return self.home.round.grad_scale if keeps else 1.0

    @property
    def unscale(self) -> float:
        """The factor that takes it out."""
        return 1.0 / self.rescale

    @property
    def num_ranks(self) -> int:
        return self.context.cluster.num_ranks

    def codec(self, device: Device) -> Codec:
        """The compressor's."""
        return self.context.codecs(self.choice.compressor, device)

    def key(self, site: Site) -> DrawKey:
        """For what is drawn at a site in this iteration."""
        shared = site.replicas(self.context.cluster) > 1
        return self.drawn(site, -1 if shared else self.context.rank)

    def drawn(self, site: Site, rank: int = -1) -> DrawKey:
        """The same as a rank drew it; receivers do not say which."""
        return DrawKey(self.context.seed, self.home.round.step, list(Site).index(site), rank)

    def is_first(self, index: int) -> bool:
        """Whether no step before this one compresses."""
        return all(flow.step.kind is not StepKind.COMPRESS for flow in self.flows[:index])

    def is_last(self, index: int) -> bool:
        """Whether no step after this one decompresses."""
        return all(flow.step.kind is not StepKind.DECOMPRESS for flow in self.flows[index + 1 :])

    def ends(self, index: int) -> bool:
        """Whether this step is the last."""
        return index == len(self.flows) - 1
