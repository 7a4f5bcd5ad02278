"""Where training ends with all of the residual in the next gradient, and with a part of it: over seeds, no network.

    python -m benchmarks.feedback_gain
    python -m benchmarks.feedback_gain --cases mlp --steps 150 --start 40
    python -m benchmarks.feedback_gain --start 15 --gains own --arms "dgc:ratio=0.01;dgc:ratio=0.01,least=2048"
    python -m benchmarks.feedback_gain --cases translate,waves --gains own,0.03 --arms efsignsgd

One process plays both ranks of a job: real models and data, the project's own codecs, tensors of more than one
dimension compressed from step ``--start`` on (vectors stay exact, as in automatic mode). ``twice`` compresses the sum
again, as options with two compressions do. Nothing is timed, so that only the arithmetic is compared.

A row passes if its mean test loss with the compressor's own gain is at most the largest of plain's seeds. Rows of other
gains are there to compare with and are not judged. Of the suite's tasks the loss is their metric, of accuracies what is
missing to 1.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.table import Table

from benchmarks import results
from benchmarks.models import build_workload
from benchmarks.small_models import MODELS, OPTIMIZERS
from benchmarks.suite.tasks import MADE, build_task
from espresso.compressors import Decoding, DrawKey, Encoding, Feedback, Layout, Segment, create, host_codec
from espresso.compressors.base import gain_scale
from espresso.live.script import momentum_of

CASES = ("mlp-sgd", "mlp-adam", "cnn-sgd", "cnn-adam", "mlp")
"""Of :mod:`benchmarks.small_models`, and the 10 M parameter MLP with its own optimizer. Others are ``gpt-adamw``, the
suite's tasks of one model, and optimizers of less momentum (``mlp-sgd0``, ``mlp-adam5``, ``mlp-adam0``).
"""

ARMS = (
    "efsignsgd",
    "efsignsgd twice",
    "topk:ratio=0.01",
    "topk:ratio=0.01,least=2048",
    "dgc:ratio=0.01",
    "dgc:ratio=0.01,least=2048",
    "randomk:ratio=0.05",
)
"""With ``least`` as automatic mode runs them where there is time."""

PLAIN = "plain"
RANKS = 2
SERVER = RANKS  # the "rank" whose residual is of the sum

Array = npt.NDArray[np.float32]
app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Job:
    """One training run."""

    case: str
    arm: str
    gain: float
    seed: int
    steps: int
    start: int
    falls: bool = False


@dataclass(frozen=True)
class Row:
    """One arm with one gain over its seeds."""

    case: str
    arm: str
    gain: float
    own: bool
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    worst_plain: float
    within: bool


class Site:
    """One encoder of one tensor with its residual."""

    def __init__(self, spec: str, numel: int, gain: float, index: int, rank: int) -> None:
        self._codec = host_codec(create(spec))
        self._layout: Layout = self._codec.compressor.layout([Segment(f"t{index}", 0, numel)])
        self._payload = np.zeros((1, self._layout.num_bytes), np.uint8)
        self._starts = np.zeros(1, np.int64)
        self._old, self._new = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
        self._gain = gain
        # A summable compressor's ranks draw alike.
        self._rank = -1 if self._codec.compressor.traits.summable else rank
        self._site = index
        self.corrected = self.sent = self._old

    def send(self, gradient: Array, step: int) -> Array:
        """What arrives of the gradient."""
        key = DrawKey(seed=0, step=step, site=self._site, rank=self._rank)
        feedback = Feedback(self._old, self._new, self._starts, self._gain)
        self._codec.encode(Encoding(self._layout, gradient, self._starts, feedback=feedback, key=key), self._payload[0])
        self._old, self._new = self._new, self._old
        arrived = np.empty_like(gradient)
        self._codec.decode(Decoding(self._layout, arrived, self._starts, key=key), self._payload)
        self.corrected, self.sent = gradient + self._new, arrived  # buffers are swapped: new is what was kept before
        return arrived

    @property
    def owed(self) -> Array:
        """What was not sent yet."""
        return self._old / np.float32(self._gain)

    def bare(self, gradient: Array) -> Array:
        """What would arrive of the gradient alone."""
        payload, arrived = np.zeros_like(self._payload), np.empty_like(gradient)
        key = DrawKey(seed=1, site=self._site, rank=self._rank)
        self._codec.encode(Encoding(self._layout, gradient, self._starts, key=key), payload[0])
        self._codec.decode(Decoding(self._layout, arrived, self._starts, key=key), payload)
        return arrived


def parts_of(case: str, seed: int) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    """Workload, model and optimizer of a case."""
    name, _, optimizer = case.partition("-")
    workload = build_workload(name, seed)
    if not optimizer:
        model = workload.make_model()
        return workload, model, workload.make_optimizer(model)
    torch.manual_seed(seed)
    model = MODELS[name]()
    return workload, model, OPTIMIZERS[optimizer](model)


Backward = Callable[[int, int], object]
"""Leaves the gradients of a (step, rank) in the model."""


def opened(case: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Backward, Callable[[], Any]]:
    """Model, optimizer, its gradients, and what gives test loss and accuracy."""
    if case in MADE:
        task = build_task(case, seed)
        (model,) = models = task.make_models()
        still = [torch.optim.SGD(model.parameters(), lr=0.0)]  # the step is taken with all ranks' gradients

        def score() -> tuple[float, float]:
            metric = task.metric(models)
            return (metric if task.less_is_more else 1 - metric), metric

        def step(number: int, rank: int) -> object:
            return task.step(models, still, number, rank, RANKS)

        return model, task.make_optimizer(model), step, score
    workload, model, optimizer = parts_of(case, seed)

    def backward(number: int, rank: int) -> object:
        inputs, targets = workload.batch(number, rank, RANKS)
        model.zero_grad()
        return workload.loss(model(inputs), targets).backward()

    def evaluate() -> tuple[float, float]:
        found = workload.evaluate(model)
        return found.loss, found.accuracy

    return model, optimizer, backward, evaluate


def lower(optimizer: torch.optim.Optimizer, part: float) -> None:
    """The learning rate in this part of a run: it falls to a fiftieth."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * max(1 - part, 0.02)


def train(job: Job) -> tuple[Job, float, float]:
    """Train and evaluate; test loss and accuracy."""
    torch.set_num_threads(1)
    model, optimizer, backward, evaluate = opened(job.case, job.seed)
    parameters = list(model.parameters())
    spec, _, twice = job.arm.partition(" ")
    sites = {
        index: [Site(spec, p.numel(), job.gain, index, rank) for rank in range(RANKS + 1)]
        for index, p in enumerate(parameters)
        if job.arm != PLAIN and p.ndim > 1
    }
    for step in range(job.steps):
        if job.falls:
            lower(optimizer, step / job.steps)
        given: list[list[Array]] = []
        for rank in range(RANKS):
            backward(step, rank)
            given.append([p.grad.flatten().numpy().copy() for p in parameters])  # type: ignore[union-attr]
        for index, parameter in enumerate(parameters):
            mine = [gradients[index] for gradients in given]
            if step >= job.start and index in sites:
                mine = [sites[index][rank].send(gradient, step) for rank, gradient in enumerate(mine)]
            total: Array = np.sum(mine, axis=0)
            if twice and step >= job.start and index in sites:
                total = sites[index][SERVER].send(total, step)
            parameter.grad = torch.from_numpy(total / RANKS).view_as(parameter)
        optimizer.step()
    return job, *evaluate()


def judge(runs: Sequence[tuple[Job, float, float]]) -> list[Row]:
    """Rows per case, arm and gain, in the order of the runs."""
    rows = []
    for case, arm, gain in dict.fromkeys((job.case, job.arm, job.gain) for job, _, _ in runs):
        mine = [(loss, right) for job, loss, right in runs if (job.case, job.arm, job.gain) == (case, arm, gain)]
        worst = max(loss for job, loss, _ in runs if (job.case, job.arm) == (case, PLAIN))
        losses, accuracies = zip(*mine, strict=True)
        own = arm == PLAIN or gain == own_gain(arm, case)
        within = statistics.fmean(losses) <= worst
        rows.append(Row(case, arm, gain, own, losses, accuracies, worst, within))
    return rows


def own_gain(arm: str, case: str) -> float:
    """The compressor's own beside the case's optimizer."""
    return create(arm.partition(" ")[0]).traits.gain_at(scale_of(case))


@cache
def scale_of(case: str) -> float:
    """Of feedback gains beside the case's optimizer."""
    optimizer = opened(case, 0)[1]
    return gain_scale(momentum_of(optimizer.param_groups), adapts=not isinstance(optimizer, torch.optim.SGD))


def table_of(rows: Sequence[Row], title: str) -> Table:
    """For people."""
    table = Table(title=title, title_justify="left")
    for header in ("case", "arm", "gain", "mean loss", "its seeds", "plain's worst", "accuracy", ""):
        table.add_column(header, justify="left" if header in ("case", "arm", "") else "right")
    for row in rows:
        judged = "within" if row.within else ("[bold red]outside[/]" if row.own else "outside")
        table.add_row(
            row.case, row.arm, "" if row.arm == PLAIN else f"{row.gain:g}", f"{statistics.fmean(row.losses):.4f}",
            f"{min(row.losses):.4f} … {max(row.losses):.4f}", f"{row.worst_plain:.4f}",
            f"{statistics.fmean(row.accuracies):.3f}", "" if row.arm == PLAIN else judged,
        )  # fmt: skip
    return table


@app.command()
def main(
    cases: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(CASES),
    arms: Annotated[str, typer.Option(help="Separated by semicolons.")] = ";".join(ARMS),
    steps: Annotated[int, typer.Option(help="Of every run; half as many for the large MLP.")] = 300,
    start: Annotated[int, typer.Option(help="Plain steps before compression begins.")] = 60,
    seeds: Annotated[int, typer.Option(help="Of small models; at most 3 of the large MLP.", min=2)] = 6,
    gains: Annotated[str, typer.Option(help="Comma-separated; 'own': each compressor's.")] = "own,1",
    falls: Annotated[bool, typer.Option("--falls", help="The learning rate falls to a fiftieth.")] = False,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "feedback_gain.json",
) -> None:
    """Train with feedback gains beside each compressor's own."""
    jobs = []
    for case in cases.split(","):
        large = case == "mlp"
        of_case = range(min(seeds, 3) if large else seeds)
        length = steps // 2 if large else steps
        pairs = [(PLAIN, 1.0)] + [
            (a, g)
            for a in arms.split(";")
            for g in sorted({own_gain(a, case) if gain == "own" else float(gain) for gain in gains.split(",")})
        ]
        jobs += [Job(case, arm, gain, seed, length, start, falls) for arm, gain in pairs for seed in of_case]
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        runs = pool.map(train, jobs, chunksize=1)
    rows = judge(runs)
    config = {
        "cases": cases, "arms": arms, "gains": gains, "steps": steps, "start": start, "seeds": seeds, "falls": falls,
        "ranks": RANKS,
    }  # fmt: skip
    results.write(json_path, results.record(config, 0, [asdict(row) for row in rows]))
    title = f"{steps} steps, two ranks played by one process; the gain is the part of a residual that returns at once"
    results.console(130).print(table_of(rows, title))
    if any(row.own and not row.within for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
