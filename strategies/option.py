"""Steps and options: the words in which a way of communicating one tensor is written down.

An *option* is a tuple of steps that starts and ends uncompressed, one leaf of the decision tree
(Espresso, EuroSys '23, section 4.2). It is data: the timeline prices it, the executor carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Word(Enum):
    """An enum whose members hash by identity, as they compare: options are hashed by the thousand."""

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python


class Device(Word):
    """Where a computation runs: a rank's own two (the paper's GPU and CPU), or a parameter server's processor."""

    TRAINING = "training"
    OFFLOAD = "offload"
    SERVER = "server"


RANK_DEVICES = (Device.TRAINING, Device.OFFLOAD)
"""The devices of a rank: what compressions of its own may choose from."""


class Scope(Word):
    """Which ranks take part in a routine."""

    FLAT = "flat"
    INTRA = "intra"
    INTER = "inter"


class Routine(Word):
    """A collective, or one half of a parameter-server exchange."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALLGATHER = "allgather"
    ALL_TO_ALL = "all_to_all"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    GATHER = "gather"
    PUSH = "push"
    PULL = "pull"


class Phase(Word):
    """Place of a routine in its pair; an indivisible scheme is one whole routine."""

    WHOLE = "whole"
    FIRST = "first"
    SECOND = "second"


class Form(Word):
    """What a routine moves: numbers of the tensor, opaque payloads, or payloads that add up like numbers.

    ``HALF``: numbers that travel as float16 and are added up as they were (a reduction inside the node).
    """

    RAW = "raw"
    HALF = "half"
    PAYLOAD = "payload"
    SUMMABLE = "summable"


class StepKind(Word):
    COMPRESS = "compress"
    DECOMPRESS = "decompress"
    TRANSFORM = "transform"
    AGGREGATE = "aggregate"
    COMMUNICATE = "communicate"


_WORDS = {
    StepKind.COMPRESS: "comp",
    StepKind.DECOMPRESS: "dec",
    StepKind.TRANSFORM: "transform",
    StepKind.AGGREGATE: "sum",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One action. Compute steps have a ``device``, communication steps a routine, scope and phase."""

    kind: StepKind
    form: Form
    device: Device | None = None
    routine: Routine | None = None
    scope: Scope | None = None
    phase: Phase | None = None

    @property
    def is_communication(self) -> bool:
        return self.kind is StepKind.COMMUNICATE

    def __str__(self) -> str:
        if self.is_communication:
            assert self.scope is not None
            assert self.routine is not None
            half = ":fp16" if self.form is Form.HALF else ""
            return f"{self.scope.value}.{self.routine.value}{half}"
        assert self.device is not None
        word = _WORDS[self.kind]
        return word if self.device is Device.TRAINING else f"{word}@{self.device.value}"


def compress(device: Device, form: Form = Form.PAYLOAD) -> Step:
    return Step(StepKind.COMPRESS, form, device=device)


def decompress(device: Device, form: Form = Form.PAYLOAD) -> Step:
    """Decode *and aggregate* every payload held."""
    return Step(StepKind.DECOMPRESS, form, device=device)


def aggregate(device: Device) -> Step:
    """Add up raw numbers that several ranks sent, in rank order."""
    return Step(StepKind.AGGREGATE, Form.RAW, device=device)


def transform(device: Device) -> Step:
    """Between two rounds of a summable compressor: make the next round's vector from the sum of the last."""
    return Step(StepKind.TRANSFORM, Form.SUMMABLE, device=device)


def communicate(routine: Routine, scope: Scope, phase: Phase, form: Form) -> Step:
    return Step(StepKind.COMMUNICATE, form, routine=routine, scope=scope, phase=phase)


@dataclass(frozen=True)
class Option:
    """A leaf of the tree. ``str(option)`` is its id in strategy files, unique within the tree.

    Example:
        >>> str(UNCOMPRESSED)
        'flat.allreduce'
    """

    steps: tuple[Step, ...]

    @cached_property
    def is_compressed(self) -> bool:
        return any(step.kind is StepKind.COMPRESS for step in self.steps)

    @cached_property
    def halves(self) -> bool:
        """Whether raw numbers travel as fp16 on the way: what that rounds away is kept nowhere."""
        return any(step.form is Form.HALF for step in self.steps)

    @cached_property
    def is_summable(self) -> bool:
        """Whether the payload goes through raw reductions, which only a summable compressor allows."""
        return any(step.form is Form.SUMMABLE for step in self.steps)

    @cached_property
    def carries_payloads(self) -> bool:
        """Whether ranks send each other payloads, in which exact numbers may ride: not sums, and not to servers."""
        return self.is_compressed and not self.is_summable and not self.uses_servers

    @cached_property
    def moves_matrices(self) -> bool:
        """Whether a transform runs on another device than the compression whose matrices it works on."""
        devices = [s.device for s in self.steps if s.kind in (StepKind.COMPRESS, StepKind.TRANSFORM)]
        return self.num_rounds > 1 and len(set(devices)) > 1

    @cached_property
    def num_rounds(self) -> int:
        """How many vectors are summed, one after the other; above 1 tensors are kept whole."""
        return 1 + sum(step.kind is StepKind.TRANSFORM for step in self.steps)

    @cached_property
    def is_hierarchical(self) -> bool:
        return any(step.scope in (Scope.INTRA, Scope.INTER) for step in self.steps)

    @cached_property
    def num_compressions(self) -> int:
        return sum(step.kind is StepKind.COMPRESS for step in self.steps)

    @cached_property
    def uses_offload(self) -> bool:
        return any(step.device is Device.OFFLOAD for step in self.steps)

    @cached_property
    def uses_servers(self) -> bool:
        return any(step.device is Device.SERVER for step in self.steps)

    def on_device(self, device: Device) -> Option:
        """The same leaf with every compression and decompression of a rank on ``device``."""
        return Option(
            tuple(
                step if step.device in (None, Device.SERVER) else Step(step.kind, step.form, device=device)
                for step in self.steps
            )
        )

    @cached_property
    def _text(self) -> str:
        return " > ".join(str(step) for step in self.steps)

    def __str__(self) -> str:
        return self._text

    def __hash__(self) -> int:
        return hash(self._text)  # a text remembers its own


UNCOMPRESSED = Option((communicate(Routine.ALLREDUCE, Scope.FLAT, Phase.WHOLE, Form.RAW),))
