"""Parameter servers under ``mpirun``: what they carry, by servers and engine threads, and the time of a training step.

    python -m benchmarks.server_mpi

One machine and no limit on its loopback: memory and processor are what is measured, and MPI's transport. Emulated
cards are in ``benchmarks.server_throughput`` and ``benchmarks.server_speed``.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks import results
from benchmarks.python_path import ROOT, python_path

SHAPES = ((1, 1), (1, 4), (2, 1), (2, 4))
"""Servers, engine threads."""

WORKERS = {"throughput": 3, "steps": 2}
ARMS = ("plain", "servers:raw", "servers:efsignsgd")

app = typer.Typer(pretty_exceptions_enable=False)


def under_mpirun(workers: int, servers: int, engines: int, script: list[str], deadline_s: float) -> Any:
    """Run a module of the benchmarks behind the launcher; what it wrote as JSON."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpirun is None:
        raise typer.BadParameter("mpirun is not installed: pip install '.[mpi]'")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        argv = [
            mpirun,
            "--oversubscribe",
            "-np",
            str(workers + servers),
            sys.executable,
            "-m",
            "espresso.launch",
        ]
        argv += ["--servers", str(servers), "--engines", str(engines), "-m", *script, "--json", str(out)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        subprocess.run(argv, cwd=ROOT, env=env, timeout=deadline_s, check=True)
        return json.loads(out.read_text())


@app.command()
def main(
    codings: Annotated[str, typer.Option(help="raw and compressors, separated by semicolons.")] = (
        "raw;int8;efsignsgd"
    ),
    rounds: Annotated[int, typer.Option(help="Of every throughput figure, three times.")] = 3,
    model: Annotated[str, typer.Option(help="Of the training steps.")] = "cnn",
    deadline_s: Annotated[float, typer.Option(help="Of each job.")] = 120.0,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "server_mpi.json",
) -> None:
    """Throughput of every shape, then training steps."""
    rows: list[dict[str, Any]] = []
    load = ["benchmarks.server_throughput", "worker", "--rate-bps", "0", "--codings", codings]
    load += ["--rounds", str(rounds)]
    for servers, engines in SHAPES:
        rows += under_mpirun(WORKERS["throughput"], servers, engines, load, deadline_s)
    train = ["benchmarks.train", "--model", model, "--arms", ",".join(ARMS)]
    train += ["--blocks", "3", "--steps-per-block", "4", "--interface", "lo"]
    for arm in under_mpirun(WORKERS["steps"], 1, 1, train, deadline_s)["arms"]:
        rows.append({"arm": arm["name"], "step_ms": arm["step_ms"], "replicas_equal": arm["replicas_equal"]})
    table = Table(title="parameter servers over MPI, one machine", title_justify="left")
    for header in ("what", "workers", "servers", "engines", "gradient, GB/s", "step, ms"):
        table.add_column(header, justify="right")
    for row in rows:
        if "arm" in row:
            table.add_row(f"{model} {row['arm']}", str(WORKERS["steps"]), "1", "1", "", f"{row['step_ms']:.1f}")
            continue
        shape = (str(row["workers"]), str(row["servers"]), str(row["engines"]))
        table.add_row(row["coding"], *shape, f"{row['gradient_gb_per_s']:.2f}", "")
    results.console(100).print(table)
    config = {"command": "python -m benchmarks.server_mpi", "model": model, "rounds": rounds}
    results.write(json_path, results.record(config, 0, rows))


if __name__ == "__main__":
    app()
