"""The rows: every table and figure of the two papers, ours beside what was published."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.paper.causes import Cause, Setting
from benchmarks.paper.one_setting import one_setting
from benchmarks.paper.published import (
    BYTEPS_COMPRESS,
    BYTEPS_COMPRESS_GAINS,
    BYTEPS_COMPRESS_RATE,
    CASES,
    FIGURE_14_MOST,
    FP32,
    HIPRESS,
    HITOPKCOMM,
    NVLINK,
    PCIE,
    RATIOS,
    TENSORS,
    Case,
)
from benchmarks.paper.ratios import (
    SETTLED,
    Ratio,
    figure_16_ratios,
    figures_12_and_13_ratios,
    naive_gains,
    scaling_factors,
)
from benchmarks.paper.rows import Row, beside, explained
from benchmarks.paper.systems import OURS, PROVEN, UPPER, at_gbits, byteps_us, job_of, published_to_upper, times
from benchmarks.search_evidence import sub_jobs
from espresso.model.job import Job
from espresso.model.payload_sizes import payload_bytes
from espresso.model.presets import published_costs
from espresso.model.pricing import Pricer
from espresso.search.ablation import EVERYTHING, ablate
from espresso.search.algorithms import OFFLOAD_CAP, greedy, offload
from espresso.search.baselines import byteps_compress
from espresso.search.candidates import compressed_choices, raw_choices, units_of
from espresso.search.evaluator import Evaluator
from espresso.search.search import search
from espresso.strategies import DTYPES, PLAIN, CompressorSpec, Device, StepKind, TensorSpec

NODES = (1, 2, 4, 8)
GBITS = (1, 2, 5, 10, 25, 50, 100, 200)
TENSOR_SIZES = tuple(1 << power for power in range(12, 28, 2))
MOST_SUBSETS = 10
"""Tensors of which every subset is looked at."""
RUNS = 3
OFFLOAD_WIDTHS = (1, 2, 4)
REPEATS = 5


def _explained(ratios: Sequence[Ratio]) -> Iterator[Row]:
    for one in ratios:
        yield explained(one.figure, one.row, one.published, one.ours, one.causes, one.note)


def table_1() -> Iterator[Row]:
    """Scaling factors, and what compressing everything gains by them."""
    yield from _explained([*scaling_factors(), *naive_gains()])


def tables_5_and_6() -> Iterator[Row]:
    """Selection and offload times of the published algorithms on this machine, and of our search with certificate."""
    tables = published_costs()["paper"]
    for case in CASES:
        job = job_of(case.model, NVLINK)
        spec = CompressorSpec.parse(case.spec)
        tree = raw_choices(job.cluster) + compressed_choices(job, (spec,), Device.TRAINING)
        evaluator = Evaluator(job, units_of(job), 0)
        chosen = greedy(evaluator, tree)
        first = _median_ms(lambda e=evaluator, t=tree: greedy(e, t))  # type: ignore[misc]
        second = _median_ms(lambda e=evaluator, c=chosen: offload(e, c))  # type: ignore[misc]
        yield beside(
            "table 5", case.model, tables["table5_select_ms"][case.model], first, "ms, Algorithm 1", at_most=True
        )
        yield beside(
            "table 6", case.model, tables["table6_offload_ms"][case.model], second, "ms, Algorithm 2", at_most=True
        )
        ours = _median_ms(lambda j=job, s=spec: search(j, s))  # type: ignore[misc]
        yield beside("table 5", f"{case.model}, ours", None, ours, "ms, search and certificate")


def algorithm_2() -> Iterator[Row]:
    """What Algorithm 2 gains, and what it gives up: over the best of every subset on the host (Lemma 1).

    The paper offloads the first of each group of equal tensors, for all vectors of such numbers; above a cap of vectors
    one group is settled after the other. The largest of each over runs of large tensors of all traces, of which every
    subset can be tried, and over widths of the pool.
    """
    for cluster, (name, text) in itertools.product((NVLINK, PCIE), RATIOS.items()):
        spec, ratios = CompressorSpec.parse(text), []
        for case, width in itertools.product(CASES, OFFLOAD_WIDTHS):
            for job in itertools.islice(sub_jobs(job_of(case.model, cluster), MOST_SUBSETS), RUNS):
                wide = replace(job, costs=replace(job.costs, offload_width=width))
                evaluator = Evaluator(wide, units_of(wide), 0)
                tree = raw_choices(wide.cluster) + compressed_choices(wide, (spec,), Device.TRAINING)
                start = greedy(evaluator, tree)
                moved = [replace(c, option=c.option.on_device(Device.OFFLOAD)) for c in evaluator.decode(start)]
                subsets = np.array(list(itertools.product((False, True), repeat=len(start))))
                best = evaluator.batch(np.where(subsets, evaluator.encode(moved), start), cut=True)[1]
                found = [offload(evaluator, start, cap)[0] for cap in (OFFLOAD_CAP, 0)]
                ratios.append([evaluator.makespan(each) / best for each in (start, *found)])
        for column, what in enumerate(("nothing offloaded", "all vectors", "group after group")):
            largest = max(row[column] for row in ratios)
            yield beside("algorithm 2", f"{name}, {cluster}, {what}", None, largest, "times the best subset")


def _median_ms(action: Callable[[], Any]) -> float:
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        found.append((time.perf_counter() - began) * 1e3)
    return statistics.median(found)


def figure_10() -> Iterator[Row]:
    """Communication time saved over compression time of one tensor alone, the best leaf on the training device."""
    base = job_of("vgg16", NVLINK)
    for name, spec_text in RATIOS.items():
        spec = CompressorSpec.parse(spec_text)
        leaves = compressed_choices(base, (spec,), Device.TRAINING)
        pricer = Pricer(base.costs, base.cluster)
        for numel in TENSOR_SIZES:
            raw = sum(work.us for work in pricer.chain(PLAIN, numel, "float32"))
            best = 0.0
            for leaf in leaves:
                works = pricer.chain(leaf, numel, "float32")
                moved = sum(work.us for work in works if work.shape.step.kind is StepKind.COMMUNICATE)
                best = max(best, (raw - moved) / max(sum(work.us for work in works) - moved, 1e-9))
            yield beside("figure 10", f"{name}, {numel} elements", None, best, "saved over spent")


def figure_11() -> Iterator[Row]:
    """How many tensors there are, and of how many sizes: why Algorithm 2 has few groups."""
    for case in CASES:
        sizes = Counter(tensor.numel for tensor in job_of(case.model, NVLINK).tensors)
        yield beside("figure 11", f"{case.model}, tensors", TENSORS[case.model], float(sizes.total()))
        yield beside("figure 11", f"{case.model}, sizes", None, float(len(sizes)))
        yield beside("figure 11", f"{case.model}, most of one size", None, float(max(sizes.values())))


def figures_12_and_13() -> Iterator[Row]:
    """Speed-ups with 64 GPUs against the text's, then the series of both clusters."""
    yield from _explained(figures_12_and_13_ratios())
    for case in CASES:
        for cluster in (NVLINK, PCIE):
            for nodes in NODES:
                found = times(replace(case, cluster=cluster), Setting(SETTLED), nodes)
                for system in (FP32, BYTEPS_COMPRESS, HITOPKCOMM, HIPRESS, OURS, UPPER):
                    name = f"{case.model}, {cluster}, {8 * nodes} GPUs, {system}"
                    yield beside("figures 12, 13, series", name, None, found.scaling(system), "scaling factor")


FIGURE_14_CAUSES = (Cause.IN_FLIGHT, Cause.ONE_THREAD, Cause.HOST_SPEED, Cause.ARTIFACT_LINKS, Cause.NOMINAL)
"""Those that the published algorithms' time or the upper bound's can have."""


def figure_14() -> Iterator[Row]:
    """Distance of each system's throughput to the upper bound's, 64 GPUs: all models, compressors and clusters.

    The certificate's bound is among them: no strategy is nearer.

    Throughput is of whole steps, so a forward pass is in them; ours also without, of backward alone. The published
    algorithms cut nothing: their bound does not either. Three distances stand in the text, of Figures 12a to 12c.
    """
    text = published_costs()["paper"]["gap_to_upper_bound"]
    for cluster in (NVLINK, PCIE):
        for case in CASES:
            for name in RATIOS:
                row = f"{case.model}, {name}, {cluster}"
                one = Case("14", case.model, name, cluster)
                found, bare = times(one, Setting(SETTLED)), times(one)
                for system in (BYTEPS_COMPRESS, HITOPKCOMM, HIPRESS, OURS, PROVEN):
                    most = FIGURE_14_MOST if system == OURS and cluster == NVLINK else None
                    yield _distance("figure 14", f"{row}, {system}", most, found.to_upper(system))
                as_published = published_to_upper(one, Setting(SETTLED))
                yield _distance("figure 14", f"{row}, published algorithms", None, as_published)
                if cluster == NVLINK and f"{case.model}+{name}" in text:
                    most = text[f"{case.model}+{name}"]
                    yield _distance("figure 14, text", f"{row}, {OURS}", most, found.to_upper(OURS))
                    yield _distance("figure 14, text", f"{row}, published algorithms", most, as_published)
                yield _distance("figure 14", f"{row}, {OURS}, backward alone", None, bare.to_upper(OURS))


def _distance(figure: str, row: str, most: float | None, far: float) -> Row:
    return beside(figure, row, most, far, "distance to the upper bound", at_most=True)


def figure_14_causes() -> Iterator[Row]:
    """How near the published algorithms are on NVLink, where the paper's are all within 10 %, under each cause."""
    for causes in [(), *((cause,) for cause in FIGURE_14_CAUSES)]:
        setting = Setting(SETTLED | set(causes))
        far = [published_to_upper(Case("14", case.model, name, NVLINK), setting) for case in CASES for name in RATIOS]
        name = f"published algorithms, {causes[0].value if causes else 'as they are'}"
        within = sum(value <= FIGURE_14_MOST for value in far)
        yield beside("figure 14, causes", f"{name}, within 10 %", None, float(within), f"of {len(far)} on {NVLINK}")
        yield beside("figure 14, causes", f"{name}, farthest", None, max(far), "distance to the upper bound")


MECHANISMS = {
    "all four dimensions": EVERYTHING,
    "1: all compressed": "all tensors compressed",
    "2: GPU only": "training device only",
    "2: host only": "offload only",
}
CRIPPLED = {
    "1: myopic": "myopic",
    "3: inter allgather": "inter-allgather",
    "3, 4: inter all-to-all": "inter-all-to-all",
    "4: all-to-all + all-to-all": "all-to-all + all-to-all",
}


def figure_15() -> Iterator[Row]:
    """VGG16's scaling factor with 64 GPUs, each dimension of the space crippled in turn."""
    panels = [(NVLINK, name) for name in RATIOS] + [(PCIE, "efsignsgd")]
    for cluster, name in panels:
        case = Case("15", "vgg16", name, cluster)
        setting = Setting(SETTLED)
        found = times(case, setting)
        job = setting.apply(job_of(case.model, cluster), case.compressor)
        searched = {row.name: row.predicted_us for row in ablate(job, [CompressorSpec.parse(case.spec)])}
        kinds = {kind: searched[key] for kind, key in MECHANISMS.items()}
        kinds |= {kind: found.baselines[key] for kind, key in CRIPPLED.items()}
        for kind, us in kinds.items():
            yield beside("figure 15", f"{name}, {cluster}, {kind}", None, found.alone_us / us, "scaling factor")


def figure_16() -> Iterator[Row]:
    """Speed-ups of the convergence runs, and their counterpart that was run."""
    yield from _explained(figure_16_ratios())
    yield from small_models()


def small_models(folder: Path = results.RESULTS_DIR) -> Iterator[Row]:
    """Of each arm of the convergence dossier the final metric and the seconds to the target, beside plain's."""
    figure = "figure 16, small models"
    for path in sorted(folder.glob("dossier*.json")):
        rows = json.loads(path.read_text())["rows"]
        plain = {row["case"]: row for row in rows if row["arm"] == "plain"}
        for row in rows:
            base = plain.get(row["case"])
            if base is None or base is row:
                continue
            name = f"{row['case']}, {row['arm']}, {path.stem}"
            yield beside(figure, f"{name}, metric", None, row["metric"] - base["metric"], "less plain's")
            if row["seconds_to_target"] and base["seconds_to_target"]:
                spent = row["seconds_to_target"] / base["seconds_to_target"]
                yield beside(figure, f"{name}, seconds to the target", None, spent, "over plain's")


def other_models() -> Iterator[Row]:
    """Models that the papers name and publish no trace of, by the rule of :mod:`benchmarks.search_models`, 64 GPUs."""
    for model in ("resnet50", "bert_large"):
        for cluster in (NVLINK, PCIE):
            found = times(Case("other", model, "dgc", cluster), Setting(SETTLED))
            for system in (FP32, BYTEPS_COMPRESS, HITOPKCOMM, HIPRESS, OURS, UPPER):
                yield beside(
                    "other models", f"{model}, dgc, {cluster}, {system}", None, found.scaling(system), "scaling factor"
                )


def sweep() -> Iterator[Row]:
    """Our gain over FP32 from 1 to 200 Gb/s between machines, where the paper has two points."""
    for case in CASES:
        for gbits in GBITS:
            found = times(case, Setting(SETTLED), gbits=gbits)
            yield beside("sweep", f"{case.model}, {gbits} Gb/s", None, found.over(OURS, FP32), "ours over FP32")


def byteps_paper() -> Iterator[Row]:
    """BytePS-Compress over BytePS at 25 Gb/s, and the bytes of top-k 0.1 %.

    Assumed, since the abstract does not say: eight machines of eight V100 with NVLink, colocated servers, a forward
    pass of half of backward; signs with one scale for the CNNs, priced as the published EF-SignSGD; top-k 0.1 % for
    BERT, priced as the published DGC, against gradients in fp16 (its baseline is mixed precision).
    """
    compressors = {"resnet50": "efsignsgd", "vgg16": "efsignsgd", "bert_base": "dgc:ratio=0.001"}
    for model, published in BYTEPS_COMPRESS_GAINS.items():

        def ours(setting: Setting, model: str = model) -> float:
            settled = Setting(setting.causes | SETTLED)
            job = settled.apply(job_of(model, at_gbits(NVLINK, 25.0)), compressors[model])
            job = _in_fp16(job) if model == "bert_base" else job
            evaluator = Evaluator(job, units_of(job), 0)
            own, choices = byteps_compress(
                evaluator, CompressorSpec.parse(compressors[model]), settled.byteps_raw_below
            )
            compressed = job.forward_us + own.makespan(own.encode(choices))
            return byteps_us(job) / compressed

        causes = (Cause.ONE_THREAD, Cause.HOST_SPEED, Cause.SCRIPT_THRESHOLD, Cause.IN_FLIGHT, Cause.NOMINAL)
        yield explained("BytePS-Compress", f"{model}, 25 Gb/s", published, ours, causes, "over BytePS")
    yield beside("BytePS-Compress", "bytes, top-k 0.1 %", BYTEPS_COMPRESS_RATE, fewer_bytes(), "raw over payload, fp16")


def _in_fp16(job: Job) -> Job:
    return replace(job, tensors=tuple(TensorSpec(t.name, t.shape, "float16") for t in job.tensors))


def fewer_bytes(elements: int = 100_000_000) -> float:
    """How many times fewer bytes top-k 0.1 % sends of fp16 gradients than raw ones take."""
    return (
        elements * DTYPES["float16"] / payload_bytes(CompressorSpec.parse("topk:ratio=0.001"), elements, "float16", 1)
    )


FIGURES: dict[str, Callable[[], Iterator[Row]]] = {
    "table-1": table_1,
    "tables-5-6": tables_5_and_6,
    "algorithm-2": algorithm_2,
    "figure-10": figure_10,
    "figure-11": figure_11,
    "figures-12-13": figures_12_and_13,
    "one-setting": one_setting,
    "figure-14": figure_14,
    "figure-14-causes": figure_14_causes,
    "figure-15": figure_15,
    "figure-16": figure_16,
    "other-models": other_models,
    "sweep": sweep,
    "byteps-compress": byteps_paper,
}
"""By the name that the command takes."""
