"""Vector operations of the stochastic quantizers. Formulas and draws: :mod:`espresso.compressors.levels`."""

# Numba inspects the signatures of operations: no postponed annotations here.
from typing import Any

from llvmlite import ir
from numba import types

from espresso.cpu_offload.jit import operation
from espresso.cpu_offload.vectors import GROUP, SUM_GROUPS, GroupBuilder, each_group, local, signature_of, splat

ROW = 64
"""Elements that 16 counters of Philox serve: four words each."""

_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_HALF = 8
_LOW = (1 << 32) - 1


@operation
def fill_draws(typing_context: Any, key: Any, row: Any, draws: Any) -> Any:
    """``draws[:64]`` (uint32) = the words of Philox4x32-10 for the elements from 64 * row on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        key, row, draws = arguments
        wide, narrow = ir.IntType(64), ir.IntType(32)
        vector = ir.VectorType(wide, _HALF)
        data = context.make_array(signature.args[2])(context, builder, draws).data
        low_mask, half_width = (ir.Constant(vector, [value] * _HALF) for value in (_LOW, 32))
        keys = [builder.and_(key, ir.Constant(wide, _LOW)), builder.lshr(key, ir.Constant(wide, 32))]
        for half in range(GROUP // _HALF):
            first = builder.mul(row, ir.Constant(wide, GROUP))
            lanes = ir.Constant(vector, [half * _HALF + lane for lane in range(_HALF)])
            counter = builder.add(splat(builder, first, vector), lanes)
            zero = ir.Constant(vector, None)
            words = [builder.and_(counter, low_mask), builder.lshr(counter, half_width), zero, zero]
            for turn in range(_ROUNDS):
                # Only the low halves of the 64-bit lanes mean anything; products are of low halves.
                products = [
                    builder.mul(
                        builder.and_(words[2 * side], low_mask),
                        ir.Constant(vector, [_MULTIPLY[side]] * _HALF),
                    )
                    for side in range(2)
                ]
                steps = (ir.Constant(wide, turn * _WEYL[side]) for side in range(2))
                turned = [splat(builder, builder.add(*pair), vector) for pair in zip(keys, steps, strict=True)]
                high = [builder.lshr(product, half_width) for product in products]
                words = [
                    builder.xor(builder.xor(high[1], words[1]), turned[0]),
                    products[1],
                    builder.xor(builder.xor(high[0], words[3]), turned[1]),
                    products[0],
                ]
            out = ir.VectorType(narrow, _HALF)
            for number, word in enumerate(words):
                place = builder.gep(data, [ir.Constant(wide, GROUP * number + _HALF * half)])
                place = builder.bitcast(place, out.as_pointer())
                builder.store(builder.trunc(word, out), place).align = 4
        return context.get_dummy_value()

    return types.void(types.uint64, types.intp, draws), generate


@operation
def sum_squares(typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, num: Any) -> Any:
    """The sum of q * q over ``num`` elements, a multiple of 16, in float64; lane = element mod 64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        group = GroupBuilder(context, builder, signature.args[0].dtype)
        wide = ir.VectorType(ir.DoubleType(), GROUP)
        lanes = [local(builder, ir.Constant(wide, None)) for _ in range(SUM_GROUPS)]

        def add(q: Any, lane: int) -> None:
            value = builder.fpext(q, wide) if group.size == 4 else q
            builder.store(builder.fadd(builder.load(lanes[lane]), builder.fmul(value, value)), lanes[lane])

        each_group(group, builder, signature.args, arguments, add)
        return group.sum([builder.load(lane) for lane in lanes], widen=False)

    return signature_of(types.float64, source, old, types.intp), generate


class _Level:
    """What linear and natural rounding share: v, the draw, and the code."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.group = GroupBuilder(context, builder, signature.args[0].dtype)
        self.ir, self.kinds, self.arguments = builder, signature.args, arguments
        self.context = context
        self.is_single = self.group.size == 4
        self.whole = ir.VectorType(ir.IntType(32), GROUP)
        self.q = self.group.q(self.kinds, arguments)
        inverse, cap = (self.group.splat(value, self.group.numbers) for value in arguments[5:7])
        v = builder.fmul(self.group.magnitude(self.q), inverse)
        self.v = builder.select(builder.fcmp_ordered(">", v, cap), cap, v)
        place = self.group.pointer(self.kinds[7], arguments[7], arguments[8], self.whole)
        self.draw = builder.load(place)
        self.draw.align = 4

    def real(self, value: float) -> Any:
        return ir.Constant(self.group.numbers, [value] * GROUP)

    def same(self, value: int) -> Any:
        return ir.Constant(self.whole, [value] * GROUP)

    def uniform(self) -> Any:
        """u in [0, 1)."""
        if self.is_single:
            short = self.ir.lshr(self.draw, self.same(8))
            return self.ir.fmul(self.ir.sitofp(short, self.group.numbers), self.real(2.0**-24))
        long = self.ir.zext(self.draw, self.group.bits)
        return self.ir.fmul(self.ir.sitofp(long, self.group.numbers), self.real(2.0**-32))

    def store(self, level: Any) -> Any:
        """Put the sign in front and write a byte each."""
        builder, arguments = self.ir, self.arguments
        negative = builder.fcmp_ordered("<", self.q, self.real(0.0))
        sign = self.group.splat(builder.trunc(arguments[11], ir.IntType(32)), self.whole)
        code = builder.or_(level, builder.select(negative, sign, self.same(0)))
        bytes_ = ir.VectorType(ir.IntType(8), GROUP)
        place = self.group.pointer(self.kinds[9], arguments[9], arguments[10], bytes_)
        builder.store(builder.trunc(code, bytes_), place).align = 1
        return self.context.get_dummy_value()


@operation
def linear_group(
    typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, inverse: Any, cap: Any, draws: Any,
    draw: Any, codes: Any, code: Any, sign: Any,
) -> Any:  # fmt: skip
    """``codes[code:][:16]``: levels of v = min(|q| * inverse, cap), rounded by ``draws[draw:]``, with their signs."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        level = _Level(context, builder, signature, arguments)
        whole = builder.fptosi(level.v, level.whole)
        rest = builder.fsub(level.v, builder.sitofp(whole, level.group.numbers))
        up = builder.fcmp_ordered("<", level.uniform(), rest)
        return level.store(builder.add(whole, builder.zext(up, level.whole)))

    number = source.dtype
    more = (number, number, draws, types.intp, codes, types.intp, types.intp)
    return signature_of(types.void, source, old, *more), generate


@operation
def natural_group(
    typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, inverse: Any, cap: Any, draws: Any,
    draw: Any, codes: Any, code: Any, sign: Any, smallest: Any, lift: Any, base: Any,
) -> Any:  # fmt: skip
    """The same for powers of two: level 1 is ``smallest`` = 1 / ``lift``, and ``base`` its biased exponent less 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        level = _Level(context, builder, signature, arguments)
        group = level.group
        smallest, lift = (group.splat(value, group.numbers) for value in arguments[12:14])
        fraction = 23 if level.is_single else 52
        width = ir.Constant(group.bits, [fraction] * GROUP)
        if level.is_single:
            noise = builder.lshr(level.draw, level.same(9))
        else:
            noise = builder.shl(builder.zext(level.draw, group.bits), ir.Constant(group.bits, [20] * GROUP))
        exponent = builder.lshr(builder.add(builder.bitcast(level.v, group.bits), noise), width)
        exponent = exponent if level.is_single else builder.trunc(exponent, level.whole)
        base = group.splat(builder.trunc(arguments[14], ir.IntType(32)), level.whole)
        power = builder.sub(exponent, base)
        up = builder.fcmp_ordered("<", level.uniform(), builder.fmul(level.v, lift))
        is_small = builder.fcmp_ordered("<", level.v, smallest)
        return level.store(builder.select(is_small, builder.zext(up, level.whole), power))

    number = source.dtype
    more = (number, number, draws, types.intp, codes, types.intp, types.intp, number, number, types.intp)
    return signature_of(types.void, source, old, *more), generate


_PLANE = 32
_BYTES = ir.VectorType(ir.IntType(8), _PLANE)


def _code_bytes(context: Any, builder: Any, kind: Any, codes: Any, at: Any) -> Any:
    data = context.make_array(kind)(context, builder, codes).data
    return builder.bitcast(builder.gep(data, [at]), _BYTES.as_pointer())


@operation
def plane_of(typing_context: Any, codes: Any, at: Any, bit: Any) -> Any:
    """32 bits: bit ``bit`` (a value such as 4, not a position) of each of ``codes[at:][:32]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = builder.load(_code_bytes(context, builder, signature.args[0], *arguments[:2]))
        loaded.align = 1
        some = builder.and_(loaded, splat(builder, arguments[2], _BYTES))
        return builder.bitcast(builder.icmp_unsigned("!=", some, ir.Constant(_BYTES, None)), ir.IntType(_PLANE))

    return types.uint32(codes, types.intp, types.uint8), generate


@operation
def add_plane(typing_context: Any, plane: Any, codes: Any, at: Any, bit: Any) -> Any:
    """The reverse: ``codes[at:][:32] |= bit`` where ``plane`` has a bit."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _code_bytes(context, builder, signature.args[1], *arguments[1:3])
        loaded = builder.load(place)
        loaded.align = 1
        flags = builder.bitcast(arguments[0], ir.VectorType(ir.IntType(1), _PLANE))
        more = builder.select(flags, splat(builder, arguments[3], _BYTES), ir.Constant(_BYTES, None))
        builder.store(builder.or_(loaded, more), place).align = 1
        return context.get_dummy_value()

    return types.void(types.uint32, codes, types.intp, types.uint8), generate
