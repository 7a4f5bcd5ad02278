"""How kernels and their vector operations are compiled, in one place.

Kernels are annotated like other functions, but a type checker cannot follow Numba's arithmetic (a uint32 and a Python
integer, say): what they return is a ``Scalar``.
"""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.extending import intrinsic

Scalar = Any
"""A number as Numba sees it: of the arrays' dtype, of a fixed width, or a truth value."""

kernel: Any = njit(nogil=True, cache=True)
"""Single-threaded, without the interpreter lock, cached on disk for each combination of argument types."""

operation: Any = intrinsic
"""A function that writes LLVM itself."""
