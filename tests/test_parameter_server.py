"""The parameter server: every leaf against exact sums, both residuals, an independent reference, changing plans."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.exchange import (
    digest,
    exact_average,
    integers,
    make_buckets,
    numels_of,
    planned,
    reduce_bucket,
    snapshot,
    strategy_of,
)
from benchmarks.rank_pool import NUM_RANKS, POOL
from espresso.comm.execute.executor import Assignment
from espresso.comm.parameter_server.transport import Channel
from espresso.comm.parameter_server.wire import Key
from espresso.comm.program import servers as servers_program
from espresso.compressors.base import Correction
from espresso.strategies import NONE, Choice, Cluster, CompressorSpec, Site, parse_option, plan
from espresso.strategies.tree import server_options, two_way_option
from tests.backends import DEVICES, build_for
from tests.servers import NUM_SERVERS, client, exchange_over, serving

TWO_WAY = str(two_way_option(Cluster(2, 1, 1)))
RAW = "flat.push > sum@server > flat.pull"
ONE_WAY = "comp > flat.push > dec@server > flat.pull"
SIZES = ({"a": 1021, "b": 7}, {"c": 333, "d": 64})
TOPK = "topk:ratio=0.05,raw_below=1"


@pytest.fixture(scope="module")
def servers():
    # So little memory that pushes must wait for it: back-pressure is part of every test here.
    with serving(POOL, memory_bytes=8192) as running:
        yield running


def choice_of(option: str, spec: str) -> Choice:
    leaf = parse_option(option)
    return Choice(leaf, CompressorSpec.parse(spec) if leaf.is_compressed else NONE)


# -- what comes back -------------------------------------------------------------------------------


def run_every_leaf(rank: int, dtype: str) -> list[tuple[str, list[str], bool]]:
    """(leaf, digests of its results, whether they are exact) for a compressor that loses nothing."""
    buckets = make_buckets(*SIZES, dtype=dtype)
    found = []
    for cluster in (Cluster(4, 1, NUM_SERVERS), Cluster(2, 2, NUM_SERVERS)):
        exchange = exchange_over(4, NUM_SERVERS, rank, cluster.ranks_per_node)
        for option in server_options(cluster.is_hierarchical):
            spec = CompressorSpec("none") if option.is_compressed else NONE
            strategy = strategy_of(buckets, cluster, Choice(option, spec), partition_bytes=1024)
            results = []
            for draw in range(2):
                assignment = Assignment(strategy)
                assignment = planned(assignment, buckets) if draw else assignment
                results.append(exchange.step(assignment, buckets, integers(buckets, rank, NUM_RANKS, draw)))
            exact = all(
                torch.equal(mine, right)
                for draw in range(2)
                for mine, right in zip(results[draw], exact_average(buckets, NUM_RANKS, draw), strict=True)
            )
            found.append((str(option), [digest(result) for result in results], exact))
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_leaf_averages_exactly_and_alike(servers, dtype):
    everybody = POOL.run(run_every_leaf, dtype)
    assert len(everybody[0]) == 7 + 21
    assert all(mine == everybody[0] for mine in everybody)
    assert [leaf for leaf, _, exact in everybody[0] if not exact] == []


def gains_at(rank: int, scales: tuple[float, ...]) -> list[tuple[float, float]]:
    """By a strategy's scale of gains the gain of this rank's residuals, and of those that servers are told to keep."""
    buckets, found, told = make_buckets(*SIZES), [], []
    exchange, made = exchange_over(NUM_RANKS, NUM_SERVERS, rank), servers_program.Key

    def key(**settings: Any) -> Key:
        told.append(settings["gain"])
        return made(**settings)

    with patch.object(servers_program, "Key", key):
        for scale in scales:
            exchange.renew(gain=None)
            strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(TWO_WAY, "efsignsgd:raw_below=8"))
            exchange.step(
                Assignment(replace(strategy, gain_scale=scale)), buckets, integers(buckets, rank, NUM_RANKS, 0)
            )
            exchange.executor.conclude()
            (here,), (there,) = {each.gain for each in exchange.store.live}, set(told)
            found.append((here, there))
            told.clear()
    return found


def test_servers_give_back_as_much_of_what_they_owe_as_ranks(servers):
    scales = (1.0, 4.0, 1 / 4)
    for gains in POOL.run(gains_at, scales):
        assert gains == [(scale / 16, scale / 16) for scale in scales]


def run_on_a_device(rank: int, where: str) -> list[tuple[str, bool, bool]]:
    """(leaf and compressor, results are the host's, residuals too) for a model on a device."""
    from tests.test_device_executor import DeviceExchange

    buckets = make_buckets(*SIZES)
    host = exchange_over(NUM_RANKS, NUM_SERVERS, rank)
    assert host is not None
    device = DeviceExchange(1, where, client=client())
    device.groups.cluster = host.groups.cluster
    found = []
    for option, spec in (
        (RAW, "none"), (ONE_WAY, TOPK), (TWO_WAY, TOPK), (TWO_WAY, "efsignsgd:raw_below=8"),
        (TWO_WAY.replace("comp ", "comp@offload ", 1), TOPK), (TWO_WAY, "topk:ratio=1,raw_below=1"),
    ):  # fmt: skip
        strategy = strategy_of(buckets, host.groups.cluster, choice_of(option, spec), partition_bytes=1024)
        kept, same = [], True
        digests = []
        for exchange in (host, device):
            exchange.renew()
            mine = []
            for step in range(3):
                random = np.random.default_rng([step, rank])
                gradients = [torch.from_numpy(random.standard_normal(b.numel).astype(np.float32)) for b in buckets]
                assignment = Assignment(strategy)
                assignment = exchange.planned(assignment, buckets) if step else assignment
                mine.append(digest(exchange.step(assignment, buckets, gradients)))
            exchange.executor.conclude()
            kept.append(exchange.kept(numels_of(buckets)))
            digests.append(mine)
        same = all(np.array_equal(kept[0][name], kept[1][name]) for name in kept[0])
        found.append((f"{option} {spec}", digests[0] == digests[1], same))
    device.close()
    return found


@pytest.mark.parametrize("where", DEVICES)
def test_a_device_goes_through_servers_like_the_host(servers, where):
    build_for(where)
    everybody = POOL.run(run_on_a_device, where)
    assert [row for rows in everybody for row in rows if not (row[1] and row[2])] == []


def run_in_a_drawn_order(rank: int) -> bool:
    """A round whose total order has nothing of the keys' own; whoever is last completes one key after the other."""
    buckets = make_buckets(*SIZES)
    exchange = exchange_over(NUM_RANKS, 1, rank)
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(RAW, "none"), partition_bytes=128)
    laid = plan(strategy, buckets)
    drawn = np.random.default_rng(3).permutation(len(laid.partitions))
    order = sorted(laid.order, key=lambda task: drawn[laid.tasks[task].partition])
    time.sleep(0.1 * rank)
    found = exchange.step(Assignment(strategy, tuple(order), buckets), buckets, integers(buckets, rank, NUM_RANKS))
    return all(map(torch.equal, found, exact_average(buckets, NUM_RANKS)))


def test_an_engine_answers_in_the_order_of_the_plan(servers, monkeypatch):
    server = servers[0]
    heard, said = ({worker: [] for worker in range(NUM_RANKS)} for _ in range(2))

    def noted(call, notes, takes_s):
        def to(channel, peer, tag, data):
            if channel is Channel.DATA:
                notes[peer].append(tag)
                time.sleep(takes_s)  # answers take a while: what has come meanwhile waits together
            return call(channel, peer, tag, data)

        return to

    monkeypatch.setattr(server.transport, "receive", noted(server.transport.receive, heard, 0.0))
    monkeypatch.setattr(server.transport, "send", noted(server.transport.send, said, 0.002))
    assert all(POOL.run(run_in_a_drawn_order))
    engines = {summed.tag: summed.engine for summed in server._held}
    assert {engines[tag] for tag in heard[0]} == {0, 1}
    assert len(heard[0]) > 20
    assert heard[0] != sorted(heard[0])
    for engine in (0, 1):
        orders = [[tag for tag in tags if engines[tag] == engine] for tags in (*heard.values(), *said.values())]
        assert all(order == orders[0] for order in orders)


# -- residuals -------------------------------------------------------------------------------------


def run_telescoping(rank: int, workers: int, num_servers: int, rounds: int):
    """The sum of what came back times the workers, of what went in, what is kept, and all digests."""
    exchange = exchange_over(workers, num_servers, rank)
    if exchange is None:
        return None
    exchange.warm_up([TOPK])
    buckets = make_buckets(*SIZES)
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(TWO_WAY, TOPK), partition_bytes=1024)
    numels = numels_of(buckets)
    came = {name: np.zeros(numel) for name, numel in numels.items()}
    went = {name: np.zeros(numel) for name, numel in numels.items()}
    hashes = []
    for step in range(rounds):
        # Workers are not always a power of two: multiples of them keep averages exact.
        gradients = integers(buckets, rank, workers, step)
        assignment = Assignment(strategy)
        results = exchange.step(planned(assignment, buckets) if step == 1 else assignment, buckets, gradients)
        hashes.append(digest(results))
        for bucket, gradient, result in zip(buckets, gradients, results, strict=True):
            for slot in bucket.slots:
                part = slice(slot.offset, slot.offset + slot.numel)
                went[slot.tensor] += gradient[part].double().numpy()
                came[slot.tensor] += result[part].double().numpy() * workers
    kept = exchange.kept(numels)
    sites = exchange.sites()
    return came, went, kept, hashes, sites


def check_telescoping(workers: int, num_servers: int, rounds: int) -> None:
    answers = [a for a in POOL.run(run_telescoping, workers, num_servers, rounds) if a is not None]
    assert len(answers) == workers
    assert all(answer[3] == answers[0][3] for answer in answers)  # bit-identical in every round
    for name in answers[0][0]:
        sent = answers[0][0][name]
        left = sum(answer[2][name] for answer in answers)
        put = sum(answer[1][name] for answer in answers)
        assert np.array_equal(sent + left, put), (workers, num_servers, name)
    # Both residuals hold something: compression happened. Each worker answers for a share of the servers'.
    assert all(answer[4] == {"local", "server"} for answer in answers)


@pytest.mark.parametrize("num_servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_nothing_is_lost_over_both_residuals(servers, workers, num_servers):
    """From the third round on all rounds run the same code; most rounds are of the job with the most keys in flight."""
    check_telescoping(workers, num_servers, 100 if workers == NUM_RANKS and num_servers == NUM_SERVERS else 20)


def run_shared_draws(rank: int) -> tuple[set[str], bool]:
    exchange = exchange_over(NUM_RANKS, 2, rank)
    spec = "randomk:ratio=0.1,raw_below=1"
    exchange.warm_up([spec])
    buckets = make_buckets(*SIZES)
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(TWO_WAY, spec))
    results = [
        exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS, draw)) for draw in range(3)
    ]
    return exchange.sites(), bool(results[-1][0].any())


def test_shared_draws_make_the_second_compression_lossless(servers):
    for sites, moved in POOL.run(run_shared_draws):
        assert moved
        assert sites == {"local"}  # nothing is left at a server


# -- an independent reference ----------------------------------------------------------------------


def scaled_sign(x: np.ndarray) -> np.ndarray:
    return np.abs(x).mean() * np.where(x < 0, -1.0, 1.0)


def reference(gradients: list[list[dict[str, np.ndarray]]]) -> list[dict[str, np.ndarray]]:
    """Two-way scaled sign by the book, in float64: one scale for each tensor, residuals at both ends."""
    workers = len(gradients[0])
    local = [{name: np.zeros_like(g) for name, g in gradients[0][0].items()} for _ in range(workers)]
    server = {name: np.zeros_like(g) for name, g in gradients[0][0].items()}
    averages = []
    for step in gradients:
        average = {}
        for name in server:
            total = server[name].copy()
            for worker in range(workers):
                q = step[worker][name] + local[worker][name]
                sent = scaled_sign(q)
                local[worker][name] = q - sent
                total += sent
            answer = scaled_sign(total)
            server[name] = total - answer
            average[name] = answer / workers
        averages.append(average)
    return averages


STEPS = 8
SIGN = "efsignsgd:block=0,raw_below=1"


def gradient(rank: int, step: int, numel: int) -> np.ndarray:
    return np.random.default_rng([rank, step, numel]).standard_normal(numel).astype(np.float32)


def run_two_way(rank: int) -> list[dict[str, np.ndarray]]:
    exchange = exchange_over(NUM_RANKS, 2, rank)
    exchange.warm_up([SIGN])
    buckets = make_buckets(*SIZES)
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(TWO_WAY, SIGN))
    found = []
    for step in range(STEPS):
        flat = [
            torch.from_numpy(np.concatenate([gradient(rank, step, slot.numel) for slot in bucket.slots]))
            for bucket in buckets
        ]
        results = exchange.step(Assignment(strategy), buckets, flat)
        found.append(
            {
                slot.tensor: result[slot.offset : slot.offset + slot.numel].numpy().copy()
                for bucket, result in zip(buckets, results, strict=True)
                for slot in bucket.slots
            }
        )
    return found


def test_two_way_equals_an_independent_reference(servers):
    found = POOL.run(run_two_way)
    numels = numels_of(make_buckets(*SIZES))
    draws = [
        [{name: gradient(rank, step, n).astype(float) for name, n in numels.items()} for rank in range(NUM_RANKS)]
        for step in range(STEPS)
    ]
    for mine, right in zip(found[0], reference(draws), strict=True):
        for name, values in right.items():
            np.testing.assert_allclose(mine[name], values, rtol=2e-4, atol=2e-5)


# -- plans that change, checkpoints, non-finite gradients --------------------------------------------


def run_changes(rank: int) -> dict[str, object]:
    """Keep the sum through re-cuts, other servers, other leaves, a NaN, a checkpoint on one server fewer."""
    exchange = exchange_over(NUM_RANKS, 3, rank)
    cluster, buckets = exchange.groups.cluster, make_buckets(*SIZES)
    numels = numels_of(buckets)
    two_way = strategy_of(buckets, cluster, choice_of(TWO_WAY, TOPK), partition_bytes=1024)
    recut = strategy_of(buckets, cluster, choice_of(TWO_WAY, TOPK), partition_bytes=2048)
    raw = strategy_of(buckets, cluster, choice_of(RAW, TOPK))
    balance_of = {name: np.zeros(numel) for name, numel in numels.items()}

    def step(strategy, draw, spoil=False):
        gradients = integers(buckets, rank, NUM_RANKS, draw)
        if spoil and rank == 2:
            gradients[0][5] = float("nan")
        results = exchange.step(Assignment(strategy), buckets, gradients)
        for bucket, given, result in zip(buckets, gradients, results, strict=True):
            for slot in bucket.slots if not spoil else ():
                part = slice(slot.offset, slot.offset + slot.numel)
                balance_of[slot.tensor] += given[part].double().numpy()
                if rank == 0:
                    balance_of[slot.tensor] -= result[part].double().numpy() * NUM_RANKS
        return results

    for draw in range(3):
        step(two_way, draw)

    def kept_by_all():  # after everybody has done what was done before
        exchange.groups.barrier()
        everybody = exchange.groups.all_objects(exchange.kept(numels))
        return {name: sum(theirs[name] for theirs in everybody) for name in numels}

    before = kept_by_all()
    spoilt = step(two_way, 50, spoil=True)
    after = kept_by_all()
    same = all(np.array_equal(before[name], after[name]) for name in numels)
    for draw in range(3, 6):
        step(recut, draw)
    # Other units and back again: doubling is exact.
    twice = kept_by_all()
    exchange.store.rescale(dict.fromkeys(numels, 2.0))
    doubled = kept_by_all()
    same = same and all(np.array_equal(doubled[name], 2 * twice[name]) for name in numels)
    exchange.store.rescale(dict.fromkeys(numels, 0.5))
    exchange.groups.barrier()
    # Save, load over two servers instead of three, go on.
    pieces, carry = snapshot(exchange.store)
    client().num_servers = 2
    exchange.groups.cluster = replace(cluster, num_servers=2)
    exchange.renew()
    exchange.store.load(pieces, carry, numels)
    loaded = exchange.kept(numels)
    for draw in range(6, 9):
        step(two_way, draw)
    kept = exchange.kept(numels)
    server_held = "server" in exchange.sites()
    step(raw, 9)
    step(raw, 10)
    drained = exchange.kept(numels)
    return {
        "nan": bool(torch.isnan(spoilt[0][:64]).all()) and bool(torch.isfinite(spoilt[1]).all()),
        "same": same,
        "loaded": loaded,
        "saved": {name: sum_of(pieces, carry, name, numel) for name, numel in numels.items()},
        "kept": kept,
        "drained": drained,
        "balance": balance_of,
        "server_held": server_held,
    }


def sum_of(pieces, carry, name, numel):
    total = np.zeros(numel)
    for (tensor, _), parts in pieces.items():
        for start, values, _ in parts if tensor == name else ():
            total[start : start + values.size] += values
    return total + carry.get(name, 0)


def test_changes_of_plan_servers_and_a_nan_lose_nothing(servers):
    answers = POOL.run(run_changes)
    assert all(answer["nan"] and answer["same"] for answer in answers)
    assert answers[0]["server_held"]
    for name in numels_of(make_buckets(*SIZES)):
        assert all(np.array_equal(answer["loaded"][name], answer["saved"][name]) for answer in answers)
        assert not any(answer["drained"][name].any() for answer in answers)
        assert not sum(answer["balance"][name] for answer in answers).any(), name


def run_gains(rank: int, spec: str) -> tuple[dict[str, np.ndarray], float, bool]:
    """What is missing after rounds with the compressor's own gain, over 3, 1 and 2 servers, coded, plain and raw."""
    exchange = exchange_over(NUM_RANKS, 3, rank)
    assert exchange is not None
    cluster, buckets = exchange.groups.cluster, make_buckets(*SIZES)
    numels = numels_of(buckets)
    missing = {name: np.zeros(numel) for name, numel in numels.items()}
    largest, at_servers, draw = 0.0, False, 0
    pieces, carry = {}, {}
    # Half of all elements is more than plain numbers: what was kept moves to keys that go plain.
    plain = "topk:ratio=0.9,raw_below=1"
    for num_servers, given, cut_at in ((3, spec, 1024), (1, spec, 700), (2, plain, 700), (2, spec, 0)):
        client().num_servers = num_servers
        exchange.groups.cluster = replace(cluster, num_servers=num_servers)
        exchange.renew(gain=None)
        exchange.store.load(pieces, carry, numels)
        exchange.warm_up([given])
        strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(TWO_WAY, given), partition_bytes=cut_at)
        for _ in range(5):
            gradients = integers(buckets, rank, NUM_RANKS, draw)
            results = exchange.step(Assignment(strategy), buckets, gradients)
            draw += 1
            for bucket, put, result in zip(buckets, gradients, results, strict=True):
                for slot in bucket.slots:
                    part = slice(slot.offset, slot.offset + slot.numel)
                    missing[slot.tensor] += put[part].double().numpy()
                    if rank == 0:
                        missing[slot.tensor] -= result[part].double().numpy() * NUM_RANKS
        at_servers |= "server" in exchange.sites()
        kept = exchange.kept(numels)
        largest = max(largest, *(float(np.abs(values).max()) for values in kept.values()))
        pieces, carry = snapshot(exchange.store)
    return {name: missing[name] - kept[name] for name in numels}, largest, at_servers


@pytest.mark.parametrize("spec", [TOPK, "efsignsgd:raw_below=8"])
def test_nothing_is_lost_with_a_gain_over_changing_servers(servers, spec):
    answers = POOL.run(run_gains, spec)
    assert answers[0][2]  # servers kept something
    for name in answers[0][0]:
        total = sum(answer[0][name] for answer in answers)
        assert np.abs(total).max() < 1e-3 < 1.0 < answers[0][1], (name, total)


def run_early_nan(rank: int) -> tuple[bool, bool]:
    """A NaN in the last bucket of the very first iteration: (the first bucket was averaged, nothing is kept)."""
    exchange = exchange_over(NUM_RANKS, 2, rank)
    assert exchange is not None
    exchange.warm_up([TOPK])
    buckets = make_buckets(*SIZES)
    gradients = integers(buckets, rank, NUM_RANKS)
    if rank == 1:
        gradients[1][5] = float("nan")
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(TWO_WAY, TOPK))
    exchange.script.next = Assignment(strategy)
    first = reduce_bucket(exchange.executor, buckets[0], gradients[0].clone(), is_last=False, grad_scale=1.0)
    averaged = bool(first.wait().isfinite().all())  # before the second bucket's keys are agreed
    reduce_bucket(exchange.executor, buckets[1], gradients[1].clone(), is_last=True, grad_scale=1.0).wait()
    exchange.groups.barrier()
    kept = exchange.kept(numels_of(buckets))
    return averaged, not any(values.any() for values in kept.values())


def test_a_nan_in_the_first_iteration_moves_no_residual_at_a_server(servers):
    assert POOL.run(run_early_nan) == [(True, True)] * NUM_RANKS


def run_load_without_servers(rank: int) -> tuple[float, bool]:
    """Server residuals are loaded, and the strategy sends nothing through servers: (what came, nothing is kept)."""
    exchange = exchange_over(NUM_RANKS, 2, rank)
    assert exchange is not None
    buckets = make_buckets({"a": 10})
    pieces = {("a", Site.SERVER): [(3, np.full(4, 8, np.float32), 0)]} if rank == 0 else {}
    pieces[("a", Site.LOCAL)] = [(0, np.ones(1, np.float32), 0)]
    exchange.executor.restart(0)
    exchange.store.load(pieces, {}, numels_of(buckets))
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of("flat.allreduce", TOPK))
    (result,) = exchange.step(Assignment(strategy), buckets, [torch.zeros(10)])
    kept = exchange.kept(numels_of(buckets))["a"]
    return float(result.sum()) * NUM_RANKS, not kept.any()


def test_loaded_server_residuals_are_trained_on_without_servers_too(servers):
    assert POOL.run(run_load_without_servers) == [(4 * 8.0 + NUM_RANKS, True)] * NUM_RANKS


def run_skipped_buckets(rank: int, option: str, spec: str, ranks_per_node: int, numel: int) -> list[float]:
    """A bucket is laid otherwise in a step, and then as before; the largest error of each step's averages.

    Gradients of one magnitude, another on every rank and in every step: signs lose nothing of them.
    """
    both, one = make_buckets({"x": numel}, {"a": numel}), make_buckets({"a": numel})
    exchange = exchange_over(NUM_RANKS, NUM_SERVERS, rank, ranks_per_node, timeout_s=20.0)
    strategy = strategy_of(both, exchange.groups.cluster, choice_of(option, spec))
    apart = []
    for step, buckets in enumerate((both, one, both)):
        signs = [torch.where(each < 0, -1.0, 1.0) for each in integers(buckets, 0, NUM_RANKS, step)]
        found = exchange.step(Assignment(strategy), buckets, [(rank + 1) * 2.0**step * each for each in signs])
        exact = [(NUM_RANKS + 1) / 2 * 2.0**step * each for each in signs]
        apart.append(max(float((mine - each).abs().max()) for mine, each in zip(found, exact, strict=True)))
    return apart


def test_keys_that_another_bucket_took_over_are_asked_for_anew(servers):
    assert POOL.run(run_skipped_buckets, RAW, "none", 1, 1024) == [[0.0] * 3] * NUM_RANKS
    hierarchical = "intra.reduce_scatter > " + TWO_WAY.replace("flat", "inter") + " > intra.allgather"
    # Of so few elements some ranks have none.
    specs = hierarchical, "efsignsgd:raw_below=1", 2, 40
    assert POOL.run(run_skipped_buckets, *specs) == [[0.0] * 3] * NUM_RANKS


def run_scaled_once(rank: int, spec: str) -> float:
    """Of a gradient of 2 times the loss scale the mean of its average, over both."""
    buckets = make_buckets({"a": 1024})
    exchange = exchange_over(NUM_RANKS, NUM_SERVERS, rank)
    exchange.renew(correction=Correction(0.9))
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(ONE_WAY, spec))
    scaled = [torch.full((1024,), 2.0 * 1024.0)]
    (average,) = exchange.step(Assignment(strategy), buckets, scaled, grad_scale=1024.0)
    return float(average.mean()) / (2.0 * 1024.0)


@pytest.mark.parametrize("spec", ["fp16", "qsgd"])
def test_what_keeps_no_residual_has_its_loss_scale_with_momentum_too(servers, spec):
    assert POOL.run(run_scaled_once, spec) == [pytest.approx(1.0, rel=0.05)] * NUM_RANKS


def run_small_keys(rank: int) -> int:
    """How many pushes a worker remembers after thirty steps of one small key."""
    exchange = exchange_over(NUM_RANKS, 1, rank)
    assert exchange is not None
    buckets = make_buckets({"a": 1000})
    assignment = Assignment(strategy_of(buckets, exchange.groups.cluster, choice_of(TWO_WAY, TOPK)))
    for _ in range(30):
        exchange.step(assignment, buckets, integers(buckets, rank, NUM_RANKS))
    return len(client()._window)


def test_pushes_that_were_answered_are_forgotten(servers):
    assert all(number <= 1 for number in POOL.run(run_small_keys))
