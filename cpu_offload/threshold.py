"""Fixed threshold on the host. Format: :mod:`espresso.compressors.sparse`; passes: ``cpu_offload.sparse``."""

from __future__ import annotations

from espresso.compressors.threshold import Threshold
from espresso.cpu_offload.pool import WorkerPool
from espresso.cpu_offload.sparse import HostSparse, Selection


class HostThreshold(HostSparse):
    """``threshold``: no sample and no second look."""

    def __init__(self, compressor: Threshold, pool: WorkerPool | None = None) -> None:
        fixed = Selection(
            part=0.0, slack=0.0, enough=0.0, attempts=0, exact=False, threshold=compressor.threshold
        )
        super().__init__(compressor, pool, fixed)
