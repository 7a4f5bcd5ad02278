"""DGC's momentum correction: a velocity in front of error feedback.

Lin et al., Deep Gradient Compression, ICLR 2018. With the residual v kept by the codec's error feedback::

    plain      m <- mu*m + g            v <- v + m
    nesterov   m <- mu*(m + g)          v <- v + m + g
    both       send the top of v; zero m and v there (v: error feedback does; m: momentum masking)

The conservation law is the residual's own: sum sent + v = sum of what was added to v. What travels raw is
sent whole in every step; as in the authors' code its velocity is not masked, so that it sees the usual momentum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Array, Bytes, Codec, Correction, DrawKey, Feedback, Layout


def advance(rule: Correction, gradient: Array, scale: float, old: Array, new: Array, out: Array) -> None:
    """Move a velocity on: ``new`` becomes m, ``out`` what is added to v.

    Args:
        gradient: g over ``scale``; not changed unless it is ``out``.
        old: m before.
        new: another array; may be ``out`` too, without Nesterov.
        out: may be ``gradient``.
    """
    kind = new.dtype.type
    if rule.nesterov:
        np.multiply(gradient, kind(scale), out=out)
        np.add(old, out, out=new)
        np.multiply(new, kind(rule.momentum), out=new)
        np.add(new, out, out=out)
        return
    scaled = gradient if scale == 1.0 else gradient * kind(scale)
    np.multiply(old, kind(rule.momentum), out=new)
    np.add(new, scaled, out=new)
    if out is not new:
        np.copyto(out, new)


class MomentumCorrection:
    """Encodes v + m instead of v + g. Acts at the first compression site only; ``decode`` is the codec's.

    Velocities are transactional like residuals: read from one buffer, written to another, laid out alike. The
    optimizer's own momentum has to be 0. Not for several threads at once: it keeps a buffer.

    Args:
        codec: of any compressor; only what a sparsifier sends is masked.
        rule: momentum above 0.
    """

    def __init__(self, codec: Codec, rule: Correction) -> None:
        if not 0 < rule.momentum < 1:
            raise ValueError(f"momentum must be above 0 and below 1, got {rule.momentum}")
        self.codec = codec
        self.rule = rule
        self._added: Array = np.empty(0)

    def advance(
        self, layout: Layout, source: Array, starts: npt.NDArray[np.int64], velocity: Feedback, scale: float
    ) -> tuple[Array, npt.NDArray[np.int64]]:
        """Move the velocities of all segments on; returns what to encode instead, and where it starts."""
        out, out_starts = velocity.new, velocity.starts
        if self.rule.nesterov:
            if self._added.size < layout.num_elements or self._added.dtype != layout.dtype:
                self._added = np.empty(layout.num_elements, layout.dtype)
            out, out_starts = self._added, np.cumsum(layout.numels) - layout.numels
        for numel, start, kept, at in zip(layout.numels, starts, velocity.starts, out_starts, strict=True):
            here = slice(kept, kept + numel)
            new = velocity.new[here]
            added = out[at : at + numel] if self.rule.nesterov else new
            advance(self.rule, source[start : start + numel], scale, velocity.old[here], new, added)
        return out, out_starts

    def encode(
        self,
        layout: Layout,
        source: Array,
        starts: npt.NDArray[np.int64],
        payload: Bytes,
        *,
        feedback: Feedback | None,
        velocity: Feedback,
        scale: float = 1.0,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """Encode with corrected momentum. Two passes over memory more than the codec's, three with Nesterov.

        Args:
            layout, source, starts, payload, feedback, scale, key: as for :meth:`espresso.compressors.Codec.encode`.
            velocity: m before (``old``) and after (``new``).

        Returns:
            Whether all was finite; if not, both ``new`` buffers are unspecified.
        """
        added, added_starts = self.advance(layout, source, starts, velocity, scale)
        finite = self.codec.encode(layout, added, added_starts, payload, feedback=feedback, key=key)
        if finite:
            for segment, indices in self.codec.compressor.sent(layout, payload):
                velocity.new[velocity.starts[segment] :][indices] = 0
        return finite
