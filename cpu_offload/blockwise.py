"""Blockwise quantizers on the host: int8, int4, fp8. Format: :mod:`espresso.compressors.blockwise`.

Encode makes one pass: a block's q stays in the first-level cache between its maximum, its codes and its residual.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Array, Encoding
from espresso.compressors.blockwise import MAX_BLOCK, NEARLY, TINY, Blockwise
from espresso.compressors.blockwise import Codes as Form
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, HostCodec
from espresso.cpu_offload.dither import dither_blocks
from espresso.cpu_offload.fp8_kernels import quantize_fp8, widen_fp8
from espresso.cpu_offload.jit import Scalar, as_number, fence, kernel, room
from espresso.cpu_offload.kernels import BLOCK, can_stream, clear_block, copy_block, fetch_block, fill_q, neutral_block
from espresso.cpu_offload.vectors import GROUP, largest, quantize_group
from espresso.cpu_offload.work import HIGH, LOW, OFFSET, RESIDUAL, SEGMENT, SOURCE, Table

Codes = npt.NDArray[np.int8]
E5M2 = Form.E5M2.value


@kernel
def encode_chunks(
    table: Table, chunks: Table, first: int, end: int, source: Array, scale: float, old: Array, new: Array,
    has_feedback: bool, stream: bool, numbers: Array, codes: Codes, block: int, code_bits: int,
    levels: float, tiny: float, magic: float, magnitude: int, infinity: int, form: int,
) -> Scalar:  # fmt: skip
    """Quantize block by block and write the residual. Returns whether all is finite."""
    itemsize = numbers.itemsize
    stride = itemsize + block * code_bits // 8
    q, zeros = room(MAX_BLOCK, source.dtype), room(MAX_BLOCK, source.dtype)
    kept, block_codes = room(MAX_BLOCK, source.dtype), room(MAX_BLOCK, np.int8)
    neutral_block(zeros, block)
    one, zero = source.dtype.type(1), source.dtype.type(0)
    finite = True
    for chunk in range(first, end):
        row = table[chunks[chunk, SEGMENT]]
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], block):
            num = min(block, chunks[chunk, HIGH] - low)
            at, to = row[SOURCE] + low, row[RESIDUAL] + low
            place = row[OFFSET] + low // block * stride
            direct = has_feedback and num == block
            if direct:
                size = largest(source, at, scale, old, to, block, magnitude)
            else:
                fill_q(q, source, at, scale, old, to, num, has_feedback)
                clear_block(q, num, block - num)
                size = largest(q, 0, one, zeros, 0, block, magnitude)
            top = as_number(size, one)
            if size >= infinity:
                finite = False
                top = zero
            small = top < tiny
            step = zero if small else top / levels
            inverse = zero if small else levels / top
            numbers[place // itemsize] = step
            place += itemsize
            if direct:
                out, start = (codes, place) if code_bits == 8 else (block_codes, 0)
                quantize(source, at, scale, old, to, new, to, block, inverse, step, magic, out, start, stream, form)
            else:
                quantize(q, 0, one, zeros, 0, kept, 0, block, inverse, step, magic, block_codes, 0, False, form)
                if code_bits == 8:
                    copy_block(codes, place, block_codes, num)
                if has_feedback:
                    copy_block(new, to, kept, num)
            if code_bits == 4:
                pack_nibbles(block_codes, num, codes[place : place + (num + 1) // 2])
    fence()
    return finite


@kernel
def quantize(
    source: Array, at: int, scale: float, old: Array, kept: int, new: Array, to: int, num: int, inverse: float,
    step: float, magic: float, codes: Codes, code: int, stream: bool, form: int,
) -> None:  # fmt: skip
    """Codes and residual of ``num`` elements, a multiple of a group; ``form`` is that of the codes."""
    stream = can_stream(stream, new, to)
    if form:
        quantize_fp8(source, at, scale, old, kept, new, to, num, inverse, step, codes, code, stream, form == E5M2)
        return
    for i in range(0, num, GROUP):
        quantize_group(source, at + i, scale, old, kept + i, new, to + i, inverse, step, magic, codes, code + i, stream)


@kernel
def pack_nibbles(nibbles: Codes, num: int, body: Codes) -> None:
    """Two codes a byte, half a block apart."""
    half = len(body)
    if num < 2 * half:
        nibbles[num] = 0
    low, high = nibbles[:half], nibbles[half : 2 * half]
    for i in range(half):
        body[i] = np.int8((low[i] & 15) | (high[i] << 4))


@kernel
def unpack_nibbles(body: Codes, nibbles: Codes) -> None:
    """The reverse; ``nibbles`` has room for twice the bytes."""
    half = len(body)
    low, high = nibbles[:half], nibbles[half : 2 * half]
    for i in range(half):
        low[i] = np.int8(body[i] << 4) >> 4
        high[i] = body[i] >> 4


@kernel
def decode_chunks(
    table: Table, chunks: Table, first: int, end: int, target: Array, scale: float, num_rows: int, row_bytes: int,
    numbers: Array, codes: Codes, block: int, code_bits: int, form: int,
) -> Scalar:  # fmt: skip
    """``target = scale * sum over rows of code * step``, rows in order. One pass over the target."""
    itemsize = numbers.itemsize
    stride = itemsize + block * code_bits // 8
    nibbles = room(MAX_BLOCK, np.int8)
    values = room(MAX_BLOCK, target.dtype)
    for chunk in range(first, end):
        segment = chunks[chunk, SEGMENT]
        row = table[segment]
        for low in range(chunks[chunk, LOW], chunks[chunk, HIGH], block):
            num = min(block, chunks[chunk, HIGH] - low)
            out = target[row[SOURCE] + low :][:num]
            fetch_block(target, row[SOURCE] + low + max(block, BLOCK), block)
            if not num_rows:
                clear_block(out, 0, num)
            for source in range(num_rows):
                at = source * row_bytes + row[OFFSET] + low // block * stride
                step = numbers[at // itemsize]
                if not 0 <= step < np.inf:
                    return 1 + source * len(table) + segment
                if code_bits == 8:
                    code = codes[at + itemsize :][:num]
                else:
                    unpack_nibbles(codes[at + itemsize :][: (num + 1) // 2], nibbles)
                    code = nibbles[:num]
                factor = scale if source == num_rows - 1 else out.dtype.type(1)
                if form:
                    widen_fp8(code, values[:num], form == E5M2)
                    add_block(values[:num], step, out, source > 0, factor)
                else:
                    add_block(code, step, out, source > 0, factor)
    return 0


@kernel
def add_block(code: Array, step: float, out: Array, accumulate: bool, scale: float) -> None:
    """``out = (out + code * step) * scale``, or without the sum; ``scale`` is 1 but for the last row."""
    if accumulate:
        for i in range(len(code)):
            out[i] = (out[i] + out.dtype.type(code[i]) * step) * scale
    else:
        for i in range(len(code)):
            out[i] = out.dtype.type(code[i]) * step * scale


class HostBlockwise(HostCodec):
    """``int8``, ``int4`` and ``fp8`` with the residual fused."""

    compressor: Blockwise
    malformed_body: ClassVar[str] = "a block's scale is negative or not finite"

    def encode_bodies(self, call: EncodeCall) -> bool:
        """One pass, chunks in any order."""
        how, kind, itemsize = self.compressor, call.layout.dtype.type, call.layout.dtype.itemsize
        magic = kind(1.5 * 2.0 ** (23 if itemsize == 4 else 52))
        return all(
            self.share(
                encode_chunks, call, call.work.chunks, *call.given, call.stream, call.numbers,
                call.payload.view(np.int8), how.block, how.code_bits, kind(how.levels), kind(TINY[itemsize]), magic,
                call.magnitude, call.infinity - NEARLY, how.codes.value,
            )
        )  # fmt: skip

    def decode_bodies(self, call: DecodeCall) -> None:
        """Sum the rows block by block."""
        how, codes = self.compressor, call.payload.view(np.int8)
        self.share_decode(decode_chunks, call, call.numbers, codes, how.block, how.code_bits, how.codes.value)

    def dither(self, encoding: Encoding) -> None:
        """As :class:`espresso.compressors.base.DitheringCodec` says, for whole numbers."""
        dither_blocks(self, encoding, self.compressor.block, self.compressor.levels)
