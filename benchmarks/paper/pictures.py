"""Pictures of the rows: series, distances to the upper bound, crippled dimensions, bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.published import BYTEPS_COMPRESS, CASES, FP32, HIPRESS, HITOPKCOMM, NVLINK, PCIE
from benchmarks.paper.systems import OURS, UPPER

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"

STYLES: Mapping[str, tuple[str, str]] = {
    FP32: ("#9aa5b1", "o"),
    BYTEPS_COMPRESS: ("#c9a227", "s"),
    HITOPKCOMM: ("#7a9e7e", "^"),
    HIPRESS: ("#b07aa1", "v"),
    OURS: ("#1f6f8b", "D"),
    UPPER: ("#7a3b3b", "_"),
}

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows, folder: Path = IMAGES) -> list[Path]:
    """Write ``paper_series.png``, ``paper_distances.png`` and ``paper_bandwidth.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {"series": _series(rows), "distances": _distances(rows), "bandwidth": _bandwidth(rows)}
    paths = []
    for name, figure in made.items():
        paths.append(folder / f"paper_{name}.png")
        figure.savefig(paths[-1], dpi=80)
    return paths


def _of(rows: Rows, figure: str) -> dict[str, float]:
    return {row["row"]: row["ours"] for row in rows if row["figure"] == figure}


def _series(rows: Rows) -> Any:
    """Scaling factors from 8 to 64 GPUs: a row of panels for each cluster."""
    from matplotlib.figure import Figure

    found = _of(rows, "figures 12, 13, series")
    figure = Figure(figsize=(15, 5.4), layout="constrained")
    panels = figure.subplots(2, len(CASES), sharex=True, sharey=True)
    for line, cluster in zip(panels, (NVLINK, PCIE), strict=True):
        for axis, case in zip(line, CASES, strict=True):
            for system, (colour, marker) in STYLES.items():
                points = [
                    (gpus, found[f"{case.model}, {cluster}, {gpus} GPUs, {system}"])
                    for gpus in (8, 16, 32, 64)
                    if f"{case.model}, {cluster}, {gpus} GPUs, {system}" in found
                ]
                axis.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=system)
            axis.set_title(f"{case.model}, {case.compressor}\n{cluster}", fontsize=8)
            axis.set_ylim(0, 1.05)
            axis.set_xscale("log", base=2)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(STYLES), fontsize=8)
    figure.supxlabel("GPUs", fontsize=9)
    figure.supylabel("scaling factor", fontsize=9)
    return figure


def _distances(rows: Rows) -> Any:
    """Figure 14 as cumulative distributions, Figure 15 as bars."""
    from matplotlib.figure import Figure

    found, crippled = _of(rows, "figure 14"), _of(rows, "figure 15")
    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 2))
    for axis, cluster in ((left, NVLINK), (middle, PCIE)):
        for system, (colour, _) in STYLES.items():
            far = sorted(
                100 * value for name, value in found.items() if f", {cluster}, " in name and name.endswith(f" {system}")
            )
            if far:
                axis.step(far, [(n + 1) / len(far) for n in range(len(far))], where="post", color=colour, label=system)
        axis.set(xlabel="below the upper bound, %", xlim=(0, 100), ylim=(0, 1.02))
        axis.set_title(cluster, fontsize=9)
    left.legend(fontsize=7)
    panels = list(dict.fromkeys(tuple(name.split(", ")[:2]) for name in crippled))
    kinds = list(dict.fromkeys(", ".join(name.split(", ")[2:]) for name in crippled))
    for number, kind in enumerate(kinds):
        heights = [crippled[f"{compressor}, {cluster}, {kind}"] for compressor, cluster in panels]
        right.bar([at + 0.09 * number for at in range(len(panels))], heights, 0.09, label=kind)
    right.set_xticks([at + 0.32 for at in range(len(panels))], [f"{c}\n{k}" for c, k in panels], fontsize=7)
    right.set(ylabel="VGG16's scaling factor, 64 GPUs", ylim=(0, 1.3))
    right.legend(fontsize=6, ncols=3)
    return figure


def _bandwidth(rows: Rows) -> Any:
    """The gain over FP32 against the network's rate, and Figure 10."""
    from matplotlib.figure import Figure

    found, benefit = _of(rows, "sweep"), _of(rows, "figure 10")
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for case in CASES:
        points = [(int(n.split()[1]), v) for n, v in found.items() if n.startswith(f"{case.model}, ")]
        left.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"{case.model}, {case.compressor}")
    left.set(xscale="log", yscale="log", xlabel="Gb/s between machines", ylabel="throughput over FP32")
    left.axhline(1, color="grey", linewidth=0.8)
    left.legend(fontsize=7)
    for name in dict.fromkeys(row.split(", ")[0] for row in benefit):
        points = [(int(row.split()[1]), value) for row, value in benefit.items() if row.startswith(f"{name}, ")]
        right.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    right.set(xscale="log", yscale="log", xlabel="elements", ylabel="saved over spent")
    right.legend(fontsize=7)
    return figure
