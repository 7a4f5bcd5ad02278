"""``espresso simulate``: how long a job's iteration takes under a strategy, and what every lane does."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from espresso.commands._common import (
    JobFile,
    JsonFlag,
    StrategyFile,
    check_output,
    draw,
    emit_json,
    out,
    picture_option,
    say,
    user_errors,
    working,
)
from espresso.show.gantt import IMAGE_FORMATS, write_gantt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from espresso.model.job import Job
    from espresso.model.timeline import Timeline
    from espresso.show.lane_events import LaneEvent
    from espresso.strategies import Strategy


@user_errors
def simulate(
    job: JobFile,
    strategy: StrategyFile,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace for ui.perfetto.dev.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, picture_option("the lanes")] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a run's flight records: its newest such step is shown beside the prediction.",
            show_default=False,
            readable=False,
        ),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Predict one iteration of a job under a strategy, lane by lane."""
    from espresso.compressors.schedule import check_choices
    from espresso.flight.form import load_run
    from espresso.model.job import Job
    from espresso.show.flight_events import step_events
    from espresso.show.lane_events import predicted_events
    from espresso.show.report import human_us, lane_rows, utilisation_table
    from espresso.strategies import Strategy

    check_output(trace)
    check_output(plot, *IMAGE_FORMATS)
    loaded_job, loaded = Job.load(job), Strategy.load(strategy)
    check_choices(loaded)
    loaded.check_model(loaded_job.tensors, loaded_job.cluster)
    with working(f"Simulating {loaded_job.model}"):
        timeline, plain = _timelines(loaded_job, loaded)
        events = predicted_events(timeline)
        title = f"{loaded_job.model}, {loaded_job.cluster}, {loaded_job.mode.value} mode"
        ran = [] if measured is None else step_events(load_run(measured), loaded, timeline.bucket_ready_us[0])
        _write(events, ran, trace, plot, title)
    if json_output:
        emit_json(
            {
                "predicted_us": timeline.iteration_us,
                "uncompressed_us": plain.iteration_us,
                "forward_us": timeline.forward_us,
                "optimizer_us": timeline.optimizer_us,
                "mode": loaded_job.mode.value,
                "profile": None if loaded_job.profile is None else asdict(loaded_job.profile),
                "lanes": lane_rows(events, timeline.iteration_us),
                "trace": None if trace is None else str(trace),
                "plot": None if plot is None else str(plot),
            }
        )
        return
    console = out()
    console.print(utilisation_table(events, timeline.iteration_us))
    console.print(
        f"{title}: {human_us(timeline.iteration_us)} an iteration, of which {human_us(timeline.forward_us)}"
        f" forward and {human_us(timeline.optimizer_us)} optimizer;"
        f" uncompressed {human_us(plain.iteration_us)} ({_ratio(plain.iteration_us, timeline.iteration_us):.2f}x)",
        markup=False,
    )
    if loaded_job.profile is not None:
        console.print(f"profile: {loaded_job.profile}")
    if trace is not None:
        say(f"written: {trace}")


def _ratio(one: float, other: float) -> float:
    return one / other if other else 1.0


def _timelines(job: "Job", strategy: "Strategy") -> "tuple[Timeline, Timeline]":
    """The timelines of the strategy, in the buckets that it asks for, and of plain flat allreduce in the job's own.

    Each is in its list-scheduled order.
    """
    from espresso.model.bucket_caps import as_asked
    from espresso.model.timeline import simulate as run
    from espresso.search.search import lay_out
    from espresso.strategies import Strategy

    plain = Strategy.uniform(strategy.tensors, strategy.cluster, partition_bytes=0)
    asked = as_asked(job, strategy.bucket_cap_mb)
    return run(lay_out(asked, strategy), asked), run(lay_out(job, plain), job)


def _write(
    events: "Sequence[LaneEvent]",
    ran: "Sequence[LaneEvent]",
    trace: Path | None,
    plot: Path | None,
    title: str,
) -> None:
    if trace is not None:
        from espresso.show.trace_events import write_trace

        write_trace(trace, events, ran, metadata={"title": title})
    draw(plot, partial(write_gantt, title=title), events, ran)
