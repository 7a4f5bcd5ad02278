"""What a compressor is: parameters, traits, a payload layout, and a codec that moves bytes.

Two halves, so that one wire format serves two backends:

- a :class:`Compressor` is a frozen dataclass of parameters. It knows its traits and lays payloads out;
- a :class:`Codec` encodes into and decodes from such payloads on one backend (Numba on the host, in
  ``espresso.cpu_offload``; CuPy on the GPU). Codecs never communicate and own no state.

Everything is batched over *segments*: the stretches of tensors inside one shard of one partition.
A payload is one header, one segment table and one body per segment; its size is known before the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Starts = npt.NDArray[np.int64]


class PayloadError(ValueError):
    """A payload is malformed, truncated, of another version or algorithm, or of another layout."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What the decision tree, the cost model and the executor need to know of a compressor.

    Attributes:
        summable: payload numbers may be added by a raw reduction (the tree's extension applies).
        lossless: decoding gives the encoded numbers back bit for bit.
        error_feedback: needs a residual at every compression site (biased compressors), or must not have one:
            unbiased quantizers, whose residual would grow, and casts.
        stochastic: draws random numbers, so that the draw key matters.
        exact_size: every byte of a payload counts; False where slots may stay empty, so that its size is a bound.
        masks: a sparsifier whose bodies are those of :mod:`espresso.compressors.sparse`, and whose choice masks
            velocities of momentum correction.
        sparse: sends nothing of most numbers, and perhaps nothing of a stretch of them.
        rounds: vectors that are summed one after the other, with a transform between; above 1 the compressor
            has no payload, works on whole tensors, and goes through the tree's extension only.
        feedback_gain: the :class:`Feedback` gain that training goes best with beside SGD with a momentum of .9, unless
            the user sets one. All of the residual at once makes coarse compressors swing; low-rank factors lose what
            comes back slowly.
    """

    summable: bool = False
    lossless: bool = False
    error_feedback: bool = True
    stochastic: bool = False
    exact_size: bool = True
    masks: bool = False
    sparse: bool = False
    rounds: int = 1
    feedback_gain: float = 1.0

    def gain_at(self, scale: float) -> float:
        """The feedback gain beside an optimizer with this :func:`gain_scale`.

        It is less than usual only where all numbers are sent: what a sparsifier leaves out comes by its residual alone.
        """
        if self.sparse or self.feedback_gain == 1.0:
            scale = max(scale, 1.0)
        return min(self.feedback_gain * scale, 1.0)


DAMPED = 1 / 16
"""Feedback gain of compressors whose errors are large in every step: with less, a run ends before all is sent; with
more, what comes back smooths the averages, and Adam's steps get longer by it (docs/convergence.md)."""

MOMENTUM = 0.9
"""What most optimizers have, and the first beta of Adam and its kin."""

SLOWER = 1 / 2
"""Beside Adam and its kin so much of the gain: what comes back weighs numbers by their gradients again, which their
steps do not (docs/convergence.md)."""


def gain_scale(momentum: float | None, *, adapts: bool = False) -> float:
    """By how much feedback gains are multiplied beside an optimizer: a power of two, by which numbers are divided
    exactly.

    With less momentum than most have it is more: what is late is harmful sooner, and what comes back swings less.

    Args:
        momentum: or first beta; None where nobody says, which leaves gains as they are.
        adapts: steps depend on what it remembers of gradients beside their sum.
    """
    if momentum is None:
        return 1.0
    doublings = max(round(math.log2((1 - momentum) / (1 - MOMENTUM))), 0)
    return SLOWER if adapts and not doublings else math.ldexp(1.0, doublings)


@dataclass(frozen=True, slots=True)
class Correction:
    """Momentum in front of error feedback (DGC): a property of the whole job, raw tensors included.

    Attributes:
        momentum: mu, in (0, 1); the optimizer's own has to be 0.
        nesterov: the Nesterov form.
        clip_norm: a rank's gradient of a tensor is scaled down to this norm over the root of the number of
            ranks, before anything else; 0 does not clip.
    """

    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float = 0.0

    def added(self, velocity: Array, gradient: Array) -> Array:
        """What is added to the residual, of the velocity before it moves and an unclipped gradient, of equal shape."""
        gain = 1 + self.momentum if self.nesterov else 1.0
        return self.momentum * velocity + gain * gradient


@dataclass(frozen=True, slots=True)
class Segment:
    """``numel`` elements of ``tensor`` from ``tensor_start``: the unit of scales, k and residual ranges.

    ``shape`` is the whole tensor's, where it is known; ``exact`` that it travels raw, whatever its size.
    """

    tensor: str
    tensor_start: int
    numel: int
    shape: tuple[int, ...] = ()
    exact: bool = False


@dataclass(frozen=True, slots=True)
class DrawKey:
    """What random numbers depend on beside tensor and element: never the order of draws.

    Attributes:
        seed: the job's seed, equal on all ranks.
        step: the iteration.
        site: the compression site's number.
        rank: the encoding rank, or -1 where several ranks encode the same aggregate or share a draw.
    """

    seed: int = 0
    step: int = 0
    site: int = 0
    rank: int = -1


@dataclass(frozen=True, eq=False)
class Layout:
    """Where everything lies in the payload of one list of segments. Made once per plan, then reused.

    Attributes:
        segments: what is encoded, in order.
        dtype: ``float32`` or ``float64``: the type codecs read, write and keep residuals in.
        num_bytes: the payload's size (for sparsifiers the bound, slots included); a multiple of 8.
        header: the bytes of header and segment table, with the flags clear.
        numels: int64[num_segments].
        offsets: int64[num_segments], byte offset of each segment's body, a multiple of 8.
        counts: int64[num_segments], the algorithm's own count per segment (k, blocks, words; 0 if unused).
        raw: bool[num_segments], true where the segment is too small and travels as plain numbers.
    """

    segments: tuple[Segment, ...]
    dtype: np.dtype[Any]
    num_bytes: int
    header: bytes
    numels: Starts
    offsets: Starts
    counts: Starts
    raw: npt.NDArray[np.bool_]

    @property
    def num_elements(self) -> int:
        return int(self.numels.sum())


@dataclass(frozen=True, slots=True)
class Feedback:
    """Residual buffers of one encode: read from ``old``, write to ``new`` (never the same array).

    ``starts[i]`` is where segment i begins in both. A discarded iteration simply keeps ``old``.

    With q = scale * source + old and C(q) what is sent, encoders write::

        new = gain * (q - C(q)) + (1 - gain) * old

    A gain of 1 is classical error feedback (Karimireddy et al., ICML 2019). A smaller one is the low-pass filter of
    ScaleCom (Chen et al., NeurIPS 2020, arXiv 2104.11125): what was not sent comes back over some 1 / gain
    iterations instead of all in the next. Nothing is lost either way: ``old / gain`` is what is still owed, and
    sum sent + new / gain = sum given + old / gain.
    """

    old: Array
    new: Array
    starts: Starts
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Encoding:
    """What to encode: ``q = scale * source + residual`` on every segment of a layout.

    Attributes:
        layout: of the codec's compressor.
        source: 1-D of ``layout.dtype``, an array or a tensor of the codec's device; not changed. Segment i is
            ``source[starts[i] : starts[i] + numels[i]]``.
        starts: int64[num_segments].
        scale: multiplies the source only.
        feedback: residuals in the units of q; ``new`` receives ``q - decode(payload)`` on every segment.
        key: for random numbers.
    """

    layout: Layout
    source: Any
    starts: Starts
    scale: float = 1.0
    feedback: Feedback | None = None
    key: DrawKey = DrawKey()


@dataclass(frozen=True, slots=True)
class Decoding:
    """Where decoded numbers go: ``scale`` times them on every segment of a layout.

    Attributes:
        layout: of the codec's compressor.
        target: 1-D of ``layout.dtype``, where the codec works; only the segments are written, all of their elements.
        starts: int64[num_segments], as for :class:`Encoding`.
        key: as given to encode; needed where the receiver draws the same numbers (random-k). ``rank`` is -1 there.
    """

    layout: Layout
    target: Any
    starts: Starts
    scale: float = 1.0
    key: DrawKey = DrawKey()


class Compressor:
    """Parameters, traits and wire format of one algorithm; a frozen dataclass per algorithm.

    What a subclass leaves as it is here asks for no momentum, follows no schedule and masks nothing.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits]
    scheduled: ClassVar[frozenset[str]] = frozenset()
    """The parameters that a schedule is made of: what differs in no other is the same, at another time."""

    def layout(self, segments: Sequence[Segment], dtype: npt.DTypeLike = np.float32) -> Layout:
        """Lay out the payload for these segments; ``dtype`` is float32 or float64."""
        raise NotImplementedError

    def params(self) -> dict[str, Any]:
        """The parameters that differ from their defaults, as a spec writes them."""
        return {}

    @property
    def correction(self) -> Correction | None:
        """The momentum this compressor asks of the job, if any."""
        return None

    @property
    def is_scheduled(self) -> bool:
        """Whether :meth:`in_force` depends on the epoch or the step."""
        return False

    @property
    def start_step(self) -> int:
        """The first step that compresses; :meth:`in_force` gives no compression before."""
        return 0

    def in_force(self, epoch: int, step: int) -> Compressor:
        """What to run in this step: another ratio while it warms up; itself where there is no schedule."""
        return self

    def sent(self, layout: Layout, payload: Bytes) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """What a sparsifier chose: (segment, indices within it); nothing from a dense compressor."""
        return iter(())


@runtime_checkable
class Codec(Protocol):
    """One compressor on one backend. All methods are safe to call from several threads at once."""

    @property
    def compressor(self) -> Compressor: ...

    def encode(self, encoding: Encoding, payload: Bytes) -> bool:
        """Encode into ``payload``: uint8[layout.num_bytes], 8-byte aligned, fully written (padding zero).

        Returns:
            Whether q was finite everywhere. If not, the payload says so in its header (decoders then
            produce NaN) and ``feedback.new`` is unspecified.
        """
        ...

    def decode(self, decoding: Decoding, payloads: npt.NDArray[np.uint8]) -> bool:
        """Write ``scale * sum of the decoded payloads``.

        Args:
            payloads: uint8[num_sources, layout.num_bytes], rows contiguous and 8-byte aligned; summed in row order.

        Returns:
            Whether every payload was finite; if not, all segments of the target are NaN.

        Raises:
            PayloadError: a payload does not belong to this layout; says what differs.
        """
        ...


@runtime_checkable
class DitheringCodec(Codec, Protocol):
    """A codec that can be made to round without bias: casts and whole numbers."""

    def dither(self, encoding: Encoding) -> None:
        """Move the numbers of the source, in place and at random by the key, so that encoded then each is on average
        what it was. What fits already stays.
        """
        ...


@runtime_checkable
class SummableCodec(Codec, Protocol):
    """A codec whose payload can also be a plain vector of numbers that a reduction adds up."""

    def num_values(self, layout: Layout) -> int:
        """How many numbers the vector has."""
        ...

    def value_dtype(self, layout: Layout) -> str:
        """Their type: ``float16``, ``bfloat16``, ``float32`` or ``float64``."""
        ...

    def encode_values(self, encoding: Encoding, values: Array) -> bool:
        """Like ``encode``; ``values`` is 1-D of ``num_values`` (bfloat16 as uint16). Non-finite stays so."""
        ...

    def decode_values(self, decoding: Decoding, values: Array) -> bool:
        """Write ``scale * decoded``; returns whether all is finite."""
        ...


class Factors(Protocol):
    """What a compressor of several rounds keeps from one step to the next, by tensor; equal on all ranks."""

    def read(self, tensor: str) -> Array | None:
        """What the last step that counted left."""
        ...

    def write(self, tensor: str, values: Array) -> None:
        """For the next step, if this one counts; the array is the store's from now on."""
        ...


class RoundsCodec(Protocol):
    """A codec of several rounds. Vectors are 1-D of the layout's dtype; a reduction adds them up between calls."""

    compressor: Compressor

    def num_values(self, layout: Layout, number: int) -> int:
        """How many numbers the vector of a round has."""
        ...

    def encode_values(self, encoding: Encoding, values: Array, factors: Factors) -> None:
        """Write ``scale * source + residual`` to ``feedback.new``, and the first round's vector."""
        ...

    def transform_values(self, layout: Layout, summed: Array, values: Array, *, feedback: Feedback) -> None:
        """From the first round's sum (changed in place) make the second vector; ``feedback.new`` keeps what is left."""
        ...

    def decode_values(self, decoding: Decoding, first: Array, second: Array, factors: Factors) -> bool:
        """Write ``scale * decoded``; returns whether all is finite."""
        ...
