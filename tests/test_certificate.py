"""The certificate of a unit with which more of its bucket may travel: a plan may cut both finer than it alone."""

import pytest

from espresso.model.pricing import Pricer
from espresso.model.timeline import first_come
from espresso.search.candidates import every_choice, units_of
from espresso.search.evaluator import Evaluator
from espresso.search.refine import certify_units
from espresso.search.search import search
from espresso.search.terms import Terms
from espresso.strategies import NONE, Bucket, Choice, Mode, Slot, Strategy, plan
from espresso.strategies.constraints import Constraints
from tests.timeline_jobs import TOY, compute, make_job

WEIGHT, BIAS, LIMIT = 655_360, 16, 1_310_720
"""The weight alone is cut in two at this size, with its bias in three."""


@pytest.mark.parametrize(("beta", "encode_us", "decode_us"), [(16.0, 0.1, 0.1), (4.0, 1.0, 0.2)])
def test_no_strategy_is_below_it_whatever_travels_along(beta, encode_us, decode_us):
    bucket = Bucket(0, (Slot("t0", 0, WEIGHT), Slot("t1", WEIGHT, BIAS)))
    job = make_job(
        [WEIGHT, BIAS], [0, 0], beta=beta, costs=compute(encode_us, decode_us),
        mode=Mode.DDP, buckets=(bucket,), bucket_ready_us=(10.0,),
    )  # fmt: skip
    exact = Constraints(exact_vectors=BIAS)
    units, leaves = units_of(job, exact), every_choice(job, (TOY,))
    assert [unit.tensors for unit in units] == [("t0",)]
    pricer = Pricer(job.costs, job.cluster)

    def takes_us(leaf: Choice, size: int) -> float:
        choices = {"t0": leaf, "t1": Choice(leaf.option, NONE)}
        strategy = Strategy(job.tensors, choices, job.cluster, partition_bytes=size)
        return first_come(plan(strategy, job.laid_out, mode=job.mode), job, pricer=pricer).makespan_us

    riding = [leaf for leaf in leaves if leaf.option.carries_payloads]
    best_us = min(takes_us(leaf, LIMIT) for leaf in riding)
    bound_us = certify_units(job, Evaluator(job, units, 0, pricer=pricer), leaves, (0, LIMIT), 1.1 * best_us)
    assert 0.95 * best_us < bound_us <= best_us
    found = search(job, TOY, partitions=(0, LIMIT), terms=Terms(constraints=exact))
    assert bound_us <= found.predicted_us <= best_us * (1 + 1e-9)
