"""Every leaf of the decision tree, carried out.

All 4341 leaves with ``none`` and the 36 summable ones with fp16, on two nodes of two ranks (real processes,
Gloo), on integer-valued gradients: every result is the exact average, bit-identical on all ranks.

    python -m benchmarks.leaves
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist
from rich.progress import track

from benchmarks import results
from benchmarks.exchange import (
    Exchange,
    digest,
    exact_average,
    integers,
    make_buckets,
    planned,
    strategy_of,
)
from benchmarks.rank_pool import POOL, RankPool
from espresso.comm.execute.executor import Assignment
from espresso.strategies import PLAIN, Choice, Cluster, CompressorSpec, Device, Option, options_for

SAMPLE = 4
"""On three nodes of two ranks every fourth leaf of the training device runs."""

CHUNK = 64
"""Leaves between two steps of the progress bar."""

TRAINING = (Device.TRAINING,)
PARTITION_BYTES = 16384

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


def run_cases(rank: int, cluster: Cluster, cases: Sequence[Case], dtypes: Sequence[str]) -> tuple[list[str], list[str]]:
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


def wrong_on(
    cluster: Cluster, cases: Sequence[Case], dtypes: Sequence[str] = ("float32",), pool: RankPool = POOL
) -> list[str]:
    """Run the cases on the first ranks of the pool; what went wrong, ranks that differ included."""
    answers = pool.run(run_cases, cluster, cases, dtypes, deadline_s=300)[: cluster.num_ranks]
    wrong = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(answers) for text in texts]
    for rank, (_, digests) in enumerate(answers):
        if digests != answers[0][1]:
            wrong.append(f"rank {rank} has other bits than rank 0")
        if len(digests) != 2 * len(cases) * len(dtypes):
            wrong.append(f"rank {rank} ran {len(digests)} exchanges for {len(cases)} leaves")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaves", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take every n-th leaf only (writes no result)")
    arguments = parser.parse_args(argv)
    began = time.perf_counter()
    two_by_two = Cluster(2, 2)
    cases = cases_for(two_by_two, (Device.TRAINING, Device.OFFLOAD))[:: arguments.every]
    wrong: list[str] = []
    for start in track(range(0, len(cases), CHUNK), description="leaves"):
        wrong += wrong_on(two_by_two, cases[start : start + CHUNK])
    others = {}
    for cluster in (Cluster(4, 1), Cluster(1, 3)):
        flat = cases_for(cluster, (Device.TRAINING, Device.OFFLOAD))[:: arguments.every]
        wrong += wrong_on(cluster, flat)
        others[str(cluster)] = len(flat)
    POOL.close()
    six, three_by_two = RankPool(6), Cluster(3, 2)
    sample = cases_for(three_by_two)[:: SAMPLE * arguments.every]
    wrong += wrong_on(three_by_two, sample, pool=six)
    six.close()
    others[str(three_by_two)] = len(sample)
    config = {
        "cluster": str(two_by_two),
        "backend": "gloo",
        "exchanges_per_leaf": "one in plain order, one list-scheduled",
        "bucket_elements": [sum(sizes.values()) for sizes in SIZES],
    }
    row = {
        "leaves": sum(not option.is_summable for option, _ in cases),
        "summable_leaves": sum(option.is_summable for option, _ in cases),
        "leaves_on_other_clusters": others,
        "wrong": wrong,
        "seconds": round(time.perf_counter() - began, 1),
    }
    result = results.record(config, 0, [row])
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if arguments.every == 1:
        results.write(results.RESULTS_DIR / "leaves.json", result)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
