"""Whether compressed training ends where plain DDP does: loss and accuracy after equal steps, over seeds.

    python -m benchmarks.convergence
    python -m benchmarks.convergence --cases mlp-sgd --steps 300
    python -m benchmarks.convergence --cases mlp10m,gpt10m --rate 1gbit --no-controls

Small models on a slow emulated network (so that automatic mode has a reason to compress), or those of ten millions that
the other benchmarks time; the same weights and batches for every arm of a seed. Plain DDP, whose numbers do not depend
on the network, trains on a fast one. An arm passes if its mean test loss is not above, and its mean accuracy not
below, the worst of plain DDP's seeds. Every compressor has a control: the same run with its residuals thrown
away after every step, which shows what the check can see.
"""

import json
import logging
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.emulated import open_network, run_workers
from benchmarks.models import Evaluation, Gpt, build_workload
from benchmarks.train import process_group

COMPRESSORS = ("efsignsgd", "dgc:ratio=0.01", "topk:ratio=0.01")
CONTROL = "residuals off"
FAST = "10gbit"

app = typer.Typer(pretty_exceptions_enable=False)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _gpt() -> nn.Module:
    return Gpt(width=64, num_layers=2, num_heads=4)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "cnn": _cnn, "gpt": _gpt}
LARGE = {"mlp10m": "mlp", "gpt10m": "gpt"}
"""Those of the other benchmarks, by their names there; alone with their own optimizer."""

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01),
    "sgd0": lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
    "adam5": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9)),
    "adam0": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.99)),
}
CASES = ("mlp-sgd", "mlp-adam", "cnn-sgd", "cnn-adam", "gpt-adamw")
"""Model and optimizer; the default ones."""


@dataclass(frozen=True)
class Run:
    """One training run: where it ended."""

    case: str
    arm: str
    seed: int
    loss: float
    accuracy: float
    tensors_compressed: int


@dataclass(frozen=True)
class Row:
    """One arm over its seeds, against plain DDP's spread."""

    case: str
    arm: str
    loss: float
    accuracy: float
    plain_losses: tuple[float, ...]
    plain_accuracies: tuple[float, ...]
    tensors_compressed: int
    within: bool

    @property
    def is_control(self) -> bool:
        """Whether the arm is there to be caught."""
        return self.arm.endswith(CONTROL)


def judge(runs: Sequence[Run]) -> list[Row]:
    """One row per case and arm but plain: mean over the seeds against the worst of plain's seeds."""
    rows = []
    for case in dict.fromkeys(run.case for run in runs):
        mine = [run for run in runs if run.case == case]
        plain = [run for run in mine if run.arm == "plain"]
        losses, accuracies = tuple(r.loss for r in plain), tuple(r.accuracy for r in plain)
        for arm in dict.fromkeys(run.arm for run in mine if run.arm != "plain"):
            of_arm = [run for run in mine if run.arm == arm]
            loss = statistics.fmean(run.loss for run in of_arm)
            accuracy = statistics.fmean(run.accuracy for run in of_arm)
            within = loss <= max(losses) and accuracy >= min(accuracies)
            fewest = min(run.tensors_compressed for run in of_arm)
            rows.append(Row(case, arm, loss, accuracy, losses, accuracies, fewest, within))
    return rows


# -- inside the workers ------------------------------------------------------------------------------


def train_once(case: str, arm: str, seed: int, steps: int) -> Run:
    """Train and evaluate; every rank calls it."""
    import espresso

    name, _, optimizer_name = case.partition("-")
    workload = build_workload(LARGE.get(name) or name, seed)
    torch.manual_seed(seed)
    model = DistributedDataParallel(workload.make_model() if name in LARGE else MODELS[name]())
    optimizer = (OPTIMIZERS[optimizer_name] if optimizer_name else workload.make_optimizer)(model)
    state: Any = None
    if arm != "plain":
        compressor, _, control = arm.partition(", ")
        state = espresso.register(model, compressor=compressor, seed=seed)
        if control:
            # Residuals are written and never committed: every step starts from none.
            store = state.session.store
            store.commit = store.discard
    for step in range(steps):
        inputs, targets = workload.batch(step, dist.get_rank(), dist.get_world_size())
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found: Evaluation = workload.evaluate(model.module)
    compressed = 0
    if state is not None:
        compressed = int(state.metrics()["espresso/tensors_compressed"])
        state.close()
    return Run(case, arm, seed, found.loss, found.accuracy, compressed)


# -- outside -----------------------------------------------------------------------------------------


def table_of(rows: Sequence[Row], title: str) -> Table:
    """For people."""
    table = Table(title=title, title_justify="left")
    for header in ("case", "arm", "loss", "plain's seeds", "accuracy", "plain's seeds", "compressed", ""):
        table.add_column(header, justify="left" if header in ("case", "arm", "") else "right")
    for row in rows:
        verdict = "within" if row.within else "[bold red]outside[/]"
        if row.is_control:
            verdict = "[bold red]not caught[/]" if row.within else "caught"
        table.add_row(
            row.case, row.arm, f"{row.loss:.4f}", f"{min(row.plain_losses):.4f} … {max(row.plain_losses):.4f}",
            f"{row.accuracy:.3f}", f"{min(row.plain_accuracies):.3f} … {max(row.plain_accuracies):.3f}",
            str(row.tensors_compressed), verdict,
        )  # fmt: skip
    return table


@app.command()
def main(
    cases: Annotated[str, typer.Option(help="Comma-separated model-optimizer pairs.")] = ",".join(CASES),
    steps: Annotated[int, typer.Option(help="Of every run.")] = 300,
    seeds: Annotated[int, typer.Option(help="Of every arm.", min=3)] = 3,
    rate: Annotated[str, typer.Option(help="Each host's egress limit.")] = "100mbit",
    compressors: Annotated[str, typer.Option(help="Separated by semicolons.")] = ";".join(COMPRESSORS),
    controls: Annotated[bool, typer.Option(help="Every compressor without residuals too.")] = True,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "convergence.json",
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train to equal steps with and without compression, over several seeds."""
    specs = compressors.split(";")
    if worker is not None:
        arms = [*specs, *(f"{spec}, {CONTROL}" for spec in specs if controls)] if compressors else ["plain"]
        _as_worker(worker, cases.split(","), arms, seeds, steps)
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    json_path.parent.mkdir(parents=True, exist_ok=True)
    raw = json_path.with_suffix(".raw")
    argv = [sys.executable, "-m", "benchmarks.convergence", "--cases", cases, "--steps", str(steps)]
    argv += ["--seeds", str(seeds), "--worker", str(raw)]
    argv += [] if controls else ["--no-controls"]
    runs: list[Run] = []
    for speed, of in ((FAST, ""), (rate, compressors)):
        with open_network(2, speed) as network:
            given = [*argv, "--compressors", of]
            run_workers(network, given, pin=True, deadline_s=3600)
        runs += [Run(**run) for run in json.loads(raw.read_text())]
        raw.unlink()
    rows = judge(runs)
    config = {"cases": cases, "steps": steps, "seeds": seeds, "rate": rate, "ranks": 2}
    body = results.record(config, 0, [asdict(row) | {"is_control": row.is_control} for row in rows])
    results.write(json_path, body | {"runs": [asdict(run) for run in runs]})
    title = f"{steps} steps on 2 ranks, automatic mode, mean of {seeds} seeds"
    results.console(130).print(table_of(rows, title))
    if any(row.within is row.is_control for row in rows):
        raise typer.Exit(1)


def _as_worker(out: Path, cases: Sequence[str], arms: Sequence[str], seeds: int, steps: int) -> None:
    torch.set_num_threads(1)
    with process_group(120.0):
        runs = [train_once(case, arm, seed, steps) for case in cases for arm in arms for seed in range(seeds)]
        if dist.get_rank() == 0:
            out.write_text(json.dumps([asdict(run) for run in runs]))
        dist.barrier()


if __name__ == "__main__":
    app()
