"""Processes that share a folder of kernels compile each of them once: the others wait, and read what was left.

Without it every process of a host that starts with the rest compiles the same kernels, and of two that keep different
signatures of one kernel at the same time the first one's is lost.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

PATIENCE_S = 30.0
"""For a kernel that somebody else compiles; a process that was stopped meanwhile must not hold up the others."""

_POLL_S = 0.02


class Turn:
    """The turn to compile one kernel, among processes. It ends with the process, whatever becomes of that.

    Numba compiles one kernel at a time in a process, so that no two threads ask for the same turn.

    Args:
        folder: where it is kept.
        name: of the kernel, in the folder.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._place, self._file = folder, zlib.crc32(name.encode()), -1

    def take(self) -> bool:
        """Wait for it; whether somebody else had it, and may have left the kernel on disk."""
        until = time.monotonic() + PATIENCE_S
        try:
            self._file = _lock_file(self._folder)
            if self._try():
                return False
            while time.monotonic() < until and not self._try():
                time.sleep(_POLL_S)
        except OSError:  # no such folder, or a file system without locks
            return False
        return True

    def give_back(self) -> None:
        """Let the next one compile."""
        if self._file >= 0:
            with suppress(OSError):  # a file system without locks refuses this too
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place)

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place)
        except BlockingIOError:
            return False
        return True


@cache
def _lock_file(folder: str) -> int:
    """One for all kernels of a folder, open as long as the process lives: closing it anywhere would end all turns."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return os.open(Path(folder) / "espresso.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
