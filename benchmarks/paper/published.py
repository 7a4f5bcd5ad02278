"""What the papers say in numbers. A figure that is a picture only is not here: reading one off is not a source."""

from __future__ import annotations

from dataclasses import dataclass

from espresso.model.presets import published_costs

NVLINK, PCIE = "nvlink-100g", "pcie-25g"
ESPRESSO = "espresso"
FP32, BYTEPS_COMPRESS, HITOPKCOMM, HIPRESS = "fp32", "byteps-compress", "hitopkcomm", "hipress"

RATIOS = {"randomk": "randomk:ratio=0.01", "dgc": "dgc:ratio=0.01", "efsignsgd": "efsignsgd"}
"""The compressors of the evaluation (section 5.1): sparsifiers keep 1 %."""


@dataclass(frozen=True)
class Case:
    """A model, what compresses it and where: one panel of Figures 12 and 13."""

    figure: str
    model: str
    compressor: str
    cluster: str

    @property
    def spec(self) -> str:
        """The compressor with its ratio."""
        return RATIOS[self.compressor]


CASES = (
    Case("12a", "bert_base", "randomk", NVLINK),
    Case("12b", "gpt2", "efsignsgd", NVLINK),
    Case("12c", "ugatit", "dgc", NVLINK),
    Case("13a", "vgg16", "randomk", PCIE),
    Case("13b", "lstm", "efsignsgd", PCIE),
    Case("13c", "resnet101", "dgc", PCIE),
)


@dataclass(frozen=True)
class SpeedUp:
    """Throughput of one system over another's with 64 GPUs."""

    case: Case
    system: str
    over: str
    published: float


def speed_ups() -> tuple[SpeedUp, ...]:
    """Sections 5.2.1 and 5.2.3: Espresso over others, and the others over FP32 where the text has a number.

    ("Up to", where the text says so, is taken for 64 GPUs.)
    """
    found = []
    for case in CASES:
        for row in published_costs()["paper"]["speedups_64_gpus"]:
            if (row["model"], row["compressor"]) == (case.model, case.compressor):
                found += [SpeedUp(case, ESPRESSO, over, value) for over, value in row["espresso_over"].items()]
        found += [SpeedUp(case, *row) for row in _TEXT.get(case.figure, ())]
    return tuple(found)


_TEXT: dict[str, tuple[tuple[str, str, float], ...]] = {
    "12a": ((HITOPKCOMM, FP32, 1.04), (HIPRESS, FP32, 1.13)),
    "12c": ((HIPRESS, FP32, 1.86), (HITOPKCOMM, FP32, 1.66), (BYTEPS_COMPRESS, FP32, 0.82)),
    "13b": ((HIPRESS, FP32, 1.02), (BYTEPS_COMPRESS, FP32, 0.88)),
    "13c": (
        (ESPRESSO, FP32, 1.20),
        (ESPRESSO, BYTEPS_COMPRESS, 1.18),
        (ESPRESSO, HIPRESS, 1.24),
        (HITOPKCOMM, FP32, 0.46),
        (HIPRESS, FP32, 0.96),
    ),
}


@dataclass(frozen=True)
class Scaling:
    """A row of Table 1: scaling factors with 64 GPUs; ``gpu`` and ``cpu`` compress every tensor there."""

    case: Case
    fp32: float
    gpu: float
    cpu: float


TABLE_1 = (
    Scaling(Case("table 1", "gpt2", "dgc", NVLINK), 0.58, 0.67, 0.64),
    Scaling(Case("table 1", "bert_base", "efsignsgd", NVLINK), 0.51, 0.55, 0.61),
    Scaling(Case("table 1", "lstm", "dgc", PCIE), 0.46, 0.43, 0.42),
)

RESNET101_SCALING = 0.70
"""Of FP32 on PCIe-only machines (section 5.2.3)."""

TENSORS = {"vgg16": 32, "resnet101": 314, "ugatit": 148, "bert_base": 207, "gpt2": 148, "lstm": 10}
"""Table 5's second row."""

FIGURE_14_MOST = 0.10
"""Espresso's distance to the upper bound, NVLink (section 5.2.4)."""

FIGURE_16 = {("bert_base", "dgc"): 1.55, ("resnet101", "efsignsgd"): 1.23}
"""Speed-ups of the convergence runs over FP32 (section 5.4)."""

BYTEPS_COMPRESS_GAINS = {"resnet50": 1.050, "vgg16": 1.581, "bert_base": 1.233}
"""The abstract of BytePS-Compress: training time better by 5.0, 58.1 and 23.3 % at 25 Gb/s, read as speed-ups."""

BYTEPS_COMPRESS_RATE = 333
"""Fewer bytes than mixed precision: top-k 0.1 % with 32-bit indices and fp16 values."""
