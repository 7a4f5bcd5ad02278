"""How well the timeline predicts: simulated against measured iteration time, strategy by strategy.

    python -m benchmarks.prediction --model mlp --workers 1
    python -m benchmarks.prediction --rate 100mbit,1gbit --rtt-ms 0,5,20,50,100     # near and far, one table
    python -m benchmarks.prediction --rate 1gbit --job-path job.json                # and then, from that job alone:
    python -m benchmarks.prediction --rate 100mbit,300mbit --carried job.json       # as espresso what-if does it
    python -m benchmarks.prediction --hosts 4 --carried job.json
    python -m benchmarks.prediction --quota 0.5 --carried job.json                  # half a core, by two probes

On the demo's emulated network the job is measured once (gaps, links, what compressors cost), as automatic mode
does it; nothing that is measured later flows back. Then every strategy of the list is carried out by the live
job, all alternated in one process group, and its measured median stands beside what was predicted before.
"""

import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.emulated import Distance, describe, open_network, run_workers
from benchmarks.emulated.quota import processor_quota
from benchmarks.models import NAMES, Workload, build_workload
from benchmarks.train import MAX_STEPS_TO_DECIDE, process_group

MAX_MEDIAN_ERROR = 0.15
MAX_ERROR_FAR = 0.30
"""The worst that a strategy may be off between hosts far apart."""
CARRIED = (0.1085, 0.20, 0.9)
"""Of a job that was profiled elsewhere: the median error and the worst, at most, and Kendall's tau."""
CLEARLY, CLEARLY_FAR = 1.05, 1.10
"""Measured times that differ by more than this must be predicted in the right order."""

COMPRESSOR = "efsignsgd"
SHARDED = "comp > flat.all_to_all > dec > comp > flat.allgather > dec"
PIPELINES: tuple[tuple[str, str, str], ...] = (
    ("uncompressed", "flat.allreduce", "none"),
    ("fp16", "comp > flat.allreduce > dec", "fp16"),
    ("scaled sign, allgather", "comp > flat.allgather > dec", COMPRESSOR),
    ("scaled sign, all-to-all + allgather", SHARDED, COMPRESSOR),
    ("DGC, allgather", "comp > flat.allgather > dec", "dgc:ratio=0.01"),
)
"""Name, option, compressor; every tensor the same."""

HIERARCHICAL_PIPELINES: tuple[tuple[str, str, str], ...] = (
    (
        "scaled sign, inter allgather",
        "intra.reduce_scatter > comp > inter.allgather > dec > intra.allgather",
        COMPRESSOR,
    ),
    (
        "scaled sign, inter all-to-all + allgather",
        "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather",
        COMPRESSOR,
    ),
)
"""The pair that needs two workers a host."""

WARM_UP_STEPS = 12
"""Of each strategy: far apart a connection loses packets in its first steps, until its bursts are spread."""

SETTLING_STEPS, SETTLING_STEPS_FAR = 1, 8
"""Of a block, not counted. Far apart a strategy that comes after the others' turns loses packets for some steps, as a
job that never pauses does not; there blocks are half as many and twice as long."""
app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """One strategy: predicted before, measured after."""

    name: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Relative to what was measured; positive if the prediction was too long."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True)
class Score:
    """How well a list of rows was predicted. ``wrong_pairs`` differ clearly and are in the wrong order."""

    median_error: float
    kendall_tau: float
    num_clear_pairs: int
    wrong_pairs: tuple[tuple[str, str], ...]

    @property
    def passes(self) -> bool:
        """Whether both bars are met."""
        return self.median_error < MAX_MEDIAN_ERROR and not self.wrong_pairs


def score(rows: Sequence[Row], clearly: float = CLEARLY) -> Score:
    """Median absolute error, order of the pairs that differ clearly, and Kendall's tau over all pairs."""
    agree, wrong, clear = 0, [], 0
    pairs = list(combinations(rows, 2))
    for a, b in pairs:
        same = (a.measured_ms < b.measured_ms) == (a.predicted_ms < b.predicted_ms)
        agree += 1 if same else -1
        if max(a.measured_ms, b.measured_ms) > clearly * min(a.measured_ms, b.measured_ms):
            clear += 1
            if not same:
                wrong.append((a.name, b.name))
    errors = [abs(row.error) for row in rows]
    return Score(statistics.median(errors), agree / max(len(pairs), 1), clear, tuple(wrong))


# -- inside the workers ------------------------------------------------------------------------------


class _Trainee:
    """A DDP model with its optimizer, taking steps on the same data as every other."""

    def __init__(self, workload: Workload, bucket_cap_mb: float) -> None:
        self._workload = workload
        self.model = DistributedDataParallel(workload.make_model(), bucket_cap_mb=bucket_cap_mb)
        self._optimizer = workload.make_optimizer(self.model)
        self._count = 0

    def step(self) -> None:
        inputs, targets = self._workload.batch(self._count, dist.get_rank(), dist.get_world_size())
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._workload.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._count += 1

    def block(self, steps: int, settling: int) -> list[float]:
        """Milliseconds of each step after the settling ones, mean over the ranks."""
        dist.barrier()
        marks = []
        for count in range(settling + steps):
            self.step()
            if count + 1 >= settling:
                marks.append(time.perf_counter())
        taken = torch.tensor([1e3 * (b - a) for a, b in pairwise(marks)])
        dist.all_reduce(taken)
        return (taken / dist.get_world_size()).tolist()


def _profile(trainee: _Trainee) -> Any:
    """The job as automatic mode measures it, and nothing else."""
    import espresso

    os.environ["ESPRESSO_PROFILE_ONLY"] = "1"
    state = espresso.register(trainee.model, compressor=COMPRESSOR)
    while not state.decided:
        if trainee._count == MAX_STEPS_TO_DECIDE:
            raise RuntimeError("profiling did not end")
        trainee.step()
    del os.environ["ESPRESSO_PROFILE_ONLY"]
    job = state.job
    state.close()
    return job


def _with_costs(job: Any, specs: Sequence[str]) -> Any:
    """The job with the costs of further compressors, measured the same way."""
    from espresso.comm.groups import Groups
    from espresso.live.codec_costs import measure_compressor
    from espresso.live.codecs import HostCodecs
    from espresso.strategies import CompressorSpec, Device

    groups, codecs = Groups(None), HostCodecs(1)
    compute = list(job.costs.compute)
    largest = max(bucket.numel for bucket in job.buckets)
    for text in specs:
        spec = CompressorSpec.parse(text)
        for turn in range(dist.get_world_size()):
            # One after the other: the first compiles, the others find its kernels in the cache.
            if turn == dist.get_rank():
                codecs.warm_up([spec], ["float32"])
            dist.barrier()
        compute += measure_compressor(
            groups, codecs, spec, [Device.TRAINING], largest=largest, cores=job.costs.contention.cores or 1.0
        )
    codecs.close()
    groups.close()
    shared: list[Any] = [replace(job, costs=replace(job.costs, compute=tuple(compute)))]
    dist.broadcast_object_list(shared)
    return shared[0]


def _strategies(job: Any) -> list[tuple[str, Any, float]]:
    """Name, strategy, predicted microseconds, on rank 0's word."""
    from espresso.model.timeline import simulate
    from espresso.search.search import lay_out, search
    from espresso.strategies import Choice, CompressorSpec, Strategy, parse_option

    rows: list[Any] = []
    if dist.get_rank() == 0:
        pipelines = PIPELINES + (HIERARCHICAL_PIPELINES if job.cluster.is_hierarchical else ())
        for name, option, compressor in pipelines:
            choice = Choice(parse_option(option), CompressorSpec.parse(compressor))
            strategy = Strategy.uniform(job.tensors, job.cluster, choice)
            if strategy.only_averages:  # whole buckets, as plain DDP does it, whatever it says of partitions
                strategy = replace(strategy, partition_bytes=0)
            rows.append((name, strategy, simulate(lay_out(job, strategy), job).iteration_us))
        found = search(job, COMPRESSOR)
        rows.append(("chosen", found.strategy, found.predicted_us))
    shared = [rows]
    dist.broadcast_object_list(shared)
    return shared[0]


def _carried(path: Path, network: str, quota: float) -> Any:
    """A job that was measured elsewhere, on this network and so many hosts (:mod:`espresso.model.what_if`).

    Args:
        network: rate and round trip, with a space between.
        quota: of a core; with less than one the device is told by two probes.
    """
    from espresso.model.job import Job
    from espresso.model.probe import Probe
    from espresso.model.what_if import Change, changed, parse_gbit

    job, (rate, rtt_ms) = Job.load(path), network.split()
    nodes = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    far = float(rtt_ms) or None
    change = Change(num_nodes=nodes, inter_gbit=parse_gbit(rate), rtt_ms=far)
    if quota < 1:
        change = replace(change, here=Probe.load(path.with_suffix(".probe")), there=_probe())
    return changed(job, change)


def _probe() -> Any:
    """Of rank 0's device, for all ranks."""
    from espresso.live.probe import measure_probe

    shared = [measure_probe(1) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    return shared[0]


def measure(
    model: str,
    seed: int,
    rounds: int,
    steps: int,
    bucket_cap_mb: float,
    carried: Path | None,
    network: str,
    quota: float,
) -> tuple[list[Row], Any]:
    """Profile or carry over, predict, then run everything, alternated. Every rank calls it."""
    import espresso

    workload = build_workload(model, seed)
    if carried is None:
        job = _with_costs(_profile(_Trainee(workload, bucket_cap_mb)), ["fp16", "dgc:ratio=0.01"])
    else:
        job = _carried(carried, network, quota)
    found = _strategies(job)
    trainees, states = [], []
    for _, strategy, _ in found:
        trainee = _Trainee(workload, bucket_cap_mb)
        states.append(espresso.register(trainee.model, strategy=strategy))
        trainees.append(trainee)
    settling = SETTLING_STEPS
    if float(network.split()[1]):
        settling, rounds, steps = SETTLING_STEPS_FAR, (rounds + 1) // 2, 2 * steps
    for trainee in trainees:
        trainee.block(WARM_UP_STEPS, settling=1)
    times: list[list[float]] = [[] for _ in found]
    order = list(range(len(found)))
    for _ in range(rounds):
        for index in order:
            times[index] += trainees[index].block(steps, settling)
        order = order[1:] + order[:1]
    for state in states:
        state.close()
    rows = [
        Row(name, predicted_us / 1e3, statistics.median(taken))
        for (name, _, predicted_us), taken in zip(found, times, strict=True)
    ]
    return rows, job


# -- outside -----------------------------------------------------------------------------------------


def table_of(rows: Sequence[Row], total: Score, title: str, *, passes: bool, bar: float = MAX_MEDIAN_ERROR) -> Table:
    """For people."""
    verdict = "pass" if passes else "MISS"
    wrong = ", ".join(f"{a} / {b}" for a, b in total.wrong_pairs) or "none"
    caption = (
        f"median error {total.median_error:.1%} (bar: {bar:.1%}); of {total.num_clear_pairs}"
        f" pairs that differ clearly, in the wrong order: {wrong}; Kendall's tau {total.kendall_tau:.2f}: {verdict}"
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for header in ("strategy", "predicted, ms", "measured, ms", "error"):
        table.add_column(header, justify="left" if header == "strategy" else "right")
    for row in rows:
        table.add_row(row.name, f"{row.predicted_ms:.1f}", f"{row.measured_ms:.1f}", f"{row.error:+.1%}")
    return table


@dataclass(frozen=True)
class Cell:
    """Everything at one rate and one distance."""

    rate: str
    rtt_ms: float
    network: str
    rows: tuple[Row, ...]
    carried: bool = False

    @property
    def score(self) -> Score:
        return score(self.rows, CLEARLY_FAR if self.rtt_ms else CLEARLY)

    @property
    def worst(self) -> float:
        return max(abs(row.error) for row in self.rows)

    @property
    def passes(self) -> bool:
        """Whether the bars are met; between hosts far apart, and of a job carried over, the worst row has one too."""
        if self.carried:
            median, worst, tau = CARRIED
            return self.score.median_error <= median and self.worst <= worst and self.score.kendall_tau >= tau
        return self.score.passes and (not self.rtt_ms or self.worst < MAX_ERROR_FAR)

    def record(self) -> dict[str, Any]:
        """As the results file has it."""
        body = [asdict(row) | {"error": row.error} for row in self.rows]
        where = {"rate": self.rate, "rtt_ms": self.rtt_ms, "network": self.network}
        return where | {"rows": body, "score": asdict(self.score) | {"worst": self.worst}}


def matrix_of(cells: Sequence[Cell], title: str) -> Table:
    """All cells, a line each."""
    errors = [abs(row.error) for cell in cells for row in cell.rows]
    met = sum(cell.passes for cell in cells)
    caption = (
        f"all rows: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}; bars met in {met} cells"
    )
    table = Table(title=title, caption=f"{caption} of {len(cells)}", title_justify="left", caption_justify="left")
    for header in ("rate", "round trip, ms", "median error", "worst", "wrong pairs", ""):
        table.add_column(header, justify="left" if header == "rate" else "right")
    for cell in cells:
        total, verdict = cell.score, "pass" if cell.passes else "MISS"
        wrong = f"{len(total.wrong_pairs)} of {total.num_clear_pairs}"
        table.add_row(cell.rate, f"{cell.rtt_ms:g}", f"{total.median_error:.1%}", f"{cell.worst:.1%}", wrong, verdict)
    return table


@app.command()
def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(NAMES)}.")] = "mlp",
    rate: Annotated[str, typer.Option(help="Each host's egress limit; several with commas.")] = "1gbit",
    rtt_ms: Annotated[str, typer.Option(help="Round trip; 0 is a local network; several with commas.")] = "0",
    workers: Annotated[int, typer.Option(help="Workers per host.")] = 1,
    rounds: Annotated[int, typer.Option(help="Blocks of every strategy; far apart half as many.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of a block; far apart twice.")] = 6,
    bucket_cap_mb: Annotated[float, typer.Option(help="DDP's bucket size.")] = 25.0,
    seed: Annotated[int, typer.Option()] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Default: benchmarks/results.")] = None,
    job_path: Annotated[Path | None, typer.Option(help="Leave the job there, with all costs.")] = None,
    hosts: Annotated[int, typer.Option(help="Emulated hosts.")] = 2,
    carried: Annotated[
        Path | None, typer.Option(help="Predict from this job, measured elsewhere, and only run.")
    ] = None,
    quota: Annotated[float, typer.Option(help="Of a core, that every worker has.")] = 1.0,
    network_asked: Annotated[str, typer.Option("--network", hidden=True)] = "",
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Predict, then measure, and compare."""
    config = {
        "model": model, "workers": workers, "rounds": rounds, "steps": steps, "bucket_cap_mb": bucket_cap_mb,
        "hosts": hosts, "quota": quota,
    }  # fmt: skip
    if worker is not None:
        _as_worker(worker, model, seed, rounds, steps, bucket_cap_mb, job_path, carried, network_asked, quota)
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    console = results.console(120)
    target = (
        json_path
        or results.RESULTS_DIR / f"prediction_{model}_{rate}_{workers}{_suffix(rtt_ms, hosts, carried, quota)}.json"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    raw = target.with_suffix(".raw")
    argv = [sys.executable, "-m", "benchmarks.prediction", "--worker", str(raw), "--seed", str(seed)]
    for key, value in config.items():
        argv += [f"--{key.replace('_', '-')}", str(value)]
    if job_path is not None:
        argv += ["--job-path", str(job_path.resolve())]
    if carried is not None:
        argv += ["--carried", str(carried.resolve())]
    cells = []
    for one_rate in rate.split(","):
        for rtt in map(float, rtt_ms.split(",")):
            with open_network(hosts, one_rate, distance=Distance(rtt) if rtt else None) as network:
                described = describe(network)
                own = [*argv, "--network", f"{one_rate} {rtt:g}"]
                with _limited(hosts * workers, quota, raw) as limit:
                    run_workers(network, own, workers_per_host=workers, pin=True, deadline_s=1800, on_poll=limit)
            rows = tuple(Row(**row) for row in json.loads(raw.read_text()))
            raw.unlink()
            cell = Cell(one_rate, rtt, described, rows, carried is not None)
            bar = CARRIED[0] if cell.carried else MAX_MEDIAN_ERROR
            title = f"{model}, {hosts} hosts x {workers}, {described}"
            console.print(table_of(rows, cell.score, title, passes=cell.passes, bar=bar))
            cells.append(cell)
            results.write(target, results.record(config, seed, [cell.record() for cell in cells]))
    if len(cells) > 1:
        console.print(matrix_of(cells, f"{model}, {hosts} hosts x {workers}"))
    if not all(cell.passes for cell in cells):
        raise typer.Exit(1)


def _pid_file(raw: Path, rank: int) -> Path:
    return raw.with_suffix(f".pid{rank}")


@contextmanager
def _limited(num_ranks: int, quota: float, raw: Path) -> Iterator[Callable[[], None]]:
    """What gives each worker that told its pid its part of a core; to be called every so often."""
    with ExitStack() as stack:
        share = range(num_ranks) if quota < 1 else ()
        groups = [stack.enter_context(processor_quota(quota, f"prediction{rank}")) for rank in share]

        def limit() -> None:
            for rank, members in enumerate(groups):
                told = _pid_file(raw, rank)
                if told.exists() and told.read_text():
                    members.write_text(told.read_text())
                    told.unlink()

        yield limit


def _suffix(rtt_ms: str, hosts: int, carried: Path | None, quota: float) -> str:
    parts = [f"{rtt_ms}ms"] * (rtt_ms != "0") + [f"{hosts}hosts"] * (hosts != 2)
    parts += [f"{quota:g}core"] * (quota < 1) + ["carried"] * (carried is not None)
    return "".join(f"_{part}" for part in parts)


def _as_worker(
    out: Path,
    model: str,
    seed: int,
    rounds: int,
    steps: int,
    bucket_cap_mb: float,
    job_path: Path | None,
    carried: Path | None,
    network: str,
    quota: float,
) -> None:
    torch.set_num_threads(1)
    with process_group(120.0):
        if quota < 1:
            told = _pid_file(out, dist.get_rank())
            told.write_text(str(os.getpid()))
            while told.exists():  # an emulated host does not see the groups: who started it limits it
                time.sleep(0.1)
            dist.barrier()
        rows, job = measure(model, seed, rounds, steps, bucket_cap_mb, carried, network, quota)
        probe = None if job_path is None else _probe()
        if dist.get_rank() == 0:
            out.write_text(json.dumps([asdict(row) for row in rows]))
            if job_path is not None and probe is not None:
                job.save(job_path)
                probe.save(job_path.with_suffix(".probe"))
        dist.barrier()


if __name__ == "__main__":
    app()
