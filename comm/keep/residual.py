"""One residual: what an encoder reads and writes, and how it is kept in between.

Kept in full, the law is exact: what was sent plus what is kept equals what came in. Kept narrower it loses what the
rounding loses, in every iteration and for every element, and no more::

    sum sent + e_T + sum of r_t = sum given + e_0

    float32   r = 0
    bf16      |r| < 2^-7 |e|                     half the memory
    int8      |r| < max |e| of its block / 126   a quarter, and 1/64: blocks of 256

where e is what the encoder left. What was lost is gone; error feedback goes on from what was kept. Rounding goes up or
down at random, and on average loses nothing: to the nearest, a residual would stop to grow where a gradient is less
than half of what numbers are apart there, which with a gain below 1 takes a sparsifier most of a steady gradient.

Encoders may hold part of it back (``gain``, see :class:`espresso.compressors.Feedback`): the buffers then hold
gain * e, what the next iteration adds. Everything that leaves this file (``read``, ``add``, the norm) is e itself.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from espresso.comm.memory import HostMemory, Memory
from espresso.compressors import Segment, create
from espresso.compressors.base import Decoding, DitheringCodec, DrawKey, Encoding, Feedback, Starts
from espresso.strategies import RESIDUAL_DTYPES, Run, Site

Array = npt.NDArray[Any]

Places = npt.NDArray[np.int64]
"""Indices, ascending."""

FULL = RESIDUAL_DTYPES[0]
"""As wide as encoders work: float64 where gradients are."""


def check_storage(storage: str) -> str:
    """Raise ValueError unless residuals can be kept so."""
    if storage not in RESIDUAL_DTYPES:
        raise ValueError(f"residual_dtype must be one of {', '.join(RESIDUAL_DTYPES)}, got {storage!r}")
    return storage


class Loan:
    """Numbers as they were when they were lent, on the host. Nothing is copied: as long as somebody holds the loan, who
    lent them writes elsewhere.

    Args:
        kept: an array, or what ``unpack`` makes one of.
        gain: what the numbers are multiplied by.
    """

    def __init__(self, kept: Array, unpack: Callable[[Array], Array] | None = None, gain: float = 1.0) -> None:
        self.kept, self._unpack, self._gain = kept, unpack, gain

    @property
    def is_packed(self) -> bool:
        """Whether a stretch of it can only be read with all of it."""
        return self._unpack is not None

    def read(self, start: int, numel: int) -> Array:
        """A copy of a stretch. Any thread may ask."""
        values = self.kept if self._unpack is None else self._unpack(self.kept)
        found: Array = values[start : start + numel]
        return found.copy() if self._gain == 1 else found / found.dtype.type(self._gain)


class Residual:
    """The residual of one partition at one site on this rank, over its region.

    Kept are two buffers, or without transactions one, and another while an encoder runs: numbers as encoders read and
    write them, or payloads of a codec, which are unpacked while an encoder runs. Both are packed then, so that a
    discarded iteration leaves the first as it was, bit for bit. There are none before :meth:`begin`, so that those of
    another plan can be gone by then.

    Args:
        runs: the tensor stretches of the region, in order; run i lies at ``starts[i]`` of the buffers.
        replica: 0 on the ranks that answer for it when it is carried or gathered, else above 0.
        memory: where its step runs.
        transactional: whether an iteration may be discarded.
        gain: the part of what was not sent that the next iteration adds.
        holds: whether encoders :meth:`hold`: what is packed has an unpacked twin then.
    """

    def __init__(
        self, site: Site, runs: tuple[Run, ...], starts: tuple[int, ...], dtype: Any, replica: int, memory: Memory, *,
        transactional: bool = True, gain: float = 1.0, storage: str = FULL, holds: bool = False,
    ) -> None:  # fmt: skip
        self.site, self.runs, self.starts, self.dtype, self.replica = site, runs, starts, dtype, replica
        self.memory, self.gain, self.storage = memory, gain, storage
        self.size = starts[-1] + runs[-1].numel if runs else 0
        self.written = False
        self._key = DrawKey(site=list(Site).index(site))
        self._transactional = transactional
        self._packer = None if storage == FULL else _Packer(memory, runs, starts, self.size, dtype, storage)
        self._loan: Callable[[], Loan | None] = lambda: None
        self._old: Array
        self._new: Array | None = None
        each = self.size * np.dtype(dtype).itemsize if self._packer is None else self._packer.num_bytes
        self.num_bytes = each * (2 if transactional else 1)
        if holds and self._packer is not None:
            self.num_bytes += self.size * np.dtype(dtype).itemsize

    def begin(self) -> None:
        """Keep zeros, in buffers of the stream that this is called on."""
        self._old = self._room()
        self._new = self._room() if self._transactional else None

    @property
    def place(self) -> Hashable:
        """What it keeps, and how: residuals of which this is equal differ in no more than their numbers."""
        runs = tuple((run.tensor, run.tensor_start, run.numel) for run in self.runs)
        return self.site, runs, np.dtype(self.dtype), self.replica, id(self.memory), self.gain, self.storage

    def inherit(self, other: Residual) -> None:
        """Keep what another one of the same place keeps, in its buffers; it has none then."""
        self._old, self._new, self._loan, self._key = other._old, other._new, other._loan, other._key
        other.end()

    def end(self) -> None:
        """Keep nothing, and no buffers."""
        del self._old
        self._new = None

    def _room(self) -> Array:
        room: Array = self.memory.zeros(self.size, self.dtype)
        return room if self._packer is None else self._packer.packed(room)

    @property
    def old(self) -> Array:
        """What is kept, times the gain, a copy where it is packed; assign to change it."""
        return self._old if self._packer is None else self._packer.unpacked(self._old)

    @old.setter
    def old(self, values: Array) -> None:
        self._old = values if self._packer is None else self._packer.packed(values)

    # -- in an iteration -------------------------------------------------------------------------

    def feedback(self, starts: Starts) -> Feedback:
        """What an encoder reads and writes, for segments that begin there; until :meth:`settle`, on this thread."""
        if self._packer is not None:
            return Feedback(*self._packer.open(self._old), starts, self.gain)
        if self._new is None:
            self._new = self._room()
        return Feedback(self._old, self._new, starts, self.gain)

    def hold(self) -> None:
        """The encoder goes on in a later step; others use this thread's rooms in between."""
        if self._packer is not None:
            self._packer.hold()

    def settle(self, key: DrawKey) -> None:
        """The encoder has written everything.

        Args:
            key: of this iteration, for how what is kept narrowly is rounded.
        """
        if self._packer is not None:
            if self._new is None:
                self._take_back()
            self._packer.close(self._old if self._new is None else self._new, key, for_good=not self._transactional)
        elif not self._transactional and self._new is not None:
            self.memory.let_go(self._old)
            self._old, self._new = self._new, None
        self.written, self._key = True, key

    def commit(self) -> None:
        """The iteration counts: what was written becomes what is kept, if it is not already."""
        if self.written and self._transactional and self._new is not None:
            self._old, self._new = self._new, self._room() if self._is_lent() else self._old
        self.written = False

    def discard(self) -> None:
        """It never happened. Of what was overwritten all the same no inf or NaN is kept: they would stay for good."""
        if self.written and not self._transactional:
            kept = self.old
            _clean(kept)
            self.old = kept
        self.written = False

    # -- between iterations ----------------------------------------------------------------------

    def lend(self) -> Loan:
        """What is kept, as it is now: without a copy on the host, as one from a device."""
        if not isinstance(self.memory, HostMemory):
            return Loan(self.read(0, self.size))
        held = self._loan()
        if held is None or held.kept is not self._old:
            held = Loan(self._old, None if self._packer is None else self._packer.unpacked, self.gain)
            self._loan = weakref.ref(held)
        return held

    def _is_lent(self) -> bool:
        held = self._loan()
        return held is not None and held.kept is self._old

    def _take_back(self) -> None:
        """Before what is kept is changed in place."""
        if self._is_lent():
            self._old = self._old.copy()

    def read(self, start: int, numel: int) -> Array:
        """A copy of what is kept of a stretch, on the host."""
        values = self.memory.read(self.old, start, numel)
        return values if self.gain == 1 else values / values.dtype.type(self.gain)

    def picked(self, where: Sequence[Places]) -> list[torch.Tensor]:
        """What is kept, times the gain, at each of these places, where its step runs."""
        whole = self.memory.tensor(self.old)
        return [whole.index_select(0, torch.from_numpy(places).to(whole.device, non_blocking=True)) for places in where]

    def add(self, parts: Iterable[tuple[int, Array]]) -> None:
        """Add host numbers to what is kept from each place on; where it is packed it is rounded once more, to the
        nearest: plans change seldom, and what moves fits already as a rule.
        """
        self._take_back()
        kept = self.old
        for start, values in parts:
            self.memory.add(kept, start, values if self.gain == 1 else values * values.dtype.type(self.gain))
        self.old = kept

    def scale(self, factors: Mapping[str, float]) -> None:
        """Multiply what is kept of the named tensors; where it is packed it is rounded once more, without bias: a
        factor may be near 1, and there is one in every step where a learning rate moves.
        """
        self._take_back()
        kept = self.old
        for run, start in zip(self.runs, self.starts, strict=True):
            if run.tensor in factors:
                kept[start : start + run.numel] *= factors[run.tensor]
        # Drawn anew, and alike on replicas: as for the last iteration, but as if at another site.
        self._key = replace(self._key, site=self._key.site + len(Site))
        self._old = kept if self._packer is None else self._packer.packed(kept, self._key)

    def clear(self) -> None:
        """Keep nothing."""
        self._take_back()
        kept = self.old
        kept[:] = 0
        self.old = kept

    def square_sum(self) -> float:
        """Of what is kept."""
        return self.memory.square_sum(self.old) / self.gain**2

    def tensor_at(self, start: int) -> str:
        """The tensor whose numbers lie here in the buffers."""
        return self.runs[bisect_right(self.starts, start) - 1].tensor

    def locate(self, group_start: int) -> int:
        """Where the element at this position of the group lies in the buffers."""
        index = bisect_right(self.runs, group_start, key=lambda run: run.group_start) - 1
        return self.starts[index] + group_start - self.runs[index].group_start


def _clean(numbers: Array) -> None:
    """Zeros in place of inf and NaN."""
    numbers[~(abs(numbers) < math.inf)] = 0


class _Packer:
    """Unpacks a residual while an encoder runs, and packs it.

    The room for unpacked numbers belongs to the thread, on a GPU to the stream, and is as large as the largest residual
    that it has met, twice. Around the encoder's own there is a pass to unpack and two to pack, a launch each on a GPU.

    Attributes:
        num_bytes: of a payload.
    """

    def __init__(
        self, memory: Memory, runs: tuple[Run, ...], starts: tuple[int, ...], size: int, dtype: Any, storage: str
    ) -> None:
        self._memory, self._size, self._dtype = memory, size, dtype
        self._codec = cast(DitheringCodec, memory.codec(create(f"{storage}:raw_below=1")))
        # Run by run: what lies between them in the rooms is anything, and must not get into a block's scale.
        segments = [Segment(run.tensor, run.tensor_start, run.numel) for run in runs]
        self._starts = np.array(starts, np.int64)
        self._layout = self._codec.compressor.layout(segments, dtype)
        self.num_bytes = self._layout.num_bytes
        self._is_open = self._holds = False
        self._held: Array | None = None

    def packed(self, values: Array, key: DrawKey | None = None) -> Array:
        """A payload of these numbers: rounded to the nearest, or by a key without bias, which moves them."""
        payload: Array = self._memory.zeros(self._layout.num_bytes, np.uint8)
        if key is not None:
            self._codec.dither(Encoding(self._layout, values, self._starts, key=key))
        self._pack(values, payload)
        return payload

    def unpacked(self, payload: Array) -> Array:
        """The numbers of a payload."""
        values: Array = self._memory.zeros(self._size, self._dtype)
        self._unpack(payload, values)
        return values

    def open(self, payload: Array) -> tuple[Array, Array]:
        """What an encoder reads and what it writes, until :meth:`close`; the same for all encodes of a step."""
        old, new = self._rooms()
        if not self._is_open:
            self._unpack(payload, old)
            if self._holds:
                new[:] = self._held
            self._is_open = True
        return old, new

    def hold(self) -> None:
        """What is written so far is for a later step."""
        if self._held is None:
            self._held = self._memory.zeros(self._size, self._dtype)
        self._held[:] = self._rooms()[1]
        self._is_open, self._holds = False, True

    def close(self, payload: Array, key: DrawKey, *, for_good: bool = False) -> None:
        """The encoder has written everything: pack it, rounded without bias. What overwrites all that is kept has no
        inf or NaN, since a payload with one decodes to nothing else.
        """
        numbers = self._rooms()[1]
        if for_good and not isinstance(self._memory, HostMemory):  # whose encoders do not wait for what they find
            _clean(numbers)
        self._codec.dither(Encoding(self._layout, numbers, self._starts, key=key))
        if not self._pack(numbers, payload) and for_good:
            _clean(numbers)
            self._pack(numbers, payload)
        self._is_open = self._holds = False

    def _pack(self, values: Array, payload: Array) -> bool:
        """Whether all of it was finite; anything on a device that is not waited for."""
        return self._codec.encode(Encoding(self._layout, values, self._starts), payload)

    def _unpack(self, payload: Array, values: Array) -> None:
        self._codec.decode(Decoding(self._layout, values, self._starts), payload.reshape(1, -1))

    def _rooms(self) -> tuple[Array, Array]:
        room = self._memory.room
        return room("residual", self._size, self._dtype), room("new residual", self._size, self._dtype)
