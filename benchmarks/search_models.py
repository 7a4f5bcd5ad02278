"""Jobs of models without a trace in the package, their tensors from the architecture, and random ones.

Tensors are exact; when each becomes ready is not measured: a stated time of backward is shared out, to weights in
proportion to the multiplications that they take part in, and each tensor takes a launch. A random job is reproducible
from its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from espresso.model.job import Job
from espresso.model.presets import ClusterPreset, job_from_trace
from espresso.strategies import TensorSpec

Row = tuple[str, int, float]
"""Name, elements, multiplications a sample (in any unit), in the order of forward."""

LAUNCH_US = 5.0
BACKWARD_US = {"resnet50": 66_000.0, "resnet101": 110_000.0, "bert_large": 210_000.0, "ncf": 9_000.0}
"""Of one V100 at usual batch sizes, roughly. Of the paper's figures those of ResNet101 rest on it."""


def _resnet(blocks: Sequence[int]) -> list[Row]:
    """torchvision's bottleneck ResNets for ImageNet (He et al. 2016)."""
    rows: list[Row] = []

    def conv(name: str, inside: int, out: int, kernel: int, side: int) -> None:
        numel = inside * out * kernel * kernel
        rows.append((f"{name}.weight", numel, float(numel * side * side)))
        rows.extend((f"{name}.bn.{part}", out, float(out * side * side)) for part in ("weight", "bias"))

    conv("conv1", 3, 64, 7, 112)
    inside = 64
    for stage, count in enumerate(blocks):
        width, side = 64 << stage, 56 >> stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            conv(f"{name}.conv1", inside, width, 1, side)
            conv(f"{name}.conv2", width, width, 3, side)
            conv(f"{name}.conv3", width, 4 * width, 1, side)
            if block == 0:
                conv(f"{name}.downsample", inside, 4 * width, 1, side)
            inside = 4 * width
    rows += [("fc.weight", 2_048_000, 2_048_000.0), ("fc.bias", 1000, 1000.0)]
    return rows


def _bert(layers: int, hidden: int, vocabulary: int = 30_522, positions: int = 512) -> list[Row]:
    """BERT with a pooler (Devlin et al. 2019); embeddings are looked up, not multiplied."""
    rows: list[Row] = [
        (f"embeddings.{name}", count * hidden, float(hidden * positions))
        for name, count in (("word", vocabulary), ("position", positions), ("type", 2))
    ]

    def linear(name: str, inside: int, out: int) -> None:
        rows.extend([(f"{name}.weight", inside * out, float(inside * out * positions)), (f"{name}.bias", out, out)])

    def norm(name: str) -> None:
        rows.extend((f"{name}.{part}", hidden, float(hidden)) for part in ("weight", "bias"))

    norm("embeddings.norm")
    for layer in range(layers):
        for name in ("query", "key", "value", "attention.output"):
            linear(f"layer.{layer}.{name}", hidden, hidden)
        norm(f"layer.{layer}.attention.norm")
        linear(f"layer.{layer}.intermediate", hidden, 4 * hidden)
        linear(f"layer.{layer}.output", 4 * hidden, hidden)
        norm(f"layer.{layer}.norm")
    linear("pooler", hidden, hidden)
    return rows


def _ncf(users: int = 138_493, items: int = 26_744, factors: int = 64) -> list[Row]:
    """Neural collaborative filtering on MovieLens-20M, MLPerf's shape (He et al. 2017)."""
    rows: list[Row] = [
        (f"{part}_{kind}", count * width, float(width))
        for part, width in (("mf", factors), ("mlp", 128))
        for kind, count in (("user", users), ("item", items))
    ]
    for index, (inside, out) in enumerate(((256, 256), (256, 128), (128, 64))):
        rows += [
            (f"mlp.{index}.weight", inside * out, float(inside * out)),
            (f"mlp.{index}.bias", out, float(out)),
        ]
    return [*rows, ("final.weight", 128, 128.0), ("final.bias", 1, 1.0)]


MODELS: dict[str, Callable[[], list[Row]]] = {
    "resnet50": lambda: _resnet((3, 4, 6, 3)),
    "resnet101": lambda: _resnet((3, 4, 23, 3)),
    "bert_large": lambda: _bert(24, 1024),
    "ncf": _ncf,
}


def model_job(name: str, preset: str | ClusterPreset, num_nodes: int = 8, ranks_per_node: int = 8) -> Job:
    """One of :data:`MODELS`, with the published compressor costs, on a cluster preset."""
    rows = MODELS[name]()[::-1]
    work = np.array([row[2] for row in rows])
    left = BACKWARD_US[name] - LAUNCH_US * len(rows)
    gaps = np.append(0.0, (LAUNCH_US + left * work / work.sum())[1:])
    return _job(name, [(row[0], row[1]) for row in rows], gaps, preset, num_nodes, ranks_per_node)


def random_model_job(seed: int, preset: str, num_nodes: int = 8, ranks_per_node: int = 8) -> Job:
    """A job drawn at random: 5 to 400 tensors, of a few sizes or of many, a giant or none, even gaps or bursts."""
    rng = np.random.default_rng(seed)
    count = int(np.exp(rng.uniform(np.log(5), np.log(400))))
    palette = np.exp(rng.uniform(np.log(64), np.log(2.0**24), rng.integers(2, 12))).astype(int)
    sizes = rng.choice(palette, count)
    for _ in range(rng.integers(0, 4)):
        sizes[rng.integers(count)] = int(2.0 ** rng.uniform(24, 27))
    gaps = rng.gamma(rng.choice([0.2, 1.0, 5.0]), 1.0, count)
    # From far less time than the links need to far more.
    total = float(sizes.sum()) * 4e-3 * np.exp(rng.uniform(np.log(0.02), np.log(1.0)))
    gaps = np.append(0.0, gaps[1:] * total / gaps.sum())
    rows = [(f"t{index}", int(size)) for index, size in enumerate(sizes)]
    return _job(f"random {seed}", rows, gaps, preset, num_nodes, ranks_per_node)


def _job(
    name: str,
    rows: Sequence[tuple[str, int]],
    gaps: npt.NDArray[np.float64],
    preset: str | ClusterPreset,
    nodes: int,
    ranks: int,
) -> Job:
    base = job_from_trace("vgg16", nodes, ranks, preset)
    tensors = tuple(TensorSpec(tensor, (numel,)) for tensor, numel in rows)
    return replace(base, model=name, tensors=tensors, gaps_us=tuple(float(gap) for gap in gaps), source="generated")
