"""``espresso compare``: the search's choice beside the fixed policies of other systems, on one job."""

from pathlib import Path
from typing import Annotated

import typer

from espresso.commands._common import (
    CompressorOption,
    JobFile,
    JsonFlag,
    check_output,
    compressors_of,
    emit_json,
    out,
    parse_compressors,
    say,
    skip_blas,
    user_errors,
    working,
)
from espresso.show.gantt import IMAGE_FORMATS


@user_errors
def compare(
    job: JobFile,
    compressor: CompressorOption,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Also search with one dimension restricted at a time.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the table (png, pdf or svg).", show_default=False)
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Predict one job under the searched strategy and under every baseline."""
    from espresso.model.job import Job
    from espresso.show.report import prediction_table

    parse_compressors(compressor)
    check_output(plot, *IMAGE_FORMATS)
    loaded = Job.load(job)
    specs = compressors_of(compressor, loaded)
    with working(f"Predicting {loaded.model}") as progress:
        skip_blas()
        from espresso.search.ablation import ablate
        from espresso.search.search import search
        from espresso.show.comparison import comparison_rows, write_comparison

        result = search(loaded, specs, progress=progress.update)
        rows = comparison_rows(result, ablate(loaded, specs) if ablation else ())
    used = ", ".join(map(str, specs))
    title = f"{loaded.model}, {loaded.cluster}, {used}, {loaded.mode.value} mode"
    if plot is not None:
        write_comparison(plot, rows, title)
        say(f"picture written to {plot}")
    if json_output:
        emit_json(rows)
        return
    console = out()
    console.print(title, markup=False)
    console.print(prediction_table({row["name"]: row["predicted_us"] for row in rows}, result.uncompressed_us))
    console.print(f"chosen is within {100 * result.gap:.1f} % of the best there is (certified)")
