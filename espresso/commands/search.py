"""``espresso search``: from a job to a strategy."""

from pathlib import Path
from typing import Annotated

import typer

from espresso.commands._common import (
    CompressorOption,
    JobFile,
    JsonFlag,
    check_output,
    emit_json,
    out,
    parse_compressors,
    say,
    user_errors,
    working,
)


@user_errors
def search(
    job: JobFile,
    compressor: CompressorOption,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The strategy file to write.", show_default=False)
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Search the strategy with the shortest predicted iteration, and say what it chose."""
    from espresso.explain import explain
    from espresso.job import Job
    from espresso.report import BOUND, CERTIFICATE, choices_table, human_us, prediction_table

    specs = parse_compressors(compressor)
    check_output(output)
    loaded = Job.load(job)
    with working(f"Searching {len(loaded.tensors)} tensors") as progress:
        from espresso.search import search as find

        result = find(loaded, specs, progress=progress.update)
    if output is not None:
        result.strategy.save(output)
    if json_output:
        emit_json(
            {
                "predicted_us": result.predicted_us,
                "uncompressed_us": result.uncompressed_us,
                "upper_bound_us": result.upper_bound_us,
                "lower_bound_us": result.lower_bound_us,
                "gap": result.gap,
                "search_ms": result.search_ms,
                "algorithms_ms": result.algorithms_ms,
                "certificate_ms": result.certificate_ms,
                "improve_ms": result.improve_ms,
                "num_tensors": result.num_tensors,
                "num_compressed": result.num_compressed,
                "num_offloaded": result.num_offloaded,
                "num_candidates": result.num_candidates,
                "compressors": [str(spec) for spec in specs],
                "mode": loaded.mode.value,
                "baselines": dict(result.baselines),
                "strategy": None if output is None else str(output),
            }
        )
        return
    console = out()
    rows = {
        "uncompressed": result.uncompressed_us,
        "chosen": result.predicted_us,
        BOUND: result.upper_bound_us,
        CERTIFICATE: result.lower_bound_us,
    }
    console.print(choices_table(explain(result.strategy)))
    console.print()
    console.print(prediction_table(rows, result.uncompressed_us))
    console.print(
        f"{result.num_compressed} of {result.num_tensors} tensors compressed,"
        f" {result.num_offloaded} on the offload pool; {result.num_candidates} leaves a tensor searched in"
        f" {human_us(result.search_ms * 1e3)}; prediction for {loaded.mode.value} mode"
    )
    console.print(
        f"certified: no strategy is below {human_us(result.lower_bound_us)}, so this one is within"
        f" {100 * result.gap:.1f} % of the best; certificate in {human_us(result.certificate_ms * 1e3)}"
    )
    if output is not None:
        say(f"strategy written to {output}")
