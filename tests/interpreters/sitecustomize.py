"""For the two hundred interpreters that tests start afresh: what PyTorch leaves behind is not searched for garbage.

Loading it makes a million objects that live as long as the process. Collecting among them while it loads and once more
at the exit is two fifths of the processor time of a process that does little else (3.7 s and 2.2, 2026-11-23).
Interpreters whose exit is what a test is about (``tests/test_lifecycle.py``) do without this.
"""

import atexit
import gc

gc.set_threshold(1_000_000)
atexit.register(gc.freeze)  # registered first, so it is called last
