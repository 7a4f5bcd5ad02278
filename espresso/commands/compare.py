"""``espresso compare``: the search's choice beside the fixed policies of other systems, on one job."""

from pathlib import Path
from typing import Annotated

import typer

from espresso.commands._common import (
    CompressorOption,
    JobFile,
    JsonFlag,
    check_output,
    draw,
    emit_json,
    job_and_compressors,
    out,
    picture_option,
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
    plot: Annotated[Path | None, picture_option("the table")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Predict one job under the searched strategy and under every baseline."""
    from espresso.show.report import prediction_table

    check_output(plot, *IMAGE_FORMATS)
    loaded, specs = job_and_compressors(job, compressor)
    with working(f"Predicting {loaded.model}", searches=True) as progress:
        from espresso.search.ablation import ablate
        from espresso.search.search import search
        from espresso.show.comparison import comparison_rows, write_comparison

        result = search(loaded, specs, progress=progress.update)
        rows = comparison_rows(result, ablate(loaded, specs) if ablation else ())
    used = ", ".join(map(str, specs))
    title = f"{loaded.model}, {loaded.cluster}, {used}, {loaded.mode.value} mode"
    draw(plot, write_comparison, rows, title)
    if json_output:
        emit_json(rows)
        return
    console = out()
    console.print(title, markup=False)
    console.print(prediction_table({row["name"]: row["predicted_us"] for row in rows}, result.uncompressed_us))
    if result.lower_bound_us or not result.predicted_us:
        console.print(f"chosen is within {100 * result.gap:.1f} % of the best there is (certified)")
