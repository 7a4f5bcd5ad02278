"""Decoding and adding up compressed payloads on the host, against copying the result.

    python -m benchmarks.decode_sum

A server decodes the payloads of four workers into one sum. The bar: per payload this runs at 1.2 times the rate of a
plain copy of the result (4 bytes an element in, 4 out), on one thread, for the 1-bit compressors.
"""

import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks import results
from benchmarks.ratios import paired_ratio
from espresso.compressors import create
from espresso.compressors.base import Decoding, Encoding, Segment
from espresso.live.codecs import HostCodecs
from espresso.strategies import CompressorSpec, Device

LEAST = 1.2
ONE_BIT = ("efsignsgd", "onebit")

app = typer.Typer(pretty_exceptions_enable=False)


def measure(spec: str, elements: int, payloads: int, rounds: int, keys: int) -> dict[str, Any]:
    """One row: copy and decode alternate, so that a disturbance hits both.

    ``keys`` results and payloads take turns, as on a server: with one, all of it may stay in the processor's caches.
    """
    codec = HostCodecs(1)(CompressorSpec.parse(spec), Device.TRAINING)
    layout = codec.compressor.layout([Segment("w", 0, elements)], np.float32)
    starts = np.zeros(1, np.int64)
    every = np.zeros((keys, payloads, layout.num_bytes), np.uint8)
    for number, row in enumerate(every[0]):
        source = np.random.default_rng(number).standard_normal(elements).astype(np.float32)
        codec.encode(Encoding(layout, source, starts), row)
    every[1:] = every[0]
    results_of, copies_of = np.zeros((keys, elements), np.float32), np.zeros((keys, elements), np.float32)
    codec.decode(Decoding(layout, results_of[0], starts), every[0])
    copies, decodes = [], []
    for turn in range(rounds):
        rows, result, copy = every[turn % keys], results_of[turn % keys], copies_of[turn % keys]
        begin = time.perf_counter()
        np.copyto(copy, result)
        middle = time.perf_counter()
        codec.decode(Decoding(layout, result, starts), rows)
        copies.append(middle - begin)
        decodes.append((time.perf_counter() - middle) / payloads)
    ratio = paired_ratio(copies, decodes)
    return {
        "compressor": spec,
        "elements": elements,
        "payloads": payloads,
        "keys": keys,
        "copy_us": 1e6 * median(copies),
        "decode_us_per_payload": 1e6 * median(decodes),
        "rate_over_copy": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "judged": spec.partition(":")[0] in ONE_BIT,
    }


@app.command()
def main(
    compressors: Annotated[str, typer.Option(help="Separated by semicolons.")] = "efsignsgd;onebit;int8;topk",
    elements: Annotated[str, typer.Option(help="Of the result, separated by commas.")] = "1048576,1048576,16777216",
    keys: Annotated[str, typer.Option(help="That take turns, one number for each size.")] = "16,1,1",
    payloads: Annotated[int, typer.Option()] = 4,
    rounds: Annotated[int, typer.Option()] = 60,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "decode_sum.json",
) -> None:
    """Measure decode-and-sum against a copy."""
    rows = []
    for spec in compressors.split(";"):
        try:
            create(CompressorSpec.parse(spec))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        sizes = zip(elements.split(","), keys.split(","), strict=True)
        rows += [measure(spec, int(size), payloads, rounds, int(turns)) for size, turns in sizes]
    table = Table(title=f"decode and sum of {payloads} payloads, per payload, against a copy", title_justify="left")
    for header in (
        "compressor",
        "elements",
        "keys in turn",
        "copy, us",
        "decode, us",
        "rate over copy",
        "bar",
    ):
        table.add_column(header, justify="right")
    missed = [row for row in rows if row["judged"] and row["rate_over_copy"] < LEAST]
    for row in rows:
        verdict = "" if not row["judged"] else "MISS" if row in missed else "pass"
        rate = f"{row['rate_over_copy']:.2f} ({row['low']:.2f} … {row['high']:.2f})"
        table.add_row(
            row["compressor"], str(row["elements"]), str(row["keys"]), f"{row['copy_us']:.0f}",
            f"{row['decode_us_per_payload']:.0f}", rate, verdict,
        )  # fmt: skip
    results.console(120).print(table)
    config = {
        "payloads": payloads,
        "rounds": rounds,
        "least": LEAST,
        "command": "python -m benchmarks.decode_sum",
    }
    results.write(json_path, results.record(config, 0, rows))
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
