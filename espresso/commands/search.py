"""``espresso search``: from a job to a strategy."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from espresso.commands._common import (
    CompressorOption,
    ExitStatus,
    JobFile,
    JsonFlag,
    UserError,
    check_output,
    emit_json,
    out,
    parse_compressors,
    say,
    skip_blas,
    user_errors,
    working,
)

if TYPE_CHECKING:
    from espresso.model.job import Job
    from espresso.search.exactness import Automatic
    from espresso.search.frontier import FrontierPoint
    from espresso.search.result import SearchResult
    from espresso.strategies import CompressorSpec


@user_errors
def search(
    job: JobFile,
    compressor: CompressorOption,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The strategy file to write.", show_default=False)
    ] = None,
    error_budget: Annotated[
        float | None,
        typer.Option(min=0.0, help="Most error a strategy may make (docs/search.md).", show_default=False),
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(help="File: each compressor's relative error per tensor.", show_default=False),
    ] = None,
    frontier: Annotated[
        int | None,
        typer.Option(min=2, help="Also print time against error, so many points.", show_default=False),
    ] = None,
    old: Annotated[
        Path | None,
        typer.Option("--from", help="Replan: begin with this strategy, much faster.", show_default=False),
    ] = None,
    gentle: Annotated[
        bool | None,
        typer.Option(
            help="As automatic mode: small vectors stay exact, sums are compressed again only where that pays."
            " By default where the job was measured on a live run.",
            show_default=False,
        ),
    ] = None,
    exact_vectors: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --gentle: vectors of so many elements stay exact. By default as in the live run.",
            show_default=False,
        ),
    ] = None,
    bucket_caps: Annotated[
        bool | None,
        typer.Option(
            help="DDP jobs: also search the bucket size to set. By default, but not with --gentle.",
            show_default=False,
        ),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Search the strategy with the shortest predicted iteration, and say what it chose."""
    from espresso.model.job import Job
    from espresso.strategies import Strategy

    specs = parse_compressors(compressor)
    check_output(output)
    if old is not None and (error_budget is not None or sensitivity is not None or frontier is not None):
        raise UserError("--from replans without an error budget; leave the other options out", ExitStatus.USAGE)
    loaded = Job.load(job)
    budgeted = error_budget is not None or sensitivity is not None or frontier is not None
    manner = _gentleness(loaded, gentle, exact_vectors, budgeted)
    points: list[FrontierPoint] = []
    # Loading compiles on the first call of all; the line that says so must be up by then.
    with working(f"Searching {len(loaded.tensors)} tensors (the first search compiles)") as progress:
        skip_blas()
        from espresso.search.error_budget import Sensitivity
        from espresso.search.search import replan
        from espresso.search.search import search as find

        lost = None if sensitivity is None else Sensitivity.load(sensitivity)
        if old is not None:
            result = replan(loaded, Strategy.load(old), compressor=specs)
        else:
            sized = manner is None if bucket_caps is None else bucket_caps
            result = find(
                loaded, specs, progress=progress.update, bucket_caps=None if sized else (),
                error_budget=error_budget, sensitivity=lost,
                partitions=None if manner is None else manner.partitions,
            )  # fmt: skip
        if manner is not None:
            from espresso.search.exactness import trade_for_exactness

            result = trade_for_exactness(loaded, result, manner)
        if frontier is not None:
            from espresso.search.frontier import frontier as sweep

            progress.describe("time against error")
            points = sweep(loaded, specs, sensitivity=lost, points=frontier)
    if output is not None:
        result.strategy.save(output)
    if json_output:
        summary = _summary(loaded, specs, result, output) | _gentle_json(manner, result)
        emit_json(summary | _frontier_json(points, frontier))
        return
    _print(loaded, result, points, manner)
    if output is not None:
        say(f"strategy written to {output}")


def _gentleness(job: "Job", asked: bool | None, exact_vectors: int | None, budgeted: bool) -> "Automatic | None":
    """With which settings automatic mode's rules hold; None: they do not, the search is the paper's."""
    from espresso.search.exactness import Automatic

    if budgeted and (asked or exact_vectors is not None):
        raise UserError("--gentle and an error budget are two answers to one question; leave one out", ExitStatus.USAGE)
    if asked is False and exact_vectors is not None:
        raise UserError("--exact-vectors belongs to --gentle; leave one out", ExitStatus.USAGE)
    live = Automatic.of(job.meta)
    if budgeted or asked is False or (asked is None and exact_vectors is None and live is None):
        return None
    settings = live or Automatic()
    return settings if exact_vectors is None else replace(settings, exact_vectors=exact_vectors)


def _gentle_json(manner: "Automatic | None", result: "SearchResult") -> dict[str, Any]:
    if manner is None:
        return {"gentle": False}
    rows = [{"name": row.name, "predicted_us": row.predicted_us} for row in result.alternatives]
    settings = {name: getattr(manner, name) for name in ("exact_vectors", "exact_tensors", "least_sent", "sign_block")}
    return {"gentle": True, **settings, "alternatives": rows}


def _summary(
    job: "Job", specs: "tuple[CompressorSpec, ...]", result: "SearchResult", output: Path | None
) -> dict[str, Any]:
    figures = (
        "predicted_us", "uncompressed_us", "upper_bound_us", "lower_bound_us", "gap", "search_ms", "algorithms_ms",
        "certificate_ms", "improve_ms", "num_tensors", "num_compressed", "num_offloaded", "num_candidates",
        "offload_capped", "bucket_cap_mb", "error", "error_budget",
    )  # fmt: skip
    return {name: getattr(result, name) for name in figures} | {
        "partition_bytes": result.strategy.partition_bytes,
        "bucket_caps": [asdict(row) for row in result.caps],
        "compressors": [str(spec) for spec in specs],
        "mode": job.mode.value,
        "baselines": dict(result.baselines),
        "strategy": None if output is None else str(output),
    }


def _frontier_json(points: "list[FrontierPoint]", asked: int | None) -> dict[str, Any]:
    if asked is None:
        return {}
    return {"frontier": [{"error": p.error, "predicted_us": p.predicted_us} for p in points]}


def _print(job: "Job", result: "SearchResult", points: "list[FrontierPoint]", manner: "Automatic | None") -> None:
    from espresso.show.comparison import CERTIFICATE, UPPER_BOUND
    from espresso.show.explain import explain
    from espresso.show.report import (
        choices_table,
        frontier_table,
        human_us,
        prediction_table,
    )

    console = out()
    rows = {
        "uncompressed": result.uncompressed_us,
        "chosen": result.predicted_us,
        UPPER_BOUND: result.upper_bound_us,
        CERTIFICATE: result.lower_bound_us,
    }
    console.print(choices_table(explain(result.strategy)))
    console.print()
    console.print(prediction_table(rows, result.uncompressed_us))
    console.print(
        f"{result.num_compressed} of {result.num_tensors} tensors compressed,"
        f" {result.num_offloaded} on the offload pool; {result.num_candidates} leaves a tensor searched in"
        f" {human_us(result.search_ms * 1e3)}; prediction for {job.mode.value} mode"
    )
    console.print(
        f"certified: no strategy is below {human_us(result.lower_bound_us)}, so this one is within"
        f" {100 * result.gap:.1f} % of the best; certificate in {human_us(result.certificate_ms * 1e3)}"
    )
    for line in _remarks(result):
        console.print(line)
    if manner is not None:
        console.print(
            f"as automatic mode: vectors of up to {manner.exact_vectors} elements stay exact; where there is time,"
            f" tensors of up to {manner.exact_tensors} do too, top-k and DGC send at least {manner.least_sent} numbers"
            f" of the others, {manner.sign_block or 256} signs share a mean; sums are compressed again only where"
            " that pays (--no-gentle: the shortest iteration alone)"
        )
    if points:
        console.print()
        console.print(frontier_table([(p.error, p.predicted_us, p.result.num_compressed) for p in points]))


def _remarks(result: "SearchResult") -> list[str]:
    from espresso.show.report import human_us

    lines = []
    if result.bucket_cap_mb is not None:
        own = result.caps[0].predicted_us
        lines.append(
            f"set DistributedDataParallel(bucket_cap_mb={result.bucket_cap_mb:g}): with the buckets of the job"
            f" the best is {human_us(own)}"
        )
    elif result.caps:
        lines.append("the job's own bucket size stays: no other gains 2 %")
    if result.error is not None and result.error_budget is not None:
        lines.append(f"error {result.error:.4g} of a budget of {result.error_budget:.4g}")
    elif result.error is not None:
        lines.append(f"error {result.error:.4g}")
    if result.offload_capped:
        lines.append("Algorithm 2 had more combinations than its cap allows; it settled its groups one after the other")
    return lines
