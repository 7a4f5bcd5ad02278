"""Codecs whose payload can also be a plain vector that a reduction adds up: no header, no table, numbers only."""

from __future__ import annotations

from typing import Any

import numpy as np

from espresso.compressors.base import Array, DrawKey, Feedback, Layout, Starts
from espresso.cpu_offload.codec import (
    DecodeCall,
    EncodeCall,
    HostCodec,
    bits_dtype,
    check_array,
    fill_table,
    infinity_bits,
    streams,
)
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

    def encode_values(
        self,
        layout: Layout,
        source: Array,
        starts: Starts,
        values: Array,
        *,
        scale: float = 1.0,
        feedback: Feedback | None = None,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """Encode ``scale * source + residual`` into the vector; returns whether all of it is finite."""
        check_array("source", source, layout)
        self._check_values(layout, values)
        work = work_of(layout)
        call = EncodeCall(
            layout=layout,
            work=work,
            table=self._pack(layout, fill_table(layout, work, source, starts, feedback), values),
            source=source,
            scale=layout.dtype.type(scale),
            old=source if feedback is None else feedback.old,
            new=np.empty(0, layout.dtype) if feedback is None else feedback.new,
            has_feedback=feedback is not None,
            stream=streams(layout),
            payload=values.view(np.uint8),
            numbers=values,
            words=np.empty(0, np.uint32),
            bits=values.view(bits_dtype(layout)) if values.dtype == layout.dtype else values,
            infinity=infinity_bits(layout),
            key=key,
            gain=layout.dtype.type(1.0 if feedback is None else feedback.gain),
        )
        return self.encode_vector(call)

    def decode_values(
        self,
        layout: Layout,
        values: Array,
        target: Array,
        starts: Starts,
        *,
        scale: float = 1.0,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """Write ``scale * decoded``; returns whether the vector is finite."""
        check_array("target", target, layout)
        self._check_values(layout, values)
        work = work_of(layout)
        call = DecodeCall(
            layout=layout,
            work=work,
            table=self._pack(layout, fill_table(layout, work, target, starts, None), values),
            target=target,
            scale=layout.dtype.type(scale),
            num_rows=1,
            row_bytes=values.nbytes,
            payload=values.view(np.uint8),
            numbers=values,
            words=np.empty(0, np.uint32),
            key=key,
        )
        return self.decode_vector(call)

    def encode_vector(self, call: EncodeCall) -> bool:
        """Encode every segment, raw ones included, at ``table[:, OFFSET]`` of ``numbers``."""
        raise NotImplementedError

    def decode_vector(self, call: DecodeCall) -> bool:
        """The reverse; returns whether the vector is finite."""
        raise NotImplementedError

    def _pack(self, layout: Layout, table: Table, values: Array) -> Table:
        ends = np.cumsum(self.segment_values(layout))
        table[1:, OFFSET] = ends[:-1] * values.itemsize
        table[:1, OFFSET] = 0
        return table

    def _check_values(self, layout: Layout, values: Array) -> None:
        kind: Any = self.value_dtype(layout)
        wanted = np.dtype(np.uint16 if kind == "bfloat16" else kind)
        size = self.num_values(layout)
        if values.dtype != wanted or values.shape != (size,) or not values.flags.c_contiguous:
            raise ValueError(
                f"values must be contiguous {wanted}[{size}] ({kind}), got {values.dtype}{list(values.shape)}"
            )
