"""The trainer and the demo, end to end, with the arms that PyTorch brings itself."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.demo import plain_step_s, steps_that_fit, what_ends_say
from benchmarks.emulated import Network, why_not_permitted

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_demo_leaves_a_summary_that_adds_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.demo", "--model", "cnn", "--arms", "plain,fp16,none"]
    # Few steps: five before the timing, then two blocks of one that is not timed and two that are, and one more.
    command += ["--blocks", "2", "--steps-per-block", "2", "--total-steps", "12", "--rate", "300mbit"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "So short a training does not say where it would end" in " ".join(done.stdout.split())
    rows = {row["name"]: row for row in json.loads((tmp_path / "summary.json").read_text())}
    assert list(rows) == ["plain DDP", "fp16 hook", "compute only"]
    plain, half, bound = rows["plain DDP"], rows["fp16 hook"], rows["compute only"]
    # 2.48 M parameters in float32, and in half of it.
    assert half["final_loss"] == pytest.approx(plain["final_loss"], rel=0.05)
    arms = {arm["name"]: arm for arm in json.loads((tmp_path / "train.json").read_text())["arms"]}
    blocks = {name: arm["block_step_ms"] for name, arm in arms.items()}
    for row, mine in zip((plain, half, bound), (blocks["plain"], blocks["fp16"], blocks["none"]), strict=True):
        pairs = [theirs / ours for theirs, ours in zip(blocks["plain"], mine, strict=True)]
        assert row["speedup"] == pytest.approx(statistics.geometric_mean(pairs))
    assert arms["plain"]["replicas_equal"] is True
    assert arms["fp16"]["replicas_equal"] is True
    assert arms["none"]["replicas_equal"] is None
    assert {name: arm["num_steps"] for name, arm in arms.items()} == {"plain": 12, "fp16": 12, "none": 5 + 2 * 3}
    if why_not_permitted() is None:
        assert "verified" in done.stdout
        assert plain["mb_per_step_per_host"] == pytest.approx(4 * 2.483, rel=0.03)
        assert half["mb_per_step_per_host"] == pytest.approx(2 * 2.483, rel=0.03)
        assert bound["mb_per_step_per_host"] < 0.05
        assert bound["speedup"] > 1.0  # how far above depends on what else the machine does
    else:
        assert "No limited network" in done.stdout


@pytest.mark.parametrize(("rate_bps", "steps"), [(None, 180), (10**9, 180), (300 * 10**6, 55), (10**6, 40)])
def test_a_slow_network_has_fewer_steps(rate_bps: int | None, steps: int) -> None:
    """10.2 M gradients are 327 Mb: a minute of them is 55 steps at 300 Mb/s; fewer than 40 are no training."""
    assert steps_that_fit(plain_step_s("mlp", Network((), rate_bps))) == steps


def test_the_demo_says_that_one_run_of_each_is_not_enough() -> None:
    """One run of plain and one of ours differ by several per cent, and so do two of plain."""
    assert "from seed to seed" in what_ends_say(180)
    assert "So short a training" in what_ends_say(17)
