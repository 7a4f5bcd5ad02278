"""Operations that Numba does not offer, as target-independent LLVM: any machine runs them.

- the number of trailing zeros;
- streaming stores, which spare the read of the line that they overwrite, the fence that ends them, and addresses.
"""

# Numba inspects these signatures: no postponed annotations here.
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

STREAM_BYTES = 64
"""Streaming stores write whole, aligned cache lines."""


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any, vector: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


@intrinsic
def trailing_zeros(typing_context: Any, value: Any) -> Any:
    """How many low bits of a nonzero 64-bit number are zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.int64(types.uint64), generate


@intrinsic
def stream_line(typing_context: Any, target: Any, at: Any, source: Any, start: Any) -> Any:
    """Copy one cache line past the caches; ``target[at]`` lies at its beginning, ``source`` has the same dtype."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, other, begin = arguments
        number = context.get_value_type(signature.args[0].dtype)
        size = signature.args[0].dtype.bitwidth // 8
        vector = ir.VectorType(number, STREAM_BYTES // size)
        loaded = builder.load(_pointer(context, builder, signature.args[2], other, begin, vector))
        loaded.align = size
        store = builder.store(loaded, _pointer(context, builder, signature.args[0], array, index, vector))
        store.align = STREAM_BYTES
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), generate


@intrinsic
def fence(typing_context: Any) -> Any:
    """Make streamed lines visible to other threads before what follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def address(typing_context: Any, array: Any) -> Any:
    """The address of an array's first element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), generate
