"""What holds for every test: what was loaded to begin with is kept out of the garbage collector.

PyTorch, Numba and SciPy leave half a million objects behind that live as long as the process; going through them took a
tenth of the time of a test run.
"""

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
