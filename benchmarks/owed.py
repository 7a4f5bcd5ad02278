"""Is what a job owes what was forecast, and does the guard see what it owes?

    python -m benchmarks.owed                                  # five tasks, nothing chosen, ten minutes
    python -m benchmarks.owed --cases lstm-adamw --rate 1gbit

Two emulated hosts of limited rate, the tasks of ``benchmarks.dossier``. Wherever the guard looks at a sample of a
tensor's gradient and residual, this looks at all of both. Three figures every hundred steps, in gradients that ranks
owe each for itself, of the whole model, as a budget counts them: what was forecast when the strategy was chosen, what
the guard says of its latest checks, and what is true of the same steps. What the guard says is also what the next
hundred steps are expected to owe (``ahead``: over what is true then, of the same strategy).
"""

# No `from __future__ import annotations` here: typer reads the annotations.
import json
import logging
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.dossier import task_of
from benchmarks.emulated import describe, open_network, run_workers
from benchmarks.train import process_group

CASES = ("mlp-sgd", "cnn-sgd", "gpt-adamw", "recommender-adam", "lstm-adamw")
STEPS, EVERY = 1000, 100
WITHIN = 1.15

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """Gradients owed at one time of a run, and the strategy then in use."""

    case: str
    step: int
    strategy: str
    forecast: float
    seen: float
    true: float


class Whole:
    """Looks at all of what the guard samples, in the same steps: by tensor and choice, the latest sums of squares."""

    def __init__(self) -> None:
        from espresso.live.guard import OWED_CHECKS, Guard

        self._squares: dict[str, float] = {}
        self._found: dict[str, tuple[Any, deque[tuple[float, float]]]] = {}
        see, end = Guard.see, Guard.end

        def see_all(guard: Guard, buffer: torch.Tensor, describe: Callable[[], Any]) -> Any:
            bucket = see(guard, buffer, describe)
            if guard._check is not None:
                for slot in bucket.slots:
                    numbers = buffer[slot.offset : slot.offset + slot.numel].double()
                    self._squares[slot.tensor] = float(numbers.square().sum())
            return bucket

        def end_all(guard: Guard, record: Any) -> bool:
            check = guard._check
            if check is not None and check.in_use:
                ranks = dist.get_world_size()
                where = {name: np.arange(guard._numels[name]) for name in check.where}
                kept = guard._store.kept(where, weigh=guard._weigh)
                for name, choice in check.choices.items():
                    if name not in self._found or self._found[name][0] != choice:
                        self._found[name] = choice, deque(maxlen=OWED_CHECKS)
                    own = torch.from_numpy(kept[name][1].copy())
                    dist.all_reduce(own)  # every rank's check is of the same step and tensors
                    self._found[name][1].append((float(own.square().sum()) / ranks, self._squares[name]))
            return end(guard, record)

        for name, other in (("see", see_all), ("end", end_all)):
            setattr(Guard, name, other)

    def owed(self, strategy: Any) -> float:
        """By all ranks, which call it together. Of PowerSGD's tensors, whose ranks keep one thing, it says too much."""
        from espresso.search.error_budget import owed_by, rings

        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, {name: tuple(seen) for name, (_, seen) in self._found.items()})
        found = {}
        for name, (choice, _) in self._found.items():
            looks = [look for theirs in everybody for look in theirs[name]]
            kept, squares = (math.fsum(column) for column in zip(*looks, strict=True))
            owed = rings(choice.compressor, scale=strategy.gain_scale) * math.sqrt(kept / max(squares, 1e-300))
            found[name] = choice, owed
        return owed_by(strategy, found)


def train_once(case: str, steps: int) -> list[Row]:
    """A job with nothing chosen; every rank calls it."""
    import espresso

    whole, task, rows = Whole(), task_of(case, 0), list[Row]()
    models = [DistributedDataParallel(model) for model in task.make_models()]
    optimizers = [task.make_optimizer(model) for model in models]
    state = espresso.register(models[0], seed=0, compile_beside=False)
    for step in range(1, steps + 1):
        task.step(models, optimizers, step - 1, dist.get_rank(), dist.get_world_size())
        if step % EVERY == 0:
            figures, strategy = state.metrics(), state.strategy
            forecast, seen = figures["espresso/predicted_owed"], figures["espresso/owed"]
            rows.append(Row(case, step, state.history[-1]["strategy"], forecast, seen, whole.owed(strategy)))
    state.close()
    return rows


@dataclass(frozen=True)
class Line:
    """A case: medians over the rows of its second half."""

    case: str
    strategy: str
    forecast: float
    seen: float
    true: float
    forecast_over_true: float
    seen_over_true: float
    ahead_over_true: float

    @property
    def passes(self) -> bool:
        """Whether all three are as near to the truth as they should be; where nothing is owed, they are."""
        ratios = (self.forecast_over_true, self.seen_over_true, self.ahead_over_true)
        return not self.true or all(1 / WITHIN <= ratio <= WITHIN for ratio in ratios)


def lines_of(rows: Sequence[Row]) -> list[Line]:
    """One a case."""
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        late = [row for row in mine if row.step > mine[-1].step // 2 and row.true]
        columns = [(r.forecast, r.seen, r.true, r.forecast / r.true, r.seen / r.true) for r in late] or [(0.0,) * 5]
        told = [(old, new) for old, new in pairwise(mine) if new in late and old.seen and old.strategy == new.strategy]
        ahead = statistics.median([old.seen / new.true for old, new in told] or [0.0])
        medians = [*map(statistics.median, zip(*columns, strict=True)), ahead]
        lines.append(Line(case, mine[-1].strategy, *medians))
    return lines


def table_of(lines: Sequence[Line]) -> Table:
    """For people."""
    table = Table(title=f"Gradients owed, medians over the second half; bar: {WITHIN} apart", title_justify="left")
    headers = ("forecast", "seen", "true", "forecast / true", "seen / true", "ahead / true")
    for header in ("case", "in use at the end", *headers, ""):
        table.add_column(header)
    for line in lines:
        figures = [f"{value:.2f}" for value in astuple(line)[2:]]
        table.add_row(line.case, line.strategy, *figures, "pass" if line.passes else "[bold red]MISS[/]")
    return table


@app.command()
def main(
    cases: Annotated[str, typer.Option(help="Comma-separated tasks with an optimizer.")] = ",".join(CASES),
    steps: Annotated[int, typer.Option(help="Of every run.")] = STEPS,
    rate: Annotated[str, typer.Option(help="Each host's egress limit.")] = "200mbit",
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "owed.json",
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train every case with nothing chosen, and compare."""
    if worker is not None:
        torch.set_num_threads(1)
        with process_group(120.0, "gloo"):
            found = train_once(cases, steps)
            if dist.get_rank() == 0:
                worker.write_text(json.dumps([asdict(row) for row in found]))
            dist.barrier()
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    rows: list[Row] = []
    networks: dict[str, str] = {}
    for case in cases.split(","):
        raw = json_path.with_suffix(".raw")
        argv = [sys.executable, "-m", "benchmarks.owed", "--cases", case, "--steps", str(steps), "--worker", str(raw)]
        with open_network(2, rate) as network:
            networks[case] = describe(network)
            run_workers(network, argv, pin=True, deadline_s=1800)
        rows += [Row(**row) for row in json.loads(raw.read_text())]
        raw.unlink()
        config = {"ranks": 2, "rate": rate, "steps": steps, "networks": networks}
        results.write(json_path, results.record(config, 0, [asdict(row) for row in rows]))
    lines = lines_of(rows)
    results.console(130).print(table_of(lines))
    if not all(line.passes for line in lines):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
