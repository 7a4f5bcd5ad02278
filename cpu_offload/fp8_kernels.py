"""Rounding to 8-bit floating point and back. Formats: :class:`espresso.compressors.blockwise.Fp8`."""

# Numba inspects the signatures of operations: no postponed annotations here.
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from espresso.compressors.base import Array
from espresso.cpu_offload.jit import kernel, operation
from espresso.cpu_offload.vectors import GROUP, GroupBuilder, signature_of

Codes = npt.NDArray[np.int8]

E4M3 = (3, 7)
E5M2 = (2, 15)
"""Bits of mantissa, bias of the exponent."""


def _make_fp8_group(format_: tuple[int, int]) -> Callable[..., Any]:
    mantissa, bias = format_

    def fp8_group(
        typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, new: Any, to: Any, inverse: Any,
        step: Any, codes: Any, code: Any, stream: Any,
    ) -> Any:  # fmt: skip
        """``codes[code:][:16]`` = q * inverse rounded to nearest even, ``new[to:][:16]`` = q - code * step.

        Normal numbers are rounded in integer arithmetic; for the others, adding a number whose last bit weighs what
        the format's last bit weighs there does it.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            group, kinds = GroupBuilder(context, builder, signature.args[0].dtype), signature.args
            fraction, own_bias = (23, 127) if group.size == 4 else (52, 1023)
            shift, lift = fraction - mantissa, 1 - bias - mantissa + fraction

            def whole(value: int) -> Any:
                return ir.Constant(group.bits, [value] * GROUP)

            def real(value: float) -> Any:
                return ir.Constant(group.numbers, [value] * GROUP)

            q = group.q(kinds, arguments)
            inverse, step = (group.splat(value, group.numbers) for value in arguments[7:9])
            size = group.magnitude(builder.fmul(q, inverse))
            bits = builder.bitcast(size, group.bits)
            odd = builder.and_(builder.lshr(bits, whole(shift)), whole(1))
            raised = builder.add(builder.add(bits, whole((1 << (shift - 1)) - 1)), odd)
            rounded = builder.lshr(raised, whole(shift))
            normal = builder.bitcast(builder.shl(rounded, whole(shift)), group.numbers)
            lifted = builder.fadd(size, real(2.0**lift))
            steps = builder.sub(builder.bitcast(lifted, group.bits), whole((own_bias + lift) << fraction))
            is_small = builder.fcmp_ordered("<", size, real(2.0 ** (1 - bias)))
            normal_code = builder.sub(rounded, whole((own_bias - bias) << mantissa))
            number = builder.select(is_small, steps, normal_code)
            value = builder.select(is_small, builder.fsub(lifted, real(2.0**lift)), normal)
            negative = builder.fcmp_ordered("<", q, real(0.0))
            number = builder.or_(number, builder.select(negative, whole(128), whole(0)))
            bytes_ = ir.VectorType(ir.IntType(8), GROUP)
            place = group.pointer(kinds[9], arguments[9], arguments[10], bytes_)
            builder.store(builder.trunc(number, bytes_), place).align = 1
            value = builder.select(negative, builder.fneg(value), value)
            residual = builder.fsub(q, builder.fmul(value, step))
            group.store(residual, kinds[5], arguments[5], arguments[6], arguments[11])
            return context.get_dummy_value()

        number = source.dtype
        more = (new, types.intp, number, number, codes, types.intp, types.boolean)
        return signature_of(types.void, source, old, *more), generate

    function: Callable[..., Any] = operation(fp8_group)
    return function


_e4m3, _e5m2 = _make_fp8_group(E4M3), _make_fp8_group(E5M2)


@kernel
def quantize_fp8(
    source: Array, at: int, scale: float, old: Array, kept: int, new: Array, to: int, num: int, inverse: float,
    step: float, codes: Codes, code: int, stream: bool, is_e5m2: bool,
) -> None:  # fmt: skip
    """Codes and residual of ``num`` elements, a multiple of a group."""
    if is_e5m2:
        for i in range(0, num, GROUP):
            _e5m2(source, at + i, scale, old, kept + i, new, to + i, inverse, step, codes, code + i, stream)
    else:
        for i in range(0, num, GROUP):
            _e4m3(source, at + i, scale, old, kept + i, new, to + i, inverse, step, codes, code + i, stream)


@kernel
def widen_fp8(codes: Codes, values: Array, is_e5m2: bool) -> None:
    """``values[i]`` = the number of ``codes[i]``, exactly."""
    mantissa, bias = E5M2 if is_e5m2 else E4M3
    shift, exponent = np.uint32(23 - mantissa), np.uint32((127 - bias) << 23)
    first_normal, smallest = np.uint32(1 << mantissa), np.float32(2.0 ** (1 - bias - mantissa))
    for i in range(len(values)):
        code = np.uint32(np.uint8(codes[i]))
        size = np.uint32(code & np.uint32(127))
        normal = np.uint32((size << shift) + exponent).view(np.float32)
        value = np.float32(size) * smallest if size < first_normal else np.float32(normal)
        values[i] = -value if code & np.uint32(128) else value
