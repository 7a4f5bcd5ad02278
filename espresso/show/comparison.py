"""One job under every strategy there is a name for: rows for a table, for JSON, and for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espresso.search.ablation import AblationRow
from espresso.search.result import SearchResult
from espresso.search.search import GREEDY, PUBLISHED

CHOSEN = "chosen"
CERTIFICATE = "certified lower bound"
UPPER_BOUND = "upper bound (free compression)"


def comparison_rows(result: SearchResult, ablation: Sequence[AblationRow] = ()) -> list[dict[str, Any]]:
    """``name``, ``predicted_us`` and ``kind`` (baseline, searched, ablation, bound), slowest first within a kind.

    The certificate is a bound on every strategy; the paper's upper bound (on throughput) prices compression
    at nothing and is no certificate.
    """
    rows = [
        _row(name, us, "searched" if name in (GREEDY, PUBLISHED) else "baseline")
        for name, us in result.baselines.items()
    ]
    rows.append(_row(CHOSEN, result.predicted_us, "searched") | {"gap": result.gap})
    rows += [
        _row(f"only: {row.name}", row.predicted_us, "ablation")
        | {"gap": row.predicted_us / row.lower_bound_us - 1 if row.lower_bound_us else 0.0}
        for row in ablation
    ]
    rows.append(_row(CERTIFICATE, result.lower_bound_us, "bound"))
    rows.append(_row(UPPER_BOUND, result.upper_bound_us, "bound"))
    kinds = ("baseline", "searched", "ablation", "bound")
    return sorted(rows, key=lambda row: (kinds.index(row["kind"]), -row["predicted_us"]))


def _row(name: str, us: float, kind: str) -> dict[str, Any]:
    return {"name": name, "predicted_us": us, "kind": kind}


def write_comparison(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Draw the rows as bars (png, pdf or svg by the name's ending)."""
    from matplotlib.figure import Figure

    colours = {"baseline": "#9aa5b1", "searched": "#1f6f8b", "ablation": "#c9a227", "bound": "#7a3b3b"}
    figure = Figure(figsize=(9, 0.32 * len(rows) + 1.2), layout="constrained")
    axis = figure.subplots()
    names = [str(row["name"]) for row in rows][::-1]
    times = [row["predicted_us"] / 1e3 for row in rows][::-1]
    bars = axis.barh(names, times, color=[colours[row["kind"]] for row in rows][::-1])
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    bound = next(row["predicted_us"] for row in rows if row["name"] == CERTIFICATE)
    axis.axvline(bound / 1e3, color=colours["bound"], linewidth=0.8, linestyle="--")
    axis.set_xlabel("predicted iteration, ms")
    axis.set_title(title, fontsize=10)
    axis.margins(x=0.1)
    figure.savefig(path)
