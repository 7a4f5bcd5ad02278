"""``espresso what-if``: the same job on another network, more machines, another device."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from espresso.commands._common import (
    ExitStatus,
    JobFile,
    JsonFlag,
    UserError,
    check_output,
    draw,
    emit_json,
    job_and_compressors,
    out,
    picture_option,
    usage_errors,
    user_errors,
    working,
)
from espresso.show.gantt import IMAGE_FORMATS

if TYPE_CHECKING:
    from espresso.model.job import Job
    from espresso.model.what_if import Change
    from espresso.search.what_if import Prediction
    from espresso.strategies import CompressorSpec

DEFAULT_COMPRESSORS = ("efsignsgd", "dgc:ratio=0.01")


@user_errors
def what_if(
    job: JobFile,
    nodes: Annotated[str, typer.Option(help="Machines: 2,4,16.", show_default="the job's")] = "",
    ranks_per_node: Annotated[str, typer.Option(help="Ranks on each: 1,8.", show_default="the job's")] = "",
    inter: Annotated[
        str, typer.Option(help="Networks between machines, by nominal rate: 100mbit,25gbit.", show_default="the job's")
    ] = "",
    rtt_ms: Annotated[str, typer.Option(help="Round trips between machines: 0.1,50.", show_default="the job's")] = "",
    device: Annotated[
        Path | None,
        typer.Option(help="Probe of another device, by espresso probe there.", show_default=False, readable=False),
    ] = None,
    measured_on: Annotated[
        Path | None,
        typer.Option(help="Probe of the device that the job ran on.", show_default=False, readable=False),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Another model: a job file whose tensors and passes are taken.", show_default=False, readable=False
        ),
    ] = None,
    compressor: Annotated[
        list[str] | None,
        typer.Option("--compressor", "-c", help="By default signs and DGC at 1 %, where the job has their costs."),
    ] = None,
    threshold: Annotated[
        bool, typer.Option(help="Also find the rate from which on compression stops paying, and what twice gives.")
    ] = True,
    plot: Annotated[Path | None, picture_option("steps against rates")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Predict the job's step, and what compression would gain, under other conditions."""
    from espresso.model.job import Job
    from espresso.model.probe import Probe
    from espresso.model.what_if import Change, of_model, own_gbit, parse_gbit, repaired, slowest

    check_output(plot, *IMAGE_FORMATS)
    loaded, specs = job_and_compressors(job, compressor or DEFAULT_COMPRESSORS)
    if not compressor:
        specs = _with_costs(loaded, specs)
    if model is not None:
        loaded = of_model(loaded, Job.load(model), specs)
    if device is not None and measured_on is None:
        raise UserError(
            "--device needs --measured-on: run espresso probe -o here.json where the job was measured", ExitStatus.USAGE
        )
    if measured_on is not None and device is None:
        raise UserError(
            "--measured-on needs --device: run espresso probe -o there.json on the device that is asked about",
            ExitStatus.USAGE,
        )
    base = Change(
        here=None if measured_on is None else Probe.load(measured_on),
        there=None if device is None else Probe.load(device),
    )
    with working(f"Predicting {loaded.model}", searches=True) as progress:
        from espresso.search.what_if import combinations, predict, stops_paying

        with usage_errors():
            asked = combinations(
                _whole_numbers("--nodes", nodes), _whole_numbers("--ranks-per-node", ranks_per_node),
                [parse_gbit(text) for text in _parts(inter)], _reals("--rtt-ms", rtt_ms), base,
            )  # fmt: skip
        rows = []
        for number, change in enumerate(asked):
            progress.update(f"{number + 1} of {len(asked)}", number / len(asked))
            rows.append(predict(loaded, specs, change))
        answers: dict[str, Any] = {}
        first = asked[0]
        if threshold and rows[0].inter_gbit is not None:
            answers["stops_paying_gbit"] = stops_paying(loaded, specs, first, progress.describe)
            twice = 2 * (first.inter_gbit or own_gbit(loaded))
            answers["twice"] = _in_range(loaded, specs, replace(first, inter_gbit=twice))
        mended = {host: _in_range(repaired(loaded, host), specs, first) for host in slowest(loaded)}
        answers["repaired"] = {host: row for host, row in mended.items() if row is not None}
    if plot is not None:
        from espresso.show.what_if import write_what_if

        draw(plot, write_what_if, rows, f"{loaded.model}, {', '.join(map(str, specs))}")
    _print(loaded, specs, rows, answers, json_output)


def _in_range(job: "Job", specs: "tuple[CompressorSpec, ...]", change: "Change") -> "Prediction | None":
    """What would be, or None where that is too far from what was measured."""
    from espresso.model.what_if import RangeError
    from espresso.search.what_if import predict

    try:
        return predict(job, specs, change)
    except RangeError:
        return None


def _with_costs(job: "Job", specs: "tuple[CompressorSpec, ...]") -> "tuple[CompressorSpec, ...]":
    """Those of the default ones that the job has costs for."""
    known = tuple(spec for spec in specs if job.costs.devices(spec))
    if not known:
        costs = ", ".join(sorted({cost.spec for cost in job.costs.compute})) or "none at all"
        raise UserError(f"name a compressor with -c; the job has costs for {costs}", ExitStatus.USAGE)
    return known


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole_numbers(option: str, text: str) -> list[int]:
    parts = _parts(text)
    if not all(part.isdecimal() and 0 < int(part) < 1 << 20 for part in parts):
        raise UserError(f"{option} {text}: give whole numbers from 1 on, as in 2,4,16", ExitStatus.USAGE)
    return [int(part) for part in parts]


def _reals(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in _parts(text)]
    except ValueError:
        raise UserError(f"{option} {text}: give numbers, as in 0.1,50", ExitStatus.USAGE) from None


def _print(
    job: "Job", specs: "tuple[CompressorSpec, ...]", rows: "list[Prediction]", answers: dict[str, Any], as_json: bool
) -> None:
    from espresso.show.what_if import remarks, what_if_table

    if as_json:
        twice = answers.get("twice")
        stops = answers.get("stops_paying_gbit")
        emit_json(
            {
                "model": job.model,
                "mode": job.mode.value,
                "compressors": [str(spec) for spec in specs],
                "rows": [row.to_json() for row in rows],
                # JSON has no infinity: null both where it always and where it never pays; "pays" of the rows tells.
                "stops_paying_gbit": stops if stops is not None and stops < float("inf") else None,
                "always_pays": stops == float("inf"),
                "twice": None if twice is None else twice.to_json(),
                "repaired": [{"host": host} | row.to_json() for host, row in answers["repaired"].items()],
            }
        )
        return
    console = out()
    console.print(what_if_table(rows))
    for line in remarks(job, rows, answers):
        console.print(line, markup=False)
