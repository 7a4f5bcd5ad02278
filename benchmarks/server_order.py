"""Whether an order by need shortens what goes through a parameter server: total orders of one plan, in turn.

    python -m benchmarks.server_order

All buckets are there at once, so that as many keys wait as ever can; half of the tensors go raw, half two-way as
``topk``. Each order has a state of its own at the servers. What is timed ends with the last bucket, as DDP's step does:

    first come     the list schedule, as in a job
    needed first   the last bucket, whose layers the next forward pass begins with, before the one before it, and so on
    decoded first  what has more to do after its pull before what has less: here all that is compressed
"""

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks import results
from benchmarks.emulated import describe, open_network, run_workers
from benchmarks.exchange import Exchange, make_buckets, strategy_of
from benchmarks.ratios import paired_ratio
from benchmarks.train import process_group
from espresso.comm.execute.executor import Assignment
from espresso.comm.parameter_server import connected
from espresso.live.codecs import HostCodecs
from espresso.strategies import Choice, CompressorSpec, Plan, parse_option, plan
from espresso.strategies.list_scheduling import list_order
from espresso.strategies.tree import two_way_option

FIRST_COME, NEEDED_FIRST, DECODED_FIRST = "first come", "needed first", "decoded first"
RAW = Choice(parse_option("flat.push > sum@server > flat.pull"))
SPEC = CompressorSpec.parse("topk:ratio=0.01,raw_below=1")
BUCKETS, ELEMENTS, PARTITION_BYTES = 4, 1 << 19, 1 << 18
JOBS = ((2, 1), (3, 2))
"""Workers, servers."""

app = typer.Typer(pretty_exceptions_enable=False)


def orders_of(laid: Plan, durations: list[float]) -> dict[str, tuple[int, ...]]:
    """The list schedule of buckets that are there at once, and it with some groups ahead of the others.

    Args:
        durations: of every task, in microseconds.
    """
    first = list_order(laid, [0.0] * len(laid.buckets), durations)
    group = [laid.groups[laid.partitions[task.partition].group] for task in laid.tasks]
    return {
        FIRST_COME: first,
        NEEDED_FIRST: tuple(sorted(first, key=lambda task: -group[task].bucket)),
        DECODED_FIRST: tuple(sorted(first, key=lambda task: not group[task].choice.option.is_compressed)),
    }


@app.command()
def worker(blocks: int, rounds: int, out: Path) -> None:
    """One worker of the benchmark, inside espresso.launch."""
    torch.set_num_threads(1)
    buckets = make_buckets(*({f"raw {i}": ELEMENTS, f"coded {i}": ELEMENTS} for i in range(BUCKETS)))
    gradients = [torch.randn(bucket.numel) for bucket in buckets]
    codecs = HostCodecs(1)
    client = connected()
    assert client is not None
    with process_group(120.0):
        exchanges = {
            name: Exchange(1, client=client, codecs=codecs, timeout_s=120.0)
            for name in (FIRST_COME, NEEDED_FIRST, DECODED_FIRST)
        }
        one = exchanges[FIRST_COME]
        one.warm_up([str(SPEC)])
        cluster = replace(one.groups.cluster, num_servers=client.num_servers)
        for exchange in exchanges.values():
            exchange.groups.cluster = cluster
            exchange.renew()
        coded = Choice(two_way_option(cluster), SPEC)
        choices = {slot.tensor: coded if slot.tensor.startswith("coded") else RAW for b in buckets for slot in b.slots}
        strategy = strategy_of(buckets, cluster, choices, partition_bytes=PARTITION_BYTES)

        def step_ms(name: str, assignment: Assignment) -> float:
            one.groups.barrier()
            start = time.perf_counter()
            exchanges[name].step(assignment, buckets, gradients)
            return 1e3 * float(max(one.groups.all_objects(time.perf_counter() - start)))

        for _ in range(2):
            step_ms(FIRST_COME, Assignment(strategy, record=True))
        laid = plan(strategy, buckets)
        durations = [0.0] * len(laid.tasks)
        for interval in one.record.intervals:
            durations[interval.task] = (interval.end_ns - interval.start_ns) / 1e3
        orders = one.groups.from_rank_0(orders_of(laid, durations))
        planned = {name: Assignment(strategy, order, buckets) for name, order in orders.items()}
        times: dict[str, list[float]] = {name: [] for name in planned}
        for block in range(blocks):
            for turn in range(len(planned)):
                name = [*planned][(block + turn) % len(planned)]
                found = [step_ms(name, planned[name]) for _ in range(1 + rounds)]
                times[name].append(statistics.median(found[1:]))  # the first finds another state's data in the caches
        if one.rank == 0:
            out.write_text(json.dumps(times))
        for exchange in exchanges.values():
            exchange.close()


@app.command()
def emulated(
    rate: Annotated[str, typer.Option(help="Of every host's card.")] = "200mbit",
    blocks: Annotated[int, typer.Option()] = 15,
    rounds: Annotated[int, typer.Option()] = 3,
    engines: Annotated[int, typer.Option()] = 1,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "server_order.json",
) -> None:
    """Every job on hosts of its own."""
    rows: list[dict[str, Any]] = []
    networks = {}
    table = Table(title="total orders through parameter servers", title_justify="left")
    for header in ("workers", "servers", "order", "exchange, ms", "over first come"):
        table.add_column(header, justify="right")
    for workers, servers in JOBS:
        part = json_path.with_suffix(".raw")
        with open_network(workers + servers, rate) as network:
            networks[f"{workers} workers, {servers} servers"] = describe(network)
            argv = [sys.executable, "-m", "espresso.launch", "--servers", str(servers), "--engines", str(engines)]
            argv += ["-m", "benchmarks.server_order", "worker", str(blocks), str(rounds), str(part)]
            run_workers(network, argv, pin=True, deadline_s=400.0)
        times = json.loads(part.read_text())
        part.unlink()
        for name, each in times.items():
            ratio = paired_ratio(each, times[FIRST_COME])
            ms = statistics.median(each)
            rows.append({"workers": workers, "servers": servers, "order": name, "ms": ms, "ratio": asdict(ratio)})
            words = f"{ratio.value:.3f} ({ratio.low:.3f} … {ratio.high:.3f})"
            table.add_row(str(workers), str(servers), name, f"{ms:.1f}", words)
    results.console(100).print(table)
    config = {"networks": networks, "blocks": blocks, "rounds": rounds, "engines": engines, "spec": str(SPEC),
              "buckets": BUCKETS, "elements": ELEMENTS, "partition_bytes": PARTITION_BYTES}  # fmt: skip
    results.write(json_path, results.record(config, 0, rows))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.argv.insert(1, "emulated")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    app()
