"""How much of the gradient a strategy loses, and a budget for it, so that compressors can be mixed.

The *relative error* of a compressor on a tensor is ``|x - decode(encode(x))| / |x|``. A strategy's error is the
mean over tensors, each counted with its share of the model's elements; raw tensors lose nothing. It is one
number per tensor and compressor, however many times the tensor's option compresses. A sensitivity file::

    {"schema_version": 1, "kind": "espresso-sensitivity",
     "relative_error": {"dgc:ratio=0.01": {"*": 0.93, "embedding.weight": 0.4}, "fp16": {"*": 0.0003}}}

with ``*`` for all tensors that are not named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.compressors import Decoding, Encoding
from espresso.model.links import JobError
from espresso.search.candidates import Unit
from espresso.strategies import NONE, Choice, CompressorSpec, TensorSpec, fields
from espresso.strategies.fields import faults, number

Reals = npt.NDArray[np.float64]
EVERY = "*"
KIND = "espresso-sensitivity"
_SAMPLE = 1 << 16


@dataclass(frozen=True)
class Sensitivity:
    """Relative error by compressor and tensor name; ``*`` stands for tensors that are not named.

    Raises:
        JobError: an error that is negative or not finite.
    """

    relative_error: Mapping[CompressorSpec, Mapping[str, float]]

    def __post_init__(self) -> None:
        with faults(JobError):
            for spec, rows in self.relative_error.items():
                for tensor, value in rows.items():
                    number(value, f"relative error of '{spec}' on tensor {tensor!r}")

    def of(self, spec: CompressorSpec, tensor: str) -> float:
        """The error of a compressor on a tensor.

        Raises:
            JobError: it is not known.
        """
        if spec == NONE:
            return 0.0
        rows = self.relative_error.get(spec, {})
        value = rows.get(tensor, rows.get(EVERY))
        if value is None:
            raise JobError(
                f"the sensitivity does not say what '{spec}' does to tensor {tensor!r};"
                f" name the tensor, or give {EVERY!r} for all that are not named"
            )
        return value

    @classmethod
    def from_json(cls, body: Any) -> Sensitivity:
        """Read the file's form.

        Raises:
            JobError: names the fault.
        """
        with faults(JobError):
            found = fields.read_as(_File, fields.without_head(body, KIND), "the sensitivity")
        try:
            return cls({CompressorSpec.parse(name): rows for name, rows in found.relative_error.items()})
        except JobError:
            raise
        except ValueError as error:
            raise JobError(f"relative_error: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Read a sensitivity file.

        Raises:
            JobError: not JSON or faulty; begins with the path.
            OSError: the file cannot be read.
        """
        return fields.load(path, cls.from_json, JobError)

    def to_json(self) -> dict[str, Any]:
        errors = {str(spec): dict(rows) for spec, rows in self.relative_error.items()}
        return fields.head(KIND) | {"relative_error": errors}


@dataclass(frozen=True)
class _File:
    """A sensitivity file, below its head."""

    relative_error: Mapping[str, Mapping[str, float]]
    note: str = ""


def measure_sensitivity(
    gradients: Mapping[str, npt.NDArray[np.float32]], specs: Iterable[CompressorSpec]
) -> Sensitivity:
    """Encode and decode gradients (1-D float32, not changed), and see what is lost.

    Raises:
        ValueError: a gradient that is not finite, or not one-dimensional float32.
    """
    from espresso.compressors.base import Segment
    from espresso.compressors.registry import create, host_codec

    found: dict[CompressorSpec, dict[str, float]] = {}
    for spec in specs:
        compressor = create(spec)
        codec = host_codec(compressor, None)
        rows = found.setdefault(spec, {})
        for name, gradient in gradients.items():
            if gradient.ndim != 1 or gradient.dtype != np.float32 or not np.isfinite(gradient).all():
                raise ValueError(f"gradient {name!r} must be 1-D, float32 and finite")
            layout = compressor.layout((Segment(name, 0, len(gradient)),))
            payload = np.zeros(layout.num_bytes, dtype=np.uint8)
            back, starts = np.empty_like(gradient), np.zeros(1, dtype=np.int64)
            codec.encode(Encoding(layout, gradient, starts), payload)
            codec.decode(Decoding(layout, back, starts), payload[None])
            norm = float(np.linalg.norm(gradient.astype(np.float64)))
            lost = float(np.linalg.norm(gradient.astype(np.float64) - back))
            rows[name] = lost / norm if norm else 0.0
    return Sensitivity(found)


def normal_sensitivity(specs: Iterable[CompressorSpec]) -> Sensitivity:
    """What the compressors lose of normally distributed numbers: where nothing better was measured."""
    sample = np.random.default_rng(0).standard_normal(_SAMPLE).astype(np.float32)
    return measure_sensitivity({EVERY: sample}, specs)


class ErrorTable:
    """The errors of one job's tensors, and the budget.

    Args:
        budget: the most a strategy's error may be; infinity only reports errors.

    Raises:
        JobError: a budget below zero, or a sensitivity that is not known.
    """

    def __init__(
        self,
        sensitivity: Sensitivity,
        tensors: Sequence[TensorSpec],
        specs: Sequence[CompressorSpec],
        budget: float = math.inf,
    ) -> None:
        if math.isnan(budget) or budget < 0:
            raise JobError(f"an error budget is at least zero, got {budget!r}")
        self.budget = budget
        self.columns = {spec: column for column, spec in enumerate((NONE, *specs))}
        total = sum(tensor.numel for tensor in tensors) or 1
        self._of = {
            tensor.name: np.array([tensor.numel / total * sensitivity.of(spec, tensor.name) for spec in self.columns])
            for tensor in tensors
        }

    def of_units(self, units: Sequence[Unit]) -> Reals:
        """float64[units, columns]: what each compressor adds to the error on each unit."""
        return np.array([sum(self._of[name] for name in unit.tensors) for unit in units])

    def of_choices(self, choices: Mapping[str, Choice]) -> float:
        """The error of a strategy, by tensor name."""
        return float(sum(self._of[name][self.columns[choice.compressor]] for name, choice in choices.items()))

    def knows(self, spec: CompressorSpec) -> bool:
        return spec in self.columns


__all__ = ["ErrorTable", "Sensitivity", "measure_sensitivity", "normal_sensitivity"]
