"""The executor on real ranks: order, records, never blocking, changes in mid-iteration, failures."""

import gc
import threading
import time
import weakref
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.exchange import (
    Exchange,
    digest,
    exact_average,
    integers,
    make_buckets,
    numels_of,
    planned,
    reduce_bucket,
    strategy_of,
)
from benchmarks.rank_pool import NUM_RANKS, POOL
from espresso.comm.errors import EspressoError
from espresso.comm.execute import executor
from espresso.comm.execute.assignment import Assignment, Record
from espresso.comm.execute.averaging import IN_A_ROW
from espresso.comm.execute.failure import StalledError
from espresso.comm.execute.host import HostPass
from espresso.comm.execute.iteration import Iteration
from espresso.live.planner import FixedPlanner
from espresso.strategies import (
    PLAIN,
    RANK_LANES,
    Choice,
    Cluster,
    CompressorSpec,
    Device,
    Lane,
    options_for,
    parse_option,
    plan,
)
from espresso.strategies.list_scheduling import list_order

LINKS = (Lane.INTRA, Lane.INTER_OUT, Lane.INTER_IN)
SIZES = ({"a": 3000, "b": 100}, {"c": 2000}, {"d": 500, "e": 700})
PAIR = "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather"
ALLGATHER = "comp > flat.allgather > dec"
TOPK = CompressorSpec.parse("topk:ratio=0.05")


def lossless(text: str) -> Choice:
    return Choice(parse_option(text))


def run_between(rank: int) -> list[bool]:
    """Compressed tensors with uncompressed ones between them, flat and hierarchical, with and without partitions."""
    exchange = Exchange(2)
    buckets = make_buckets({"w1": 3000, "b1": 70, "w2": 2000, "b2": 30}, {"b3": 11, "w3": 4001})
    right = []
    for text in (ALLGATHER, PAIR):
        for size in (0, 4096):
            mine = integers(buckets, rank, NUM_RANKS)
            wanted = exact_average(buckets, NUM_RANKS)
            choices = {
                s.tensor: lossless(text) if s.tensor.startswith("w") else PLAIN for b in buckets for s in b.slots
            }
            strategy = strategy_of(buckets, exchange.groups.cluster, choices, partition_bytes=size)
            got = exchange.step(Assignment(strategy), buckets, mine)
            right += [torch.equal(a, b) for a, b in zip(got, wanted, strict=True)]
    exchange.close()
    return right


def test_tensors_between_others_of_their_bucket_keep_their_own_choice():
    assert all(all(right) for right in POOL.run(run_between))


def normal(buckets: Any, rank: int) -> list[torch.Tensor]:
    random = np.random.default_rng(rank)
    return [torch.from_numpy(random.standard_normal(b.numel).astype(np.float32)) for b in buckets]


# What comes out


def run_plain(rank: int) -> bool:
    exchange = Exchange(2)
    buckets = make_buckets(*SIZES)
    mine = normal(buckets, rank)
    got = exchange.step(Assignment(strategy_of(buckets, exchange.groups.cluster, PLAIN)), buckets, mine)
    for gradient in mine:
        gradient.div_(NUM_RANKS)
        dist.all_reduce(gradient)
    exchange.close()
    return digest(got) == digest(mine)


def test_without_compression_it_is_ddps_own_average_bit_for_bit():
    assert all(POOL.run(run_plain))


def run_alone(rank: int) -> list[str]:
    groups = [dist.new_group([other]) for other in range(NUM_RANKS)]
    exchange = Exchange(1, process_group=groups[rank])
    exchange.warm_up({"none"})
    buckets = make_buckets(*SIZES)
    mine = normal(buckets, rank)
    wrong = []
    for option in options_for(Cluster(1, 1), devices=(Device.TRAINING,)):
        strategy = strategy_of(buckets, Cluster(1, 1), Choice(option), partition_bytes=4096)
        if digest(exchange.step(Assignment(strategy), buckets, mine)) != digest(mine):
            wrong.append(str(option))
    exchange.close()
    return wrong


def test_one_rank_gets_its_own_gradient_back():
    assert POOL.run(run_alone) == [[]] * NUM_RANKS


# What is left


def run_released(rank: int) -> list[list[bool]]:
    """Which of four steps' buckets are still there after each choice's steps, if nobody collects circles.

    The second choice's first two steps are profiled: they are exchanged by tasks.
    """
    exchange = Exchange(2)
    buckets = make_buckets(*SIZES)
    left = []
    gc.disable()
    try:
        for choice, profiled in ((PLAIN, False), (PLAIN, True), (lossless(ALLGATHER), False)):
            strategy = strategy_of(buckets, exchange.groups.cluster, choice)
            assignments = [Assignment(strategy, deferred=profiled and step < 2) for step in range(4)]
            seen = [
                [weakref.ref(b) for b in exchange.step(each, buckets, integers(buckets, rank, NUM_RANKS))]
                for each in assignments
            ]
            if profiled:
                gc.collect()  # programs are circles, and are forgotten
            until = time.monotonic() + 5.0  # the library's thread may not be out of its call yet
            awaited = seen if choice == PLAIN else seen[:-1]
            while any(ref() is not None for refs in awaited for ref in refs) and time.monotonic() < until:
                time.sleep(0.01)
            left.append([any(ref() is not None for ref in refs) for refs in seen])
    finally:
        gc.enable()
    exchange.close()
    return left


def test_a_steps_buckets_are_let_go_when_they_are_averaged():
    """FSDP has new ones in every step. Compressed, the last step's stay where programs work on them."""
    for plain, profiled, compressed in POOL.run(run_released):
        assert not any(plain + profiled)
        assert not any(compressed[:-1])


def test_a_bucket_may_be_handed_over_behind_the_one_that_was_averaged_last():
    """Threads complete buckets; one may be kept waiting between its last word and its bucket."""
    record = Record(0, Assignment(strategy_of(make_buckets(*SIZES), Cluster(2, 1), PLAIN)))
    iteration = Iteration(record, HostPass(record), None, False, lambda _: None)
    futures = [iteration.arrive(index, torch.zeros(3), index == 1) for index in range(2)]
    assert not iteration.completes(0)
    assert iteration.completes(1)
    iteration.hand_over_last(1)
    iteration.hand_over(0)
    assert all(future.done() for future in futures)
    assert not iteration.buffers


# Records


def run_recorded(rank: int) -> Any:
    exchange = Exchange(2)
    exchange.warm_up({"none"})
    buckets = make_buckets(*SIZES)
    strategy = strategy_of(buckets, exchange.groups.cluster, lossless(PAIR), partition_bytes=4096)
    assignment = planned(Assignment(strategy, record=True), buckets)
    for _ in range(3):
        exchange.step(assignment, buckets, integers(buckets, rank, NUM_RANKS))
    record = exchange.record
    exchange.close()
    return record


def test_a_record_tells_what_ran_and_every_link_kept_the_total_order():
    for record in POOL.run(run_recorded):
        assert record.iteration == 2
        assert record.finite
        assert record.buckets == make_buckets(*SIZES)
        laid = record.plan
        assert sorted(i.task for i in record.intervals) == list(range(len(laid.tasks)))
        times = {i.task: (i.start_ns, i.end_ns) for i in record.intervals}
        lanes = {lane for task in laid.tasks for lane in task.lanes}
        for lane in lanes:
            ordered = [times[index] for index in laid.order if lane in laid.tasks[index].lanes]
            if lane in RANK_LANES:  # it took what could run, one after the other
                ordered.sort()
            end = 0 if lane in LINKS else 1  # on a link one begins while the one before it is on its way
            assert all(one[end] <= two[0] for one, two in pairwise(ordered)), lane
        for task in laid.tasks:
            start, end = times[task.index]
            bucket = laid.groups[laid.partitions[task.partition].group].bucket
            assert record.ready_ns[bucket] <= start <= end <= record.done_ns
            assert task.after is None or times[task.after][1] <= start
        numel = sum(bucket.numel for bucket in record.buckets)
        assert record.bytes_raw == pytest.approx(2 * 3 / 4 * 4 * numel, abs=len(laid.partitions))


def run_late(rank: int) -> dict[int, tuple[int, int]]:
    """Two buckets in plain order, one rank late: when each task began and ended, in nanoseconds."""
    exchange = Exchange(2)
    exchange.warm_up({"topk"})
    buckets = make_buckets({"a": 3000}, {"b": 3000})
    assignment = Assignment(strategy_of(buckets, exchange.groups.cluster, Choice(parse_option(ALLGATHER), TOPK)))
    for _ in range(2):
        if rank == NUM_RANKS - 1:
            time.sleep(0.3)
        exchange.step(assignment, buckets, integers(buckets, rank, NUM_RANKS))
    spans = exchange.record.intervals
    exchange.close()
    return {span.task: (span.start_ns, span.end_ns) for span in spans}


def test_an_encode_does_not_wait_behind_a_decode_whose_exchange_is_late():
    for at in POOL.run(run_late)[: NUM_RANKS - 1]:
        _, exchange, decode, next_encode, *_ = (at[task] for task in sorted(at))
        assert next_encode[1] < exchange[1] <= decode[0]


def run_in_plain_order(rank: int) -> tuple[list[Any], Any]:
    """A given strategy until it has its order: the records, and the assignment that follows."""
    exchange = Exchange(2)
    exchange.warm_up({"none"})
    buckets = make_buckets(*SIZES)
    strategy = strategy_of(buckets, exchange.groups.cluster, lossless(PAIR), partition_bytes=4096)
    planner = FixedPlanner(strategy, exchange.groups)
    records = []
    for step in range(3):
        exchange.script.work = None
        exchange.step(planner.assign(step), buckets, integers(buckets, rank, NUM_RANKS))
        records.append(exchange.record)
        work = planner.after(exchange.record)
        if work is not None:
            work()
    exchange.close()
    return records, planner.assign(3)


def test_a_given_strategy_is_ordered_by_how_long_its_tasks_took():
    answers = POOL.run(run_in_plain_order)
    records, assignment = answers[0]
    laid = plan(assignment.strategy, make_buckets(*SIZES))
    measured = records[1]  # the first whose buckets are those of the one before
    assert measured.assignment.order is None
    assert sorted(i.task for i in measured.intervals) == list(range(len(laid.tasks)))
    for interval in measured.intervals:
        task = laid.tasks[interval.task]
        bucket = laid.groups[laid.partitions[task.partition].group].bucket
        assert task.lanes[0] == interval.lane
        assert interval.start_ns >= measured.ready_ns[bucket]
    took = {i.task: (i.end_ns - i.start_ns) / 1e3 for i in measured.intervals}
    ready = [(ns - measured.ready_ns[0]) / 1e3 for ns in measured.ready_ns]
    order = list_order(laid, ready, [took[task.index] for task in laid.tasks])
    assert [answer[1].order for answer in answers] == [order] * NUM_RANKS
    assert records[2].assignment.order == order


def run_asked(rank: int, text: str) -> list[int]:
    """How often the loss scale is asked for, in each of two iterations."""
    exchange = Exchange(2)
    exchange.warm_up({"none"})
    buckets = make_buckets(*SIZES)
    exchange.script.next = Assignment(strategy_of(buckets, exchange.groups.cluster, Choice(parse_option(text))))
    asked = [0, 0]
    for step in range(2):

        def grad_scale(step: int = step) -> float:
            asked[step] += 1
            return 1.0

        futures = [
            exchange.executor.reduce(b.index, g, is_last=b.index == 2, grad_scale=grad_scale, describe=lambda b=b: b)
            for b, g in zip(buckets, integers(buckets, rank, NUM_RANKS), strict=True)
        ]
        torch.futures.wait_all(futures)
    exchange.close()
    return asked


@pytest.mark.parametrize("text", ["flat.allreduce", ALLGATHER])
def test_the_loss_scale_is_asked_for_once_an_iteration(text):
    """On a GPU every answer makes the host wait for backward."""
    assert POOL.run(run_asked, text) == [[1, 1]] * NUM_RANKS


def run_ended(rank: int, text: str, deferred: bool) -> list[Any]:
    """Three iterations whose last bucket is known only afterwards; the second has a bucket fewer than planned."""
    exchange = Exchange(2)
    buckets = make_buckets(*SIZES)
    strategy = strategy_of(buckets, exchange.groups.cluster, Choice(parse_option(text)))
    order = plan(strategy, buckets).order
    exchange.script.next = Assignment(strategy, order, tuple(buckets), deferred=deferred, record=True)
    found = []
    for given in (buckets, buckets[:2], buckets):
        buffers = integers(given, rank, NUM_RANKS)
        futures = [
            reduce_bucket(exchange.executor, bucket, buffer, is_last=False, grad_scale=1.0)
            for bucket, buffer in zip(given, buffers, strict=True)
        ]
        time.sleep(0.02 * rank)
        exchange.executor.end().wait()
        assert all(future.done() for future in futures)
        record = exchange.record
        found.append((digest(buffers), record.buckets, len(record.ready_ns), record.bytes_raw > 0))
    nothing = exchange.executor.end().wait().numel()
    exchange.close()
    return [found, nothing]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("text", ["flat.allreduce", "flat.reduce_scatter > flat.allgather"])
def test_an_iteration_may_end_after_its_last_bucket(text, deferred):
    buckets = make_buckets(*SIZES)
    expected = [(given, digest(exact_average(given, NUM_RANKS))) for given in (buckets, buckets[:2], buckets)]
    for found, nothing in POOL.run(run_ended, text, deferred):
        assert found == [(bits, tuple(given), len(given), True) for given, bits in expected]
        assert nothing == 0


def run_deferred(rank: int) -> tuple[bool, Any, str]:
    exchange = Exchange(2)
    buckets = make_buckets(*SIZES)
    exchange.script.next = Assignment(strategy_of(buckets, exchange.groups.cluster, PLAIN), deferred=True, record=True)
    buffers = integers(buckets, rank, NUM_RANKS)
    futures = []
    for bucket, buffer in zip(buckets, buffers, strict=True):
        time.sleep(0.05)
        futures.append(reduce_bucket(exchange.executor, bucket, buffer, is_last=bucket.index == 2, grad_scale=1.0))
        early = bucket.index < 2 and any(future.done() for future in futures)
    torch.futures.wait_all(futures)
    record = exchange.record
    exchange.close()
    return early, record, digest(buffers)


def test_a_deferred_iteration_starts_nothing_before_its_last_bucket():
    buckets = make_buckets(*SIZES)
    for early, record, bits in POOL.run(run_deferred):
        assert not early
        assert min(interval.start_ns for interval in record.intervals) >= record.ready_ns[-1]
        assert bits == digest(exact_average(buckets, NUM_RANKS))


def run_without_waiting(rank: int, text: str) -> list[bool]:
    """Rank 3 hands its buckets over only after the others have handed over all of theirs."""
    exchange = Exchange(2)
    exchange.warm_up({"none"})
    buckets = make_buckets(*SIZES)
    exchange.script.next = Assignment(strategy_of(buckets, exchange.groups.cluster, Choice(parse_option(text))))
    buffers = integers(buckets, rank, NUM_RANKS)
    if rank == 3:
        exchange.groups.barrier()
    futures = [
        reduce_bucket(exchange.executor, bucket, buffer, is_last=bucket.index == 2, grad_scale=1.0)
        for bucket, buffer in zip(buckets, buffers, strict=True)
    ]
    early = [future.done() for future in futures]
    if rank != 3:
        exchange.groups.barrier()
    torch.futures.wait_all(futures)
    exchange.close()
    return early


@pytest.mark.parametrize("text", ["flat.allreduce", ALLGATHER, PAIR])
def test_the_hook_never_waits_for_other_ranks(text):
    assert POOL.run(run_without_waiting, text)[:3] == [[False] * 3] * 3


def run_with_work(rank: int) -> list[str]:
    exchange = Exchange(2)
    buckets = make_buckets(*SIZES)
    log: list[str] = []

    def work() -> None:
        log.append(f"work, rank 0 says {exchange.groups.from_rank_0(rank)}")

    exchange.script.work = work
    assignment = Assignment(strategy_of(buckets, exchange.groups.cluster, PLAIN))
    for _ in range(2):
        exchange.step(assignment, buckets, integers(buckets, rank, NUM_RANKS))
        log.append("averaged")
    exchange.close()
    return log


def test_the_planners_work_runs_before_the_last_future_completes():
    for log in POOL.run(run_with_work):
        assert log == ["work, rank 0 says 0", "averaged", "averaged"]


# Buckets that are not as planned


def run_rebuilt(rank: int) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """A plan for SIZES meets: its buckets, others from the second on, others altogether, a part of them."""
    exchange = Exchange(2)
    exchange.warm_up({str(TOPK)})
    cluster = exchange.groups.cluster
    known = make_buckets(*SIZES)
    everything = [
        known,
        make_buckets(SIZES[0], {"d": 500, "c": 2000}, {"e": 700}),
        known,
        make_buckets({"e": 700, "a": 3000}, {"b": 100, "c": 2000, "d": 500}),
        known,
        make_buckets(*SIZES[:2]),
        known,
        make_buckets(*SIZES[:2], {"e": 700}, {"d": 500}),
        known,
    ]
    choices = {name: Choice(parse_option(PAIR), TOPK) for name in numels_of(known)}
    choices |= {"b": PLAIN, "d": Choice(parse_option(ALLGATHER), TOPK)}
    assignment = planned(Assignment(strategy_of(known, cluster, choices, partition_bytes=4096)), known)
    numels = numels_of(known)
    balance = {name: np.zeros(numel) for name, numel in numels.items()}
    digests = []
    for draw, buckets in enumerate(everything):
        mine = integers(buckets, rank, NUM_RANKS, draw)
        got = exchange.step(assignment, buckets, mine)
        digests.append(digest(got))
        for bucket, given, average in zip(buckets, mine, got, strict=True):
            for slot in bucket.slots:
                part = slice(slot.offset, slot.offset + slot.numel)
                balance[slot.tensor] += (average[part] - given[part]).double().numpy()
    kept = exchange.kept(numels)
    exchange.close()
    return digests, balance, kept


def test_buckets_that_change_under_a_plan_lose_nothing():
    answers = POOL.run(run_rebuilt)
    assert all(answer[0] == answers[0][0] for answer in answers)
    for name in answers[0][1]:
        total = sum(balance[name] + kept[name] for _, balance, kept in answers)
        assert not total.any(), name
    assert any(kept["a"].any() for *_, kept in answers)


# Half precision


def run_narrow(rank: int) -> tuple[list[bool], list[bool], bool]:
    """The average fits fp32 and not the fp16 bucket, in the second step."""
    exchange = Exchange(2)
    exchange.warm_up({str(TOPK)})
    buckets = make_buckets({"a": 4000}, dtype="float16")
    assignment = Assignment(strategy_of(buckets, exchange.groups.cluster, Choice(parse_option(ALLGATHER), TOPK)))
    mine = [torch.full((4000,), 40000.0, dtype=torch.float16)]
    finite, recorded, kept = [], [], []
    for _ in range(2):
        got = exchange.step(assignment, buckets, mine)
        finite.append(bool(got[0].isfinite().all()))
        recorded.append(exchange.record.finite)
        kept.append(exchange.kept(numels_of(buckets))["a"])
    exchange.close()
    return finite, recorded, bool((kept[0] == kept[1]).all() and kept[0].any())


def test_an_average_too_large_for_its_bucket_is_discarded_everywhere():
    assert POOL.run(run_narrow) == [([True, False], [True, False], True)] * NUM_RANKS


def run_rooted(rank: int, spec: str) -> list[bool]:
    """One partition, one root per node: the other ranks keep no residual and decode nothing."""
    exchange = Exchange(2)
    exchange.warm_up({spec})
    buckets = make_buckets({"a": 4000})
    choice = Choice(
        parse_option("intra.reduce > comp > inter.allgather > dec > intra.broadcast"),
        CompressorSpec.parse(spec),
    )
    assignment = Assignment(strategy_of(buckets, exchange.groups.cluster, choice))
    found = []
    for poison in (0.0, np.inf, 0.0):
        mine = integers(buckets, rank, NUM_RANKS)
        if rank == 3:
            mine[0][17] = poison
        exchange.step(assignment, buckets, mine)
        found.append(exchange.record.finite)
    exchange.close()
    return found


@pytest.mark.parametrize("spec", [str(TOPK), "fp16"])
def test_all_ranks_agree_whether_an_iteration_was_finite(spec):
    """Planners move by it, so a rank without residuals must know it too."""
    assert POOL.run(run_rooted, spec) == [[True, False, True]] * NUM_RANKS


# Failures


class BrokenCodec:
    """``none``, until it is told to raise or to wait."""

    def __init__(self, codec: Any) -> None:
        self.codec, self.compressor = codec, codec.compressor
        self.error: Exception | None = None
        self.wait: threading.Event | None = None

    def encode(self, *args: Any) -> bool:
        if self.error is not None:
            raise self.error
        if self.wait is not None:
            self.wait.wait(20)
        return bool(self.codec.encode(*args))

    def decode(self, *args: Any) -> bool:
        return bool(self.codec.decode(*args))


def caught(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_broken_codec(rank: int) -> tuple[list[str], float, str]:
    exchange = Exchange(2, timeout_s=3.0)
    codecs = exchange.codecs
    broken = BrokenCodec(codecs(CompressorSpec("none"), Device.TRAINING))
    exchange.codecs = lambda spec, device: broken
    exchange.renew()
    buckets = make_buckets(*SIZES)
    assignment = Assignment(strategy_of(buckets, exchange.groups.cluster, lossless(PAIR)))
    mine = integers(buckets, rank, NUM_RANKS)
    exchange.step(assignment, buckets, mine)
    if rank == 1:
        broken.error = ValueError("the codec broke")
    futures = [
        reduce_bucket(exchange.executor, bucket, buffer, is_last=bucket.index == 2, grad_scale=1.0)
        for bucket, buffer in zip(buckets, mine, strict=True)
        if exchange.executor.error is None
    ]
    began = time.monotonic()
    errors = [caught(future.wait) for future in futures]
    took = time.monotonic() - began
    again = caught(lambda: exchange.step(assignment, buckets, mine))
    exchange.close()
    codecs.close()
    return errors, took, again


def test_a_failing_task_fails_every_future_on_every_rank_in_time():
    answers = POOL.run(run_broken_codec)
    for rank, (errors, took, again) in enumerate(answers):
        # Buckets that were already averaged keep their result; the last one cannot be among them.
        assert "EspressoError" in errors[-1] or "espresso on rank" in errors[-1], errors
        assert took < 15
        assert f"espresso on rank {rank} failed" in again
        assert "of bucket" in again
    assert "the codec broke" in answers[1][2]
    assert "comp" in answers[1][2]
    assert "(tensors " in answers[1][2]


def run_impatient(rank: int) -> tuple[float, list[bool]]:
    """A hook around ours that waits for every bucket inside the hook, which DDP itself never does: how long it takes,
    and whether every bucket's end is looked at from then on, iteration by iteration.
    """
    exchange = Exchange(2)
    buckets = make_buckets(*SIZES)
    exchange.script.next = Assignment(strategy_of(buckets, exchange.groups.cluster, PLAIN))
    begin, early = time.monotonic(), []
    for _ in range(IN_A_ROW + 1):
        for bucket, buffer in zip(buckets, integers(buckets, rank, NUM_RANKS), strict=True):
            reduce_bucket(exchange.executor, bucket, buffer, is_last=bucket.index == 2, grad_scale=1.0).wait()
        early.append(exchange.executor._averager.collects_early)
    took = time.monotonic() - begin
    exchange.close()
    return took, early


def test_waiting_for_a_bucket_inside_the_hook_does_not_hang():
    """One such iteration may have paused in its backward pass, and makes the next ones no slower."""
    for took, early in POOL.run(run_impatient):
        assert took < 10
        assert early == [*[False] * IN_A_ROW, True], "the first looks at all ends, and needs no hurry"


def run_hanging_disk(rank: int, error: Exception) -> tuple[str, bool, list[str]]:
    """What is left of a failure cannot be written until all is over."""
    exchange = Exchange(2)
    executor, alarm, buckets = exchange.executor, exchange.groups.alarm, make_buckets(*SIZES)
    assignment = Assignment(strategy_of(buckets, exchange.groups.cluster, PLAIN))
    mine = integers(buckets, rank, NUM_RANKS)
    exchange.step(assignment, buckets, mine)
    exchange.groups.barrier()
    done, writes, goes_on, insist = list[str](), threading.Event(), threading.Event(), alarm.insist
    alarm.insist = lambda: (insist(), done.append("insisted"))  # type: ignore[assignment]
    executor.on_failure(lambda: (done.append("writes"), writes.set(), goes_on.wait(20)))
    failing = threading.Thread(target=executor.lanes.fail, args=(error,))
    failing.start()
    failing.join(5)
    is_stuck = failing.is_alive()
    text = caught(lambda: exchange.step(assignment, buckets, mine))
    writes.wait(5)
    goes_on.set()
    exchange.close()
    return text, is_stuck, done


@pytest.mark.parametrize("error", [ValueError("a codec broke"), StalledError("nothing went on")], ids=str)
def test_a_disk_that_hangs_holds_up_neither_the_error_nor_the_word_to_the_others(error):
    for text, is_stuck, done in POOL.run(run_hanging_disk, error):
        assert str(error) in text
        assert not is_stuck
        assert done == ["insisted", "writes"]


def run_misuse(rank: int) -> list[str]:
    exchange = Exchange(2)
    buckets = make_buckets(*SIZES)
    buffers = integers(buckets, rank, NUM_RANKS)
    exchange.script.next = Assignment(strategy_of(buckets, exchange.groups.cluster, PLAIN))

    def give(index: int) -> Any:
        return reduce_bucket(exchange.executor, buckets[index], buffers[index], is_last=False, grad_scale=1.0)

    first = give(0)
    first.wait()
    exchange.groups.barrier()
    texts = [caught(lambda: give(2)), caught(lambda: give(1))]
    exchange.renew()
    exchange.script.next = Assignment(strategy_of(buckets, exchange.groups.cluster, PLAIN))
    give(0).wait()
    texts.append(caught(lambda: give(0)))
    exchange.renew()
    texts.append(caught(lambda: give(1)))
    exchange.close()
    return texts


def test_buckets_out_of_order_are_an_error_that_stays():
    for rank, texts in enumerate(POOL.run(run_misuse)):
        assert f"rank {rank}: bucket 2 arrived out of order" in texts[0]
        assert texts[1] == texts[0]
        assert "a new backward pass began before the last one was averaged" in texts[2]
        assert "bucket 1 arrived out of order" in texts[3]


def run_two_errors(rank: int) -> str:
    """A task fails, and before anything is known of that but to the lanes, a bucket comes out of order."""
    exchange = Exchange(2)
    buckets, lanes = make_buckets(*SIZES), exchange.executor.lanes
    told, has_failed = lanes._on_failure, threading.Event()

    def late(error: BaseException, node: Any) -> None:
        has_failed.set()
        time.sleep(0.5)
        told(error, node)

    lanes._on_failure = late
    threading.Thread(target=lanes.fail, args=(ValueError("the first error"),)).start()
    has_failed.wait(10)
    buffer = integers(buckets, rank, NUM_RANKS)[1]
    text = caught(lambda: reduce_bucket(exchange.executor, buckets[1], buffer, is_last=False, grad_scale=1.0))
    exchange.close()
    return text


def test_a_second_error_does_not_hide_the_first():
    for text in POOL.run(run_two_errors):
        assert "the first error" in text


def run_watchdog(rank: int) -> tuple[str, str]:
    """A task that hangs; the deadline is short."""
    exchange = Exchange(2)
    codecs = exchange.codecs
    broken = BrokenCodec(codecs(CompressorSpec("none"), Device.TRAINING))
    exchange.codecs = lambda spec, device: broken
    exchange.renew(timeout_s=0.2)
    buckets = make_buckets(*SIZES)
    exchange.script.next = Assignment(strategy_of(buckets, exchange.groups.cluster, lossless(ALLGATHER)))
    buffers = integers(buckets, rank, NUM_RANKS)

    def give(index: int) -> Any:
        return reduce_bucket(exchange.executor, buckets[index], buffers[index], is_last=index == 2, grad_scale=1.0)

    give(0).wait()
    with patch.object(executor, "SLACK_S", 0.1):
        time.sleep(1.5)  # a slow backward pass: nobody waits for us, so no deadline runs
    patient = caught(lambda: give(1).wait())
    broken.wait = threading.Event()
    stuck = caught(give(2).wait)
    broken.wait.set()
    exchange.close()
    codecs.close()
    return patient, stuck


def test_the_watchdog_ends_a_wait_and_names_it_but_lets_backward_take_its_time():
    for rank, (patient, stuck) in enumerate(POOL.run(run_watchdog)):
        assert patient == "no error"
        assert f"espresso on rank {rank} failed" in stuck
        assert "no progress for" in stuck
        assert "step 1/3 'comp' of bucket 2 (tensors d … e)" in stuck


def run_closed(rank: int) -> tuple[str, str]:
    exchange = Exchange(2)
    buckets = make_buckets(*SIZES)
    exchange.script.next = Assignment(strategy_of(buckets, exchange.groups.cluster, PLAIN), deferred=True)
    buffer = integers(buckets, rank, NUM_RANKS)[0]
    future = reduce_bucket(exchange.executor, buckets[0], buffer, is_last=False, grad_scale=1.0)
    before = str(future.done())
    exchange.close()
    return before, caught(future.wait)


def test_closing_fails_the_futures_that_are_open():
    for before, error in POOL.run(run_closed):
        assert before == "False"
        assert "closed during a backward pass" in error


def run_failing_work(rank: int) -> list[str]:
    exchange = Exchange(2)
    buckets = make_buckets(*SIZES)

    def work() -> None:
        raise ValueError("no such strategy")

    exchange.script.work = work
    assignment = Assignment(strategy_of(buckets, exchange.groups.cluster, PLAIN))
    mine = integers(buckets, rank, NUM_RANKS)
    texts = [caught(lambda: exchange.step(assignment, buckets, mine)) for _ in range(2)]
    assert isinstance(exchange.executor.error, EspressoError)
    exchange.close()
    return texts


def run_failing_note(rank: int, text: str) -> str:
    exchange = Exchange(2)
    exchange.warm_up({"none"})
    buckets = make_buckets(*SIZES)

    def after(record: Any) -> None:
        raise ValueError("a note that fails")

    exchange.script.after = after
    assignment = Assignment(strategy_of(buckets, exchange.groups.cluster, Choice(parse_option(text))))
    began = time.monotonic()
    text = caught(lambda: exchange.step(assignment, buckets, integers(buckets, rank, NUM_RANKS)))
    assert time.monotonic() - began < 10
    exchange.close()
    return text


@pytest.mark.parametrize("text", ["flat.allreduce", ALLGATHER])
def test_an_error_in_the_planners_notes_does_too(text):
    assert all("a note that fails" in text for text in POOL.run(run_failing_note, text))


def test_an_error_in_the_planners_work_reaches_the_hook():
    for texts in POOL.run(run_failing_work):
        assert all("no such strategy" in text for text in texts), texts
