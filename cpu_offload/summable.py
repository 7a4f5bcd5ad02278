"""Codecs whose payload can also be a plain vector that a reduction adds up: no header, no table, numbers only."""

from __future__ import annotations

from typing import Any

import numpy as np

from espresso.compressors.base import Array, Decoding, Encoding, Layout, Starts
from espresso.cpu_offload.codec import DecodeCall, EncodeCall, HostCodec, fill_table
from espresso.cpu_offload.work import OFFSET, Table, work_of


class SummableHostCodec(HostCodec):
    """:class:`espresso.compressors.SummableCodec` on the host. Segment after segment, raw ones included."""

    def segment_values(self, layout: Layout) -> Starts:
        """How many numbers each segment has in the vector."""
        return layout.numels

    def value_dtype(self, layout: Layout) -> str:
        """The numbers' type; the layout's own unless a codec says otherwise."""
        return layout.dtype.name

    def num_values(self, layout: Layout) -> int:
        """The vector's length."""
        return int(self.segment_values(layout).sum())

    def encode_values(self, encoding: Encoding, values: Array) -> bool:
        """Encode ``scale * source + residual`` into the vector; returns whether all of it is finite."""
        self._check_values(encoding.layout, values)
        call = EncodeCall.of(encoding, values.view(np.uint8))
        self._pack(encoding.layout, call.table, values)
        return self.encode_vector(call)

    def decode_values(self, decoding: Decoding, values: Array) -> bool:
        """Write ``scale * decoded``; returns whether the vector is finite."""
        layout = decoding.layout
        self._check_values(layout, values)
        work, target, scale = work_of(layout), decoding.target, layout.dtype.type(decoding.scale)
        table = fill_table("target", layout, work, target, decoding.starts)
        self._pack(layout, table, values)
        flat = values.view(np.uint8)
        return self.decode_vector(DecodeCall(layout, work, table, flat, decoding.key, target, scale, 1, flat.size))

    def encode_vector(self, call: EncodeCall) -> bool:
        """Encode every segment, raw ones included, at ``table[:, OFFSET]`` of the vector."""
        raise NotImplementedError

    def decode_vector(self, call: DecodeCall) -> bool:
        """The reverse; returns whether the vector is finite."""
        raise NotImplementedError

    def _pack(self, layout: Layout, table: Table, values: Array) -> None:
        ends = np.cumsum(self.segment_values(layout))
        table[1:, OFFSET] = ends[:-1] * values.itemsize
        table[:1, OFFSET] = 0

    def _check_values(self, layout: Layout, values: Array) -> None:
        kind: Any = self.value_dtype(layout)
        wanted = np.dtype(np.uint16 if kind == "bfloat16" else kind)
        size = self.num_values(layout)
        if values.dtype != wanted or values.shape != (size,) or not values.flags.c_contiguous:
            raise ValueError(
                f"values must be contiguous {wanted}[{size}] ({kind}), got {values.dtype}{list(values.shape)}"
            )
