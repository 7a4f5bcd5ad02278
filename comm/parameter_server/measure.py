"""What a server's processor can do: timed there, on request, for the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from espresso.comm.memory import Codecs
from espresso.compressors.base import Decoding, Encoding, Feedback, Segment
from espresso.strategies import CompressorSpec, Device

SUM_ELEMENTS = 1 << 20
_REPEATS = 5

MEASURED_GAIN = 0.5
"""Any but 1: encoders that do not fuse the feedback gain take one more pass for it."""


def measure_server(
    codecs: Codecs, spec: CompressorSpec | None, sizes: Sequence[int], num_workers: int
) -> dict[str, Any]:
    """Times on one engine thread, medians, in microseconds.

    Returns:
        ``sum_us_per_kb`` of contributions; ``encode`` and ``decode``: (elements, us) per size, decode per payload.
    """
    a, b = np.ones(SUM_ELEMENTS, np.float32), np.ones(SUM_ELEMENTS, np.float32)
    out = np.empty_like(a)
    sum_us = _time(lambda: np.add(a, b, out=out))
    result: dict[str, Any] = {"sum_us_per_kb": sum_us / (2 * a.nbytes / 1e3), "encode": [], "decode": []}
    if spec is None:
        return result
    codec = codecs(spec, Device.TRAINING)
    for size in sizes:
        layout = codec.compressor.layout([Segment("probe", 0, size)])
        starts = np.zeros(1, np.int64)
        source = np.random.default_rng(0).standard_normal(size).astype(np.float32)
        rows = np.zeros((num_workers, layout.num_bytes), np.uint8)
        feedback = None
        if codec.compressor.traits.error_feedback:
            feedback = Feedback(np.zeros(size, np.float32), np.zeros(size, np.float32), starts, MEASURED_GAIN)

        encoding = Encoding(layout, source, starts, feedback=feedback)
        result["encode"].append((size, _time(partial(codec.encode, encoding, rows[0]))))
        rows[1:] = rows[0]
        decode = partial(codec.decode, Decoding(layout, source, starts), rows)
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
