"""What do the sizes of DDP's buckets do to what is left of an exchange after backward, and to the step?

    python -m benchmarks.buckets
    python -m benchmarks.buckets --models mlp --caps 25,1 --compressor dgc:ratio=0.01 --rate 100mbit
    python -m benchmarks.buckets --models depths,waves --caps auto --rate 100mbit

The papers release a tensor when its gradient is ready; DDP hands over buckets, and one of 25 MB may be ready when
backward is over. Smaller buckets are the way to begin sooner: with one tensor in each, the paper's unit. Two emulated
hosts of one core; every size runs the same strategy, all of them in turn, in blocks. What is exposed is recorded: from
the end of backward until the last average is there. Ratios are to the first size. ``sooner`` is what a hook on each
parameter would add: how long a gradient is there before its bucket is handed over, the mean over all elements.

``auto`` among the sizes is automatic mode with nothing chosen, which may have DDP's buckets laid anew where it expects
to gain, beside automatic mode that keeps the 25 MB: its ratios are to that. Models are the suite's tasks of one model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.emulated import format_rate, measure_bulk_rate, open_network, run_workers
from benchmarks.exchange import uniform
from benchmarks.ratios import paired_ratio
from benchmarks.suite.task import Task
from benchmarks.suite.tasks import NAMES, build_task
from benchmarks.train import Block, Place, alternate, have_decided, process_group, run_block
from espresso.live.observer import GradientClock
from espresso.strategies import Bucket

CAPS = "25,8,1,auto"
"""In MB; 25 is DDP's own."""
AUTO, AUTO_KEEPS = "auto", "auto, own buckets"

MODELS = tuple(name for name in NAMES if name != "gan")
"""A GAN is two."""

OPTION = "comp > flat.allgather > dec"
WARM_UP = 6


@dataclass
class Trainee:
    """A model in buckets of some size, or of automatic mode's choice."""

    name: str
    task: Task
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    state: Any
    num_steps: int = 0
    blocks: list[Block] = field(default_factory=list)
    exposed_ms: list[float] = field(default_factory=list)
    """Of each block, the median."""
    sooner_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        net = self.model.module
        self.clock = GradientClock(net, {id(parameter): name for name, parameter in net.named_parameters()})
        self.gradients_ns: deque[dict[str, int]] = deque(maxlen=64)

    @classmethod
    def start(cls, task: Task, name: str, compressor: str) -> Trainee:
        """Wrap and register it."""
        import espresso

        (bare,) = task.make_models()
        if name in (AUTO, AUTO_KEEPS):
            model = DistributedDataParallel(bare)
            state = espresso.register(model, adapt=False)
            if name == AUTO_KEEPS:
                state.session.lay_buckets = lambda cap: False
        else:
            model = DistributedDataParallel(bare, bucket_cap_mb=float(name))
            state = espresso.register(model, strategy=uniform(OPTION, compressor))
        return cls(name, task, model, task.make_optimizer(model), state)

    @property
    def base(self) -> str:
        """What it is compared with; empty: the first."""
        return AUTO_KEEPS if self.name in (AUTO, AUTO_KEEPS) else ""

    def settle(self, place: Place) -> None:
        """Steps until it runs what it will be timed with. Every rank calls it."""
        while not have_decided([self.state]):
            run_block(partial(self.step, place), place, WARM_UP)
        run_block(partial(self.step, place), place, WARM_UP)

    def step(self, place: Place) -> float:
        """Train one step; returns its seconds."""
        self.clock.begin()
        began = time.perf_counter()
        self.task.step([self.model], [self.optimizer], self.num_steps, place.rank, place.world_size)
        self.num_steps += 1
        took = time.perf_counter() - began
        self.gradients_ns.append(self.clock.ready_ns)
        return took

    def block(self, place: Place, steps: int) -> None:
        """Time some steps, and note what was exposed in them."""
        self.blocks.append(run_block(partial(self.step, place), place, steps))
        flight = self.state.session.recorder.flight(steps)
        scripts = [each.script for each in flight.steps]
        self.exposed_ms.append(statistics.median((s.averaged_us - s.backward_end_us) / 1e3 for s in scripts))
        buckets, seen = flight.stretches[-1].buckets, list(self.gradients_ns)[-len(flight.steps) :]
        self.sooner_ms += [_sooner_ms(buckets, one.ready_us, ns) for one, ns in zip(flight.steps, seen, strict=True)]


def _sooner_ms(buckets: Sequence[Bucket], handed_us: Sequence[float], ready_ns: Mapping[str, int]) -> float:
    waits = [
        (slot.numel, at - ready_ns[slot.tensor] / 1e3)
        for bucket, at in zip(buckets, handed_us, strict=True)
        for slot in bucket.slots
    ]
    return sum(numel * us for numel, us in waits) / sum(numel for numel, _ in waits) / 1e3


def work(model: str, names: Sequence[str], compressor: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Everything of one model; every rank calls it."""
    task, place = build_task(model), Place.from_env(None)
    trainees = [Trainee.start(task, name, compressor) for name in names]
    for trainee in trainees:
        trainee.settle(place)
    for trainee in alternate(trainees, rounds):
        trainee.block(place, steps)
    by_name, rows = {one.name: one for one in trainees}, []
    for one in trainees:
        base = by_name[one.base] if one.base else trainees[0]
        times, exposed = [block.median_step_s for block in one.blocks], one.exposed_ms
        step = paired_ratio(times, [block.median_step_s for block in base.blocks])
        left = paired_ratio(exposed, base.exposed_ms)
        rows.append(
            {
                "model": model,
                "buckets": one.name,
                "num_buckets": len(one.state.session.recorder.flight(1).stretches[0].buckets),
                "step_ms": 1e3 * statistics.median(times),
                "step_ratio": [step.low, step.value, step.high],
                "exposed_ms": statistics.median(exposed),
                "exposed_ratio": [left.low, left.value, left.high],
                "sooner_ms": statistics.median(one.sooner_ms),
            }
        )
    for one in trainees:
        one.state.close()
    return rows


def table_of(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """For people."""
    table = Table("model", "buckets, MB", "number", "step, ms", "x", "exposed, ms", "x", "sooner, ms", title=title)
    for row in rows:
        ratios = ("{1:.3f} ({0:.3f} to {2:.3f})".format(*row[key]) for key in ("step_ratio", "exposed_ratio"))
        step, exposed = ratios
        table.add_row(
            row["model"], row["buckets"], str(row["num_buckets"]), f"{row['step_ms']:.1f}", step,
            f"{row['exposed_ms']:.1f}", exposed, f"{row['sooner_ms']:.2f}",
        )  # fmt: skip
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,gpt,resnet", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--caps", default=CAPS, help="DDP's bucket_cap_mb, the others are compared with the first; and auto"
    )
    parser.add_argument("--compressor", default="efsignsgd")
    parser.add_argument("--rate", default="1gbit", help="of the network between the hosts")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6, help="of a block")
    parser.add_argument("--json", type=Path, default=results.RESULTS_DIR / "buckets.json", help="where results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker is not None:
        torch.set_num_threads(1)
        with process_group(300.0):
            names = [each for cap in given.caps.split(",") for each in ((AUTO_KEEPS, AUTO) if cap == AUTO else (cap,))]
            found = work(given.models, names, given.compressor, given.rounds, given.steps)
        if Place.from_env(None).rank == 0:
            given.worker.write_text(json.dumps(found))
        return 0
    unknown = [model for model in given.models.split(",") if model not in MODELS]
    if unknown:
        parser.error(f"no model is called {unknown[0]!r}; there are {', '.join(MODELS)}")
    try:
        if any(float(cap) <= 0 for cap in given.caps.split(",") if cap != AUTO):
            raise ValueError
    except ValueError:
        parser.error(f"--caps are numbers above zero, or auto, with commas between, got {given.caps!r}")
    rows: list[dict[str, Any]] = []
    raw = given.json.with_suffix(".raw")
    for model in given.models.split(","):
        settings = ["--caps", given.caps, "--compressor", given.compressor, "--worker", str(raw)]
        settings += ["--rounds", str(given.rounds), "--steps", str(given.steps)]
        with open_network(2, given.rate) as network:
            bulk = ", ".join(format_rate(one.payload_bps) for one in measure_bulk_rate(network))
            run_workers(
                network, [sys.executable, "-m", "benchmarks.buckets", "--models", model, *settings],
                pin=True, deadline_s=1800.0,
            )  # fmt: skip
        rows += json.loads(raw.read_text())
        raw.unlink()
    config = {"rate": given.rate, "compressor": given.compressor, "rounds": given.rounds, "steps": given.steps}
    results.write(given.json, results.record(config, 0, rows))
    results.console(150).print(table_of(rows, f"{given.compressor}, {given.rate} (bulk {bulk})"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
