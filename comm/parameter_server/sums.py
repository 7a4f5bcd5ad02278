"""What a server does with one key: hold what was pushed, add it up in rank order, make the answer.

::

    rows    [worker, bytes]     one place per worker: a push is received into its place (copied first, never added
                                to anything), so the sum does not depend on who came first
    home    numbers             the sum: one decode over all rows, in rank order
    answers [2, bytes]          of this round and the last: a pull never reads what the next round writes
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from espresso.comm.keep.residual import Residual
from espresso.comm.keep.store import ResidualStore
from espresso.comm.memory import Codecs
from espresso.comm.messages import Bytes
from espresso.comm.parameter_server.plain import smaller
from espresso.comm.parameter_server.transport import Pending
from espresso.comm.parameter_server.wire import Key
from espresso.compressors.base import Array, Decoding, DrawKey, Encoding, Layout, Segment
from espresso.compressors.rehearsal import rehearse
from espresso.strategies import CompressorSpec, Device, Run, Site

_TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}


LOOK_S = 0.05
"""Where memory is short, until it is looked at again who waits for what."""


class Slots:
    """Memory for what was pushed and not yet added up, limited: who pushes ahead waits.

    Keys take and give whole blocks. Of one job's keys all workers push in the same order, so that a key which has its
    block always gets the rest of its pushes; of several jobs' they may not, and who would wait for memory before the
    push that frees it is given some all the same.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._free: dict[int, list[Bytes]] = {}
        self._allocated = 0
        self._in_use = 0
        self._changed = threading.Condition()

    def take(self, num_bytes: int, holds_up: Callable[[], bool] = lambda: False) -> Bytes:
        """A block; waits while too much is in use. A block larger than the limit is given when nothing else is.

        Args:
            holds_up: whether something waits behind this that others wait for.
        """
        at_once = False
        while True:
            with self._changed:
                if at_once or not self._in_use or self._in_use + num_bytes <= self._limit:
                    return self._taken(num_bytes)
                self._changed.wait(LOOK_S)
            at_once = holds_up()

    def _taken(self, num_bytes: int) -> Bytes:
        self._in_use += num_bytes
        fitting = self._free.get(num_bytes)
        if fitting:
            return fitting.pop()
        while self._allocated and self._allocated + num_bytes > self._limit and self._drop_one():
            pass
        self._allocated += num_bytes
        return np.empty(num_bytes, np.uint8)

    def give(self, block: Bytes) -> None:
        with self._changed:
            self._in_use -= block.nbytes
            self._free.setdefault(block.nbytes, []).append(block)
            self._changed.notify_all()

    def _drop_one(self) -> bool:
        for size, blocks in self._free.items():
            if blocks:
                blocks.pop()
                self._allocated -= size
                return True
        return False


def stretch_of_bytes(num_bytes: int) -> int:
    """Distance of rows: codecs read 8-byte words."""
    return -(-num_bytes // 8) * 8


class KeySum:
    """One key at its server. Its engine's thread calls ``add_up``; receivers fill ``place``."""

    def __init__(self, key: Key, codecs: Codecs, store: ResidualStore, tag: int, engine: int) -> None:
        self.key, self.tag, self.engine = key, tag, engine
        self.announced: set[int] = set()
        self.arrived: set[int] = set()
        self.first_s = 0.0
        self._taking = threading.Lock()
        self.rounds = 0
        self.sends: tuple[list[Pending], list[Pending]] = ([], [])
        self.written_step = -1
        self.residual: Residual | None = None
        self._rows: Bytes | None = None
        self._stride = stretch_of_bytes(key.up_bytes)
        self._answers = np.zeros((2, stretch_of_bytes(key.down_bytes)), np.uint8)
        if key.coded:
            self._prepare_codec(codecs, store)

    def _prepare_codec(self, codecs: Codecs, store: ResidualStore) -> None:
        key = self.key
        self._dtype = np.dtype(key.dtype)
        segments = [Segment(s.tensor, s.start, s.numel) for s in key.stretches]
        self._starts = np.cumsum([0, *(s.numel for s in key.stretches[:-1])]).astype(np.int64)
        chosen = codecs(key.compressor, Device.TRAINING)
        self._codec = smaller(chosen, segments, self._dtype)
        self._layout: Layout = self._codec.compressor.layout(segments, self._dtype)
        assert self._layout.num_bytes == key.up_bytes, "both ends lay payloads out alike"
        self._home: Array = np.zeros(key.numel if key.two_way else 0, self._dtype)
        self._shares_draws = chosen.compressor.traits.summable
        if key.keeps_residual:
            runs = [
                Run(s.tensor, s.start, int(at), 0, s.numel) for s, at in zip(key.stretches, self._starts, strict=True)
            ]
            self.residual = store.new_residual(Site.SERVER, runs, self._dtype, 0, gain=key.gain)
            self._kept_at = np.array(self.residual.starts, np.int64)

    # -- a round ---------------------------------------------------------------------------------

    @property
    def has_block(self) -> bool:
        """Whether there is room for everybody's push."""
        return self._rows is not None

    def take_block(self, slots: Slots, holds_up: Callable[[], bool]) -> None:
        """Have room for everybody's push; waits while memory is short. See :meth:`Slots.take`."""
        with self._taking:  # one taker: a second one would wait for memory that this very key could free
            if self._rows is None:
                self._rows = slots.take(self._stride * len(self.key.workers), holds_up)

    def place(self, worker: int) -> Bytes:
        """Where the push of ``worker`` goes."""
        assert self._rows is not None
        start = self.key.workers.index(worker) * self._stride
        return self._rows[start : start + self.key.up_bytes]

    @property
    def parity(self) -> int:
        return self.rounds % 2

    def add_up(self, step: int, scale: float) -> tuple[Bytes, Bytes]:
        """Sum in rank order, compress once. Returns the answer, and the block that is free again."""
        assert self._rows is not None
        block, self._rows = self._rows, None
        rows = block.reshape(len(self.key.workers), self._stride)[:, : self.key.up_bytes]
        answer = self._answers[self.parity][: self.key.down_bytes]
        if self.key.coded:
            self._add_payloads(rows, answer, step, scale)
        else:
            self._add_numbers(rows, answer)
        self.arrived.clear()
        self.announced.clear()
        self.rounds += 1
        return answer, block

    def _add_numbers(self, rows: npt.NDArray[np.uint8], answer: Bytes) -> None:
        dtype = _TORCH.get(self.key.dtype)
        if dtype is None:
            parts = [row.view(self.key.dtype) for row in rows]
            out = answer.view(self.key.dtype)
            np.copyto(out, parts[0]) if len(parts) == 1 else np.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                np.add(out, part, out=out)
            return
        total = torch.from_numpy(answer).view(dtype)
        total.copy_(torch.from_numpy(np.ascontiguousarray(rows[0])).view(dtype))
        for row in rows[1:]:
            total.add_(torch.from_numpy(np.ascontiguousarray(row)).view(dtype))

    def _add_payloads(self, rows: npt.NDArray[np.uint8], answer: Bytes, step: int, scale: float) -> None:
        key = self.key
        pushed = DrawKey(key.seed, step, key.site, -1)
        if not key.two_way:
            out = answer.view(self._dtype)
            self._codec.decode(Decoding(self._layout, out, self._starts, scale=scale, key=pushed), rows)
            return
        self._codec.decode(Decoding(self._layout, self._home, self._starts, scale=scale, key=pushed), rows)
        # What all payloads drew in common the sum is made of, so compressing it alike loses nothing.
        own = pushed if self._shares_draws else DrawKey(key.seed, step, list(Site).index(Site.SERVER), -1)
        residual = self.residual
        feedback = None if residual is None else residual.feedback(self._kept_at)
        self._codec.encode(Encoding(self._layout, self._home, self._starts, feedback=feedback, key=own), answer)
        self.written_step = step
        if residual is not None:
            residual.settle(own)

    # -- the residual, in units of the sum -------------------------------------------------------

    def settle(self, kept: bool) -> None:
        """The last round counts, or never happened."""
        if self.residual is not None and kept:
            self.residual.commit()
        elif self.residual is not None:
            self.residual.discard()

    def settle_unless(self, discarded: frozenset[int]) -> None:
        self.settle(self.written_step not in discarded)


# -- what it takes -------------------------------------------------------------------------------

SUM_ELEMENTS = 1 << 20
_REPEATS = 5


def measure_server(
    codecs: Codecs, spec: CompressorSpec | None, sizes: Sequence[int], num_workers: int
) -> dict[str, Any]:
    """Times on one engine thread, medians, in microseconds.

    Returns:
        ``sum_us_per_kb`` of contributions; ``encode`` and ``decode``: (elements, us) per size, decode per payload.
    """
    a, b = np.ones(SUM_ELEMENTS, np.float32), np.ones(SUM_ELEMENTS, np.float32)
    out = np.empty_like(a)
    sum_us = _time(lambda: np.add(a, b, out=out)) * max(num_workers - 1, 1)  # the first two are added in one go
    result: dict[str, Any] = {"sum_us_per_kb": sum_us / (num_workers * a.nbytes / 1e3), "encode": [], "decode": []}
    if spec is None:
        return result
    codec = codecs(spec, Device.TRAINING)
    for size in sizes:
        encode, decode, *_ = rehearse(codec, [Segment("probe", 0, size)], rows=num_workers)
        result["encode"].append((size, _time(encode)))
        result["decode"].append((size, _time(decode) / num_workers))
    return result


def _time(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e6)
    return median(times)
