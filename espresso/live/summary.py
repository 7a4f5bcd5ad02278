"""A few lines for people: what was decided, why, what it gains, what it sends, what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from espresso.live.figures import noted, owed, predicted_us
from espresso.live.planner import AutoPlanner
from espresso.live.session import Session
from espresso.model.payload_sizes import compressed
from espresso.strategies import Strategy

LISTED = 3
"""Kinds of choices that are named; the rest is counted."""


def summary_of(session: Session) -> str:
    """The summary of a started job, one fact a line."""
    rows = [("job", _job(session)), ("profile", _profile(session)), ("decided", _decided(session))]
    rows.append(("strategy", _strategy(session.decider.strategy)))
    rows += [("", line) for line in _kinds(session.decider.strategy)]
    rows += [("gains", _gains(session)), ("sends", _sends(session)), ("keeps", _keeps(session))]
    if session.search is not None and session.search.advice:
        rows.append(("advice", session.search.advice))
    return "\n".join(f"{name:<9} {text}".rstrip() for name, text in rows if text)


def _job(session: Session) -> str:
    tensors = session.model.tensors
    size = sum(tensor.num_bytes for tensor in tensors)
    steps = session.executor.next_step
    return f"{session.groups.cluster}; {len(tensors)} tensors, {_bytes(size)} of gradients; step {steps}"


def _profile(session: Session) -> str:
    job = None if session.search is None else session.search.job
    return "" if job is None else str(job.profile or "")


def _decided(session: Session) -> str:
    decider = session.decider
    if decider.verdict is None:
        assert isinstance(decider, AutoPlanner)
        doing = decider.doing if session.is_compiled else "waits for its kernels, which are compiled beside plain steps"
        return f"not yet: automatic mode {doing}"
    return f"{decider.verdict.name}: {decider.verdict.reason}"


def _strategy(strategy: Strategy) -> str:
    found = compressed(strategy)
    if not found:
        return "nothing is compressed"
    share = sum(tensor.numel for tensor in found) / sum(tensor.numel for tensor in strategy.tensors)
    return f"{len(found)} of {len(strategy.tensors)} tensors are compressed, {share:.1%} of the elements"


def _kinds(strategy: Strategy) -> Iterator[str]:
    chosen = [strategy.choices[tensor.name] for tensor in compressed(strategy)]
    counts = Counter((str(choice.option), str(choice.compressor)) for choice in chosen)
    for (option, compressor), count in counts.most_common(LISTED):
        yield f"{count} by {compressor}: {option}"
    if len(counts) > LISTED:
        yield f"and {len(counts) - LISTED} other kinds"


def _gains(session: Session) -> str:
    verdict = session.decider.verdict
    if verdict is None or verdict.name == "plain" or not {verdict.name, "plain"} <= verdict.measured_us.keys():
        return ""
    ours, plain = verdict.measured_us[verdict.name], verdict.measured_us["plain"]
    predicted = f", predicted {predicted_us(session) / 1e3:.1f}" if predicted_us(session) else ""
    return f"{ours / 1e3:.1f} ms a step instead of {plain / 1e3:.1f}, {plain / ours:.2f} times as fast{predicted}"


def _sends(session: Session) -> str:
    last = session.observer.last
    if last is None or not last.bytes_sent:
        return ""
    less = f", {last.bytes_raw / last.bytes_sent:.1f} times less" if last.bytes_sent < last.bytes_raw else ""
    return f"{_bytes(last.bytes_sent)} a step and rank, plain {_bytes(last.bytes_raw)}{less}"


def _keeps(session: Session) -> str:
    kept = [(session.store.num_bytes, "residuals")]
    if session.velocities is not None:
        kept.append((session.velocities.num_bytes, "velocities"))
    kept.append((session.executor.factors.num_bytes, "PowerSGD's factors"))
    said = " and ".join(f"{_bytes(size)} of {what}" for size, what in kept if size) or "nothing"
    strategy = session.decider.strategy
    predicted, forecast = noted(strategy, "gradients_owed"), noted(strategy, "residual_mb")
    said += f", {forecast:.3g} MB forecast" if forecast else ""
    if not predicted:
        return said
    measured = owed(session)
    return said + f"; owes about {predicted:.2g} gradients" + (f", measured {measured:.2g}" if measured else "")


def _bytes(size: float) -> str:
    """In the largest unit that leaves a number of at least 1."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
