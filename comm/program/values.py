"""Steps 3a and 3c where the payload adds up: encode home as one vector, decode the vector's sum."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from espresso.comm.program.context import TORCH_DTYPES
from espresso.comm.program.held import Compiled, Numbers, Placed, Vector
from espresso.comm.program.kept import keep
from espresso.comm.program.mirrors import both, desk
from espresso.comm.program.part import Part
from espresso.compressors.base import Decoding, Encoding, SummableCodec
from espresso.strategies import Site


def compress(part: Part, index: int) -> Compiled:
    """Encode the region into a vector."""
    flow, at = part.flows[index], desk(part, index)
    assert flow.site is not None
    codec, site = cast(SummableCodec, at.codec), flow.site
    segments, starts = part.home.segments(flow.before.region)
    layout = codec.compressor.layout(segments, part.home.wide)
    kept = keep(part, index, codec, at.memory)
    kept_at = kept.starts(part.home.runs_in(flow.before.region))
    values = part.context.memory.numbers(codec.num_values(layout), TORCH_DTYPES[codec.value_dtype(layout)])
    written = at.twin(values)
    vector = at.memory.array(written)

    def run() -> None:
        encoding = Encoding(layout, at.numbers(), starts, part.unscale, kept.feedback(kept_at), part.key(site))
        encoding = kept.advance(encoding, kept_at)
        if not part.keeps_residual:  # divide first: the sum of a cast must not overflow
            encoding = replace(encoding, scale=encoding.scale / part.num_ranks)
        codec.encode_values(encoding, vector)
        kept.settle()

    copies = at.copies([at.of_home(flow.before.region)], [both(values, written)])
    return Compiled(Vector(values, Placed(layout, starts)), run, copies, kept=kept)


def decompress(part: Part, index: int, held: Vector) -> Compiled:
    """Write the vector's sum home, as an average."""
    flow, at = part.flows[index], desk(part, index)
    codec, ends = cast(SummableCodec, at.codec), part.ends(index)
    layout, starts = held.placed
    read = at.twin(held.values)
    vector = at.memory.array(read)

    def run() -> None:
        scale = part.rescale
        if part.keeps_residual:
            scale /= part.num_ranks
        decoding = Decoding(layout, at.numbers(), starts, scale, part.drawn(Site.LOCAL))
        finite = codec.decode_values(decoding, vector)
        part.home.finite = finite if ends else None

    copies = at.copies([both(held.values, read)], [at.of_home(flow.after.region)])
    return Compiled(Numbers(), run, copies)
