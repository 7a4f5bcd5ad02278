"""Structurally different tasks, plain and compressed: how fast, how much is sent, how much memory, and how good.

    python -m benchmarks.suite                        # everything: some hours on two cores
    python -m benchmarks.suite --tasks gan,graph --rates 1gbit --quick

Two emulated hosts of one worker and one core each. A step rate is a share of computing alone (``of compute``), and
of computing with one barrier a step (``of barrier``), which is the honest bound: ranks that exchange anything wait for
each other. ``overlap`` is the share of the bytes' time on the verified network that the step does not wait for. The
metric is the mean over seeds after equal steps, and is in plain's band if it is no worse than the worst of plain's
seeds. Peak memory is that of a rank's process, with nothing else in it. Writes ``benchmarks/results/suite.json``.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import results
from benchmarks.emulated import Network, measure_bulk_rate, open_network, run_workers
from benchmarks.suite.tasks import MADE, NAMES, build_task

COMPRESSORS = ("auto", "dgc:ratio=0.01")
"""What users get who choose nothing, and one that was named."""
RATES = ("1gbit", "100mbit")
FAST = "10gbit"
"""Plain DDP's numbers do not depend on the network: its metrics are trained on a fast one."""

DEADLINE_S = 3600.0


def run(
    network: Network,
    name: str,
    arms: Sequence[str],
    seed: int,
    blocks: int,
    steps: int,
    *,
    tiny: bool,
    to_end: bool = False,
    decide_by: int = 0,
) -> Any:
    """One job of all ranks; what rank 0 found."""
    out = results.RESULTS_DIR / "suite.raw"
    argv = [sys.executable, "-m", "benchmarks.suite", "--worker", str(out), "--tasks", name, "--arms", ",".join(arms)]
    argv += ["--seed", str(seed), "--blocks", str(blocks), "--steps", str(steps)]
    argv += ["--decide-by", str(decide_by)] + ["--to-end"] * to_end + ["--tiny"] * tiny
    run_workers(network, argv, pin=True, deadline_s=DEADLINE_S)
    found = json.loads(out.read_text())
    out.unlink()
    return found


def rows_of(timed: Sequence[Mapping[str, Any]], rate: str, bulk_bps: float | None) -> list[dict[str, Any]]:
    """The worker's rows with shares of the bounds, and the overlap where the network has a limit."""
    step_s = {row["arm"]: row["step_ms"] / 1e3 for row in timed}
    rows = []
    for row in timed:
        wire_s = 8e6 * row["mb_per_step_per_host"] / bulk_bps if bulk_bps else 0.0
        exposed_s = max(step_s[row["arm"]] - step_s["barrier"], 0.0)
        rows.append(
            {key: row[key] for key in ("task", "arm", "step_ms", "mb_per_step_per_host", "parameters")}
            | {
                "rate": rate,
                "of_compute": 1 / row["time_over_none"],
                "of_barrier": 1 / row["time_over_barrier"],
                "of_plain": 1 / row["time_over_plain"],
                "overlap": max(1 - exposed_s / wire_s, 0.0)
                if wire_s and row["arm"] not in ("none", "barrier")
                else None,
                "replicas_equal": row["replicas_equal"],
                "steps_to_decide": row["steps_to_decide"],
                "verdicts": row["verdicts"],
            }
        )
    return rows


def in_band(metrics: Sequence[float], plain: Sequence[float], *, less_is_more: bool) -> bool:
    """Whether the mean is no worse than the worst of plain's seeds."""
    mean = statistics.fmean(metrics)
    return mean <= max(plain) if less_is_more else mean >= min(plain)


def metrics_of(name: str, arms: Sequence[str], seeds: int, steps: int, rate: str, *, tiny: bool) -> dict[str, Any]:
    """Metrics by arm, over seeds, with the peak memory of each arm alone."""
    found: dict[str, Any] = {}
    for arm in arms:
        with open_network(2, FAST if arm == "plain" else rate) as network:
            runs = [run(network, name, [arm], seed, 0, steps, to_end=True, tiny=tiny) for seed in range(seeds)]
        found[arm] = {
            "metrics": [one["metric"] for one in runs],
            "peak_mib": max(one["peak_mib"] for one in runs),
            "replicas_equal": all(one["replicas_equal"] for one in runs),
            "stays_plain": [one["stays_plain"] for one in runs],
            "verdicts": [one["verdicts"] for one in runs],
        }
    less = build_task(name, tiny=tiny).less_is_more
    for one in found.values():
        one["in_band"] = in_band(one["metrics"], found["plain"]["metrics"], less_is_more=less)
    return found


SHOWN = {
    "step_ms": (".1f", "step, ms"),
    "mb_per_step_per_host": (".2f", "MB"),
    "of_compute": (".0%", "of compute"),
    "of_barrier": (".0%", "of barrier"),
    "of_plain": (".2f", "x plain"),
    "overlap": (".0%", "overlap"),
}
"""Of a timed row: how it is printed, under what head."""


def table_of(rows: Sequence[Mapping[str, Any]], ends: Mapping[str, Mapping[str, Any]]) -> Table:
    """Everything in one table; blank is what was not measured."""
    heads = [head for _, head in SHOWN.values()]
    table = Table("task", "network", "arm", *heads, "metric", "in band", "peak MiB")
    timed = {row["task"] for row in rows}
    trained = [{"task": task, "arm": arm} for task, arms in ends.items() if task not in timed for arm in arms]
    for row in [*rows, *trained]:
        figures = ["" if row.get(key) is None else format(row[key], how) for key, (how, _) in SHOWN.items()]
        end = ends.get(row["task"], {}).get(row["arm"])
        if end is None:
            ended = ["", "", ""]
        else:
            mean, inside = statistics.fmean(end["metrics"]), "yes" if end["in_band"] else "NO"
            if left := sum(end["stays_plain"]):
                inside += f", {left} plain"
            ended = [f"{mean:.3f}", inside, f"{end['peak_mib']:.0f}"]
        table.add_row(row["task"], row.get("rate", ""), row["arm"], *figures, *ended)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rates", default=",".join(RATES), help="of the network between the hosts")
    parser.add_argument("--compressors", default=";".join(COMPRESSORS), help="separated by semicolons")
    parser.add_argument("--blocks", type=int, default=5, help="rounds of timing; 0: no times")
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument(
        "--decide-by", type=int, default=0,
        help="when arms with nothing chosen have decided; 60 is users' default; before, steps take the network's pace",
    )  # fmt: skip
    parser.add_argument("--train-steps", type=int, default=300, help="before the metric is taken; 0: no metrics")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two blocks, one compressor, no metrics")
    parser.add_argument("--tiny", action="store_true", help=f"tiny forms, of {', '.join(MADE)}; what the tests run")
    parser.add_argument("--json", type=Path, default=results.RESULTS_DIR / "suite.json", help="where results go")
    for name in ("--worker", "--arms"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--to-end", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    given = _parser().parse_args(argv)
    if given.worker is not None:
        from benchmarks.suite.worker import work

        work(
            given.tasks, given.arms, given.seed, given.blocks, given.steps, Path(given.worker),
            decide_by=given.decide_by, to_end=given.to_end, tiny=given.tiny,
        )  # fmt: skip
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    names = [name for name in given.tasks.split(",") if name]
    for name in names:
        if name not in NAMES or (given.tiny and name not in MADE):
            sys.exit(f"no {'tiny ' if given.tiny else ''}task is called {name!r}; there are {', '.join(NAMES)}")
    specs = given.compressors.split(";")[: 1 if given.quick else None]
    ours = [f"espresso:{spec}" for spec in specs]
    blocks, train_steps = (2, 0) if given.quick else (given.blocks, given.train_steps)
    rows: list[dict[str, Any]] = []
    ends: dict[str, Any] = {}
    for name in names:
        for rate in given.rates.split(",") if blocks else ():
            with open_network(2, rate) as network:
                bulk = None
                if network.rate_bps is not None:
                    bulk = min(one.payload_bps for one in measure_bulk_rate(network))
                arms = ["none", "barrier", "plain", *ours]
                timed = run(
                    network, name, arms, given.seed, blocks, given.steps, tiny=given.tiny, decide_by=given.decide_by
                )
            rows += rows_of(timed, rate, bulk)
        if train_steps:
            slowest = given.rates.split(",")[-1]
            ends[name] = metrics_of(name, ["plain", *ours], given.seeds, train_steps, slowest, tiny=given.tiny)
        # After every task: what was measured so far survives an interruption.
        config = {"rates": given.rates, "blocks": blocks, "steps": given.steps, "decide_by": given.decide_by,
                  "train_steps": train_steps,
                  "seeds": given.seeds, "tiny": given.tiny}  # fmt: skip
        results.write(given.json, results.record(config, given.seed, rows) | {"ends": ends})
    results.console(170).print(table_of(rows, ends))
    trained = [end for task in ends.values() for end in task.values()]
    wrong = [row for row in [*rows, *trained] if row["replicas_equal"] is False]
    outside = [end for end in trained if not end["in_band"]]
    return 1 if wrong or outside else 0


if __name__ == "__main__":
    raise SystemExit(main())
