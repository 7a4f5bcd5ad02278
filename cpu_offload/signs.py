"""Signs on the host: what scaled sign and onebit share. Format: :mod:`espresso.compressors.signs`.

The kernels are in ``sign_blocks`` (means per block: one pass) and ``sign_segments`` (one per segment: two passes).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from espresso.compressors.signs import Signs
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, HostCodec, malformed
from espresso.cpu_offload.pool import WorkerPool
from espresso.cpu_offload.sign_blocks import decode_blocks, encode_blocks
from espresso.cpu_offload.sign_segments import encode_segments, sign_chunks, sum_chunks, write_scale
from espresso.cpu_offload.work import END_CHUNK, FIRST_CHUNK


class HostSigns(HostCodec):
    """Signs with the residual fused; one pass over the target to decode."""

    fuses_gain: ClassVar[bool] = True

    def __init__(self, compressor: Signs, pool: WorkerPool | None = None) -> None:
        super().__init__(compressor, pool)
        self._block, self._means = compressor.block, compressor.num_means

    def encode_bodies(self, call: EncodeCall) -> bool:
        """Sum, scale, signs: block by block, or else segment by segment."""
        return self._encode_blocks(call) if self._block else self._encode_segments(call)

    def _encode_blocks(self, call: EncodeCall) -> bool:
        chunks, halves, block = call.work.chunks, call.payload.view(np.uint16), self._block

        def run_part(first: int, end: int) -> bool:
            old, new, rooms = call.old, call.new, np.zeros((3, block), call.layout.dtype)
            rooms[1] = -0.0  # as neutral_block
            if not call.has_feedback:
                old, new = np.zeros(block, call.layout.dtype), np.empty(block, call.layout.dtype)
            return bool(
                encode_blocks(
                    call.table, chunks, first, end, call.source, call.scale, old, new, call.has_feedback,
                    call.stream and call.has_feedback, call.numbers, halves, block, self._means, rooms,
                    call.gain,
                )
            )  # fmt: skip

        return all(self.run_chunks(run_part, len(chunks)))

    def _encode_segments(self, call: EncodeCall) -> bool:
        """Whole segments where they are small, chunk by chunk where they are large."""
        chunks, segments = call.work.chunks, call.work.segments
        sums = np.empty(len(chunks), dtype=np.float64)
        halves = call.payload.view(np.uint16)

        def fused(first: int, end: int) -> bool:
            return bool(
                encode_segments(
                    call.table, chunks, segments, first, end, call.source, call.scale, call.old, call.new,
                    call.has_feedback, call.stream, call.numbers, halves, sums, call.gain,
                )
            )  # fmt: skip

        def split(position: int) -> bool:
            segment = int(segments[position])
            base, stop = call.table[segment, FIRST_CHUNK], call.table[segment, END_CHUNK]

            def sum_part(first: int, end: int) -> None:
                sum_chunks(
                    call.table, chunks, base + first, base + end, call.source, call.scale, call.old,
                    call.has_feedback, sums,
                )  # fmt: skip

            def sign_part(first: int, end: int) -> None:
                sign_chunks(
                    call.table, chunks, base + first, base + end, call.source, call.scale, call.old, call.new,
                    call.has_feedback, call.stream, call.numbers, halves, call.gain,
                )  # fmt: skip

            self.run_chunks(sum_part, int(stop - base))
            if not write_scale(call.table, segment, sums, call.numbers):
                return False
            self.run_chunks(sign_part, int(stop - base))
            return True

        return all(self.run_segments(call.work, fused, split))

    def decode_bodies(self, call: DecodeCall) -> None:
        """Sum the rows, a few blocks at a time."""
        chunks, halves = call.work.chunks, call.payload.view(np.uint16)

        def run_part(first: int, end: int) -> int:
            return int(
                decode_blocks(
                    call.table, chunks, first, end, call.target, call.scale, call.num_rows, call.row_bytes,
                    call.numbers, halves, self._block, self._means,
                )
            )  # fmt: skip

        code = max(self.run_chunks(run_part, len(chunks)), default=0)
        if code:
            raise malformed(code, call.layout, "a mean has the wrong sign or is not finite")
