"""Does the guard on averages notice an encoder that lies, and is it silent while encoders are sound?

    python -m benchmarks.guard

Two ranks, three small models on digits, each with another compressor, one again with corrected momentum. First
every model trains with sound encoders: an alarm is a false one. Then each lie, told by all ranks and by one of
them, from step ``SOUND`` on: it has to be noticed within ``WITHIN`` steps, and the group of a tensor that was lied
about has to be named.

A lying encoder keeps its books as if it had sent what it should.
"""

# No `from __future__ import annotations` here: typer reads the annotations.
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import results
from benchmarks.rank_pool import RankPool
from espresso.compressors.base import Decoding, Encoding
from espresso.cpu_offload.codec import HostCodec

Array = npt.NDArray[Any]
SOUND, WITHIN, STEPS = 40, 100, 3000
NUM_RANKS = 2
ROWS = 16

app = typer.Typer(pretty_exceptions_enable=False)


# -- lies ------------------------------------------------------------------------------------------

Lie = Callable[[str, Array], Array]
"""What a segment of a tensor is sent as instead of its numbers."""


@contextmanager
def lying(lie: Lie) -> Iterator[None]:
    """Encoders keep their books as if they had sent what they should."""
    encode = HostCodec.encode

    def other(self: HostCodec, encoding: Encoding, payload: Any) -> bool:
        finite = encode(self, encoding, payload)
        layout = encoding.layout
        starts = np.concatenate(([0], np.cumsum(layout.numels)[:-1])).astype(np.int64)
        values = np.zeros(layout.num_elements, layout.dtype)
        self.decode(Decoding(layout, values, starts, key=encoding.key), payload.reshape(1, -1))
        for segment, at in zip(layout.segments, starts, strict=True):
            part = slice(at, at + segment.numel)
            values[part] = lie(segment.tensor, values[part].copy())
        encode(self, Encoding(layout, values, starts, key=encoding.key), payload)
        return finite

    HostCodec.encode = other  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostCodec.encode = encode  # type: ignore[method-assign]


def zeroed(tensor: str) -> Lie:
    """One tensor is sent as zeros."""
    return lambda name, values: values * 0 if name == tensor else values


def halved(tensor: str, values: Array) -> Array:
    """Everything is sent at half its scale."""
    return values / 2


class Stale:
    """The same numbers again and again."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], Array] = {}

    def __call__(self, tensor: str, values: Array) -> Array:
        return self._first.setdefault((tensor, values.size), values)


LIES: dict[str, Callable[[str], Lie]] = {
    "zeroes a tensor": zeroed,
    "halves scales": lambda tensor: halved,
    "stale numbers": lambda tensor: Stale(),
}


# -- jobs ------------------------------------------------------------------------------------------


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _convolutions() -> nn.Module:
    from benchmarks.models import Residual

    body = [nn.Unflatten(1, (1, 8, 8)), Residual(1, 16, 1), Residual(16, 32, 2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(512, 10))


def _attention() -> nn.Module:
    from benchmarks.models import Vit

    return Vit(48, 2, 4)


@dataclass(frozen=True)
class Job:
    """A model, how it is compressed, and the tensor that may be zeroed."""

    make: Callable[[], nn.Module]
    option: str
    compressor: str
    tensor: str
    adamw: bool = False


ONCE = "comp > flat.allgather > dec"
TWICE = "comp > flat.all_to_all > dec > comp > flat.allgather > dec"
JOBS = {
    "mlp": Job(_mlp, ONCE, "efsignsgd", "2.weight"),
    "convolutions": Job(_convolutions, TWICE, "topk:ratio=0.02", "2.inner.3.weight"),
    "attention": Job(_attention, TWICE, "int8", "encoder.layers.0.linear1.weight", adamw=True),
    "mlp, corrected momentum": Job(_mlp, TWICE, "dgc:ratio=0.05,momentum=0.9,nesterov=true", "2.weight"),
}


@dataclass(frozen=True)
class Told:
    """What a run told: the rows of its history that the guard wrote, and how long a step took."""

    alarms: list[dict[str, Any]]
    step_ms: float
    loss: float


def train(rank: int, name: str, steps: int, lie: str = "", liars: tuple[int, ...] = ()) -> Told:
    """A job whose encoders are sound for ``steps`` steps; then they lie until that is noticed, if there is a lie."""
    import espresso
    from benchmarks.exchange import uniform
    from benchmarks.models import digits

    job = JOBS[name]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(job.make(), bucket_cap_mb=0.1)
    kind: Any = torch.optim.AdamW if job.adamw else torch.optim.SGD
    optimizer = kind(ddp.parameters(), lr=1e-3 if job.adamw else 0.02)
    images, labels = digits()[0]
    state = espresso.register(ddp, strategy=uniform(job.option, job.compressor), ranks_per_node=1, adapt=True)

    def step(number: int) -> float:
        draw = torch.Generator().manual_seed(number * NUM_RANKS + rank)
        rows = torch.randint(len(labels), (ROWS,), generator=draw)
        optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(ddp(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def alarms() -> list[dict[str, Any]]:
        return [row for row in state.history if row["event"] == "backed_off"]

    try:
        loss, begin = 0.0, time.perf_counter()
        for number in range(steps):
            loss = step(number)
        step_ms = 1e3 * (time.perf_counter() - begin) / steps
        honest: Lie = lambda tensor, values: values  # noqa: E731
        if lie:
            with lying(LIES[lie](job.tensor) if rank in liars else honest):
                for number in range(steps, steps + WITHIN):
                    step(number)
                    if alarms():
                        break
        return Told(alarms(), step_ms, loss)
    finally:
        state.close()


@dataclass(frozen=True)
class Row:
    """One run: ``noticed_after`` steps, None if it was not; ``named`` is the first alarm's reason."""

    model: str
    compressor: str
    lie: str
    liars: str
    steps: int
    noticed_after: int | None
    named: str
    step_ms: float
    loss: float
    passes: bool


def run(pool: RankPool, name: str, steps: int, lie: str = "", liars: tuple[int, ...] = ()) -> Row:
    """One run on all ranks; all of them have to tell the same."""
    told = pool.run(train, name, steps, lie, liars, deadline_s=900)
    alarms = told[0].alarms
    alike = all([a["reason"] for a in each.alarms] == [a["reason"] for a in alarms] for each in told)
    after = alarms[0]["step"] - steps if alarms else None
    named = alarms[0]["reason"] if alarms else ""
    group = JOBS[name].tensor.rpartition(".")[0]
    right = bool(alarms) and after is not None and 0 <= after <= WITHIN and f"'{group}'" in named
    passes = alike and (right if lie else not alarms)
    who = "" if not lie else "all ranks" if len(liars) == NUM_RANKS else f"rank {liars[0]}"
    return Row(name, JOBS[name].compressor, lie, who, steps, after, named, told[0].step_ms, told[0].loss, passes)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Sound steps of each model.")] = STEPS,
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "guard.json",
) -> None:
    """Sound steps, then every lie; 1 if a lie was missed or an alarm was false."""
    pool, rows = RankPool(NUM_RANKS), []
    everybody = tuple(range(NUM_RANKS))
    try:
        for name in JOBS:
            rows.append(run(pool, name, steps))
            for lie in LIES:
                rows += [run(pool, name, SOUND, lie, liars) for liars in (everybody, everybody[-1:])]
    finally:
        pool.close()
    table = Table(title=f"Alarms of the guard; a lie is to be noticed within {WITHIN} steps", title_justify="left")
    for header in ("model", "compressor", "lie", "of", "sound steps", "noticed after", "loss", ""):
        table.add_column(header)
    for row in rows:
        after = "" if row.noticed_after is None else str(row.noticed_after)
        verdict = "pass" if row.passes else "[bold red]MISS[/]"
        cells = row.model, row.compressor, row.lie or "none", row.liars, str(row.steps), after, f"{row.loss:.3f}"
        table.add_row(*cells, verdict)
    results.console(120).print(table)
    results.write(json_path, results.record({"steps": steps, "ranks": NUM_RANKS}, 0, [asdict(row) for row in rows]))
    if not all(row.passes for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
