"""Training steps through a parameter server, against the uncompressed server and plain DDP.

    python -m benchmarks.server_speed

Two worker hosts and one server host (some cases: more) with one network card each (namespaces, ``tbf``), one
core pinned to each host (hosts share cores where there are fewer). All arms live in one job and alternate in blocks.
The bars: two-way 1-bit at least 2.5 times the step rate of the uncompressed server; where the search takes servers,
no slower than plain; servers of both kinds at most 3 % slower than the better kind alone. Kinds are jobs of their own,
so these are run in turn:

    python -m benchmarks.server_speed --cases own,beside,both,both-slow,both-slow-rule --turns 2
    python -m benchmarks.server_speed --cases own-mlp,beside-mlp,both-mlp,both-slow-mlp --turns 2
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks import results
from benchmarks.emulated import describe, open_network, run_workers
from benchmarks.ratios import paired_ratio
from espresso.strategies import Sharing

LEAST = 2.5
WORST = 1.03
"""Servers of both kinds over the better kind alone, at most."""
RAW, TWO_WAY = "servers:raw", "servers:efsignsgd"
ARMS = ("plain", RAW, TWO_WAY, "espresso:efsignsgd")

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Case:
    """A model on a network of a rate; ``server_rate`` is that of the servers' cards if they have another one.

    With ``servers_per_node`` every host has two processes: a worker and a server, or two servers, which share a card.
    """

    name: str
    model: str
    rate: str
    blocks: int
    steps: int
    workers: int = 2
    servers: int = 1
    arms: tuple[str, ...] = ARMS
    server_rate: str = ""
    servers_per_node: int = 0
    sharing: str = Sharing.MEASURED.value

    @property
    def server_hosts(self) -> int:
        return self.servers // (1 + self.servers_per_node)

    @property
    def has_both_kinds(self) -> bool:
        return self.servers > 0 and self.servers_per_node > 0

    def stands_beside(self, both: "Case") -> bool:
        """Whether its one kind of servers stood beside the same workers as those of ``both`` kinds."""
        workers, others = ((case.model, case.rate, case.workers) for case in (self, both))
        return workers == others and both.has_both_kinds and not self.has_both_kinds


BOTH_ARMS = ("plain", RAW, TWO_WAY)
CASES = (
    Case("mlp-1g", "mlp", "1gbit", 4, 3),
    Case("cnn-1g", "cnn", "1gbit", 5, 5),
    Case("cnn-200m", "cnn", "200mbit", 4, 3),
    # More workers: payloads for everybody cost more than over two.
    Case("cnn-4w", "cnn", "100mbit", 4, 3, 4, 2, ("plain", TWO_WAY, "espresso:efsignsgd")),
    # As many servers as workers and a mild compressor: less on every card than any exchange without servers.
    Case("cnn-4w4s", "cnn", "200mbit", 3, 3, 4, 4, ("plain", "servers:int8", "espresso:int8")),
    # Thin cards at the workers, a thick one at the server: a payload leaves each worker once, not one and a half times.
    Case("cnn-thick", "cnn", "200mbit", 3, 2, 4, 1, ("plain", "servers:fp16", "espresso:fp16"), "1gbit"),
    # The same with one bit an element, on cards so thin that the payloads of the others still count.
    Case("cnn-thin", "cnn", "50mbit", 3, 2, 4, 1, ("plain", TWO_WAY, "espresso:efsignsgd"), "1gbit"),
    # A server of its own, servers beside the workers, and both; then both with half a card for the one of its own.
    Case("own", "cnn", "100mbit", 2, 2, 3, 1, BOTH_ARMS),
    Case("beside", "cnn", "100mbit", 2, 2, 3, 0, BOTH_ARMS, "", 1),
    Case("both", "cnn", "100mbit", 2, 2, 3, 2, BOTH_ARMS, "", 1),
    Case("both-slow", "cnn", "100mbit", 2, 2, 3, 2, BOTH_ARMS, "50mbit", 1),
    Case("both-slow-rule", "cnn", "100mbit", 2, 2, 3, 2, BOTH_ARMS, "50mbit", 1, Sharing.SIZES.value),
    # The same with keys enough to be shared out: of 4 MB the CNN has three, the MLP ten.
    Case("own-mlp", "mlp", "400mbit", 2, 2, 3, 1, BOTH_ARMS),
    Case("beside-mlp", "mlp", "400mbit", 2, 2, 3, 0, BOTH_ARMS, "", 1),
    Case("both-mlp", "mlp", "400mbit", 2, 2, 3, 2, BOTH_ARMS, "", 1),
    Case("both-slow-mlp", "mlp", "400mbit", 2, 2, 3, 2, BOTH_ARMS, "200mbit", 1),
)


def run_case(case: Case, seed: int, out: Path, deadline_s: float) -> tuple[str, list[dict[str, Any]]]:
    """(the network in words, the trainer's rows)."""
    servers = range(case.workers, case.workers + case.server_hosts)
    rates = dict.fromkeys(servers, case.server_rate) if case.server_rate else {}
    with open_network(case.workers + case.server_hosts, case.rate, rates=rates) as network:
        words = describe(network)
        argv = [sys.executable, "-m", "espresso.launch", "--servers", str(case.servers), "--engines", "1"]
        argv += ["--servers-per-node", str(case.servers_per_node), "--sharing", case.sharing]
        argv += ["-m", "benchmarks.train", "--model", case.model, "--arms", ",".join(case.arms)]
        argv += ["--blocks", str(case.blocks), "--steps-per-block", str(case.steps), "--seed", str(seed)]
        argv += ["--json", str(out), "--timeout-s", "300"]
        each = 1 + case.servers_per_node
        run_workers(network, argv, workers_per_host=each, pin=True, deadline_s=deadline_s)
    body = json.loads(out.read_text())
    out.unlink()
    return words, body["arms"]


def joined(turns: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The trainer's rows of a case that had several turns: as of one with the blocks of all of them."""
    return [
        {
            **each[-1],
            "step_ms": statistics.median(arm["step_ms"] for arm in each),
            "block_step_ms": [ms for arm in each for ms in arm["block_step_ms"]],
            "replicas_equal": all(arm["replicas_equal"] for arm in each),
        }
        for each in zip(*turns, strict=True)
    ]


def rows_of(case: Case, arms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rates over the uncompressed server and over plain, and what is judged of them."""
    times = {arm["name"]: arm["block_step_ms"] for arm in arms}
    rows = []
    for arm in arms:
        over_raw = paired_ratio(times[RAW], arm["block_step_ms"]) if RAW in times else None
        over_plain = paired_ratio(times["plain"], arm["block_step_ms"])
        through = int(arm["metrics"].get("espresso/tensors_through_servers", 0))
        row = {
            "case": case.name,
            "arm": arm["name"],
            "step_ms": arm["step_ms"],
            "block_step_ms": arm["block_step_ms"],
            "rate_over_raw_server": None if over_raw is None else asdict(over_raw),
            "rate_over_plain": asdict(over_plain),
            "tensors_through_servers": through,
            "verdict": arm["verdict"],
            "replicas_equal": arm["replicas_equal"],
            "cpu": results.hardware()["cpu"],
            "date": time.strftime("%Y-%m-%d"),
            "passes": None,
        }
        if arm["name"] == TWO_WAY and over_raw is not None:
            row["passes"] = over_raw.value >= LEAST
        elif arm["name"].startswith("espresso:") and through:
            row["passes"] = over_plain.value >= 1.0
        rows.append(row)
    return rows


def judge_both(rows: list[dict[str, Any]]) -> None:
    """Compare servers of both kinds with the better kind alone, block by block, where both had the same turns."""
    named = {case.name: case for case in CASES}
    for row in rows:
        case = named[row["case"]]
        alone = [
            other["block_step_ms"]
            for other in rows
            if other["arm"] == row["arm"] and named[other["case"]].stands_beside(case)
        ]
        if len(alone) == 2 and row["arm"] != "plain":
            better = min(alone, key=statistics.median)  # of a turn that is not over it may have blocks more
            ratio = paired_ratio(row["block_step_ms"], better[: len(row["block_step_ms"])])
            row["time_over_better_kind"] = asdict(ratio)
            if case.sharing == Sharing.MEASURED.value:
                row["passes"] = ratio.value <= WORST and row["passes"] is not False


def table_of(rows: list[dict[str, Any]]) -> Table:
    """For people."""
    table = Table(title="through a parameter server", title_justify="left")
    for header in ("case", "arm", "step, ms", "x raw server", "x plain", "time, x better kind", "via servers", "bar"):
        table.add_column(header, justify="right")
    for row in rows:
        ratios = (row["rate_over_raw_server"], row["rate_over_plain"], row.get("time_over_better_kind"))
        table.add_row(
            row["case"], row["arm"], f"{row['step_ms']:.1f}",
            *("" if r is None else f"{r['value']:.2f} ({r['low']:.2f} … {r['high']:.2f})" for r in ratios),
            str(row["tensors_through_servers"]), {None: "", True: "pass", False: "MISS"}[row["passes"]],
        )  # fmt: skip
    return table


@app.command()
def main(
    cases: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(c.name for c in CASES)}.")] = "",
    turns: Annotated[int, typer.Option(min=1, help="Of each case, one after the other.")] = 1,
    seed: Annotated[int, typer.Option()] = 0,
    deadline_s: Annotated[float, typer.Option()] = 400.0,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "server_speed.json",
) -> None:
    """Measure the arms on every case."""
    wanted = [name for name in cases.split(",") if name] or [case.name for case in CASES]
    unknown = sorted(set(wanted) - {case.name for case in CASES})
    if unknown:
        raise typer.BadParameter(f"no case is called {unknown[0]!r}")
    kept: list[dict[str, Any]] = []
    networks = {}
    if json_path.exists():  # cases measured before stay; each row says on what
        before = json.loads(json_path.read_text())
        kept = [row for row in before["rows"] if row["case"] not in wanted]
        networks = before["config"]["networks"]
    measured: dict[Case, list[list[dict[str, Any]]]] = {}
    for case in [case for case in CASES if case.name in wanted] * turns:
        networks[case.name], arms = run_case(case, seed, json_path.with_suffix(".raw"), deadline_s)
        measured.setdefault(case, []).append(arms)
        new = [row for one, runs in measured.items() for row in rows_of(one, joined(runs))]
        judge_both(new)
        rows = kept + new
        config = {"networks": networks, "cases": [asdict(c) for c in CASES], "least": LEAST, "worst": WORST}
        results.write(json_path, results.record(config, seed, rows))
    console = results.console(130)
    console.print(table_of(rows))
    for row in rows:
        if row["verdict"]:
            console.print(f"{row['case']} {row['arm']}: {row['verdict']}")
    if any(row["passes"] is False for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
