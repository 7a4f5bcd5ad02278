"""What a diagnosis says: for programs, and for people on one screen, the worst first."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

WIDTH = 110

PHASES = {
    "optimizer": "optimizer",
    "input": "input",
    "earlier": "earlier passes",
    "prepare": "broadcast of buffers",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "exposed": "waits for averages",
}
"""Fields of a turn's part, in people's words."""

HIDDEN_SHARE = 0.05
"""Of a step: where averages are waited for less, compression is not worth a try."""

MOST_GROUPS = 8
"""That people are told of."""


@dataclass(frozen=True)
class Finding:
    """Something that makes steps slow.

    Attributes:
        kind: what it is, in one word.
        rank, host: where; None where it concerns all, the rank where it concerns every rank of the host.
        cost_us: of a step, now.
        gain_us: what a step would be shorter without it, by the timeline.
        confidence: 0 to 1.
        remedy: what to do.
        detail: what was seen.
    """

    kind: str
    rank: int | None
    host: str | None
    cost_us: float
    gain_us: float
    confidence: float
    remedy: str
    detail: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        findings: the worst first.
        step_us: a step as measured, median; an optimizer's step, with all its passes.
        replayed_us: the same by the timeline.
        overlap: part of all communication that backward hides, as measured; None where nothing was exchanged.
        overlap_predicted: the same by the timeline.
        bound: what takes most of a step: ``compute``, ``input``, ``network`` or, with findings, the first one's kind.
        shares: of a step, by phase.
        missing: ranks that left no record here; what is slow on them alone is not seen.
        other_groups: ranks that left one beside these and train in other groups; nobody looked at it.
    """

    findings: tuple[Finding, ...]
    step_us: float
    replayed_us: float
    overlap: float | None
    overlap_predicted: float | None
    bound: str
    num_steps: int
    num_ranks: int
    shares: dict[str, float]
    missing: tuple[int, ...] = ()
    other_groups: tuple[tuple[int, ...], ...] = ()

    @property
    def clean(self) -> bool:
        """Whether there is nothing to mend."""
        return not self.findings

    def __str__(self) -> str:
        """One screen, for people."""
        return text_of(self)

    def to_json(self) -> dict[str, Any]:
        """As ``espresso diagnose --json`` prints it."""
        return {"clean": self.clean, **asdict(self), "findings": [asdict(finding) for finding in self.findings]}


def text_of(found: Diagnosis) -> str:
    """One screen."""
    lines = [
        f"{found.num_ranks} rank{'s' if found.num_ranks != 1 else ''}, {found.num_steps} steps of"
        f" {_ms(found.step_us)}; the timeline replays them in {_ms(found.replayed_us)}"
    ]
    if found.missing:
        lines.append(f"  no record of {_ranks(found.missing)}: what is slow there is not seen")
    if found.other_groups:
        groups = "; ".join(map(_ranks, found.other_groups[:MOST_GROUPS]))
        groups += "; …" if len(found.other_groups) > MOST_GROUPS else ""
        lines.append(f"  not looked at: {groups} (other groups: give the files of each a folder of their own)")
    shares = sorted(((share, PHASES[name]) for name, share in found.shares.items()), reverse=True)
    lines.append("  " + ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.01))
    if found.overlap is not None:
        lines.append(f"  {found.overlap:.0%} of all communication is hidden behind backward")
    if found.clean:
        where = " on the ranks that were looked at" if found.missing or found.other_groups else ""
        lines += ["", f"Nothing to mend{where}. A step is bound by {found.bound}; {_advice(found.shares['exposed'])}"]
    for number, finding in enumerate(found.findings, start=1):
        lines += ["", *_rows(number, finding, found.step_us)]
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _advice(waits: float) -> str:
    if waits <= HIDDEN_SHARE:
        return "compressing gradients would bring next to nothing."
    return f"{waits:.0%} of it waits for averages: espresso's automatic mode finds out what compressing them brings."


def _rows(number: int, finding: Finding, step_us: float) -> list[str]:
    on_host = "" if finding.host is None else f" on host {finding.host}"
    where = on_host if finding.rank is None else f" on rank {finding.rank}, host {finding.host}"
    head = (
        f"{number}. {finding.kind.replace('_', ' ')}{where}: costs {_ms(finding.cost_us)} a step; without it"
        f" {_ms(finding.gain_us)} less ({finding.gain_us / step_us:.0%}); {finding.confidence:.0%} sure"
    )
    body = [f"seen: {finding.detail}"] if finding.detail else []
    body.append(f"do:   {finding.remedy}")
    wrapped = [line for each in body for line in textwrap.wrap(each, WIDTH - 3, subsequent_indent="      ")]
    return [head, *(f"   {line}" for line in wrapped)]


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f} ms"
