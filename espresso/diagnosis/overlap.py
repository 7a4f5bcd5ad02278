"""The part of all communication that other work hides: measured, and by the timeline (Flux's figure).

Compressing and decompressing are a part of it: whether backward hides them decides whether they pay.
"""

from __future__ import annotations

from collections.abc import Iterable

from espresso.flight.form import StepRecord
from espresso.model.job import Job
from espresso.model.timeline import first_come
from espresso.strategies import Strategy, plan


def measured_overlap(step: StepRecord, on_device: bool = False) -> float | None:
    """Of one rank's step; None where its exchanges, or the end of its backward pass, were not seen.

    On a GPU, whose host runs ahead, backward ends with the last bucket.
    """
    exchanged = [(span.start_us, span.end_us) for span in step.spans]
    gone, end = step.script.backward_end_us, step.script.averaged_us or step.done_us
    if on_device:
        gone, end = max(step.ready_us), step.done_us
    if gone is None or not exchanged:
        return None
    return hidden(max(end, step.done_us, gone) - gone, _covered(exchanged))


def predicted_overlap(job: Job, strategy: Strategy) -> float:
    """Of a job's iteration under a strategy."""
    laid = plan(strategy, job.laid_out, mode=job.mode, host_copies=job.host_copies)
    timeline = first_come(laid, job)
    exchanged = zip(timeline.start_us, timeline.end_us, strict=True)
    return hidden(timeline.makespan_us - max(timeline.bucket_ready_us), _covered(exchanged))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of them lasted."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def hidden(open_us: float, comm_us: float) -> float:
    """The part of so much communication of which so much is open to see; of none all."""
    return min(max(1 - open_us / comm_us, 0.0), 1.0) if comm_us > 0 else 1.0
