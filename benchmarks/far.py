"""Hosts far apart, where packets are lost: is training still exact, and does it fail only when it should?

    python -m benchmarks.far                                              # 300 steps at 50 ms, 1 % loss, jitter
    python -m benchmarks.far --rtt-ms 300 --steps 1000 --arms auto --kill  # no false alarm; then a worker is killed

An arm is a model of its own, trained by DDP with our hook; arms take turns, step by step, in one job:

| arm    | exchange                                                                                   |
| ------ | ------------------------------------------------------------------------------------------ |
| one    | one all-gather of what top-k leaves: moves numbers unchanged, so the law is exact          |
| pair   | all-to-all and all-gather of the same: residuals at two sites                              |
| parts  | as one, cut into partitions: several exchanges in flight                                   |
| signs  | scaled signs, which round: the law holds to the rounding of float32                        |
| auto   | automatic mode with scaled signs: measured, searched and raced on such a network           |

The loss is linear in the weights, with whole numbers drawn anew in every step as its slopes: so gradients are known on
every rank, and what was averaged plus what is kept must be what came in. After the last step the last rank is killed
in the middle of an exchange, if asked for, and the others must say who it was.
"""

# No `from __future__ import annotations` here: typer reads the annotations.
import json
import logging
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.emulated import Distance, describe, open_network, run_workers
from benchmarks.exchange import digest, kept_by, uniform
from benchmarks.train import process_group

WITHIN_S = 10.0
"""Within so many seconds the others must have named a worker that was killed."""

ROUNDING = 1e-5
"""What float32 may lose of the law, of the largest sum of gradients, where a compressor rounds."""

ARMS: Mapping[str, tuple[str, str, int]] = {
    "one": ("comp > flat.allgather > dec", "topk:ratio=0.01", 0),
    "pair": ("comp > flat.all_to_all > dec > comp > flat.allgather > dec", "topk:ratio=0.01", 0),
    "parts": ("comp > flat.allgather > dec", "topk:ratio=0.01", 16_384),
    "signs": ("comp > flat.allgather > dec", "efsignsgd", 0),
    "auto": ("", "efsignsgd", 0),
}
"""Option, compressor and partition size."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """What came of an arm.

    Attributes:
        off: the most that the law is broken by, of the largest sum of gradients.
        equal: whether all ranks had the same averages, bit for bit, in every step.
    """

    arm: str
    steps: int
    step_ms: float
    slowest_ms: float
    off: float
    equal: bool
    verdict: str = ""

    @property
    def passes(self) -> bool:
        """Whether nothing was lost and replicas stayed equal."""
        return self.equal and self.off <= (0.0 if ARMS[self.arm][1].startswith("topk") else ROUNDING)


@dataclass(frozen=True)
class Death:
    """How the others heard of a worker that was killed."""

    seconds: float
    named: bool
    text: str

    @property
    def passes(self) -> bool:
        """Whether they named it in time."""
        return self.named and self.seconds <= WITHIN_S


# -- inside the workers ------------------------------------------------------------------------------


class _Trainee:
    """A model with known gradients, and the books of what was averaged."""

    def __init__(self, arm: str, sizes: tuple[int, ...], timeout_s: float) -> None:
        import espresso

        self.arm = arm
        module = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
        self._model = DistributedDataParallel(Slopes(module), bucket_cap_mb=4 * max(sizes) / 2**20)
        option, spec, partition = ARMS[arm]
        given: dict[str, Any] = {"strategy": uniform(option, spec, partition_bytes=partition)} if option else {}
        self.state = espresso.register(
            self._model,
            spec,
            timeout_s=timeout_s,
            feedback_gain=1.0,
            decide_by=0,
            adapt=False,
            **given,
        )
        self._given = [np.zeros(size) for size in sizes]
        self._averaged = [np.zeros(size) for size in sizes]
        self._digests: list[str] = []
        self.taken: list[float] = []

    def step(self, number: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        random = np.random.default_rng([number, rank])
        slopes = [torch.from_numpy(random.integers(-7, 8, g.size).astype(np.float32) * ranks) for g in self._given]
        begin = time.perf_counter()
        self._model.zero_grad(set_to_none=True)
        with self.state.errors():
            self._model(slopes).backward()
        self.taken.append(time.perf_counter() - begin)
        averages = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        self._digests.append(digest(averages))
        for given, averaged, slope, average in zip(self._given, self._averaged, slopes, averages, strict=True):
            given += slope.double().numpy()
            averaged += average.double().numpy()

    def row(self) -> Row:
        """Collective; everybody's books together."""
        names = [name for name, _ in self._model.module.named_parameters()]
        kept = kept_by(self.state.session.store, {n: g.size for n, g in zip(names, self._given, strict=True)})
        off = largest = 0.0
        for name, given, averaged in zip(names, self._given, self._averaged, strict=True):
            sums = torch.from_numpy(np.stack([given, kept[name]]))
            dist.all_reduce(sums)
            sent = averaged * dist.get_world_size()
            off = max(off, float(np.max(np.abs(sent + sums[1].numpy() - sums[0].numpy()))))
            largest = max(largest, float(sums[0].abs().max()))
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, self._digests)
        return Row(
            self.arm,
            len(self.taken),
            1e3 * statistics.median(self.taken),
            1e3 * max(self.taken),
            off / largest,
            all(theirs == everybody[0] for theirs in everybody),
            self.state.verdict,
        )


class Slopes(nn.Module):
    """A loss that is linear in the weights."""

    def __init__(self, weights: nn.ParameterList) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, slopes: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.dot(w, s) for w, s in zip(self.weights, slopes, strict=True)]).sum()


def _as_worker(folder: Path, arms: list[str], sizes: tuple[int, ...], steps: int, kill: bool, rtt_ms: float) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kill and rank == ranks - 1 and (pid := os.fork()):
        os.waitpid(pid, 0)
        (folder / "killed").write_text(str(time.time()))
        until = time.monotonic() + 60.0
        while time.monotonic() < until and len(list(folder.glob("heard*"))) < ranks - 1:
            time.sleep(0.05)
        return
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, stream=sys.stderr)
    with process_group(300.0):
        trainees = [_Trainee(arm, sizes, 300.0) for arm in arms]
        for number in range(steps):
            for trainee in trainees:
                trainee.step(number)
            if rank == 0 and number % 50 == 49:
                logging.info("%d of %d steps", number + 1, steps)
        rows = [trainee.row() for trainee in trainees]
        if rank == 0:
            (folder / "rows").write_text(json.dumps([asdict(row) for row in rows]))
        dist.barrier()
        if kill:
            _die_or_hear(folder, trainees[0], steps, rank == ranks - 1, rtt_ms)
        for trainee in trainees:
            trainee.state.close()


def _die_or_hear(folder: Path, trainee: _Trainee, steps: int, is_victim: bool, rtt_ms: float) -> None:
    """Train on until the victim is killed; the others write what they heard, and when, and end."""
    if is_victim:
        threading.Timer(5 * rtt_ms / 1e3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        for number in range(steps, steps + 1000):
            trainee.step(number)
    except Exception as error:
        part = folder / f"part{os.environ['RANK']}"
        part.write_text(json.dumps({"at": time.time(), "text": f"{type(error).__name__}: {error}"}))
        part.rename(folder / f"heard{os.environ['RANK']}")
    with suppress(Exception):
        trainee.state.close()
    os._exit(0)  # the group is broken: nothing of it can be ended in good order


# -- outside -----------------------------------------------------------------------------------------


def death_of(folder: Path, ranks: int) -> Death:
    """From what was written: the slowest of those who live, and whether all name the last rank."""
    at = float((folder / "killed").read_text())
    heard = [json.loads(path.read_text()) for path in folder.glob("heard*")]
    named = len(heard) == ranks - 1 and all(f"rank {ranks - 1}" in one["text"].lower() for one in heard)
    return Death(max((one["at"] - at for one in heard), default=float("inf")), named, heard[0]["text"] if heard else "")


def table_of(rows: list[Row], title: str) -> Table:
    """For people."""
    table = Table(title=title, title_justify="left")
    for header in ("arm", "steps", "median, ms", "slowest, ms", "law off by", "replicas", ""):
        table.add_column(header, justify="left" if header in ("arm", "replicas", "") else "right")
    for row in rows:
        table.add_row(
            row.arm, str(row.steps), f"{row.step_ms:.0f}", f"{row.slowest_ms:.0f}", f"{row.off:.1e}",
            "equal" if row.equal else "[bold red]differ[/]", "pass" if row.passes else "[bold red]MISS[/]",
        )  # fmt: skip
    return table


@app.command()
def main(
    arms: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(ARMS)}.")] = "one,pair,parts,signs",
    steps: Annotated[int, typer.Option(help="Of every arm.")] = 300,
    hosts: Annotated[int, typer.Option(help="Emulated hosts, one worker each.")] = 2,
    rate: Annotated[str, typer.Option(help="Each host's egress limit.")] = "200mbit",
    rtt_ms: Annotated[float, typer.Option(help="Round trip.")] = 50.0,
    jitter_ms: Annotated[float, typer.Option(help="Up to this much more each way.")] = 5.0,
    loss: Annotated[float, typer.Option(help="Part of the packets that is lost.")] = 0.01,
    elements: Annotated[str, typer.Option(help="Of the tensors, a bucket each.")] = "40000,20000,40000",
    kill: Annotated[bool, typer.Option(help="Kill the last worker at the end; the others must name it.")] = False,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "far.json",
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train where packets are lost, and check what came of it."""
    names = arms.split(",")
    if unknown := [name for name in names if name not in ARMS]:
        raise typer.BadParameter(f"no arm is called {unknown[0]!r}; there are {', '.join(ARMS)}")
    if worker is not None:
        _as_worker(worker, names, tuple(map(int, elements.split(","))), steps, kill, rtt_ms)
        return
    console = results.console(110)
    with TemporaryDirectory() as name, open_network(hosts, rate, distance=Distance(rtt_ms)) as network:
        words = describe(network)  # without loss, which no bulk transfer reaches a link's rate with
        network.change(jitter_ms=jitter_ms, loss=loss)
        words += f", then jitter {jitter_ms:g} ms and loss {loss:.1%}"
        argv = [sys.executable, "-m", "benchmarks.far", "--worker", name, "--arms", arms, "--steps", str(steps)]
        argv += ["--elements", elements, "--rtt-ms", str(rtt_ms), *(["--kill"] if kill else [])]
        run_workers(network, argv, pin=True, deadline_s=3600)
        rows = [Row(**row) for row in json.loads((Path(name) / "rows").read_text())]
        death = death_of(Path(name), hosts) if kill else None
    console.print(table_of(rows, f"{hosts} hosts, {words}"))
    for row in rows:
        if row.verdict:
            console.print(f"{row.arm}: {row.verdict}")
    if death is not None:
        console.print(f"killed: named {death.named} after {death.seconds:.1f} s: {death.text}")
    config = {"network": words, "elements": elements, "steps": steps, "hosts": hosts}
    config |= {"death": None if death is None else asdict(death)}
    results.write(json_path, results.record(config, 0, [asdict(row) for row in rows]))
    if not all(row.passes for row in rows) or (death is not None and not death.passes):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
