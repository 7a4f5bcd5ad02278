"""Home: where the raw numbers of a partition are in every iteration.

A view of DDP's bucket where codecs can read its type and the group is one stretch of it (or only codecs touch the
numbers: they know where each tensor begins), else a workspace of our own. Reductions, gathers and decodes write home at
the coordinates of their region, so nothing is copied between steps.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from espresso.comm.memory import Array, Memory
from espresso.comm.program.context import TORCH_DTYPES, Round
from espresso.compressors.base import Segment, Starts
from espresso.strategies import Group, Partition, Run
from espresso.strategies.flow import Span


class Home:
    """The numbers of one partition.

    Args:
        dtype: of the numbers while steps run.
        contiguous: whether routines move them, so that they have to lie side by side.
        host: memory for the mirror of offloaded steps.

    Attributes:
        runs: the stretches of tensors, in order.
        wide: float32, or float64 where gradients are: what codecs and residuals use.
        buffer: DDP's bucket of this iteration.
        tensor, array: the numbers of this iteration, as collectives and as codecs take them.
        round: this iteration.
        finite: whether a decoder that wrote the result found all of it finite; None where none said so.
    """

    def __init__(
        self, group: Group, partition: Partition, dtype: torch.dtype, memory: Memory, host: Memory, *, contiguous: bool
    ) -> None:
        self._group, self._partition, self._memory, self._host = group, partition, memory, host
        self.runs = group.segments(partition.start, partition.stop)
        self.dtype = dtype
        self.wide: type[np.float32] | type[np.float64] = np.float64 if group.dtype == "float64" else np.float32
        is_one_stretch = len({run.bucket_start - run.group_start for run in group.runs if run.numel}) <= 1
        self._in_place = dtype is TORCH_DTYPES[group.dtype] and (is_one_stretch or not contiguous)
        self._first = min((run.bucket_start for run in self.runs), default=0)
        self._last = max((run.bucket_start + run.numel for run in self.runs), default=0)
        self.buffer = torch.empty(0, dtype=TORCH_DTYPES[group.dtype])
        self.tensor = memory.numbers(0 if self._in_place else partition.numel, dtype)
        self.array: Array = memory.array(self.tensor)
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

    @cached_property
    def mirror_array(self) -> Array:
        """The same as codecs take them."""
        return self._host.array(self.mirror)
