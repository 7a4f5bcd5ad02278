"""Where each rank's time goes in a recorded run: a bar a rank, a colour a phase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from espresso.diagnosis.report import PHASES
from espresso.diagnosis.turns import Run
from espresso.flight.form import Flight


def write_bars(path: str | Path, flights: Sequence[Flight]) -> None:
    """Draw it.

    Raises:
        FlightError: too few steps.
        OSError: the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    run = Run(flights)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.4 * len(run.flights)), layout="constrained")
    names = [f"{host}, rank {flight.name}" for flight, host in zip(run.flights, run.hosts, strict=True)]
    left = [0.0] * len(names)
    for phase, words in PHASES.items():
        widths = [median(getattr(turn.parts[place], phase) for turn in run.turns) / 1e3 for place in range(len(names))]
        if max(widths) > 0:
            axes.barh(names, widths, left=left, label=words)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step, medians")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
