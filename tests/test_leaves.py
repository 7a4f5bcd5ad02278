"""Every leaf of the decision tree that runs on the training device, on real processes, with nothing lost.

Gradients are small integers, so that every order of additions gives the same exact average.
"""

from collections.abc import Sequence

import pytest

from benchmarks.exchange import Exchange, digest, exact_average, integers, make_buckets, planned, strategy_of
from benchmarks.leaves import PARTITION_BYTES, cases_for, wrong_on
from benchmarks.rank_pool import POOL
from espresso.comm.execute.executor import Assignment
from espresso.strategies import Bucket, Choice, Cluster, parse_option


@pytest.mark.slow
def test_every_leaf_on_two_nodes_of_two_ranks():
    cases = cases_for(Cluster(2, 2))
    assert len(cases) == 174 + 9
    assert not wrong_on(Cluster(2, 2), cases)


@pytest.mark.parametrize("cluster", [Cluster(4, 1), Cluster(1, 3)], ids=str)
def test_every_flat_leaf_on_one_level(cluster):
    cases = cases_for(cluster)
    assert len(cases) == 12 + 3
    assert not wrong_on(cluster, cases)


def test_other_dtypes():
    assert not wrong_on(Cluster(2, 2), cases_for(Cluster(2, 2))[::12], ("float64", "float16", "bfloat16"))


# Several choices in one bucket: groups that are not one stretch of it.

MIXED = (
    "flat.allreduce",
    "comp > flat.allgather > dec",
    "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather",
    "comp > intra.gather > inter.gather > inter.broadcast > intra.broadcast > dec",
    "flat.reduce_scatter > flat.allgather",
)


def mixed_choices(buckets: Sequence[Bucket]) -> dict[str, Choice]:
    names = [slot.tensor for bucket in buckets for slot in bucket.slots]
    options = [parse_option(text) for text in MIXED]
    return {name: Choice(options[index % len(options)]) for index, name in enumerate(names)}


def run_mixed(rank: int, dtype: str) -> list[str]:
    exchange = Exchange(2)
    exchange.warm_up({"none"}, [dtype])
    buckets = make_buckets(
        {f"a{i}": 101 * i % 700 for i in range(12)}, {f"b{i}": 997 * i % 3000 for i in range(7)}, dtype=dtype
    )
    strategy = strategy_of(buckets, exchange.groups.cluster, mixed_choices(buckets), partition_bytes=PARTITION_BYTES)
    plain = Assignment(strategy)
    digests = []
    for draw, assignment in enumerate((plain, planned(plain, buckets), plain)):
        got = exchange.step(assignment, buckets, integers(buckets, rank, 4, draw))
        assert digest(got) == digest(exact_average(buckets, 4, draw))
        digests.append(digest(got))
    exchange.close()
    return digests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_choices_in_one_bucket(dtype):
    answers = POOL.run(run_mixed, dtype)
    assert all(answer == answers[0] for answer in answers)
