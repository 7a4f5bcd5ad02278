"""Thousands of rounds through parameter servers: memory flat, sums right to the end; then a server is killed.

    python -m benchmarks.server_soak                 # 5 000 rounds, then a job whose server dies in round 2 500

Three workers and two servers on loopback. Every round's average of a lossless exchange is compared with the exact one;
beside it a two-way top-k exchange keeps both residuals, whose telescoped sum is compared at the end.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from benchmarks import results
from benchmarks.python_path import ROOT, python_path

WORKERS, SERVERS = 3, 2
KILLER, KILLED_IN = "KILL", 2500

app = typer.Typer(pretty_exceptions_enable=False)


def resident_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def server_pids() -> list[int]:
    """The servers of this launch: the launcher's other children that run no script of ours."""
    mine, found = os.getppid(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
                env = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            parent = int(re.search(r"^PPid:\t(\d+)", status, re.M)[1])  # type: ignore[index]
            ranks = [int(v[5:]) for v in env if v.startswith(b"RANK=")]
            if parent == mine and ranks and ranks[0] >= WORKERS:
                found.append(int(entry.name))
    return sorted(found)


def memory_of(pids: list[int]) -> list[float]:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return [count * os.sysconf("SC_PAGE_SIZE") / 1e6 for count in pages]


@app.command()
def worker(rounds: Annotated[int, typer.Option()], json_path: Annotated[Path, typer.Option("--json")]) -> None:
    """One worker, inside espresso.launch."""
    import torch
    import torch.distributed as dist

    from benchmarks.exchange import Exchange, integers, make_buckets, numels_of, planned, strategy_of
    from espresso.comm.execute.executor import Assignment
    from espresso.comm.parameter_server import connected
    from espresso.strategies import Choice, CompressorSpec, parse_option

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    exchange = Exchange(1, client=connected(), timeout_s=30.0)
    exchange.warm_up(["topk:ratio=0.05,raw_below=1"])
    buckets = make_buckets({"exact": 20_011}, {"lossy": 30_029})
    two_way = parse_option("comp > flat.push > dec@server > comp@server > flat.pull > dec")
    choices = {
        "exact": Choice(parse_option("flat.push > sum@server > flat.pull")),
        "lossy": Choice(two_way, CompressorSpec.parse("topk:ratio=0.05,raw_below=1")),
    }
    strategy = strategy_of(buckets, exchange.groups.cluster, choices, partition_bytes=32768)
    assignment = planned(Assignment(strategy), buckets)
    rank, size = exchange.rank, exchange.groups.num_ranks
    # A few draws, used over and over: drawing numbers would take longer than the exchange.
    draws = [integers(buckets, rank, size, draw) for draw in range(8)]
    exact = [
        torch.stack([integers(buckets, r, size, d)[0].double() for r in range(size)]).sum(0) / size for d in range(8)
    ]
    went, came = np.zeros(30_029), np.zeros(30_029)
    wrong, memory, servers = 0, [], server_pids()
    start = time.perf_counter()
    for step in range(rounds):
        if rank == 0 and step == KILLED_IN and os.environ.get(KILLER):
            os.kill(servers[0], signal.SIGKILL)
        average, lossy = exchange.step(assignment, buckets, draws[step % 8])
        wrong += not torch.equal(average.double(), exact[step % 8])
        went += draws[step % 8][1].numpy()
        came += lossy.numpy() * size
        if step % 250 == 249:
            exchange.script.records.clear()  # the harness keeps them for tests; a training job does not
            memory.append([resident_mb(), *(memory_of(servers) if rank == 0 else [])])
    seconds = time.perf_counter() - start
    sums = exchange.groups.all_objects((went, exchange.kept(numels_of(buckets))["lossy"], wrong))
    left = came + sum(kept for _, kept, _ in sums) - sum(put for put, _, _ in sums)
    if rank == 0:
        body = {
            "rounds": rounds,
            "seconds": seconds,
            "wrong_rounds": sum(count for _, _, count in sums),
            "largest_loss": float(np.abs(left).max()),
            "kept_norm": float(np.linalg.norm(sums[0][1])),
            "memory_mb": memory,
        }
        json_path.write_text(json.dumps(body))
    exchange.close()
    dist.destroy_process_group()


def launch(rounds: int, out: Path, logs: Path, kill: bool) -> float:
    """Run the job; the seconds it took. It fails if ``kill``."""
    argv = [sys.executable, "-m", "espresso.launch", "--servers", str(SERVERS), "--timeout-s", "30"]
    argv += ["-m", "benchmarks.server_soak", "worker", "--rounds", str(rounds), "--json", str(out)]
    processes = []
    for rank in range(WORKERS + SERVERS):
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORKERS + SERVERS), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(WORKERS + SERVERS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29733",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), **({KILLER: "1"} if kill else {}),
        }  # fmt: skip
        with (logs / f"rank{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log, cwd=ROOT))
    start = time.monotonic()
    try:
        for process in processes[:WORKERS]:
            process.wait(400.0)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return time.monotonic() - start


@app.command()
def soak(
    rounds: Annotated[int, typer.Option()] = 5000,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "server_soak.json",
) -> None:
    """The soak, then the kill."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        launch(rounds, logs / "out.json", logs, kill=False)
        row = json.loads((logs / "out.json").read_text())
        launch(rounds, logs / "none.json", logs, kill=True)
        said = [(logs / f"rank{rank}.log").read_text() for rank in range(WORKERS)]
    wanted = re.compile(r"failed in iteration (\d+).*server rank (\d+) .*key \d+ \(", re.S)
    errors = [_error_line(text) for text in said]
    row["killed_server"] = {
        "errors": errors,
        "named_rank_and_key": [bool(wanted.search(line)) for line in errors],
    }
    table = Table(title=f"{WORKERS} workers, {SERVERS} servers, {rounds} rounds", title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    first, last = row["memory_mb"][1], row["memory_mb"][-1]
    table.add_row("rounds a second", f"{rounds / row['seconds']:.0f}")
    table.add_row("rounds with a wrong sum", str(row["wrong_rounds"]))
    table.add_row("largest element lost over both residuals", str(row["largest_loss"]))
    for name, begin, end in zip(("worker 0", "server 0", "server 1"), first, last, strict=False):
        table.add_row(f"memory of {name}, round 500 to the end", f"{begin:.1f} -> {end:.1f} MB")
    table.add_row(f"server killed in round {KILLED_IN}: workers that name it and a key",
                  f"{sum(row['killed_server']['named_rank_and_key'])} of {WORKERS}")  # fmt: skip
    console = results.console(120)
    console.print(table)
    console.print(errors[0], markup=False)
    results.write(json_path, results.record({"workers": WORKERS, "servers": SERVERS}, 0, [row]))
    if row["wrong_rounds"] or row["largest_loss"] or not all(row["killed_server"]["named_rank_and_key"]):
        raise typer.Exit(1)


def _error_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "failed in iteration" in line]
    return lines[-1][:600] if lines else text[-300:]


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.argv.insert(1, "soak")
    app()
