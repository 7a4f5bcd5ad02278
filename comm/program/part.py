"""One partition on one rank, as the steps that are compiled for it see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from espresso.comm.program.context import Context
from espresso.comm.program.home import Home
from espresso.compressors.base import Codec, DrawKey, Traits
from espresso.strategies import Choice, Device, Group, Partition, Site, StepFlow, StepKind


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
