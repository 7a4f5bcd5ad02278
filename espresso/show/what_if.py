"""What ``espresso what-if`` found, for people: a table, remarks, a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from espresso.model.job import Job
from espresso.model.what_if import FARTHEST, LONGEST_RTT_MS, own_gbit, shown_gbit
from espresso.search.what_if import PAYS, Prediction
from espresso.show.report import human_us


def what_if_table(rows: Sequence[Prediction]) -> Table:
    """One row per combination."""
    table = Table("machines x ranks", "network", "round trip", "plain step", "best step", "gain", "most bytes by")
    for row in rows:
        choice = row.main_choice
        table.add_row(
            f"{row.cluster.num_nodes} x {row.cluster.ranks_per_node}",
            "-" if row.inter_gbit is None else shown_gbit(row.inter_gbit),
            "as measured" if row.rtt_ms is None else f"{row.rtt_ms:g} ms",
            human_us(row.plain_us),
            human_us(row.best_us),
            f"{row.gain:.2f}x" if row.pays else f"{row.gain:.2f}x, not by compressing",
            Text(f"{choice.compressor}: {choice.option}" if row.strategy.compresses else str(choice.option)),
        )
    return table


def remarks(job: Job, rows: Sequence[Prediction], answers: Mapping[str, Any]) -> list[str]:
    """When compression stops paying, what twice the bandwidth brings, how far all this is from what was measured."""
    lines = []
    first = rows[0]
    if "stops_paying_gbit" in answers:
        stops = answers["stops_paying_gbit"]
        if stops is None:
            lines.append("compression pays on no network that may be asked about")
        elif math.isinf(stops):
            lines.append("compression pays on every network that may be asked about")
        else:
            lines.append(f"compression stops paying from {shown_gbit(stops)} on (gains less than {PAYS - 1:.0%})")
        twice = answers["twice"]
        if twice is not None:
            lines.append(
                f"twice the bandwidth: plain {human_us(first.plain_us)} to {human_us(twice.plain_us)},"
                f" best {human_us(first.best_us)} to {human_us(twice.best_us)}"
            )
    for host, row in answers.get("repaired", {}).items():
        lines.append(f"{host} as fast as the others: plain {human_us(row.plain_us)}, best {human_us(row.best_us)}")
    if not job.costs.links.curves:
        lines.append("links of this job are stated lines: the formulas hold for any number of machines")
        return lines
    own = shown_gbit(own_gbit(job)) if job.cluster.num_nodes > 1 else "no network between machines"
    lines.append(
        f"measured on {job.cluster}, {own}; predictions reach {FARTHEST['rate']:g} times from its rate,"
        f" {FARTHEST['nodes']:g} from its machines, {FARTHEST['ranks_per_node']:g} from its ranks on one,"
        f" {LONGEST_RTT_MS:g} ms of round trip"
    )
    far = [max(value, 1 / value) for row in rows for value in row.far.values()]
    if far and max(far) > 1:
        lines.append(f"the farthest row is {max(far):.3g} times from what was measured")
    return lines


def write_what_if(path: Path, rows: Sequence[Prediction], title: str) -> None:
    """Draw plain and best steps, against the network's rate where it varies, else against the ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    by_rate = len({row.inter_gbit for row in rows} - {None}) > 1  # one machine has no rate
    groups: dict[Any, list[Prediction]] = {}
    for row in rows:
        groups.setdefault((row.cluster.shape if by_rate else row.inter_gbit, row.rtt_ms), []).append(row)
    for number, ((what, rtt), members) in enumerate(groups.items()):
        at = [float(row.inter_gbit or 0.0) if by_rate else float(row.cluster.num_ranks) for row in members]
        order = sorted(range(len(at)), key=at.__getitem__)
        name = f"{what[0]} x {what[1]}" if by_rate else ("one machine" if what is None else shown_gbit(what))
        name += "" if rtt is None else f", {rtt:g} ms"
        for kind, style in (("plain", "--"), ("best", "-")):
            times = [members[n].plain_us if kind == "plain" else members[n].best_us for n in order]
            axis.plot(
                [at[n] for n in order], [us / 1e3 for us in times], style, marker="o", markersize=3,
                color=f"C{number % 10}", label=f"{kind}, {name}",
            )  # fmt: skip
    axis.set(
        xscale="log", yscale="log", ylabel="predicted step, ms",
        xlabel="Gb/s between machines" if by_rate else "ranks", title=title,
    )  # fmt: skip
    axis.legend(fontsize=7)
    figure.savefig(path)
