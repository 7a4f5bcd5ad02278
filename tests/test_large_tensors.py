"""Beyond 2^31 elements: nobody has the memory for such tensors here, but their ends can be tried.

Arrays are reserved, not filled: only the pages that a kernel touches exist. The CUDA sources run on the host
(``tests/emulator``), beside their Numba twins.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compressor_cases import numbers

from espresso.comm.keep.store import FactorStore
from espresso.compressors import (
    Correction,
    Decoding,
    DrawKey,
    Encoding,
    Feedback,
    Segment,
    create,
    cuda_codec,
    host_codec,
)
from espresso.compressors.cuda.momentum import CudaMover
from espresso.compressors.momentum import HOST_MOVER
from espresso.cpu_offload import work
from tests.backends import needs_compiler
from tests.emulator import EmulatedDevice

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python names it from 3.13 on
FAR = (1 << 31) + 12_345
SPECS = (
    "none",
    "fp16",
    "fp8",
    "int8",
    "int4",
    "efsignsgd",
    "efsignsgd:block=0",
    "onebit",
    "twobit",
    "topk",
    "dgc",
    "threshold:threshold=1.5",
    "stc",
    "randomk",
    "qsgd",
    "natural",
)
KEY = DrawKey(seed=3, step=5)


def reserved(numel: int, dtype: Any) -> np.ndarray:
    """Zeros that take no memory until they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        return np.frombuffer(mmap.mmap(-1, numel * np.dtype(dtype).itemsize, flags=flags), dtype)
    except OSError as error:
        pytest.skip(f"this machine reserves no {numel} numbers: {error}")


@needs_compiler
@pytest.mark.parametrize("spec", SPECS)
def test_segments_that_begin_far_out(spec: str) -> None:
    """In gradients, in both residuals, in the target, and in payloads that lie more than 2^31 bytes apart."""
    sizes, at = (5003, 33, 9001), np.array([0, 5003, 5036], np.int64)
    total = sum(sizes)
    outcomes = []
    for codec, far in ((host_codec(create(spec)), 0), (cuda_codec(create(spec), EmulatedDevice()), FAR)):
        layout = codec.compressor.layout([Segment(f"t{i}", 0, n) for i, n in enumerate(sizes)])
        source, old, new, target = (reserved(far + total, np.float32) for _ in range(4))
        source[far:], old[far:] = numbers(total, np.float32, 1), numbers(total, np.float32, 2)
        apart = layout.num_bytes + (far and 1 << 31)
        payloads = reserved(2 * apart + layout.num_bytes, np.uint8)
        rows = np.lib.stride_tricks.as_strided(payloads, (3, layout.num_bytes), (apart, 1))
        for row, scale in zip(rows, (0.5, 1.0, 2.0), strict=True):
            feedback = Feedback(old, new, at + far, 0.25)
            assert codec.encode(Encoding(layout, source, at + far, scale=scale, feedback=feedback, key=KEY), row)
        assert codec.decode(Decoding(layout, target, at + far, scale=0.5, key=KEY), rows)
        outcomes.append([part.tobytes() for part in (*rows, new[far:], target[far:])])
    assert outcomes[0] == outcomes[1]
    assert any(outcomes[0][-1])


class LastTiles(EmulatedDevice):
    """Runs the last tiles of a table only."""

    def launch(self, file: str, kernel: str, grid: int, threads: int, arguments: Sequence[Any]) -> None:
        rows, tiles, _, *rest = arguments
        super().launch(file, kernel, 2, threads, (rows, tiles[-2:].clone(), np.int64(2), *rest))


@needs_compiler
@pytest.mark.parametrize("spec", ["none", "fp16", "int8", "int4", "efsignsgd", "twobit", "randomk", "qsgd", "natural"])
def test_the_end_of_a_long_segment(spec: str) -> None:
    """One segment of 2^31 and some elements: its last tiles, and what the host makes of the same chunk."""
    numel, end = (1 << 31) + 5003, 1 << 31
    outcomes = []
    for codec in (host_codec(create(spec)), cuda_codec(create(spec), LastTiles())):
        layout = codec.compressor.layout([Segment("t", 0, numel)])
        whole = work.work_of(layout)
        work._CACHE[layout] = replace(whole, chunks=whole.chunks[-1:], raw_chunks=whole.raw_chunks[-1:])
        source, old, new = (reserved(numel, np.float32) for _ in range(3))
        source[end:], old[end:] = numbers(5003, np.float32, 1), numbers(5003, np.float32, 2)
        starts, payload = np.zeros(1, np.int64), reserved(layout.num_bytes, np.uint8)
        keeps = codec.compressor.traits.error_feedback
        feedback = Feedback(old, new, starts, 0.25) if keeps else None
        assert codec.encode(Encoding(layout, source, starts, feedback=feedback, key=KEY), payload)
        outcomes.append((codec, layout, payload, new[end:].tobytes()))
    assert outcomes[0][3] == outcomes[1][3]
    sums = []
    for codec, layout, _, _ in outcomes:
        for _, _, payload, _ in outcomes:  # each reads both
            target = reserved(numel, np.float32)
            assert codec.decode(Decoding(layout, target, np.zeros(1, np.int64), key=KEY), payload.reshape(1, -1))
            sums.append(target[end:].tobytes())
    assert len(set(sums)) == 1
    assert any(sums[0])


@needs_compiler
def test_slots_at_the_end_of_a_long_segment() -> None:
    """Written by hand, since no encode fits: two slots in the first span, the others in the last of 32 769."""
    numel, end = (1 << 31) + 5003, 1 << 31
    wanted = [0, 65535, end, end + 4096, end + 5002]
    compressor, starts = create("topk:ratio=1e-6"), np.zeros(1, np.int64)
    layout = compressor.layout([Segment("t", 0, numel)])
    k = int(layout.counts[0])
    payload = np.zeros(layout.num_bytes, np.uint8)
    payload[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
    body = payload[int(layout.offsets[0]) :]
    body[:4].view(np.uint32)[0] = len(wanted)
    body[8:].view(np.float32)[: len(wanted)] = 1 + np.arange(len(wanted))
    body[8 + 4 * k :].view(np.uint32)[: 1 << 15] = 2
    body[8 + 4 * k + (4 << 15) :].view(np.uint16)[: len(wanted)] = [index % 65536 for index in wanted]
    assert [indices.tolist() for _, indices in compressor.sent(layout, payload)] == [wanted]
    host = host_codec(compressor)
    whole = work.work_of(layout)
    work._CACHE[layout] = replace(whole, chunks=whole.chunks[-1:])
    for codec in (host, cuda_codec(compressor, LastTiles())):
        target = reserved(numel, np.float32)
        assert codec.decode(Decoding(layout, target, starts), payload.reshape(1, -1))
        assert target[end:].nonzero()[0].tolist() == [0, 4096, 5002]
        assert target[wanted[2:]].tolist() == [3, 4, 5]
    for mover in (HOST_MOVER, CudaMover(EmulatedDevice())):
        velocity = reserved(numel, np.float32)
        velocity[wanted] = velocity[end + 7] = 1
        given: list[Any] = [velocity, payload]
        if mover is not HOST_MOVER:
            given = [torch.from_numpy(array) for array in given]
        mover.mask(compressor, layout, given[1], Feedback(given[0][:0], given[0], starts))
        assert not velocity[wanted].any()
        assert velocity[end + 7] == 1


@needs_compiler
def test_velocities_that_lie_far_out() -> None:
    rule, numels, at = Correction(0.9, nesterov=True), np.array([5003, 900]), np.array([0, 5003])
    compressor = create("topk:ratio=0.05")
    layout = compressor.layout([Segment("a", 0, 5003), Segment("b", 0, 900)])
    payload = np.zeros(layout.num_bytes, np.uint8)
    host_codec(compressor).encode(Encoding(layout, numbers(5903, np.float32, 3), at), payload)
    outcomes = []
    for mover, far in ((HOST_MOVER, 0), (CudaMover(EmulatedDevice()), FAR)):
        arrays = [reserved(far + 5903, np.float32) for _ in range(4)]
        arrays[0][far:], arrays[1][far:] = numbers(5903, np.float32, 1), numbers(5903, np.float32, 2)
        given: list[Any] = arrays if far == 0 else [torch.from_numpy(array) for array in arrays]
        velocity = Feedback(given[1], given[2], at + far)
        mover.advance(rule, numels, given[0], at + far, 0.5, velocity, given[3], at + far)
        mover.mask(compressor, layout, payload if far == 0 else torch.from_numpy(payload), velocity)
        outcomes.append([array[far:].tobytes() for array in arrays[2:]])
    assert outcomes[0] == outcomes[1]


@needs_compiler
def test_matrices_that_lie_far_out() -> None:
    """The device's codec against itself nearer by: its sums depend on the matrix alone."""
    outcomes = []
    for far in (0, FAR):
        codec: Any = cuda_codec(create("powersgd:rank=2,start_iter=0"), EmulatedDevice())
        layout = codec.compressor.layout([Segment("w", 0, 6000, (100, 60)), Segment("b", 0, 60, (60,))])
        starts = np.array([far, far + 6000])
        source, old, new, target = (torch.from_numpy(reserved(far + 6060, np.float32)) for _ in range(4))
        source[far:] = torch.from_numpy(numbers(6060, np.float32, 1))
        first, second = (torch.zeros(codec.num_values(layout, n)) for n in (0, 1))
        kept, factors = Feedback(old, new, starts, 0.5), FactorStore()
        codec.encode_values(Encoding(layout, source, starts, scale=0.5, feedback=kept, key=KEY), first, factors=factors)
        codec.transform_values(layout, first, second, feedback=kept)
        assert codec.decode_values(Decoding(layout, target, starts, scale=0.5), first, second, factors=factors)
        outcomes.append([part.numpy().tobytes() for part in (first, second, new[far:], target[far:])])
    assert outcomes[0] == outcomes[1]
