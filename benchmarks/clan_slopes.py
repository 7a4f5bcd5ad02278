"""How fast CLAN's gradients vanish with the number of steps: its claim is O(1 / sqrt(T)).

    python -m benchmarks.clan_slopes

The claim (BytePS-Compress, theorem on CLAN) is about a run of T steps at a constant rate of c / sqrt(T): the mean over
its steps of the squared norm of the whole gradient falls at least like 1 / sqrt(T). So runs of several T are made, each
from the start, and a line is laid through log mean against log T: its slope is to be at most -0.5, or below zero and
no more than ``BAND`` above that of LANS, which compresses nothing. Two real ranks over Gloo; the MLP's ranks each see
other digits. The gradient is that of one large fixed batch, at ``LOOKS`` steps of a run. Two values of c, and a
character GPT. Nothing is timed.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.models import Batch, Gpt, build_workload, digits
from benchmarks.rank_pool import RankPool
from espresso.optim import CLAN, LANS

NUM_RANKS = 2
LOOKS = 20
CLAIM, BAND = -0.5, 0.1
RATES = {"mlp": (0.05, 0.2), "gpt": (0.05, 0.2)}
"""c: the constant rate of a run is c / sqrt(T)."""
STEPS = {"mlp": (1600, 3200, 6400, 12800), "gpt": (100, 200, 400, 800)}
"""T: as long as there is time for. Of the MLP's runs of up to 400 steps even those of LANS say nothing."""
DEADLINE_S = 1800.0
"""Of one run."""
COMPRESSORS = ("", "efsignsgd", "topk:ratio=0.05")
"""The first is LANS."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Run:
    """One run: the mean of the squared norm of the whole gradient over its steps."""

    model: str
    compressor: str
    c: float
    steps: int
    mean_squared: float


@dataclass(frozen=True)
class Row:
    """One line: how the mean falls with the steps."""

    model: str
    compressor: str
    c: float
    means: tuple[float, ...]
    slope: float
    passes: bool


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(rank: int, model: str, compressor: str, c: float, steps: int) -> Run:
    """Every rank calls it."""
    torch.manual_seed(1)
    workload = build_workload("gpt", 1) if model == "gpt" else None
    module = Gpt(width=64, num_layers=2, num_heads=4) if workload else _mlp()
    ddp = DistributedDataParallel(module, process_group=dist.new_group())
    rate = c / math.sqrt(steps)
    optimizer: LANS
    if compressor:
        optimizer = CLAN(ddp, lr=rate, compressor=compressor, raw_below_bytes=1024, ranks_per_node=1, timeout_s=60.0)
    else:
        optimizer = LANS(ddp.parameters(), lr=rate)
    (inputs, targets), _ = digits()
    mine = targets % NUM_RANKS == rank

    def batch(step: int) -> Batch:
        if workload is not None:
            return workload.batch(step, rank, NUM_RANKS)
        drawn = torch.randint(int(mine.sum()), (48,), generator=torch.Generator().manual_seed(step * 64 + rank))
        return inputs[mine][drawn], targets[mine][drawn]

    whole = [(inputs, targets)] if workload is None else [workload.batch(10**6 + k, 0, 1) for k in range(4)]
    squared = []
    for step in range(steps):
        if step * LOOKS // steps != (step - 1) * LOOKS // steps:
            squared.append(_squared_norm(module, whole))
        optimizer.zero_grad()
        _loss(ddp, batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    exchange = getattr(optimizer, "exchange", None)
    if exchange is not None:
        exchange.close()
    return Run(model, compressor, c, steps, statistics.fmean(squared))


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    outputs = model(batch[0])
    return functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def _squared_norm(module: nn.Module, batches: Sequence[Batch]) -> float:
    """Of the gradient over all batches, without a hook."""
    parameters = list(module.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for batch in batches:
        for sum_, part in zip(total, torch.autograd.grad(_loss(module, batch), parameters), strict=True):
            sum_ += part / len(batches)
    return float(sum(part.square().sum() for part in total))


def slope(steps: Sequence[int], means: Sequence[float]) -> float:
    """Of log mean against log steps, least squares."""
    return statistics.linear_regression([math.log(s) for s in steps], [math.log(m) for m in means]).slope


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """A row for each line, CLAN's beside its LANS."""
    rows: list[Row] = []
    for model, c in dict.fromkeys((run.model, run.c) for run in runs):
        plain = math.nan
        for compressor in dict.fromkeys(run.compressor for run in runs if (run.model, run.c) == (model, c)):
            line = sorted(
                (r for r in runs if (r.model, r.c, r.compressor) == (model, c, compressor)), key=lambda r: r.steps
            )
            means = tuple(run.mean_squared for run in line)
            found = slope([run.steps for run in line], means)
            plain = found if not compressor else plain
            passes = found <= CLAIM or (found < 0 and found <= plain + BAND)
            rows.append(Row(model, compressor, c, means, found, passes))
    return rows


@app.command()
def main(
    steps: Annotated[str, typer.Option(help="T, separated by commas; without it a model's own.")] = "",
    models: Annotated[str, typer.Option(help="Separated by commas.")] = "mlp,gpt",
    compressors: Annotated[str, typer.Option(help="Separated by semicolons; LANS always runs.")] = ";".join(
        COMPRESSORS[1:]
    ),
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "clan_slopes.json",
) -> None:
    """Train runs of several lengths, and lay a line through them."""
    lengths = {name: tuple(int(part) for part in steps.split(",")) if steps else STEPS[name] for name in RATES}
    began, runs, pool = time.perf_counter(), [], RankPool(NUM_RANKS)
    try:
        for model in models.split(","):
            for c in RATES[model]:
                for compressor in ("", *compressors.split(";")):
                    for length in lengths[model]:
                        runs.append(pool.run(train, model, compressor, c, length, deadline_s=DEADLINE_S)[0])
    finally:
        pool.close()
    rows = rows_of(runs)
    table = Table(title="mean squared gradient of runs of T steps", title_justify="left")
    for header in ("model", "optimizer", "c", "T", "mean squared gradient", "slope", ""):
        table.add_column(header)
    for row in rows:
        name = f"CLAN, {row.compressor}" if row.compressor else "LANS"
        means = ", ".join(f"{mean:.3g}" for mean in row.means)
        asked = ", ".join(str(length) for length in lengths[row.model])
        table.add_row(row.model, name, f"{row.c:g}", asked, means, f"{row.slope:.2f}", "" if row.passes else "above")
    results.console(130).print(table)
    config = {"steps": lengths, "ranks": NUM_RANKS, "claim": CLAIM, "band": BAND, "rates": RATES}
    body = results.record(config, 1, [asdict(row) for row in rows])
    results.write(json_path, body | {"seconds": time.perf_counter() - began})
    if not all(row.passes for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
