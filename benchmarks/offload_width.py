"""Several offloaded compressions at once: what a pool of some width gains over one of one.

    python -m benchmarks.offload_width --threads 2

The executor's own lanes carry out a row of offloaded encodes, as many partitions of one size, on codecs that share one
pool of threads. Widths alternate, so that a disturbance hits all. Compressors that split a partition between threads
gain little; those that take one thread up to a million elements (sparsifiers) gain the pool. ``copy`` encodes nothing:
it is what the memory of this machine gives to as many cores. The bar: 1.5 times as fast with two threads for the first,
a sparsifier. The simulated counterpart is in ``tests/test_timeline.py``.
"""

import threading
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks import results
from benchmarks.ratios import paired_ratio
from espresso.comm.execute.lanes import Lanes, Node
from espresso.compressors.base import Segment
from espresso.compressors.rehearsal import Step, rehearse
from espresso.cpu_offload import available_cores
from espresso.live.codecs import HostCodecs
from espresso.strategies import CompressorSpec, Device, Lane

LEAST = 1.5
COPY = "copy"
COMPRESSORS = f"dgc:ratio=0.01;topk:ratio=0.01;threshold;randomk:ratio=0.01;int8;efsignsgd;efsignsgd:block=0;{COPY}"

app = typer.Typer(pretty_exceptions_enable=False)


def _run(encode: Step) -> None:
    encode()


def row(encodes: list[Step], width: int) -> float:
    """Seconds until all encodes are done, on lanes of this width."""
    done = threading.Event()
    failures: list[BaseException] = []

    def failed(error: BaseException, node: Node | None) -> None:
        failures.append(error)
        done.set()

    lanes = Lanes(failed, width)
    left = threading.Semaphore(0)
    nodes = [
        Node((Lane.OFFLOAD,), 0, partial(_run, encode), lambda: "encode", on_done=lambda _: left.release())
        for encode in encodes
    ]
    lanes.enqueue(nodes)
    begin = time.perf_counter()
    lanes.bucket_ready([0])
    for _ in nodes:
        if not left.acquire(timeout=60.0):
            raise failures[0] if failures else TimeoutError("an encode takes longer than a minute")
    took = time.perf_counter() - begin
    lanes.close()
    return took


def _copies(elements: int) -> Step:
    given, kept = np.ones(elements, np.float32), np.ones(elements, np.float32)
    return partial(np.copyto, kept, given)


def measure(spec: str, threads: int, elements: int, partitions: int, rounds: int) -> dict[str, Any]:
    """Width one against as many as there are threads."""
    codecs = HostCodecs(threads)
    if spec == COPY:
        encodes = [_copies(elements) for _ in range(partitions)]
    else:
        codec = codecs(CompressorSpec.parse(spec), Device.OFFLOAD)
        encodes = [rehearse(codec, [Segment(f"w{i}", 0, elements)])[0] for i in range(partitions)]
    one: list[float] = []
    wide: list[float] = []
    for turn in range(rounds + 1):
        for width, times in ((1, one), (threads, wide)):
            took = row(encodes, width)
            if turn:
                times.append(took)
    codecs.close()
    ratio = paired_ratio(one, wide)
    return {
        "compressor": spec,
        "threads": threads,
        "elements": elements,
        "partitions": partitions,
        "one_ms": 1e3 * median(one),
        "wide_ms": 1e3 * median(wide),
        "times_as_fast": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
    }


@app.command()
def main(
    compressors: Annotated[str, typer.Option(help="Separated by semicolons.")] = COMPRESSORS,
    threads: Annotated[int, typer.Option(help="Of the pool, and the width.")] = min(available_cores(), 8),
    elements: Annotated[int, typer.Option(help="Of a partition.")] = 1 << 20,
    partitions: Annotated[int, typer.Option()] = 12,
    rounds: Annotated[int, typer.Option()] = 12,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "offload_width.json",
) -> None:
    """Measure a row of offloaded encodes, one at a time and several."""
    rows = [measure(spec, threads, elements, partitions, rounds) for spec in compressors.split(";")]
    table = Table(title=f"{partitions} offloaded encodes of {elements} elements, {threads} threads")
    for header in ("compressor", "one at a time, ms", f"{threads} at once, ms", "times as fast", "95 % interval"):
        table.add_column(header, justify="left" if header == "compressor" else "right")
    for each in rows:
        interval = f"{each['low']:.2f} … {each['high']:.2f}"
        table.add_row(
            each["compressor"],
            f"{each['one_ms']:.1f}",
            f"{each['wide_ms']:.1f}",
            f"{each['times_as_fast']:.2f}",
            interval,
        )
    results.console(100).print(table)
    config = {"threads": threads, "elements": elements, "partitions": partitions, "rounds": rounds, "bar": LEAST}
    results.write(json_path, results.record(config, 0, rows))
    if threads >= 2 and rows[0]["times_as_fast"] < LEAST:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
