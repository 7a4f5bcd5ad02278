"""Does ``espresso diagnose`` name what is slow? Causes injected on emulated hosts, and clean runs.

    python -m benchmarks.diagnose

Every cause runs with and without it: it must be named first, on the right rank, and the gain that the timeline predicts
is compared with the one that removing it brought. Clean runs must find nothing. The recorded steps of every run also go
through the timeline, plain and compressed, and are compared with what they took.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espresso
from benchmarks import results
from benchmarks.emulated import Distance, Network, open_network, run_workers
from benchmarks.emulated.launch import cores_of
from benchmarks.emulated.quota import processor_quota
from benchmarks.train import process_group
from espresso.comm.errors import EspressoError
from espresso.diagnosis.findings import diagnose
from espresso.diagnosis.replay import costs_of, replay
from espresso.diagnosis.turns import Run
from espresso.flight.form import load_run
from espresso.live.names import named_gradients, tensor_specs
from espresso.strategies import PLAIN, Choice, Cluster, CompressorSpec, Device, Strategy, parse_option

GAIN_ERROR, STEP_ERROR = 0.15, 0.03
"""A predicted gain is right within so much of the measured one, or of a step."""

MEDIAN_REPLAY, WORST_REPLAY = 0.05, 0.10
FOUND, GAINS = 0.95, 0.95
"""Of the causes so many are named first, and so many gains are right."""

NEAR_MS = 0.2
BUSY = "while True: sum(range(1000))"

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Job:
    """What the workers train, and what is wrong with it.

    Attributes:
        compressor: none trains with plain averages.
        observed: recorded from outside, with DDP's own exchange.
        norms: buffers that DDP broadcasts, in layers.
        passes: of an optimizer's step; exchanged all, or under ``no_sync`` but for the last.
        input_ms, encode_ms: that the rank ``at`` waits for its input, or spends in every compression.
    """

    steps: int = 40
    width: int = 512
    layers: int = 6
    rows: int = 256
    bucket_cap_mb: float = 1.0
    compressor: str = "none"
    observed: bool = False
    norms: int = 0
    broadcasts: bool = True
    passes: int = 1
    no_sync: bool = True
    at: int = 0
    input_ms: float = 0.0
    encode_ms: float = 0.0
    backward_ms: float = 0.0


@dataclass(frozen=True)
class Case:
    """A cause, and the same without it.

    Attributes:
        kinds: of the finding that is to come first; none for a clean run.
        competitors: busy processes on the core of host ``job.at``.
        quota: part of its core that it may use.
        twin: the job without the cause, where it is the job that is wrong.
    """

    name: str
    kinds: tuple[str, ...]
    job: Job
    rate: str = "1gbit"
    rates: Mapping[int, str] = field(default_factory=dict)
    rtt_ms: float | None = None
    competitors: int = 0
    quota: float = 1.0
    twin: Job | None = None

    @property
    def rank(self) -> int | None:
        """Where it is, if it is somewhere."""
        return self.job.at if self.kinds and self.twin is None and self.rtt_ms is None else None

    def mended(self) -> "Case":
        job = self.twin or replace(self.job, input_ms=0.0, encode_ms=0.0, backward_ms=0.0)
        rtt_ms = None if self.rtt_ms is None else NEAR_MS
        return replace(self, kinds=(), job=job, rates={}, rtt_ms=rtt_ms, competitors=0, quota=1.0)


CODED = Job(compressor="efsignsgd")
CASES = (
    Case("thin card", ("thin_card",), Job(at=1), rates={1: "200mbit"}),
    Case("thin card at host 0", ("thin_card",), Job(at=0), rates={0: "300mbit"}),
    Case("thin card observed", ("thin_card",), Job(at=1, observed=True), rates={1: "200mbit"}),
    Case("competitor", ("slow_worker",), Job(at=1), competitors=1),
    Case("two competitors", ("slow_worker",), Job(at=0), competitors=2),
    Case("competitor observed", ("slow_worker",), Job(at=1, observed=True), competitors=1),
    Case("competitor beside compression", ("slow_worker",), replace(CODED, at=1), competitors=1),
    Case("half a core", ("slow_worker",), Job(at=1), quota=0.5),
    Case("half a core at host 0", ("slow_worker",), replace(CODED, at=0), quota=0.5),
    Case("slow input", ("slow_input",), Job(at=0, input_ms=40)),
    Case("slow input at host 1", ("slow_input",), Job(at=1, input_ms=25)),
    Case("slow backward", ("slow_backward",), Job(at=1, backward_ms=80)),
    Case("slow encoder", ("slow_encoder",), replace(CODED, at=1, encode_ms=12)),
    Case("slow encoder at host 0", ("slow_encoder",), replace(CODED, at=0, encode_ms=20)),
    Case("added latency", ("latency_bound",), Job(width=128, bucket_cap_mb=0.1), rtt_ms=20),
    Case("a little latency", ("latency_bound",), Job(width=128, bucket_cap_mb=0.1), rtt_ms=4),
    Case("buffer broadcast", ("buffer_broadcast",), Job(norms=60, layers=1), rate="100mbit",
         twin=Job(norms=60, layers=1, broadcasts=False)),
    Case("missing no_sync", ("missing_no_sync",), Job(passes=4, no_sync=False, steps=80), twin=Job(passes=4)),
    Case("buckets too small", ("buckets_too_small",), Job(width=64, layers=100, bucket_cap_mb=0.001),
         twin=Job(width=64, layers=100, bucket_cap_mb=25)),
    Case("buckets too large", ("buckets_too_large",), Job(bucket_cap_mb=100), rate="500mbit",
         twin=Job(bucket_cap_mb=1)),
)  # fmt: skip
CLEAN = (
    Case("clean", (), Job()),
    Case("clean observed", (), Job(observed=True)),
    Case("clean compressed", (), CODED),
    Case("clean fast network", (), Job(), rate="10gbit"),
    Case("clean slow network", (), Job(), rate="300mbit"),
)


# -- inside the workers ------------------------------------------------------------------------------


class _Net(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_layer(job.width) for _ in range(job.layers)))
        self.norms = nn.ModuleList(nn.BatchNorm1d(job.width) for _ in range(job.norms))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(inputs)
        for norm in self.norms:
            out = out + 0.01 * norm(out)
        return out


def _layer(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def _delays_encoding(state: espresso.EspressoState, job: Job) -> None:
    """Have this rank's compression take longer."""
    codec: Any = state.session.codecs(state.compressor, Device.TRAINING)
    encode = codec.encode

    def slowly(*args: Any, **more: Any) -> Any:
        time.sleep(job.encode_ms / 1e3)
        return encode(*args, **more)

    codec.encode = slowly


def work(job: Job, folder: Path) -> None:
    """Train, and leave a flight record."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = DistributedDataParallel(_Net(job), bucket_cap_mb=job.bucket_cap_mb, broadcast_buffers=job.broadcasts)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watched = espresso.observe(model, ranks_per_node=1) if job.observed else _registered(model, job)
    if job.encode_ms and rank == job.at and isinstance(watched, espresso.EspressoState):
        _delays_encoding(watched, job)
    if job.backward_ms and rank == job.at:
        first: Any = next(model.parameters())
        first.register_hook(lambda grad: time.sleep(job.backward_ms / 1e3))
    inputs = torch.randn(job.rows, job.width)
    for _ in range(job.steps // job.passes):
        if job.input_ms and rank == job.at:
            time.sleep(job.input_ms / 1e3)
        for number in range(job.passes):
            with ExitStack() as stack:
                if job.no_sync and number < job.passes - 1:
                    stack.enter_context(model.no_sync())
                model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    watched.record(folder)
    live = watched.diagnose().to_json()
    (folder / f"live{rank}.json").write_text(json.dumps(live))
    watched.close()


def work_all(folder: Path) -> None:
    """Train what the parent asks for, until there is no more."""
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    for number in itertools.count():
        here = folder / str(number)
        while not (here / "job").exists():
            if (folder / "end").exists():
                return
            time.sleep(0.02)
        work(Job(**json.loads((here / "job").read_text())), here)
        (here / f"done{dist.get_rank()}").touch()


def _registered(model: DistributedDataParallel, job: Job) -> espresso.EspressoState:
    choice = PLAIN
    if job.compressor != "none":
        choice = Choice(parse_option("comp > flat.allgather > dec"), CompressorSpec.parse(job.compressor))
    cluster = Cluster(dist.get_world_size(), 1)
    strategy = Strategy.uniform(tensor_specs(named_gradients(model)), cluster, choice, partition_bytes=0)
    compressor = "efsignsgd" if job.compressor == "none" else job.compressor
    return espresso.register(model, compressor, strategy, ranks_per_node=1)


# -- around them -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A run as diagnosed, or why it could not be run."""

    name: str
    wanted: str
    found: str
    right: bool
    step_ms: float = 0.0
    gain_ms: float = 0.0
    predicted_ms: float = 0.0
    replay_error: float = 0.0

    @property
    def gain_is_right(self) -> bool:
        off = abs(self.predicted_ms - self.gain_ms)
        return off <= max(GAIN_ERROR * self.gain_ms, STEP_ERROR * self.step_ms)


@contextmanager
def _slowed(case: Case, network: Network, folder: Path) -> Iterator[None]:
    """One host's processor is shared with busy processes, or has a quota."""
    core = sorted(cores_of(network.hosts[case.job.at]))[0]
    argv = ["taskset", "-c", str(core), sys.executable, "-c", BUSY]
    processes = [subprocess.Popen(argv) for _ in range(case.competitors)]
    try:
        with ExitStack() as stack:
            if case.quota < 1:
                members = stack.enter_context(processor_quota(case.quota, "diagnose"))
                members.write_text((folder / f"pid{case.job.at}").read_text())
            yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _parent(cases: Sequence[Case], network: Network, folder: Path) -> Iterator[None]:
    """Have running workers train one case after the other; yields while it waits for them."""
    yield
    while len(list(folder.glob("pid*"))) < len(network.hosts):
        yield
    for number, case in enumerate(cases):
        if network.distance is not None:
            network.change(rate=case.rate, rtt_ms=case.rtt_ms)
        else:
            network.change(rate=case.rate)
        for host, rate in case.rates.items():
            network.change(rate=rate, host=host)
        here = folder / str(number)
        here.mkdir()
        with _slowed(case, network, folder):
            (here / "asked").write_text(json.dumps(asdict(case.job)))
            (here / "asked").rename(here / "job")
            while len(list(here.glob("done*"))) < len(network.hosts):
                yield
    (folder / "end").touch()
    while True:
        yield


def run(cases: Sequence[Case], hosts: int, folder: Path) -> None:
    """Train on emulated hosts, case after case in the same processes; records are left in ``folder/0`` and so on."""
    folder.mkdir(parents=True)
    far = cases[0].rtt_ms is not None
    with open_network(hosts, cases[0].rate, distance=Distance() if far else None) as network:
        argv = [sys.executable, "-m", "benchmarks.diagnose", "--worker", str(folder)]
        parent = _parent(cases, network, folder)
        with closing(parent):  # type: ignore[type-var]
            run_workers(
                network, argv, pin=True, deadline_s=60.0 * len(cases) + 60.0,
                log_dir=folder, on_poll=lambda: next(parent),
            )  # fmt: skip


def replay_error(folder: Path) -> float:
    """Of recorded steps through the timeline: the median's error."""
    run = Run(load_run(folder))
    costs = costs_of(run)
    predicted = statistics.median(replay(turn, costs) for turn in run.turns)
    return predicted / statistics.median(turn.measured for turn in run.turns) - 1


def judge(case: Case, folder: Path, without: Path | None) -> Row:
    """One row, of a run's records and, for a cause, of a run without it."""
    found = diagnose(load_run(folder))
    error = replay_error(folder)
    first = found.findings[0] if found.findings else None
    named = "nothing" if first is None else f"{first.kind}{'' if first.rank is None else f' on rank {first.rank}'}"
    if without is None:
        return Row(case.name, "nothing", named, first is None, found.step_us / 1e3, replay_error=error)
    wanted = case.kinds[0] + ("" if case.rank is None else f" on rank {case.rank}")
    right = first is not None and first.kind in case.kinds and first.rank == case.rank
    after = diagnose(load_run(without))
    gain = (found.step_us - after.step_us) / 1e3
    # What of the cause is still there: no emulated hosts are without any latency.
    left_us = 0.0 if first is None else sum(each.gain_us for each in after.findings if each.kind == first.kind)
    predicted = 0.0 if first is None else (first.gain_us - left_us) / 1e3
    return Row(case.name, wanted, named, right, found.step_us / 1e3, gain, predicted, error)


def table_of(rows: Sequence[Row]) -> Table:
    """For people."""
    table = Table(title="What was wrong, and what was found first", title_justify="left")
    for header in ("case", "wanted", "found", "", "step, ms", "gain, ms", "predicted", "replay"):
        table.add_column(
            header, justify="right" if header in ("step, ms", "gain, ms", "predicted", "replay") else "left"
        )
    for row in rows:
        gain = (f"{row.gain_ms:.1f}", f"{row.predicted_ms:.1f}") if row.wanted != "nothing" else ("", "")
        verdict = "" if row.right else "[bold red]WRONG[/]"
        table.add_row(row.name, row.wanted, row.found, verdict, f"{row.step_ms:.1f}", *gain, f"{row.replay_error:+.1%}")
    return table


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Names of cases, comma-separated.")] = "",
    hosts: Annotated[int, typer.Option(help="Emulated hosts, a core each.")] = 2,
    clean: Annotated[int, typer.Option(help="Clean runs.")] = 10,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "diagnose.json",
    keep: Annotated[Path | None, typer.Option(help="Keep the flight records in this folder.")] = None,
    again: Annotated[bool, typer.Option(help="Judge the records that are kept, and run nothing.")] = False,
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Inject causes, diagnose, count."""
    if worker is not None:
        torch.set_num_threads(1)
        with process_group(120.0):
            work_all(worker)
        return
    cases = [*CASES, *(replace(CLEAN[n % len(CLEAN)], name=f"{CLEAN[n % len(CLEAN)].name} {n}") for n in range(clean))]
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    cases = [case for case in cases if not wanted or case.name in wanted]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if keep is None else keep
        for far in (False, True):
            chosen = [case for case in cases if (case.rtt_ms is not None) == far]
            if chosen:
                here = folder / ("far" if far else "near")
                rows += judged(chosen, here) if again else measured(chosen, hosts, here)
    results.write(json_path, results.record({"hosts": hosts, "clean": clean}, 0, [asdict(row) for row in rows]))
    results.console(140).print(table_of(rows))
    causes = [row for row in rows if row.wanted != "nothing"]
    if not summary(rows, causes):
        raise typer.Exit(1)


def measured(cases: Sequence[Case], hosts: int, folder: Path) -> list[Row]:
    """Every cause's run, and right after it one without the cause; clean runs alone."""
    runs = [each for case in cases for each in ([case, case.mended()] if case.kinds else [case])]
    try:
        run(runs, hosts, folder)
    except (EspressoError, RuntimeError) as error:
        typer.echo(f"stopped: {error}", err=True)
    return judged(cases, folder)


def judged(cases: Sequence[Case], folder: Path) -> list[Row]:
    """A row a case, of the records that :func:`measured` left."""
    rows, number = [], 0
    for case in cases:
        with_it, without = folder / str(number), folder / str(number + 1) if case.kinds else None
        number += 2 if case.kinds else 1
        try:
            rows.append(judge(case, with_it, without))
        except (EspressoError, ValueError, OSError) as error:
            rows.append(Row(case.name, ", ".join(case.kinds) or "nothing", f"failed: {error}"[:200], False))
    return rows


def summary(rows: Sequence[Row], causes: Sequence[Row]) -> bool:
    """Print counts and medians; whether all bars are met. A run that failed is a cause that was missed."""
    errors = [abs(row.replay_error) for row in rows if row.step_ms]
    typer.echo(
        f"{sum(row.right for row in causes)} of {len(causes)} causes named first;"
        f" {sum(not row.right for row in rows if row not in causes)} of {len(rows) - len(causes)} clean runs not clean;"
        f" {sum(row.right and row.gain_is_right for row in causes)} gains right; replay: median error"
        f" {statistics.median(errors) if errors else 0:.1%}, worst {max(errors, default=0):.1%}"
    )
    named = sum(row.right for row in causes) / len(causes) if causes else 1.0
    gains = sum(row.right and row.gain_is_right for row in causes) / len(causes) if causes else 1.0
    clean = all(row.right for row in rows if row not in causes)
    replayed = bool(errors) and statistics.median(errors) <= MEDIAN_REPLAY and max(errors) <= WORST_REPLAY
    return clean and named >= FOUND and gains >= GAINS and replayed


if __name__ == "__main__":
    app()
