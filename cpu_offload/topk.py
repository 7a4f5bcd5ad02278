"""Exact top-k on the host. Format: :mod:`espresso.compressors.sparse`; passes: :mod:`espresso.cpu_offload.sparse`."""

from __future__ import annotations

from espresso.compressors.topk import TopK
from espresso.cpu_offload.pool import WorkerPool
from espresso.cpu_offload.sparse import HostSparse


class HostTopK(HostSparse):
    """``topk``: a sample guesses a threshold somewhat below the k-th magnitude; if k pass, the top k are among them."""

    def __init__(self, compressor: TopK, pool: WorkerPool | None = None) -> None:
        super().__init__(compressor, pool, compressor.selection())
