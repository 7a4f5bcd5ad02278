"""Which measure of error predicts where training ends: rank correlations over strategies of very different error.

    python -m benchmarks.error_measures
    python -m benchmarks.error_measures --cases cnn-adam --seeds 5 --steps 600

One process plays both ranks, as in ``benchmarks.feedback_gain``: plain steps, of which some are sampled as automatic
mode samples them, then a strategy until the end while the learning rate falls. Of each run it keeps the final training
and test loss, what each measure said from a third of the way on, and what was forecast from the samples. The best
measure is the one by whose order the strategies end (Spearman's rho, mean over cases).

====================  =================================================================================
``one step``          energy that a compressor loses of the bare gradient
``missing``           energy of the corrected gradient (gradient plus what comes back of the residual) that is not sent
``owed by energy``    |e| / |g| of the whole model
``owed``              root of the mean over elements of (|e| / |g|)² of their tensors
``and rings``         the same, a tensor's times :func:`espresso.search.error_budget.rings` of its feedback gain
``own``               the same of what ranks owe each for itself: what they owe alike is only late
``angle``             one minus the cosine between the exchanged and the exact average
``forecast``          ``own``, as measure_sensitivity says before anything was compressed
====================  =================================================================================
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from benchmarks import results
from benchmarks.feedback_gain import PLAIN, RANKS, Array, Site, lower, own_gain, parts_of, scale_of
from espresso.compressors import create
from espresso.compressors.powersgd import PowerSgd
from espresso.search.budgets import Budgets, Ledger
from espresso.search.error_budget import Sample, measure_sensitivity, rings
from espresso.strategies import Choice, Cluster, CompressorSpec, TensorSpec, parse_option

CASES = ("mlp-sgd", "mlp-adam", "cnn-sgd", "cnn-adam", "gpt-adamw")
STRATEGIES = (
    "int8", "int4", "fp8", "twobit", "efsignsgd:block=64", "efsignsgd", "efsignsgd:block=4096", "efsignsgd:block=0",
    "onebit",
    "topk:ratio=0.3", "topk:ratio=0.1", "topk:ratio=0.03", "topk:ratio=0.01", "topk:ratio=0.003", "topk:ratio=0.001",
    "dgc:ratio=0.1", "dgc:ratio=0.01,least=2048", "stc:ratio=0.1", "stc:ratio=0.03",
    "powersgd:rank=2", "powersgd:rank=4", "powersgd:rank=8", "randomk:ratio=0.3", "randomk:ratio=0.1",
    "randomk:ratio=0.03", "randomk:ratio=0.01",
    "largest topk:ratio=0.001", "others topk:ratio=0.001", "largest randomk:ratio=0.01", "others efsignsgd:block=0",
)  # fmt: skip
"""A compressor for all matrices, for the largest tensor alone, or for all other matrices."""

MEASURES = ("one step", "missing", "owed by energy", "owed", "and rings", "own", "angle", "forecast")
SAMPLED = range(4, 12)
"""Steps whose gradients are sampled: those that automatic mode profiles."""
SAMPLE = 1 << 14
"""Elements of a tensor."""
EVERY = 10
"""Steps from one look to the next."""
GATHER = parse_option("comp > flat.allgather > dec")

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Job:
    """One training run; a gain of 0 is each compressor's own."""

    case: str
    strategy: str
    gain: float
    seed: int
    steps: int
    start: int


@dataclass(frozen=True)
class Run:
    """Where it ended, and what each measure said."""

    job: Job
    train_loss: float
    test_loss: float
    measures: dict[str, float]


def chosen(strategy: str, parameters: Sequence[torch.nn.Parameter]) -> dict[int, str]:
    """The compressor of every tensor that has one, by index."""
    which, _, spec = strategy.rpartition(" ")
    if strategy == PLAIN:
        return {}
    matrices = [index for index, p in enumerate(parameters) if p.ndim > 1]
    largest = max(matrices, key=lambda index: parameters[index].numel())
    compressor = create(spec)
    if isinstance(compressor, PowerSgd):  # what it sends raw is not compressed
        matrices = [index for index in matrices if compressor.rank_of(tuple(parameters[index].shape))]
    return {i: spec for i in matrices if not which or (i == largest) == (which == "largest")}


def train(job: Job) -> Run:
    """Train to the end and look now and then."""
    torch.set_num_threads(1)
    workload, model, optimizer = parts_of(job.case, job.seed)
    parameters = list(model.parameters())
    specs = chosen(job.strategy, parameters)
    gains = {index: job.gain or own_gain(spec, job.case) for index, spec in specs.items()}
    sites = {index: _senders(spec, parameters[index], gains[index], index) for index, spec in specs.items()}
    samples: dict[int, list[Array]] = {index: [] for index in specs}
    forecast = 0.0
    seen: dict[str, list[float]] = {name: [] for name in MEASURES}
    late: list[float] = []
    for step in range(job.steps):
        lower(optimizer, step / job.steps)
        given: list[list[Array]] = []
        for rank in range(RANKS):
            inputs, targets = workload.batch(step, rank, RANKS)
            model.zero_grad()
            loss = workload.loss(model(inputs), targets)
            loss.backward()
            if step >= job.steps - 30:
                late.append(float(loss.detach()))
            given.append([p.grad.flatten().numpy().copy() for p in parameters])  # type: ignore[union-attr]
        if step in SAMPLED:
            for index, kept in samples.items():
                kept.append(_sampled(given[0][index]))
        if step == SAMPLED[-1] and specs:
            forecast = _forecast(specs, samples, parameters, job.gain, scale_of(job.case))
        looks = step >= max(job.start + EVERY, job.steps // 3) and step % EVERY == 0
        look = _Look(sum(p.numel() for p in parameters), scale_of(job.case)) if looks else None
        for index, parameter in enumerate(parameters):
            mine = [gradients[index] for gradients in given]
            if step >= job.start and index in sites:
                sender, given_here = sites[index], mine
                mine = sender.send(mine, step)
                if look is not None:
                    look.at(sender, given_here, sum(mine), CompressorSpec.parse(specs[index]), job.gain)
            elif look is not None:
                look.exact(sum(mine), mine[0])
            parameter.grad = torch.from_numpy(np.sum(mine, axis=0) / RANKS).view_as(parameter)
        if look is not None:
            for name, value in look.measures().items():
                seen[name].append(value)
        optimizer.step()
    measures = {name: statistics.median(values) if values else 0.0 for name, values in seen.items()}
    return Run(job, statistics.fmean(late), workload.evaluate(model).loss, measures | {"forecast": forecast})


class _Each:
    """A codec that each rank runs by itself; rank 0 stands for all where one is looked at."""

    def __init__(self, spec: str, numel: int, gain: float, index: int) -> None:
        self._sites = [Site(spec, numel, gain, index, rank) for rank in range(RANKS)]
        self.bare = self._sites[0].bare

    def mean(self, given: list[Array]) -> Array:
        """Rank 0's."""
        return given[0]

    def send(self, given: list[Array], step: int) -> list[Array]:
        """What arrives of each rank's gradient."""
        return [site.send(gradient, step) for site, gradient in zip(self._sites, given, strict=True)]

    @property
    def owed(self) -> Array:
        """By rank 0."""
        return self._sites[0].owed

    @property
    def own(self) -> float:
        """Square of what a rank owes apart from what all owe alike."""
        apart = np.array([site.owed for site in self._sites]).astype(np.float64)
        return float(np.square(apart - apart.mean(axis=0)).sum()) / (RANKS - 1)

    @property
    def corrected(self) -> Array:
        """Rank 0's gradient and what came back."""
        return self._sites[0].corrected

    @property
    def sent(self) -> Array:
        """By rank 0."""
        return self._sites[0].sent


class _Together:
    """PowerSGD of a matrix: all ranks send one thing, and what is owed is their mean's."""

    def __init__(self, compressor: PowerSgd, shape: tuple[int, ...], gain: float, index: int) -> None:
        rank = compressor.rank_of(shape)
        self._shape, self._gain = (shape[0], math.prod(shape[1:])), np.float32(gain)
        self._right = np.random.default_rng(index).standard_normal((self._shape[1], rank)).astype(np.float32)
        self._kept = [np.zeros(math.prod(shape), np.float32) for _ in range(RANKS)]
        self.corrected = self.sent = self._kept[0]

    def mean(self, given: list[Array]) -> Array:
        """Of all ranks' gradients."""
        found: Array = np.mean(given, axis=0)
        return found

    def bare(self, gradient: Array) -> Array:
        """What would arrive of the mean gradient alone, by the factors of now."""
        return self._near(gradient)[0]

    def _near(self, values: Array) -> tuple[Array, Array]:
        matrix = values.reshape(self._shape)
        left, _ = np.linalg.qr(matrix @ self._right)
        right = matrix.T @ left
        return (left @ right.T).reshape(-1), right

    def send(self, given: list[Array], step: int) -> list[Array]:
        """What arrives of the mean, as each rank's."""
        whole = [gradient + self._gain * kept for gradient, kept in zip(given, self._kept, strict=True)]
        self.corrected = self.mean(whole)
        self.sent, self._right = self._near(self.corrected)
        self._kept = [g + kept - self.sent for g, kept in zip(given, self._kept, strict=True)]
        return [self.sent] * RANKS

    @property
    def owed(self) -> Array:
        """By the mean."""
        return self.mean(self._kept)

    @property
    def own(self) -> float:
        """Square of that: what ranks owe each for itself cancels in it."""
        return _square(self.owed)


def _senders(spec: str, parameter: torch.nn.Parameter, gain: float, index: int) -> _Each | _Together:
    compressor = create(spec)
    if isinstance(compressor, PowerSgd):
        return _Together(compressor, tuple(parameter.shape), gain, index)
    return _Each(spec, parameter.numel(), gain, index)


def _sampled(gradient: Array) -> Array:
    return gradient[:SAMPLE].copy()


def _forecast(
    specs: dict[int, str],
    samples: dict[int, list[Array]],
    parameters: Sequence[torch.nn.Parameter],
    gain: float,
    scale: float,
) -> float:
    """What the ledger says of the strategy."""
    tensors = [TensorSpec(f"t{index}", tuple(p.shape)) for index, p in enumerate(parameters)]
    used = [CompressorSpec.parse(spec) for spec in dict.fromkeys(specs.values())]
    taken = [Sample(tensors[index], np.stack(kept)) for index, kept in samples.items()]
    found = measure_sensitivity(taken, used, gain=gain or None, scale=scale)
    rows = {spec: {**dict.fromkeys((t.name for t in tensors), 0.0), **rows} for spec, rows in found.owed.items()}
    ledger = Ledger(tensors, Cluster(RANKS, 1), used, type(found)(rows), Budgets())
    choices = {f"t{index}": Choice(GATHER, CompressorSpec.parse(spec)) for index, spec in specs.items()}
    return ledger.error(choices) or 0.0


class _Look:
    """What the measures say in one step, rank 0 for both."""

    def __init__(self, numel: int, scale: float) -> None:
        self._numel, self._scale = numel, scale
        self._sums = dict.fromkeys(
            ("lost", "given", "missing", "corrected", "owed", "mean", "rings", "own", "dot", "a", "b"), 0.0
        )

    def at(self, site: _Each | _Together, given: list[Array], arrived: Any, spec: CompressorSpec, gain: float) -> None:
        """A tensor that was compressed; ``site`` has sent already."""
        gradient, exact = site.mean(given), sum(given)
        sums, square = self._sums, _square(gradient)
        sums["given"] += square
        sums["lost"] += _square(gradient - site.bare(gradient))
        owed = _square(site.owed)
        sums["owed"] += owed
        sums["mean"] += gradient.size / self._numel * owed / max(square, 1e-30)
        felt = gradient.size / self._numel / max(square, 1e-30) * rings(spec, gain or None, self._scale) ** 2
        sums["rings"] += felt * owed
        sums["own"] += felt * site.own
        sums["missing"] += _square(site.corrected - site.sent)
        sums["corrected"] += _square(site.corrected)
        self._angle(exact, arrived)

    def exact(self, exact: Any, gradient: Array) -> None:
        """A tensor that was not."""
        self._sums["given"] += _square(gradient)
        self._sums["corrected"] += _square(gradient)
        self._angle(exact, exact)

    def _angle(self, exact: Any, arrived: Any) -> None:
        for name, left, right in (("dot", exact, arrived), ("a", exact, exact), ("b", arrived, arrived)):
            self._sums[name] += float(np.dot(left.astype(np.float64), right))

    def measures(self) -> dict[str, float]:
        """By name, but for the forecast."""
        s = self._sums
        return {
            "one step": s["lost"] / s["given"],
            "missing": s["missing"] / s["corrected"],
            "owed by energy": math.sqrt(s["owed"] / s["given"]),
            "owed": math.sqrt(s["mean"]),
            "and rings": math.sqrt(s["rings"]),
            "own": math.sqrt(s["own"]),
            "angle": 1.0 - s["dot"] / math.sqrt(max(s["a"] * s["b"], 1e-30)),
        }


def _square(values: Array) -> float:
    return float(np.dot(values.astype(np.float64), values))


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank.

    >>> spearman([1, 2, 3], [10, 30, 20])
    0.5
    """
    ranks = []
    for values in (left, right):
        order = {value: statistics.fmean(i for i, v in enumerate(sorted(values)) if v == value) for value in values}
        ranks.append([order[value] for value in values])
    return round(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), 12)


def correlations(runs: Sequence[Run], case: str, gains: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Measure to its correlation with (final training loss, test loss), means over seeds by strategy and gain; plain is
    one.
    """
    mine = [run for run in runs if run.job.case == case and (run.job.gain in gains or run.job.strategy == PLAIN)]
    names = list(dict.fromkeys((run.job.strategy, run.job.gain) for run in mine))

    def mean(of: Any) -> list[float]:
        return [statistics.fmean(of(run) for run in mine if (run.job.strategy, run.job.gain) == name) for name in names]

    losses = mean(lambda run: run.train_loss), mean(lambda run: run.test_loss)
    said = {name: mean(lambda run, name=name: run.measures[name]) for name in MEASURES}
    return {name: (spearman(values, losses[0]), spearman(values, losses[1])) for name, values in said.items()}


def tables(runs: Sequence[Run], gains: Sequence[float]) -> tuple[Table, dict[str, float]]:
    """Correlations by case for people, and each measure's mean over cases."""
    table = Table(title="rank correlation with the final training loss (test loss)", title_justify="left")
    for header in ("case", "gain", *MEASURES):
        table.add_column(header)
    found: dict[str, list[float]] = {name: [] for name in MEASURES}
    for case in dict.fromkeys(run.job.case for run in runs):
        for together in dict.fromkeys([(gain,) for gain in gains] + [tuple(gains)]):
            rows = correlations(runs, case, together)
            label = " and ".join(f"{gain:g}" if gain else "own" for gain in together)
            table.add_row(case, label, *(f"{a:.2f} ({b:.2f})" for a, b in rows.values()))
            if together != tuple(gains):
                continue
            for name, (train_rho, _) in rows.items():
                found[name].append(train_rho)
    means = {name: statistics.fmean(values) for name, values in found.items()}
    table.add_row("mean", "", *(f"{value:.2f}" for value in means.values()))
    return table, means


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Final training loss against what was owed and what was forecast, case by case."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(run.job.case for run in runs))
    figure = Figure(figsize=(3.4 * len(cases), 6), layout="constrained")
    axes = figure.subplots(2, len(cases), squeeze=False)
    for column, case in enumerate(cases):
        for row, name in enumerate(("own", "forecast")):
            axis = axes[row][column]
            mine = [run for run in runs if run.job.case == case and run.measures[name] > 0]
            axis.scatter([r.measures[name] for r in mine], [r.train_loss for r in mine], s=9, color="#1f6f8b")
            plain = [run.train_loss for run in runs if run.job.case == case and run.job.strategy == PLAIN]
            axis.axhspan(min(plain), max(plain), color="#c9a227", alpha=0.3)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_title(case, fontsize=9)
            axis.set_xlabel(name)
    figure.savefig(path, dpi=90)


@app.command()
def main(
    cases: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(CASES),
    strategies: Annotated[str, typer.Option(help="Patterns, separated by semicolons.")] = "*",
    steps: Annotated[int, typer.Option(help="Of every run.")] = 300,
    start: Annotated[int, typer.Option(help="Plain steps before compression begins.")] = 60,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    gains: Annotated[str, typer.Option(help="Feedback gains, comma-separated; 0: each compressor's own.")] = "0",
    processes: Annotated[int | None, typer.Option(help="By default as many as there are cores.")] = None,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "error_measures.json",
    plot: Annotated[Path | None, typer.Option(help="Draw the runs there.")] = None,
) -> None:
    """Train every strategy to its end and rank the measures."""
    wanted = [s for s in STRATEGIES if any(fnmatchcase(s, pattern) for pattern in strategies.split(";"))]
    used = [float(gain) for gain in gains.split(",")]
    jobs = [
        Job(case, strategy, gain, seed, steps, start)
        for case in cases.split(",")
        for gain in used
        for strategy in ((PLAIN, *wanted) if gain == used[0] else wanted)
        for seed in range(seeds)
        if strategy == PLAIN or create(strategy.rpartition(" ")[2]).traits.error_feedback
    ]
    with multiprocessing.get_context("spawn").Pool(processes or len(os.sched_getaffinity(0))) as pool:
        runs = pool.map(train, jobs, chunksize=1)
    table, means = tables(runs, used)
    results.console(150).print(table)
    config = {"cases": cases, "steps": steps, "start": start, "seeds": seeds, "gains": gains, "ranks": RANKS}
    results.write(json_path, results.record(config, 0, [asdict(run) for run in runs]) | {"means": means})
    if plot is not None:
        draw(plot, runs)


if __name__ == "__main__":
    app()
