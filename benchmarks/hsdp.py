"""HSDP between two hosts: shards inside a host, replicas between them, in four ways at once, alternated in blocks.

    python -m benchmarks.hsdp                     # a GPT, 2 hosts x 2 ranks, 1 Gb/s and 200 Mb/s between them
    python -m benchmarks.hsdp --rates 200mbit --rtt-ms 20 --quick

::

    free                 fully_shard inside a host, a hook that returns at once: nothing is exchanged between hosts
    native               fully_shard over both dimensions, as PyTorch does it
    none                 espresso.fsdp with a strategy that compresses nothing
    espresso:efsignsgd   espresso.fsdp in automatic mode

All arms train the same model from the same weights on the same data, and with ``--catch-up`` for as many steps as
automatic mode takes to decide, so that their losses compare (on a slow network that takes minutes). Bars: automatic
mode reaches 75 % of the step rate of ``free`` and several times native's at 200 Mb/s; ``none`` has native's parameters
bit for bit, within 3 % of its time; replicas are equal in every arm but ``free``. Bytes are counted by the card. With
``--seeds 3 --catch-up --blocks 1 --steps 150 --layers 1`` every arm trains from three seeds, and automatic mode's mean
loss on data that nobody trained on has to be within native's band: its mean and two standard deviations.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import espresso.fsdp
from benchmarks import results
from benchmarks.emulated import Distance, describe, open_network, run_workers
from benchmarks.exchange import digest, uniform
from benchmarks.models import Gpt, Workload, build_workload, seeded
from benchmarks.ratios import paired_ratio
from benchmarks.train import MAX_STEPS_TO_DECIDE, Block, Place, alternate, have_decided, process_group, run_block
from espresso.fsdp.layout import hybrid_mesh, sum_and_divide
from espresso.live.state import EspressoState

SHARDS = 2
WARM_UP_STEPS = 5
OF_FREE, OVER_NATIVE_AT_200, NONE_OVER_NATIVE = 0.75, 2.0, 1.03
DEADLINE_S = 1800.0

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass
class Runner:
    """One arm; the trainer's blocks run it."""

    arm: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: EspressoState | None
    num_steps: int = 0
    num_steps_to_decide: int = 0
    blocks: list[Block] = field(default_factory=list)

    def step(self, workload: Workload, place: Place) -> float:
        """Train one step; returns its duration in seconds on this rank."""
        inputs, targets = workload.batch(self.num_steps, place.rank, place.world_size)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = workload.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        elapsed_s = time.perf_counter() - start
        self.num_steps += 1
        return elapsed_s


def make_runner(arm: str, workload: Workload, mesh: DeviceMesh, layers: int, seed: int) -> Runner:
    """An arm's model, sharded; its state where it has one."""
    model = seeded(seed, partial(Gpt, num_layers=layers))()
    for module in (*model.get_submodule("blocks").children(), model):
        fully_shard(module, mesh=mesh if arm == "native" else mesh["shard"])
    sum_and_divide(model)
    state = None
    if arm == "free":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda gradient: None)
    elif arm != "native":
        compressor = arm.removeprefix("espresso:")
        make = partial(espresso.fsdp.register, model, mesh["replicate"], timeout_s=300.0)
        state = make("none", uniform(partition_bytes=0)) if arm == "none" else make(compressor)
    return Runner(arm, model, workload.make_optimizer(model), state)


def work(arms: Sequence[str], layers: int, blocks: int, steps: int, catch_up: bool, seed: int, out: Path) -> None:
    """One rank: train all arms, and leave the figures in ``out``."""
    torch.set_num_threads(1)
    place = Place.from_env(None)
    workload = build_workload("gpt", seed)
    with process_group(300.0):
        mesh = hybrid_mesh("cpu", SHARDS)
        runners = [make_runner(arm, workload, mesh, layers, seed) for arm in arms]
        for runner in runners:
            while not have_decided([runner.state]) and runner.num_steps < MAX_STEPS_TO_DECIDE:
                runner.step(workload, place)
                runner.num_steps_to_decide = runner.num_steps
        total = max(runner.num_steps for runner in runners) if catch_up else WARM_UP_STEPS
        for runner in runners:
            while runner.num_steps < total:
                runner.step(workload, place)
        for runner in alternate(runners, blocks):
            runner.blocks.append(run_block(partial(runner.step, workload, place), place, steps))
        rows = [row_of(runner, workload, place) for runner in runners]
        for runner in runners:
            if runner.state is not None:
                runner.state.close()
    if place.rank == 0:
        out.write_text(json.dumps(rows))


def row_of(runner: Runner, workload: Workload, place: Place) -> dict[str, Any]:
    """An arm's figures, the same on every rank (a collective)."""
    digests: list[Any] = [None] * place.world_size
    shards = (parameter.to_local() for parameter in runner.model.parameters())  # type: ignore[attr-defined]
    dist.all_gather_object(digests, digest(shards))
    return {
        "arm": runner.arm,
        "step_ms": 1e3 * statistics.median(block.median_step_s for block in runner.blocks),
        "mb_per_step_per_host": statistics.fmean(block.tx_bytes_per_step for block in runner.blocks) / 1e6,
        "block_step_s": [block.median_step_s for block in runner.blocks],
        "num_steps": runner.num_steps,
        "num_steps_to_decide": runner.num_steps_to_decide,
        "test_loss": workload.evaluate(runner.model).loss,
        "shards": digests[:SHARDS],
        "replicas_equal": all(digests[i] == digests[i % SHARDS] for i in range(place.world_size)),
        "verdict": "" if runner.state is None else runner.state.verdict,
    }


def judge(rate: str, seed: int, rows: Sequence[dict[str, Any]]) -> None:
    """Add ratios, and what the bars say, to the arms of one network and seed."""
    by_name = {row["arm"]: row for row in rows}
    free, native = by_name["free"], by_name["native"]
    for row in rows:
        row |= {"rate": rate, "seed": seed}
        row["of_free"] = asdict(paired_ratio(free["block_step_s"], row["block_step_s"]))
        row["over_native"] = asdict(paired_ratio(row["block_step_s"], native["block_step_s"]))
        held = {"replicas are equal": row["replicas_equal"]} if row["arm"] != "free" else {}
        if row["arm"] == "none":
            held["native's parameters"] = row["shards"] == native["shards"]
            held[f"{NONE_OVER_NATIVE - 1:.0%} of native's time"] = row["over_native"]["value"] <= NONE_OVER_NATIVE
        if row["arm"].startswith("espresso:"):
            held[f"{OF_FREE:.0%} of free"] = row["of_free"]["value"] >= OF_FREE
            if rate == "200mbit":
                held[f"{OVER_NATIVE_AT_200:g} times native"] = row["over_native"]["value"] <= 1 / OVER_NATIVE_AT_200
        row["bars"] = held


def judge_losses(rows: Sequence[dict[str, Any]], arm: str) -> dict[str, Any]:
    """An arm's mean loss on one network beside native's band."""
    ours, native = ([row["test_loss"] for row in rows if row["arm"] == one] for one in (arm, "native"))
    wide = 2 * statistics.stdev(native)
    off = statistics.fmean(ours) - statistics.fmean(native)
    return {"native": native, "ours": ours, "off": off, "band": wide, "bars": {"native's band of losses": off <= wide}}


def table_of(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """For people."""
    table = Table(title=title, title_justify="left")
    for header in ("arm", "step, ms", "MB", "of free", "time over native", "loss", "bars"):
        table.add_column(header, justify="left" if header in ("arm", "bars") else "right")
    for row in rows:
        bars = ", ".join(f"{'' if met else '[bold red]MISS[/] '}{bar}" for bar, met in row["bars"].items())
        table.add_row(
            row["arm"], f"{row['step_ms']:.0f}", f"{row['mb_per_step_per_host']:.2f}",
            f"{row['of_free']['value']:.1%}", f"{row['over_native']['value']:.3f}", f"{row['test_loss']:.3f}", bars,
        )  # fmt: skip
    return table


@app.command()
def main(
    rates: Annotated[str, typer.Option(help="Between the hosts, comma-separated.")] = "1gbit,200mbit",
    compressor: Annotated[str, typer.Option(help="Of automatic mode.")] = "efsignsgd",
    rtt_ms: Annotated[float, typer.Option(help="Round trip between the hosts; 0 is one local network.")] = 0.0,
    layers: Annotated[int, typer.Option(help="Of the GPT, 1.8 million parameters each.")] = 6,
    blocks: Annotated[int, typer.Option(help="Rounds; each runs one block of every arm.")] = 6,
    steps_per_block: Annotated[int, typer.Option("--steps-per-block", "--steps")] = 4,
    catch_up: Annotated[bool, typer.Option(help="As many steps for every arm, so that losses compare.")] = False,
    quick: Annotated[bool, typer.Option(help="Two rounds of two steps.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights and batches, the first.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many; several say whether losses differ.")] = 1,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "hsdp.json",
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare native HSDP, none and automatic mode with no exchange between the hosts at all."""
    arms = ("free", "native", "none", f"espresso:{compressor}")
    blocks, steps_per_block = (2, 2) if quick else (blocks, steps_per_block)
    if worker is not None:
        work(arms, layers, blocks, steps_per_block, catch_up, seed, worker)
        return
    console, measured, networks = results.console(150), [], {}
    raw = json_path.with_suffix(".raw")
    argv = [sys.executable, "-m", "benchmarks.hsdp", "--compressor", compressor, "--worker", str(raw)]
    argv += ["--layers", str(layers), "--blocks", str(blocks), "--steps", str(steps_per_block)]
    argv += ["--catch-up"] if catch_up else []
    for rate, one in product(rates.split(","), range(seed, seed + seeds)):
        with open_network(2, rate, distance=Distance(rtt_ms) if rtt_ms else None) as network:
            networks[rate] = describe(network)
            run_workers(
                network, [*argv, "--seed", str(one)], workers_per_host=SHARDS, pin=True, deadline_s=DEADLINE_S,
            )  # fmt: skip
        rows: list[dict[str, Any]] = json.loads(raw.read_text())
        raw.unlink()
        judge(rate, one, rows)
        measured += rows
        console.print(table_of(rows, f"gpt: 2 hosts x {SHARDS}, {networks[rate]}, seed {one}"))
        console.print(
            f"  {rows[-1]['arm']} decided after {rows[-1]['num_steps_to_decide']} steps: {rows[-1]['verdict']}"
        )
        config = {
            "arms": arms,
            "networks": networks,
            "layers": layers,
            "blocks": blocks,
            "steps": steps_per_block,
            "rtt_ms": rtt_ms,
            "catch_up": catch_up,
            "seeds": seeds,
        }
        results.write(json_path, results.record(config, seed, measured))
    for rate in rates.split(",") if seeds > 1 else ():
        measured.append(judge_losses([row for row in measured if row.get("rate") == rate], arms[-1]))
        console.print({"rate": rate} | measured[-1])
        results.write(json_path, results.record(config, seed, measured))
    if not all(met for row in measured for met in row["bars"].values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
