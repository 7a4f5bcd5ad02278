"""The frontier of time against error and memory as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from espresso.search.frontier import FrontierPoint


def write_frontier(path: Path, points: Sequence[FrontierPoint], title: str) -> None:
    """Draw the points (png, pdf or svg by the name's ending): time over error, memory as colour; the line is the
    shortest time for who may owe so much.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    errors, times = [point.error for point in points], [point.predicted_us / 1e3 for point in points]
    least = sorted(zip(errors, times, strict=True))
    within = list(accumulate((time for _, time in least), min))
    axis.plot([error for error, _ in least], within, color="#9aa5b1", linewidth=0.8, drawstyle="steps-post", zorder=1)
    dots = axis.scatter(errors, times, c=[point.residual_bytes / 1e6 for point in points], cmap="viridis", zorder=2)
    figure.colorbar(dots, label="residuals of a rank, MB")
    axis.set_xlabel("gradients owed")
    axis.set_ylabel("predicted iteration, ms")
    axis.set_title(title, fontsize=10)
    figure.savefig(path)
