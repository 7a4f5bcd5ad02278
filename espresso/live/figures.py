"""Flat figures of a started job, for any logger."""

from __future__ import annotations

from espresso.diagnosis.overlap import predicted_overlap
from espresso.live.session import Session
from espresso.model.links import JobError
from espresso.model.payload_sizes import compressed
from espresso.search.error_budget import owed_by
from espresso.strategies import Strategy

METRICS = tuple(
    f"espresso/{name}"
    for name in (
        "bytes_sent", "bytes_raw", "residual_norm", "residual_bytes", "velocity_bytes", "predicted_step_us",
        "measured_step_us", "steps", "skipped_steps", "tensors_compressed", "tensors_through_servers", "decided",
        "overlap", "predicted_overlap", "owed", "predicted_owed", "probing_s",
    )
)  # fmt: skip
"""What :func:`metrics_of` tells."""


def metrics_of(session: Session) -> dict[str, float]:
    """Everything in ``METRICS``, and the guard's figures by group of tensors."""
    session.executor.judge()
    last, strategy, velocities = session.observer.last, session.decider.strategy, session.velocities
    figures = (
        0 if last is None else last.bytes_sent,
        0 if last is None else last.bytes_raw,
        session.store.norm(),
        session.store.num_bytes,
        0 if velocities is None else velocities.num_bytes,
        predicted_us(session),
        session.observer.step_us,
        session.executor.next_step,
        session.observer.num_skipped,
        len(compressed(strategy)),
        strategy.num_through_servers,
        session.decider.decided,
        session.recorder.overlap() or 0.0,
        _predicted_overlap(session),
        owed(session),
        noted(strategy, "gradients_owed"),
        session.decider.probed_us / 1e6,
    )
    found = {} if session.guard is None else session.guard.figures
    by_group = {f"espresso/{what}/{group}": value for group, row in found.items() for what, value in row.items()}
    return dict(zip(METRICS, map(float, figures), strict=True)) | by_group


def predicted_us(session: Session) -> float:
    """Of an iteration of the decided strategy; 0 where nothing was predicted."""
    verdict = session.decider.verdict
    if verdict is None:
        return 0.0
    if verdict.name == "plain" and session.search is not None:
        return session.search.uncompressed_us
    return verdict.predicted_us.get(verdict.name, 0.0)


def noted(strategy: Strategy, name: str) -> float:
    """A number of a strategy's notes; 0 where there is none: somebody else may have written the file."""
    told = strategy.notes.get(name)
    return float(told) if isinstance(told, int | float) else 0.0


def owed(session: Session) -> float:
    """Gradients that the strategy in use owes by the guard's checks, tensors by their elements; 0 where it saw none."""
    strategy = session.decider.strategy
    return 0.0 if session.guard is None else owed_by(strategy, session.guard.owed(scale=strategy.gain_scale))


def _predicted_overlap(session: Session) -> float:
    job, strategy = None if session.search is None else session.search.job, session.decider.strategy
    if job is None:
        return 0.0
    if session.overlap_of is None or session.overlap_of[0] is not strategy:
        try:
            session.overlap_of = strategy, predicted_overlap(job, strategy)
        except JobError:  # of what nobody measured
            session.overlap_of = strategy, 0.0
    return session.overlap_of[1]
