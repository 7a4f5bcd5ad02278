"""Random payloads against every host decoder: ``python -m benchmarks.fuzz [--inputs 10000000]``.

Each input is a good payload with bytes changed (header or body), a piece of one, or noise. A decoder may write
numbers or raise PayloadError, and nothing else. Payload and target lie between pages that may not be touched, at their
beginning or their end in turn, so that a read or write outside ends the process; the memory beside the target on its
own page is compared as well.

``--files 100000`` and ``--checkpoints 20000`` spoil those instead: see benchmarks/fuzz_files.py.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import mmap
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.results import record, write
from espresso.compressors import Decoding, DrawKey, Encoding, PayloadError, Segment, compressor_ids, create, host_codec
from espresso.compressors.sparse import SPAN
from espresso.cpu_offload import available_cores

RESULT = Path(__file__).parent / "results" / "fuzz.json"
SIZES = (3, 70, 300)
LONG_SIZES = (70, 2 * SPAN + 300)
"""Of sparsifiers that send one in a thousand: three spans of indices."""
VARIANTS = {
    "efsignsgd": ("", "block=0", "block=96"),
    "onebit": ("", "block=0,means=1"),
    "twobit": ("", "block=96"),
    "fp8": ("", "format=e5m2"),
    "qsgd": ("", "levels=127"),
    "dithering": ("", "levels=5,norm=l2", "partition=natural"),
    "randomk": ("ratio=0.1",),
    "topk": ("ratio=0.1", "ratio=0.001"),
    "dgc": ("ratio=0.1", "ratio=0.001"),
    "threshold": ("ratio=0.1", "ratio=0.001"),
    "stc": ("", "ratio=0.001"),
}
BATCH = 2000
STUCK_SECONDS = 1200.0
FILL = 0x5A


@dataclass(frozen=True)
class Row:
    """What became of one codec's inputs."""

    compressor: str
    dtype: str
    inputs: int
    refused: int
    decoded: int
    not_finite: int


class Fence:
    """Memory between two pages that may not be touched."""

    def __init__(self, num_bytes: int) -> None:
        page = mmap.PAGESIZE
        self.inside = -(-num_bytes // page) * page
        self._map = mmap.mmap(-1, self.inside + 2 * page)
        whole = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for at in (0, page + self.inside):
            if libc.mprotect(ctypes.c_void_p(whole.ctypes.data + at), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.bytes = whole[page : page + self.inside]

    def place(self, num_bytes: int, at_end: bool) -> npt.NDArray[np.uint8]:
        """``num_bytes`` next to one of the pages."""
        return self.bytes[self.inside - num_bytes :] if at_end else self.bytes[:num_bytes]


def specs() -> list[str]:
    """Every id that has payloads, with some of its parameters; small segments are compressed too."""
    found = []
    for name in compressor_ids():
        if create(name).traits.rounds > 1:
            continue  # plain vectors of a fixed size, for sums: nothing to parse
        for params in VARIANTS.get(name, ("",)):
            more = "raw_below=8" + (f",{params}" if params else "")
            found.append(name if name == "none" else f"{name}:{more}")
    return found


class Fuzzer:
    """One codec, one layout, and a good payload to spoil."""

    def __init__(self, spec: str, dtype: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.codec = host_codec(create(spec))
        sizes = LONG_SIZES if "ratio=0.001" in spec else SIZES
        segments = [Segment(f"t{i}", 0, size) for i, size in enumerate(sizes)]
        self.layout = self.codec.compressor.layout(segments, dtype)
        self.starts = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
        source = self.rng.standard_normal(self.layout.num_elements).astype(dtype)
        self.good = np.empty(self.layout.num_bytes, np.uint8)
        self.key = DrawKey(seed=seed)
        self.codec.encode(Encoding(self.layout, source, self.starts, key=self.key), self.good)
        self.input = Fence(self.good.size + 64)
        self.output = Fence(source.nbytes + 64)
        self.numbers = source.nbytes
        self.counts: Counter[str] = Counter()

    def batch(self, count: int) -> None:
        """Decode ``count`` spoilt payloads."""
        rng, size = self.rng, self.good.size
        kinds = rng.integers(0, 16, count)
        changes = rng.integers(1, 9, count)
        places = (rng.random((count, 8)) * size).astype(np.int64)
        body = rng.random(count) < 0.9
        header = len(self.layout.header)
        values = rng.integers(0, 256, (count, 8), dtype=np.uint8)
        lengths = rng.integers(0, size // 8 + 8, count) * 8
        for index in range(count):
            kind = kinds[index]
            length = int(lengths[index]) if kind == 0 else size
            payload = self.input.place(length, bool(index & 1))
            if kind == 1:
                payload[header:] = rng.integers(0, 256, size - header, dtype=np.uint8)
                payload[:header] = self.good[:header]
            elif kind == 2:
                payload[:] = rng.integers(0, 256, size, dtype=np.uint8)
            else:
                payload[: min(length, size)] = self.good[:length]
            if kind > 2:
                at = places[index, : changes[index]]
                at = header + at % (size - header) if body[index] else at
                payload[at] = values[index, : changes[index]]
            self._decode(payload, bool(index & 2))

    def _decode(self, payload: npt.NDArray[np.uint8], at_end: bool) -> None:
        target = self.output.place(self.numbers, at_end).view(self.layout.dtype)
        beside = self.output.bytes[: -self.numbers] if at_end else self.output.bytes[self.numbers :]
        beside[:64], beside[-64:] = FILL, FILL
        try:
            finite = self.codec.decode(Decoding(self.layout, target, self.starts, key=self.key), payload.reshape(1, -1))
            self.counts["decoded"] += 1
            self.counts["not_finite"] += not finite
        except PayloadError:
            self.counts["refused"] += 1
        if (beside[:64] != FILL).any() or (beside[-64:] != FILL).any():
            raise AssertionError(f"{self.codec.compressor}: wrote outside its target")


def run(job: tuple[str, str, int, int]) -> Row:
    """Fuzz one codec."""
    spec, dtype, inputs, seed = job
    np.seterr(all="ignore")  # spoilt numbers may overflow when they are summed
    fuzzer = Fuzzer(spec, dtype, seed)
    for first in range(0, inputs, BATCH):
        fuzzer.batch(min(BATCH, inputs - first))
    counts = fuzzer.counts
    return Row(spec, dtype, inputs, counts["refused"], counts["decoded"], counts["not_finite"])


def watched(run_slice: Any, *arguments: Any) -> Any:
    """Run a slice; what hangs outside Python, where no signal helps, ends the process and with it the run."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    try:
        return run_slice(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def fuzz_readers(options: argparse.Namespace) -> int:
    """Spoil files or checkpoints; print what became of each kind. 1 where one was neither loaded nor refused."""
    from benchmarks import fuzz_checkpoints, fuzz_files

    run_slice = fuzz_files.run_slice if options.files else fuzz_checkpoints.run_slice
    total, size = options.files or options.checkpoints, 500
    begin = time.monotonic()
    tallies: dict[str, fuzz_files.Tally] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context) as pool:
        slices = [
            pool.submit(watched, run_slice, options.seed, first, min(size, total - first), options.through)
            for first in range(0, total, size)
        ]
        for done in slices:
            for name, tally in done.result().items():
                tallies.setdefault(name, fuzz_files.Tally()).add(tally)
    wrong = [row for tally in tallies.values() for row in tally.wrong]
    config = {"inputs": total, "seconds": round(time.monotonic() - begin)}
    name = "fuzz_files.json" if options.files else "fuzz_checkpoints.json"
    write(options.result.with_name(name), record(config, options.seed, fuzz_files.rows_of(tallies)))
    if options.json:
        body = {"inputs": total, "right": total - len(wrong), "wrong": len(wrong), "which": wrong}
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        sys.stdout.write(fuzz_files.table(tallies, options.seed, time.monotonic() - begin))
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz every decoder; print a table and write it down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000_000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=available_cores())
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--files", type=int, help="so many mutated files instead")
    parser.add_argument("--checkpoints", type=int, help="so many mutated checkpoints instead")
    parser.add_argument("--through", type=float, default=0.01, help="share of loaded files that go through commands")
    parser.add_argument("--json", action="store_true", help="print one JSON object: inputs, right, wrong, and which")
    options = parser.parse_args(arguments)
    if options.files or options.checkpoints:
        return fuzz_readers(options)
    pairs = [(spec, dtype) for spec in specs() for dtype in ("float32", "float64")]
    each = -(-options.inputs // len(pairs))
    jobs = [(spec, dtype, each, options.seed * 1000 + i) for i, (spec, dtype) in enumerate(pairs)]
    begin = time.monotonic()
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    # An executor rather than a pool: it notices a process that a bad access has ended.
    with ProcessPoolExecutor(options.processes, context) as pool:
        for row in pool.map(run, jobs):
            rows.append(row)
            sys.stdout.write(
                f"{row.compressor:48} {row.dtype} {row.inputs:8} inputs, {row.refused:8} refused,"
                f" {row.decoded:8} decoded ({row.not_finite} flagged not finite)\n"
            )
            sys.stdout.flush()
    total = sum(row.inputs for row in rows)
    seconds = time.monotonic() - begin
    sys.stdout.write(f"{total} inputs in {seconds:.0f} s: no crash, nothing written outside a target\n")
    segments = {"segments": SIZES, "long_segments": LONG_SIZES}
    config: dict[str, Any] = {"inputs": total, **segments, "seconds": round(seconds)}
    write(options.result, record(config, options.seed, [asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
