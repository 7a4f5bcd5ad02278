"""Deep Gradient Compression: a threshold from a sample, local accumulation, momentum correction.

Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from espresso.compressors.base import Correction, Traits
from espresso.compressors.common import ADDED
from espresso.compressors.sparse import FEEDBACK_GAIN, Selection, Sparsifier


@dataclass(frozen=True)
class Dgc(Sparsifier):
    """Sends the numbers above a threshold estimated from a sample; never more than k a segment.

    Body: see :mod:`espresso.compressors.sparse`.

    The threshold aims at k by a sample of magnitudes. Where it lets through fewer than 0.8 k it is lowered,
    at most ten times; where it lets through more than k, the k largest of those are selected exactly. (The
    paper raises the threshold by 1.3 there first. Selecting among the few that passed costs less than that
    second look and keeps exactly k.) So what is sent is always the top n of the segment, 0.8 k <= n <= k
    unless fewer are non-zero or the ten attempts did not suffice.

    Momentum and warm-up are kept by the training state (:mod:`espresso.compressors.momentum`,
    ``EspressoState.set_epoch``); a codec encodes with the ratio it is given.

    Attributes:
        ratio, least: see :class:`~espresso.compressors.sparse.Sparsifier`.
        sample: the part of a segment that is sampled, in (0, 1]; small segments are sampled more densely.
        momentum: mu of momentum correction, for an optimizer whose own momentum is 0; with the default 0 this
            is sampled top-k with error feedback, and the optimizer's momentum or Adam stays right.
        nesterov: the Nesterov form of momentum correction; needs momentum.
        clip_norm: clip a rank's gradients before they are accumulated, tensor by tensor, to this norm over the
            root of the number of ranks; needs momentum; 0 does not clip. (The paper takes the norm of all
            tensors together, which nobody knows when the first bucket has to leave.)
        warmup_epochs: E of the warm-up that :meth:`at_epoch` follows; 0 means none.
    """

    name: ClassVar[str] = "dgc"
    traits: ClassVar[Traits] = Traits(exact_size=False, masks=True, feedback_gain=FEEDBACK_GAIN, finer="least")
    algorithm: ClassVar[int] = 7

    ratio: float = 0.01
    sample: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float = 0.0
    warmup_epochs: int = 0
    least: int = field(default=1, metadata=ADDED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_float("sample", above=0.0)
        self.check_float("momentum", high=1.0)
        if self.momentum == 1.0:
            raise ValueError("compressor dgc: momentum must be below 1, got 1.0")
        self.check_bool("nesterov")
        self.check_float("clip_norm", high=1e30)
        for name in ("nesterov", "clip_norm"):
            if getattr(self, name) and not self.momentum:
                raise ValueError(f"compressor dgc: {name} needs a momentum above 0")
        self.check_int("warmup_epochs", low=0)

    @property
    def correction(self) -> Correction | None:
        """Momentum correction, where ``momentum`` is above 0."""
        if not self.momentum:
            return None
        return Correction(self.momentum, self.nesterov, self.clip_norm)

    @property
    def is_scheduled(self) -> bool:
        """Whether it warms up."""
        return self.warmup_epochs > 0

    def in_force(self, epoch: int, step: int) -> Dgc:
        """The compressor of this epoch."""
        return self.at_epoch(epoch) if self.is_scheduled else self

    def selection(self) -> Selection:
        """The threshold aims at k; it is lowered at most ten times where fewer than 0.8 k pass."""
        return Selection(part=self.sample, slack=0.0, enough=0.8, attempts=10, exact=False)

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
