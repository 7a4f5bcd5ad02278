"""Deep Gradient Compression: a threshold from a sample, local accumulation, momentum correction.

Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.common import BaseCompressor
from espresso.compressors.sparse import sparse_body_size


@dataclass(frozen=True)
class Dgc(BaseCompressor):
    """Sends the numbers above a threshold estimated from a sample; never more than k a segment.

    Body: see :mod:`espresso.compressors.sparse`.

    The threshold aims at k by a sample of magnitudes. Where it lets through fewer than 0.8 k it is lowered,
    at most ten times; where it lets through more than k, the k largest of those are selected exactly. (The
    paper raises the threshold by 1.3 there first. Selecting among the few that passed costs less than that
    second look and keeps exactly k.) So what is sent is always the top n of the segment, 0.8 k <= n <= k
    unless fewer are non-zero or the ten attempts did not suffice.

    Attributes:
        ratio: k / d, in (0, 1].
        sample: the part of a segment that is sampled, in (0, 1]; small segments are sampled more densely.
        momentum: mu of momentum correction; with the default 0 this is sampled top-k with error feedback.
            Above 0 it needs a :class:`espresso.compressors.momentum.MomentumCorrection`; training has no place
            for its velocities yet, so that codecs refuse it.
        nesterov: the Nesterov form of momentum correction; needs momentum.
        warmup_epochs: E of the warm-up that :meth:`at_epoch` follows; 0 means none. Codecs refuse it likewise.
    """

    name: ClassVar[str] = "dgc"
    traits: ClassVar[Traits] = Traits()
    algorithm: ClassVar[int] = 7

    ratio: float = 0.01
    sample: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    warmup_epochs: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_float("ratio", above=0.0)
        self.check_float("sample", above=0.0)
        self.check_float("momentum", high=1.0)
        if self.momentum == 1.0:
            raise ValueError("compressor dgc: momentum must be below 1, got 1.0")
        self.check_bool("nesterov")
        if self.nesterov and not self.momentum:
            raise ValueError("compressor dgc: nesterov needs a momentum above 0")
        self.check_int("warmup_epochs", low=0)

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """k, and the body of k slots."""
        return sparse_body_size(numel, itemsize, self.ratio)

    def check_stateless(self) -> None:
        """Raise ValueError for momentum and warm-up: training keeps no velocities and changes no ratio yet."""
        if self.momentum:
            raise ValueError(
                f"compressor dgc: momentum={self.momentum} needs velocities, which training does not keep yet: leave it"
                " at 0, where the optimizer's own momentum applies (MomentumCorrection can be used by itself)"
            )
        if self.warmup_epochs:
            raise ValueError(
                f"compressor dgc: warmup_epochs={self.warmup_epochs} needs a ratio that changes with the epoch, which"
                " training does not do yet: leave it at 0 (Dgc.at_epoch gives the ratios of the schedule)"
            )

    def at_epoch(self, epoch: int) -> Dgc:
        """The compressor of an epoch: ratio ``max(base^((e+1)/(E+1)), base)`` while it warms up.

        Example:
            >>> [round(Dgc(ratio=0.001, warmup_epochs=2).at_epoch(e).ratio, 4) for e in range(3)]
            [0.1, 0.01, 0.001]
        """
        if epoch < 0:
            raise ValueError(f"compressor dgc: epoch must be at least 0, got {epoch}")
        exponent = min(1.0, (epoch + 1) / (self.warmup_epochs + 1))
        return replace(self, ratio=max(self.ratio**exponent, self.ratio), warmup_epochs=0)
