"""How kernels and their vector operations are compiled, in one place, and scalar operations that Numba does not offer.

Kernels are annotated like other functions, but a type checker cannot follow Numba's arithmetic (a uint32 and a Python
integer, say): what they return is a ``Scalar``. Operations are target-independent LLVM: any machine runs them.
"""

# Numba inspects the signatures of operations: no postponed annotations here.

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

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
    cannot allocate: they take buffers as arguments, or small ones from :func:`room`.
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


_on_stack: Any = cgutils.alloca_once
_populate: Any = populate_array


@operation
def trailing_zeros(typing_context: Any, value: Any) -> Any:
    """How many low bits of a nonzero 64-bit number are zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.int64(types.uint64), generate


@operation
def fence(typing_context: Any) -> Any:
    """Make what was streamed visible to other threads before what follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@operation
def address(typing_context: Any, array: Any) -> Any:
    """The address of an array's first element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), generate


@operation
def prefetch(typing_context: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of ``array[at]``, soon to be read; an address outside the array does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        flag, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        name = "llvm.prefetch.p0i8"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        place = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        read, all_levels, is_data = (ir.Constant(flag, value) for value in (0, 3, 1))
        builder.call(function, [place, read, all_levels, is_data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@operation
def as_number(typing_context: Any, bits: Any, like: Any) -> Any:
    """The floating-point number with these bits, of the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return like(bits, like), generate


@operation
def as_type(typing_context: Any, value: Any, like: Any) -> Any:
    """The number converted to the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[0], *signature.args)

    return like(value, like), generate


@literal_operation
def room(typing_context: Any, size: Any, dtype: Any) -> Any:
    """An array of ``size`` (a constant, at most some thousands) numbers on the stack, not initialised."""
    number = dtype.dtype if isinstance(dtype, types.DType) else dtype.instance_type

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_data_type(number)
        place = _on_stack(builder, kind, size=size.literal_value)
        place.align = 64
        item, count = number.bitwidth // 8, ir.Constant(ir.IntType(64), size.literal_value)
        width = ir.Constant(ir.IntType(64), item)
        array = context.make_array(signature.return_type)(context, builder)
        _populate(array, data=place, shape=[count], strides=[width], itemsize=width, meminfo=None)
        return array._getvalue()

    return types.Array(number, 1, "C")(size, dtype), generate
