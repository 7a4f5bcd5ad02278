"""Weather: the network, the load and the batch change under a running job; who copes?

    python -m benchmarks.weather                          # the whole schedule, all arms, minutes
    python -m benchmarks.weather --change all              # single changes, adapt and fresh, some six minutes
    python -m benchmarks.weather --change none             # none, adapt alone, some two minutes

Every arm is a job of its own under the same schedule of phases, on two emulated hosts:

| arm      | meaning                                                                                             |
| -------- | --------------------------------------------------------------------------------------------------- |
| plain    | DDP as it is                                                                                        |
| frozen   | automatic mode, ``adapt=False``: the strategy of step 60 for ever                                   |
| adapt    | automatic mode, ``adapt=True``                                                                      |
| fixed:N  | one strategy throughout, ``FIXED`` lists them; the fastest is the best fixed strategy in hindsight  |
| fresh    | a new job in each phase, whose steps count once it has decided                                      |
| again    | plain once more, for what two jobs that do the same differ by; only if asked for                    |

What is best in each phase, known in advance, is the fastest there of all but adapt and again.

What two jobs take one after the other differs by more than the bars on a machine that others share. Where both adapt
and fresh run, a last job therefore plays their strategies against each other in every phase after the first, the
adaptive job's as it was ``WITHIN`` steps after the change: in blocks, in turn, each on a model of its own.

A phase is written ``rate/steps`` with more after commas: ``50mbit/150,load=0,batch=4,rtt=20``. ``load=HOST`` has a
competitor on that host's core. The step before a phase waits until the network is as it should be.
"""

# No `from __future__ import annotations` here: typer reads the annotations.
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import accumulate, cycle, islice, pairwise
from math import log10
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks import results
from benchmarks.emulated import Distance, Network, open_network, run_workers
from benchmarks.emulated.launch import cores_of

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "weather.svg"
WITHIN = 40
"""Steps after a change in which the adaptive job may look for a better strategy."""

OF_FRESH, OF_KNOWN, OF_PLAIN = 1.15, 1.10, 1.05
"""The bars: a phase's steps beyond those over a fresh decision's; all of the time over the best of each phase known in
advance; any ``PLAIN_WINDOW`` steps over plain's."""

QUIET, QUIET_WINDOW = 0.02, 1000
"""The bar where the weather never changes: the part of any ``QUIET_WINDOW`` steps that goes into probing."""

NEEDLESS = 1.0
"""The bar there for switches, in two thousand steps."""

PLAIN_WINDOW, SUMMED = 200, 20
"""A window's steps, and those of each sum that is kept of an arm: a window begins with one of them."""

SAMPLE, SAMPLE_S = 40, 5.0
"""An arm that does not decide on the way runs so many steps of a phase, or for so many seconds where that is more; the
rest of it is taken to be as these, again and again."""

AGAIN = "again"
DUEL, DUEL_BLOCK, DUEL_ROUNDS, SETTLES = "duel", 12, 10, 4
"""The last job: steps of a block, blocks of each, and a block's first steps, which do not count."""

UNLIMITED = "10gbit"
DEADLINE_S = 3600.0

FIXED = {
    "signs once": ("comp > flat.allgather > dec", "efsignsgd"),
    "signs twice": ("comp > flat.all_to_all > dec > comp > flat.allgather > dec", "efsignsgd"),
    "half": ("comp > flat.allreduce > dec", "fp16"),
}

CHANGES = {
    "plain slower": ("64,256,256,256,10", f"{UNLIMITED}/100 50mbit/120"),
    "slower": ("64,1024,1024,1024,10", f"{UNLIMITED}/100 200mbit/120"),
    "tenth": ("64,1024,1024,1024,10", "1gbit/100 100mbit/120"),
    "faster": ("64,1024,1024,1024,10", f"100mbit/100 {UNLIMITED}/120"),
    "load": ("64,1024,1024,1024,10", "1gbit/100 1gbit/300,load=0 1gbit/120"),
}
"""Single changes: the model's widths, and the schedule."""

QUIETS = {
    "short steps": ("64,512,512,512,10", f"{UNLIMITED}/2060"),
    "longer steps": ("64,1024,1024,1024,1024,10", f"{UNLIMITED}/2060"),
    "1 Gb/s": ("64,512,512,512,10", "1gbit/2060"),
    "100 Mb/s": ("64,512,512,512,10", "100mbit/2060"),
}
"""No change: likewise."""

SCHEDULE = (
    f"{UNLIMITED}/2000 50mbit/1600 200mbit/1600 1gbit/2000 1gbit/2000,load=0 {UNLIMITED}/1600,batch=4"
    f" 100mbit/1600,batch=4 100mbit/1600 {UNLIMITED}/2000"
)
WIDTHS = "64,512,512,512,10"

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Phase:
    """A stretch of steps under one weather.

    Attributes:
        rate: each host's egress limit.
        load: the host whose core has a competitor; None for none.
        batch: so many times the batch.
        rtt_ms: round trip; only where some phase has one.
    """

    rate: str
    steps: int
    load: int | None = None
    batch: int = 1
    rtt_ms: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Phase":
        """``rate/steps,key=value…``; ValueError if it is anything else."""
        head, *more = text.split(",")
        rate, _, steps = head.partition("/")
        values = dict(part.partition("=")[::2] for part in more)
        unknown = values.keys() - {"load", "batch", "rtt"}
        if not steps.isdigit() or unknown:
            raise ValueError(f"a phase is rate/steps,load=HOST,batch=TIMES,rtt=MS, got {text!r}")
        load = int(values["load"]) if "load" in values else None
        return cls(rate, int(steps), load, int(values.get("batch", 1)), float(values.get("rtt", 0.0)))


def parse_schedule(text: str) -> tuple[Phase, ...]:
    """Phases separated by blanks."""
    return tuple(Phase.parse(part) for part in text.split())


# -- a rank of one arm -----------------------------------------------------------------------------


def wait_for(phase: int, folder: Path, rank: int) -> None:
    """Say that a phase may begin, and wait until the network is its own. All ranks."""
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        (folder / f"ask{phase}").touch()
        while not (folder / f"go{phase}").exists():
            time.sleep(0.005)
    dist.barrier()


def the_same(value: float) -> float:
    """The largest of all ranks' values."""
    import torch
    import torch.distributed as dist

    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def work(arm: str, widths: str, schedule: str, folder: Path, decide_by: int) -> None:
    """Train through the schedule; rank 0 writes its steps' times, which add up to the job's."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import espresso

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank = dist.get_rank()
    if rank == 0:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    sizes = [int(width) for width in widths.split(",")]

    def trained() -> tuple[Any, Any]:
        """A new model and its optimizer."""
        torch.manual_seed(0)
        layers: list[Any] = []
        for before, after in pairwise(sizes):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        ddp = DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
        return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)

    def attach(ddp: Any) -> Any:
        if arm in ("plain", AGAIN, DUEL):
            return None
        if arm.startswith("fixed:"):
            return espresso.register(ddp, strategy=lambda t, c: fixed_strategy(arm.partition(":")[2], t, c))
        # Kernels first: an arm that compiles them would decide a minute later than the others, in another phase.
        return espresso.register(
            ddp, timeout_s=300.0, adapt=arm == "adapt", decide_by=decide_by, compile_beside=False
        )  # fmt: skip

    ddp, optimizer = trained()
    state = attach(ddp)
    number, events, ratios = 0, [], []
    step_s: list[float] = []
    probed_s: list[float] = []

    def duel(index: int, phase: Phase) -> float:
        """The time of the adaptive job's strategy over that of the fresh one's, of rank 0."""
        fighters = [(*trained(), name) for name in ("adapt", "fresh")]
        states = [
            espresso.register(ddp, strategy=str(strategy_file(folder.parent / name, index)), timeout_s=300.0)
            for ddp, _, name in fighters
        ]
        times: dict[str, list[float]] = {name: [] for *_, name in fighters}
        for _ in range(DUEL_ROUNDS):
            for ddp, optimizer, name in fighters:
                times[name] += [step(ddp, optimizer, phase.batch) for _ in range(DUEL_BLOCK)][SETTLES:]
        for state in states:
            state.close()
        return statistics.median(times["adapt"]) / statistics.median(times["fresh"])

    def step(ddp: Any, optimizer: Any, times: int) -> float:
        nonlocal number
        draw = torch.Generator().manual_seed(number * 100 + rank)
        inputs = torch.randn(16 * times, sizes[0], generator=draw)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(ddp(inputs), (inputs.sum(1) > 0).long())
        loss.backward()
        optimizer.step()
        number += 1
        taken = time.perf_counter() - begin
        if arm == "adapt":
            probed_s.append(state.session.decider.probed_us / 1e6)
        return taken

    for index, phase in enumerate(parse_schedule(schedule)):
        wait_for(index, folder, rank)
        if arm == DUEL:
            ratios += [duel(index, phase)] if index else []
            continue
        if arm == "fresh":
            if state is not None:
                state.close()
            ddp, optimizer = trained()
            state = attach(ddp)
            for _ in range(62):
                step(ddp, optimizer, phase.batch)
        # Where nothing is decided on the way, the rest of a phase is as its sample.
        decides = arm == "adapt" or (arm == "frozen" and index == 0)
        ran = [step(ddp, optimizer, phase.batch) for _ in range(min(phase.steps, WITHIN))]
        enough = max(SAMPLE, int(SAMPLE_S / the_same(statistics.median(ran))))
        num_steps = phase.steps if decides else min(phase.steps, enough)
        if state is not None and state.strategy is not None and rank == 0:
            state.strategy.save(strategy_file(folder, index))
        ran += [step(ddp, optimizer, phase.batch) for _ in range(num_steps - len(ran))]
        step_s += islice(cycle(ran), phase.steps)
        if state is not None and arm == "fresh":
            events.append({"step": len(step_s) - phase.steps, "event": "decided", "strategy": state.verdict})
    if state is not None and arm != "fresh":
        events = state.history
    if state is not None:
        state.close()
    if rank == 0:
        body = {"step_s": step_s, "events": events, "of_fresh": ratios, "probed_s": probed_s}
        (folder / "result.json").write_text(json.dumps(body))
    # A group that a model still holds has threads, and one that lets go of a tensor while the interpreter ends aborts
    # it (PyTorch 2.13, seen without this package).
    ddp = optimizer = state = None
    gc.collect()
    dist.destroy_process_group()


def strategy_file(folder: Path, phase: int) -> Path:
    """Where an arm leaves what was in use ``WITHIN`` steps after a phase began."""
    return folder / f"strategy{phase}.json"


def fixed_strategy(name: str, tensors: Any, cluster: Any) -> Any:
    """One of ``FIXED`` for matrices; vectors stay exact."""
    from espresso.strategies import Choice, CompressorSpec, Strategy, options_for, parse_option

    option, spec = FIXED[name]
    summable = {str(each): each for each in options_for(cluster, summable=True) if each.is_summable}
    parsed = summable[option] if spec == "fp16" else parse_option(option)
    large = {t.name: Choice(parsed, CompressorSpec.parse(spec)) for t in tensors if len(t.shape) > 1}
    return Strategy.uniform(tensors, cluster).with_choices(large)


# -- the weather -----------------------------------------------------------------------------------


class Weather:
    """Makes the network what each phase asks for, as the workers come to it."""

    def __init__(self, network: Network, phases: Sequence[Phase], folder: Path) -> None:
        self._network, self._phases, self._folder = network, phases, folder
        self._next = 0
        self._competitor: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Called every so often while the workers run."""
        if self._next < len(self._phases) and (self._folder / f"ask{self._next}").exists():
            self._become(self._phases[self._next])
            (self._folder / f"go{self._next}").touch()
            self._next += 1

    def end(self) -> None:
        """End the competitor, if there is one."""
        if self._competitor is not None:
            self._competitor.kill()
            self._competitor.wait()
            self._competitor = None

    def _become(self, phase: Phase) -> None:
        if self._network.rate_bps is not None:
            rtt_ms = None if self._network.distance is None else phase.rtt_ms
            self._network.change(rate=phase.rate, rtt_ms=rtt_ms)
        self.end()
        if phase.load is not None:
            core = min(cores_of(self._network.hosts[phase.load]))
            busy = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
            self._competitor = subprocess.Popen([sys.executable, "-c", busy])


def run_arm(arm: str, widths: str, schedule: str, folder: Path, decide_by: int) -> dict[str, Any]:
    """One job through the schedule."""
    phases = parse_schedule(schedule)
    folder.mkdir(parents=True)
    distance = Distance(phases[0].rtt_ms) if any(phase.rtt_ms for phase in phases) else None
    argv = [sys.executable, "-m", "benchmarks.weather", "--work", arm, "--widths", widths]
    argv += ["--schedule", schedule, "--folder", str(folder), "--decide-by", str(decide_by)]
    with open_network(2, phases[0].rate, distance=distance) as network, _ended(Weather(network, phases, folder)) as now:
        run_workers(network, argv, pin=True, deadline_s=DEADLINE_S, log_dir=folder, on_poll=now.look)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@contextmanager
def _ended(weather: Weather) -> Iterator[Weather]:
    try:
        yield weather
    finally:
        weather.end()


# -- figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One arm in one phase: milliseconds a step, over its first ``WITHIN`` steps, and beyond those."""

    phase: int
    arm: str
    first_ms: float
    later_ms: float


def rows_of(phases: Sequence[Phase], step_s: Mapping[str, Sequence[float]]) -> list[Row]:
    """Medians by phase."""
    rows, begin = [], 0
    for index, phase in enumerate(phases):
        for arm, times in step_s.items():
            mine = times[begin : begin + phase.steps]
            first, later = mine[:WITHIN], mine[WITHIN:] or mine
            rows.append(Row(index, arm, 1e3 * statistics.median(first), 1e3 * statistics.median(later)))
        begin += phase.steps
    return rows


def verdicts(
    phases: Sequence[Phase], step_s: Mapping[str, Sequence[float]], of_fresh: Sequence[float]
) -> dict[str, float]:
    """The figures that the bars are about, as far as the arms were run; automatic mode's first 60 steps are left out.

    Returns:
        ``of_fresh``: the worst phase after the first, of duels. Where plain runs too, ``of_known``: all of the time,
        over the fastest other arm of each phase; ``of_plain``: the worst window; ``again_of_plain``: of plain itself.
    """
    found: dict[str, float] = {}
    ours, plain, again = (step_s.get(arm) for arm in ("adapt", "plain", AGAIN))
    if plain and again:
        found["again_of_plain"] = _worst_window(again, plain)
    if ours is None:
        return found
    if of_fresh:
        found["of_fresh"] = max(of_fresh)
    others = [times for arm, times in step_s.items() if arm not in ("adapt", AGAIN)]
    if plain:
        ends = list(accumulate(phase.steps for phase in phases))
        known = [min(sum(times[max(begin, 60) : end]) for times in others) for begin, end in pairwise([0, *ends])]
        found["of_known"] = sum(ours[60:]) / sum(known)
        found["of_plain"] = _worst_window(ours, plain)
    return found


def sums_of(times: Sequence[float]) -> list[float]:
    """What every ``SUMMED`` steps took."""
    return [round(sum(times[at : at + SUMMED]), 5) for at in range(0, len(times), SUMMED)]


def _worst_window(ours: Sequence[float], plain: Sequence[float]) -> float:
    sums, first, size = [sums_of(ours), sums_of(plain)], 60 // SUMMED, PLAIN_WINDOW // SUMMED
    starts = range(first, max(len(sums[0]) - size, first) + 1)
    windows = [[sum(each[at : at + size]) for each in sums] for at in starts]
    return max(a / b for a, b in windows if b)


def most_probed(step_s: Sequence[float], probed_s: Sequence[float]) -> float:
    """The largest part of any ``QUIET_WINDOW`` steps beyond the 60th that went into probing; all of them if they are
    fewer. ``probed_s`` is what it was after each step.
    """
    size = max(min(QUIET_WINDOW, len(step_s) - 61), 1)
    starts = range(60, len(step_s) - size)
    return max(((probed_s[i + size] - probed_s[i]) / sum(step_s[i + 1 : i + size + 1]) for i in starts), default=0.0)


def table_of(phases: Sequence[Phase], rows: Sequence[Row], title: str) -> Table:
    """Milliseconds a step by phase; beyond the first ``WITHIN`` steps."""
    table = Table(title=title, title_justify="left")
    arms = list(dict.fromkeys(row.arm for row in rows))
    for header in ("phase", *arms):
        table.add_column(header, justify="left" if header == "phase" else "right")
    for index, phase in enumerate(phases):
        mine = {row.arm: f"{row.later_ms:.1f}" for row in rows if row.phase == index}
        more = "".join(
            f", {what}"
            for what in (
                f"load on host {phase.load}" if phase.load is not None else "",
                f"batch x{phase.batch}" if phase.batch > 1 else "",
                f"{phase.rtt_ms:g} ms" if phase.rtt_ms else "",
            )
            if what
        )
        table.add_row(f"{phase.rate}{more}", *(mine[arm] for arm in arms))
    return table


COLOURS = {"plain": "#b8bec6", "frozen": "#d29922", "adapt": "#1f6feb", "fresh": "#2da44e"}
WIDTH, HEIGHT, LEFT, TOP = 900, 320, 60, 30


def draw(phases: Sequence[Phase], step_s: Mapping[str, Sequence[float]], events: Sequence[Mapping[str, Any]]) -> str:
    """Step time over steps as SVG, the time's axis logarithmic, with phases and the adaptive job's events."""
    total = sum(phase.steps for phase in phases)
    values = [1e3 * each for times in step_s.values() for each in times]
    low, high = log10(min(values)), log10(max(values))
    across = (WIDTH - LEFT - 10) / max(total, 1)

    def y(ms: float) -> float:
        return TOP + (HEIGHT - TOP - 40) * (1 - (log10(ms) - low) / max(high - low, 1e-9))

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    begin = 0
    for phase in phases:
        x = LEFT + begin * across
        lines.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - 40}" stroke="#d0d7de"/>')
        load = " + load" if phase.load is not None else ""
        batch = f" x{phase.batch}" if phase.batch > 1 else ""
        lines.append(f'<text x="{x + 3:.1f}" y="{HEIGHT - 26}">{phase.rate}{load}{batch}</text>')
        begin += phase.steps
    for power in range(int(low) - 1, int(high) + 2):
        if low <= power <= high:
            lines.append(f'<text x="4" y="{y(10.0**power) + 4:.1f}">{10.0**power:g} ms</text>')
    stride = max(1, total // (2 * WIDTH))
    half = max(2, stride // 2)
    for place, (arm, times) in enumerate(step_s.items()):
        shown = {i: statistics.median(times[max(i - half, 0) : i + half + 1]) for i in range(0, len(times), stride)}
        points = " ".join(f"{LEFT + i * across:.1f},{y(1e3 * each):.1f}" for i, each in shown.items())
        colour = COLOURS.get(arm, "#8250df")
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(f'<text x="{LEFT + 110 * place}" y="14" fill="{colour}">{arm}</text>')
    for row in events:
        if row["event"] in ("decided", "switched", "kept", "backed_off"):
            x = LEFT + row["step"] * across
            lines.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - 40}" stroke="#1f6feb" stroke-dasharray="2 3"/>')
            lines.append(f'<text x="{x + 2:.1f}" y="{TOP - 3}" font-size="9">{row["event"]}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


LIMITS = {
    "of_fresh": OF_FRESH, "of_known": OF_KNOWN, "of_plain": OF_PLAIN, "again_of_plain": OF_PLAIN, "probing": QUIET,
    "switches": NEEDLESS,
}  # fmt: skip


def compare(
    names: Sequence[str], widths: str, schedule: str, folder: Path, decide_by: int, console: Any
) -> dict[str, Any]:
    """Run every arm through a schedule and print the figures; the body of a record, with every arm's step times."""
    phases = parse_schedule(schedule)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = run_arm(name, widths, schedule, folder / name.replace(":", "_").replace(" ", "_"), decide_by)
        console.print(f"{name}: {sum(found[name]['step_s']):.1f} s in {len(found[name]['step_s'])} steps")
    of_fresh: list[float] = []
    if {"adapt", "fresh"} <= found.keys():
        of_fresh = run_arm(DUEL, widths, schedule, folder / DUEL, decide_by)["of_fresh"]
        console.print(f"adapt over fresh, in turn, by phase: {', '.join(f'{ratio:.2f}' for ratio in of_fresh)}")
    step_s = {name: body["step_s"] for name, body in found.items()}
    rows = rows_of(phases, step_s)
    console.print(table_of(phases, rows, f"ms a step beyond a phase's first {WITHIN}, MLP {widths}"))
    for name, body in found.items():
        for row in body["events"]:
            console.print(f"  {name} step {row['step']:>5} {row['event']}: {row['strategy']} ({row.get('reason', '')})")
    bars = verdicts(phases, step_s, of_fresh)
    if "adapt" in found and len(phases) == 1:
        bars["probing"] = most_probed(step_s["adapt"], found["adapt"]["probed_s"])
        bars["switches"] = float(sum(row["event"] == "switched" for row in found["adapt"]["events"]))
    for name, value in bars.items():
        verdict = "pass" if value <= LIMITS[name] else "MISS"
        console.print(f"  {name}: {value:.3f}, bar {LIMITS[name]:.2f}, {verdict}")
    events = {name: body["events"] for name, body in found.items()}
    config = {"schedule": schedule, "widths": widths}
    rows_as_dicts = [asdict(row) for row in rows]
    return {
        "config": config, "rows": rows_as_dicts, "bars": bars, "of_fresh": of_fresh, "events": events, "step_s": step_s,
    }  # fmt: skip


@app.command()
def main(
    schedule: Annotated[str, typer.Option(help="Phases, separated by blanks.")] = "",
    change: Annotated[str, typer.Option(help=f"Single changes: 'all', 'none', or some of {', '.join(CHANGES)}.")] = "",
    widths: Annotated[str, typer.Option(help="Of the layers of the MLP.")] = "",
    arms: Annotated[str, typer.Option(help="Comma-separated.")] = "",
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "weather.json",
    picture: Annotated[Path, typer.Option(help="Where the picture of the schedule goes.")] = PICTURE,
    folder: Annotated[Path, typer.Option(help="For logs; made anew.")] = Path("weather"),
    work_arm: Annotated[str, typer.Option("--work", hidden=True)] = "",
    decide_by: Annotated[int, typer.Option(hidden=True)] = 58,
) -> None:
    """Run every arm through the schedule; a table by phase, the bars, and a picture."""
    if work_arm:
        work(work_arm, widths, schedule, folder, decide_by)
        return
    is_quiet = change == "none"
    single = QUIETS if is_quiet else CHANGES
    changes = list(single) if is_quiet or change == "all" else [name for name in change.split(",") if name]
    unknown = [name for name in changes if name not in single]
    if unknown:
        raise typer.BadParameter(f"no change is called {unknown[0]!r}; there are all, none, {', '.join(CHANGES)}")
    try:
        parse_schedule(schedule)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = results.console(160)
    base = folder / time.strftime("%H%M%S")
    cores = {"cores": sorted(os.sched_getaffinity(0))}
    if changes:
        bodies = {}
        for name in changes:
            its_widths, its_schedule = single[name]
            console.print(f"[bold]{name}[/]: {its_schedule}")
            names = (arms or ("adapt" if is_quiet else "adapt,fresh")).split(",")
            logs = base / name.replace(" ", "_").replace("/", "_")
            bodies[name] = compare(
                names, widths or its_widths, its_schedule, logs, decide_by if is_quiet else 0, console
            )
            del bodies[name]["step_s"]
        rows = [{"change": name} | row for name, body in bodies.items() for row in body["rows"]]
        kept = {name: {key: body[key] for key in ("bars", "of_fresh", "events")} for name, body in bodies.items()}
        own = "weather_quiet.json" if is_quiet else "weather_changes.json"
        json_path = json_path.with_name(own) if json_path.name == "weather.json" else json_path
        results.write(json_path, results.record(cores, 0, rows) | {"changes": kept})
        missed = [name for name, body in bodies.items() if any(v > LIMITS[k] for k, v in body["bars"].items())]
    else:
        names = arms.split(",") if arms else ["plain", "frozen", "adapt", "fresh", *(f"fixed:{name}" for name in FIXED)]
        schedule = schedule or SCHEDULE
        body = compare(names, widths or WIDTHS, schedule, base, decide_by, console)
        record = results.record(cores | body["config"], 0, body["rows"])
        sums = {"steps": SUMMED} | {arm: sums_of(times) for arm, times in body["step_s"].items()}
        results.write(json_path, record | {key: body[key] for key in ("bars", "of_fresh", "events")} | {"sums_s": sums})
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(draw(parse_schedule(schedule), body["step_s"], body["events"].get("adapt", ())))
        missed = [name for name, value in body["bars"].items() if value > LIMITS[name]]
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
