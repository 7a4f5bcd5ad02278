"""DGC on the host. Format: :mod:`espresso.compressors.sparse`; passes: :mod:`espresso.cpu_offload.sparse`."""

from __future__ import annotations

from espresso.compressors.dgc import Dgc
from espresso.cpu_offload.pool import WorkerPool
from espresso.cpu_offload.sparse import HostSparse


class HostDgc(HostSparse):
    """``dgc``: the threshold aims at k; it is lowered at most ten times where fewer than 0.8 k pass."""

    def __init__(self, compressor: Dgc, pool: WorkerPool | None = None) -> None:
        super().__init__(compressor, pool, compressor.selection())
