"""Numba's cache on disk for our kernels: never stale, and never a reason to fail.

Numba notices a change of the file that a kernel is in, not of helpers and constants in other files that were compiled
into it, and would go on running the old code. The keys here hold a digest of all sources that kernels may draw on.

Where kernels are kept, the first that can be written::

    $NUMBA_CACHE_DIR, __pycache__ beside the source, the user's cache folder, espresso-<uid> in the temporary folder

Where none can, they are compiled in every process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba.core import caching

from espresso.jit.folders import private_folder, warn_once
from espresso.jit.turns import Turn

_REMEDY = "set NUMBA_CACHE_DIR to a folder that can be written"

_only_kept = False

_Impl: Any = caching.CompileResultCacheImpl
_Cache: Any = caching.FunctionCache
_Beside: Any = _Impl._locator_classes[1]


def digest_of(paths: Iterable[Path]) -> str:
    """A digest of source files, names included."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def keep(dispatcher: Any, digest: str) -> Any:
    """Let Numba keep what a dispatcher compiles, under keys that hold ``digest``. Returns the dispatcher."""
    try:
        dispatcher._cache = _KernelCache(dispatcher.py_func, digest)
    except (RuntimeError, OSError):  # no folder to keep it in
        warn_once(f"no folder for compiled kernels can be written, so every process compiles them; {_REMEDY}")
    return dispatcher


class NotKeptError(Exception):
    """A kernel would have to be compiled, where only those that are kept may be used."""


@contextmanager
def only_kept() -> Iterator[None]:
    """In here a kernel that is not on disk is not compiled, in no thread of this process.

    Where there is no folder for kernels nothing is ever kept, and they are compiled all the same.

    Raises:
        NotKeptError: by the call of such a kernel.
    """
    global _only_kept
    _only_kept = True
    try:
        yield
    finally:
        _only_kept = False


class _Temporary(_Beside):  # type: ignore[misc]  # Numba's classes are untyped
    """Kernels in a folder of this user's in the temporary one."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = str(private_folder() / self.get_suitable_cache_subpath(file))

    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        try:
            found = super().from_function(function, file)
        except OSError:
            return None
        if found is not None:
            warn_once(f"compiled kernels are kept in {private_folder()}; {_REMEDY}")
        return found


def _locators() -> list[Any]:
    """Numba's own places and ours. Without a home, Numba would take a folder called ``~`` in the current one."""
    has_home = "XDG_CACHE_HOME" in os.environ or os.path.isabs(os.path.expanduser("~"))
    return [kind for kind in _Impl._locator_classes if has_home or "UserWide" not in kind.__name__] + [_Temporary]


class _Places(_Impl):  # type: ignore[misc]
    _locator_classes = _locators()


class _KernelCache(_Cache):  # type: ignore[misc]
    """Numba's cache, keyed by the digest as well. What cannot be read or written is compiled."""

    _impl_class = _Places

    def __init__(self, function: Any, digest: str) -> None:
        self._digest = digest
        super().__init__(function)
        self._turn = Turn(self.cache_path, self._impl.filename_base)

    def _index_key(self, *arguments: Any) -> tuple[Any, ...]:
        key: tuple[Any, ...] = super()._index_key(*arguments)
        return (*key, self._digest)

    def load_overload(self, *arguments: Any) -> Any:
        found = self._read(*arguments)
        if found is None and _only_kept:
            raise NotKeptError(f"{self.cache_path} does not have {self._name}")
        if found is None and self._turn.take():
            found = self._read(*arguments)
            if found is not None:
                self._turn.give_back()
        return found

    def _read(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)
        except Exception as error:  # a damaged file raises whatever unpickling it runs into
            self._warn(error)
            return None

    def save_overload(self, *arguments: Any) -> None:
        try:
            super().save_overload(*arguments)
        except Exception as error:
            self._warn(error)
        finally:
            self._turn.give_back()

    def _warn(self, error: Exception) -> None:
        warn_once(f"a kernel cannot be kept in {self.cache_path}, so it is compiled each time ({error!r}); {_REMEDY}")
