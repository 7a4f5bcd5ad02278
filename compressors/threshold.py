"""Fixed threshold. Strom: Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espresso.compressors.base import Traits
from espresso.compressors.sparse import FEEDBACK_GAIN, Selection, Sparsifier


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """Sends the numbers of at least the threshold's magnitude; what is kept is below it.

    Body: see :mod:`espresso.compressors.sparse`.

    Deviation from the paper: it sends the threshold with the number's sign, this one the number (as the peers do).
    Sizes are known before the exchange here, so that a segment has k = ratio * d slots: where more than k pass, the k
    largest are sent, and the rest is kept with the others until its turn comes.

    Attributes:
        threshold: in the units of the gradient (loss scale taken out), above 0.
        ratio: slots / d, in (0, 1].
    """

    name: ClassVar[str] = "threshold"
    traits: ClassVar[Traits] = Traits(exact_size=False, feedback_gain=FEEDBACK_GAIN)
    algorithm: ClassVar[int] = 11

    threshold: float = 0.001
    ratio: float = 0.05
    least = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_float("threshold", above=0.0, high=1e30)

    @property
    def raw_limit(self) -> int:
        """Segments with fewer elements travel raw."""
        return self.raw_below

    def selection(self) -> Selection:
        """No sample and no second look."""
        return Selection(part=0.0, slack=0.0, enough=0.0, attempts=0, exact=False, threshold=self.threshold)
