"""The parameter server: every leaf against exact sums, both residuals, an independent reference, failures."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.exchange import (
    digest,
    exact_average,
    integers,
    make_buckets,
    numels_of,
    planned,
    reduce_bucket,
    strategy_of,
)
from benchmarks.rank_pool import NUM_RANKS, POOL, RanksFailed
from espresso.comm.errors import EspressoError, ProtocolError, TopologyError
from espresso.comm.execute.executor import Assignment
from espresso.comm.keep.store import ResidualStore
from espresso.comm.parameter_server import Client, Line
from espresso.comm.parameter_server.join import ServerSettings, assign_roles
from espresso.comm.parameter_server.places import Bearing, balance, place
from espresso.comm.parameter_server.plain import PlainCodec, smaller
from espresso.comm.parameter_server.secret import Door, Secret, knock
from espresso.comm.parameter_server.sums import Slots
from espresso.comm.parameter_server.transport import LinkError
from espresso.comm.parameter_server.wire import (
    Coding,
    Flag,
    Header,
    Key,
    Op,
    Stretch,
)
from espresso.compressors.base import Correction, Decoding, Encoding, Feedback, Segment
from espresso.compressors.cuda import sources
from espresso.live.codecs import HostCodecs
from espresso.live.server_profile import raw_keys
from espresso.model.servers import shared_out
from espresso.strategies import (
    NONE,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Sharing,
    Site,
    parse_option,
    shares_by_rule,
)
from espresso.strategies.tree import server_options, two_way_option
from tests.backends import needs_compiler
from tests.emulator import build
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


def run_every_leaf(rank: int) -> list[tuple[str, list[str], bool]]:
    """(leaf, digests of its results, whether they are exact) for a compressor that loses nothing."""
    buckets = make_buckets(*SIZES)
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


def test_every_leaf_averages_exactly_and_alike(servers):
    everybody = POOL.run(run_every_leaf)
    assert len(everybody[0]) == 7 + 21
    assert all(mine == everybody[0] for mine in everybody)
    assert [leaf for leaf, _, exact in everybody[0] if not exact] == []


def run_on_a_device(rank: int) -> list[tuple[str, bool, bool]]:
    """(leaf and compressor, results are the host's, residuals too) for a model on an emulated device."""
    from tests.test_device_executor import DeviceExchange

    buckets = make_buckets(*SIZES)
    host = exchange_over(NUM_RANKS, NUM_SERVERS, rank)
    assert host is not None
    device = DeviceExchange(1, client=client())
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


@needs_compiler
def test_a_device_goes_through_servers_like_the_host(servers):
    build(sources())
    everybody = POOL.run(run_on_a_device)
    assert [row for rows in everybody for row in rows if not (row[1] and row[2])] == []


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
    check_telescoping(workers, num_servers, 100)


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
    pieces, carry = exchange.store.snapshot()
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
        pieces, carry = exchange.store.snapshot()
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
    """A bucket is laid otherwise in a step, and then as before; the largest error of each step's averages."""
    both, one = make_buckets({"x": numel}, {"a": numel}), make_buckets({"a": numel})
    exchange = exchange_over(NUM_RANKS, NUM_SERVERS, rank, ranks_per_node, timeout_s=20.0)
    strategy = strategy_of(both, exchange.groups.cluster, choice_of(option, spec))
    apart = []
    for buckets in (both, one, both):
        found = exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))
        pairs = zip(found, exact_average(buckets, NUM_RANKS), strict=True)
        apart.append(max(float((mine - exact).abs().max()) for mine, exact in pairs))
    return apart


def test_keys_that_another_bucket_took_over_are_asked_for_anew(servers):
    assert POOL.run(run_skipped_buckets, RAW, "none", 1, 1024) == [[0.0] * 3] * NUM_RANKS
    hierarchical = "intra.reduce_scatter > " + TWO_WAY.replace("flat", "inter") + " > intra.allgather"
    # Of so few elements some ranks have none.
    for apart in POOL.run(run_skipped_buckets, hierarchical, "efsignsgd:raw_below=1", 2, 40):
        assert len(apart) == 3


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


# -- handshake and failures ------------------------------------------------------------------------


def run_other_strategy(rank: int, num_servers: int = 1) -> str:
    exchange = exchange_over(NUM_RANKS, num_servers, rank)
    buckets = make_buckets({"a": 100})
    spec = "topk:ratio=0.5" if rank == 2 else "topk:ratio=0.25"
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(TWO_WAY, spec))
    try:
        exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))
    except Exception as error:
        return str(error)
    return "no error"


def test_another_strategy_on_one_worker_is_refused_at_the_handshake(servers):
    for text in POOL.run(run_other_strategy):
        assert "server rank 4 refuses: worker rank 2 has another strategy than rank 0 (hash" in text


def run_refused_twice(rank: int) -> tuple[list[str], list[Any]]:
    """Both servers refuse; what they answer afterwards."""
    texts = [run_other_strategy(rank, 2) for _ in range(2)]
    client().num_servers = 2
    body = (set(), set())
    return texts, list(client().ask_all(Op.PREPARE, {0: body, 1: body}, 10.0).values())


def test_servers_that_have_refused_answer_the_next_question(servers):
    for texts, answers in POOL.run(run_refused_twice):
        assert all("refuses: worker rank 2 has another strategy" in text for text in texts)
        assert answers == [None, None]


class Silent:
    """A transport on which sends to one server fail."""

    rank, size = 0, 3

    def send(self, channel, peer, tag, data):
        return SilentPending(peer)

    def receive(self, channel, peer, tag, data):
        return SilentPending(0)

    def close(self):
        pass


class SilentPending:
    def __init__(self, peer):
        self.peer = peer

    def wait(self, timeout_s=None):
        if self.peer == 1:
            raise LinkError("rank 1: gone", 1)
        if self.peer == 0:
            threading.Event().wait()


def test_a_push_that_is_not_taken_names_its_own_server():
    mine = Client(Silent(), 1, addresses=("10.0.0.1", "10.0.0.2"))
    lines = [
        Line(Key(
            number, number, (0,), (Stretch(f"w{number}", 0, 4 << 20),), "float32", NONE, False, False, False,
            Coding.RAW, Coding.RAW, 16 << 20, 16 << 20, 0, 0,
        ))
        for number in range(2)
    ]  # fmt: skip
    data = np.zeros(16 << 20, np.uint8)
    mine.push(lines[0], data, data, Header(Op.PUSH, 0, 0), 1.0)
    # The window is full of the first server's push.
    with pytest.raises(EspressoError, match=r"server rank 1 \(10.0.0.1\) did not take the push of key 0 \(w0"):
        mine.push(lines[1], data, data, Header(Op.PUSH, 0, 1), 1.0)


def raised_by(exchange: Any, assignment: Assignment, buckets: Any, rank: int) -> str:
    """What one more round raised."""
    try:
        exchange.step(assignment, buckets, integers(buckets, rank, NUM_RANKS))
    except Exception as error:
        return str(error)
    return "no error"


def run_missing_table(rank: int) -> str:
    """Rank 3 never says which keys it would use."""
    exchange = exchange_over(NUM_RANKS, 1, rank, timeout_s=1.5)
    assert exchange is not None
    buckets = make_buckets({"weights": 300})
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(RAW, TOPK))
    return "" if rank == 3 else raised_by(exchange, Assignment(strategy), buckets, rank)


def test_a_worker_that_never_offers_its_keys_is_named():
    with serving(POOL):
        for text in POOL.run(run_missing_table)[:3]:
            assert "server rank 4 reports: worker rank 3 died, left or hangs" in text, text
            assert "no table of keys within 1.35 s" in text, text
        POOL.close()


def run_missing_worker(rank: int) -> str:
    """Rank 3 stays away from the second round."""
    exchange = exchange_over(NUM_RANKS, 2, rank, timeout_s=1.5)
    buckets = make_buckets({"weights": 300})
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(RAW, TOPK))
    exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))
    return "" if rank == 3 else raised_by(exchange, Assignment(strategy), buckets, rank)


def test_a_worker_that_hangs_is_named_by_the_server_with_the_key():
    with serving(POOL):
        texts = POOL.run(run_missing_worker)[:3]
        for text in texts:
            assert "server rank 4 reports: worker rank 3 died, left or hangs while key" in text
            assert "(weights[0:300]) waited for its push" in text
            assert "no push within 1.35 s" in text
        POOL.close()


def test_an_answer_that_does_not_come_names_server_and_key():
    with serving(POOL) as running:
        POOL.run(run_round, 20.0)
        with running[0]._lock:  # it hangs
            texts = POOL.run(run_round, 1.0)
        for text in texts:
            assert "server rank 4 did not answer within 1 s or is gone: key" in text
            assert "(weights[0:300])" in text
            assert "step 3/3 'flat.pull' of bucket 0" in text
        POOL.close()  # a transfer that timed out has closed its connections


_kept: list[Any] = []


def run_round(rank: int, timeout_s: float) -> str:
    """One more round of the same exchange; what it raised."""
    buckets = make_buckets({"weights": 300})
    if not _kept:
        exchange = exchange_over(NUM_RANKS, 2, rank)
        strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(RAW, TOPK))
        _kept.extend((exchange, Assignment(strategy)))
    exchange, assignment = _kept
    exchange.link.timeout_s = timeout_s
    return raised_by(exchange, assignment, buckets, rank)


def test_a_worker_that_dies_is_named_with_the_key_that_waits_for_it():
    with pytest.raises(RanksFailed, match=r"^no answer from rank 3$"), serving(POOL) as running:
        POOL.run(run_dying_worker)
    assert "worker rank 3 died or left while key" in str(running[0].error or running[1].error)


def run_dying_worker(rank: int) -> None:
    import os
    import time

    exchange = exchange_over(NUM_RANKS, 1, rank)
    buckets = make_buckets({"weights": 300})
    strategy = strategy_of(buckets, exchange.groups.cluster, choice_of(RAW, TOPK))
    exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))
    if rank == 3:
        time.sleep(1.0)
        os._exit(1)
    with pytest.raises(Exception, match=r"server rank 4 reports: worker rank 3 died or left while key \d+ \(weights"):
        exchange.step(Assignment(strategy), buckets, integers(buckets, rank, NUM_RANKS))


def test_a_closed_door_names_rank_and_address():
    secret = Secret(b"a secret of the job")
    door = Door("127.0.0.1", secret)
    knock(0, 5, "127.0.0.1", door.port, secret, 2.0)
    door.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(LinkError, match=rf"worker rank 2 cannot reach server rank 5 at 127.0.0.1:{port}"):
            knock(2, 5, "127.0.0.1", port, secret, 2.0)


# -- the parts -------------------------------------------------------------------------------------


def test_roles():
    nodes = [("a",), ("a",), ("a",), ("b",), ("b",), ("b",)]
    assert assign_roles(nodes, ServerSettings(servers=2)).workers == (0, 1, 2, 3)
    per_node = assign_roles(nodes, ServerSettings(servers_per_node=1))
    assert (per_node.workers, per_node.servers) == ((0, 1, 3, 4), (2, 5))
    with pytest.raises(TopologyError, match="6 servers of 6 ranks leave no worker"):
        assign_roles(nodes, ServerSettings(servers=9))
    both = assign_roles([*nodes, ("c",)], ServerSettings(servers=1, servers_per_node=1))
    assert (both.workers, both.servers) == ((0, 1, 3, 4), (2, 5, 6))
    # One of the last ranks shares a machine with workers: those come first.
    assert assign_roles([*nodes[:3], ("c",), ("a",)], ServerSettings(servers=2)).servers == (4, 3)
    with pytest.raises(ValueError, match="or both"):
        ServerSettings()


def test_balance_is_even_in_bytes_and_counts_what_is_there():
    assert balance([8, 1, 1, 1, 5], 2, [0, 0]) == [0, 1, 1, 1, 1]
    assert balance([3], 3, [5, 0, 9]) == [1]
    random = np.random.default_rng(0)
    loads = random.integers(1, 4 << 20, 200).tolist()
    total = np.bincount(balance(loads, 3, [0, 0, 0]), weights=loads)
    assert total.max() < 1.01 * total.min()


def parts_of(keys: list[Key], bearing: Bearing) -> list[float]:
    """What part of all bytes each server gets."""
    found = place(keys, bearing, [])
    return list(np.bincount(found, [key.raw_bytes for key in keys], len(bearing.near)) / sum(k.raw_bytes for k in keys))


def test_a_slower_card_or_processor_gets_less_and_machines_share_their_card():
    keys = raw_keys(300, 4096, range(4))
    alike = Bearing.alike(range(3), (0.0,) * 3)
    assert parts_of(keys, alike) == pytest.approx([1 / 3] * 3, abs=0.01)
    assert parts_of(keys, replace(alike, card_us=(1.0, 2.0, 2.0))) == pytest.approx([0.5, 0.25, 0.25], abs=0.01)
    busy = replace(alike, card_us=(1e-3,) * 3, processor_us=(1.0, 1.0, 2.0))
    assert parts_of(keys, busy) == pytest.approx([0.4, 0.4, 0.2], abs=0.01)
    assert parts_of(keys, Bearing.alike((0, 0, 2), (0.0,) * 3)) == pytest.approx([0.25, 0.25, 0.5], abs=0.01)
    by_size = replace(busy, sharing=Sharing.SIZES)
    assert parts_of(keys, by_size) == pytest.approx([1 / 3] * 3, abs=0.01)


@pytest.mark.parametrize("dedicated", [1, 2, 4, 8])
@pytest.mark.parametrize("machines", [2, 4, 8])
def test_both_kinds_get_what_bytepss_rule_says_where_only_alike_cards_count(machines, dedicated):
    """The rule, the placing of keys and the model's shares are three ways to the same split."""
    cluster = Cluster(machines, 1, machines + dedicated, True, dedicated)
    rule = shared_out(cluster, 1.0, 1.0, 1e-9, (), Sharing.SIZES)
    found = shared_out(cluster, 1.0, 1.0, 1e-9)
    assert max(found.worker_card, found.server_card) == pytest.approx(max(rule.worker_card, rule.server_card))
    near = (1 / machines,) * machines + (0.0,) * dedicated
    parts = parts_of(raw_keys(1000, 4096, range(4)), Bearing.alike(range(machines + dedicated), near))
    assert sum(parts[machines:]) <= dedicated * shares_by_rule(machines, machines, dedicated)[1] + 0.01
    busiest = max(1 / machines + parts[0] * (machines - 2) / machines, parts[machines])
    assert busiest == pytest.approx(max(rule.worker_card, rule.server_card), abs=0.01)


def test_servers_of_both_kinds_are_never_slower_than_the_better_kind_alone():
    for work in (1e-6, 0.3, 3.0):
        for server_us in (0.2, 1.0, 5.0):
            times = []
            for apart, beside in ((2, 0), (0, 4), (2, 4)):
                cluster = Cluster(4, 1, apart + beside, beside > 0, apart if beside else 0)
                load = shared_out(cluster, 1.0, server_us, work)
                times.append(max(load.worker_card, load.server_card * server_us, load.processor * work))
            assert times[2] <= min(times[:2]) * (1 + 1e-9)


def test_headers_round_trip_and_strangers_are_refused():
    header = Header(Op.PUSH, 3, 77, Flag.RAW | Flag.KEPT, 12, 1 << 33, 0.25)
    assert Header.unpack(header.pack()) == header
    with pytest.raises(ProtocolError, match="do all machines run the same espresso"):
        Header.unpack(np.zeros(56, np.uint8))
    wrong = header.pack()
    wrong[5] = 99
    with pytest.raises(ProtocolError, match="unknown parameter-server operation 99 from rank 3"):
        Header.unpack(wrong)


def test_payloads_larger_than_raw_go_raw():
    codec = HostCodecs(1)(CompressorSpec.parse("topk:ratio=0.9,raw_below=1"), Device.TRAINING)
    segments = [Segment("w", 0, 100)]
    plain = smaller(codec, segments, np.float32)
    assert isinstance(plain, PlainCodec)
    assert smaller(codec, [Segment("w", 0, 10_000)], np.float32) is not codec  # 6 bytes for each of 9000
    assert smaller(HostCodecs(1)(CompressorSpec("int8"), Device.TRAINING), [Segment("w", 0, 5000)], "f4") is not None
    layout = plain.compressor.layout(segments)
    assert layout.num_bytes == 400
    source, starts = np.arange(100, dtype=np.float32), np.zeros(1, np.int64)
    old, new = np.ones(100, np.float32), np.full(100, 7, np.float32)
    payload = np.zeros((2, 400), np.uint8)
    assert plain.encode(Encoding(layout, source, starts, scale=2.0, feedback=Feedback(old, new, starts)), payload[0])
    payload[1] = payload[0]
    out = np.empty_like(source)
    assert plain.decode(Decoding(layout, out, starts, scale=0.5), payload)
    assert np.array_equal(out, 2 * source + 1)  # what was kept is sent, and nothing is kept
    assert not new.any()
    feedback = Feedback(old, new, starts, 0.25)  # 4 are owed: one of them goes, three stay
    assert plain.encode(Encoding(layout, source, starts, scale=2.0, feedback=feedback), payload[0])
    assert np.array_equal(payload[0].view(np.float32), 2 * source + 1)
    assert np.array_equal(new, np.full(100, 0.75, np.float32))


def test_slots_wait_for_memory_and_reuse_it():
    slots = Slots(100)
    first = slots.take(80)
    got = []
    waiting = threading.Thread(target=lambda: got.append(slots.take(40)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    slots.give(first)
    waiting.join(5.0)
    assert got[0].nbytes == 40
    slots.give(got[0])
    assert slots.take(40) is got[0]
    slots.give(got[0])
    assert slots.take(500).nbytes == 500  # larger than the limit: alone, but not never


def test_a_store_places_what_a_server_is_given():
    store = ResidualStore()
    from espresso.strategies import Run

    residual = store.new_residual(Site.SERVER, [Run("w", 10, 0, 0, 5)], np.float32, 0)
    store.adopt([residual], {"w": 15})
    store.place("w", Site.SERVER, (12, np.ones(3, np.float32), 0))
    assert residual.old.tolist() == [0, 0, 1, 1, 1]
    assert dist.is_available()
