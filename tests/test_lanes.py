"""Lanes: who may start when, in exact orders, on hand-made tasks that end when the test says so."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from espresso.comm.execute.lanes import IN_FLIGHT, OVERTAKEN, Lanes, Node
from espresso.strategies import Lane

FLAT = (Lane.INTRA, Lane.INTER_OUT, Lane.INTER_IN)
INTER = (Lane.INTER_OUT, Lane.INTER_IN)
DEADLINE_S = 10.0


class Stage:
    """Makes nodes, notes their starts and ends, and lets each end on command."""

    def __init__(self, offload_width: int = 1) -> None:
        self.log: list[str] = []
        self.failures: list[tuple[BaseException, Node | None]] = []
        self.lanes = Lanes(lambda error, node: self.failures.append((error, node)), offload_width)
        self.releases: dict[str, threading.Event] = {}

    def node(self, name: str, *lanes: Lane, bucket: int = 0, after: Node | None = None) -> Node:
        release = self.releases[name] = threading.Event()

        def run() -> None:
            self.log.append(f"+{name}")
            assert release.wait(DEADLINE_S)
            self.log.append(f"-{name}")

        return Node(lanes, bucket, run, lambda: name, after, on_done=lambda _: self.log.append(f"!{name}"))

    def end(self, *names: str) -> None:
        """Let these tasks end, and wait until their owners were told."""
        for name in names:
            self.releases[name].set()
        self.until(lambda: all(f"!{name}" in self.log for name in names))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"still {self.log}"
            time.sleep(0.001)

    def running(self, *names: str) -> None:
        """Exactly these tasks run, now and after a moment."""

        def now() -> set[str]:
            seen = list(self.log)
            return {s[1:] for s in seen if s[0] == "+"} - {s[1:] for s in seen if s[0] == "-"}

        self.until(lambda: now() == set(names))
        time.sleep(0.02)
        assert now() == set(names), self.log


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.lanes.close()
    for release in made.releases.values():
        release.set()


def test_a_lane_takes_its_tasks_in_order_and_waits_for_their_buckets(stage):
    stage.lanes.enqueue(
        [
            stage.node("a", Lane.TRAINING, bucket=0),
            stage.node("b", Lane.TRAINING, bucket=1),
            stage.node("c", Lane.TRAINING, bucket=0),
        ]
    )
    stage.running()
    stage.lanes.bucket_ready([0])
    stage.running("a")
    stage.end("a")
    stage.running()  # c's bucket is there, but b comes first
    stage.lanes.bucket_ready([1])
    stage.running("b")
    stage.end("b")
    stage.end("c")
    assert [entry for entry in stage.log if entry[0] == "+"] == ["+a", "+b", "+c"]


def test_what_concerns_this_rank_alone_holds_up_nothing_while_it_cannot_start(stage):
    """An exchange takes longer than predicted: its decode is first in the order, the next bucket's encode is there."""
    sent = stage.node("send", *INTER, bucket=0)
    decode = stage.node("decode", Lane.TRAINING, bucket=0, after=sent)
    encode = stage.node("encode", Lane.TRAINING, bucket=1)
    later = stage.node("later", Lane.TRAINING, bucket=1)
    decode.gives_way = encode.gives_way = True
    stage.lanes.enqueue([sent, decode, encode, later])
    stage.lanes.bucket_ready([0])
    stage.running("send")
    stage.lanes.bucket_ready([1])
    stage.running("send", "encode")
    stage.end("send")
    stage.running("encode")  # the lane takes one at a time
    stage.end("encode")
    stage.running("decode")
    stage.end("decode")
    stage.running("later")
    stage.end("later")
    assert not stage.lanes.pending()


def test_so_many_are_passed_by_and_no_more(stage):
    waits = [stage.node(f"w{number}", Lane.TRAINING, bucket=1) for number in range(OVERTAKEN + 1)]
    last, first = stage.node("last", Lane.TRAINING), stage.node("first", Lane.TRAINING)
    for node in (*waits, first, last):
        node.gives_way = True
    stage.lanes.enqueue([*waits[1:], first, waits[0], last])
    stage.lanes.bucket_ready([0])
    stage.running("first")
    stage.end("first")
    stage.running()
    stage.lanes.bucket_ready([1])
    stage.end(*(node.label() for node in waits))
    stage.running("last")
    stage.end("last")


def test_what_gives_way_takes_no_room_that_it_does_not_need():
    stage = Stage(offload_width=2)
    waits, *others = (stage.node(name, Lane.OFFLOAD, bucket=number) for number, name in enumerate("wabc"))
    for node in (waits, *others):
        node.gives_way = True
    stage.lanes.enqueue([waits, *others])
    stage.lanes.bucket_ready([1, 2, 3])
    stage.running("a", "b")
    stage.lanes.bucket_ready([0])
    stage.running("a", "b")
    stage.end("a")
    stage.running("w", "b")
    stage.end("w", "b")
    stage.end("c")
    stage.lanes.close()


def test_a_later_bucket_may_come_first_if_the_order_says_so(stage):
    stage.lanes.enqueue([stage.node("late", Lane.INTRA, bucket=1), stage.node("early", Lane.INTRA, bucket=0)])
    stage.lanes.bucket_ready([0])
    stage.running()
    stage.lanes.bucket_ready([1])
    stage.running("late")
    stage.end("late")
    stage.running("early")


def test_a_task_waits_for_the_one_it_follows_on_another_lane(stage):
    first = stage.node("comp", Lane.TRAINING)
    second = stage.node("send", *INTER, after=first)
    other = stage.node("next", Lane.TRAINING)
    stage.lanes.enqueue([first, second, other])
    stage.lanes.bucket_ready([0])
    stage.running("comp")
    stage.end("comp")
    stage.running("send", "next")  # two lanes at once


@pytest.mark.parametrize(("first", "second"), [("intra 1", "inter 1"), ("inter 1", "intra 1")])
def test_a_flat_task_holds_both_links(stage, first, second):
    stage.lanes.enqueue(
        [
            stage.node("intra 1", Lane.INTRA),
            stage.node("inter 1", *INTER),
            stage.node("flat", *FLAT),
            stage.node("intra 2", Lane.INTRA),
            stage.node("inter 2", *INTER),
            stage.node("training", Lane.TRAINING),
        ]
    )
    stage.lanes.bucket_ready([0])
    stage.running("intra 1", "inter 1", "training")
    stage.end(first)
    stage.running(second, "training")
    stage.end(second)
    stage.running("flat", "training")
    stage.end("flat")
    stage.running("intra 2", "inter 2", "training")


def test_a_new_iteration_closes_the_gates(stage):
    stage.lanes.enqueue([stage.node("a", Lane.TRAINING)])
    stage.lanes.bucket_ready([0])
    stage.end("a")
    stage.lanes.begin_iteration()
    stage.lanes.enqueue([stage.node("b", Lane.TRAINING, bucket=0)])
    stage.lanes.bucket_ready([1])
    stage.running()
    stage.lanes.bucket_ready([0])
    stage.running("b")


def test_dropped_tasks_leave_every_lane_and_started_ones_stay(stage):
    stage.lanes.enqueue(
        [
            stage.node("runs", *FLAT, bucket=0),
            stage.node("gone", *FLAT, bucket=1),
            stage.node("stays", *INTER, bucket=0),
        ]
    )
    stage.lanes.bucket_ready([0])
    stage.running("runs")
    stage.lanes.drop(lambda node: node.bucket >= 1 or node.started)
    assert [node.label() for node in stage.lanes.pending()] == ["runs", "stays"]
    stage.end("runs")
    stage.running("stays")


def test_pending_names_what_is_under_way_first(stage):
    stage.lanes.enqueue([stage.node("waits", Lane.TRAINING, bucket=1), stage.node("runs", Lane.INTRA)])
    stage.lanes.bucket_ready([0])
    stage.running("runs")
    assert [node.label() for node in stage.lanes.pending()] == ["runs", "waits"]


def test_times_of_a_task_enclose_its_work(stage):
    node = stage.node("a", Lane.OFFLOAD)
    stage.lanes.enqueue([node])
    before = time.perf_counter_ns()
    stage.lanes.bucket_ready([0])
    stage.running("a")
    stage.end("a")
    assert before <= node.start_ns < node.start_ns + 20_000_000 <= node.end_ns <= time.perf_counter_ns()


def test_a_wide_pool_has_several_under_way_in_their_order():
    stage = Stage(offload_width=2)
    first = stage.node("send", *INTER)
    stage.lanes.enqueue([stage.node("a", Lane.OFFLOAD), stage.node("b", Lane.OFFLOAD), first])
    stage.lanes.enqueue([stage.node("c", Lane.OFFLOAD, after=first), stage.node("d", Lane.OFFLOAD)])
    stage.lanes.bucket_ready([0])
    stage.running("a", "b", "send")
    stage.end("b")
    stage.running("a", "send")  # c is next, and waits for what it follows; d does not overtake it
    stage.end("send")
    stage.running("a", "c")
    stage.end("a")
    stage.running("c", "d")
    stage.end("c", "d")
    stage.lanes.close()


# Failure


def raising(text: str) -> Callable[[], Any]:
    def run() -> None:
        raise ValueError(text)

    return run


def test_a_failure_cancels_the_order_on_all_lanes(stage):
    bad = Node((Lane.TRAINING,), 0, raising("broken"), lambda: "bad")
    running = stage.node("running", Lane.INTRA)
    follower = stage.node("follower", Lane.TRAINING, after=bad)
    behind = stage.node("behind", Lane.INTRA)
    stage.lanes.enqueue([running, behind])
    stage.lanes.bucket_ready([0])
    stage.running("running")
    stage.lanes.enqueue([bad, follower])
    stage.lanes.bucket_ready([])
    stage.until(lambda: bool(stage.failures))
    stage.releases["running"].set()
    stage.until(lambda: "-running" in stage.log)
    stage.running()
    assert [(str(error), node) for error, node in stage.failures] == [("broken", bad)]
    assert stage.lanes.pending() == []
    assert "!running" not in stage.log  # nobody is told of an end that no longer counts


def test_only_the_first_failure_is_reported(stage):
    first, second = ValueError("first"), ValueError("second")
    stage.lanes.fail(first)
    stage.lanes.fail(second)
    assert stage.failures == [(first, None)]


def test_a_failing_completion_callback_is_a_failure_too(stage):
    def complain(node: Node) -> None:
        raise ValueError("callback")

    stage.lanes.enqueue([Node((Lane.COPY,), 0, lambda: None, lambda: "copy", on_done=complain)])
    stage.lanes.bucket_ready([0])
    stage.until(lambda: bool(stage.failures))
    assert str(stage.failures[0][0]) == "callback"


# Tasks that the backend carries out


def test_issued_tasks_go_on_the_wire_together_in_order_and_hold_their_lanes_against_others(stage):
    futures = [torch.futures.Future() for _ in range(3)]
    issued = []

    def issue(index: int) -> Any:
        issued.append(index)
        return futures[index]

    nodes = [Node(FLAT, i, raising("must not run"), lambda: "x", None, lambda i=i: issue(i), True) for i in range(3)]
    stage.lanes.enqueue([nodes[0], nodes[1], stage.node("between", Lane.INTRA, bucket=1), nodes[2]])
    stage.lanes.bucket_ready([2])
    assert issued == []  # its turn has not come
    stage.lanes.bucket_ready([0])
    assert issued == [0]  # in the calling thread, at once
    stage.lanes.bucket_ready([1])
    assert issued == [0, 1]  # beside the first, but not past what is no library routine
    futures[1].set_result([])
    assert nodes[1].done
    assert not nodes[0].done
    stage.running()
    futures[0].set_result([])
    stage.running("between")
    assert issued == [0, 1]
    stage.end("between")
    stage.until(lambda: issued == [0, 1, 2])
    futures[2].set_result([])
    assert not stage.lanes.pending()
    assert not stage.failures


class Wire:
    """Exchanges that note when they begin and end, and end on command."""

    def __init__(self, stage: Stage) -> None:
        self.begun: list[int] = []
        self.arrived = [threading.Event() for _ in range(IN_FLIGHT + 2)]
        self.nodes = [
            Node(INTER, 0, lambda i=i: self._begin(i), lambda: "x", travels=True) for i in range(len(self.arrived))
        ]
        stage.lanes.enqueue(self.nodes)

    def _begin(self, index: int) -> Callable[[], object]:
        self.begun.append(index)
        return lambda: self.arrived[index].wait(DEADLINE_S)

    def end(self, stage: Stage, index: int) -> None:
        self.arrived[index].set()
        stage.until(lambda: self.nodes[index].done)


def test_exchanges_begin_in_order_and_end_as_they_come(stage):
    wire = Wire(stage)
    stage.lanes.enqueue([stage.node("other", *INTER)])
    stage.lanes.bucket_ready([0])
    stage.until(lambda: len(wire.begun) == IN_FLIGHT)
    time.sleep(0.05)
    assert wire.begun == list(range(IN_FLIGHT))  # bounded
    wire.end(stage, 5)
    stage.until(lambda: wire.begun == list(range(IN_FLIGHT + 1)))
    assert not wire.nodes[0].done
    wire.end(stage, 0)
    stage.until(lambda: wire.begun == list(range(IN_FLIGHT + 2)))
    stage.running()  # what is no exchange waits until all before it have ended
    for index in range(len(wire.nodes)):
        wire.end(stage, index)
    stage.running("other")


def test_the_next_exchange_waits_until_the_one_before_it_has_begun(stage):
    """Begun is not started: a slow beginning must not be overtaken, or messages would match wrongly."""
    go, begun = threading.Event(), []

    def slow() -> Callable[[], object]:
        assert go.wait(DEADLINE_S)
        begun.append("slow")
        return lambda: None

    def quick() -> Callable[[], object]:
        begun.append("quick")
        return lambda: None

    nodes = [Node(INTER, 0, run, lambda: "x", travels=True) for run in (slow, quick)]
    stage.lanes.enqueue(nodes)
    stage.lanes.bucket_ready([0])
    time.sleep(0.05)
    assert begun == []
    go.set()
    stage.until(lambda: nodes[1].done)
    assert begun == ["slow", "quick"]


def test_an_exchange_that_fails_on_its_way(stage):
    node = Node(INTER, 0, lambda: raising("connection lost"), lambda: "x", travels=True)
    stage.lanes.enqueue([node, stage.node("a", Lane.INTER_IN)])
    stage.lanes.bucket_ready([0])
    stage.until(lambda: bool(stage.failures))
    assert stage.failures[0][1] is node
    stage.running()


@pytest.mark.parametrize("at_start", [True, False])
def test_an_issued_task_that_fails(stage, at_start):
    future: Any = torch.futures.Future()
    issue = raising("backend") if at_start else lambda: future
    stage.lanes.enqueue([Node(FLAT, 0, lambda: None, lambda: "x", issue=issue), stage.node("a", Lane.INTRA)])
    stage.lanes.bucket_ready([0])
    if not at_start:
        future.set_exception(ValueError("backend"))
    stage.until(lambda: bool(stage.failures))
    assert "backend" in str(stage.failures[0][0])
    stage.running()


def test_what_a_job_beside_the_order_raises_is_a_failure_and_its_thread_goes_on(stage):
    def raises() -> None:
        raise ValueError("no memory")

    done = threading.Event()
    stage.lanes.submit("control", raises)
    stage.lanes.submit("control", done.set)
    assert done.wait(10)
    assert "no memory" in str(stage.failures[0][0])


def test_closed_lanes_start_nothing_and_their_threads_end(stage):
    stage.lanes.enqueue([stage.node("a", Lane.TRAINING), stage.node("b", Lane.TRAINING)])
    stage.lanes.bucket_ready([0])
    stage.running("a")
    threads = [t for t in threading.enumerate() if t.name == "espresso-training"]
    stage.lanes.close()
    stage.releases["a"].set()
    stage.until(lambda: not any(t.is_alive() for t in threads[-1:]))
    assert "+b" not in stage.log
    stage.lanes.fail(ValueError("late"))
    assert not stage.failures
