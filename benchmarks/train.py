"""Train one model by DDP in several ways at once, alternated in blocks, and compare them.

    torchrun --nproc-per-node 2 -m benchmarks.train --model mlp --arms none,plain,espresso:efsignsgd

All arms live in the same processes, one DDP model each, with equal weights and equal data. Every round runs
one block of steps of each arm, so that a ratio compares neighbours in time. Arms that decide for themselves
do so in the warm-up; every arm takes the same number of steps, so losses are compared after equal steps.
"""

import atexit
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arms import Arm, Decider, OneMessage, parse_arms
from benchmarks.models import Name, Workload, build_workload, num_parameters
from benchmarks.ratios import paired_ratio

#: Automatic mode has decided by then; see the README.
MAX_STEPS_TO_DECIDE = 60
#: The first steps of a block find another arm's data in the caches; they count as training, not as timing.
UNTIMED_STEPS = 1

app = typer.Typer(pretty_exceptions_enable=False)

Taker = TypeVar("Taker")

# PyTorch's compiler, which DDP loads, is half a million objects: nobody has to look through them at the end.
atexit.register(gc.freeze)


@dataclass(frozen=True)
class Place:
    """Where this process stands among the others, as torchrun tells it."""

    rank: int
    world_size: int
    local_rank: int
    num_hosts: int
    interface: str
    device: str = "cpu"

    @classmethod
    def from_env(cls, interface: str | None, device: str = "cpu") -> "Place":
        """Read torchrun's variables; ``interface`` defaults to the one Gloo was told, or else to loopback."""
        world_size, num_local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        name = interface or os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        return cls(rank, world_size, local_rank, world_size // num_local, name, device)

    def settle(self) -> None:
        """Wait for what a GPU still has to do."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def tx_bytes(self) -> int:
        """What this host's card has sent so far, by the kernel's counter."""
        return self._counted("tx_bytes")

    def rx_bytes(self) -> int:
        """What it has received."""
        return self._counted("rx_bytes")

    def _counted(self, counter: str) -> int:
        return int(Path(f"/sys/class/net/{self.interface}/statistics/{counter}").read_text())


@dataclass(frozen=True)
class Block:
    """One block of steps of one arm, over all ranks."""

    step_s: list[float]
    slowest_step_s: list[float]
    tx_bytes_per_step: float

    @property
    def median_step_s(self) -> float:
        """Median over the steps of the mean over the ranks."""
        return statistics.median(self.step_s)


class Steps(Protocol):
    """An arm that is trained step by step, side by side with others."""

    arm: Arm
    num_steps: int
    num_steps_to_decide: int

    def step(self, place: Place) -> float:
        """Train one step; returns its duration in seconds on this rank."""

    def has_decided(self) -> bool:
        """Whether all that decides for itself has decided on every rank (a collective)."""


@dataclass
class Runner:
    """One arm with its model and what was measured of it."""

    arm: Arm
    workload: Workload
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    state: Decider | None
    total_steps: int | None = None
    message: OneMessage | None = None
    num_steps: int = 0
    num_steps_to_decide: int = 0
    train_loss: float = float("nan")
    blocks: list[Block] = field(default_factory=list)

    def step(self, place: Place) -> float:
        """Train one step; returns its duration in seconds on this rank."""
        self._decay()
        inputs, targets = self.workload.batch(self.num_steps, place.rank, place.world_size)
        place.settle()
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.workload.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.arm.meet()
        place.settle()
        elapsed_s = time.perf_counter() - start
        self.num_steps += 1
        self.train_loss = loss.item()
        return elapsed_s

    def _decay(self) -> None:
        """The learning rate falls linearly to zero over ``total_steps``, if there is such a number."""
        if self.total_steps is None:
            return
        left = max(1.0 - self.num_steps / self.total_steps, 0.0)
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * left

    def has_decided(self) -> bool:
        """Whether the arm's state has decided on every rank (a collective)."""
        return have_decided([self.state])


class Progress:
    """Tells a parent process how far rank 0 is, one JSON line per block."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def report(self, phase: str, arm: Arm, done: int, total: int) -> None:
        """Append a line, if anybody listens."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"phase": phase, "arm": arm.name, "done": done, "total": total}) + "\n")


def have_decided(states: Iterable[Decider | None]) -> bool:
    """Whether all that decides for itself has decided on every rank (a collective)."""
    flag = torch.tensor(int(all(state is None or state.decided for state in states)))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def warm_up(runners: Sequence[Steps], place: Place, num_steps: int, progress: Progress) -> None:
    """Let automatic arms decide, then bring every arm to the same number of steps, ``num_steps`` at least."""
    for runner in runners:
        while not runner.has_decided():
            if runner.num_steps == MAX_STEPS_TO_DECIDE:
                raise RuntimeError(f"{runner.arm.name} had not decided after {MAX_STEPS_TO_DECIDE} steps")
            runner.step(place)
            runner.num_steps_to_decide = runner.num_steps
            progress.report("warm-up", runner.arm, runner.num_steps, MAX_STEPS_TO_DECIDE)
    # One step more than the last to decide took: every arm has run what it decided.
    total = max(num_steps, 1 + max(runner.num_steps_to_decide for runner in runners))
    for runner in runners:
        while runner.num_steps < total:
            runner.step(place)
            progress.report("warm-up", runner.arm, runner.num_steps, total)


def finish(runners: list[Runner], place: Place, progress: Progress) -> None:
    """Bring every arm that exchanges gradients to the end of its schedule."""
    for runner in runners:
        if runner.arm.keeps_replicas_equal and runner.total_steps is not None:
            while runner.num_steps < runner.total_steps:
                runner.step(place)
                progress.report("training", runner.arm, runner.num_steps, runner.total_steps)


def run_block(step: Callable[[], float], place: Place, num_steps: int) -> Block:
    """Run a block between barriers; durations and bytes are exchanged after it, outside the measured part."""
    dist.barrier()
    for _ in range(UNTIMED_STEPS):
        step()
    dist.barrier()
    before = place.tx_bytes()
    elapsed = torch.tensor([step() for _ in range(num_steps)], dtype=torch.float64)
    dist.barrier()
    sent = torch.tensor([place.tx_bytes() - before], dtype=torch.float64)
    slowest = elapsed.clone()
    for tensor, operation in ((elapsed, dist.ReduceOp.SUM), (sent, dist.ReduceOp.SUM)):
        dist.all_reduce(tensor, operation)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    # Ranks of one host read the same counter. On loopback all hosts do, and it counts what all of them send.
    num_readers = place.world_size * (place.num_hosts if place.interface == "lo" else 1)
    bytes_per_step = float(sent) / num_readers / num_steps
    return Block((elapsed / place.world_size).tolist(), slowest.tolist(), bytes_per_step)


def alternate(runners: Sequence[Taker], rounds: int) -> Iterator[Taker]:
    """Every runner once a round, in the orders of a balanced square (Williams, 1949): what follows plain DDP on a slow
    network may pay for it. So, within rounds, each follows each other one once in as many rounds as there are runners,
    of an odd number twice in twice as many.
    """
    number = len(runners)
    steps = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(number)]
    for done in range(rounds):
        order = [(done + step) % number for step in steps]
        yield from (runners[each] for each in (order[::-1] if number % 2 and done % 2 else order))


def replicas_are_equal(models: Iterable[nn.Module]) -> bool:
    """Whether all ranks hold the same parameters, bit for bit (a collective)."""
    from benchmarks.exchange import digest

    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, digest(p for model in models for p in model.parameters()))
    return len(set(everybody)) == 1


def summarize(runner: Runner, runners: list[Runner]) -> dict[str, Any]:
    """The arm's row of the result."""
    evaluation = runner.workload.evaluate(runner.model.module)
    by_kind = {
        other.arm.kind: other
        for other in runners
        if other.arm.kind in ("none", "plain") or (other.arm.kind, other.arm.detail) == ("bare", runner.arm.detail)
    }
    times = [block.median_step_s for block in runner.blocks]
    ratios = {
        f"time_over_{kind}": asdict(paired_ratio(times, [block.median_step_s for block in other.blocks]))
        for kind, other in by_kind.items()
    }
    return {
        "name": runner.arm.name,
        "step_ms": 1e3 * statistics.median(step for block in runner.blocks for step in block.step_s),
        "slowest_rank_step_ms": 1e3
        * statistics.median(step for block in runner.blocks for step in block.slowest_step_s),
        "mb_per_step_per_host": statistics.fmean(block.tx_bytes_per_step for block in runner.blocks) / 1e6,
        **ratios,
        "num_steps": runner.num_steps,
        "num_steps_to_decide": runner.num_steps_to_decide,
        "train_loss": runner.train_loss,
        "final_loss": evaluation.loss,
        "final_accuracy": evaluation.accuracy,
        "block_step_ms": [1e3 * seconds for seconds in times],
        "verdict": "" if runner.state is None else runner.state.verdict,
        "metrics": {} if runner.state is None else runner.state.metrics(),
    }


def is_there(device: str, backend: str) -> bool:
    """Whether there is such a device to measure on; says so where there is none.

    Raises:
        typer.BadParameter: NCCL is for GPUs.
    """
    if backend == "nccl" and device != "cuda":
        raise typer.BadParameter("nccl is for GPUs: --device cuda --backend nccl")
    if device == "cuda" and not torch.cuda.is_available():
        typer.echo("NO GPU: nothing was measured")
        return False
    return True


def name_of(device: str) -> str:
    """A GPU's own name."""
    return device if device == "cpu" else torch.cuda.get_device_name()


@contextmanager
def process_group(timeout_s: float, backend: str = "gloo") -> Iterator[None]:
    """The default group, from torchrun's variables."""
    served = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    dist.init_process_group(served, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_runners(
    arms: tuple[Arm, ...],
    workload: Workload,
    artifacts_dir: Path | None,
    total_steps: int | None,
    decide_by: int | None = None,
    decide_named_by: int | None = None,
) -> list[Runner]:
    """One DDP model per arm, all with the same weights. Several automatic arms have a folder of artifacts each.

    Args:
        decide_by: of automatic arms; None leaves the setting's default.
        decide_named_by: of those that name their compressors, where it differs.
    """
    runners = []
    alone = sum(arm.kind == "espresso" for arm in arms) == 1
    for arm in arms:
        model = DistributedDataParallel(workload.make_model())
        folder = artifacts_dir if artifacts_dir is None or alone else artifacts_dir / arm.detail.replace(":", "_")
        message = state = None
        if arm.kind == "bare":
            message = OneMessage.of(model, arm.detail)
            message.attach(model)
        else:
            names_none = arm.detail == "auto" or decide_named_by is None
            state = arm.attach(model, folder, decide_by if names_none else decide_named_by)
        runners.append(Runner(arm, workload, model, workload.make_optimizer(model), state, total_steps, message))
    return runners


def send_as_much(runners: Sequence[Runner]) -> None:
    """Have every single message be as long as what the automatic arm of its compressor sends. All ranks."""
    for runner in runners:
        for other in runners:
            if (
                runner.message
                and other.state
                and other.arm.kind == "espresso"
                and other.arm.detail == runner.arm.detail
            ):
                sent = torch.tensor([int(other.state.metrics()["espresso/bytes_sent"])])
                dist.broadcast(sent, 0)
                runner.message.resize(int(sent))


@app.command()
def main(
    model: Annotated[Name, typer.Option(help="What to train.")] = "mlp",
    arms: Annotated[str, typer.Option("--arms", "--arm", help="Arms, comma-separated.")] = "plain",
    blocks: Annotated[int, typer.Option(help="Rounds; each runs one block of every arm.")] = 5,
    steps_per_block: Annotated[int, typer.Option("--steps-per-block", "--steps")] = 10,
    warmup_steps: Annotated[int, typer.Option(help="At least so many steps before the timing.")] = 5,
    total_steps: Annotated[
        int | None, typer.Option(help="Train on to so many steps, the learning rate falling to zero.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    interface: Annotated[str | None, typer.Option(help="Whose bytes to count.")] = None,
    artifacts_dir: Annotated[Path | None, typer.Option(help="For strategy and job of automatic arms.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result there.")] = None,
    decide_by: Annotated[int | None, typer.Option(help="Of automatic arms; by default the setting's.")] = None,
    decide_named_by: Annotated[int | None, typer.Option(help="Of those that name their compressors.")] = None,
    progress_path: Annotated[Path | None, typer.Option("--progress", hidden=True)] = None,
    timeout_s: Annotated[float, typer.Option(help="Of the default process group.")] = 120.0,
    device: Annotated[str, typer.Option(help="cpu, or cuda: all ranks on the first GPU.")] = "cpu",
    backend: Annotated[str, typer.Option(help="gloo, or nccl for what is on the GPU.")] = "gloo",
) -> None:
    """Compare arms; run under torchrun or ``python -m benchmarks.emulated``."""
    torch.set_num_threads(1)
    place, parsed = Place.from_env(interface, device), parse_arms(arms)
    workload = build_workload(model, seed).on(device)
    progress = Progress(progress_path if place.rank == 0 else None)
    with process_group(timeout_s, backend):
        runners = make_runners(parsed, workload, artifacts_dir, total_steps, decide_by, decide_named_by)
        warm_up(runners, place, warmup_steps, progress)
        send_as_much(runners)
        for runner in alternate(runners, blocks):
            runner.blocks.append(run_block(partial(runner.step, place), place, steps_per_block))
            progress.report("timing", runner.arm, len(runner.blocks), blocks)
        finish(runners, place, progress)
        equal = [replicas_are_equal([one.model]) if one.arm.keeps_replicas_equal else None for one in runners]
        rows = [summarize(runner, runners) for runner in runners] if place.rank == 0 else []
        dist.barrier()
        for runner in runners:
            if runner.state is not None:
                runner.state.close()
    if place.rank == 0:
        result = {
            "model": model,
            "num_parameters": num_parameters(runners[0].model),
            "seed": seed,
            "world_size": place.world_size,
            "num_hosts": place.num_hosts,
            "interface": place.interface,
            "device": name_of(device),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "num_cores": len(os.sched_getaffinity(0)),
            "arms": [{**row, "replicas_equal": same} for row, same in zip(rows, equal, strict=True)],
        }
        text = json.dumps(result, indent=1)
        if json_path is None:
            sys.stdout.write(text + "\n")
        else:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(text)


if __name__ == "__main__":
    app()
