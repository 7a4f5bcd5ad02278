"""Fixed threshold on the host. Format: :mod:`espresso.compressors.sparse`; passes: ``cpu_offload.sparse``."""

from __future__ import annotations

from espresso.compressors.threshold import Threshold
from espresso.cpu_offload.pool import WorkerPool
from espresso.cpu_offload.sparse import HostSparse


class HostThreshold(HostSparse):
    """``threshold``: no sample and no second look."""

    def __init__(self, compressor: Threshold, pool: WorkerPool | None = None) -> None:
        super().__init__(compressor, pool, compressor.selection())
