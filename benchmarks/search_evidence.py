"""Where a certified gap is large: is the bound or the strategy at fault? Brute force on a sub-job says.

A sub-job keeps the last few tensors to be ready, with their gaps, on the same cluster. Every assignment of the
leaves that no other beats in lanes, chain, host time and first training work is simulated, unpartitioned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from espresso.candidates import every_choice, units_of
from espresso.evaluator import Evaluator
from espresso.job import Job
from espresso.presets import job_from_trace
from espresso.search import search
from espresso.strategies import CompressorSpec

TENSORS = 4
MOST = 3_000_000


def sub_job(job: Job, count: int = TENSORS) -> Job:
    """The last ``count`` large tensors to be ready; the first of them is ready at once."""
    largest = max(tensor.numel for tensor in job.tensors)
    large = [i for i, tensor in enumerate(job.tensors) if tensor.numel >= largest / 64][-count:]
    ready = np.cumsum(job.gaps_us)[large]
    gaps = tuple(float(gap) for gap in np.diff(ready, prepend=ready[0]))
    return replace(job, tensors=tuple(job.tensors[i] for i in large), gaps_us=gaps)


def brute_force(job: Job, spec: CompressorSpec) -> tuple[float, int]:
    """The least iteration time over all assignments, and how many there are; fewer leaves where they are too many."""
    evaluator = Evaluator(job, units_of(job), 0)
    options = evaluator.options(every_choice(job, (spec,)))
    while np.prod([float(len(row)) for row in options]) > MOST:
        longest = max(range(len(options)), key=lambda index: len(options[index]))
        alone = evaluator.candidates.alone_us(options[longest])
        options[longest] = options[longest][np.argsort(alone)[: len(options[longest]) * 3 // 4]]
    best, total = np.inf, 0
    inner = np.stack(np.meshgrid(*options[1:], indexing="ij"), axis=-1).reshape(-1, len(options) - 1)
    for first in options[0]:
        batch = np.column_stack([np.full(len(inner), first), inner]).astype(np.int64)
        index, makespan, _ = evaluator.batch(batch, best, cut=True)
        best = makespan if index >= 0 else best
        total += len(batch)
    return job.forward_us + best + job.optimizer_us, total


def evidence(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per case whose gap is above 8 %."""
    rows = []
    for case in cases:
        if case["gap"] <= 0.08:
            continue
        job = sub_job(job_from_trace(case["trace"], 8, 8, case["cluster"]))
        result = search(job, case["compressor"], partitions=(0,))
        best, assignments = brute_force(job, CompressorSpec.parse(case["compressor"]))
        rows.append(
            {
                **{key: case[key] for key in ("trace", "cluster", "compressor", "gap")},
                "sub_job_tensors": len(job.tensors),
                "assignments": assignments,
                "optimum_us": best,
                "found_us": result.predicted_us,
                "bound_us": result.lower_bound_us,
            }
        )
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for people."""
    out = ["", "Gaps above 8 %: brute force on the last large tensors (unpartitioned) says who is at fault.", "",
           "| trace | cluster | compressor | gap | assignments | strategy over optimum | optimum over bound |",
           "|" + " --- |" * 7]  # fmt: skip
    for r in rows:
        out.append(
            f"| {r['trace']} | {r['cluster']} | {r['compressor']} | {100 * r['gap']:.1f} % |"
            f" {r['assignments']:,} | {100 * (r['found_us'] / r['optimum_us'] - 1):.1f} % |"
            f" {100 * (r['optimum_us'] / r['bound_us'] - 1):.1f} % |"
        )
    return out if rows else []


__all__ = ["brute_force", "evidence", "markdown", "sub_job"]
