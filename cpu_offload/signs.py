"""Signs on the host: what scaled sign and onebit share. Format: :mod:`espresso.compressors.signs`."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from espresso.compressors.signs import Signs
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, HostCodec
from espresso.cpu_offload.sign_kernels import (
    decode_blocks,
    encode_blocks,
    encode_segments,
    sign_chunks,
    sum_chunks,
    write_scale,
)
from espresso.cpu_offload.work import END_CHUNK, FIRST_CHUNK


class HostSigns(HostCodec):
    """``efsignsgd`` and ``onebit`` with the residual fused; one pass over the target to decode."""

    compressor: Signs
    fuses_gain: ClassVar[bool] = True
    malformed_body: ClassVar[str] = "a mean has the wrong sign or is not finite"

    def encode_bodies(self, call: EncodeCall) -> bool:
        """Sum, scale, signs: block by block, or else segment by segment."""
        return self._encode_blocks(call) if self.compressor.block else self._encode_segments(call)

    def _encode_blocks(self, call: EncodeCall) -> bool:
        halves, chunks = call.payload.view(np.uint16), call.work.chunks
        block, kind = self.compressor.block, call.layout.dtype

        def run_part(first: int, end: int) -> bool:
            old, new, rooms = call.old, call.new, np.zeros((3, block), kind)
            rooms[1] = -0.0  # as neutral_block
            if not call.has_feedback:
                old, new = np.zeros(block, kind), np.empty(block, kind)
            return bool(
                encode_blocks(
                    call.table, chunks, first, end, call.source, call.scale, old, new, call.has_feedback,
                    call.stream and call.has_feedback, call.numbers, halves, block, self.compressor.num_means, rooms,
                    call.gain,
                )
            )  # fmt: skip

        return all(self.run_chunks(run_part, len(chunks)))

    def _encode_segments(self, call: EncodeCall) -> bool:
        """Whole segments where they are small, chunk by chunk where they are large."""
        chunks, segments, numbers = call.work.chunks, call.work.segments, call.numbers
        sums = np.empty(len(chunks), dtype=np.float64)
        written = call.stream, numbers, call.payload.view(np.uint16)

        def fused(first: int, end: int) -> bool:
            return bool(
                encode_segments(call.table, chunks, segments, first, end, *call.given, *written, sums, call.gain)
            )

        def split(position: int) -> bool:
            segment = int(segments[position])
            mine = chunks[call.table[segment, FIRST_CHUNK] : call.table[segment, END_CHUNK]]
            my_sums = sums[call.table[segment, FIRST_CHUNK] : call.table[segment, END_CHUNK]]
            self.share(sum_chunks, call, mine, call.source, call.scale, call.old, call.has_feedback, my_sums)
            if not write_scale(call.table, segment, sums, numbers):
                return False
            self.share(sign_chunks, call, mine, *call.given, *written, call.gain)
            return True

        return all(self.run_segments(call.work, fused, split))

    def decode_bodies(self, call: DecodeCall) -> None:
        """Sum the rows, a few blocks at a time."""
        halves, how = call.payload.view(np.uint16), self.compressor
        self.share_decode(decode_blocks, call, call.numbers, halves, how.block, how.num_means)
