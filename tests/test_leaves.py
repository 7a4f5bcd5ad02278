"""Every leaf of the decision tree that runs on the training device, on real processes, with nothing lost.

Gradients are small integers, so that every order of additions gives the same exact average.
"""

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from espresso.comm import Assignment
from espresso.strategies import (
    PLAIN,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Option,
    options_for,
    parse_option,
)
from tests.exchange import (
    Exchange,
    digest,
    exact_average,
    integers,
    make_buckets,
    planned,
    strategy_of,
)
from tests.rank_pool import POOL

TRAINING = (Device.TRAINING,)
PARTITION_BYTES = 8192

SIZES = (
    {"a": 1000, "b": 7, "empty": 0, "c": 333},
    {"d": 5000, "e": 1, "f": 2000},  # cut into partitions, d in the middle
    {"g": 3},  # less than one aligned shard: most ranks hold nothing
    {"h": 4097},
)

Case = tuple[Option, str]


def cases_for(cluster: Cluster, devices: tuple[Device, ...] = TRAINING) -> list[Case]:
    """Every leaf with ``none``, and the summable leaves with fp16, which is exact on small integers."""
    leaves = [(option, "none") for option in options_for(cluster, devices=devices)]
    both = options_for(cluster, devices=devices, summable=True)
    return leaves + [(option, "fp16") for option in both if option.is_summable]


def run_cases(
    rank: int, cluster: Cluster, cases: Sequence[Case], dtypes: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Run every case twice: in plain order, then in a list-scheduled one on other numbers.

    Returns:
        What went wrong, and a digest of every result.
    """
    members = list(range(cluster.num_ranks))
    group = dist.new_group(members, backend="gloo")
    if rank not in members:
        return [], []
    exchange = Exchange(cluster.ranks_per_node, process_group=group)
    exchange.warm_up({"none", "fp16"}, dtypes)
    num_ranks = exchange.groups.num_ranks
    wrong: list[str] = []
    digests: list[str] = []
    for dtype in dtypes:
        buckets = make_buckets(*SIZES, dtype=dtype)
        mine = [integers(buckets, rank, num_ranks, draw) for draw in range(2)]
        wanted = [exact_average(buckets, num_ranks, draw) for draw in range(2)]
        for option, compressor in cases:
            choice = Choice(option, CompressorSpec(compressor)) if option.is_compressed else PLAIN
            strategy = strategy_of(buckets, exchange.groups.cluster, choice, partition_bytes=PARTITION_BYTES)
            plain = Assignment(strategy)
            for draw, assignment in enumerate((plain, planned(plain, buckets))):
                got = exchange.step(assignment, buckets, mine[draw])
                digests.append(digest(got))
                if digests[-1] != digest(wanted[draw]):
                    wrong.append(f"{option} with {compressor} on {dtype}, {('plain', 'planned')[draw]} order")
    exchange.close()
    return wrong, digests


def check(cluster: Cluster, cases: Sequence[Case], dtypes: Sequence[str] = ("float32",)) -> None:
    answers = POOL.run(run_cases, cluster, cases, dtypes, deadline_s=120)[: cluster.num_ranks]
    for rank, (wrong, digests) in enumerate(answers):
        assert not wrong, f"rank {rank}: {len(wrong)} wrong: {wrong[:5]}"
        assert len(digests) == 2 * len(cases) * len(dtypes)
        assert digests == answers[0][1]


def test_every_leaf_on_two_nodes_of_two_ranks():
    cases = cases_for(Cluster(2, 2))
    assert len(cases) == 174 + 9
    check(Cluster(2, 2), cases)


@pytest.mark.parametrize("cluster", [Cluster(4, 1), Cluster(1, 3)], ids=str)
def test_every_flat_leaf_on_one_level(cluster):
    cases = cases_for(cluster)
    assert len(cases) == 12 + 3
    check(cluster, cases)


def test_other_dtypes():
    check(Cluster(2, 2), cases_for(Cluster(2, 2))[::12], ("float64", "float16", "bfloat16"))


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
    strategy = strategy_of(
        buckets, exchange.groups.cluster, mixed_choices(buckets), partition_bytes=PARTITION_BYTES
    )
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
