"""Every system's iteration time on one job, under a set of switched-on causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

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
from espresso.search.baselines import (
    BYTEPS_PARTITION_BYTES,
    byteps_compress,
    byteps_raw_pipeline,
    inter_allgather,
)
from espresso.search.candidates import units_of
from espresso.search.evaluator import Evaluator
from espresso.search.result import SearchResult
from espresso.search.search import PUBLISHED, search
from espresso.strategies import PLAIN, Choice, CompressorSpec, Device

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
        search_ms: wall time of the search.
    """

    of: Mapping[str, float]
    alone_us: float
    baselines: Mapping[str, float]
    search_ms: float

    def over(self, system: str, other: str) -> float:
        """Throughput of one system over the other's."""
        return self.of[other] / self.of[system]

    def scaling(self, system: str) -> float:
        """The scaling factor: of the throughput that as many single devices have."""
        return self.alone_us / self.of[system]


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


@lru_cache(maxsize=512)
def times(case: Case, setting: Setting = AS_IS, nodes: int = 8, gbits: float | None = None) -> Times:
    """Every system on the model of a case, compressed as the case says.

    Args:
        gbits: the network between machines; None: the cluster's own.
    """
    cluster = case.cluster if gbits is None else at_gbits(case.cluster, gbits)
    return times_of(setting.apply(job_of(case.model, cluster, nodes), case.compressor), case.spec, setting)


def times_of(job: Job, compressor: str, setting: Setting) -> Times:
    """Every system on a job whose costs the setting has changed already."""
    spec = CompressorSpec.parse(compressor)
    result = search(job, spec)
    base = result.baselines
    whole = Evaluator(job, units_of(job), 0)
    found = {
        FP32: result.uncompressed_us,
        BYTEPS_COMPRESS: base["BytePS-Compress"],
        HITOPKCOMM: base["HiTopKComm"],
        HIPRESS: base["HiPress"],
        # The paper's system, by the better of its published algorithms and our search over its space.
        ESPRESSO: base[PUBLISHED] if Cause.ALGORITHMS in setting else result.predicted_us,
        OURS: result.predicted_us,
        UPPER: result.upper_bound_us,
        PROVEN: result.lower_bound_us,
    }
    if Cause.FP32_IS_BYTEPS in setting:
        found[FP32] = byteps_us(job)
    if Cause.SCRIPT_THRESHOLD in setting:
        found[BYTEPS_COMPRESS] = byteps_compress_us(job, compressor, setting)
    if Cause.ARTIFACT_BASELINES in setting:
        found[HIPRESS] = _time(whole, _allgather_above(whole, spec, _hipress_elements(job)))
        least = HITOPKCOMM_ELEMENTS.get(job.model, OTHER_HITOPKCOMM_ELEMENTS)
        found[HITOPKCOMM] = _time(whole, _allgather_above(whole, spec, least))
    if Cause.SCHEDULER_THRESHOLD in setting:
        found[ESPRESSO] = _raw_below_scheduler(job, result, found[ESPRESSO])
    # (Not the result itself: it keeps prices of thousands of leaves.)
    return Times(found, job.forward_us + job.backward_us, base, result.search_ms)


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


def _raw_below_scheduler(job: Job, result: SearchResult, espresso_us: float) -> float:
    """The chosen strategy with small tensors raw (by a flat allreduce), where that is slower."""
    strategy = result.strategy
    evaluator = Evaluator(job, units_of(job), strategy.partition_bytes)
    choices = [
        strategy.choices[unit.tensors[0]] if unit.numel >= SCHEDULER_ELEMENTS else PLAIN for unit in evaluator.units
    ]
    return max(_time(evaluator, choices), espresso_us)
