"""Baselines: the strategies that others use, as strategies of our own, so that one timeline compares them.

Every baseline is one choice per unit. Names follow the Espresso paper (EuroSys '23, section 5); where the
cluster has one scope only, the flat twin of a hierarchical pipeline stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from espresso.model.payload_sizes import create_compressor
from espresso.search.candidates import Size, compressed_choices, raw_choices
from espresso.search.evaluator import Evaluator, evaluator_at
from espresso.strategies import (
    NONE,
    PLAIN,
    RANK_DEVICES,
    Choice,
    CompressorSpec,
    Device,
    Option,
    parse_option,
)

FP16 = CompressorSpec("fp16")


@dataclass(frozen=True)
class Baseline:
    """A named strategy.

    Attributes:
        choices: one per unit of the evaluator that made it.
        makespan_us: first ready gradient to the latest finish.
        partition_bytes: its partition size; a policy that fixes one keeps its own.
    """

    name: str
    choices: tuple[Choice, ...]
    makespan_us: float
    partition_bytes: int = 0


def _pipeline(hierarchical: bool, deep: str, flat: str) -> Option:
    return parse_option(deep if hierarchical else flat)


def inter_allgather(hierarchical: bool) -> Option:
    """HiTopKComm's shape: reduce-scatter in the node, compress the shard, allgather between nodes."""
    return _pipeline(
        hierarchical,
        "intra.reduce_scatter > comp > inter.allgather > dec > intra.allgather",
        "comp > flat.allgather > dec",
    )


def inter_all_to_all(hierarchical: bool) -> Option:
    """Compressed reduce-scatter and allgather between nodes, raw inside them."""
    return _pipeline(
        hierarchical,
        "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather",
        "comp > flat.all_to_all > dec > comp > flat.allgather > dec",
    )


def inter_gather_broadcast(hierarchical: bool) -> Option:
    """As :func:`inter_all_to_all`, by one aggregator instead of one in every node."""
    return _pipeline(
        hierarchical,
        "intra.reduce_scatter > comp > inter.gather > dec > comp > inter.broadcast > dec > intra.allgather",
        "comp > flat.gather > dec > comp > flat.broadcast > dec",
    )


def all_to_all_all_to_all(hierarchical: bool) -> Option:
    """Compressed in the node and between nodes, both as all-to-all and allgather."""
    return _pipeline(
        hierarchical,
        "comp > intra.all_to_all > dec > comp > inter.all_to_all > dec > comp > inter.allgather"
        " > intra.allgather > dec",
        "comp > flat.all_to_all > dec > comp > flat.allgather > dec",
    )


BYTEPS_PARTITION_BYTES = 4_096_000
BYTEPS_RAW_BELOW_BYTES = 64 << 10


def byteps_pipeline(hierarchical: bool) -> Option:
    """Reduce in the node, then compressed push and pull by the host, then broadcast in the node.

    Servers are colocated and partitions balanced over them, so that push and pull together are an all-to-all
    and an allgather between nodes, with the servers' decode, sum and second compression between.
    """
    return _pipeline(
        hierarchical,
        "intra.reduce > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.broadcast",
        "comp > flat.all_to_all > dec > comp > flat.allgather > dec",
    )


def byteps_raw_pipeline(hierarchical: bool) -> Option:
    """What BytePS does with a tensor that it does not compress: the same ways, with raw numbers."""
    return _pipeline(
        hierarchical,
        "intra.reduce > inter.reduce_scatter > inter.allgather > intra.broadcast",
        "flat.reduce_scatter > flat.allgather",
    )


def byteps_compress(
    evaluator: Evaluator, spec: CompressorSpec, raw_below_bytes: int = BYTEPS_RAW_BELOW_BYTES
) -> tuple[Evaluator, list[Choice]]:
    """BytePS-Compress (Zhong et al. 2021, "Compressed Communication for Distributed Training").

    Its definition, from the system's own documents and source (BytePS, ``docs/gradient-compression.md``, and in
    ``global.cc`` the defaults ``_partition_bytes = 4096000`` and ``_min_compress_bytes = 1 << 16``): gradients are
    summed inside the node by the device's own library and copied to the host (its optional fp16 there is left out,
    as the raw sum is what the others do too); tensors of at least 64 KiB are compressed by the worker's CPU threads,
    in partitions of 4 096 000 bytes, and again by the server; smaller ones travel raw. Nothing looks at the
    timeline. Without a host cost for the compressor, the training device serves.
    """
    device = Device.OFFLOAD if Device.OFFLOAD in _devices(evaluator, spec) else Device.TRAINING
    option = byteps_pipeline(evaluator.job.cluster.is_hierarchical).on_device(device)
    small = Choice(byteps_raw_pipeline(evaluator.job.cluster.is_hierarchical))
    choices = [Choice(option, spec) if unit.num_bytes >= raw_below_bytes else small for unit in evaluator.units]
    return evaluator_at(evaluator, BYTEPS_PARTITION_BYTES), choices


def hitopkcomm(evaluator: Evaluator, spec: CompressorSpec) -> list[Choice]:
    """HiTopKComm (Shi et al., MLSys '21, "Towards Scalable Distributed Training of Deep Learning on Public
    Cloud Clusters"): every tensor is reduce-scattered in the node, its shard compressed on the training device,
    allgathered between nodes, decoded, and allgathered in the node.

    Source: the paper's abstract, and the implementation with which the Espresso paper measured it (its artifact,
    ``communicator/ddp_allgather_twolayer.py``; the paper's body was not at hand). Two things there are not taken
    over: the artifact forwards payloads in the node and decodes them last, and it leaves tensors raw below a
    number of elements that it sets by hand for each model (512 for BERT, 16384 for VGG16).
    """
    option = inter_allgather(evaluator.job.cluster.is_hierarchical)
    device = _devices(evaluator, spec)[0]
    return [Choice(option.on_device(device), spec)] * len(evaluator.units)


def hipress(evaluator: Evaluator, spec: CompressorSpec) -> list[Choice]:
    """HiPress (Bai et al., SOSP '21, "Gradient Compression Supercharged High-Performance Data Parallel DNN
    Training"): its planner compresses a gradient on the training device iff that shortens this gradient's own
    synchronisation, all others left aside.

    Source: the planner of its published code (``src/SeCoPa/SeCoPa.py``, topology PS; README, step 4). Compressed, a
    gradient follows CaSync-PS with colocated aggregators: encode, gather, decode and sum, encode, broadcast, decode,
    in 1 to N parts, each with an aggregator of its own, whichever number is quickest. One part is the gather
    and broadcast here and N parts are the all-to-all and allgather; what lies between is left out. Gradients are
    first summed in the node. Uncompressed ones take the usual allreduce (README, step 5). SeCoPa adds up fitted lines
    for its authors' cluster; here the job's own costs serve.
    """
    hierarchical = evaluator.job.cluster.is_hierarchical
    device = _devices(evaluator, spec)[0]
    choices = (
        PLAIN,
        Choice(inter_gather_broadcast(hierarchical).on_device(device), spec),
        Choice(inter_all_to_all(hierarchical).on_device(device), spec),
    )
    picked: list[Choice] = []
    for unit in evaluator.units:
        alone = evaluator.candidates.alone_us(evaluator.candidates.many(unit.size, choices))
        picked.append(choices[int(np.argmin(alone))])
    return picked


def _devices(evaluator: Evaluator, spec: CompressorSpec) -> tuple[Device, ...]:
    return evaluator.job.costs.devices(spec)


def simple_baselines(evaluator: Evaluator, specs: Sequence[CompressorSpec]) -> list[Baseline]:
    """The baselines that need no search. Those that the job cannot price (no fp16 cost, say) are left out."""
    hierarchical = evaluator.job.cluster.is_hierarchical
    rows: list[Baseline] = []

    def add(name: str, choices: Sequence[Choice]) -> None:
        makespan = evaluator.makespan(evaluator.encode(choices))
        rows.append(Baseline(name, tuple(choices), makespan, evaluator.partition_bytes))

    def uniform(name: str, choice: Choice) -> None:
        add(name, [choice] * len(evaluator.units))

    whole = evaluator_at(evaluator, 0)  # as plain DDP averages
    rows.append(Baseline("uncompressed", (PLAIN,) * len(whole.units), whole.makespan(whole.uniform(PLAIN))))
    raw = raw_choices(evaluator.job.cluster)
    if len(raw) > 1:
        rows.append(_best_uniform(evaluator, "cheapest raw leaf", raw))
    if FP16 not in specs and Device.TRAINING in _devices(evaluator, FP16):
        uniform("fp16", Choice(parse_option("comp > flat.allreduce > dec"), FP16))
    for spec in specs:
        if spec == NONE:
            continue
        suffix = f" ({spec})" if len(specs) > 1 else ""
        for device in _devices(evaluator, spec)[:1]:
            if spec == FP16:
                uniform("fp16", Choice(parse_option("comp > flat.allreduce > dec").on_device(device), FP16))
            leaves = compressed_choices(evaluator.job, (spec,), device)
            rows.append(_best_uniform(evaluator, "compress everything" + suffix, leaves))
            if create_compressor(spec).traits.rounds > 1:
                continue  # the policies of other systems exchange payloads, which it does not have
            shapes: tuple[tuple[str, Callable[[bool], Option]], ...] = (
                ("inter-allgather", inter_allgather),
                ("inter-all-to-all", inter_all_to_all),
                ("all-to-all + all-to-all", all_to_all_all_to_all),
            )
            for name, shape in shapes:
                uniform(name + suffix, Choice(shape(hierarchical).on_device(device), spec))
            add("HiPress" + suffix, hipress(evaluator, spec))
            add("HiTopKComm" + suffix, hitopkcomm(evaluator, spec))
            own, choices = byteps_compress(evaluator, spec)
            rows.append(
                Baseline(
                    "BytePS-Compress" + suffix, tuple(choices), own.makespan(own.encode(choices)),
                    own.partition_bytes,
                )
            )  # fmt: skip
    add("myopic", myopic(evaluator, specs))
    return rows


def _best_uniform(evaluator: Evaluator, name: str, leaves: tuple[Choice, ...]) -> Baseline:
    """The best strategy that gives every unit the same leaf."""
    index, makespan, _ = evaluator.batch(evaluator.uniforms(leaves), cut=True)
    return Baseline(name, (leaves[index],) * len(evaluator.units), makespan, evaluator.partition_bytes)


def myopic(evaluator: Evaluator, specs: Sequence[CompressorSpec]) -> list[Choice]:
    """Every unit takes the leaf whose own chain is shortest, as if it were alone (the paper's policy)."""
    job = evaluator.job
    leaves = raw_choices(job.cluster) + tuple(
        choice for device in RANK_DEVICES for choice in compressed_choices(job, specs, device)
    )
    best: dict[Size, Choice] = {}
    for unit in evaluator.units:
        if unit.size not in best:
            numbers = evaluator.candidates.numbers(unit.size, leaves)
            best[unit.size] = leaves[int(np.argmin(evaluator.candidates.alone_us(numbers)))]
    return [best[unit.size] for unit in evaluator.units]
