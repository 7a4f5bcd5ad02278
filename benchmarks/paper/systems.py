"""Every system's iteration time on one job, under a set of switched-on causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from benchmarks.paper.causes import (
    AS_IS,
    EFFICIENCY,
    HIPRESS_ELEMENTS,
    HIPRESS_RESNET_ELEMENTS,
    HITOPKCOMM_ELEMENTS,
    OTHER_HITOPKCOMM_ELEMENTS,
    SCHEDULER_ELEMENTS,
    Cause,
    Setting,
)
from benchmarks.paper.published import BYTEPS_COMPRESS, ESPRESSO, FP32, HIPRESS, HITOPKCOMM, Case
from benchmarks.search_models import MODELS, model_job
from espresso.model.job import Job
from espresso.model.links import AlphaBeta
from espresso.model.presets import ClusterPreset, job_from_trace, load_cluster
from espresso.search.algorithms import upper_bound_us
from espresso.search.baselines import (
    BYTEPS_PARTITION_BYTES,
    byteps_compress,
    byteps_raw_pipeline,
    inter_allgather,
)
from espresso.search.candidates import partition_sizes, units_of
from espresso.search.evaluator import Evaluator
from espresso.search.local_search import NO_EFFORT
from espresso.search.search import PUBLISHED, search
from espresso.strategies import PLAIN, Choice, CompressorSpec, Device, Strategy

RANKS = 8
"""On each machine of both testbeds."""

OURS, UPPER, PROVEN = "ours", "upper bound", "no strategy is nearer"


@dataclass(frozen=True)
class Times:
    """Predicted iteration times in microseconds.

    Attributes:
        of: by system.
        alone_us: of the job computing alone.
        baselines: every strategy that the search names, the published algorithms among them.
        upper: finds the upper bound, where that is asked for.
    """

    of: Mapping[str, float]
    alone_us: float
    baselines: Mapping[str, float]
    upper: Callable[[], float]

    def us(self, system: str) -> float:
        """Of a system, or the upper bound."""
        return self.upper() if system == UPPER else self.of[system]

    def over(self, system: str, other: str) -> float:
        """Throughput of one system over the other's."""
        return self.us(other) / self.us(system)

    def to_upper(self, system: str) -> float:
        """How far a system's throughput is from the upper bound's, as a share of that."""
        return 1 - self.us(UPPER) / self.us(system)

    def scaling(self, system: str) -> float:
        """The scaling factor: of the throughput that as many single devices have."""
        return self.alone_us / self.us(system)


def job_of(model: str, cluster: str | ClusterPreset, nodes: int = 8) -> Job:
    """A trace, or a model whose times of release follow a rule, on machines of eight ranks."""
    if model in MODELS:
        return model_job(model, cluster, nodes, RANKS)
    return job_from_trace(model, nodes, RANKS, cluster)


def at_gbits(cluster: str, gbits: float) -> ClusterPreset:
    """A cluster with another network between its machines, at the presets' efficiency."""
    preset = load_cluster(cluster)
    assert preset.inter is not None
    inter = AlphaBeta(preset.inter.alpha_us, 8.0 / (gbits * EFFICIENCY))
    return replace(preset, name=f"{cluster} at {gbits:g} Gb/s", inter=inter)


@cache
def times(case: Case, setting: Setting = AS_IS, nodes: int = 8, gbits: float | None = None) -> Times:
    """Every system on the model of a case, compressed as the case says.

    Args:
        gbits: the network between machines; None: the cluster's own.
    """
    key = case, setting.of_job, nodes, gbits
    job, result = _searched(*key)
    spec, base = CompressorSpec.parse(case.spec), result.baselines
    whole = Evaluator(job, units_of(job), 0)
    found = {
        FP32: result.uncompressed_us,
        BYTEPS_COMPRESS: base["BytePS-Compress"],
        HITOPKCOMM: base["HiTopKComm"],
        HIPRESS: base["HiPress"],
        # The paper's system, by the better of its published algorithms and our search over its space.
        ESPRESSO: base[PUBLISHED] if Cause.ALGORITHMS in setting else result.predicted_us,
        OURS: result.predicted_us,
        PROVEN: result.lower_bound_us,
    }
    if Cause.FP32_IS_BYTEPS in setting:
        found[FP32] = byteps_us(job)
    if Cause.SCRIPT_THRESHOLD in setting:
        found[BYTEPS_COMPRESS] = byteps_compress_us(job, case.spec, setting)
    if Cause.ARTIFACT_BASELINES in setting:
        found[HIPRESS] = _time(whole, _allgather_above(whole, spec, _hipress_elements(job)))
        least = HITOPKCOMM_ELEMENTS.get(job.model, OTHER_HITOPKCOMM_ELEMENTS)
        found[HITOPKCOMM] = _time(whole, _allgather_above(whole, spec, least))
    if Cause.SCHEDULER_THRESHOLD in setting:
        found[ESPRESSO] = _raw_below_scheduler(job, result.strategy, found[ESPRESSO])
    return Times(found, job.forward_us + job.backward_us, base, partial(_upper_us, *key))


@dataclass(frozen=True)
class _Searched:
    """What is kept of a search: a result itself keeps prices of thousands of leaves."""

    predicted_us: float
    uncompressed_us: float
    lower_bound_us: float
    baselines: Mapping[str, float]
    strategy: Strategy


@cache
def _searched(case: Case, setting: Setting, nodes: int, gbits: float | None) -> tuple[Job, _Searched]:
    """A search under what a setting changes of the job."""
    cluster = case.cluster if gbits is None else at_gbits(case.cluster, gbits)
    job = setting.apply(job_of(case.model, cluster, nodes), case.compressor)
    result = search(job, case.spec)
    return job, _Searched(
        result.predicted_us,
        result.uncompressed_us,
        result.lower_bound_us,
        result.baselines,
        result.strategy,
    )


@cache
def _upper_us(case: Case, setting: Setting, nodes: int, gbits: float | None) -> float:
    """The paper's upper bound, searched for at every partition size: the search does at that of its strategy alone."""
    job, result = _searched(case, setting, nodes, gbits)
    sizes = partition_sizes(units_of(job))
    return min(result.predicted_us, *(_upper_at(job, case, result.strategy, size) for size in sizes))


def _upper_at(job: Job, case: Case, strategy: Strategy, partition_bytes: int) -> float:
    units = units_of(job)
    start = [strategy.choices[unit.tensors[0]] for unit in units]
    return upper_bound_us(job, (CompressorSpec.parse(case.spec),), units, partition_bytes=partition_bytes, start=start)


@cache
def published_to_upper(case: Case, setting: Setting) -> float:
    """How far the algorithms as published are from the upper bound of their own space, which cuts nothing."""
    job = setting.apply(job_of(case.model, case.cluster), case.compressor)
    result = search(job, case.spec, effort=NO_EFFORT, partitions=(0,), certified=False)
    return 1 - _upper_at(job, case, result.strategy, 0) / result.baselines[PUBLISHED]


def byteps_compress_us(job: Job, compressor: str, setting: Setting) -> float:
    """An iteration of BytePS-Compress; the job's costs are the setting's already."""
    whole = Evaluator(job, units_of(job), 0)
    return _time(*byteps_compress(whole, CompressorSpec.parse(compressor), setting.byteps_raw_below))


def byteps_us(job: Job) -> float:
    """An iteration of BytePS without compression: partitions through colocated servers."""
    evaluator = Evaluator(job, units_of(job), BYTEPS_PARTITION_BYTES)
    choice = Choice(byteps_raw_pipeline(job.cluster.is_hierarchical))
    return _time(evaluator, [choice] * len(evaluator.units))


def _time(evaluator: Evaluator, choices: Sequence[Choice]) -> float:
    job = evaluator.job
    return job.forward_us + evaluator.makespan(evaluator.encode(choices)) + job.optimizer_us


def _allgather_above(evaluator: Evaluator, spec: CompressorSpec, least: int) -> list[Choice]:
    """Reduce-scatter in the node, compress the shard, allgather between nodes, from so many elements on."""
    option = inter_allgather(evaluator.job.cluster.is_hierarchical).on_device(Device.TRAINING)
    return [Choice(option, spec) if unit.numel >= least else PLAIN for unit in evaluator.units]


def _hipress_elements(job: Job) -> int:
    return HIPRESS_RESNET_ELEMENTS if job.model.startswith("resnet") else HIPRESS_ELEMENTS


def _raw_below_scheduler(job: Job, strategy: Strategy, espresso_us: float) -> float:
    """The chosen strategy with small tensors raw (by a flat allreduce), where that is slower."""
    evaluator = Evaluator(job, units_of(job), strategy.partition_bytes)
    choices = [
        strategy.choices[unit.tensors[0]] if unit.numel >= SCHEDULER_ELEMENTS else PLAIN for unit in evaluator.units
    ]
    return max(_time(evaluator, choices), espresso_us)
