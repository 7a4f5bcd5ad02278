"""What every GPU codec shares: argument checks, tables, launches, and what is read back.

``encode`` and ``decode`` keep the promises of :class:`espresso.compressors.Codec` and wait for the device, since they
answer with a bool. In training they only launch and answer True: whether all was finite and well formed then stays on
the device, in the header's flag and in a status that is read once an iteration.

Arrays are torch tensors on the device, or what torch reads without a copy (CuPy arrays, by the array interface).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from espresso.compressors.base import Compressor, Decoding, DrawKey, Encoding, Layout, PayloadError, Starts
from espresso.compressors.common import BaseCompressor
from espresso.compressors.cuda.runtime import Device
from espresso.compressors.cuda.tables import Table, TableCache, Tables
from espresso.compressors.draws import rank_salt
from espresso.compressors.payload import FLAGS_AT, read_header

THREADS = 256
TILE = 4096
"""Elements of a tile, one thread block's work: small enough that a bucket fills a GPU, a multiple of most blocks."""

HEADER_ERROR = 1 << 62
STATUS_WORDS = 2
"""Of a decode, int64: 1 if a payload is flagged as not finite; the largest error code."""

Tensor = torch.Tensor


@dataclass(eq=False)
class Scratch:
    """Buffers of one stream, kept between calls: launches on a stream run in order, so that they may share."""

    device: torch.device
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sync = torch.zeros(2, dtype=torch.int32, device=self.device)

    def bytes_of(self, name: str, num_bytes: int, *, zero: bool = False) -> Tensor:
        """A buffer of at least this size; holds what the last call left. ``zero``: zeros when it is new."""
        held = self.buffers.get(name)
        if held is None or held.numel() < num_bytes:
            held = self.buffers[name] = torch.empty(max(num_bytes, 16), dtype=torch.uint8, device=self.device)
            if zero:
                held.zero_()
        return held


@dataclass(frozen=True, slots=True)
class EncodeCall:
    """One encode: the arguments that all encode kernels begin with."""

    layout: Layout
    tables: Tables
    rows: Tensor
    scratch: Scratch
    key: DrawKey
    common: tuple[Any, ...]


class CudaCodec:
    """A compressor on a GPU. Results are ready on torch's current stream.

    Args:
        compressor: its parameters.
        device: where kernels run.
        waits: for the device, to answer whether all was finite. Else calls answer True, and what decodes find is
            noted in ``status``.

    Attributes:
        status: int64[STATUS_WORDS] on the device, raised by what is found. Whoever reads it zeroes it.
    """

    file: ClassVar[str]
    """The CUDA source."""

    malformed_body: ClassVar[str] = "its body is malformed"
    """What is wrong with a body that a kernel refuses."""

    def __init__(self, compressor: BaseCompressor, device: Device, *, waits: bool = True) -> None:
        self.compressor: Compressor = compressor
        self.device, self.waits = device, waits
        self.status = new_status(device)
        self.tile = self.tile_elements()
        self._tables = TableCache(compressor, self.tile, device.torch_device)
        self._scratch: dict[int, Scratch] = {}
        self._lock = threading.Lock()  # an encode may be several launches that share scratch

    # -- what an algorithm adds --------------------------------------------------------------------

    def tile_elements(self) -> int:
        """Elements of a tile; a codec whose blocks do not divide ``TILE`` says otherwise."""
        return TILE

    @property
    def form(self) -> str:
        """What the names of its kernels say behind encode and decode."""
        return ""

    def launch_bodies(self, call: EncodeCall) -> None:
        """Launch what encodes all segments, raw ones included, and writes the header."""
        self._launch_encode(call, f"encode{self.form}", self.arguments(call.layout, call.key))

    def arguments(self, layout: Layout, key: DrawKey) -> tuple[Any, ...]:
        """The kernels' arguments after the common ones."""
        return ()

    # -- the protocol ------------------------------------------------------------------------------

    def encode(self, encoding: Encoding, payload: Any) -> bool:
        """As :meth:`espresso.compressors.Codec.encode`; the header says whether all was finite."""
        out, layout = tensor_on(self.device, "payload", payload), encoding.layout
        if (
            out.dtype is not torch.uint8
            or tuple(out.shape) != (layout.num_bytes,)
            or not out.is_contiguous()
            or out.data_ptr() % 8
        ):
            raise ValueError(
                f"payload must be contiguous, 8-byte aligned uint8[{layout.num_bytes}], got"
                f" {out.dtype}{list(out.shape)} at {out.data_ptr():#x}"
            )
        self._encode_into(encoding, self._tables.tables(layout), out)
        return not (self.waits and int(out[FLAGS_AT]))

    def decode(self, decoding: Decoding, payloads: Any) -> bool:
        """As :meth:`espresso.compressors.Codec.decode`."""
        rows, layout = tensor_on(self.device, "payloads", payloads), decoding.layout
        if rows.dtype is not torch.uint8 or rows.ndim != 2 or (rows.numel() and rows.stride(1) != 1):
            raise ValueError(f"payloads must be uint8[rows, {layout.num_bytes}] with contiguous rows")
        if rows.shape[0] and rows.shape[1] != layout.num_bytes:
            raise PayloadError(
                f"payload has {rows.shape[1]} bytes, its layout says {layout.num_bytes}: do all ranks use the same"
                " strategy?"
            )
        row_bytes = int(rows.stride(0)) if rows.shape[0] > 1 else layout.num_bytes
        if row_bytes % 8 or (rows.numel() and rows.data_ptr() % 8):
            raise ValueError(f"payload rows must be 8-byte aligned and ascending, got a stride of {row_bytes} bytes")
        return self._decode_from(decoding, self._tables.tables(layout), rows, rows.shape[0], row_bytes)

    def _read(self, status: Tensor, layout: Layout, payloads: Tensor) -> bool:
        """What a decode found: whether all payloads were finite. Waits for the device.

        Raises:
            PayloadError: a payload does not belong to the layout, or its body is malformed.
        """
        flagged, code = status.cpu().tolist()
        if code >= HEADER_ERROR:
            row = divmod(code - HEADER_ERROR - 1, max(len(layout.segments), 1))[0]
            read_header(payloads[row].cpu().numpy(), layout)
            raise PayloadError(f"payload {row}: its header is not that of its layout")
        if code:
            row, segment = divmod(code - 1, len(layout.segments))
            name = layout.segments[segment].tensor
            raise PayloadError(f"payload {row}, segment {segment} ({name!r}): {self.malformed_body}")
        return not flagged

    # -- launching ---------------------------------------------------------------------------------

    def _encode_into(self, encoding: Encoding, tables: Tables, out: Tensor) -> None:
        layout, feedback = encoding.layout, encoding.feedback
        numbers = numbers_on(self.device, "source", encoding.source, layout)
        old = fresh = None
        kept = None if feedback is None else feedback.starts
        if feedback is not None:
            old = numbers_on(self.device, "feedback.old", feedback.old, layout)
            fresh = numbers_on(self.device, "feedback.new", feedback.new, layout)
        kept_size = 0 if old is None or fresh is None else min(old.numel(), fresh.numel())
        rows = self._tables.rows(layout, tables, encoding.starts, numbers.numel(), kept, kept_size)
        with self._lock:
            scratch = self._scratch_here()
            null = np.uint64(0)
            common = (
                rows,
                tables.tiles,
                np.int64(tables.num_tiles),
                np.int64(self.tile),
                numbers,
                layout.dtype.type(encoding.scale),
                null if old is None else old,
                null if fresh is None else fresh,
                out,
                tables.header,
                np.int64(tables.header.numel()),
                scratch.sync,
                layout.dtype.type(1.0 if feedback is None else feedback.gain),
            )
            try:
                self.launch_bodies(EncodeCall(layout, tables, rows, scratch, encoding.key, common))
            except BaseException:
                # What the launches that did not come would have cleared: the next call's must be zero.
                self._scratch.pop(self.device.lane(), None)
                raise

    def _decode_from(self, decoding: Decoding, tables: Tables, payloads: Tensor, num_rows: int, row_bytes: int) -> bool:
        layout, status = decoding.layout, new_status(self.device) if self.waits else self.status
        numbers = numbers_on(self.device, "target", decoding.target, layout)
        common = (
            self._tables.rows(layout, tables, decoding.starts, numbers.numel(), None, 0),
            tables.tiles,
            np.int64(tables.num_tiles),
            np.int64(self.tile),
            np.int64(len(layout.segments)),
            numbers,
            layout.dtype.type(decoding.scale),
            np.int64(num_rows),
            np.int64(row_bytes),
            payloads,
            tables.header,
            np.int64(tables.header.numel()),
            status,
            *self.arguments(layout, decoding.key),
        )
        if tables.num_tiles or tables.header.numel():  # without segments headers are looked at all the same
            kernel = f"decode{self.form}_{suffix(layout)}"
            self.device.launch(self.file, kernel, max(tables.num_tiles, 1), THREADS, common)
        return not self.waits or self._read(status, layout, payloads)

    def _dither(self, encoding: Encoding, *, block: int = 0, levels: float = 1.0, spare: int = 0) -> None:
        layout, kind = encoding.layout, encoding.layout.dtype.type
        numbers = numbers_on(self.device, "source", encoding.source, layout)
        tables = self._tables.tables(layout)
        rows = self._tables.rows(layout, tables, encoding.starts, numbers.numel(), None, 0)
        salt = np.uint64(rank_salt(encoding.key))
        how = np.int32(block), kind(levels), np.int32(spare)
        arguments = (rows, tables.tiles, np.int64(self.tile), numbers, *how, salt)
        if tables.num_tiles:
            self.device.launch("dither.cu", f"dither_{suffix(layout)}", tables.num_tiles, THREADS, arguments)

    def _launch_encode(
        self, call: EncodeCall, kernel: str, more: Sequence[Any], *, grid: int | None = None, threads: int = THREADS
    ) -> None:
        grid = max(call.tables.num_tiles, 1) if grid is None else grid
        self.device.launch(self.file, f"{kernel}_{suffix(call.layout)}", grid, threads, (*call.common, *more))

    def _scratch_here(self) -> Scratch:
        lane = self.device.lane()
        found = self._scratch.get(lane)
        if found is None:
            found = self._scratch[lane] = Scratch(self.device.torch_device)
        return found


class CudaSummableCodec(CudaCodec):
    """:class:`espresso.compressors.SummableCodec` on a GPU. Segment after segment, raw ones included."""

    def segment_values(self, layout: Layout) -> Starts:
        """How many numbers each segment has in the vector."""
        return layout.numels

    def value_dtype(self, layout: Layout) -> str:
        """The numbers' type; the layout's own unless a codec says otherwise."""
        return layout.dtype.name

    def num_values(self, layout: Layout) -> int:
        """The vector's length."""
        return int(self.segment_values(layout).sum())

    def encode_values(self, encoding: Encoding, values: Any) -> bool:
        """As :meth:`espresso.compressors.SummableCodec.encode_values`; a vector that is not finite says so itself."""
        out = self._values(encoding.layout, values)
        self._encode_into(encoding, self._vector_tables(encoding.layout, out), out)
        numbers = out.view(torch.bfloat16) if out.dtype in (torch.uint16, torch.int16) else out
        return not self.waits or bool(torch.isfinite(numbers).all())

    def decode_values(self, decoding: Decoding, values: Any) -> bool:
        """As :meth:`espresso.compressors.SummableCodec.decode_values`."""
        vector = self._values(decoding.layout, values)
        tables = self._vector_tables(decoding.layout, vector)
        return self._decode_from(decoding, tables, vector, 1, vector.numel() * vector.element_size())

    def vector_rows(self, rows: Table) -> None:
        """Change the rows of a vector's table where it holds other numbers than a payload's bodies."""

    def _vector_tables(self, layout: Layout, vector: Tensor) -> Tables:
        ends = np.cumsum(self.segment_values(layout))
        begins = np.concatenate(([0], ends[:-1]))[: len(ends)].astype(np.int64)
        return self._tables.tables(layout, begins * vector.element_size(), self.vector_rows)

    def _values(self, layout: Layout, values: Any) -> Tensor:
        tensor = tensor_on(self.device, "values", values)
        kind, size = self.value_dtype(layout), self.num_values(layout)
        names = {kind, "uint16", "int16"} if kind == "bfloat16" else {kind}
        if (
            str(tensor.dtype).removeprefix("torch.") not in names
            or tuple(tensor.shape) != (size,)
            or not tensor.is_contiguous()
        ):
            raise ValueError(f"values must be contiguous {kind}[{size}], got {tensor.dtype}{list(tensor.shape)}")
        return tensor


def tensor_on(device: Device, what: str, array: Any) -> Tensor:
    """The array as a tensor that shares its memory.

    Raises:
        ValueError: it is not on the device: kernels would follow an address that means nothing there, and of a
            NumPy array torch would make a copy, in which a result is lost.
    """
    here = device.torch_device
    if isinstance(array, np.ndarray) and here.type != "cpu":
        raise ValueError(f"{what} is a NumPy array, this codec works on {here}")
    tensor = array if isinstance(array, torch.Tensor) else torch.as_tensor(array, device=here)
    if tensor.device != here:
        raise ValueError(f"{what} is on {tensor.device}, this codec works on {here}")
    return tensor


def numbers_on(device: Device, what: str, array: Any, layout: Layout) -> Tensor:
    """The same for numbers of a layout; ValueError unless kernels can take them."""
    tensor = tensor_on(device, what, array)
    wanted = torch.float32 if layout.dtype.itemsize == 4 else torch.float64
    if tensor.dtype is not wanted or tensor.ndim != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be a contiguous 1-D {layout.dtype} array, got {tensor.dtype}{list(tensor.shape)}"
            f" with strides {tensor.stride()}"
        )
    return tensor


def new_status(device: Device) -> Tensor:
    """Zeros for decodes to note in what they find."""
    return torch.zeros(STATUS_WORDS, dtype=torch.int64, device=device.torch_device)


def suffix(layout: Layout) -> str:
    """Of kernel names: the type of the layout's numbers."""
    return "f32" if layout.dtype.itemsize == 4 else "f64"
