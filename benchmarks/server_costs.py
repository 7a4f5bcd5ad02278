"""When a parameter server pays, by the simulator: tables for docs/parameter_server.md.

    python -m benchmarks.server_costs

Then servers of both kinds in one job, their load shared out by what they bear and by BytePS's rule, beside the better
kind alone; also where one in four of them has half a processor and, on machines of their own, half a card. The bar:
what they bear is never more than 3 % slower than the better kind alone.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks import results
from espresso.model.job import Job
from espresso.model.presets import job_from_trace
from espresso.model.timeline import first_come
from espresso.strategies import NONE, PLAIN, Choice, CompressorSpec, Option, Sharing, Strategy, parse_option, plan
from espresso.strategies.tree import two_way_option

SPEC = CompressorSpec("efsignsgd")
RAW = parse_option("intra.reduce_scatter > inter.push > sum@server > inter.pull > intra.allgather")
HIERARCHICAL = parse_option("intra.reduce_scatter > inter.allreduce > intra.allgather")
NODES, RANKS_PER_NODE = 8, 8
PARTITION_BYTES = 4 << 20
DEDICATED, SLOW = (1, 4, 8), 0.5
WORST = 1.03
"""Servers of both kinds over the better kind alone, at most."""

app = typer.Typer(pretty_exceptions_enable=False)


def predicted_ms(job: Job, option: Option, spec: CompressorSpec = NONE) -> float:
    """One iteration with the same leaf for every tensor."""
    choice = Choice(option, spec)
    size = 0 if choice == PLAIN else PARTITION_BYTES
    strategy = Strategy.uniform(job.tensors, job.cluster, choice, partition_bytes=size)
    laid = plan(strategy, job.laid_out, mode=job.mode, host_copies=job.host_copies)
    return first_come(laid, job).iteration_us / 1e3


def rows_of(trace: str, cluster: str) -> list[dict[str, Any]]:
    """Without servers, then with some."""
    job = job_from_trace(trace, NODES, RANKS_PER_NODE, cluster)
    base: dict[str, Any] = {"model": trace, "cluster": cluster, "backward_ms": job.backward_us / 1e3}
    plain = min(predicted_ms(job, PLAIN.option), predicted_ms(job, HIERARCHICAL))
    rows = [{**base, "servers": 0, "colocated": False, "raw_ms": plain, "two_way_ms": None}]
    for servers, each in ((1, 0), (2, 0), (4, 0), (8, 0), (0, 1)):
        job = job_from_trace(trace, NODES, RANKS_PER_NODE, cluster, servers=servers, servers_per_node=each)
        raw, two_way = _both_ms(job)
        kind = {"servers": job.cluster.num_servers, "colocated": job.cluster.colocated}
        rows.append({**base, **kind, "raw_ms": raw, "two_way_ms": two_way})
    return rows


def _both_ms(job: Job) -> tuple[float, float]:
    return predicted_ms(job, RAW), predicted_ms(job, two_way_option(job.cluster), SPEC)


def mixed_rows(trace: str, cluster: str) -> list[dict[str, Any]]:
    """Servers of both kinds beside the better kind alone, all alike and with slow ones among them."""
    rows = []
    for slow in (1.0, SLOW):
        for beside in DEDICATED:
            found: dict[str, tuple[float, float]] = {}
            for name, servers, each in (("dedicated", beside, 0), ("colocated", 0, 1), ("both", beside, 1)):
                job = job_from_trace(trace, NODES, RANKS_PER_NODE, cluster, servers=servers, servers_per_node=each)
                for sharing in Sharing:
                    found[f"{name}, {sharing.value}"] = _both_ms(_shared(job, slow, sharing))
            for place, kind in enumerate(("raw", f"two-way {SPEC}")):
                times = {name: both[place] for name, both in found.items()}
                alone = min(times[f"{name}, {Sharing.MEASURED.value}"] for name in ("dedicated", "colocated"))
                rows.append({
                    "model": trace, "cluster": cluster, "dedicated": beside, "slow": slow, "kind": kind,
                    "better_kind_ms": alone, "both_ms": times[f"both, {Sharing.MEASURED.value}"],
                    "both_by_rule_ms": times[f"both, {Sharing.SIZES.value}"],
                })  # fmt: skip
    return rows


def _shared(job: Job, slow: float, sharing: Sharing) -> Job:
    """The job with every fourth server slow, by one way to share."""
    servers = job.costs.servers
    assert servers is not None
    beside = job.cluster.num_colocated  # a slow card there would slow workers down, however the load is shared
    each = tuple(
        ((1.0 if server < beside else slow), slow) if server % 4 == 0 else (1.0, 1.0)
        for server in range(job.cluster.num_servers)
    )
    costs = replace(servers, speeds=each if slow < 1.0 else (), sharing=sharing)
    return replace(job, costs=replace(job.costs, servers=costs))


@app.command()
def main(
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "server_costs.json",
) -> None:
    """Predict and print."""
    rows = [r for model in ("vgg16", "bert_base") for c in ("nvlink-100g", "pcie-25g") for r in rows_of(model, c)]
    table = Table(title=f"{NODES} nodes x {RANKS_PER_NODE} ranks, predicted ms an iteration", title_justify="left")
    for header in ("model", "cluster", "backward", "servers", "raw", f"two-way {SPEC}"):
        table.add_column(header, justify="right")
    for row in rows:
        where = "none (best all-reduce)" if not row["servers"] else str(row["servers"])
        two_way = "" if row["two_way_ms"] is None else f"{row['two_way_ms']:.1f}"
        table.add_row(
            row["model"], row["cluster"], f"{row['backward_ms']:.1f}",
            where + (" colocated" if row["colocated"] else ""), f"{row['raw_ms']:.1f}", two_way,
        )  # fmt: skip
    results.console(110).print(table)
    mixed = [r for model in ("vgg16", "bert_base") for c in ("nvlink-100g", "pcie-25g") for r in mixed_rows(model, c)]
    table = Table(title=f"both kinds: {NODES} colocated servers and some of their own, ms", title_justify="left")
    for header in ("model", "cluster", "own", "slow ones", "", "better kind alone", "both", "both, BytePS's rule"):
        table.add_column(header, justify="right")
    for row in mixed:
        figures = (f"{row[name]:.1f}" for name in ("better_kind_ms", "both_ms", "both_by_rule_ms"))
        slow = "" if row["slow"] == 1.0 else f"x {row['slow']}"
        table.add_row(row["model"], row["cluster"], str(row["dedicated"]), slow, row["kind"], *figures)
    results.console(130).print(table)
    body = results.record({"partition_bytes": PARTITION_BYTES, "worst": WORST}, 0, rows)
    results.write(json_path, body | {"mixed": mixed})
    if any(row["both_ms"] > WORST * row["better_kind_ms"] for row in mixed):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
