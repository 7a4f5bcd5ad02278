"""Does ``espresso diagnose`` name what is slow? Causes injected on emulated hosts, and clean runs.

    python -m benchmarks.diagnose

Every cause runs with and without it: it must be named first, on the right rank, and the gain that the timeline predicts
is compared with the one that removing it brought. Clean runs must find nothing. With ``--replay`` recorded steps go
through the timeline, plain and compressed, and are compared with what they took.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from benchmarks.train import process_group
from espresso.comm.errors import EspressoError
from espresso.diagnosis.findings import diagnose
from espresso.diagnosis.replay import costs_of, replay
from espresso.diagnosis.report import Diagnosis
from espresso.diagnosis.turns import Run
from espresso.flight.form import load_run
from espresso.live.names import named_gradients, tensor_specs
from espresso.strategies import PLAIN, Choice, Cluster, CompressorSpec, Device, Strategy, parse_option

ROOT = Path(__file__).resolve().parents[1]
GAIN_ERROR, STEP_ERROR = 0.15, 0.03
"""A predicted gain is right within so much of the measured one, or of a step."""

MEDIAN_REPLAY, WORST_REPLAY = 0.05, 0.10
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
    """

    name: str
    kinds: tuple[str, ...]
    job: Job
    rate: str = "1gbit"
    rates: Mapping[int, str] = field(default_factory=dict)
    rtt_ms: float | None = None
    competitors: int = 0
    twin: Job | None = None

    @property
    def rank(self) -> int | None:
        """Where it is, if it is somewhere."""
        return self.job.at if self.kinds and self.twin is None and self.rtt_ms is None else None

    def mended(self) -> "Case":
        job = self.twin or replace(self.job, input_ms=0.0, encode_ms=0.0, backward_ms=0.0)
        return replace(self, kinds=(), job=job, rates={}, rtt_ms=None if self.rtt_ms is None else 0.2, competitors=0)


CODED = Job(compressor="efsignsgd")
CASES = (
    Case("thin card", ("thin_card",), Job(at=1), rates={1: "200mbit"}),
    Case("thin card at host 0", ("thin_card",), Job(at=0), rates={0: "300mbit"}),
    Case("thin card observed", ("thin_card",), Job(at=1, observed=True), rates={1: "200mbit"}),
    Case("competitor", ("slow_worker", "slow_backward"), Job(at=1), competitors=1),
    Case("two competitors", ("slow_worker", "slow_backward"), Job(at=0), competitors=2),
    Case("competitor observed", ("slow_worker", "slow_backward"), Job(at=1, observed=True), competitors=1),
    Case("slow input", ("slow_input",), Job(at=0, input_ms=40)),
    Case("slow input at host 1", ("slow_input",), Job(at=1, input_ms=25)),
    Case("slow backward", ("slow_backward",), Job(at=1, backward_ms=30)),
    Case("slow encoder", ("slow_encoder",), replace(CODED, at=1, encode_ms=12)),
    Case("slow encoder at host 0", ("slow_encoder",), replace(CODED, at=0, encode_ms=20)),
    Case("added latency", ("latency_bound",), Job(width=128, bucket_cap_mb=0.1), rtt_ms=20),
    Case("buffer broadcast", ("buffer_broadcast",), Job(norms=60), twin=Job(norms=60, broadcasts=False)),
    Case("missing no_sync", ("missing_no_sync",), Job(passes=4, no_sync=False, steps=80), twin=Job(passes=4)),
    Case("buckets too small", ("buckets_too_small",), Job(width=256, layers=40, bucket_cap_mb=0.01),
         twin=Job(width=256, layers=40, bucket_cap_mb=5)),
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
def _competing(case: Case, network: Network) -> Iterator[None]:
    """Busy processes on one host's core."""
    core = sorted(cores_of(network.hosts[case.job.at]))[0]
    argv = ["taskset", "-c", str(core), sys.executable, "-c", BUSY]
    processes = [subprocess.Popen(argv) for _ in range(case.competitors)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(case: Case, hosts: int, folder: Path) -> Diagnosis:
    """Train on emulated hosts, and diagnose from the files."""
    folder.mkdir(parents=True)
    distance = None if case.rtt_ms is None else Distance(rtt_ms=case.rtt_ms)
    with open_network(hosts, case.rate, rates=case.rates, distance=distance) as network, _competing(case, network):
        argv = [sys.executable, "-m", "benchmarks.diagnose", "--worker", str(folder)]
        (folder / "job").write_text(json.dumps(asdict(case.job)))
        run_workers(network, argv, pin=True, deadline_s=240, env={"PYTHONPATH": str(ROOT)}, log_dir=folder)
    return diagnose(load_run(folder))


def replay_error(folder: Path) -> float:
    """Of recorded steps through the timeline: the median's error."""
    run = Run(load_run(folder))
    costs = costs_of(run)
    predicted = statistics.median(replay(turn, costs) for turn in run.turns)
    return predicted / statistics.median(turn.measured for turn in run.turns) - 1


def judge(case: Case, hosts: int, folder: Path) -> Row:
    """One row; a cause is run without it too."""
    found = run(case, hosts, folder / "with")
    error = replay_error(folder / "with")
    first = found.findings[0] if found.findings else None
    named = "nothing" if first is None else f"{first.kind}{'' if first.rank is None else f' on rank {first.rank}'}"
    if not case.kinds:
        return Row(case.name, "nothing", named, first is None, found.step_us / 1e3, replay_error=error)
    wanted = case.kinds[0] + ("" if case.rank is None else f" on rank {case.rank}")
    right = first is not None and first.kind in case.kinds and first.rank == case.rank
    mended = run(case.mended(), hosts, folder / "without")
    gain = (found.step_us - mended.step_us) / 1e3
    predicted = 0.0 if first is None else first.gain_us / 1e3
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
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Inject causes, diagnose, count."""
    if worker is not None:
        torch.set_num_threads(1)
        with process_group(120.0):
            work(Job(**json.loads((worker / "job").read_text())), worker)
        return
    cases = [*CASES, *(replace(CLEAN[n % len(CLEAN)], name=f"{CLEAN[n % len(CLEAN)].name} {n}") for n in range(clean))]
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    cases = [case for case in cases if not wanted or case.name in wanted]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if keep is None else keep
        for case in cases:
            try:
                rows.append(judge(case, hosts, folder / case.name.replace(" ", "_").replace(",", "")))
            except (EspressoError, ValueError, RuntimeError) as error:
                rows.append(Row(case.name, ", ".join(case.kinds) or "nothing", f"failed: {error}"[:200], False))
            results.console(140).print(table_of(rows[-1:]))
    results.write(json_path, results.record({"hosts": hosts, "clean": clean}, 0, [asdict(row) for row in rows]))
    results.console(140).print(table_of(rows))
    causes = [row for row in rows if row.wanted != "nothing"]
    print_summary(rows, causes)
    if not all(row.right for row in rows):
        raise typer.Exit(1)


def print_summary(rows: Sequence[Row], causes: Sequence[Row]) -> None:
    """Counts and medians."""
    errors = [abs(row.replay_error) for row in rows]
    typer.echo(
        f"{sum(row.right for row in causes)} of {len(causes)} causes named first;"
        f" {sum(not row.right for row in rows if row not in causes)} of {len(rows) - len(causes)} clean runs not clean;"
        f" {sum(row.gain_is_right for row in causes)} gains right; replay: median error"
        f" {statistics.median(errors) if errors else 0:.1%}, worst {max(errors, default=0):.1%}"
    )


if __name__ == "__main__":
    app()
