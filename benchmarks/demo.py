"""``make demo``: two emulated hosts, a slow network, a real model, and what compression does about it.

Trains the same model with plain DDP, with PyTorch's fp16 hook and with ``strategy="auto"``, alternated in one
run, and compares step time, bytes on the wire, and where training ends after equal steps. A hook that communicates
nothing stands beside them: nobody can be faster.
"""

import json
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import results
from benchmarks.emulated import (
    DeadlineError,
    Distance,
    Network,
    WorkerError,
    format_rate,
    measure_bulk_rate,
    measure_round_trip,
    open_network,
    run_workers,
)
from benchmarks.models import Name, build_workload, num_parameters
from benchmarks.pictures import draw_lanes

DEADLINE_S = 600.0
"""And what the steps of all arms take at plain DDP's bytes."""
MOST_STEPS, FEWEST_STEPS = 180, 40
PLAIN_S = 60.0
"""What plain DDP's bytes may take in all, so that the demo ends within minutes on a slow network too."""
LEFT_BEHIND = {
    "summary.json": "this table",
    "strategy.json": "what automatic mode chose (espresso explain)",
    "job.json": "what it measured (espresso search)",
    "trace.json": "predicted and measured lanes, for Perfetto",
    "lanes.png": "the same lanes as a picture",
}

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """One way to train, as ``summary.json`` has it; ``speedup`` is against plain DDP."""

    name: str
    step_ms: float
    mb_per_step_per_host: float
    speedup: float
    final_loss: float
    final_accuracy: float
    averages_gradients: bool

    @classmethod
    def of(cls, arm: dict[str, Any]) -> "Row":
        """From an arm's row of the trainer's result."""
        names = {"none": "compute only", "plain": "plain DDP", "fp16": "fp16 hook"}
        name = names.get(arm["name"]) or f"espresso auto ({arm['name'].partition(':')[2]})"
        return cls(
            name,
            arm["step_ms"],
            arm["mb_per_step_per_host"],
            1 / arm["time_over_plain"]["value"],
            arm["final_loss"],
            arm["final_accuracy"],
            arm["replicas_equal"] is not None,
        )


class Follower:
    """Shows on a progress bar what the trainer writes to its progress file."""

    def __init__(self, path: Path, bar: Progress) -> None:
        self._path, self._bar = path, bar
        self._read = 0
        self._task = bar.add_task("starting", total=None)

    def __call__(self) -> None:
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._read)
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith("\n")]
        self._read += sum(len(line.encode()) for line in lines)
        if lines:
            last = json.loads(lines[-1])
            text = f"{last['phase']}: {last['arm']}"
            self._bar.update(self._task, description=text, completed=last["done"], total=last["total"])


def train(
    network: Network, console: Console, out: Path, argv: list[str], workers: int, deadline_s: float
) -> dict[str, Any]:
    """Run the trainer on every host and return its result."""
    logs, result, progress = out / "logs", out / "train.json", out / "progress.jsonl"
    logs.mkdir(parents=True, exist_ok=True)
    for stale in (result, progress, *(out / name for name in LEFT_BEHIND), *out.glob("flight-*.json")):
        stale.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.train", *argv]
    command += ["--json", str(result), "--progress", str(progress), "--artifacts-dir", str(out)]
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        run_workers(
            network,
            command,
            workers_per_host=workers,
            pin=True,
            deadline_s=deadline_s,
            log_dir=logs,
            on_poll=Follower(progress, bar),
        )
    loaded: dict[str, Any] = json.loads(result.read_text())
    return loaded


def table_of(rows: list[Row], title: str) -> Table:
    """The comparison, for people."""
    table = Table(title=title, title_justify="left")
    for header in ("", "step, ms", "sent, MB per step and host", "speed-up", "test accuracy", "test loss"):
        table.add_column(header, justify="left" if not header else "right")
    for row in rows:
        loss = f"{row.final_loss:.4f}" if row.averages_gradients else "-"
        accuracy = f"{row.final_accuracy:.3f}" if row.averages_gradients else "-"
        speedup = f"{row.speedup:.2f}x"
        table.add_row(row.name, f"{row.step_ms:.1f}", f"{row.mb_per_step_per_host:.2f}", speedup, accuracy, loss)
    return table


def what_ends_say(num_steps: int) -> str:
    """What one run of each arm says about where training ends."""
    if num_steps < MOST_STEPS:
        return (
            "So short a training does not say where it would end: what error feedback still keeps back is a large part"
            " of it. python -m benchmarks.dossier measures that."
        )
    return (
        "One run each: from seed to seed loss and accuracy of plain DDP differ as well."
        " python -m benchmarks.dossier trains several."
    )


def plain_step_s(model: Name, network: Network) -> float:
    """What plain DDP's bytes take: between two hosts an allreduce sends every gradient once."""
    if network.rate_bps is None:
        return 0.0
    return 32 * num_parameters(build_workload(model).make_model()) / network.rate_bps


def steps_that_fit(step_s: float) -> int:
    """How many steps of each arm end within minutes: fewer where those of plain DDP take more than ``PLAIN_S``."""
    return max(FEWEST_STEPS, min(MOST_STEPS, int(PLAIN_S / step_s) if step_s else MOST_STEPS))


def describe_network(network: Network, console: Console) -> None:
    """Say what the network is, and whether its rate was verified."""
    if network.rate_bps is None:
        console.print(f"[bold red]No limited network here[/]: {network.why_unlimited}.")
        console.print("Running on loopback without a limit, where there is little to gain by compression.")
        return
    rates = measure_bulk_rate(network)
    measured = ", ".join(format_rate(rate.payload_bps) for rate in rates)
    verdict = "verified" if all(rate.is_verified for rate in rates) else "[bold red]NOT as asked[/]"
    console.print(
        f"{len(network.hosts)} hosts (network namespaces), each limited to {format_rate(network.rate_bps)} "
        f"and pinned to one core; bulk TCP {measured}: {verdict}"
    )
    if network.distance is not None:
        console.print(
            f"round trip {measure_round_trip(network):.1f} ms (asked for {network.distance.rtt_ms:g}),"
            f" TCP's congestion control {network.distance.congestion}"
        )


@app.command()
def main(
    model: Annotated[Name, typer.Option(help="What to train.")] = "mlp",
    rate: Annotated[str, typer.Option(help="Each host's egress limit.")] = "1gbit",
    rtt_ms: Annotated[float, typer.Option(help="Round trip between hosts far apart; 0: one local network.")] = 0.0,
    workers: Annotated[int, typer.Option(help="Workers per host.")] = 1,
    compressor: Annotated[str, typer.Option(help="What automatic mode may use.")] = "efsignsgd",
    blocks: Annotated[int, typer.Option(help="Rounds of timing.")] = 4,
    steps_per_block: Annotated[int | None, typer.Option(help="8 by default, 3 or more where steps are few.")] = None,
    total_steps: Annotated[
        int | None, typer.Option(help="Of every arm; the learning rate falls to zero. By default what fits minutes.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where everything is left.")] = Path("build/demo"),
    arms: Annotated[str | None, typer.Option(help="Other arms than the demo's.")] = None,
) -> None:
    """Train with and without compression on an emulated network, and compare."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    console = results.console(110)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = arms or f"plain,fp16,espresso:{compressor},none"
    try:
        with open_network(2, rate, distance=Distance(rtt_ms=rtt_ms) if rtt_ms else None) as network:
            describe_network(network, console)
            step_s = plain_step_s(model, network)
            total = total_steps or steps_that_fit(step_s)
            timed = steps_per_block or max(3, min(8, total // 20))
            argv = ["--model", model, "--arms", chosen, "--blocks", str(blocks)]
            argv += ["--steps-per-block", str(timed), "--total-steps", str(total)]
            argv += ["--decide-by", "0"] if total < MOST_STEPS else []  # plain steps to wait in are what is slow
            result = train(network, console, out, argv, workers, DEADLINE_S + len(chosen.split(",")) * total * step_s)
    except (WorkerError, DeadlineError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None
    rows = [Row.of(arm) for arm in result["arms"]]
    (out / "summary.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    steps = max(arm["num_steps"] for arm in result["arms"])
    size = result["num_parameters"] / 1e6
    console.print(table_of(rows, f"{model}, {size:.1f} M parameters, after {steps} steps each"))
    console.print(what_ends_say(steps))
    for arm in result["arms"]:
        if arm["verdict"]:
            console.print(f"{arm['name']} decided after {arm['num_steps_to_decide']} steps: {arm['verdict']}")
    draw_lanes(out, f"{model}, 2 hosts x {workers}, {rate}, {compressor}")
    for name, what in LEFT_BEHIND.items():
        if (out / name).exists():
            console.print(f"  {out / name}: {what}")


if __name__ == "__main__":
    app()
