"""The compatibility page knows every flag, and the tests that it names are there; PyTorch's own DDP tests, a few."""

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
STATUSES = ("supported", "supported, if installed", "refused", "untried")
PYTORCHS = Path(torch.__file__).parent / "testing" / "_internal" / "distributed" / "distributed_test.py"
"""What ``benchmarks/ddp_tests.py`` runs tests of."""


def test_every_flag_is_on_the_page():
    first = " ".join(row[0] for row in ROWS)
    for function, known in ((DistributedDataParallel.__init__, {"self", "module"}), (fully_shard, {"module"})):
        flags = set(inspect.signature(function).parameters) - known
        assert not {flag for flag in flags if not re.search(rf"`{flag}[`(]", first)}


def missing(where: str) -> list[str]:
    """Of the files and tests that a cell names, those that are not there; a test is in the file named before it."""
    found, text = [], ""
    for file, test in re.findall(r"((?:tests|benchmarks)/\w+\.py)|\b(test_\w+)", where):
        if file:
            path = PYTORCHS if file == "benchmarks/ddp_tests.py" else ROOT / file
            text = path.read_text() if path.is_file() else ""
        if not text or (test and f"def {test}(" not in text):
            found.append(file or test)
    return found


def test_what_the_page_names_and_is_not_there_is_found():
    there = "`tests/test_compatibility.py::test_every_flag_is_on_the_page`, `test_every_row_has_a_status"
    assert missing(f"{there}_and_a_test_that_exists`") == []
    assert missing(f"{there}`") == ["test_every_row_has_a_status"]
    assert missing("`tests/test_nothing.py`") == ["tests/test_nothing.py"]
    ours = "`benchmarks/ddp_tests.py`: "
    assert missing(f"{ours}test_ddp_broadcast_buffer") == []
    assert missing(f"{ours}test_ddp_nothing") == ["test_ddp_nothing"]


def test_every_row_has_a_status_and_a_test_that_exists():
    count = 0
    for row in ROWS:
        if set("".join(row)) <= {"-", " "} or "status" in row:
            continue
        count += 1
        assert sum(cell in STATUSES for cell in row) == 1, row
        if "untried" in row:
            continue
        assert re.search(r"`(tests|benchmarks)/\w+\.py", row[-1]), row
        assert not missing(row[-1]), row
    assert count > 40


@pytest.mark.slow
@pytest.mark.skipif(find_spec("expecttest") is None, reason="PyTorch's tests need expecttest")
def test_one_of_pytorchs_own_tests():
    command = [sys.executable, "-m", "benchmarks.ddp_tests", "--few", "--modes", "plain", "allgather", "--at-once", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| plain | 1 | 0 | 0 | 0 |" in done.stdout
    assert "| allgather | 1 | 0 | 0 | 1 |" in done.stdout
