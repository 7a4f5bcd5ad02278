"""How much a parameter server carries: gradients through it against its network card's limit.

    python -m benchmarks.server_throughput                  # emulated hosts, 4 workers, 1 and 2 servers, 1 Gb/s
    python -m benchmarks.server_throughput --rate 200mbit --rtt-ms 50 --workers 1 --shapes 1x4,1x4x4   # far apart
    mpirun -np 6 python -m espresso.launch --servers 2 -m benchmarks.server_throughput worker --rate-bps 0

Workers push prepared messages of 4 MB partitions and pull the answers, as fast as both go: nothing else runs. What
counts is what the servers send, each limited to the network's rate: a ratio of 1 would be a card that never rests.
"""

import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.emulated import Distance, measure_bulk_rate, open_network, run_workers
from espresso.comm.groups import Groups
from espresso.comm.keep.store import ResidualStore
from espresso.comm.parameter_server import Line, Link, connected
from espresso.comm.parameter_server.wire import Key, Stretch
from espresso.compressors import create
from espresso.compressors.base import Encoding, Segment
from espresso.live.codecs import HostCodecs
from espresso.strategies import NONE, CompressorSpec, Device

PARTITION_ELEMENTS = 1 << 20
LEAST = 0.70
"""Of the card's limit: the bar for 4 workers and 2 servers, raw and int8."""

app = typer.Typer(pretty_exceptions_enable=False)


def make_keys(coding: str, count: int, workers: tuple[int, ...]) -> list[Key]:
    """``count`` partitions of 4 MB, raw or two-way through a compressor."""
    raw_bytes = 4 * PARTITION_ELEMENTS
    spec = NONE if coding == "raw" else CompressorSpec.parse(coding)
    size = raw_bytes
    if coding != "raw":
        size = create(spec).layout([Segment("part 0", 0, PARTITION_ELEMENTS)], np.float32).num_bytes
    coded = coding != "raw"
    keeps = coded and create(spec).traits.error_feedback
    return [
        Key(
            number=-1, server=-1, workers=workers, stretches=(Stretch(f"part {i}", 0, PARTITION_ELEMENTS),),
            dtype="float32", compressor=spec, coded=coded, two_way=coded, keeps_residual=keeps,
            is_plain=not coded, up_bytes=size, down_bytes=size, site=0, seed=0,
        )
        for i in range(count)
    ]  # fmt: skip


class Load:
    """All keys of one coding, pushed and pulled without a pause: a key's next push follows its pull."""

    def __init__(self, link: Link, keys: list[Key], codecs: HostCodecs, rank: int) -> None:
        self._link, self._lines = link, [Line(key) for key in keys]
        self._numels = {stretch.tensor: stretch.numel for key in keys for stretch in key.stretches}
        link.install(keys, dict(enumerate(self._lines)), self._numels, None, "throughput")
        self._data = [_message(key, codecs, rank) for key in keys]
        self._answers = [np.zeros(key.down_bytes, np.uint8) for key in keys]
        self._free = [threading.Semaphore(1) for _ in keys]
        self._step = 0

    def run(self, rounds: int) -> None:
        """So many rounds of every key."""
        pusher = threading.Thread(target=self._push, args=(rounds,))
        pusher.start()
        for _ in range(rounds):
            for index, line in enumerate(self._lines):
                while line.answer is None:
                    time.sleep(1e-4)
                self._link.pull(line)
                self._free[index].release()
        pusher.join()

    def close(self) -> None:
        """Have the servers forget the keys."""
        self._link.install([], {}, self._numels, None, "throughput")

    def _push(self, rounds: int) -> None:
        for _ in range(rounds):
            for index, line in enumerate(self._lines):
                self._free[index].acquire()
                self._link.push(line, self._data[index], self._answers[index], self._step, 1.0)
            self._step += 1


def _message(key: Key, codecs: HostCodecs, rank: int) -> Any:
    numbers = np.random.default_rng(rank).standard_normal(key.numel).astype(np.float32)
    if not key.coded:
        return numbers.view(np.uint8)
    codec = codecs(key.compressor, Device.TRAINING)
    layout = codec.compressor.layout([Segment(s.tensor, s.start, s.numel) for s in key.stretches])
    payload = np.zeros(layout.num_bytes, np.uint8)
    codec.encode(Encoding(layout, numbers, np.zeros(1, np.int64)), payload)
    return payload


@app.command()
def worker(
    codings: Annotated[str, typer.Option(help="raw and compressors, separated by semicolons.")] = "raw;int8",
    partitions: Annotated[int, typer.Option()] = 8,
    rounds: Annotated[int, typer.Option()] = 5,
    repeats: Annotated[int, typer.Option()] = 3,
    rate_bps: Annotated[float, typer.Option(help="A server's card; 0: unlimited.")] = 1e9,
    connections: Annotated[int, typer.Option(help="As espresso.launch was told, for the table.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """One worker of the benchmark, inside espresso.launch."""
    client = connected()
    if client is None:
        raise typer.BadParameter("start it through python -m espresso.launch --servers N")
    dist.init_process_group("gloo")
    groups = Groups(ranks_per_node=1, timeout_s=120.0)
    codecs = HostCodecs(1)
    rows: list[dict[str, Any]] = []
    for coding in codings.split(";"):
        link = Link(client, groups.ranks, ResidualStore(), 120.0, groups.from_rank_0(client.new_namespace()))
        if coding != "raw":
            link.prepare([CompressorSpec.parse(coding)], ["float32"])
        groups.barrier(patient=True)
        keys = make_keys(coding, partitions, groups.ranks)
        load = Load(link, keys, codecs, groups.rank)
        load.run(1)
        times = []
        for _ in range(repeats):
            groups.barrier()
            start = time.perf_counter()
            load.run(rounds)
            groups.barrier()
            times.append((time.perf_counter() - start) / rounds)
        seconds = median(times)
        sent = groups.num_ranks * sum(key.down_bytes for key in keys) / client.num_servers
        rows.append(
            {
                "coding": coding,
                "workers": groups.num_ranks,
                "servers": client.num_servers,
                "engines": client.engines,
                "connections": connections,
                "round_ms": 1e3 * seconds,
                "server_mb_per_s": sent / seconds / 1e6,
                "of_card": 8 * sent / seconds / rate_bps if rate_bps else None,
                "gradient_gb_per_s": 4e-9 * PARTITION_ELEMENTS * partitions / seconds,
            }
        )
        load.close()
    if groups.rank == 0:
        text = json.dumps(rows, indent=1)
        if json_path is None:
            Console(highlight=False, width=120).print(table_of(rows))
        else:
            json_path.write_text(text)
    groups.close()
    codecs.close()
    dist.destroy_process_group()


def passes(row: dict[str, Any]) -> bool | None:
    """None where nothing is asked."""
    judged = row["of_card"] is not None and row["servers"] == 2 and row["coding"] in ("raw", "int8")
    return bool(row["of_card"] >= LEAST) if judged else None


def table_of(rows: list[dict[str, Any]]) -> Table:
    """For people."""
    table = Table(title="parameter-server throughput", title_justify="left")
    for header in (
        "servers",
        "engines",
        "connections",
        "workers",
        "coding",
        "round, ms",
        "MB/s a server",
        "of its card",
        "bar",
    ):
        table.add_column(header, justify="right")
    for row in rows:
        share = row["of_card"]
        table.add_row(
            *(str(row[name]) for name in ("servers", "engines", "connections", "workers", "coding")),
            f"{row['round_ms']:.0f}", f"{row['server_mb_per_s']:.1f}", "" if share is None else f"{share:.1%}",
            {None: "", True: "pass", False: "MISS"}[passes(row)],
        )  # fmt: skip
    return table


def _parsed(shape: str) -> tuple[int, int, int]:
    """Servers, engines and connections of ``1x4`` or ``1x4x2``."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", shape)
    if found is None:
        raise typer.BadParameter(f"a shape is servers x engines [x connections], such as 1x4 or 1x4x2; got {shape!r}")
    return int(found[1]), int(found[2]), int(found[3] or 1)


@app.command()
def emulated(
    rate: Annotated[str, typer.Option(help="Of every host's card.")] = "1gbit",
    workers: Annotated[int, typer.Option()] = 4,
    rtt_ms: Annotated[float, typer.Option(help="Round trip between hosts far apart; 0: one local network.")] = 0.0,
    shapes: Annotated[str, typer.Option(help="servers x engines, x connections where there are several.")] = (
        "1x4,2x1,2x4"
    ),
    codings: Annotated[str, typer.Option()] = "raw;int8;efsignsgd",
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "server_throughput.json",
) -> None:
    """Every shape on hosts of its own, the bulk rate measured in the same run."""
    rows: list[dict[str, Any]] = []
    bulk: dict[str, list[float]] = {}
    console = results.console(120)
    asked = [(shape, _parsed(shape)) for shape in shapes.split(",")]
    for shape, (servers, engines, connections) in asked:
        part = json_path.with_suffix(".raw")
        with open_network(workers + servers, rate, distance=Distance(rtt_ms) if rtt_ms else None) as network:
            measured = measure_bulk_rate(network, 0.6)[-2:]
            bulk[shape] = [one.payload_bps for one in measured]
            argv = [sys.executable, "-m", "espresso.launch", "--servers", str(servers), "--engines", str(engines)]
            argv += ["--connections", str(connections)]
            argv += ["-m", "benchmarks.server_throughput", "worker", "--codings", codings, "--json", str(part)]
            argv += ["--rate-bps", str(network.rate_bps or 0), "--connections", str(connections)]
            run_workers(network, argv, deadline_s=200.0)
        rows += json.loads(part.read_text())
        part.unlink()
    console.print(table_of(rows))
    console.print(f"bulk rates in the same run: { {k: [f'{b / 1e6:.0f} Mb/s' for b in v] for k, v in bulk.items()} }")
    config = {
        "rate": rate,
        "rtt_ms": rtt_ms,
        "partition_elements": PARTITION_ELEMENTS,
        "bulk_bps": bulk,
        "least": LEAST,
    }
    config["command"] = " ".join(("python -m benchmarks.server_throughput", *sys.argv[2:]))
    results.write(json_path, results.record(config, 0, rows))
    if any(passes(row) is False for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.argv.insert(1, "emulated")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    app()
