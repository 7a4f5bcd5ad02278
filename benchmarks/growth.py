"""How traffic and rounds grow with the number of hosts: exchanges of every kind, measured against the model's formulas.

    python -m benchmarks.growth                       # 2, 4 and 8 emulated hosts
    python -m benchmarks.growth --hosts 2,4 --workers 2
    python -m benchmarks.growth --servers 1           # on a host of its own

Bytes are those that a host's card sends in a step, of a gradient of a million numbers; with servers, what a server's
card receives and sends, which is what its workers' cards send and receive. Rounds are what a step of a
thousand numbers takes, over the way in one direction: what waits for the distance. The formulas are those that the
timeline plays (:mod:`espresso.model.links`), with a link of which a byte, or a round, costs one.
"""

# No `from __future__ import annotations` here: typer reads the annotations.
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.emulated import Distance, describe, open_network, run_workers
from benchmarks.exchange import uniform
from benchmarks.far import Slopes
from benchmarks.train import Place, process_group

MANY, FEW = 1 << 20, 1 << 10
"""Numbers of the gradients by which bytes are counted, and rounds."""

STEPS = 5
WITHIN = 0.05
"""Of the formula: headers and acknowledgements take some per cent."""

FLAT = {
    "allreduce": ("flat.allreduce", "none"),
    "reduce-scatter, all-gather": ("flat.reduce_scatter > flat.allgather", "none"),
    "signs, all-gather": ("comp > flat.allgather > dec", "efsignsgd"),
    "signs, all-to-all, all-gather": ("comp > flat.all_to_all > dec > comp > flat.allgather > dec", "efsignsgd"),
}
HIERARCHICAL = {
    "signs, between hosts: all-gather": (
        "intra.reduce_scatter > comp > inter.allgather > dec > intra.allgather",
        "efsignsgd",
    ),
    "signs, between hosts: all-to-all, all-gather": (
        "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather",
        "efsignsgd",
    ),
}
SERVERS = {
    "through a server": ("flat.push > sum@server > flat.pull", "none"),
    "signs, through a server": ("comp > flat.push > dec@server > comp@server > flat.pull > dec", "efsignsgd"),
}

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """An exchange on so many hosts."""

    hosts: int
    workers: int
    name: str
    mb: float
    formula_mb: float
    rounds: float
    formula_rounds: float

    @property
    def passes(self) -> bool:
        """Whether the card sends what the formula says."""
        return abs(self.mb / self.formula_mb - 1) <= WITHIN


def formula(option: str, spec: str, hosts: int, workers: int, numel: int, servers: int = 0) -> tuple[float, float]:
    """(bytes of the card that is counted, rounds) of a step, as the model has them."""
    from espresso.model.costs import CostModel, ServerCosts
    from espresso.model.links import KB, AlphaBeta, Links
    from espresso.model.pricing import Pricer
    from espresso.strategies import Choice, Cluster, CompressorSpec, parse_option

    cluster = Cluster(hosts, workers, num_servers=servers)
    nothing, counted = AlphaBeta(0.0, 0.0), AlphaBeta(0.0, 1.0, 1.0)
    costs = CostModel(Links(nothing, counted, in_flight=2), servers=ServerCosts(0.0))
    choice = Choice(parse_option(option), CompressorSpec.parse(spec))
    works = [w for w in Pricer(costs, cluster, free=True).chain(choice, numel, "float32") if w.shape.step.scope]
    return KB * sum(work.us for work in works), sum(work.latency_us for work in works)


def options(workers: int, servers: int) -> dict[str, tuple[str, str]]:
    """What such a job can run."""
    return SERVERS if servers else FLAT | (HIERARCHICAL if workers > 1 else {})


# -- inside the workers ------------------------------------------------------------------------------


def measure(place: Place, names: dict[str, tuple[str, str]], num_servers: int) -> list[tuple[str, float, float]]:
    """Name, bytes of a card, and microseconds of a step of few numbers; every rank calls it."""
    import espresso

    found = []
    for name, (option, spec) in names.items():
        sent = step_s = 0.0
        for numel in (MANY, FEW):
            model = DistributedDataParallel(Slopes(nn.ParameterList([nn.Parameter(torch.zeros(numel))])))
            state = espresso.register(model, spec, uniform(option, spec, partition_bytes=0), timeout_s=120.0)
            slopes, times = [torch.randn(numel)], []
            for step in range(STEPS + 2):
                if step == 2:  # DDP has rebuilt its buckets, and kernels are there
                    dist.barrier()
                    before = place.tx_bytes(), place.rx_bytes()
                begin = time.perf_counter()
                model(slopes).backward()
                times.append(time.perf_counter() - begin)
            dist.barrier()
            if numel == MANY:
                sent = (place.tx_bytes() - before[0]) / STEPS
                if "push" in option:  # a server's card carries what all of its workers' do
                    carried = torch.tensor([sent + (place.rx_bytes() - before[1]) / STEPS], dtype=torch.float64)
                    dist.all_reduce(carried)
                    sent = float(carried) / num_servers
            else:
                step_s = statistics.median(times[2:])
            state.close()
        slowest = torch.tensor([step_s])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append((name, sent, float(slowest) * 1e6))
    return found


def _as_worker(out: Path, workers: int, servers: int) -> None:
    torch.set_num_threads(1)
    with process_group(120.0):
        found = measure(Place.from_env(None), options(workers, servers), servers)
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
        dist.barrier()


# -- outside -----------------------------------------------------------------------------------------


def table_of(rows: list[Row], title: str) -> Table:
    """For people."""
    table = Table(title=title, title_justify="left")
    for header in ("hosts", "exchange", "MB a card", "formula", "rounds", "formula", ""):
        table.add_column(header, justify="left" if header in ("exchange", "") else "right")
    for row in rows:
        table.add_row(
            f"{row.hosts} x {row.workers}", row.name, f"{row.mb:.3f}", f"{row.formula_mb:.3f}",
            f"{row.rounds:.1f}", f"{row.formula_rounds:g}", "pass" if row.passes else "[bold red]MISS[/]",
        )  # fmt: skip
    return table


@app.command()
def main(
    hosts: Annotated[str, typer.Option(help="Emulated hosts, comma-separated.")] = "2,4,8",
    workers: Annotated[int, typer.Option(help="Of each host.")] = 1,
    servers: Annotated[int, typer.Option(help="Parameter servers, each on a host of its own.")] = 0,
    rate: Annotated[str, typer.Option(help="Each host's egress limit.")] = "200mbit",
    rtt_ms: Annotated[float, typer.Option(help="Round trip.")] = 40.0,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "growth.json",
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Count bytes and rounds of a step, and compare."""
    if worker is not None:
        _as_worker(worker, workers, servers)
        return
    if servers and workers > 1:
        raise typer.BadParameter(
            "a server's card is told by its workers' cards, so with --servers a host has one worker"
        )
    rows: list[Row] = []
    networks: dict[str, str] = {}
    for number in map(int, hosts.split(",")):
        with TemporaryDirectory() as folder:
            out = Path(folder) / "found"
            with open_network(number + servers, rate, distance=Distance(rtt_ms)) as network:
                networks[str(number)] = describe(network)
                launch = ["espresso.launch", "--servers", str(servers), "-m"] if servers else []
                argv = [sys.executable, "-m", *launch, "benchmarks.growth", "--worker", str(out)]
                argv += ["--workers", str(workers), "--servers", str(servers)]
                run_workers(network, argv, workers_per_host=workers, pin=True, deadline_s=600)
            found: list[Any] = json.loads(out.read_text())
        for name, sent, us in found:
            option, spec = options(workers, servers)[name]
            said, _ = formula(option, spec, number, workers, MANY, servers)
            _, rounds = formula(option, spec, number, workers, FEW, servers)
            rows.append(Row(number, workers, name, sent / 1e6, said / 1e6, us / (rtt_ms * 500), rounds))
    results.console(110).print(table_of(rows, f"{workers} workers a host, {'; '.join(networks.values())}"))
    config = {"networks": networks, "workers": workers, "servers": servers, "rtt_ms": rtt_ms, "cores": os.cpu_count()}
    results.write(json_path, results.record(config, 0, [asdict(row) for row in rows]))
    if not all(row.passes for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
