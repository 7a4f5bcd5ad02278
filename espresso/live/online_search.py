"""Automatic mode's measuring and searching, on the live job. Collective; rank 0 decides, all obey."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from espresso.comm.errors import EspressoError
from espresso.comm.execute.executor import Record
from espresso.comm.groups import Groups
from espresso.live.artifacts import Artifacts
from espresso.live.codecs import HostCodecs
from espresso.live.config import Config
from espresso.live.fixed_planner import InForce
from espresso.live.observer import Observation, Observer, combine
from espresso.live.planner import Candidate
from espresso.live.profiler import cores_per_rank, machine_facts, measure_compressor, measure_links
from espresso.live.remeasure import up_to_date
from espresso.live.runtime import Runtime
from espresso.live.server_profile import measure_exchange, measure_processors
from espresso.live.watch import Change
from espresso.model.costs import ComputeCost, Contention, CostModel
from espresso.model.job import Job
from espresso.model.links import Links
from espresso.search.exactness import Automatic, racers, trade_for_exactness
from espresso.strategies import (
    NONE,
    PLAIN,
    RANK_DEVICES,
    Bucket,
    CompressorSpec,
    Device,
    Mode,
    Strategy,
    TensorSpec,
    plan,
)

if TYPE_CHECKING:
    from espresso.search.result import SearchResult

logger = logging.getLogger("espresso")

ADVISED_CAPS_MB = (5, 25, 100)
"""Bucket sizes that automatic mode looks at: few, since all ranks wait for it."""


class OnlineSearch:
    """Measures links and compressors, builds the job, searches it on rank 0, and tells everybody.

    Attributes:
        compressor: the one in force; a later call measures what has changed, and searches again.
        job: what was measured, on every rank; None before.
        uncompressed_us: predicted iteration time of the plain strategy.
        advice: what the user could set for a shorter iteration; empty if nothing (rank 0).
    """

    def __init__(
        self,
        groups: Groups,
        codecs: HostCodecs,
        compressor: CompressorSpec,
        tensors: tuple[TensorSpec, ...],
        config: Config,
        artifacts: Artifacts,
        observer: Observer,
        runtime: Runtime,
    ) -> None:
        self._groups, self._codecs, self._given, self.compressor = groups, codecs, compressor, compressor
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._settings = config.automatic
        self._artifacts, self._observer, self._runtime = artifacts, observer, runtime
        self.job: Job | None = None
        self.uncompressed_us = 0.0
        self.advice = ""
        self._revised = False

    def follow(self, in_force: InForce) -> bool:
        """Search for the compressor in force, or for the one to come while nothing is."""
        found = in_force.get(self._given, self._given)
        before, self.compressor = self.compressor, self._given if found == NONE else found
        return self.compressor != before

    def revise(self, change: Change) -> None:
        """Measure again what changed in the running job. Collective; the next call searches with it."""
        if self.job is not None:
            self.job, self._revised = up_to_date(self.job, change, self._groups, self._runtime.place), True

    def __call__(self, records: Sequence[Record]) -> list[Candidate]:
        """Measure, search, agree. Returns the candidates, best first; none if plain is predicted to be best.

        Jobs beside each other measure at once, as they will run, and race what the first of them found.
        """
        found, beside = self._find(records), self._groups.beside
        if beside is None:
            return found
        beside.barrier(patient=True)
        told = beside.from_rank_0([(c.name, c.strategy.to_json(), c.order, c.predicted_us) for c in found])
        return [self._here(records[-1].buckets, *row) for row in told] if beside.rank else found

    def _here(self, buckets: tuple[Bucket, ...], name: str, body: Any, order: tuple[int, ...], us: float) -> Candidate:
        """A candidate that was found for another shard of the same tensors."""
        found = Strategy.from_json(body)
        tensors = tuple(self._tensors.values())
        choices = {tensor.name: found.choices.get(tensor.name, PLAIN) for tensor in tensors}
        strategy = Strategy(tensors, choices, found.cluster, found.partition_bytes)
        laid = plan(strategy, buckets, host_copies=self._groups.host_copies)
        with suppress(ValueError):  # this shard is cut into other partitions
            laid = laid.with_order(order)
        return Candidate(name, strategy, laid.order, buckets, us)

    def _find(self, records: Sequence[Record]) -> list[Candidate]:
        if self.job is None:
            everybody = self._groups.all_objects(
                [
                    (dict(seen.tensor_ready_us), seen.bucket_ready_us, seen.forward_us, seen.optimizer_us)
                    for seen in self._observer.observations[-len(records) :]
                ]
            )
            observed = combine([[Observation(*seen) for seen in theirs] for theirs in everybody])
            costs = self._measure(max(bucket.numel for bucket in records[-1].buckets))
            job = self._make_job(records[-1].buckets, observed, costs)
        else:
            job = self._with_compressor(self.job)
        self.job = Job.from_json(self._groups.from_rank_0(job.to_json()))
        found: list[Candidate] = []
        told: Any = None
        failed: Exception | None = None
        if self._groups.rank == 0:
            try:
                self._artifacts.job(self.job)
                found, self.uncompressed_us = self._search(self.job)
                told = [(c.name, c.strategy.to_json(), c.order, c.predicted_us) for c in found], self.uncompressed_us
            except Exception as error:  # every rank must hear of it, or they wait for the answer
                failed, told = error, f"{type(error).__name__}: {error}"
        self._groups.barrier(patient=True)
        told = self._groups.from_rank_0(told)
        if isinstance(told, str):
            raise EspressoError(f"the search failed on rank 0 ({told})") from failed
        if self._groups.rank == 0:
            return found
        rows, self.uncompressed_us = told
        buckets = self.job.buckets or ()
        return [Candidate(name, Strategy.from_json(body), order, buckets, us) for name, body, order, us in rows]

    def _measure(self, largest: int) -> CostModel:
        devices = [Device.TRAINING]
        cores = cores_per_rank(self._groups)
        backward = min(float(torch.get_num_threads()), cores)
        if cores > 1.0 and self._codecs.pool.num_threads > 1:
            devices.append(Device.OFFLOAD)
        runtime = self._runtime
        links = measure_links(self._groups, place=runtime.place)
        compute = self._measure_compressor(devices, largest)
        width = self._codecs.offload_width if Device.OFFLOAD in devices else 1
        pool = min(float(self._codecs.pool.num_threads), cores) / width
        pushes, burnt = measure_exchange(self._groups)
        servers, on_servers = measure_processors(self._groups, self.compressor)
        contention = runtime.contention(Contention(cores, backward, pool, {**links.comm_cpu, **burnt}))
        curves = Links(curves=links.curves + pushes, in_flight=links.in_flight)
        copies = runtime.copy_cost(self._groups)
        return CostModel(curves, compute + on_servers, copies, contention, servers=servers, offload_width=width)

    def _measure_compressor(self, devices: Sequence[Device], largest: int) -> tuple[ComputeCost, ...]:
        place = self._runtime.place
        return measure_compressor(
            self._groups, self._codecs, self.compressor, devices, largest=largest, place=place,
            offload_width=self._codecs.offload_width,
        )  # fmt: skip

    def _with_compressor(self, job: Job) -> Job:
        """The job with the costs of a compressor that came into force since it was measured."""
        measured = {(cost.spec, cost.device) for cost in job.costs.compute}
        devices = [d for d in dict.fromkeys(cost.device for cost in job.costs.compute) if d in RANK_DEVICES]
        if all((str(self.compressor), device) in measured for device in devices):
            return job
        largest = max(bucket.numel for bucket in job.laid_out)
        more = self._measure_compressor(devices, largest)
        return replace(job, costs=replace(job.costs, compute=job.costs.compute + more))

    def _make_job(self, buckets: tuple[Bucket, ...], seen: Observation, costs: CostModel) -> Job:
        in_order = sorted(seen.tensor_ready_us, key=lambda name: seen.tensor_ready_us[name])
        ready = [seen.tensor_ready_us[name] for name in in_order]
        gaps = [0.0] + [max(b - a, 0.0) for a, b in itertools.pairwise(ready)]
        handed_over: list[float] = []
        for at in seen.bucket_ready_us:
            handed_over.append(max([at, *handed_over[-1:]]))
        return Job(
            model="live",
            tensors=tuple(self._tensors[name] for name in in_order),
            gaps_us=tuple(gaps),
            cluster=self._groups.cluster,
            costs=costs,
            mode=Mode.DDP,
            buckets=buckets,
            bucket_ready_us=tuple(handed_over),
            forward_us=max(seen.forward_us, 0.0),
            optimizer_us=max(seen.optimizer_us, 0.0),
            source="measured on the live job",
            meta=machine_facts() | {"compressor": str(self.compressor)} | self._settings.to_meta(),
        )

    def _search(self, job: Job) -> tuple[list[Candidate], float]:
        candidates, result = find_candidates(job, self.compressor, self._settings)
        if not self._revised:
            self._advise_bucket_size(job, result)
        logger.info(
            "searched %d tensors in %.0f ms: plain %.1f ms predicted, best %.1f ms",
            len(job.tensors),
            result.search_ms,
            result.uncompressed_us / 1e3,
            result.predicted_us / 1e3,
        )
        return candidates, result.uncompressed_us

    def _advise_bucket_size(self, job: Job, result: SearchResult) -> None:
        """Say which bucket size would be better: DDP fixes its own when it is made, so only the user can set it."""
        from espresso.search.search import advised_bucket_cap

        if self._groups.beside is not None:
            return  # buckets are modules
        found = advised_bucket_cap(job, self.compressor, result, ADVISED_CAPS_MB)
        if found is not None:
            self.advice = (
                f"DistributedDataParallel(bucket_cap_mb={found.bucket_cap_mb:g}) is predicted to take"
                f" {found.predicted_us / 1e3:.1f} ms instead of {result.predicted_us / 1e3:.1f} ms"
            )
            logger.info("buckets: %s", self.advice)


def find_candidates(job: Job, compressor: CompressorSpec, settings: Automatic) -> tuple[list[Candidate], SearchResult]:
    """What races against plain on a live job, best first, and the search's own result."""
    from espresso.search.search import search  # compiles kernels: only rank 0 needs them

    result = search(job, compressor, partitions=settings.partitions)
    found = racers(trade_for_exactness(job, result, settings))
    return [
        Candidate(row.name, row.strategy, row.plan.order, job.buckets or (), row.predicted_us) for row in found
    ], result
