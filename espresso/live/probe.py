"""Measuring the two probes of :mod:`espresso.model.probe` on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from espresso.live.machine import machine_facts
from espresso.model.probe import Probe

COPY_BYTES = 64 << 20
"""More than caches hold: gradients and what compressors read come from memory."""

SIDE = 1024
REPEATS = 15


def measure_probe(threads: int | None = None) -> Probe:
    """Medians of copies and of products; on the GPU where there is one.

    Args:
        threads: as many as a rank has; None: as PyTorch is set.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    left = torch.ones(SIDE, SIDE, device=device)
    product = torch.empty_like(left)
    copy_s = _median_s(lambda: target.copy_(source), device)
    matmul_s = _median_s(lambda: torch.mm(left, left, out=product), device)
    return Probe(
        device.type,
        0 if device.type == "cuda" else torch.get_num_threads(),
        COPY_BYTES / copy_s / 1e9,
        2 * SIDE**3 / matmul_s / 1e9,
        machine_facts(),
    )


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(REPEATS + 2):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return median(taken[2:])
