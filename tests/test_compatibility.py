"""The compatibility page knows every flag, and the tests that it names are there; PyTorch's own DDP tests, a few."""

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
STATUSES = ("supported", "supported, if installed", "refused", "untried")


def test_every_flag_is_on_the_page():
    first = " ".join(row[0] for row in ROWS)
    for function, known in ((DistributedDataParallel.__init__, {"self", "module"}), (fully_shard, {"module"})):
        flags = set(inspect.signature(function).parameters) - known
        assert not {flag for flag in flags if not re.search(rf"`{flag}[`(]", first)}


def test_every_row_has_a_status_and_a_test_that_exists():
    count = 0
    for row in ROWS:
        if set("".join(row)) <= {"-", " "} or "status" in row:
            continue
        count += 1
        assert sum(cell in STATUSES for cell in row) == 1, row
        if "untried" in row:
            continue
        file, _, test = re.findall(r"`((?:tests|benchmarks)/\w+\.py)(::(\w+))?`", row[-1])[0]
        assert not test or f"def {test}(" in (ROOT / file).read_text(), row
    assert count > 40


@pytest.mark.slow
@pytest.mark.skipif(find_spec("expecttest") is None, reason="PyTorch's tests need expecttest")
def test_one_of_pytorchs_own_tests():
    command = [sys.executable, "-m", "benchmarks.ddp_tests", "--few", "--modes", "plain", "allgather", "--at-once", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| plain | 1 | 0 | 0 | 0 |" in done.stdout
    assert "| allgather | 1 | 0 | 0 | 1 |" in done.stdout
