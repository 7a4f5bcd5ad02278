"""What a pause costs the next message between hosts far apart, and what helps: small traffic, or the system's setting.

    python -m benchmarks.idle --rtt-ms 50

A connection that was idle for longer than its retransmission time-out starts again from ten segments. Both ranks pause,
as in a backward pass, and then gather a payload from each other over Gloo. Arms: nothing sent in a pause; as espresso
does it (:mod:`espresso.comm.upkeep`); with ``net.ipv4.tcp_slow_start_after_idle=0`` on both hosts, and nothing sent.
"""

# No `from __future__ import annotations` here: typer reads the annotations.
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from benchmarks import results
from benchmarks.emulated import Distance, Network, describe, open_network, run_workers
from benchmarks.train import process_group

ARMS = ("silent", "as it is", "setting")

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """Milliseconds of a message after a pause: the median, the slower rank's."""

    arm: str
    kb: int
    pause_ms: int
    ms: float


def measure(num_bytes: int, pause_s: float, repeats: int, *, beats: bool) -> float:
    """Milliseconds of an all-gather after a pause; both ranks call it."""
    from espresso.comm import collectives, upkeep
    from espresso.comm.groups import Groups
    from espresso.strategies import Scope

    if not beats:
        upkeep.EVERY_S = 1e6
    groups = Groups(None, timeout_s=60.0)
    member = groups.scopes[Scope.FLAT]
    taken = []

    def gather(size: int) -> None:
        mine, theirs = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        collectives.allgather(mine, [theirs] * member.size, member)()

    for number in range(repeats + 3):
        time.sleep(pause_s)
        begin = time.perf_counter()
        gather(num_bytes)
        if number >= 3:  # the connection has grown
            taken.append(time.perf_counter() - begin)
    groups.close()
    slowest = torch.tensor([statistics.median(taken)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return 1e3 * float(slowest)


def _as_worker(out: Path, arm: str, sizes: list[int], pauses: list[int], repeats: int) -> None:
    torch.set_num_threads(1)
    with process_group(120.0):
        rows = [
            Row(arm, kb, pause, measure(1000 * kb, pause / 1e3, repeats, beats=arm == ARMS[1]))
            for kb in sizes
            for pause in pauses
        ]
        if dist.get_rank() == 0:
            out.write_text(json.dumps([asdict(row) for row in rows]))
        dist.barrier()


def _never_start_again(network: Network) -> None:
    for host in network.hosts:
        subprocess.run(host.command(["sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0"]), check=True)


@app.command()
def main(
    rate: Annotated[str, typer.Option(help="Each host's egress limit.")] = "200mbit",
    rtt_ms: Annotated[float, typer.Option(help="Round trip.")] = 50.0,
    mtu: Annotated[int, typer.Option(help="Of the cards.")] = 1500,
    kb: Annotated[str, typer.Option(help="Of the messages, comma-separated.")] = "100,600",
    pauses: Annotated[str, typer.Option(help="Milliseconds, comma-separated.")] = "0,150,600",
    repeats: Annotated[int, typer.Option(help="Messages of each arm.")] = 7,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "idle.json",
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
    arm: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Time messages after pauses."""
    if worker is not None:
        _as_worker(worker, arm, [int(n) for n in kb.split(",")], [int(n) for n in pauses.split(",")], repeats)
        return
    rows: list[Row] = []
    with TemporaryDirectory() as folder, open_network(2, rate, distance=Distance(rtt_ms, mtu=mtu)) as network:
        words, out = describe(network), Path(folder) / "rows"
        for name in ARMS:
            if name == ARMS[2]:
                _never_start_again(network)
            argv = [sys.executable, "-m", "benchmarks.idle", "--worker", str(out), "--arm", name]
            argv += ["--kb", kb, "--pauses", pauses, "--repeats", str(repeats)]
            run_workers(network, argv, pin=True, deadline_s=300)
            rows += [Row(**row) for row in json.loads(out.read_text())]
    table = Table(title=f"a message after a pause, ms; {words}, MTU {mtu}", title_justify="left")
    for header in ("message", "pause", *ARMS):
        table.add_column(header, justify="right")
    for size, pause in dict.fromkeys((row.kb, row.pause_ms) for row in rows):
        found = [row.ms for row in rows if (row.kb, row.pause_ms) == (size, pause)]
        table.add_row(f"{size} KB", f"{pause} ms", *(f"{ms:.0f}" for ms in found))
    results.console(100).print(table)
    results.write(json_path, results.record({"network": words, "mtu": mtu}, 0, [asdict(row) for row in rows]))


if __name__ == "__main__":
    app()
