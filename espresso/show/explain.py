"""A strategy in plain words: tensors with equal choices, and what happens to them step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from espresso.model.payload_sizes import create_compressor, payload_bytes, round_bytes, width_of
from espresso.strategies import (
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Form,
    Phase,
    Routine,
    Scope,
    Site,
    StepFlow,
    StepKind,
    Strategy,
    TensorSpec,
    trace,
)
from espresso.strategies.flow import shard_values

_SITE_WORDS = {
    Site.LOCAL: "the rank's own gradient",
    Site.INTER_FIRST: "the node's sum, before the exchange between nodes",
    Site.INTER_SECOND: "the sum over nodes, before it is spread between nodes",
    Site.INTRA_SECOND: "the sum over all ranks, before it is spread inside the node",
    Site.FLAT_SECOND: "the sum over all ranks, before it is spread",
    Site.SERVER: "the sum of what was pushed, before it is pulled",
}
_SCOPE_WORDS = {
    Scope.FLAT: "all {p} ranks",
    Scope.INTRA: "the {p} ranks of the node",
    Scope.INTER: "the {p} nodes",
}
_DEVICE_WORDS = {
    Device.TRAINING: "on the training device",
    Device.OFFLOAD: "on the offload pool",
    Device.SERVER: "on the server",
}
_FORM_WORDS = {
    Form.RAW: "uncompressed",
    Form.HALF: "as fp16",
    Form.PAYLOAD: "compressed",
    Form.SUMMABLE: "compressed numbers",
}
_ROUTINE_WORDS = {
    Routine.ALLREDUCE: "add up over {who}; each ends with the whole sum",
    Routine.REDUCE_SCATTER: "add up over {who}; each ends with its shard of the sum",
    Routine.REDUCE: "add up over {who}, at one of them (the root)",
    Routine.ALL_TO_ALL: "send every shard to its owner among {who}",
    Routine.GATHER: "collect at one of {who} (the root)",
    Routine.BROADCAST: "the root sends its result to {who}",
    Routine.PUSH: "push to the servers",
    Routine.PULL: "pull from the servers",
}


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """One step of a pipeline.

    Attributes:
        step: as option ids write it.
        words: what it does.
        site: where a compression sits, else None.
        residual_elements: numbers kept back at that site by one rank; 0 without error feedback.
        at_root: whether only the root of a rooted routine takes part.
        sent_bytes: what a rank sends, on average over the ranks; 0 for compute steps.
        scope: between whom; None for compute steps.
    """

    step: str
    words: str
    site: Site | None
    residual_elements: int
    at_root: bool
    sent_bytes: int
    scope: Scope | None

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "words": self.words,
            "site": None if self.site is None else self.site.value,
            "residual_elements": self.residual_elements,
            "at_root": self.at_root,
            "sent_bytes": self.sent_bytes,
        }


@dataclass(frozen=True, slots=True)
class ExplainedGroup:
    """Tensors with equal choices and what is done with them."""

    choice: Choice
    tensors: tuple[TensorSpec, ...]
    steps: tuple[ExplainedStep, ...]

    @property
    def raw_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def sent_bytes(self) -> int:
        return sum(step.sent_bytes for step in self.steps)

    def sent_by_scope(self) -> dict[Scope, int]:
        """``sent_bytes``, by who talks to whom."""
        sent: dict[Scope, int] = {}
        for step in self.steps:
            if step.scope is not None:
                sent[step.scope] = sent.get(step.scope, 0) + step.sent_bytes
        return sent

    def to_json(self) -> dict[str, Any]:
        return {
            "option": str(self.choice.option),
            "compressor": str(self.choice.compressor),
            "tensors": [tensor.name for tensor in self.tensors],
            "raw_bytes": self.raw_bytes,
            "sent_bytes": self.sent_bytes,
            "sent_bytes_by_scope": {scope.value: sent for scope, sent in self.sent_by_scope().items()},
            "steps": [step.to_json() for step in self.steps],
        }


def explain(strategy: Strategy) -> list[ExplainedGroup]:
    """Group the tensors by choice, most bytes first, and put every pipeline in words.

    Bytes assume even shards and no partitions: right to within payload headers and rounding to cache lines.
    """
    members: dict[Choice, list[TensorSpec]] = {}
    for tensor in strategy.tensors:
        members.setdefault(strategy.choices[tensor.name], []).append(tensor)
    groups = [
        ExplainedGroup(choice, tuple(tensors), _steps(choice, tensors, strategy.cluster))
        for choice, tensors in members.items()
    ]
    return sorted(groups, key=lambda group: -group.raw_bytes)


def _steps(choice: Choice, tensors: Sequence[TensorSpec], cluster: Cluster) -> tuple[ExplainedStep, ...]:
    # A size that every cut of this cluster divides evenly, so that shares are exact fractions.
    whole = 64 * (cluster.num_ranks * cluster.ranks_per_node * cluster.num_nodes) ** 2
    feedback = choice.option.is_compressed and keeps_residual(choice.compressor)
    steps = []
    share = Fraction(1)  # of the ranks that take part
    outer: dict[Scope | None, Fraction] = {}
    for flow in trace(choice.option, cluster, whole):
        residual = 0
        if flow.step.is_communication:
            sent = sum(round(share * _sent(flow, whole, tensor, choice)) for tensor in tensors)
        else:
            sent = 0
        if flow.site is not None and feedback:
            part = Fraction(flow.before.elements, whole)
            residual = sum(round(part * tensor.numel) for tensor in tensors)
        words, at_root = _words(flow, choice), share < 1
        steps.append(ExplainedStep(str(flow.step), words, flow.site, residual, at_root, sent, flow.step.scope))
        share = _next_share(flow, share, outer)
    return tuple(steps)


def _next_share(flow: StepFlow, share: Fraction, outer: dict[Scope | None, Fraction]) -> Fraction:
    """The ranks that go on: a rooted first step leaves one of its group, its second brings all back."""
    step = flow.step
    if step.routine in (Routine.REDUCE, Routine.GATHER):
        outer[step.scope] = share
        return share / flow.peers
    if step.routine is Routine.BROADCAST:
        return outer.get(step.scope, share)
    return share


def _sent(flow: StepFlow, whole: int, tensor: TensorSpec, choice: Choice) -> Fraction:
    """Bytes that one rank taking part sends, on average over the routine's group."""
    routine, others = flow.step.routine, flow.peers - 1
    width = width_of(tensor.dtype, is_wide=choice.option.is_compressed)
    held = _held_bytes(flow, whole, tensor, choice.compressor, width)
    if flow.step.form is Form.HALF:
        held = held * 2 / width
    if routine is Routine.ALLREDUCE:
        return 2 * held * Fraction(others, flow.peers)
    if routine is Routine.ALLGATHER:
        return held * others
    if routine is Routine.PUSH:
        return held
    if routine is Routine.PULL:
        return Fraction(0)  # the servers send
    # The others send to the root, or the root to the others; all-to-all keeps one shard at home.
    # A broadcast is counted over its whole group: before it, only the root takes part.
    return held * (others if routine is Routine.BROADCAST else Fraction(others, flow.peers))


def _held_bytes(flow: StepFlow, whole: int, tensor: TensorSpec, spec: CompressorSpec, width: int) -> Fraction:
    """What a rank holds before a step, in bytes, if a number has ``width``."""
    state = flow.before
    part = Fraction(state.elements, whole)
    if state.form is Form.RAW:
        return part * tensor.numel * width
    if state.form is Form.SUMMABLE:
        start, stop = shard_values(whole, state.value_cuts)
        held = payload_bytes(spec, tensor.numel, tensor.dtype) if create_compressor(spec).traits.rounds == 1 else (
            round_bytes(spec, tensor.numel, tensor.dtype, (tensor.shape,), state.round)
        )  # fmt: skip
        return Fraction(stop - start, whole) * held
    atoms = len(state.atoms)
    elements = max(round(part * tensor.numel / atoms), 1)
    return Fraction(state.multiplicity * atoms * payload_bytes(spec, elements, tensor.dtype))


@lru_cache(maxsize=64)
def keeps_residual(spec: CompressorSpec) -> bool:
    """Whether this compressor works with error feedback."""
    from espresso.compressors import create

    return create(spec).traits.error_feedback


def _words(flow: StepFlow, choice: Choice) -> str:
    step = flow.step
    if step.kind is StepKind.COMMUNICATE:
        return _exchange_words(flow)
    assert step.device is not None
    where = _DEVICE_WORDS[step.device]
    if step.kind is StepKind.COMPRESS:
        assert flow.site is not None
        return f"compress with {choice.compressor}, {where}: {_SITE_WORDS[flow.site]}"
    if step.kind is StepKind.TRANSFORM:
        return f"transform the numbers of {choice.compressor}, {where}"
    if step.kind is StepKind.AGGREGATE:
        return f"add up the numbers of {flow.before.multiplicity} ranks in rank order, {where}"
    if flow.before.multiplicity > 1:
        return f"decode {flow.before.multiplicity} payloads and add them up, {where}"
    return f"decode, {where}"


def _exchange_words(flow: StepFlow) -> str:
    step = flow.step
    assert step.routine is not None
    assert step.scope is not None
    who = _SCOPE_WORDS[step.scope].format(p=flow.peers)
    if step.routine is Routine.ALLGATHER:
        payloads = step.form is Form.PAYLOAD and step.phase is Phase.WHOLE
        action = f"{who} each receive everyone's payloads" if payloads else f"{who} collect all shards"
    else:
        action = _ROUTINE_WORDS[step.routine].format(who=who)
    return f"{action} ({_FORM_WORDS[step.form]})"
