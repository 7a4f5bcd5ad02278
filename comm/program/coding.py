"""Steps 3a, 3c and 3d: what codecs do, from numbers at home to a payload, a vector or matrices, and back.

What adds up travels as one *vector*. Other compressors make *payloads*, which cannot be cut afterwards: every atom of
the region has one of its own, with room for the largest that any rank makes. A compressor of several rounds::

    3a compress    M, first vector P      ── summed over ranks ──┐
    3d transform   P orthonormal, second vector Q, residual   <──┘── Q summed ──┐
    3c decompress  average = P Q' / ranks, Q kept for the next step          <──┘

M stays where the residual is, so compress and transform run on the same side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from espresso.comm.keep.store import FactorStore
from espresso.comm.memory import Array, Memory
from espresso.comm.parameter_server.plain import PlainCodec, is_plain, smaller
from espresso.comm.program.held import Action, Compiled, Matrices, Numbers, Payload, Placed, Vector, keep
from espresso.comm.program.part import TORCH_DTYPES, Part
from espresso.compressors.base import Codec, Decoding, Encoding, Layout, RoundsCodec, SummableCodec
from espresso.strategies import NONE, Device, Site, Stage, trace
from espresso.strategies.flow import Span

Twins = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Gives a tensor of the device, which may lie elsewhere in every iteration, and its mirror."""


class Desk:
    """Where one compute step works, and with what: beside the numbers, or on mirrors of them in host memory.

    Offloaded steps of a job on a device take the host. A copy before the step fills its mirrors, another after it
    writes back what it changed. In a job on the CPU all steps work in place.

    Attributes:
        memory: of the arrays that the codec takes.
        is_mirrored: whether that is the host's, and the numbers are a device's.
    """

    def __init__(self, part: Part, index: int) -> None:
        device, context = part.flows[index].step.device, part.context
        assert device is not None
        self.home, self.codec = part.home, part.codec(device)
        self.is_mirrored = device is Device.OFFLOAD and context.memory.host_copies
        self.memory = context.host if self.is_mirrored else context.memory

    def numbers(self) -> Array:
        """Home, as the codec takes it."""
        return self.memory.array(self.home.mirror) if self.is_mirrored else self.home.array

    def mine(self, held: torch.Tensor) -> tuple[Array, Twins]:
        """The array that the step works on in place of ``held``, itself or a mirror's; both, for copies."""
        twin = self.memory.numbers(held.numel(), held.dtype).zero_().view(held.shape) if self.is_mirrored else held
        return self.memory.array(twin), lambda: (held, twin)

    def copies(self, before: Sequence[Twins], after: Sequence[Twins]) -> Mapping[Stage, Action]:
        """What is copied before and after the step; nothing where it works in place."""
        if not self.is_mirrored:
            return {}
        copied = {Stage.COPY_TO_HOST: before, Stage.COPY_TO_DEVICE: after}
        return {stage: copy(twins, stage) for stage, twins in copied.items()}

    def of_home(self, span: Span) -> Twins:
        """A range of home and its mirror."""
        low, high = span
        return lambda: (self.home.tensor[low:high], self.home.mirror[low:high])


def _place(part: Part, codec: Codec, span: Span) -> Placed:
    """How the codec lays out a range of the partition."""
    segments, starts = part.home.segments(span)
    return Placed(codec.compressor.layout(segments, part.home.wide), starts)


def copy(twins: Sequence[Twins], stage: Stage) -> Action:
    """Fills the mirrors before a step, or writes them back after it."""

    def run() -> None:
        for pair in twins:
            here, there = pair()
            source, target = (here, there) if stage is Stage.COPY_TO_HOST else (there, here)
            target.copy_(source, non_blocking=True)

    return run


# -- payloads -------------------------------------------------------------------------------------


def compress_payload(part: Part, index: int) -> Compiled:
    """Encode every atom of the region from home."""
    flow, at = part.flows[index], Desk(part, index)
    assert flow.site is not None
    codec, site, first = _wire_codec(part, at, flow.after.region), flow.site, part.is_first(index)
    kept = keep(part, index, codec, at.memory)
    held = _room(part, index, codec)
    payloads, twins = at.mine(held.buffer)
    jobs = []
    for number, span in enumerate(flow.after.atoms):
        layout, starts = held.atoms[span]
        jobs.append((layout, starts, kept.starts(part.home.runs_in(span)), payloads[0, number, : layout.num_bytes]))

    def run() -> None:
        scale = part.unscale if first else 1.0
        key = part.key(site)
        for layout, starts, kept_at, out in jobs:
            encoding = Encoding(layout, at.numbers(), starts, scale, kept.feedback(kept_at), key)
            kept.encode(codec, encoding, kept_at, out)
        kept.settle(key)

    copies = at.copies([at.of_home(flow.before.region)], [twins])
    return Compiled(held, run, copies, kept=kept)


def decompress_payload(part: Part, index: int, held: Payload) -> Compiled:
    """Decode all sources and write their sum home, the last time as an average."""
    flow, at = part.flows[index], Desk(part, index)
    codec, site = _wire_codec(part, at, flow.before.region), _site_before(part, index)
    last, ends = part.is_last(index), part.ends(index)
    payloads, twins = at.mine(held.buffer)
    jobs = []
    for number, span in enumerate(flow.before.atoms):
        layout, starts = held.atoms[span]
        jobs.append((layout, starts, payloads[:, number, : layout.num_bytes]))

    def run() -> None:
        scale = part.rescale / part.num_ranks if last else 1.0
        key, finite = part.drawn(site), True
        for layout, starts, sources in jobs:
            finite &= codec.decode(Decoding(layout, at.numbers(), starts, scale=scale, key=key), sources)
        part.home.finite = finite if ends else None

    copies = at.copies([twins], [at.of_home(flow.after.region)])
    return Compiled(Numbers(), run, copies)


def _wire_codec(part: Part, at: Desk, span: Span) -> Codec:
    """On the way to a server plain numbers, where the compressor's payload would be no smaller."""
    if not part.choice.option.uses_servers:
        return at.codec
    chosen = smaller(at.codec, part.home.segments(span)[0], part.home.wide)
    if at.memory is part.context.host or not is_plain(chosen):
        return chosen
    return PlainCodec(part.context.codecs(NONE, Device.TRAINING))


def _room(part: Part, index: int, codec: Codec) -> Payload:
    """Room for this rank's payloads, and the layouts of every atom that any rank encodes at this step."""
    memory, cluster, partition = part.context.memory, part.context.cluster, part.partition
    atoms: dict[Span, Placed] = {}
    for rank in range(cluster.num_ranks):
        flow = trace(part.choice.option, cluster, partition.numel, rank, partition.root)[index]
        for span in flow.after.atoms:
            if span not in atoms:
                atoms[span] = _place(part, codec, span)
    stride = max((layout.num_bytes for layout, _ in atoms.values()), default=0)
    shape = (1, len(part.flows[index].after.atoms), stride)
    return Payload(memory.tensor(memory.zeros(shape, np.uint8)), atoms)


def _site_before(part: Part, index: int) -> Site:
    """Where what is decoded here was encoded, for what both draw alike."""
    sites = [flow.site for flow in part.flows[:index] if flow.site is not None]
    if sites[-1] is Site.SERVER and part.traits.summable:
        return sites[0]  # the server draws as the ranks did
    return sites[-1]


# -- one vector -----------------------------------------------------------------------------------


def compress_vector(part: Part, index: int) -> Compiled:
    """Encode the region into a vector."""
    flow, at = part.flows[index], Desk(part, index)
    assert flow.site is not None
    codec, site = cast(SummableCodec, at.codec), flow.site
    layout, starts = placed = _place(part, codec, flow.before.region)
    kept = keep(part, index, codec, at.memory)
    kept_at = kept.starts(part.home.runs_in(flow.before.region))
    values = part.context.memory.numbers(codec.num_values(layout), TORCH_DTYPES[codec.value_dtype(layout)])
    vector, twins = at.mine(values)

    def run() -> None:
        encoding = Encoding(layout, at.numbers(), starts, part.unscale, kept.feedback(kept_at), part.key(site))
        encoding = kept.advance(encoding, kept_at)
        if not part.keeps_residual:  # divide first: the sum of a cast must not overflow
            encoding = replace(encoding, scale=encoding.scale / part.num_ranks)
        kept.around(encoding, lambda encoding: codec.encode_values(encoding, vector))
        kept.settle(part.key(site))

    copies = at.copies([at.of_home(flow.before.region)], [twins])
    return Compiled(Vector(values, placed), run, copies, kept=kept)


def decompress_vector(part: Part, index: int, held: Vector) -> Compiled:
    """Write the vector's sum home, as an average."""
    flow, at = part.flows[index], Desk(part, index)
    codec, ends = cast(SummableCodec, at.codec), part.ends(index)
    layout, starts = held.placed
    vector, twins = at.mine(held.values)

    def run() -> None:
        scale = part.rescale
        if part.keeps_residual:
            scale /= part.num_ranks
        decoding = Decoding(layout, at.numbers(), starts, scale, part.drawn(Site.LOCAL))
        finite = codec.decode_values(decoding, vector)
        part.home.finite = finite if ends else None

    copies = at.copies([twins], [at.of_home(flow.after.region)])
    return Compiled(Numbers(), run, copies)


# -- several rounds -------------------------------------------------------------------------------


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


def compress_matrices(part: Part, index: int) -> Compiled:
    """The first vector; M is left in the new residual."""
    flow, at = part.flows[index], Desk(part, index)
    codec, site, region = cast(RoundsCodec, at.codec), flow.site, flow.before.region
    assert site is not None
    layout, starts = placed = _place(part, at.codec, region)
    kept = keep(part, index, at.codec, at.memory)
    kept_at = kept.starts(part.home.runs_in(region))
    residual = kept.residual
    assert residual is not None
    values = _vector(part, codec, layout, 0)
    (vector, twins), factors = at.mine(values), _Factors(part.context.factors, at.memory)

    def run() -> None:
        encoding = Encoding(layout, at.numbers(), starts, part.unscale, residual.feedback(kept_at), part.key(site))
        codec.encode_values(kept.advance(encoding, kept_at), vector, factors)
        residual.hold()
        if kept.velocity is not None:
            kept.velocity.settle(part.key(site))

    copies = at.copies([at.of_home(region)], [twins])
    return Compiled(Matrices((values,), placed, residual, kept_at), run, copies, kept=kept)


def transform_matrices(part: Part, index: int, held: Matrices) -> Compiled:
    """The second vector, and the residual."""
    at = Desk(part, index)
    codec, layout = cast(RoundsCodec, at.codec), held.placed.layout
    assert at.memory is held.residual.memory, "plans keep matrices where they were compressed"
    vectors = (*held.vectors, _vector(part, codec, layout, len(held.vectors)))
    (summed, first), (values, second) = (at.mine(vector) for vector in vectors)

    def run() -> None:
        codec.transform_values(layout, summed, values, feedback=held.residual.feedback(held.kept_at))
        held.residual.settle(part.key(held.residual.site))

    return Compiled(replace(held, vectors=vectors), run, at.copies([first], [first, second]))


def decompress_matrices(part: Part, index: int, held: Matrices) -> Compiled:
    """The average."""
    at = Desk(part, index)
    codec = cast(RoundsCodec, at.codec)
    layout, starts = held.placed
    (first, of_first), (second, of_second) = (at.mine(vector) for vector in held.vectors)
    factors = _Factors(part.context.factors, at.memory)

    def run() -> None:
        decoding = Decoding(layout, at.numbers(), starts, part.rescale / part.num_ranks)
        part.home.finite = codec.decode_values(decoding, first, second, factors)

    copies = at.copies([of_first, of_second], [at.of_home(part.flows[index].after.region)])
    return Compiled(Numbers(), run, copies)


def _vector(part: Part, codec: RoundsCodec, layout: Layout, number: int) -> torch.Tensor:
    """Room for the vector of a round, where collectives sum it."""
    memory = part.context.memory
    return memory.tensor(memory.zeros(codec.num_values(layout, number), layout.dtype))
