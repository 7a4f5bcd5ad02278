"""What compressors of several rounds keep between steps: by tensor, equal on all ranks, committed like residuals."""

from __future__ import annotations

from typing import Any

from espresso.comm.memory import HOST

Array = Any
"""Of the memory in which the step ran that wrote it."""


class FactorStore:
    """PowerSGD's Q of every tensor. Lanes write at the same time, for different tensors."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}
        self._written: dict[str, Array] = {}

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self._kept.values())

    def read(self, tensor: str) -> Array | None:
        """What the last step that counted left."""
        return self._kept.get(tensor)

    def write(self, tensor: str, values: Array) -> None:
        """For the next step, if this one counts."""
        self._written[tensor] = values

    def commit(self) -> None:
        """The iteration counts."""
        self._kept.update(self._written)
        self._written.clear()

    def discard(self) -> None:
        """The iteration did not happen."""
        self._written.clear()

    def snapshot(self) -> dict[str, Array]:
        """Copies of everything on the host, flat."""
        return {tensor: HOST.here(values).reshape(-1).copy() for tensor, values in self._kept.items()}

    def load(self, factors: dict[str, Array]) -> None:
        """Replace everything."""
        self._kept = dict(factors)
        self._written.clear()
