"""``espresso diagnose``: what is slow in a recorded run, and what would help."""

from pathlib import Path
from typing import Annotated

import typer

from espresso.commands._common import JsonFlag, check_output, draw, emit_json, picture_option, say, user_errors, working
from espresso.show.gantt import IMAGE_FORMATS


@user_errors
def diagnose(
    run_dir: Annotated[
        Path,
        typer.Argument(
            help="The folder of a run: flight records (flight-00000.json …), or Kineto's traces, one file a rank.",
            show_default=False,
            readable=False,
        ),
    ],
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write all ranks' steps on one clock, for ui.perfetto.dev.", show_default=False),
    ] = None,
    plot: Annotated[Path | None, picture_option("where each rank's time goes")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Say what is slow in a recorded run, the worst first, and what mending it would bring."""
    from espresso.diagnosis.findings import diagnose as find
    from espresso.flight.kineto import load_any
    from espresso.show.phase_bars import write_bars

    check_output(trace)
    check_output(plot, *IMAGE_FORMATS)
    with working(f"Reading {run_dir}"):
        flights = load_any(run_dir)
        found = find(flights)
        if trace is not None:
            from espresso.show.flight_events import flight_events
            from espresso.show.trace_events import write_trace

            write_trace(trace, [], flight_events(flights), metadata={"title": str(run_dir)})
        draw(plot, write_bars, flights)
    if json_output:
        emit_json(found.to_json())
        return
    typer.echo(str(found))
    if trace is not None:
        say(f"written: {trace}")
