"""Two probes of a device: how fast it copies and how fast it multiplies matrices.

What is computed goes with the second, what compressors and optimizers do with the first. ``espresso probe`` measures
them (:mod:`espresso.live.probe`); its file is JSON::

    {"schema_version": 1, "kind": "espresso-probe", "device": "cpu", "threads": 1,
     "copy_gb_per_s": 11.2, "matmul_gflops": 94.0, "machine": {}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espresso.model.links import JobError
from espresso.strategies import fields
from espresso.strategies.fields import faults, number, whole

KIND = "espresso-probe"


@dataclass(frozen=True)
class Probe:
    """What one rank's device can do.

    Attributes:
        threads: of the host's cores that it used; 0 on a GPU.
        copy_gb_per_s: bytes copied a second, each counted once.
        matmul_gflops: of float32 matrix products.
        machine: what it was; a remark.
    """

    device: str
    threads: int
    copy_gb_per_s: float
    matmul_gflops: float
    machine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with faults(JobError):
            whole(self.threads, "threads")
            number(self.copy_gb_per_s, "copy_gb_per_s", positive=True)
            number(self.matmul_gflops, "matmul_gflops", positive=True)

    @property
    def body(self) -> dict[str, Any]:
        """As in the file."""
        values: dict[str, Any] = fields.as_json(self)
        return fields.head(KIND) | values

    def save(self, path: str | Path) -> None:
        """Write the file."""
        fields.save(path, self.body)

    @classmethod
    def load(cls, path: str | Path) -> Probe:
        """Read the file.

        Raises:
            JobError: it is not one of ours.
            OSError: it cannot be read.
        """

        def read(body: Any) -> Probe:
            return fields.read_as(cls, fields.without_head(body, KIND), "the probe")

        return fields.load(path, read, JobError)
