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
    check_compressor,
    check_output,
    draw,
    emit_json,
    job_and_compressors,
    out,
    picture_option,
    say,
    usage_errors,
    user_errors,
    working,
)
from espresso.show.gantt import IMAGE_FORMATS

if TYPE_CHECKING:
    from espresso.model.job import Job
    from espresso.search.frontier import FrontierPoint
    from espresso.search.result import SearchResult
    from espresso.search.terms import Terms
    from espresso.strategies import CompressorSpec, Strategy


@user_errors
def search(
    job: JobFile,
    compressor: CompressorOption,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The strategy file to write.", show_default=False)
    ] = None,
    error_budget: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Gradients that a strategy may owe (docs/how_it_decides.md). By default as the live run that measured"
            " the job, else 2.5 of several compressors.",
            show_default=False,
        ),
    ] = None,
    residual_budget_mb: Annotated[
        float | None,
        typer.Option(min=0.0, help="Memory of all residuals of a rank, in MB.", show_default=False),
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(
            help="File: what each compressor owes per tensor. By default as the job says.", show_default=False
        ),
    ] = None,
    keep_exact: Annotated[
        list[str] | None,
        typer.Option(help="Tensors that are never compressed, by name (* and ?).", show_default=False),
    ] = None,
    exact_vectors: Annotated[
        int | None,
        typer.Option(min=0, help="Vectors of up to so many elements are never compressed.", show_default=False),
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option(help="Options that no tensor takes, by their text: '*all_to_all*'.", show_default=False),
    ] = None,
    devices: Annotated[
        list[str] | None,
        typer.Option(help="Where compressions may run: training, offload. By default both.", show_default=False),
    ] = None,
    most_compressions: Annotated[
        int | None,
        typer.Option(min=0, help="That a tensor may go through; 1: no sum is compressed again.", show_default=False),
    ] = None,
    force: Annotated[
        list[str] | None,
        typer.Option(help="NAME=COMPRESSOR or 'NAME=COMPRESSOR via OPTION': what tensors take.", show_default=False),
    ] = None,
    all_kinds: Annotated[
        bool | None,
        typer.Option(
            "--all-kinds",
            help="The fastest, with however many kinds of choices (for a job that was measured on a live run: with"
            " --no-automatic); else up to 2 % go for fewer, and as much for not cutting tensors.",
        ),
    ] = None,
    frontier: Annotated[
        int | None,
        typer.Option(min=2, help="Also print time against error, so many points.", show_default=False),
    ] = None,
    memory_points: Annotated[int, typer.Option(min=1, help="With --frontier: budgets of memory for each point.")] = 1,
    plot: Annotated[Path | None, picture_option("the frontier")] = None,
    old: Annotated[
        Path | None,
        typer.Option("--from", help="Replan: begin with this strategy and its terms, much faster.", show_default=False),
    ] = None,
    automatic: Annotated[
        bool | None,
        typer.Option(
            help="As automatic mode: small vectors stay exact. By default where the job was measured on a live run;"
            " with --from, where the old strategy was. With neither its terms nor a budget: --no-automatic.",
            show_default=False,
        ),
    ] = None,
    bucket_caps: Annotated[
        bool | None,
        typer.Option(
            help="DDP jobs: also search the bucket size to set. By default, but not with --automatic.",
            show_default=False,
        ),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Search the strategy with the shortest predicted iteration, or nearly (see --all-kinds), and say what it chose."""
    from espresso.compressors.schedule import check_choices
    from espresso.strategies import Strategy

    check_output(output)
    check_output(plot, *IMAGE_FORMATS)
    if old is not None and frontier is not None:
        raise UserError("--from replans one strategy; leave --frontier out", ExitStatus.USAGE)
    if old is not None and bucket_caps:
        raise UserError("--from keeps the old strategy's bucket size; leave --bucket-caps out", ExitStatus.USAGE)
    if memory_points > 1 and frontier is None:
        raise UserError("--memory-points goes with --frontier: give that too", ExitStatus.USAGE)
    if plot is not None and frontier is None:
        raise UserError("--plot draws the frontier: give --frontier too", ExitStatus.USAGE)
    loaded, specs = job_and_compressors(job, compressor)
    limits = {
        "exact_vectors": exact_vectors, "keep_exact": keep_exact, "forbid": forbid, "devices": devices,
        "most_compressions": most_compressions, "force": None if force is None else dict(map(_forced, force)),
    }  # fmt: skip
    given = {
        "error_budget": error_budget, "residual_budget_mb": residual_budget_mb, "all_kinds": all_kinds or None
    }  # fmt: skip
    begun = None if old is None else Strategy.load(old)
    if begun is not None:
        check_choices(begun)
    terms, is_automatic = _terms(loaded, specs, begun, automatic, given, limits)
    for warning in terms.constraints.idle([tensor.name for tensor in loaded.tensors], loaded.cluster):
        say(warning)
    points: list[FrontierPoint] = []
    # Loading compiles on the first call of all; the line that says so must be up by then.
    with working(f"Searching {len(loaded.tensors)} tensors (the first search compiles)", searches=True) as progress:
        from espresso.search.error_budget import Sensitivity
        from espresso.search.finish import with_assumed_error
        from espresso.search.search import replan
        from espresso.search.search import search as find
        from espresso.search.space import sensitivity_of

        owed = None if sensitivity is None else Sensitivity.load(sensitivity)
        if begun is not None:
            result = replan(loaded, begun, compressor=specs, terms=terms, sensitivity=owed)
        else:
            sized = not is_automatic if bucket_caps is None else bucket_caps
            result = find(
                loaded, specs, progress=progress.update, bucket_caps=None if sized else (), terms=terms,
                sensitivity=owed, partitions=terms.partitions,
            )  # fmt: skip
        if result.error is None and sensitivity_of(loaded, owed) is None:
            result = with_assumed_error(result)
        if frontier is not None:
            from espresso.search.frontier import frontier as sweep

            progress.describe("time against error")
            points = sweep(
                loaded, specs, sensitivity=owed, points=frontier, memory_points=memory_points, terms=terms
            )  # fmt: skip
    if plot is not None:
        from espresso.show.frontier import write_frontier

        draw(plot, write_frontier, points, loaded.model)
    if output is not None:
        result.strategy.save(output)
    if json_output:
        emit_json(_summary(loaded, specs, result, output, is_automatic) | _frontier_json(points, frontier))
        return
    _print(loaded, result, points, is_automatic)
    if output is not None:
        say(f"strategy written to {output}")


def _forced(text: str) -> tuple[str, str]:
    pattern, equals, choice = text.partition("=")
    if not equals or not pattern or not choice:
        raise UserError(f"--force {text}: write NAME=COMPRESSOR", ExitStatus.USAGE)
    check_compressor(compressor := choice.partition(" via ")[0], f"--force {pattern}={compressor}")
    return pattern, choice


def _terms(
    job: "Job",
    specs: "tuple[CompressorSpec, ...]",
    begun: "Strategy | None",
    automatic: bool | None,
    given: dict[str, Any],
    limits: dict[str, Any],
) -> "tuple[Terms, bool]":
    """What the search keeps to: the old strategy's terms, a live run's, automatic mode's, or few kinds alone; then what
    was asked. And whether it is as automatic mode does it.
    """
    from espresso.model.job import TERMS
    from espresso.search.terms import Terms

    if automatic is None and begun is not None:
        terms = Terms.of(begun.notes) or Terms()
        is_automatic = terms.races
    else:
        is_automatic = TERMS in job.meta if automatic is None else automatic
        plain = Terms(all_kinds=False)
        terms = plain if automatic is False else Terms.usual(job, specs, automatic=is_automatic)
    asked = {name: value for name, value in limits.items() if value is not None}
    said = {name: value for name, value in given.items() if value is not None}
    with usage_errors():
        return replace(terms, constraints=replace(terms.constraints, **asked), **said), is_automatic


def _summary(
    job: "Job", specs: "tuple[CompressorSpec, ...]", result: "SearchResult", output: Path | None, is_automatic: bool
) -> dict[str, Any]:
    figures = (
        "predicted_us", "late_us", "uncompressed_us", "upper_bound_us", "lower_bound_us", "gap", "search_ms",
        "algorithms_ms", "certificate_ms", "improve_ms", "num_tensors", "num_compressed", "num_offloaded",
        "num_candidates", "offload_capped", "bucket_cap_mb", "error", "error_budget", "residual_bytes",
        "kinds_left_out", "fewer_kinds_cost_us",
    )  # fmt: skip
    return {name: getattr(result, name) for name in figures} | {
        "residual_budget_mb": result.terms.residual_budget_mb,
        "automatic": is_automatic,
        "constraints": result.terms.constraints.given,
        "alternatives": [{"name": row.name, "predicted_us": row.predicted_us} for row in result.alternatives],
        "partition_bytes": result.strategy.partition_bytes,
        "bucket_caps": [asdict(row) for row in result.caps],
        "compressors": [str(spec) for spec in specs],
        "mode": job.mode.value,
        "profile": None if job.profile is None else asdict(job.profile),
        "baselines": dict(result.baselines),
        "strategy": None if output is None else str(output),
    }


def _frontier_json(points: "list[FrontierPoint]", asked: int | None) -> dict[str, Any]:
    if asked is None:
        return {}
    rows = [{"error": p.error, "residual_bytes": p.residual_bytes, "predicted_us": p.predicted_us} for p in points]
    return {"frontier": rows}


def _print(job: "Job", result: "SearchResult", points: "list[FrontierPoint]", is_automatic: bool) -> None:
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
        "not certified: fp16 everywhere is best, and nothing is known of what it owes"
        if not result.lower_bound_us and result.predicted_us
        else f"certified: no strategy is below {human_us(result.lower_bound_us)}, so this one is within"
        f" {100 * result.gap:.1f} % of the best; certificate in {human_us(result.certificate_ms * 1e3)}"
    )
    if result.late_us > result.predicted_us:
        console.print(f"one exchange in ten takes longer; where all of them do a step takes {human_us(result.late_us)}")
    if job.profile is not None:
        console.print(f"profile: {job.profile}")
    for line in _remarks(result, is_automatic):
        console.print(line)
    if points:
        console.print()
        found = [(p.error, p.residual_bytes, p.predicted_us, p.result.num_compressed) for p in points]
        console.print(frontier_table(found))


def _remarks(result: "SearchResult", is_automatic: bool) -> list[str]:
    from espresso.search.terms import MB
    from espresso.show.report import human_us

    lines = []
    if result.bucket_cap_mb is not None:
        why = "as the old strategy asks"
        if result.caps:
            why = f"with the buckets of the job the best is {human_us(result.caps[0].predicted_us)}"
        lines.append(f"set DistributedDataParallel(bucket_cap_mb={result.bucket_cap_mb:g}): {why}")
    elif result.caps:
        lines.append("the job's own bucket size stays: no other gains 2 %")
    terms = result.terms
    if result.error is not None:
        of = "" if terms.error_budget is None else f" of a budget of {terms.error_budget:.4g}"
        lines.append(f"owes {result.error:.4g} gradients{of}")
    if result.residual_bytes:
        of = "" if terms.residual_budget_mb is None else f" of a budget of {terms.residual_budget_mb:.4g} MB"
        lines.append(f"residuals take {result.residual_bytes / MB:.4g} MB on a rank{of}")
    if result.kinds_left_out:
        lines.append(
            f"{result.kinds_left_out} kinds of choices were merged into others, which takes"
            f" {human_us(max(result.fewer_kinds_cost_us, 0.0))} (--all-kinds: without)"
        )
    if is_automatic:
        lines.append(
            f"as automatic mode: vectors of up to {terms.constraints.exact_vectors} elements stay exact"
            " (--no-automatic: without)"
        )
    if result.offload_capped:
        lines.append("Algorithm 2 had more combinations than its cap allows; it settled its groups one after the other")
    return lines
