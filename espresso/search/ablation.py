"""Ablation: the search with one dimension of the space restricted at a time (Espresso, EuroSys '23, figure 15).

Each restriction leaves out leaves of the tree, or the partition sizes; the rest is searched and certified as
ever, so that every row has a gap of its own and a difference between rows is one of the space, not of luck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from espresso.model.job import Job
from espresso.model.pricing import shared_pricer
from espresso.search.candidates import every_choice, partition_sizes, units_of
from espresso.search.evaluator import Evaluator
from espresso.search.refine import Start, refine
from espresso.strategies import Choice, CompressorSpec, Device, Phase, Scope


@dataclass(frozen=True, slots=True)
class AblationRow:
    """A restricted search: its best strategy's iteration time and a bound for its space."""

    name: str
    predicted_us: float
    lower_bound_us: float


def _one_device(device: Device) -> Callable[[Choice], bool]:
    return lambda choice: all(step.device in (None, device) for step in choice.option.steps)


def _keeps(choice: Choice, scope: Scope) -> bool:
    return not any(step.scope is scope and step.form.value == "payload" for step in choice.option.steps)


def _phases(choice: Choice) -> set[Phase]:
    outer = [step for step in choice.option.steps if step.scope in (Scope.INTER, Scope.FLAT)]
    return {step.phase for step in outer if step.phase is not None}


EVERYTHING = "everything"

RESTRICTIONS: tuple[tuple[str, Callable[[Choice], bool]], ...] = (
    ("all tensors compressed", lambda choice: choice.option.is_compressed),
    ("training device only", _one_device(Device.TRAINING)),
    ("offload only", _one_device(Device.OFFLOAD)),
    ("one device per tensor", lambda c: len({s.device for s in c.option.steps if s.device}) <= 1),
    ("hierarchical schemes only", lambda choice: choice.option.is_hierarchical),
    ("flat schemes only", lambda choice: not choice.option.is_hierarchical),
    ("indivisible between nodes", lambda choice: _phases(choice) <= {Phase.WHOLE}),
    ("divisible between nodes", lambda choice: Phase.WHOLE not in _phases(choice)),
    ("no compressed data inside a node", lambda choice: _keeps(choice, Scope.INTRA)),
    ("one compression at most", lambda choice: choice.option.num_compressions <= 1),
)


def ablate(job: Job, specs: Sequence[CompressorSpec]) -> list[AblationRow]:
    """Search each restricted space; spaces that are empty or equal to the whole on this job are left out.

    The whole space is searched last and begins with what the others found, so that none of them is better.
    """
    units = units_of(job)
    sizes = partition_sizes(units)
    whole = every_choice(job, specs)
    beside = job.forward_us + job.optimizer_us
    evaluator = Evaluator(job, units, sizes[0], pricer=shared_pricer(job.costs, job.cluster))
    winners: list[Start] = []

    def searched(name: str, leaves: tuple[Choice, ...], tried: Sequence[int]) -> AblationRow:
        index, makespan, _ = evaluator.batch(evaluator.uniforms(leaves), cut=True)
        start = Start((leaves[index],) * len(units), sizes[0], makespan)
        found = refine(job, evaluator, [start, *(winners if name == EVERYTHING else ())], leaves, tried)
        choices = tuple(found.evaluator.decode(found.strategy))
        winners.append(Start(choices, found.evaluator.partition_bytes, found.makespan_us))
        return AblationRow(name, found.makespan_us + beside, found.bound_us + beside)

    rows: list[AblationRow] = []
    for name, keeps in (*RESTRICTIONS, ("no partitions", lambda choice: True)):
        leaves = tuple(choice for choice in whole if keeps(choice))
        tried = sizes[:1] if name == "no partitions" else sizes
        if leaves and (len(leaves) < len(whole) or tried != sizes):
            rows.append(searched(name, leaves, tried))
    return [searched(EVERYTHING, whole, sizes), *rows]
