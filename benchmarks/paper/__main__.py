"""Every table and figure of the two papers, simulated on the shipped traces, beside what was published.

    python -m benchmarks.paper                       # everything: some ten minutes
    python -m benchmarks.paper --only sweep          # some figures; the others keep their last rows
    python -m benchmarks.paper --json                # rows on stdout as one JSON object

Writes ``benchmarks/results/paper.json``, and the tables and pictures of ``docs/fidelity.md``. A row has ``figure``,
``row``, ``published`` (null: a picture only), ``ours``, ``ratio`` of the two, ``cause``; a ratio outside 25 % has the
named cause that brings it nearest, or several, and ``switched``: ours with each cause switched on. Nothing is measured
but the times of Tables 5 and 6. The bar is that of Figures 12 and 13: status 1 if one of their ratios is outside 25 %
and no named cause brings it inside. Which others are is said after the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import results
from benchmarks.paper.causes import CLAIMS
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.pictures import draw
from benchmarks.paper.rows import missed
from benchmarks.paper.tables import update_page

PATH = results.RESULTS_DIR / "paper.json"
BAR = "figures-12-13"
"""The section whose misses are the status."""


def run(chosen: Sequence[str], old: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """The rows of the chosen figures, the others as they were."""
    kept: dict[str, list[dict[str, Any]]] = {}
    for row in old:
        kept.setdefault(row["section"], []).append(dict(row))
    for name in track(chosen, "figures", console=Console(stderr=True), transient=True):
        kept[name] = [{"section": name} | row.to_json() for row in FIGURES[name]()]
    return [row for name in FIGURES for row in kept.get(name, ())]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What was published beside ours, for people."""
    made = Table("figure", "row", "published", "ours", "ratio", "verdict")
    for row in rows:
        if row["published"] is not None:
            made.add_row(
                row["figure"], row["row"], f"{row['published']:.2f}", f"{row['ours']:.2f}", f"{row['ratio']:.2f}",
                row["verdict"],
            )  # fmt: skip
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), default=list(FIGURES), help="some figures")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object")
    arguments = parser.parse_args(argv)
    old = json.loads(PATH.read_text())["rows"] if PATH.exists() else []
    rows = run(arguments.only, old)
    config = {"causes": {cause.value: claim for cause, claim in CLAIMS.items()}}
    body = results.record(config, 0, rows)
    results.write(PATH, body)
    draw(rows)
    update_page(rows)
    if arguments.json:
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        console = results.console(150)
        console.print(table(rows))
        for row in filter(missed, rows):
            console.print(f"{row['figure']}, {row['row']}: {row['verdict']}")
    return 1 if any(missed(row) for row in rows if row["section"] == BAR) else 0


if __name__ == "__main__":
    raise SystemExit(main())
