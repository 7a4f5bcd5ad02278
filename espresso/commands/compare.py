"""``espresso compare``: the search's choice beside the fixed policies of other systems, on one job."""

from espresso.commands._common import (
    CompressorOption,
    JobFile,
    JsonFlag,
    emit_json,
    out,
    parse_compressors,
    user_errors,
    working,
)


@user_errors
def compare(
    job: JobFile,
    compressor: CompressorOption,
    json_output: JsonFlag = False,
) -> None:
    """Predict one job under the searched strategy and under every baseline."""
    from espresso.job import Job
    from espresso.report import BOUND, prediction_table

    specs = parse_compressors(compressor)
    loaded = Job.load(job)
    with working(f"Predicting {loaded.model}") as progress:
        from espresso.search import search

        result = search(loaded, specs, progress=progress.update)
    rows = {**result.baselines, "chosen": result.predicted_us}
    if json_output:
        emit_json(
            {
                "compressors": [str(spec) for spec in specs],
                "mode": loaded.mode.value,
                "uncompressed_us": result.uncompressed_us,
                "upper_bound_us": result.upper_bound_us,
                "predicted_us": rows,
            }
        )
        return
    ranked = dict(sorted(rows.items(), key=lambda row: (-row[1], row[0] == "chosen")))
    table = prediction_table({**ranked, BOUND: result.upper_bound_us}, result.uncompressed_us)
    used = ", ".join(map(str, specs))
    console = out()
    console.print(f"{loaded.model}, {loaded.cluster}, {used}, {loaded.mode.value} mode", markup=False)
    console.print(table)
