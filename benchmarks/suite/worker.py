"""What every rank of the suite does: time arms side by side, or train one arm to its end."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arms import Arm, Decider, parse_arms
from benchmarks.ratios import paired_ratio
from benchmarks.suite.task import Task
from benchmarks.suite.tasks import build_task
from benchmarks.train import (
    Block,
    Place,
    Progress,
    alternate,
    have_decided,
    process_group,
    replicas_are_equal,
    run_block,
    warm_up,
)


@dataclass
class Trainee:
    """One arm on all models of a task; what :mod:`benchmarks.train` needs of a runner."""

    arm: Arm
    task: Task
    models: list[DistributedDataParallel]
    optimizers: list[torch.optim.Optimizer]
    states: list[Decider | None]
    num_steps: int = 0
    num_steps_to_decide: int = 0
    blocks: list[Block] = field(default_factory=list)

    @classmethod
    def start(cls, arm: Arm, task: Task, decide_by: int | None = None, *, adapt: bool = False) -> Trainee:
        """Wrap the task's models and attach the arm to each; ``decide_by`` and ``adapt`` of automatic arms."""
        models = [DistributedDataParallel(model) for model in task.make_models()]
        optimizers = [task.make_optimizer(model) for model in models]
        states = [arm.attach(model, decide_by=decide_by, adapt=adapt) for model in models]
        return cls(arm, task, models, optimizers, states)

    def step(self, place: Place) -> float:
        """Train one step; returns its duration in seconds on this rank."""
        began = time.perf_counter()
        self.task.step(self.models, self.optimizers, self.num_steps, place.rank, place.world_size)
        self.arm.meet()
        self.num_steps += 1
        return time.perf_counter() - began

    def has_decided(self) -> bool:
        """Whether every model's state has decided on every rank (a collective)."""
        return have_decided(self.states)

    def modules(self) -> list[nn.Module]:
        """The bare models."""
        return [model.module for model in self.models]

    def close(self) -> None:
        """End the states' threads."""
        for state in self.states:
            if state is not None:
                state.close()


def time_arms(
    task: Task, arms: Sequence[Arm], place: Place, blocks: int, steps: int, decide_by: int
) -> list[dict[str, Any]]:
    """Step times of all arms, alternated in blocks; ratios to computing alone and to computing with a barrier.

    Arms that name their compressor decide as soon as they have measured: when makes no difference to their steps.
    """
    chosen = {arm: decide_by if arm.detail.startswith("auto") else min(decide_by, 1) for arm in arms}
    trainees = [Trainee.start(arm, task, decide_by=by) for arm, by in chosen.items()]
    for one in trainees:  # each by itself: sixty uncompressed steps on a slow network would tell nothing
        warm_up([one], place, 4, Progress(None))
    for trainee in alternate(trainees, blocks):
        trainee.blocks.append(run_block(partial(trainee.step, place), place, steps))
    rows = []
    times = {one.arm.kind: [block.median_step_s for block in one.blocks] for one in trainees}
    for one in trainees:
        mine = [block.median_step_s for block in one.blocks]
        rows.append(
            {
                "task": task.name,
                "arm": one.arm.name,
                "step_ms": 1e3 * statistics.median(mine),
                "mb_per_step_per_host": statistics.fmean(block.tx_bytes_per_step for block in one.blocks) / 1e6,
                **{f"time_over_{kind}": paired_ratio(mine, times[kind]).value for kind in BOUNDS},
                "parameters": sum(p.numel() for model in one.models for p in model.parameters()),
                "steps_to_decide": one.num_steps_to_decide,
                "verdicts": [state.verdict for state in one.states if state is not None],
                "replicas_equal": replicas_are_equal(one.modules()) if one.arm.keeps_replicas_equal else None,
            }
        )
    for one in trainees:
        one.close()
    return rows


BOUNDS = ("none", "barrier", "plain")


def train_to_end(task: Task, arm: Arm, place: Place, steps: int) -> dict[str, Any]:
    """Train one arm alone in this process: its metric, the largest memory any rank had, and what was in use at last."""
    trainee = Trainee.start(arm, task, adapt=True)
    while trainee.num_steps < steps:
        trainee.step(place)
    peak = torch.tensor(peak_mib())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    equal = replicas_are_equal(trainee.modules()) if arm.keeps_replicas_equal else None
    verdicts = [str(state.verdict) for state in trainee.states if state is not None]
    found = {
        "metric": task.metric(trainee.modules()), "peak_mib": float(peak), "replicas_equal": equal,
        "verdicts": verdicts, "stays_plain": bool(verdicts) and all(one.startswith("plain") for one in verdicts),
    }  # fmt: skip
    dist.barrier()
    trainee.close()
    return found


def peak_mib() -> float:
    """The most memory that this process has had at a time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def work(
    name: str,
    arms: str,
    seed: int,
    blocks: int,
    steps: int,
    out: Path,
    *,
    decide_by: int,
    to_end: bool,
    tiny: bool,
) -> None:
    """A rank's whole life; rank 0 writes what was found."""
    torch.set_num_threads(1)
    place, parsed, task = Place.from_env(None), parse_arms(arms), build_task(name, seed, tiny=tiny)
    with process_group(300.0):
        found: Any = (
            train_to_end(task, parsed[0], place, steps)
            if to_end
            else time_arms(task, parsed, place, blocks, steps, decide_by)
        )
        if place.rank == 0:
            out.write_text(json.dumps(found))
        dist.barrier()
