"""DGC's momentum correction around a codec: velocity in front of error feedback.

Lin et al., Deep Gradient Compression, ICLR 2018. With the residual v kept by the codec's error feedback::

    plain      m <- mu*m + g            v <- v + m
    nesterov   m <- mu*(m + g)          v <- v + m + g
    both       send the top of v; zero m and v there (v: error feedback does; m: momentum masking)

The conservation law is the residual's own: sum sent + v = sum of what was added to v.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from espresso.compressors.base import Array, Bytes, Codec, DrawKey, Feedback, Layout
from espresso.compressors.sparse import PREFIX_BYTES


class MomentumCorrection:
    """Encodes v + m instead of v + g. Acts at the first compression site only; ``decode`` is the codec's.

    Velocities are transactional like residuals: read from one buffer, written to another, both laid out as
    ``feedback`` is. The optimizer's own momentum has to be 0.

    Args:
        codec: of a sparsifier whose body is that of :mod:`espresso.compressors.sparse`.
        momentum: mu, in [0, 1).
        nesterov: the Nesterov form.
    """

    def __init__(self, codec: Codec, momentum: float, nesterov: bool = False) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, got {momentum}")
        self.codec = codec
        self.momentum = momentum
        self.nesterov = nesterov

    def encode(
        self,
        layout: Layout,
        source: Array,
        starts: npt.NDArray[np.int64],
        payload: Bytes,
        *,
        feedback: Feedback,
        velocity: Feedback,
        scale: float = 1.0,
        key: DrawKey = DrawKey(),  # noqa: B008 (frozen)
    ) -> bool:
        """Encode with corrected momentum.

        Args:
            layout, source, starts, payload, feedback, scale, key: as for :meth:`espresso.compressors.Codec.encode`.
            velocity: m before (``old``) and after (``new``).

        Returns:
            Whether all was finite; if not, both ``new`` buffers are unspecified.
        """
        kind = layout.dtype.type
        added = np.empty(layout.num_elements, layout.dtype)
        packed = np.cumsum(np.concatenate(([0], layout.numels)))[: len(layout.segments)].astype(np.int64)
        rows = zip(layout.numels, starts, velocity.starts, packed, strict=True)
        for numel, start, kept, at in rows:
            gradient = source[start : start + numel] * kind(scale)
            moved = velocity.old[kept : kept + numel]
            new = velocity.new[kept : kept + numel]
            out = added[at : at + numel]
            if self.nesterov:
                new[:] = kind(self.momentum) * (moved + gradient)
                out[:] = new + gradient
            else:
                new[:] = kind(self.momentum) * moved + gradient
                out[:] = new
        finite = self.codec.encode(layout, added, packed, payload, feedback=feedback, key=key)
        if finite:
            self._mask(layout, payload, velocity)
        return finite

    def _mask(self, layout: Layout, payload: Bytes, velocity: Feedback) -> None:
        """Zero the velocity where a number was sent."""
        for segment, (numel, offset, k) in enumerate(
            zip(layout.numels.tolist(), layout.offsets.tolist(), layout.counts.tolist(), strict=True)
        ):
            kept = velocity.new[velocity.starts[segment] :][:numel]
            if layout.raw[segment]:
                kept[:] = 0
                continue
            sent = int(payload[offset : offset + 4].view(np.uint32)[0])
            at = offset + PREFIX_BYTES + k * layout.dtype.itemsize
            kept[payload[at : at + 4 * sent].view(np.uint32)] = 0
