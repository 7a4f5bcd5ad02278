"""Where a benchmark leaves its figures: one JSON file each, with what it was run on and how."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

RESULTS_DIR = Path(__file__).resolve().parent / "results"
_LIBRARIES = ("torch", "numpy", "numba")


def hardware() -> dict[str, Any]:
    """The machine: processor, cores this process may use, memory, kernel."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Python, the libraries that do the work, and the commit (``+`` marks uncommitted changes)."""
    libraries = {name: version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), **libraries, "commit": _commit()}


def _said(*command: str) -> str:
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False).stdout.strip()


def _commit() -> str:
    """Results that a run has written so far are no changes of the code."""
    changed = _said("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return (_said("describe", "--always") or "unknown") + "+" * bool(changed)


def record(config: Mapping[str, Any], seed: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A result as it is written: what it ran on, how, when, and its rows."""
    return {
        "hardware": hardware(),
        "versions": versions(),
        "config": dict(config),
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, replacing an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def console(width: int) -> Console:
    """Where a benchmark prints: as wide as the terminal, or ``width`` where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)
