"""How fast the search's parts are: events, evaluations, the paper's algorithms, options, replanning, the CLI."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.search_models import MODELS, model_job
from espresso.model.job import Job
from espresso.model.links import AlphaBeta, Links
from espresso.model.presets import cluster_names, job_from_trace, trace_names
from espresso.model.timeline_kernels import EVENTS
from espresso.search.algorithms import greedy, offload
from espresso.search.candidates import compressed_choices, raw_choices, units_of
from espresso.search.evaluator import Evaluator
from espresso.search.search import replan, search
from espresso.strategies import PLAIN, CompressorSpec, Device

SHAPE = (8, 8)
SPECS = tuple(map(CompressorSpec.parse, ("randomk:ratio=0.01", "dgc:ratio=0.01", "efsignsgd")))
REPEATS = 7


def _median_ms(action: Callable[[], Any], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def algorithms() -> list[dict[str, Any]]:
    """Algorithms 1 and 2 on every trace, generated model, preset and compressor, and how long options took to build."""
    rows = []
    for trace in (*trace_names(), *MODELS):
        for preset in cluster_names():
            for spec in SPECS:
                known = trace in trace_names()
                job = job_from_trace(trace, *SHAPE, preset) if known else model_job(trace, preset, *SHAPE)
                tree = raw_choices(job.cluster) + compressed_choices(job, (spec,), Device.TRAINING)
                began = time.perf_counter()
                evaluator = Evaluator(job, units_of(job), 0)
                evaluator.options(tree)
                cold = (time.perf_counter() - began) * 1e3
                both = _median_ms(lambda e=evaluator, t=tree: offload(e, greedy(e, t)))  # type: ignore[misc]
                rows.append(
                    {
                        "trace": trace, "cluster": preset, "compressor": str(spec),
                        "tensors": len(evaluator.units), "algorithms_ms": both, "options_ms": cold,
                    }
                )  # fmt: skip
    return rows


def evaluations() -> dict[str, float]:
    """Evaluations of the raw 199-tensor job and of a compressed strategy of it, on one core."""
    job = job_from_trace("bert_base", *SHAPE, "nvlink-100g")
    evaluator = Evaluator(job, units_of(job), 0)
    raw = evaluator.uniform(PLAIN)
    tree = raw_choices(job.cluster) + compressed_choices(job, SPECS[1:2], Device.TRAINING)
    compressed = greedy(evaluator, tree)
    found = {}
    for name, strategy in (("raw", raw), ("compressed", compressed)):
        batch = strategy[None].repeat(5000, axis=0)
        ms = _median_ms(lambda b=batch: evaluator.batch(b))  # type: ignore[misc]
        evaluator.makespan(strategy)
        # The kernels' own count: hand-overs and completed tasks.
        events = int(evaluator.kernel_arrays().states[3][1][EVENTS])
        found[f"{name}_evaluations_per_s"] = len(batch) / ms * 1e3
        found[f"{name}_ns_per_event"] = ms * 1e6 / len(batch) / events
    return found


def replanning() -> dict[str, float]:
    """A search from scratch and a replan after the link between nodes slowed down to half, both without options."""
    job = job_from_trace("bert_base", *SHAPE, "nvlink-100g")
    old = search(job, SPECS[1])

    def slower() -> Job:
        links = Links(job.costs.links.intra, AlphaBeta(50.0, 0.2))
        return replace(job, costs=replace(job.costs, links=links))

    scratch = search(slower(), SPECS[1])
    again = replan(slower(), old.strategy)
    return {
        "scratch_ms": _median_ms(lambda: search(slower(), SPECS[1]), 3),
        "replan_ms": _median_ms(lambda: replan(slower(), old.strategy), 3),
        "scratch_us": scratch.predicted_us,
        "replan_us": again.predicted_us,
        "old_us": again.baselines["old strategy"],
    }


def command_line() -> dict[str, float]:
    """``espresso search`` in a process of its own: with an empty cache of compiled code, then with a full one."""
    with tempfile.TemporaryDirectory() as folder:
        job_path = Path(folder) / "job.json"
        job_from_trace("vgg16", *SHAPE, "nvlink-100g").save(job_path)
        argv = [sys.executable, "-m", "espresso", "search", str(job_path), "-c", "dgc:ratio=0.01", "--json"]
        env = {**os.environ, "NUMBA_CACHE_DIR": str(Path(folder) / "cache")}

        def run() -> float:
            began = time.perf_counter()
            subprocess.run(argv, env=env, check=True, capture_output=True)
            return time.perf_counter() - began

        cold = run()
        return {"cold_compile_s": cold, "warm_s": statistics.median(run() for _ in range(3))}


def speed() -> list[dict[str, Any]]:
    """All of it, as one row."""
    return [
        {
            "algorithms": algorithms(),
            "evaluations": evaluations(),
            "replanning": replanning(),
            "command_line": command_line(),
        }
    ]


def markdown(body: dict[str, Any]) -> list[str]:
    """Lines for people."""
    rows = body["algorithms"]
    out = ["", "| trace | tensors | Algorithms 1 and 2, slowest of 6 cases, ms | options built, slowest, ms |",
           "| --- | --- | --- | --- |"]  # fmt: skip
    for trace in dict.fromkeys(row["trace"] for row in rows):
        mine = [row for row in rows if row["trace"] == trace]
        out.append(
            f"| {trace} | {mine[0]['tensors']} | {max(r['algorithms_ms'] for r in mine):.1f} |"
            f" {max(r['options_ms'] for r in mine):.0f} |"
        )
    evaluated, replanned, cli = body["evaluations"], body["replanning"], body["command_line"]
    out += [
        "",
        f"- BERT raw: {evaluated['raw_evaluations_per_s']:,.0f} evaluations a second,"
        f" {evaluated['raw_ns_per_event']:.1f} ns an event; compressed by Algorithm 1:"
        f" {evaluated['compressed_evaluations_per_s']:,.0f}, {evaluated['compressed_ns_per_event']:.1f} ns",
        f"- replanning BERT for a link half as fast, options not cached: {replanned['replan_ms']:.0f} ms and"
        f" {replanned['replan_us'] / 1e3:.1f} ms an iteration, from scratch {replanned['scratch_ms']:.0f} ms and"
        f" {replanned['scratch_us'] / 1e3:.1f} ms (the old strategy {replanned['old_us'] / 1e3:.1f} ms)",
        f"- `espresso search` of VGG16 in a fresh process: {cli['cold_compile_s']:.1f} s with an empty cache of"
        f" compiled code, {cli['warm_s']:.2f} s with a full one",
    ]
    return out
