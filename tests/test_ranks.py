"""Those who start ranks leave none behind, also where an answer cannot be read."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest

from benchmarks.rank_pool import RankPool
from tests.workers import run_ranks


class Unreadable:
    """Can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def answer(rank: int) -> Unreadable | None:
    """Rank 0's cannot be read; the other would stay for long."""
    if rank == 0:
        return Unreadable()
    time.sleep(60)
    return None


def test_ranks_end_with_an_answer_that_cannot_be_read() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match="no number"):
        run_ranks(answer, 2, init=False)
    assert set(multiprocessing.active_children()) <= before


def test_a_pool_starts_anew_after_an_answer_that_cannot_be_read() -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(ValueError, match="no number"):
            pool.run(answer)
        assert not pool.running
    finally:
        pool.close()
