"""Scalar operations that Numba does not offer, as target-independent LLVM: any machine runs them."""

# Numba inspects these signatures: no postponed annotations here.
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from espresso.cpu_offload.jit import operation


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
