"""How close to compute-only automatic mode comes on a slow network: the project's speed bars.

    python -m benchmarks.speed                      # everything, about half an hour
    python -m benchmarks.speed --rows mlp-1,gpt-1   # some rows
    python -m benchmarks.speed --quick              # fewer rounds, one compressor
    python -m benchmarks.speed --nothing-chosen --rows mlp-1,cnn-1,cnn-slow    # "auto" against the best of five alone
    python -m benchmarks.speed --device cuda --rows mlp-1                      # both hosts on the first GPU
    python -m benchmarks.speed --device cuda --backend nccl --rows mlp-1       # the same over NCCL, through sockets

Two emulated hosts, each pinned to one core (not with ``--device cuda``), its card limited by ``tbf`` (the bulk rate
verified before every row), bytes by the card's own counter. All arms of a row live in one process group and alternate
in blocks; a rate is a ratio between neighbours, with its 95 % interval.
"""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks import results
from benchmarks.emulated import Distance, Network, describe, open_network, parse_rate, run_workers
from benchmarks.ratios import paired_ratio
from benchmarks.train import is_there

COMPRESSORS = ("efsignsgd", "dgc:ratio=0.01", "topk:ratio=0.01")
DEADLINE_S = 2400.0

AUTO, ALONE = "espresso:auto", ("efsignsgd", "dgc:ratio=0.01", "int8", "fp16", "powersgd:rank=4")
OVER_ALONE = 1.05
"""With nothing chosen a step takes at most this many times the best of those alone."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Case:
    """A row of the matrix, and the bars its automatic arms must reach (None: for information).

    Attributes:
        rtt_ms: round trip between the hosts; 0 is one local network.
        over_bare: the longest time allowed, relative to one message of the same bytes after the last bucket.
        of_link: the least part of the link's rate that an uncompressed step (``--compressors none``) must use.
    """

    name: str
    model: str
    workers: int
    rate: str
    of_compute: float | None
    of_plain: float | None
    blocks: int
    steps: int
    rtt_ms: float = 0.0
    over_bare: float | None = None
    of_link: float | None = None


CASES = (
    Case("mlp-1", "mlp", 1, "1gbit", 0.75, None, 6, 6),
    Case("gpt-1", "gpt", 1, "1gbit", 0.85, None, 5, 4),
    Case("cnn-1", "cnn", 1, "1gbit", None, None, 6, 8),
    Case("mlp-2", "mlp", 2, "1gbit", 0.65, None, 5, 5),
    Case("gpt-2", "gpt", 2, "1gbit", 0.75, None, 4, 3),
    Case("cnn-2", "cnn", 2, "1gbit", None, None, 6, 8),
    Case("mlp-slow", "mlp", 1, "100mbit", None, 25.0, 3, 3),
    Case("cnn-slow", "cnn", 1, "100mbit", None, None, 6, 8),
    Case("gpt-slow", "gpt", 1, "100mbit", None, None, 3, 3),
    Case("resnet-1", "resnet", 1, "1gbit", None, None, 5, 6),
    Case("vit-1", "vit", 1, "1gbit", None, None, 5, 6),
    Case("lstm-1", "lstm", 1, "1gbit", None, None, 5, 4),
    *(
        Case(f"{model}-{rtt_ms}ms", model, 1, "200mbit", None, None, 4, 3, rtt_ms, 1.25, 0.75)
        for model in ("mlp", "gpt")
        for rtt_ms in (20, 50, 100)
    ),
)
"""``mlp-slow`` takes 3.7 s for a plain step, so it has few of them; rows in ms are of hosts far apart, where plain
steps take seconds: ``--beside plain`` adds them."""


@dataclass(frozen=True)
class Rate:
    """A rate relative to another arm's, with its interval: the inverse of a ratio of times."""

    value: float
    low: float
    high: float

    @classmethod
    def from_times(cls, ratio: dict[str, float]) -> "Rate":
        """From the trainer's ratio of times; an open interval stays open."""
        return cls(1 / ratio["value"], 1 / ratio["high"], 1 / ratio["low"] if ratio["low"] else float("inf"))


@dataclass(frozen=True)
class Row:
    """One arm of one case."""

    case: str
    arm: str
    step_ms: float
    mb_per_step_per_host: float
    of_compute: Rate
    of_plain: Rate | None
    over_bare: float | None
    of_link: float
    bar: str
    passes: bool | None
    steps_to_decide: int
    verdict: str


def rows_of(case: Case, arms: Sequence[dict[str, Any]]) -> list[Row]:
    """The trainer's arms against the case's bars; only automatic arms are judged."""
    rows = []
    for arm in arms:
        compute = Rate.from_times(arm["time_over_none"])
        plain = Rate.from_times(arm["time_over_plain"]) if "time_over_plain" in arm else None
        judged, bare = arm["name"].startswith("espresso:"), arm.get("time_over_bare", {}).get("value")
        is_raw = arm["name"] == "espresso:none"
        of_link = 8e9 * arm["mb_per_step_per_host"] / (arm["step_ms"] * parse_rate(case.rate))
        bars = [
            (f"{case.of_compute:.0%} of compute-only", compute.value >= case.of_compute)
            if case.of_compute is not None
            else None,
            (f"{case.of_plain:g}x plain", plain.value >= case.of_plain)
            if case.of_plain is not None and plain is not None
            else None,
            (f"{case.over_bare:g} of bare", bare <= case.over_bare)
            if case.over_bare is not None and bare is not None and not is_raw
            else None,
            (f"{case.of_link:.0%} of the link", of_link >= case.of_link)
            if case.of_link is not None and is_raw
            else None,
        ]
        held = [bar for bar in bars if bar is not None and judged]
        rows.append(
            Row(
                case.name,
                arm["name"],
                arm["step_ms"],
                arm["mb_per_step_per_host"],
                compute,
                plain,
                bare,
                of_link,
                ", ".join(text for text, _ in held),
                all(met for _, met in held) if held else None,
                arm["num_steps_to_decide"],
                arm["verdict"],
            )
        )
    return rows


def table_of(rows: Sequence[Row], title: str) -> Table:
    """For people."""
    table = Table(title=title, title_justify="left")
    for header in ("row", "arm", "step, ms", "MB", "of compute-only", "x plain", "over bare", "link", "bar", ""):
        table.add_column(header, justify="left" if header in ("row", "arm", "bar", "") else "right")
    for row in rows:
        verdict = {None: "", True: "pass", False: "[bold red]MISS[/]"}[row.passes]
        compute = f"{row.of_compute.value:.1%} ({row.of_compute.low:.1%} … {row.of_compute.high:.1%})"
        times = row.of_plain
        plain = "" if times is None else f"{times.value:.2f} ({times.low:.2f} … {times.high:.2f})"
        table.add_row(
            row.case, row.arm, f"{row.step_ms:.1f}", f"{row.mb_per_step_per_host:.2f}", compute, plain,
            f"{row.over_bare:.2f}" if row.over_bare else "", f"{row.of_link:.0%}", row.bar, verdict,
        )  # fmt: skip
    return table


@dataclass(frozen=True)
class OverBest:
    """The step with nothing chosen, over that of the best compressor alone, with its interval."""

    case: str
    best: str
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, case: Case, arms: Sequence[dict[str, Any]]) -> "OverBest":
        """From the trainer's arms, block by block."""
        mine = next(arm for arm in arms if arm["name"] == AUTO)
        alone = [arm for arm in arms if arm["name"].startswith("espresso:") and arm is not mine]
        best = min(alone, key=lambda arm: float(arm["step_ms"]))
        ratio = paired_ratio(mine["block_step_ms"], best["block_step_ms"])
        return cls(case.name, best["name"].removeprefix("espresso:"), ratio.value, ratio.low, ratio.high)

    def __str__(self) -> str:
        bar = "pass" if self.value <= OVER_ALONE else "MISS"
        interval = f"{self.low:.3f} … {self.high:.3f}"
        return f"{self.case}: {self.value:.3f} ({interval}) of {self.best} alone; at most {OVER_ALONE}: {bar}"


def train(
    network: Network,
    case: Case,
    arms: Sequence[str],
    seed: int,
    out: Path,
    artifacts_dir: Path | None,
    *,
    named_at_once: bool = False,
    device: str = "cpu",
    backend: str = "gloo",
) -> dict[str, Any]:
    """Run one case; the trainer's result.

    Args:
        named_at_once: arms that name their compressor decide at once. When they do makes no difference to their
            steps, as it does to nothing chosen, which may owe only so much: that decides when it does by default.
    """
    out.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "benchmarks.train", "--model", case.model, "--arms", ",".join(arms)]
    argv += ["--blocks", str(case.blocks), "--steps-per-block", str(case.steps), "--seed", str(seed)]
    # The first collectives of a slow network wait for seconds of gradients.
    argv += ["--json", str(out), "--timeout-s", "300", "--device", device, "--backend", backend]
    if case.rtt_ms:  # a plain step takes seconds far apart: as few as may be
        argv += ["--decide-by", "0"]
    argv += ["--decide-named-by", "1"] if named_at_once else []
    argv += [] if artifacts_dir is None else ["--artifacts-dir", str(artifacts_dir.resolve() / case.name)]
    run_workers(
        network,
        argv,
        workers_per_host=case.workers,
        pin=device == "cpu",  # drivers of GPUs have threads of their own
        deadline_s=DEADLINE_S,
    )
    loaded: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return loaded


@app.command()
def main(
    rows: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(c.name for c in CASES)}.")] = "",
    compressors: Annotated[
        str, typer.Option(help="Separated by semicolons, since a spec may hold a comma.")
    ] = ";".join(COMPRESSORS),
    beside: Annotated[
        str, typer.Option(help="More arms, comma-separated, such as powersgd:rank=1 (PyTorch's own hook).")
    ] = "",
    quick: Annotated[bool, typer.Option(help="Half the rounds, and efsignsgd only.")] = False,
    nothing_chosen: Annotated[
        bool, typer.Option(help=f'compressor="auto" against {", ".join(ALONE)} alone, which decide at once.')
    ] = False,
    seed: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    backend: Annotated[str, typer.Option(help="gloo, or nccl for what is on the GPU.")] = "gloo",
    artifacts_dir: Annotated[Path | None, typer.Option(help="For job, strategy and lanes of automatic arms.")] = None,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "speed.json",
) -> None:
    """Measure step rates against compute-only and plain DDP, next to their bars."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    names = [name for name in rows.split(",") if name]
    unknown = sorted(set(names) - {case.name for case in CASES})
    if unknown:
        raise typer.BadParameter(f"no row is called {unknown[0]!r}; there are {', '.join(c.name for c in CASES)}")
    chosen = [case for case in CASES if not names or case.name in names]
    specs = ["efsignsgd"] if quick else compressors.split(";")
    more = [*filter(None, beside.split(",")), *(f"espresso:{spec}" for spec in specs)]
    near, far = ["none", "plain", "fp16", *more], ["none", *(f"bare:{spec}" for spec in specs), *more]
    if nothing_chosen:
        near = far = ["none", AUTO, *(f"espresso:{spec}" for spec in ALONE)]
    if not is_there(device, backend):
        return
    console = results.console(150)
    measured: list[Row] = []
    over: list[OverBest] = []
    networks: dict[str, str] = {}
    for case in chosen:
        if quick:
            case = Case(**{**asdict(case), "blocks": max(case.blocks // 2, 2)})
        distance = Distance(case.rtt_ms) if case.rtt_ms else None
        with open_network(2, case.rate, distance=distance) as network:
            networks[case.name] = describe(network)
            own, raw = far if case.rtt_ms else near, json_path.with_suffix(".raw")
            result = train(
                network, case, own, seed, raw, artifacts_dir,
                named_at_once=nothing_chosen, device=device, backend=backend,
            )  # fmt: skip
        found = rows_of(case, result["arms"])
        measured += found
        console.print(table_of(found, f"{case.name}: 2 hosts x {case.workers}, {networks[case.name]}"))
        if nothing_chosen:
            over.append(OverBest.of(case, result["arms"]))
            console.print(f"  {over[-1]}")
        for row in found:
            if row.verdict:
                console.print(f"  {row.arm} decided after {row.steps_to_decide} steps: {row.verdict}")
        # After every case: what was measured so far survives an interruption.
        config = {
            "device": result["device"],
            "backend": backend,
            "arms": near,
            "far": far,
            "networks": networks,
            "quick": quick,
            "cases": [asdict(c) for c in chosen],
        }
        results.write(json_path, results.record(config, seed, [*map(asdict, measured), *map(asdict, over)]))
    if any(row.passes is False for row in measured) or any(one.value > OVER_ALONE for one in over):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
