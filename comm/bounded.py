"""A bound for calls that have none: the job's key-value store answers nobody while its process is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from espresso.comm.errors import EspressoError

T = TypeVar("T")


_LOOK_EVERY_S = 2.0


def within(patience_s: float, call: Callable[[], T], what: str, meanwhile: Callable[[], None] = lambda: None) -> T:
    """``call()``, waited for no longer than ``patience_s``; it runs on a thread of its own, on the same GPU.

    Args:
        meanwhile: called every two seconds of waiting.

    Raises:
        EspressoError: it did not return in time. Its thread is left to itself.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    cuda: Any = torch.cuda
    device = cuda.current_device() if cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                cuda.set_device(device)
            results.append(call())
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="espresso-bounded", daemon=True)
    thread.start()
    until = time.monotonic() + patience_s
    while thread.is_alive() and (left := until - time.monotonic()) > 0:
        thread.join(min(left, _LOOK_EVERY_S))
        if thread.is_alive():
            meanwhile()
    if errors:
        raise errors[0]
    if not results:
        raise EspressoError(
            f"{what} took longer than {patience_s:g} s: a rank does not take part, or rank 0, where the job's store"
            " runs, was stopped or cannot be reached"
        )
    return results[0]
