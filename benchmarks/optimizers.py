"""Whether the compressed optimizers end where the uncompressed ones do, and whether that check can fail.

    python -m benchmarks.optimizers
    python -m benchmarks.optimizers --optimizers clan --compressors "dithering"

Four real ranks over Gloo on loopback train a small network on handwritten digits. Each rank sees only some of the ten
digits, so that ranks pull apart and what a server throws away is missed; with equal data on all ranks LANS hardly
notices (it normalises gradients). Every rank is the server of a quarter of each tensor, as ``espresso.optim.TwoWay``
lays it out; the arms "2 servers" are jobs of ``espresso.launch``, four workers and two dedicated server processes.

Arms that were measured before, with the same settings and seeds, stay in the result file, so that the whole may be
run in pieces. The bands were set after a run with seed 0, so seed 0 is not among those that are judged.

A compressed arm passes if its mean test loss is at most ``BAND_LOSS`` above the uncompressed optimizer's, and its mean
test accuracy at most ``BAND_ACCURACY`` below. Compressors in ``CONTROLLED`` have two controls, the same run with the
servers' residuals thrown away, or with their sign turned, after every step: those must fail. (An unbiased compressor
has no residuals; int8 errs so little that nothing shows.) Compressed Adam in its paper's form runs for information.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.models import Batch, digits
from benchmarks.python_path import ROOT, python_path
from benchmarks.rank_pool import RankPool
from benchmarks.train import replicas_are_equal
from espresso.comm.keep.store import ResidualStore
from espresso.compressors import registry
from espresso.live.state import EspressoState
from espresso.optim import CLAN, LANS, CompressedAdam
from espresso.strategies import Site

NUM_RANKS = 4
NUM_SERVERS = 2
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
    """One way to train.

    Attributes:
        compressor: "" for an uncompressed optimizer.
        control: "" for none.
        servers: dedicated ones; 0: every rank is the server of a share.
    """

    optimizer: str
    compressor: str = ""
    control: str = ""
    servers: int = 0

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
    through_servers: int
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


def arms_for(optimizers: Sequence[str], compressors: Sequence[str], servers: Sequence[int]) -> list[Arm]:
    """Uncompressed optimizers, then every compressor with CLAN and scaled sign with compressed Adam."""
    arms = [Arm(name) for name in dict.fromkeys(FAMILIES[optimizer] for optimizer in optimizers)]
    for optimizer in optimizers:
        for number in servers if optimizer in BAND_LOSS else servers[:1]:
            for spec in compressors if optimizer == "clan" else compressors[:1]:
                controls = CONTROLS if spec in CONTROLLED and optimizer in BAND_LOSS else ("",)
                arms += [Arm(optimizer, spec, control, number) for control in controls]
    return arms


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
        through_servers=int(found.get("espresso/tensors_through_servers", 0)),
        bytes_sent=found.get("espresso/bytes_sent", 1.0), bytes_raw=found.get("espresso/bytes_raw", 1.0),
        replicas_equal=replicas_are_equal([module]), seconds=seconds,
    )  # fmt: skip
    if exchange is not None:
        exchange.close()
    return run


def _make_optimizer(model: DistributedDataParallel, arm: Arm, steps: int) -> torch.optim.Optimizer:
    # Every rank a node of its own: four servers, each of which adds up four workers.
    settings: dict[str, Any] = {
        "compressor": arm.compressor, "raw_below_bytes": RAW_BELOW_BYTES, "ranks_per_node": 1, "timeout_s": 60.0,
        "adapt": False,  # the guard on what is learnt would see that residuals are spoilt, and mend it
    }  # fmt: skip
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "lans": lambda: LANS(model.parameters(), lr=0.01),
        "clan": lambda: CLAN(model, lr=0.01, **settings),
        "adam": lambda: torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0),
        "compressed adam": lambda: CompressedAdam(model, lr=2e-3, warmup_steps=steps // 5, **settings),
        UNDIVIDED: lambda: CompressedAdam(model, lr=2e-3, warmup_steps=steps // 5, precondition=False, **settings),
    }
    return makers[arm.optimizer]()


def _share_of(rank: int, data: Batch) -> Batch:
    """The images of this rank's digits: 0-2, 3-4, 5-7 and 8-9."""
    inputs, targets = data
    mine = targets * NUM_RANKS // 10 == rank
    return inputs[mine], targets[mine]


def _interfere(exchange: EspressoState, factor: float) -> None:
    """Multiply the servers' residuals by ``factor`` whenever an iteration has been committed."""
    store = exchange.session.store
    commit = store.commit

    def commit_and_spoil() -> None:
        commit()
        _spoil(store, factor, [tensor.name for tensor in exchange.session.model.tensors])

    store.commit = commit_and_spoil  # type: ignore[method-assign]


def _spoil(store: ResidualStore, factor: float, tensors: Sequence[str]) -> None:
    """Dedicated servers are told to; without them the residuals of shares are at hand."""
    for residual in store.live:
        if residual.site in SERVER_SITES:
            residual.old *= factor
    if store.remote is not None:
        store.remote.rescale(dict.fromkeys(tensors, factor))


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


def train_with_servers(job_path: Path) -> None:
    """What a worker of ``espresso.launch`` runs: the arms of a job file; rank 0 writes the runs into it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = json.loads(job_path.read_text())
    rank = dist.get_rank()
    runs = [train_once(rank, Arm(**arm), seed, job["steps"]) for arm in job["arms"] for seed in job["seeds"]]
    if rank == 0:
        job_path.write_text(json.dumps([asdict(run) for run in runs]))
    dist.destroy_process_group()


# -- outside -----------------------------------------------------------------------------------------


def run_with_servers(arms: Sequence[Arm], seeds: Sequence[int], steps: int, deadline_s: float) -> list[Run]:
    """One job of the launcher for all arms that have the same number of servers."""
    servers = arms[0].servers
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"arms": [asdict(arm) for arm in arms], "seeds": seeds, "steps": steps}))
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        argv += ["--nproc-per-node", str(NUM_RANKS + servers), "-m", "espresso.launch"]
        argv += ["--servers", str(servers), "--engines", "1", "--timeout-s", "60"]
        argv += ["-m", "benchmarks.optimizers", "--job", str(job)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        subprocess.run(argv, cwd=ROOT, env=env, timeout=deadline_s, check=True)
        return [run_from(row) for row in json.loads(job.read_text())]


def run_from(row: dict[str, Any]) -> Run:
    """A run as it was written; NaN was written as null."""
    numbers: dict[str, Any] = {key: math.nan if value is None else value for key, value in row.items() if key != "arm"}
    return Run(arm=Arm(**row["arm"]), **numbers)


def measured_before(path: Path, config: dict[str, Any]) -> list[Run]:
    """The runs of an earlier call with the same settings."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    if before["config"] != json.loads(json.dumps(config)):
        return []
    return [run_from(row) for row in before["runs"]]


def measure(arms: Sequence[Arm], seeds: Sequence[int], steps: int) -> list[Run]:
    """Train every arm with every seed."""
    runs: list[Run] = []
    pool = RankPool(NUM_RANKS)
    try:
        for arm in (arm for arm in arms if not arm.servers):
            runs += [pool.run(train_once, arm, seed, steps, deadline_s=180.0)[0] for seed in seeds]
    finally:
        pool.close()
    for servers in sorted({arm.servers for arm in arms} - {0}):
        same = [arm for arm in arms if arm.servers == servers]
        runs += run_with_servers(same, seeds, steps, 180.0 * len(same) * len(seeds))
    return runs


def table_of(rows: Sequence[Row], title: str) -> Table:
    """For people."""
    table = Table(title=title, title_justify="left")
    for header in (
        "optimizer",
        "compressor",
        "servers",
        "control",
        "test loss",
        "above",
        "accuracy",
        "below",
        "bytes",
        "",
    ):
        table.add_column(header, justify="left" if header in ("optimizer", "compressor", "control", "") else "right")
    for row in rows:
        verdict = "within" if row.within else "outside"
        if not row.is_as_wanted:
            verdict = f"[bold red]{'not caught' if row.arm.control else 'outside'}[/]"
        where = str(row.arm.servers or "shares")
        table.add_row(
            row.arm.optimizer, row.arm.compressor, where, row.arm.control, f"{statistics.fmean(row.losses):.4f}",
            f"{row.above:+.4f}", f"{statistics.fmean(row.accuracies):.3f}", f"{row.below:+.3f}",
            f"{row.bytes_share:.0%}", verdict,
        )  # fmt: skip
    return table


def known(compressors: str) -> tuple[str, ...]:
    """The specs whose compressors this version has."""
    return tuple(spec for spec in compressors.split(";") if spec.partition(":")[0] in registry.compressor_ids())


def _without_nan(body: Any) -> Any:
    """The same with null for NaN, which JSON does not have (a run that diverged)."""
    return json.loads(json.dumps(body), parse_constant=lambda _: None)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Of every run.")] = 400,
    seeds: Annotated[str, typer.Option(help="Of every arm, separated by commas.")] = "3,4,5",
    optimizers: Annotated[str, typer.Option(help="Separated by semicolons.")] = ";".join(FAMILIES),
    compressors: Annotated[str, typer.Option(help="Separated by semicolons.")] = ";".join(COMPRESSORS),
    servers: Annotated[
        str, typer.Option(help="Dedicated servers, separated by commas; 0: ranks share it.")
    ] = f"0,{NUM_SERVERS}",
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "optimizers.json",
    job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train with and without compression, and with the servers' residuals spoilt."""
    if job is not None:
        train_with_servers(job)
        return
    numbers = [int(seed) for seed in seeds.split(",")]
    config: dict[str, Any] = {
        "steps": steps, "seeds": numbers, "ranks": NUM_RANKS, "batch_size": BATCH_SIZE,
        "raw_below_bytes": RAW_BELOW_BYTES, "band_loss": BAND_LOSS, "band_accuracy": BAND_ACCURACY,
    }  # fmt: skip
    strangers = sorted(set(optimizers.split(";")) - set(FAMILIES))
    if strangers:
        raise typer.BadParameter(f"no optimizer {strangers[0]!r}; there are {'; '.join(FAMILIES)}")
    arms = arms_for(optimizers.split(";"), known(compressors), [int(number) for number in servers.split(",")])
    before = measured_before(json_path, config)
    # What others are compared with is not measured again.
    arms = [arm for arm in arms if arm.compressor or arm not in {run.arm for run in before}]
    runs = [run for run in before if run.arm not in arms] + measure(arms, numbers, steps)
    rows = judge(runs)
    body = results.record(config, numbers[0], [asdict(row) | {"is_as_wanted": row.is_as_wanted} for row in rows])
    results.write(json_path, _without_nan(body | {"runs": [asdict(run) for run in runs]}))
    title = f"{steps} steps on {NUM_RANKS} ranks with different digits, mean of seeds {seeds}"
    results.console(140).print(table_of(rows, title))
    if not all(row.is_as_wanted for row in rows) or not all(run.replicas_equal for run in runs):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
