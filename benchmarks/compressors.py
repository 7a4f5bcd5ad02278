"""Host compressors against a plain copy: ``python -m benchmarks.compressors [--json]``.

Rows: ``gb_per_s`` is gigabytes of uncompressed numbers per second; ``copy_fraction`` divides it by what ``np.copyto``
copies per second (source bytes counted once) with the same number of threads, alternated with it in the same run.

Operations, with residuals where training keeps them (not with ``none`` and casts):
    encode      q = gradient + residual, payload and new residual
    decode      one payload into the target
    decode_add  four payloads into the target in one call; bytes = four times the numbers
    torch       PyTorch's plain operation (with --torch), as ``encode``, without a residual

    python -m benchmarks.compressors efsignsgd int8 --elements 1006272 --sets 20 --threads 1

is what partitions of the default size meet in a step: a little less than 4 MB, and in no cache any more.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.results import RESULTS_DIR, record, write
from espresso.compressors import (
    Codec,
    Decoding,
    Encoding,
    Feedback,
    Layout,
    Segment,
    compressor_ids,
    create,
    host_codec,
)
from espresso.compressors.rehearsal import warm_up
from espresso.cpu_offload import WorkerPool, available_cores
from espresso.cpu_offload.work import FUSED

DECODE_ADD_ROWS = 4
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Row:
    """One measurement. ``segment_elements`` is the length of the segments that the elements were cut into."""

    compressor: str
    op: str
    elements: int
    segment_elements: int
    threads: int
    gb_per_s: float
    copy_fraction: float


class Bench:
    """Arrays of one size, and the plain copy to compare with. Several sets of them take turns, one a repeat."""

    def __init__(
        self, elements: int, pool: WorkerPool, repeats: int, clock: Callable[[], float], sets: int = 1, seed: int = 0
    ) -> None:
        self.clock = clock
        rng = np.random.default_rng(seed)
        self._sets = deque(
            (
                rng.standard_normal(elements, dtype=np.float32),
                0.3 * rng.standard_normal(elements, dtype=np.float32),
                *(np.full(elements, 0, np.float32) for _ in range(3)),  # and not the first to touch a page
            )
            for _ in range(sets)
        )
        self._turn()
        self.pool, self.repeats = pool, repeats
        threads = pool.num_threads
        self._halves = [(i * elements // threads, (i + 1) * elements // threads) for i in range(threads)]

    def against_copy(self, call: Callable[[], object], num_bytes: int) -> tuple[float, float]:
        """GB/s of ``call`` and its ratio to the copy, medians of alternated runs."""
        inner = max(1, (1 << 20) // max(self.source.size, 1))
        call()
        self._copy()
        times, copies = [], []
        for _ in range(self.repeats):
            copies.append(_time(self._copy, inner, self.clock))
            self._turn()
            times.append(_time(call, inner, self.clock))
            self._turn()
        rate = num_bytes / statistics.median(times)
        return rate / 1e9, rate / (self.source.nbytes / statistics.median(copies))

    def _turn(self) -> None:
        self._sets.rotate()
        self.source, self.old, self.new, self.target, self.copy = self._sets[0]

    def _copy(self) -> None:
        self.pool.run(lambda low, high: np.copyto(self.copy[low:high], self.source[low:high]), self._halves)

    def layout(self, codec: Codec, segment: int) -> tuple[Layout, Array]:
        """The elements cut into segments."""
        starts = np.arange(0, self.source.size, segment)
        segments = [Segment("t", int(low), min(segment, self.source.size - int(low))) for low in starts]
        return codec.compressor.layout(segments), starts


def measure(spec: str, bench: Bench, segment: int) -> list[Row]:
    """Encode, decode and decode-add of one compressor."""
    codec = host_codec(create(spec), bench.pool)
    warm_up(codec, sizes=(1, 5000, FUSED + 1))
    layout, starts = bench.layout(codec, segment)
    payloads = np.zeros((DECODE_ADD_ROWS, layout.num_bytes), np.uint8)
    keeps = codec.compressor.traits.error_feedback

    def encode(payload: Array) -> bool:
        feedback = Feedback(bench.old, bench.new, starts) if keeps else None
        return codec.encode(Encoding(layout, bench.source, starts, feedback=feedback), payload)

    calls: dict[str, tuple[Callable[[], object], int]] = {
        "encode": (lambda: encode(payloads[0]), 1),
        "decode": (lambda: codec.decode(Decoding(layout, bench.target, starts), payloads[:1]), 1),
        "decode_add": (lambda: codec.decode(Decoding(layout, bench.target, starts), payloads), DECODE_ADD_ROWS),
    }
    for row in payloads:
        encode(row)
    rows = []
    for op, (call, times) in calls.items():
        rate, fraction = bench.against_copy(call, times * bench.source.nbytes)
        rows.append(Row(spec, op, bench.source.size, segment, bench.pool.num_threads, rate, fraction))
    return rows


def measure_torch(bench: Bench) -> list[Row]:
    """What PyTorch's own operations take for comparable work."""
    import torch

    torch.set_num_threads(bench.pool.num_threads)
    tensor = torch.from_numpy(bench.source)
    half = torch.empty_like(tensor, dtype=torch.float16)
    weights = 2 ** torch.arange(8, dtype=torch.uint8)

    def sign_and_pack() -> torch.Tensor:
        packed: torch.Tensor = ((tensor < 0).view(-1, 8) * weights).sum(1, dtype=torch.uint8)
        return packed * tensor.abs().mean()

    calls: dict[str, Callable[[], object]] = {
        "torch.topk": lambda: tensor.abs().topk(max(1, tensor.numel() // 100), sorted=False),
        "torch.half": lambda: half.copy_(tensor),
        "torch.sign+pack": sign_and_pack,
    }
    size, threads = bench.source.size, bench.pool.num_threads
    results = [(name, *bench.against_copy(call, bench.source.nbytes)) for name, call in calls.items()]
    return [Row(name, "torch", size, size, threads, rate, fraction) for name, rate, fraction in results]


def _time(call: Callable[[], object], inner: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(inner):
        call()
    return (clock() - begin) / inner


def one_round_ids() -> list[str]:
    """The compressors that encode a payload; those of several rounds have no such call to time."""
    return [name for name in compressor_ids() if create(name).traits.rounds == 1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compressors", description=__doc__.split("\n")[0])
    parser.add_argument("compressors", nargs="*", help="specs; all ids with their defaults if none is given")
    parser.add_argument("--log2-elements", type=int, nargs="+", default=[14, 16, 18, 20, 22, 24, 26])
    parser.add_argument("--elements", type=int, nargs="+", help="sizes that are no powers of two")
    parser.add_argument("--sets", type=int, default=1, help="of arrays, taking turns: enough of them are in no cache")
    parser.add_argument("--log2-segment", type=int, default=None, help="cut into segments of this length")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, available_cores()}))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--torch", action="store_true", help="PyTorch's plain operations as well")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--save",
        nargs="?",
        const="compressors",
        metavar="NAME",
        help="put the rows into benchmarks/results/NAME.json and NAME.md (compressors); one name for each machine",
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count CPU time, not wall time: for one thread on a busy machine",
    )
    options = parser.parse_args(arguments)
    if options.cpu_time and options.threads != [1]:
        parser.error("--cpu-time measures one thread only: add --threads 1")
    clock = time.thread_time if options.cpu_time else time.perf_counter
    rows: list[Row] = []
    for threads in options.threads:
        with WorkerPool(threads) as pool:
            for elements in options.elements or [1 << power for power in options.log2_elements]:
                segment = elements if options.log2_segment is None else min(elements, 1 << options.log2_segment)
                bench = Bench(elements, pool, options.repeats, clock, options.sets)
                for spec in options.compressors or one_round_ids():
                    rows += measure(spec, bench, segment)
                    if not options.json:
                        _write(rows[-3:])
                if options.torch:
                    rows += measure_torch(bench)
                    if not options.json:
                        _write(rows[-3:])
    facts = {
        "machine": platform.machine(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "clock": clock.__name__,
        "repeats": options.repeats,
        "sets": options.sets,
        "seed": 0,
    }
    if options.save:
        save(rows, facts, options.save)
    if options.json:
        sys.stdout.write(json.dumps({**facts, "rows": [asdict(row) for row in rows]}) + "\n")
    return 0


def save(rows: Sequence[Row], facts: dict[str, Any], name: str) -> None:
    """Put rows into the committed result, in place of those of the same measurement, and write its table anew."""
    path = RESULTS_DIR / f"{name}.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    merged = {_name(row): row for row in [*known, *map(asdict, rows)]}
    write(path, record(facts, 0, list(merged.values())))
    (RESULTS_DIR / f"{name}.md").write_text(table(list(merged.values())))


def _name(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("compressor", "op", "elements", "segment_elements", "threads"))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rates by compressor, operation and threads, a column per size: GB/s, and the fraction of a plain copy."""
    sizes = sorted({row["elements"] for row in rows})
    lines = [
        "# Host compressors: GB/s of fp32 input (fraction of `np.copyto`'s rate, same run, same threads)",
        "",
        "| compressor | operation | threads | " + " | ".join(map(_size, sizes)) + " |",
        "| --- | --- | --- |" + " --- |" * len(sizes),
    ]
    cells: dict[tuple[Any, ...], dict[int, str]] = {}
    for row in rows:
        key = (row["compressor"], row["op"], row["threads"])
        cells.setdefault(key, {})[row["elements"]] = f"{row['gb_per_s']:.2f} ({row['copy_fraction']:.2f})"
    for key, by_size in sorted(cells.items()):
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | " + " | ".join(by_size.get(size, "") for size in sizes) + " |"
        )
    return "\n".join(lines) + "\n"


def _size(elements: int) -> str:
    power = elements.bit_length() - 1
    return f"2^{power}" if elements == 1 << power else str(elements)


def _write(rows: Sequence[Row]) -> None:
    for row in rows:
        sys.stdout.write(
            f"{row.compressor:24} {row.op:10} {_size(row.elements)} elements {row.threads} threads"
            f" {row.gb_per_s:7.2f} GB/s {row.copy_fraction:6.2f} of copy\n"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
