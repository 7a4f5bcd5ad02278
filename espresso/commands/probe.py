"""``espresso probe``: how fast this device copies and multiplies matrices, for ``what-if --device``."""

from pathlib import Path
from typing import Annotated

import typer

from espresso.commands._common import JsonFlag, check_output, emit_json, out, say, user_errors


@user_errors
def probe(
    output: Annotated[Path, typer.Option("-o", "--output", help="The probe file to write.")] = Path("probe.json"),
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads that a rank has.", show_default="as PyTorch is set")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Measure a copy and a matrix product here, with the cores and threads that a rank has."""
    from espresso.live.probe import measure_probe

    check_output(output)
    found = measure_probe(threads)
    found.save(output)
    if json_output:
        emit_json(found.body | {"probe": str(output)})
        return
    out().print(
        f"{found.device}, {found.threads} threads: copies {found.copy_gb_per_s:.1f} GB/s,"
        f" multiplies {found.matmul_gflops:.0f} GFLOP/s"
    )
    say(f"probe written to {output}; next: espresso what-if job.json --measured-on here.json --device {output}")
