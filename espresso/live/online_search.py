"""Automatic mode's measuring and searching, on the live job. Collective; rank 0 decides, all obey."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import pvariance
from typing import TYPE_CHECKING, Any

import torch

from espresso.comm.errors import EspressoError
from espresso.comm.execute.executor import Record
from espresso.comm.groups import Groups
from espresso.comm.parameter_server import Bearing
from espresso.compressors import create
from espresso.live.artifacts import Artifacts
from espresso.live.beside import measure_handling
from espresso.live.candidates import Candidate, Moved
from espresso.live.change import TELLING, Change
from espresso.live.codec_costs import measure_compressors
from espresso.live.codecs import HostCodecs
from espresso.live.config import Config
from espresso.live.fixed_planner import InForce
from espresso.live.guard import OWED_CHECKS
from espresso.live.machine import cores_per_rank, machine_facts
from espresso.live.observer import Observation, Observer, combine, hosts_of, profile_of
from espresso.live.patience import MUST_GAIN
from espresso.live.profiler import measure_links
from espresso.live.remeasure import Remeasured, use_up_rest
from espresso.live.runtime import Runtime
from espresso.live.sampler import Sampler
from espresso.live.server_profile import measure_exchange, measure_processors
from espresso.model.bucket_caps import in_buckets
from espresso.model.costs import ComputeCost, Contention, CostModel
from espresso.model.job import GAIN_SCALE, OFFERED, SENSITIVITY, Job, JobError
from espresso.model.timeline import first_come
from espresso.search.error_budget import Sensitivity, measure_sensitivity, normal_sensitivity, owed_by
from espresso.search.settle import racers
from espresso.search.terms import HARMLESS, HARMLESS_ADAPTIVE, MB, Terms
from espresso.strategies import (
    NONE,
    RANK_DEVICES,
    RESIDUAL_DTYPES,
    Bucket,
    Choice,
    CompressorSpec,
    Device,
    Mode,
    Strategy,
    TensorSpec,
    plan,
)
from espresso.strategies.fields import FormError

if TYPE_CHECKING:
    from espresso.search.result import SearchResult

logger = logging.getLogger("espresso")

ADVISED_CAPS_MB = (1, 5, 25, 100)
"""Bucket sizes that automatic mode looks at: few, since all ranks wait for it."""


class OnlineSearch:
    """Measures links and compressors, builds the job, searches it on rank 0, and tells everybody.

    Attributes:
        compressors: those in force; a later call measures what has changed, and searches again.
        job: what was measured, on every rank; None before, and in a shard that holds nothing of the model.
        is_measured: whether the job is measured, also where that is in other shards alone.
        uncompressed_us: predicted iteration time of the plain strategy.
        advice: what the user could set for a shorter iteration; empty if nothing (rank 0).
        bucket_cap_mb: DDP's bucket size for it; None if nothing (every rank).
        why_none: why there are no candidates; empty where none is predicted to be faster than plain.
        measured_owed: what tensors owe by the choices that run, where that is looked at; one check may be left out, and
            what was counted beside another gain scale.
        optimizer_adapts, gain_scale: of :class:`espresso.live.script.StepGuard`.
        corrects_momentum: whether the job does, for all of its compressors.
    """

    def __init__(
        self,
        groups: Groups,
        codecs: HostCodecs,
        compressors: tuple[CompressorSpec, ...],
        tensors: tuple[TensorSpec, ...],
        config: Config,
        artifacts: Artifacts,
        observer: Observer,
        sampler: Sampler,
        runtime: Runtime,
        bearing: Bearing | None = None,
    ) -> None:
        self._bearing = bearing
        self._groups, self._codecs, self._given, self.compressors = groups, codecs, compressors, compressors
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._asked, self._gain = config.terms, config.feedback_gain
        self._artifacts, self._observer, self._sampler, self._runtime = artifacts, observer, sampler, runtime
        self.job: Job | None = None
        self.is_measured = False
        self.uncompressed_us = 0.0
        self.advice = ""
        self.bucket_cap_mb: float | None = None
        self.why_none = ""
        self._seen: list[list[Observation]] = []
        self._revised: Remeasured | None = None
        self._forecast: dict[CompressorSpec, Mapping[str, float]] = {}
        self._known: dict[CompressorSpec, Mapping[str, float]] = {}
        self._measured: dict[tuple[CompressorSpec, str], None] = {}  # in the order in which they came first
        self._forecast_scale: float | None = None
        self.measured_owed: Callable[..., Mapping[str, tuple[Choice, float]]] = lambda without=None, scale=None: {}
        self.optimizer_adapts: Callable[[], bool] = lambda: True
        self.gain_scale: Callable[[], float] = lambda: 1.0
        self.corrects_momentum = False

    @property
    def _terms(self) -> Terms:
        """The user's; of several compressors' errors as many as are harmless, where the user says nothing."""
        if self._asked.error_budget is not None or len(self._given) == 1:
            return self._asked
        return replace(self._asked, error_budget=HARMLESS_ADAPTIVE if self.optimizer_adapts() else HARMLESS)

    def follow(self, in_force: InForce) -> bool:
        """Search for the compressors in force, or for those to come while nothing is; whether they are others now."""
        found = [(given, in_force.get(given, given)) for given in self._given]
        before, self.compressors = self.compressors, tuple(given if now == NONE else now for given, now in found)
        return self.compressors != before

    def revise(self, change: Change, in_use: Strategy | None = None) -> Moved:
        """Measure again what changed in the running job. Collective; the next call searches with it.

        Args:
            in_use: the strategy of the steps in which it changed.
        """
        if self.job is None:
            return Moved(1.0, 0.0)
        self._revised = self._revised or Remeasured(self.job, change, in_use)
        self.job = self._revised.job(self.job, change, self._groups, self._runtime.place, in_use)
        return self._revised.moved

    def before_trying(self) -> None:
        """Have the first strategy that is tried find the links as the later ones do. Collective."""
        use_up_rest(self._groups, self._runtime.place)

    def after_trying(self) -> None:
        """Give back what only those that were tried needed."""
        self._runtime.put_away()

    def over_budget(self, strategy: Strategy) -> float:
        """So many times what it may owe the strategy in use does owe, where that is certain; else 0.

        It asks nobody, and is the same on every rank.
        The budget is the user's, or what rank 0 searched under: what an optimizer is ranks may see differently.
        """
        asked = self._asked
        if asked.error_budget is None and len(self._given) > 1:
            with suppress(JobError):  # notes of another version
                asked = Terms.of(strategy.notes) or asked
                if asked.error_budget is None:  # found where one was named, or written by hand: the laxer of the two
                    asked = replace(asked, error_budget=HARMLESS)
        of_this = partial(self.measured_owed, scale=strategy.gain_scale)
        budget, owes = asked.error_budget, owed_by(strategy, of_this())
        if not budget or owes <= math.exp(TELLING) * budget:
            return 0.0
        # Each check saw other runs of a tensor: how far they are apart says how far the mean may be off.
        without = [owed_by(strategy, of_this(without=number)) for number in range(OWED_CHECKS)]
        error = math.sqrt((OWED_CHECKS - 1) * pvariance(without))
        return owes / budget if owes - 2 * error > budget else 0.0

    def foresees(self, strategy: Strategy) -> tuple[float, float]:
        """What an iteration takes of the job as it is known by now, and what all that it sends does behind a token
        bucket (rank 0; 0 elsewhere, and while too little is measured).
        """
        if self.job is None or self._groups.rank:
            return 0.0, 0.0
        try:
            here = replace(strategy, cluster=self.job.cluster)  # a checkpoint's may have had other servers
            laid = plan(here, self.job.laid_out, mode=self.job.mode, host_copies=self.job.host_copies)
            found = first_come(laid, self.job)
        except JobError:  # it came with a checkpoint, and has compressors that were not measured here
            return 0.0, 0.0
        return found.iteration_us, found.sent_us

    def spread(self, records: Sequence[Record]) -> float:
        """How far the steps of a profile are apart; collective, the same on all ranks; 0 where the job is known.

        What ranks tell each other here is what the job is made of. Jobs beside each other measure as many steps.
        """
        if self.is_measured:
            return 0.0
        everybody = self._groups.all_objects(
            [
                (dict(seen.tensor_ready_us), seen.bucket_ready_us, seen.forward_us, seen.optimizer_us)
                for seen in self._observer.observations[-len(records) :]
            ]
        )
        self._seen = [[Observation(*seen) for seen in theirs] for theirs in everybody]
        spread, beside = profile_of(self._seen).spread, self._groups.beside
        return spread if beside is None else max(map(float, beside.all_objects(spread)))

    def __call__(self, records: Sequence[Record]) -> list[Candidate]:
        """Measure, search, agree. Returns the candidates, best first; none if plain is predicted to be best.

        Jobs beside each other measure at once, as they will run, and race what the first of them found.
        """
        found, beside = self._find(records) if self._tensors else [], self._groups.beside
        self.is_measured = True
        if beside is None:
            return found
        beside.barrier(patient=True)
        rows, self.uncompressed_us = beside.from_rank_0(([c.to_row() for c in found], self.uncompressed_us))
        return [self._here(records[-1].buckets, *row) for row in rows] if beside.rank else found

    def _here(
        self, buckets: tuple[Bucket, ...], name: str, body: Any, order: tuple[int, ...], us: float, sent_us: float
    ) -> Candidate:
        """A candidate that was found for another shard of the same tensors."""
        strategy = Strategy.from_json(body).over(self._tensors.values())
        laid = plan(strategy, buckets, host_copies=self._groups.host_copies)
        with suppress(ValueError):  # this shard is cut into other partitions
            laid = laid.with_order(order)
        return Candidate(name, strategy, laid.order, buckets, us, sent_us)

    def _find(self, records: Sequence[Record]) -> list[Candidate]:
        if self.job is None:
            hosts = hosts_of(self._seen, self._groups.cluster.ranks_per_node)
            costs = self._measure(max(bucket.numel for bucket in records[-1].buckets))
            job = self._make_job(records[-1].buckets, combine(self._seen), costs)
            job = replace(job, hosts=hosts, profile=profile_of(self._seen))
            if self._groups.speaks:
                logger.info("profiled %s", job.profile)
        else:
            job = self._with_compressors(self.job)
            if records[-1].buckets != job.buckets:
                held = [slot.tensor for bucket in records[-1].buckets for slot in bucket.slots]
                # A step without some of the tensors says nothing of the next one's buckets.
                if sorted(held) == sorted(tensor.name for tensor in job.tensors):
                    job = in_buckets(job, records[-1].buckets)
        self.job = Job.from_json(self._groups.from_rank_0(job.to_json()))
        found: list[Candidate] = []
        told: Any = None
        failed: Exception | None = None
        if self._groups.rank == 0:
            try:
                self.job = self._with_sensitivity(self.job)
                self._artifacts.job(self.job)
                found, self.uncompressed_us = self.decide(self.job)
                # What was in no bucket while the job was measured may come to be in one.
                known = {tensor.name for tensor in self.job.tensors}
                later = [tensor for name, tensor in self._tensors.items() if name not in known]
                if later:
                    found = [replace(c, strategy=c.strategy.over((*c.strategy.tensors, *later))) for c in found]
                self.why_none = "" if found else self._why_nowhere(self.job)
            except FormError as error:  # what was asked leaves nothing
                logger.warning("automatic mode found no strategy: %s; gradients stay as they are", error)
                found, self.why_none = [], f"the search found no strategy: {error}"
            except Exception as error:  # every rank must hear of it, or they wait for the answer
                failed, told = error, f"{type(error).__name__}: {error}"
            if failed is None:
                told = [c.to_row() for c in found], self.uncompressed_us, self.bucket_cap_mb, self.why_none
        self._groups.barrier(patient=True)
        told = self._groups.from_rank_0(told)
        if isinstance(told, str):
            raise EspressoError(f"the search failed on rank {self._groups.ranks[0]} ({told})") from failed
        if self._groups.rank == 0:
            return found
        rows, self.uncompressed_us, self.bucket_cap_mb, self.why_none = told
        buckets = self.job.buckets or ()
        return [Candidate(name, Strategy.from_json(body), order, buckets, *us) for name, body, order, *us in rows]

    def _why_nowhere(self, job: Job) -> str:
        """In words, where it is so, that none of the devices that are allowed compresses here."""
        allowed, measured = self._terms.constraints.devices, {cost.device.value for cost in job.costs.compute}
        if not allowed or measured & set(allowed):
            return ""
        return (
            f"devices={list(allowed)} allows compression nowhere: the offload pool needs more than one core a rank"
            " and offload_threads above 1"
        )

    def _measure(self, largest: int) -> CostModel:
        devices = [Device.TRAINING]
        cores = cores_per_rank(self._groups)
        backward = min(float(torch.get_num_threads()), cores)
        if cores > 1.0 and self._codecs.pool.num_threads > 1:
            devices.append(Device.OFFLOAD)
        runtime = self._runtime
        largest_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())
        links, taken = measure_links(self._groups, place=runtime.place, largest=largest_bytes)
        compute = self._measure_compressors(self._wanted(), devices, largest, cores)
        width = self._codecs.offload_width if Device.OFFLOAD in devices else 1
        pool = min(float(self._codecs.pool.num_threads), cores) / width
        pushes, burnt = measure_exchange(self._groups, self._bearing)
        servers, on_servers = measure_processors(self._groups, self._wanted(), self._bearing)
        contention = runtime.contention(Contention(cores, backward, pool, {**taken, **burnt}))
        links = replace(links, curves=links.curves + pushes)
        copies = runtime.copy_cost(self._groups)
        if contention.cores is not None:
            contention = replace(contention, handling_us=measure_handling(self._groups, self._codecs))
        return CostModel(
            links, compute + on_servers, copies, contention,
            servers=servers, offload_width=width, residual_dtype=self._terms.residual_dtype,
        )  # fmt: skip

    def _wanted(self) -> tuple[CompressorSpec, ...]:
        """Those to measure: in force, or forced, or what packs residuals; of several none that would send every tensor
        raw."""
        forced = tuple(spec for spec in self._terms.constraints.forced() if spec != NONE)
        wanted = self.compressors + forced
        terms = self._terms
        kept = {spec.residual_dtype or terms.residual_dtype for spec in wanted if create(spec).traits.error_feedback}
        narrow = kept if terms.residual_budget_mb is None else RESIDUAL_DTYPES
        packs = tuple(CompressorSpec(dtype) for dtype in RESIDUAL_DTYPES[1:] if dtype in narrow)
        return tuple(spec for spec in dict.fromkeys(wanted + packs) if self._suits(spec))

    def _suits(self, spec: CompressorSpec) -> bool:
        compressor: Any = create(spec)
        several = compressor.traits.rounds > 1 and len(self.compressors) > 1
        return not several or any(compressor.rank_of(tensor.shape) for tensor in self._tensors.values())

    @property
    def _offered(self) -> list[CompressorSpec]:
        """Those that any tensor may take."""
        return [spec for spec in self._wanted() if spec in self.compressors]

    def _measure_compressors(
        self, specs: Sequence[CompressorSpec], devices: Sequence[Device], largest: int, cores: float
    ) -> tuple[ComputeCost, ...]:
        return measure_compressors(
            self._groups, self._codecs, specs, devices, largest=largest, place=self._runtime.place,
            offload_width=self._codecs.offload_width, cores=cores,
        )  # fmt: skip

    def _with_compressors(self, job: Job) -> Job:
        """The job with the costs of compressors that came into force since it was measured."""
        measured = {(cost.spec, cost.device) for cost in job.costs.compute}
        devices = [d for d in dict.fromkeys(cost.device for cost in job.costs.compute) if d in RANK_DEVICES]
        fresh = [spec for spec in self._wanted() if any((str(spec), device) not in measured for device in devices)]
        if not fresh:
            return job
        largest = max(bucket.numel for bucket in job.laid_out)
        more = self._measure_compressors(fresh, devices, largest, job.costs.contention.cores or 1.0)
        return replace(job, costs=replace(job.costs, compute=job.costs.compute + more))

    def _with_sensitivity(self, job: Job) -> Job:
        """The job with what compressors owe of its gradients: forecast, and kept up by what was sent (rank 0)."""
        scale = self.gain_scale()
        if scale != self._forecast_scale:  # what comes back sooner owes less
            self._forecast, self._known, self._measured, self._forecast_scale = {}, {}, {}, scale
        fresh = [spec for spec in self._wanted() if spec not in self._forecast]
        if fresh:
            samples, begin = self._sampler.samples(), time.perf_counter()
            how: dict[str, Any] = {"gain": self._gain, "scale": scale, "corrected": self.corrects_momentum}
            found: dict[CompressorSpec, Mapping[str, float]] = {}
            if samples:
                found |= measure_sensitivity(samples, fresh, **how).owed
            if len(samples) < len(self._tensors):  # was never finite, or had no gradient yet
                normal = normal_sensitivity(fresh, **how).owed
                found = {spec: {**rows, **found.get(spec, {})} for spec, rows in normal.items()}
            first, known = Sensitivity(self._forecast), Sensitivity(self._known)
            self._known |= Sensitivity(found).corrected(first, known, self._measured).owed
            self._forecast |= found
            logger.info("measured what %d compressors owe in %.1f s", len(fresh), time.perf_counter() - begin)
        measured = self.measured_owed(scale=scale)
        kept_up = Sensitivity(self._known).kept_up(measured, self._measured.keys())
        self._known = dict(kept_up.owed)  # still known when another strategy runs, and is not measured yet
        for tensor, (choice, _) in measured.items():
            self._measured[choice.compressor.kept_as(""), tensor] = None
        offered = "; ".join(map(str, self._offered))
        return replace(job, meta={**job.meta, OFFERED: offered, SENSITIVITY: kept_up.to_json(), GAIN_SCALE: scale})

    def _make_job(self, buckets: tuple[Bucket, ...], seen: Observation, costs: CostModel) -> Job:
        in_order = sorted(seen.tensor_ready_us, key=lambda name: seen.tensor_ready_us[name])
        ready = [seen.tensor_ready_us[name] for name in in_order]
        # What had no gradient while the job was measured may have one later: as late as the last.
        held = {slot.tensor for bucket in buckets for slot in bucket.slots}
        unseen = [name for name in self._tensors if name in held and name not in seen.tensor_ready_us]
        in_order, ready = in_order + unseen, ready + [max(ready, default=0.0)] * len(unseen)
        gaps = [0.0] + [max(b - a, 0.0) for a, b in itertools.pairwise(ready)]
        handed_over: list[float] = []
        for at in seen.bucket_ready_us:
            handed_over.append(max([at, 0.0, *handed_over[-1:]]))  # padding alone comes before the first gradient
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
            meta=machine_facts() | {OFFERED: "; ".join(map(str, self._offered))} | self._terms.to_meta(),
        )

    def decide(self, job: Job) -> tuple[list[Candidate], float]:
        """The candidates for a job as it was measured, the best first, and what plain takes, in microseconds."""
        candidates, result = find_candidates(job, self._offered, self._terms)
        if self._revised is None:
            self._advise_bucket_size(job, result)
        logger.info(
            "searched %d tensors in %.0f ms: plain %.1f ms predicted, best %.1f to %.1f ms, which owes %s and keeps"
            " %.1f MB; %d kinds of choices left out for %.1f ms",
            len(job.tensors),
            result.search_ms,
            result.uncompressed_us / 1e3,
            result.predicted_us / 1e3,
            result.late_us / 1e3,
            "nobody knows what" if result.error is None else f"{result.error:.2g} gradients",
            result.residual_bytes / MB,
            result.kinds_left_out,
            result.fewer_kinds_cost_us / 1e3,
        )
        return candidates, result.uncompressed_us

    def _advise_bucket_size(self, job: Job, result: SearchResult) -> None:
        """Say which bucket size would be better; it is to be had where it is worth a switch that nobody can race."""
        from espresso.search.search import advised_bucket_cap, as_others_us

        if self._groups.beside is not None:
            return  # buckets are modules
        found = None
        with suppress(JobError):  # in other buckets nothing may keep to the terms
            found = advised_bucket_cap(job, self._offered, result, ADVISED_CAPS_MB, self._terms)
        self.advice, self.bucket_cap_mb = "", None
        if found is not None:
            if found.predicted_us < (1 - MUST_GAIN) * as_others_us(result):
                self.bucket_cap_mb = found.bucket_cap_mb
            self.advice = (
                f"DistributedDataParallel(bucket_cap_mb={found.bucket_cap_mb:g}) is predicted to take"
                f" {found.predicted_us / 1e3:.1f} ms in {found.num_buckets} buckets, instead of"
                f" {result.predicted_us / 1e3:.1f} ms in {len(job.laid_out)}"
            )
            logger.info("buckets: %s", self.advice)


def find_candidates(
    job: Job, compressors: Sequence[CompressorSpec], terms: Terms
) -> tuple[list[Candidate], SearchResult]:
    """What races against plain on a live job, best first, and the search's own result."""
    from espresso.search.search import search  # compiles kernels: only rank 0 needs them

    result = search(job, compressors, partitions=terms.partitions, terms=terms, certified=False)
    found = racers(result.alternatives)
    return [
        Candidate(row.name, row.strategy, row.plan.order, job.buckets or (), row.predicted_us, row.timeline.sent_us)
        for row in found
    ], result
