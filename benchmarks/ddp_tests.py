"""PyTorch's own DDP tests, those of the wheel, with our hook under every model: ``python -m benchmarks.ddp_tests``.

Each test runs on three ranks over Gloo with plain DDP, and with the hook uncompressed, by a lossless all-gather, and in
automatic mode. The table has what passes with plain DDP and not with us, each with its reason. Exits with 1 if there is
anything in it that :data:`KNOWN` does not explain.
"""

from __future__ import annotations

import argparse
import inspect
import json
import queue
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rank_pool import RANKS
from benchmarks.results import RESULTS_DIR

MODES = ("plain", "none", "allgather", "auto")
NUM_RANKS = 3
DEADLINE_S = 150.0
MOURNING_S = 40.0
"""How long the others may take once one rank has failed."""

SKIPPED = range(70, 100)
"""Exit codes of PyTorch's runner for tests that do not run here."""

FEW = ("test_DistributedDataParallelCPU",)
"""For the ordinary tests."""

KNOWN: dict[str, str] = {
    "test_ddp_comm_hook_logging": "asserts that no hook is set",
    "test_ddp_profiling_torch_profiler": "counts the all-reduces that DDP begins itself; an all-gather is none",
}
"""Tests that cannot pass with any hook, and why."""


@dataclass(frozen=True)
class Outcome:
    """Of one test in one mode.

    Attributes:
        ended: ``passed``, ``skipped`` or ``failed``.
        hooks: models that the hook was put under, on the rank with the most.
        reason: the last line of the first failed rank's traceback.
    """

    test: str
    mode: str
    ended: str
    hooks: int
    reason: str
    seconds: float


def run_test(test: str, mode: str) -> Outcome:
    """One test in processes of its own."""
    begin = time.monotonic()
    from benchmarks.ddp_tests_ranks import run_rank

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for inside in ("barrier", "init_dir", "test_dir"):
            (Path(folder) / inside).mkdir()
        answers: Any = RANKS.Queue()
        ranks = [
            RANKS.Process(target=run_rank, args=(rank, mode, test, folder, answers), daemon=True)
            for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        codes, texts, hooks = _collect(answers, begin + DEADLINE_S)
        for process in ranks:
            process.join(timeout=1.0)
            process.kill()
            process.join()
    missing = [rank for rank in range(NUM_RANKS) if rank not in codes]
    if missing:
        texts.setdefault(missing[0], "died or hung")
    if not missing and all(code == 0 for code in codes.values()):
        ended = "passed"
    elif not missing and any(code in SKIPPED for code in codes.values()):
        ended = "skipped"
    else:
        ended = "failed"
    reason = next((_last_line(texts[rank]) for rank in sorted(texts)), "") if ended == "failed" else ""
    return Outcome(test, mode, ended, max(hooks, default=0), reason, round(time.monotonic() - begin, 1))


def _collect(answers: Any, deadline: float) -> tuple[dict[int, int], dict[int, str], list[int]]:
    """Exit codes, tracebacks in the order in which they came, and numbers of hooks."""
    codes: dict[int, int] = {}
    texts: dict[int, str] = {}
    hooks: list[int] = []
    while len(codes) < NUM_RANKS and time.monotonic() < deadline:
        try:
            rank, code, text, count = answers.get(timeout=0.5)
        except queue.Empty:
            continue
        hooks.append(count)
        if text:
            texts.setdefault(rank, text)
        if code is not None:
            codes[rank] = code
            if code:
                deadline = min(deadline, time.monotonic() + MOURNING_S)
    return codes, texts, hooks


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line and not line.startswith((" ", "Exception raised"))]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|died)", line)]
    return (errors or lines or ["?"])[-1][:300]


def all_tests() -> list[str]:
    """The names of PyTorch's tests whose text speaks of DDP."""
    from benchmarks.ddp_tests_ranks import Tests

    names = [name for name in dir(Tests) if name.startswith("test_")]
    return sorted(name for name in names if re.search("(?i)ddp|DataParallel", inspect.getsource(getattr(Tests, name))))


def table(outcomes: list[Outcome]) -> tuple[str, list[Outcome]]:
    """Counts by mode, what passes with plain DDP and not with us; and of that what is not explained."""
    by = {(o.test, o.mode): o for o in outcomes}
    modes = [mode for mode in MODES if any(o.mode == mode for o in outcomes)]
    lines = ["| mode | passed | failed | do not run here | tests with our hook |", "| --- | --- | --- | --- | --- |"]
    for mode in modes:
        mine = [o for o in outcomes if o.mode == mode]
        counts = [sum(o.ended == ended for o in mine) for ended in ("passed", "failed", "skipped")]
        lines.append(f"| {mode} | {' | '.join(map(str, counts))} | {sum(o.hooks > 0 for o in mine)} |")
    lost = [
        o
        for o in outcomes
        if o.ended != "passed" and o.mode != "plain" and by.get((o.test, "plain"), o).ended == "passed"
    ]
    lines += ["", "Passes with plain DDP and not with us:", "", "| test | mode | reason |", "| --- | --- | --- |"]
    for o in lost:
        lines.append(f"| `{o.test}` | {o.mode} | {KNOWN.get(o.test) or 'NOT EXPLAINED: ' + o.reason} |")
    if not lost:
        lines.append("| none | | |")
    return "\n".join(lines), [o for o in lost if o.test not in KNOWN]


def _outcomes(pool: ThreadPoolExecutor, tests: list[str], modes: Sequence[str]) -> Iterator[Outcome]:
    """Of plain DDP first; with us of what passes so."""
    passing = []
    for outcome in pool.map(lambda test: run_test(test, "plain"), tests):
        yield outcome
        if outcome.ended == "passed":
            passing.append(outcome.test)
    ours = [(test, mode) for test in passing for mode in modes if mode != "plain"]
    yield from pool.map(lambda pair: run_test(*pair), ours)


def main() -> None:
    """The command."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("-k", default="", help="only tests whose name contains this")
    arguments.add_argument("--few", action="store_true", help="those that the ordinary tests run")
    arguments.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    arguments.add_argument("--at-once", type=int, default=1, help="tests that run at the same time")
    arguments.add_argument("--save", action="store_true", help="write benchmarks/results/ddp_tests.{md,json}")
    chosen = arguments.parse_args()
    RANKS.set_forkserver_preload(["benchmarks.rank_preload", "benchmarks.ddp_tests_ranks"])
    tests = [name for name in (FEW if chosen.few else all_tests()) if chosen.k in name]
    outcomes = []
    with ThreadPoolExecutor(chosen.at_once) as pool:
        for outcome in _outcomes(pool, tests, chosen.modes):
            outcomes.append(outcome)
            line = (
                f"{outcome.mode:<9} {outcome.ended:<7} {outcome.seconds:5.1f} s  {outcome.test} {outcome.reason[:140]}"
            )
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    text, unexplained = table(outcomes)
    sys.stdout.write(text + "\n")
    if chosen.save:
        import torch

        head = f"PyTorch {torch.__version__}, {NUM_RANKS} ranks over Gloo: `python -m benchmarks.ddp_tests --save`."
        (RESULTS_DIR / "ddp_tests.md").write_text(f"# PyTorch's own DDP tests\n\n{head}\n\n{text}\n")
        (RESULTS_DIR / "ddp_tests.json").write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    raise SystemExit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
