"""What a search found: the strategy, its prediction, its bounds, and what it was compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from espresso.model.job import Job
from espresso.model.payload_sizes import compressed, offloaded
from espresso.model.pricing import Pricer
from espresso.model.timeline import Timeline, first_come, simulate
from espresso.search.terms import Terms
from espresso.strategies import Plan, Strategy, plan


@dataclass(frozen=True)
class Ranked:
    """A strategy with its predicted iteration time and where it came from."""

    name: str
    strategy: Strategy
    predicted_us: float
    job: Job
    pricer: Pricer

    @cached_property
    def timeline(self) -> Timeline:
        """Of the strategy laid over the job, lanes serving first come first served."""
        laid = plan(self.strategy, self.job.laid_out, mode=self.job.mode, host_copies=self.job.host_copies)
        return first_come(laid, self.job, pricer=self.pricer)

    @property
    def plan(self) -> Plan:
        """Its plan, in that order."""
        return self.timeline.plan

    @cached_property
    def late_us(self) -> float:
        """The iteration's time where every exchange takes what one in ten does: the prediction, where none vary."""
        costs = self.job.costs
        if not any(curve.spread_us for curve in costs.links.curves):
            return self.predicted_us
        pricer = Pricer(replace(costs, links=costs.links.late), self.job.cluster)
        return max(simulate(self.plan, self.job, pricer=pricer).iteration_us, self.predicted_us)


@dataclass(frozen=True, slots=True)
class CapRow:
    """A bucket size of DDP and the best iteration that was found with it; None: the buckets as they are."""

    bucket_cap_mb: float | None
    num_buckets: int
    predicted_us: float
    uncompressed_us: float


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        chosen: the best; its plan is laid out when it is first asked for.
        predicted_us: its iteration time: forward, to the latest finish, optimizer.
        uncompressed_us: flat allreduce of everything.
        upper_bound_us: the paper's upper bound on throughput, as an iteration time: compression free, nothing
            contending. (Of the best strategy found under that assumption: not a certificate.)
        lower_bound_us: certified (0: not asked for): no strategy of the space is predicted below it (see
            :mod:`espresso.search.bounds`). In DDP mode the space is one choice per bucket, or per part where the
            search split one.
        search_ms: wall time of everything.
        algorithms_ms: of baselines and Algorithms 1 and 2 alone.
        certificate_ms: of the certificate alone.
        improve_ms: of the improvement alone.
        alternatives: the best distinct strategies, best first, the chosen one among them, never plain.
        baselines: name to predicted iteration time.
        num_candidates: leaves considered per tensor before deduplication.
        offload_capped: whether Algorithm 2's product was larger than its cap.
        caps: DDP's bucket sizes that were searched; empty where none were.
        bucket_cap_mb: the one to set; None: leave the buckets as they are.
        error: gradients that the strategy owes; None where that is not known.
        residual_bytes: that its residuals take on a rank, at most.
        terms: that it was searched under.
        kinds_left_out, fewer_kinds_cost_us: how many kinds of choices were merged into others, and what that takes.
    """

    chosen: Ranked
    predicted_us: float
    uncompressed_us: float
    upper_bound_us: float
    lower_bound_us: float
    search_ms: float
    algorithms_ms: float
    certificate_ms: float
    improve_ms: float
    alternatives: tuple[Ranked, ...]
    baselines: dict[str, float]
    num_candidates: int
    offload_capped: bool
    caps: tuple[CapRow, ...] = ()
    error: float | None = None
    residual_bytes: float = 0.0
    terms: Terms = field(default_factory=Terms)
    kinds_left_out: int = 0
    fewer_kinds_cost_us: float = 0.0

    @property
    def error_budget(self) -> float | None:
        """Most that it might owe."""
        return self.terms.error_budget

    @property
    def bucket_cap_mb(self) -> float | None:
        """See above."""
        return self.strategy.bucket_cap_mb

    @property
    def strategy(self) -> Strategy:
        """The best strategy found."""
        return self.chosen.strategy

    @property
    def plan(self) -> Plan:
        """It laid over the job, in its total order."""
        return self.chosen.plan

    @property
    def late_us(self) -> float:
        """See :attr:`Ranked.late_us`."""
        return self.chosen.late_us

    @property
    def gap(self) -> float:
        """Iteration time over the certified bound, minus one."""
        return self.predicted_us / self.lower_bound_us - 1 if self.lower_bound_us else 0.0

    @property
    def num_tensors(self) -> int:
        return len(self.strategy.tensors)

    @property
    def num_compressed(self) -> int:
        return len(compressed(self.strategy))

    @property
    def num_offloaded(self) -> int:
        return len(offloaded(self.strategy))
