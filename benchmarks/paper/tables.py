"""The tables of ``docs/fidelity.md``, from the rows."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.causes import CLAIMS
from benchmarks.paper.published import BYTEPS_COMPRESS, HIPRESS, HITOPKCOMM, NVLINK, PCIE
from benchmarks.paper.rows import AND, near
from benchmarks.paper.systems import OURS, PROVEN

Rows = Sequence[Mapping[str, Any]]


def fidelity_tables(rows: Rows) -> dict[str, str]:
    """Every table of the page, by name."""
    return {
        "ratios": _ratios([row for row in rows if row["switched"]]),
        "gains": _gains([row for row in rows if row["switched"] and row["figure"] in GAINS]),
        "causes": _causes([row for row in rows if row["switched"]]),
        "settings": _settings([row for row in rows if row["section"] == "one-setting"]),
        "distances": _distances(rows),
        "times": _times([row for row in rows if row["section"] == "tables-5-6"]),
    }


GAINS = ("table 1, gains", "BytePS-Compress")
"""Figures that are gains over no compression, in percent on the page."""


PAGE = Path(__file__).resolve().parents[2] / "docs" / "fidelity.md"


def update_page(rows: Rows, path: Path = PAGE) -> None:
    """Put the tables where the page says ``<!-- table: NAME -->``."""
    text = path.read_text()
    for name, table in fidelity_tables(rows).items():
        text = re.sub(rf"(<!-- table: {name} -->\n\n)(?:\|.*\n)*\n*", lambda found, t=table: f"{found[1]}{t}\n\n", text)  # type: ignore[misc]
    path.write_text(text)


def _lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    out = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*out, *(f"| {' | '.join(line)} |" for line in body)])


def _ratios(rows: Rows) -> str:
    body = [
        [
            row["figure"], row["row"], f"{row['published']:.2f}", f"{row['ours']:.2f}", f"{row['ratio']:.2f}",
            row["verdict"] + (f" ({row['with_cause']:.2f})" if row["cause"] else ""),
        ]
        for row in rows
    ]  # fmt: skip
    return _lines(("figure", "row", "published", "ours", "ratio", "verdict (ours with the cause)"), body)


def _gains(rows: Rows) -> str:
    body = []
    for row in rows:
        percent = [f"{100 * (row[which] - 1):+.1f} %" for which in ("published", "ours")]
        body.append([f"{row['figure'].removesuffix(', gains')}, {row['row']}", *percent])
    return _lines(("gain", "published", "ours"), body)


def _settings(rows: Rows) -> str:
    body = [
        [*row["row"].split(", ", 1), f"{row['ours']:g} {row['note'].removesuffix(' ratios within 25 %')}"]
        for row in rows
    ]
    return _lines(("cluster", "setting", "within 25 %"), body)


def _causes(rows: Rows) -> str:
    """For every cause: the rows that it can move, and how far it moves them."""
    body = []
    for cause in CLAIMS:
        moves = [row["switched"][cause.value] / row["ours"] for row in rows if cause.value in row["switched"]]
        inside = [row for row in rows if row["cause"] and near(row["with_cause"] / row["published"])]
        named = sum(cause.value in row["cause"].split(AND) for row in inside)
        body.append([cause.value, str(len(moves)), f"{min(moves):.2f} to {max(moves):.2f}", str(named)])
    return _lines(("cause", "rows it can move", "times ours", "rows it explains"), body)


def _distances(rows: Rows) -> str:
    body = []
    for cluster in (NVLINK, PCIE):
        for system in (
            OURS,
            f"{OURS}, backward alone",
            "published algorithms",
            PROVEN,
            HIPRESS,
            HITOPKCOMM,
            BYTEPS_COMPRESS,
        ):
            ending = f", {cluster}, {system}"
            far = [100 * row["ours"] for row in rows if row["figure"] == "figure 14" and row["row"].endswith(ending)]
            within = sum(value <= 10 for value in far)
            body.append([cluster, system, f"{statistics.median(far):.1f} %", f"{max(far):.1f} %", f"{within} of 18"])
    return _lines(("cluster", "system", "median", "largest", "within 10 %"), body)


def _times(rows: Rows) -> str:
    found = {(row["figure"], row["row"]): row for row in rows}
    body = []
    for (figure, model), row in found.items():
        if figure == "table 6":
            select, ours = found["table 5", model], found["table 5", f"{model}, ours"]
            body.append(
                [
                    model, f"{select['published']:g}", f"{select['ours']:.1f}", f"{row['published']:g}",
                    f"{row['ours']:.1f}", f"{ours['ours']:.0f}",
                ]
            )  # fmt: skip
    head = ("model", "select, published ms", "ours", "offload, published ms", "ours", "our search and certificate, ms")
    return _lines(head, body)
