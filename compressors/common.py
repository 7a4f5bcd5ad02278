"""What every compressor shares: validated parameters, a digest of them, and the layout call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Bytes, Compressor, Correction, Layout, Segment, Traits
from espresso.compressors.payload import build_layout, params_digest
from espresso.compressors.sparse import sent_slots

ADDED = {"added": True}
"""Metadata of a parameter that came after payloads were first written: at its default it leaves their digest alone."""


class Steady:
    """What a compressor is that asks for no momentum, follows no schedule and masks nothing."""

    @property
    def correction(self) -> Correction | None:
        """The momentum this compressor asks of the job, if any."""
        return None

    @property
    def is_scheduled(self) -> bool:
        """Whether :meth:`in_force` depends on the epoch or the step."""
        return False

    @property
    def start_step(self) -> int:
        """The first step that compresses."""
        return 0

    def in_force(self, epoch: int, step: int) -> Compressor:
        """What to run in this step; itself, as there is no schedule."""
        return cast(Compressor, self)

    def sent(self, layout: Layout, payload: Bytes) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """What a sparsifier chose; nothing here."""
        return iter(())


@dataclass(frozen=True)
class BaseCompressor(Steady):
    """Parameters of one algorithm; subclasses add theirs and say how large a body is.

    Attributes:
        raw_below: segments with fewer elements travel as plain numbers inside the payload.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits]
    algorithm: ClassVar[int]

    raw_below: int = 256

    def __post_init__(self) -> None:
        self.check_int("raw_below", low=0)

    @property
    def raw_limit(self) -> int:
        """Segments with fewer elements travel raw."""
        return self.raw_below

    def body_size(self, numel: int, itemsize: int) -> tuple[int, int]:
        """The algorithm's count for a segment of ``numel`` numbers, and its body's bytes before padding."""
        raise NotImplementedError

    def layout(self, segments: Sequence[Segment], dtype: npt.DTypeLike = np.float32) -> Layout:
        """Lay out the payload for these segments; ``dtype`` is float32 or float64."""
        return build_layout(
            algorithm=self.algorithm,
            digest=params_digest(self.name, self._digested()),
            raw_below=self.raw_limit,
            body_size=self.body_size,
            segments=segments,
            dtype=dtype,
        )

    def _digested(self) -> list[tuple[str, Any]]:
        values = [(f, getattr(self, f.name)) for f in fields(self)]
        return [(f.name, value) for f, value in values if not f.metadata.get("added") or value != f.default]

    def sent(self, layout: Layout, payload: Bytes) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """What was chosen, segment by segment, where the traits say that it masks."""
        return sent_slots(layout, payload) if self.traits.masks else iter(())

    def params(self) -> dict[str, Any]:
        """The parameters that differ from their defaults, as a spec writes them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def check_int(self, key: str, *, low: int, high: int | None = None, multiple: int = 1) -> None:
        """Raise ValueError unless the parameter is an integer in range."""
        value = getattr(self, key)
        wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        if multiple > 1:
            wanted += f", a multiple of {multiple}"
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= low
        if not fits or (high is not None and value > high) or value % multiple:
            raise ValueError(f"compressor {self.name}: {key} must be {wanted}, got {value!r}")

    def check_float(self, key: str, *, above: float | None = None, low: float = 0.0, high: float = 1.0) -> None:
        """Raise ValueError unless the parameter is a number in ``[low, high]`` (``(above, high]``); store a float."""
        value = getattr(self, key)
        wanted = f"a number above {above} and at most {high}" if above is not None else f"a number from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"compressor {self.name}: {key} must be {wanted}, got {value!r}")
        if value > high or (value <= above if above is not None else value < low):
            raise ValueError(f"compressor {self.name}: {key} must be {wanted}, got {value!r}")
        object.__setattr__(self, key, float(value))

    def check_choice(self, key: str, choices: Sequence[str]) -> None:
        """Raise ValueError unless the parameter is one of the choices."""
        if getattr(self, key) not in choices:
            raise ValueError(
                f"compressor {self.name}: {key} must be {' or '.join(choices)}, got {getattr(self, key)!r}"
            )

    def check_bool(self, key: str) -> None:
        """Raise ValueError unless the parameter is true or false."""
        if not isinstance(getattr(self, key), bool):
            raise ValueError(f"compressor {self.name}: {key} must be true or false, got {getattr(self, key)!r}")
