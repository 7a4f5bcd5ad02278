"""How much a compressor keeps back of a tensor's gradient, by simulating error feedback on a sample of it.

*Owed* is ``|e| / |g|`` where error feedback has settled: how many of its gradients a tensor's residual is as large as,
without what all ranks keep alike. That is what gradients have in common for many steps: it is late by as many as the
feedback gain says, and no more. Owed says what the error of one step does not: signs lose 60 % of a gradient in every
step and owe a few gradients, one number in a hundred loses less than twice that and owes ten. A residual that comes
back in the next step counts :func:`rings` times. Of codecs without a residual it is what one step loses
(:mod:`benchmarks.error_measures` has what it predicts of training). A sensitivity file::

    {"schema_version": 1, "kind": "espresso-sensitivity",
     "owed": {"dgc:ratio=0.01": {"*": 9.5, "embedding.weight": 4.0}, "fp16": {"*": 0.0003}}}

with ``*`` for all tensors that are not named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import MOMENTUM, Decoding, DrawKey, Encoding, Feedback, Segment
from espresso.compressors.powersgd import matrix_of
from espresso.model.arrays import Reals
from espresso.model.links import JobError
from espresso.model.payload_sizes import create_compressor
from espresso.strategies import NONE, Choice, CompressorSpec, Strategy, TensorSpec, fields
from espresso.strategies.fields import faults, number

EVERY = "*"
KIND = "espresso-sensitivity"
STEPS = 128
"""Of error feedback that are played. Signs and quantizers settle within thirty; one number in a hundred nearly does,
one in a thousand does not, and owes more."""
SAMPLED_STEPS = 8
"""Gradients of a sample: as many as automatic mode profiles."""
ONE_STEP = 4
"""Steps of codecs without a residual: each is like the other."""
LIKE_ONE = 8
"""Of a single gradient, so many with its magnitudes and any signs."""
RINGING = math.sqrt((1 + MOMENTUM) / (1 - MOMENTUM))
"""What a residual that comes back in the next step (a feedback gain of 1) counts against one that takes many: as much
more as the usual momentum makes of what it is given again and again than of what has any sign in the next step. From 3
to 6 ends of training are in the order of what is owed over both (docs/convergence.md)."""
TOO_MUCH = 1e6
"""Gradients owed by what cannot carry a tensor's: half precision ends at 65 504."""
ROWS_A_RANK = 4
"""Of a matrix, to see what a rank leaves of it: rank 8 left nothing of eight rows of an LSTM's, and owed ten gradients
(benchmarks.owed)."""
RUNS = 8
"""Stretches of a tensor that is too large to be sampled whole."""
_NORMAL = (128, 128)


def rings(spec: CompressorSpec, gain: float | None = None, scale: float = 1.0, *, corrected: bool = False) -> float:
    """What is owed counts so much: more where it comes back at once, and less where beside an optimizer it comes back
    over more steps than usual, in proportion.

    1 of what keeps nothing back, and of momentum correction, which is defined with a gain of 1 and not known. A gain
    that compressors choose beside less momentum counts as the one beside the usual, one that is given as it is.

    Args:
        gain: that is given.
        scale: of compressors' own.
        corrected: whether the job corrects momentum: then it does for all of its compressors.
    """
    compressor = create_compressor(spec)
    traits = compressor.traits
    if not traits.error_feedback or corrected or compressor.correction:
        return 1.0
    if gain is not None:
        return max(RINGING * gain, 1.0)
    usual = traits.feedback_gain
    return max(RINGING * usual, 1.0) * min(traits.gain_at(scale) / usual, 1.0)


@dataclass(frozen=True)
class Sensitivity:
    """Gradients owed by compressor and tensor name; ``*`` stands for tensors that are not named.

    Raises:
        JobError: an error that is negative or not finite.
    """

    owed: Mapping[CompressorSpec, Mapping[str, float]]

    def __post_init__(self) -> None:
        with faults(JobError):
            for spec, rows in self.owed.items():
                for tensor, value in rows.items():
                    number(value, f"what '{spec}' owes of tensor {tensor!r}")

    def of(self, spec: CompressorSpec, tensor: str) -> float:
        """Gradients that a compressor owes of a tensor.

        Raises:
            JobError: it is not known.
        """
        if spec == NONE:
            return 0.0
        rows = self.owed.get(spec, self.owed.get(spec.kept_as(""), {}))
        value = rows.get(tensor, rows.get(EVERY))
        if value is None:
            raise JobError(
                f"the sensitivity does not say what '{spec}' does to tensor {tensor!r};"
                f" name the tensor, or give {EVERY!r} for all that are not named"
            )
        return value

    def knows(self, spec: CompressorSpec, tensors: Iterable[str] = ()) -> bool:
        """Whether anything is said of a compressor, and of all these tensors."""
        rows = self.owed.get(spec, self.owed.get(spec.kept_as("")))
        return rows is not None and (EVERY in rows or all(name in rows for name in tensors))

    def kept_up(
        self, measured: Mapping[str, tuple[Choice, float]], seen: AbstractSet[tuple[CompressorSpec, str]] = frozenset()
    ) -> Sensitivity:
        """With what tensors were found to owe by their choices.

        What one compressor owes of a tensor tells of the others with error feedback: forecasts of a tensor are off
        alike, since they assume how much of a gradient the later ones have in common.

        Args:
            seen: compressor and tensor that were measured before: no forecasts, which a first measurement of another
                compressor could put right. What the same compressor owes with other settings is told by it: only a
                first measurement of that compressor moves it.
        """
        found = {spec: dict(rows) for spec, rows in self.owed.items()}
        names = {(spec.name, tensor) for spec, tensor in seen}
        for tensor, (choice, owed) in measured.items():
            if not self.knows(choice.compressor) or not keeps_back(choice.compressor):
                continue
            forecast, ours = self.of(choice.compressor, tensor), choice.compressor.kept_as("")
            # A sum that is compressed again owes as much again.
            now = owed / math.sqrt(max(choice.option.num_compressions, 1))
            is_first = (ours, tensor) not in seen
            for spec, rows in found.items():
                is_known = (spec.kept_as(""), tensor) in seen or (
                    spec.name != ours.name and (spec.name, tensor) in names
                )
                stays = is_first and is_known and spec.kept_as("") != ours
                if forecast > 0 and keeps_back(spec) and (tensor in rows or EVERY in rows) and not stays:
                    rows[tensor] = now / forecast * self.of(spec, tensor)
        return Sensitivity(found)

    def corrected(
        self, first: Sensitivity, known: Sensitivity, seen: Iterable[tuple[CompressorSpec, str]]
    ) -> Sensitivity:
        """Forecasts that come later, by as much as those of what has run were off.

        Args:
            first, known: what compressors were forecast to owe, and what is known of them now.
            seen: compressor and tensor that were measured; of two of a tensor the last counts.
        """
        off = {}
        for spec, tensor in seen:
            if first.knows(spec, (tensor,)) and keeps_back(spec) and (said := first.of(spec, tensor)) > 0:
                off[tensor] = known.of(spec, tensor) / said
        rows = {spec: dict(rows) for spec, rows in self.owed.items()}
        for spec in filter(keeps_back, rows):
            rows[spec] |= {tensor: times * self.of(spec, tensor) for tensor, times in off.items()}
        return Sensitivity(rows)

    @classmethod
    def from_json(cls, body: Any) -> Sensitivity:
        """Read the file's form.

        Raises:
            JobError: names the fault.
        """
        with faults(JobError):
            found = fields.read_as(_File, fields.without_head(body, KIND), "the sensitivity")
        try:
            return cls({CompressorSpec.parse(name): rows for name, rows in found.owed.items()})
        except JobError:
            raise
        except ValueError as error:
            raise JobError(f"owed: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Read a sensitivity file.

        Raises:
            JobError: not JSON or faulty; begins with the path.
            OSError: the file cannot be read.
        """
        return fields.load(path, cls.from_json, JobError)

    def to_json(self) -> dict[str, Any]:
        errors = {str(spec): dict(rows) for spec, rows in self.owed.items()}
        return fields.head(KIND) | {"owed": errors}


def owed_by(strategy: Strategy, found: Mapping[str, tuple[Choice, float]]) -> float:
    """Gradients that a strategy owes by what its tensors were found to owe, as a budget counts them; of others none."""
    choices, sizes = strategy.choices, {tensor.name: tensor.numel for tensor in strategy.tensors}
    squares = (sizes[name] * owed**2 for name, (choice, owed) in found.items() if choices.get(name) == choice)
    return math.sqrt(math.fsum(squares) / max(sum(sizes.values()), 1))


def keeps_back(spec: CompressorSpec) -> bool:
    """Whether a compressor has error feedback."""
    return create_compressor(spec).traits.error_feedback


def has_rounds(spec: CompressorSpec) -> bool:
    """Whether a compressor sends several vectors, each made of the last one's sum."""
    return create_compressor(spec).traits.rounds > 1


@dataclass(frozen=True)
class _File:
    """A sensitivity file, below its head."""

    owed: Mapping[str, Mapping[str, float]]
    note: str = ""


@dataclass(frozen=True)
class Sample:
    """Some numbers of a tensor's gradient in a few steps.

    Attributes:
        tensor: whole.
        values: float32[steps, sampled], whole rows of a matrix where they fit.
    """

    tensor: TensorSpec
    values: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.dtype != np.float32 or not np.isfinite(self.values).all():
            raise ValueError(f"the sample of {self.tensor.name!r} must be 2-D (steps, numbers), float32 and finite")


def stretches_of(tensor: TensorSpec, most: int) -> tuple[tuple[int, int], ...]:
    """(first element, elements) of what to sample: all of a tensor, or ``RUNS`` stretches of it, evenly spaced."""
    numel = tensor.numel
    if numel <= most:
        return ((0, numel),)
    columns = numel // tensor.shape[0]
    each = most // RUNS
    if columns <= each:
        each -= each % columns
    starts = [number * (numel - each) // (RUNS - 1) for number in range(RUNS)]
    if columns <= each:
        starts = [start - start % columns for start in starts]
    return tuple((start, each) for start in starts)


def measure_sensitivity(
    samples: Sequence[Sample],
    specs: Iterable[CompressorSpec],
    *,
    gain: float | None = None,
    scale: float = 1.0,
    corrected: bool = False,
) -> Sensitivity:
    """Play error feedback on gradients like those sampled, and see what is owed at the end.

    A step's gradient is the samples' scatter in new proportions, as many different ones as needed, with the heavy tails
    and the sparsity of the tensor's own numbers. What is not finite after it owes ``TOO_MUCH``.

    Args:
        gain: of the feedback; None takes each compressor's own.
        scale: of compressors' own, beside the job's optimizer.
        corrected: see :func:`rings`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        made = _Gradients(samples, STEPS)
        found = {
            spec: dict(zip(made.names, _owed(made, spec, gain, scale, corrected).tolist(), strict=True))
            for spec in dict.fromkeys(specs)
        }
    return Sensitivity({spec: rows for spec, rows in found.items() if spec != NONE})


def normal_sensitivity(
    specs: Iterable[CompressorSpec], *, gain: float | None = None, scale: float = 1.0, corrected: bool = False
) -> Sensitivity:
    """What compressors owe of independent normal numbers: where nothing better was measured."""
    return _of_normal(tuple(specs), gain, scale, corrected)


@lru_cache(maxsize=64)
def _of_normal(specs: tuple[CompressorSpec, ...], gain: float | None, scale: float, corrected: bool) -> Sensitivity:
    values = np.random.default_rng(0).standard_normal((SAMPLED_STEPS, *_NORMAL)).astype(np.float32)
    sample = Sample(TensorSpec(EVERY, _NORMAL), values.reshape(SAMPLED_STEPS, -1))
    return measure_sensitivity([sample], specs, gain=gain, scale=scale, corrected=corrected)


class _Gradients:
    """Gradients of all sampled tensors, one after the other in one array, step by step."""

    def __init__(self, samples: Sequence[Sample], steps: int) -> None:
        self.samples = samples
        self.names = [sample.tensor.name for sample in samples]
        self.numels = np.array([sample.values.shape[1] for sample in samples], np.int64)
        self.starts = np.cumsum(self.numels) - self.numels
        self.steps = steps
        self._scatter = np.concatenate([_scatter(sample) for sample in samples], axis=-1)
        self._mix = np.random.default_rng(0).standard_normal((steps, len(self._scatter))).astype(np.float32)

    def step(self, number: int) -> npt.NDArray[np.float32]:
        """float32[all numbers]."""
        values: npt.NDArray[np.float32] = self._mix[number] @ self._scatter
        return values

    def norms(self, values: npt.NDArray[np.float32]) -> Reals:
        """float64[tensors]."""
        squares, full = np.zeros(len(self.numels)), self.numels > 0
        if full.any():
            squares[full] = np.add.reduceat(np.square(values, dtype=np.float64), self.starts[full])
        return np.sqrt(squares)


def _scatter(sample: Sample) -> npt.NDArray[np.float32]:
    """What a sample's gradients have apart from each other, so that a mix of it has its variance.

    Of gradients that were all zero nothing is known: normal numbers stand in. Of one alone, or of one again and again,
    its magnitudes are, with any signs.
    """
    values = sample.values
    if values.size and not values.any():
        values = np.random.default_rng(0).standard_normal(values.shape, np.float32)
    if (values == values[0]).all():
        rows = len(values) if len(values) > 1 else LIKE_ONE
        signs = np.random.default_rng(1).choice(np.array([-1.0, 1.0], np.float32), (rows, values.shape[1]))
        alike: npt.NDArray[np.float32] = values[0] * signs / np.float32(math.sqrt(rows))
        return alike
    scatter: npt.NDArray[np.float32] = (values - values.mean(axis=0)) / np.float32(math.sqrt(len(values) - 1))
    return scatter


def _owed(made: _Gradients, spec: CompressorSpec, gain: float | None, scale: float, corrected: bool) -> Reals:
    """float64[tensors]: the median over the last quarter of the steps."""
    compressor = create_compressor(spec)
    traits = compressor.traits
    used = 1.0 if corrected or compressor.correction else (traits.gain_at(scale) if gain is None else gain)
    play = _LowRank(made, compressor) if traits.rounds > 1 else _Coded(made, spec, used)
    steps = made.steps if traits.error_feedback else ONE_STEP
    felt, rows = rings(spec, gain, scale, corrected=corrected), []
    for step in range(steps):
        gradient = made.step(step)
        left = play.left(gradient, step)
        if step >= steps * 3 // 4:
            norms = made.norms(gradient)
            rows.append(felt * np.divide(made.norms(left), norms, out=np.zeros_like(norms), where=norms != 0))
    return np.asarray(np.nan_to_num(np.median(rows, axis=0), nan=TOO_MUCH, posinf=TOO_MUCH))


class _Coded:
    """Error feedback around a codec, every sampled tensor a segment."""

    def __init__(self, made: _Gradients, spec: CompressorSpec, gain: float) -> None:
        from espresso.compressors.registry import host_codec

        self._gain, self._parts = gain, []
        self._old, self._new = (np.zeros(int(made.numels.sum()), np.float32) for _ in range(2))
        alike: dict[CompressorSpec, list[int]] = {}
        for index, sample in enumerate(made.samples):
            alike.setdefault(_on_sample(spec, sample), []).append(index)
        for used, members in alike.items():
            codec = host_codec(create_compressor(used), None)
            segments = [Segment(made.names[i], 0, int(made.numels[i])) for i in members]
            layout = codec.compressor.layout(segments)
            self._parts.append((codec, layout, made.starts[members], np.zeros(layout.num_bytes, np.uint8)))

    def left(self, gradient: npt.NDArray[np.float32], step: int) -> npt.NDArray[np.float32]:
        """What is kept after a step, or of codecs without a residual what is lost in it."""
        keeps = True
        for codec, layout, starts, payload in self._parts:
            keeps = codec.compressor.traits.error_feedback
            key = DrawKey(step=step)
            feedback = Feedback(self._old, self._new, starts, self._gain) if keeps else None
            codec.encode(Encoding(layout, gradient, starts, feedback=feedback, key=key), payload)
            if not keeps:
                codec.decode(Decoding(layout, self._new, starts, key=key), payload[None])
        if not keeps:
            return gradient - self._new
        self._old, self._new = self._new, self._old
        return self._old / np.float32(self._gain)


def _on_sample(spec: CompressorSpec, sample: Sample) -> CompressorSpec:
    """On a sample what is sent as plain numbers of a whole tensor is sent so, and no more; and a sparsifier that sends
    a count of a tensor sends the same part.
    """
    whole, sampled = sample.tensor.numel, sample.values.shape[1]
    if whole == sampled:
        return spec
    layout = create_compressor(spec).layout([Segment("", 0, whole)])
    params = dict(spec.params)
    if "raw_below" in params:
        below = whole if layout.raw[0] else 1
        spec = CompressorSpec(spec.name, (*spec.without("raw_below").params, ("raw_below", below)))
    if "least" not in params and "k" not in params:
        return spec
    part = 1.0 if layout.raw[0] else float(layout.counts[0]) / whole
    return CompressorSpec(spec.name, (*spec.without("least", "k", "ratio").params, ("ratio", part)))


class _LowRank:
    """PowerSGD on the rows of each matrix that were sampled; what it sends raw owes nothing.

    A step's scatter is a mix of few matrices, and those of eight steps span so little that a warm start would soon send
    all of it. So its columns change their signs at random from step to step, and the rank stays: forecasts are then
    1.2 to 6.5 times what is owed in training, without .2 to .6 of a GPT's (docs/convergence.md). Over many steps
    energy spreads over all directions, and what waits for its turn grows with the root of their number: a matrix owes
    as much more than its sampled rows as it has more directions.
    """

    def __init__(self, made: _Gradients, compressor: Any) -> None:
        self._spans: list[tuple[slice, int, int, np.float32]] = []
        self._draws = np.random.default_rng(0)
        for start, sample in zip(made.starts.tolist(), made.samples, strict=True):
            rank, (whole, columns) = compressor.rank_of(sample.tensor.shape), matrix_of(sample.tensor.shape)
            rows = sample.values.shape[1] // max(columns, 1)
            span = slice(start, start + sample.values.shape[1])
            is_whole = rows == whole or rows >= ROWS_A_RANK * rank
            if rank and is_whole and rows * columns == sample.values.shape[1]:
                more = math.sqrt(min(whole, columns) / min(rows, columns))
                self._spans.append((span, columns, min(rank, rows), np.float32(more)))
            elif rank:  # of few rows, or of less than one, a low rank has it all, and of the whole next to nothing
                self._spans.append((span, 0, rank, np.float32(1.0)))
        self._kept = np.zeros(int(made.numels.sum()), np.float32)
        self._right: dict[int, npt.NDArray[np.float32]] = {}

    def left(self, gradient: npt.NDArray[np.float32], step: int) -> npt.NDArray[np.float32]:
        """What is kept after a step, for all rows of the matrices."""
        of_all = np.zeros_like(self._kept)
        for index, (span, columns, rank, more) in enumerate(self._spans):
            if not columns:
                self._kept[span] += gradient[span]
                of_all[span] = self._kept[span]
                continue
            turned = gradient[span].reshape(-1, columns) * self._signs(columns)
            matrix = turned + self._kept[span].reshape(-1, columns)
            right = self._right.get(index)
            if right is None:
                right = np.random.default_rng(index).standard_normal((columns, rank)).astype(np.float32)
            left, _ = np.linalg.qr(matrix @ right)
            self._right[index] = right = matrix.T @ left
            self._kept[span] = (matrix - left @ right.T).reshape(-1)
            of_all[span] = self._kept[span] * more
        return of_all

    def _signs(self, count: int) -> npt.NDArray[np.float32]:
        """float32[count] of 1 and -1."""
        return self._draws.integers(0, 2, count, dtype=np.int8).astype(np.float32) * 2 - 1
