"""Groups of 16 numbers in one operation, as target-independent LLVM vectors.

Each loads q = scale * source + old for 16 elements, does something with it and stores the residual, so that a pass
over memory is one stream of loads and stores: kernels that went block by block through a buffer (fill, work, store)
left the memory idle while they worked, and ran at half the speed. Bounds are the caller's.

Where ``stream`` is true they write the residual past the caches, which spares the read of what they overwrite; the
target must be 16-byte aligned then, and the kernel ends with ``fence``. LLVM takes the question out of loops.
"""

# Numba inspects these signatures: no postponed annotations here.
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from espresso.cpu_offload.jit import operation

GROUP = 16
STREAM_ALIGNMENT = 16
SUM_GROUPS = 4
"""Groups that are summed side by side: one alone would wait for its own last addition."""

_LANE = ir.IntType(32)
local: Any = cgutils.alloca_once_value
_tuple_of: Any = types.UniTuple
_values_of: Any = cgutils.unpack_tuple


def splat(builder: Any, scalar: Any, vector: Any) -> Any:
    """A number in all lanes of a vector type."""
    undefined = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(_LANE, 0))
    lanes = ir.Constant(ir.VectorType(_LANE, vector.count), [0] * vector.count)
    return builder.shuffle_vector(single, undefined, lanes)


class GroupBuilder:
    """Loads, stores and arithmetic on one group; arrays come as (kind, value) pairs."""

    def __init__(self, context: Any, builder: Any, number: Any) -> None:
        self.context, self.ir = context, builder
        self.numbers = ir.VectorType(context.get_value_type(number), GROUP)
        self.bits = ir.VectorType(ir.IntType(number.bitwidth), GROUP)
        self.size = number.bitwidth // 8

    def pointer(self, kind: Any, array: Any, at: Any, target: Any) -> Any:
        data = self.context.make_array(kind)(self.context, self.ir, array).data
        return self.ir.bitcast(self.ir.gep(data, [at]), target.as_pointer())

    def load(self, kind: Any, array: Any, at: Any) -> Any:
        loaded = self.ir.load(self.pointer(kind, array, at, self.numbers))
        loaded.align = self.size
        return loaded

    def store(self, value: Any, kind: Any, array: Any, at: Any, stream: Any = False) -> None:
        """Past the caches where ``stream`` holds: a truth value of the kernel, or a constant."""
        if not isinstance(stream, bool):
            with self.ir.if_else(stream) as (past, through):
                with past:
                    self.store(value, kind, array, at, True)
                with through:
                    self.store(value, kind, array, at)
        elif stream:
            lanes = STREAM_ALIGNMENT // self.size
            part = ir.VectorType(self.numbers.element, lanes)
            one = self.ir.module.add_metadata([ir.Constant(_LANE, 1)])
            for first in range(0, GROUP, lanes):
                place = self.ir.add(at, ir.Constant(at.type, first))
                stored = self.ir.store(self.part(value, first, lanes), self.pointer(kind, array, place, part))
                stored.align = STREAM_ALIGNMENT
                stored.set_metadata("nontemporal", one)
        else:
            self.ir.store(value, self.pointer(kind, array, at, self.numbers)).align = self.size

    def splat(self, scalar: Any, vector: Any) -> Any:
        return splat(self.ir, scalar, vector)

    def q(self, kinds: Any, arguments: Any) -> Any:
        """From the first five arguments: source, at, scale, old, kept."""
        source, at, scale, old, kept = arguments[:5]
        scaled = self.ir.fmul(self.load(kinds[0], source, at), self.splat(scale, self.numbers))
        return self.ir.fadd(scaled, self.load(kinds[3], old, kept))

    def kept(self, value: Any, kinds: Any, arguments: Any, gain: Any) -> Any:
        """The residual, ``gain * value + (1 - gain) * old``: the value itself, bit for bit, with a gain of 1."""
        one = ir.Constant(self.numbers.element, 1.0)
        old = self.load(kinds[3], arguments[3], arguments[4])
        part = self.ir.fmul(value, self.splat(gain, self.numbers))
        rest = self.ir.fmul(old, self.splat(self.ir.fsub(one, gain), self.numbers))
        return self.ir.select(self.ir.fcmp_ordered("==", gain, one), value, self.ir.fadd(part, rest))

    def mask(self, flags: Any) -> Any:
        return self.ir.bitcast(flags, ir.IntType(GROUP))

    def magnitude(self, value: Any) -> Any:
        name = f"llvm.fabs.v{GROUP}f{8 * self.size}"
        kind = ir.FunctionType(self.numbers, [self.numbers])
        function = self.ir.module.globals.get(name) or ir.Function(self.ir.module, kind, name)
        return self.ir.call(function, [value])

    def sum(self, groups: list[Any], *, widen: bool = True) -> Any:
        """The sum in float64 of a power of two of groups, by halving; unless they are in float64, ``widen`` them."""
        wide = ir.VectorType(ir.DoubleType(), GROUP)
        groups = [self.ir.fpext(group, wide) if widen and self.size == 4 else group for group in groups]
        while len(groups) > 1:
            half = len(groups) // 2
            groups = [self.ir.fadd(low, high) for low, high in zip(groups, groups[half:], strict=False)]
        total, lanes = groups[0], GROUP
        while lanes > 1:
            lanes //= 2
            total = self.ir.fadd(self.part(total, 0, lanes), self.part(total, lanes, lanes))
        return self.ir.extract_element(total, ir.Constant(_LANE, 0))

    def part(self, value: Any, first: int, lanes: int) -> Any:
        order = ir.Constant(ir.VectorType(_LANE, lanes), list(range(first, first + lanes)))
        return self.ir.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), order)


def signature_of(result: Any, source: Any, old: Any, *more: Any) -> Any:
    """Of an operation whose arguments begin with what q is made of."""
    return result(source, types.intp, source.dtype, old, types.intp, *more)


@operation
def add_magnitudes(
    typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, lanes: Any, lane: Any
) -> Any:
    """``lanes[lane:][:16] += |q|``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        group, kinds = GroupBuilder(context, builder, signature.args[0].dtype), signature.args
        q = group.q(kinds, arguments)
        total = builder.fadd(group.load(kinds[5], arguments[5], arguments[6]), group.magnitude(q))
        group.store(total, kinds[5], arguments[5], arguments[6])
        return context.get_dummy_value()

    return signature_of(types.void, source, old, lanes, types.intp), generate


def each_group(group: GroupBuilder, builder: Any, kinds: Any, arguments: Any, add: Callable[[Any, int], None]) -> None:
    """Call ``add(q, lane)`` for every group of ``num`` elements (the sixth argument), ``lane`` = group mod 4."""
    source, at, scale, old, kept, num = arguments[:6]
    index = num.type

    def add_at(first: Any, lane: int) -> None:
        shift = builder.add(first, ir.Constant(index, GROUP * lane))
        add(group.q(kinds, [source, builder.add(at, shift), scale, old, builder.add(kept, shift)]), lane)

    width = GROUP * SUM_GROUPS
    rows = builder.and_(num, ir.Constant(index, -width))
    begin, step = ir.Constant(index, 0), ir.Constant(index, width)
    with cgutils.for_range_slice(builder, begin, rows, step, intp=index) as (first, _):
        for lane in range(SUM_GROUPS):
            add_at(first, lane)
    rest = builder.sub(num, rows)
    for lane in range(SUM_GROUPS - 1):
        with builder.if_then(builder.icmp_signed(">", rest, ir.Constant(index, GROUP * lane))):
            add_at(rows, lane)


@operation
def sum_magnitudes(typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, num: Any) -> Any:
    """The sum of |q| over ``num`` elements, a multiple of 16, as float64; lane = element mod 64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        group = GroupBuilder(context, builder, signature.args[0].dtype)
        zero = ir.Constant(group.numbers, None)
        lanes = [local(builder, zero) for _ in range(SUM_GROUPS)]  # LLVM keeps them in registers

        def add(q: Any, lane: int) -> None:
            builder.store(builder.fadd(builder.load(lanes[lane]), group.magnitude(q)), lanes[lane])

        each_group(group, builder, signature.args, arguments, add)
        return group.sum([builder.load(lane) for lane in lanes])

    return signature_of(types.float64, source, old, types.intp), generate


def sum_split(context: Any, builder: Any, signature: Any, arguments: Any, split: Callable[[Any, Any], Any]) -> Any:
    """Two sums and a count: ``split(group, q)`` says what a group adds to either sum, and which lanes count."""
    group = GroupBuilder(context, builder, signature.args[0].dtype)
    zero, wide = ir.Constant(group.numbers, None), ir.IntType(64)
    sums = [[local(builder, zero) for _ in range(SUM_GROUPS)] for _ in range(2)]
    count = local(builder, ir.Constant(wide, 0))

    def add(q: Any, lane: int) -> None:
        *values, counted = split(group, q)
        for lanes, value in zip(sums, values, strict=True):
            builder.store(builder.fadd(builder.load(lanes[lane]), value), lanes[lane])
        found = builder.zext(builder.ctpop(group.mask(counted)), wide)
        builder.store(builder.add(builder.load(count), found), count)

    each_group(group, builder, signature.args, arguments, add)
    totals = [group.sum([builder.load(lane) for lane in lanes]) for lanes in sums]
    number = builder.sitofp(builder.load(count), ir.DoubleType())
    return context.make_tuple(builder, signature.return_type, [*totals, number])


@operation
def sum_sides(typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, num: Any) -> Any:
    """The sums of max(q, 0) and of max(-q, 0), as :func:`sum_magnitudes`, and how many q are negative."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def sides(group: Any, q: Any) -> Any:
            zero = ir.Constant(group.numbers, None)
            negative = builder.fcmp_ordered("<", q, zero)
            return builder.select(negative, zero, q), builder.select(negative, builder.fneg(q), zero), negative

        return sum_split(context, builder, signature, arguments, sides)

    return signature_of(_tuple_of(types.float64, 3), source, old, types.intp), generate


@operation
def sum_parts(typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, num: Any, mean: Any) -> Any:
    """The sums of the |q| up to ``mean`` and of those above, as :func:`sum_magnitudes`, and how many are above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def parts(group: Any, q: Any) -> Any:
            zero, size = ir.Constant(group.numbers, None), group.magnitude(q)
            above = builder.fcmp_ordered(">", size, group.splat(arguments[6], group.numbers))
            return builder.select(above, zero, size), builder.select(above, size, zero), above

        return sum_split(context, builder, signature, arguments, parts)

    return signature_of(_tuple_of(types.float64, 3), source, old, types.intp, source.dtype), generate


@operation
def largest(
    typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, num: Any, magnitude: Any
) -> Any:
    """The largest |q| of ``num`` elements, a multiple of 16, as bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        group = GroupBuilder(context, builder, signature.args[0].dtype)
        mask = group.splat(arguments[6], group.bits)
        tops = [local(builder, ir.Constant(group.bits, None)) for _ in range(SUM_GROUPS)]

        def larger(left: Any, right: Any) -> Any:
            return builder.select(builder.icmp_unsigned(">", left, right), left, right)

        def add(q: Any, lane: int) -> None:
            sizes = builder.and_(builder.bitcast(q, group.bits), mask)
            builder.store(larger(sizes, builder.load(tops[lane])), tops[lane])

        each_group(group, builder, signature.args, arguments, add)
        low, high, *rest = [builder.load(top) for top in tops]
        top, lanes = larger(larger(low, high), larger(*rest)), GROUP
        while lanes > 1:
            lanes //= 2
            top = larger(group.part(top, 0, lanes), group.part(top, lanes, lanes))
        return builder.extract_element(top, ir.Constant(_LANE, 0))

    bits = _bits_of(source.dtype)
    return signature_of(bits, source, old, types.intp, bits), generate


def _bits_of(number: Any) -> Any:
    return types.uint32 if number.bitwidth == 32 else types.uint64


@operation
def sign_group(
    typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, new: Any, to: Any, plus: Any,
    minus: Any, gain: Any, stream: Any,
) -> Any:  # fmt: skip
    """``new[to:][:16]`` = what is kept of q - (minus if q < 0 else plus); returns 16 bits, 1 = negative."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        group, kinds = GroupBuilder(context, builder, signature.args[0].dtype), signature.args
        q = group.q(kinds, arguments)
        plus, minus = (group.splat(value, group.numbers) for value in arguments[7:9])
        negative = builder.fcmp_ordered("<", q, ir.Constant(group.numbers, None))
        left = builder.fsub(q, builder.select(negative, minus, plus))
        residual = group.kept(left, kinds, arguments, arguments[9])
        group.store(residual, kinds[5], arguments[5], arguments[6], arguments[10])
        return group.mask(negative)

    number = source.dtype
    return signature_of(types.uint16, source, old, new, types.intp, number, number, number, types.boolean), generate


@operation
def size_group(
    typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, new: Any, to: Any, mean: Any,
    inner: Any, outer: Any, gain: Any, stream: Any,
) -> Any:  # fmt: skip
    """``new[to:][:16]`` = what is kept of q - (outer if |q| > mean else inner) with q's sign.

    Returns 16 bits, 1 = negative, and 16 more, 1 = |q| is above the mean.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        group, kinds = GroupBuilder(context, builder, signature.args[0].dtype), signature.args
        q = group.q(kinds, arguments)
        mean, inner, outer = (group.splat(value, group.numbers) for value in arguments[7:10])
        negative = builder.fcmp_ordered("<", q, ir.Constant(group.numbers, None))
        above = builder.fcmp_ordered(">", group.magnitude(q), mean)
        size = builder.select(above, outer, inner)
        left = builder.fsub(q, builder.select(negative, builder.fneg(size), size))
        residual = group.kept(left, kinds, arguments, arguments[10])
        group.store(residual, kinds[5], arguments[5], arguments[6], arguments[11])
        return context.make_tuple(builder, signature.return_type, [group.mask(negative), group.mask(above)])

    number = source.dtype
    more = (new, types.intp, number, number, number, number, types.boolean)
    return signature_of(_tuple_of(types.uint16, 2), source, old, *more), generate


@operation
def filter_group(
    typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, new: Any, to: Any, magnitude: Any,
    threshold: Any, gain: Any, stream: Any,
) -> Any:  # fmt: skip
    """``new[to:][:16]`` = what is kept of q, of nothing where q's magnitude reaches the threshold.

    Returns 16 bits, 1 = it reaches the threshold.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        group, kinds = GroupBuilder(context, builder, signature.args[0].dtype), signature.args
        q = group.q(kinds, arguments)
        sizes = builder.and_(builder.bitcast(q, group.bits), group.splat(arguments[7], group.bits))
        passes = builder.icmp_unsigned(">=", sizes, group.splat(arguments[8], group.bits))
        left = builder.select(passes, ir.Constant(group.numbers, None), q)
        residual = group.kept(left, kinds, arguments, arguments[9])
        group.store(residual, kinds[5], arguments[5], arguments[6], arguments[10])
        return builder.zext(group.mask(passes), ir.IntType(64))

    number, bits = source.dtype, _bits_of(source.dtype)
    return signature_of(types.uint64, source, old, new, types.intp, bits, bits, number, types.boolean), generate


@operation
def drop_group(
    typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, new: Any, to: Any, dropped: Any,
    infinity: Any, stream: Any,
) -> Any:  # fmt: skip
    """``new[to:][:16] = q``, but 0 where ``dropped`` has a bit; returns 16 bits, 1 = q is not finite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        group, kinds = GroupBuilder(context, builder, signature.args[0].dtype), signature.args
        q = group.q(kinds, arguments)
        drop = builder.bitcast(arguments[7], ir.VectorType(ir.IntType(1), GROUP))
        zero = ir.Constant(group.numbers, None)
        group.store(builder.select(drop, zero, q), kinds[5], arguments[5], arguments[6], arguments[9])
        top = group.splat(arguments[8], group.bits)
        exponents = builder.and_(builder.bitcast(q, group.bits), top)
        return group.mask(builder.icmp_unsigned("==", exponents, top))

    bits = _bits_of(source.dtype)
    return signature_of(types.uint16, source, old, new, types.intp, types.uint16, bits, types.boolean), generate


@operation
def quantize_group(
    typing_context: Any, source: Any, at: Any, scale: Any, old: Any, kept: Any, new: Any, to: Any, inverse: Any,
    step: Any, magic: Any, codes: Any, code: Any, stream: Any,
) -> Any:  # fmt: skip
    """``codes[code:][:16]`` = q * inverse rounded to nearest even, ``new[to:][:16]`` = q - code * step.

    Adding ``magic``, 1.5 * 2^23 (or 2^52), and taking it away rounds to a whole number.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        group, kinds = GroupBuilder(context, builder, signature.args[0].dtype), signature.args
        q = group.q(kinds, arguments)
        inverse, step, magic = (group.splat(value, group.numbers) for value in arguments[7:10])
        rounded = builder.fsub(builder.fadd(builder.fmul(q, inverse), magic), magic)
        bytes_ = ir.VectorType(ir.IntType(8), GROUP)
        wide = builder.fptosi(rounded, ir.VectorType(_LANE, GROUP))
        place = group.pointer(kinds[10], arguments[10], arguments[11], bytes_)
        builder.store(builder.trunc(wide, bytes_), place).align = 1
        residual = builder.fsub(q, builder.fmul(rounded, step))
        group.store(residual, kinds[5], arguments[5], arguments[6], arguments[12])
        return context.get_dummy_value()

    number = source.dtype
    more = (new, types.intp, number, number, number, codes, types.intp, types.boolean)
    return signature_of(types.void, source, old, *more), generate


class Unpacker:
    """Adds rows up: ``target[at:][:16] = (target + row + row + …) * scale``, no target unless ``accumulate``.

    From an operation's first nine arguments: halves, rows, half, two tuples of numbers, target, at, accumulate, scale.
    """

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.kinds, self.ir, self.arguments = signature.args, builder, arguments
        self.group = GroupBuilder(context, builder, signature.args[5].dtype)

    def flags(self, row: Any) -> Any:
        """The 16 bits of a row's group."""
        builder, place = self.ir, self.ir.add(row, self.arguments[2])
        loaded = builder.load(self.group.pointer(self.kinds[0], self.arguments[0], place, ir.IntType(GROUP)))
        loaded.align = 2
        return builder.bitcast(loaded, ir.VectorType(ir.IntType(1), GROUP))

    def add_up(self, values: Callable[[Any, Any, Any], Any]) -> None:
        """``values(row, first, second)`` makes a group of numbers of a row's place and its two numbers."""
        builder, group = self.ir, self.group
        target, at, accumulate, scale = self.arguments[5:9]
        places, *numbers = (_values_of(builder, one) for one in (self.arguments[1], *self.arguments[3:5]))
        firsts, seconds = ([group.splat(one, group.numbers) for one in each] for each in numbers)
        first, *others = [values(*row) for row in zip(places, firsts, seconds, strict=True)]
        total = builder.select(accumulate, builder.fadd(group.load(self.kinds[5], target, at), first), first)
        for other in others:
            total = builder.fadd(total, other)
        group.store(builder.fmul(total, group.splat(scale, group.numbers)), self.kinds[5], target, at)


def rows_signature(halves: Any, rows: Any, target: Any, *more: Any) -> Any:
    """Of an operation whose arguments begin as :class:`Unpacker` says."""
    number, count = target.dtype, len(rows)
    places, numbers = _tuple_of(types.intp, count), _tuple_of(number, count)
    return types.void(halves, places, types.intp, numbers, numbers, target, types.intp, types.boolean, number, *more)


@operation
def unpack_groups(
    typing_context: Any, halves: Any, rows: Any, half: Any, plus: Any, minus: Any, target: Any, at: Any,
    accumulate: Any, scale: Any,
) -> Any:  # fmt: skip
    """``target[at:][:16] = (target + row + row + …) * scale``, added in this order, as many rows as the tuples hold.

    A row's 16 sign bits are ``halves[row + half]``, its numbers are plus or minus. No target in the sum unless
    ``accumulate``. Several rows at once spare the target's way through the registers for each of them.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        unpacker = Unpacker(context, builder, signature, arguments)
        unpacker.add_up(lambda row, plus, minus: builder.select(unpacker.flags(row), minus, plus))
        return context.get_dummy_value()

    return rows_signature(halves, rows, target), generate


@operation
def unpack_planes(
    typing_context: Any, halves: Any, rows: Any, half: Any, inner: Any, outer: Any, target: Any, at: Any,
    accumulate: Any, scale: Any, plane: Any,
) -> Any:  # fmt: skip
    """As :func:`unpack_groups`, of two bits: those ``plane`` halves further on choose outer for inner."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        unpacker = Unpacker(context, builder, signature, arguments)

        def values(row: Any, inner: Any, outer: Any) -> Any:
            above = unpacker.flags(builder.add(row, arguments[9]))
            size = builder.select(above, outer, inner)
            return builder.select(unpacker.flags(row), builder.fneg(size), size)

        unpacker.add_up(values)
        return context.get_dummy_value()

    return rows_signature(halves, rows, target, types.intp), generate
