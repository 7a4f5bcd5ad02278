"""What every routine costs on every scope, raw and compressed, between the ranks of a launch.

    mpirun -np 4 python -m benchmarks.collectives --ranks-per-node 2
    torchrun --nproc-per-node 4 -m benchmarks.collectives --ranks-per-node 2

Routines of numbers move the gradient itself; routines of payloads move what the compressor makes of it, the encode
before and the decode after included. Both ways aggregate the same number of elements.
"""

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.table import Table

from benchmarks import results
from espresso.comm.environment import export_environment
from espresso.comm.groups import Groups
from espresso.compressors.base import Decoding, Encoding, Segment
from espresso.live.codecs import HostCodecs
from espresso.live.profiler import measure_links
from espresso.model.links import interpolate
from espresso.strategies import CompressorSpec, Device, Form

app = typer.Typer(pretty_exceptions_enable=False)


def codec_us(codecs: HostCodecs, spec: CompressorSpec, elements: int, payloads: int) -> tuple[int, float]:
    """(bytes of a payload, encode once and decode ``payloads`` of them in microseconds)."""
    codec = codecs(spec, Device.TRAINING)
    layout = codec.compressor.layout([Segment("w", 0, elements)])
    starts, source = (
        np.zeros(1, np.int64),
        np.random.default_rng(0).standard_normal(elements).astype(np.float32),
    )
    rows = np.zeros((payloads, layout.num_bytes), np.uint8)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        codec.encode(Encoding(layout, source, starts), rows[0])
        rows[1:] = rows[0]
        codec.decode(Decoding(layout, source, starts), rows)
        times.append((time.perf_counter() - begin) * 1e6)
    return layout.num_bytes, median(times)


@app.command()
def main(
    ranks_per_node: Annotated[int | None, typer.Option(help="Which ranks share a node.")] = None,
    elements: Annotated[str, typer.Option(help="Of the gradient, comma-separated.")] = "65536,1048576",
    compressor: Annotated[str, typer.Option()] = "efsignsgd",
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "collectives.json",
) -> None:
    """Measure on all ranks; rank 0 prints."""
    torch.set_num_threads(1)
    launch = export_environment()
    dist.init_process_group("gloo")
    groups = Groups(ranks_per_node=ranks_per_node, timeout_s=120.0)
    codecs, spec = HostCodecs(1), CompressorSpec.parse(compressor)
    for turn in (True, False):
        if (groups.rank == 0) is turn:
            codecs.warm_up([spec], ["float32"])
        groups.barrier(patient=True)
    links, _ = measure_links(groups)
    rows: list[dict[str, Any]] = []
    for size in (int(text) for text in elements.split(",")):
        for curve in links.curves:
            peers = groups.scopes[curve.scope].size
            packed, coding_us = codec_us(codecs, spec, size, peers)
            compressed = curve.form is Form.PAYLOAD
            total = packed * peers if compressed else 4 * size
            wire_us = interpolate(curve.points, total)
            rows.append(
                {
                    "routine": curve.routine.value,
                    "scope": curve.scope.value,
                    "form": curve.form.value,
                    "elements": size,
                    "ranks": peers,
                    "array_bytes": total,
                    "wire_us": wire_us,
                    "with_coding_us": wire_us + (coding_us if compressed else 0.0),
                }
            )
    if groups.rank == 0:
        table = Table(title=f"routines between {groups.cluster}, {spec}", title_justify="left")
        for header in ("scope", "routine", "form", "elements", "array", "wire, us", "with coding, us"):
            table.add_column(header, justify="right")
        for row in rows:
            table.add_row(
                row["scope"], row["routine"], row["form"], str(row["elements"]), f"{row['array_bytes'] / 1e3:.0f} KB",
                f"{row['wire_us']:.0f}", f"{row['with_coding_us']:.0f}",
            )  # fmt: skip
        results.console(110).print(table)
        config = {
            "launcher": launch.launcher if launch else "",
            "cluster": str(groups.cluster),
            "spec": str(spec),
        }
        results.write(json_path, results.record(config, 0, json.loads(json.dumps(rows))))
    groups.close()
    codecs.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    app()
