"""``python -m benchmarks.chaos --faults 200 --seed S [--json]``."""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.trial import Verdict, draw_plan, play, warm_up

app = typer.Typer(pretty_exceptions_enable=False)


def table_of(verdicts: list[Verdict]) -> Table:
    """Right outcomes by fault."""
    table = Table(title=f"{len(verdicts)} faults", title_justify="left")
    for header in ("fault", "played", "right", "slowest error, s"):
        table.add_column(header, justify="left" if header == "fault" else "right")
    for fault in FAULTS:
        group = [verdict for verdict in verdicts if verdict.plan.fault is fault]
        if group:
            right, slowest = sum(not verdict.wrong for verdict in group), max(v.slowest_s for v in group)
            table.add_row(fault.name, str(len(group)), str(right), f"{slowest:.1f}" if slowest else "")
    return table


@app.command()
def main(
    faults: Annotated[int, typer.Option(min=1, help="How many faults to play.")] = 200,
    seed: Annotated[int, typer.Option(help="Of everything that chance decides.")] = 0,
    timeout_s: Annotated[float, typer.Option(help="The jobs' time-out.")] = 8.0,
    only: Annotated[str, typer.Option(help="Only faults whose plan contains these words.")] = "",
    output: Annotated[Path, typer.Option("--output", "-o")] = results.RESULTS_DIR / "chaos.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play faults at random moments of real jobs, and judge what comes of them."""
    draw, console = random.Random(seed), Console(stderr=True, highlight=False, soft_wrap=True)
    verdicts = []
    warm_up()
    for number in range(faults):
        plan = draw_plan(draw, number)
        if only not in str(plan):
            continue
        verdict = play(plan, timeout_s)
        verdicts.append(verdict)
        console.print(f"{number + 1:4} {plan}: {verdict.wrong or 'right'}", markup=False)
        if verdict.wrong:
            console.print(verdict.log, markup=False, style="dim")
    wrong = [{"plan": str(v.plan), "delay_s": round(v.plan.delay_s, 3), "why": v.wrong} for v in verdicts if v.wrong]
    body = {"faults": len(verdicts), "right": len(verdicts) - len(wrong), "wrong": len(wrong), "list": wrong}
    rows = Counter((v.plan.fault.name, v.plan.place.name, v.plan.kind, v.plan.phase, not v.wrong) for v in verdicts)
    keys = ("fault", "place", "kind", "phase", "right")
    listed = [{**dict(zip(keys, key, strict=True)), "times": times} for key, times in sorted(rows.items())]
    results.write(output, results.record({"faults": faults, "timeout_s": timeout_s}, seed, listed) | {"summary": body})
    if as_json:
        sys.stdout.write(json.dumps(body, indent=1) + "\n")
    else:
        Console(highlight=False).print(table_of(verdicts))
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
