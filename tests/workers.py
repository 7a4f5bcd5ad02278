"""Real processes for multi-rank tests: started apart, torn down by a hard deadline."""

from __future__ import annotations

import os
import queue
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.ports import free_port
from benchmarks.rank_pool import RANKS, RanksFailed, torchrun_variables

# What needs a real interpreter exit (tests/test_lifecycle.py) starts programs of its own.


@dataclass(frozen=True)
class Outcome:
    """What a rank returned, or the traceback it died with; ``exit_code`` None means it had to be killed."""

    rank: int
    value: Any
    error: str | None
    exit_code: int | None


def run_ranks(
    target: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    ranks_per_node: int | None = None,
    deadline_s: float = 90.0,
    check: bool = True,
    init: bool = True,
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """Run ``target(rank, *args)`` in ``num_ranks`` processes joined in a Gloo group.

    Args:
        ranks_per_node: what LOCAL_WORLD_SIZE and GROUP_RANK say; None leaves one node.
        deadline_s: then everything is killed.
        check: raise if a rank raised or hung.
        init: whether the harness calls init_process_group.

    Raises:
        RanksFailed: with every failed rank's traceback.
    """
    port, results = free_port(), RANKS.Queue()
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    processes: list[Any] = []
    try:
        for rank in range(num_ranks):
            env = torchrun_variables(rank, num_ranks, per_node, port) | (environment or {})
            process = RANKS.Process(target=_main, args=(target, rank, args, env, init, results), daemon=False)
            process.start()
            processes.append(process)
        outcomes = _collect(processes, results, deadline_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = [o for o in outcomes if o.error is not None or o.exit_code != 0]
    if check and failed:
        raise RanksFailed("\n".join(f"rank {o.rank} (exit {o.exit_code}): {o.error}" for o in failed))
    return outcomes


def _collect(processes: list[Any], results: Any, deadline_s: float) -> list[Outcome]:
    deadline = time.monotonic() + deadline_s
    answers: dict[int, tuple[Any, str | None]] = {}
    while len(answers) < len(processes) and time.monotonic() < deadline:
        try:
            rank, value, error = results.get(timeout=0.2)
            answers[rank] = (value, error)
        except queue.Empty:
            if not any(process.is_alive() for process in processes) and results.empty():
                break
    for process in processes:
        process.join(timeout=max(0.1, deadline - time.monotonic()))
    outcomes = []
    for rank, process in enumerate(processes):
        value, error = answers.get(rank, (None, "no answer"))
        if process.exitcode is None:
            error = error or "did not exit: killed at the deadline"
        outcomes.append(Outcome(rank, value, error, process.exitcode))
    return outcomes


def _main(target: Callable[..., Any], rank: int, args: Any, env: dict[str, str], init: bool, results: Any) -> None:
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if init:
            dist.init_process_group("gloo")
        value = target(rank, *args)
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    finally:
        results.close()
        results.join_thread()
        if init and dist.is_initialized():
            dist.destroy_process_group()
