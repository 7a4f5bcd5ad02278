"""Memory that was freed stays with the process: gradients are freed and made anew in every step.

glibc gives it back to the kernel where much of it lies on top of the heap, or where a block was large, and gets it back
page by page: 10 000 faults a step for 40 MB of gradients. Whether it does depends on what happens to lie above, so two
steps that compute the same differ by that, and predictions with them.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_ON_TOP = (1 << 31) - 1
_LARGEST_BLOCK = 32 << 20
"""glibc takes no more. Larger blocks still come from the kernel, and go back to it."""

_ASKED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have glibc keep up to 2 GiB of freed blocks of up to 32 MiB; whether it does now.

    It leaves a process alone that was started with one of glibc's own variables for this.
    """
    if _is_told():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return bool(mallopt and mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_TRIM_THRESHOLD, _MOST_ON_TOP))


def give_freed_memory_back() -> None:
    """Once: what a job has needed that it will not need again, as strategies that were tried."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and not _is_told():
        trim(ctypes.c_size_t(0))


def _is_told() -> bool:
    return any(os.environ.get(name) for name in _ASKED)
