"""What the hook costs when nothing is compressed: the uncompressed strategy against plain DDP.

    python -m benchmarks.overhead

Two ranks on loopback without a limit, one core each, many buckets. All arms live in one process group and
alternate in short blocks; the ratio is taken between neighbours, its interval over all pairs. The models are
made anew every round, each time in another order: two equal plain models can differ by several per cent for
their lives, by where their memory lies. PyTorch's own allreduce hooks stand beside ours, in Python and in C++:
what any hook costs, since only plain DDP divides by the number of ranks while it copies a gradient.

    python -m benchmarks.overhead --device cuda --backend nccl --json benchmarks/results/overhead_gpu_nccl.json

On the first GPU: both ranks over Gloo; over NCCL one rank alone, and so the hook without an exchange: two processes on
one GPU take turns, and what one's kernels wait for comes in the other's turn.

    python -m benchmarks.overhead --recorder

What the flight recorder costs: our hook with it against our hook without, on one model, whose recorder is paused in
one step of two, at random. In some steps it looks at the end of every exchange. A typical ratio knows nothing of what
is seldom, so those steps are compared by themselves, and count by how many they are.

    python -m benchmarks.overhead --watch

What ``adapt=True`` costs, the watch and the guard, where all matrices are compressed: on two models, and, since that is
less than two models differ by, the time that threads spend in its own code, as a share of a step.
"""

import gc
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.emulated import Host, Network, run_workers
from benchmarks.emulated.interrupts import termination_raises
from benchmarks.models import build_workload
from benchmarks.ratios import Ratio, paired_ratio
from benchmarks.train import is_there, name_of, process_group

BAR = 1.03
ARMS = ("plain", "espresso", "torch's allreduce hook", "torch's C++ hook")
RECORDER_BAR = 1.005
RECORDER_ARMS = ("espresso, no recorder", "espresso")
WATCH_ARMS = ("espresso, no watch", "espresso")
SIGNS = "comp > flat.allgather > dec"
"""The first is what the others are compared with."""

RECORDER_PAIRS = 15
"""Times as many pairs, of a step each, where both arms are one model: what is looked for is less than noise."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Case:
    """A model and its buckets. Only a judged case counts against the bar."""

    model: str
    bucket_cap_mb: float
    rounds: int
    pairs: int
    steps: int
    judged: bool


CASES = (
    Case("mlp", 1.0, 12, 12, 2, False),
    Case("gpt", 1.0, 12, 5, 2, True),
    Case("deep", 0.25, 8, 10, 4, True),
)
"""The bar is for many buckets. ``deep``: 48 narrow layers, so that a bucket costs next to nothing and what is left
is the hook. ``mlp``, for information, has three buckets, large ones: what any hook adds there is a pass over them."""


@dataclass(frozen=True)
class Result:
    """One arm of one case."""

    model: str
    arm: str
    num_buckets: int
    step_ms: float
    ratio: Ratio
    judged: bool
    bar: float = BAR
    own_us: float | None = None

    @property
    def passes(self) -> bool:
        """Whether the interval ends at or below the bar; the watch's own code takes no more than that of a step."""
        if self.own_us is not None:
            return 1 + self.own_us / (1e3 * self.step_ms) <= self.bar
        return self.ratio.high <= self.bar


class _Own:
    """Time of this process's threads in the code of the watch and the guard, but for describing buckets."""

    def __init__(self) -> None:
        from espresso.live.guard import Guard
        from espresso.live.watch import Watch

        self.ns, self.calls, self.is_on = 0, 0, False
        for kind, names in ((Watch, ("take", "look")), (Guard, ("begin", "see", "end", "look"))):
            for name in names:
                setattr(kind, name, self._timed(getattr(kind, name)))
        empty = self._timed(lambda: None)
        self.is_on = True
        for _ in range(10_000):
            empty()
        self._each_ns = self.ns / self.calls  # of the clock itself
        self.restart()

    def restart(self) -> None:
        """Begin to count anew, switched off."""
        self.ns, self.calls, self.is_on = 0, 0, False

    @property
    def us(self) -> float:
        """So far."""
        return (self.ns - self._each_ns * self.calls) / 1e3

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            sees = function.__name__ == "see"
            if not self.is_on or (sees and arguments[0]._check is None):  # which only describes the bucket
                return function(*arguments, **named)
            begin = time.thread_time_ns()
            if sees:
                arguments = (*arguments[:-1], self._apart(arguments[-1]))
            try:
                return function(*arguments, **named)
            finally:
                self.ns += time.thread_time_ns() - begin
                self.calls += 1

        return run

    def _apart(self, describe: Callable[[], Any]) -> Callable[[], Any]:
        def described() -> Any:
            begin = time.thread_time_ns()
            try:
                return describe()
            finally:
                self.ns -= time.thread_time_ns() - begin

        return described


def _deep() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(48):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers)


class _Job:
    """One DDP model per arm, made in this order, on the same batch."""

    def __init__(self, case: Case, seed: int, order: Sequence[str], device: str) -> None:
        torch.manual_seed(seed)
        self._device = device
        if case.model == "deep":
            inputs = torch.randn(32, 256)
            targets = torch.randint(256, (32,))
            make = _deep
        else:
            workload = build_workload(case.model, seed)
            inputs, targets = workload.batch(0, dist.get_rank(), dist.get_world_size())
            make = workload.make_model
        self.inputs, self.targets = inputs.to(device), targets.to(device)
        self.models: dict[str, DistributedDataParallel] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.states: list[Any] = []
        self.num_buckets = 0
        self.has_looked = False
        self._watch = WATCH_ARMS[0] in order
        self.pauses = RECORDER_ARMS[0] in order
        for arm in order:
            if self.pauses and self.models:
                first = next(iter(self.models))
                self.models[arm], self.optimizers[arm] = self.models[first], self.optimizers[first]
                continue
            model = DistributedDataParallel(make().to(device), bucket_cap_mb=case.bucket_cap_mb)
            self._attach(arm, model)
            self.models[arm] = model
            self.optimizers[arm] = torch.optim.SGD(model.parameters(), lr=1e-4)

    def _attach(self, arm: str, model: DistributedDataParallel) -> None:
        import espresso
        from espresso.live.names import named_gradients, tensor_specs
        from espresso.strategies import Choice, Cluster, CompressorSpec, Strategy, parse_option

        if arm in (*RECORDER_ARMS, *WATCH_ARMS):
            tensors = tensor_specs(named_gradients(model))
            watched = self._watch and arm == "espresso"
            strategy = Strategy.uniform(tensors, Cluster(dist.get_world_size(), 1))
            if self._watch:  # matrices alone, as in automatic mode
                choice = Choice(parse_option(SIGNS), CompressorSpec("efsignsgd"))
                strategy = strategy.with_choices({t.name: choice for t in tensors if len(t.shape) > 1})
            self.states.append(espresso.register(model, strategy=strategy, ranks_per_node=1, adapt=watched))
        elif arm == "torch's allreduce hook":
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        elif arm != "plain":
            kinds: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]
            model._register_builtin_comm_hook(kinds.ALLREDUCE)  # type: ignore[no-untyped-call]

    def block(self, arm: str, steps: int) -> float:
        """Seconds per step on the slowest rank, between barriers."""
        model, optimizer = self.models[arm], self.optimizers[arm]
        if self.pauses and arm == RECORDER_ARMS[0]:
            self.states[0].session.recording.pause()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            outputs = model(self.inputs)
            loss = nn.functional.cross_entropy(outputs.flatten(0, -2), self.targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if self._device != "cpu":
            torch.cuda.synchronize()
        elapsed = torch.tensor((time.perf_counter() - begin) / steps, dtype=torch.float64)
        self.has_looked = self.pauses and arm != RECORDER_ARMS[0] and self._has_looked()
        if self.pauses and arm == RECORDER_ARMS[0]:
            self.states[0].session.recording.go_on()
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return float(elapsed)

    def _has_looked(self) -> bool:
        """Whether the recorder looked at exchanges in the step that has ended: the same step on all ranks."""
        return bool(self.states[0].session.recorder.flight(1).steps[-1].spans)

    def close(self) -> None:
        for state in self.states:
            state.close()


def _buckets_of(model: DistributedDataParallel) -> int:
    data: Any = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return len(str(data["rebuilt_bucket_sizes"] or data["bucket_sizes"]).split(","))


def work(
    case: Case, seed: int, arms: Sequence[str] = ARMS, own: _Own | None = None, device: str = "cpu"
) -> list[Result]:
    """Measure one case; every rank of the default group calls it."""
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    looked_at: dict[str, list[float]] = {arm: [] for arm in arms}
    draw = random.Random(seed)
    if own is not None:
        own.restart()
    buckets = steps = 0
    for turn in range(case.rounds):
        order = _rotated(arms, turn)
        job = _Job(case, seed, order, device)
        for arm in order:
            job.block(arm, 3)
        for pair in range(case.pairs):
            order = draw.sample(arms, len(arms)) if job.pauses else _rotated(arms, pair)
            taken = {}
            for arm in order:
                if own is not None and arm == WATCH_ARMS[1]:
                    own.is_on, steps = True, steps + case.steps
                taken[arm] = job.block(arm, case.steps), job.has_looked
                if own is not None:
                    own.is_on = False
            kept = looked_at if any(looked for _, looked in taken.values()) else times
            for arm, (step_s, _) in taken.items():
                kept[arm].append(step_s)
        buckets = _buckets_of(job.models[arms[0]])
        job.close()
        del job
        gc.collect()
    rows = summarize(case, buckets, times, looked_at)
    if own is not None:
        rows = [replace(row, own_us=own.us / steps) if row.arm == WATCH_ARMS[1] else row for row in rows]
    return rows


def _rotated(arms: Sequence[str], turn: int) -> Sequence[str]:
    """The arms, rotated, forward and backward in turn: all are first as often, and none always follows the same."""
    first = turn // 2 % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order if turn % 2 == 0 else order[::-1]


def summarize(
    case: Case, num_buckets: int, times: dict[str, list[float]], looked_at: dict[str, list[float]]
) -> list[Result]:
    """One row per arm, each against the first; steps that were looked at (of the recorder) count by their number."""
    base = next(iter(times))

    def ratio(arm: str) -> Ratio:
        usual, few = paired_ratio(times[arm], times[base]), looked_at[arm]
        if not few:
            return usual
        seldom, share = paired_ratio(few, looked_at[base]), len(few) / (len(few) + len(times[arm]))
        mixed = [(1 - share) * a + share * b for a, b in zip(astuple(usual), astuple(seldom), strict=True)]
        return Ratio(*mixed)

    bar = RECORDER_BAR if base in (RECORDER_ARMS[0], WATCH_ARMS[0]) else BAR
    return [
        Result(
            case.model,
            arm,
            num_buckets,
            1e3 * statistics.median(values),
            ratio(arm),
            case.judged and arm == "espresso",
            bar,
        )
        for arm, values in times.items()
    ]


def table_of(rows: Sequence[Result]) -> Table:
    """For people."""
    bar, base = (rows[0].bar, rows[0].arm) if rows else (BAR, ARMS[0])
    own = any(row.own_us is not None for row in rows)
    what = f"the code's own time adds at most {bar - 1:.1%}" if own else f"the interval ends at or below {bar}"
    title = f"Against {base}; bar: {what}"
    table = Table(title=title, title_justify="left")
    headers = (
        "model",
        "arm",
        "buckets",
        "step, ms",
        f"time / {base}",
        "95 % interval",
        *(["own, us"] if own else []),
        "",
    )
    for header in headers:
        table.add_column(header, justify="left" if header in ("model", "arm", "") else "right")
    for row in rows:
        verdict = ("pass" if row.passes else "[bold red]MISS[/]") if row.judged else ""
        interval = f"{row.ratio.low:.3f} … {row.ratio.high:.3f}"
        table.add_row(
            row.model, row.arm, str(row.num_buckets), f"{row.step_ms:.1f}", f"{row.ratio.value:.3f}", interval,
            *([("" if row.own_us is None else f"{row.own_us:.0f}")] if own else []), verdict,
        )  # fmt: skip
    return table


@app.command()
def main(
    models: Annotated[str, typer.Option(help="Comma-separated: mlp, gpt, deep.")] = "mlp,gpt,deep",
    quick: Annotated[bool, typer.Option(help="A quarter of the rounds.")] = False,
    recorder: Annotated[bool, typer.Option("--recorder", help="With the flight recorder against without.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="With the watch of adapt=True against without.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    backend: Annotated[str, typer.Option(help="gloo, or nccl for what is on the GPU.")] = "gloo",
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "overhead.json",
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the overhead of the uncompressed strategy on loopback."""
    chosen = [case for case in CASES if case.model in models.split(",")]
    if quick:
        chosen = [replace(c, rounds=max(1, c.rounds // 4)) for c in chosen]
    if recorder:
        chosen = [replace(c, pairs=RECORDER_PAIRS * c.pairs, steps=1) for c in chosen]
    if watch:  # the guard looks every 64 steps
        chosen = [replace(c, rounds=max(1, c.rounds // 4), pairs=4 * c.pairs) for c in chosen]
    if worker is not None:
        _as_worker(worker, chosen, seed, RECORDER_ARMS if recorder else WATCH_ARMS if watch else ARMS, device, backend)
        return
    if not is_there(device, backend):
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    raw = json_path.with_suffix(".raw")
    ranks = 1 if backend == "nccl" else 2
    network = Network(tuple(Host(i, None, "127.0.0.1", "lo") for i in range(ranks)), None, "asked for loopback")
    argv = [sys.executable, "-m", "benchmarks.overhead", "--models", models, "--seed", str(seed)]
    argv += ["--worker", str(raw), *(["--quick"] if quick else []), *(["--recorder"] if recorder else [])]
    argv += [*(["--watch"] if watch else []), "--device", device, "--backend", backend]
    json_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with termination_raises():
            run_workers(network, argv, pin=device == "cpu", deadline_s=1800)
        rows = [Result(**{**row, "ratio": Ratio(**row["ratio"])}) for row in json.loads(raw.read_text())]
    finally:
        raw.unlink(missing_ok=True)
    config = {"ranks": ranks, "network": "loopback, no limit", "cases": [asdict(case) for case in chosen]}
    config |= {"device": name_of(device), "backend": backend}
    results.write(json_path, results.record(config, seed, [asdict(row) for row in rows]))
    results.console(110).print(table_of(rows))
    if any(row.judged and not row.passes for row in rows):
        raise typer.Exit(1)


def _as_worker(out: Path, chosen: list[Case], seed: int, arms: Sequence[str], device: str, backend: str) -> None:
    torch.set_num_threads(1)
    with process_group(120.0, backend):
        own = _Own() if WATCH_ARMS[0] in arms else None
        rows = [row for case in chosen for row in work(case, seed, arms, own, device)]
        if dist.get_rank() == 0:
            out.write_text(json.dumps([asdict(row) for row in rows]))
        dist.barrier()


if __name__ == "__main__":
    app()
