"""Does training with nothing chosen end where plain DDP's does, and how soon? Steps and time to a target.

    python -m benchmarks.dossier                                       # hours: six cases, seven arms, five seeds
    python -m benchmarks.dossier --cases mlp-sgd --seeds 3 --steps 300 --arms "plain;ours;ours, residuals off"
    python -m benchmarks.dossier --cases cnn-adam --arms "plain;topk:ratio=0.01;topk:ratio=0.01, residuals off"
    python -m benchmarks.dossier --cases mixer,gan --steps 300 --rate 1gbit --arms "plain;ours;ours, residuals off"

Two emulated hosts of limited rate. Arms of a seed have the same weights and batches. Time is that of the steps alone.
The target is the training loss that plain reaches on average in nine tenths of its steps. An arm is inside if its mean
metric is no worse than the worst of plain's seeds. Controls drop residuals after every step: what this check sees.

=========================  ======================================================================
``plain``                  DDP as it is, float32
``bf16 hook``              gradients summed as bfloat16 (PyTorch's own hook wants CUDA, or NCCL)
``powersgd hook``          PyTorch's own, rank 4, from step 10 on
``ours``                   ``compressor="auto"``, nothing else
``ours, half the budget``  half of the error that it may owe by itself, and twice
``SPEC``                   automatic mode with that compressor
``…, residuals off``       a control, of ``ours`` or ``SPEC``
=========================  ======================================================================
"""

# No `from __future__ import annotations` here: DDP refuses hooks whose annotations are strings.
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.emulated import describe, open_network, run_workers
from benchmarks.ratios import half_interval
from benchmarks.small_models import MODELS, OPTIMIZERS
from benchmarks.suite.task import Task
from benchmarks.suite.tasks import build_task
from benchmarks.train import process_group
from espresso.compressors import create

CASES = ("mlp-sgd", "mlp-adamw", "cnn-sgd", "gpt-adamw", "recommender-adam", "lstm-adamw")
"""A task and its optimizer; the first three and the GPT are :mod:`benchmarks.small_models`. Without an optimizer: the
suite's own task."""

STEPS = {"gpt": 3000, "lstm": 1000, "recommender": 1000}
"""Of a run, where it is not said; else 600."""

LOOKS = 50
"""Points of a run's curve."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        curve: (steps, seconds of steps, mean training loss since the last point).
        metric: at the end, on data that training does not see; ``less_is_more`` says which way is better.
        verdict: what automatic mode decided.
    """

    case: str
    arm: str
    seed: int
    curve: tuple[tuple[int, float, float], ...]
    metric: float
    less_is_more: bool
    verdict: str


def bf16_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average as bfloat16."""
    buffer: torch.Tensor = bucket.buffer()
    narrow = (buffer / dist.get_world_size()).to(torch.bfloat16)
    future = dist.all_reduce(narrow, async_op=True).get_future()

    def widen(done: torch.futures.Future[Any]) -> torch.Tensor:
        buffer.copy_(done.value()[0])
        return buffer

    return future.then(widen)  # type: ignore[no-any-return]


OFF = ", residuals off"
OURS = {"ours": 1.0, "ours, half the budget": 0.5, "ours, twice the budget": 2.0}
"""With what part of the default error budget."""
PYTORCHS = ("plain", "bf16 hook", "powersgd hook")
ARMS = (*PYTORCHS, *OURS, f"ours{OFF}")

ONE_BUCKET_MB = 1024
"""PyTorch's PowerSGD starts its factors' exchanges in callbacks: with several buckets over Gloo ranks start them in
different orders and wait for each other for good (the recommender).
"""


def attach(arm: str, model: DistributedDataParallel, seed: int, harmless: float) -> Any:
    """Register the arm on a model, which may owe so much by itself; the state of automatic mode, else None."""
    import espresso

    if arm == "bf16 hook":
        model.register_comm_hook(None, bf16_hook)
    elif arm == "powersgd hook":
        low_rank = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        model.register_comm_hook(low_rank, powerSGD_hook.powerSGD_hook)
    if arm in PYTORCHS:
        return None
    spec = arm.removesuffix(OFF)
    part = OURS.get(spec)
    state = espresso.register(
        model, compressor=spec if part is None else "auto", seed=seed, compile_beside=False,
        error_budget=None if part in (None, 1.0) else harmless * part,
        adapt=not arm.endswith(OFF),  # the guard would mend a control
    )  # fmt: skip
    if arm.endswith(OFF):
        # Residuals are written and never committed: every step starts from none.
        store: Any = state.session.store
        store.commit = store.discard
    return state


def task_of(case: str, seed: int) -> Task:
    """The task with the case's optimizer, small where there is a small model of that name; or the suite's own."""
    name, _, optimizer = case.partition("-")
    if not optimizer:
        return build_task(name, seed)
    task = build_task("mlp" if name == "cnn" else name, seed)  # the same digits

    def make_models() -> list[torch.nn.Module]:
        torch.manual_seed(seed)
        return [MODELS[name]()]

    small = replace(task, make_models=make_models) if name in MODELS else task
    return replace(small, make_optimizer=OPTIMIZERS[optimizer])


def train_once(case: str, arm: str, seed: int, steps: int) -> Run:
    """Train to the end; every rank calls it."""
    from espresso.search.terms import HARMLESS, HARMLESS_ADAPTIVE

    task = task_of(case, seed)
    cap_mb = ONE_BUCKET_MB if arm == "powersgd hook" else None
    models = [DistributedDataParallel(model, bucket_cap_mb=cap_mb) for model in task.make_models()]
    optimizers = [task.make_optimizer(model) for model in models]
    harmless = HARMLESS if isinstance(optimizers[0], torch.optim.SGD) else HARMLESS_ADAPTIVE
    states = [state for model in models if (state := attach(arm, model, seed, harmless)) is not None]
    curve, losses, took_s = [], list[float](), 0.0
    for step in range(steps):
        begin = time.perf_counter()
        losses.append(task.step(models, optimizers, step, dist.get_rank(), dist.get_world_size()))
        took_s += time.perf_counter() - begin
        if (step + 1) % max(steps // LOOKS, 1) == 0:
            curve.append((step + 1, took_s, statistics.fmean(losses)))
            losses.clear()
    metric = task.metric([model.module for model in models])
    verdict = "; ".join(state.verdict for state in states)
    for state in states:
        state.close()
    return Run(case, arm, seed, tuple(curve), metric, task.less_is_more, verdict)


@dataclass(frozen=True)
class Row:
    """One arm of one case over its seeds; intervals are half as wide as they are long."""

    case: str
    arm: str
    metric: float
    metric_95: float
    steps_to_target: float | None
    seconds_to_target: float | None
    seconds_95: float | None
    step_ms: float
    inside: bool


def judge(runs: Sequence[Run]) -> list[Row]:
    """Rows per case and arm, in the order of the runs."""
    rows = []
    for case in dict.fromkeys(run.case for run in runs):
        plain = [run for run in runs if (run.case, run.arm) == (case, "plain")]
        ninth = [run.curve[min(len(run.curve) * 9 // 10, len(run.curve) - 1)][2] for run in plain]
        target = statistics.fmean(ninth)
        sign = -1.0 if plain[0].less_is_more else 1.0
        worst = min(sign * run.metric for run in plain)
        for arm in dict.fromkeys(run.arm for run in runs if run.case == case):
            mine = [run for run in runs if (run.case, run.arm) == (case, arm)]
            reached = [next((at for at in run.curve if at[2] <= target), None) for run in mine]
            there = [at for at in reached if at is not None]
            all_there = len(there) == len(mine)
            metrics = [run.metric for run in mine]
            rows.append(
                Row(
                    case, arm, statistics.fmean(metrics), half_interval(metrics),
                    statistics.fmean(at[0] for at in there) if all_there else None,
                    statistics.fmean(at[1] for at in there) if all_there else None,
                    half_interval([at[1] for at in there]) if all_there else None,
                    statistics.median(1e3 * (run.curve[-1][1] - run.curve[len(run.curve) // 2][1])
                                      / (run.curve[-1][0] - run.curve[len(run.curve) // 2][0]) for run in mine),
                    sign * statistics.fmean(metrics) >= worst,
                )
            )  # fmt: skip
    return rows


def table_of(rows: Sequence[Row], title: str) -> Table:
    """For people."""
    table = Table(title=title, title_justify="left")
    for header in ("case", "arm", "metric", "steps to target", "seconds to target", "step, ms", ""):
        table.add_column(header, justify="left" if header in ("case", "arm", "") else "right")
    for row in rows:
        verdict = ("not caught" if row.inside else "caught") if row.arm.endswith(OFF) else (
            "inside" if row.inside else "[bold red]outside[/]"
        )  # fmt: skip
        steps = "never" if row.steps_to_target is None else f"{row.steps_to_target:.0f}"
        seconds = "never" if row.seconds_to_target is None else f"{row.seconds_to_target:.1f} ± {row.seconds_95:.1f}"
        metric = f"{row.metric:.4f} ± {row.metric_95:.4f}"
        table.add_row(row.case, row.arm, metric, steps, seconds, f"{row.step_ms:.1f}", verdict)
    return table


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Training loss over the seconds of steps, a line an arm: the mean over seeds."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(run.case for run in runs))
    figure = Figure(figsize=(5 * len(cases), 4), layout="constrained")
    for axis, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        for arm in dict.fromkeys(run.arm for run in runs if run.case == case):
            curves = [run.curve for run in runs if (run.case, run.arm) == (case, arm)]
            points = list(zip(*curves, strict=True))
            seconds = [statistics.fmean(point[1] for point in at) for at in points]
            losses = [statistics.fmean(point[2] for point in at) for at in points]
            axis.plot(seconds, losses, label=arm, linewidth=1.0)
        axis.set_title(case, fontsize=10)
        axis.set_xlabel("seconds of steps")
        axis.set_ylabel("training loss")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=90)


@app.command()
def main(
    cases: Annotated[str, typer.Option(help="Comma-separated: task-optimizer, or a task.")] = ",".join(CASES),
    arms: Annotated[str, typer.Option(help="Separated by semicolons; plain has to be one.")] = ";".join(ARMS),
    steps: Annotated[int | None, typer.Option(help="Of every run; by default as fits the task.")] = None,
    seeds: Annotated[int, typer.Option(help="Of every arm.", min=2, max=10)] = 5,
    rate: Annotated[str, typer.Option(help="Each host's egress limit.")] = "200mbit",
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "dossier.json",
    plot: Annotated[Path | None, typer.Option(help="Draw the curves there.")] = None,
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train every case with every arm and seed."""
    wanted = [(case, steps or STEPS.get(case.partition("-")[0], 600)) for case in cases.split(",")]
    if worker is not None:
        _as_worker(worker, wanted, arms.split(";"), seeds)
        return
    for case, _ in wanted:
        try:
            task_of(case, 0)
        except (KeyError, ValueError) as error:
            raise typer.BadParameter(f"no case {case!r}: {error}", param_hint="--cases") from error
    for arm in arms.split(";"):
        if arm not in ARMS:
            _check_named(arm)
    if "plain" not in arms.split(";"):
        raise typer.BadParameter("the others are compared with plain: name it too", param_hint="--arms")
    begin = time.perf_counter()
    json_path.parent.mkdir(parents=True, exist_ok=True)
    raw = json_path.with_suffix(".raw")
    runs: list[Run] = []
    networks: dict[str, str] = {}
    for case, length in wanted:
        argv = [sys.executable, "-m", "benchmarks.dossier", "--cases", case, "--steps", str(length), "--arms", arms]
        argv += ["--seeds", str(seeds), "--worker", str(raw)]
        with open_network(2, rate) as network:
            networks[case] = describe(network)
            run_workers(network, argv, pin=True, deadline_s=6 * 3600)
        runs += [Run(**{**run, "curve": tuple(map(tuple, run["curve"]))}) for run in json.loads(raw.read_text())]
        raw.unlink()
    rows = judge(runs)
    config = {"cases": wanted, "arms": arms, "seeds": seeds, "rate": rate, "ranks": 2, "networks": networks}
    took = {"seconds": time.perf_counter() - begin}
    body = results.record(config | took, 0, [asdict(row) for row in rows])
    ends = [{key: value for key, value in asdict(run).items() if key != "curve"} for run in runs]
    results.write(json_path, body | {"runs": ends})
    if plot is not None:
        draw(plot, runs)
    results.console(140).print(table_of(rows, f"two hosts, {rate}, {seeds} seeds; mean ± half of the 95 % interval"))
    if any(row.arm not in PYTORCHS and row.inside is row.arm.endswith(OFF) for row in rows):
        raise typer.Exit(1)


def _check_named(arm: str) -> None:
    try:
        create(arm.removesuffix(OFF))
    except ValueError as error:
        raise typer.BadParameter(f"no arm {arm!r}: {error}; or {'; '.join(ARMS)}", param_hint="--arms") from error


def _as_worker(out: Path, cases: Sequence[tuple[str, int]], arms: Sequence[str], seeds: int) -> None:
    torch.set_num_threads(1)
    with process_group(300.0):
        runs = [train_once(case, arm, seed, steps) for case, steps in cases for seed in range(seeds) for arm in arms]
        if dist.get_rank() == 0:
            out.write_text(json.dumps([asdict(run) for run in runs]))
        dist.barrier()


if __name__ == "__main__":
    app()
