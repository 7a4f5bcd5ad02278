"""Where a certified gap is large: is the bound or the strategy at fault? Brute force on a sub-job says.

A sub-job keeps a few large tensors that are ready one after the other, with their gaps, on the same cluster; of all
there are in a job the one with the largest certified gap is looked at. Every assignment of the leaves that no other
beats in lanes, chain, host time and first training work is simulated, unpartitioned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from espresso.model.job import Job
from espresso.search.candidates import every_choice, units_of
from espresso.search.evaluator import Evaluator
from espresso.search.result import SearchResult
from espresso.search.search import search
from espresso.strategies import CompressorSpec

TENSORS = 3
MOST = 6_000_000
_STRIDE = 3


def sub_jobs(job: Job, count: int = TENSORS) -> Iterator[Job]:
    """Runs of ``count`` large tensors; the first of each is ready at once. The last run ends the job."""
    largest = max(tensor.numel for tensor in job.tensors)
    by_size = sorted(range(len(job.tensors)), key=lambda i: -job.tensors[i].numel)
    # (Where fewer are large, the largest there are.)
    large = sorted(i for n, i in enumerate(by_size) if n < count or job.tensors[i].numel >= largest / 64)
    times = np.cumsum(job.gaps_us)
    for end in range(len(large), count - 1, -_STRIDE):
        few = large[end - count : end]
        gaps = tuple(float(gap) for gap in np.diff(times[few], prepend=times[few[0]]))
        yield replace(job, tensors=tuple(job.tensors[i] for i in few), gaps_us=gaps)


def hardest(job: Job, compressor: str) -> tuple[Job, SearchResult]:
    """The sub-job with the largest certified gap, and its search."""
    found = [(part, search(part, compressor, partitions=(0,))) for part in sub_jobs(job)]
    return max(found, key=lambda row: row[1].gap)


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


def evidence(cases: Sequence[dict[str, Any]], job_of: Callable[[str, str], Job]) -> list[dict[str, Any]]:
    """One row per case whose gap is above 8 %; ``job_of`` makes a job of a name and a cluster preset."""
    rows = []
    for case in cases:
        if case["gap"] <= 0.08:
            continue
        job, result = hardest(job_of(case["trace"], case["cluster"]), case["compressor"])
        best, assignments = brute_force(job, CompressorSpec.parse(case["compressor"]))
        rows.append(
            {
                **{key: case[key] for key in ("trace", "cluster", "compressor", "gap")},
                "sub_job_tensors": len(job.tensors),
                "sub_job_gap": result.gap,
                "assignments": assignments,
                "optimum_us": best,
                "found_us": result.predicted_us,
                "bound_us": result.lower_bound_us,
            }
        )
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for people."""
    columns = (
        "trace", "cluster", "compressor", "gap", "gap of the sub-job", "assignments", "strategy over optimum",
        "optimum over bound",
    )  # fmt: skip
    out = [
        "",
        f"Gaps above 8 %: brute force on {TENSORS} large tensors (unpartitioned; those of the largest gap) says who is"
        " at fault.",
        "",
        f"| {' | '.join(columns)} |",
        "|" + " --- |" * len(columns),
    ]
    for r in rows:
        strategy, bound = r["found_us"] / r["optimum_us"] - 1, r["optimum_us"] / r["bound_us"] - 1
        out.append(
            f"| {r['trace']} | {r['cluster']} | {r['compressor']} | {100 * r['gap']:.1f} % |"
            f" {100 * r['sub_job_gap']:.1f} % | {r['assignments']:,} | {100 * strategy:.1f} % | {100 * bound:.1f} % |"
        )
    return out if rows else []
