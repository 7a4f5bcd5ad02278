"""How the search's kernels are compiled, in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.registry import CPUDispatcher

from espresso.jit.kernels import digest_of, keep

ROOT = Path(__file__).parents[1]
ROOMS = ("model", "search")
"""Where kernels and their helpers are; a test finds every ``*_kernels.py`` that uses this module in one of them."""


def source_digest() -> str:
    """A digest of the sources that kernels draw on."""
    return digest_of(path for room in ROOMS for path in (ROOT / room).glob("*_kernels.py"))


_DIGEST = source_digest()
_Dispatcher: Any = CPUDispatcher


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
    return keep(njit(nogil=True, fastmath=fastmath, **_OPTIONS)(function), _DIGEST)


def _inner(function: Callable[..., Any], fastmath: bool | set[str]) -> Any:
    options = {"nopython": True, "fastmath": fastmath, "no_cpython_wrapper": True, **_OPTIONS}
    return keep(_InnerKernel(function, targetoptions=options), _DIGEST)
