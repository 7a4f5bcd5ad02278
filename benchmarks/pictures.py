"""What the demo leaves to look at: the chosen strategy's lanes, predicted and as they ran."""

from pathlib import Path

from espresso.flight.form import FlightError, load_run
from espresso.model.job import Job
from espresso.model.timeline import first_come
from espresso.show.flight_events import step_events
from espresso.show.gantt import write_gantt
from espresso.show.lane_events import last_iteration, predicted_events
from espresso.show.trace_events import write_trace
from espresso.strategies import Strategy, plan


def draw_lanes(folder: Path, title: str) -> list[Path]:
    """Write ``trace.json`` and ``lanes.png`` from the folder's job, strategy and flight records.

    Returns:
        What was written. Without a strategy and a job (no automatic arm ran) that is nothing; without
        flight records the predicted lanes stand alone.
    """
    job_path, strategy_path = folder / "job.json", folder / "strategy.json"
    if not (job_path.exists() and strategy_path.exists()):
        return []
    job, strategy = Job.load(job_path), Strategy.load(strategy_path)
    laid_out = plan(strategy, job.laid_out, mode=job.mode, host_copies=job.host_copies)
    timeline = first_come(laid_out, job)
    predicted = predicted_events(timeline)
    try:
        measured = step_events(load_run(folder), strategy, timeline.bucket_ready_us[0])
    except FlightError:  # nothing was recorded, or no step of it ran the strategy with its exchanges looked at
        measured = []
    trace, picture = folder / "trace.json", folder / "lanes.png"
    write_trace(trace, predicted, measured, metadata={"title": title})
    write_gantt(picture, predicted, last_iteration(measured), title=title)
    return [trace, picture]
