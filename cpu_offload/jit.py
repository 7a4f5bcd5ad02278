"""How kernels and their vector operations are compiled, in one place.

Kernels are annotated like other functions, but a type checker cannot follow Numba's arithmetic (a uint32 and a Python
integer, say): what they return is a ``Scalar``.

Numba's cache on disk notices a change of the file that a kernel is in, not of helpers and constants in other files
that were compiled into it, and would go on running the old code. The cache here takes a digest of all sources that
kernels may draw on into its keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import caching
from numba.extending import intrinsic

import espresso.compressors

Scalar = Any
"""A number as Numba sees it: of the arrays' dtype, of a fixed width, or a truth value."""

operation: Any = intrinsic
"""A function that writes LLVM itself."""

literal_operation: Any = intrinsic(prefer_literal=True)
"""The same, for operations that take constants."""


_compile: Any = njit  # its annotations do not have the option that kernels need


def kernel(function: Callable[..., Any]) -> Any:
    """Compile single-threaded, without the interpreter lock, cached on disk per combination of argument types.

    Without reference counts (``_nrt``): Numba would count references to arrays around calls and slices, with locked
    instructions, and each of those waits for all streamed stores (scaled sign ran at a third of its rate). So kernels
    cannot allocate: they take buffers as arguments, or small ones from :func:`espresso.cpu_offload.intrinsics.room`.
    """
    dispatcher: Any = _compile(nogil=True, cache=True, _nrt=False)(function)
    dispatcher._cache = _KernelCache(function)
    return dispatcher


def source_digest() -> str:
    """A digest of this package's sources and of those of ``espresso.compressors``, whose constants kernels use."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in (Path(__file__).parent, Path(espresso.compressors.__file__).parent):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


_DIGEST = source_digest()


_Cache: Any = caching.FunctionCache


class _KernelCache(_Cache):  # type: ignore[misc]  # Numba's classes are untyped
    """Numba's cache, keyed by the digest as well. A test edits a helper and sees that Numba still asks for this key."""

    def _index_key(self, *arguments: Any) -> tuple[Any, ...]:
        key: tuple[Any, ...] = super()._index_key(*arguments)
        return (*key, _DIGEST)
