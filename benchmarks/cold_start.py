"""How long is training held up until automatic mode has decided, with no kernel compiled yet?

    python -m benchmarks.cold_start

Two emulated hosts of one core, nothing chosen. Kernels are kept in a folder that is empty at first: they are compiled
beside plain steps. The same once more with the folder as it then is. What a job is held up by is the time from before
``espresso.register`` to its decision, less as many of plain DDP's steps, which the same processes took before. The bar:
30 s with nothing compiled.
"""

# No `from __future__ import annotations` here: typer reads the annotations.
import json
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.emulated import describe, open_network, run_workers
from benchmarks.models import build_workload
from benchmarks.train import Place, have_decided, process_group

MOST_S = 30.0
PLAIN_STEPS = 30
CACHES = ("empty", "filled")

app = typer.Typer(pretty_exceptions_enable=False)


def work(name: str) -> dict[str, Any]:
    """One job, beside plain DDP before it; every rank calls it."""
    import espresso

    workload, place = build_workload(name), Place.from_env(None)

    def trained(steps: int) -> tuple[float, list[float]]:
        """Seconds in all, and of each step; 0: with espresso, until it has decided."""
        model = DistributedDataParallel(workload.make_model())
        optimizer = workload.make_optimizer(model)
        dist.barrier()
        began = time.perf_counter()
        state = None if steps else espresso.register(model)
        took: list[float] = []
        while len(took) < steps or (state is not None and not have_decided([state])):
            inputs, targets = workload.batch(len(took), place.rank, place.world_size)
            start = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            workload.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            took.append(time.perf_counter() - start)
        all_s = time.perf_counter() - began
        if state is not None:
            state.close()
        return all_s, took

    plain_s = statistics.median(trained(PLAIN_STEPS)[1])
    all_s, took = trained(0)
    return {
        "plain_ms": 1e3 * plain_s, "steps": len(took), "decided_s": all_s, "longest_step_s": max(took),
        "held_up_s": all_s - len(took) * plain_s,
    }  # fmt: skip


@app.command()
def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "mlp,gpt",
    rate: Annotated[str, typer.Option(help="Each host's egress limit.")] = "1gbit",
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "cold_start.json",
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run jobs with an empty and a filled folder of kernels."""
    if worker is not None:
        torch.set_num_threads(1)
        with process_group(300.0):
            found = work(models)
            if dist.get_rank() == 0:
                worker.write_text(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    for model in models.split(","):
        with TemporaryDirectory() as folder, open_network(2, rate) as network:
            words, out = describe(network), Path(folder) / "found.json"
            kernels = Path(folder) / "kernels"
            kernels.mkdir()
            for cache in CACHES:
                argv = [sys.executable, "-m", "benchmarks.cold_start", "--models", model, "--worker", str(out)]
                run_workers(network, argv, pin=True, deadline_s=1200.0, env={"NUMBA_CACHE_DIR": str(kernels)})
                rows.append({"model": model, "cache": cache} | json.loads(out.read_text()))
    table = Table(title=f"until automatic mode has decided, {words}", title_justify="left")
    for header in ("model", "kernels", "plain, ms", "steps", "decided after, s", "held up by, s", "longest step, s"):
        table.add_column(header)
    for row in rows:
        numbers = (f"{row[key]:.1f}" for key in ("decided_s", "held_up_s", "longest_step_s"))
        table.add_row(row["model"], row["cache"], f"{row['plain_ms']:.0f}", str(row["steps"]), *numbers)
    results.console(120).print(table)
    config = {"rate": rate, "plain_steps": PLAIN_STEPS, "bar_s": MOST_S}
    results.write(json_path, results.record(config, 0, rows))
    if max(row["held_up_s"] for row in rows) > MOST_S:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
