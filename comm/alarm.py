"""Word of a failure, through the key-value store that the job was started with.

A rank that fails but lives on keeps its connections, so the others' collectives only end at their time-out. It
leaves a key instead; a rank that has been waiting for a while looks for it. No step that goes well touches
the store.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed.distributed_c10d as torch_groups

logger = logging.getLogger("espresso")

LOOK_AFTER_S = 1.0
"""A step that makes no progress for so long is worth a look."""


class Alarm:
    """One key for one set of groups. Best effort: a store that is gone or missing rings nothing.

    Args:
        name: the same on all ranks of the job, and of no other job in this store.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._rank = rank
        self._store: Any = None
        try:
            self._store = torch_groups.PrefixStore(f"espresso/{name}", torch_groups._get_default_store())
        except (RuntimeError, ValueError, TypeError) as error:  # a backend without a store, such as MPI's
            logger.debug("no store for alarms: %s", error)

    def ring(self, text: str) -> None:
        """Tell the others that this rank failed, and of what."""
        if self._store is None:
            return
        try:
            self._store.set("failed", f"{self._rank} {text}")
        except (RuntimeError, OSError) as error:
            logger.debug("could not tell the other ranks: %s", error)

    def heard(self) -> tuple[int, str] | None:
        """(rank, what it said) if another rank failed."""
        if self._store is None:
            return None
        try:
            if not self._store.check(["failed"]):
                return None
            rank, _, text = self._store.get("failed").decode(errors="replace").partition(" ")
        except (RuntimeError, OSError):
            return None
        return None if int(rank) == self._rank else (int(rank), text)
