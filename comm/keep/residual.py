"""One residual: what an encoder reads and writes, and how it is kept in between.

Kept in full, the law is exact: what was sent plus what is kept equals what came in. Kept narrower it loses what the
rounding loses, in every iteration and for every element, and no more::

    sum sent + e_T + sum of r_t = sum given + e_0

    float32   r = 0
    bf16      |r| <= 2^-8 |e|                    half the memory
    int8      |r| <= max |e| of its block / 254  a quarter, and 1/64: blocks of 256

where e is what the encoder left. The residual that was lost is gone; error feedback goes on from what was kept.

Encoders may hold part of it back (``gain``, see :class:`espresso.compressors.Feedback`): the buffers then hold
gain * e, what the next iteration adds. Everything that leaves this file (``read``, ``add``, the norm) is e itself.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.comm.memory import HOST, Memory
from espresso.compressors import Codec, Layout, Segment, create
from espresso.strategies import Run, Site

Array = npt.NDArray[Any]

FULL = "float32"
"""As wide as encoders work: float64 where gradients are."""

_CODECS = {"bf16": "bf16:raw_below=1", "int8": "int8:raw_below=1"}
STORAGES = (FULL, *_CODECS)


def check_storage(storage: str) -> str:
    """Raise ValueError unless residuals can be kept so."""
    if storage not in STORAGES:
        raise ValueError(f"residual_dtype must be one of {', '.join(STORAGES)}, got {storage!r}")
    return storage


@dataclass(eq=False)
class Residual:
    """The residual of one partition at one site on this rank: a pair of buffers over its region.

    Attributes:
        runs: the tensor stretches of the region, in order; run i lies at ``starts[i]`` of the buffers.
        replica: 0 on the ranks that answer for it when it is carried or gathered, else above 0.
        gain: the part of what was not sent that the next iteration adds.
    """

    site: Site
    runs: tuple[Run, ...]
    starts: tuple[int, ...]
    dtype: Any
    replica: int = 0
    memory: Memory = HOST
    old: Array = field(init=False)
    new: Array | None = field(init=False)
    transactional: bool = True
    gain: float = 1.0
    written: bool = False
    scratch: Array | None = None
    storage: str = FULL

    def __post_init__(self) -> None:
        self.old = self.spare()
        self.new = self.spare() if self.transactional else None

    def spare(self) -> Array:
        """A zero buffer of this residual's size, where its step runs."""
        size = self.starts[-1] + self.runs[-1].numel if self.runs else 0
        made: Array = self.memory.zeros(size, self.dtype)
        return made

    @property
    def num_bytes(self) -> int:
        return self.old.nbytes * (1 if self.new is None else 2)

    def buffers(self) -> tuple[Array, Array]:
        """What an encoder reads and what it writes, until :meth:`settle`."""
        if self.new is not None:
            return self.old, self.new
        self.scratch = self.spare() if self.scratch is None else self.scratch
        return self.old, self.scratch

    def settle(self) -> None:
        """The encoder has written everything."""
        self.written = True
        if self.new is None and self.scratch is not None:
            self.memory.let_go(self.old)
            self.old, self.scratch = self.scratch, None

    def read(self, start: int, numel: int) -> Array:
        """A copy of what is kept of a stretch, on the host."""
        values = self.memory.read(self.old, start, numel)
        return values if self.gain == 1 else values / values.dtype.type(self.gain)

    def add(self, start: int, values: Array) -> None:
        """Add host numbers to what is kept of a stretch."""
        self.memory.add(self.old, start, self._held(values))

    def _held(self, values: Array) -> Array:
        """What the buffers hold of these."""
        return values if self.gain == 1 else values * values.dtype.type(self.gain)

    def scale(self, start: int, numel: int, factor: float) -> None:
        """Multiply what is kept of a stretch."""
        self.old[start : start + numel] *= factor

    def clear(self) -> None:
        """Keep nothing."""
        self.old[:] = 0

    def square_sum(self) -> float:
        """Of what is kept."""
        return self.memory.square_sum(self.old) / self.gain**2

    def commit(self) -> None:
        """What was written becomes what is kept."""
        if self.written and self.new is not None:
            self.old, self.new = self.new, self.old
        self.written = False

    def locate(self, group_start: int) -> int:
        """Where the element at this position of the group lies in the buffers."""
        index = bisect_right(self.runs, group_start, key=lambda run: run.group_start) - 1
        return self.starts[index] + group_start - self.runs[index].group_start


class PackedResidual(Residual):
    """A residual kept as the payload of a codec; unpacked while an encoder runs.

    Both buffers are packed, so that a discarded iteration leaves the first as it was, bit for bit. The room for
    unpacked numbers belongs to the thread, on a GPU to the stream, and is as large as the largest residual that it
    has met, twice. Unpacking and packing are a pass each around the encoder's own, one launch each on a GPU.
    """

    def __init__(
        self, site: Site, runs: tuple[Run, ...], starts: tuple[int, ...], dtype: Any, replica: int, memory: Memory,
        transactional: bool, gain: float = 1.0, *, storage: str,
    ) -> None:  # fmt: skip
        self._codec: Codec = memory.codec(create(_CODECS[storage]))
        super().__init__(
            site,
            runs,
            starts,
            dtype,
            replica,
            memory,
            transactional=transactional,
            gain=gain,
            storage=storage,
        )

    def __post_init__(self) -> None:
        self._size = self.starts[-1] + self.runs[-1].numel if self.runs else 0
        # Run by run: what lies between them in the rooms is anything, and must not get into a block's scale.
        segments = [Segment(run.tensor, run.tensor_start, run.numel) for run in self.runs]
        self._at = np.array(self.starts, np.int64)
        self._layout: Layout = self._codec.compressor.layout(segments, self.dtype)
        self._old = self.memory.zeros(self._layout.num_bytes, np.uint8)
        self._new = self.memory.zeros(self._layout.num_bytes, np.uint8) if self.transactional else None
        self.clear()

    @property
    def num_bytes(self) -> int:
        """Of the packed buffers."""
        return int(self._old.nbytes) * (1 if self._new is None else 2)

    @property
    def old(self) -> Array:
        """A copy of what is kept; assign to change it."""
        values: Array = self.memory.zeros(self._size, self.dtype)
        self._unpack(values)
        return values

    @old.setter
    def old(self, values: Array) -> None:
        self._codec.encode(self._layout, values, self._at, self._old)

    def add(self, start: int, values: Array) -> None:
        """Unpacked, changed and packed again: one more rounding."""
        kept = self.old
        self.memory.add(kept, start, self._held(values))
        self.old = kept

    def scale(self, start: int, numel: int, factor: float) -> None:
        """The same."""
        kept = self.old
        kept[start : start + numel] *= factor
        self.old = kept

    def clear(self) -> None:
        """Exact."""
        self.old = self.memory.zeros(self._size, self.dtype)

    def buffers(self) -> tuple[Array, Array]:
        """Unpack, once for all encodes of a step; valid on this thread until :meth:`settle`."""
        old, new = self._room()
        if not self._open:
            self._unpack(old)
            self._open = True
        return old, new

    def settle(self) -> None:
        """Pack what the encoder wrote."""
        _, new = self._room()
        target = self._old if self._new is None else self._new
        self._codec.encode(self._layout, new, self._at, target)
        self.written, self._open = True, False

    def commit(self) -> None:
        """A swap."""
        if self.written and self._new is not None:
            self._old, self._new = self._new, self._old
        self.written = False

    _open = False

    def _unpack(self, values: Array) -> None:
        self._codec.decode(self._layout, self._old.reshape(1, -1), values, self._at)

    def _room(self) -> tuple[Array, Array]:
        """Two arrays of this residual's size, the thread's or stream's own."""
        room = self.memory.room
        return room("residual", self._size, self.dtype), room("new residual", self._size, self.dtype)
