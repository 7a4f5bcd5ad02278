"""A picture of one iteration by lane: predicted above measured, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from espresso.show.lane_events import Kind, LaneEvent, last_iteration, sorted_lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: the kinds stay apart for colour-blind readers and in grey.
COLOURS = {
    Kind.BACKWARD: "#BBBBBB",
    Kind.COMPRESS: "#D55E00",
    Kind.DECOMPRESS: "#E69F00",
    Kind.TRANSFORM: "#CC79A7",
    Kind.AGGREGATE: "#009E73",
    Kind.COPY: "#F0E442",
    Kind.EXCHANGE_RAW: "#0072B2",
    Kind.EXCHANGE_COMPRESSED: "#56B4E9",
    Kind.OTHER: "#999999",
}
LANE_NAMES = {
    "backward": "backward",
    "training": "training device",
    "offload": "offload pool",
    "copy": "host copies",
    "intra": "link inside node",
    "inter_out": "network, out",
    "inter_in": "network, in",
}
SHORT = 0.004
"""Bars below this share of the picture's width are drawn without a light edge."""

IMAGE_FORMATS = (".png", ".pdf", ".svg")


def write_gantt(
    path: str | Path,
    predicted: Sequence[LaneEvent],
    measured: Sequence[LaneEvent] | None = None,
    *,
    title: str = "",
) -> None:
    """Draw the lanes of one iteration and save the picture.

    Args:
        path: ends in .png, .pdf or .svg.
        predicted: may be empty if ``measured`` is not.
        measured: the last iteration of the lowest rank is drawn.

    Raises:
        ValueError: nothing to draw, or another file ending.
        OSError: the file cannot be written.
    """
    # Pyplot would choose a GUI backend and keep figures alive; a bare figure does neither.
    from matplotlib.figure import Figure

    if Path(path).suffix.lower() not in IMAGE_FORMATS:
        raise ValueError(f"{path}: a picture's name ends in one of {', '.join(IMAGE_FORMATS)}")
    panels = [("predicted", list(predicted)), ("measured", last_iteration(measured or []))]
    panels = [(name, events) for name, events in panels if events]
    if not panels:
        raise ValueError("there is no interval to draw")
    counts = [len(sorted_lanes(events)) for _, events in panels]
    figure = Figure(figsize=(13, 1.7 + 0.52 * sum(counts) + 0.5 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    latest = max(event.end_us for _, events in panels for event in events)
    for axis, (name, events) in zip(axes, panels, strict=True):
        _draw(axis, name, events, latest)
    axes[-1].set_xlabel("time since the first gradient was ready, ms")
    if title:
        figure.suptitle(title, fontsize=12)
    _legend(figure, [event for _, events in panels for event in events])
    figure.savefig(path, dpi=130)


def _draw(axis: Axes, name: str, events: list[LaneEvent], latest_us: float) -> None:
    lanes = sorted_lanes(events)
    for row, lane in enumerate(lanes):
        for kind in Kind:
            mine = [event for event in events if event.lane == lane and event.kind is kind]
            # White edges keep neighbours apart; on very short bars they would hide the bars themselves.
            for short, edge in ((True, COLOURS[kind]), (False, "white")):
                spans = [
                    (event.start_us / 1e3, event.duration_us / 1e3)
                    for event in mine
                    if (event.duration_us < SHORT * latest_us) is short
                ]
                axis.broken_barh(spans, (row - 0.36, 0.72), facecolors=COLOURS[kind], edgecolor=edge, linewidth=0.4)
    end_ms = max(event.end_us for event in events) / 1e3
    axis.axvline(end_ms, color="black", linewidth=1, linestyle="--")
    axis.set_yticks(range(len(lanes)), [LANE_NAMES.get(lane, lane) for lane in lanes])
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.set_xlim(0, latest_us / 1e3 * 1.02)
    axis.set_title(f"{name}: last gradient averaged {end_ms:.1f} ms after the first was ready", loc="left", fontsize=10)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    _mark_backward(axis, events)


def _mark_backward(axis: Axes, events: list[LaneEvent]) -> None:
    """A thin line where backward ends: what comes after it is communication that nothing hides."""
    ends = [event.end_us for event in events if event.kind is Kind.BACKWARD]
    if ends:
        axis.axvline(max(ends) / 1e3, color="#777777", linewidth=1, linestyle=":")


def _legend(figure: Figure, events: list[LaneEvent]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {event.kind for event in events}
    handles: list[Patch | Line2D] = [Patch(color=COLOURS[kind], label=kind.value) for kind in Kind if kind in used]
    if Kind.BACKWARD in used:
        handles.append(Line2D([], [], color="#777777", linestyle=":", label="backward ends"))
    handles.append(Line2D([], [], color="black", linestyle="--", label="last gradient averaged"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8), frameon=False, fontsize=9)
