"""An uncompressed step over a network: which part of the link it uses, by option, partition and connections.

    python -m benchmarks.emulated --hosts 2 --rate 200mbit --rtt-ms 50 --pin -- \
        python -m benchmarks.raw_steps --rate 200mbit

With ``--window`` the hosts' TCP windows are too small for the link, as where nobody set ``tcp_rmem`` and ``tcp_wmem``;
with ``--bursts`` nothing is paced.
All arms live in the same processes and alternate; the first step of a block, after another arm's, is not counted.
"""

import math
import os
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.emulated import parse_rate
from benchmarks.exchange import uniform
from benchmarks.models import build_workload
from benchmarks.train import process_group
from espresso.comm import connections as tcp

SHARDED = "flat.reduce_scatter > flat.allgather"
OPTIONS = (("flat.allreduce", 0), (SHARDED, 1 << 20), (SHARDED, 4 << 20))
"""Option, and partition size in bytes (0: whole buckets)."""

app = typer.Typer(pretty_exceptions_enable=False)


def measure(connections: list[int], rounds: int, steps: int) -> list[tuple[str, float]]:
    """Arms and the median seconds of a step; every rank calls it."""
    import espresso

    workload = build_workload("mlp", 0)
    names, models, states = ["plain DDP"], [DistributedDataParallel(workload.make_model())], []
    for count in connections:
        for text, partition in OPTIONS:
            models.append(DistributedDataParallel(workload.make_model()))
            strategy = uniform(text, partition_bytes=partition)
            states.append(espresso.register(models[-1], strategy=strategy, connections=count))
            cut = f", {partition >> 20} MB" if partition else ""
            names.append(f"{text}{cut}, connections {count}")
    optimizers = [workload.make_optimizer(model) for model in models]
    taken: list[list[float]] = [[] for _ in models]
    number = 0
    for turn in range(rounds + 1):
        for model, optimizer, times in zip(models, optimizers, taken, strict=True):
            dist.barrier()
            for step in range(steps + 1):
                begin = time.perf_counter()
                inputs, targets = workload.batch(number, dist.get_rank(), dist.get_world_size())
                optimizer.zero_grad(set_to_none=True)
                workload.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                number += 1
                if turn and step:
                    times.append(time.perf_counter() - begin)
    for state in states:
        state.close()
    return [(name, statistics.median(times)) for name, times in zip(names, taken, strict=True)]


@app.command()
def main(
    rate: Annotated[str, typer.Option(help="The link's, to compare with.")] = "200mbit",
    connections: Annotated[str, typer.Option(help="Of a link; several with commas.")] = "1,4",
    rounds: Annotated[int, typer.Option(help="Blocks of every arm; one more warms up.")] = 1,
    steps: Annotated[int, typer.Option(help="Of a block that are counted.")] = 1,
    window: Annotated[int, typer.Option(help="Largest TCP buffer of an emulated host, in bytes; 0: as it is.")] = 0,
    bursts: Annotated[bool, typer.Option("--bursts", help="Pace no connection.")] = False,
) -> None:
    """Measure steps on the ranks that run this."""
    torch.set_num_threads(1)
    if bursts:
        tcp.FAR_US = math.inf
    if window and os.environ.get("GLOO_SOCKET_IFNAME", "lo") != "lo":  # this machine's own stay as they are
        for name in ("tcp_rmem", "tcp_wmem"):
            Path("/proc/sys/net/ipv4", name).write_text(f"4096 {min(window, 1 << 16)} {window}")
    with process_group(300.0):
        rows = measure([int(text) for text in connections.split(",")], rounds, steps)
        ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    if not is_first:
        return
    model = build_workload("mlp", 0).make_model()
    size = 4 * sum(p.numel() for p in model.parameters()) * 2 * (ranks - 1) / ranks
    table = Table(title=f"an uncompressed step of {size / 1e6:.1f} MB a rank")
    for header in ("arm", "ms", "of the link"):
        table.add_column(header, justify="left" if header == "arm" else "right")
    for name, seconds in rows:
        table.add_row(name, f"{1e3 * seconds:.0f}", f"{8 * size / seconds / parse_rate(rate):.0%}")
    results.console(120).print(table)


if __name__ == "__main__":
    app()
