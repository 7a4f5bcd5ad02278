"""GPU compressors against a device-to-device copy: ``python -m benchmarks.gpu`` (part of ``make gpu``).

A row's ``fraction`` is (bytes an operation has to move, both directions) / its time / (bytes per second of a plain
copy, both directions), measured in the same run: 1 is the speed of the memory. The bytes an element needs are fixed
by the bar, not by what a kernel happens to move: scaled sign and onebit 20.2 (two passes over gradient and residual),
int8 and fp8 13.1 (one), sampled sparsifiers 20.2; decode 4 plus the payload.

Times are the device's, by CUDA events around many calls, medians; inputs rotate so that no run finds the last one's in
the cache. The calls are queued behind a kernel that spins, so that the host, which is slower than a small kernel, does
not show; what the host needs for a call stands beside it. Only the rows of 300 tensors are timed without, back to back
and on whichever of the two is slower, because there the host is the question.
Prints one table last and writes JSON (``--json PATH``, by default benchmarks/results/gpu.json). Exit status 1 if a
bar is missed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import RESULTS_DIR, record, write
from espresso.compressors import Decoding, Encoding, Feedback, Segment, compressor_ids, create, cuda_codec
from espresso.compressors.cuda import CudaCodec, CudaDevice, CudaUnavailableError
from espresso.compressors.rehearsal import rehearse

ROTATE_BYTES = 512 << 20
"""Input sets together are at least this large where they would fit a cache."""

MIN_CALLS = 10
"""Queued between two events."""

SPIN_CYCLES_PER_S = 2e9
"""At least as many as the device's clock makes."""

DECODE_ADD_ROWS = 4
SMALL_TENSORS = 300
SMALL_ELEMENTS = 1000

BARS = {
    "efsignsgd": (20.2, 0.7),
    "onebit": (20.2, 0.7),
    "int8": (13.1, 0.7),
    "fp8": (13.1, 0.7),
    "dgc": (20.2, 0.5),
    "topk": (20.2, 0.5),
}
"""Of encode with a residual at 2^24: bytes an element, and the fraction of the copy bandwidth to reach."""


@dataclass(frozen=True)
class Row:
    """One measurement; ``bar`` is empty where there is none."""

    compressor: str
    op: str
    elements: int
    us: float
    gb_per_s: float
    fraction: float
    host_us: float = 0.0
    bar: str = ""
    passed: bool = True


class Bench:
    """Times calls on the current stream against the copy bandwidth."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.host_us = 0.0  # of the last call that was timed
        self.copy_bytes_per_us = self._copy_bandwidth()

    def _copy_bandwidth(self) -> float:
        """Bytes read plus bytes written per microsecond, at 1 GiB."""
        source = torch.rand(1 << 28, device="cuda")
        target = torch.empty_like(source)
        us = self.time_us([lambda: target.copy_(source)])
        return 2 * source.numel() * source.element_size() / us

    def time_us(self, calls: Sequence[Callable[[], object]], *, held: bool = True) -> float:
        """Median microseconds of a call; ``calls`` are taken in turn.

        Args:
            held: whether the device waits until all are queued.
        """
        for call in calls:
            call()
        calls = list(calls) * max(1, MIN_CALLS // len(calls))
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        for call in calls:
            call()
        host_s = time.perf_counter() - begin_s
        torch.cuda.synchronize()
        self.host_us = host_s * 1e6 / len(calls)
        spin = int(SPIN_CYCLES_PER_S * (1.5 * host_s + 1e-4))
        wait: Any = torch.cuda._sleep
        times = []
        for _ in range(max(3, self.repeats)):
            make: Any = torch.cuda.Event
            begin, end = (make(enable_timing=True) for _ in range(2))
            if held:
                wait(spin)
            begin.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e3 / len(calls))
        return statistics.median(times)

    def row(self, name: str, op: str, elements: int, us: float, bytes_each: float, bar: float | None = None) -> Row:
        rate = bytes_each * elements / us
        fraction = rate / self.copy_bytes_per_us
        passed = bar is None or fraction >= bar
        says = "" if bar is None else f">= {bar}"
        return Row(name, op, elements, us, rate / 1e3, fraction, self.host_us, says, passed)


class Case:
    """Input sets, residuals and payloads of one compressor at one size."""

    def __init__(self, spec: str, sizes: Sequence[int], device: CudaDevice) -> None:
        codec = cuda_codec(create(spec), device, waits=False)
        assert isinstance(codec, CudaCodec)
        self.codec, self.spec = codec, spec
        self.name = spec.partition(":")[0]
        self.layout = codec.compressor.layout([Segment(f"t{i}", 0, n) for i, n in enumerate(sizes)])
        self.starts = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
        self.elements = sum(sizes)
        self.num_sets = max(1, min(8, ROTATE_BYTES // (12 * self.elements)))
        generator = torch.Generator("cuda").manual_seed(0)

        def numbers() -> Any:
            made = torch.randn(self.elements, device="cuda", generator=generator)
            return made * torch.randn(self.elements, device="cuda", generator=generator).exp_()

        self.sources = [numbers() for _ in range(self.num_sets)]
        keeps = codec.compressor.traits.error_feedback
        fresh: Any = torch.empty
        self.feedbacks = [
            Feedback(0.3 * numbers(), fresh(self.elements, device="cuda"), self.starts) if keeps else None
            for _ in range(self.num_sets)
        ]
        shape = (DECODE_ADD_ROWS, self.layout.num_bytes)
        self.payloads = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        self.target = torch.empty(self.elements, device="cuda")
        for row in self.payloads:
            codec.encode(Encoding(self.layout, self.sources[0], self.starts, feedback=self.feedbacks[0]), row)

    def encodes(self) -> list[Callable[[], object]]:
        """One encode an input set."""
        return [
            partial(self.codec.encode, Encoding(self.layout, source, self.starts, feedback=feedback), self.payloads[0])
            for source, feedback in zip(self.sources, self.feedbacks, strict=True)
        ]

    def decodes(self, rows: int) -> list[Callable[[], object]]:
        """A decode of the first payloads."""
        return [partial(self.codec.decode, Decoding(self.layout, self.target, self.starts), self.payloads[:rows])]


def measure(spec: str, elements: int, bench: Bench, device: CudaDevice) -> list[Row]:
    """Encode, decode and decode-add of one compressor at one size."""
    case = Case(spec, [elements], device)
    payload = case.layout.num_bytes / elements
    feedback = case.codec.compressor.traits.error_feedback
    bytes_each, bar = BARS.get(case.name, ((12.0 if feedback else 4.0) + payload, None))
    judged = bar if elements == 1 << 24 else None
    rows = [bench.row(spec, "encode", elements, bench.time_us(case.encodes()), bytes_each, judged)]
    for op, sources in (("decode", 1), ("decode_add", DECODE_ADD_ROWS)):
        us = bench.time_us(case.decodes(sources))
        rows.append(bench.row(spec, op, elements, us, 4.0 + sources * payload))
    return rows


def measure_topk(bench: Bench, device: CudaDevice) -> list[Row]:
    """Exact top-k of 1 % of 2^24, residual included, against torch.topk on the magnitudes."""
    elements = 1 << 24
    case = Case("topk:ratio=0.01", [elements], device)
    ours = bench.time_us(case.encodes())
    sources, k = [source.abs() for source in case.sources], elements // 100
    theirs = bench.time_us([partial(torch.topk, source, k, sorted=False) for source in sources])
    bar = f"below torch.topk ({theirs:.0f} us)"
    row = bench.row(case.spec, "exact top-k", elements, ours, 20.2)
    return [
        replace(row, bar=bar, passed=ours < theirs),
        bench.row("torch.topk", "torch", elements, theirs, 4.0),
    ]


def measure_batch(spec: str, bench: Bench, device: CudaDevice) -> Row:
    """One encode of 300 small tensors, back to back: what a call takes, host and device overlapped."""
    case = Case(spec, [SMALL_ELEMENTS] * SMALL_TENSORS, device)
    calls = case.encodes() * (200 // case.num_sets)
    us = bench.time_us(calls, held=False)
    row = bench.row(spec, f"encode of {SMALL_TENSORS} tensors", case.elements, us, 12.0)
    return replace(row, bar="< 50 us", passed=us < 50.0)


def measure_torch(elements: int, bench: Bench) -> list[Row]:
    """PyTorch's plain operations, without a residual."""
    source = torch.randn(elements, device="cuda")
    half = torch.empty_like(source, dtype=torch.float16)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def sign_and_pack() -> torch.Tensor:
        packed: torch.Tensor = ((source < 0).view(-1, 8) * weights).sum(1, dtype=torch.uint8)
        return packed * source.abs().mean()

    return [
        bench.row("copy", "torch", elements, bench.time_us([lambda: target.copy_(source)]), 8.0),
        bench.row("torch.half", "torch", elements, bench.time_us([lambda: half.copy_(source)]), 6.0),
        bench.row("torch.sign+pack", "torch", elements, bench.time_us([sign_and_pack]), 4.125),
    ]


def measure_rounds(spec: str, elements: int, bench: Bench, device: CudaDevice) -> list[Row]:
    """The three steps of one square matrix; bytes are those of the passes that gpu.md and the kernels count."""
    codec = cuda_codec(create(spec), device, waits=False)
    side = math.isqrt(elements)
    segment = Segment("matrix", 0, side * side, (side, side))
    encode, decode, transform = rehearse(codec, [segment], here=lambda a: torch.from_numpy(a).to(device.torch_device))
    steps = (("encode", encode, 12.0), ("transform", transform, 12.0), ("decode", decode, 4.0))
    return [bench.row(spec, op, side * side, bench.time_us([call]), each) for op, call, each in steps]


def run(log2_elements: Sequence[int], specs: Sequence[str], repeats: int) -> tuple[list[Row], Bench]:
    """All rows; what has no GPU codec is left out."""
    device = CudaDevice()
    bench = Bench(repeats)
    rows: list[Row] = []
    available = []
    for spec in specs:
        try:
            cuda_codec(create(spec), device)
        except ValueError:
            continue
        available.append(spec)
    for power in log2_elements:
        for spec in available:
            measured = measure if create(spec).traits.rounds == 1 else measure_rounds
            rows += measured(spec, 1 << power, bench, device)
        rows += measure_torch(1 << power, bench)
    rows += measure_topk(bench, device)
    rows += [measure_batch(s, bench, device) for s in available if create(s).traits.rounds == 1]
    return rows, bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write JSON, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("compressors", nargs="*", help="specs; all ids with their defaults if none is given")
    parser.add_argument("--log2-elements", type=int, nargs="+", default=[20, 24, 26])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, default=RESULTS_DIR / "gpu.json")
    options = parser.parse_args(arguments)
    try:
        CudaDevice()
    except CudaUnavailableError as error:
        sys.stdout.write(f"NO GPU: nothing was measured ({error})\n")
        return 0
    rows, bench = run(options.log2_elements, options.compressors or compressor_ids(), options.repeats)
    properties = torch.cuda.get_device_properties(0)
    config = {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cupy": import_module("cupy").__version__,
        "copy_gb_per_s": bench.copy_bytes_per_us / 1e3,
        "repeats": options.repeats,
    }
    made = record(config, 0, [asdict(row) for row in rows])
    write(options.json, made)
    options.json.with_suffix(".md").write_text(markdown(made))
    sys.stdout.write(table(rows, config))
    return 0 if all(row.passed for row in rows) else 1


def table(rows: Sequence[Row], config: dict[str, Any]) -> str:
    """The one table, last."""
    lines = [
        f"{config['gpu']}, CUDA {config['cuda']}: a copy moves {config['copy_gb_per_s']:.0f} GB/s, both directions",
        f"{'compressor':24} {'operation':30} {'elements':>10} {'us':>9} {'GB/s':>7} {'of copy':>8} {'host us':>8}  bar",
    ]
    for row in rows:
        verdict = "" if not row.bar else f"{row.bar}: {'ok' if row.passed else 'MISSED'}"
        lines.append(
            f"{row.compressor:24} {row.op:30} {row.elements:10d} {row.us:9.1f} {row.gb_per_s:7.0f}"
            f" {row.fraction:8.2f} {row.host_us:8.1f}  {verdict}"
        )
    return "\n".join(lines) + "\n"


def markdown(made: dict[str, Any]) -> str:
    """What was written as JSON, for people."""
    config, versions = made["config"], made["versions"]
    lines = [
        "# GPU compressors against a device-to-device copy",
        "",
        "Written by `python -m benchmarks.gpu`, which says what the columns mean; see [gpu.md](../../docs/gpu.md) too.",
        "",
        f"{made['date']}, {config['gpu']} (compute capability {config['capability']}), CUDA {config['cuda']}, torch"
        f" {versions['torch']}, Python {versions['python']}, commit {versions['commit']}. A copy moves"
        f" {config['copy_gb_per_s']:.0f} GB/s, both directions.",
        "",
        "| compressor | operation | elements | µs | of copy | host µs | bar |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in made["rows"]:
        verdict = "" if not row["bar"] else f"{row['bar']}: {'ok' if row['passed'] else 'MISSED'}"
        lines.append(
            f"| {row['compressor']} | {row['op']} | {row['elements']} | {row['us']:.1f} | {row['fraction']:.2f}"
            f" | {row['host_us']:.1f} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
