"""How the search's kernels are compiled, in one place.

Numba's cache on disk notices a change of the file that a kernel is in, not of helpers and constants in other files
that were compiled into it, and would go on running the old code. The cache here takes a digest of every
``*_kernels.py`` of this package into its keys, so helpers and constants of kernels live in such files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import caching
from numba.core.registry import CPUDispatcher

ROOT = Path(__file__).parents[1]
ROOMS = ("model", "search")
"""Where kernels and their helpers are; a test finds every ``*_kernels.py`` that uses this module in one of them."""


def source_digest() -> str:
    """A digest of the sources that kernels draw on."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for room in ROOMS for path in (ROOT / room).glob("*_kernels.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


_DIGEST = source_digest()
_Cache: Any = caching.FunctionCache
_Dispatcher: Any = CPUDispatcher


class _KernelCache(_Cache):  # type: ignore[misc]  # Numba's classes are untyped
    """Numba's cache, keyed by the digest as well."""

    def _index_key(self, *arguments: Any) -> tuple[Any, ...]:
        key: tuple[Any, ...] = super()._index_key(*arguments)
        return (*key, _DIGEST)


class _InnerKernel(_Dispatcher):  # type: ignore[misc]
    """What only other kernels call; Python, which has no way into the compiled code, gets the function itself."""

    def __call__(self, *arguments: Any) -> Any:
        return self.py_func(*arguments)


# (Numba compiles a wrapper for calls from C too, unless told; nobody calls these from there.)
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "no_cfunc_wrapper": True}
_SUMS = {"reassoc", "contract"}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile without the interpreter lock, cached on disk; division by zero is infinity, as in NumPy."""
    return _compiled(function, fastmath=False)


def inner_kernel(function: Callable[..., Any]) -> Any:
    """As :func:`kernel`, for what only other kernels call: to Python it stays the function that it is."""
    return _inner(function, fastmath=False)


def sum_kernel(function: Callable[..., Any]) -> Any:
    """As :func:`kernel`, for sums whose order does not matter: they may be reordered, and so use vector units."""
    return _compiled(function, fastmath=_SUMS)


def inner_sum_kernel(function: Callable[..., Any]) -> Any:
    """:func:`sum_kernel` and :func:`inner_kernel` in one."""
    return _inner(function, fastmath=_SUMS)


def _compiled(function: Callable[..., Any], fastmath: bool | set[str]) -> Any:
    dispatcher: Any = njit(nogil=True, cache=True, fastmath=fastmath, **_OPTIONS)(function)
    dispatcher._cache = _KernelCache(function)
    return dispatcher


def _inner(function: Callable[..., Any], fastmath: bool | set[str]) -> Any:
    options = {"nopython": True, "fastmath": fastmath, "no_cpython_wrapper": True, **_OPTIONS}
    dispatcher: Any = _InnerKernel(function, targetoptions=options)
    dispatcher._cache = _KernelCache(function)
    return dispatcher


__all__ = ["inner_kernel", "inner_sum_kernel", "kernel", "source_digest", "sum_kernel"]
