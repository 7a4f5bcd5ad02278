"""What holds for every test: what was loaded to begin with is kept out of the garbage collector.

PyTorch, Numba and SciPy leave hundreds of thousands of objects behind that live as long as the process.

Files with slow tests come first, so that no worker begins one when the others are done.
"""

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
