"""Steps 3a, 3d and 3c of a compressor of several rounds::

    3a compress    M, first vector P      ── summed over ranks ──┐
    3d transform   P orthonormal, second vector Q, residual   <──┘── Q summed ──┐
    3c decompress  average = P Q' / ranks, Q kept for the next step          <──┘

M stays where the residual is, so compress and transform run on the same side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from espresso.comm.keep.factors import FactorStore
from espresso.comm.memory import Array, Memory
from espresso.comm.program.held import Compiled, Matrices, Numbers, Placed
from espresso.comm.program.kept import keep
from espresso.comm.program.mirrors import both, desk
from espresso.comm.program.part import Part
from espresso.compressors.base import Decoding, Encoding, Layout, RoundsCodec


@dataclass(frozen=True)
class _Factors:
    """What was kept, as arrays of the memory that a step works in."""

    store: FactorStore
    memory: Memory

    def read(self, tensor: str) -> Array | None:
        kept = self.store.read(tensor)
        return None if kept is None else self.memory.here(kept)

    def write(self, tensor: str, values: Array) -> None:
        self.store.write(tensor, values)


def compress(part: Part, index: int) -> Compiled:
    """The first vector; M is left in the new residual."""
    flow, at = part.flows[index], desk(part, index)
    codec, site, region = cast(RoundsCodec, at.codec), flow.site, flow.before.region
    assert site is not None
    segments, starts = part.home.segments(region)
    layout = codec.compressor.layout(segments, part.home.wide)
    kept = keep(part, index, at.codec, at.memory)
    kept_at = kept.starts(part.home.runs_in(region))
    residual = kept.residual
    assert residual is not None
    values = _vector(part, codec, layout, 0)
    written = at.twin(values)
    vector, factors = at.memory.array(written), _Factors(part.context.factors, at.memory)

    def run() -> None:
        encoding = Encoding(layout, at.numbers(), starts, part.unscale, residual.feedback(kept_at), part.key(site))
        codec.encode_values(kept.advance(encoding, kept_at), vector, factors)
        residual.hold()
        if kept.velocity is not None:
            kept.velocity.settle()

    copies = at.copies([at.of_home(region)], [both(values, written)])
    return Compiled(Matrices((values,), Placed(layout, starts), residual, kept_at), run, copies, kept=kept)


def transform(part: Part, index: int, held: Matrices) -> Compiled:
    """The second vector, and the residual."""
    at = desk(part, index)
    codec, layout = cast(RoundsCodec, at.codec), held.placed.layout
    assert at.memory is held.residual.memory, "plans keep matrices where they were compressed"
    vectors = (*held.vectors, _vector(part, codec, layout, len(held.vectors)))
    twins = [at.twin(vector) for vector in vectors]
    summed, values = (at.memory.array(twin) for twin in twins)

    def run() -> None:
        codec.transform_values(layout, summed, values, feedback=held.residual.feedback(held.kept_at))
        held.residual.settle()

    pairs = [both(vector, twin) for vector, twin in zip(vectors, twins, strict=True)]
    return Compiled(replace(held, vectors=vectors), run, at.copies(pairs[:1], pairs))


def decompress(part: Part, index: int, held: Matrices) -> Compiled:
    """The average."""
    at = desk(part, index)
    codec = cast(RoundsCodec, at.codec)
    layout, starts = held.placed
    twins = [at.twin(vector) for vector in held.vectors]
    first, second = (at.memory.array(twin) for twin in twins)
    factors = _Factors(part.context.factors, at.memory)

    def run() -> None:
        decoding = Decoding(layout, at.numbers(), starts, part.rescale / part.num_ranks)
        part.home.finite = codec.decode_values(decoding, first, second, factors)

    pairs = [both(vector, twin) for vector, twin in zip(held.vectors, twins, strict=True)]
    return Compiled(Numbers(), run, at.copies(pairs, [at.of_home(part.flows[index].after.region)]))


def _vector(part: Part, codec: RoundsCodec, layout: Layout, number: int) -> torch.Tensor:
    """Room for the vector of a round, where collectives sum it."""
    memory = part.context.memory
    return memory.tensor(memory.zeros(codec.num_values(layout, number), layout.dtype))
