"""A search of a job that is made up, before one is needed: it compiles the kernels of all, or reads them from disk."""

from __future__ import annotations

from dataclasses import replace

from espresso.model.costs import COMMON_OPS, ComputeCost, Contention, CostModel
from espresso.model.job import Job
from espresso.model.links import AlphaBeta, Links
from espresso.search.error_budget import EVERY, Sensitivity
from espresso.search.search import advised_bucket_cap, search
from espresso.search.terms import AUTOMATIC
from espresso.strategies import Bucket, Cluster, CompressorSpec, Device, Mode, Slot, TensorSpec

SPEC = CompressorSpec("efsignsgd")
_TERMS = replace(AUTOMATIC, error_budget=1.5, residual_budget_mb=4.0)


def rehearse() -> None:
    """Search as automatic mode does, once with each kernel of the timeline."""
    for cores, in_flight in ((None, 1), (2.0, 8)):
        job = _job(Contention(cores), in_flight)
        found = search(job, [SPEC], sensitivity=Sensitivity({SPEC: {EVERY: 1.0}}), terms=_TERMS)
        advised_bucket_cap(job, [SPEC], found, (0.1,), _TERMS)


def _job(contention: Contention, in_flight: int) -> Job:
    """Six tensors in three buckets on four machines."""
    tensors = tuple(TensorSpec(f"t{number}", (250, 400)) for number in range(6))
    links = Links(AlphaBeta(20.0, 0.02), AlphaBeta(50.0, 10.0), in_flight=in_flight)
    compute = tuple(
        ComputeCost(str(SPEC), device, op, ((0.0, 0.0), (1000.0, 1.0)))
        for device in (Device.TRAINING, Device.OFFLOAD)
        for op in COMMON_OPS
    )
    buckets = tuple(
        Bucket(number, tuple(Slot(tensor.name, place * 100_000, tensor.numel) for place, tensor in enumerate(pair)))
        for number, pair in enumerate((tensors[:2], tensors[2:4], tensors[4:]))
    )
    return Job(
        model="made up", tensors=tensors, gaps_us=(0.0, *[1000.0] * 5), cluster=Cluster(4, 1),
        costs=CostModel(links, compute, None, contention), mode=Mode.DDP, buckets=buckets,
        bucket_ready_us=(1000.0, 3000.0, 5000.0),
    )  # fmt: skip
