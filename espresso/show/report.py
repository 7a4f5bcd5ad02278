"""Tables for people: what a search chose, how it compares, what a strategy does, how busy the lanes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from espresso.model.links import LinkCurve, fit_line, group_size, on_link
from espresso.show.explain import ExplainedGroup
from espresso.show.lane_events import LaneEvent, busy_us, sorted_lanes
from espresso.strategies import Cluster, Scope

MAX_NAMES = 3
_NUMERIC = {
    "against uncompressed",
    "bandwidth",
    "busy",
    "gradient",
    "intervals",
    "latency",
    "predicted iteration",
    "of the iteration",
    "sent per rank",
    "sent (per rank)",
    "tensors",
}
_SCOPES = {Scope.FLAT: "to all ranks", Scope.INTRA: "inside the node", Scope.INTER: "between nodes"}


def frontier_table(points: Sequence[tuple[float, float, float, int]]) -> Table:
    """Rows of (gradients owed, bytes of residuals, predicted iteration in us, compressed tensors)."""
    table = Table(title="time against error and memory", title_justify="left")
    for name in ("gradients owed", "residuals", "predicted iteration", "tensors compressed"):
        table.add_column(name, justify="right")
    for error, kept, us, count in points:
        table.add_row(f"{error:.4f}", human_bytes(kept), human_us(us), str(count))
    return table


def human_bytes(count: float) -> str:
    """
    >>> human_bytes(1234567)
    '1.23 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError


def human_us(us: float) -> str:
    """
    >>> human_us(81234.5)
    '81.2 ms'
    """
    if us < 1e3:
        return f"{us:.0f} us"
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.1f} ms" if us >= 1e4 else f"{us / 1e3:.2f} ms"


def short_names(names: Sequence[str], limit: int = MAX_NAMES) -> str:
    """The first few names and how many follow."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def choices_table(groups: Sequence[ExplainedGroup]) -> Table:
    """One row per choice: how many tensors, which, how many bytes, before and after."""
    table = _table(None, "tensors", "which", "gradient", "sent per rank", "compressor", "option")
    for group in groups:
        table.add_row(
            str(len(group.tensors)),
            Text(short_names([tensor.name for tensor in group.tensors], 2)),
            human_bytes(group.raw_bytes),
            human_bytes(group.sent_bytes),
            Text(str(group.choice.compressor)),
            Text(str(group.choice.option)),
        )
    return table


def prediction_table(rows: Mapping[str, float], uncompressed_us: float) -> Table:
    """Iteration times by name, in the order given, with the speed-up over uncompressed."""
    table = _table(None, "strategy", "predicted iteration", "against uncompressed")
    for name, us in rows.items():
        table.add_row(Text(name), human_us(us), f"{uncompressed_us / us:.2f}x" if us else "-")
    return table


def utilisation_table(events: Sequence[LaneEvent], span_us: float) -> Table:
    """How long each lane is in use, against the whole iteration."""
    table = _table(None, "lane", "intervals", "busy", "of the iteration")
    for row in lane_rows(events, span_us):
        table.add_row(row["lane"], str(row["intervals"]), human_us(row["busy_us"]), f"{100 * row['utilisation']:.1f} %")
    return table


def lane_rows(events: Sequence[LaneEvent], span_us: float) -> list[dict[str, Any]]:
    """The utilisation table as JSON rows: lane, intervals, busy_us, utilisation."""
    busy = busy_us(events)
    return [
        {
            "lane": lane,
            "intervals": sum(event.lane == lane for event in events),
            "busy_us": busy[lane],
            "utilisation": busy[lane] / span_us if span_us else 0.0,
        }
        for lane in sorted_lanes(events)
    ]


def pipeline_heading(group: ExplainedGroup, number: int) -> str:
    """Which tensors a pipeline is for, and what it costs in bytes."""
    tensors = group.tensors
    names = short_names([tensor.name for tensor in tensors])
    plural = "tensor" if len(tensors) == 1 else "tensors"
    sent = ", ".join(f"{human_bytes(sent)} {_SCOPES[scope]}" for scope, sent in group.sent_by_scope().items())
    return (
        f"{number}. {len(tensors)} {plural}: {names}\n"
        f"   {human_bytes(group.raw_bytes)} of gradient; sent per rank and iteration: {sent}"
    )


def pipeline_table(group: ExplainedGroup) -> Table:
    """One pipeline step by step, with the residual kept at each compression and the bytes sent."""
    table = _table(None, "", "step", "what happens", "residual kept (per rank)", "sent (per rank)")
    for position, step in enumerate(group.steps, start=1):
        kept = "-"
        if step.site is not None:
            numbers = f"{step.residual_elements:,} numbers" if step.residual_elements else "none"
            numbers += " (at the root)" if step.at_root and step.residual_elements else ""
            kept = f"{step.site.value}: {numbers}"
        sent = human_bytes(step.sent_bytes) if step.sent_bytes else "-"
        table.add_row(str(position), Text(step.step), Text(step.words), kept, sent)
    return table


def link_rows(curves: Sequence[LinkCurve], cluster: Cluster) -> list[dict[str, Any]]:
    """What was measured and its fit, as JSON rows.

    ``alpha_us`` is the latency of a whole call; ``gbit_per_s`` is how fast bytes cross one link: what the
    routine puts on it per byte of the whole array is divided out.
    """
    rows = []
    for curve in curves:
        _, share = on_link(curve.routine, group_size(curve.scope, cluster))
        line = fit_line(curve.alone, messages=1, factor=share)
        rows.append(
            {
                "scope": curve.scope.value,
                "routine": curve.routine.value,
                "form": curve.form.value,
                "alpha_us": line.alpha_us,
                "gbit_per_s": 8 / line.beta_us_per_kb if line.beta_us_per_kb else None,
                "latency_us": curve.latency_us,
                "points": [list(point) for point in curve.alone],
            }
        )
    return rows


def links_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per routine, scope and form: the fit, then the time at every size of the whole array."""
    sizes = sorted({size for row in rows for size, _ in row["points"]})
    shown = tuple(human_bytes(size) for size in sizes)
    table = _table(None, "scope", "routine", "form", "latency", "bandwidth", *shown, right=shown)
    for row in rows:
        times = dict(row["points"])
        speed = f"{row['gbit_per_s']:.3g} Gb/s" if row["gbit_per_s"] else "not limited"
        cells = (human_us(times[size]) if size in times else "" for size in sizes)
        table.add_row(row["scope"], row["routine"], row["form"], human_us(row["alpha_us"]), speed, *cells)
    return table


def _table(title: str | None, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        justify: Literal["right", "left"] = "right" if column in _NUMERIC or column in right else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table
