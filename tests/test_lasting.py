"""A job that is killed in the middle of a save goes on from the checkpoint before it."""

import pytest

from benchmarks.lasting import kills


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before_it() -> None:
    def was_in_the_middle(seed: int) -> bool:
        (row,) = kills(1, seed=seed, width=256)
        assert row["right"], row
        assert row["loaded"] >= 1
        return bool(row["in the middle"])

    assert any(was_in_the_middle(seed) for seed in range(3)), "all came between two saves"
