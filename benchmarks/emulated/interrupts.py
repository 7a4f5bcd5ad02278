"""What SIGINT and SIGTERM may do: end a block by an exception, and never disturb the cleaning up after it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def termination_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that ``finally`` blocks run; SIGINT raises already."""
    if not _in_main_thread():
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block is left: impatient people press Ctrl-C twice.

    Handlers and not a signal mask: a mask is the thread's own, and any other thread would take the signal.
    """
    if not _in_main_thread():
        yield
        return
    caught: list[int] = []

    def remember(signum: int, frame: FrameType | None) -> None:
        caught.append(signum)

    before = {sign: signal.signal(sign, remember) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
    if caught:
        signal.raise_signal(caught[0])
