"""What holds for every test: what was loaded to begin with is kept out of the garbage collector.

PyTorch, Numba and SciPy leave hundreds of thousands of objects behind that live as long as the process.
"""

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
