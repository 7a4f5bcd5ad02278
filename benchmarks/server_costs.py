"""When a parameter server pays, by the simulator: a table for docs/parameter_server.md.

python -m benchmarks.server_costs
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks import results
from espresso.model.job import Job
from espresso.model.presets import job_from_trace
from espresso.model.timeline import list_schedule, simulate
from espresso.strategies import NONE, PLAIN, Choice, CompressorSpec, Option, Strategy, parse_option, plan
from espresso.strategies.tree import two_way_option

SPEC = CompressorSpec("efsignsgd")
RAW = parse_option("intra.reduce_scatter > inter.push > sum@server > inter.pull > intra.allgather")
HIERARCHICAL = parse_option("intra.reduce_scatter > inter.allreduce > intra.allgather")
NODES, RANKS_PER_NODE = 8, 8
PARTITION_BYTES = 4 << 20

app = typer.Typer(pretty_exceptions_enable=False)


def predicted_ms(job: Job, option: Option, spec: CompressorSpec = NONE) -> float:
    """One iteration with the same leaf for every tensor."""
    choice = Choice(option, spec)
    size = 0 if choice == PLAIN else PARTITION_BYTES
    strategy = Strategy.uniform(job.tensors, job.cluster, choice, partition_bytes=size)
    laid = plan(strategy, job.laid_out, mode=job.mode, host_copies=job.host_copies)
    return simulate(list_schedule(laid, job), job).iteration_us / 1e3


def rows_of(trace: str, cluster: str) -> list[dict[str, Any]]:
    """Without servers, then with some."""
    job = job_from_trace(trace, NODES, RANKS_PER_NODE, cluster)
    base = {"model": trace, "cluster": cluster, "backward_ms": job.backward_us / 1e3}
    plain = min(predicted_ms(job, PLAIN.option), predicted_ms(job, HIERARCHICAL))
    rows = [{**base, "servers": 0, "colocated": False, "raw_ms": plain, "two_way_ms": None}]
    for servers, colocated in ((1, False), (2, False), (4, False), (8, False), (8, True)):
        job = job_from_trace(trace, NODES, RANKS_PER_NODE, cluster, servers=servers, colocated=colocated)
        raw, two_way = predicted_ms(job, RAW), predicted_ms(job, two_way_option(job.cluster), SPEC)
        rows.append({**base, "servers": servers, "colocated": colocated, "raw_ms": raw, "two_way_ms": two_way})
    return rows


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
    results.write(json_path, results.record({"partition_bytes": PARTITION_BYTES}, 0, rows))


if __name__ == "__main__":
    app()
