"""Twenty workers killed at random moments: do the others raise in time, and say what they waited for?

    python -m benchmarks.kill

Four ranks train on loopback. At a random moment a random rank gets SIGKILL. Every other rank must raise
within the time-out and end by itself; the summary says how long that took and what was said.
"""

import json
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import results
from benchmarks.chaos.trial import blamed_in
from benchmarks.exchange import uniform
from benchmarks.ports import free_port
from benchmarks.rank_pool import RANKS

NUM_RANKS = 4
GRACE_S = 5.0
LONGEST_DELAY_S = 2.0
WIDTHS = (256, 1024, 1024, 512, 10)

STRATEGIES: dict[str, tuple[str, str, int]] = {
    "plain": ("flat.allreduce", "none", 1),
    "scaled sign, all-to-all + allgather": (
        "comp > flat.all_to_all > dec > comp > flat.allgather > dec",
        "efsignsgd",
        1,
    ),
    "DGC, flat allgather": ("comp > flat.allgather > dec", "dgc:ratio=0.01", 1),
    "scaled sign, hierarchical": (
        "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather",
        "efsignsgd",
        2,
    ),
    "auto": ("", "efsignsgd", 2),
}
"""Name to option, compressor and ranks per node; no option is automatic mode, killed while it measures."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Trial:
    """One killed worker.

    Attributes:
        raised_s: from the kill to each survivor's error.
        num_hung: survivors that did not raise, or did not exit, before time-out and grace were over.
        num_named: survivors whose error names itself, iteration, what was waited for, and at last the dead rank.
        texts: what they said.
    """

    strategy: str
    victim: int
    delay_s: float
    raised_s: tuple[float, ...]
    num_hung: int
    num_named: int
    texts: tuple[str, ...]


def worker(rank: int, port: int, name: str, timeout_s: float, talk: Connection) -> None:
    """Train until an error comes, then tell it."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import logging

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import espresso

    logging.getLogger("espresso").addHandler(logging.NullHandler())  # the error is told below
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    option, compressor, ranks_per_node = STRATEGIES[name]
    strategy: Any = uniform(option, compressor) if option else "auto"
    state = espresso.register(
        ddp, compressor, strategy, ranks_per_node=ranks_per_node, timeout_s=timeout_s, offload_threads=1
    )
    try:
        for step in range(100_000):
            ddp.zero_grad()
            ddp(torch.randn(8, WIDTHS[0])).square().mean().backward()
            if step == 2:
                talk.send("trains")
    except RuntimeError:
        talk.send((time.time(), str(state.error)))


def run_trial(name: str, victim: int, delay_s: float, timeout_s: float) -> Trial:
    """Start four ranks, kill one ``delay_s`` after all have trained a few steps, and watch the others."""
    port = free_port()
    pairs = [RANKS.Pipe(duplex=False) for _ in range(NUM_RANKS)]
    processes = [
        RANKS.Process(target=worker, args=(rank, port, name, timeout_s, pairs[rank][1])) for rank in range(NUM_RANKS)
    ]
    try:
        for process in processes:
            process.start()
        for receive, _ in pairs:
            if not receive.poll(180.0) or receive.recv() != "trains":
                raise RuntimeError("a worker did not begin to train")
        time.sleep(delay_s)
        pid = processes[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return _watch(name, victim, delay_s, time.time(), time.monotonic() + timeout_s + GRACE_S, processes, pairs)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _watch(
    name: str, victim: int, delay_s: float, killed_at: float, deadline: float, processes: Any, pairs: Any
) -> Trial:
    raised, texts, num_hung = [], [], 0
    for rank, (receive, _) in enumerate(pairs):
        if rank == victim:
            continue
        if not receive.poll(max(0.0, deadline - time.monotonic())):
            num_hung += 1
            continue
        at, text = receive.recv()
        raised.append(round(at - killed_at, 3))
        texts.append((rank, text))
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        num_hung += rank != victim and process.is_alive()
    named = sum(_names(rank, victim, text) for rank, text in texts)
    return Trial(name, victim, round(delay_s, 3), tuple(raised), num_hung, named, tuple(text for _, text in texts))


def _names(rank: int, victim: int, text: str) -> bool:
    """Whether a survivor's error says where it was, what it waited for, and at last who it was."""
    # A step of a bucket, or what all ranks do together between two of them.
    waited_for = ("step " in text and "tensors" in text) or "after the last bucket" in text or "the ranks' " in text
    says_itself = f"espresso on rank {rank} failed in iteration" in text
    return says_itself and waited_for and blamed_in(rank, text)[-1:] == [{victim}]


@app.command()
def main(
    trials: Annotated[int, typer.Option(min=1, help="Workers to kill.")] = 20,
    timeout_s: Annotated[float, typer.Option(help="The state's time-out.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of moments and victims.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o")] = results.RESULTS_DIR / "kill.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Kill one worker of four at random moments, strategy after strategy."""
    draw = random.Random(seed)
    names = list(STRATEGIES)
    plans = [
        (names[i % len(names)], draw.randrange(NUM_RANKS), draw.uniform(0, LONGEST_DELAY_S)) for i in range(trials)
    ]
    console = Console(stderr=True)
    done = [run_trial(*plan, timeout_s) for plan in track(plans, "Killing", console=console, transient=True)]
    body = results.record(
        {"trials": trials, "timeout_s": timeout_s, "num_ranks": NUM_RANKS, "widths": WIDTHS},
        seed,
        [asdict(trial) for trial in done],
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps(body, indent=1) + "\n")
    else:
        show(done, Console())
    if any(trial.num_hung or trial.num_named != NUM_RANKS - 1 for trial in done):
        raise typer.Exit(1)


def show(done: list[Trial], console: Console) -> None:
    table = Table(title=f"{len(done)} workers killed")
    for heading in (
        "strategy",
        "killed",
        "raised after, median s",
        "slowest s",
        "hung",
        "errors that name it",
    ):
        table.add_column(heading)
    for name in STRATEGIES:
        group = [trial for trial in done if trial.strategy == name]
        times = [seconds for trial in group for seconds in trial.raised_s]
        if times:
            table.add_row(
                name,
                str(len(group)),
                f"{statistics.median(times):.2f}",
                f"{max(times):.2f}",
                str(sum(trial.num_hung for trial in group)),
                f"{sum(trial.num_named for trial in group)} of {len(group) * (NUM_RANKS - 1)}",
            )
    console.print(table)


if __name__ == "__main__":
    app()
