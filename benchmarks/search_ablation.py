"""What each phase of the search is worth: searches without one of them, beside the whole search.

    python -m benchmarks.search_ablation

Cases are the published traces on every cluster preset, random jobs, the same in DDP's buckets, and small jobs of a
few large tensors; compressors take turns. Writes ``benchmarks/results/search_ablation.json`` and ``.md``. Times are
those of the process on the processor, summed over the cases and divided by the whole search's of the same run. A phase
that was measured and then deleted keeps its row.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.search_evidence import sub_jobs
from benchmarks.search_models import random_model_job
from espresso.model.bucket_caps import rebucketed
from espresso.model.job import Job
from espresso.model.presets import cluster_names, job_from_trace, trace_names
from espresso.search.candidates import units_of
from espresso.search.local_search import NO_EFFORT, Effort
from espresso.search.search import search
from espresso.strategies import Mode

RESULTS = Path(__file__).parent / "results" / "search_ablation.json"
SHAPE = (8, 8)
COMPRESSORS = ("randomk:ratio=0.01", "dgc:ratio=0.01", "efsignsgd")
RANDOM_JOBS = 14
BUCKET_MB = 25
WHOLE = "the whole search"


@dataclass(frozen=True)
class Case:
    """One job and the compressor that it is searched for."""

    name: str
    job: Job
    compressor: str


def cases() -> Iterator[Case]:
    """Every case, the compressors in turn."""
    named: list[tuple[str, Job]] = []
    for trace in trace_names():
        for preset in cluster_names():
            job = job_from_trace(trace, *SHAPE, preset)
            named.append((f"{trace}, {preset}", job))
            named.append((f"{trace}, {preset}, large tensors only", next(sub_jobs(job))))
            named.append((f"{trace}, {preset}, in DDP's buckets", _in_buckets(job)))
    presets = cluster_names()
    named += [(f"random {seed}", random_model_job(seed, presets[seed % len(presets)])) for seed in range(RANDOM_JOBS)]
    for number, (name, job) in enumerate(named):
        yield Case(name, job, COMPRESSORS[number % len(COMPRESSORS)])


def _in_buckets(job: Job) -> Job:
    ddp = replace(job, mode=Mode.DDP, buckets=job.laid_out, bucket_ready_us=job.ready_us)
    return rebucketed(ddp, BUCKET_MB)


def efforts(units: int) -> dict[str, Effort]:
    """The whole search, and it without one phase at a time."""
    whole = Effort.for_units(units).patient
    return {
        WHOLE: whole,
        "one partition size": replace(whole, sizes=1),
        "no start from longer chains": replace(whole, further=()),
        "no blocks": replace(whole, starts=1, descents=0),
        "half the events": replace(whole, events=whole.events // 2),
        "blocks from one start": replace(whole, starts=1),
        "no branching": replace(whole, branching=0),
        "no patient ascents": replace(whole, polish=0),
        "no orders": replace(whole, orders=0),
        "no local search": NO_EFFORT,
    }


def measure(case: Case) -> list[dict[str, Any]]:
    """One row per effort. What a search leaves for the next one (options, prices, compiled kernels) is made before."""
    found, tried = [], efforts(len(units_of(case.job)))
    search(case.job, case.compressor, effort=tried[WHOLE])
    for name, effort in tried.items():
        began = time.process_time()
        result = search(case.job, case.compressor, effort=effort)
        spent = time.process_time() - began
        found.append(
            {
                "case": case.name, "compressor": case.compressor, "effort": name, "gap": result.gap,
                "predicted_us": result.predicted_us, "bound_us": result.lower_bound_us, "processor_s": spent,
            }
        )  # fmt: skip
    return found


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per effort, against the whole search."""
    whole = {row["case"]: row for row in rows if row["effort"] == WHOLE}
    found = []
    for name in dict.fromkeys(row["effort"] for row in rows):
        mine = [row for row in rows if row["effort"] == name]
        pairs = [(row, whole[row["case"]]) for row in mine]
        times = [row["predicted_us"] / base["predicted_us"] for row, base in pairs]
        bounds = [row["bound_us"] / base["bound_us"] for row, base in pairs]
        found.append(
            {
                "without": name,
                "cases": len(mine),
                "predicted": math.exp(statistics.mean(map(math.log, times))) - 1,
                "worst": max(times) - 1,
                "bound": math.exp(statistics.mean(map(math.log, bounds))) - 1,
                "median_gap": statistics.median(row["gap"] for row in mine),
                "largest_gap": max(row["gap"] for row in mine),
                "search_time": sum(row["processor_s"] for row in mine) / sum(base["processor_s"] for _, base in pairs),
            }
        )
    return found


def markdown(body: dict[str, Any]) -> str:
    """The tables for people."""
    columns = ("", "cases", "predicted time", "worst case", "bound", "median gap", "largest gap", "search time")
    head = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    out = ["# The search without one of its phases", ""]
    titles = {
        "summary": "The search as it is:",
        "deleted": "Phases that were deleted, against the search that still had them:",
        "kept": "Phases that stayed, against the same search:",
    }
    for name, title in titles.items():
        if name in body:
            out += [title, "", *head, *map(_line, body[name]), ""]
    out += [
        "Predicted time and bound: geometric mean of the change; worst case: the largest rise of the predicted time.",
        "Search time: processor time of the search, over that of the whole search in the same run.",
    ]
    return "\n".join(out) + "\n"


def _line(row: dict[str, Any]) -> str:
    return (
        f"| {row['without']} | {row['cases']} | {100 * row['predicted']:+.2f} % | {100 * row['worst']:+.2f} % |"
        f" {100 * row['bound']:+.2f} % | {100 * row['median_gap']:.2f} % | {100 * row['largest_gap']:.1f} % |"
        f" {row['search_time']:.2f} |"
    )


def main() -> int:
    body: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows: list[dict[str, Any]] = []
    for case in track(list(cases()), "ablation", console=Console(stderr=True)):
        rows += measure(case)
    body |= {"summary": summary(rows), "rows": rows}
    RESULTS.write_text(json.dumps(body, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(markdown(body))
    sys.stdout.write(markdown(body))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
