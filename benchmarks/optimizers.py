"""Whether the compressed optimizers end where the uncompressed ones do, and whether that check can fail.

    python -m benchmarks.optimizers
    python -m benchmarks.optimizers --steps 400 --seeds 3 --compressors "efsignsgd;topk:ratio=0.05"

Four real ranks over Gloo on loopback train a small network on handwritten digits. Each rank sees only some of the ten
digits, so that ranks pull apart and what a server throws away is missed; with equal data on all ranks LANS hardly
notices (it normalises gradients). Every rank is the server of a quarter of each tensor, as ``espresso.optim.TwoWay``
lays it out.

A compressed arm passes if its mean test loss is at most ``BAND_LOSS`` above the uncompressed optimizer's, and its mean
test accuracy at most ``BAND_ACCURACY`` below. Compressors in ``CONTROLLED`` have two controls, the same run with the
servers' residuals thrown away, or with their sign turned, after every step: those must fail. (An unbiased compressor
has no residuals; int8 errs so little that nothing shows.) Compressed Adam in its paper's form runs for information.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.models import Batch, digits
from benchmarks.rank_pool import RankPool
from espresso.compressors import registry
from espresso.optim import CLAN, LANS, CompressedAdam
from espresso.state import EspressoState
from espresso.strategies import Site

NUM_RANKS = 4
BATCH_SIZE = 48
RAW_BELOW_BYTES = 1024
BAND_LOSS = {"clan": 0.05, "compressed adam": 0.02}
"""Nats of test loss."""
BAND_ACCURACY = 0.02

COMPRESSORS = ("efsignsgd", "topk:ratio=0.05", "dithering", "int8")
"""Scaled 1-bit, top-k, dithering, and a quantizer with error feedback for comparison."""

CONTROLLED = ("efsignsgd", "topk:ratio=0.05")
UNDIVIDED = "compressed adam, undivided"
"""The paper's form: momentum is compressed before it is divided by the frozen deviation."""

SERVER_SITES = (Site.FLAT_SECOND, Site.INTER_SECOND)
CONTROLS = {"": 1.0, "server residual off": 0.0, "server residual's sign turned": -1.0}
"""What the servers' residuals are multiplied by after every step."""

FAMILIES: dict[str, str] = {"clan": "lans", "compressed adam": "adam", UNDIVIDED: "adam"}
"""Compressed optimizer, and the uncompressed one it has to keep up with."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Arm:
    """One way to train: optimizer, compressor ("" for an uncompressed optimizer) and control ("" for none)."""

    optimizer: str
    compressor: str = ""
    control: str = ""

    @property
    def reference(self) -> str:
        return FAMILIES.get(self.optimizer, self.optimizer)


@dataclass(frozen=True)
class Run:
    """Where one training run ended."""

    arm: Arm
    seed: int
    train_loss: float
    loss: float
    accuracy: float
    tensors_compressed: int
    bytes_sent: float
    bytes_raw: float
    replicas_equal: bool
    seconds: float


@dataclass(frozen=True)
class Row:
    """One compressed arm over its seeds, against its uncompressed optimizer."""

    arm: Arm
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    above: float
    below: float
    bytes_share: float
    within: bool

    @property
    def is_as_wanted(self) -> bool:
        """Within the band, or, for a control, outside. What runs for information may end anywhere."""
        if self.arm.optimizer not in BAND_LOSS:
            return True
        return self.within is (self.arm.control == "")


def arms_for(compressors: Sequence[str]) -> list[Arm]:
    """Both uncompressed optimizers, then every compressor with CLAN and scaled sign with compressed Adam."""
    arms = [Arm(name) for name in dict.fromkeys(FAMILIES.values())]
    for optimizer, specs in (("clan", compressors), ("compressed adam", compressors[:1])):
        for spec in specs:
            arms += [Arm(optimizer, spec, control) for control in (CONTROLS if spec in CONTROLLED else ("",))]
    return [*arms, Arm(UNDIVIDED, compressors[0])]


def judge(runs: Sequence[Run]) -> list[Row]:
    """One row per compressed arm: means over the seeds against those of its uncompressed optimizer."""
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs if run.arm.compressor):
        mine = [run for run in runs if run.arm == arm]
        plain = [run for run in runs if run.arm == Arm(arm.reference)]
        losses, accuracies = tuple(r.loss for r in mine), tuple(r.accuracy for r in mine)
        above = statistics.fmean(losses) - statistics.fmean(r.loss for r in plain)
        below = statistics.fmean(r.accuracy for r in plain) - statistics.fmean(accuracies)
        within = above <= BAND_LOSS.get(arm.optimizer, 0.0) and below <= BAND_ACCURACY
        share = mine[-1].bytes_sent / mine[-1].bytes_raw
        rows.append(Row(arm, losses, accuracies, above, below, share, within))
    return rows


# -- inside the workers ------------------------------------------------------------------------------


def train_once(rank: int, arm: Arm, seed: int, steps: int) -> Run:
    """Train and evaluate; every rank calls it."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(module, process_group=dist.new_group())
    optimizer = _make_optimizer(model, arm, steps)
    exchange: EspressoState | None = getattr(optimizer, "exchange", None)
    if exchange is not None and arm.control:
        _interfere(exchange, CONTROLS[arm.control])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1.0 - step / steps)
    )
    inputs, targets = _share_of(rank, digits()[0])
    began = time.perf_counter()
    for step in range(steps):
        drawn = torch.randint(
            len(targets),
            (BATCH_SIZE,),
            generator=torch.Generator().manual_seed((seed * 10**6 + step) * 64 + rank),
        )
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[drawn]), targets[drawn]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - began
    found = {} if exchange is None else exchange.metrics()
    run = Run(
        arm, seed, *_measure(module),
        tensors_compressed=int(found.get("espresso/tensors_compressed", 0)),
        bytes_sent=found.get("espresso/bytes_sent", 1.0), bytes_raw=found.get("espresso/bytes_raw", 1.0),
        replicas_equal=_replicas_equal(module), seconds=seconds,
    )  # fmt: skip
    if exchange is not None:
        exchange.close()
    return run


def _make_optimizer(model: DistributedDataParallel, arm: Arm, steps: int) -> torch.optim.Optimizer:
    # Every rank a node of its own: four servers, each of which adds up four workers.
    settings: dict[str, Any] = {
        "compressor": arm.compressor, "raw_below_bytes": RAW_BELOW_BYTES, "ranks_per_node": 1, "timeout_s": 60.0
    }  # fmt: skip
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "lans": lambda: LANS(model.parameters(), lr=0.01),
        "clan": lambda: CLAN(model, lr=0.01, **settings),
        "adam": lambda: torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0),
        "compressed adam": lambda: CompressedAdam(model, lr=2e-3, warmup_steps=steps // 5, **settings),
        UNDIVIDED: lambda: CompressedAdam(
            model, lr=2e-3, warmup_steps=steps // 5, precondition=False, **settings
        ),
    }
    return makers[arm.optimizer]()


def _share_of(rank: int, data: Batch) -> Batch:
    """The images of this rank's digits: 0-2, 3-4, 5-7 and 8-9."""
    inputs, targets = data
    mine = targets * NUM_RANKS // 10 == rank
    return inputs[mine], targets[mine]


def _interfere(exchange: EspressoState, factor: float) -> None:
    """Multiply the servers' residuals by ``factor`` whenever an iteration has been committed."""
    store = exchange._store
    commit = store.commit

    def commit_and_spoil() -> None:
        commit()
        for residual in store._live:
            if residual.site in SERVER_SITES:
                residual.old *= factor

    store.commit = commit_and_spoil  # type: ignore[method-assign]


@torch.no_grad()
def _measure(module: nn.Module) -> tuple[float, float, float]:
    """Training loss, test loss, test accuracy."""
    (inputs, targets), (test_inputs, test_targets) = digits()
    outputs = module(test_inputs)
    right = (outputs.argmax(1) == test_targets).float().mean()
    losses = (
        functional.cross_entropy(module(inputs), targets),
        functional.cross_entropy(outputs, test_targets),
    )
    return float(losses[0]), float(losses[1]), float(right)


def _replicas_equal(module: nn.Module) -> bool:
    mine = torch.cat([p.detach().flatten() for p in module.parameters()])
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    same = torch.tensor(int(torch.equal(mine, theirs)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


# -- outside -----------------------------------------------------------------------------------------


def table_of(rows: Sequence[Row], title: str) -> Table:
    """For people."""
    table = Table(title=title, title_justify="left")
    for header in (
        "optimizer",
        "compressor",
        "control",
        "test loss",
        "above",
        "accuracy",
        "below",
        "bytes",
        "",
    ):
        table.add_column(
            header, justify="left" if header in ("optimizer", "compressor", "control", "") else "right"
        )
    for row in rows:
        verdict = "within" if row.within else "outside"
        if not row.is_as_wanted:
            verdict = f"[bold red]{'not caught' if row.arm.control else 'outside'}[/]"
        table.add_row(
            row.arm.optimizer, row.arm.compressor, row.arm.control, f"{statistics.fmean(row.losses):.4f}",
            f"{row.above:+.4f}", f"{statistics.fmean(row.accuracies):.3f}", f"{row.below:+.3f}",
            f"{row.bytes_share:.0%}", verdict,
        )  # fmt: skip
    return table


def known(compressors: str) -> tuple[str, ...]:
    """The specs whose compressors this version has."""
    return tuple(
        spec for spec in compressors.split(";") if spec.partition(":")[0] in registry.compressor_ids()
    )


def _without_nan(body: Any) -> Any:
    """The same with null for NaN, which JSON does not have (a run that diverged)."""
    return json.loads(json.dumps(body), parse_constant=lambda _: None)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Of every run.")] = 400,
    seeds: Annotated[int, typer.Option(help="Of every arm.", min=1)] = 3,
    compressors: Annotated[str, typer.Option(help="Separated by semicolons.")] = ";".join(COMPRESSORS),
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "optimizers.json",
) -> None:
    """Train with and without compression, and with the servers' residuals spoilt."""
    arms = arms_for(known(compressors))
    pool = RankPool(NUM_RANKS)
    runs: list[Run] = []
    try:
        for arm in arms:
            for seed in range(seeds):
                runs.append(pool.run(train_once, arm, seed, steps, deadline_s=180.0)[0])
    finally:
        pool.close()
    rows = judge(runs)
    config = {
        "steps": steps, "seeds": seeds, "compressors": compressors, "ranks": NUM_RANKS, "batch_size": BATCH_SIZE,
        "raw_below_bytes": RAW_BELOW_BYTES, "band_loss": BAND_LOSS, "band_accuracy": BAND_ACCURACY,
    }  # fmt: skip
    body = results.record(config, 0, [asdict(row) | {"is_as_wanted": row.is_as_wanted} for row in rows])
    results.write(json_path, _without_nan(body | {"runs": [asdict(run) for run in runs]}))
    title = f"{steps} steps on {NUM_RANKS} ranks with different digits, mean of {seeds} seeds"
    Console(highlight=False, width=None if sys.stdout.isatty() else 130).print(table_of(rows, title))
    if not all(row.is_as_wanted for row in rows) or not all(run.replicas_equal for run in runs):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
