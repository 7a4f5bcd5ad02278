"""What every compressor shares: validated parameters, a digest of them, and the layout call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Compressor, Correction, Layout, Segment
from espresso.compressors.payload import build_layout, params_digest
from espresso.strategies import RESIDUAL_DTYPES

ADDED = {"added": True}
"""Metadata of a parameter that came after payloads were first written: at its default it leaves their digest alone."""

LOCAL = {"local": True}
"""Metadata of a parameter that changes what a rank encodes, and not how: payloads' digests leave it out."""


@dataclass(frozen=True)
class BaseCompressor(Compressor):
    """Parameters of one algorithm; subclasses add theirs and say how large a body is.

    Attributes:
        raw_below: segments with fewer elements travel as plain numbers inside the payload.
        momentum: mu of a momentum in front of error feedback, for an optimizer whose own momentum is 0; with the
            default 0 the optimizer's momentum or Adam stays right (:mod:`espresso.compressors.momentum`).
        nesterov: the Nesterov form; needs momentum.
        clip_norm: clip a rank's gradients before they are accumulated, tensor by tensor, to this norm over the
            root of the number of ranks; needs momentum; 0 does not clip. (Deep Gradient Compression takes the norm of
            all tensors together, which nobody knows when the first bucket has to leave.)
        residual_dtype: how residuals are kept between iterations, where that is not the job's way.
    """

    algorithm: ClassVar[int]

    raw_below: int = 256
    momentum: float = field(default=0.0, kw_only=True, repr=False, metadata=LOCAL)
    nesterov: bool = field(default=False, kw_only=True, repr=False, metadata=LOCAL)
    clip_norm: float = field(default=0.0, kw_only=True, repr=False, metadata=LOCAL)
    residual_dtype: str = field(default="", kw_only=True, repr=False, metadata=LOCAL)

    def __post_init__(self) -> None:
        self.check_int("raw_below", low=0)
        self.check_float("momentum", high=1.0)
        if self.momentum == 1.0:
            raise ValueError(f"compressor {self.name}: momentum must be below 1, got 1.0")
        self.check_bool("nesterov")
        self.check_float("clip_norm", high=1e30)
        for name in ("nesterov", "clip_norm"):
            if getattr(self, name) and not self.momentum:
                raise ValueError(f"compressor {self.name}: {name} needs a momentum above 0")
        if self.residual_dtype:
            self.check_choice("residual_dtype", RESIDUAL_DTYPES)
            if not self.traits.error_feedback:
                raise ValueError(f"compressor {self.name} keeps no residual: leave residual_dtype out")

    @property
    def correction(self) -> Correction | None:
        """The momentum it asks of the job, where ``momentum`` is above 0."""
        if not self.momentum:
            return None
        return Correction(self.momentum, self.nesterov, self.clip_norm)

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
        values = [(f, getattr(self, f.name)) for f in fields(self) if not f.metadata.get("local")]
        return [(f.name, value) for f, value in values if not f.metadata.get("added") or value != f.default]

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
        self._require(fits and (high is None or value <= high) and value % multiple == 0, key, wanted)

    def check_power_of_two(self, key: str, *, low: int, high: int) -> None:
        """Raise ValueError unless the parameter is a power of two in range."""
        self.check_int(key, low=low, high=high)
        value = getattr(self, key)
        if value & (value - 1):
            raise ValueError(f"compressor {self.name}: {key} must be a power of two, got {value}")

    def check_float(self, key: str, *, above: float | None = None, low: float = 0.0, high: float = 1.0) -> None:
        """Raise ValueError unless the parameter is a number in ``[low, high]`` (``(above, high]``); store a float."""
        value = getattr(self, key)
        wanted = f"a number above {above} and at most {high}" if above is not None else f"a number from {low} to {high}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        self._require(is_number and value <= high and (value >= low if above is None else value > above), key, wanted)
        object.__setattr__(self, key, float(value))

    def check_choice(self, key: str, choices: Sequence[str]) -> None:
        """Raise ValueError unless the parameter is one of the choices."""
        self._require(getattr(self, key) in choices, key, " or ".join(choices))

    def check_bool(self, key: str) -> None:
        """Raise ValueError unless the parameter is true or false."""
        self._require(isinstance(getattr(self, key), bool), key, "true or false")

    def _require(self, fits: bool, key: str, wanted: str) -> None:
        if not fits:
            raise ValueError(f"compressor {self.name}: {key} must be {wanted}, got {getattr(self, key)!r}")
