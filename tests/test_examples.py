"""Every example runs, by the command in its first lines, at a small size."""

import ast
import contextlib
import importlib.util
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.workers import RanksFailed, run_ranks

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"

SMALL = {
    "ddp.py": "--steps 8 --width 32",
    "log_to_tensorboard.py": "--steps 10",
    "clan.py": "--steps 8",
    "parameter_servers.py": "--steps 4",
    "strategy_file.py": "--steps 8",
    "hsdp.py": "--steps 4 --width 16 --layers 1 --context 16",
    "char_gpt.py": "--steps 3 --width 16 --layers 1 --context 16 --accumulate 2",
}

SAYS = {
    "ddp.py": r"steps 0 to 8: loss \d",
    "log_to_tensorboard.py": r"tensorboard --logdir build/tensorboard",
    "clan.py": r"loss \d.*; [1-9]\d* kB of residuals",
    "parameter_servers.py": r"3 workers; .*; 1 tensors went through the server",
    "strategy_file.py": r"2 of 6 tensors compressed\n.*sent 1\d\.\d times less",
    "hsdp.py": r"job       1 nodes x 2 ranks.*\n(.*\n)*steps 0 to 4: loss \d",
    "char_gpt.py": r"3 steps; held-out loss [2-5]\.",
}


def commands(name: str) -> list[list[str]]:
    """The commands of an example's docstring that start it, as words."""
    lines = (ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or "").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("    ") and f"examples/{name}" in line]


def split(command: list[str]) -> tuple[int, list[str]]:
    """How many processes a command starts, and what each of them is."""
    if command[0] == "torchrun":
        assert command[1] == "--nproc-per-node"
        return int(command[2]), command[3:]
    assert command[0] == "python"
    return 1, command[1:]


def play(rank: int, words: list[str], folder: str) -> str:
    """Run a script or ``-m module`` as Python would; what it printed."""
    os.chdir(folder)
    printed = Path(folder) / f"printed{rank}.txt"
    with printed.open("w") as file, contextlib.redirect_stdout(file):
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                sys.path.insert(0, str(EXAMPLES))
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return printed.read_text()


def run(name: str, command: list[str], folder: Path) -> str:
    """What the ranks of one command printed."""
    num_ranks, words = split(command)
    words = [str(ROOT / word) if word == f"examples/{name}" else word for word in words]
    words += [] if "make" in words else SMALL[name].split()
    # The first to run after a change of the kernels compiles them.
    outcomes = run_ranks(play, num_ranks, words, str(folder), init=False, deadline_s=300)
    return "".join(outcome.value for outcome in outcomes)


def test_every_example_is_here() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(SMALL) == sorted(SAYS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALL)
def test_example(name: str, tmp_path: Path) -> None:
    if name == "log_to_tensorboard.py" and importlib.util.find_spec("tensorboard") is None:
        pytest.skip("TensorBoard is not installed")
    found = [command for command in commands(name) if command[0] != "mpirun"]
    assert found
    printed = "".join(run(name, command, tmp_path) for command in found)
    assert re.search(SAYS[name], printed), printed
    if name == "hsdp.py":
        assert re.search(r"steps 4 to 8: loss \d", run(name, found[0], tmp_path))
    if name == "ddp.py":  # once more, from the checkpoint
        assert re.search(r"steps 8 to 16: loss \d", run(name, found[0], tmp_path))
        (tmp_path / "build" / "ddp" / "rank1.pt").unlink()
        with pytest.raises(RanksFailed, match=r"rank 0: .* is not of these ranks; steps by rank: \[16, None\]"):
            run(name, found[0], tmp_path)
    if name == "log_to_tensorboard.py":
        assert list((tmp_path / "build" / "tensorboard").glob("events.out.*"))
