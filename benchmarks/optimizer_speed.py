"""What a step of LANS costs on the CPU, beside torch's AdamW.

    python -m benchmarks.optimizer_speed

Ten tensors of a million float32 each on one thread; the implementations take turns, and the best of several rounds
counts. Ratios are to ``torch.optim.AdamW`` as it comes.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import nn

from benchmarks import results
from espresso.optim import LANS

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "LANS, fused": lambda params: LANS(params, fused=True),
    "LANS, foreach": lambda params: LANS(params, foreach=True),
    "LANS, one by one": lambda params: LANS(params, foreach=False, fused=False),
}

app = typer.Typer(pretty_exceptions_enable=False)


def measure(rounds: int, num_tensors: int, numel: int) -> dict[str, float]:
    """The best step of every optimizer, in milliseconds."""
    params = [nn.Parameter(torch.randn(numel)) for _ in range(num_tensors)]
    for param in params:
        param.grad = torch.randn(numel)
    optimizers = {name: make(params) for name, make in OPTIMIZERS.items()}
    best = dict.fromkeys(optimizers, float("inf"))
    for turn in range(rounds + 1):
        for name, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            if turn:  # the first step allocates moments and compiles kernels
                best[name] = min(best[name], (time.perf_counter() - began) * 1e3)
    return best


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    num_tensors: Annotated[int, typer.Option(min=1)] = 10,
    numel: Annotated[int, typer.Option(help="Of every tensor.", min=1)] = 1_000_000,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "optimizer_speed.json",
) -> None:
    """Time one step of every optimizer."""
    torch.set_num_threads(1)
    best = measure(rounds, num_tensors, numel)
    rows = [{"optimizer": name, "step_ms": ms, "ratio": ms / best["AdamW"]} for name, ms in best.items()]
    config = {"rounds": rounds, "num_tensors": num_tensors, "numel": numel, "threads": 1}
    results.write(json_path, results.record(config, 0, rows))
    table = Table(title=f"{num_tensors} tensors of {numel} float32, one thread", title_justify="left")
    for header in ("optimizer", "step, ms", "over AdamW"):
        table.add_column(header, justify="left" if header == "optimizer" else "right")
    for name, ms in best.items():
        table.add_row(name, f"{ms:.1f}", f"{ms / best['AdamW']:.2f}")
    results.console(100).print(table)


if __name__ == "__main__":
    app()
