"""What holds for every test: how it is scheduled, and what the garbage collector leaves alone.

PyTorch, Numba and SciPy leave hundreds of thousands of objects behind that live as long as the process.

Files with slow tests come first, and those with many, so that no worker begins one when the others are done.
"""

import atexit
import gc
import os
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.python_path import python_path

LONG = frozenset(
    f"test_{name}.py"
    for name in (
        "conservation", "device_executor", "docs", "guard", "hook_modes", "measuring", "momentum", "nonfinite",
        "optim_exchange", "parameter_server",
    )
)  # fmt: skip
"""Files that take long though none of their tests does."""

gc.disable()  # until all is loaded and collected
atexit.register(gc.freeze)
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).with_name("interpreters")), python_path()])
# More threads than cores: under the default policy who is woken up takes the core of who woke it, which often holds a
# lock of Gloo's, for which its loop then spins. Processes and threads inherit this.
if hasattr(os, "SCHED_BATCH"):
    with suppress(OSError):  # some containers forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = {item.path for item in items if item.path.name in LONG or item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 10)  # Python's own; interpreters/sitecustomize.py
    gc.enable()
