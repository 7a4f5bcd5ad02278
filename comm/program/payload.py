"""Steps 3a and 3c where what travels is a payload: encode atoms of home, decode and add up what has arrived.

A payload cannot be cut after it was made, so every atom of the region has one of its own; all have room for the largest
that any rank makes.
"""

from __future__ import annotations

import numpy as np

from espresso.comm.parameter_server.plain import DevicePlain, is_plain, smaller
from espresso.comm.program.held import Compiled, Numbers, Payload, Placed
from espresso.comm.program.kept import keep
from espresso.comm.program.mirrors import Desk, both, desk
from espresso.comm.program.part import Part
from espresso.compressors.base import Codec, Decoding, Encoding
from espresso.strategies import NONE, Device, Site, trace
from espresso.strategies.flow import Span


def compress(part: Part, index: int) -> Compiled:
    """Encode every atom of the region from home."""
    flow, at = part.flows[index], desk(part, index)
    assert flow.site is not None
    codec, site, first = _wire_codec(part, at, flow.after.region), flow.site, part.is_first(index)
    kept = keep(part, index, codec, at.memory)
    held = _room(part, index, codec)
    written = at.twin(held.buffer)
    payloads = at.memory.array(written)
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
        kept.settle()

    copies = at.copies([at.of_home(flow.before.region)], [both(held.buffer, written)])
    return Compiled(held, run, copies, kept=kept)


def decompress(part: Part, index: int, held: Payload) -> Compiled:
    """Decode all sources and write their sum home, the last time as an average."""
    flow, at = part.flows[index], desk(part, index)
    codec, site = _wire_codec(part, at, flow.before.region), _site_before(part, index)
    last, ends = part.is_last(index), part.ends(index)
    read = at.twin(held.buffer)
    payloads = at.memory.array(read)
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

    copies = at.copies([both(held.buffer, read)], [at.of_home(flow.after.region)])
    return Compiled(Numbers(), run, copies)


def _wire_codec(part: Part, at: Desk, span: Span) -> Codec:
    """On the way to a server plain numbers, where the compressor's payload would be no smaller."""
    if not part.choice.option.uses_servers:
        return at.codec
    chosen = smaller(at.codec, part.home.segments(span)[0], part.home.wide)
    if at.memory is part.context.host or not is_plain(chosen):
        return chosen
    return DevicePlain(part.context.codecs(NONE, Device.TRAINING))


def _room(part: Part, index: int, codec: Codec) -> Payload:
    """Room for this rank's payloads, and the layouts of every atom that any rank encodes at this step."""
    memory, cluster, partition = part.context.memory, part.context.cluster, part.partition
    atoms: dict[Span, Placed] = {}
    for rank in range(cluster.num_ranks):
        flow = trace(part.choice.option, cluster, partition.numel, rank, partition.root)[index]
        for span in flow.after.atoms:
            if span not in atoms:
                segments, starts = part.home.segments(span)
                atoms[span] = Placed(codec.compressor.layout(segments, part.home.wide), starts)
    stride = max((layout.num_bytes for layout, _ in atoms.values()), default=0)
    shape = (1, len(part.flows[index].after.atoms), stride)
    return Payload(memory.tensor(memory.zeros(shape, np.uint8)), atoms)


def _site_before(part: Part, index: int) -> Site:
    """Where what is decoded here was encoded, for what both draw alike."""
    sites = [flow.site for flow in part.flows[:index] if flow.site is not None]
    if sites[-1] is Site.SERVER and part.traits.summable:
        return sites[0]  # the server draws as the ranks did
    return sites[-1]
