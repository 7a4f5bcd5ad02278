"""The search on every published trace, cluster preset and compressor, and at scale.

    python -m benchmarks.search                 # everything
    python -m benchmarks.search --only scale    # any of the sections

Writes ``benchmarks/results/search.json`` and ``search.md``. Times are medians of repeated searches
with kernels compiled and options cached; the first search of a job, which builds the options, is reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks import results, search_evidence, search_speed
from benchmarks.search_models import MODELS, model_job, random_model_job
from espresso.model.job import Job
from espresso.model.presets import cluster_names, job_from_trace, trace_names
from espresso.search.error_budget import normal_sensitivity
from espresso.search.result import SearchResult
from espresso.search.search import GREEDY, PUBLISHED, search
from espresso.search.terms import Terms
from espresso.strategies import CompressorSpec, TensorSpec

SHAPE = (8, 8)
COMPRESSORS = ("randomk:ratio=0.01", "dgc:ratio=0.01", "efsignsgd")
FAMILIES = tuple(
    map(CompressorSpec.parse, ("fp16", "efsignsgd", "onebit", "dgc:ratio=0.01", "randomk:ratio=0.05"))
)  # fmt: skip
BUDGETS = (2.0, 4.0, 6.0, 8.0)
REPEATS = 3
TENSORS = (100, 300, 1000, 3000, 10_000)
NODES = (8, 64, 256, 1024)
RANDOM_JOBS = 14
GAP_SECTIONS = {
    "traces": "The published traces:",
    "models": "Models without a trace here, their backward time shared out by a rule:",
    "random": "Random jobs:",
}


def traces() -> list[dict[str, Any]]:
    """One row per trace, preset and compressor."""
    return _rows(trace_names(), "traces")


def models() -> list[dict[str, Any]]:
    """The same for models that have no trace here (:mod:`benchmarks.search_models`)."""
    return _rows(MODELS, "models")


def random_jobs() -> list[dict[str, Any]]:
    """The same for random jobs."""
    return _rows([f"random {seed}" for seed in range(RANDOM_JOBS)], "random jobs")


def _rows(names: Iterable[str], title: str) -> list[dict[str, Any]]:
    cases = [(n, p, c) for n in names for p in cluster_names() for c in COMPRESSORS]
    return [_case(*case) for case in track(cases, title, console=Console(stderr=True))]


def job_of(name: str, preset: str) -> Job:
    """The job of a row: a trace, a model or a random one."""
    if name in MODELS:
        return model_job(name, preset, *SHAPE)
    if name.startswith("random "):
        return random_model_job(int(name.removeprefix("random ")), preset, *SHAPE)
    return job_from_trace(name, *SHAPE, preset)


def _case(trace: str, preset: str, compressor: str) -> dict[str, Any]:
    job = job_of(trace, preset)
    began = time.perf_counter()
    search(job, compressor)
    cold = (time.perf_counter() - began) * 1e3
    runs = [search(job, compressor) for _ in range(REPEATS)]
    best = runs[0]
    fixed = {n: t for n, t in best.baselines.items() if n not in (PUBLISHED, GREEDY)}
    name = min(fixed, key=lambda n: fixed[n])
    return {
        "trace": trace,
        "cluster": preset,
        "compressor": compressor,
        "tensors": best.num_tensors,
        "predicted_us": best.predicted_us,
        "uncompressed_us": best.uncompressed_us,
        "algorithms_us": best.baselines[PUBLISHED],
        "greedy_us": best.baselines[GREEDY],
        "best_baseline": name,
        "best_baseline_us": fixed[name],
        "lower_bound_us": best.lower_bound_us,
        "gap": best.gap,
        "partition_mib": best.strategy.partition_bytes >> 20,
        "first_ms": cold,
        **_times(runs),
    }


def _times(runs: Sequence[SearchResult]) -> dict[str, float]:
    parts: dict[str, Callable[[SearchResult], float]] = {
        "search_ms": lambda r: r.search_ms,
        "algorithms_ms": lambda r: r.algorithms_ms,
        "certificate_ms": lambda r: r.certificate_ms,
        "improve_ms": lambda r: r.improve_ms,
    }
    return {name: statistics.median(map(part, runs)) for name, part in parts.items()}


def generated_job(tensors: int, nodes: int = 8) -> Job:
    """A transformer-like job: BERT's tensors repeated, the whole backward pass as long as the tensors ask."""
    base = job_from_trace("bert_base", nodes, SHAPE[1], "nvlink-100g")
    picked = [base.tensors[index % len(base.tensors)] for index in range(tensors)]
    gaps = [base.gaps_us[index % len(base.gaps_us)] for index in range(tensors)]
    specs = tuple(TensorSpec(f"t{i}", tensor.shape, tensor.dtype) for i, tensor in enumerate(picked))
    return Job("generated", specs, (0.0, *gaps[1:]), base.cluster, base.costs, base.mode)


def scale() -> list[dict[str, Any]]:
    """How the search's time grows with tensors and with nodes."""
    cases = [(tensors, 8) for tensors in TENSORS] + [(1000, nodes) for nodes in NODES] + [(10_000, 1024)]
    rows = []
    for tensors, nodes in track(cases, "scale", console=Console(stderr=True)):
        job = generated_job(tensors, nodes)
        began = time.perf_counter()
        search(job, COMPRESSORS[0])
        cold = (time.perf_counter() - began) * 1e3
        runs = [search(job, COMPRESSORS[0]) for _ in range(REPEATS)]
        rows.append({"tensors": tensors, "nodes": nodes, "gap": runs[0].gap, "first_ms": cold, **_times(runs)})
    return rows


def options() -> list[dict[str, Any]]:
    """How the search's time grows with the leaves that a tensor may take: BERT with one to three compressors."""
    job = job_from_trace("bert_base", *SHAPE, "nvlink-100g")
    rows = []
    for count in range(1, len(COMPRESSORS) + 1):
        search(job, COMPRESSORS[:count])
        runs = [search(job, COMPRESSORS[:count]) for _ in range(REPEATS)]
        rows.append({"options": runs[0].num_candidates, "gap": runs[0].gap, **_times(runs)})
    return rows


def families() -> list[dict[str, Any]]:
    """Five families at once within error budgets, of normal gradients: gaps and times."""
    known = normal_sensitivity(FAMILIES)
    rows = []
    for name, preset in track([(n, p) for n in trace_names() for p in cluster_names()], "families"):
        job = job_of(name, preset)
        for budget in BUDGETS:
            terms = Terms(error_budget=budget)
            first, *runs = [search(job, FAMILIES, terms=terms, sensitivity=known) for _ in range(1 + REPEATS)]
            rows.append({
                "trace": name, "cluster": preset, "budget": budget, "tensors": first.num_tensors,
                "predicted_us": first.predicted_us, "error": first.error, "gap": first.gap,
                "first_ms": first.search_ms, **_times(runs),
            })  # fmt: skip
    return rows


def families_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Gaps, times, and how often and by how much more may be owed for a slower step."""
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=itemgetter("budget")):
        by_case.setdefault((row["trace"], row["cluster"]), []).append(row)
    looser = [
        row["predicted_us"] / min(one["predicted_us"] for one in case[:place]) - 1
        for case in by_case.values() for place, row in enumerate(case) if place
    ]  # fmt: skip
    gaps = [row["gap"] for row in rows]
    return {
        "cases": len(gaps),
        "median_gap": statistics.median(gaps),
        "largest_gap": max(gaps),
        "gaps_above_8_percent": sum(gap > 0.08 for gap in gaps),
        "largest_certificate_and_improvement_ms": max(map(_both_ms, rows)),
        "median_certificate_and_improvement_ms": statistics.median(map(_both_ms, rows)),
        "slower_by_a_thousandth_within_more": sum(more > 1e-3 for more in looser),
        "slower_within_more_by_at_most": max(looser),
    }


def facts() -> dict[str, Any]:
    """Hardware, load, versions."""
    # Times are only worth something on a quiet machine: near zero before the benchmark itself.
    load = {"load_before": round(os.getloadavg()[0], 1)}
    return results.hardware() | load | results.versions()


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures that the search is judged by."""
    gaps = [row["gap"] for row in rows]
    both = {few: [_both_ms(row) for row in rows if (row["tensors"] <= 200) == few] for few in (True, False)}
    bert = [row for row in rows if row["trace"] == "bert_base"]
    return {
        "cases": len(gaps),
        "median_gap": statistics.median(gaps),
        "largest_gap": max(gaps),
        "gaps_above_8_percent": sum(gap > 0.08 for gap in gaps),
        "largest_certificate_and_improvement_ms": max(both[True]),
        **({"largest_above_200_tensors_ms": max(both[False])} if both[False] else {}),
        **{
            f"least_gain_on_bert_base_over_{name}": min(1 - row["predicted_us"] / row[f"{name}_us"] for row in bert)
            for name in (("algorithms", "greedy") if bert else ())
        },
        "times_the_algorithms_are_above_the_best_baseline": sum(
            row["algorithms_us"] > row["best_baseline_us"] * (1 + 1e-9) for row in rows
        ),
        "times_the_greedy_is_above_the_best_baseline": sum(
            row["greedy_us"] > row["best_baseline_us"] * (1 + 1e-9) for row in rows
        ),
    }


def _both_ms(row: dict[str, Any]) -> float:
    return float(row["certificate_ms"] + row["improve_ms"])


def markdown(body: dict[str, Any]) -> str:
    """The tables for people."""
    out = ["# Search", "", "Measured:", ""]
    for key in filter(lambda key: key.endswith("_facts"), body):
        out += [f"- {key.removesuffix('_facts')}: {', '.join(f'{what} {value}' for what, value in body[key].items())}"]
    out += [""]
    for name, title in GAP_SECTIONS.items():
        if name in body:
            out += [title, "", *_table(body[name], body[f"{name}_summary"])]
            out += [*search_evidence.markdown(body.get(f"{name}_evidence", ())), ""]
    if "scale" in body:
        out += ["", "| tensors | nodes | gap | search ms | certificate ms | improvement ms | first ms |",
                "|" + " --- |" * 7]  # fmt: skip
        out += [
            f"| {r['tensors']} | {r['nodes']} | {100 * r['gap']:.1f} % | {r['search_ms']:.0f} |"
            f" {r['certificate_ms']:.0f} | {r['improve_ms']:.0f} | {r['first_ms']:.0f} |"
            for r in body["scale"]
        ]
    if "options" in body:
        out += [
            "",
            "| leaves a tensor | gap | search ms | certificate ms | improvement ms |",
            "|" + " --- |" * 5,
        ]
        out += [
            f"| {r['options']} | {100 * r['gap']:.1f} % | {r['search_ms']:.0f} | {r['certificate_ms']:.0f} |"
            f" {r['improve_ms']:.0f} |"
            for r in body["options"]
        ]
    if "families" in body:
        names = ", ".join(map(str, FAMILIES))
        out += ["", f"{names} at once, within so many gradients owed:", ""]
        out += ["| trace | cluster | budget | ours ms | owed | gap | search ms | certificate ms | improvement ms |"]
        out += ["|" + " --- |" * 9]
        out += [
            f"| {r['trace']} | {r['cluster']} | {r['budget']:g} | {r['predicted_us'] / 1e3:.1f} | {r['error']:.2f} |"
            f" {100 * r['gap']:.1f} % | {r['search_ms']:.0f} | {r['certificate_ms']:.0f} | {r['improve_ms']:.0f} |"
            for r in body["families"]
        ]
        out += ["", *(f"- {key}: {value:.3g}" for key, value in body["families_summary"].items()), ""]
    if "speed" in body:
        out += search_speed.markdown(body["speed"][0])
    return "\n".join(out) + "\n"


def _table(rows: Sequence[dict[str, Any]], totals: dict[str, float]) -> list[str]:
    columns = (
        "trace", "cluster", "compressor", "fp32 ms", "best baseline", "Alg. 1+2 ms", "greedy ms", "ours ms",
        "bound ms", "gap", "baselines and Alg. ms", "certificate ms", "improvement ms", "first ms",
    )  # fmt: skip
    out = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for r in rows:
        out.append(
            f"| {r['trace']} | {r['cluster']} | {r['compressor']} | {r['uncompressed_us'] / 1e3:.1f} |"
            f" {r['best_baseline']} {r['best_baseline_us'] / 1e3:.1f} | {r['algorithms_us'] / 1e3:.1f} |"
            f" {r['greedy_us'] / 1e3:.1f} |"
            f" {r['predicted_us'] / 1e3:.1f} | {r['lower_bound_us'] / 1e3:.1f} | {100 * r['gap']:.1f} % |"
            f" {r['algorithms_ms']:.0f} | {r['certificate_ms']:.0f} | {r['improve_ms']:.0f} |"
            f" {r['first_ms']:.0f} |"
        )
    return [*out, "", *(f"- {key}: {value:.3g}" for key, value in totals.items()), ""]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    sections: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "traces": traces,
        "models": models,
        "random": random_jobs,
        "scale": scale,
        "options": options,
        "families": families,
        "speed": search_speed.speed,
    }
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sections,
        default=list(sections),
        help="the others keep their last results",
    )
    chosen = parser.parse_args(argv).only
    path = results.RESULTS_DIR / "search.json"
    body: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    body = {name: value for name, value in body.items() if name.split("_")[0] in sections}
    about = facts()
    for name, section in sections.items():
        if name in chosen:
            body[name] = section()
            body[f"{name}_facts"] = {"date": datetime.now(UTC).isoformat(timespec="minutes"), **about}
    if "families" in body:
        body["families_summary"] = families_summary(body["families"])
    for name in GAP_SECTIONS:
        if name in body:
            body[f"{name}_summary"] = summary(body[name])
        if name in chosen:
            body[f"{name}_evidence"] = search_evidence.evidence(body[name], job_of)
    results.RESULTS_DIR.mkdir(exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")
    (results.RESULTS_DIR / "search.md").write_text(markdown(body))
    sys.stdout.write(markdown(body))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
