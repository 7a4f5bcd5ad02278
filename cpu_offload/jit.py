"""How kernels and their vector operations are compiled, in one place.

Kernels are annotated like other functions, but a type checker cannot follow Numba's arithmetic (a uint32 and a Python
integer, say): what they return is a ``Scalar``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.extending import intrinsic

import espresso.compressors
from espresso.jit.kernels import digest_of, keep

Scalar = Any
"""A number as Numba sees it: of the arrays' dtype, of a fixed width, or a truth value."""

operation: Any = intrinsic
"""A function that writes LLVM itself."""

literal_operation: Any = intrinsic(prefer_literal=True)
"""The same, for operations that take constants."""


_compile: Any = njit  # its annotations do not have the option that kernels need


def kernel(function: Callable[..., Any]) -> Any:
    """Compile single-threaded, without the interpreter lock, kept on disk per combination of argument types.

    Without reference counts (``_nrt``): Numba would count references to arrays around calls and slices, with locked
    instructions, and each of those waits for all streamed stores (scaled sign ran at a third of its rate). So kernels
    cannot allocate: they take buffers as arguments, or small ones from :func:`espresso.cpu_offload.intrinsics.room`.
    """
    return keep(_compile(nogil=True, _nrt=False)(function), _DIGEST)


def sum_kernel(function: Callable[..., Any]) -> Any:
    """Compile a sum whose order is the compiler's choice: only for a rank's own products."""
    return keep(_compile(nogil=True, fastmath={"reassoc", "contract", "nsz"})(function), _DIGEST)


def source_digest() -> str:
    """A digest of this package's sources and of those of ``espresso.compressors``, whose constants kernels use."""
    folders = (Path(__file__).parent, Path(espresso.compressors.__file__).parent)
    return digest_of(path for folder in folders for path in folder.glob("*.py"))


_DIGEST = source_digest()
