"""Mutated files against every reader: strategies, jobs, clusters, traces, sensitivities and measured intervals.

A reader may return what it is for or raise its own named error, within a second of processor time and 200 MB, and
nothing else. What loads although it was changed goes on, a sample of it, through the commands that use it.
"""

from __future__ import annotations

import io
import json
import random
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from espresso.diagnosis.findings import diagnose
from espresso.flight.form import Flight, Script, Span, StepRecord, Stretch, Tick, Traffic
from espresso.model.costs import ComputeCost, Contention, CopyCost, CostModel, Op
from espresso.model.job import Job
from espresso.model.links import AlphaBeta, LinkCurve, Links
from espresso.model.presets import job_from_trace, load_cluster
from espresso.search.error_budget import Sensitivity
from espresso.show.flight_events import flight_events
from espresso.show.trace_events import trace_body
from espresso.strategies import (
    PLAIN,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    FormError,
    Mode,
    Routine,
    Scope,
    Slot,
    Strategy,
    TensorSpec,
    parse_option,
)

SECONDS = 1.0
MEGABYTES = 200
COMMAND_SECONDS = 25.0

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 255, 2**31, 2**53, 2**62, 2**63, 2**64, -(2**62), 10**18),
    *(0.0, -0.5, 1e-320, 1e-9, 1e15, 1e17, 1e300, "", "a", " ", "*", "0", "[/]", "[bold]", "\x1b[31m", "\x00"),
    *("\ud800", "e\u0301", "\u202e", "x" * 20_000, "flat.allreduce", "comp > flat.allgather > dec", "comp"),
    *(" > " * 3000, "none", "dgc:ratio=nan", "dgc:ratio=0.01", "dgc:ratio=" + "9" * 400, "float16", "espresso-job"),
    *([], [[]], [0], [1, 2, 3], ["a", 1, 2], {}, {"a": 1}, {"": {}}),
)
RAW = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400, "9" * 6000, "-" + "9" * 30, "0." + "1" * 5000),
    *("1e-5000", "[" * 100_000, "[" * 900 + "]" * 900, "[" * 100_000 + "]" * 100_000, '{"a":' * 50_000),
    *('{"a":' * 500 + "1" + "}" * 500, '"\\ud800"', '"\\udfff\\ud800"', '{"a":1,"a":2}', "[" + "0," * 500_000 + "0]"),
    *("[" + "{}," * 120_000 + "{}]", '"' + "y" * 3_000_000 + '"', "tru", "'a'", "01", "+1", "1.", "--1", "//"),
    *("\ufeff", "\x00"),
)


class TooSlowError(BaseException):
    """A second has passed. No reader may catch it."""


@dataclass
class Tally:
    """What became of the files of one kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    slowest_s: float = 0.0
    through: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.outcomes += other.outcomes
        self.through += other.through
        self.wrong += other.wrong
        self.slowest_s = max(self.slowest_s, other.slowest_s)


@dataclass(frozen=True)
class Kind:
    """A kind of file: a sound body, and its reader."""

    body: Any
    load: Callable[[Path], Any]


TENSORS = tuple(
    TensorSpec(name, shape, dtype)
    for name, shape, dtype in (
        ("head.weight", (512, 128), "float32"),
        ("head.bias", (512,), "float32"),
        ("norm", (64,), "bfloat16"),
        ("empty", (0, 3), "float32"),
    )
)
GATHER = "comp > flat.allgather > dec"


def _costs() -> CostModel:
    compute = tuple(
        ComputeCost(name, device, op, ((0.0, 0.0), (1e5, 30.0)), 5.0, 1.0)
        for name in ("dgc", "fp16")
        for device in (Device.TRAINING, Device.OFFLOAD)
        for op in (Op.ENCODE, Op.DECODE)
    )
    curve = LinkCurve(Routine.ALLREDUCE, Scope.FLAT, Form.RAW, ((1e3, 10.0), (1e6, 900.0)))
    links = Links(AlphaBeta(5.0, 0.1), AlphaBeta(20.0, 1.0), (curve,))
    return CostModel(links, compute, CopyCost(1.0, 0.1), Contention(2.0, 1.0, 1.0, {"flat.allreduce": 0.5}))


def _job(mode: Mode) -> Job:
    buckets: Any = {}
    if mode is Mode.DDP:
        slots = ((Slot("head.bias", 0, 512), Slot("head.weight", 512, 65536)), (Slot("empty", 0, 0),))
        both = (Bucket(0, slots[0]), Bucket(1, slots[1]), Bucket(2, (Slot("norm", 0, 64),), "bfloat16"))
        buckets = {"buckets": both, "bucket_ready_us": (10.0, 50.0, 90.0)}
    meta = {"cpu": "any", "automatic": {"exact_vectors": 64, "partition_bytes": None, "sign_block": 64}}
    gaps = (0.0, 10.0, 30.0, 50.0)
    return Job(
        "toy", TENSORS, gaps, Cluster(2, 1), _costs(), mode, forward_us=99.0, source="fuzz", meta=meta, **buckets
    )


def sound_strategy() -> Strategy:
    choice = Choice(parse_option(GATHER), CompressorSpec.parse("dgc:ratio=0.01"))
    choices = {"head.weight": choice, "head.bias": PLAIN, "norm": PLAIN, "empty": PLAIN}
    return Strategy(TENSORS, choices, Cluster(2, 1), 1 << 16, 25.0, {"made": "by hand", "n": [1, {"x": 2.5}]})


def _flight() -> Flight:
    slots = (Slot("head.bias", 0, 512), Slot("head.weight", 512, 65536))
    stretch = Stretch(sound_strategy(), (Bucket(0, slots),))
    spans = tuple(
        Span(task.index, 80.0 + task.index, 80.5 + task.index, 81.0 + task.index, 8) for task in stretch.plan.tasks
    )
    steps = tuple(
        StepRecord(
            n, 0, Script(0.0, 1.0, 0.0, 1, 5.0, 6.0, 20.0, 21.0, 80.0, 95.0, 96.0, 99.0), (80.0,), 94.0, spans=spans
        )
        for n in range(3)
    )
    looks = (Traffic(1.0, 5, 1.0, 0.5, 9.0), Traffic(2.0, 50, 9.0, 0.7, 9.0))
    return Flight(0, 2, "here", Cluster(2, 1), (stretch,), steps, (Tick(1.0, 2.0, 3.0),), looks, {"cores": 1})


def _diagnosed(path: Path) -> str:
    flight = Flight.load(path)
    trace_body([], flight_events([flight]))
    return str(diagnose([flight]))


@cache
def kinds() -> dict[str, Kind]:
    """Every kind of file that a user can give."""
    line = {"alpha_us": 1, "beta_us_per_kb": 0.5}
    head = {"schema_version": 1, "kind": "espresso-cluster"}
    losses = {CompressorSpec.parse("dgc:ratio=0.01"): {"*": 0.9, "norm": 0.1}, CompressorSpec("fp16"): {"*": 0.001}}
    trace = {
        "model": "m",
        "source": "s",
        "columns": ["name", "numel", "gap_us"],
        "tensors": [["a", 64, 0], ["b", 9, 2.5]],
    }
    return {
        "strategy": Kind(sound_strategy().to_json(), Strategy.load),
        "job": Kind(_job(Mode.DDP).to_json(), Job.load),
        "paper job": Kind(_job(Mode.PAPER).to_json(), Job.load),
        "cluster": Kind(
            {**head, "intra": line, "inter": line, "copy": {**line, "shares_intra": True}, "measured": {"links": [1]}},
            load_cluster,
        ),
        "sensitivity": Kind(Sensitivity(losses).to_json(), Sensitivity.load),
        "trace": Kind(trace, lambda path: job_from_trace(path, 2, 2, "pcie-25g")),
        "flight record": Kind(_flight().to_json(), _diagnosed),
    }


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in a tree of lists and dicts."""
    found = []
    waiting, seen = [tree], set()
    while waiting:
        here = waiting.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        keys: Any = here.keys() if isinstance(here, dict) else range(len(here))
        for key in keys:
            found.append((here, key))
            if isinstance(here[key], dict | list):
                waiting.append(here[key])
    return found


def _change_tree(draw: random.Random, body: Any) -> bytes:
    """The JSON of a body with one to three values replaced, removed, doubled, renamed or swapped."""
    tree, raw = json.loads(json.dumps(body)), ""
    for _ in range(draw.randint(1, 3)):
        here, key = draw.choice(places(tree))
        what = draw.randrange(8)
        if what < 3:
            here[key] = deepcopy(draw.choice(ODD))
        elif what == 3:
            raw, here[key] = draw.choice(RAW), "@raw@"
        elif what == 4:
            del here[key]
        elif what == 5 and isinstance(here, dict):
            here[draw.choice([o for o in ODD if isinstance(o, str)])] = here.pop(key)
        elif what == 6:
            other, place = draw.choice(places(tree))
            here[key] = json.loads(json.dumps(other[place]))
        elif isinstance(here[key], int | float) and not isinstance(here[key], bool):
            here[key] = here[key] * draw.choice((-1, 0, 10, 1e3, 1e6, 1e9, 1e12)) + draw.choice((0, 1))
        if not places(tree):
            break
    text = json.dumps(tree)
    return text.replace('"@raw@"', raw).encode("utf-8", "surrogatepass")


def _change_bytes(draw: random.Random, data: bytes) -> bytes:
    """The file with bytes changed, cut, doubled or something put before it."""
    spoilt, at = bytearray(data), draw.randrange(len(data))
    what = draw.randrange(8)
    if what < 3:
        for _ in range(draw.randint(1, 8)):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256) if what else draw.choice(b'0123456789-.e"[]{},:')
    elif what == 3:
        del spoilt[at:]
    elif what == 4:
        del spoilt[at : at + draw.randint(1, 64)]
    elif what == 5:
        spoilt[at:at] = spoilt[at : at + draw.randint(1, 200)]
    elif what == 6:
        spoilt[at:at] = draw.choice(RAW).encode("utf-8", "surrogatepass")
    else:
        return draw.choice(
            (b"", b"\xef\xbb\xbf" + data, data.decode().encode("utf-16"), draw.randbytes(300), b"\0" * 99)
        )
    return bytes(spoilt)


def mutated(draw: random.Random, body: Any) -> bytes:
    """A spoilt file."""
    return _change_tree(draw, body) if draw.random() < 0.7 else _change_bytes(draw, json.dumps(body).encode())


@dataclass
class limits:
    """Processor time and memory that what runs inside may take."""

    seconds: float
    megabytes: int

    def __enter__(self) -> None:
        signal.signal(signal.SIGPROF, _too_slow)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (self.megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _too_slow(*_: object) -> None:
    raise TooSlowError


def one_file(tally: Tally, name: str, seed: str, path: Path) -> bool:
    """Write and read one spoilt file; whether it loads and says something else than the sound one."""
    kind = kinds()[name]
    data = mutated(random.Random(seed), kind.body)
    path.write_bytes(data)
    begin = time.process_time()
    loads = False
    try:
        with limits(SECONDS, MEGABYTES):
            kind.load(path)
        tally.outcomes["loaded"] += 1
        loads = True
    except FormError as error:
        tally.outcomes["refused"] += 1
        if len(str(error)) > 60_000:
            tally.wrong.append({"kind": name, "seed": seed, "error": f"a message of {len(str(error))} characters"})
    except (Exception, TooSlowError) as error:
        tally.outcomes["wrong"] += 1
        tally.wrong.append({"kind": name, "seed": seed, "error": f"{type(error).__name__}: {error}"[:300]})
    tally.slowest_s = max(tally.slowest_s, time.process_time() - begin)
    return loads


COMMANDS = {
    "strategy": (("validate", "{file}"), ("validate", "{file}", "--job", "{job}"), ("explain", "{file}"),
                 ("simulate", "{job}", "{file}"), ("simulate", "{job}", "{file}", "--json")),
    "job": (("simulate", "{file}", "{strategy}"), ("search", "{file}", "-c", "dgc:ratio=0.01", "--json"),
            ("compare", "{file}", "-c", "dgc:ratio=0.01"), ("search", "{file}", "-c", "fp16", "--from", "{strategy}")),
    "paper job": (("simulate", "{file}", "{strategy}"), ("search", "{file}", "-c", "fp16"),
                  ("compare", "{file}", "-c", "dgc:ratio=0.01", "--json")),
    "sensitivity": (("search", "{job}", "-c", "fp16", "--sensitivity", "{file}", "--error-budget", "0.1"),),
    "flight record": (("diagnose", "{folder}", "--trace", "{out}"), ("diagnose", "{folder}", "--json")),
    "cluster": (("job", "vgg16", "--nodes", "2", "--ranks-per-node", "1", "--cluster", "{file}", "-o", "{out}"),),
    "trace": (("job", "{file}", "--nodes", "2", "--ranks-per-node", "2", "--cluster", "pcie-25g", "-o", "{out}"),),
}  # fmt: skip


def through_commands(tally: Tally, name: str, seed: str, files: dict[str, str]) -> None:
    """Run what loads through a command that uses it: an exit status and a message, never a traceback or a hang."""
    from espresso.cli import app

    command = [part.format(**files) for part in random.Random(seed).choice(COMMANDS[name])]
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said), limits(COMMAND_SECONDS, 20 * MEGABYTES):
            app(command, standalone_mode=False)
        tally.through["done"] += 1
    except (SystemExit, Exception, TooSlowError) as error:
        status = getattr(error, "exit_code", getattr(error, "code", None))
        if isinstance(error, Exception | SystemExit) and status in (0, 1, 2):
            tally.through["refused"] += 1
            return
        tally.through["wrong"] += 1
        tally.wrong.append({"kind": command[0], "seed": seed, "error": f"{type(error).__name__}: {error}"[:300]})


def run_slice(seed: int, first: int, count: int, share: float) -> dict[str, Tally]:
    """Files ``first`` to ``first + count``; ``share`` of those that load go through a command."""
    tallies = {name: Tally() for name in kinds()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run" / "flight-00000.json"
        path.parent.mkdir()
        files = {"file": str(path), "folder": str(path.parent), "out": str(Path(folder) / "out.json")}
        for key, kind in (("job", "job"), ("strategy", "strategy")):
            files[key] = str(Path(folder) / f"sound_{key}.json")
            Path(files[key]).write_text(json.dumps(kinds()[kind].body))
        for number in range(first, first + count):
            name = list(kinds())[number % len(kinds())]
            label = f"{seed}/{number}"
            if one_file(tallies[name], name, label, path) and random.Random(label + "?").random() < share:
                through_commands(tallies[name], name, label, files)
    return tallies


def rows_of(tallies: dict[str, Tally]) -> list[dict[str, Any]]:
    """What became of each kind."""
    return [
        {
            "kind": name,
            "inputs": tally.outcomes.total(),
            "loaded": tally.outcomes["loaded"],
            "refused": tally.outcomes["refused"],
            "wrong": len(tally.wrong),
            "slowest_s": round(tally.slowest_s, 2),
            "through_commands": tally.through.total(),
        }
        for name, tally in tallies.items()
    ]


def table(tallies: dict[str, Tally], seed: int, seconds: float) -> str:
    """What became of each kind, as Markdown, and what was wrong."""
    rows = rows_of(tallies)
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    lines += ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]
    wrong = [row for tally in tallies.values() for row in tally.wrong]
    lines += ["", f"Seed {seed}, {seconds:.0f} s; {len(wrong)} wrong."]
    lines += [f"- {row['kind']}, seed {row['seed']}: {row['error']}" for row in wrong]
    return "\n".join(lines) + "\n"
