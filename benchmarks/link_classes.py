"""Would one compressor inside machines and another between them pay? By simulation, thirty cases.

    python -m benchmarks.link_classes

Five traces, two cluster presets, three sizes. What the search finds where every tensor takes one of the compressors is
compared with what it finds where every tensor takes one of them inside machines and another between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations, product
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from rich.table import Table

from benchmarks import results
from espresso.model.arrays import Reals, Wholes
from espresso.model.job import Job
from espresso.model.presets import cluster_names, job_from_trace, trace_names
from espresso.model.pricing import Pricer, SizeKey
from espresso.search import search as searching
from espresso.strategies import CompressorSpec, Option, Scope, Step, StepKind

SPECS = tuple(map(CompressorSpec.parse, ("efsignsgd", "dgc:ratio=0.01", "randomk:ratio=0.01")))
NODES, RANKS_PER_NODE = (2, 8, 32), 8
PAYS, OFTEN = 1.05, 3
"""It would be worth building where it gains so much in so many cases."""

app = typer.Typer(pretty_exceptions_enable=False)


class Mixed(Pricer):
    """Prices ``inside`` as ``between`` wherever a payload goes between machines, or is made or read for that."""

    inside: CompressorSpec
    between: CompressorSpec

    def columns(self, options: Sequence[Option], size: SizeKey) -> tuple[Wholes, Reals, Reals]:
        sets, us, beside = super().columns(options, size)
        if size[0] != self.inside:
            return sets, us, beside
        _, other_us, other_beside = super().columns(options, (self.between, *size[1:]))
        crossing = np.zeros(us.shape, dtype=bool)
        for row, option in enumerate(options):
            for place, crosses in enumerate(_crossing(option.steps)):
                crossing[row, place] = crosses
        return sets, np.where(crossing, other_us, us), np.where(crossing[..., None], other_beside, beside)


def _crossing(steps: Sequence[Step]) -> Iterator[bool]:
    """Of every step, whether it is for an exchange between machines: encoding for the next, decoding for the last."""
    for place, step in enumerate(steps):
        near = steps[place:] if step.kind is StepKind.COMPRESS else steps[place::-1]
        exchange = next((other for other in near if other.is_communication), None)
        yield exchange is not None and exchange.scope is not Scope.INTRA


@dataclass(frozen=True)
class Row:
    """A case: the best with one compressor a tensor, and with two."""

    trace: str
    preset: str
    nodes: int
    one_us: float
    two_us: float
    inside: str
    between: str

    @property
    def gain(self) -> float:
        return self.one_us / self.two_us


def row_of(trace: str, preset: str, nodes: int) -> Row:
    """Search a case every way."""
    job = job_from_trace(trace, nodes, RANKS_PER_NODE, preset)
    one = searching.search(job, SPECS).predicted_us
    two_us, inside, between = min((_mixed(job, a, b), str(a), str(b)) for a, b in permutations(SPECS, 2))
    return Row(trace, preset, nodes, one, two_us, inside, between)


def _mixed(job: Job, inside: CompressorSpec, between: CompressorSpec) -> float:
    def pricer(costs: Any, cluster: Any, payload: Any) -> Mixed:
        made = Mixed(costs, cluster, payload)
        made.inside, made.between = inside, between
        return made

    with patch.object(searching, "shared_pricer", pricer):
        return searching.search(job, inside).predicted_us


@app.command()
def main(
    json_path: Annotated[Path, typer.Option("--json")] = results.RESULTS_DIR / "link_classes.json",
    only: Annotated[str, typer.Option(help="One trace.")] = "",
) -> None:
    """Simulate all cases."""
    cases = list(product([only] if only else trace_names(), cluster_names(), NODES))
    rows = [row_of(*case) for case in cases]
    table = Table(title="One compressor a tensor, and one a link class", title_justify="left")
    for header in ("trace", "cluster", "machines", "one, ms", "two, ms", "gain", "inside", "between"):
        table.add_column(header)
    for row in rows:
        figures = (f"{row.one_us / 1e3:.1f}", f"{row.two_us / 1e3:.1f}", f"{row.gain:.3f}")
        table.add_row(row.trace, row.preset, str(row.nodes), *figures, row.inside, row.between)
    results.console(130).print(table)
    pays = sum(row.gain >= PAYS for row in rows)
    typer.echo(f"it gains {PAYS - 1:.0%} in {pays} of {len(rows)} cases; worth building from {OFTEN} on")
    body = [asdict(row) | {"gain": row.gain} for row in rows]
    results.write(json_path, results.record({"ranks_per_node": RANKS_PER_NODE}, 0, body))


if __name__ == "__main__":
    app()
