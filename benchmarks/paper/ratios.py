"""The published ratios for which a cause is looked for, and what gives ours under any setting."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.paper.causes import Cause, Setting
from benchmarks.paper.published import (
    BYTEPS_COMPRESS,
    CASES,
    ESPRESSO,
    FIGURE_16,
    FP32,
    HIPRESS,
    HITOPKCOMM,
    NVLINK,
    RESNET101_SCALING,
    TABLE_1,
    Case,
    speed_ups,
)
from benchmarks.paper.systems import times

SETTLED = frozenset({Cause.FORWARD})
"""Scaling factors always have a forward pass: a single device's step has one."""

TOUCHES = {
    FP32: (Cause.FP32_IS_BYTEPS,),
    BYTEPS_COMPRESS: (Cause.ONE_THREAD, Cause.HOST_SPEED, Cause.SCRIPT_THRESHOLD),
    HITOPKCOMM: (Cause.ARTIFACT_BASELINES,),
    HIPRESS: (Cause.ARTIFACT_BASELINES,),
    ESPRESSO: (Cause.ALGORITHMS, Cause.SCHEDULER_THRESHOLD, Cause.ONE_THREAD, Cause.HOST_SPEED),
}
"""The causes that a system's time can have; the forward pass and what concerns links touch all."""

EVERYWHERE = (Cause.FORWARD, Cause.IN_FLIGHT, Cause.ARTIFACT_LINKS, Cause.NOMINAL)


def causes_of(*systems: str) -> tuple[Cause, ...]:
    """The causes that can move a ratio of these systems."""
    return tuple(dict.fromkeys([*EVERYWHERE, *(cause for system in systems for cause in TOUCHES[system])]))


@dataclass(frozen=True)
class Ratio:
    """A published ratio.

    Attributes:
        figure, row, note: as in :class:`~benchmarks.paper.figures.Row`.
        over: the other system; "": the scaling factor of the first.
        settled: switched on whatever else is.
    """

    figure: str
    row: str
    published: float
    case: Case
    system: str
    over: str = ""
    settled: frozenset[Cause] = frozenset()
    note: str = ""

    def ours(self, setting: Setting) -> float:
        """What our simulator says."""
        found = times(self.case, Setting(setting.causes | self.settled))
        return found.over(self.system, self.over) if self.over else found.scaling(self.system)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Those that can move it."""
        systems = [system for system in (self.system, self.over) if system]
        return tuple(cause for cause in causes_of(*systems) if cause not in self.settled)


def _scaling(figure: str, what: str, published: float, case: Case, system: str) -> Ratio:
    return Ratio(figure, f"{case.model}, {what}", published, case, system, settled=SETTLED, note="scaling factor")


def scaling_factors() -> list[Ratio]:
    """Table 1, and the one factor that the text has beside it.

    "Compressed on the GPU" and "on the host" are the policies of HiTopKComm and of BytePS-Compress: the second leaves
    tensors below 64 KiB raw, where Table 1 says that all are compressed.
    """
    found = []
    for row in TABLE_1:
        found += [
            _scaling("table 1", "FP32", row.fp32, row.case, FP32),
            _scaling("table 1", "compressed on the GPU", row.gpu, row.case, HITOPKCOMM),
            _scaling("table 1", "compressed on the host", row.cpu, row.case, BYTEPS_COMPRESS),
        ]
    return [*found, _scaling("section 5.2.3", "FP32", RESNET101_SCALING, CASES[5], FP32)]


def naive_gains() -> list[Ratio]:
    """What compressing every tensor gains over FP32, by the factors of Table 1: -9 to +20 %."""
    return [
        Ratio(
            "table 1, gains", f"{row.case.model}, {where} over FP32", factor / row.fp32, row.case, system, FP32, SETTLED
        )
        for row in TABLE_1
        for where, factor, system in (("GPU", row.gpu, HITOPKCOMM), ("host", row.cpu, BYTEPS_COMPRESS))
    ]


def figures_12_and_13_ratios() -> list[Ratio]:
    """The text's speed-ups with 64 GPUs."""
    return [
        Ratio(f"figure {one.case.figure}", f"{one.case.model}, {one.system} over {one.over}", one.published, one.case,
              one.system, one.over)
        for one in speed_ups()
    ]  # fmt: skip


def figure_16_ratios() -> list[Ratio]:
    """The speed-ups of the convergence runs."""
    return [
        Ratio("figure 16", f"{model}, {name}", published, Case("16", model, name, NVLINK), ESPRESSO, FP32,
              note="over FP32")
        for (model, name), published in FIGURE_16.items()
    ]  # fmt: skip
