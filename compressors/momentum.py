"""DGC's momentum correction: a velocity in front of error feedback.

Lin et al., Deep Gradient Compression, ICLR 2018. With the residual v kept by the codec's error feedback::

    plain      m <- mu*m + g            v <- v + m
    nesterov   m <- mu*(m + g)          v <- v + m + g
    both       send the top of v; zero m and v there (v: error feedback does; m: momentum masking)

The conservation law is the residual's own: sum sent + v = sum of what was added to v. What travels raw is
sent whole in every step; as in the authors' code its velocity is not masked, so that it sees the usual momentum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from espresso.compressors.base import (
    Array,
    Bytes,
    Codec,
    Compressor,
    Correction,
    Encoding,
    Feedback,
    Layout,
    Starts,
)


class Mover(Protocol):
    """Moves velocities on one backend. Each call takes all stretches: one launch on a GPU."""

    def advance(
        self,
        rule: Correction,
        numels: Starts,
        source: Array,
        starts: Starts,
        scale: float,
        velocity: Feedback,
        out: Array,
        out_starts: Starts,
    ) -> None:
        """``velocity.new`` becomes m, ``out`` what is added to v.

        Args:
            numels: of every stretch; stretch i begins at ``starts[i]``, ``velocity.starts[i]``, ``out_starts[i]``.
            source: g over ``scale``; not changed unless it is ``out``.
            velocity: m before and after, different arrays.
            out: may be ``source``, or without Nesterov ``velocity.new``, with equal starts.
        """
        ...

    def empty(self, numel: int, layout: Layout) -> Array:
        """Room for numbers of a layout."""
        ...

    def mask(self, compressor: Compressor, layout: Layout, payload: Bytes, velocity: Feedback) -> None:
        """Zero ``velocity.new`` where a sparsifier has sent; not where the payload says that it is not finite."""
        ...


class HostMover:
    """In NumPy: two passes over memory, three with Nesterov."""

    def advance(
        self,
        rule: Correction,
        numels: Starts,
        source: Array,
        starts: Starts,
        scale: float,
        velocity: Feedback,
        out: Array,
        out_starts: Starts,
    ) -> None:
        """As :meth:`Mover.advance`."""
        for numel, start, kept, at in zip(numels, starts, velocity.starts, out_starts, strict=True):
            here = slice(kept, kept + numel)
            gradient, added = source[start : start + numel], out[at : at + numel]
            _advance(rule, gradient, scale, velocity.old[here], velocity.new[here], added)

    def empty(self, numel: int, layout: Layout) -> Array:
        """As :meth:`Mover.empty`."""
        return np.empty(numel, layout.dtype)

    def mask(self, compressor: Compressor, layout: Layout, payload: Bytes, velocity: Feedback) -> None:
        """As :meth:`Mover.mask`; the caller looks whether all was finite."""
        for segment, indices in compressor.sent(layout, payload):
            velocity.new[velocity.starts[segment] :][indices] = 0


def _advance(rule: Correction, gradient: Array, scale: float, old: Array, new: Array, out: Array) -> None:
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
    if not np.may_share_memory(out, new):
        np.copyto(out, new)


HOST_MOVER = HostMover()


class MomentumCorrection:
    """Encodes v + m instead of v + g. Acts at the first compression site only; ``decode`` is the codec's.

    Velocities are transactional like residuals: read from one buffer, written to another, laid out alike. The
    optimizer's own momentum has to be 0. Not for several threads at once: it keeps a buffer.

    Args:
        codec: of any compressor; only what a sparsifier sends is masked.
        rule: momentum above 0.
        mover: of the codec's backend.
    """

    def __init__(self, codec: Codec, rule: Correction, mover: Mover = HOST_MOVER) -> None:
        if not 0 < rule.momentum < 1:
            raise ValueError(f"momentum must be above 0 and below 1, got {rule.momentum}")
        self.codec, self.rule, self._mover = codec, rule, mover
        self._added: dict[Any, Array] = {}

    def advance(self, encoding: Encoding, velocity: Feedback) -> Encoding:
        """Move the velocities of all segments on, m before in ``old`` and after in ``new``; returns what to encode."""
        layout = encoding.layout
        out, out_starts = velocity.new, velocity.starts
        if self.rule.nesterov:
            out, out_starts = self._room(layout), np.cumsum(layout.numels) - layout.numels
        self._mover.advance(
            self.rule, layout.numels, encoding.source, encoding.starts, encoding.scale, velocity, out, out_starts
        )
        return replace(encoding, source=out, starts=out_starts, scale=1.0)

    def encode(self, encoding: Encoding, payload: Bytes, velocity: Feedback) -> bool:
        """Encode with corrected momentum. Two passes over memory more than the codec's, three with Nesterov.

        Returns:
            Whether all was finite; if not, both ``new`` buffers are unspecified.
        """
        finite = self.codec.encode(self.advance(encoding, velocity), payload)
        if finite:
            self._mover.mask(self.codec.compressor, encoding.layout, payload, velocity)
        return finite

    def _room(self, layout: Layout) -> Array:
        held = self._added.get(layout.dtype)
        if held is None or len(held) < layout.num_elements:
            held = self._added[layout.dtype] = self._mover.empty(layout.num_elements, layout)
        return held
