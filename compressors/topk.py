"""Exact top-k. Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.common import ADDED, BaseCompressor
from espresso.compressors.sparse import FEEDBACK_GAIN, Selection, sparse_body_size


@dataclass(frozen=True)
class TopK(BaseCompressor):
    """Keeps the k numbers of largest magnitude in every segment; ties go to the lower index.

    Body: see :mod:`espresso.compressors.sparse`.

    Attributes:
        ratio: k / d, in (0, 1].
        least: k is at least this. A segment less than twice as long travels raw, which takes
            at most a third more bytes in float32 and keeps nothing back.
    """

    name: ClassVar[str] = "topk"
    traits: ClassVar[Traits] = Traits(exact_size=False, masks=True, feedback_gain=FEEDBACK_GAIN, finer="least")
    algorithm: ClassVar[int] = 6

    ratio: float = 0.01
    least: int = field(default=1, metadata=ADDED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_float("ratio", above=0.0)
        self.check_int("least", low=1)

    @property
    def raw_limit(self) -> int:
        """Segments with fewer elements travel raw."""
        return max(self.raw_below, 2 * self.least)

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """k, and the body of k slots."""
        return sparse_body_size(numel, itemsize, self.ratio, self.least)

    def selection(self) -> Selection:
        """A threshold somewhat below the k-th magnitude; if k pass, the top k are among them."""
        return Selection(part=0.01, slack=4.0, enough=1.0, attempts=2, exact=True)
