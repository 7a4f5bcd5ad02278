"""Random-k with a shared seed. Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from espresso.compressors.base import DAMPED, Traits
from espresso.compressors.common import ADDED, BaseCompressor
from espresso.compressors.sparse import num_slots

STRATUM = 4096
"""Elements of a stratum: positions are drawn inside one, so that both backends gather from their nearest cache."""

ROUNDS = 4
"""Rounds of the keyed permutation."""


@dataclass(frozen=True)
class RandomK(BaseCompressor):
    """Keeps k numbers at random positions that all ranks draw alike; only values travel, and they can be summed.

    Body: k numbers of the layout's dtype. ``count`` = k.

    Positions depend on (seed, step, site, tensor, the segment's start in it), never on the rank. Of the d elements,
    stratum c (4096 elements from a = 4096 c to b) holds the slots from s(a) to s(b), with s(x) = (U + k x) div d and
    one U below d per segment: every element is kept with probability k/d (those of strata of fewer than some 64
    elements up to 8 % more or less often), nothing is drawn twice and the slots are k in all. Slot s(a) + j is element
    P(j) of its stratum, P a permutation: a Feistel network of four rounds on the smallest even number of bits that
    holds the stratum, walked until it falls inside. Keys come from splitmix64's finaliser
    (``espresso.cpu_offload.randomk`` spells them out).

    Values are not rescaled: with error feedback that is the contraction with E error = (1 - k/d) |x|^2.

    Attributes:
        ratio: k / d, in (0, 1].
        k: the count itself, of every segment, in place of the ratio; 0 leaves it to the ratio.
    """

    name: ClassVar[str] = "randomk"
    traits: ClassVar[Traits] = Traits(summable=True, stochastic=True, sparse=True, feedback_gain=DAMPED)
    algorithm: ClassVar[int] = 8

    ratio: float = 0.01
    k: int = field(default=0, metadata=ADDED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_float("ratio", above=0.0)
        self.check_int("k", low=0)

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """k, and k numbers."""
        k = num_slots(numel, self.ratio, k=self.k)
        return k, k * itemsize
