"""Exact top-k. Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.common import ADDED
from espresso.compressors.sparse import FEEDBACK_GAIN, Selection, Sparsifier


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Keeps the k numbers of largest magnitude in every segment; ties go to the lower index.

    Body: see :mod:`espresso.compressors.sparse`.

    Attributes:
        ratio, least: see :class:`~espresso.compressors.sparse.Sparsifier`.
    """

    name: ClassVar[str] = "topk"
    traits: ClassVar[Traits] = Traits(exact_size=False, masks=True, feedback_gain=FEEDBACK_GAIN, finer="least")
    algorithm: ClassVar[int] = 6

    ratio: float = 0.01
    least: int = field(default=1, metadata=ADDED)

    def selection(self) -> Selection:
        """A threshold somewhat below the k-th magnitude; if k pass, the top k are among them."""
        return Selection(part=0.01, slack=4.0, enough=1.0, attempts=2, exact=True)
