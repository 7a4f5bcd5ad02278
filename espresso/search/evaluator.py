"""Evaluating strategies of one job: the kernels behind Python's own types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from espresso.model.arrays import Reals, Wholes
from espresso.model.costs import PAPER_CONTENTION
from espresso.model.job import Job
from espresso.model.payload_sizes import PayloadBytes, payload_bytes
from espresso.model.pricing import Pricer
from espresso.model.timeline_kernels import (
    NUM_LANES,
    ROOM_UNDER_WAY,
    General,
    JobArrays,
    State,
    advance_general,
    advance_serial,
    best_of,
    copy_state,
    evaluate_batch,
    limits_of,
    make_state,
    reset,
)
from espresso.search.candidates import Candidates, Unit
from espresso.strategies import Choice


@dataclass(frozen=True)
class KernelArrays:
    """An evaluator's buffers: (which kernel, start of backward, two scratch states), and the job's arrays."""

    states: tuple[General, State, State, State]
    job: JobArrays


class Evaluator:
    """Makespans of strategies of one job, at one partition size.

    Args:
        units: in the order of their buckets.
        free: the paper's upper bound: compression and copies cost nothing, nothing contends.
    """

    def __init__(
        self,
        job: Job,
        units: Sequence[Unit],
        partition_bytes: int,
        payload: PayloadBytes = payload_bytes,
        *,
        free: bool = False,
        pricer: Pricer | None = None,
    ) -> None:
        costs = replace(job.costs, contention=PAPER_CONTENTION) if free else job.costs
        self.job = job
        self.units = tuple(units)
        self.partition_bytes = partition_bytes
        self.pricer = pricer or Pricer(costs, job.cluster, payload, free=free)
        self.candidates = self.pricer.remember(
            ("candidates", partition_bytes), lambda: Candidates(self.pricer, partition_bytes)
        )
        self._limits = limits_of(costs, job.cluster, job.forward_us + job.optimizer_us)
        self._general: General = None if costs.in_turn(job.cluster) else True
        self._gaps = np.diff(np.array(job.ready_us), prepend=0.0)
        self.buckets = np.array([unit.bucket for unit in units], dtype=np.int64)
        self._first_unit = np.searchsorted(self.buckets, np.arange(len(self._gaps) + 1)).astype(np.int64)
        self._sizes = list(dict.fromkeys(unit.size for unit in self.units))
        place = {size: index for index, size in enumerate(self._sizes)}
        self._size_of = np.array([place[unit.size] for unit in self.units])
        self.ready = np.zeros(len(self._gaps))
        self._loads = np.zeros(NUM_LANES)
        self.finish = np.zeros(len(units))
        parts = sum(self._partitions(unit) for unit in units)
        active = 0 if self._general is None else int(self._limits[ROOM_UNDER_WAY : ROOM_UNDER_WAY + NUM_LANES].sum())
        self._origin, self._start, self._scratch = (make_state(parts, active) for _ in range(3))
        reset(self._origin, self._gaps, job.cluster.num_servers > 0)
        self._advance = advance_serial if self._general is None else advance_general

    def _partitions(self, unit: Unit) -> int:
        return 1 if self.partition_bytes == 0 else -(-unit.num_bytes // self.partition_bytes) + 1

    def uniform(self, choice: Choice) -> Wholes:
        """The strategy that gives every unit the same choice."""
        only: Wholes = self.uniforms((choice,))[0]
        return only

    def uniforms(self, leaves: tuple[Choice, ...]) -> Wholes:
        """int64[leaves, units]: for every leaf the strategy that gives it to every unit."""
        by_size: Wholes = np.array([self.candidates.numbers(size, leaves) for size in self._sizes])
        return np.ascontiguousarray(by_size[self._size_of].T)

    def options(self, leaves: tuple[Choice, ...], *, prune: bool = True) -> list[Wholes]:
        """For every unit its candidates among ``leaves`` that can matter (:meth:`Candidates.distinct`)."""
        by_size = [self.candidates.distinct(size, leaves, prune=prune) for size in self._sizes]
        return [by_size[index] for index in self._size_of]

    def encode(self, choices: Sequence[Choice]) -> Wholes:
        """Candidate numbers for one choice per unit."""
        number = self.candidates.number
        return np.array(
            [number(unit.size, choice) for unit, choice in zip(self.units, choices, strict=True)],
            dtype=np.int64,
        )

    def decode(self, strategy: Wholes) -> list[Choice]:
        """One choice per unit for candidate numbers."""
        return [self.candidates.choices[number] for number in strategy]

    def makespan(self, strategy: Wholes) -> float:
        """First ready gradient to the latest finish; fills ``ready`` (buckets) and ``finish`` (units)."""
        copy_state(self._origin, self._scratch)
        return self._run(self._scratch, strategy, len(self._gaps) + 1)

    def best(self, strategy: Wholes, unit: int, numbers: Wholes, limit: float, *, hint: int = -1) -> tuple[int, float]:
        """The best candidate for one unit, the others fixed, if below ``limit``; else (-1, limit).

        ``hint`` is tried first, which changes nothing but how soon the others can be given up.
        """
        copy_state(self._origin, self._start)
        self._run(self._start, strategy, self.units[unit].bucket)
        best, time = best_of(
            self._general, self._start, self._scratch, unit, numbers, hint, strategy, limit, self._job()
        )
        return int(best), float(time)

    def batch(self, strategies: Wholes, limit: float = np.inf, *, cut: bool = False) -> tuple[int, float, Reals]:
        """(first best row below ``limit``, its makespan, all makespans) of int64[n, units].

        With ``cut`` the makespans of rows that cannot be the best are infinity.
        """
        times = np.empty(len(strategies))
        best, time = evaluate_batch(
            self._general, self._origin, self._scratch, strategies, limit, cut, times, self._job()
        )
        return int(best), float(time), times

    def kernel_arrays(self) -> KernelArrays:
        """What compiled searches take; valid until new candidates are made."""
        return KernelArrays((self._general, self._origin, self._start, self._scratch), self._job())

    def _run(self, state: State, strategy: Wholes, stop: int) -> float:
        return float(self._advance(state, strategy, stop, np.inf, self._job()))

    def _job(self) -> JobArrays:
        return (
            self._gaps, self._first_unit, *self.candidates.arrays(), self._limits, self._loads, self.ready, self.finish
        )  # fmt: skip


def evaluator_at(evaluator: Evaluator, partition_bytes: int) -> Evaluator:
    """The same units and prices at another partition size."""
    if evaluator.partition_bytes == partition_bytes:
        return evaluator
    return Evaluator(evaluator.job, evaluator.units, partition_bytes, pricer=evaluator.pricer)
