"""Real ranks that stay: what differs only in what it exchanges shares one process start.

A failure or a missed deadline kills all of them; the next test starts fresh ones.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.ports import free_port

RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["benchmarks.rank_preload"])
"""Ranks are forked from one server that holds what all of them load."""

NUM_RANKS = 4

MOURNING_S = 5.0
"""How long the others may take to answer once one rank has failed or died: they are probably waiting for it."""


class RanksFailed(AssertionError):
    """A rank raised, died or hung."""


def torchrun_variables(rank: int, num_ranks: int, ranks_per_node: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank of this machine, which gets one thread."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_RANK": str(rank // ranks_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


class RankPool:
    """``run`` calls a function on every rank of one Gloo group; the launcher's words say two nodes of two ranks."""

    def __init__(self, num_ranks: int = NUM_RANKS) -> None:
        self.num_ranks = num_ranks
        self._processes: list[Any] = []
        self._inboxes: list[Any] = []
        self._results: Any = None

    @property
    def running(self) -> bool:
        return bool(self._processes)

    def run(self, target: Callable[..., Any], *args: Any, deadline_s: float = 60.0) -> list[Any]:
        """``target(rank, *args)`` on all ranks; what they returned, in rank order.

        Raises:
            RanksFailed: with every failed rank's traceback.
        """
        if not self._processes:
            self._start()
        try:
            return self._run(target, args, deadline_s)
        except BaseException:
            self.close()
            raise

    def _run(self, target: Callable[..., Any], args: tuple[Any, ...], deadline_s: float) -> list[Any]:
        for inbox in self._inboxes:
            inbox.put((target, args))
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + deadline_s
        awaited = set(range(self.num_ranks))
        while awaited and time.monotonic() < deadline:
            dead = {rank for rank in awaited if not self._processes[rank].is_alive()}
            try:
                rank, value, error = self._results.get(timeout=0.2)
            except queue.Empty:
                awaited -= dead  # they were dead before the queue was seen empty
                if dead:
                    deadline = min(deadline, time.monotonic() + MOURNING_S)
                continue
            awaited.discard(rank)
            if error is None:
                answers[rank] = value
            else:
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + MOURNING_S)
        if len(answers) < self.num_ranks:
            told = [f"rank {rank}: {error}" for rank, error in sorted(errors.items())]
            silent = [str(rank) for rank in range(self.num_ranks) if rank not in answers and rank not in errors]
            raise RanksFailed("\n".join([*told, f"no answer from rank {', '.join(silent) or '(none)'}"]))
        return [answers[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        """Kill the ranks: they hold nothing worth keeping."""
        for process in self._processes:
            process.kill()
            process.join()
        for box in [*self._inboxes, self._results]:
            if box is not None:
                box.cancel_join_thread()
                box.close()
        self._processes, self._inboxes, self._results = [], [], None

    def _start(self) -> None:
        port = free_port()
        self._results = RANKS.Queue()
        for rank in range(self.num_ranks):
            env = torchrun_variables(rank, self.num_ranks, 2, port)
            inbox = RANKS.Queue()
            process = RANKS.Process(target=_serve, args=(rank, env, inbox, self._results), daemon=True)
            process.start()
            self._processes.append(process)
            self._inboxes.append(inbox)


POOL = RankPool()
atexit.register(POOL.close)


def _serve(rank: int, env: dict[str, str], inbox: Any, results: Any) -> None:
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        target, args = inbox.get()
        try:
            results.put((rank, target(rank, *args), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
